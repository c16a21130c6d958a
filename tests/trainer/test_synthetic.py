"""Every model with a per-example loss gets synthetic examples, and passes the self-check on them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_images
import torch
import transformers as hf
from models import ARCHITECTURES, collate, without_downcasts
from torch.nn import functional as F

from hf_dp.batches.padding import Padding
from hf_dp.clipping import self_check
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.errors import DataError, SelfCheckError, UnsupportedModelError
from hf_dp.losses import per_example_loss, task_of
from hf_dp.run.synthetic import made_up_tokens, synthetic_examples
from hf_dp.run.training_data import padded_together


def synthetic_batches(model):
    """The synthetic examples as one padded batch and one by one."""
    return padded_together(synthetic_examples(model), Padding.of(model, None))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_whole_zoo_passes_the_self_check_and_trains_its_own_loss(name):
    """Transformers' mean over a batch of one is the mean over that example's own tokens."""
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    for example in architecture.examples(model, (5, 3)):
        batch = collate(model, [example])
        with torch.no_grad(), without_downcasts():
            own = model(**batch).loss
            found = per_example_loss(model, batch)
        torch.testing.assert_close(found, own[None].to(found.dtype), rtol=1e-6, atol=1e-6)
    padded, alone = synthetic_batches(model)
    with without_downcasts():
        self_check(model, per_example_loss, padded, alone)


def test_a_config_that_knows_no_end_token():
    sizes = {"d_model": 16, "d_head": 8, "d_inner": 24, "n_head": 2, "block_sizes": [1, 1]}
    config = hf.FunnelConfig(vocab_size=61, **sizes)
    assert not hasattr(config, "eos_token_id")
    padded, alone = synthetic_batches(hf.FunnelForSequenceClassification(config))
    assert padded["input_ids"].shape == (3, 12)
    assert [row["input_ids"].shape[1] for row in alone] == [7, 12, 4]


def test_an_end_token_outside_the_vocabulary_is_none():
    """GPT-2's configuration has 50256, whatever the size of its vocabulary."""
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
    for tokens in (
        synthetic_batches(model)[0]["input_ids"],
        made_up_tokens(model, (1, 5), torch.ones(1, 3, dtype=torch.long)),
    ):
        assert tokens.max() < 64 < model.config.eos_token_id
    own = torch.nn.Linear(2, 2)  # a module without embeddings of transformers' kind
    own.config = SimpleNamespace(eos_token_id=1)
    assert made_up_tokens(own, (1, 3), torch.ones(1, 2, dtype=torch.long)).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_by_every_strategy_in_float32(strategy):
    model = ARCHITECTURES["bert_masked_lm"].build(dtype=torch.float32)
    self_check(model, per_example_loss, *synthetic_batches(model), strategy=strategy)


def token_classifier() -> hf.BertForTokenClassification:
    torch.manual_seed(0)
    small = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.BertConfig(**small, intermediate_size=24, num_labels=4)
    return hf.BertForTokenClassification(config).double()


def test_token_classification():
    model = token_classifier()
    padded, alone = synthetic_batches(model)
    self_check(model, per_example_loss, padded, alone)
    assert task_of(model) == "token_classification"
    model.eval()
    for example in alone:
        (found,) = per_example_loss(model, example)
        torch.testing.assert_close(found, model(**example).loss, rtol=1e-9, atol=0)


def test_what_cannot_be_made_up_is_refused_by_name():
    model = token_classifier()
    _, (example, *_) = synthetic_batches(model)
    with pytest.raises(DataError, match=r"one label per token, shape \(1, 7\), got \(1, 8\)"):
        per_example_loss(model, {**example, "labels": F.pad(example["labels"], (0, 1))})
    model = ARCHITECTURES["vit"].build()
    model.main_input_name = "input_values"
    with pytest.raises(UnsupportedModelError, match="takes 'input_values'.*synthetic_batches"):
        synthetic_batches(model)
    small = {"embedding_size": 4, "hidden_sizes": [4] * 4, "depths": [1] * 4, "groups_width": 4}
    model = hf.RegNetForImageClassification(hf.RegNetConfig(**small))
    with pytest.raises(UnsupportedModelError, match="says image_size None .*config.json, or over"):
        synthetic_examples(model)


def test_a_coupled_loss_is_seen_on_images_too():
    model = ARCHITECTURES["vit"].build()
    padded, alone = synthetic_batches(model)

    def coupled(m, inputs):
        return per_example_loss(m, inputs) * inputs["pixel_values"].mean()

    with pytest.raises(SelfCheckError, match="alone but"):
        self_check(model, coupled, padded, alone)


@pytest.mark.parametrize("model", [tiny_images.clip, tiny_images.siglip])
def test_the_size_of_images_is_that_of_the_part_that_reads_them(model):
    assert {each["pixel_values"].shape for each in synthetic_examples(model())} == {(1, 3, 8, 8)}
