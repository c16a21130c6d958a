"""DPGRPOTrainer: a prompt with all its completions is one example, written and scored alone."""

import copy
import math
import sys
import zlib
from typing import Any

import chat
import pytest
import tiny
import torch
import transformers as hf
from chat import tokenizer, words
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from processes import results
from scipy import stats
from silence import PLAIN_STEPS, Silent, weights
from trl import GRPOConfig, GRPOTrainer

from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.errors import (
    DataError,
    InvalidArgumentError,
    SelfCheckError,
    StepError,
    UnsupportedArgumentError,
)
from hf_dp.run.engine_check import EngineCheck
from hf_dp.statement.evidence import disagreements, read
from hf_dp.trainer import grpo
from hf_dp.trainer.grpo import DPGRPOConfig, DPGRPOTrainer, advantages_of
from hf_dp.tuners.frost.tuner import FrostConfig

pytestmark = pytest.mark.usefixtures("unchecked")

CHECK = EngineCheck.check  # which tests of other things leave out
ROWS, G, MOST, C = 12, 4, 5, 0.05
CLIPS_SOME = {"per_example_max_grad_norm": 1.1}
PLACES = [0, 3, 5, 10, 11]  # the first, the last, one of the shortest and one of the longest


def prompts(count: int = ROWS, start: int = 0) -> Dataset:
    made = [(f"{i}: {words(i, 1 + i % 3)}?", i % 7) for i in range(start, start + count)]
    return Dataset.from_list([{"prompt": text, "answer": answer} for text, answer in made])


def talks(count: int = ROWS, start: int = 0) -> Dataset:
    rows = prompts(count, start).to_list()
    return Dataset.from_list(
        [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    )


def spread(prompts, completions, completion_ids, answer) -> list[float]:
    """A reward that differs between completions, also by the prompt and by a column."""
    assert len(prompts) == len(completions) == len({*answer}) * len(answer) and len({*prompts}) == 1
    return [float(sum(ids) % 11 + len(prompts[0]) + answer[0]) for ids in completion_ids]


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=512, **sizes))


def of_talk(prompts, completions, **_: Any) -> list[float | None]:
    found = [message["content"] for (message,) in completions]
    return [None if not each else float(ord(each[0]) % 5) for each in found]


def trainer(folder: Any, reward: Any = spread, made: Any = prompts, kind: Any = DPGRPOTrainer, **options: Any):  # fmt: skip
    names = ("eval_dataset", "peft_config", "model", "tools")
    given = {name: options.pop(name) for name in names if name in options}
    sizes = {
        "expected_batch_size": 6, "per_device_train_batch_size": 8, "max_steps": 2,
        "num_generations": G, "max_completion_length": MOST, "per_example_max_grad_norm": C,
        "report_to": "none", **options,
    }  # fmt: skip
    args, model = tiny.arguments(folder, DPGRPOConfig, **sizes), given.pop("model", None)
    rows = made() if callable(made) else made
    more = {"train_dataset": rows, "processing_class": tokenizer(), **given}
    return kind(model or chat.model().double(), reward, args, **more)


class Coupled(Silent):
    """No noise, and for each prompt a stream of its own, whichever others there are."""

    run = drawn = 0

    def example_seed(self, index: int | None) -> int:
        return zlib.crc32(b"%d %d" % (self.run, -1 if index is None else index))


def drawn(made: Any, places: list[int] = PLACES, run: int = 0) -> list[Any]:
    """What goes into a step if these prompts are drawn: batches with completions."""
    made.run.randomness = Coupled(0)
    made.run.randomness.run, made.run.randomness.drawn = run, len(places)
    made.create_optimizer()
    loader = made.get_train_dataloader()
    units = loader.dataset.__getitems__([(place,) * G for place in places])
    batches = loader.collate_fn(units)
    with made._alone():
        return [made._completed(each) for each in batches]


def of_prompts(batches: list[Any]) -> dict[str, dict[str, torch.Tensor]]:
    """The rows of each prompt without padding on the right, by its text."""
    found = {}
    for batch in batches:
        inputs = getattr(batch.inputs, "inputs", batch.inputs)
        for first in range(0, len(inputs["labels"]), G):
            rows = slice(first, first + G)
            part = {n: value[rows] for n, value in inputs.items()}
            row = next(grpo.prompts_of(part))[1]
            used = int(part["attention_mask"].sum(1).max())
            found[str(row["prompt"])] = {
                n: each[:, :used] if each.dim() == 2 else each
                for n, each in part.items()
                if n != "pickled_row"
            }
    return found


def sums(made: Any, batches: list[Any]) -> dict[str, torch.Tensor]:
    with made.run.engine() as engine:
        made.run.feed(engine, batches)
        return engine.collect()


def flat(found: Any) -> torch.Tensor:
    return torch.cat([each.flatten().double() for each in found])


# -- losses, gradients and advantages --


@pytest.mark.parametrize(
    ("kind", "beta", "unbiased"), [("dr_grpo", 0.0, True), ("grpo", 0.3, True), ("dr_grpo", 0.3, False)]
)  # fmt: skip
def test_loss_and_gradient_of_a_prompt_are_those_of_trl(kind, beta, unbiased, tmp_path):
    options = {
        "loss_type": kind,
        "beta": beta,
        "use_bias_correction_kl": unbiased,
        "temperature": 0.7,
    }
    made = trainer(tmp_path / "ours", **options)
    for parameter in made.model.parameters():  # which is not its reference any more
        torch.nn.init.normal_(parameter.data, std=0.3)
    ((_, rows),) = of_prompts(drawn(made, [5])).items()
    losses = made.compute_per_example_loss(made.model, rows)
    ours = torch.autograd.grad(losses.mean(), list(made.model.parameters()))
    args = GRPOConfig(
        str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none", num_generations=G,
        per_device_train_batch_size=G, max_completion_length=MOST, gradient_checkpointing=False,
        **{**options, "beta": 0.0},
    )  # fmt: skip
    theirs = GRPOTrainer(
        made.model, spread, args, train_dataset=prompts(), processing_class=tokenizer()
    )
    theirs.beta = beta  # with a reference TRL would load the model by its name
    theirs.current_gradient_accumulation_steps = 1
    start = int((rows["labels"][0] != -100).long().argmax())
    given = {
        "prompt_ids": rows["input_ids"][:, :start],
        "prompt_mask": rows["attention_mask"][:, :start],
        "completion_ids": rows["input_ids"][:, start:],
        "completion_mask": rows["attention_mask"][:, start:],
        "advantages": rows["advantages"],
        "ref_per_token_logps": rows.get("reference", rows["labels"])[:, start:],
    }
    loss = theirs._compute_loss(made.model.train(), given)
    expected = torch.autograd.grad(loss, list(made.model.parameters()))
    assert losses.mean().item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(flat(ours), flat(expected), rtol=1e-4, atol=1e-6)
    assert flat(ours).norm() > 1e-3


def test_the_reference_is_the_model_before_training_and_adapters_are_switched_off(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    whole, adapted = (
        trainer(tmp_path / f"{i}", beta=0.3, peft_config=each)
        for i, each in enumerate([None, lora])
    )
    for made in (whole, adapted):
        for parameter in made.model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter.data, std=0.3)
        for rows in of_prompts(drawn(made)).values():
            expected = grpo.log_probs(chat.model().double(), rows, 1.0)
            counted = rows["labels"] != -100
            torch.testing.assert_close(rows["reference"][counted].double(), expected[counted])


def test_the_reference_has_the_precision_of_the_policy(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as bf16=True, and as `accelerate`
    made = trainer(tmp_path, beta=0.1, model=chat.model().float())
    ((_, rows),) = of_prompts(drawn(made, [5])).items()
    counted, found = rows["labels"] != -100, []
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), torch.no_grad():
            found.append(grpo.log_probs(chat.model().float(), rows, 1.0)[counted])
    of_policy, in_float32 = found
    assert (rows["reference"][counted] - of_policy).abs().max() < 1e-5
    assert (in_float32 - of_policy).abs().max() > 1e-4


def test_the_reference_of_an_adapter_is_no_second_adapter_that_is_saved(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    made = trainer(tmp_path, beta=0.3, model=get_peft_model(chat.model(), lora))
    before = copy.deepcopy(made.model)
    assert list(made.model.peft_config) == ["default"]
    made.train()
    made.save_model()
    weights = [each.relative_to(tmp_path) for each in tmp_path.rglob("*.safetensors")]
    assert [str(each) for each in weights] == ["adapter_model.safetensors"]
    for parameter in made.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.3)
    for rows in of_prompts(drawn(made)).values():
        counted = rows["labels"] != -100
        expected = grpo.log_probs(before, rows, 1.0)
        torch.testing.assert_close(rows["reference"][counted], expected[counted])


@pytest.mark.parametrize(("size", "beta"), [(4, 0.0), (12, 0.3)])
def test_the_sum_of_a_step_equals_the_loop_over_prompts(size, beta, tmp_path):
    """Each prompt alone in float64, without padding, by autograd."""
    made = trainer(tmp_path, per_device_train_batch_size=size, beta=beta, **CLIPS_SOME)
    batches = drawn(made)
    found, total = of_prompts(batches), torch.zeros(1)
    clip, norms = made.run.plan.clips_to, []
    for rows in found.values():
        ids, at = rows["input_ids"], rows["labels"][:, 1:] != -100
        parts = []
        for one in range(G):
            used = int(rows["attention_mask"][one].sum())
            logits = made.model(ids[one : one + 1, :used]).logits[0, :-1]
            logps = logits.log_softmax(1).gather(1, ids[one, 1:used, None])[:, 0][
                at[one, : used - 1]
            ]
            loss = -rows["advantages"][one] * logps
            if beta:
                apart = rows["reference"][one, 1:used][at[one, : used - 1]] - logps
                here = apart.detach()
                loss = loss + beta * ((here.exp() - here - 1) * logps + apart.exp() - apart)
            parts.append(loss.sum() / MOST)
        gradient = flat(torch.autograd.grad(torch.stack(parts).mean(), [*made.model.parameters()]))
        norms.append(float(gradient.norm()))
        total = total + gradient * min(1.0, clip / norms[-1])
    assert min(norms) < clip < max(norms)
    torch.testing.assert_close(flat(sums(made, batches).values()), total, rtol=1e-6, atol=1e-9)


def test_advantages_are_of_one_prompt(tmp_path):
    rewards = torch.tensor([1.0, 2.0, math.nan, 6.0], dtype=torch.float64)
    plain = [-2.0, -1.0, 0.0, 3.0]
    assert advantages_of(rewards, scaled=False).tolist() == plain
    std = 7**0.5
    assert advantages_of(rewards, scaled=True).tolist() == pytest.approx([x / (std + 1e-4) for x in plain])  # fmt: skip
    nobody = torch.full((3,), math.nan, dtype=torch.float64)
    assert advantages_of(nobody, scaled=True).tolist() == [0.0] * 3
    both = grpo.Rewards([spread, lambda **_: [1.0, None, 3.0]], [2.0, 0.5])
    row = {"prompt": "ab", "answer": 1}
    assert both(row, ["x"] * 3, [[1], [2], [3]]).tolist() == [8.5, 10.0, 13.5]


# -- no prompt has a part in another's --


def others_stay(made: Any) -> bool:
    """Without one prompt, whichever it is, completions and advantages of the others are the same in
    every bit, and the clipped sum moves by at most C."""
    whole = drawn(made)
    total, before = flat(sums(made, whole).values()), of_prompts(whole)
    for place in PLACES:
        rest = drawn(made, [each for each in PLACES if each != place])
        for text, rows in of_prompts(rest).items():
            same = (torch.equal(rows[name], before[text][name]) for name in rows)
            if not all(same):
                return False
        moved = float((total - flat(sums(made, rest).values())).norm())
        if not 0 < moved <= C:
            return False
    return True


def shared_stream(self: Any, prompt: int | None = None) -> None:
    """The planted bug: numbers that depend on how many prompts were drawn, as if all of them were
    written to in one batch."""
    randomness = self.run.randomness
    torch.manual_seed(randomness.example_seed(prompt) + randomness.drawn)


COMPLETED = DPGRPOTrainer._completed


def centered_over_the_batch(self: Any, batch: Any) -> Any:
    """The planted bug: advantages less their mean over a batch of prompts."""
    batch = COMPLETED(self, batch)
    batch.inputs["advantages"] += batch.inputs["advantages"].square().mean()
    return batch


def test_no_prompt_changes_what_is_written_to_another(tmp_path, monkeypatch):
    made = trainer(tmp_path, beta=0.1, per_device_train_batch_size=12)
    assert others_stay(made)
    with monkeypatch.context() as patch:
        patch.setattr(DPGRPOTrainer, "_begin_stream", shared_stream)
        assert not others_stay(made)
    monkeypatch.setattr(DPGRPOTrainer, "_completed", centered_over_the_batch)
    assert not others_stay(made)


def test_each_prompt_is_alone_when_it_is_written_to(tmp_path, monkeypatch):
    made, seen = trainer(tmp_path, per_device_train_batch_size=12), []
    write = grpo.Author.write

    def watched(self, model, prompt, count):
        assert not model.training and not torch.is_grad_enabled()
        seen.append(tokenizer().decode(prompt))
        return write(self, model, prompt, count)

    monkeypatch.setattr(grpo.Author, "write", watched)
    drawn(made)
    texts = prompts()["prompt"]
    assert sorted(seen) == sorted(texts[place] for place in PLACES)  # without padding


@pytest.mark.os_randomness
def test_completions_do_not_follow_from_the_seed_and_differ_in_each_step(tmp_path):
    seen = []
    for _ in range(2):
        torch.manual_seed(0)
        made = trainer(tmp_path / str(len(seen)))
        loader = made.get_train_dataloader()
        for _ in range(2):
            (batch,) = loader.collate_fn(loader.dataset.__getitems__([(3,) * G]))
            with made._alone():
                seen.append(made._completed(batch).inputs["input_ids"].flatten().tolist())
    assert len({tuple(each) for each in seen}) == 4


class CoupledLoss(DPGRPOTrainer):
    """The planted bug: a loss with the mean advantage of the batch."""

    def compute_per_example_loss(self, model, inputs):
        mean = inputs["advantages"].mean()
        return super().compute_per_example_loss(model, {**inputs, "advantages": inputs["advantages"] - mean})  # fmt: skip


def test_a_loss_that_completions_share_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(EngineCheck, "check", CHECK)
    made = trainer(tmp_path, kind=CoupledLoss)
    with pytest.raises(SelfCheckError):
        made.train()
    assert not made.ledger.steps()


def remembering(completions, calls: list[int] = [], **_: Any) -> list[float]:  # noqa: B006
    calls.append(1)
    return [len(calls) + 0.1 * place for place in range(len(completions))]


def test_reward_functions_remember_nothing_and_hold_no_rows(tmp_path):
    rewards = grpo.Rewards([remembering], None)
    first, second = (rewards({"prompt": "a"}, ["x"] * 2, [[1]] * 2) for _ in range(2))
    assert first.tolist() == second.tolist() == [1.0, 1.1]
    rows = prompts()

    def nearest(prompts, completions, known=rows, **_):
        return [float(known[0]["answer"])] * len(completions)

    with pytest.raises(DataError, match="nearest.*holds rows of the training set"):
        trainer(tmp_path, nearest)


def trained(folder: Any, size: int) -> dict[str, torch.Tensor]:
    sizes = {"per_device_train_batch_size": size, "expected_batch_size": ROWS}  # all take part
    made = trainer(folder, **sizes, **PLAIN_STEPS)
    made.run.randomness = Coupled(0, made.run.processes.rank)
    before = weights(made)
    made.train()
    return {name: value - before[name] for name, value in weights(made).items()}


def test_the_update_does_not_depend_on_the_processes(tmp_path):
    alone = trained(tmp_path / "one", 48)
    assert flat(alone.values()).norm() > 0
    for found in results(2, lambda: trained(tmp_path / "two", 4)):
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-8, atol=1e-12)


# -- completions that cannot be scored --


def failing(kind: str) -> Any:
    def reward(prompts, completions, **_):
        found = [float(place) for place in range(len(completions))]
        if prompts[0].startswith("5:"):
            sys.stdout.write(f"SECRET {prompts[0]}")
            if kind == "raises":
                raise RuntimeError(f"SECRET {prompts[0]}")
            if kind == "panics":  # as a tokenizer written in Rust does
                raise type("PanicException", (BaseException,), {})(f"SECRET {prompts[0]}")
            if kind == "memory":
                raise MemoryError(f"SECRET {prompts[0]}")
            return {"short": found[1:], "inf": [math.inf, *found[1:]], "text": ["SECRET"] * G}[kind]
        return found

    return reward


@pytest.mark.parametrize("kind", ["raises", "panics", "short", "inf", "text"])
def test_a_prompt_without_rewards_adds_nothing_and_nobody_is_told(kind, tmp_path, monkeypatch, capfd):  # fmt: skip
    monkeypatch.setattr(grpo, "_TRIED", 1)
    made = trainer(tmp_path, failing(kind), expected_batch_size=ROWS, max_steps=1)
    capfd.readouterr()
    with_it, without = drawn(made), drawn(made, [place for place in PLACES if place != 5])
    found, expected = (flat(sums(made, each).values()) for each in (with_it, without))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    loader = made.get_train_dataloader()  # alone, it adds exactly 0
    with made._alone():
        alone = [made._completed(each) for each in loader.collate_fn(loader.dataset.__getitems__([(5,) * G]))]  # fmt: skip
    assert not any(each.any() for each in sums(made, alone).values())
    made.train()
    assert made.ledger.steps() == 1 and "SECRET" not in "".join(capfd.readouterr())


def test_what_is_not_a_prompts_own_error_ends_the_run_and_names_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "_TRIED", 1)
    made = trainer(tmp_path, failing("memory"), expected_batch_size=ROWS, max_steps=1)
    with pytest.raises((DataError, StepError), match="memory ran out.*does not say") as found:
        made.train()
    error: BaseException | None = found.value
    while error is not None:
        assert "SECRET" not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert not made.ledger.steps()


def test_reward_functions_are_tried_before_the_first_draw(tmp_path):
    made = trainer(tmp_path, failing("raises"))
    with pytest.raises(DataError, match=r"of row 5 .*\['reward'\] \(RuntimeError: SECRET"):
        made.train()
    with pytest.raises(DataError, match="of row 0 .*log_metric"):
        trainer(tmp_path / "2", lambda completions, log_metric, **_: [0.0] * G).train()
    assert not made.ledger.steps()


# -- whole runs --


@pytest.mark.parametrize(("made", "lora"), [(prompts, True), (talks, False)])
def test_a_private_run_names_its_unit_and_shows_no_completion(made, lora, tmp_path, capfd):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if lora else None
    reward, twice = (spread if lora else of_talk), Dataset.from_list([*made().to_list(), made()[3]])
    tested = trainer(
        tmp_path, reward, twice, peft_config=adapter, eval_dataset=made(6, 100), beta=0.1 * lora,
        model=chat.model(), mask_truncated_completions=not lora, scale_rewards="none",
        generation_kwargs='{"min_new_tokens": 2}',
    )  # fmt: skip
    capfd.readouterr()
    tested.train()
    tested.save_model()
    statement = tested.privacy_statement()
    assert statement.status == "proven" and tested.ledger.steps() == 2
    assert tested.ledger.events[-1] == PoissonSampledGaussian(1.0, 6 / ROWS, 2)
    said = (
        "one prompt with all its completions (all rows with one value in the column 'prompt'), of"
    )
    assert f"{said} which the training set has {ROWS}" in statement.sentence()
    assert "2 steps of DP-SGD on 4 completions of each prompt" in statement.sentence()
    assert any("cannot be scored" in each for each in statement.not_covered)
    assert "single prompt with all its completions" in (tmp_path / "README.md").read_text()
    assert not disagreements(read(tmp_path / "privacy.json"))
    logged = {name for entry in tested.state.log_history for name in entry}
    assert not {name for name in logged if "reward" in name or "completion" in name}
    found = tested.evaluate()
    predicted = tested.predict(made(4, 200))
    assert found["eval_reward_std"] > 0 and predicted.predictions.shape == (4, G)
    assert predicted.metrics["test_reward"] == pytest.approx(float(predicted.predictions.mean()), nan_ok=True)  # fmt: skip
    with pytest.raises(UnsupportedArgumentError, match="training set"):
        tested.evaluate(made(6))
    with pytest.raises(DataError, match="was already prepared"):
        tested.evaluate(tested.eval_dataset)


def test_several_sets_are_evaluated_on_and_the_best_model_has_the_largest_reward(tmp_path):
    tested = trainer(
        tmp_path, eval_dataset=prompts(6, 50), load_best_model_at_end=True, eval_strategy="steps",
        eval_steps=1, save_strategy="steps", save_steps=1, per_device_eval_batch_size=4,
        eval_do_concat_batches=False,
    )  # fmt: skip
    tested.train()
    rewards = [each["eval_reward"] for each in tested.state.log_history if "eval_reward" in each]
    assert len(rewards) == 2 and tested.state.best_metric == max(rewards)
    several = {"a": prompts(2, 60), "b": prompts(2, 70)}
    assert {"eval_a_reward", "eval_b_reward"} <= tested.evaluate(several).keys()
    pickled = several["a"].add_column("pickled_row", [b"cos\nsystem\n."] * 2)
    for raw in (pickled, {"a": pickled}, {"a": tested.eval_dataset}):
        with pytest.raises(DataError, match="was already prepared"):
            tested.evaluate(raw)
    with pytest.raises(UnsupportedArgumentError, match="the evaluation set 'b'"):
        tested.evaluate({"a": several["a"], "b": prompts(6)})


@pytest.mark.parametrize(
    ("read_by", "metric"),
    [
        ({"save_strategy": "best"}, "reward"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "reward"),
        ({"save_strategy": "best", "metric_for_best_model": "reward_std"}, "reward_std"),
        ({}, None),
    ],
)
def test_the_best_model_is_by_reward_where_nothing_is_said(read_by, metric, tmp_path):
    sizes = {"num_generations": G, "per_device_train_batch_size": 8, "eval_strategy": "steps"}
    args = tiny.arguments(tmp_path, DPGRPOConfig, eval_steps=1, **sizes, **read_by)
    assert args.metric_for_best_model == metric
    assert args.greater_is_better is (None if metric is None else True)


@pytest.mark.slow
def test_rewards_rise(tmp_path):
    """With hardly any noise, the model learns to write the letter that is rewarded."""

    def letters(completions, **_):
        return [sum(each.count("e") for each in completions[at : at + 1]) for at in range(G)]

    made = trainer(
        tmp_path, letters, noise_multiplier=0.05, expected_batch_size=ROWS, max_steps=40,
        learning_rate=2e-2, eval_dataset=prompts(40, 100), per_example_max_grad_norm=1.0,
        model=chat.model(), per_device_train_batch_size=48,
    )  # fmt: skip
    before = made.evaluate()["eval_reward"]
    made.train()
    assert made.evaluate()["eval_reward"] > 2 * before


def found_of_canaries(made: Any, streams: int = 40, noises: int = 25) -> tuple[float, float]:
    """Bounds, each right with 99 %, on how often a canary is found and how often it is found that
    was left out, by someone who knows all but the noise, in streams x noises runs of a step."""
    generator, hits, false = torch.Generator().manual_seed(0), 0, 0
    for run in range(streams):
        whole, rest = (
            flat(sums(made, drawn(made, places, run)).values()) for places in (PLACES, PLACES[:-1])
        )
        moved = float((whole - rest).norm()) / made.run.plan.clipping_norm  # by the canary
        noise = torch.randn(2, noises, generator=generator)
        hits, false = hits + int((moved + noise[0] > 3).sum()), false + int((noise[1] > 3).sum())
    found = [stats.binomtest(count, streams * noises) for count in (hits, false)]
    return found[0].proportion_ci(0.98).low, found[1].proportion_ci(0.98).high


@pytest.mark.slow
def test_an_audit_refutes_shared_streams_alone(tmp_path, monkeypatch):
    """An epsilon below the bound of the audit is refuted."""
    made, delta = trainer(tmp_path), 1e-2
    claimed = epsilon(PoissonSampledGaussian(1.0, 1.0, 1), delta, "pld").value
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(DPGRPOTrainer, "_begin_stream", shared_stream)
        found, wrong = found_of_canaries(made)
        bound = math.log(max(found - delta, 1e-9) / wrong)
        assert (bound > claimed) == planted, (planted, found, wrong, claimed)


# -- what is refused --


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("loss_type", "dapo", "'dr_grpo' or 'grpo'.*tokens of a batch"),
        ("loss_type", "cispo", "'dr_grpo' or 'grpo'"),
        ("loss_type", "bnpo", "'dr_grpo' or 'grpo'"),
        ("scale_rewards", "batch", "Set 'group' or 'none'"),
        ("multi_objective_aggregation", "normalize_then_sum", "over the batch"),
        ("top_entropy_quantile", 0.2, "tokens of a batch"),
        ("entropy_coef", 0.1, "other prompts' tokens"),
        ("num_iterations", 2, "used more than once"),
        ("steps_per_generation", 2, "used more than once"),
        ("generation_batch_size", 16, "Set `expected_batch_size`"),
        ("importance_sampling_level", "sequence", "every ratio is 1"),
        ("use_vllm", True, "batch of their own"),
        ("use_transformers_continuous_batching", True, "batch of their own"),
        ("cache_implementation", "static", "longest prompt so far"),
        ("generation_kwargs", {"max_new_tokens": 9}, "names among"),
        ("generation_kwargs", '{"num_beams": 2}', "names among"),
        ("log_completions", True, "not released"),
        ("log_unique_prompts", True, "not released"),
        ("sync_ref_model", True, "frozen model"),
        ("use_liger_kernel", True, "Fused kernels"),
        ("num_generations", 1, "2 or more.*with each other"),
        ("views_per_example", 3, "to be num_generations, 4"),
        ("per_device_train_batch_size", 6, "multiple of num_generations, 4"),
        ("max_tokens_per_physical_batch", 99, "apart"),
        ("privacy_unit", "example", "what is protected"),
        ("privacy_unit_column", "answer", "what is protected"),
        ("noised_loss_bound", 2.0, "says nothing about rewards"),
        ("privacy_mode", "non_private", "trl.GRPOTrainer"),
        ("beta", -1, ">= 0"),
        ("audit_canaries", 10, "A canary is one row"),
    ],
)
def test_what_couples_prompts_or_uses_a_draw_twice_is_refused(option, value, message, tmp_path):
    with pytest.raises(InvalidArgumentError, match=f"`{option}`.*{message}"):
        trainer(tmp_path, **{option: value})


async def later(completions, **_):
    return [0.0] * len(completions)


def test_what_cannot_be_trained_by_rewards_is_refused(tmp_path):
    for reward in ("org/reward-model", torch.nn.Linear(1, 1), later):
        with pytest.raises(UnsupportedArgumentError, match="`reward_funcs` to be functions"):
            trainer(tmp_path, reward)
    with pytest.raises(UnsupportedArgumentError, match="`tools` to be left out"):
        trainer(tmp_path, tools=[print])
    with pytest.raises(UnsupportedArgumentError, match="`batch_eval_metrics` to be False without"):
        trainer(tmp_path, batch_eval_metrics=True)
    with pytest.raises(UnsupportedArgumentError, match="does not choose what trains"):
        trainer(tmp_path, peft_config=FrostConfig(selection_noise_multiplier=2.0))
    with pytest.raises(DataError, match="the column 'prompt'.*Rename"):
        trainer(tmp_path, made=prompts().rename_column("prompt", "question"))
    with pytest.raises(DataError, match="holds an empty text"):
        trainer(tmp_path, made=Dataset.from_list([*prompts().to_list(), {"prompt": "", "answer": 1}]))  # fmt: skip
    long = Dataset.from_list([*prompts().to_list(), {"prompt": "film " * 60, "answer": 1}])
    with pytest.raises(DataError, match="Model and loss fail on a synthetic row"):
        trainer(tmp_path, made=long, model=gpt2()).train()
