"""Let a model write: beams, nucleus sampling or greedily, in batches of prompts of like length.

Nothing here reads or moves the private random sources: sampling uses torch's global generator,
seeded for the call and restored after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from hf_dp.errors import DataError
from hf_dp.losses import base_model, padding_moves_prompts, positions_of
from hf_dp.tasks.generation.arguments import BEAM, NUCLEUS, DecodingArguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    settings: DecodingArguments,
    *,
    progress: bool = True,
) -> list[str]:
    """Return one text for each prompt, in their order, without the prompt.

    Prompts are sorted by length and padded on the left for a decoder, so that what is written
    stands after the prompt. The same prompts, settings and machine give the same texts.

    Args:
        prompts: token ids, of at least one token each.

    Raises: DataError for a prompt that is empty, or longer than the model's positions leave room
        for.
    """
    from tqdm.auto import tqdm

    check_prompts(model, prompts, settings)
    batches = _batches(model, prompts, settings.decoding_batch_size)
    options = _options(model, tokenizer, settings)
    generate: Any = model.generate
    encodes = _is_encoder_decoder(model)
    side = "right" if encodes else "left"
    texts = [""] * len(prompts)
    training, device = model.training, next(model.parameters()).device
    devices = [device] if device.type != "cpu" else []
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(settings.decoding_seed)
            for batch in tqdm(batches, desc="Decoding", disable=not progress):
                given = {"input_ids": [list(prompts[i]) for i in batch]}
                inputs = tokenizer.pad(given, padding_side=side, return_tensors="pt").to(device)
                written = generate(**inputs, **options)
                if not encodes:
                    written = written[:, inputs["input_ids"].shape[1] :]
                found = tokenizer.batch_decode(written, skip_special_tokens=True)
                for i, text in zip(batch, found):
                    for stop in settings.stop:
                        text = text.split(stop, 1)[0]
                    texts[i] = text.strip()
    finally:
        model.train(training)
    return texts


def _batches(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], size: int
) -> list[list[int]]:
    """Return the places of prompts of like length; of equal length where padding would matter."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    alike = padding_moves_prompts(model)
    groups = [list(group) for _, group in groupby(order, lambda i: len(prompts[i]) * alike)]
    return [group[at : at + size] for group in groups for at in range(0, len(group), size)]


def _options(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: DecodingArguments
) -> dict[str, Any]:
    """Return the keywords of ``generate``; all that it samples by is given, so that a model's own
    generation_config decides nothing but its end tokens."""
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "num_beams": settings.num_beams if settings.decoding == BEAM else 1,
        "do_sample": settings.decoding == NUCLEUS,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if settings.decoding == NUCLEUS:
        options |= {"top_p": settings.top_p, "top_k": 0, "temperature": settings.temperature}
    if settings.stop:
        options |= {"stop_strings": list(settings.stop), "tokenizer": tokenizer}
    if getattr(base_model(model).generation_config, "eos_token_id", None) is None:
        options["eos_token_id"] = tokenizer.eos_token_id
    return options


def check_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: DecodingArguments,
    virtual: int = 0,
) -> None:
    """Raise DataError for a prompt that is empty, or leaves no room to write; as decode does.

    Args: virtual: how many positions an adapter will take that the model has not yet.
    """
    lengths = [len(prompt) for prompt in prompts]
    if lengths and not min(lengths):
        raise DataError(
            f"Prompt {lengths.index(0)} has no token, and a model writes after one. Begin with the "
            "tokenizer's beginning or end token."
        )
    limit = None if _is_encoder_decoder(model) else positions_of(model)
    if limit and lengths and max(lengths) + settings.max_new_tokens > limit - virtual:
        raise DataError(
            f"Prompt {lengths.index(max(lengths))} has {max(lengths)} tokens, and with "
            f"`max_new_tokens` {settings.max_new_tokens} it passes the {limit - virtual} positions "
            "of the model. Shorten it, or lower `max_new_tokens`."
        )


def _is_encoder_decoder(model: PreTrainedModel) -> bool:
    return bool(getattr(base_model(model).config, "is_encoder_decoder", False))
