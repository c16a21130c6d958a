"""A bad row that is looked at when it is drawn keeps its place, adds exactly 0, and nobody hears."""

import errno
import logging
import os
import sys
import warnings
from contextlib import nullcontext

import pytest
import tiny
import torch
import users
from data_paths import bert
from silence import Coupled

from hf_dp.batches import loader, views, when_drawn
from hf_dp.batches.loader import Masked, PhysicalBatches
from hf_dp.batches.when_drawn import FirstRows
from hf_dp.errors import DataError, InvalidArgumentError, UnsupportedArgumentError
from hf_dp.plans.samplers import PoissonSampler

pytestmark = pytest.mark.usefixtures("unchecked")

ROWS, SEEN, LONGEST, C = 12, 4, 9, 0.1
BAD = {
    "columns": lambda row: row.pop("attention_mask"),
    "long": lambda row: row.update(input_ids=[4] * 10, attention_mask=[1] * 10),
    "id": lambda row: row.update(input_ids=[4, 19], attention_mask=[1, 1]),
    "label": lambda row: row.update(label=2),
    "raises": lambda row: row.update(input_ids="a text of a patient"),
}
GOOD = {
    "as long as may be": lambda row: row.update(input_ids=[4] * 9, attention_mask=[1] * 9),
    "eight tokens": lambda row: row.update(input_ids=[4] * 8, attention_mask=[1] * 8),
}
PARTS = {
    "noised_loss_bound": 0.7, "noised_loss_budget_ratio": 0.2, "clipping_quantile": 0.5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_rows_are_looked_at_first(monkeypatch):
    monkeypatch.setattr(when_drawn, "FIRST", SEEN)


def collate(rows):
    """Tensors of lists; loud where it fails."""
    (row,) = rows
    if isinstance(row["input_ids"], str):
        sys.stdout.write(f"printed {row['input_ids']}")
        warnings.warn(f"warned {row['input_ids']}", stacklevel=1)
        logging.getLogger("transformers").warning("logged %s", row["input_ids"])
        raise ValueError(row["input_ids"])
    return {("labels" if k == "label" else k): torch.tensor([v]) for k, v in row.items()}


def rows(bad=None):
    """Rows of 3 to 8 tokens, of which some, by place, are bad."""
    made = [dict(row) for row in tiny.dataset(ROWS)]
    for place, kind in (bad or {}).items():
        (BAD | GOOD)[kind](made[place])
    return made


def trainer(folder, bad=None, without=None, who=None, **options):
    kept = [place for place in range(ROWS) if place != without]
    data = rows(bad)
    data = [data[i] | ({"who": who[i]} if who else {}) for i in kept]
    model = bert() if options.get("bf16") else bert().double()
    given = {"model": model, "train_dataset": data, "eval_dataset": None}
    given["data_collator"] = collate
    values = {
        "look_over": "when_drawn", "longest_row": LONGEST, "expected_batch_size": len(set(who or kept)),
        "per_example_max_grad_norm": C, "target_delta": 1e-3, "accountant": "rdp",
        "report_to": "none", "remove_unused_columns": False,
    }  # fmt: skip
    if who:
        values |= {"privacy_unit": "user", "privacy_unit_column": "who"}
    made = tiny.trainer(folder, given=given, **{**values, **options})
    made.run.randomness = Coupled(0)  # neighbors are the same with and without a row
    made.run.randomness.rows = kept
    return made


def clipped(made, places=range(ROWS)):
    """What a draw adds up to: gradients, losses, and the other parts of the event."""
    reads = made.get_train_dataloader()
    found = made.mechanism.clip(reads.collate_fn(reads.dataset.__getitems__(places)))
    return [users.flat(found.values), found.loss_sum, *found.beside.values()]


EACH = dict(zip((SEEN, 5, 7, 9, ROWS - 1), BAD, strict=True))


def with_and_without(folder, size, **options):
    """Each part of a release, of a draw of all rows and of one without some that are bad."""
    made = trainer(folder, EACH, per_device_train_batch_size=size, **PARTS | options)
    everyone = clipped(made)
    for left_out in (*({place} for place in EACH), {*EACH}):
        others = clipped(made, [place for place in range(ROWS) if place not in left_out])
        yield list(zip(everyone, others, strict=True))


def test_views_are_compared_on_rows_that_were_looked_over(tmp_path, monkeypatch):
    """A row that nobody looked at does not decide whether a run begins."""
    made = trainer(tmp_path, EACH, views_per_example=2)
    for module in made.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    made.run.check_engine()
    for name in ("_readings_differ", "_losses_differ"):  # planted: rows from all over the data set
        planted = getattr(views, name)
        monkeypatch.setattr(views, name, lambda e, rows, *a, of=planted: of(e, len(e), *a))
    with pytest.raises((DataError, IndexError)):
        made.run.check_engine()


@pytest.mark.parametrize(("size", "rtol"), [(1, 0), (16, 1e-9)])
def test_a_bad_row_adds_exactly_nothing_to_any_part(size, rtol, tmp_path):
    """Alone in its physical batch to the last bit; beside others but for the rounding of their
    products, in float64 (and of losses, in float32)."""
    for gradients, losses, *beside in with_and_without(tmp_path, size):
        torch.testing.assert_close(*gradients, rtol=rtol, atol=1e-6 * rtol)
        torch.testing.assert_close(*losses, rtol=1e3 * rtol, atol=0)
        assert float(gradients[0].norm()) > C and len(beside) == 2
        for one, other in beside:  # a count would rise by a norm of 0, too
            torch.testing.assert_close(one, other, rtol=rtol, atol=0)


def test_so_it_does_in_bf16(tmp_path):
    for parts in with_and_without(tmp_path, 1, bf16=True):
        assert all(torch.equal(one, other) for one, other in parts)


@pytest.mark.parametrize("mode", [{"bf16": True}, {"bands": 3}], ids=["bf16", "bands"])
def test_so_it_does_in_runs_whatever_is_wrong_with_it(mode, tmp_path):
    """Draws, noise and what else is random are the same in all runs."""
    found = []
    for kind in ("columns", "id", "eight tokens"):
        made = trainer(tmp_path / kind, {7: kind}, **{"expected_batch_size": 4, **mode})
        made.train()
        found.append(users.flat_of(made.model.parameters()))
        assert made.ledger.events == (made.privacy_plan.event(4),)
    assert torch.equal(*found[:2]) and not torch.equal(*found[1:])


def test_planted_bad_row_that_counts_is_seen(tmp_path, monkeypatch):
    """Planted: the synthetic row stands there like one that was drawn."""
    together = lambda self, reads: self.padding.together([r.example for r in reads], self.layout)  # noqa: E731
    monkeypatch.setattr(PhysicalBatches, "padded", together)
    for parts in with_and_without(tmp_path, 1):
        assert all(float((one - other).abs().max()) > 1e-3 for one, other in parts)


WHO = [f"u{place // 3}" for place in range(ROWS)]


@pytest.mark.parametrize(("size", "reduction"), [(1, "mean"), (4, "mean"), (40, "sum")])
def test_of_a_user_the_other_rows_stay_and_the_mean_counts_the_bad_one(size, reduction, tmp_path):
    """A loop over the users, of which one has a bad row and one nothing else."""
    bad = {5: "raises", 9: "long", 10: "id", 11: "label"}
    options = {"per_device_train_batch_size": size, "unit_reduction": reduction, **PARTS}
    made = trainer(tmp_path, bad, who=WHO, **options)
    sums, _, losses, counts = clipped(made, [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)])
    examples, model = made.run.training_data().examples, made.model
    total, means, norms = torch.zeros(()), [], []
    for user in range(3):
        good = [place for place in range(3 * user, 3 * user + 3) if place not in bad]
        each = torch.cat([made.run.losses(examples[place]) for place in good])
        scaled = each.sum() / (3 if reduction == "mean" else 1)
        gradient = users.flat_of(torch.autograd.grad(scaled, list(model.parameters())))
        norms.append(float(gradient.norm()))
        total = total + gradient * min(1.0, made.run.plan.clips_to / norms[-1])
        means.append(float(each.sum()) / 3)
    torch.testing.assert_close(sums, total, rtol=1e-8, atol=1e-12)
    assert float(losses) == pytest.approx(sum(min(mean, 0.7) for mean in means), rel=1e-9)
    assert abs(float(counts)) <= 1.5 and min(norms) > 2 * C and float(counts) < -1.49


def draws(folder, bad=None):
    """The places and the sizes of the physical batches of 30 truncated draws."""
    options = {"max_logical_batch_size": 6, "expected_batch_size": 6, "max_steps": 30}
    made = trainer(folder, bad, per_device_train_batch_size=4, accountant="pld", **options)
    reads = made.run.draws(made.run.plan.sampler())
    found = []
    for places in reads.batch_sampler:
        batches = reads.collate_fn(reads.dataset.__getitems__(places))
        inputs = [each.inputs if isinstance(each, Masked) else each for each in batches]
        found.append((places, [len(each["input_ids"]) for each in inputs]))
    assert all(sum(sizes) == len(places) <= 6 for places, sizes in found)
    return found


def test_draw_truncation_and_physical_batches_are_those_of_a_good_row(tmp_path):
    good = draws(tmp_path / "good", {7: "as long as may be"})
    assert sum(7 in places and len(places) == 6 for places, _ in good) > 3
    for kind in ("columns", "raises"):
        assert draws(tmp_path / kind, {7: kind}) == good


def dropped_before_truncation(patch):
    honest = PoissonSampler.joining
    patch.setattr(PoissonSampler, "joining", lambda *args: (drawn := honest(*args))[drawn != 7])


def left_out_of_its_batch(patch):
    honest = PhysicalBatches.__call__
    patch.setattr(
        PhysicalBatches,
        "__call__",
        lambda self, drawn: honest(self, [one for one in drawn if not one.missing]),
    )


@pytest.mark.parametrize("plant", [dropped_before_truncation, left_out_of_its_batch])
def test_planted_bad_row_without_a_place_is_seen(plant, tmp_path, monkeypatch):
    good = draws(tmp_path / "good", {7: "as long as may be"})
    plant(monkeypatch)
    try:
        found = draws(tmp_path / "bad", {7: "id"})
    except AssertionError:
        return
    assert found != good


def test_whether_a_row_is_bad_depends_on_no_other_row(tmp_path):
    assert not others_that_turn(tmp_path)


def test_planted_length_of_the_longest_row_that_was_seen(tmp_path, monkeypatch):
    """Planted: a row that is longer than the longest of the first ones is bad."""
    monkeypatch.setattr(FirstRows, "_declared", lambda self, name, leaf, padding: leaf)
    assert others_that_turn(tmp_path) == {5, ROWS - 1}


def others_that_turn(folder):
    """Row 2, which is looked at first, row 5 and the last one have eight tokens, and no other has
    as many: those that are bad only if row 2 is there, or only if it is not."""
    bad = {2: "eight tokens", ROWS - 1: "eight tokens"}
    missing = []
    for without in (None, 2):
        made = trainer(folder / str(without), bad, without=without)
        reads, kept = made.get_train_dataloader(), made.run.randomness.rows
        drawn = zip(kept, reads.dataset.__getitems__(range(len(kept))), strict=True)
        missing.append({place for place, one in drawn if one.missing})
    return missing[0] ^ missing[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_with_bad_rows_trains_and_says_nothing(workers, tmp_path, capfd, caplog):
    heard(tmp_path, workers, capfd, caplog, said=False)


class Panic(BaseException):
    """Stands for pyo3's PanicException, which Rust prints and which is not an Exception."""


def test_a_panic_of_a_tokenizer_in_rust_is_a_bad_row_and_not_heard(tmp_path, monkeypatch, capfd):
    honest = collate

    def fails(rows):
        if isinstance(rows[0]["input_ids"], str):
            os.write(2, b"thread panicked, of a patient")
            raise Panic("retry-limit-in-match over")
        return honest(rows)

    monkeypatch.setitem(globals(), "collate", fails)
    reads = trainer(tmp_path, {9: "raises"}).get_train_dataloader()
    drawn = reads.dataset.__getitems__(range(ROWS))
    assert [place for place, one in enumerate(drawn) if one.missing] == [9]
    assert "patient" not in capfd.readouterr().err


def test_what_a_drawn_row_warns_of_is_not_heard(tmp_path, capfd):
    """Also where all rows were looked over before."""
    rows = [{**tiny.dataset()[at], "at": at} for at in range(ROWS)]
    honest = collate

    def warns(given):
        if given[0].pop("at") == 3:
            sys.stdout.write("of a patient")
            warnings.warn("of a patient", stacklevel=2)
        return honest(given)

    options = {"max_steps": 1, "remove_unused_columns": False}
    given = {"train_dataset": rows, "data_collator": warns, "eval_dataset": None}
    made = tiny.trainer(tmp_path, given=given, **options)
    reads = made.get_train_dataloader()
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        reads.dataset.__getitems__(range(ROWS))
    assert not any("patient" in str(each.message) for each in warned)
    assert "patient" not in capfd.readouterr().out


def adds_a_word(words):
    words.add_tokens(["patient"])
    raise ValueError("this row fails beside it")


OUTSIDE = {
    "memory": (MemoryError(), "memory ran out"),
    "a disk": (OSError(errno.EIO, "of a patient"), "Input/output error"),
    "open files": (OSError(errno.EMFILE, "of a patient"), "Too many open files"),
    "a vocabulary": (None, "adds tokens to a tokenizer"),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_other_rows_may_have_a_part_in_ends_the_run(kind, tmp_path, monkeypatch):
    """Else what a row adds would depend on others. Planted: it goes on."""
    (error, said), words, honest = OUTSIDE[kind], tiny.tokenizer(), collate

    def fails(rows):
        if isinstance(rows[0]["input_ids"], str):
            if error is not None:
                raise error
            adds_a_word(words)
        return honest(rows)

    monkeypatch.setitem(globals(), "collate", fails)
    reads = trainer(tmp_path, {9: "raises"}).get_train_dataloader()
    with pytest.raises(DataError, match=said) as raised:
        reads.dataset.__getitems__(range(ROWS))
    assert "patient" not in str(raised.value) and "Row 9" not in str(raised.value)
    monkeypatch.setattr(when_drawn, "not_of_the_row", lambda problem: None)
    assert len(reads.dataset.__getitems__(range(ROWS))) == ROWS
    if kind == "a vocabulary":
        assert "patient" in words.get_vocab()


def test_planted_warning_during_training_is_heard(tmp_path, capfd, caplog, monkeypatch):
    monkeypatch.setattr(loader, "unheard", nullcontext)
    heard(tmp_path, 0, capfd, caplog, said=True)


def heard(folder, workers, capfd, caplog, *, said):
    bad = dict(zip(range(SEEN, ROWS), ["raises", *BAD], strict=False))
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    made = trainer(folder, bad, dataloader_num_workers=workers, **options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made.train()
    made.save_model()
    assert made.ledger.steps() == 2
    texts = [*capfd.readouterr(), *map(str, (each.message for each in warned)), caplog.text]
    assert any("of a patient" in text for text in texts) == said
    written = [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".md")]
    assert not any("patient" in path.read_text() for path in written)
    card = (folder / "README.md").read_text()
    assert "a row that could not be trained on added 0, and nobody was told of it" in card
    with pytest.raises(DataError, match=f"Row {SEEN} of the training set, collated alone, failed"):
        trainer(folder / "all", bad, look_over="all", longest_row=None).train()


@pytest.mark.parametrize(
    ("bad", "options", "said"),
    [
        ({SEEN - 1: "id"}, {}, f"Row {SEEN - 1} .*`input_ids` holds 19"),
        ({SEEN - 1: "raises"}, {}, f"Row {SEEN - 1} of the training set, collated alone, failed"),
        ({1: "long"}, {}, "`input_ids` has 3 to 10 numbers as collated, and longest_row is 9"),
        ({}, {"longest_row": None}, "`input_ids` has 3 to 6 numbers .* longest_row is None. Set it"),
        ({}, {"longest_row": 25}, "Model and loss fail on a synthetic row as large as the largest"),
    ],
)  # fmt: skip
def test_what_the_first_rows_refuse(bad, options, said, tmp_path):
    made = trainer(tmp_path, bad, **options)
    with pytest.raises(DataError, match=said):
        made.train()
    assert made.ledger.steps() == 0


def test_rows_of_one_length_need_no_declared_one_and_others_are_bad(tmp_path):
    alike = {place: "eight tokens" for place in range(ROWS) if place != 7}
    reads = trainer(tmp_path, alike, longest_row=None).get_train_dataloader()
    drawn = reads.dataset.__getitems__(range(ROWS))
    assert [place for place, one in enumerate(drawn) if one.missing] == [7]


def test_columns_that_nobody_knows_the_range_of_are_refused(tmp_path):
    made = trainer(tmp_path)
    made.train_dataset = made.run.train_dataset = [row | {"tags": [3]} for row in rows()]
    message = r"`look_over` to be 'all' for rows with the columns \['tags'\]"
    with pytest.raises(UnsupportedArgumentError, match=message):
        made.run.training_data()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"look_over": "all", "longest_row": 9}, "`longest_row` to be left at None"),
        ({"look_over": "drawn"}, "`look_over` to be one of"),
        ({"privacy_mode": "dp_fp", "dp_fp_variant": "frozen"}, "`look_over` to be left at 'all'"),
    ],
)
def test_what_arguments_refuse(options, said, tmp_path):
    with pytest.raises(InvalidArgumentError, match=said):
        tiny.arguments(tmp_path, **{"look_over": "when_drawn", **options})
