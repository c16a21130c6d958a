"""Tokenizers of five families, trained here on a few sentences: no download."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import transformers as hf
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SENTENCES = [
    "It was great .", "It was terrible .", "It was good , not bad .", "Yes , No , Maybe ? It was a "
    "film .",
    "the film was a very long and dull one", "is this the same question ?", "wonderful great "
    "terrible awful",
]  # fmt: skip
_SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


def _word_pieces() -> dict[str, int]:
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz[]<>"),
    )
    pieces.train_from_iterator(SENTENCES * 20, trainer)
    return pieces.get_vocab()


def _bytes(special: list[str | AddedToken]) -> Tokenizer:
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    pieces.train_from_iterator([f" {sentence}" for sentence in SENTENCES] * 20, trainer)
    return pieces


_CHAT = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@cache
def decoder() -> Any:
    """A tokenizer as SmolLM2's: bytes, digits apart, a chat template, and padding that is the end
    token."""
    pieces = _bytes(["<|end|>", "<|start|>"])
    splits = [pre_tokenizers.Digits(individual_digits=True), pieces.pre_tokenizer]
    pieces.pre_tokenizer = pre_tokenizers.Sequence(splits)
    names = {"eos_token": "<|end|>", "pad_token": "<|end|>", "bos_token": "<|start|>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=pieces, chat_template=_CHAT, **names)


@cache
def bert() -> Any:
    return hf.BertTokenizer(vocab=_word_pieces())


@cache
def electra() -> Any:
    return hf.ElectraTokenizer(vocab=_word_pieces())


@cache
def roberta() -> Any:
    model = json.loads(_bytes(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]).to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    mask = AddedToken("<mask>", lstrip=True, special=True)  # as in roberta-base's own files
    return hf.RobertaTokenizer(vocab=model["vocab"], merges=merges, mask_token=mask)


@cache
def modernbert() -> Any:
    mask = AddedToken("[MASK]", lstrip=True, special=True)  # as in ModernBERT's own files
    pieces = _bytes([*list(_SPECIAL.values())[:-1], mask])
    ids = {name: pieces.token_to_id(name) for name in ("[CLS]", "[SEP]")}
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=list(ids.items())
    )
    names = ["input_ids", "attention_mask"]
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=pieces, model_input_names=names, **_SPECIAL | {"mask_token": mask}
    )


@cache
def deberta() -> Any:
    pieces = Tokenizer(models.Unigram())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=list(_SPECIAL.values()), unk_token="[UNK]"
    )
    pieces.train_from_iterator(SENTENCES * 20, trainer)
    vocabulary = [tuple(entry) for entry in json.loads(pieces.to_str())["model"]["vocab"]]
    # The words of the templates as pieces, as a vocabulary of 128,000 has them.
    known = {piece for piece, _ in vocabulary}
    words = ["▁It", "▁was", "▁great", "▁terrible", "▁Yes", "▁No", "▁Maybe", "▁?", "▁,", "▁."]
    return hf.DebertaV2Tokenizer(
        vocab=[*vocabulary, *((word, -3.0) for word in words if word not in known)]
    )


def saved_masked_lm(folder: Path, tokenizer: Any = None, **options: Any) -> Path:
    """Return the folder with a tiny BERT that fills in a mask, and its tokenizer."""
    tokenizer = tokenizer or bert()
    hf.set_seed(0)
    config = hf.BertConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=48, **options,
    )  # fmt: skip
    hf.BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": bert, "electra": electra, "roberta": roberta, "modernbert": modernbert, "deberta": deberta,
}  # fmt: skip
