"""Partitions: a weight with its bias, disjoint, complete, tied ones together, names stable."""

from __future__ import annotations

import json

import pytest
from architectures import ARCHITECTURES

from hf_dp.cli.main import main
from hf_dp.tuners.frost.select import partitions


@pytest.mark.parametrize(
    "name",
    ["bert", "albert", "bert_masked_lm", "gpt2_tied", "gemma3", "t5", "bart", "vit", "dinov2"],
)
def test_every_trainable_parameter_is_in_exactly_one(name):
    model = ARCHITECTURES[name].build()
    found = partitions(model)
    parameters = dict(model.named_parameters())
    assert sorted(n for p in found for n in p.parameters) == sorted(parameters)
    assert [p.size for p in found] == [
        sum(parameters[n].numel() for n in p.parameters) for p in found
    ]
    assert len({p.name for p in found}) == len(found)
    assert partitions(ARCHITECTURES[name].build()) == found


def by_name(name: str, **options):
    return {p.name: p for p in partitions(ARCHITECTURES[name].build(), **options)}


def test_a_weight_goes_with_its_bias():
    found = by_name("bert")
    query = found["bert.encoder.layer.0.attention.self.query"]
    assert query.parameters == (f"{query.name}.weight", f"{query.name}.bias")
    assert query.owners == (query.name,)
    assert found["bert.embeddings.word_embeddings"].parameters == (
        "bert.embeddings.word_embeddings.weight",
    )
    assert found["bert.encoder.layer.0.output.LayerNorm"].size == 32


def test_bare_parameters_are_their_own():
    found = by_name("vit")
    assert found["vit.embeddings.cls_token"].parameters == ("vit.embeddings.cls_token",)
    assert found["vit.embeddings.position_embeddings"].parameters == (
        "vit.embeddings.position_embeddings",
    )


def test_tied_parameters_are_one_partition_with_all_its_owners():
    found = by_name("gpt2_tied")
    assert found["transformer.wte"].owners == ("transformer.wte", "lm_head")
    assert "lm_head" not in found
    # BERT's decoder is tied to the embedding; the vocabulary's bias belongs to it.
    found = by_name("bert_masked_lm")
    tied = found["bert.embeddings.word_embeddings"]
    bias = "cls.predictions.bias"
    assert set(tied.parameters) == {"bert.embeddings.word_embeddings.weight", bias}
    assert "cls.predictions.decoder" in tied.owners
    t5 = by_name("t5")
    assert set(t5["shared"].owners) >= {"shared", "encoder.embed_tokens", "decoder.embed_tokens"}


def test_frozen_parameters_are_left_out():
    model = ARCHITECTURES["bert"].build()
    model.bert.embeddings.requires_grad_(False)
    assert not any("embeddings" in p.name for p in partitions(model))


def test_the_command(tmp_path, capsys):
    model = ARCHITECTURES["bert"].build()
    model.save_pretrained(tmp_path)
    assert main(["partitions", str(tmp_path), "--num-labels", "3"]) == 0
    text = capsys.readouterr().out
    head = sum(p.numel() for p in model.classifier.parameters())
    count, numbers = len(partitions(model)) - 1, model.num_parameters() - head
    assert f"{count} partitions, {numbers:,} parameters" in text
    assert f"{head} of a new head, which always train" in text
    assert main(["partitions", str(tmp_path), "--num-labels", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found[name] for name in ("parameters", "always_train", "stay_frozen")) == (
        model.num_parameters()
    )
    vision = ARCHITECTURES["vit"].build()
    vision.save_pretrained(tmp_path)
    labels = str(vision.config.num_labels)
    assert main(["partitions", str(tmp_path), "--num-labels", labels, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["always_train"] == sum(p.numel() for p in vision.classifier.parameters())
    assert not any(row["name"].startswith("classifier") for row in found["partitions"])
    assert main(["partitions", "no/such"]) == 2
    assert "'no/such' could not be loaded" in capsys.readouterr().err
