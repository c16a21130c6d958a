"""Ways to move a sum by more than C, or to be silently wrong, that were found by trying.

Each is exact or refused now.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import models
import pytest
import torch
import transformers
from models import (
    ARCHITECTURES,
    Net,
    assert_net_exact,
    assert_not_entered,
    batch_for,
    clip_losses,
    norm_of,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import BlenderbotConfig, BlenderbotForCausalLM, LongformerConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_dp.batches.padding import Padding
from hf_dp.clipping import ClippingEngine, coupling, rounding, self_check
from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import Dense, OuterProducts
from hf_dp.clipping.norms import inner_product
from hf_dp.clipping.rules import find_rule
from hf_dp.errors import (
    DataError,
    HfDpError,
    InvalidArgumentError,
    SelfCheckError,
    UnaccountedGradientError,
    UnsupportedModelError,
)
from hf_dp.losses import per_example_loss
from hf_dp.run.synthetic import synthetic_examples
from hf_dp.run.training_data import padded_together

C = 0.01


def contribution(model: nn.Module, x: Tensor, strategy: str = "book_keeping") -> float:
    """``|sum| / C`` of what these examples add."""
    return norm_of(clip_losses(model, lambda: model(x), C, strategy=strategy)[1]) / C


# -- what a Longformer looks up in all rows at once ---

SEPARATOR = 2


def longformer(name: str) -> Any:
    torch.manual_seed(0)
    config = LongformerConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=32, sep_token_id=SEPARATOR, eos_token_id=SEPARATOR, attention_window=4,
    )  # fmt: skip
    model = getattr(transformers, f"LongformerFor{name}")(config).train()
    for parameter in model.longformer.parameters():
        parameter.requires_grad_(False)
    return model


def separated(*rows: list[int]) -> Tensor:
    """Token ids (b, 10) with separators at these places of each row."""
    ids = torch.full((len(rows), 10), 5)
    for row, places in zip(ids, rows, strict=True):
        row[places] = SEPARATOR
    return ids


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["QuestionAnswering", "MultipleChoice"])
def test_rows_that_would_move_the_question_of_their_neighbors_need_a_mask(name, lora):
    """Transformers asks for three separators a row on average. No row decides what is refused."""
    model = plain = longformer(name)
    if lora:
        model = get_peft_model(plain, LoraConfig(r=2, target_modules=["qa_outputs", "classifier"]))

    def norms(*rows: list[int], **given: Tensor) -> Tensor:
        ids = separated(*rows)
        labels = {"start_positions": torch.ones(2).long(), "end_positions": torch.ones(2).long()}
        if name == "MultipleChoice":
            ids, labels = torch.stack([ids, separated([1, 2, 3], [4, 5, 6])], 1), {}
            labels = {"labels": torch.zeros(2).long()}
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **labels, **given}
        return clip_losses(model, lambda: per_example_loss(model, batch), C)[0]

    for rows in ([2, 3, 9], [1, 4, 9]), ([2, 3, 5, 9], [1, 9]), ([1, 9], [2, 3, 5, 9]):
        with pytest.raises(DataError, match="Without a column `global_attention_mask`, Longformer"):
            norms(*rows)
        shape = (2, 2, 10) if name == "MultipleChoice" else (2, 10)
        assert norms(*rows, global_attention_mask=torch.zeros(shape).long()).shape == (2,)
    assert not plain._forward_pre_hooks


# -- what a forward keeps for some examples alone ---


class Observes(nn.Module):
    """Keeps the largest input if it is above 6, which no synthetic example reaches, and shows it to
    the examples that come after it; in place, or as another tensor."""

    def __init__(self, in_place: bool):
        super().__init__()
        self.in_place, self.last = in_place, nn.Linear(4, 1)
        self.register_buffer("largest", torch.full((4,), 6.0))

    def forward(self, x: Tensor) -> Tensor:
        largest = torch.maximum(self.largest, x.detach().abs().amax(0))
        found = self.last(x / self.largest).squeeze(-1)
        if self.in_place:
            self.largest.copy_(largest)
        elif bool((largest > 6).any()):
            self.largest = largest
            self.register_buffer("newest", x.detach()[-1])
        return found


@pytest.mark.parametrize("counted", [False, torch.tensor([False])], ids=["none", "by unit"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_rare_row_leaves_in_a_buffer_ends_with_its_batch(in_place, strategy, counted):
    """It would be saved as it is, and would move the gradients of all later examples."""
    torch.manual_seed(0)
    model, rare, later = Observes(in_place), torch.full((1, 4), 1e4), torch.randn(3, 4)
    before = dict(model.state_dict())
    sums = []
    for batches in ([later], [rare, later]):
        with ClippingEngine(model, C, strategy=strategy) as engine:
            for x in batches[:-1]:
                engine.backward(
                    model(x), False if strategy == "two_pass" else torch.zeros(1).bool()
                )
            engine.backward(model(later))
            sums.append(engine.collect())
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])
    with ClippingEngine(model, C, strategy=strategy):
        model(rare)  # and nothing follows
    assert model.state_dict().keys() == before.keys()
    assert torch.equal(model.largest, torch.full((4,), 6.0))


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_forward_does_not_see_what_those_before_it_left(in_place, before):
    """As those of a pair, whose losses are back-propagated together."""
    torch.manual_seed(0)
    model, later = Observes(in_place), torch.randn(3, 4)
    norms = []
    for first in (torch.randn(3, 4), torch.full((3, 4), 1e4)):
        with ClippingEngine(model, C) as engine:
            unused = sum(model(first) for _ in range(before))
            norms.append(engine.backward(0 * unused + model(later)))
            assert torch.equal(model.largest, torch.full((4,), 6.0))
            norms.append(engine.backward(model(later)))
    assert all(torch.equal(norms[0], each) for each in norms)


def test_a_weight_is_not_given_back_with_a_buffer_that_shares_its_memory():
    """Also where only a part's forward runs, before which nobody looks at the buffers again."""
    model = nn.Sequential(nn.Linear(4, 1))
    model[0].register_buffer("same", model[0].weight.detach())
    with ClippingEngine(model, 1.0) as engine:
        with torch.no_grad():
            model[0].weight.add_(1.0)  # as an optimizer does
        stepped = model[0].weight.detach().clone()
        engine.backward(model[0](torch.ones(2, 4))[:, 0])
        assert torch.equal(model[0].weight, stepped)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_forward_of_a_part_left_ends_with_an_error(in_place):
    model = nn.Sequential(Observes(in_place))
    with suppress(ZeroDivisionError), ClippingEngine(model, C):
        model[0](torch.full((3, 4), 1e4))
        raise ZeroDivisionError
    assert torch.equal(model[0].largest, torch.full((4,), 6.0)) and len(model.state_dict()) == 3


def test_an_entry_that_fails_leaves_the_callers_changes(monkeypatch):
    model = Observes(True)
    engine = ClippingEngine(model, C)
    with engine:
        model(torch.randn(3, 4))
    model.largest.fill_(9.0)
    monkeypatch.setattr(coupling.Buffers, "keep", raising(MemoryError))
    with pytest.raises(MemoryError):
        engine.__enter__()
    assert torch.equal(model.largest, torch.full((4,), 9.0)) and not model._forward_pre_hooks


def raising(error: type[Exception]) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


def test_what_the_caller_changes_between_steps_stays():
    """Also a buffer that shares the memory of a weight, which the optimizer changes."""
    model = nn.Linear(4, 1)
    model.register_buffer("steps", torch.zeros(()))
    model.register_buffer("same", model.weight.detach())
    model.register_buffer("wide", torch.zeros(1).expand(3))
    with torch.inference_mode():
        model.register_buffer("inferred", torch.zeros(2))
    first, optimizer = model.weight.detach().clone(), torch.optim.SGD(model.parameters(), lr=1.0)
    with ClippingEngine(model, 1.0) as engine:
        for _ in range(3):
            engine.backward(model(torch.ones(2, 4))[:, 0])
            for name, total in engine.collect().items():
                model.get_parameter(name).grad = total.to(torch.float32)
            optimizer.step()
            optimizer.zero_grad()
            model.steps += 1
    assert float(model.steps) == 3 and torch.equal(model.same, model.weight)
    assert (model.weight - first).norm() > 1 and model.same.data_ptr() == model.weight.data_ptr()


def test_modules_that_save_a_state_of_their_own_are_refused():
    class Keeps(nn.Linear):
        def get_extra_state(self) -> Tensor:
            return torch.zeros(1)

    assert_not_entered(nn.Sequential(Keeps(4, 1)), "`0` is a Keeps, which saves a state of its own")


# -- random numbers in forwards that run again ---


class Checkpointed(nn.Module):
    def __init__(self, generator: torch.Generator | None = None):
        super().__init__()
        self.inner, self.last, self.generator = nn.Linear(16, 16), nn.Linear(16, 1), generator

    def block(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.inner(x))
        if self.generator is not None:
            hidden = hidden * torch.rand(hidden.shape, generator=self.generator)
        return self.last(F.dropout(hidden, 0.5, True))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False).squeeze(-1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_that_do_not_restore_the_random_state(strategy):
    """The second pass met other masks than the first measured: up to 4.65 C."""
    for seed in range(20):
        torch.manual_seed(seed)
        assert contribution(Checkpointed(), torch.randn(1, 16), strategy) <= 1 + 1e-5


def test_a_generator_of_the_models_own_is_seen_in_the_second_pass():
    model = Checkpointed(torch.Generator().manual_seed(0))
    said = "second backward pass met other values.*book_keeping"
    with pytest.raises(UnsupportedModelError, match=said):
        contribution(model, torch.randn(1, 16), "two_pass")
    assert contribution(model, torch.randn(1, 16), "book_keeping") <= 1 + 1e-5


def hooked(net: Any, x: Tensor) -> Tensor:
    """Both terms get one gradient tensor, which a hook changes after `last` has seen it."""
    hidden = net.first(x)
    hidden.register_hook(lambda grad: grad.mul_(100))
    return (net.last(x) + hidden).square().sum((1, 2))


def hooked_between(net: Any, x: Tensor) -> Tensor:
    """The hook shrinks a gradient between the two uses of `last`, of which the first had it. Once the
    second pass added a use before the hook had changed it: 1.44 C."""
    x = net.last(x)
    hidden = net.first(x.detach() * 0.01)
    hidden.register_hook(lambda grad: grad.mul_(1e-3))
    return (net.last(x) + hidden).square().sum((1, 2))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("compute", [hooked, hooked_between])
def test_a_gradient_changed_in_place(compute, strategy):
    torch.manual_seed(0)
    model = Net(compute, first=nn.Linear(16, 16), last=nn.Linear(16, 16))
    assert contribution(model, torch.randn(1, 3, 16), strategy) <= 1 + 1e-5


def cancelling(net: Any, x: Tensor) -> Tensor:
    """Two uses of a layer, longer than it is wide, that cancel but for one number."""
    factor = torch.rand(32, generator=torch.Generator().manual_seed(3)) + 0.5
    other = factor.clone()
    other[0] = torch.nextafter(other[0], torch.tensor(9.0))
    return (net.layer(x) * factor).sum((1, 2)) - (net.layer(x) * other).sum((1, 2))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_uses_that_cancel_move_a_sum_by_no_more_than_their_sum(strategy):
    """Added one by one, they left their own rounding in the sum of others: 56 C."""
    torch.manual_seed(0)
    x = torch.randn(3, 40, 32) * 1e3
    model = Net(cancelling, layer=nn.Linear(32, 32, bias=False))
    _, everyone = clip_losses(model, lambda: model(x), 1e-6, strategy=strategy)
    _, others = clip_losses(model, lambda: model(x[1:]), 1e-6, strategy=strategy)
    moved = everyone["layer.weight"] - others["layer.weight"]
    assert float(moved.norm()) <= 1e-6 * (1 + 1e-5)


def test_a_second_pass_that_meets_fewer_gradients_is_refused(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    original, passes = ClippedSum.backward, []

    def losing(self, losses, sink, retain_graph=False):
        passes.append(1)
        met: list[tuple[nn.Parameter, object]] = []
        original(self, losses, lambda *use: met.append(use), retain_graph)
        for use in met if len(passes) == 1 else met[:-1]:
            sink(*use)

    monkeypatch.setattr(ClippedSum, "backward", losing)
    with ClippingEngine(model, C, strategy="two_pass") as engine:
        with pytest.raises(UnsupportedModelError, match="fewer gradients than the first"):
            engine.backward(model(torch.randn(2, 3)).squeeze(1))
        with pytest.raises(UnaccountedGradientError, match="parts of some gradients"):
            engine.collect()


# -- rounding of long sums ---


@pytest.mark.parametrize("count", [1, 1023, 1024, 10**7])
def test_the_norm_of_a_large_explicit_gradient(count):
    """A float32 norm over 1e7 numbers at once loses 0.35 % on the CPU."""
    found = float(Dense(torch.full((1, count), 0.1)).norms().squared)
    assert found == pytest.approx(count * float(torch.tensor(0.1)) ** 2, rel=1e-6)


def error_of_claimed(examples: int, length: int, features: int) -> float:
    """Of equal positions, the worst for adding up: rounding errors of one sign."""
    left = torch.full((examples, length, features), 0.1)
    use = OuterProducts(left, left[:, :, :1] * 7)
    exact = use.example_gradient(0, torch.Size((features, 1))).square().sum()
    norms = use.norms()
    return abs(float(norms.squared[0]) - float(exact)) / float(norms.error[0])


@pytest.mark.parametrize("features", [768, 1024, 1025, 3072, 50_257, 256_000])
def test_few_positions_of_many_features(features):
    """Products of a few rows add up one by one: 5e-4 off where 8e-6 was claimed."""
    for length in (1, 2, 4, 8, 11, 12, 15, 16, 17, 33):
        assert error_of_claimed(4, length, features) <= 1, length


def test_an_inner_product_of_few_positions():
    left, shape = torch.full((1, 8, 256_000), 0.1), torch.Size((256_000, 1))
    one = OuterProducts(left, left[:, :, :1] * 7)
    other = OuterProducts(left[:, :4].clone(), left[:, :4, :1] * 7)
    exact = (one.example_gradient(0, shape) * other.example_gradient(0, shape)).sum()
    found, error = inner_product(one, other)
    assert abs(float(found[0]) - float(exact)) <= float(error[0])


def test_planted_float32_for_few_positions_is_seen(monkeypatch):
    monkeypatch.setattr(rounding, "_FEW", 0)
    assert max(error_of_claimed(4, length, 256_000) for length in (1, 2, 4, 8, 11)) > 1


def test_a_clipping_norm_whose_square_underflows_is_refused():
    with pytest.raises(InvalidArgumentError, match="`clipping_norm` to be at least 1e-09"):
        ClippingEngine(nn.Linear(2, 2), 1e-13)


# -- rows that are not the examples: their number, and the self-check ---


def chosen(*counts: int) -> tuple[Net, Tensor]:
    """A head on the positions that hold a value above 0, like a language model's on masked ones, and
    4 examples of 8 positions, of which so many hold one."""

    def losses(net: Any, x: Tensor) -> Tensor:
        chosen = x[..., 0] > 0
        found = net.head(net.first(x)[chosen]).square()
        return torch.zeros(chosen.shape).masked_scatter(chosen, found).sum(1)

    x = torch.randn(4, 8, 3)
    x[..., 0] = (torch.arange(8) < torch.tensor(counts)[:, None]) * 2.0 - 1
    return Net(losses, first=nn.Linear(3, 3), head=nn.Linear(3, 1)), x


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("counts", [(8, 0, 6, 2), (4, 4, 4, 4), (3, 4, 0, 1)])
def test_rows_chosen_by_value_are_refused_where_as_many_would_fit_every_example(counts, strategy):
    said = "first dimension is not the number of examples|for an example alone"
    with pytest.raises(UnsupportedModelError, match=said):
        contribution(*chosen(*counts), strategy)


def head_at_labels(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of each example over its labels; NaN without one. Only labeled vectors
    reach the head."""
    where = batch["labels"] != -100
    mask = batch["attention_mask"]
    vectors = model.bert(batch["input_ids"], attention_mask=mask).last_hidden_state[where]
    losses = F.cross_entropy(model.cls(vectors), batch["labels"][where], reduction="none")
    sums = torch.zeros(len(where), dtype=losses.dtype).index_add(0, where.nonzero()[:, 0], losses)
    return sums / where.sum(1)


def head_everywhere(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same, of a head that sees all vectors."""
    labels = batch["labels"]
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape).sum(1) / (labels != -100).sum(1)


def the_one_logit(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a head that sees all vectors, at the one label that each row has."""
    row, at = (batch["labels"] != -100).nonzero(as_tuple=True)
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    each = torch.arange(len(logits))
    return F.cross_entropy(logits[each, at], batch["labels"][row, at], reduction="none")


def test_a_loss_that_gives_its_head_only_labeled_vectors_is_refused():
    """With one label each, there are as many such vectors as examples. On rows with 2, 0 and 1, one
    row moved the sum by 1.6 C."""
    model = models.bert_masked_lm()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("cls.predictions.transform" in name)
    batch = batch_for(model, (7, 12, 4))
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, 1] = batch["input_ids"][:, 1]
    batch = {n: batch[n] for n in ("input_ids", "attention_mask")} | {"labels": labels}
    alone = [
        {n: x[i : i + 1, :length] for n, x in batch.items()} for i, length in enumerate((7, 12, 4))
    ]
    with pytest.raises(UnsupportedModelError, match="first dimension is not the number of examp"):
        self_check(model, head_at_labels, batch, alone)
    self_check(model, head_everywhere, batch, alone)  # NaN for a row without a label is none
    self_check(model, the_one_logit, batch, alone)  # nor is an error for one


def test_the_length_of_an_evaluation_is_not_one_of_the_training_forward():
    model, x = chosen(8, 0, 6, 2)  # 16 rows, as of 4 examples of 4
    with ClippingEngine(model, C) as engine:
        with torch.no_grad():
            model(x[:, :4])
        losses = model(x)
        with torch.no_grad():
            model(x[:, :4])
        with pytest.raises(
            UnsupportedModelError, match="first dimension is not the number of examples"
        ):
            engine.backward(losses)


def by_length(net: Any, x: Tensor) -> Tensor:
    """Sorts its inputs by length inside, so that input 0 is another example there."""
    real = x.abs().sum(-1) > 0
    order = real.sum(1).argsort(stable=True)
    hidden = torch.tanh(net.inner(x[order])) * real[order][..., None]
    return net.last(hidden.sum(1)[order.argsort()]).squeeze(-1)


def gated(net: Any, x: Tensor) -> Tensor:
    """A branch that mixes examples, behind a gate that starts at 0 (as LoRA's B)."""
    time_first = net.inner(x.transpose(0, 1).reshape(-1, 6)).view(x.shape[1], len(x), 6)
    return net.last(x + net.gate(torch.tanh(time_first).transpose(0, 1))).sum((1, 2))


def class_token(net: Any, x: Tensor) -> Tensor:
    """One token for all: looked up once, expanded to the batch by the model."""
    token = net.token(torch.zeros(1, dtype=torch.long))
    return net.last(torch.cat([token[None].expand(len(x), -1, -1), x], 1)).square().sum((1, 2))


def first_row(net: Any, x: Tensor) -> Tensor:
    """Positions of shape (1, T), of which the model takes row 0."""
    positions = net.token(torch.zeros(1, x.shape[1], dtype=torch.long))
    return net.last(x + positions[0]).square().sum((1, 2))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([2.0]))

    def forward(self) -> Tensor:
        return self.value * 1


def temperature(net: Any, x: Tensor) -> Tensor:
    return (net.last(x).sum(1) / net.scale()).squeeze(-1)


def pairs(net: Any, x: Tensor) -> Tensor:
    """Two views of each example, one below the other: (2 b, d)."""
    one, other = net.last(torch.cat([x.sum(1), x.square().sum(1)])).chunk(2)
    return (one * other).squeeze(-1)


def table(net: Any, x: Tensor) -> Tensor:
    """A layer applied to a table of as many rows as the batch has, or a multiple."""
    return x.sum((1, 2)) * net.last(torch.eye(6)).sum()


def closed() -> nn.Linear:
    gate = nn.Linear(6, 6)
    nn.init.zeros_(gate.weight)
    nn.init.zeros_(gate.bias)
    return gate


PARTS = {
    by_length: {"inner": lambda: nn.Linear(6, 6)},
    gated: {"inner": lambda: nn.Linear(6, 6), "gate": closed},
    class_token: {"token": lambda: nn.Embedding(1, 6)},
    first_row: {"token": lambda: nn.Embedding(1, 6)},
    temperature: {"scale": Scale},
    pairs: {},
    table: {},
}


def of_rows(compute: Callable[[Any, Tensor], Tensor]) -> Net:
    parts = {name: part() for name, part in PARTS.get(compute, {}).items()}
    return Net(compute, **parts, last=nn.Linear(6, 1))


def padded_and_alone() -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    singles = [torch.randn(1, length, 6) for length in (4, 7, 2)]
    return torch.cat([F.pad(x, (0, 0, 0, 7 - x.shape[1])) for x in singles]), singles


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("compute", PARTS)
def test_rows_that_are_not_the_examples_are_refused(compute, strategy):
    torch.manual_seed(0)
    padded, singles = padded_and_alone()
    if compute is not by_length:  # no padding: they have no mask
        singles = [padded[i : i + 1] for i in range(3)]
    with pytest.raises(HfDpError):
        self_check(of_rows(compute), Net.__call__, padded, singles, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_positions_that_look_like_examples_are_refused_by_the_self_check(strategy):
    """Blenderbot's positions are arange(T): with T examples, norms were sqrt(T - 1) too small."""
    sizes = {"vocab_size": 61, "d_model": 16, "decoder_layers": 1, "decoder_ffn_dim": 24}
    sizes |= {"decoder_attention_heads": 2, "max_position_embeddings": 40}
    model = models.builder(BlenderbotForCausalLM, BlenderbotConfig, **sizes)()
    examples = padded_together(synthetic_examples(model), Padding.of(model, None))
    with pytest.raises(HfDpError):
        self_check(model, per_example_loss, *examples, strategy=strategy)


def test_a_single_loss_shows_rows_in_another_order():
    """Of equal examples norms and sums are right in any order."""

    def swapped(net: Any, x: Tensor) -> Tensor:
        """The last layer sees the examples from the last to the first."""
        return net.last(x.flip(0)).flip(0).square().sum((1, 2))

    torch.manual_seed(0)
    example = torch.randn(1, 4, 6)
    with pytest.raises(SelfCheckError, match="loss of synthetic example 2 alone gave example 0"):
        self_check(of_rows(swapped), Net.__call__, example.expand(3, -1, -1), [example] * 3)


def test_as_many_examples_as_positions_are_tried():
    def guesses_its_layout(net: Any, batch: dict[str, Tensor]) -> Tensor:
        """Right, except for as many examples as positions."""
        rows = net.tokens(batch["input_ids"])
        if len(rows) == rows.shape[1]:
            return net.last(rows.transpose(0, 1)).transpose(0, 1).square().sum((1, 2))
        return net.last(rows).square().sum((1, 2))

    torch.manual_seed(0)
    ids = torch.randint(0, 9, (3, 4))
    model = Net(guesses_its_layout, tokens=nn.Embedding(9, 6), last=nn.Linear(6, 1))
    alone = [{"input_ids": row[None]} for row in ids]
    with pytest.raises(SelfCheckError, match="norm"):
        self_check(model, Net.__call__, {"input_ids": ids}, alone)


def test_a_model_that_sorts_passes_on_sorted_rows_alone():
    """A model that sorts its rows is right on rows that are sorted already, and on no others."""
    torch.manual_seed(0)
    singles = [torch.randn(1, length, 6) for length in (2, 4, 7)]
    padded = torch.cat([F.pad(x, (0, 0, 0, 7 - x.shape[1])) for x in singles])
    self_check(of_rows(by_length), Net.__call__, padded, singles)
    singles[:2], padded = singles[1::-1], padded[[1, 0, 2]]
    with pytest.raises(SelfCheckError):
        self_check(of_rows(by_length), Net.__call__, padded, singles)


# -- rules ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("width", [3, 4])
def test_a_kernel_tied_between_a_rule_and_none(width, strategy):
    torch.manual_seed(0)
    one, other = nn.Conv2d(width, 5, 1), nn.Conv2d(width, 5, 1, padding="same")  # no rule
    other.weight = one.weight
    model = Net(lambda net, x: (net.one(x) * net.other(x)).sum((1, 2, 3)), one=one, other=other)
    assert_net_exact(model.double(), torch.randn(4, width, 9, 9).double(), strategy)


def test_what_looks_like_an_rms_norm_and_is_none_has_no_rule():
    class Decorated(LlamaRMSNorm):
        @functools.wraps(LlamaRMSNorm.forward)
        def forward(self, hidden_states):
            return 3 * LlamaRMSNorm.forward(self, hidden_states)

    assert find_rule(LlamaRMSNorm(6)) is not None
    assert find_rule(Decorated(6)) is None
    assert find_rule(LlamaRMSNorm((2, 6))) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("base", [nn.Linear, type("NoRule", (nn.Linear,), {})])
def test_outputs_of_linear_layers_may_be_changed_in_place(base):
    def halved(net: Any, x: Tensor) -> Tensor:
        hidden = net.inner(x)
        hidden /= 2
        return net.last(torch.tanh(hidden)).sum((1, 2))

    torch.manual_seed(0)
    model = Net(halved, inner=base(6, 6), last=base(6, 1))
    assert_net_exact(model.double(), torch.randn(4, 5, 6).double())


# -- state between calls ---


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_that_an_error_left_half_added_cannot_be_collected(monkeypatch, strategy):
    model, calls = models.bert(), []
    batch = batch_for(model, (5, 3))
    original = ClippedSum._kept

    def failing(self, *args):
        calls.append(1)
        weights = original(self, *args)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return weights

    monkeypatch.setattr(ClippedSum, "_kept", failing)
    with ClippingEngine(model, C, strategy=strategy) as engine:
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.backward(per_example_loss(model, batch))
        engine.backward(per_example_loss(model, batch))
        with pytest.raises(UnaccountedGradientError, match="failed while it added"):
            engine.collect()


def test_a_parameter_unfrozen_inside_is_seen():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    with ClippingEngine(model, C) as engine:
        model[0].requires_grad_(True)
        with pytest.raises(UnaccountedGradientError, match="0.weight"):
            engine.backward(model(torch.randn(2, 3)).squeeze(1))


@pytest.mark.parametrize("padded", [0, 1], ids=["the row with the hole", "its neighbor"])
@pytest.mark.parametrize("build", [models.gpt2, ARCHITECTURES["opt"].build], ids=["gpt2", "opt"])
def test_a_hole_in_a_mask_is_refused_where_positions_would_depend_on_a_neighbors_length(
    build, padded
):
    """GPT-2 counts positions over holes, OPT only tokens. Either changes if one kind of position
    ids is given only beside a longer row: 16 rows with a hole and one longer row that joined moved
    GPT-2's clipped sum by 10.3 C."""
    model = build().eval()
    batch = batch_for(model, (8, 8))
    batch["attention_mask"][0, 4] = 0
    batch["attention_mask"][padded, :2] = 0
    with pytest.raises(DataError, match="hole"):
        per_example_loss(model, batch)


@pytest.mark.parametrize("build", [models.gpt2, ARCHITECTURES["opt"].build], ids=["gpt2", "opt"])
def test_padding_on_both_sides_is_no_hole(build):
    model = build().eval()
    batch = batch_for(model, (8, 8))
    batch["attention_mask"][0, :2] = 0
    batch["attention_mask"][0, 6:] = 0
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    alone = {name: value[:1, 2:6] for name, value in batch.items()}
    found, expected = (per_example_loss(model, each)[0] for each in (batch, alone))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
