"""The words that the E2E challenge's script counts for BLEU and NIST."""

from __future__ import annotations


def mteval_words(text: str) -> list[str]:
    """Return the lower-case words of ``mteval-v13a``, by sacrebleu's tokenizer of that name."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()(text.lower()).split()
