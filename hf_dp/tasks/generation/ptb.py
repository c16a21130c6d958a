"""The words that the E2E challenge's script counts for METEOR, ROUGE-L and CIDEr."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from hf_dp.errors import MetricUnavailableError
from hf_dp.tasks.generation.java import run


def ptb_rows(
    predictions: list[str], references: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return predictions and references in lower case, tokenized and without punctuation.

    Tokens are separated by one space. The program is Stanford's PTBTokenizer, the punctuation that
    of pycocoevalcap, as the script has it. A text of punctuation alone becomes empty.

    Raises: MetricUnavailableError where Java is missing or fails.
    """
    tokenized = iter(_tokenized((*predictions, *(text for row in references for text in row))))
    return [next(tokenized) for _ in predictions], [
        [next(tokenized) for _ in row] for row in references
    ]


@lru_cache(maxsize=1)  # three metrics ask for the same texts, one after the other
def _tokenized(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return each text tokenized, by one run of the program."""
    from pycocoevalcap.tokenizer import ptbtokenizer

    # The program knows more ends of a line than \n. All of them are white space in Python, too.
    lines = [" ".join(text.split()) for text in texts]
    some = [line for line in lines if line]
    jar = Path(ptbtokenizer.__file__).with_name(ptbtokenizer.STANFORD_CORENLP_3_4_1_JAR)
    command = ["-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer"]
    printed = run([*command, "-preserveLines", "-lowerCase"], some) if some else []
    if len(printed) != len(some):
        raise MetricUnavailableError(
            f"{jar.name} printed {len(printed)} lines for {len(some)} texts"
        )
    words = iter(printed)
    return tuple(
        " ".join(word for word in next(words).split() if word not in ptbtokenizer.PUNCTUATIONS)
        if line
        else ""
        for line in lines
    )
