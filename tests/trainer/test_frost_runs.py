"""DP-FROST inside a private run: paid for before it is used, made once, kept, loaded by stock PEFT,
nothing un-noised left."""

import copy
import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from watch import watch

from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.errors import BudgetExceededError, ConfigError, HfDpError, InvalidArgumentError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.samplers import PoissonSampler
from hf_dp.plans.selection import SelectionPlan
from hf_dp.run.gate import Release
from hf_dp.run.ledger import RunLedger
from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import disagreements, read
from hf_dp.tuners.frost.magnitude import MagnitudeEngine, sensitivity
from hf_dp.tuners.frost.tuner import FrostConfig
from hf_dp.tuners.public_choice import RandomConfig
from tests import tiny

pytestmark = pytest.mark.usefixtures("unchecked")

SMALL = {"unfreeze_ratio": 0.3, "selection_sample_rate": 0.3, "selection_iterations": 3}
GIVEN = {**SMALL, "selection_noise_multiplier": 2.0}
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


def frost(folder, given=None, config=None, **options):
    config = FrostConfig(**GIVEN) if config is None else config
    options = {"accountant": "rdp", **options}
    return tiny.trainer(folder, given={"peft_config": config, **(given or {})}, **options)


@pytest.mark.slow
def test_selection_and_training_together_meet_the_target(tmp_path):
    trainer = frost(tmp_path, config=FrostConfig(**SMALL), target_epsilon=2.0, accountant="pld")
    trainer.train()
    plan = trainer.privacy_plan
    training = PoissonSampledGaussian(plan.noise_multiplier, 8 / 40, 4)
    selection = PoissonSampledGaussian(plan.selection.noise_multiplier, 0.3, 3)
    assert list(trainer.ledger.events) == [selection, training]
    assert epsilon(training, plan.delta).value == pytest.approx(0.9 * 2.0, rel=1e-3)
    assert trainer.epsilon().value == epsilon([selection, training], plan.delta).value <= 2.0
    assert trainer.epsilon().value > 1.99
    assert [row.purpose for row in trainer.ledger.entries] == ["selection", "training"]
    assert disagreements(read(tmp_path)) == []


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of 2 steps, and ledger and optimizer when each sum of its selection was noised."""
    folder = tmp_path_factory.mktemp("frost")
    trainer = frost(folder, config=FrostConfig(**GIVEN, gap_coefficient=0.0), **SAVING)

    def state(release, sums):
        return release.planned.purpose, read_run(folder).ledger.steps(), trainer.optimizer

    with pytest.MonkeyPatch.context() as patch:
        seen = watch(patch, Release, "sum", before=state)
        trainer.train()
    (made,) = trainer.model.peft_config["default"].made
    return SimpleNamespace(trainer=trainer, folder=folder, seen=seen, made=made)


def test_only_the_selected_and_the_head_move(ran):
    before = tiny.model().state_dict()
    names = json.loads(json.dumps(ran.made))["parameters"]
    moved = tiny.moved(before, copy.deepcopy(ran.trainer.model).merge_and_unload())
    assert moved == {*names, "classifier.weight", "classifier.bias"}
    numbers = sum(before[name].numel() for name in names)
    others = sum(value.numel() for name, value in before.items() if "classifier" not in name)
    assert 0 < numbers <= 0.3 * others


def test_each_release_is_durable_before_it_is_used_charged_and_noised_for_what_remains(ran):
    assert ran.seen[:3] == [("selection", number, None) for number in (1, 2, 3)]
    assert [purpose for purpose, *_ in ran.seen[3:]] == ["training"] * 2
    assert sensitivities_follow(ran.made)
    assert ran.trainer.ledger.steps("selection") == len(ran.made["noisy_magnitudes"]) == 3


def test_a_resumed_run_reads_its_selection_and_no_further_training_makes_one(
    ran, tmp_path, monkeypatch
):
    folder = Path(shutil.copytree(ran.folder, tmp_path / "run"))
    chosen = ran.trainer.model.peft_config["default"].parameters
    monkeypatch.setattr(
        "hf_dp.tuners.frost.tuner.select_partitions", lambda *a: pytest.fail("selected again")
    )
    again = tiny.resumed(
        frost(folder, config=FrostConfig(**GIVEN, gap_coefficient=0.0), **SAVING), 1
    )
    assert again.model.peft_config["default"].parameters == chosen
    assert again.ledger.steps("selection") == 3 and again.ledger.steps("training") == 3
    stored = json.loads((folder / "checkpoint-1" / "selection.json").read_text())
    trained = {n for n, p in again.model.named_parameters() if p.requires_grad}
    assert len([n for n in trained if "ln_tuning" in n]) == len(stored["parameters"])
    again.train()
    assert again.ledger.steps("selection") == 3 and again.ledger.steps("training") == 5


STOCK = """
class Refuse:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "hf_dp": raise ImportError("hf_dp is not here")
sys.meta_path.insert(0, Refuse())"""


@pytest.mark.slow
def test_stock_peft_without_hf_dp_computes_the_same(tmp_path):
    trainer = tiny.trained(frost(tmp_path / "run"))
    trainer.save_model()
    tiny.assert_loads_elsewhere(trainer, STOCK)


def test_no_artifact_holds_noise_drawn_rows_or_magnitudes_without_noise(tmp_path, monkeypatch):
    noise: list[float] = []
    original = Release.sum

    def watched(self, sums):
        before = {name: values.clone() for name, values in sums.items()}
        noisy = original(self, sums)
        if self.planned.purpose == "selection":
            (name,) = noisy
            noise.extend((noisy[name] - before[name]).tolist())
        return noisy

    monkeypatch.setattr(Release, "sum", watched)
    exact = watch(monkeypatch, MagnitudeEngine, "magnitudes", lambda found, *_: found.tolist())
    drawn = watch(monkeypatch, PoissonSampler, "draw")
    # Seeded: with fresh noise one run in a hundred has a secret number beside one of the public
    # ones by chance.
    trainer = tiny.trained(frost(tmp_path, insecure_seed=1, **SAVING))
    trainer.save_model()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    stored = tiny.numbers_in(tmp_path)
    noisy = trainer.model.peft_config["default"].made[0]["noisy_magnitudes"][0]
    assert set(noisy.values()) <= stored  # the search finds what is there
    secret = [*noise, *itertools.chain(*exact)]
    assert len(noise) > 25 and len(secret) > 50 and len(drawn) >= 5
    close = [v for v in secret if v and any(math.isclose(v, s, rel_tol=1e-6) for s in stored)]
    assert close == []
    for path in files:
        if path.suffix == ".json":
            for row in drawn:
                assert len(row) < 3 or str(row) not in path.read_text().replace("\n", "")


# -- the noise, and what happens when a rule is broken on purpose ---


def measured(trainer) -> float:
    """Return the spread of what the run's gate adds to a sum of sensitivity 0.37."""
    run, found = trainer.run, []
    run.book.append = lambda event, purpose: None
    for _ in range(40):
        with run.release(run.plan.selection.release(0.37)) as release:
            found.append(release.sum({"sum": torch.zeros(1000, dtype=torch.float64)})["sum"])
    return float(torch.cat(found).std())


def test_the_noise_is_that_of_the_plan_and_another_is_seen(tmp_path, monkeypatch):
    # Of 40,000 draws, 0.35 % is one standard deviation.
    expected = pytest.approx(GIVEN["selection_noise_multiplier"] * 0.37, rel=0.04)
    assert measured(frost(tmp_path)) == expected
    honest = SelectionPlan.release
    monkeypatch.setattr(
        SelectionPlan, "release", lambda self, sensitivity: honest(self, sensitivity * 2 / 3)
    )
    assert measured(frost(tmp_path)) != expected


def sensitivities_follow(made) -> bool:
    """Each release was noised for the partitions that were looked at in it."""
    sizes = {
        part.name: part.size
        for part in FrostConfig(**GIVEN, task_type="SEQ_CLS").candidate_partitions(tiny.model())
    }
    margin = 1 + 2.0**-12
    expected = [
        0.1 / (sum(sizes[name] for name in row) / len(row)) * margin
        for row in made["noisy_magnitudes"]
    ]
    first, *_, last = made["noisy_magnitudes"]
    assert len(last) < len(first)  # some were taken before the last
    return made["sensitivities"] == pytest.approx(expected, rel=1e-12)


def test_planted_remaining_set_that_is_not_updated_and_no_charge_are_seen(tmp_path, monkeypatch):
    """Clipping over all partitions, noise for all, when only the remaining ones are published."""
    first: list[float] = []
    append = RunLedger.append

    def stale(*given):
        first.append(sensitivity(*given))
        return first[0]

    def forgetful(self, event, purpose):
        return None if purpose == "selection" else append(self, event, purpose)

    monkeypatch.setattr("hf_dp.tuners.frost.tuner.sensitivity", stale)
    monkeypatch.setattr(RunLedger, "append", forgetful)
    config = FrostConfig(**GIVEN, gap_coefficient=0.0)
    trainer = tiny.trained(frost(tmp_path, config=config, max_steps=1))
    (made,) = trainer.model.peft_config["default"].made
    assert not sensitivities_follow(made)
    assert trainer.ledger.steps("selection") != len(made["noisy_magnitudes"])


def begun(folder, iterations, steps):
    """The ledger of a run with a target that begins."""
    plan = PrivacyPlan.create(
        num_examples=40, expected_batch_size=8, clipping_norm=0.1, target_epsilon=2.0, accountant="rdp",
        max_steps=steps, selection=SelectionPlan("mgna", 0.3, iterations, 0.1, 1, None, 0.2),
    )  # fmt: skip
    return RunLedger(folder, plan), plan


def train_on(run, most=100) -> int:
    """Pay for steps until nothing is left."""
    steps = 0
    while not run.exhausted and steps < most:
        run.append(run.plan.event(1), "training")
        steps += 1
    return steps


def test_selections_beyond_the_plan_are_paid_from_what_is_left(tmp_path):
    """A selection made again after a resume counts, and never passes the target."""
    run, plan = begun(tmp_path, 2, 20)
    run.start(20)
    run.append(plan.selection.event(2), "selection")
    run.append(plan.event(10), "training")
    assert not run.exhausted
    run.append(plan.selection.event(1), "selection")  # one more than planned
    assert 0 < train_on(run) < 10
    assert run.ledger.epsilon(plan.delta).value <= 2.0
    with pytest.raises(BudgetExceededError, match="next step of selection would exceed"):
        run.append(plan.selection.event(2), "selection")
    run.stop()


def test_training_leaves_room_for_the_selections_to_come(tmp_path):
    run, plan = begun(tmp_path, 6, 9)
    run.start(9, 6)
    run.append(plan.selection.event(4), "selection")
    run.append(plan.event(5), "training")
    run.start(6, 4)  # killed, and resumed from step 3: one selection is made once more
    train_on(run, 3)
    run.append(plan.selection.event(4), "selection")  # what was reserved can be bought
    assert run.ledger.epsilon(plan.delta).value <= 2.0
    run.stop()


# -- repeated selection ---


def test_selected_again_in_the_middle(tmp_path):
    config = FrostConfig(**GIVEN, num_selections=2)
    before = tiny.model().state_dict()
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    trainer = tiny.trained(frost(tmp_path, config=config, **saving))
    assert [(row.purpose, row.event.steps) for row in trainer.ledger.entries] == [
        ("selection", 3), ("training", 2), ("selection", 3), ("training", 2),
    ]  # fmt: skip
    made = json.loads((tmp_path / "checkpoint-4" / "selection.json").read_text())["made"]
    assert len(made) == 2
    head = {"classifier.weight", "classifier.bias"}
    moved = tiny.moved(before, trainer.model)
    assert moved == {*made[0]["parameters"], *made[1]["parameters"]} | head
    one = json.loads((tmp_path / "checkpoint-1" / "selection.json").read_text())["made"]
    assert one == made[:1]
    again = tiny.resumed(frost(tmp_path, config=config), 3)
    assert again.ledger.steps("selection") == 6 and again.ledger.steps("training") == 5
    again = tiny.resumed(frost(tmp_path, config=config), 1)  # the second selection is made again
    assert again.ledger.steps("selection") == 9
    statement = again.privacy_statement()
    assert "at most" not in statement.mechanism.split("What trains")[1]
    assert "9 noisy releases" in statement.sentence()


# -- bad input ---


def test_refusals(tmp_path):
    def refused(match, error=HfDpError, given=None, **options):
        with pytest.raises(error, match=match):
            frost(tmp_path, given, **options)
        assert not list(tmp_path.iterdir())

    for ratio in (0.0, -0.5, 1.5):
        with pytest.raises(InvalidArgumentError, match="unfreeze_ratio"):
            FrostConfig(unfreeze_ratio=ratio)
    with pytest.raises(ConfigError, match="target_modules"):
        FrostConfig(target_modules=["query"])
    config = FrostConfig(**{**GIVEN, "unfreeze_ratio": 1e-4})
    refused("leave room for the smallest partition", config=config)
    refused("selection_noise_multiplier.*beside `noise_multiplier`", config=FrostConfig(**SMALL))
    refused("selection_noise_multiplier.*to be None with a target", target_epsilon=2.0)
    adapted = get_peft_model(tiny.model(), RandomConfig(task_type="SEQ_CLS"))
    refused("PeftModel already", given={"model": adapted})
    model = tiny.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused("optimizers", given={"model": model, "optimizers": (optimizer, None)})
    config = FrostConfig(**GIVEN, parameters=["bert.pooler.dense.weight"])
    refused("another run made", ConfigError, config=config)
    with pytest.raises(ConfigError, match="DPTrainer.*peft_config=FrostConfig"):
        get_peft_model(tiny.model(), FrostConfig())
