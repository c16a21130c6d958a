"""Where the end token is what pads, too, the end of a text is learned in every collator and format,
and padding is not.

Texts and labels are written out by hand, and losses are those of single examples without padding,
in double precision. The usual fault, to tell padding by its id, is planted in each, and seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chat
import families
import models
import preferences
import pytest
import tiny
import torch
import transformers as hf
from datasets import Dataset
from torch import Tensor
from torch.nn import functional as F

from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import Layout, own
from hf_dp.losses import IGNORED_LABEL, number_of_targets, per_example_loss
from hf_dp.run.checks import check_collator
from hf_dp.tasks.generation.arguments import DecodingArguments, TextArguments
from hf_dp.tasks.generation.encoding import encode, encoding_of
from hf_dp.tasks.generation.evaluation import decode, negative_log_likelihood
from hf_dp.tasks.infilling import load_infilling
from hf_dp.tasks.templates import GLUE
from hf_dp.trainer.seq2seq import split_rows
from hf_dp.trainer.sft import DPSFTConfig, DPSFTTrainer

SIDES = ["right", "left"]
END = "<|im_end|>"


def words(side: str = "right") -> hf.PreTrainedTokenizerFast:
    made = chat.tokenizer()
    made.pad_token, made.padding_side = END, side
    return made


def ids(*texts: str) -> list[int]:
    """The tokens of texts that are tokenized one by one."""
    return [token for text in texts for token in words()(text, add_special_tokens=False).input_ids]


@pytest.fixture(scope="module")
def decoders() -> dict[str, Any]:
    """Decoders whose padding token is the end token: one of absolute positions, one of others."""
    made = {
        "gpt2": models.gpt2(n_positions=128, **of_words()),
        "llama": models.llama(max_position_embeddings=128, **of_words()),
    }
    return {name: model.eval() for name, model in made.items()}


def of_words() -> dict[str, int]:
    """The options of a model of these words, whose padding is the end token."""
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    return {"vocab_size": len(words()), **dict.fromkeys(names, words().eos_token_id)}


# -- what is learned of each row, by hand --


@dataclass(frozen=True)
class Alone:
    """One example as it is read alone: all its tokens, and how many of the last are learned."""

    tokens: list[int]
    learned: int

    def log_probs(self, model: Any) -> Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([self.tokens])).logits[0, :-1]
        targets = torch.tensor(self.tokens[1:])[:, None]
        return logits.log_softmax(-1).gather(1, targets)[-self.learned :, 0]

    def targets(self) -> list[int]:
        return self.tokens[-self.learned :]


def written(before: Sequence[int], text: str) -> Alone:
    return Alone([*before, *ids(text, END)], len(ids(text, END)))


def free(text: str) -> Alone:
    return written(ids(END), text)


def asked(prompt: str, text: str) -> Alone:
    return written(ids(prompt, "\n"), text)


TURNS = [
    {"role": "system", "content": "short"},
    {"role": "user", "content": "great film?"},
    {"role": "assistant", "content": "good plot"},
]
ASKED = (
    "<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\ngreat film?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TABLE = {"meaning_representation": "name[Aromi], eatType[pub]", "human_reference": "Aromi is a pub"}
TRIPLES = {"tripleset": [["A", "IS_PART_OF", "B"]], "annotations": {"text": ["A is in B"]}}
TALK = {"personality": ["i like film ."], "history": ["hello"], "candidates": ["no", "good film"]}
FORMATS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[Alone]]] = {
    "pairs": (
        {"prompt_column": "q", "target_column": "r"},
        [{"q": "food", "r": ["Thai", " a long film plot"]}, {"q": f"a{END}", "r": [f"b{END}c"]}],
        [
            asked("food", "Thai"), asked("food", " a long film plot"),
            # An end token of the text's own is a token like any other.
            Alone(ids("a", END, "\n", "b", END, "c", END), len(ids("b", END, "c", END))),
        ],
    ),
    "text": (
        {"text_column": "t"},
        [{"t": "good"}, {"t": "a long bad film"}],
        [free("good"), free("a long bad film")],
    ),
    "table": (
        {"columns": ["age", "film"]},
        [{"age": 31, "film": "dull plot"}, {"age": 7, "film": "good"}],
        [free("age: 31\nfilm: dull plot"), free("age: 7\nfilm: good")],
    ),
    "e2e": (
        {},
        [TABLE, {**TABLE, "human_reference": "dull"}],
        [asked(" name : Aromi | Type : pub", text) for text in (" Aromi is a pub", " dull")],
    ),
    "dart": (
        {},
        [TRIPLES, {**TRIPLES, "annotations": {"text": ["B"]}}],
        [asked(" A : is part of : B", text) for text in (" A is in B", " B")],
    ),
    "persona_chat": (
        {},
        [TALK, {**TALK, "history": ["a", "b", "great"]}],
        [
            asked("persona : i like film .\npartner : hello\nself :", " good film"),
            asked("persona : i like film .\npartner : a\nself : b\npartner : great\nself :", " good film"),
        ],
    ),
    "messages": (
        {},
        [{"messages": TURNS}, {"messages": [*TURNS[:2], {**TURNS[2], "content": "dull"}]}],
        [
            # TRL's template counts the line breaks around an answer as the assistant's, too.
            Alone(ids(ASKED, "good plot", END, "\n"), len(ids("\n", "good plot", END, "\n"))),
            Alone(ids(ASKED, "dull", END, "\n"), len(ids("\n", "dull", END, "\n"))),
        ],
    ),
}  # fmt: skip


def together(
    model: Any, tokenizer: Any, collate: Any, rows: Iterable[Any], **options: Any
) -> dict[str, Tensor]:
    """The batch of a private step: rows are collated alone, and then padded."""
    layout, examples = Layout(), [own(collate([dict(row)])) for row in rows]
    for example in examples:
        layout.add(example)
    padding = Padding.of(model, tokenizer, **options)
    padding.check(layout)
    return dict(padding.together(examples, layout))


def by_id(batch: dict[str, Tensor], end: int, *names: str) -> dict[str, Tensor]:
    """The planted fault: a collator that takes every token with the id of padding for padding."""
    fills = {"labels": IGNORED_LABEL, "attention_mask": 0}
    hidden = {
        name: batch[name].masked_fill(batch["input_ids"] == end, fills[name]) for name in names
    }
    return {**batch, **hidden}


def are_those(found: Tensor, expected: Tensor, planted: Tensor, least: float = 1e-4) -> None:
    """Losses are the expected ones, and those of the planted fault are not."""
    torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=0)
    assert ((planted - expected).abs() > least).all()


def means(model: Any, expected: Sequence[Alone]) -> Tensor:
    return torch.stack([-each.log_probs(model).mean() for each in expected])


def check(
    model: Any,
    tokenizer: Any,
    collate: Callable[[list[Any]], Any],
    rows: Sequence[Any],
    expected: Sequence[Alone],
) -> None:
    """Labels and losses are those that were written by hand, in each way to make a batch."""
    assert len(rows) == len(expected)
    losses = means(model, expected)
    batches = [together(model, tokenizer, collate, rows)]
    batches.append(dict(collate([dict(row) for row in rows])))  # as in evaluation
    for batch in batches:
        labels = [row[row != IGNORED_LABEL].tolist() for row in batch["labels"]]
        assert labels == [each.targets() for each in expected]
        assert number_of_targets(model, batch).tolist() == [each.learned for each in expected]
        planted = per_example_loss(model, by_id(batch, tokenizer.eos_token_id, "labels"))
        are_those(per_example_loss(model, batch), losses, planted)
    check_likelihood(model, collate, rows, expected)


def check_likelihood(
    model: Any, collate: Any, rows: Sequence[Any], expected: Sequence[Alone]
) -> None:
    """An evaluation adds up the losses of all tokens that are learned, and counts them."""
    total, count = negative_log_likelihood(model, collate, [dict(row) for row in rows], 2)
    by_hand = -sum(float(each.log_probs(model).sum()) for each in expected)
    assert total == pytest.approx(by_hand, rel=1e-9)
    assert count == sum(each.learned for each in expected)


# -- language models --


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("layout", FORMATS)
def test_formats_of_decoders(layout, name, side, decoders):
    options, rows, expected = FORMATS[layout]
    tokenizer = words(side)
    data = TextArguments(data_format=layout, metrics=[], max_length=120, **options)
    encoded = encode(Dataset.from_list(rows), data, encoding_of("causal_lm", tokenizer, data))
    collate = hf.DataCollatorForSeq2Seq(tokenizer)
    check(decoders[name], tokenizer, collate, list(encoded), expected)


@pytest.mark.parametrize("side", SIDES)
def test_rows_that_were_packed_beforehand(side, decoders):
    """The end of each text inside is learned, too. Nothing stands before the first token."""
    packed = [ids("good film", END, "dull", END), ids("a", END, "b", END, "long plot", END)]
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in packed]
    expected = [Alone(row, len(row) - 1) for row in packed]
    tokenizer, model = words(side), decoders["gpt2"]
    collate = hf.DataCollatorForSeq2Seq(tokenizer)
    batch = together(model, tokenizer, collate, rows)
    planted = per_example_loss(model, by_id(batch, tokenizer.eos_token_id, "labels"))
    are_those(per_example_loss(model, batch), means(model, expected), planted)
    check_likelihood(model, collate, rows, expected)


SFT = {
    "completions": (
        {},
        [{"prompt": "food?", "completion": " Thai"}, {"prompt": "a", "completion": " long film"}],
        [written(ids("food?"), " Thai"), written(ids("a"), " long film")],
    ),
    "texts": (
        {},
        [{"text": "good"}, {"text": "a long bad film"}],
        [
            Alone(ids("good", END), len(ids("good", END)) - 1),
            Alone(ids("a long bad film", END), len(ids("a long bad film", END)) - 1),
        ],
    ),
    "talks": ({"assistant_only_loss": True}, FORMATS["messages"][1], FORMATS["messages"][2]),
}  # fmt: skip


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("form", SFT)
def test_what_trl_prepares(form, side, decoders, tmp_path):
    options, rows, expected = SFT[form]
    tokenizer = words(side)
    args = DPSFTConfig(
        str(tmp_path), noise_multiplier=1.0, expected_batch_size=1, max_steps=1, use_cpu=True,
        disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = DPSFTTrainer(
        decoders["llama"], args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    batch = together(decoders["llama"], tokenizer, trainer.data_collator, trainer.train_dataset)
    found = trainer.compute_per_example_loss(trainer.model.eval(), batch)
    planted = per_example_loss(trainer.model, by_id(batch, tokenizer.eos_token_id, "labels"))
    are_those(found, means(trainer.model, expected), planted)


@pytest.mark.parametrize("side", SIDES)
def test_pairs_of_answers(side, decoders, tmp_path):
    rows = [
        {"prompt": "food?", "chosen": " Thai", "rejected": " a long film"},
        {"prompt": "a b", "chosen": " good great film plot", "rejected": " dull"},
    ]
    tokenizer, model = words(side), decoders["llama"]
    given = {"model": model, "ref_model": model, "processing_class": tokenizer}
    given["train_dataset"] = Dataset.from_list(rows)
    trainer = preferences.trainer(tmp_path, given=given, expected_batch_size=1)
    data = trainer.train_dataset
    for name in ("ref_chosen_logps", "ref_rejected_logps"):  # made in single precision
        data = data.remove_columns(name).add_column(name, [0.0] * len(rows))
    options = {"values": trainer.args.padding_values, "own_loss": True}
    batch = together(model, tokenizer, trainer.data_collator, data, **options)

    def answer(row: dict[str, str], which: str) -> Tensor:
        return written(ids(row["prompt"]), row[which]).log_probs(model).sum()

    margins = torch.stack([answer(row, "chosen") - answer(row, "rejected") for row in rows])
    expected = -F.logsigmoid(preferences.BETA * margins)
    as_planted = by_id(batch, tokenizer.eos_token_id, "labels")
    found, planted = (
        trainer.compute_per_example_loss(trainer.model.eval(), each) for each in (batch, as_planted)
    )
    are_those(found, expected, planted)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders(family):
    tokenizer = words()
    end = tokenizer.eos_token_id
    start = {"decoder_start_token_id": end, "forced_eos_token_id": None}
    model = models.ARCHITECTURES[family].build(**of_words(), **start).eval()
    data = TextArguments(metrics=[], prompt_column="q", target_column="r")
    rows = Dataset.from_list(
        [{"q": "food", "r": "Thai"}, {"q": f"a{END} film", "r": "a dull plot"}]
    )
    encoded = list(encode(rows, data, encoding_of("seq2seq", tokenizer, data)))
    collate = hf.DataCollatorForSeq2Seq(tokenizer)
    targets = [ids("Thai", END), ids("a dull plot", END)]
    sources = [ids("food"), ids("a", END, " film")]
    losses, total = [], 0.0
    for source, target in zip(sources, targets):
        decoder = torch.tensor([[end, *target[:-1]]])
        with torch.no_grad():
            logits = model(torch.tensor([source]), decoder_input_ids=decoder).logits[0]
        losses.append(F.cross_entropy(logits, torch.tensor(target)))
        total += float(losses[-1]) * len(target)
    batch = together(model, tokenizer, collate, encoded)
    assert [row[row != IGNORED_LABEL].tolist() for row in batch["labels"]] == targets
    hidden = batch["labels"].masked_fill(batch["labels"] == end, IGNORED_LABEL)
    planted = per_example_loss(model, {**batch, "labels": hidden})
    are_those(per_example_loss(model, batch), torch.stack(losses), planted)
    assert negative_log_likelihood(model, collate, encoded, 2) == (
        pytest.approx(total, rel=1e-9), sum(map(len, targets))
    )  # fmt: skip


# -- writing --


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_is_written_does_not_depend_on_padding(name, decoders, monkeypatch):
    tokenizer, model = words(), decoders[name]
    prompts = [ids("a", END), ids("a long film plot", END), ids(END, "good", END, "b"), ids("dull")]
    settings = DecodingArguments(decoding="greedy", max_new_tokens=6)
    texts = decode(model, tokenizer, prompts, settings, progress=False)
    alone = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        found = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=6)
        alone.append(tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True).strip())
    assert texts == alone
    pad = type(tokenizer).pad

    def planted(self: Any, *given: Any, **options: Any) -> Any:
        made = pad(self, *given, **options)
        made["attention_mask"] = (made["input_ids"] != self.pad_token_id).long()
        return made

    monkeypatch.setattr(type(tokenizer), "pad", planted)
    assert decode(model, tokenizer, prompts, settings, progress=False) != texts


@pytest.mark.parametrize("side", SIDES)
def test_prompts_and_targets_are_cut_by_the_mask(side):
    tokenizer = words(side)
    prompts = [ids("a", END), ids("long film")]
    targets = [ids("b", END), ids("good", END, "c", END)]
    rows = [
        {"input_ids": [*p, *t], "attention_mask": [1] * len(p + t), "labels": [-100] * len(p) + t}
        for p, t in zip(prompts, targets)
    ]
    before, after = split_rows(hf.DataCollatorForSeq2Seq(tokenizer)(rows), tokenizer.pad_token_id)
    assert after is not None
    found = [row[mask != 0] for row, mask in zip(before["input_ids"], before["attention_mask"])]
    assert [row.tolist() for row in found] == prompts
    assert [row[row != IGNORED_LABEL].tolist() for row in after] == targets


# -- encoders --


def ends_with_padding() -> Any:
    made = tiny.tokenizer()
    made.pad_token = "[SEP]"
    return made


def of_bert(model: Any, tokenizer: Any, collate: Any, rows: list[Any]) -> None:
    """The loss of each row of a batch is that of the row alone, which ends with the token that
    pads; hidden from attention by its id, it is not."""
    batch = together(model, tokenizer, collate, rows)
    losses = []
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        cut = {name: value[place : place + 1] for name, value in batch.items()}
        cut = {n: v[:, :length] if v.dim() > 1 else v for n, v in cut.items()}
        assert cut["attention_mask"].all() and batch["attention_mask"][place].sum() == length
        with torch.no_grad():
            losses.append(model(**cut).loss)
    planted = per_example_loss(model, by_id(batch, tokenizer.pad_token_id, "attention_mask"))
    are_those(per_example_loss(model, batch), torch.stack(losses), planted, least=1e-6)


def test_a_head_on_an_encoder():
    tokenizer = ends_with_padding()
    model = tiny.model(initializer_range=0.4).double().eval()
    rows = [{**tokenizer(row["sentence"]), "labels": row["label"]} for row in tiny.rows(4)]
    of_bert(model, tokenizer, hf.DataCollatorWithPadding(tokenizer), rows)


def test_a_masked_language_model():
    tokenizer = ends_with_padding()
    tokenizer.mask_token = "long"  # any word
    torch.manual_seed(1)
    model = hf.BertForMaskedLM(tiny.model(initializer_range=0.4).config).double().eval()
    rows = [tokenizer(row["sentence"], return_special_tokens_mask=True) for row in tiny.rows(8)]
    rows = [dict(row) for row in rows if len(row["input_ids"]) > 5]
    collate = hf.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.9, seed=0)
    labels = collate([dict(row) for row in rows])["labels"]
    assert not bool((labels == tokenizer.pad_token_id).any())
    of_bert(model, tokenizer, collate, rows)


def test_infilling(tmp_path: Path):
    tokenizer = copy.deepcopy(families.bert())
    tokenizer.pad_token = "[SEP]"
    base = families.saved_masked_lm(tmp_path, tokenizer, initializer_range=0.4)
    model, fast = load_infilling(str(base), tokenizer, GLUE["sst2"], ["negative", "positive"])
    rows = [{**fast(text), "labels": i % 2} for i, text in enumerate(("good film", "a bad plot ."))]
    of_bert(model.double().eval(), fast, hf.DataCollatorWithPadding(fast), rows)


def test_transformers_collator_that_tells_padding_by_its_id_is_warned_of(warnings_of):
    said = warnings_of("run.checks")
    check_collator(hf.DataCollatorForLanguageModeling(words(), mlm=False))
    assert "would not learn where a text ends" in said.pop()
    check_collator(hf.DataCollatorForLanguageModeling(chat.tokenizer(), mlm=False))
    check_collator(hf.DataCollatorForSeq2Seq(words()))
    assert not said
