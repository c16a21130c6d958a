"""Scaled gradients: exact against the loop over single examples, for every rule and strategy."""

import pytest
import torch
from models import (
    EACH_RULE,
    SHORT,
    Expected,
    assert_equal,
    built,
    clip,
    collate,
    gradients_of,
    trained,
)
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


def expected_of(model: nn.Module, examples, scales: dict[str, Scale]) -> Expected:
    parameters = trained(model)
    found = [
        [None if g is None else g * whole(scales[name], g) for name, g in zip(parameters, one)]
        for one in gradients_of(model, examples)
    ]
    return clip(parameters, found)


def clipped(model: nn.Module, batch, scales, c: float, strategy: str = "book_keeping"):
    with ClippingEngine(model, c, strategy=strategy) as engine:
        engine.measure(scales=scales)
        return engine.backward(per_example_loss(model, batch)), engine.collect()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", EACH_RULE)
def test_norms_and_sums_are_those_of_scaled_gradients(name, strategy):
    architecture, model, examples = built(name, SHORT)
    with architecture.precision():
        scales = scales_of(model)
        expected = expected_of(model, examples, scales)
        batch = collate(model, examples)
        norms, sums = clipped(model, batch, scales, expected.clipping_norm, strategy)
        assert_equal(norms, sums, expected)
        for parameter, each in scales.items():
            undone = sums[parameter].clone()
            each.undo(undone)
            torch.testing.assert_close(undone * whole(each, undone), sums[parameter])


@pytest.mark.parametrize("form", [OuterProducts, Lookups, Dense])
def test_planted_scales_that_miss_a_form_are_seen(form, monkeypatch):
    architecture, model, examples = built("gpt2_tied", SHORT)
    scales, honest = scales_of(model), Scale.of
    expected = expected_of(model, examples, scales)
    missed = lambda self, use: use if isinstance(use, form) else honest(self, use)  # noqa: E731
    monkeypatch.setattr(Scale, "of", missed)
    strategy = "per_example" if form is Dense else "book_keeping"
    with architecture.precision():
        found = clipped(model, collate(model, examples), scales, expected.clipping_norm, strategy)
    with pytest.raises(AssertionError):
        assert_equal(*found, expected)


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
