"""Users as the privacy unit in whole runs: what one user can move, and what is said of it."""

import hashlib
import hmac
import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from recipe import Recipe
from transformers import DataCollatorWithPadding
from users import SECRET, C, by_user, flat, owners, trainer
from watch import watch

from hf_dp.accounting import LOSS, PoissonSampledGaussian, UserRowsGaussian, epsilon, round_up
from hf_dp.batches.units import UnitDraws, UnitTable
from hf_dp.cli.main import main
from hf_dp.clipping import per_example_gradients
from hf_dp.errors import DataError, InvalidArgumentError, LedgerError, UnsupportedArgumentError
from hf_dp.losses import per_example_loss
from hf_dp.noise import SecretRandomness
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.rounding import ROUNDING_MARGIN
from hf_dp.plans.units import USER, Users
from hf_dp.run import earlier
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.evidence import disagreements, read
from hf_dp.statement.facts import EarlierRun
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.tuners.frost.tuner import FrostConfig

pytestmark = pytest.mark.usefixtures("unchecked")


def clipped(made, units, part: str = "values"):
    """What a step's clipped sums are, or its other sums by part, when these users are drawn."""
    made.create_optimizer()
    loader = made.get_train_dataloader()
    table, secret = made.run.units, os.urandom
    most = made.run.plan.users.max_rows
    drawn = [table.chosen(unit, most, secret) for unit in units]
    batches = loader.collate_fn(loader.dataset.__getitems__(drawn))
    return getattr(made.mechanism.clip(batches), part)


# -- what one user can move --


def moved(folder: Path, rows: int, **options) -> float:
    """``|sum with the user - sum without| / C``, beside five others; all gradients are large, and
    the user's pull in one direction."""
    values = ["many"] * rows + [f"other{number % 5}" for number in range(11)]
    aligned = tiny.dataset(12).select([*[3] * rows, *range(11)]).add_column("who", values)
    options = {"max_rows_per_unit": 100, "unit_reduction": "sum", **options}
    made = trainer(folder, given={"train_dataset": aligned}, **options)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(3)
    return float((flat(clipped(made, range(6))) - flat(clipped(made, range(1, 6)))).norm()) / C


@pytest.mark.parametrize(
    ("rows", "least", "options"),
    [
        *((rows, 0.9, {}) for rows in (1, 5, 50)),
        (12, 0.5, {"max_tokens_per_physical_batch": 16}),
        (12, 0.5, {"per_device_train_batch_size": 1}),
        (12, 0.5, {"clipping_strategy": "two_pass"}),
        (12, 0.5, {"clipping": "per_layer"}),
    ],
    ids=str,
)
def test_one_user_moves_a_step_by_at_most_c(rows, least, options, tmp_path):
    assert least < moved(tmp_path, rows, **options) <= 1 + ROUNDING_MARGIN


def test_planted_users_that_are_not_clipped_as_one_are_seen(not_clipped_as_one, tmp_path):
    assert moved(tmp_path, 50) > 5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_step_equals_the_loop_over_users(reduction, tmp_path):
    made = trainer(tmp_path, unit_reduction=reduction, per_device_train_batch_size=3)
    made.model.double()
    found = clipped(made, range(len(made.run.units)))
    parameters = dict(made.model.named_parameters())
    expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for unit in range(len(made.run.units)):
        rows = made.run.units.rows(unit).tolist()
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for row in rows:
            values = made.train_dataset[row]
            inputs = {k: torch.tensor([values[k]]) for k in ("input_ids", "attention_mask")}
            loss = per_example_loss(
                made.model, {**inputs, "labels": torch.tensor([values["label"]])}
            )
            for name, gradient in next(per_example_gradients(loss, parameters)).items():
                total[name] += gradient / (len(rows) if reduction == "mean" else 1)
        weight = min(1.0, made.run.plan.clips_to / float(flat(total).norm()))
        for name, gradient in total.items():
            expected[name] += weight * gradient
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-8, atol=1e-12)


def test_a_noised_loss_counts_a_user_once(tmp_path):
    loss = {"noised_loss_bound": 0.5, "noised_loss_budget_ratio": 0.2, "accountant": "rdp"}
    options = {"expected_batch_size": 1, "target_delta": 1e-2, **loss}
    made = trainer(tmp_path, ["many"] * 9 + ["other"], **options)
    both = clipped(made, [0, 1], "beside")[LOSS]
    one = clipped(made, [1], "beside")[LOSS]
    assert 0 < float(both - one) <= 0.5 and float(one) <= 0.5


# -- what is planned and said --


RUN = {"max_rows_per_unit": 2, "max_steps": 4, "privacy_unit_name": "patient"}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run whose collator, callback and model look for the column; its noise is watched."""
    folder = tmp_path_factory.mktemp("users")
    pad = DataCollatorWithPadding(tiny.tokenizer())

    def collator(rows):
        assert {name for row in rows for name in row} == {"input_ids", "attention_mask", "label"}
        return pad(rows)

    recorder = tiny.Recorder()
    given = {"data_collator": collator, "callbacks": [recorder]}
    saving = {"save_strategy": "steps", "save_steps": 2}
    made = trainer(folder, given=given, remove_unused_columns=False, **RUN, **saving)
    with pytest.MonkeyPatch.context() as patch:
        stds = watch(patch, SecretRandomness, "gaussian_like", before=lambda _, tensor, std: std)
        made.train()
    made.save_model()
    return SimpleNamespace(
        plan=made.privacy_plan, ledger=made.ledger, statement=made.privacy_statement(),
        epsilon=made.epsilon().value, columns=made.train_dataset.column_names, folder=folder,
        drawn_from=len(made.get_train_dataloader().dataset), logs=str(recorder.logs), stds=set(stds),
    )  # fmt: skip


def test_all_that_counts_examples_counts_users_and_the_column_reaches_nothing(done):
    plan, users = done.plan, len(set(owners()))
    assert (plan.num_examples, plan.privacy_unit, plan.unit) == (users, USER, USER)
    assert plan.sample_rate == 4 / users
    assert done.ledger.events[0] == PoissonSampledGaussian(1.0, 4 / users, 4)
    assert done.drawn_from == users and done.stds == {plan.noise_std}
    assert "who" not in done.columns
    files = [path for path in done.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    for content in [done.logs.encode(), *(path.read_bytes() for path in files)]:
        assert not any(secret.encode() in content for secret in SECRET)


def test_statement_and_card_speak_of_users(done):
    assert done.statement.unit_code == USER
    unit = "zero-out of one patient (all rows with one value in the column 'who')"
    assert unit in str(done.statement)
    card = (done.folder / "README.md").read_text()
    assert "unit: user" in card and "name: patient" in card and "column: who" in card
    assert "each single patient in the training set" in card.lower()
    assert "with more than 2 rows" in card
    assert "rows in the training set (public)" not in card
    assert main(["verify", str(done.folder)]) == 0


def test_the_record_reads_back_and_an_edit_is_found(done, tmp_path):
    record = read(done.folder)
    assert record.plan == done.plan and not disagreements(record)
    assert PrivacyPlan.from_dict(json.loads(json.dumps(record.plan.to_dict()))) == record.plan
    for part, name, value in (
        ("plan", "column", "row_id"),
        ("plan", "max_rows", 0),
        ("statement", "name", "person"),
        ("statement", "reduction", "none"),
    ):
        edited = json.loads((done.folder / "privacy.json").read_text())
        edited[part]["users"][name] = value
        (tmp_path / "privacy.json").write_text(json.dumps(edited))
        assert main(["verify", str(tmp_path)]) != 0
        with pytest.raises(LedgerError):
            read(tmp_path)


@pytest.mark.parametrize("options", [{"max_rows_per_unit": 3}, {"unit_reduction": "sum"}])
def test_a_resume_with_other_users_is_refused(done, options):
    with pytest.raises(LedgerError, match="Cannot resume: `users`"):
        resumed_with(by_user(), done.folder, **options)


def resumed_with(rows, folder: Path, **options):
    return tiny.resumed(trainer(folder, given={"train_dataset": rows}, **{**RUN, **options}), 2)


def test_a_resume_with_rows_grouped_in_another_way_is_refused(done, tmp_path):
    folder = Path(shutil.copytree(done.folder, tmp_path / "run"))
    with pytest.raises(LedgerError, match="groups the rows differently.*without earlier_runs"):
        resumed_with(regrouped(), folder)
    kept = folder / "_users.json"
    assert not any(str(name) in kept.read_text() for name in owners())
    secret = folder / "_users_secret.json"
    for file in (kept, secret):
        assert file.stat().st_mode & 0o777 == 0o600
        content = file.read_text()
        file.unlink()
        with pytest.raises(LedgerError, match="_users.json or _users_secret.json.*is missing"):
            resumed_with(by_user(), folder)
        file.write_text(content)


def test_which_rows_are_one_users_is_kept_with_a_secret_of_the_folder(tmp_path, monkeypatch):
    names = ["b", "a", "b", "c"]
    held = np.array([0, 1, 0, 2], np.int64).tobytes()  # as anybody can number them

    def kept(name):
        (tmp_path / name).mkdir()
        earlier.same_users(tmp_path / name, "id", UnitTable(names, "who"), begun=False)
        files = ("_users.json", "_users_secret.json")
        return [json.loads((tmp_path / name / file).read_text())["value"] for file in files]

    (digest, key), other = kept("one"), kept("two")
    assert digest == hmac.new(key.encode(), held, hashlib.sha256).hexdigest()
    assert len(key) == 64 and key != other[1] and digest != other[0]
    monkeypatch.setattr(earlier.secrets, "token_hex", lambda size: "0" * 2 * size)  # planted
    assert kept("three") == kept("four")


def test_a_resume_with_other_names_of_the_same_users_goes_on(done, tmp_path):
    folder = Path(shutil.copytree(done.folder, tmp_path / "run"))
    renamed = by_user().map(lambda row: {"who": f"{row['who']} again"})
    assert resumed_with(renamed, folder).ledger.steps() == 4 + 2


def test_earlier_runs_by_another_column_are_refused_and_a_look_at_its_name_alone_is_seen(
    done, tmp_path, monkeypatch
):
    earlier = {"earlier_runs": [str(done.folder)]}
    given = {"train_dataset": by_user().rename_column("who", "author")}
    with pytest.raises(InvalidArgumentError, match="'author' grouped the rows.*not one by 'who'"):
        trainer(tmp_path, given=given, privacy_unit_column="author", **earlier)
    with pytest.raises(InvalidArgumentError, match="privacy_unit='example', not 'user'"):
        tiny.trainer(tmp_path, **earlier)  # rows and users do not add up
    monkeypatch.setattr("hf_dp.run.earlier.is_grouping_of", lambda *a: True)
    regrouping = trainer(tmp_path, given={"train_dataset": regrouped()}, **earlier)
    assert regrouping.run.book.earlier_entries


def regrouped():
    """Return the rows of ``by_user()`` after two of them changed their users."""
    who = list(by_user()["who"])
    other = next(row for row, name in enumerate(who) if name != who[0])
    who[0], who[other] = who[other], who[0]
    return by_user().remove_columns("who").add_column("who", who)


@pytest.mark.parametrize("sampling", ["users", "examples"])
def test_a_run_with_rows_grouped_in_another_way_is_not_counted(done, tmp_path, sampling):
    """The hole that was found: one user of the new run was two users of the one it counted, and
    its card said that epsilon for one user covers both."""
    before, folder = {*done.folder.rglob("*")}, tmp_path / "second"
    options = {"unit_sampling": sampling, "max_rows_per_unit": 2, "max_steps": 1}
    options |= {"earlier_runs": [str(done.folder)]}
    message = "grouped the rows as it does now.*without earlier_runs"
    with pytest.raises(InvalidArgumentError, match=message):
        trainer(folder, [i % 12 for i in range(40)], **options)
    assert {*done.folder.rglob("*")} == before and not folder.exists()
    renamed = [f"renamed {name}" for name in owners()]
    both = tiny.trained(trainer(folder, renamed, **options))
    assert both.ledger.steps() == 5 and both.epsilon().value > done.epsilon
    assert both.privacy_statement().unit_code == USER


@pytest.mark.parametrize("place", ["", "privacy.json", "checkpoint-2", "checkpoint-2/privacy.json"])
def test_the_users_of_an_earlier_run_are_found_from_each_of_its_names(done, tmp_path, place):
    path = str(done.folder / place)
    made = trainer(tmp_path, earlier_runs=[path])
    assert sum(entry.event.steps for entry in made.run.book.earlier_entries) == 4
    with pytest.raises(InvalidArgumentError, match="grouped the rows as it does now"):
        trainer(tmp_path, given={"train_dataset": regrouped()}, earlier_runs=[path])


@pytest.mark.parametrize("damage", [None, "", "[]", '{"run_id": "other", "value": "a"}'])
@pytest.mark.parametrize("file", ["_users.json", "_users_secret.json"])
def test_an_earlier_run_of_unknown_users_is_not_counted(done, tmp_path, damage, file):
    folder = Path(shutil.copytree(done.folder, tmp_path / "run"))
    (folder / file).unlink()
    if damage is not None:
        (folder / file).write_text(damage)
    message = "_users.json and _users_secret.json say .*with these files"
    with pytest.raises(InvalidArgumentError, match=message):
        trainer(tmp_path / "second", earlier_runs=[str(folder)])


def test_a_statement_and_a_plan_of_both_are_refused(done):
    other = EarlierRun(run_id="a", unit="example", relation="zero_out")
    rows = replace(done.statement.facts, earlier=(other,))
    with pytest.raises(LedgerError, match="protect what this run does"):
        PrivacyStatement.from_ledger(done.plan, done.ledger, rows)
    for options in ({"privacy_unit": "user"}, {"users": Users("who")}):
        with pytest.raises(InvalidArgumentError, match="`privacy_unit` to be 'user' exactly where"):
            PrivacyPlan(10, 2.0, 3, 1e-3, DpSgdPlan(1.0, 1.0), **options)


def test_frost_selects_by_users(tmp_path, monkeypatch):
    selection = {"selection_noise_multiplier": 2.0, "selection_sample_rate": 0.5}
    config = FrostConfig(unfreeze_ratio=0.3, selection_iterations=2, **selection)
    made = trainer(tmp_path, given={"peft_config": config}, max_steps=1, accountant="rdp")
    drawn = []
    honest = UnitDraws.__iter__

    def watched(self):
        for draw in honest(self):
            drawn.append(draw)
            yield draw

    monkeypatch.setattr(UnitDraws, "__iter__", watched)
    made.train()
    (event,) = [e.event for e in made.ledger.entries if e.purpose == "selection"]
    assert (event.sample_rate, event.steps, len(drawn)) == (0.5, 2, 3)
    assert "the gradients of each user" in made.privacy_statement().mechanism


# -- rows of users, drawn and clipped one by one --


MOST = 2
ROWS = sum(min(count, MOST) for count in Counter(owners()).values())
BY_ROW = {"unit_sampling": "examples", "max_rows_per_unit": MOST}


def by_row(folder, values=None, given=None, **options):
    return trainer(folder, values, given, **{**BY_ROW, **options})


@pytest.fixture(scope="module")
def by_rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_row")
    made = by_row(folder, privacy_unit_name="patient", max_steps=2, noise_multiplier=2.0)
    drawn_from = len(made.get_train_dataloader().dataset)
    made.train()
    made.save_model()
    return SimpleNamespace(
        folder=folder, plan=made.privacy_plan, ledger=made.ledger, units=made.run.units,
        statement=made.privacy_statement(), drawn_from=drawn_from, epochs=made.state.epoch,
    )  # fmt: skip


def test_the_accountant_is_told_how_many_rows_one_user_has(by_rows):
    plan = by_rows.plan
    assert (plan.num_examples, plan.drawn_from, plan.unit) == (len(set(owners())), ROWS, USER)
    assert plan.users.num_rows == by_rows.drawn_from == ROWS
    event = UserRowsGaussian(2.0, 4 / ROWS, 2, MOST)
    assert by_rows.ledger.events == (event,)
    assert by_rows.statement.epsilon == round_up(epsilon(event, plan.delta).value)
    assert by_rows.statement.accountant == "pld"
    assert by_rows.epochs == pytest.approx(2 * 4 / ROWS)


def test_no_user_has_more_rows_than_that_and_the_record_reads_back(by_rows):
    of_row = {row: unit for unit in range(len(by_rows.units)) for row in by_rows.units.rows(unit)}
    kept = Counter(of_row[row] for row in by_rows.units.capped(MOST))
    assert max(kept.values()) == MOST and sum(kept.values()) == ROWS
    assert set(kept) == set(range(len(by_rows.units)))
    record = read(by_rows.folder)
    assert record.plan == by_rows.plan and not disagreements(record)
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


def test_statement_and_card_say_how(by_rows):
    card = (by_rows.folder / "README.md").read_text()
    assert f"at most 2 rows of each patient are drawn from, {ROWS} rows in all" in card
    public = "the number of units (each a patient) and of the rows kept of them, which is stated as"
    assert any(public in each for each in by_rows.statement.not_covered)
    assert "unit: user" in card and "sampling: examples" in card
    assert f"num_rows: {ROWS}" in card
    assert "each single patient in the training set" in card.lower()
    assert main(["verify", str(by_rows.folder)]) == 0


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
    unit = {"privacy_unit": "user", "privacy_unit_column": "who", "max_rows_per_unit": 2}
    recipe = Recipe(tmp_path, capsys, **unit, max_steps=3, target_epsilon=0.5)
    made = [{"text": "a", "label": 0, "who": i % 300} for i in range(900)]
    said = recipe.run("plan", train_file=recipe.lines("rows.json", made), expected_batch_size=30)
    assert "a step of about 60 rows" in said and "do not publish" in said
    found = {way: said.split(f"unit_sampling={way}")[1] for way in ("users", "examples")}
    noise = {way: float(text.split(": ")[1].split()[0]) for way, text in found.items()}
    assert "unit_sampling=users (as configured)" in said and min(noise.values()) > 0
    said = recipe.run("plan", expected_batch_size=60, unit_sampling="examples")
    assert "600 rows, 60 expected in a step" in said
    assert f"unit_sampling=examples (as configured): {noise['examples']:.4g}" in said
    assert f"unit_sampling=users: {noise['users']:.4g}" in said
    recipe.refused("counted user by user", "plan", "--num-examples", "300")


# -- data --


REFUSED = {
    "a row of nobody": ({"values": [None, *owners()[1:]]}, DataError, "'who' holds NoneType.*belongs to nobody"),
    "one user": ({"values": ["one"] * 40}, DataError, r"names 1 unit\(s\)"),
    "no column": ({"given": {"train_dataset": tiny.dataset()}}, DataError, "to have the privacy_unit_column 'who'.*input_ids"),
    # It would be taken off, and a task that keeps both columns would name one twice.
    **{
        name: ({"privacy_unit_column": name}, InvalidArgumentError, "`privacy_unit_column` to be a column other th")
        for name in ("label", "labels", "label_ids")
    },
    "delta of users": ({"target_delta": 0.09}, InvalidArgumentError, "`target_delta` to be < 1/num_examples"),
    "DP-FP": (
        {"privacy_mode": "dp_fp", "dp_fp_variant": "private_encoder"}, UnsupportedArgumentError, "releases a vector for each row",
    ),
    "rows with a largest draw": ({**BY_ROW, "max_logical_batch_size": 8}, InvalidArgumentError, "unit_sampling"),
    "rows with a noised loss": (
        {**BY_ROW, "noised_loss_bound": 1.0, "noised_loss_budget_ratio": 0.1}, InvalidArgumentError, "unit_sampling",
    ),
    "more rows than there are": ({**BY_ROW, "expected_batch_size": 100}, InvalidArgumentError, "expected_batch_size"),
    "rows with FROST": (
        {**BY_ROW, "given": {"peft_config": FrostConfig()}}, InvalidArgumentError, "`peft_config` to be left out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_users_do_not_go_with_is_refused_before_anything_is_written(case, tmp_path):
    options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        trainer(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_rows_are_those_of_the_start_in_any_order(tmp_path):
    made = trainer(tmp_path)
    made.train_dataset = made.train_dataset.select(range(39, -1, -1))
    with pytest.raises(DataError, match="was replaced after it was used"):
        made.train()
    rows = [dict(row) for row in by_user()]
    made = trainer(tmp_path, given={"train_dataset": rows}, remove_unused_columns=False)
    before = [made.train_dataset[index] for index in range(40)]
    rows.reverse()
    assert [made.train_dataset[index] for index in range(40)] == before


def test_delta_is_of_users_and_rows_are_compared_as_text(tmp_path):
    assert trainer(tmp_path, target_delta=None).privacy_plan.delta == 1 / (2 * len(set(owners())))
    own, numbers = tiny.evaluation_set(), [i % 9 for i in range(40)]
    same = own.add_column("who", ["3"] * len(own))
    with pytest.raises(UnsupportedArgumentError, match="of the same values"):
        trainer(tmp_path, numbers, given={"eval_dataset": same})
    trainer(tmp_path, numbers, given={"eval_dataset": own.add_column("who", [["3"]] * len(own))})
    made = trainer(tmp_path)
    with pytest.raises(UnsupportedArgumentError, match="users of several rows"):
        made.mechanism.find_physical_batch(None)


def test_evaluation_on_the_same_users_is_refused(tmp_path):
    own = tiny.evaluation_set()
    same = own.add_column("who", [SECRET[0]] * len(own))
    with pytest.raises(UnsupportedArgumentError, match="of the same values in 'who'.*Split by"):
        trainer(tmp_path, given={"eval_dataset": same})
    released = trainer(tmp_path, given={"eval_dataset": same}, evaluate_on_training_rows=True)
    assert "evaluation_on_training_rows" in released.run.book.weaknesses.released
    others = own.add_column("who", [f"new{i}" for i in range(len(own))])
    compared = trainer(tmp_path, given={"eval_dataset": others})
    assert compared.run.book.weaknesses.evaluation_compared
    with pytest.raises(UnsupportedArgumentError, match="the evaluation set 'b' has rows"):
        compared.evaluate({"a": others, "b": same})
    for unknown in (own, others.to_iterable_dataset()):  # without the column, or only iterated
        compared = trainer(tmp_path, given={"eval_dataset": unknown})
        assert not compared.run.book.weaknesses.evaluation_compared


def test_rows_that_look_like_users_and_few_users_get_a_word(tmp_path, warnings_of, monkeypatch):
    told = warnings_of("run.checks")
    given = {"train_dataset": by_user(name="user_id")}
    for column in ("label_id", "text_user", "username_hint"):
        tiny.trainer(tmp_path, given={"train_dataset": by_user(name=column)})
    tiny.trainer(tmp_path, given={"train_dataset": by_user(list(range(40)), "user_id")})
    tiny.trainer(tmp_path, given=given, privacy_mode="non_private")
    trainer(tmp_path, given=given, privacy_unit_column="user_id")
    assert not any("privacy_unit_column=" in text for text in told)
    tiny.trainer(tmp_path, given=given)
    assert "privacy_unit_column='user_id'" in told[-1]
    told = warnings_of("run.checks")
    trainer(tmp_path)
    assert len(told) == 1 and "names 12 users" in told[0] and "0.042" in told[0]
    monkeypatch.setattr("hf_dp.run.checks.FEW_USERS", 5)
    trainer(tmp_path, ["none"] * 21 + [f"u{number}" for number in range(19)])
    assert len(told) == 2 and "one of them has 21 of 40 rows" in told[1]
