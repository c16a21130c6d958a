"""The sum that a run noises moves by C and the plan's margin when a row is left out, however many
rows stand in how many physical batches beside it.

Whole runs of one step through ``DPTrainer.train()`` with every row drawn, with and without one row.
Read is what enters the noise. In both runs each row has the same key, as in the proof.
"""

import math

import pytest
import tiny
import torch
from coordinates import Square
from silence import Coupled
from torch import Tensor
from transformers import TrainerCallback, default_data_collator
from users import flat
from watch import watch

from hf_dp.batches import loader
from hf_dp.clipping import ClippingEngine, forms
from hf_dp.plans.rounding import rounding_margin
from hf_dp.run.gate import Release
from hf_dp.trainer.trainer import DPTrainer

pytestmark = pytest.mark.usefixtures("unchecked")

C, WIDTH = 0.1, 16


class Products(DPTrainer):
    seen: list[frozenset[float]] = []  # the rows of each physical batch, by what only a row has

    def compute_per_example_loss(self, model, inputs):
        self.seen.append(frozenset(inputs["g"][:, 0, 0].tolist()))
        return (model(inputs["x"]) * inputs["g"]).float().sum((1, 2))

    def synthetic_batches(self):
        return [{"x": torch.randn(1, 3, WIDTH), "g": torch.rand(1, 3, WIDTH)} for _ in range(3)]


def aligned(count: int) -> list[tuple[Tensor, Tensor]]:
    """Gradients of one direction and two sizes, both above C."""
    generator = torch.Generator().manual_seed(1)
    x, g = torch.rand(2, 1, WIDTH, generator=generator)
    return [(x * (1 + 0.3 * (i % 2)), g) for i in range(count)]


def adversarial(count: int) -> list[tuple[Tensor, Tensor]]:
    """Gradients of one direction, below C, such that in batches of 4 each product is half a unit in
    the last place of a float32 sum beyond what it holds, or just below half: with row 0 it is
    rounded up each time, and without it down."""
    size = 0.9 * C / WIDTH
    unit = 2.0 ** (math.floor(math.log2(count * size)) - 23)
    size = (round(4 * size / unit) + 0.52) * unit / 4
    drift = [0.04 * unit * (i // 4) * (-1, 1, 0, 0)[i % 4] for i in range(count)]
    x = torch.ones(1, WIDTH)
    return [(x, x * (size + each)) for each in drift]


def cancelling(count: int) -> list[tuple[Tensor, Tensor]]:
    """Positions that cancel to 0.3 C, each of them large."""
    generator = torch.Generator().manual_seed(1)
    x, g = torch.randn(2, 32, WIDTH, generator=generator)
    x, g = torch.cat([x, x]), torch.cat([g, -g])
    direction = torch.ones(WIDTH) * (0.3 * C / WIDTH / 64) ** 0.5
    rows = []
    for i in range(count):
        scaled = x * (1.0 + 0.01 * (i % 11))
        rows.append((torch.cat([scaled, direction[None] * 8]), torch.cat([g, direction[None] * 8])))
    return rows


def numbered(count: int) -> list[tuple[Tensor, Tensor]]:
    """Rows whose g says which row it is."""
    return [(torch.ones(2, WIDTH), torch.full((2, WIDTH), 1.0 + i)) for i in range(count)]


KINDS = {"aligned": aligned, "adversarial": adversarial, "cancelling": cancelling}


def noised(folder, monkeypatch, kind: str, count: int, without: int | None, **options) -> Tensor:
    """What enters the noise of the one step, float64."""
    kept = [i for i in range(count) if i != without]
    rows = numbered(count) if kind == "numbered" else KINDS[kind](count)
    given = {"model": Square(WIDTH), "eval_dataset": None, "data_collator": default_data_collator,
             "train_dataset": [{"x": rows[i][0], "g": rows[i][1]} for i in kept]}  # fmt: skip
    values = {"expected_batch_size": len(kept), "max_steps": 1, "per_example_max_grad_norm": C,
              "remove_unused_columns": False, "logging_strategy": "no", "insecure_seed": 5}  # fmt: skip
    made = tiny.trainer(folder, cls=Products, given=given, **{**values, **options})
    made.run.randomness = Coupled(5)
    made.run.randomness.rows = kept
    with monkeypatch.context() as patch:
        seen = watch(patch, Release, "sum", before=lambda _, sums: flat(sums))
        made.train()
    return seen[0]


def moved(folder, patch, kind: str, count: int, places: list[int], **options) -> list[float]:
    """How far leaving out each of some rows moves the sum, in units of C."""
    everyone = noised(folder / "all", patch, kind, count, None, **options)
    without = [noised(folder / f"{i}", patch, kind, count, i, **options) for i in places]
    return [float((everyone - each).norm()) / C for each in without]


COVERED = 1 + rounding_margin(12_288, 12_288)
MIDDLE = {4096: 2047, 12_288: 6145}


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_leaving_out_a_row_moves_the_sum_by_what_the_noise_covers(
    kind, size, bf16, tmp_path, monkeypatch
):
    options = {"per_device_train_batch_size": size, "bf16": bf16}
    found = moved(tmp_path, monkeypatch, kind, 4096, [0, MIDDLE[4096], 4095], **options)
    assert 0.001 < max(found) <= COVERED


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_so_it_does_with_more_rows(kind, tmp_path, monkeypatch):
    options, places = {"per_device_train_batch_size": 4}, [0, MIDDLE[12_288]]
    assert max(moved(tmp_path, monkeypatch, kind, 12_288, places, **options)) <= COVERED


@pytest.mark.slow
def test_planted_float32_sums_and_full_batches_are_seen(tmp_path, monkeypatch):
    """Planted: the running sums and the batches that hf_dp once had."""
    float32_sums(monkeypatch)
    full_batches(monkeypatch)
    options = {"per_device_train_batch_size": 4}
    assert moved(tmp_path, monkeypatch, "adversarial", 11_376, [0], **options)[0] > 1.3


def regrouped(folder, patch, without: int) -> int:
    """How many other rows share their physical batch with other rows once one is left out."""
    Products.seen = every = []
    noised(folder / "all", patch, "numbered", 60, None, per_device_train_batch_size=4)
    Products.seen = fewer = []
    noised(folder / "one", patch, "numbered", 60, without, per_device_train_batch_size=4)
    return sum(len(rows) for rows in set(fewer) - set(every) if min(rows) >= 1)


@pytest.mark.parametrize("without", [0, 33, 59])
def test_leaving_out_a_row_regroups_no_more_than_a_batch(without, tmp_path, monkeypatch):
    assert regrouped(tmp_path, monkeypatch, without) <= 4


def test_a_smaller_batch_size_does_not_hold_for_batches_that_were_cut_before(tmp_path, monkeypatch):
    """The size that cut the batches bounds how many examples one can regroup."""

    class Smaller(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            args.per_device_train_batch_size = 2

    backward, seen = ClippingEngine.backward, []

    def watched(engine, losses, *args, **kwargs):
        seen.append((len(losses), engine.regrouped))
        return backward(engine, losses, *args, **kwargs)

    monkeypatch.setattr(ClippingEngine, "backward", watched)
    given = {"callbacks": [Smaller()], "train_dataset": tiny.dataset(40), "eval_dataset": None}
    options = {"expected_batch_size": 40, "max_steps": 3, "save_strategy": "no"}
    tiny.trainer(tmp_path, given=given, per_device_train_batch_size=16, **options).train()
    assert max(size for size, _ in seen) > 2
    assert {moved for _, moved in seen[-3:]} == {16}


def test_planted_full_batches_regroup_most(tmp_path, monkeypatch):
    full_batches(monkeypatch)
    assert regrouped(tmp_path, monkeypatch, 0) > 50


# -- planted bugs ---


def float32_sums(patch):
    patch.setattr(forms, "zero_sum", lambda shape, device: torch.zeros(tuple(shape), device=device))


def full_batches(patch):
    def full(lengths, keys, size, max_tokens=None, shapes=None):
        return [list(range(i, min(i + size, len(keys)))) for i in range(0, len(keys), size)]

    patch.setattr(loader, "physical_batches", full)
