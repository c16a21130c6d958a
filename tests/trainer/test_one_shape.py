"""All physical batches of one shape, or of a few, add up to what batches of any shape do."""

import pytest
import tiny
import torch
import users
from data_paths import bert
from silence import Coupled

from hf_dp.batches.loader import BatchOptions, Masked, PhysicalBatches
from hf_dp.errors import DataError, HfDpError, UnsupportedArgumentError

pytestmark = pytest.mark.usefixtures("unchecked")

ROWS, SIZE, LONGEST = 12, 4, 9
ONE = {"shapes": "one", "longest_row": LONGEST}
PARTS = {"noised_loss_bound": 0.7, "noised_loss_budget_ratio": 0.2, "clipping_quantile": 0.5}


def trainer(folder, **options):
    given = {"model": bert().double(), "train_dataset": tiny.dataset(ROWS), "eval_dataset": None}
    values = {"expected_batch_size": ROWS, "per_device_train_batch_size": SIZE, "target_delta": 1e-3, "accountant": "rdp"}  # fmt: skip
    made = tiny.trainer(folder, given=given, **{**values, **PARTS, **options})
    made.run.randomness = Coupled(0)
    made.run.randomness.rows = [*range(ROWS)]
    return made


def drawn(made, count=ROWS):
    reads = made.get_train_dataloader()
    return reads.collate_fn(reads.dataset.__getitems__(range(count)))


def parts(made, batches):
    found = made.mechanism.clip(batches)
    return [users.flat(found.values), found.loss_sum, *found.beside.values()]


@pytest.mark.parametrize(("shapes", "lengths"), [("one", {LONGEST}), ("few", {3, 5, LONGEST})])
def test_every_batch_has_a_known_shape_and_the_sums_are_those_of_any(shapes, lengths, tmp_path):
    """In float64 to the rounding of another order; the loss is summed in float32."""
    known = {**ONE, "shapes": shapes}
    one, any_shapes = (trainer(tmp_path / name, **o) for name, o in (("one", known), ("any", {})))
    all_found = set()
    assert one.privacy_plan == any_shapes.privacy_plan
    for count in (1, 5, ROWS):
        batches = drawn(one, count)
        found = {tuple(e.shape) for b in batches for e in getattr(b, "inputs", b).values()}
        assert found <= {(SIZE,), *[(SIZE, length) for length in lengths]}
        all_found |= found
        for batch in batches:  # each row in its own shape, whatever its neighbors
            inputs, counts = batch if isinstance(batch, Masked) else (batch, slice(None))
            for own in inputs["attention_mask"].sum(1)[counts].tolist():
                assert inputs["input_ids"].shape[1] == min(n for n in lengths if n >= own)
        filled = sum(int((~b.counts).sum()) for b in batches if isinstance(b, Masked))
        assert SIZE * len(batches) == count + filled
        expected = parts(any_shapes, drawn(any_shapes, count))
        for each, other, rtol in zip(
            parts(one, batches), expected, (1e-9, 1e-6, 0, 0), strict=True
        ):
            torch.testing.assert_close(each, other, rtol=rtol, atol=1e-12)
    assert len(all_found) == 1 + len(lengths)
    reads = one.get_train_dataloader()
    longer = reads.dataset.__getitems__([0])[0]
    longer.unit.update({n: torch.cat([v] * 4, 1) for n, v in longer.unit.items() if v.dim() > 1})
    (nothing,) = reads.collate_fn([longer])  # of a collator that makes rows longer
    assert not nothing.counts.any() and nothing.inputs["input_ids"].shape == (SIZE, LONGEST)
    assert drawn(one, 0) == []  # how many batches there are is not constant


@pytest.mark.parametrize("shapes", ["one", "few"])
def test_planted_filler_that_counts_is_seen(shapes, tmp_path, monkeypatch):
    """Planted: what fills a batch up stands there like a row."""
    expected = parts(trainer(tmp_path / "any"), drawn(trainer(tmp_path / "again"), 5))
    stock = PhysicalBatches.padded

    def counting(self, reads):
        batch = stock(self, reads)
        return batch.inputs if isinstance(batch, Masked) else batch

    monkeypatch.setattr(PhysicalBatches, "padded", counting)
    planted = trainer(tmp_path / "one", **{**ONE, "shapes": shapes})
    for each, other in zip(parts(planted, drawn(planted, 5)), expected, strict=True):
        assert float((each - other).abs().max()) > 1e-3


@pytest.mark.parametrize(("options", "says", "error"), [
    ({"longest_row": None}, "all rows, `input_ids` has 3 to 8 .*Set it to the most", DataError),
    ({"longest_row": 7}, "all rows, `input_ids` has 3 to 8", DataError),
    ({"longest_row": 30}, "position|synthetic row", HfDpError),
    ({"max_tokens_per_physical_batch": 64}, "shapes", UnsupportedArgumentError),
])  # fmt: skip
def test_what_has_no_one_shape_is_refused_by_name(options, says, error, tmp_path):
    with pytest.raises(error, match=says):
        drawn(trainer(tmp_path, **{**ONE, **options}))
    assert BatchOptions().shapes == "any"
