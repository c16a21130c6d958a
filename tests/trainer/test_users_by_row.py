"""Rows of users drawn and clipped one by one: what is drawn from, what is said, what is refused."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from transformers import DataCollatorWithPadding
from users import C, by_user, flat, owners, trainer

from hf_dp.accounting import UserRowsGaussian, epsilon, round_up
from hf_dp.batches.units import UnitTable
from hf_dp.cli.main import main
from hf_dp.errors import DataError, InvalidArgumentError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.rounding import ROUNDING_MARGIN
from hf_dp.plans.units import USER, Users
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.evidence import disagreements, read

pytestmark = pytest.mark.usefixtures("unchecked")

MOST = 2
ROWS = sum(min(count, MOST) for count in Counter(owners()).values())


def by_row(folder, values=None, given=None, **options):
    options = {"unit_sampling": "examples", "max_rows_per_unit": MOST, **options}
    return trainer(folder, values, given, **options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_row")
    made = by_row(folder, privacy_unit_name="patient", max_steps=2, noise_multiplier=2.0)
    drawn_from = len(made.get_train_dataloader().dataset)
    made.train()
    made.save_model()
    return SimpleNamespace(
        folder=folder, plan=made.privacy_plan, ledger=made.ledger, units=made.run.units,
        statement=made.privacy_statement(), drawn_from=drawn_from, epochs=made.state.epoch,
    )  # fmt: skip


def test_the_accountant_is_told_how_many_rows_one_user_has(done):
    plan = done.plan
    assert (plan.num_examples, plan.drawn_from, plan.unit) == (len(set(owners())), ROWS, USER)
    assert plan.users.num_rows == done.drawn_from == ROWS
    event = UserRowsGaussian(2.0, 4 / ROWS, 2, MOST)
    assert done.ledger.events == (event,)
    assert done.statement.epsilon == round_up(epsilon(event, plan.delta).value)
    assert done.statement.accountant == "pld"
    assert done.epochs == pytest.approx(2 * 4 / ROWS)


def test_no_user_has_more_rows_than_that_and_the_record_reads_back(done):
    of_row = {row: unit for unit in range(len(done.units)) for row in done.units.rows(unit)}
    kept = Counter(of_row[row] for row in done.units.capped(MOST))
    assert max(kept.values()) == MOST and sum(kept.values()) == ROWS
    assert set(kept) == set(range(len(done.units)))
    record = read(done.folder)
    assert record.plan == done.plan and not disagreements(record)
    assert PrivacyPlan.from_dict(json.loads(json.dumps(record.plan.to_dict()))) == record.plan


def test_one_user_moves_a_step_by_at_most_c_a_row(tmp_path):
    values = ["many"] * 9 + [f"other{number}" for number in range(5)]
    aligned = tiny.dataset(14).select([*[3] * 9, *range(5)]).add_column("who", values)
    made = by_row(tmp_path, given={"train_dataset": aligned}, max_rows_per_unit=3)
    made.create_optimizer()
    loader = made.get_train_dataloader()
    assert len(made.train_dataset) == 8  # the first three are of one user

    def total(rows):
        batches = loader.collate_fn(loader.dataset.__getitems__(rows))
        return flat(made.mechanism.clip(batches).values)

    for rows in ([0], [0, 1], [0, 1, 2]):
        moved = float((total([*rows, 5, 6]) - total([5, 6])).norm()) / C
        assert 0.9 * len(rows) < moved <= len(rows) * (1 + ROUNDING_MARGIN)


def test_statement_and_card_say_how(done):
    card = (done.folder / "README.md").read_text()
    assert f"at most 2 rows of each patient are drawn from, {ROWS} rows in all" in card
    public = "the number of units (each a patient) and of the rows kept of them, which is stated as"
    assert any(public in each for each in done.statement.not_covered)
    assert "unit: user" in card and "sampling: examples" in card
    assert f"num_rows: {ROWS}" in card
    assert "each single patient in the training set" in card.lower()
    assert main(["verify", str(done.folder)]) == 0


def test_which_rows_are_drawn_from_depends_on_their_user_alone():
    """So all processes, and a resumed run, draw from the same ones."""
    table = UnitTable(["a"] * 9 + ["b"] * 30, "who")
    of_b = table.capped(4)[4:] - 9
    alone = UnitTable(["b"] * 30 + ["a"] * 2, "who").capped(4)[:4]
    np.testing.assert_array_equal(of_b, alone)
    assert len(set(np.diff(of_b))) > 1  # not just the first ones


def test_a_loop_of_ones_own_draws_from_as_many_rows_as_planned(tmp_path):
    users = Users("who", max_rows=MOST, sampling="examples", num_rows=ROWS)
    plan = PrivacyPlan.create(
        num_examples=len(set(owners())), expected_batch_size=4, max_steps=2, noise_multiplier=1.0, clipping_norm=C,
        privacy_unit="user", users=users,
    )  # fmt: skip
    rows = {"train_dataset": by_user(), "data_collator": DataCollatorWithPadding(tiny.tokenizer())}

    def run(users):
        return PrivateRun(tiny.model(), replace(plan, users=users), tmp_path, **rows)

    assert len(run(users).train_dataset) == ROWS
    with pytest.raises(DataError, match=f"There are {ROWS} rows to draw from"):
        run(replace(users, num_rows=ROWS - 1))
    for wrong in ({"num_rows": None}, {"num_rows": 3}, {"sampling": "users"}):
        with pytest.raises(InvalidArgumentError, match="num_rows"):
            replace(plan, users=replace(users, **wrong))


def test_the_plan_command_compares_both_ways(tmp_path, capsys):
    rows, recipe = tmp_path / "rows.json", tmp_path / "recipe.yaml"
    made = [json.dumps({"text": "a", "label": 0, "who": i % 300}) for i in range(900)]
    rows.write_text("\n".join(made))

    def planned(*words: str) -> str:
        unit = f"train_file: {rows}\nprivacy_unit: user\nprivacy_unit_column: who\n"
        recipe.write_text(f"{unit}max_rows_per_unit: 2\nmax_steps: 3\ntarget_epsilon: 0.5\n")
        assert main(["plan", "--config", str(recipe), *words]) == 0
        return capsys.readouterr().out

    said = planned("--expected_batch_size", "30")
    assert "a step of about 60 rows" in said and "do not publish" in said
    found = {way: said.split(f"unit_sampling={way}")[1] for way in ("users", "examples")}
    noise = {way: float(text.split(": ")[1].split()[0]) for way, text in found.items()}
    assert "unit_sampling=users (as configured)" in said and min(noise.values()) > 0
    by_row = ("--expected_batch_size", "60", "--unit_sampling", "examples")
    said = planned(*by_row)
    assert "600 rows, 60 expected in a step" in said
    assert f"unit_sampling=examples (as configured): {noise['examples']:.4g}" in said
    assert f"unit_sampling=users: {noise['users']:.4g}" in said
    words = ["plan", "--config", str(recipe), *by_row, "--num-examples", "300"]
    assert main(words) == 2
    assert "counted user by user" in capsys.readouterr().err
