"""Whose the rows are: the table, the choice of rows, and whole users in physical batches."""

import os
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from scipy import stats

from hf_dp.batches.loader import Drawn, PhysicalBatches
from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import Layout
from hf_dp.batches.units import (
    UnitBatch,
    UnitBatches,
    UnitDraws,
    UnitTable,
    split_off_units,
    unit_values,
)
from hf_dp.errors import DataError
from hf_dp.plans.samplers import PoissonSampler
from hf_dp.plans.units import Users

USERS = Users("who", max_rows=3)


def test_rows_that_draw_do_not_move_the_generators_of_what_comes_next():
    """Such as an adapter's initial weights, which are released as they are."""

    class Drawing(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"owner": index, "kept": torch.rand(index + 1)}

    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert unit_values(Drawing(), "owner") == [0, 1, 2]
    assert torch.equal(torch.rand(1), expected)


def test_equal_values_are_one_unit_in_whatever_order():
    table = UnitTable(["b", "a", "b", "c", "a", "b"], "who")
    assert len(table) == 3 and table.num_rows == 6
    assert [table.rows(unit).tolist() for unit in range(3)] == [[0, 2, 5], [1, 4], [3]]
    assert table.sizes().tolist() == [3, 2, 1]
    assert table.shared(["a", "z", "c"]).tolist() == [0, 2]


def test_text_and_whole_numbers_are_told_apart():
    assert len(UnitTable([1, "1", np.int64(1), 2], "who")) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", None, "b"], r"'who' holds NoneType.*fill it in"),
        (["a", ""], r"'who' holds an empty text"),
        ([1.5, float("nan")], r"holds float.*cast_column"),
        ([True, False], r"holds bool"),
        ([["a"], ["b"]], r"holds list"),
        (["a", "a"], r"names 1 unit\(s\).*two or more"),
    ],
)
def test_bad_columns_are_refused(values, message):
    with pytest.raises(DataError, match=message):
        UnitTable(values, "who")


def test_the_column_is_split_off():
    rows = {"text": ["a", "b", "c"], "who": [7, 7, 8]}
    table, rest = split_off_units(datasets.Dataset.from_dict(rows), "who")
    assert len(table) == 2 and rest.column_names == ["text"]
    listed = [{"text": t, "who": w} for t, w in zip(*rows.values(), strict=True)]
    table, rest = split_off_units(listed, "who")
    assert len(table) == 2
    assert [rest[i] for i in range(len(rest))] == [{"text": t} for t in rows["text"]]
    assert listed[0] == {"text": "a", "who": 7}
    for dataset in (datasets.Dataset.from_dict(rows), listed):
        with pytest.raises(DataError, match="privacy_unit_column 'owner'"):
            split_off_units(dataset, "owner")


def test_a_part_of_a_units_rows_is_chosen_uniformly():
    table = UnitTable(["a"] * 6 + ["b"], "who")
    drawn = Counter(table.chosen(0, 2, os.urandom) for _ in range(3000))
    assert len(drawn) == 15 and all(len(set(rows)) == 2 for rows in drawn)
    assert stats.chisquare(list(drawn.values())).pvalue > 1e-8
    assert table.chosen(1, 2, os.urandom) == (6,)
    assert table.chosen(0, 6, os.urandom) == table.chosen(0, 9, os.urandom) == tuple(range(6))


def test_users_are_drawn_alike_however_many_rows_they_have():
    values = ["a"] * 50 + ["b"] * 5 + ["c", "d"]
    table = UnitTable(values, "who")
    draws = [*UnitDraws(PoissonSampler(len(table), 0.3, 4000), table, USERS, os.urandom)]
    counts = Counter(values[rows[0]] for draw in draws for rows in draw)
    for user in "abcd":
        assert stats.binomtest(counts[user], 4000, 0.3).pvalue > 1e-8
    assert max(len(rows) for draw in draws for rows in draw) == USERS.max_rows


def test_processes_share_users_and_never_split_one():
    table = UnitTable(["a", "b", "a", "c", "b", "d", "e"], "who")
    drawn = []
    for rank in range(2):
        own = [unit for unit in range(len(table)) if unit % 2 == rank]  # as SharedDraws gives them
        (draw,) = UnitDraws([own], table, USERS, os.urandom)
        drawn += draw
    assert sorted(drawn) == sorted(tuple(table.rows(unit).tolist()) for unit in range(len(table)))


def example(number: int, length: int):
    return {"input_ids": torch.full((1, length), number), "place": torch.tensor([number])}


def batches(**options) -> PhysicalBatches:
    layout = Layout()
    for length in (1, 30):
        layout.add(example(1, length))
    padding = Padding(values={"input_ids": 0})
    return PhysicalBatches(padding, layout, **{"size": 4, **options})


def made(sizes: list[int], lengths: list[int]) -> list[list[dict]]:
    numbers, cycle = iter(range(1, 10**6)), iter(lengths * 1000)
    return [[example(next(numbers), next(cycle)) for _ in range(size)] for size in sizes]


def drawn(units: list) -> list[Drawn]:
    """Each with a key of its own, as the loader draws it."""
    keys = np.random.default_rng(0).integers(0, 2**63, len(units)).tolist()
    return [Drawn(unit, key) for unit, key in zip(units, keys, strict=True)]


def read(found: list) -> list[tuple[list[int], int, bool]]:
    """(which rows, rows of each unit, whether it continues) of each physical batch."""
    return [
        (batch.inputs["place"].tolist(), batch.rows, batch.continues)
        if isinstance(batch, UnitBatch)
        else (batch["place"].tolist(), 1, False)
        for batch in found
    ]


@pytest.mark.parametrize("options", [{}, {"max_tokens": 24}, {"one_shape": True}, {"size": 1}])
@pytest.mark.parametrize("seed", range(4))
def test_every_unit_is_whole_in_one_batch_or_alone_in_several(seed, options):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 8, 12).tolist()
    units = made(sizes, generator.integers(1, 12, 50).tolist())
    cut = UnitBatches(batches(**options), Users("who"))
    unit_of = {int(row["place"]): n for n, unit in enumerate(units) for row in unit}
    found, open_rows, ended = read(cut(drawn(units))), [], []
    for rows, per_unit, continues in found:
        assert len(rows) <= options.get("size", 4) and len(rows) % per_unit == 0
        if continues or open_rows:
            assert per_unit == len(rows)
            open_rows += rows
            if not continues:
                ended.append(open_rows)
                open_rows = []
        else:
            ended += [rows[i : i + per_unit] for i in range(0, len(rows), per_unit)]
    assert not open_rows and len(ended) == len(units)
    for rows in ended:  # each unit once, with all of its rows
        (unit,) = {unit_of[row] for row in rows}
        assert sorted(rows) == sorted(int(row["place"]) for row in units[unit])


def test_rows_of_one_user_each_come_as_without_users():
    units = made([1] * 9, [3, 5, 2])
    plain = batches()(drawn([unit[0] for unit in units]))
    of_users = UnitBatches(batches(), Users("who"))(drawn(units))
    assert not any(isinstance(batch, UnitBatch) for batch in of_users)
    for one, other in zip(plain, of_users, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 1 / 6), ("sum", 1.0)])
def test_the_mean_is_over_all_rows_of_a_user_also_in_parts(reduction, scale):
    found = UnitBatches(batches(), Users("who", reduction=reduction))(drawn(made([6], [3])))
    assert [batch.scale for batch in found] == [scale, scale]
    assert [batch.continues for batch in found] == [True, False]
    assert sum(batch.rows for batch in found) == 6


def test_limits_on_tokens_need_tokens():
    layout, rows = Layout(), [[{"place": torch.tensor([number])}] for number in (1, 2)]
    for (row,) in rows:
        layout.add(row)
    with pytest.raises(DataError, match="max_tokens_per_physical_batch.*no `input_ids` to count"):
        UnitBatches(PhysicalBatches(Padding(), layout, 4, 9), Users("who"))(drawn(rows))
    with pytest.raises(DataError, match="max_tokens_per_physical_batch.*no `input_ids` to count"):
        PhysicalBatches(Padding(), layout, 4, 9)(drawn([row for (row,) in rows]))
