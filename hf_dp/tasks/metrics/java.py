"""The Java programs that pycocoevalcap brings: the E2E challenge's words, and METEOR."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path

from hf_dp.errors import MetricUnavailableError

# Before Java 18 the locale decides how text is read, and many a server has none.
_OPTIONS = ("-Dfile.encoding=UTF-8", "-Xmx2G")


def run(arguments: list[str], text: str = "") -> list[str]:
    """Return the lines that a program prints for this input.

    Raises: MetricUnavailableError where Java is missing or the program fails.
    """
    java = shutil.which("java")
    if java is None:
        raise MetricUnavailableError("it needs Java, and no `java` is on the PATH")
    command = [java, *_OPTIONS, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise MetricUnavailableError(f"{Path(arguments[1]).name} failed under Java: {last}")
    return done.stdout.removesuffix("\n").split("\n")


def ptb_rows(
    predictions: list[str], references: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return predictions and references in lower case, tokenized and without punctuation.

    Tokens are separated by one space. The program is Stanford's PTBTokenizer, the punctuation that
    of pycocoevalcap, as the script has it. A text of punctuation alone becomes empty.

    Raises: MetricUnavailableError where Java is missing or fails.
    """
    words = iter(_tokenized((*predictions, *(text for row in references for text in row))))
    return [next(words) for _ in predictions], [[next(words) for _ in row] for row in references]


@lru_cache(maxsize=1)  # three metrics ask for the same texts, one after the other
def _tokenized(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return each text tokenized, by one run of the program."""
    from pycocoevalcap.tokenizer import ptbtokenizer

    # The program knows more ends of a line than \n. All of them are white space in Python, too.
    lines = [" ".join(text.split()) for text in texts]
    some = [line for line in lines if line]
    jar = Path(ptbtokenizer.__file__).with_name(ptbtokenizer.STANFORD_CORENLP_3_4_1_JAR)
    program = ["-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer"]
    text = "".join(f"{line}\n" for line in some)
    printed = run([*program, "-preserveLines", "-lowerCase"], text) if some else []
    if len(printed) != len(some):
        raise MetricUnavailableError(
            f"{jar.name} printed {len(printed)} lines for {len(some)} texts"
        )
    dropped, words = ptbtokenizer.PUNCTUATIONS, iter(printed)
    return tuple(
        " ".join(word for word in next(words).split() if word not in dropped) if line else ""
        for line in lines
    )


def meteor_score(predictions: list[str], references: list[list[str]]) -> float:
    """Return METEOR 1.5 of tokenized texts, by its authors' program.

    The program wants as many references of each row, and takes the best one. So the references of a
    row are repeated.

    Raises: MetricUnavailableError where Java is missing or fails.
    """
    from pycocoevalcap.meteor import meteor

    jar = Path(meteor.__file__).with_name(meteor.METEOR_JAR)
    most = max(map(len, references))
    padded = [each for row in references for each in islice(cycle(row), most)]
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name, texts in {"predictions": predictions, "references": padded}.items():
            file = Path(folder, name)
            file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
            files.append(str(file))
        options = ["-l", "en", "-norm", "-r", str(most)]
        printed = run(["-jar", str(jar), *files, *options])
    try:
        return float(printed[-1].removeprefix("Final score:"))
    except ValueError:
        raise MetricUnavailableError(f"{jar.name} printed no score, but {printed[-1]!r}") from None
