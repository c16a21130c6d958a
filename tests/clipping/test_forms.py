"""Which form per-example gradients take, and that none of them changes a sum."""

import pytest
import torch
from forms import FORMS, force
from torch import nn

from hf_dp.clipping import ClippingEngine, forms
from hf_dp.clipping.forms import Bundle, RunningSums, held_bytes, make_explicit, worth_it
from hf_dp.clipping.gradients import Dense, Lookups, OuterProducts, Unformed, Weights, summed
from hf_dp.clipping.rules.norms import _of_scale, _of_weight
from hf_dp.errors import InvalidArgumentError


def outer(examples: int, positions: int, height: int, width: int, shared=None) -> OuterProducts:
    left = torch.randn(examples, positions, height)
    right = torch.randn(examples, positions, width) if shared is None else shared
    return OuterProducts(left, right)


def weight(height: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(height, width))


@pytest.mark.parametrize(
    ("examples", "positions", "height", "width", "explicit"),
    [
        # Times of this layer's two forms over that of the plain product, two threads.
        (2, 512, 768, 3072, True),  # factors 1.53, explicit 1.05
        (4, 512, 768, 2304, True),  # 1.62, 1.09
        (1, 1024, 768, 3072, True),  # 1.97, 1.03
        (16, 128, 768, 768, True),  # 1.46, 1.32
        (16, 32, 768, 3072, False),  # 1.28, 2.52
    ],
)
def test_the_faster_form_is_chosen_where_memory_is_no_object(
    examples, positions, height, width, explicit
):
    one = weight(height, width)
    uses = {one: forms.compact([outer(examples, positions, height, width)], one.shape)}
    make_explicit(uses, float("inf"))
    assert isinstance(uses[one][0], Dense) is explicit


def test_a_weight_that_is_smaller_than_its_factors_is_explicit_at_once():
    small, large = weight(8, 16), weight(64, 64)
    assert isinstance(forms.compact([outer(2, 20, 8, 16)], small.shape)[0], Dense)
    assert isinstance(forms.compact([outer(2, 20, 64, 64)], large.shape)[0], OuterProducts)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.9])
def test_explicit_gradients_stay_within_the_memory_that_is_spare(share, monkeypatch):
    """Count the tensors themselves, before and after; pairs of weights share an input."""
    monkeypatch.setattr(forms.Weight, "saved", property(lambda weight: weight.explicit))
    torch.manual_seed(int(10 * share))
    uses, more = {}, 0
    for _ in range(12):
        positions, height, width = (int(torch.randint(20, 60, ())) for _ in range(3))
        positions //= 5
        first = outer(3, positions, height, width)
        for each in (first, outer(3, positions, height, width, first.right)):
            one = weight(height, width)
            uses[one] = [each]
            more += max(0, 3 * one.nbytes - each.left.nbytes - each.right.nbytes // 2)

    def held() -> int:
        tensors = [t for (use,) in uses.values() for t in vars(use).values() if t is not True]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())

    before = held()
    assert before == held_bytes(uses)
    # A factor is freed with the last of the weights that share it.
    unfreed = max(use.right.nbytes // 2 for (use,) in uses.values())
    make_explicit(uses, share * more)
    assert held() - before <= share * more + unfreed
    forms_left = {type(use) for (use,) in uses.values()}
    assert forms_left == ({OuterProducts, Dense} if share else {OuterProducts})


def test_the_most_time_for_a_byte_comes_first():
    wide, narrow = weight(768, 3072), weight(768, 512)
    uses = {wide: [outer(1, 300, 768, 3072)], narrow: [outer(1, 300, 768, 512)]}
    both = worth_it(uses, float("inf"))
    assert both == [narrow, wide]
    more = 4 * (768 * 512 - 300 * (768 + 512))
    assert worth_it(uses, more) == [narrow] and worth_it(uses, more - 1) == []


def test_uses_of_one_weight_become_one_explicit_gradient_beside_its_lookups():
    table = weight(30, 4)
    uses = {table: [outer(2, 3, 30, 4), outer(2, 5, 30, 4)]}
    lookups = Lookups(torch.randint(0, 30, (2, 6)), torch.randn(2, 6, 4))
    uses[table].append(lookups)
    expected = sum(use.example_gradient(1, table.shape) for use in uses[table][:2])
    explicit, *rest = forms.made_explicit(uses[table], table.shape)
    assert rest == [lookups]
    torch.testing.assert_close(explicit.gradients[1], expected.float())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass"])
@pytest.mark.parametrize("sizes", [(3,), (1,), (1, 1, 2), (2, 1)])
def test_sums_do_not_depend_on_form_or_physical_batches(form, strategy, sizes, monkeypatch):
    """A single example's gradient becomes the running sum itself, so the first and later ones
    take different ways; a removed example takes a third."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()
    rows = torch.randn(sum(sizes), 7, 6).double()
    single = []
    for row in rows:
        gradients = torch.autograd.grad(model(row).square().mean(), list(model.parameters()))
        norm = torch.cat([each.flatten() for each in gradients]).norm()
        single.append([each * min(1, 0.05 / norm) for each in gradients])
    force(form, monkeypatch)
    with ClippingEngine(model, 0.05, strategy=strategy) as engine:
        for part in rows.split(list(sizes)):
            engine.backward(model(part).square().mean((1, 2)))
        removed = rows[:1] * float("nan")
        engine.backward(model(removed).square().mean((1, 2)))
        sums = engine.collect()
    for place, found in enumerate(sums.values()):
        expected = torch.stack([each[place] for each in single]).sum(0)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_memory_must_be_a_ratio_of_at_least_one():
    for wrong in (0.5, 0, "much", float("inf")):
        with pytest.raises(InvalidArgumentError, match="memory_ratio"):
            ClippingEngine(nn.Linear(2, 2), 1.0, memory_ratio=wrong)


def _cancelling(model: nn.Linear, x: torch.Tensor, scale: float) -> torch.Tensor:
    """Losses whose output gradients cancel over the positions of an example, up to rounding."""
    outputs = model(x)
    weights = torch.randn(1, *outputs.shape[1:], generator=torch.Generator().manual_seed(1))
    weights = scale * (weights - weights.mean(1, keepdim=True))
    return (outputs * weights).sum((1, 2))


@pytest.mark.parametrize("width", [64, 192])  # in a bundle, and by itself
@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_the_weight_of_an_example_does_not_depend_on_the_form(scale, width, monkeypatch):
    """One more example can change the form of all others' gradients. What clipping would make of
    rounding noise then moved the sum by 6 C."""
    torch.manual_seed(0)
    model = nn.Linear(width, width, bias=False)
    one = scale * torch.randn(1, 1, width).expand(1, 90, width)
    x = one.repeat(6, 1, 1)

    def total(form: str) -> torch.Tensor:
        with monkeypatch.context() as patch:
            force(form, patch)
            with ClippingEngine(model, 1.0) as engine:
                engine.backward(_cancelling(model, x, scale))
                return engine.collect()["weight"].double()

    factors = total("factors")
    for form in ("explicit as seen", "explicit at the end"):
        assert (total(form) - factors).norm() < 6 * 0.01  # rounding, of six examples


def test_planted_explicit_gradients_without_the_slack_of_their_factors_are_seen(monkeypatch):
    nothing = property(lambda self: None, lambda self, value: None)
    monkeypatch.setattr(Dense, "of_terms", nothing, raising=False)
    with pytest.raises(AssertionError):
        test_the_weight_of_an_example_does_not_depend_on_the_form(100.0, 192, monkeypatch)


def test_the_budget_counts_bytes_of_16_bit_factors(monkeypatch):
    monkeypatch.setattr(forms.Weight, "saved", 1.0)
    one = weight(100, 100)
    short = OuterProducts(*torch.randn(2, 2, 40, 100, dtype=torch.bfloat16))
    more = 4 * 2 * 100 * 100 - 2 * 2 * 40 * 200
    assert forms.compact([short], one.shape) == [short]
    assert worth_it({one: [short]}, more) == [one]
    assert worth_it({one: [short]}, more - 1) == []


def test_sums_of_changing_compositions_take_no_more_than_their_parameters():
    """Experts: other small parameters in each batch."""
    torch.manual_seed(0)
    experts = [nn.Parameter(torch.zeros(10)) for _ in range(12)]
    sums, expected = RunningSums(), {p: torch.zeros(10).double() for p in experts}
    for _ in range(30):
        used = [experts[i] for i in torch.randperm(12)[:4]]
        gradients = torch.randn(3, 40)
        sums.add_bundle(Bundle(used, Dense(gradients)), Weights(torch.ones(3)))
        for parameter, part in zip(used, gradients.sum(0).split(10), strict=True):
            expected[parameter] += part
    assert sum(each.numel() for each in sums.values()) == 120
    for parameter in experts:
        torch.testing.assert_close(sums[parameter], expected[parameter])


def test_a_bundle_is_of_limited_size_and_sums_are_the_same(monkeypatch):
    parameters = [nn.Parameter(torch.zeros(2, 5)) for _ in range(5)]
    gradients = torch.randn(5, 3, 2, 5)
    found = {}
    for most, sizes in ((forms._IN_BUNDLE, [5]), (70, [2, 2, 1])):  # of 30 numbers each
        monkeypatch.setattr(forms, "_IN_BUNDLE", most)
        uses = {p: [Dense(each)] for p, each in zip(parameters, gradients, strict=True)}
        bundles = forms.bundled(uses, dict.fromkeys(parameters, 0), ())
        assert [len(bundle.parameters) for bundle in bundles] == sizes and not uses
        sums = RunningSums()
        for bundle in bundles:
            sums.add_bundle(bundle, Weights(torch.tensor([1.0, 0.5, 0.0])))
        found[most] = [sums[p] for p in parameters]
    torch.testing.assert_close(*found.values())


# -- what is formed together is what each would be alone --


def waiting_uses(count: int, examples: int = 3, positions: int = 5) -> list[Unformed]:
    """Some of each kind: sums, layer and root-mean-square norms, adapters; also not finite."""

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(examples, positions, *shape)

    found = []
    for number in range(count):
        found += [summed(of(8), torch.float32), summed(of(6), torch.float32)]
        found.append(Unformed(_of_weight, (of(8), of(1), of(1), of(8)), (1,)))
        found.append(Unformed(_of_scale, (of(8), of(8)), (1e-6, torch.float32, number % 2 > 0)))
        found.append(forms.unformed(OuterProducts(of(2), of(8)), torch.Size((2, 8))))
    found[0].tensors[0][1, 2, 3] = torch.nan
    return found


def formed_together(uses: list[Unformed]) -> list[Dense]:
    owners, found = [weight(1, 1) for _ in uses], {}
    together = forms.Together(lambda owner: found.setdefault(owner, None))
    for owner, use in zip(owners, uses, strict=True):
        together.add(owner, use, lambda one, owner=owner: found.__setitem__(owner, one))
    together.form()
    assert [*map(id, found)] == [*map(id, owners)]  # in the order in which they came
    return list(found.values())


def equal_bits(one: Dense, other: Dense) -> bool:
    pairs = zip((one.gradients, one.size()), (other.gradients, other.size()), strict=True)
    return all(mine.numpy().tobytes() == its.numpy().tobytes() for mine, its in pairs)


@pytest.mark.parametrize("most", [None, 50, 400])
def test_together_each_gradient_is_the_same_in_every_bit(most, monkeypatch):
    """However many wait for each other; what a row that is not finite makes stays in its row."""
    torch.manual_seed(0)
    if most is not None:
        monkeypatch.setitem(forms._WAITING, "cpu", most)
    uses = waiting_uses(4)
    assert all(map(equal_bits, formed_together(uses), [use.formed() for use in uses]))


def test_planted_form_that_mixes_rows_is_seen():
    def mixes(terms: torch.Tensor) -> Dense:
        return Dense(terms.sum(1) - terms.mean())

    uses = [Unformed(mixes, (torch.randn(3, 5, 8),)) for _ in range(4)]
    assert not any(map(equal_bits, formed_together(uses), [use.formed() for use in uses]))


def test_what_waits_is_small_and_of_bounded_number(monkeypatch):
    monkeypatch.setitem(forms._WAITING, "cpu", 1000)
    monkeypatch.setitem(forms._SMALL, "cpu", 200)
    together, given = forms.Together(lambda owner: None), []
    for count in range(1, 101):
        together.add(weight(1, 1), summed(torch.randn(3, 5, 8), torch.float32), given.append)
        assert 0 <= (count - len(given)) * 120 < 1000
    others = (torch.randn(3, 10, 8), torch.randn(3, 8, 5).mT)  # too large; other than a copy of it
    for place, terms in enumerate(others, len(given) + 1):
        together.add(weight(1, 1), summed(terms, torch.float32), given.append)
        assert len(given) == place
    together.form()
    assert len(given) == 102


def test_a_parameter_used_twice_does_not_wait():
    """The order of its uses, by which their sum is rounded, is that of the backward pass."""
    shared = nn.LayerNorm(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 1))
    waited, add = [], forms.Together.add

    def noted(self, parameter, use, give):
        waited.append(parameter)
        add(self, parameter, use, give)

    with pytest.MonkeyPatch.context() as patch, ClippingEngine(model, 1.0) as engine:
        patch.setattr(forms.Together, "add", noted)
        engine.backward(model(torch.randn(3, 5, 4)).mean((1, 2)))
    assert {*map(id, waited)} >= {id(model[0].bias), id(model[2].bias)}
    assert not {*map(id, waited)} & {*map(id, shared.parameters())}
