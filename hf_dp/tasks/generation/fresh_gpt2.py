"""Make the tokenizer and the shape of a small GPT-2 from public text, where no base is at hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_dp._validate import integer

END = "<|endoftext|>"  # GPT-2's one special token, which begins and ends a text


def fresh_gpt2(
    texts: Iterable[str],
    *,
    vocabulary: int = 4096,
    layers: int = 4,
    width: int = 192,
    heads: int = 4,
    positions: int = 256,
) -> tuple[Any, Any]:
    """Return a configuration and a byte-level BPE tokenizer of GPT-2's kind.

    Only public text may go in: nothing protects it, and the tokenizer goes wherever the model does.

    Args:
        texts: to learn the tokens from.
        vocabulary: how many tokens at most; at least 257.
        layers, width, heads, positions: of the model.

    Raises: InvalidArgumentError for a size that does not fit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    integer("vocabulary", vocabulary, 257)
    for name, value in {"layers": layers, "heads": heads, "positions": positions}.items():
        integer(name, value, 1)
    integer("width", width, heads)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    learning = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(texts, learning)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=END,
        eos_token=END,
        unk_token=END,
        model_max_length=positions,
    )
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["GPT2LMHeadModel"],
    )
    return config, tokenizer
