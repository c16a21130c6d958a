"""A head on a decoder reads at the last token of a text, wherever padding is and whatever pads; one
on an encoder-decoder at its last end token, of which rows may have any number."""

import json
import re
from typing import Any

import chat
import datasets
import peft
import pytest
import tiny
import torch
import transformers as hf
from recipe import Recipe
from torch.nn import functional as F
from transformers import DataCollatorWithPadding

from hf_dp import losses
from hf_dp.errors import DataError, SelfCheckError, UnsupportedModelError
from hf_dp.losses import each_row_read_as_alone, per_example_loss

PAD = END = 3
ENDS = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), PAD)
SHARED = {"vocab_size": 61, "num_labels": 3, **ENDS}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {"hidden_size": 16, "initializer_range": 0.4, **LAYERS}
ROPE = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 48}
KINDS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48, "initializer_range": 0.4,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "OPT": {"hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24,
            "max_position_embeddings": 48, "dropout": 0.0, "init_std": 0.4},
    "GPTNeoX": {**SIZES, "intermediate_size": 24, "max_position_embeddings": 48},
    "Bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.4,
              "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "Llama": ROPE, "Qwen2": ROPE, "Qwen3": {**ROPE, "head_dim": 8}, "Mistral": ROPE,
}  # fmt: skip
SIDES = ["right", "left"]
# Texts with the end token nowhere, inside, last, twice at the end, and alone.
TEXTS = [[5, 6, 7, 8], [9, PAD, 10], [11, 12, PAD], [4, 13, 14, PAD, PAD], [PAD]]


def model_of(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(**{**SHARED, **KINDS[kind], **options})
    return getattr(hf, f"{kind}ForSequenceClassification")(config).eval()


def rows(texts: list[list[int]]) -> list[dict[str, Any]]:
    return [
        {"input_ids": text, "attention_mask": [1] * len(text), "labels": i % 3}
        for i, text in enumerate(texts)
    ]


def padded(some: list[dict[str, Any]], side: str, by: str = "[SEP]") -> dict[str, Any]:
    """A batch, padded by a token: [SEP] has the id 3."""
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = side, by
    return dict(DataCollatorWithPadding(tokenizer)(some))


def alone(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """The logits at the last token of a row by itself, by the backbone and the head."""
    backbone = getattr(model, model.base_model_prefix)
    hidden = backbone(torch.tensor([row["input_ids"]])).last_hidden_state[0, -1]
    return model.score(hidden)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_gradients_and_logits_are_those_of_the_text_alone(kind, side, monkeypatch):
    model, some = model_of(kind).double(), rows(TEXTS)
    batch = padded(some, side)
    if (kind, side) == ("Bloom", "left"):  # whose forward takes no positions
        with pytest.raises(UnsupportedModelError, match="padding_side = 'right'"):
            per_example_loss(model, dict(batch))
        return
    expected = torch.stack([alone(model, row) for row in some])
    own = F.cross_entropy(expected, torch.arange(len(some)) % 3, reduction="none")
    with each_row_read_as_alone(model):  # as around a loss of the user's own, which may call ours
        found = per_example_loss(model, dict(batch))
        evaluated = model(**batch).logits
    torch.testing.assert_close(found, own, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(evaluated, expected, rtol=1e-9, atol=1e-12)
    of_head = list(model.parameters())
    for one, other in zip(found, own):
        ours = torch.autograd.grad(one, of_head, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(other, of_head, retain_graph=True, allow_unused=True)
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert not model._forward_pre_hooks  # hooks are gone
    # The planted fault is what transformers does: it tells padding by its id.
    monkeypatch.setattr(losses, "_READ_BEFORE_PADDING", frozenset())
    planted = per_example_loss(model, dict(batch))
    wrong = (planted - own).abs() > 1e-6
    assert wrong.tolist()[:2] == [False, False] and wrong[2] and wrong[3]


@pytest.mark.parametrize(
    ("method", "side"), [("lora", "right"), ("lora", "left"), ("prefix", "right")]
)
def test_adapters_read_at_the_same_place(method, side):
    config: Any = peft.LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False)
    if method == "prefix":
        config = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    model = peft.get_peft_model(model_of("Llama"), config).double().eval()
    some = rows(TEXTS)
    found = per_example_loss(model, padded(some, side))
    with each_row_read_as_alone(model):
        own = [
            F.cross_entropy(model(**padded([row], side)).logits, torch.tensor([row["labels"]]))
            for row in some
        ]
    torch.testing.assert_close(found, torch.stack(own), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("task", ["SEQ_CLS", "CAUSAL_LM"])
def test_virtual_tokens_before_the_padding_are_refused(task):
    """They would be as far from the text as the longest row of the batch is long."""
    config = peft.PromptTuningConfig(task_type=task, num_virtual_tokens=2)
    made = model_of("Llama") if task == "SEQ_CLS" else hf.LlamaForCausalLM(model_of("Llama").config)
    model, some = peft.get_peft_model(made, config).eval(), rows(TEXTS[:2])
    if task == "CAUSAL_LM":
        some = [{**row, "labels": row["input_ids"]} for row in some]
    for row in some:  # alone it has no padding
        per_example_loss(model, {name: torch.tensor([row[name]]) for name in row})
    widths = (4 - len(row["input_ids"]) for row in some)
    sides = [{n: [0] * w * isinstance(v, list) + v if isinstance(v, list) else v for n, v in row.items()}
             for row, w in zip(some, widths)]  # fmt: skip
    batch = {name: torch.tensor([row[name] for row in sides]) for name in some[0]}
    with pytest.raises(
        UnsupportedModelError, match="padded on the left.*PROMPT_TUNING stand before"
    ):
        per_example_loss(model, batch)


def test_a_configuration_without_padding_token_is_named():
    model = model_of("GPT2", pad_token_id=None)
    one = rows([[5, 6, 7]])
    found = per_example_loss(model, padded(one, "right"))
    own = F.cross_entropy(alone(model, one[0])[None], torch.tensor([0]))
    torch.testing.assert_close(found[0], own)
    with pytest.raises(UnsupportedModelError, match=r"model\.config\.pad_token_id = tokenizer"):
        per_example_loss(model, padded(rows(TEXTS), "right"))


def data(count: int = 40, last: int | None = None, first: int = 0) -> datasets.Dataset:
    texts = [[4 + (first + i * 7 + j) % 50 for j in range(2 + i % 5)] for i in range(count)]
    texts[5][0] = texts[6][1] = PAD  # inside a text it is a token like any other
    if last is not None:
        texts[last][-1] = PAD
    return datasets.Dataset.from_list(rows(texts))


def trainer_of(folder: Any, side: str, rows: datasets.Dataset, **given: Any) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = side, "[SEP]"
    made = {"model": model_of("GPT2"), "train_dataset": rows, "processing_class": tokenizer}
    made |= {"data_collator": DataCollatorWithPadding(tokenizer), "eval_dataset": data(8, 0, 3)}
    return tiny.trainer(folder, given=made | given, max_steps=1, accountant="rdp")


@pytest.mark.parametrize("side", SIDES)
def test_a_run_checks_itself_trains_and_evaluates(side, tmp_path, caplog):
    trainer = tiny.trained(trainer_of(tmp_path, side, data()))
    assert "skips the data collator" not in caplog.text  # made-up rows must not end with padding
    model, some = trainer.model.eval(), list(trainer.eval_dataset)
    with torch.no_grad():
        expected = torch.stack([alone(model, row) for row in some])
    found = torch.from_numpy(trainer.predict(trainer.eval_dataset).predictions)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    labels = torch.tensor([row["labels"] for row in some])
    loss = float(F.cross_entropy(expected, labels))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-4)


def test_a_row_that_others_would_read_elsewhere_is_named_before_the_first_draw(tmp_path):
    trainer = trainer_of(tmp_path, "right", data(last=7))
    with pytest.raises(DataError, match=r"Row 7 .*ends with the token that pads \(3\).*pad_token"):
        trainer.train()
    assert trainer.ledger.steps() == 0


# -- encoder-decoders, whose heads read at the last end token --

BART = {
    "vocab_size": 19, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": END, "decoder_start_token_id": END, "forced_eos_token_id": END, "max_position_embeddings": 32,
    "dropout": 0.0, "attention_type": "original_full",
}  # fmt: skip
T5 = {
    "vocab_size": 19, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
CLASSES = {"Bart": BART, "BigBirdPegasus": BART, "MBart": BART, "Mvp": BART, "PLBart": BART,
           "T5": T5, "MT5": T5, "UMT5": T5}  # fmt: skip


def encoder_decoder(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**CLASSES[name], num_labels=2)
    return getattr(hf, f"{name}ForSequenceClassification")(config)


def ended(count: int = 12, ends=(1, 2, 3), first: int = 2) -> list[dict]:
    made = []
    for i in range(count):
        body = [token for j in range(ends[i % len(ends)] - 1) for token in (4 + (i + j) % 12, END)]
        ids = [first, *body, 5 + i % 9, END]
        made.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": i % 2})
    return made


@pytest.mark.parametrize("name", CLASSES)
def test_each_loss_and_gradient_is_that_of_the_row_alone(name):
    model = encoder_decoder(name).double().eval()
    some = ended(3)
    batch = padded(some, "right", "[PAD]")
    with each_row_read_as_alone(model):  # as around a loss of the user's own, which may call ours
        found = per_example_loss(model, dict(batch))
    of_head = list(model.classification_head.parameters())
    for place, row in enumerate(some):
        own = model(**{key: torch.tensor([value]) for key, value in row.items()}).loss
        torch.testing.assert_close(found[place], own, rtol=1e-6, atol=0)
        ours = torch.autograd.grad(found[place], of_head, retain_graph=True)
        for one, other in zip(ours, torch.autograd.grad(own, of_head), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    with pytest.raises(ValueError, match="same number of <eos>"):  # hooks are gone
        model(**batch)


def trainer_of_ended(folder, name="Bart", data=None, **given):
    options = {"max_steps": 2, "per_device_train_batch_size": 8, "expected_batch_size": 8}
    rows = {"train_dataset": data or ended(), "eval_dataset": ended(6, first=17)}
    rows = {each: datasets.Dataset.from_list(made) for each, made in rows.items()}
    given = {"model": encoder_decoder(name), **rows, **given}
    return tiny.trainer(folder, given=given, **options, eval_strategy="steps", eval_steps=1)


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_a_run_of_an_encoder_decoder_trains_and_evaluates(name, tmp_path):
    layers = {"target_modules": ["k_proj", "k"], "modules_to_save": ["classification_head"]}
    adapter = peft.LoraConfig(r=2, **layers) if name == "T5" else None
    trainer = tiny.trained(trainer_of_ended(tmp_path, name, peft_config=adapter))
    assert trainer.ledger.steps() == 2 and trainer.evaluate()["eval_loss"] > 0


def test_a_row_without_an_end_token_is_found_before_the_first_draw(tmp_path):
    data = ended()
    data[7]["input_ids"] = [9 if token == END else token for token in data[7]["input_ids"]]
    with pytest.raises(DataError, match=r"Row 7 .* no end token \(3\), where BartFor.*truncate"):
        trainer_of_ended(tmp_path, data=data).train()


def test_planted_rows_that_must_be_alike_are_found_by_the_self_check(tmp_path, monkeypatch):
    monkeypatch.setattr(losses, "_READ_AT_THE_END", frozenset())
    trainer = trainer_of_ended(tmp_path, data=ended(ends=(1,)))
    message = r"examples of .*input_ids': \(3, 12\).*same number of <eos>.*in common"
    with pytest.raises(SelfCheckError, match=message):
        trainer.train()
    assert trainer.ledger.steps() == 0


# -- a recipe, on a decoder as it comes --


@pytest.fixture
def decoder(tmp_path) -> str:
    """A folder of a language model whose end token pads; its configuration names no padding."""
    tokenizer = chat.tokenizer()
    tokenizer.pad_token = None
    torch.manual_seed(0)
    words = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = hf.LlamaConfig(**ROPE, **words)
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_recipe_trains_a_head_and_others_load_it(method, decoder, tmp_path, capsys):
    values: dict[str, Any] = {
        "task": "text_classification", "model_name_or_path": decoder, "max_length": 24,
        "class_names": ["negative", "positive"], "target_epsilon": 8, "accountant": "rdp",
        "expected_batch_size": 8, "max_steps": 2, "learning_rate": "1e-2",
        "metrics": ["accuracy"],
    }  # fmt: skip
    if method == "lora":
        values["peft"] = {"peft_type": "lora", "r": 2, "target_modules": ["q_proj", "v_proj"]}
    task = Recipe(tmp_path, capsys, **values)
    task.change(train_file=task.lines("train.jsonl", tiny.rows(40)))
    task.change(validation_file=task.lines("dev.jsonl", tiny.held_out_rows()))
    task.run()
    found = task.saved("eval_results.json")["eval_accuracy"]
    evaluated = json.loads(task.run("eval", "--json").splitlines()[-1])
    assert evaluated == {"eval_accuracy": pytest.approx(found)}
    card = (task.out / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", card, flags=re.S)
    lines = lines.replace("path/to/this/folder", str(task.out)).replace("BASE_MODEL", decoder)
    space: dict[str, Any] = {}
    exec(lines, space)
    rows = tiny.held_out_rows()
    answers = space["model"]([row["sentence"] for row in rows], batch_size=4)
    names = values["class_names"]
    right = [a["label"] == names[row["label"]] for a, row in zip(answers, rows)]
    assert sum(right) / len(rows) == pytest.approx(found)
