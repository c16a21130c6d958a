"""Scale, then privatize: in which norm an example is bounded, in which units a step passes the gate,
and which scales follow. (That scaled gradients are exact: tests/clipping/test_scales.py.) Each
property has the bug it guards against planted."""

import math
from dataclasses import replace
from pathlib import Path

import loops
import numpy as np
import pytest
import tiny
import torch
from loops import Empty, clip, one_by_one, various
from safetensors.torch import load_file, save_file
from scipy import stats

from hf_dp import ClippingQuantile, DpSgdPlan, GradientScaling, PrivateRun, mechanism_for
from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.scales import Scale
from hf_dp.errors import (
    ConfigError,
    InvalidArgumentError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from hf_dp.mechanisms import scales as scales_module
from hf_dp.mechanisms.dp_sgd import DpSgd
from hf_dp.mechanisms.gauge import FILE_NAME, Gauge
from hf_dp.mechanisms.scales import Scales, Squares, scales_of
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.rounding import slack_cap
from hf_dp.run.gate import IndependentNoise
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.tuners.rgp import RgpConfig

pytestmark = pytest.mark.usefixtures("unchecked")

C, SIGMA, ROWS, BATCH, BETA = 0.1, 1.0, 40, 8, 0.7
RULE = ClippingQuantile(0.4)


def private_run(
    folder: Path, steps: int = 4, quantile: ClippingQuantile | None = None, **given
) -> PrivateRun:
    own = DpSgdPlan(C, SIGMA, gradient_scaling=GradientScaling(BETA), clipping_quantile=quantile)
    planned = loops.plan(mechanism=own, max_steps=steps)
    return loops.run(folder, planned, **{"size": 4, "model": various().double(), **given})


def with_scales(mechanism) -> torch.Tensor:
    """Give a mechanism scales, as made-up gradients make them; return all, flat."""
    generator, made = torch.Generator().manual_seed(1), {}
    for name, p in mechanism.run.model.named_parameters():
        far = torch.randn(p.shape[0], *[1] * (p.dim() - 1), generator=generator).exp()
        made[name] = (torch.randn(p.shape, generator=generator) * far).double()
    mechanism.gauge.scales.learn(made)
    return flat(mechanism)


def flat(mechanism) -> torch.Tensor:
    now, parameters = mechanism.gauge.scales.now, mechanism.run.model.named_parameters()
    scales = [now[name] for name, _ in parameters]
    return torch.cat([torch.outer(each.rows, each.columns).flatten() for each in scales])


# -- which scales follow from squares --


def test_scales_are_inverse_roots_of_squares_with_a_mean_square_of_1():
    rows, columns = torch.tensor([1.0, 4.0, 0.25]).double(), torch.tensor([0.5, 2.0]).double()
    v = torch.outer(rows, columns) / rows.mean()
    other = Squares(v.mean(1) * 3, v.mean(0) * 3)  # three times larger throughout
    found = scales_of({"a": Squares(v.mean(1), v.mean(0)), "b": other})
    whole = {name: torch.outer(s.rows, s.columns) for name, s in found.items()}
    torch.testing.assert_close(whole["a"] / whole["a"][0, 0], (v / v[0, 0]) ** -0.5)
    torch.testing.assert_close(whole["b"], whole["a"] / math.sqrt(3))
    assert float(torch.cat([*whole.values()]).square().mean()) == pytest.approx(1.0)
    assert scales_of({}) == {}


def test_scales_are_at_most_a_thousand_times_apart():
    far = torch.logspace(-10, 10, 7, dtype=torch.float64)
    squares = {
        "a": Squares(far, far),
        "b": Squares(far * 1e5, far * 1e5),
        "c": Squares(far * 0, far[:1] * 0),
    }
    whole = [torch.outer(s.rows, s.columns).flatten() for s in scales_of(squares).values()]
    everything = torch.cat(whole)
    assert 50 < float(everything.max() / everything.min()) <= 1000 * (1 + 1e-9)


# -- in which norm an example is bounded --


def moved(folder: Path) -> tuple[float, float]:
    """How far leaving a row out moves what reaches the gate, at most, in units of what the plan says;
    and the same of what it stands for, in the plain norm."""
    mechanism = mechanism_for(private_run(folder, model=various()))
    everyone, found = list(range(0, ROWS, 2)), []
    loader = mechanism.loader()
    batches = loader.collate_fn([loader.dataset[i] for i in everyone])
    mechanism.gauge.scales.learn(mechanism.clip(batches).values)  # small where gradients are large
    scales, most = flat(mechanism), mechanism.run.plan.step_release().sensitivities["sum"]
    everything = clip(mechanism, everyone, 1.0)[0]
    for left_out in (everyone[0], everyone[10], everyone[-1]):
        others = clip(mechanism, [i for i in everyone if i != left_out], 1.0)[0]
        change = everything - others
        found.append((float(change.norm()) / most, float((change / scales).norm()) / most))
    return tuple(max(each) for each in zip(*found, strict=True))


def test_one_example_moves_the_sum_by_c_in_the_scaled_norm(tmp_path, monkeypatch):
    scaled, plain = moved(tmp_path / "honest")
    assert 0.95 < scaled <= 1 < 1.2 < plain  # of the plain norm nothing is claimed
    monkeypatch.setattr(DpSgd, "clip", unscaled(DpSgd.clip))
    assert moved(tmp_path / "planted")[0] > 1.2


def unscaled(honest):
    """Plant: plain gradients at the gate."""

    def planted(mechanism, batches):
        clipped = honest(mechanism, batches)
        for name, scale in mechanism.gauge.scales.now.items():
            scale.undo(clipped.values[name])
        return clipped

    return planted


@pytest.mark.parametrize("gauge", [1.0, 12.0])
def test_sum_and_count_are_those_of_a_loop(gauge, tmp_path):
    mechanism = mechanism_for(private_run(tmp_path, quantile=RULE))
    scales, indices = with_scales(mechanism), list(range(0, ROWS, 3))
    gradients, most = (
        [g * scales for g in one_by_one(mechanism, indices)],
        mechanism.run.plan.clips_to,
    )
    norms = [float(each.norm()) for each in gradients]
    expected = sum(
        g / gauge * min(1.0, most * gauge / n) for g, n in zip(gradients, norms, strict=True)
    )
    counted = sum(min(max(2 * (1 - n / (gauge * C)), -0.5), 0.5) for n in norms)
    sums, count = clip(mechanism, indices, gauge)
    torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-12)
    assert count == pytest.approx(counted, abs=1e-6)


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

    scales = scales_of({middle: Squares.of(gradient(0))})
    alone = gradient(0, scales)
    found = [gradient(count, scales) - alone for count in (1, 2, 4, 15, 63)]
    return max(float(change.norm() / alone.norm()) for change in found)


def test_a_regrouped_scaled_gradient_changes_by_less_than_the_margin_has_for_it(monkeypatch):
    most = 2 * (slack_cap(64) + 5e-5)
    assert changed_by_neighbors() < most / 4
    monkeypatch.setattr(scales_module, "SPREAD", 1e12)  # planted: scales of what is only rounding
    assert changed_by_neighbors() > 10 * most


# -- what leaves, and what follows from it --


def test_the_gate_sees_one_unit_and_the_optimizer_that_of_each_number(tmp_path, monkeypatch):
    private, asked, found = private_run(tmp_path, 5), set(), []
    private.randomness = Empty()
    honest = IndependentNoise.like
    monkeypatch.setattr(
        IndependentNoise,
        "like",
        lambda self, v, part, std: asked.add(std) or honest(self, v, part, std),
    )
    mechanism, std = mechanism_for(private), private.plan.noise_std / BATCH
    used = None
    for batches in mechanism.logical_batches():
        used = flat(mechanism) if mechanism.gauge.scales.now else torch.ones(())
        clipped = mechanism.clip(batches)
        with private.release_step() as release:
            mechanism.set_gradients(clipped, release)
        drawn = torch.cat([p.grad.flatten() for p in private.model.parameters()])
        found.append(drawn * used / std)
        spread = torch.ones_like(drawn).div(used).square().sum().sqrt()
        assert mechanism.noise_norm == pytest.approx(float(spread) * std)
        private.model.zero_grad()
    assert asked == {private.plan.noise_std}
    assert stats.kstest(torch.cat(found).numpy(), "norm").pvalue > 1e-7
    planted = torch.cat([each / used for each in found[:-1]])  # the last step's scales in all
    assert (
        float(used.max() / used.min()) > 3 and stats.kstest(planted.numpy(), "norm").pvalue < 1e-7
    )


def scales_follow_from_releases(folder: Path) -> bool:
    """Whether the scales after all steps are what a plain loop makes of the released gradients."""
    private = private_run(folder, 5)
    mechanism, squares = mechanism_for(private), {}
    for batches in mechanism.logical_batches():
        clipped = mechanism.clip(batches)
        with private.release_step() as release:
            mechanism.set_gradients(clipped, release)
        for name, p in private.model.named_parameters():
            square = p.grad.reshape(len(p), -1).numpy() ** 2
            means = [square.mean(1), square.mean(0)]
            old = squares.get(name, means)
            squares[name] = [BETA * a + (1 - BETA) * b for a, b in zip(old, means, strict=True)]
        private.model.zero_grad()
    expected = scales_of({n: Squares(*map(torch.from_numpy, each)) for n, each in squares.items()})
    found = mechanism.gauge.scales.now
    return all(np.allclose(found[n].rows, each.rows, rtol=1e-9) for n, each in expected.items())


def test_scales_follow_from_what_was_released_alone(tmp_path, monkeypatch):
    assert scales_follow_from_releases(tmp_path / "honest")
    clip_honestly, learn, kept = DpSgd.clip, Scales.learn, {}

    def keeping(mechanism, batches):
        clipped = clip_honestly(mechanism, batches)
        kept.update({name: total / BATCH for name, total in clipped.values.items()})
        return clipped

    monkeypatch.setattr(DpSgd, "clip", keeping)  # planted: from gradients without noise
    monkeypatch.setattr(Scales, "learn", lambda self, noised: learn(self, kept))
    assert not scales_follow_from_releases(tmp_path / "planted")


def test_a_rehearsal_takes_the_memory_of_scaled_copies(tmp_path, monkeypatch):
    mechanism, honest, scaled = mechanism_for(private_run(tmp_path)), Scale.of, []
    monkeypatch.setattr(Scale, "of", lambda scale, use: scaled.append(1) or honest(scale, use))
    loader = mechanism.loader()
    mechanism.rehearse(loader.collate_fn([loader.dataset[0], loader.dataset[1]]), None)
    assert len(scaled) >= len(list(mechanism.run.model.parameters()))


# -- whole runs --

SAVING = {"save_strategy": "steps", "save_steps": 2, "accountant": "rdp"}


def made(folder: Path, **options) -> DPTrainer:
    return tiny.trainer(folder, **{"gradient_scaling_beta": BETA, "accountant": "rdp", **options})


def goes_on_with_its_scales(folder: Path) -> bool:
    used, honest = [], Gauge.measure

    def measure(gauge, engine):
        used.append({name: s.rows.clone() for name, s in gauge.scales.now.items()})
        return honest(gauge, engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gauge, "measure", measure)
        made(folder, **SAVING).train()
        tiny.resumed(made(folder, **SAVING), 2)
    assert len(used) == 6 and used[0] == {} and used[2]
    return used[4].keys() == used[2].keys() and all(
        torch.equal(used[4][n], used[2][n]) for n in used[2]
    )


def test_a_resumed_run_goes_on_with_its_scales(tmp_path, monkeypatch):
    assert goes_on_with_its_scales(tmp_path / "honest")
    monkeypatch.setattr(Scales, "go_on", lambda self, kept, model, device: None)  # planted
    assert not goes_on_with_its_scales(tmp_path / "planted")


BROKEN = {
    "not there": lambda kept, name: None,
    "without a parameter": lambda kept, name: kept.pop(name) is None or kept,
    "of another shape": lambda kept, name: {**kept, name: kept[name][1:]},
    "not a number": lambda kept, name: {**kept, name: kept[name] * torch.nan},
    "below 0": lambda kept, name: {**kept, name: kept[name] - 1},
}


def test_scales_that_are_not_those_of_a_checkpoint_are_refused(tmp_path):
    made(tmp_path, **SAVING, max_steps=2).train()
    path = tmp_path / "checkpoint-2" / FILE_NAME
    kept = load_file(path)
    for name in (sorted(kept)[0], sorted(kept)[-1]):  # of columns, and of rows
        for broken in BROKEN.values():
            changed = broken(dict(kept), name)
            path.unlink() if changed is None else save_file(changed, path)
            with pytest.raises(ConfigError, match=FILE_NAME):
                made(tmp_path, **SAVING).train(resume_from_checkpoint=str(path.parent))
            save_file(kept, path)


def test_statement_and_plan_name_it_and_it_costs_nothing(tmp_path):
    trainer = made(tmp_path, clipping_quantile=0.5)
    trainer.train()
    trainer.save_model()
    statement, plan = trainer.privacy_statement(), trainer.privacy_plan
    assert statement.status == "proven" and "DP-SGD with scaled gradients" in statement.sentence()
    assert "the noised sum is divided by the scales" in statement.mechanism
    assert "of the scaled gradient at first" in (tmp_path / "README.md").read_text()
    assert PrivacyPlan.from_dict(plan.to_dict()) == plan
    plain = replace(plan, mechanism=replace(plan.mechanism, gradient_scaling=None))
    assert plan.event() == plain.event() and plan.step_release() == plain.step_release()


REFUSED = {
    "beta": ({"gradient_scaling_beta": 1.0}, InvalidArgumentError, "`gradient_scaling_beta` to be in"),
    "adam_bc": ({"adam_bc_floor": 0.1}, UnsupportedArgumentError, "`adam_bc_floor`.*not implemented"),
    "chunks": ({"chunked_loss": True}, UnsupportedArgumentError, "`gradient_scaling_beta`"),
    "norm": ({"release": ["clipped_gradient_norm"]}, UnsupportedArgumentError, "not implemented"),
    "audit": ({"audit_canaries": 4, "audit_scores": "directions"}, UnsupportedArgumentError, "`gradient_scaling_beta`"),
    "dp_fp": ({"privacy_mode": "dp_fp", "dp_fp_variant": "private_encoder"}, InvalidArgumentError, "gradient_scaling_beta"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_it_is_refused(case, tmp_path):
    options, error, match = REFUSED[case]
    with pytest.raises(error, match=match):
        made(tmp_path, **options)


def test_other_numbers_than_gradients_and_shards_are_refused(tmp_path):
    trainer = made(tmp_path / "rgp", given={"peft_config": RgpConfig(rank=2, task_type="SEQ_CLS")})
    with pytest.raises(UnsupportedArgumentError, match="`peft_config` to be one without it"):
        trainer.train()
    assert trainer.ledger.steps() == 0
    with pytest.raises(UnsupportedModelError, match="spread over processes"):
        mechanism_for(private_run(tmp_path / "loop")).refuse_shards(True)
