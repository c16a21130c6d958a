"""Images in a text: a model puts what it makes of a row's image at the row's own tokens for it."""

from typing import Any

import pytest
import tiny
import torch
import transformers as hf
from models import assert_equal, clipped, loop, without_downcasts
from torch.nn import functional as F

from hf_dp.clipping.engine import STRATEGIES
from hf_dp.errors import DataError, UnsupportedModelError
from hf_dp.losses import per_example_loss

IMAGE, PAD, IGNORED = 59, 0, -100
TEXT = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip


SIGLIP, GEMMA = hf.SiglipVisionConfig, {**TEXT, "head_dim": 8}
GEMMA3 = {"mm_tokens_per_image": 4, "boi_token_index": 57, "eoi_token_index": 58}
SMOL = {"scale_factor": 2, "pad_token_id": PAD}
# The name in transformers, how images and text are read, options, and tokens for an image.
MODELS: dict[str, Any] = {
    "llava": ("Llava", hf.CLIPVisionConfig, hf.LlamaConfig(**TEXT), {}, 4),
    "paligemma": ("PaliGemma", SIGLIP, hf.GemmaConfig(**GEMMA), {"projection_dim": 16}, 4),
    "gemma3": ("Gemma3", SIGLIP, hf.Gemma3TextConfig(**GEMMA), GEMMA3, 4),
    "smolvlm": ("SmolVLM", hf.SmolVLMVisionConfig, hf.LlamaConfig(**TEXT), SMOL, 1),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    kind, vision, text, options, _ = MODELS[name]
    parts = {"vision_config": vision(**VISION), "text_config": text, "image_token_id": IMAGE}
    config = getattr(hf, f"{kind}Config")(**parts, **options)
    model = getattr(hf, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def row(name: str, number: int, more: int = 0) -> dict[str, Any]:
    images = [IMAGE] * (MODELS[name][-1] + more)
    ids = [2, 5 + number, *images, *(5 + (number + 3 * t) % 50 for t in range(2 + number % 4)), 3]
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randn((1, 3, 8, 8) if name == "smolvlm" else (3, 8, 8), generator=generator)
    found = {"input_ids": ids, "attention_mask": [1] * len(ids), "pixel_values": pixels.tolist()}
    if "gemma" in name:
        found["token_type_ids"] = [int(token == IMAGE) for token in ids]
    return found | {"labels": [IGNORED if token == IMAGE else token for token in ids]}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(each["input_ids"]) for each in rows)
    fill = {"input_ids": PAD, "attention_mask": 0, "token_type_ids": 0, "labels": IGNORED}

    def column(key: str) -> torch.Tensor:
        values = [torch.tensor(each[key]) for each in rows]
        if key not in fill:
            return torch.stack(values)
        return torch.stack([F.pad(v, (0, longest - len(v)), value=fill[key]) for v in values])

    return {key: column(key) for key in rows[0]}


def wide(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    return batch | {"pixel_values": batch["pixel_values"].double()}


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loop(name):
    model = made(name).double()
    rows = [row(name, number) for number in (3, 0, 2)]
    with without_downcasts():
        expected = loop(model, [wide([each]) for each in rows], lambda m, each: m(**each).loss)
        for strategy in STRATEGIES:
            found = clipped(model, wide(rows), expected.clipping_norm, strategy, per_example_loss)
            assert_equal(*found, expected)


def trainer(folder: Any, name: str, rows: list[dict[str, Any]], **options: Any) -> Any:
    given = {"train_dataset": rows, "eval_dataset": None, "data_collator": collate}
    given |= {"model": made(name)}
    return tiny.trainer(folder, given=given, max_steps=1, remove_unused_columns=False, **options)


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_physical_batch": 9}])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_with_images_at_their_places_in_made_up_rows(name, options, tmp_path):
    rows = [row(name, number) for number in range(40)]
    private = trainer(tmp_path, name, rows, **options)
    private.train()
    places = (torch.tensor(rows[3]["input_ids"]) == IMAGE).nonzero().flatten()
    for example in private.synthetic_batches():
        assert (example["input_ids"][0] == IMAGE).nonzero().flatten().equal(places)
        assert bool((example["labels"][0, places] == IGNORED).all())


def test_a_row_that_would_take_from_its_neighbors_image_is_refused(tmp_path):
    """Planted: one token too many in a row, and one too few in another."""
    rows = [row("llava", 0), row("llava", 1, more=1), row("llava", 2, more=-1), row("llava", 3)]
    model, batch = made("llava").double().eval(), wide(rows)
    batch.pop("labels")
    before = model(**batch).logits[1]
    batch["pixel_values"][2] += 1
    assert not torch.allclose(model(**batch).logits[1], before)
    with pytest.raises(DataError, match="Row 1 .*token 59.* 5 times, but row 0 has it 4 times"):
        trainer(tmp_path, "llava", rows * 10).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"input_ids": [2, 5, 6, 3], "attention_mask": [1] * 4, "labels": [2, 5, 6, 3]},
            "no token",
        ),
        ({"image_sizes": [8, 8]}, r"\['image_sizes'\], by which Llava.* more or less"),
    ],
)
def test_images_whose_tokens_are_not_known_to_be_theirs_are_refused(changes, message, tmp_path):
    rows = [row("llava", 0) | changes for _ in range(40)]
    with pytest.raises(UnsupportedModelError, match=message):
        trainer(tmp_path, "llava", rows).train()


def test_an_image_that_some_models_take_for_padding_is_refused(tmp_path):
    rows = [row("smolvlm", number) for number in range(40)]
    for each in rows:
        each["pixel_values"] *= 2
    rows[7]["pixel_values"][1] = torch.zeros(3, 8, 8).tolist()
    with pytest.raises(DataError, match="Row 7 .*`pixel_values` of an image are all 0"):
        trainer(tmp_path, "smolvlm", rows).train()
