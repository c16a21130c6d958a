"""The infilling classifier: the base's own logits, exact clipping, reload in a fresh process,
refusals."""

import dataclasses
import json
import os
import re
from pathlib import Path

import datasets
import pytest
import tiny
import torch
import transformers as hf
from families import bert
from models import INFILLING, MASK, assert_exact, collate
from peft import LoraConfig
from warm import run_program

from hf_dp.clipping import rules
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.errors import DataError, UnsupportedModelError
from hf_dp.tasks.classification import encode
from hf_dp.tasks.infilling import (
    InfillingForSequenceClassification,
    LabelWordProjection,
    load_infilling,
)
from hf_dp.tasks.infilling_config import InfillingConfig
from hf_dp.tasks.templates import GLUE
from hf_dp.trainer.trainer import DPTrainer

LENGTHS = {
    "padded": (6, 2, 9),
    "as many positions as examples": (3, 2, 3),
    "the mask alone": (1, 1),
    "one": (7,),
}


def without_labels(architecture, model, lengths):
    batch = collate(model, architecture.examples(model, lengths))
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("name", INFILLING)
def test_logits_are_the_base_models_at_the_mask(name):
    architecture = INFILLING[name]
    model = architecture.build().eval()
    inputs = without_labels(architecture, model, (6, 2, 9))
    # The base with a vocabulary projection of its own again, on all positions.
    projection = model.masked_lm.get_output_embeddings()
    whole = torch.nn.Linear(projection.weight.shape[1], len(projection.weight), dtype=torch.float64)
    whole.weight, whole.bias = projection.weight, projection.bias
    found = model(**inputs).logits
    model.masked_lm.set_output_embeddings(whole)
    at_the_mask = model.masked_lm(**inputs).logits[inputs["input_ids"] == MASK]
    torch.testing.assert_close(found, at_the_mask[:, model.config.label_word_ids])


# Every model, every case of lengths and every strategy, but not each with each.
CASES = [
    (name, STRATEGIES[place % len(STRATEGIES)], list(LENGTHS)[place % len(LENGTHS)])
    for place, name in enumerate(INFILLING)
]


@pytest.mark.parametrize(("name", "strategy", "case"), CASES)
def test_clipping_is_exact(name, strategy, case):
    architecture = INFILLING[name]
    model = architecture.build()
    assert_exact(architecture, model, architecture.examples(model, LENGTHS[case]), strategy)


# -- from a pretrained checkpoint to a published classifier ---


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a tiny masked language model and its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"intermediate_size": 24, "max_position_embeddings": 48, "pad_token_id": 0}
    config = hf.BertConfig(vocab_size=len(bert()), **small, **sizes)
    config.pretraining_sources = ["quora", "wikipedia"]
    hf.BertForMaskedLM(config).save_pretrained(folder)
    bert().save_pretrained(folder)
    return folder


def loaded(base: Path):
    return load_infilling(str(base), bert(), GLUE["sst2"], ["negative", "positive"])


def trained(base, folder, texts, **given):
    """The trainer, its model and tokenizer after two private steps."""
    model, tokenizer = loaded(base)
    rows = datasets.Dataset.from_dict({"sentence": texts, "label": [0, 1] * (len(texts) // 2)})
    encoded = encode(rows, tokenizer, ["sentence"], "label", ["negative", "positive"], 24)
    arguments = tiny.arguments(folder / "out", max_steps=2)
    trainer = DPTrainer(
        model, arguments, train_dataset=encoded, processing_class=tokenizer, **given
    )
    trainer.train()
    return trainer, model, tokenizer


def test_a_trained_run_reloads_in_a_fresh_process_and_serves_raw_text(base, tmp_path):
    """Private training through DPTrainer; then `pipeline` alone, in another process, on raw
    text."""
    texts = ["it was great", "dull", "a [MASK] film", "the film was good", "bad", "terrible"] * 6
    trainer, model, tokenizer = trained(base, tmp_path, texts)
    trainer.save_model()
    more = f"import json; print(json.dumps(model({texts[:3]!r})))"
    for text, found in zip(texts, json.loads(run_the_cards_lines(tmp_path, base, more))):
        inputs = tokenizer([text], return_tensors="pt")
        expected = model.eval()(**inputs).logits[0].detach().softmax(0)
        assert found["label"] == model.config.id2label[int(expected.argmax())]
        assert found["score"] == pytest.approx(float(expected.max()), abs=1e-5)


@pytest.mark.parametrize("name", INFILLING)
def test_every_base_reloads_to_the_same_logits(name, tmp_path):
    """Tied or not: no parameter is lost on the way through a file, none is left uninitialized."""
    architecture = INFILLING[name]
    model = architecture.build(dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    again, info = InfillingForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    inputs = without_labels(architecture, model, (6, 2))
    torch.testing.assert_close(again.eval()(**inputs).logits, model(**inputs).logits)


def test_no_local_path_is_published(base, tmp_path):
    model, _ = loaded(base)
    model.save_pretrained(tmp_path)
    assert base.name not in (tmp_path / "config.json").read_text()


def test_gradient_checkpointing_is_claimed_as_by_the_base():
    assert INFILLING["bert"].build().supports_gradient_checkpointing
    assert not INFILLING["albert"].build().supports_gradient_checkpointing


def test_what_is_saved_is_what_is_loaded(base, tmp_path):
    model, tokenizer = loaded(base)
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert isinstance(again, InfillingForSequenceClassification)
    assert again.config.label_words == ["terrible", "great"]
    assert again.config.base_config.model_type == "bert"
    assert again.config.pretraining_sources == ["quora", "wikipedia"]
    projection = again.masked_lm.get_output_embeddings()
    tied = again.masked_lm.get_input_embeddings()
    assert projection.weight is tied.weight, "as in the base"
    inputs = tokenizer(["a film", "great"], padding=True, return_tensors="pt")
    torch.testing.assert_close(again.eval()(**inputs).logits, model.eval()(**inputs).logits)


def test_lora_on_an_infilling_model(base, tmp_path):
    adapter = LoraConfig(r=2, target_modules=["query", "value"])
    texts = ["bad", "great film"] * 20
    trainer, model, tokenizer = trained(base, tmp_path, texts, peft_config=adapter)
    trainer.describe(base_model=str(base))
    trainer.save_model()
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    inputs = tokenizer(["a film"], return_tensors="pt")
    expected = model.eval()(**inputs).logits[0].detach().softmax(0).max()
    found = run_the_cards_lines(tmp_path, base, 'print(model("a film")[0]["score"])')
    assert float(found) == pytest.approx(float(expected), abs=1e-5)


def run_the_cards_lines(folder: Path, base: Path, more: str) -> str:
    """What the lines under "Use" of a card print, run beside the model and its base."""
    (folder / base.name).symlink_to(base)
    card = (folder / "out" / "README.md").read_text()
    lines = re.search(r"## Use\n+```python\n(.*?)```", card, re.DOTALL).group(1)
    lines = lines.replace("path/to/this/folder", "out").replace("BASE_MODEL", base.name)
    done = run_program(f"{lines}\n{more}", folder, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_two_texts_for_a_template_of_one_are_refused(base):
    model, tokenizer = loaded(base)
    with pytest.raises(DataError, match="mask token exactly once"):
        model(**tokenizer(["a film"], ["a second"], return_tensors="pt"))
    with pytest.raises(DataError, match="needs `input_ids`"):
        model(inputs_embeds=torch.zeros(1, 3, 16))


def test_a_checkpoint_without_a_trained_head_is_refused(base, tmp_path):
    hf.BertModel.from_pretrained(base).save_pretrained(tmp_path)
    with pytest.raises(
        DataError, match="no trained masked-LM head.*recipes/pretraining/masked_lm.py"
    ):
        load_infilling(str(tmp_path), bert(), GLUE["sst2"], ["negative", "positive"])


def test_a_head_that_is_not_a_linear_map_is_refused():
    config = InfillingConfig(
        base_config=hf.BertConfig(vocab_size=50, hidden_size=16, num_attention_heads=2)
    )
    masked_lm = hf.BertForMaskedLM(config.base_config)
    masked_lm.set_output_embeddings(torch.nn.Bilinear(2, 2, 2))
    with pytest.raises(UnsupportedModelError, match="Bilinear, but nn.Linear was expected"):
        InfillingForSequenceClassification(config, masked_lm)


@pytest.mark.parametrize("lost", ["the cross term with the tied embedding", "the bias"])
def test_a_planted_bug_in_the_projections_rule_is_seen(monkeypatch, lost):
    architecture = INFILLING["bert"]
    model = architecture.build()
    rule = rules.RULES[LabelWordProjection]

    def broken(module, kept, grad):
        found = dict(rule.gradients(module, kept, grad))
        if lost == "the bias":
            found["bias"] = dataclasses.replace(found["bias"], grads=found["bias"].grads * 0)
        else:  # recorded at tokens that no text holds
            tokens = found["weight"].tokens + 40
            found["weight"] = dataclasses.replace(found["weight"], tokens=tokens)
        return found

    planted = dataclasses.replace(rule, gradients=broken)
    monkeypatch.setitem(rules.RULES, LabelWordProjection, planted)
    with pytest.raises(AssertionError):
        assert_exact(architecture, model, architecture.examples(model, (9, 7)))
