"""A task small enough for a test of the whole trainer: random BERT, 40 rows, no download."""

import copy
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from hf_dp import DPTrainer, DPTrainingArguments

WORDS = "good bad fine poor the a film plot was is very not and long short".split()


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {
        word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def row(number: int, start: int, step: int, length: int) -> dict[str, Any]:
    """A sentence of every ``step``-th word."""
    words = [WORDS[(start + place * step) % len(WORDS)] for place in range(length)]
    return {"sentence": " ".join(words), "label": number % 2}


def rows(count: int = 40) -> list[dict[str, Any]]:
    return [row(i, i * 7, i % 3 + 1, 1 + i % 6) for i in range(count)]


def held_out_rows() -> list[dict[str, Any]]:
    """Sentences that are longer than any of the training rows'."""
    return [row(i, i, 1 + i % 4, 7 + i % 3) for i in range(20)]


def dataset(count: int = 40) -> datasets.Dataset:
    return copy.copy(_encoded(count))


def evaluation_set() -> datasets.Dataset:
    return copy.copy(_encoded(None))


@functools.cache
def _encoded(count: int | None) -> datasets.Dataset:
    made = held_out_rows() if count is None else rows(count)
    encoded = tokenizer()([row["sentence"] for row in made])
    columns = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    return datasets.Dataset.from_dict({**columns, "label": [row["label"] for row in made]})


def model(dropout: float = 0.0, seed: int = 0, **options: Any) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    values = {
        "vocab_size": len(WORDS) + 4, "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 24,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
    }  # fmt: skip
    return BertForSequenceClassification(BertConfig(**{**values, **options}))


def save(folder: Path, made: Any = None) -> Path:
    """Save a model (default: the classifier) and its tokenizer; return the folder."""
    (model() if made is None else made).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def arguments(
    folder: Path, kind: type[DPTrainingArguments] = DPTrainingArguments, **options: Any
) -> DPTrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder), "noise_multiplier": 1.0, "expected_batch_size": 8,
        "per_device_train_batch_size": 16, "per_device_eval_batch_size": 8, "max_steps": 4,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    values.update(options)
    if values.get("target_epsilon") is not None and "noise_multiplier" not in options:
        values["noise_multiplier"] = None
    if values.get("privacy_mode") == "non_private":
        for name in ("noise_multiplier", "expected_batch_size"):
            values.pop(name)
    return kind(**values)


def trainer(
    folder: Path,
    *,
    cls: type[DPTrainer] = DPTrainer,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> DPTrainer:
    """A trainer on the tiny task. Args: given: DPTrainer's keywords."""
    keywords: dict[str, Any] = {
        "train_dataset": dataset(),
        "eval_dataset": evaluation_set(),
        "data_collator": DataCollatorWithPadding(tokenizer()),
    }
    keywords.update(given or {})
    keywords.setdefault("model", model())
    return cls(args=arguments(folder, **options), **keywords)


def trained(made: Any) -> Any:
    """The trainer after its training."""
    made.train()
    return made


def resumed(made: DPTrainer, step: int | None = None) -> DPTrainer:
    """The trainer after it went on from its checkpoint of a step, or from its newest."""
    folder = Path(made.args.output_dir)
    made.train(resume_from_checkpoint=True if step is None else str(folder / f"checkpoint-{step}"))
    return made


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def moved(before: dict[str, torch.Tensor], model: torch.nn.Module) -> set[str]:
    """The names of the weights that are not what they were."""
    after = model.state_dict()
    return {name for name in before.keys() & after if not torch.equal(before[name], after[name])}


LOADED = """
from peft import PeftModel
from transformers import AutoModelForSequenceClassification
base, adapter, out = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base), adapter).eval()
torch.save(model(torch.tensor([[2, 5, 6, 3]]), torch.ones(1, 4, dtype=torch.long)).logits, out)
"""


def assert_loads_elsewhere(made: DPTrainer, first: str) -> None:
    """Another process, after these lines, computes with the saved adapter what the trainer's does."""
    folder = Path(made.args.output_dir)
    base, out = save(folder.parent / "base"), folder.parent / "logits.pt"
    code = ["-W", "ignore", "-c", "import sys, torch\n" + first + LOADED]
    command = [sys.executable, *code, str(base), str(folder), str(out)]
    subprocess.run(command, check=True, cwd=folder.parent)
    ours = made.model.eval()(torch.tensor([[2, 5, 6, 3]]), torch.ones(1, 4, dtype=torch.long))
    torch.testing.assert_close(torch.load(out), ours.logits.detach(), rtol=0, atol=1e-6)


class StopsAfter(TrainerCallback):
    """Ends the training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


class Recorder(TrainerCallback):
    """Keeps what a tracker is given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def numbers_in(folder: Path) -> set[float]:
    """All numbers in the JSON files and the pages below a folder."""
    paths = [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".md")]
    number = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
    return {float(x) for path in paths for x in re.findall(number, path.read_text())}


def tracked(folder: Path) -> dict[str, int]:
    """How often each scalar below a folder was written for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = {path.parent for path in folder.rglob("events.out.tfevents*")}
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {name: len(accumulator.Scalars(name)) for name in names}
