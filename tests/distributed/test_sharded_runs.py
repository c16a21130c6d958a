"""Whole runs of a model that FSDP2 shards: the same update, folder and ledger as in one process.

accelerate shards on accelerators only. Here it is told that it has some, so that its own code runs
on the CPU; a model that ``fully_shard`` was called on needs no accelerate.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import silence
import tiny
import torch
from loops import plan, run, steps
from processes import on_processes, where_accelerate_shards
from safetensors.torch import load_file
from silence import Silent, assert_standard_normal, distance, moved_by_noise, weights, whole
from torch.distributed.fsdp import fully_shard

from hf_dp import DpSgdPlan, mechanism_for
from hf_dp.batches import when_drawn
from hf_dp.errors import HfDpError
from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import disagreements, read
from hf_dp.tuners.frost.tuner import FrostConfig
from hf_dp.tuners.rgp import RgpConfig

LAYERS = {"bert": "BertLayer", "gpt2": "GPT2Block", "llama_lora": "LlamaDecoderLayer"}


def sharded(count: int, kind: str, function, state_dict: str = "FULL_STATE_DICT") -> list[Any]:
    """Return what ``function()`` returns in each rank, where accelerate shards."""
    return where_accelerate_shards(count, LAYERS[kind], function, state_dict)


def trained(folder: Path, kind: str, dtype: torch.dtype, resume: bool = False, **options: Any):
    """Weights after training, whole, and whether all parameters were sharded."""
    values = {
        "max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1,
        "optim": "adamw_torch",  # a sharded checkpoint of an optimizer without state cannot be read
        "learning_rate": 1e-2,
        # Shards leave other memory for explicit gradients than a whole model does; AdamW would
        # enlarge the difference in rounding.
        "clipping_memory_ratio": 1,
    }  # fmt: skip
    made = silence.trainer(folder, kind, dtype, **{**values, **options})
    made.train(resume_from_checkpoint=resume or None)
    made.save_model()
    found = {name: whole(value) for name, value in weights(made).items()}
    return found, {type(p.data).__name__ for p in made.model.parameters()}


QUICK = ("gpt2", torch.float64, 2, 2, "SHARDED_STATE_DICT")
CASES = [
    QUICK,
    *[(kind, dtype, 2, 2, "FULL_STATE_DICT") for kind in LAYERS for dtype in (torch.float64, torch.float32)],
    ("bert", torch.float64, 2, 3, "SHARDED_STATE_DICT"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype", "count", "later", "state_dict"),
    [pytest.param(*case, marks=[] if case == QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_a_sharded_run_is_that_of_one_process_and_goes_on(
    kind, dtype, count, later, state_dict, tmp_path, request
):
    """The sharded run checks itself, and no other that it is compared with."""
    one, two = tmp_path / "one", tmp_path / "fsdp"
    found = sharded(count, kind, lambda: trained(two, kind, dtype), state_dict)
    request.getfixturevalue("unchecked")
    alone, _ = trained(one, kind, dtype)
    near = 1e-9 if dtype == torch.float64 else 1e-4
    for each, types in found:
        assert types == {"DTensor"} and distance(each, alone, kind) < near
    assert read_run(one).ledger.to_list() == read_run(two).ledger.to_list()
    assert disagreements(read(two)) == []
    assert published(two) == published(one)
    (saved,) = two.glob("*.safetensors")  # whole, as one process saves it
    same = load_file(one / saved.name)
    for name, value in load_file(saved).items():
        torch.testing.assert_close(value, same[name], rtol=1e-4, atol=1e-6)
    shutil.rmtree(two / "checkpoint-2")
    again = sharded(later, kind, lambda: trained(two, kind, dtype, resume=True), state_dict)
    assert all(distance(each, alone, kind) < near for each, _ in again)
    assert read_run(two).ledger.steps() == 3  # one step was made twice, and both count


def test_a_bad_row_that_is_looked_at_when_it_is_drawn_adds_nothing(tmp_path, monkeypatch, request):
    """Row 9, of all that are drawn; in a sharded run as in one process."""
    honest, kind = tiny.dataset(), "gpt2"
    monkeypatch.setattr(when_drawn, "FIRST", 4)

    def change(row, place):
        return {**row, "input_ids": [99] * len(row["input_ids"])} if place == 9 else row

    bad = honest.map(change, with_indices=True)
    options = {"look_over": "when_drawn", "longest_row": 9, "max_steps": 1}
    monkeypatch.setattr(tiny, "dataset", lambda: bad)
    found = sharded(2, kind, lambda: trained(tmp_path / "fsdp", kind, torch.float64, **options))
    request.getfixturevalue("unchecked")
    alone, _ = trained(tmp_path / "one", kind, torch.float64, **options)
    assert all(distance(each, alone, kind) < 1e-9 for each, _ in found)
    monkeypatch.setattr(tiny, "dataset", lambda: honest)
    good, _ = trained(tmp_path / "good", kind, torch.float64, **options)
    assert distance(good, alone, kind) > 1e-3


def published(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("_")}


ROWS = 41


def looped(folder: Path, shards: bool, batch: int = ROWS) -> dict[str, torch.Tensor]:
    """Weights, the noised losses and the clipping norms of a plain PyTorch loop on a model that
    ``fully_shard`` was called on."""
    model = tiny.model().double()
    if shards:
        for layer in model.bert.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
    loss = {"noised_loss_bound": 0.7, "noised_loss_budget_ratio": 0.2}
    own = DpSgdPlan.of(0.1, 1.0, clipping_quantile=0.5, **loss)
    planned = plan(ROWS, mechanism=own, expected_batch_size=batch, max_steps=2)
    private = run(folder, planned, model=model, size=20)
    if batch == ROWS:
        private.randomness = Silent(0, private.processes.rank)
    mechanism, losses = mechanism_for(private), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in steps(mechanism):
        losses += [each.reshape(1) for each in mechanism.noised.values()]
        optimizer.step()
    found = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return {**found, "losses": torch.cat(losses)}


def test_a_loop_on_a_sharded_model_is_that_of_one_process(tmp_path):
    # Of 41 rows one process has 21, in two batches, and the other 20, so that it makes up a batch.
    alone = looped(tmp_path / "one", False)
    for found in on_processes(2, looped, tmp_path / "fsdp", True):
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("unchecked")
def test_processes_without_examples_make_the_same_forwards(tmp_path):
    first, other = on_processes(2, looped, tmp_path, True, 1)  # most draws of both are empty
    assert all(torch.equal(first[name], other[name]) for name in other)
    assert read_run(tmp_path).ledger.steps() == 2


# -- several questions to one launch: each other one costs a third of the first --

FROST_TWICE = FrostConfig(num_selections=2, selection_noise_multiplier=1.0, task_type="SEQ_CLS")
REFUSED = {
    "rgp": ({"given": {"peft_config": RgpConfig(rank=2, task_type="SEQ_CLS")}}, "RGP makes"),
    "published": ({"privacy_mode": "dp_fp", "dp_fp_variant": "published"}, "DP-FP as published"),
    "frost twice": ({"given": {"peft_config": FROST_TWICE}}, "num_selections above 1"),
}


def error_of(folder: Path, options: dict[str, Any]) -> str:
    with pytest.raises(HfDpError) as refused:
        tiny.trainer(folder, **options).train()
    return str(refused.value)


def in_bf16(folder: Path) -> tuple[dict[str, torch.Tensor], set[torch.dtype]]:
    made = tiny.trainer(folder, bf16=True, max_steps=1, accountant="rdp")
    made.train()
    found = {name: whole(value) for name, value in weights(made).items()}
    return found, {p.dtype for p in made.model.parameters()}


@pytest.fixture(scope="module")
def of_bert(tmp_path_factory):
    """The folder, and of two processes: errors, noise, weights in bfloat16 and their types."""
    folder = tmp_path_factory.mktemp("bert")

    def ask():
        errors = {name: error_of(folder / name, options) for name, (options, _) in REFUSED.items()}
        return errors, moved_by_noise(folder / "noise", steps=1), *in_bf16(folder / "bf16")

    return folder, sharded(2, "bert", ask)


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_whole_weights_is_refused_by_name(what, of_bert):
    folder, found = of_bert
    for errors, *_ in found:
        assert REFUSED[what][1] in errors[what]
        assert "cannot be sharded with FSDP2. Train it with DDP" in errors[what]
    assert not (folder / what / "ledger.jsonl").exists()


def test_the_noise_of_shards_is_that_of_one_process(of_bert):
    (_, first, *_), (_, second, *_) = of_bert[1]
    assert torch.equal(first, second)
    assert_standard_normal(first)


def test_bf16_with_float32_master_weights(of_bert):
    folder, ((*_, first, types), (*_, second, _)) = of_bert
    assert types == {torch.float32}
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert "bfloat16" in (folder / "bf16" / "README.md").read_text()


@pytest.mark.slow
def test_frost_selects_before_the_model_is_sharded(tmp_path):
    def train():
        config = FrostConfig(unfreeze_ratio=0.5, selection_iterations=2, task_type="SEQ_CLS")
        budget = {"target_epsilon": 8.0, "accountant": "rdp"}
        made = tiny.trainer(tmp_path, given={"peft_config": config}, **budget)
        made.train()
        made.save_model()
        return {name: whole(value) for name, value in weights(made).items()}

    first, second = sharded(2, "bert", train)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert disagreements(read(tmp_path)) == []
