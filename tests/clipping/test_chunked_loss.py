"""The loss by blocks of the vocabulary against cross-entropy of whole logits."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import models
import pytest
import torch
from accelerate.utils.operations import convert_to_fp32
from models import ARCHITECTURES, assert_same_sums, batch_for, gpt2, llama, loop_over_rows
from peft import LoraConfig, get_peft_model
from short_products import WAYS, TensorCores, precision_restored, worst_difference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hf_dp.clipping import ClippingEngine, chunked_loss
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import OuterProducts
from hf_dp.errors import UnsupportedLossError
from hf_dp.losses import per_example_loss

LONG = (19, 12, 17)  # more positions than the tiny models have features


def frozen_head() -> Any:
    model = llama()
    model.lm_head.weight.requires_grad_(False)
    return model


def with_bias() -> Any:
    model = llama()
    model.lm_head = torch.nn.Linear(model.config.hidden_size, models.VOCABULARY).double()
    return model


def lora(beside: str = "q_proj") -> Any:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=[beside])
    return get_peft_model(llama(), config)


MODELS = {"tied": gpt2, "untied": llama, "bias": with_bias, "frozen": frozen_head, "lora": lora}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of the vocabulary, the last one smaller."""
    monkeypatch.setattr(chunked_loss, "_WIDTH", 9)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_whole_logits(name):
    model = MODELS[name]()
    batch = batch_for(model, LONG)
    results = []
    for chunked in (False, True):
        values = per_example_loss(model, batch, chunked)
        trained = [p for p in model.parameters() if p.requires_grad]
        weights = torch.tensor([1.0, -2.0, 0.5]).double()
        results.append([values.detach(), *torch.autograd.grad(values @ weights, trained)])
    for whole, blocks in zip(*results, strict=True):
        torch.testing.assert_close(blocks, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lengths", [LONG, (18,), (5, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_equal_the_loop(name, lengths):
    """The loop takes whole logits, one example at a time."""
    model = MODELS[name]()
    batch = batch_for(model, lengths)
    expected = loop_over_rows(model, batch, 0.01)
    for strategy in STRATEGIES if len(lengths) > 1 else STRATEGIES[:1]:
        losses = lambda: per_example_loss(model, batch, chunked=True)  # noqa: E731
        norms, sums = models.clip_losses(model, losses, 0.01, strategy=strategy)
        torch.testing.assert_close(norms, expected.norms, rtol=1e-9, atol=0)
        assert_same_sums(sums, expected.sums, atol=1e-12)


class Largest(TorchDispatchMode):
    """Notes the most numbers of any tensor made inside that has a number for each token."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_flatten(result)[0]:
            if isinstance(each, Tensor) and models.VOCABULARY in each.shape:
                self.numbers = max(self.numbers, each.numel())
        return result


@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass"])
@pytest.mark.parametrize(
    ("name", "lengths"), [("lora", LONG), ("tied", (7, 5) * 20), ("bias", (7, 5) * 20)]
)
def test_no_logits_of_the_batch_are_held(name, lengths, strategy):
    model = MODELS[name]()
    batch = batch_for(model, lengths)
    found = []
    for chunked in (True, False):
        with Largest() as largest, ClippingEngine(model, 0.01, strategy=strategy) as engine:
            engine.backward(per_example_loss(model, batch, chunked))
        found.append(largest.numbers)
    logits = len(lengths) * max(lengths) * models.VOCABULARY
    assert found[0] < logits <= found[1]


def test_in_bfloat16_a_gradient_does_not_depend_on_how_many_others_there_are():
    model = llama(dtype=torch.float32)
    batch = batch_for(model, (18,) * 9)

    def first(examples: int) -> torch.Tensor:
        part = models.rows(batch, range(examples))
        with torch.autocast("cpu", torch.bfloat16):
            value = per_example_loss(model, part, chunked=True)[0]
        return torch.autograd.grad(value, [model.model.embed_tokens.weight])[0]

    for examples in (1, 2, 8):
        torch.testing.assert_close(first(examples), first(9), rtol=0, atol=0)


def scaled_by_its_instance(model: Any) -> None:
    model.lm_head.forward = lambda x: 2 * type(model.lm_head).forward(model.lm_head, x)


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: None)


def changed_in_place(model: Any) -> None:
    def change(module: Any, args: Any, output: Any) -> None:
        with torch.no_grad():
            output.logits[..., 5] = -10

    model.register_forward_hook(change)


@pytest.mark.parametrize("change", [scaled_by_its_instance, hooked, changed_in_place])
@pytest.mark.parametrize("inside", [False, True])
def test_a_head_that_does_more_is_refused(change, inside):
    model = llama()
    change(model)
    engine = ClippingEngine(model, 1.0) if inside else nullcontext()
    with engine, pytest.raises(UnsupportedLossError, match="chunked_loss=False"):
        per_example_loss(model, batch_for(model, (18, 17)), chunked=True)


def test_logits_that_accelerate_widens_are_known():
    model = llama(dtype=torch.bfloat16)
    batch = batch_for(model, (18, 17))
    expected = per_example_loss(model, batch, chunked=True)
    forward = model.forward
    model.forward = lambda *args, **kwargs: convert_to_fp32(forward(*args, **kwargs))
    assert torch.equal(per_example_loss(model, batch, chunked=True), expected)


@pytest.mark.parametrize("label", [models.VOCABULARY, -1])
def test_a_label_that_is_no_token_fails(label):
    model = llama()
    batch = batch_for(model, (18, 17))
    batch["labels"][0, 3] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        per_example_loss(model, batch, chunked=True)


def test_nothing_labeled_gives_no_loss_and_no_gradient():
    model = gpt2()
    batch = batch_for(model, LONG)
    batch["labels"][1] = -100
    with ClippingEngine(model, 1e6) as engine:
        values = per_example_loss(model, batch, chunked=True)
        norms = engine.backward(values)
    assert values[1] == 0 and norms[1] == 0 and norms[0] > 0


def test_logits_that_are_not_finite_at_padding_do_not_count():
    """As with cross-entropy, which ignores such positions."""
    head = torch.nn.Linear(4, 9).double()
    hidden = torch.randn(2, 3, 4).double()
    hidden[0, 2] = float("inf")
    hidden.requires_grad_(True)
    labels = torch.tensor([[1, 2, -100], [3, 4, 5]])
    values = chunked_loss.chunked_loss(head, hidden, labels, -100)
    gradients = torch.autograd.grad(values.sum(), [hidden])[0]
    assert torch.isfinite(values).all() and gradients[0, 2].abs().max() == 0


def test_under_autocast_it_is_what_autocast_computes():
    model = llama(dtype=torch.float32)
    batch = batch_for(model, LONG)
    found = []
    for chunked in (False, True):
        with ClippingEngine(model, 1e6) as engine:
            with torch.autocast("cpu", torch.bfloat16):
                values = per_example_loss(model, batch, chunked)
            engine.backward(values)
            found.append((values.detach(), engine.collect()["lm_head.weight"]))
    (whole, expected), (blocks, total) = found
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-6)
    assert (total - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (models.bert, "is for sequence_classification"),
        (ARCHITECTURES["gemma2"].build, "changes its logits after the head"),
        (partial(lora, "lm_head"), "the head of LlamaForCausalLM is a peft"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(build, why):
    model = build()
    with pytest.raises(UnsupportedLossError, match=f"chunked_loss.*{why}.*chunked_loss=False"):
        per_example_loss(model, batch_for(model, (18,)), chunked=True)


@pytest.mark.parametrize("lengths", [LONG, (5, 3)])
def test_planted_sum_of_the_wrong_tokens_is_seen(lengths, monkeypatch):
    original = chunked_loss.logits_by_blocks

    def shifted(*args):
        for block in original(*args):
            block.index = (block.index + 1).clamp_max(block.logits.shape[-1] - 1)
            yield block

    monkeypatch.setattr(chunked_loss, "logits_by_blocks", shifted)
    model = gpt2()
    batch = batch_for(model, lengths)
    with ClippingEngine(model, 0.01) as engine:
        norms = engine.backward(per_example_loss(model, batch, chunked=True))
    expected = loop_over_rows(model, batch, 0.01).norms
    assert not torch.allclose(norms, expected, rtol=1e-3)


# -- heads whose gradients are formed by blocks: rows shorter than the head has features ---


@pytest.mark.parametrize("way", WAYS)
def test_what_is_added_is_what_was_measured_whatever_products_round_to(way):
    """Logits are formed in backward, and again for the sum, where other settings hold."""
    with precision_restored(), TensorCores():
        WAYS[way]()
        assert worst_difference(chunked=True) < 1e-5


def test_planted_logits_of_another_precision_are_seen(monkeypatch):
    monkeypatch.setattr(chunked_loss, "full_precision", nullcontext)
    with precision_restored(), TensorCores():
        WAYS["torch.backends.fp32_precision"]()
        assert worst_difference(chunked=True) > 1e-5


def test_cancelling_gradients_of_a_head_are_settled(monkeypatch):
    """A norm far below its terms comes from the explicit gradient in float64."""
    settled = []
    block = chunked_loss.HeadGradients.block
    monkeypatch.setattr(
        chunked_loss.HeadGradients, "block", lambda *a: settled.append(1) or block(*a)
    )
    torch.manual_seed(0)
    head = torch.nn.Linear(16, models.VOCABULARY, bias=False)
    hidden = torch.randn(1, 1, 16).expand(2, 8, 16) * torch.tensor([1.0, -1.0] * 4)[:, None]
    labels = torch.tensor([[3] * 8, [5] * 8])
    # Gradients of logits hardly depend on the input here, and the inputs cancel.
    with torch.no_grad():
        head.weight.mul_(1e-4)
    with ClippingEngine(head, 1e6) as engine:
        norms = engine.backward(chunked_loss.chunked_loss(head, hidden, labels, -100))
    assert settled
    exact, rows = head.double(), zip(hidden.double().split(1), labels.split(1), strict=True)
    for index, (row, label) in enumerate(rows):
        values = chunked_loss.chunked_loss(exact, row, label, -100)
        (gradient,) = torch.autograd.grad(values.sum(), [exact.weight])
        assert norms[index].item() == pytest.approx(gradient.norm().item(), rel=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_example_that_is_not_finite_leaves_no_trace(strategy):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, models.VOCABULARY).double()
    hidden = torch.randn(3, 5, 16, dtype=torch.float64)
    hidden[1, 2] = torch.nan
    labels = torch.randint(0, models.VOCABULARY, (3, 5))

    def sums(kept: list[int]) -> dict[str, Tensor]:
        losses = lambda: chunked_loss.chunked_loss(head, hidden[kept], labels[kept], -100)  # noqa: E731
        return models.clip_losses(head, losses, 0.1, strategy=strategy)[1]

    torch.testing.assert_close(sums([0, 1, 2]), sums([0, 2]), rtol=1e-12, atol=0)


def test_a_head_by_blocks_is_its_outer_products():
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 16, dtype=torch.float64)
    weight = torch.randn(models.VOCABULARY, 16, dtype=torch.float64)
    labels = torch.randint(0, models.VOCABULARY, (3, 5))
    logits = hidden @ weight.mT
    left = logits.softmax(-1) - torch.nn.functional.one_hot(labels, models.VOCABULARY)
    whole = OuterProducts(left, hidden)
    ones, lse = torch.ones(3, 5, 1).double(), logits.logsumexp(-1)
    gram = left @ left.mT
    by_blocks = chunked_loss.HeadGradients(hidden, weight, None, labels, lse, ones, gram)
    norms, expected = by_blocks.norms(), whole.norms()
    for name in ("squared", "error", "slack"):
        torch.testing.assert_close(getattr(norms, name), getattr(expected, name))
    torch.testing.assert_close(by_blocks.slack(), whole.slack())
    torch.testing.assert_close(by_blocks.left_at(labels), whole.left_at(labels))
    some = slice(1, 3), slice(7, 40), torch.float64
    torch.testing.assert_close(by_blocks.block(*some), whole.block(*some))
    torch.testing.assert_close(by_blocks.fingerprint(), whole.fingerprint())


def test_a_head_that_is_another_layer_too_is_refused():
    def losses(net: Any, hidden: Tensor) -> Tensor:
        labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
        return chunked_loss.chunked_loss(net.head, net.body(net.again(hidden)), labels, -100)

    head, again = (torch.nn.Linear(16, models.VOCABULARY, bias=False) for _ in range(2))
    again.weight = head.weight
    body = torch.nn.Linear(models.VOCABULARY, 16, bias=False)
    model = models.Net(losses, body=body, head=head, again=again)
    with ClippingEngine(model, 1.0) as engine:
        values = model(torch.randn(2, 3, 16))
        with pytest.raises(UnsupportedLossError, match="another linear layer.*chunked_loss=False"):
            engine.backward(values)
