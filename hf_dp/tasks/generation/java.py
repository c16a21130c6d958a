"""Run the Java programs that pycocoevalcap brings, or say why that is not possible."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_dp.errors import MetricUnavailableError

# Before Java 18 the locale decides how text is read, and many a server has none.
_OPTIONS = ("-Dfile.encoding=UTF-8", "-Xmx2G")


def require_java() -> str:
    """Return the path of ``java``. Raises: MetricUnavailableError where it is not on the PATH."""
    found = shutil.which("java")
    if found is None:
        raise MetricUnavailableError("it needs Java, and no `java` is on the PATH")
    return found


def run(arguments: list[str], lines: list[str]) -> list[str]:
    """Return the lines that a program prints for these lines of input.

    Raises: MetricUnavailableError where Java is missing or the program fails.
    """
    done = subprocess.run(
        [require_java(), *_OPTIONS, *arguments],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode != 0:
        raise _failed(arguments, done.stderr)
    return done.stdout.removesuffix("\n").split("\n")


@contextmanager
def conversation(arguments: list[str]) -> Iterator[Callable[[str, int], list[str]]]:
    """Start a program and return ``ask(line, count)``: what it answers to a line, ``count`` lines.

    Raises: MetricUnavailableError where Java is missing or the program ends early.
    """
    java = require_java()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as problems,
        subprocess.Popen(
            [java, *_OPTIONS, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=problems,
            encoding="utf-8",
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        say, hear = process.stdin, process.stdout

        def ask(line: str, count: int) -> list[str]:
            try:
                say.write(f"{line}\n")
                say.flush()
            except BrokenPipeError:
                pass  # it has ended: the missing answer below says so
            answers = [hear.readline() for _ in range(count)]
            if not all(answers):
                problems.seek(0)
                raise _failed(arguments, problems.read())
            return [answer.rstrip("\n") for answer in answers]

        try:
            yield ask
        finally:
            process.kill()  # it has no command to end


def _failed(arguments: list[str], said: str) -> MetricUnavailableError:
    """Return the error for a program that failed, with the last line that it printed."""
    program = next((Path(each).name for each in arguments if each.endswith(".jar")), arguments[0])
    last = (said.strip().splitlines() or ["it said nothing"])[-1]
    return MetricUnavailableError(f"{program} failed under Java: {last}")
