"""Ways from a user's rows to the loss, for tests that leave out one row and look at what a whole
run released.

Each path has ordinary rows and one that is longer than all others (the canary), a tiny model
without dropout, and whatever stands between: collators of transformers, of one's own, tuples,
transforms, images, workers, 16 bits.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import datasets
import numpy as np
import PIL.Image
import tiny
import tiny_images
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hf_dp.tasks.images import AUGMENTATIONS, ToPixels, image_rows
from hf_dp.trainer.trainer import DPTrainer

VOCABULARY = 19
PAD, MASK, END = 0, 1, 3
COUNT = 12  # ordinary rows

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class DataPath:
    """``rows``: all of them, the canary last; ``dataset``: of those kept; ``options``: training
    arguments."""

    model: Callable[[], nn.Module]
    rows: Callable[[], Rows]
    collator: Callable[[], Any] | None = None
    dataset: Callable[[Rows], Any] = datasets.Dataset.from_list
    options: dict[str, Any] = field(default_factory=dict)
    trainer: type[DPTrainer] = DPTrainer
    refused: str | None = None


def trainer_of(folder: Any, path: DataPath, rows: Any = None, **options: Any) -> DPTrainer:
    """A trainer on the path, or on these rows of it."""
    given: dict[str, Any] = {
        "model": path.model(), "train_dataset": path.dataset(rows or path.rows()),
        "eval_dataset": None, "data_collator": path.collator and path.collator(),
        "processing_class": None if path.collator else tokenizer(),
    }  # fmt: skip
    return tiny.trainer(folder, cls=path.trainer, given=given, **{**path.options, **options})


def tokenizer(side: str = "right") -> Any:
    made = tiny.tokenizer()
    made.mask_token, made.padding_side = "[UNK]", side
    return made


# -- rows ---


def texts(label: Callable[[list[int]], Any]) -> Rows:
    """Rows of 3 to 6 tokens, and one of 18."""
    generator = np.random.default_rng(0)
    lengths = [3 + i % 4 for i in range(COUNT)] + [18]
    rows = []
    for number, length in enumerate(lengths):
        ids = [2, *generator.integers(4, VOCABULARY, length - 2).tolist(), END]
        columns = {"input_ids": ids, "attention_mask": [1] * length, "number": number}
        rows.append({**columns, "labels": label(ids)})
    return rows


def without(name: str, rows: Rows) -> Rows:
    return [{k: v for k, v in row.items() if k != name} for row in rows]


without_number = partial(without, "number")


classes = partial(texts, lambda ids: sum(ids) % 2)
tagged = partial(texts, lambda ids: [token % 3 for token in ids])
copied = partial(texts, lambda ids: list(ids))
translated = partial(texts, lambda ids: ids[: len(ids) // 2 + 1] * (2 if len(ids) > 9 else 1))
scored = partial(texts, lambda ids: sum(ids) / 50)
several = partial(texts, lambda ids: [float(sum(ids) % 2), float(len(ids) % 2), 1.0])


def decoded() -> Rows:
    """Rows with the decoder's inputs beside labels of another length than the tokens."""
    rows = translated()
    return [{**row, "decoder_input_ids": [PAD, *row["labels"][:-1]]} for row in rows]


def unlabeled() -> Rows:
    return without("labels", texts(len))


def numbered(row: Callable[[int, np.random.Generator], dict[str, Any]]) -> Callable[[], Rows]:
    """Rows by their numbers and one stream, the canary last."""

    def made() -> Rows:
        generator = np.random.default_rng(0)
        return [row(i, generator) for i in range(COUNT + 1)]

    return made


def sentence(i: int) -> str:
    return " ".join(tiny.WORDS[(7 * i + j) % 15] for j in range(1 + i % 4 if i < COUNT else 16))


def picture(i: int, random: np.random.Generator) -> Any:
    return (random.normal(size=(3, 8, 8)) * (9 if i == COUNT else 1)).tolist()


def photograph(random: np.random.Generator) -> PIL.Image.Image:
    return PIL.Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8))


sentences = numbered(lambda i, _: {"sentence": sentence(i), "label": i % 2})
pictures = numbered(lambda i, random: {"pixel_values": picture(i, random), "labels": i % 3})
photographs = numbered(lambda i, random: {"image": photograph(random), "label": i % 3})
vectors = numbered(lambda i, random: {"x": random.normal(size=4).tolist(), "labels": i % 3 * 1.0})


# -- models ---


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 24, "hidden_dropout_prob": 0.0,
    # so that what a token attends to matters
    "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 2, "eos_token_id": END,
    "initializer_range": 0.3,
}  # fmt: skip


def bert(model_class: Any = hf.BertForSequenceClassification, **options: Any) -> Any:
    return seeded(lambda: model_class(hf.BertConfig(**{**_BERT, **options})))


def gpt2(model_class: Any = hf.GPT2LMHeadModel, **options: Any) -> Any:
    return seeded(lambda: model_class(hf.GPT2Config(**{**_GPT2, **options})))


def t5() -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24}
    config = hf.T5Config(
        **sizes, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=PAD
    )
    return seeded(lambda: hf.T5ForConditionalGeneration(config))


vit = partial(tiny_images.vit, num_labels=3)


class Own(nn.Module):
    """A module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, 0]


own = partial(seeded, Own)


class OwnTrainer(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        y = inputs.pop("labels")  # the idiom of compute_loss overrides
        return F.mse_loss(model(inputs["x"]), y, reduction="none")

    def synthetic_batches(self) -> list[Any]:
        return [{"x": torch.randn(1, 4), "labels": torch.randn(1)} for _ in range(3)]


class TupleTrainer(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        return F.mse_loss(model(inputs[0]), inputs[1], reduction="none")

    def synthetic_batches(self) -> list[Any]:
        return [(torch.randn(1, 4), torch.randn(1)) for _ in range(3)]


# -- collators ---


def padded(rows: Rows) -> Any:
    """Tokens and mask alone."""
    tokens = [{k: row[k] for k in ("input_ids", "attention_mask")} for row in rows]
    return tokenizer().pad(tokens, return_tensors="pt")


def clone_inputs(rows: Rows) -> Any:
    """Labels made from padded inputs, padding included."""
    batch = padded(rows)
    batch["labels"] = batch["input_ids"].clone()
    return batch


def stacking(rows: Rows) -> Any:
    """Makes tensors of one row, as the library pads."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def mixup(rows: Rows) -> Any:
    batch = stacking(rows)
    return {
        **batch,
        "pixel_values": 0.7 * batch["pixel_values"] + 0.3 * batch["pixel_values"].roll(1, 0),
    }


def tokenizing(rows: Rows) -> Any:
    batch = tokenizer()([row["sentence"] for row in rows], padding=True, return_tensors="pt")
    return {**batch, "labels": torch.tensor([row["label"] for row in rows])}


def with_extras(rows: Rows) -> Any:
    """Texts, numbers and a constant beside what the model takes."""
    batch = hf.DataCollatorWithPadding(tokenizer())(rows)
    names = [str(row["number"]) for row in rows]
    return {**batch, "names": names, "count": len(rows), "nothing": None}


class ExtrasTrainer(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        assert inputs.pop("count") == 1 and len(inputs.pop("names")) == len(inputs["labels"])
        for name in ("nothing", "number"):
            inputs.pop(name, None)
        return super().compute_per_example_loss(model, inputs)


def additive(rows: Rows) -> Any:
    """A float mask to be added to attention scores, one row and column for each token."""
    batch = hf.DataCollatorWithPadding(tokenizer())(rows)
    size = batch["input_ids"].shape[1]
    batch["attention_mask"] = torch.zeros(len(rows), 1, size, size)
    return batch


class Remembering:
    """Adds to each example what it kept of the one before."""

    def __init__(self) -> None:
        self.last = 0

    def __call__(self, rows: Rows) -> Any:
        batch = hf.DataCollatorWithPadding(tokenizer())(rows)
        batch["input_ids"] = (batch["input_ids"] + self.last) % VOCABULARY
        self.last = int(batch["input_ids"].sum()) % VOCABULARY
        return batch


PUBLIC_GENERATOR = np.random.default_rng(0)


def masking_by_a_public_generator(rows: Rows) -> Any:
    """Masks by place in a stream that goes on from row to row."""
    return masked_where(rows, lambda shape: torch.from_numpy(PUBLIC_GENERATOR.random(shape)))


def masked_where(rows: Rows, chances: Callable[[Any], Tensor]) -> Any:
    batch = hf.DataCollatorWithPadding(tokenizer())(rows)
    masked = chances(batch["input_ids"].shape) < 0.4
    batch["input_ids"] = batch["input_ids"].masked_fill(masked, MASK)
    return batch


def remembering_in_a_closure() -> Any:
    seen: list[int] = []

    def collate(rows: Rows) -> Any:
        batch = hf.DataCollatorWithPadding(tokenizer())(rows)
        batch["input_ids"] = (batch["input_ids"] + len(seen)) % VOCABULARY
        seen.extend(batch["input_ids"].flatten().tolist())
        return batch

    return collate


def reseeding(rows: Rows) -> Any:
    """Long rows seed the global generators, as if the ones after them were random."""
    if sum(len(row["input_ids"]) for row in rows) > 15:
        torch.manual_seed(0)
    return masked_where(rows, torch.rand)


# -- data sets ---


def of_tensors(rows: Rows) -> TensorDataset:
    return TensorDataset(
        torch.tensor([row["x"] for row in rows]), torch.tensor([row["labels"] for row in rows])
    )


def padded_by_a_transform(rows: Rows) -> Any:
    """A transform that pads all rows that it is given to the longest."""
    data = datasets.Dataset.from_list(without_number(rows))
    words = tokenizer()

    def pad(batch: Any) -> Any:
        return dict(words.pad(dict(batch), return_tensors="pt"))

    return data.with_transform(pad)


def shown(rows: Rows) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())


def pixels_by_a_transform(rows: Rows) -> Any:
    def to_pixels(batch: Any) -> Any:
        arrays = [torch.from_numpy(np.array(image)) for image in batch["image"]]
        pixels = [array.permute(2, 0, 1) / 127.5 - 1 for array in arrays]
        return {"pixel_values": pixels, "labels": batch["label"]}

    return shown(rows).with_transform(to_pixels)


def augmented_pictures(rows: Rows) -> Any:
    """As the task for images reads them, with all of its augmentations."""
    processor = hf.ViTImageProcessorPil(size={"height": 8, "width": 8})
    pixels = ToPixels(processor, [*AUGMENTATIONS])
    return image_rows(shown(rows), "image", "label", ["a", "b", "c"], pixels)


def augmented_by_a_transform(rows: Rows) -> Any:
    """A transform with a generator of its own, which hands out one list for all rows."""
    generator, shared = np.random.default_rng(0), []

    def mask(batch: Any) -> Any:
        shared[:] = [MASK if generator.random() < 0.4 else token for token in batch["input_ids"][0]]
        return {**batch, "input_ids": [shared]}

    return datasets.Dataset.from_list(without_number(rows)).with_transform(mask)


class Shared(torch.utils.data.Dataset):
    """Rows that are handed out as they are."""

    def __init__(self, rows: Rows):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Step:
    """A transform of one row, as of torchvision's kind, with a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.RandomState(0)

    def __call__(self) -> Any:
        return self.random.rand(20)


class MaskedRows(Shared):
    """Rows masked by chances that follow from the readings before, ``kept`` in one place or
    another."""

    of_the_class = np.random.default_rng(0)

    def __init__(self, kept: str, rows: Rows):
        super().__init__(without_number(rows))
        self.chances, self.steps = getattr(type(self), kept), [Step()]
        self.random, self.seed, self.count = torch.Generator().manual_seed(0), 0, 0
        self.made_when_needed: Any = None

    def __getitem__(self, index: int) -> Any:
        row, chances = self.rows[index], self.chances(self)
        ids = [MASK if chance < 0.4 else token for chance, token in zip(chances, row["input_ids"])]
        return {**row, "input_ids": ids}

    def in_a_generator(self) -> Any:
        return torch.rand(20, generator=self.random)

    def in_a_generator_of_its_seed(self) -> Any:
        if self.made_when_needed is None:
            self.made_when_needed = np.random.default_rng(self.seed)
        return self.made_when_needed.random(20)

    def in_a_step(self) -> Any:
        return self.steps[0]()

    def in_a_global(self) -> Any:
        return _chances()

    def in_its_class(self) -> Any:
        return self.of_the_class.spawn(1)[0].random(20)

    def in_a_count(self) -> Any:
        self.count += 1
        return [(self.count + place) % 3 / 3 for place in range(20)]


def _chances() -> Any:
    return PUBLIC_GENERATOR.random(20)


KEPT = {
    "with a public generator": "in_a_generator",
    "that makes a generator of its seed": "in_a_generator_of_its_seed",
    "with a step that has a generator": "in_a_step",
    "with a generator in a global": "in_a_global",
    "with a generator in its class": "in_its_class",
    "that counts": "in_a_count",
}


def popping(rows: Rows) -> Any:
    labels = torch.tensor([row.pop("labels") for row in rows])
    return {**padded(rows), "labels": labels}


def _classifier(**values: Any) -> DataPath:
    pad = {"collator": lambda: hf.DataCollatorWithPadding(tokenizer())}
    return DataPath(**{"model": bert, "rows": classes, **pad, **values})


def _language_model(collator: Callable[[], Any], **values: Any) -> DataPath:
    return DataPath(**{"model": gpt2, "rows": copied, "collator": collator, **values})


def _tagger(**options: Any) -> DataPath:
    model = partial(bert, hf.BertForTokenClassification, num_labels=3)
    return DataPath(
        model, tagged, lambda: hf.DataCollatorForTokenClassification(tokenizer(), **options)
    )


def _masked(**options: Any) -> DataPath:
    collator = partial(hf.DataCollatorForLanguageModeling, mlm_probability=0.4, **options)
    return DataPath(partial(bert, hf.BertForMaskedLM), unlabeled, lambda: collator(tokenizer()))


_KEEP = {"remove_unused_columns": False}

PATHS: dict[str, DataPath] = {
    # the table of known breaks
    "token labels padded with 0": _tagger(label_pad_token_id=0),
    "masked LM, labels cloned from padding": DataPath(partial(bert, hf.BertForMaskedLM), unlabeled, lambda: clone_inputs),
    "causal LM, labels cloned from padding": _language_model(lambda: clone_inputs, rows=unlabeled),
    "seq2seq labels padded with the padding token": DataPath(
        t5, translated, lambda: hf.DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=PAD)
    ),
    "masks from a public seed": _masked(seed=42),
    "MixUp": DataPath(vit, pictures, lambda: mixup),
    "bf16 and a transform that pads": _classifier(
        dataset=padded_by_a_transform, options={"bf16": True}, collator=lambda: hf.default_data_collator
    ),
    # collators that keep state
    "a collator that remembers": _classifier(collator=Remembering),
    "a collator that remembers in a closure": _classifier(collator=remembering_in_a_closure),
    "a collator with a public generator": _classifier(collator=lambda: masking_by_a_public_generator),
    "a collator that seeds the generators": _classifier(collator=lambda: reseeding),
    "a transform with a public generator": _classifier(dataset=augmented_by_a_transform),
    **{f"a data set {name}": _classifier(dataset=partial(MaskedRows, kept)) for name, kept in KEPT.items()},
    "a part of a data set with a generator": _classifier(
        dataset=lambda rows: torch.utils.data.Subset(MaskedRows("in_a_generator", rows), range(len(rows)))
    ),
    "a collator that pops labels of shared rows": _classifier(collator=lambda: popping, dataset=Shared),
    # stock collators
    "padding": _classifier(),
    "padding to a multiple": _classifier(collator=lambda: hf.DataCollatorWithPadding(tokenizer(), pad_to_multiple_of=8)),
    "padding to the greatest length": _classifier(
        collator=lambda: hf.DataCollatorWithPadding(tokenizer(), padding="max_length", max_length=20)
    ),
    "default collator": _classifier(collator=lambda: hf.default_data_collator),
    "no collator given": _classifier(collator=None),
    "token classification": _tagger(),
    "masked LM": _masked(),
    "whole words": _masked(mask_replace_prob=1.0, random_replace_prob=0.0),
    "causal LM": _language_model(lambda: hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False), rows=unlabeled),
    "causal LM, padded on the left": _language_model(
        lambda: hf.DataCollatorForLanguageModeling(tokenizer("left"), mlm=False), rows=unlabeled
    ),
    "causal LM, labels given, padded on the left": _language_model(lambda: hf.DataCollatorForTokenClassification(tokenizer("left"))),
    "seq2seq": DataPath(t5, translated, lambda: hf.DataCollatorForSeq2Seq(tokenizer())),
    "seq2seq with the model": DataPath(t5, translated, lambda: hf.DataCollatorForSeq2Seq(tokenizer(), model=t5())),
    "flattening": _language_model(hf.DataCollatorWithFlattening, refused="DataCollatorWithFlattening joins many examples into one"),
    # tasks
    "decoder inputs given": DataPath(t5, decoded, lambda: stacking),
    "regression": _classifier(rows=scored, model=partial(bert, num_labels=1)),
    "multi-label": _classifier(rows=several, model=partial(bert, num_labels=3)),
    "decoder as a classifier": _classifier(model=partial(gpt2, hf.GPT2ForSequenceClassification, pad_token_id=PAD)),
    "images": DataPath(vit, pictures, lambda: hf.default_data_collator),
    "photographs by a transform": DataPath(vit, photographs, lambda: hf.default_data_collator, pixels_by_a_transform, options=_KEEP),
    "photographs of the task, augmented": DataPath(
        vit, photographs, lambda: hf.default_data_collator, augmented_pictures, options=_KEEP
    ),
    # forms of rows
    "texts that the collator tokenizes": DataPath(bert, sentences, lambda: tokenizing, options=_KEEP),
    "a list of dictionaries": _classifier(dataset=without_number),
    "torch tensors": _classifier(dataset=lambda rows: datasets.Dataset.from_list(without_number(rows)).with_format("torch")),
    "columns of one's own": _classifier(collator=lambda: with_extras, trainer=ExtrasTrainer, options=_KEEP),
    "a module of one's own": DataPath(own, vectors, lambda: hf.default_data_collator, trainer=OwnTrainer, options=_KEEP),
    "tuples": DataPath(own, vectors, lambda: torch.utils.data.default_collate, of_tensors, trainer=TupleTrainer),
    "an additive mask of the tokens": _classifier(
        collator=lambda: additive, refused="`attention_mask` .float32. differs in length.*padding_values"
    ),
    # how they are fetched
    "workers and masks": dataclasses.replace(_masked(), options={"dataloader_num_workers": 2}),
    "physical batches of 3": _classifier(options={"per_device_train_batch_size": 3}),
}  # fmt: skip
_BF16 = (
    "padding", "token labels padded with 0", "seq2seq", "images", "texts that the collator tokenizes",
)  # fmt: skip
PATHS |= {
    f"{name}, bf16": dataclasses.replace(PATHS[name], options={**PATHS[name].options, "bf16": True})
    for name in _BF16
}
