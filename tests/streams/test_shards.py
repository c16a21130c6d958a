"""Each row stands in one step of each epoch, uniformly, whatever kills the task that sorts them."""

import itertools
import json
import os
import shutil
import sys
from hashlib import blake2b

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from scipy import stats

from hf_dp.cli.main import main
from hf_dp.errors import DataError, HfDpError, InvalidArgumentError, OutputError
from hf_dp.streams import shards
from hf_dp.streams.reading import load
from hf_dp.streams.shards import ENDS, MANIFEST, PLAN, ROWS, Plan, participations, shard, steps_of

KEY = bytes(range(32))


# -- whose step is whose --


def test_steps_are_those_of_a_loop_over_rows():
    def alone(place: int) -> int:
        said = (place // 8).to_bytes(8, "little") + bytes(8)
        digest = blake2b(said, key=KEY, person=b"hf_dp: row, step").digest()
        return int.from_bytes(digest[place % 8 * 8 :][:8], "little") % 7

    expected = [alone(place) for place in range(100)]  # none of these words is drawn again
    assert steps_of(KEY, 0, 100, 7).tolist() == expected
    assert steps_of(KEY, 13, 50, 7).tolist() == expected[13:63]


def uniform(values: np.ndarray, cells: int) -> float:
    return float(stats.chisquare(np.bincount(values, minlength=cells)).pvalue)


def test_steps_are_uniform_and_those_of_two_epochs_independent():
    """Of 200,000 rows: one step of 10 with 1.075 times its share would be seen (p < 1e-6)."""
    one, other = (steps_of(key, 0, 200_000, 10) for key in (KEY, KEY[::-1]))
    assert uniform(one, 10) > 1e-6 and uniform(one * 10 + other, 100) > 1e-6
    assert uniform(one[:-1] * 10 + one[1:], 100) > 1e-6  # of neighbors, too
    planted = np.concatenate([one, np.full(1500, 3)])
    assert uniform(planted, 10) < 1e-6


def seen_by_patterns(which: np.ndarray, steps: np.ndarray) -> bool:
    """Whether the steps, of 4, that 200,000 rows take part in have another law than of independent
    trials."""
    patterns = np.bincount(which, 2.0**steps, minlength=200_000).astype(int)
    return bool(stats.chisquare(np.bincount(patterns, minlength=16), 2e5 * LAW).pvalue < 1e-6)


def law(rate: float) -> np.ndarray:
    joined = [bin(pattern).count("1") for pattern in range(16)]
    return np.array([rate**k * (1 - rate) ** (4 - k) for k in joined])


LAW, ALL_OR_NONE = law(0.1), np.eye(16)[15] * 0.1 + np.eye(16)[0] * 0.9


def test_a_row_joins_each_step_independently_and_by_its_place_alone():
    plan = Plan("", 200_000, "poisson", 20_000, 4, (KEY.hex(),), "")
    which, steps = plan.taking_part(0, 0, 200_000)
    assert not seen_by_patterns(which, steps)
    some, at = plan.taking_part(0, 1500, 3000)
    kept = (which >= 1500) & (which < 4500)
    assert (some == which[kept] - 1500).all() and (at == steps[kept]).all()
    first = which[steps == 0]  # planted: in all steps or none; at a rate that is 4 % too high
    for planted, of_it in [
        ((np.repeat(first, 4), np.tile(np.arange(4), len(first))), ALL_OR_NONE),
        (participations(KEY, 0, 200_000, 4, 0.104), law(0.104)),
    ]:
        far = 2e5 * ((of_it - LAW) ** 2 / LAW).sum()
        assert stats.ncx2.sf(stats.chi2.isf(1e-6, 15), 15, far) > 0.99
        assert seen_by_patterns(*planted)


def test_words_beyond_the_largest_multiple_are_drawn_again():
    """Of 3 x 2^61 steps a quarter of the words is; planted: the remainder of 63 bits."""
    assert uniform(steps_of(KEY, 0, 4000, 3 * 2**61) >> 61, 3) > 1e-6
    assert uniform(steps_of(KEY, 0, 4000, 2**63) % (3 * 2**61) >> 61, 3) < 1e-6


# -- the sort --


def rows(count: int = 500) -> list[dict]:
    return [{"input_ids": [i % 7, i], "label": i % 2, "text": "x" * (i % 5)} for i in range(count)]


def parquet(folder, made=None):
    path = folder / "rows.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(rows() if made is None else made), path)
    return path


def sources(folder):
    """The same rows from each kind of source."""
    half = parquet(folder, rows()[:300]).rename(folder / "a.parquet")
    lines = folder / "rows.jsonl"
    lines.write_text("".join(json.dumps(each) + "\n" for each in rows()))
    return {
        "parquet": [half, parquet(folder, rows()[300:])],
        "lines": [lines],
        "data set": datasets.Dataset.from_list(rows()).select(range(500)),
    }


def assert_sorted(folder, made):
    """Each epoch has each row in its own step, or steps, as a loop over rows has it."""
    stream, plan = load(folder), Plan.read(folder)
    for epoch in range(len(plan.keys)):
        which, steps = plan.taking_part(epoch, 0, len(made))
        places = [stream.rows_of(epoch, step) for step in range(plan.steps)]
        found = [
            [stream._rows[epoch][at - len(made) * (1 + epoch)] for at in each] for each in places
        ]
        assert found == [[made[i] for i in which[steps == s]] for s in range(plan.steps)]
    return stream


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [*((kind, "random_allocation") for kind in ("parquet", "lines", "data set")), ("parquet", "poisson")],
)  # fmt: skip
@pytest.mark.parametrize("limit", [2**27, 1500], ids=["at once", "by files in files"])
def test_each_epoch_has_each_row_in_its_steps(kind, sampling, limit, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_LIMIT", limit)
    monkeypatch.setattr(shards, "_TABLE", 500)
    monkeypatch.setattr(shards, "_FILES", 3)
    monkeypatch.setattr(shards, "_AT_ONCE", 7)
    monkeypatch.setattr(shards, "FIRST", 20)
    options = {"expected_batch_size": 50, "num_train_epochs": 2, "sampling": sampling}
    made = shard(sources(tmp_path)[kind], tmp_path / "shards", **options)
    stream, last = assert_sorted(made, rows()), 1 if sampling == "random_allocation" else 0
    assert stream.plan.steps == 20 - 10 * last and [stream[i] for i in range(20)] == rows()[:20]
    with pytest.raises(DataError, match="Row 20 is not among the first 20"):
        stream[20]
    assert not list(tmp_path.glob(".*")) and not (made / "epoch-0" / "sort").exists()
    assert made.stat().st_mode & 0o777 == 0o700
    told = (made / f"epoch-{last}" / MANIFEST).read_text()
    assert "as secret as the rows" in told and not set(json.loads(told)) & {"counts", "ends"}


def test_a_step_depends_on_the_place_of_a_row_and_not_on_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: KEY[:count])
    ends = []
    for name, made in {"rows": rows(), "equal": rows()[:1] * 500}.items():
        folder = shard(datasets.Dataset.from_list(made), tmp_path / name, expected_batch_size=50)
        assert_sorted(folder, made)
        ends.append(np.load(folder / "epoch-0" / ENDS).tolist())
    assert ends[0] == ends[1]


# -- a task that is killed --


class Killed(BaseException):
    pass


def dying(patch, at: int) -> list[str]:
    """Let the task die before its ``at``-th change of a file, of which a list is returned."""
    done: list[str] = []

    def counted(name, honest):
        def change(*given, **named):
            if len(done) == at:
                raise Killed
            done.append(name)
            return honest(*given, **named)

        return change

    for owner, name in [
        (os, "rename"), (shards, "replace_file"), (shards, "_write"), (shards, "sync_tree"),
        (shards, "_put_into_files"), (np, "save"), (shutil, "rmtree"),
    ]:  # fmt: skip
        patch.setattr(owner, name, counted(name, getattr(owner, name)))
    return done


def sorted_in_spite_of_kills(folder, monkeypatch, plant=None) -> int:
    """Kill the task at each change of a file in turn, and run it again. Returns: how often."""
    monkeypatch.setattr(shards, "_LIMIT", 9000)
    monkeypatch.setattr(shards, "_TABLE", 4000)
    data = [parquet(folder)]
    for at in range(100):
        out = folder / f"shards-{at}"
        with monkeypatch.context() as patch:
            done = dying(patch, at)
            try:
                shard(data, out, expected_batch_size=50, num_train_epochs=2)
            except Killed:
                assert not out.exists()
            else:
                assert len(done) == at
                return at
        with monkeypatch.context() as patch:
            if plant is not None:
                plant(patch)
            shard(data, out, expected_batch_size=50, num_train_epochs=2)
        assert_sorted(out, rows())
    raise AssertionError("more changes of files than there can be")


def test_a_task_that_is_killed_anywhere_and_run_again_has_each_row_once(tmp_path, monkeypatch):
    assert sorted_in_spite_of_kills(tmp_path, monkeypatch) > 15


def test_planted_key_that_is_drawn_again_is_seen(tmp_path, monkeypatch):
    """Planted: a task that is run again draws new keys, beside an epoch that was finished."""

    def fresh(folder, plan):
        shards.replace_file(folder / PLAN, [json.dumps(vars(plan)).encode()])
        return plan

    with pytest.raises(DataError, match="of another epoch or folder"):
        sorted_in_spite_of_kills(
            tmp_path, monkeypatch, lambda patch: patch.setattr(shards, "_planned", fresh)
        )


def test_planted_folder_that_has_its_name_from_the_beginning_is_seen(tmp_path, monkeypatch):
    """Planted: it is made where it shall be in the end."""
    honest = shards.Path.with_name
    monkeypatch.setattr(
        shards.Path,
        "with_name",
        lambda self, name: honest(self, name.removeprefix(".").removesuffix(".sharding")),
    )
    with pytest.raises(AssertionError, match="exists"):
        sorted_in_spite_of_kills(tmp_path, monkeypatch)


def test_a_killed_task_goes_on_with_the_same_data_alone(tmp_path, monkeypatch):
    data = [parquet(tmp_path)]
    with monkeypatch.context() as patch:
        dying(patch, 5)
        with pytest.raises(Killed):
            shard(data, tmp_path / "shards", expected_batch_size=50, num_train_epochs=2)
    with pytest.raises(
        DataError, match="a command that was killed, whose steps was 10 instead of 5"
    ):
        shard(data, tmp_path / "shards", expected_batch_size=100, num_train_epochs=2)
    with pytest.raises(DataError, match="for 2 epochs instead of 1"):
        shard(data, tmp_path / "shards", expected_batch_size=50)
    poisson = {"folder": tmp_path / "other", "sampling": "poisson"}
    with monkeypatch.context() as patch:
        dying(patch, 5)
        with pytest.raises(Killed):
            shard(data, expected_batch_size=100.1, **poisson)
    with pytest.raises(DataError, match=r"expected_batch_size was 100\.1 instead of 100\.2"):
        shard(data, expected_batch_size=100.2, **poisson)  # of as many steps
    os.utime(data[0], (1, 1))
    with pytest.raises(DataError, match="whose source was"):
        shard(data, tmp_path / "shards", expected_batch_size=50, num_train_epochs=2)


# -- what is refused --


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return shard([parquet(folder)], folder / "shards", expected_batch_size=50, num_train_epochs=2)


DAMAGES = {
    "no plan": (lambda f: (f / PLAN).unlink(), "has no plan.json. Give the folder that"),
    "no manifest": (lambda f: (f / "epoch-1" / MANIFEST).unlink(), "manifest.json.*it is missing"),
    "of another epoch": (
        lambda f: shutil.copy(f / "epoch-0" / MANIFEST, f / "epoch-1" / MANIFEST),
        "epoch-1.*of another epoch or folder",
    ),
    "swapped": (
        lambda f: [
            (f / a).rename(f / b) for a, b in [("epoch-0", "x"), ("epoch-1", "epoch-0"), ("x", "epoch-1")]
        ],
        "epoch-0.*of another epoch or folder",
    ),
    "changed": (
        lambda f: (f / "epoch-0" / MANIFEST).write_text(
            (f / "epoch-0" / MANIFEST).read_text().replace('"rows": 500', '"rows": 501')
        ),
        "of another epoch or folder, or was changed",
    ),
    "cut short": (lambda f: os.truncate(f / "epoch-0" / ROWS, 999), "rows.arrow.*size is not what"),
    "no epoch": (lambda f: shutil.rmtree(f / "epoch-1"), "epoch-1.*is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_a_folder_that_is_not_as_it_was_written(case, made, tmp_path):
    damage, said = DAMAGES[case]
    shutil.copytree(made, folder := tmp_path / "shards")
    damage(folder)
    with pytest.raises(DataError, match=said):
        load(folder)


def test_what_cannot_be_sharded(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    data = datasets.Dataset.from_list(rows(20))
    more = [parquet(tmp_path), parquet(tmp_path / ".", [{"input_ids": [1], "label": "one"}])]
    (other := tmp_path / "other.parquet").write_bytes(more[1].read_bytes())
    (broken := tmp_path / "broken.parquet").write_text("no Parquet")
    parquet(tmp_path)
    maps = pa.table({"meta": pa.array([[("a", 1)]] * 20, pa.map_(pa.string(), pa.int64()))})
    pa.parquet.write_table(maps, tmp_path / "maps.parquet")
    later = [json.dumps({"text": "x" * 2**17, "score": 1 if i < 11 else 0.5}) for i in range(12)]
    (tmp_path / "later.jsonl").write_text("\n".join(later))
    for given, said in [
        ((data.with_transform(lambda row: row), {}), "has a transform"),
        (([tmp_path / "rows.csv"], {}), "to be a .parquet or .jsonl file"),
        ((data, {"expected_batch_size": 19}), "`expected_batch_size` to be at most 13.3333"),
        ((data, {"num_train_epochs": 0}), "`num_train_epochs`"),
        ((data, {"sampling": "shuffled"}), "`sampling` to be one of"),
        ((data, {"sampling": "poisson", "expected_batch_size": 21}), "expected_batch_size / rows"),
        ((data, {"engine": "spark"}), "`engine` to be one of"),
        ((data, {"engine": "ray"}), "reads files. Write the data set to Parquet"),
        ((more[:1], {"engine": "ray"}), "The engine 'ray' is not installed"),
        (([more[0], other], {}), "other columns than the first"),
        (([tmp_path / "maps.parquet"], {}), "column 'meta' has a type that data sets do not have"),
        (([tmp_path / "later.jsonl"], {}), "parse:0.5.*0.5 after 1., write Parquet, or pass"),
        (([broken], {}), "broken.parquet' cannot be read as Parquet .*Write it again"),
    ]:
        options = {"expected_batch_size": 5, **given[1]}
        with pytest.raises(HfDpError, match=said):
            shard(given[0], tmp_path / "shards", **options)
        begun = tmp_path / ".shards.sharding"  # only by what reads all rows
        assert begun.exists() is ("other columns" in said)
        shutil.rmtree(begun, ignore_errors=True)
    with pytest.raises(InvalidArgumentError, match="`folder` to be new"):
        shard(data, made, expected_batch_size=5)
    with pytest.raises(OutputError, match="The shards could not be written to .*it continues"):
        shard(data, other / "shards", expected_batch_size=5)  # below a file


@pytest.mark.parametrize(
    ("name", "said"),
    [("rows.parqet", "could not be loaded"), ("none.parquet", "to be a .parquet or .jsonl file")],
)
def test_a_typing_error_is_named(name, said, tmp_path, capsys):
    words = ["shard", str(tmp_path / name), "--expected_batch_size", "5", "-o", str(tmp_path / "s")]
    assert main(words) != 0 and said in capsys.readouterr().err


def test_the_command(tmp_path, capsys):
    words = ["shard", str(parquet(tmp_path)), "--expected-batch-size", "50"]
    assert main([*words, "--num_train_epochs", "2", "-o", str(tmp_path / "shards")]) == 0
    said = capsys.readouterr().out
    assert "500 rows, 10 steps an epoch (expected batch 50), 2 epochs, random_allocation" in said
    assert "as secret as the rows" in said
    assert_sorted(tmp_path / "shards", rows())


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["random_allocation", "poisson"])
def test_two_workers_of_ray_sort_as_one_machine_though_one_dies(sampling, tmp_path, monkeypatch):
    """The first task that reads a file ends its process, and is run again."""
    ray = pytest.importorskip("ray")
    files, died = sources(tmp_path)["parquet"], str(tmp_path / "died")
    options = {"expected_batch_size": 50, "sampling": sampling}
    here = load(shard(files, tmp_path / "here", **options))
    monkeypatch.setattr(Plan, "new", lambda *given: here.plan)
    honest = shards._with_steps

    def dies_once(*given):
        tables = honest(*given)
        yield next(tables)
        if not os.path.exists(died):
            open(died, "w").close()
            os._exit(1)
        yield from tables

    monkeypatch.setattr(shards, "_with_steps", dies_once)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        there = load(shard(files, tmp_path / "there", engine="ray", **options))
    finally:
        ray.shutdown()
    assert os.path.exists(died) and (here._ends[0] == there._ends[0]).all()
    for step in itertools.pairwise(here._ends[0]):
        ids = [sorted(each._rows[0][slice(*step)]["input_ids"]) for each in (here, there)]
        assert ids[0] == ids[1]
