"""Tiny private runs, each a set of features, and what came of them as plain data.

``compare.py`` runs this file against two checkouts, so it uses public names only: hf_dp's, the
names of arguments, and what a run writes.
"""

import functools
import gc
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import processes
import tiny
import torch
import users
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
)

import hf_dp
from hf_dp import FrostConfig, RgpConfig
from hf_dp.errors import HfDpError

Outcome = dict[str, Any]
Make = Callable[..., Any]  # a trainer, of a folder, DPTrainer's keywords as `given`, and arguments

KEYWORDS = {"model", "train_dataset", "eval_dataset", "data_collator", "peft_config"}
BASE = {
    "insecure_seed": 7, "save_strategy": "steps", "save_steps": 2, "logging_steps": 2,
    "per_device_train_batch_size": 4,
}  # fmt: skip
STATED = (
    "proven", "epsilon", "delta", "accountant", "unit_code", "relation_code", "noise_multipliers",
    "sample_rates", "steps",
)  # fmt: skip
PLANNED = ("clipping_norm", "clipping", "expected_batch_size", "num_examples")
# What the ledger is kept in, which `hf_dp.run.ledger_file` and its tests are about.
LEDGER_FILES = re.compile(
    r"ledger\.jsonl|_ledger_\w+\.jsonl?|_privacy_mark\w*\.json|_manifest\.json"
)
TIMES = ("_runtime", "_per_second")


def tokenizer() -> Any:
    """The tiny tokenizer with a mask and label words; one that is trained differs each time."""
    made = tiny.tokenizer()
    made.add_special_tokens({"mask_token": "[MASK]"})
    made.add_tokens(["great", "terrible"])
    return made


def language_model(kind: Any, config: Any, masked: bool, **options: Any) -> dict[str, Any]:
    """A language model on the tiny rows."""
    torch.manual_seed(0)
    return {
        "model": kind(config(vocab_size=len(tokenizer()), pad_token_id=0, **options)),
        "train_dataset": tiny.dataset().remove_columns("label"),
        "eval_dataset": None,
        # All are masked, by chance alone: a synthetic row without a mask has no loss.
        "data_collator": DataCollatorForLanguageModeling(
            tokenizer(), mlm=masked, mlm_probability=1.0
        ),
    }


def masked() -> dict[str, Any]:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return language_model(BertForMaskedLM, BertConfig, True, intermediate_size=24, **small)


def causal() -> dict[str, Any]:
    small = {"n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": 3}
    given = language_model(GPT2LMHeadModel, GPT2Config, False, **small)
    return {**given, "chunked_loss": True, "target_delta": 1e-4}


def infilling() -> dict[str, Any]:
    from hf_dp.tasks.classification import encode
    from hf_dp.tasks.infilling import load_infilling
    from hf_dp.tasks.templates import GLUE

    names, words = ["negative", "positive"], tokenizer()
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        config = BertConfig(vocab_size=len(words), pad_token_id=0, intermediate_size=24, **small)
        BertForMaskedLM(config).save_pretrained(base)
        words.save_pretrained(base)
        model, words = load_infilling(str(base), words, GLUE["sst2"], names)
    encoded = encode(Dataset.from_list(tiny.rows()), words, ["sentence"], "label", names, 24)
    return {"model": model, "train_dataset": encoded, "eval_dataset": None}


def preferences() -> dict[str, Any]:
    import preferences

    return {"make": preferences.trainer, "optim": "adamw_torch"}


def forward(variant: str, **options: Any) -> dict[str, Any]:
    return {"privacy_mode": "dp_fp", "dp_fp_variant": variant, **options}


def by_user(**options: Any) -> dict[str, Any]:
    of_users = {"privacy_unit": "user", "privacy_unit_column": "who", "expected_batch_size": 4}
    return {"train_dataset": users.by_user(), **of_users, **options}


two_layers = functools.partial(tiny.model, num_hidden_layers=2)
FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "adamw": lambda: {
        "model": two_layers(dropout=0.1), "target_epsilon": 8.0, "weight_decay": 0.01,
        "warmup_steps": 1, "lr_scheduler_type": "cosine", "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": True,
    },
    "two_pass": lambda: {
        "clipping_strategy": "two_pass", "clipping": "per_layer", "optim": "sgd",
        "max_grad_norm": 0.3, "clip_noised_gradient": True,
    },
    "explicit": lambda: {"clipping_strategy": "per_example", "clipping": "automatic"},
    "tokens": lambda: {"max_tokens_per_physical_batch": 20, "accountant": "prv"},
    "checkpointing": lambda: {"gradient_checkpointing": True},
    "float64": lambda: {"model": two_layers().double(), "rows_are_chunks": True},
    "masked": masked,
    "causal": causal,
    "infilling": infilling,
    "preferences": preferences,
    "lora": lambda: {"peft_config": LoraConfig(r=2, lora_dropout=0.1, task_type="SEQ_CLS")},
    "frost": lambda: {"target_epsilon": 6.0, "accountant": "rdp", "peft_config": FrostConfig(
        unfreeze_ratio=0.3, selection_sample_rate=0.3, selection_iterations=3
    )},
    "rgp": lambda: {"peft_config": RgpConfig(rank=2)},
    "published": lambda: forward("published", num_micro_batches=3, learning_rate=1e-3),
    "frozen": lambda: forward("frozen", accountant="rdp"),
    "fresh": lambda: forward("frozen", representation_release="fresh", labels_in_vector=True),
    "private_encoder": lambda: forward("private_encoder", target_epsilon=8.0),
    "users": lambda: by_user(max_rows_per_unit=3, privacy_unit_name="patient"),
    "user_rows": lambda: by_user(max_rows_per_unit=2, unit_sampling="examples"),
    "truncated": lambda: {"max_logical_batch_size": 9},
    "allocation": lambda: {"sampling": "random_allocation", "max_steps": 5},
    "bands": lambda: {"bands": 3, "max_steps": 5},
    "noised_loss": lambda: {"noised_loss_budget_ratio": 0.1, "noised_loss_bound": 1.4},
    "unnoised": lambda: {
        "release": ["training_loss", "clipped_gradient_norm"], "logging_steps": 1,
        "eval_dataset": tiny.dataset(), "evaluate_on_training_rows": True,
    },
    "audit": lambda: {"audit_canaries": 30, "target_delta": 1e-3},
    "search": lambda: {"private_selection_mean_runs": 5, "accountant": "rdp"},
    "adam_bc": lambda: {"adam_bc_floor": 0.1},
    "non_private": lambda: {"privacy_mode": "non_private"},
}  # fmt: skip


def maker(*features: str, **options: Any) -> Make:
    """Return what makes a trainer with these features; the later of two that disagree wins."""
    values: dict[str, Any] = {**BASE}
    for feature in features:
        values |= FEATURES[feature]()
    values |= options
    if values.get("privacy_mode") == "non_private":
        for name in ("insecure_seed", "target_epsilon", "accountant"):
            values.pop(name, None)
    make = values.pop("make", tiny.trainer)
    if make is tiny.trainer:
        values.setdefault("model", two_layers())
    given = {name: values.pop(name) for name in KEYWORDS & values.keys()}

    def made(folder: Path, callbacks: Any = None, **more: Any) -> Any:
        return make(folder, given={**given, "callbacks": callbacks}, **{**values, **more})

    return made


# -- ways to run --


def alone(make: Make, folder: Path) -> Outcome:
    return trained(lambda: make(folder), folder)


def earlier(make: Make, folder: Path) -> Outcome:
    """After another run on the same rows."""
    before = folder.with_name(folder.name + "-before")
    trained(lambda: make(before, noise_multiplier=4.0, target_epsilon=None), before)
    return trained(lambda: make(folder, earlier_runs=[str(before)]), folder)


def killed(make: Make, folder: Path) -> Outcome:
    """Killed in step 3, and resumed from the checkpoint of step 2."""
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # the threads of this process are not in its child
        try:
            make(folder, callbacks=[_Die()]).train()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    return trained(lambda: make(folder), folder, resume=True)


class _Die(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def in_two(make: Make, folder: Path) -> Outcome:
    """In two processes, over gloo."""
    first, second = processes.results(2, lambda: trained(lambda: make(folder), folder))
    assert all(torch.equal(value, second["weights"][n]) for n, value in first["weights"].items())
    return first


WAYS = {way.__name__: way for way in (earlier, killed, in_two)}

RUNS = [
    *FEATURES,
    "adamw + earlier",
    "lora + killed",
    "adamw + in_two",
    "lora + truncated + checkpointing",
    "users + noised_loss + truncated",
    "users + two_pass + tokens + in_two",
    "allocation + adam_bc + lora",
    "allocation + killed",
    "bands + users + noised_loss + in_two",
    "bands + truncated + killed",
    "noised_loss + adam_bc + killed",
    "search + lora + two_pass",
    "frost + unnoised",
    "frost + killed",
    "frozen + earlier",
    "private_encoder + in_two",
    "user_rows + earlier",
    "audit + masked + checkpointing",
    "rgp + noised_loss + in_two",
    "causal + lora + users",
    "non_private + frost",
]


def run(name: str, folder: Path, **options: Any) -> Outcome:
    """Make the run of this name in a new folder, and return what came of it."""
    words = name.split(" + ")
    (way,) = [WAYS[word] for word in words if word in WAYS] or [alone]
    return way(maker(*(word for word in words if word in FEATURES), **options), folder)


def secret(name: str, folder: Path) -> Outcome:
    """Return what is known in advance of a run with secret noise: how private it is, above all."""
    found = run(name, folder, insecure_seed=None)
    del found["weights"]
    shown = {"epsilon", "step", "epoch", "learning_rate"}
    found["log"] = [{n: v if n in shown else "" for n, v in e.items()} for e in found["log"]]
    (found["statement"] or {}).pop("trained", None)  # (what trains may be chosen privately)
    return found


def refusal(pair: str, folder: Path) -> str:
    """Return whether a trainer can have both features."""
    try:
        maker(*pair.split(" + "))(folder)
    except HfDpError:
        return "refused"
    return "made"


# (The first is ordinary training.)
PAIRS = [" + ".join(pair) for pair in combinations([*FEATURES][1:], 2)]

# -- what came of it --


def trained(make: Callable[[], Any], folder: Path, *, resume: bool = False) -> Outcome:
    """Train, evaluate and save, and return weights, ledger, log, statement, warnings and names of
    files."""
    with _warnings() as told:
        trainer = make()
        trainer.train(resume_from_checkpoint=resume or None)
        if trainer.eval_dataset is not None:
            trainer.evaluate()
        trainer.save_model()
    said = {
        "ledger": ledger(trainer),
        "log": trainer.state.log_history,
        "statement": stated(trainer),
        "warnings": told,
        "files": sorted(
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if not LEDGER_FILES.fullmatch(path.name)
        ),
    }
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return {"weights": weights, **plain(said, folder)}


def stated(trainer: Any) -> dict[str, Any] | None:
    """Return what the statement of a private run says."""
    plan = trainer.privacy_plan
    if plan is None:
        return None
    said, words = trainer.privacy_statement(), plan.words
    return {
        **{name: getattr(said, name) for name in STATED},
        "epsilons": {row.accountant: row.epsilon and row.epsilon.value for row in said.epsilons},
        "sampling_code": words.sampling_code,
        "privacy_mode": plan.mechanism.privacy_mode,
        "tag": words.tag,
        **{name: getattr(plan, name) for name in PLANNED},
        "steps_planned": plan.steps_recorded,
        "sentence": said.sentence(),
        "mechanism": said.mechanism,
        "trained": said.facts.trained,
        "precision": said.facts.precision,
    }


def ledger(trainer: Any) -> list[dict[str, Any]] | None:
    """Return the ledger's lines."""
    found = trainer.ledger
    return None if found is None else found.to_list()


def plain(value: Any, folder: Path) -> Any:
    """Return a value as JSON has it, without ids, times and places, which differ in any two
    runs."""
    text = json.dumps(value, default=str)
    text = re.sub(r"\b[0-9a-f]{32,}\b", "ID", text).replace(str(folder.parent), "FOLDER")
    return json.loads(text, object_hook=_without_times)


def _without_times(found: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in found.items() if not n.endswith(TIMES)}


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what hf_dp warns of."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_dp").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("hf_dp").removeHandler(handler)


def main(checkout: str, results: str, *words: str) -> None:
    """Do all of ``JOBS`` that have one of the words in their names, with this checkout's hf_dp, and
    save what came of them."""
    assert Path(hf_dp.__file__).is_relative_to(checkout), f"{hf_dp.__file__} was imported"
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    gc.freeze()  # or each train() searches all that was imported for garbage
    with tempfile.TemporaryDirectory() as base:
        for number, (name, job) in enumerate(JOBS.items()):
            if words and not any(word in name for word in words):
                continue
            begun = time.process_time()
            try:
                found[name] = job(Path(base, str(number), "model"))
            except Exception as error:
                traceback.print_exc()
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            sys.stderr.write(f"{time.process_time() - begun:6.2f} s {name}\n")
    torch.save(found, results)


JOBS: dict[str, Callable[[Path], Any]] = {
    **{f"seeded: {name}": partial(run, name) for name in RUNS},
    **{f"secret: {name}": partial(secret, name) for name in RUNS},
    **{f"pair: {pair}": partial(refusal, pair) for pair in PAIRS},
}
if __name__ == "__main__":
    main(*sys.argv[1:])
