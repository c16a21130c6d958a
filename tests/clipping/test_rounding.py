"""Norms in float32 are never too small by more than 1e-4, and sums round by no more than the slack.

Where factors are float32, the truth is the gradient formed from the same factors in float64.
"""

import functools
import sys

import pytest
import torch
from models import (
    TinyTied,
    batch_for,
    cancelling_linear,
    clip_losses,
    clipped,
    example_norms,
    loop,
    loop_over_rows,
    norm_of,
    roberta,
)
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.clipping import ClippingEngine, gradients, norms, rounding
from hf_dp.clipping.gradients import (
    Dense,
    Lookups,
    OuterProducts,
    PerExampleGradient,
    Weights,
    sum_of,
)
from hf_dp.clipping.norms import inner_product
from hf_dp.clipping.rounding import LastOf, gram_blocks, outer_norms
from hf_dp.plans.rounding import slack_cap

NORM_RTOL = 1e-4  # invariant 2


def explicit(use: PerExampleGradient, shape: tuple[int, ...], examples: int) -> Tensor:
    """The gradients in float64, (examples, *shape)."""
    return torch.stack([use.example_gradient(i, torch.Size(shape)) for i in range(examples)])


def truth(of_parameters: list[list[PerExampleGradient]], shape: torch.Size) -> Tensor:
    wholes = [sum(use.example_gradient(0, shape) for use in uses) for uses in of_parameters]
    return torch.stack(wholes).norm()


def measured(of_parameters: list[list[PerExampleGradient]], shape: torch.Size) -> Tensor:
    uses = {nn.Parameter(torch.zeros(shape)): of_parameter for of_parameter in of_parameters}
    return example_norms(uses, 1)[0][0]


def assert_measured(of_parameters: list[list[PerExampleGradient]], shape: torch.Size) -> None:
    found, exact = measured(of_parameters, shape).double(), truth(of_parameters, shape)
    torch.testing.assert_close(found, exact, rtol=NORM_RTOL, atol=0)


class Source:
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


def cancelling(
    source: Source, length: int, width: int, residue: float, scale: float = 1.0
) -> OuterProducts:
    """Coefficients of mean zero on nearly equal inputs, as in a key projection. The gradient is
    about ``residue`` of its terms."""
    coefficients = source(1, length, 1)
    coefficients = coefficients - coefficients.mean(1, keepdim=True)
    return OuterProducts(
        coefficients * source(1, 1, width) * scale,
        source(1, 1, width) + residue * source(1, length, width),
    )


@pytest.mark.parametrize("residue", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("length", [2, 16, 128])
def test_cancelling_positions_in_one_linear_layer(length, residue):
    for seed in range(5):
        assert_measured([[cancelling(Source(seed), length, 64, residue)]], torch.Size((64, 64)))


def test_planted_trust_in_the_gram_sum_is_seen(monkeypatch):
    """Without the second look a norm comes out far off, so the test above does guard something."""
    monkeypatch.setattr(norms, "_TOLERANCE", float("inf"))
    use, shape = cancelling(Source(0), 128, 64, 1e-6), torch.Size((64, 64))
    assert abs(float(measured([[use]], shape).double() / truth([[use]], shape)) - 1) > 0.01


def test_cancelling_linear_through_the_engine():
    linear, losses, truths = cancelling_linear()
    found, _ = clip_losses(linear, losses, 1.0)
    torch.testing.assert_close(found.double(), truths, rtol=NORM_RTOL, atol=0)


def tied_uses(
    source: Source, length: int, vocabulary: int, width: int, residue: float
) -> tuple[OuterProducts, Lookups]:
    """The head's gradient cancels the embedding's: same tokens, opposite sign."""
    tokens = torch.randint(0, vocabulary, (1, length), generator=source.generator)
    right = 10 * source(1, length, width)
    left = torch.zeros(1, length, vocabulary)
    left.scatter_(2, tokens[..., None], 100.0)
    grads = -100 * right + residue * source(1, length, width)
    return OuterProducts(left, right), Lookups(tokens, grads)


@pytest.mark.parametrize("residue", [1e2, 1.0, 1e-1])
@pytest.mark.parametrize("vocabulary", [3, 50])
@pytest.mark.parametrize("length", [1, 8, 64])
def test_embedding_and_head_that_cancel(length, vocabulary, residue):
    """Terms of 1e6 and more, a result down to 1: the squared norm used to come out negative."""
    for seed in range(4):
        pair = list(tied_uses(Source(seed), length, vocabulary, 32, residue))
        assert_measured([pair], torch.Size((vocabulary, 32)))


def test_the_naive_sum_fails_on_these_inputs():
    """Otherwise the tests above would prove nothing."""
    worst = 0.0
    negative = False
    for seed in range(20):
        outer, lookups = tied_uses(Source(seed), 64, 50, 32, 1e-1)
        squares = outer.norms().squared + lookups.norms().squared
        naive = squares + 2 * inner_product(outer, lookups)[0]
        expected = truth([[outer, lookups]], torch.Size((50, 32)))
        worst = max(worst, abs(float(naive.clamp_min(0).sqrt() / expected) - 1))
        negative = negative or bool(naive < 0)
    assert worst > 0.1
    assert negative


def test_tied_model_in_float32():
    torch.manual_seed(0)
    model, double = TinyTied(40, 16), TinyTied(40, 16).double()
    double.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 40, (6, 20))
    loss = lambda module, tokens: module(tokens).square().mean((1, 2))  # noqa: E731
    expected = loop(double, tokens[:, None], loss, 1.0).norms
    found, _ = clip_losses(model, lambda: loss(model, tokens), 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=NORM_RTOL, atol=0)


def test_only_the_key_projections_train():
    """Softmax ignores a shift of its scores, so a key projection's gradient cancels more."""
    model, double = roberta(dtype=torch.float32), roberta(dtype=torch.float32).double()
    for each in (model, double):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("key.weight" in name)
    batch = batch_for(model, (30, 30, 12))
    expected = loop_over_rows(double, batch, 1.0).norms
    found, _ = clipped(model, batch, 1.0)
    # the model's own float32 rounding comes on top of the engine's
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)


def test_a_large_rounding_error_does_not_hide_a_small_one():
    """Two layers cancel, one after the other. The first one's error makes the total look large.
    Once it is recomputed the total is small, and the second layer, passed over at first, is now the
    doubtful one."""
    for seed in range(100):
        source = Source(seed)
        first = cancelling(source, 16, 64, 1e-7, scale=1e3)
        assert_measured([[first], [cancelling(source, 16, 64, 1e-5)]], torch.Size((64, 64)))


def test_lookups_that_cancel_to_nothing_in_float32_are_not_taken_for_zero():
    """1e8 + 1 - 1e8 is 0 in float32; the example would pass unclipped."""
    use = Lookups(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[[1e8], [1.0], [-1e8]]]))
    shape = torch.Size((2, 1))
    assert float(truth([[use]], shape)) == 1.0
    assert float(measured([[use]], shape)) == pytest.approx(1.0, rel=NORM_RTOL)


@pytest.mark.parametrize("residue", [1e-2, 1e-4, 1e-6, 1e-7])
@pytest.mark.parametrize("length", [16, 64], ids=["outer_products", "formed_at_once"])
def test_contribution_of_a_cancelling_example_to_the_sum(length, residue):
    """What enters the sum is within the clipping norm even if its terms are far larger."""
    source = Source(0)
    linear = nn.Linear(64, 64, bias=False)
    x, direction = source(4, length, 64), source(64)
    coefficients = source(4, length)
    coefficients[0] -= coefficients[0].mean()
    x[0] = source(1, 64) + residue * x[0]
    clipping_norm = 0.1 * float(
        (coefficients[0].double() @ x[0].double()).norm() * direction.double().norm()
    )

    def sums(factor: float) -> Tensor:
        factors = torch.tensor([factor, 1.0, 1.0, 1.0])
        losses = lambda: ((linear(x) @ direction) * coefficients).sum(1) * factors  # noqa: E731
        return clip_losses(linear, losses, clipping_norm)[1]["weight"]

    # A NaN removes the example and changes nothing else.
    assert float((sums(1.0) - sums(torch.nan)).norm()) <= clipping_norm * (1 + 1e-3)


# -- is the claimed rounding error an upper bound? ---


def ratio(claimed: Tensor, found: Tensor, exact: Tensor) -> float:
    return float(((found.double() - exact).abs() / claimed.double().clamp_min(1e-300)).max())


def outer_records(kind: str, source: Source, length: int, m: int, n: int) -> OuterProducts:
    if kind == "random":
        return OuterProducts(source(2, length, m), source(2, length, n))
    if kind == "coherent":
        return OuterProducts(
            source(2, 1, m) + 1e-3 * source(2, length, m),
            source(2, 1, n).abs() + 1e-3 * source(2, length, n),
        )
    if kind == "cancelling":
        coefficients = source(2, length, 1)
        return OuterProducts(
            (coefficients - coefficients.mean(1, keepdim=True)) * source(2, 1, m),
            source(2, 1, n) + 1e-4 * source(2, length, n),
        )
    if kind == "heavy":
        return OuterProducts(
            source(2, length, m) * torch.exp(4 * source(2, length, 1)),
            source(2, length, n) * torch.exp(4 * source(2, length, 1)),
        )
    # Equal products round the same way each time: the error grows with n, not its root.
    assert kind == "constant"
    return OuterProducts(torch.full((2, length, m), 0.1), torch.full((2, length, n), 0.3))


@pytest.mark.parametrize(
    ("length", "m", "n"),
    [(1, 768, 768), (8, 768, 3072), (32, 16, 16), (128, 64, 768), (512, 2, 768)],
)
@pytest.mark.parametrize("kind", ["random", "coherent", "cancelling", "heavy", "constant"])
def test_claimed_rounding_error_of_outer_products_is_an_upper_bound(kind, length, m, n):
    for seed in range(2):
        use = outer_records(kind, Source(seed), length, m, n)
        result = use.norms()
        found, claimed = result.squared, result.error
        exact = torch.bmm(use.left.double().mT, use.right.double()).square().sum((1, 2))
        assert ratio(claimed, found, exact) < 1


@pytest.mark.parametrize("kind", ["random", "positive", "heavy", "rise_and_fall"])
@pytest.mark.parametrize("length", [1, 9, 65, 513])
def test_claimed_rounding_error_of_lookups_is_an_upper_bound(length, kind):
    risen, counts = torch.tensor([0.3, -0.3, 1e-4]), [length // 2, length // 2, 1]
    for seed in range(3):
        source = Source(seed)
        grads = {
            "random": source(2, length, 5),
            "positive": source(2, length, 5).abs(),
            "heavy": source(2, length, 5) * torch.exp(5 * source(2, length, 1)),
            "rise_and_fall": risen.repeat_interleave(torch.tensor(counts))[:, None].repeat(2, 1, 5),
        }[kind]
        tokens = torch.zeros(2, grads.shape[1], dtype=torch.long)
        if kind != "rise_and_fall":
            tokens = torch.randint(0, 4, tokens.shape, generator=source.generator)
        use = Lookups(tokens, grads)
        result = use.norms()
        found, claimed = result.squared, result.error
        exact = explicit(use, (4, 5), 2).square().sum((1, 2))
        assert ratio(claimed, found, exact) < 1


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("length", [1, 8, 64])
def test_claimed_rounding_error_of_two_uses_is_an_upper_bound(length, orthogonal):
    """The bound is one on |G + H|^2 as a whole. For orthogonal factors the cross term alone is all
    rounding, but then the squares dominate."""
    for seed in range(3):
        source = Source(seed)
        right, grads = source(2, length, 16), source(2, length, 16)
        if orthogonal:
            right = source(2, 1, 16).expand(2, length, 16).contiguous()
            grads = grads - (grads * right).sum(-1, keepdim=True) * right / right.square().sum(
                -1, keepdim=True
            )
        outer = OuterProducts(source(2, length, 12), right)
        lookups = Lookups(torch.randint(0, 12, (2, length), generator=source.generator), grads)
        both = norms.norms_of([outer, lookups])
        found, claimed = both.squared, both.error
        whole = explicit(outer, (12, 16), 2) + explicit(lookups, (12, 16), 2)
        exact = whole.square().sum((1, 2))
        assert ratio(claimed, found, exact) < 1


def test_mixed_inner_products_equal_the_explicit_product():
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 20, (3, 5), generator=generator)
    lookups = Lookups(tokens, torch.randn(3, 5, 8, generator=generator).double())
    outer = OuterProducts(*(torch.randn(3, 7, n, generator=generator).double() for n in (20, 8)))
    dense = Dense(torch.randn(3, 20, 8, generator=generator).double())
    for one, other in ((outer, lookups), (lookups, outer), (dense, outer), (dense, lookups)):
        got, _ = inner_product(one, other)
        expected = (explicit(one, (20, 8), 3) * explicit(other, (20, 8), 3)).sum((1, 2))
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["linear", "tied"])
def test_factors_of_bf16_are_squared_in_float32(form):
    source = Source(0)
    grads = source(1, 64, 32).bfloat16()
    use: PerExampleGradient = Lookups(torch.zeros(1, 64, dtype=torch.long), grads)
    if form == "linear":
        use = OuterProducts(grads, source(1, 64, 32).bfloat16())
    shape = torch.Size((32, 32))
    found, exact = measured([[use]], shape).double(), truth([[use]], shape)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


def test_ordinary_gradients_never_need_the_slow_path(monkeypatch):
    """A float64 gradient is formed only in special cases, not on random and real models. With only
    an embedding training, nothing hides its rounding error."""

    def refuse(self: PerExampleGradient, index: int, shape: torch.Size) -> Tensor:
        raise AssertionError("slow path")

    for form in (OuterProducts, Lookups, Dense):
        monkeypatch.setattr(form, "example_gradient", refuse)
    model = roberta(dtype=torch.float32)
    clipped(model, batch_for(model, (38, 38, 1, 9)), 1.0)
    source = Source(0)
    for length in (1, 16, 128):
        use = OuterProducts(source(4, length, 64), 1 + source(4, length, 64))
        example_norms({nn.Parameter(torch.zeros(64, 64)): [use]}, 4)
    tokens = torch.randint(0, 200, (4, 512), generator=source.generator)
    example_norms({nn.Parameter(torch.zeros(200, 16)): [Lookups(tokens, source(4, 512, 16))]}, 4)


@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("length", [1, 3, 100])
@pytest.mark.parametrize(("large", "small"), [(5e16, 2e-23), (1e19, 1e-24), (1e16, 1e-20)])
@pytest.mark.parametrize("large_is", ["input", "output_gradient"])
def test_a_factor_whose_square_underflows_is_not_taken_for_zero(
    large_is, large, small, length, strategy
):
    """The gradient is moderate, but the Gram matrix of one factor is 0 or has lost its digits."""
    torch.manual_seed(0)
    width = 512
    model = nn.Linear(width, width, bias=False)
    of_input, of_gradient = (large, small) if large_is == "input" else (small, large)
    x = torch.randn(2, length, width) * of_input
    direction = torch.randn(2, length, width) * of_gradient
    exact = torch.einsum("btm,btn->bmn", direction.double(), x.double())
    expected = exact.flatten(1).norm(dim=1)
    clipping_norm = float(expected.min()) / 2
    losses = lambda: (model(x) * direction).sum((1, 2))  # noqa: E731
    found, sums = clip_losses(model, losses, clipping_norm, strategy=strategy)
    kept = torch.isfinite(found)  # where the other square overflows, the example is removed
    torch.testing.assert_close(found[kept].double(), expected[kept], rtol=NORM_RTOL, atol=0)
    weights = torch.where(kept, clipping_norm / expected, 0.0)
    weighted = torch.einsum("b,bmn->mn", weights, exact)
    torch.testing.assert_close(sums["weight"], weighted, rtol=1e-3, atol=1e-7)
    assert kept.all() or large == 1e19


def test_an_example_without_a_gradient_is_not_recomputed(monkeypatch):
    """What underflow could have taken is nothing beside a clipping norm, so zeros are believed."""
    monkeypatch.setattr(norms._Group, "settle", lambda *args: pytest.fail("recomputed"))
    model, x = nn.Linear(768, 768), 100 * torch.randn(2, 64, 768)
    losses = lambda: model(x).sum((1, 2)) * torch.tensor([0.0, 1.0])  # noqa: E731
    assert clip_losses(model, losses, 1e-9)[0][0] == 0


# -- norms taken together ---


def test_a_remembered_gram_matrix_is_that_of_the_same_numbers():
    """The memory holds what it knows by address, so it keeps it alive and sees changes in place."""
    generator = torch.Generator().manual_seed(4)
    right = torch.randn(2, 66, 8, generator=generator)
    grams = LastOf(gram_blocks)
    for change in (lambda: None, lambda: None, lambda: right.mul_(2)):
        change()
        left = torch.randn(2, 66, 4, generator=generator)
        alone = OuterProducts(left, right).norms()
        remembered = OuterProducts(left, right).norms(grams)
        assert torch.equal(alone.squared, remembered.squared)
        assert torch.equal(alone.error, remembered.error)
    other = OuterProducts(left, right.roll(1, 1))
    assert not torch.allclose(other.norms(grams).squared, remembered.squared)


@pytest.mark.parametrize("together", [1, 2**18])
def test_uses_reduced_together_have_the_norms_they_have_alone(together, monkeypatch):
    """Norms come in order, for any lengths in succession, with halved matrices among them. It does
    not matter how many fit together."""
    monkeypatch.setattr(rounding, "_TOGETHER", {"cpu": together})
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 3, 7, 130, 130, 64, 3, 1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    every = [OuterProducts(draw(2, t, 6), draw(2, t, 5)) for t in lengths]
    for use, found in zip(every, outer_norms((use.left, use.right) for use in every), strict=True):
        exact = explicit(use, (6, 5), 2).square().sum((1, 2))
        torch.testing.assert_close(found.squared.double(), exact, rtol=1e-5, atol=0)
        alone = use.norms()
        torch.testing.assert_close(found.error, alone.error, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.slack, alone.slack, rtol=1e-5, atol=0)
    assert outer_norms([]) == []


def test_remembered_products_with_weights_are_those_of_the_same_numbers():
    """A factor shared by several uses is scaled once, and again after a change in place."""
    factor = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(6))
    weights = Weights(torch.tensor([0.5, 2.0]))
    first = weights.scaled(factor, torch.float32)
    assert weights.scaled(factor, torch.float32) is first
    factor.mul_(3)
    torch.testing.assert_close(weights.scaled(factor, torch.float32), 3 * first)
    assert weights.scaled(factor, torch.float64).dtype == torch.float64
    rolled = weights.scaled(factor.roll(1, 0), torch.float32)[1]
    torch.testing.assert_close(rolled, 4 * weights.scaled(factor, torch.float32)[0])


def rounded_by_product(gradient, exact: torch.Tensor) -> float:
    """Return how far a sum over examples is from the exact one, in units of their slack."""
    total = torch.zeros(exact.shape, dtype=torch.float64)
    gradient.add_weighted_sum(total, Weights(torch.ones(len(gradient.slack()))))
    return float((total - exact).norm() / gradient.slack().sum())


@functools.cache
def worst_rounding() -> float:
    """Return the most of :func:`rounded_by_product` over terms of one size, whose rounding adds up,
    in products of several shapes, and terms that then cancel."""
    found = [0.0]
    for height, width in ((1, 1), (1, 64), (8, 16), (16, 16), (48, 64)):
        for examples, positions in ((16, 64), (4, 512), (16, 1024)):
            for value, signs in ((0.1, 1), (1 / 3, 1), (0.7, 1), (0.1, -1)):
                left = torch.ones(examples, positions, height)
                right = torch.full((examples, positions, width), value)
                right[:, positions // 2 :] *= signs
                exact = torch.einsum("btm,btn->mn", left.double(), right.double())
                found.append(rounded_by_product(OuterProducts(left, right), exact))
    for examples in (16, 256):
        rows = torch.full((examples, 300), 0.1)
        found.append(rounded_by_product(Dense(rows), rows.double().sum(0)))
    return max(found)


def test_a_product_over_a_batch_rounds_by_no_more_than_the_slack_of_its_examples():
    assert worst_rounding() <= 1


def test_planted_slack_of_a_sixteenth_is_seen():
    assert worst_rounding() * 16 > 1


def test_planted_sums_of_any_length_are_seen(monkeypatch):
    """Planted: thin products term by term in float32."""
    monkeypatch.setattr(gradients, "_THIN", 0)
    monkeypatch.setattr(gradients, "_TERMS", 2**30)
    assert worst_rounding.__wrapped__() > 1


def test_a_row_whose_positions_cancel_enters_with_little_weight():
    """What is left of it is rounding, which its neighbors help to decide."""
    torch.manual_seed(0)
    x, g = torch.randn(2, 1, 64, 32)
    x, g = torch.cat([x, x], 1), torch.cat([g, -g], 1)
    model = nn.Linear(32, 32, bias=False)
    _, sums = clip_losses(model, lambda: (model(x) * g).sum((1, 2)), 1e-3)
    assert norm_of(sums) < 1e-3 * slack_cap(0)


@pytest.mark.parametrize("form", ["factors", "lookups", "summed", "summed last"])
def test_padding_does_not_change_a_slack(form):
    """A weight that it bounds would depend on the longest neighbor."""
    torch.manual_seed(0)
    g = torch.randn(2, 7, 8)

    def slack(padding):
        padded = F.pad(g, (0, 0, 0, padding))
        tokens = torch.arange(7 + padding).expand(2, -1)
        made = {
            "factors": lambda: OuterProducts(padded, torch.ones(2, 7 + padding, 3)),
            "lookups": lambda: Lookups(tokens, padded),
            "summed": lambda: sum_of(padded, torch.float32),
            "summed last": lambda: sum_of(padded.mT, torch.float32, 2),
        }
        return made[form]().slack()

    torch.testing.assert_close(slack(0), slack(500), rtol=1e-6, atol=0)


LAYERS = {"linear": nn.Linear(64, 64), "layer norm": nn.LayerNorm(64), "rms norm": nn.RMSNorm(64)}
LAYERS["linear"].weight.requires_grad_(False)


def moved_by_padding(kind: str) -> float:
    """Return how far, in units of C, the sum over 15 rows whose positions cancel moves when a longer
    one joins them, so that they are padded on the left. Its own gradient is next to nothing."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(1, 32, 64, generator=generator) * 3e5
    g = torch.cat([half, -half[:, torch.randperm(32, generator=generator)]], 1)
    x = torch.ones(1, 64, 64) * torch.linspace(1, 2, 64)
    sums = []
    for longer in (0, 7):
        model, pad = LAYERS[kind], (0, 0, longer, 0)
        rows = [(F.pad(x, pad, value=1.0), F.pad(g, pad))] * 15
        if longer:
            rows.append((torch.randn(1, 71, 64), torch.full((1, 71, 64), 1e-9)))
        with ClippingEngine(model, 0.1) as engine:
            engine.regrouped = 16
            features, factors = (torch.cat(part) for part in zip(*rows, strict=True))
            engine.backward((model(features) * factors).sum((1, 2)))
            sums.append(torch.cat([total.flatten() for total in engine.collect().values()]))
    return float((sums[0] - sums[1]).norm()) / 0.1


@pytest.mark.parametrize("kind", LAYERS)
def test_padding_does_not_move_gradients_that_are_sums_over_positions(kind):
    assert moved_by_padding(kind) < 0.01


def test_planted_sums_over_positions_without_slack_are_seen(monkeypatch):
    rule = sys.modules["hf_dp.clipping.rules.affine"]
    monkeypatch.setattr(rule, "summed", lambda terms, dtype: Dense(terms.sum(1, dtype=dtype)))
    assert moved_by_padding("linear") > 1.01
