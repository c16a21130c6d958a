"""End-to-end runs on a tiny task: equal work on both sides, batches as the mode says, ratios from
the recorded seconds."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile

import pytest
import tiny
import torch

from hf_dp.batches import loader
from hf_dp.batches.physical import physical_batches
from hf_dp.benchmarks import training
from hf_dp.benchmarks.training import (
    DEFAULT_MODES,
    MODES,
    RATIOS,
    check_modes,
    compare,
    measure_training,
    train_once,
    training_table,
)
from hf_dp.benchmarks.training_task import (
    Task,
    TrainingWork,
    in_drawn_order,
    load_task,
    one_pass,
    unsorted_batches,
)
from hf_dp.errors import DataError, HfDpError, InvalidArgumentError
from hf_dp.plans.sampling import PoissonSampler

ROWS, LOGICAL, PHYSICAL, STEPS = 40, 16, 4, 3
WORK = TrainingWork(ROWS, LOGICAL, PHYSICAL, rounds=2, threads=1, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Each run collects garbage, which on what the imports left takes longer than a tiny run."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def task():
    return Task(
        tiny.dataset(ROWS),
        tiny.model(dropout=0.1),
        tiny.tokenizer(),
        {"model": "tiny", "train_file": "tiny.csv", "max_length": 24},
    )


@pytest.fixture(scope="module")
def measured(task):
    """The report of all modes, and the number of examples of every draw, warm-ups included."""
    drawn = []
    draw = PoissonSampler.draw

    def record(sampler):
        indices = draw(sampler)
        drawn.append(len(indices))
        return indices

    weights = {name: value.clone() for name, value in task.model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoissonSampler, "draw", record)
        report = measure_training(WORK, task, list(MODES))
    assert all(torch.equal(weights[name], value) for name, value in task.model.state_dict().items())
    return report, drawn


def test_every_mode_processes_what_it_says(measured):
    report, drawn = measured
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    runs = report["runs"]
    assert {run["steps"] for each in runs.values() for run in each} == {STEPS}
    for mode in ("stock", "stock_by_length"):
        assert [run["examples"] for run in runs[mode]] == [STEPS * LOGICAL] * 2
    private = [mode for mode in MODES if mode.startswith("ours")]
    order = [
        *private,
        *private,
    ]  # round 2 starts with stock_by_length, so these keep their order in it
    timed = drawn[len(private) :]  # one draw of each was a warm-up
    assert len(timed) == len(order) * STEPS
    expected = [sum(timed[i * STEPS : (i + 1) * STEPS]) for i in range(len(order))]
    seen = [runs[mode][i // len(private)]["examples"] for i, mode in enumerate(order)]
    assert seen == expected


def test_padding_is_that_of_the_mode(measured):
    padding = {mode: row["padding_share"] for mode, row in measured[0]["modes"].items()}
    assert padding["ours"] < padding["ours_unsorted"] / 2
    assert padding["stock_by_length"] < padding["stock"] / 2
    assert 0 < padding["ours"]


def test_one_pass_of_stock_sees_every_row_equally_often(task, measured):
    # 48 examples of 40 rows: the tokens of all of them and again of the first 8
    lengths = task.lengths
    for mode in ("stock", "stock_by_length"):
        assert {run["tokens"] for run in measured[0]["runs"][mode]} == {
            sum(lengths) + sum(lengths[:8])
        }
    assert one_pass(task.rows, 10)["input_ids"] == task.rows["input_ids"][:10]


def test_the_drawn_order_is_local_to_the_benchmark():
    lengths = [3, 9, 1, 7, 5]
    with unsorted_batches():
        assert loader.physical_batches(lengths, range(5), 2) == [[0, 1], [2, 3], [4]]
    assert loader.physical_batches is physical_batches
    assert physical_batches(lengths, range(5), 2) == [[1], [3, 4], [0, 2]]
    assert in_drawn_order([], [], 2) == []
    with pytest.raises(RuntimeError), unsorted_batches():
        raise RuntimeError
    assert loader.physical_batches is physical_batches


def test_sizing_by_tokens_uses_the_ninetieth_percentile(task, monkeypatch):
    limits = []

    def record(lengths, keys, size, max_tokens=None, shapes=None):
        limits.append((size, max_tokens))
        return physical_batches(lengths, keys, size, max_tokens, shapes)

    monkeypatch.setattr(loader, "physical_batches", record)
    train_once(WORK.warm_up(), task, "ours_by_tokens")
    ninth = sorted(task.lengths)[35]  # 36 of 40 rows are at most as long
    assert set(limits) == {(2 * PHYSICAL, PHYSICAL * ninth)}


def test_ratios_come_from_the_recorded_seconds(measured):
    report, _ = measured
    seconds = {
        mode: [run["seconds"] / run["examples"] for run in each]
        for mode, each in report["runs"].items()
    }
    assert set(report["ratios"]) == {f"{mode}/{baseline}" for mode, baseline in RATIOS}
    for mode, baseline in RATIOS:
        found = report["ratios"][f"{mode}/{baseline}"]
        by_hand = [b / a for a, b in zip(seconds[mode], seconds[baseline], strict=True)]
        assert found["median"] == pytest.approx(statistics.mean(by_hand))
        assert (found["lowest"], found["highest"]) == pytest.approx((min(by_hand), max(by_hand)))
    row, runs = report["modes"]["ours"], report["runs"]["ours"]
    assert row["seconds_per_1000_examples"] == pytest.approx(
        1000 * statistics.mean(seconds["ours"])
    )
    assert row["examples_per_second"] == pytest.approx(1 / statistics.mean(seconds["ours"]))
    assert 0 < row["preparation_seconds"] < max(run["seconds"] for run in runs)
    assert all(0 < run["finishing"] < run["seconds"] - run["preparation"] for run in runs)


def test_a_ratio_by_hand():
    rounds = [{"ours": 2.0, "stock": 3.0}, {"ours": 4.0, "stock": 2.0}, {"ours": 1.0, "stock": 1.0}]
    assert compare(rounds, "ours", "stock") == {"median": 1.0, "lowest": 0.5, "highest": 1.5}
    assert compare(rounds[:1], "ours", "stock") == {"median": 1.5, "lowest": 1.5, "highest": 1.5}


def test_the_table_shows_modes_and_ratios(measured):
    report, _ = measured
    text = training_table(report)
    assert "3 optimizer steps of 16 examples in physical batches of 4" in text
    lines = text.splitlines()
    for mode in MODES:
        line = next(line for line in lines if line.startswith(mode + " "))
        assert f"{report['modes'][mode]['seconds_per_1000_examples']:.2f}" in line
    ratio = next(line for line in lines if line.startswith("ours/ours_unsorted"))
    assert f"{report['ratios']['ours/ours_unsorted']['median']:.3f}" in ratio


def test_nothing_is_left_behind(task, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    train_once(WORK.warm_up(), task, "ours")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_ratios_without_their_baseline_are_left_out(task, monkeypatch):
    ran = []

    def run(work, task, mode, seed=0):
        ran.append((mode, work.optimizer_steps, seed))
        return training.Run(2.0, 1.5, 0.5, 0.1, STEPS, 10, 30, 40)

    monkeypatch.setattr(training, "train_once", run)
    report = measure_training(WORK, task, ["ours", "stock", "ours"])
    assert list(report["ratios"]) == ["ours/stock"]
    assert ran[:2] == [("ours", 1, 0), ("stock", 1, 0)]
    assert ran[2:] == [
        ("ours", STEPS, 0),
        ("stock", STEPS, 0),
        ("stock", STEPS, 1),
        ("ours", STEPS, 1),
    ]
    assert report["modes"]["ours"]["padding_share"] == 0.25
    assert report["modes"]["ours"]["preparation_share"] == 0.25
    assert report["modes"]["ours"]["cpu_seconds_per_1000_examples"] == 150


def test_a_run_of_other_work_is_no_measurement(task, monkeypatch):
    monkeypatch.setattr(training, "one_pass", lambda rows, count: rows)
    with pytest.raises(
        HfDpError, match="stock made 3 optimizer steps with 4. examples; 3 steps with 48"
    ):
        train_once(WORK, task, "stock")


def test_a_run_of_empty_draws_is_no_measurement():
    with pytest.raises(HfDpError, match="empty"):
        _ = training.Run(2.0, 1.5, 0.5, 0.1, STEPS, 0, 0, 0).seconds_per_example


def test_by_default_one_pass_and_four_modes():
    assert TrainingWork().optimizer_steps == 10
    assert TrainingWork(steps=3).optimizer_steps == 3
    assert check_modes(DEFAULT_MODES) == list(MODES)[:4]
    assert (WORK.warm_up().logical_batch_size, WORK.warm_up().optimizer_steps) == (8, 1)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("rows", {"rows": 1}),
        ("steps", {"steps": 0}),
        ("rounds", {"rounds": 0}),
        ("physical_batch_size", {"physical_batch_size": 0}),
        ("logical_batch_size", {"logical_batch_size": 0}),
        ("logical_batch_size", {"logical_batch_size": 40, "physical_batch_size": 32, "rows": 40}),
        ("logical_batch_size", {"logical_batch_size": 64, "rows": 40}),
        ("threads", {"threads": 0}),
        ("device", {"device": "tpu"}),
    ],
)
def test_wrong_work_is_refused(field, values):
    with pytest.raises(InvalidArgumentError, match=f"`{field}`"):
        TrainingWork(**values)


def test_rows_of_another_task_are_refused(task):
    with pytest.raises(InvalidArgumentError, match="`rows`.*40"):
        measure_training(TrainingWork(48, 16, 4), task)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A CSV of 40 rows, rising in length, and a model folder."""
    folder = tmp_path_factory.mktemp("task")
    rows = sorted(tiny.rows(ROWS), key=lambda row: len(row["sentence"].split()))
    lines = ["sentence,label", *(f"{row['sentence']},{row['label']}" for row in rows)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    tiny.model().save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    return folder


def test_the_first_rows_of_a_file_in_another_order(files):
    names = ["bad", "good"]
    task = load_task(str(files / "rows.csv"), str(files / "model"), 30, 6, class_names=names)
    assert len(task.rows) == 30
    lengths = task.lengths
    everything = sorted(min(6, 2 + len(row["sentence"].split())) for row in tiny.rows(ROWS))
    assert sorted(lengths) == everything[:30] and lengths != sorted(lengths)
    assert task.names == {"model": "model", "train_file": "rows.csv", "max_length": 6}
    assert task.dropout == 0.0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": 41}, InvalidArgumentError, "`rows` to be at most the 40 rows of 'rows.csv'"),
        ({"max_length": 2}, InvalidArgumentError, "`max_length`"),
        ({"max_length": 25}, InvalidArgumentError, "`max_length` to be at most 24"),
        ({"model": "package:no-such-package"}, DataError, "not installed"),
        ({"model": "no/such/folder"}, DataError, "could not be loaded"),
        ({"class_names": []}, DataError, "class names"),
        ({"text_columns": ["text"]}, DataError, "text_columns"),
    ],
)
def test_a_wrong_task_is_refused(files, changes, error, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = {
        "model": str(files / "model"),
        "rows": 40,
        "max_length": 24,
        "class_names": ["bad", "good"],
        **changes,
    }
    with pytest.raises(error, match=message):
        load_task(str(files / "rows.csv"), **options)
