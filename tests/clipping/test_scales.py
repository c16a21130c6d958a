"""Scaled gradients: exact against the loop over single examples, for every rule and strategy."""

import pytest
import torch
from models import EACH_RULE, SHORT, assert_equal, built, clip, collate, gradients_of, trained
from torch import nn

from hf_dp.clipping import ClippingEngine, Lookups, OuterProducts
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import Dense
from hf_dp.clipping.scales import Scale
from hf_dp.errors import InvalidArgumentError
from hf_dp.losses import per_example_loss


def scales_of(model: nn.Module) -> dict[str, Scale]:
    """Scales from 1/3 to 3 for rows and for columns."""
    spread = lambda count: torch.exp2(torch.rand(count, dtype=torch.float64) * 3.2 - 1.6)  # noqa: E731
    return {
        name: Scale(spread(p.shape[0] if p.shape else 1), spread(p.shape[1:].numel()))
        for name, p in trained(model).items()
    }


def whole(scale: Scale, parameter: torch.Tensor) -> torch.Tensor:
    return torch.outer(scale.rows, scale.columns).view(parameter.shape)


def found_and_expected(name: str, strategy: str):
    """The scales, what the engine finds with them, and the clipped loop over scaled gradients."""
    architecture, model, examples = built(name, SHORT)
    scales, parameters, batch = scales_of(model), trained(model), collate(model, examples)
    with architecture.precision():
        alone = [
            [None if g is None else g * whole(scales[name], g) for name, g in zip(parameters, one)]
            for one in gradients_of(model, examples)
        ]
        expected = clip(parameters, alone)
        with ClippingEngine(model, expected.clipping_norm, strategy=strategy) as engine:
            engine.measure(scales=scales)
            norms, sums = engine.backward(per_example_loss(model, batch)), engine.collect()
    return scales, norms, sums, expected


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", EACH_RULE)
def test_norms_and_sums_are_those_of_scaled_gradients(name, strategy):
    scales, norms, sums, expected = found_and_expected(name, strategy)
    assert_equal(norms, sums, expected)
    for parameter, each in scales.items():
        undone = sums[parameter].clone()
        each.undo(undone)
        torch.testing.assert_close(undone * whole(each, undone), sums[parameter])


@pytest.mark.parametrize("form", [OuterProducts, Lookups, Dense])
def test_planted_scales_that_miss_a_form_are_seen(form, monkeypatch):
    honest = Scale.of
    missed = lambda self, use: use if isinstance(use, form) else honest(self, use)  # noqa: E731
    monkeypatch.setattr(Scale, "of", missed)
    strategy = "per_example" if form is Dense else "book_keeping"
    _, *found = found_and_expected("gpt2_tied", strategy)
    with pytest.raises(AssertionError):
        assert_equal(*found)


def test_a_new_with_begins_in_the_units_of_gradients():
    model, seen = nn.Linear(3, 2, bias=False), []
    engine, x = ClippingEngine(model, 0.1), torch.ones(4, 3)

    def norm() -> float:
        engine.backward(model(x).sum(1) * 1e-4)
        return float(engine.collect()["weight"].norm())

    with engine:
        before = norm()
    with engine:
        scale = Scale(torch.full((2,), 3.0), torch.ones(3))
        engine.measure(0.5, lambda norms, used: seen.append(1), {"weight": scale})
        assert norm() == pytest.approx(6 * before)
    with engine:
        assert norm() == before and len(seen) == 1


def test_other_gauges_and_scales_are_refused():
    _, model, _ = built("bert", SHORT)
    name, parameter = next(iter(trained(model).items()))
    one, right = torch.ones(1), Scale(*map(torch.ones, parameter.shape))
    wrong = {"no such": right, name: Scale(one, one), f"{name} ": right}
    with ClippingEngine(model, 0.1) as engine:
        for each, scale in wrong.items():
            with pytest.raises(InvalidArgumentError, match="`scales`"):
                engine.measure(scales={each: scale})
        for value in (0.0, -1.0, torch.inf, torch.nan):
            with pytest.raises(InvalidArgumentError, match="above 0"):
                engine.measure(scales={name: Scale(right.rows * value, right.columns)})
        with pytest.raises(InvalidArgumentError, match="`gauge` to be at least 1e-08"):
            engine.measure(1e-9)
        engine.measure(scales={name: right})
