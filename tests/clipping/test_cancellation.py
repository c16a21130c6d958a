"""Float32 norms of gradients that cancel are never too small by more than 1e-4.

Every factor here is float32; the truth is the gradient formed from the same factors in float64.
"""

from __future__ import annotations

import pytest
import torch
from models import TinyTied, batch_for, engine_result, example_norms, loop_oracle, roberta
from torch import Tensor, nn

from hf_dp.clipping import ClippingEngine, norms
from hf_dp.clipping.gradients import Dense, Lookups, OuterProducts, PerExampleGradient
from hf_dp.clipping.norms import inner_product

NORM_RTOL = 1e-4  # invariant 2


def truth(of_parameters: list[list[PerExampleGradient]], shape: torch.Size) -> Tensor:
    squares = [
        sum(use.example_gradient(0, shape) for use in of_parameter).square().sum()
        for of_parameter in of_parameters
    ]
    return torch.stack(squares).sum().sqrt()


def measured(of_parameters: list[list[PerExampleGradient]], shape: torch.Size) -> Tensor:
    return example_norms(
        {nn.Parameter(torch.zeros(shape)): of_parameter for of_parameter in of_parameters}, 1
    )[0][0]


class Source:
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


def cancelling(
    source: Source, length: int, width: int, residue: float, scale: float = 1.0
) -> OuterProducts:
    """Coefficients of mean zero on nearly equal inputs, as in a key projection.

    The gradient is about ``residue`` of its terms.
    """
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
        use = cancelling(Source(seed), length, 64, residue)
        shape = torch.Size((64, 64))
        torch.testing.assert_close(
            measured([[use]], shape).double(), truth([[use]], shape), rtol=NORM_RTOL, atol=0
        )


def test_cancelling_linear_through_the_engine():
    """loss = sum_t c_t v.(W a_t) with c = (1, -1) and nearly equal a: G = v (a_1 - a_2)^T."""
    torch.manual_seed(0)
    width = 256
    linear = nn.Linear(width, width, bias=False)
    direction, x = torch.randn(width), torch.randn(4, 1, width).expand(4, 2, width).clone()
    x[:, 1] += torch.tensor([1e-1, 1e-2, 1e-3, 1e-4])[:, None] * torch.randn(4, width)
    truths = direction.double().norm() * (x[:, 0].double() - x[:, 1].double()).norm(dim=1)
    with ClippingEngine(linear, 1.0) as engine:
        output = linear(x) @ direction
        found = engine.backward(output[:, 0] - output[:, 1])
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
        shape = torch.Size((vocabulary, 32))
        expected = truth([pair], shape)
        found = measured([pair], shape).double()
        torch.testing.assert_close(found, expected, rtol=NORM_RTOL, atol=0)


def test_the_naive_sum_fails_on_these_inputs():
    """Otherwise the tests above would prove nothing."""
    worst = 0.0
    negative = False
    for seed in range(20):
        outer, lookups = tied_uses(Source(seed), 64, 50, 32, 1e-1)
        naive = (
            outer.norms().squared + lookups.norms().squared + 2 * inner_product(outer, lookups)[0]
        )
        expected = truth([[outer, lookups]], torch.Size((50, 32)))
        worst = max(worst, abs(float(naive.clamp_min(0).sqrt() / expected) - 1))
        negative = negative or bool(naive < 0)
    assert worst > 0.1
    assert negative


def test_tied_model_in_float32():
    torch.manual_seed(0)
    model = TinyTied(vocabulary=40, width=16)
    double = TinyTied(vocabulary=40, width=16).double()
    double.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 40, (6, 20))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    loss = lambda module, inputs: module(inputs["input_ids"]).square().mean((1, 2))  # noqa: E731
    expected, _ = loop_oracle(double, batch, 1.0, loss)
    found, _ = engine_result(model, batch, 1.0, loss=loss)
    torch.testing.assert_close(found.double(), expected, rtol=NORM_RTOL, atol=0)


def test_only_the_key_projections_train():
    """Softmax ignores a shift of its scores, so a key projection's gradient cancels more."""
    model, double = roberta(dtype=torch.float32), roberta(dtype=torch.float32).double()
    for each in (model, double):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("key.weight" in name)
    batch = batch_for(model, (30, 30, 12))
    expected, _ = loop_oracle(double, batch, 1.0)
    found, _ = engine_result(model, batch, 1.0)
    # the model's own float32 rounding comes on top of the engine's
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)


def test_a_large_rounding_error_does_not_hide_a_small_one():
    """Two layers cancel, one after the other.

    The first one's error makes the total look large. Once it is recomputed the total is small, and the
    second layer, passed over at first, is now the doubtful one.
    """
    worst = 0.0
    shape = torch.Size((64, 64))
    for seed in range(100):
        source = Source(seed)
        pair: list[list[PerExampleGradient]] = [
            [cancelling(source, 16, 64, 1e-7, scale=1e3)],
            [cancelling(source, 16, 64, 1e-5)],
        ]
        worst = max(worst, abs(float(measured(pair, shape).double() / truth(pair, shape)) - 1))
    assert worst < NORM_RTOL


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
        with ClippingEngine(linear, clipping_norm) as engine:
            losses = ((linear(x) @ direction) * coefficients).sum(1)
            engine.backward(losses * torch.tensor([factor, 1.0, 1.0, 1.0]))
            return engine.collect()["weight"].double()

    moved = float(
        (sums(1.0) - sums(torch.nan)).norm()
    )  # a NaN removes the example and changes nothing else
    assert moved <= clipping_norm * (1 + 1e-3)


# -- is the claimed rounding error an upper bound?
# ---------------------------------------------------------------------


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
    assert (
        kind == "constant"
    )  # equal products round the same way each time: the error grows with n, not its root
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
    for seed in range(3):
        source = Source(seed)
        grads = {
            "random": source(2, length, 5),
            "positive": source(2, length, 5).abs(),
            "heavy": source(2, length, 5) * torch.exp(5 * source(2, length, 1)),
            "rise_and_fall": torch.cat(
                [
                    torch.full((2, length // 2, 5), 0.3),
                    torch.full((2, length // 2, 5), -0.3),
                    torch.full((2, 1, 5), 1e-4),
                ],
                1,
            ),
        }[kind]
        tokens = torch.zeros(2, grads.shape[1], dtype=torch.long)
        if kind != "rise_and_fall":
            tokens = torch.randint(0, 4, tokens.shape, generator=source.generator)
        use = Lookups(tokens, grads)
        result = use.norms()
        found, claimed = result.squared, result.error
        exact = torch.stack(
            [use.example_gradient(i, torch.Size((4, 5))).square().sum() for i in range(2)]
        )
        assert ratio(claimed, found, exact) < 1


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("length", [1, 8, 64])
def test_claimed_rounding_error_of_two_uses_is_an_upper_bound(length, orthogonal):
    """The bound is one on |G + H|^2 as a whole.

    For orthogonal factors the cross term alone is all rounding, but then the squares dominate.
    """
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
        shape = torch.Size((12, 16))
        exact = torch.stack(
            [
                (outer.example_gradient(i, shape) + lookups.example_gradient(i, shape))
                .square()
                .sum()
                for i in range(2)
            ]
        )
        assert ratio(claimed, found, exact) < 1


@pytest.mark.parametrize("form", ["outer", "lookups"])
def test_inner_product_with_a_dense_use(form):
    source = Source(0)
    dense = Dense(source(2, 12, 16))
    other: PerExampleGradient = (
        OuterProducts(source(2, 7, 12), source(2, 7, 16))
        if form == "outer"
        else Lookups(torch.randint(0, 12, (2, 7), generator=source.generator), source(2, 7, 16))
    )
    shape = torch.Size((12, 16))
    exact = torch.stack(
        [
            (dense.example_gradient(i, shape) * other.example_gradient(i, shape)).sum()
            for i in range(2)
        ]
    )
    torch.testing.assert_close(inner_product(dense, other)[0].double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inner_product(other, dense)[0].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["linear", "tied"])
def test_factors_of_bf16_are_squared_in_float32(form):
    source = Source(0)
    if form == "linear":
        use: PerExampleGradient = OuterProducts(
            source(1, 64, 32).bfloat16(), source(1, 64, 32).bfloat16()
        )
    else:
        use = Lookups(torch.zeros(1, 64, dtype=torch.long), source(1, 64, 32).bfloat16())
    shape = torch.Size((32, 32))
    torch.testing.assert_close(
        measured([[use]], shape).double(), truth([[use]], shape), rtol=1e-5, atol=0
    )


def test_ordinary_gradients_never_need_the_slow_path(monkeypatch):
    """A float64 gradient is formed only in special cases, not on random and real models."""

    def refuse(self: PerExampleGradient, index: int, shape: torch.Size) -> Tensor:
        raise AssertionError("slow path")

    for form in (OuterProducts, Lookups, Dense):
        monkeypatch.setattr(form, "example_gradient", refuse)
    model = roberta(dtype=torch.float32)
    engine_result(model, batch_for(model, (38, 38, 1, 9)), 1.0)
    for length in (1, 16, 128):
        source = Source(length)
        example_norms(
            {
                nn.Parameter(torch.zeros(64, 64)): [
                    OuterProducts(source(4, length, 64), source(4, length, 64))
                ]
            },
            4,
        )


def test_long_lookups_never_need_the_slow_path(monkeypatch):
    """With only an embedding training, nothing hides its rounding error.

    512 random positions are an ordinary example.
    """

    def refuse(self: PerExampleGradient, index: int, shape: torch.Size) -> Tensor:
        raise AssertionError("slow path")

    monkeypatch.setattr(Lookups, "example_gradient", refuse)
    source = Source(0)
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
    x, direction = (
        torch.randn(2, length, width) * of_input,
        torch.randn(2, length, width) * of_gradient,
    )
    exact = torch.einsum("btm,btn->bmn", direction.double(), x.double())
    expected = exact.flatten(1).norm(dim=1)
    clipping_norm = float(expected.min()) / 2
    with ClippingEngine(model, clipping_norm, strategy=strategy) as engine:
        found = engine.backward((model(x) * direction).sum((1, 2)))
        total = engine.collect()["weight"]
    kept = torch.isfinite(found)  # where the other square overflows, the example is removed
    torch.testing.assert_close(found[kept].double(), expected[kept], rtol=NORM_RTOL, atol=0)
    weights = torch.where(kept, clipping_norm / expected, 0.0)
    torch.testing.assert_close(
        total.double(), torch.einsum("b,bmn->mn", weights, exact), rtol=1e-3, atol=1e-7
    )
    assert kept.all() or large == 1e19


def test_an_example_without_a_gradient_is_not_recomputed(monkeypatch):
    """What underflow could have taken is nothing beside a clipping norm, so zeros are believed."""
    monkeypatch.setattr(norms, "_settle", lambda *args: pytest.fail("recomputed"))
    model = nn.Linear(768, 768)
    with ClippingEngine(model, 1e-9) as engine:
        found = engine.backward(
            model(100 * torch.randn(2, 64, 768)).sum((1, 2)) * torch.tensor([0.0, 1.0])
        )
    assert found[0] == 0
