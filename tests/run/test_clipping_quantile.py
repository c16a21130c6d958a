"""A clipping norm that finds itself: what is counted, in which units a step passes the gate, how far
one example moves it, and which norms follow. Each property has the bug it guards against planted."""

import math
from dataclasses import replace
from pathlib import Path

import loops
import numpy as np
import pytest
import tiny
import torch
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from loops import Empty, clip, one_by_one, various
from scipy import stats

from hf_dp import ClippingQuantile, DpSgdPlan, NoisedLoss, PrivateRun, mechanism_for
from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.clipping import ClippingEngine
from hf_dp.distributed.processes import Processes
from hf_dp.errors import ConfigError, InvalidArgumentError, UnsupportedArgumentError
from hf_dp.losses import per_example_loss
from hf_dp.mechanisms.dp_sgd import DpSgd
from hf_dp.mechanisms.gauge import Gauge
from hf_dp.noise import SecretRandomness
from hf_dp.plans import PrivacyPlan, quantile
from hf_dp.plans.draws import draw_of
from hf_dp.plans.mechanism import PlannedRelease
from hf_dp.plans.rounding import count_margin, count_share, slack_cap
from hf_dp.run.gate import Gate as RunGate
from hf_dp.run.gate import IndependentNoise, Release
from hf_dp.run.options import RunOptions

pytestmark = pytest.mark.usefixtures("unchecked")

C, SIGMA, RATIO, ROWS, BATCH = 0.1, 1.0, 0.2, 40, 8
RULE = ClippingQuantile(0.4, learning_rate=0.5, budget_ratio=RATIO)
GAUGES = [0.02, 1.0, 1000.0]  # the first clips all rows, and the last none


def planned(rule: ClippingQuantile = RULE, **changes) -> PrivacyPlan:
    own = DpSgdPlan(C, SIGMA, clipping_quantile=rule)
    return loops.plan(**{"mechanism": own, "max_steps": 4, **changes})


def private_run(folder: Path, steps: int = 4, **given) -> PrivateRun:
    return loops.run(folder, planned(max_steps=steps), **{"size": 4, "model": various(), **given})


# -- against a loop over single examples --


def written_out(
    gradients: list[torch.Tensor], gauge: float, most: float
) -> tuple[torch.Tensor, float]:
    """The clipped sum in units of the gauge, and the count."""
    norms = [float(each.norm()) for each in gradients]
    parts = [
        g / gauge * min(1.0, most / (n / gauge)) for g, n in zip(gradients, norms, strict=True)
    ]
    return sum(parts), sum(min(max(2 * (1 - n / (gauge * C)), -0.5), 0.5) for n in norms)


@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass", "per_example"])
def test_sum_and_count_are_those_of_a_loop(strategy, tmp_path):
    options = RunOptions(clipping_strategy=strategy)
    mechanism = mechanism_for(private_run(tmp_path, model=various().double(), options=options))
    indices, counts = list(range(0, ROWS, 3)), []
    gradients, most = one_by_one(mechanism, indices), mechanism.run.plan.clips_to
    median = sorted(float(each.norm()) for each in gradients)[7]
    for gauge in (*GAUGES, median / C):
        expected, counted = written_out(gradients, gauge, most)
        sums, count = clip(mechanism, indices, gauge)
        torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-12)
        assert count == pytest.approx(counted, abs=1e-6)
        counts.append(count)
    assert counts[0] == -7.0 and counts[2] == 7.0  # exactly
    assert -5 < counts[3] < 5 and counts[3] % 0.5  # some are near the norm


def test_an_example_without_a_norm_counts_nothing_and_an_empty_draw_neither(tmp_path):
    def spoiled(model, inputs):
        losses = per_example_loss(model, inputs)
        return losses * torch.where(inputs["attention_mask"].sum(1) > 5, torch.inf, 1.0)

    mechanism = mechanism_for(private_run(tmp_path, compute_per_example_loss=spoiled))
    rows = tiny.dataset()["attention_mask"]
    sound = [i for i in range(ROWS) if len(rows[i]) <= 5]
    assert 0 < len(sound) < ROWS
    assert clip(mechanism, list(range(ROWS)), 1000.0)[1] == len(sound) / 2
    assert clip(mechanism, [], 1.0)[1] == 0.0


def counts_its_own_draw(folder: Path) -> bool:
    """Whether the count of each step is that of the rows whose gradients are summed: each 1/2, where
    no norm reaches the step's."""
    mechanism, right = mechanism_for(private_run(folder)), []
    for batches in mechanism.logical_batches():
        mechanism.gauge.ratio = 1000.0
        drawn = [len(batch["labels"]) for batch in batches]
        clipped = mechanism.clip(batches)
        right.append(float(clipped.beside["count"]) == sum(drawn) / 2)
        with mechanism.run.release_step() as release:
            mechanism.set_gradients(clipped, release)
        mechanism.run.model.zero_grad()
    return all(right)


def test_a_step_counts_its_own_draw_and_a_planted_other_one_is_seen(tmp_path, monkeypatch):
    assert counts_its_own_draw(tmp_path / "honest")
    honest, before = DpSgd.clip, [torch.zeros((), dtype=torch.float64)]

    def of_the_draw_before(mechanism, batches):
        clipped = honest(mechanism, batches)
        before.append(clipped.beside["count"].clone())
        return replace(clipped, beside={"count": before[-2]})

    monkeypatch.setattr(DpSgd, "clip", of_the_draw_before)
    assert not counts_its_own_draw(tmp_path / "planted")


# -- how far one example moves it --


def most_moved(folder: Path) -> tuple[float, float]:
    """How far leaving one row out moves sum and count of a draw, of what the plan says, at most."""
    mechanism = mechanism_for(private_run(folder))
    most = mechanism.run.plan.step_release().sensitivities
    lengths = [len(ids) for ids in tiny.dataset()["input_ids"]]
    everyone = sorted(range(0, ROWS, 2), key=lambda i: (i * 7) % ROWS)
    shortest = min(everyone, key=lambda i: lengths[i])
    found = [(0.0, 0.0)]
    for gauge in (0.02, 10.0, 1000.0):
        sums, count = clip(mechanism, everyone, gauge)
        for left_out in {everyone[0], everyone[10], everyone[-1], shortest}:
            others = [i for i in everyone if i != left_out]
            without, fewer = clip(mechanism, others, gauge)
            of_sum, of_count = (sums - without).norm(), abs(count - fewer)
            found.append((float(of_sum) / most["sum"], of_count / most["count"]))
    return tuple(max(each) for each in zip(*found, strict=True))


def test_one_example_moves_sum_and_count_by_no_more_than_planned(tmp_path):
    of_sum, of_count = most_moved(tmp_path)
    assert 0.95 < of_sum <= 1 and 0.9 < of_count <= 1


def _raw_units(self, noised):
    return 1.0


def test_planted_raw_units_at_the_gate_are_seen(tmp_path, monkeypatch):
    honest = DpSgd.clip

    def raw(mechanism, batches):
        clipped = honest(mechanism, batches)
        sums = {n: total * mechanism.gauge.ratio for n, total in clipped.values.items()}
        return replace(clipped, values=sums)

    monkeypatch.setattr(DpSgd, "clip", raw)
    assert most_moved(tmp_path)[0] > 3


def moved_by_rounding(regrouped: int) -> float:
    """How far the counts of others move, at most, where each of their norms was found with the
    largest error, first too large and then too small."""
    plan, error = planned(), 5e-5 + slack_cap(regrouped)
    used, found = torch.ones(regrouped, dtype=torch.bool), []
    for true in np.linspace(0.7, 1.3, 61):
        sizes = torch.full((regrouped,), true * C, dtype=torch.float64)
        small, large = (
            float(RULE.counted(sizes * (1 + sign * error), used, C, regrouped, plan))
            for sign in (-1, 1)
        )
        found.append(small - large)
    return max(found)


@pytest.mark.parametrize("regrouped", [1, 16, 64, 256, 1024])
def test_what_others_count_moves_by_less_than_the_margin(regrouped, monkeypatch):
    """Also where all others are equal rows whose norm is next to the clipping norm."""
    most = 0.5 * (1 + count_margin())
    assert 0.5 * count_share(regrouped) + moved_by_rounding(regrouped) <= most
    assert count_share(64) == 1 and 0.8 < count_share(256) < 0.84
    if regrouped > 1:  # planted: 1/2 up to the norm, and -1/2 above it
        monkeypatch.setattr(quantile, "RAMP", 1e-9)
        assert moved_by_rounding(regrouped) > most


class Fitted(torch.nn.Module):
    """A model that has fitted its rows, all equal, up to the last digit of a cross-entropy.

    Without a fourth row the logit of their class is one unit in the last place larger, as it may be
    where a product over another group rounds in another way.
    """

    def __init__(self, gap: float):
        super().__init__()
        self.last = torch.nn.Linear(1, 2)
        with torch.no_grad():
            self.last.weight.zero_()
            self.last.bias.copy_(torch.tensor([gap, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last(x)
        return out if len(x) > 3 else out + out.new_tensor([2.0**-20, 0.0])


def missing(gap: np.float32) -> float:
    """1 - p of the class of an output with this gap, as torch rounds it."""
    return float(1 - torch.log_softmax(torch.tensor([float(gap), 0.0]), 0)[0].exp())


def gap_at_a_step() -> float:
    """The largest gap whose 1 - p is larger than that of the gap one unit further."""
    low, high = np.float32(15.0), np.float32(15.9)
    while (middle := (low + high) / np.float32(2)) not in (low, high):
        low, high = (middle, high) if missing(middle) > missing(high) else (low, middle)
    return float(low)


def moved_by_a_forward(ratio: float) -> tuple[float, float]:
    """How far one of four rows moves sum and count, of what the plan says, at a gauge."""
    model, plan, found = Fitted(gap_at_a_step()), planned(), []
    x, y = torch.full((4, 1), 1000.0), torch.zeros(4, dtype=torch.long)
    for rows in (4, 3):
        counts = []
        with ClippingEngine(model, plan.clips_to) as engine:

            def count(sizes, used, counts=counts, engine=engine):
                h = RULE.counted(sizes[0], used, ratio * C, engine.regrouped, plan)
                counts.append(float(h))

            engine.measure(ratio, count)
            losses = torch.nn.functional.cross_entropy(model(x[:rows]), y[:rows], reduction="none")
            engine.backward(losses)
            sums = torch.cat([each.flatten() for each in engine.collect().values()])
        found.append((sums, sum(counts)))
    (sums, count), (others, fewer) = found
    most = plan.step_release().sensitivities
    return float((sums - others).norm()) / most["sum"], abs(count - fewer) / most["count"]


def test_what_a_forward_rounds_moves_little_at_the_least_norm_and_much_at_a_planted_one():
    of_sum, of_count = moved_by_a_forward(RULE.moved(1.0, 1e9, planned()))
    assert 0 < of_sum < 0.5 and of_count <= 1
    of_sum, of_count = moved_by_a_forward(3e-3)  # planted: a lower limit of a thousandth
    assert of_sum > 1.5 and of_count > 2


def test_the_sum_of_counts_is_exact_in_whatever_order_and_parts():
    sizes = torch.rand(3000, generator=torch.Generator().manual_seed(0)).mul(0.2)
    used, plan, found = torch.ones(3000, dtype=torch.bool), planned(), set()
    for parts in ([3000], [1] * 100 + [2900], [750] * 4):
        cut = zip(sizes.flip(0).split(parts), used.split(parts), strict=True)
        found.add(sum(float(RULE.counted(s, u, C, 16, plan)) for s, u in cut))
    assert len(found) == 1


# -- what it costs --


def spent_by_the_package(sigma: float, rate: float, steps: int, delta: float) -> float:
    accountant = PLDAccountant().compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)
    return accountant.get_epsilon(delta)


def test_the_event_counts_both_sums_as_the_paper_does(tmp_path):
    plan = planned(max_steps=50, accountant="pld")
    release = plan.step_release()
    sigma_b = release.noise_std("count") / (1 + count_margin())
    assert release.event.noise_multipliers == {"sum": SIGMA, "count": pytest.approx(2 * sigma_b)}
    both = 1 / math.sqrt(1 / SIGMA**2 + 1 / (2 * sigma_b) ** 2)
    assert both == pytest.approx(SIGMA * math.sqrt(1 - RATIO))  # its part of the budget
    expected = spent_by_the_package(both, BATCH / ROWS, 50, plan.delta)
    found = epsilon(plan.event(), plan.delta).value
    assert expected <= found * (1 + 1e-4) and found == pytest.approx(expected, rel=0.01)
    alone = spent_by_the_package(SIGMA, BATCH / ROWS, 50, plan.delta)  # planted: not counted
    assert alone < 0.9 * found


def test_it_adds_up_with_a_noised_loss_and_a_truncated_draw():
    draw = draw_of(max_batch_size=12)
    own = DpSgdPlan(C, SIGMA, draw=draw, loss=NoisedLoss(2.0, 0.1), clipping_quantile=RULE)
    plan = loops.plan(mechanism=own, accountant="pld")
    event = plan.event()
    assert event.noise_multipliers == {"sum": 1.0, "count": 2.0, "loss": pytest.approx(3.0)}
    assert event.joint_noise_multiplier == pytest.approx((1 + 1 / 4 + 1 / 9) ** -0.5)
    assert (event.max_batch_size, event.num_examples) == (12, ROWS)
    assert PrivacyPlan.from_dict(plan.to_dict()) == plan
    (losses, counts, both) = own.outline(plan)
    assert "noise multiplier 2, standard deviation of a step's share 0.1339" in counts
    assert losses.startswith("noised loss") and both.endswith(f"{event.joint_noise_multiplier:.6g}")
    words = plan.words
    assert "Each step's three sums are accounted together" in words.mechanism
    assert words.also_covered.startswith("the noised losses and clipping norms in its logs")
    assert "clipping_quantile" not in loops.plan().to_dict()["mechanism"]


def test_a_target_pays_for_it():
    own = DpSgdPlan(C, clipping_quantile=RULE)
    plan = loops.plan(mechanism=own, target_epsilon=3.0, accountant="pld")
    alone = loops.plan(mechanism=DpSgdPlan(C), target_epsilon=3.0, accountant="pld")
    assert 2.99 < epsilon(plan.event(), plan.delta).value <= 3.0
    assert plan.noise_multiplier == pytest.approx(alone.noise_multiplier / 0.8**0.5, rel=1e-3)


# -- which norms follow --


def norms_follow_from_releases(folder: Path) -> bool:
    """Whether the norms of all steps are what a plain loop makes of the released numbers."""
    mechanism, released, norms = mechanism_for(private_run(folder, 8)), [], []
    honest = Release.beside

    def beside(release, part, total):
        found = honest(release, part, total)
        released.append(float(found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Release, "beside", beside)
        for _ in loops.steps(mechanism):
            norms.append(float(mechanism.noised["clipping_norm"]))
    expected = C
    for norm, noised in zip(norms, released, strict=True):
        if norm != pytest.approx(expected, rel=1e-12):
            return False
        share = 0.5 + noised / BATCH
        expected = expected * math.exp(-0.5 * (share - 0.4))
    assert mechanism.gauge.clipping_norm == pytest.approx(expected, rel=1e-12)
    return len(set(norms)) == 8


def test_norms_follow_from_what_was_released_alone(tmp_path):
    assert norms_follow_from_releases(tmp_path)


def test_planted_norms_from_counts_without_noise_are_seen(tmp_path, monkeypatch):
    clip, learn, kept = DpSgd.clip, Gauge.learn, {}

    def keeping(mechanism, batches):
        clipped = clip(mechanism, batches)
        kept.update({part: total.clone() for part, total in clipped.beside.items()})
        return clipped

    monkeypatch.setattr(DpSgd, "clip", keeping)
    monkeypatch.setattr(
        Gauge, "learn", lambda gauge, released, gradients: learn(gauge, kept, gradients)
    )
    assert not norms_follow_from_releases(tmp_path)


def test_the_norm_stays_within_a_thirtieth_and_a_thousand_times():
    plan = planned()
    assert RULE.moved(0.05, 1e9, plan) == 1 / 30 and RULE.moved(900.0, -1e9, plan) == 1000
    assert RULE.moved(1.0, -0.1 * BATCH, plan) == pytest.approx(1.0)  # a share of 0.4


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize("gamma", [0.2, 0.7])
def test_it_finds_the_quantile(gamma, tmp_path):
    """With all rows in each draw, no noise and weights that stay: the norm of a share of gamma."""
    rule = replace(RULE, quantile=gamma, learning_rate=1.0)
    plan = planned(rule, expected_batch_size=ROWS, max_steps=25)
    mechanism = mechanism_for(loops.run(tmp_path, plan, size=ROWS, model=various()))
    for _ in loops.steps(mechanism):
        pass
    found = mechanism.gauge.ratio
    _, count = clip(mechanism, list(range(ROWS)), found)
    assert 0.5 + count / ROWS == pytest.approx(gamma, abs=0.01)


# -- what leaves --


def noise_of_a_run(folder: Path) -> tuple[set[float], float]:
    """Which standard deviations the gate is asked for gradients' noise, and a KS test of what the
    optimizer gets, in units of each step's norm."""
    private, asked, found = private_run(folder), set(), []
    private.randomness = Empty()
    honest = IndependentNoise.like

    def like(noise, values, part, std):
        if part == "sum":
            asked.add(std)
        return honest(noise, values, part, std)

    mechanism = mechanism_for(private)
    unit = SIGMA * (1 + private.plan.mechanism.margin(private.plan)) / BATCH
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndependentNoise, "like", like)
        for batches in mechanism.logical_batches():
            mechanism.gauge.ratio *= 3  # more than counts of nobody would
            norm = mechanism.gauge.clipping_norm
            clipped = mechanism.clip(batches)
            with private.release_step() as release:
                mechanism.set_gradients(clipped, release)
            drawn = torch.cat([p.grad.flatten() for p in private.model.parameters()])
            found.append(drawn / (norm * unit))
            assert mechanism.noise_norm == pytest.approx(norm * unit * math.sqrt(len(drawn)))
            private.model.zero_grad()
    return asked, stats.kstest(torch.cat(found).numpy(), "norm").pvalue


def test_the_gate_sees_one_unit_and_the_optimizer_that_of_the_step(tmp_path, monkeypatch):
    asked, pvalue = noise_of_a_run(tmp_path / "honest")
    assert asked == {planned().noise_std} and pvalue > 1e-7
    monkeypatch.setattr(Gauge, "undo", _raw_units)  # planted
    with pytest.raises(AssertionError):
        noise_of_a_run(tmp_path / "planted")


class Unkept:
    """A ledger that keeps nothing, for many releases."""

    processes = Processes()

    def append(self, event, purpose):
        pass


def least_mu(runs: int = 3000) -> float:
    """A lower bound on 1 / noise multiplier, from releases with an example at its bounds and
    without: by the share of right guesses of the likelihood ratio, wrong less than once in 10^7.

    Of a Gaussian mechanism a guess is right with the probability Phi(mu / 2) <= 0.76 at mu = 1.41;
    the bound is then 0.2 below mu at most, and above 2 for the planted mu = 4.1, each with a
    probability above 0.999 (the share's standard deviation is 0.006 at most).
    """
    release, right = planned(RULE).step_release(), 0
    gate = RunGate(Unkept(), IndependentNoise(SecretRandomness()))
    stds = {part: release.noise_std(part) for part in ("sum", "count")}
    for number in range(runs):
        at = {"sum": C, "count": 0.5} if number % 2 else {"sum": 0.0, "count": 0.0}
        with gate.release(release) as out:
            x = float(out.sum({"w": torch.tensor([at["sum"]], dtype=torch.float64)})["w"])
            y = float(out.beside("count", torch.tensor(at["count"], dtype=torch.float64)))
        ratio = C * (x - C / 2) / stds["sum"] ** 2 + 0.5 * (y - 0.25) / stds["count"] ** 2
        right += (ratio > 0) == bool(number % 2)
    least = stats.binomtest(right, runs, alternative="greater").proportion_ci(1 - 1e-7).low
    return 2 * stats.norm.ppf(least)


@pytest.mark.parametrize("factor", [1.0, 0.2])
def test_an_audit_of_both_sums_refutes_a_planted_event_alone(factor, monkeypatch):
    rule = ClippingQuantile(0.4, budget_ratio=0.5)  # a count as telling as the gradients
    monkeypatch.setattr(f"{__name__}.RULE", rule)
    stated = 1 / planned(rule).event().joint_noise_multiplier
    honest = IndependentNoise.like

    def like(noise, values, part, std):
        return honest(noise, values, part, std * (factor if part == "count" else 1))

    monkeypatch.setattr(IndependentNoise, "like", like)
    found = least_mu()
    assert stated == pytest.approx(math.sqrt(2))
    assert (found > stated) == (factor < 1), found
    assert factor < 1 or found > stated - 0.4


# -- what is refused --


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5, math.nan, "half", True])
def test_a_quantile_outside_of_0_to_1_is_refused(value):
    with pytest.raises(InvalidArgumentError, match="`clipping_quantile`"):
        ClippingQuantile(value)


def test_other_numbers_and_ways_to_clip_are_refused():
    for own, name in (
        ({"learning_rate": 0}, "learning_rate"),
        ({"budget_ratio": 1}, "budget_ratio"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"`clipping_quantile_{name}`"):
            ClippingQuantile(0.5, **own)
    with pytest.raises(InvalidArgumentError, match="at least 1e-05 with `clipping_quantile`"):
        DpSgdPlan(1e-6, 1.0, clipping_quantile=RULE)
    with pytest.raises(UnsupportedArgumentError, match="`clipping` .* not implemented"):
        DpSgdPlan(C, 1.0, "per_layer", clipping_quantile=RULE)
    with pytest.raises(InvalidArgumentError, match="`clipping` .* no share") as refused:
        DpSgdPlan(C, 1.0, "automatic", clipping_quantile=RULE)
    assert not isinstance(refused.value, UnsupportedArgumentError)
    for others, accountant in (
        ({"sampling": "random_allocation"}, "pld"),
        ({"mean_runs": 5.0}, "rdp"),
    ):
        own = DpSgdPlan.of(C, 1.0, **others, clipping_quantile=RULE)
        with pytest.raises(UnsupportedArgumentError, match="`clipping_quantile` to be left out"):
            loops.plan(mechanism=own, accountant=accountant)


def test_an_event_without_the_count_is_no_release_of_the_plan():
    plan = planned()
    event, sensitivities = PoissonSampledGaussian(SIGMA, 0.2, 1), plan.step_release().sensitivities
    with pytest.raises(ConfigError, match="Expected the sensitivities of"):
        PlannedRelease(event, "training", sensitivities)
