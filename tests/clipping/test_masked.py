"""Clipping over the entries that a mask keeps, against a loop over single examples in float64."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, INFILLING, assert_equal, clip, collate, single, together

from hf_dp.clipping.masked import MaskedEngine
from hf_dp.errors import InvalidArgumentError

LENGTHS = (5, 1, 3, 6)
NAMES = ("bert", "gpt2_tied", "vit", "t5", "infilling")


def built(name):
    architecture = INFILLING["bert"] if name == "infilling" else ARCHITECTURES[name]
    model = architecture.build()
    generator = torch.Generator().manual_seed(5)
    masks = {n: torch.rand(p.shape, generator=generator) < 0.3 for n, p in model.named_parameters()}
    masks.popitem()  # the last trains whole
    return architecture, model, masks, architecture.examples(model, LENGTHS)


def expected_of(architecture, model, masks, examples):
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = []
    with architecture.precision():
        for example in examples:
            gradients = torch.autograd.grad(single(model, example), list(trainable.values()), allow_unused=True)
            pairs = zip(trainable, gradients, strict=True)
            found.append([g if g is None or n not in masks else g * masks[n] for n, g in pairs])
    return clip(trainable, found, None)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loop(name):
    architecture, model, masks, examples = built(name)
    expected = expected_of(architecture, model, masks, examples)
    with MaskedEngine(model, masks, expected.clipping_norm) as engine, architecture.precision():
        norms = [engine.backward(together(model, collate(model, examples[a:b]))) for a, b in ((0, 1), (1, 4))]
        sums = engine.collect()
    assert_equal(torch.cat(norms), sums, expected)
    for n, mask in masks.items():
        assert not sums[n][~mask].any()


def test_norms_are_of_the_kept_entries_alone():
    """With norms of all entries an example would be clipped harder: a planted bug that the loop sees."""
    architecture, model, masks, examples = built("bert")
    expected = expected_of(architecture, model, masks, examples)
    whole = expected_of(architecture, model, {}, examples)
    assert bool((whole.norms > 1.2 * expected.norms).all())


def test_an_infinite_gradient_outside_the_mask_does_not_count():
    """Zero times infinity is NaN: the mask has to be a `where`."""
    _, model, masks, _ = built("bert")
    name = "bert.embeddings.word_embeddings.weight"
    with MaskedEngine(model, masks, 1.0) as engine:
        parameter, mask = dict(model.named_parameters())[name], masks[name]
        values = torch.full(parameter.shape, torch.inf, dtype=torch.float64)
        values[mask] = 1.0
        _, kept = engine._masked(parameter, None, values)
        assert torch.equal(kept, mask.double())
        rows = torch.tensor([4, 4, 9])
        _, kept = engine._masked(parameter, rows, values[rows])
        assert torch.equal(kept, mask[rows].double())


def test_automatic_clipping():
    architecture, model, masks, examples = built("bert")
    expected = expected_of(architecture, model, masks, examples)
    with MaskedEngine(model, masks, 0.5, clipping="automatic") as engine:
        engine.backward(together(model, collate(model, examples[:1])))
        total = sum(float(s.square().sum()) for s in engine.collect().values()) ** 0.5
    norm = float(expected.norms[0])
    assert total == pytest.approx(0.5 * norm / (norm + 0.01), rel=1e-9)


def test_bad_masks_are_refused():
    _, model, masks, _ = built("bert")
    with pytest.raises(InvalidArgumentError, match="'nothing'"):
        MaskedEngine(model, {"nothing": torch.ones(1)}, 1.0).__enter__()
    with pytest.raises(InvalidArgumentError, match="classifier.weight"):
        MaskedEngine(model, {"classifier.weight": torch.ones(1)}, 1.0).__enter__()
    with pytest.raises(InvalidArgumentError, match="clipping"):
        MaskedEngine(model, masks, 1.0, clipping="per_layer")
