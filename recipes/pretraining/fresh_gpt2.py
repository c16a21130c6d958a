"""Make a folder with the tokenizer and the shape of a small GPT-2, from public text.

    python recipes/pretraining/fresh_gpt2.py --text_files public.parquet --text_columns text \
        --output_dir outputs/fresh_gpt2

Then train it from random weights, with ``from_scratch: true``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, PreTrainedTokenizerFast

from hf_dp.tasks.sources import read_texts

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
    """
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
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=positions, **special
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a small GPT-2 without weights.")
    parser.add_argument("--text_files", nargs="+", required=True, help="files of public text")
    parser.add_argument("--text_columns", nargs="+", required=True, help="columns of text")
    parser.add_argument("--output_dir", required=True, help="folder to write")
    for name, default in (("vocabulary", 4096), ("layers", 4), ("width", 192), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    texts = read_texts(given.pop("text_files"), given.pop("text_columns"))
    folder = given.pop("output_dir")
    for made in fresh_gpt2(texts, **given):
        made.save_pretrained(folder)
    print(folder)
