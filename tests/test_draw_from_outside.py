"""A draw added from outside the library: who takes part is decided by two coins each.

Its event is one that dp-accounting knows. Plan, sampler, ledger, statement, card and refusals know it
without a line of theirs.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import tiny
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent

from hf_dp.accounting import SUM, Event, PoissonSampledGaussian, epsilon, register_event
from hf_dp.accounting.knows import OUTSIDE
from hf_dp.errors import ConfigError, UnsupportedArgumentError, UnsupportedEventError
from hf_dp.plans import PrivacyPlan
from hf_dp.plans.draws import Draw, register_draw
from hf_dp.plans.samplers import PoissonSampler
from hf_dp.statement.evidence import disagreements, read


@register_event
@dataclass(frozen=True)
class TwoCoinsGaussian(Event):
    """A noisy sum over those for whom both coins fell right."""

    noise_multiplier: float
    coin: float
    steps: int

    @property
    def noise_multipliers(self):
        return {SUM: self.noise_multiplier}

    @property
    def sample_rate(self):
        return self.coin**2

    def dp_event(self):
        return PoissonSampledDpEvent(self.coin**2, GaussianDpEvent(self.noise_multiplier))


@dataclass(frozen=True)
class TwoCoinsSampler(PoissonSampler):
    """Keeps who is in both of two independent draws."""

    def draw(self):
        return sorted({*super().draw()} & {*super().draw()})

    def event(self, noise_multiplier, steps=1):
        return TwoCoinsGaussian(noise_multiplier, self.sample_rate, steps)


@register_draw
@dataclass(frozen=True)
class TwoCoins(Draw):
    """Each example throws two coins in each step."""

    name = sampling = "two_coins"
    kind = OUTSIDE
    drawn = "two coins"

    def sampler(self, schedule, steps):
        coin = math.sqrt(self.sample_rate(schedule))
        return TwoCoinsSampler(schedule.drawn_from, coin, steps)

    def words(self, schedule):
        return f"each {schedule.one} throws two coins in each step"


def test_arguments_ledger_statement_and_card_know_it(tmp_path):
    trainer = tiny.trainer(tmp_path, sampling="two_coins", accountant="pld", max_steps=3)
    trainer.train()
    trainer.save_model()
    record = read(tmp_path)
    rate = trainer.privacy_plan.sample_rate
    assert record.ledger.events == (TwoCoinsGaussian(1.0, math.sqrt(rate), 3),)
    assert record.plan == trainer.privacy_plan and disagreements(record) == []
    statement = trainer.privacy_statement()
    assert statement.plan.words.sampling_code == "two_coins" and statement.status == "proven"
    assert "3 steps of DP-SGD with two coins" in statement.sentence()
    card = (tmp_path / "README.md").read_text().replace("\\_", "_")
    assert f"draw 'two_coins', which is not hf_dp's but of the module '{__name__}'" in card


def test_its_epsilon_is_that_of_one_coin_with_both_chances():
    plan = PrivacyPlan.create(
        num_examples=1000, expected_batch_size=50, clipping_norm=0.1, max_steps=20,
        noise_multiplier=0.7, sampling="two_coins",
    )  # fmt: skip
    found = epsilon(plan.events(), plan.delta).value
    one_coin = epsilon(PoissonSampledGaussian(plan.noise_multiplier, 0.05, 20), plan.delta).value
    assert one_coin == pytest.approx(found, abs=0.005)
    planted = PoissonSampledGaussian(plan.noise_multiplier, math.sqrt(0.05), 20)
    assert epsilon(planted, plan.delta).value > 1.5 * found
    drawn = [len(draw) for draw in plan.sampler(400)]
    assert np.mean(drawn) == pytest.approx(50, abs=2.1)  # 6 standard errors


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp_clt"])
def test_other_accountants_refuse_it(accountant):
    with pytest.raises(UnsupportedEventError, match='Use accountant="pld"'):
        epsilon(TwoCoinsGaussian(1.0, 0.1, 1), 1e-5, accountant)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"accountant": "rdp"}, "accountant"),
        ({"max_batch_size": 60}, "max_logical_batch_size"),
        ({"mean_runs": 3.0}, "sampling"),
        ({"noised_loss_bound": 3.0, "noised_loss_budget_ratio": 0.1}, "noised_loss_bound"),
    ],
)
def test_what_is_not_known_together_is_refused(changes, argument):
    given = {"num_examples": 1000, "expected_batch_size": 50, "clipping_norm": 0.1}
    with pytest.raises(UnsupportedArgumentError, match=f"`{argument}`"):
        PrivacyPlan.create(**given, noise_multiplier=1.0, sampling="two_coins", **changes)


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ConfigError, match="two_coins"):
        register_draw(dataclass(frozen=True)(type("Other", (TwoCoins,), {})))


def test_it_is_added_in_less_than_60_lines():
    source = open(__file__, encoding="utf-8").read()
    added = source[source.index("@register_event") : source.index("def test_arguments")]
    assert len([line for line in added.splitlines() if line.strip()]) < 60
