"""An adaptive clipping norm, and scaled gradients: in which units a step passes the gate, how
far one example moves what it releases, and what follows. (That scaled gradients are exact:
tests/clipping/test_scales.py.) Each property has the bug it guards against planted."""

import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import loops
import numpy as np
import oracle
import pytest
import tiny
import torch
from models import gradients_of
from scipy import stats
from torch.nn.functional import cross_entropy
from users import flat, flat_of
from watch import watch

from hf_dp import DpSgdPlan, NoisedLoss, PrivateRun, errors, mechanism_for
from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.scales import Scale
from hf_dp.distributed.processes import Processes
from hf_dp.losses import per_example_loss
from hf_dp.mechanisms import scales as scales_module
from hf_dp.mechanisms.dp_sgd import DpSgd
from hf_dp.mechanisms.gauge import Gauge
from hf_dp.mechanisms.scales import mean_squares, scales_of
from hf_dp.noise import SecretRandomness
from hf_dp.plans import PrivacyPlan, quantile
from hf_dp.plans.draws import draw_of
from hf_dp.plans.mechanism import PlannedRelease
from hf_dp.plans.quantile import ClippingQuantile
from hf_dp.plans.rounding import COUNT_MOVES, count_margin, regrouping_share, slack_cap
from hf_dp.run.gate import Gate, IndependentNoise, Release
from hf_dp.run.options import RunOptions

pytestmark = pytest.mark.usefixtures("unchecked")

C, SIGMA, RATIO, ROWS, BATCH, BETA = 0.1, 1.0, 0.2, 40, 8, 0.7
RULE = ClippingQuantile(0.4, learning_rate=0.5, budget_ratio=RATIO)
BOTH = {"rule": RULE, "beta": BETA}
GAUGES = [0.02, 1.0, 1000.0]  # the first clips all rows, and the last none


def planned(rule=RULE, beta=None, **changes) -> PrivacyPlan:
    own = DpSgdPlan(C, SIGMA, clipping_quantile=rule, gradient_scaling_beta=beta)
    return loops.plan(**{"mechanism": own, "max_steps": 4, **changes})


def private_run(folder: Path, plan: PrivacyPlan | None = None, **given) -> PrivateRun:
    model = tiny.model()
    with torch.no_grad():
        for parameter in model.parameters():  # so that gradients have different norms
            parameter.add_(0.3 * torch.randn_like(parameter))
    return loops.run(folder, plan or planned(), **{"size": 4, "model": model, **given})


def clip(mechanism, indices: list[int], gauge: float):
    """What a draw of these rows adds, flat, and its count, at a gauge."""
    mechanism.gauge.ratio = gauge
    clipped = mechanism.clip(loops.batches_of(mechanism, indices))
    return flat(clipped.values), float(clipped.beside["count"])


def whole(mechanism) -> torch.Tensor:
    """All scales, flat; 1 where there are none."""
    scales, found = mechanism.gauge.scales, []
    for name, p in mechanism.run.model.named_parameters():
        scale = scales and scales.now.get(name)
        found.append(torch.outer(scale.rows, scale.columns) if scale else torch.ones_like(p))
    return flat_of(found)


def learn_of_rows(mechanism) -> None:
    """Let scales be small where gradients are large."""
    rows = loops.batches_of(mechanism, range(0, ROWS, 2))
    mechanism.gauge.scales.learn(mechanism.clip(rows).values)


# -- against a loop over single examples --


@pytest.mark.parametrize(
    ("strategy", "beta"),
    [("book_keeping", None), ("two_pass", None), ("per_example", None), ("book_keeping", BETA)],
)
def test_sum_and_count_are_those_of_a_loop(strategy, beta, tmp_path):
    options = RunOptions(clipping_strategy=strategy)
    mechanism = mechanism_for(private_run(tmp_path, planned(beta=beta), options=options))
    mechanism.run.model.double()
    if beta is not None:
        learn_of_rows(mechanism)
    indices, counts, most = list(range(0, ROWS, 3)), [], mechanism.run.plan.clips_to
    alone = [dict(*loops.batches_of(mechanism, [index])) for index in indices]
    found = gradients_of(mechanism.run.model, alone, lambda *one: per_example_loss(*one).sum())
    gradients = [flat_of(each) * whole(mechanism) for each in found]
    norms = [float(each.norm()) for each in gradients]
    for gauge in (*GAUGES, sorted(norms)[7] / C):
        expected = sum(
            g / gauge * min(1.0, most / (n / gauge)) for g, n in zip(gradients, norms, strict=True)
        )
        counted = sum(min(max(2 * (1 - n / (gauge * C)), -0.5), 0.5) for n in norms)
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
    sound = [mask for mask in tiny.dataset()["attention_mask"] if len(mask) <= 5]
    assert 0 < len(sound) < ROWS
    assert clip(mechanism, list(range(ROWS)), 1000.0)[1] == len(sound) / 2
    assert clip(mechanism, [], 1.0)[1] == 0.0


def counts_its_own_draw(folder: Path) -> bool:
    """Return whether the count of each step is that of the rows whose gradients are summed: each 1/2, where
    no norm reaches the step's."""
    mechanism, right = mechanism_for(private_run(folder)), []
    for batches in mechanism.logical_batches():
        mechanism.gauge.ratio = 1000.0
        count, drawn = mechanism.clip(batches).beside["count"], [len(b["labels"]) for b in batches]
        right.append(float(count) == sum(drawn) / 2)
    return all(right)


def test_a_step_counts_its_own_draw_and_a_planted_other_one_is_seen(tmp_path, monkeypatch):
    assert counts_its_own_draw(tmp_path / "honest")
    honest, before = DpSgd.clip, [{"count": torch.zeros(())}]

    def of_the_draw_before(mechanism, batches):
        clipped = honest(mechanism, batches)
        before.append(clipped.beside)
        return replace(clipped, beside=before[-2])

    monkeypatch.setattr(DpSgd, "clip", of_the_draw_before)
    assert not counts_its_own_draw(tmp_path / "planted")


# -- how far one example moves it --


def most_moved(folder: Path, beta=None) -> tuple[float, float, float]:
    """How far leaving one row out moves sum, count and unscaled sum, of what the plan says, at most."""
    mechanism, found = mechanism_for(private_run(folder, planned(beta=beta))), []
    if beta is not None:
        learn_of_rows(mechanism)
    most, scales = mechanism.run.plan.step_release().sensitivities, whole(mechanism)
    everyone = sorted(range(0, ROWS, 2), key=lambda i: i * 7 % ROWS)
    ids = tiny.dataset()["input_ids"]
    shortest = min(everyone, key=lambda i: len(ids[i]))
    for gauge in (0.02, 10.0, 1000.0):
        sums, count = clip(mechanism, everyone, gauge)
        for left_out in {everyone[0], everyone[10], everyone[-1], shortest}:
            others = [i for i in everyone if i != left_out]
            without, fewer = clip(mechanism, others, gauge)
            moved = (sums - without) / most["sum"]
            of_count, plain = abs(count - fewer) / most["count"], float((moved / scales).norm())
            found.append((float(moved.norm()), of_count, plain))
    return tuple(max(each) for each in zip(*found, strict=True))


def test_one_example_moves_sum_and_count_by_no_more_than_planned(tmp_path):
    of_sum, of_count, _ = most_moved(tmp_path / "norm")
    assert 0.95 < of_sum <= 1 and 0.9 < of_count <= 1
    of_sum, of_count, plain = most_moved(tmp_path / "scaled", BETA)
    assert 0.95 < of_sum <= 1 < 1.2 < plain  # of the plain norm nothing is claimed


@pytest.mark.parametrize("beta", [None, BETA])
def test_planted_raw_units_at_the_gate_are_seen(beta, tmp_path, monkeypatch):
    honest = DpSgd.clip

    def raw(mechanism, batches):
        clipped = honest(mechanism, batches)
        for name, total in clipped.values.items():
            if beta is None:
                total.mul_(mechanism.gauge.ratio)
            elif mechanism.gauge.scales.now:
                mechanism.gauge.scales.now[name].undo(total)
        return clipped

    monkeypatch.setattr(DpSgd, "clip", raw)
    assert most_moved(tmp_path, beta)[0] > (1.2 if beta else 3)


def moved_by_rounding(regrouped: int) -> float:
    """How far the counts of others move, at most, where each of their norms was found with the
    largest error, first too large and then too small."""
    plan, error = planned(), 5e-5 + slack_cap(regrouped)
    used = torch.ones(regrouped, dtype=torch.bool)

    def counted(size: float) -> float:
        return float(RULE.counted(torch.full((regrouped,), size * C), used, C, regrouped, plan))

    sizes = np.linspace(0.7, 1.3, 61)
    return max(counted(size * (1 - error)) - counted(size * (1 + error)) for size in sizes)


@pytest.mark.parametrize("regrouped", [1, 16, 64, 256, 1024])
def test_what_others_count_moves_by_less_than_the_margin(regrouped, monkeypatch):
    """Also where all others are equal rows whose norm is next to the clipping norm."""
    share = regrouping_share(regrouped, COUNT_MOVES)
    known = {64: 1, 256: pytest.approx(0.834, 1e-3)}
    assert share == known.get(regrouped, share)
    most = 0.5 * (1 + count_margin())
    assert 0.5 * share + moved_by_rounding(regrouped) <= most
    if regrouped > 1:  # planted: 1/2 up to the norm, and -1/2 above it
        monkeypatch.setattr(quantile, "RAMP", 1e-9)
        assert moved_by_rounding(regrouped) > most


class OtherGroup(torch.nn.Module):
    """Without a fourth row the first output is one unit in the last place larger, as it may be where
    a product over another group rounds in another way."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        return out if len(out) > 3 else out + out.new_tensor([2.0**-20, 0.0])


def missing(gap: np.float32) -> float:
    """1 - p of the class of an output with this gap, as torch rounds it."""
    return float(1 - torch.log_softmax(torch.tensor([float(gap), 0.0]), 0)[0].exp())


J = 1000.0  # the norm of the gradient of one of its outputs


def fitted() -> torch.nn.Module:
    """A model that has fitted its rows, all equal, up to the last digit of a cross-entropy: its gap
    is the largest whose 1 - p is larger than that of the gap one unit further."""
    low, high, layer = np.float32(15.0), np.float32(15.9), torch.nn.Linear(1, 2)
    while (middle := (low + high) / np.float32(2)) not in (low, high):
        low, high = (middle, high) if missing(middle) > missing(high) else (low, middle)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([float(low), 0.0]))
    return torch.nn.Sequential(layer, OtherGroup())


def moved_by_a_forward(ratio: float) -> tuple[float, float, float]:
    """How far one of four rows moves sum and count, of what the plan says, at a gauge; and how far
    the three others move the sum, in the same unit."""
    model, plan, sums, counts = fitted(), planned(), [], []
    for rows in (4, 3):
        with ClippingEngine(model, plan.clips_to) as engine:

            def count(sizes, used, engine=engine):
                h = RULE.counted(sizes[0], used, ratio * C, engine.regrouped, plan)
                counts.append(float(h))

            engine.measure(ratio, count)
            out, classes = model(torch.full((rows, 1), J)), torch.zeros(rows, dtype=torch.long)
            engine.backward(cross_entropy(out, classes, reduction="none"))
            sums.append(flat(engine.collect()))
    most = plan.step_release().sensitivities
    of_sum, of_others = (float((sums[0] * k - sums[1]).norm()) / most["sum"] for k in (1, 0.75))
    return of_sum, abs(counts[0] - counts[1]) / most["count"], of_others


def test_what_a_forward_rounds_moves_little_at_the_least_norm_and_much_at_a_planted_one():
    least = RULE.moved(1.0, 1e9, planned())
    of_sum, of_count, of_others = moved_by_a_forward(least)
    assert 0 < of_sum < 0.5 and of_count <= 1
    # As hf_dp.plans.rounding derives: each of the others by one step of the softmax.
    assert of_others == pytest.approx(3 * J * 2**-23 / (least * C), rel=0.02)
    of_sum, of_count, _ = moved_by_a_forward(3e-3)  # planted: a lower limit of a thousandth
    assert of_sum > 1.5 and of_count > 2


def test_the_sum_of_counts_is_exact_in_whatever_order_and_parts():
    sizes = torch.rand(3000, generator=torch.Generator().manual_seed(0)).mul(0.2)
    used, plan, found = torch.ones(3000, dtype=torch.bool), planned(), set()
    for parts in ([3000], [1] * 100 + [2900], [750] * 4):
        cut = zip(sizes.flip(0).split(parts), used.split(parts), strict=True)
        found.add(sum(float(RULE.counted(s, u, C, 16, plan)) for s, u in cut))
    assert len(found) == 1


M, K = 64, 512


def blind(to: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Weights (M, K), half of whose rows are orthogonal to a vector but for rounding."""
    made, to = torch.randn(M, K, generator=generator).double(), to.double()
    made[M // 2 :] -= torch.outer(made[M // 2 :] @ to, to) / to.dot(to)
    return made.float()


def changed_by_neighbors() -> float:
    """How much of its norm a row's scaled gradient changes by, at most, among other neighbors: in
    a layer, half of whose inputs and half of whose outputs' gradients are nothing but rounding, with
    scales that follow from that row alone."""
    generator = torch.Generator().manual_seed(0)
    row, out = torch.randn(2, K, generator=generator)
    layers = [torch.nn.Linear(*each, bias=False) for each in ((K, M), (M, M), (M, K))]
    model, middle = torch.nn.Sequential(*layers), "1.weight"
    for layer, weight in ((0, blind(row, generator)), (2, blind(out, generator).mT)):
        layers[layer].weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)

    def gradient(neighbors: int, scales: dict[str, Scale] | None = None) -> torch.Tensor:
        rows = torch.cat([row[None], torch.randn(neighbors, K, generator=generator)])
        with ClippingEngine(model, 1e9) as engine:
            engine.measure(scales=scales)
            engine.backward((model(rows) * out).sum(1) * torch.eye(neighbors + 1)[0])
            return engine.collect()[middle]

    scales = scales_of({middle: mean_squares(gradient(0))})
    alone = gradient(0, scales)
    found = [gradient(count, scales) - alone for count in (1, 2, 4, 15, 63)]
    return max(float(change.norm() / alone.norm()) for change in found)


def test_a_regrouped_scaled_gradient_changes_by_less_than_the_margin_has_for_it(monkeypatch):
    most = 2 * (slack_cap(64) + 5e-5)
    assert changed_by_neighbors() < most / 4
    monkeypatch.setattr(scales_module, "SPREAD", 1e12)  # planted: scales of what is only rounding
    assert changed_by_neighbors() > 10 * most


# -- what it costs --


def test_the_event_counts_both_sums_as_the_paper_does():
    plan = planned(max_steps=50, accountant="pld")
    release = plan.step_release()
    sigma_b = release.noise_std("count") / (1 + count_margin())
    assert release.event.noise_multipliers == {"sum": SIGMA, "count": pytest.approx(2 * sigma_b)}
    both = 1 / math.sqrt(1 / SIGMA**2 + 1 / (2 * sigma_b) ** 2)
    assert both == pytest.approx(SIGMA * math.sqrt(1 - RATIO))  # its part of the budget
    expected, alone = (oracle.epsilon([(s, BATCH / ROWS, 50)], plan.delta) for s in (both, SIGMA))
    found = epsilon(plan.event(), plan.delta).value
    assert expected <= found * (1 + 1e-4) and found == pytest.approx(expected, rel=0.01)
    assert alone < 0.9 * found  # planted: the count is not counted


def test_it_adds_up_with_a_noised_loss_a_truncated_draw_and_scales_which_are_free():
    others = {"draw": draw_of(max_batch_size=12), "loss": NoisedLoss(2.0, 0.1)}
    own = DpSgdPlan(C, SIGMA, clipping_quantile=RULE, **others)
    plan = loops.plan(mechanism=own, accountant="pld")
    scaled = loops.plan(mechanism=replace(own, gradient_scaling_beta=BETA), accountant="pld")
    event = plan.event()
    assert event.noise_multipliers == {"sum": 1.0, "count": 2.0, "loss": pytest.approx(3.0)}
    assert event.joint_noise_multiplier == pytest.approx((1 + 1 / 4 + 1 / 9) ** -0.5)
    assert (event.max_batch_size, event.num_examples) == (12, ROWS)
    assert scaled.event() == event and scaled.step_release() == plan.step_release()
    assert all(PrivacyPlan.from_dict(each.to_dict()) == each for each in (plan, scaled))
    (losses, counts) = own.outline(plan)
    assert "noise multiplier 2, standard deviation of a step's share 0.1339" in counts
    assert losses.startswith("noised loss")
    assert counts.endswith(f"{event.joint_noise_multiplier:.6g}")
    assert plan.words.mechanism.endswith(f"as one with {counts.rpartition('with ')[2]}")
    assert plan.words.also_covered.startswith("the clipping norms in its logs, the noised losses")
    asked = {"clipping_quantile", "gradient_scaling_beta"}
    assert asked.isdisjoint(loops.plan().to_dict()["mechanism"])


# -- which norms and scales follow --


def follow_from_releases(folder: Path) -> tuple[bool, bool]:
    """Return whether the norms of all steps, and the scales after them, are what a plain loop makes of the
    released numbers."""
    private, squares = private_run(folder, planned(**BOTH, max_steps=8)), {}
    norms, expected = [], [C]
    mechanism = mechanism_for(private)
    with pytest.MonkeyPatch.context() as patch:
        released = watch(patch, Release, "beside", lambda found, *_: float(found))
        for _ in loops.steps(mechanism):
            norms.append(float(mechanism.noised["clipping_norm"]))
            share = 0.5 + released[-1] / BATCH
            expected.append(expected[-1] * math.exp(-0.5 * (share - 0.4)))
            for name, p in private.model.named_parameters():
                square = p.grad.reshape(len(p), -1).numpy().astype(float) ** 2
                means = [square.mean(1), square.mean(0)]
                old = squares.get(name, means)
                squares[name] = [BETA * a + (1 - BETA) * b for a, b in zip(old, means, strict=True)]
    right = scales_of({name: [*map(torch.from_numpy, each)] for name, each in squares.items()})
    norms.append(mechanism.gauge.clipping_norm)
    found = mechanism.gauge.scales.now
    scales = (np.allclose(found[name].rows, each.rows, rtol=1e-5) for name, each in right.items())
    return len(set(norms)) == 9 and norms == pytest.approx(expected, rel=1e-12), all(scales)


def test_norms_and_scales_follow_from_what_was_released_alone(tmp_path, monkeypatch):
    assert follow_from_releases(tmp_path / "honest") == (True, True)
    clip_honestly, learn, kept = DpSgd.clip, Gauge.learn, {}

    def keeping(mechanism, batches):
        clipped = clip_honestly(mechanism, batches)
        kept.update({name: total.clone() for name, total in clipped.beside.items()})
        kept["sums"] = {name: total / BATCH for name, total in clipped.values.items()}
        return clipped

    monkeypatch.setattr(DpSgd, "clip", keeping)  # planted: from sums without noise
    monkeypatch.setattr(Gauge, "learn", lambda gauge, *_: learn(gauge, kept, kept["sums"]))
    assert follow_from_releases(tmp_path / "planted") == (False, False)


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
    mechanism = mechanism_for(private_run(tmp_path, plan, size=ROWS))
    for _ in loops.steps(mechanism):
        pass
    _, count = clip(mechanism, list(range(ROWS)), mechanism.gauge.ratio)
    assert 0.5 + count / ROWS == pytest.approx(gamma, abs=0.01)


def test_scales_are_inverse_roots_of_squares_with_a_mean_square_of_1():
    rows, columns = torch.tensor([1.0, 4.0, 0.25]).double(), torch.tensor([0.5, 2.0]).double()
    v = torch.outer(rows, columns) / rows.mean()
    other = v.mean(1) * 3, v.mean(0) * 3  # three times larger throughout
    found = scales_of({"a": (v.mean(1), v.mean(0)), "b": other})
    made = {name: torch.outer(s.rows, s.columns) for name, s in found.items()}
    torch.testing.assert_close(made["a"] / made["a"][0, 0], (v / v[0, 0]) ** -0.5)
    torch.testing.assert_close(made["b"], made["a"] / math.sqrt(3))
    assert float(torch.cat([*made.values()]).square().mean()) == pytest.approx(1.0)
    assert scales_of({}) == {}


def test_scales_are_at_most_a_thousand_times_apart():
    far = torch.logspace(-10, 10, 7, dtype=torch.float64)
    found = scales_of({"a": (far, far), "b": (far * 1e5, far * 1e5), "c": (far * 0, far[:1] * 0)})
    everything = flat_of(torch.outer(s.rows, s.columns) for s in found.values())
    assert 50 < float(everything.max() / everything.min()) <= 1000 * (1 + 1e-9)


# -- what leaves --


def pvalues_of_noise(folder: Path) -> list[float]:
    """KS tests of what the optimizer gets, in units of each step's norm and scales; and of the same
    with the last step's scales."""
    private, found, used = private_run(folder, planned(**BOTH, max_steps=5)), [], torch.ones(())
    private.randomness, mechanism = loops.EmptyDraws(), mechanism_for(private)
    unit = SIGMA * (1 + private.plan.mechanism.margin(private.plan)) / BATCH
    with pytest.MonkeyPatch.context() as patch:
        asked = watch(patch, IndependentNoise, "like", before=lambda shape, *given: given[1:])
        for batches in mechanism.logical_batches():
            mechanism.gauge.ratio *= 3  # more than counts of nobody would
            norm, used = mechanism.gauge.clipping_norm, whole(mechanism)
            loops.step(mechanism, batches)
            drawn = flat_of(p.grad for p in private.model.parameters())
            found.append(drawn * used / (norm * unit))
            spread = float(torch.ones_like(drawn).div(used).norm())
            assert mechanism.noise_norm == pytest.approx(norm * unit * spread)
            private.model.zero_grad()
    assert {std for part, std in asked if part == "sum"} == {private.plan.noise_std}
    assert float(used.max() / used.min()) > 3
    planted = [each / used for each in found[:-1]]
    return [stats.kstest(torch.cat(each).numpy(), "norm").pvalue for each in (found, planted)]


def test_the_gate_sees_one_unit_and_the_optimizer_that_of_the_step(tmp_path, monkeypatch):
    right, planted = pvalues_of_noise(tmp_path / "honest")
    assert right > 1e-7 > planted
    monkeypatch.setattr(Gauge, "undo", lambda self, noised: 1.0)  # planted
    with pytest.raises(AssertionError):
        pvalues_of_noise(tmp_path / "planted")


def least_mu(rule: ClippingQuantile, runs: int = 3000) -> float:
    """A lower bound on 1 / noise multiplier, from releases with an example at its bounds and
    without: by the share of right guesses of the likelihood ratio, wrong less than once in 10^7.
    Of a Gaussian mechanism a guess is right with the probability Phi(mu / 2) <= 0.76 at mu = 1.41;
    the bound is 0.2 below mu at most, and above 2 for the planted mu = 4.1, in 999 of 1,000 runs.
    """
    release, right = planned(rule).step_release(), 0
    keeps_nothing = Mock(processes=Processes(), steps_made=0)
    gate = Gate(keeps_nothing, IndependentNoise(SecretRandomness()))
    stds = {part: release.noise_std(part) for part in ("sum", "count")}
    for number in range(runs):
        of_sum, of_count = number % 2 * torch.tensor([C, 0.5], dtype=torch.float64)
        with gate.release(release) as out:
            x, y = float(out.sum({"w": of_sum})["w"]), float(out.beside("count", of_count))
        ratio = C * (x - C / 2) / stds["sum"] ** 2 + 0.5 * (y - 0.25) / stds["count"] ** 2
        right += (ratio > 0) == bool(number % 2)
    least = stats.binomtest(right, runs, alternative="greater").proportion_ci(1 - 1e-7).low
    return 2 * stats.norm.ppf(least)


@pytest.mark.parametrize("factor", [1.0, 0.2])
def test_an_audit_of_both_sums_refutes_a_planted_event_alone(factor, monkeypatch):
    rule = ClippingQuantile(0.4, budget_ratio=0.5)  # a count as telling as the gradients
    stated = 1 / planned(rule).event().joint_noise_multiplier
    honest = IndependentNoise.like

    def like(noise, values, part, std):
        return honest(noise, values, part, std * (factor if part == "count" else 1))

    monkeypatch.setattr(IndependentNoise, "like", like)
    found = least_mu(rule)
    assert stated == pytest.approx(math.sqrt(2))
    assert (found > stated) == (factor < 1), found
    assert factor < 1 or found > stated - 0.4


def test_a_rehearsal_takes_the_memory_of_scaled_copies(tmp_path, monkeypatch):
    mechanism = mechanism_for(private_run(tmp_path, planned(beta=BETA)))
    scaled = watch(monkeypatch, Scale, "of")
    mechanism.rehearse(loops.batches_of(mechanism, [0, 1]), None)
    assert len(scaled) >= len(list(mechanism.run.model.parameters()))


# -- what is refused --


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5, math.nan, "half", True])
def test_shares_outside_of_0_to_1_are_refused(value):
    for name in ("clipping_quantile", "clipping_quantile_budget_ratio", "gradient_scaling_beta"):
        with pytest.raises(errors.InvalidArgumentError, match=f"`{name}`"):
            DpSgdPlan.of(C, 1.0, **{"clipping_quantile": 0.5, name: value})


def test_other_numbers_searches_and_shards_are_refused(tmp_path):
    with pytest.raises(errors.InvalidArgumentError, match="`clipping_quantile_learning_rate`"):
        ClippingQuantile(0.5, learning_rate=0)
    with pytest.raises(errors.InvalidArgumentError, match="at least 1e-05 with `clipping_quantile"):
        DpSgdPlan(1e-6, 1.0, clipping_quantile=RULE)
    own = DpSgdPlan.of(C, 1.0, mean_runs=5.0, clipping_quantile=0.4)
    with pytest.raises(errors.UnsupportedArgumentError, match="`clipping_quantile` to be left out"):
        loops.plan(mechanism=own)
    with pytest.raises(errors.UnsupportedModelError, match="Scales of a part .* cannot be sharded"):
        mechanism_for(private_run(tmp_path, planned(beta=BETA))).refuse_shards(True)


def test_an_event_without_the_count_is_no_release_of_the_plan():
    of_both = planned().step_release().sensitivities
    with pytest.raises(errors.ConfigError, match="Expected the sensitivities of"):
        PlannedRelease(PoissonSampledGaussian(SIGMA, 0.2, 1), "training", of_both)
