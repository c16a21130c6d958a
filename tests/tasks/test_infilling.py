"""Classifiers by label words: the base's own logits, exact clipping, reloading, refusals."""

import copy
import dataclasses
import functools
from pathlib import Path

import datasets
import models
import pytest
import tiny
import torch
import transformers as hf
from families import bert, saved_masked_lm
from models import INFILLING, MASK, ONE_TOKEN, SEVERAL, assert_exact, collate
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from warm import run_the_cards_lines

from hf_dp.clipping import rules
from hf_dp.clipping.engine import STRATEGIES, ClippingEngine
from hf_dp.errors import DataError, HfDpError, UnsupportedModelError
from hf_dp.tasks.classification import encode
from hf_dp.tasks.infilling import (
    LabelWordProjection,
    LabelWords,
    load_infilling,
    load_trained,
    with_label_words,
)
from hf_dp.tasks.templates import GLUE
from hf_dp.trainer.publishing import usage
from hf_dp.trainer.trainer import DPTrainer

LENGTHS = {
    "padded": (6, 2, 9),
    "as many positions as examples": (3, 2, 3),
    "the mask alone": (1, 1),
    "one": (7,),
}


def without_labels(architecture, model, lengths, left=False):
    batch = collate(model, architecture.examples(model, lengths), left)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def language_model(model):
    """The language model that was made a classifier, with a whole head again."""
    stock = copy.deepcopy(model)
    stock.__class__ = type(model).__mro__[2]
    projection = stock.get_output_embeddings()
    if not isinstance(projection, torch.nn.Linear):
        shape, bias = projection.weight.shape, projection.bias is not None
        whole = torch.nn.Linear(shape[1], shape[0], bias=bias, dtype=projection.weight.dtype)
        whole.weight, whole.bias = projection.weight, projection.bias
        stock.set_output_embeddings(whole)
    return stock


def expected_logits(model, tokens, stock=None):
    """What one unpadded text, (1, T), gives: from all logits of the language model alone."""
    words, stock = model.label_words, stock or language_model(model)
    if words.mask_token_id is not None:
        return stock(tokens).logits[tokens == MASK][0, [token for (token,) in words.ids]]
    if words.one_token_each:
        return stock(tokens).logits[0, -1, [token for (token,) in words.ids]]
    found = []
    for word in words.ids:
        whole = torch.cat([tokens, torch.tensor([word])], 1)
        log_p = stock(whole).logits[0].log_softmax(-1)
        at = range(tokens.shape[1] - 1, whole.shape[1] - 1)
        found.append(sum(log_p[place, token] for place, token in zip(at, word, strict=True)))
    return torch.stack(found)


@pytest.mark.parametrize("name", INFILLING)
def test_logits_are_those_of_the_language_model_in_the_missing_place(name):
    """And padding changes nothing, on whichever side of a decoder's texts it stands."""
    architecture = INFILLING[name]
    model = architecture.build().eval()
    with architecture.precision(), torch.no_grad():
        inputs = without_labels(architecture, model, (6, 2, 9))
        rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        expected = torch.stack([expected_logits(model, ids[mask == 1][None]) for ids, mask in rows])
        torch.testing.assert_close(model(**inputs).logits, expected)
        if model.label_words.mask_token_id is None:
            left = without_labels(architecture, model, (6, 2, 9), left=True)
            torch.testing.assert_close(model(**left).logits, expected)


@pytest.mark.parametrize(
    "name", ["bert", *(name for name in INFILLING if name.endswith(("token", "several")))]
)
def test_gradients_are_those_of_the_language_model(name):
    """By stock torch on the whole language model. The loops that clipping is compared with go
    through this model's own forward and backward."""
    architecture = INFILLING[name]
    model = architecture.build().eval()
    stock = language_model(model)
    (tokens,) = (each["input_ids"] for each in architecture.examples(model, (6,)))
    label = torch.tensor([1])
    with architecture.precision():
        F.cross_entropy(model(tokens).logits, label).backward()
        F.cross_entropy(expected_logits(model, tokens, stock)[None], label).backward()
    expected = {name: each.grad for name, each in stock.named_parameters()}
    for name, each in model.named_parameters():
        message = lambda said, n=name: f"{n}: {said}"  # noqa: E731
        torch.testing.assert_close(each.grad, expected[name], msg=message)


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


@pytest.mark.parametrize("name", ["llama one token", "gpt2_tied several"])
def test_clipping_is_exact_with_padding_on_the_left(name, monkeypatch):
    architecture = INFILLING[name]
    model = architecture.build()
    monkeypatch.setattr(models, "collate", functools.partial(collate, left=True))
    assert_exact(architecture, model, architecture.examples(model, (6, 2, 9)), "two_pass")


class _Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if torch.is_tensor(t)}
        for each in tree_leaves(made):
            if torch.is_tensor(each) and each.untyped_storage().data_ptr() not in given:
                self.numbers = max(self.numbers, each.numel())
        return made


@pytest.mark.parametrize("words", [ONE_TOKEN, SEVERAL])
def test_memory_does_not_grow_with_the_vocabulary(words):
    """Of two texts of 30 tokens, with the vocabularies of SmolLM2 and of Llama 3 and a frozen head,
    as LoRA leaves it. The three words' six tokens meet 4,096 words at a time."""
    largest = []
    for vocabulary in (49_152, 128_000):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        config = hf.LlamaConfig(
            vocab_size=vocabulary, num_attention_heads=1, **sizes, tie_word_embeddings=True
        )
        model = hf.LlamaForCausalLM(config).train()
        model.get_input_embeddings().weight.requires_grad_(False)
        made = with_label_words(model, LabelWords("<S1> x", list("abc"), words))
        engine = ClippingEngine(made, 0.1)
        tokens = torch.randint(20, 40_000, (2, 30), generator=torch.Generator().manual_seed(0))
        with _Largest() as found, engine:
            logits = made(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
            engine.backward(logits.logsumexp(1))
        largest.append(found.numbers)
    assert largest[0] == largest[1] <= 2 * 6 * 4096


ON_HEAD = LoraConfig(r=2, target_modules=["lm_head"])
PREFIX = PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [(ON_HEAD, "the head of .* is a peft"), (PREFIX, "Prefix tuning cannot be combined")],
)
def test_what_several_tokens_do_not_go_with_is_refused(adapter, message):
    """An adapter on the head would be passed by, and one cache would be read by several forwards."""
    architecture = INFILLING["llama several"]
    model = architecture.build(dtype=torch.float32)
    model.config.pad_token_id = 0
    adapted = get_peft_model(model, adapter)
    with pytest.raises(HfDpError, match=message):
        adapted(**without_labels(architecture, model, (6, 2)))


def test_words_are_shown_of_a_model_that_fills_them_in(base, tmp_path):
    """Not of a head that was put on one later, whose configuration still has them."""
    model, tokenizer = loaded(base)
    model.save_pretrained(tmp_path / "words")
    head = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "words")
    assert "classify(" in usage(model, "text-classification")
    assert "classify(" not in usage(head, "text-classification")
    head.save_pretrained(tmp_path / "head")
    tokenizer.save_pretrained(tmp_path / "head")
    assert load_trained(str(tmp_path / "head")) is None


# -- from a pretrained checkpoint to a published classifier ---


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return saved_masked_lm(folder, pretraining_sources=["quora", "wikipedia"])


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


LORA = LoraConfig(r=2, target_modules=["query", "value"])


@pytest.mark.parametrize("adapter", [None, LORA], ids=["whole", "lora"])
def test_a_trained_run_reloads_in_a_fresh_process_and_serves_raw_text(adapter, base, tmp_path):
    """Private training; then the lines of the card alone, in another process, on raw text."""
    texts = ["it was great", "dull", "a [MASK] film", "the film was good", "bad", "terrible"] * 6
    trainer, model, tokenizer = trained(base, tmp_path, texts, peft_config=adapter)
    if adapter is not None:
        trainer.describe(base_model=str(base))
    trainer.save_model()
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() == (adapter is not None)
    more = f"print(json.dumps([classify(text) for text in {texts[:3]!r}]))"
    for text, found in zip(texts, run_the_cards_lines(tmp_path, base, more)):
        inputs = tokenizer([text], return_tensors="pt")
        expected = model.eval()(**inputs).logits[0].detach().softmax(0)
        assert [*found] == ["negative", "positive"]
        assert [*found.values()] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", INFILLING)
def test_every_base_reloads_to_the_same_logits(name, tmp_path):
    """Tied or not: no parameter is lost on the way through a file. What is saved is a checkpoint of
    the language model, which transformers loads alone."""
    architecture = INFILLING[name]
    model = architecture.build(dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    stock = type(model).__mro__[2]
    loaded, info = stock.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is stock and [type(model).__name__] == loaded.config.architectures
    assert not info["missing_keys"] and not info["unexpected_keys"]
    again = with_label_words(loaded, LabelWords(**loaded.config.label_words)).eval()
    inputs = without_labels(architecture, model, (6, 2))
    torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)


def test_gradient_checkpointing_is_claimed_as_by_the_base():
    assert INFILLING["bert"].build().supports_gradient_checkpointing
    assert not INFILLING["albert"].build().supports_gradient_checkpointing


def test_what_is_saved_is_what_is_loaded(base, tmp_path):
    model, tokenizer = loaded(base)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert base.name not in (tmp_path / "config.json").read_text()  # no local path is published
    again, tokenizer = load_trained(str(tmp_path))
    assert again.label_words.words == ["terrible", "great"]
    assert again.config.id2label == {0: "negative", 1: "positive"}
    assert again.config.pretraining_sources == ["quora", "wikipedia"]
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    inputs = tokenizer(["a film", "great"], padding=True, return_tensors="pt")
    torch.testing.assert_close(again.eval()(**inputs).logits, model.eval()(**inputs).logits)
    assert load_trained(str(base)) is None


def test_two_texts_for_a_template_of_one_are_refused(base):
    model, tokenizer = loaded(base)
    with pytest.raises(DataError, match="mask token exactly once"):
        model(**tokenizer(["a film"], ["a second"], return_tensors="pt"))
    with pytest.raises(DataError, match="needs `input_ids`"):
        model(inputs_embeds=torch.zeros(1, 3, 16))


def test_a_checkpoint_without_a_trained_head_is_refused(base, tmp_path):
    hf.BertModel.from_pretrained(base).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no trained head.*recipes/pretraining/masked_lm.py"):
        load_infilling(str(tmp_path), bert(), GLUE["sst2"], ["negative", "positive"])


def test_a_head_that_is_not_a_linear_map_is_refused():
    model = hf.BertForMaskedLM(hf.BertConfig(vocab_size=50, hidden_size=16, num_attention_heads=2))
    model.set_output_embeddings(torch.nn.Bilinear(2, 2, 2))
    with pytest.raises(UnsupportedModelError, match="Bilinear, but nn.Linear was expected"):
        with_label_words(model, LabelWords("<S1> [MASK]", ["a", "b"], [[1], [2]], 4))


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
