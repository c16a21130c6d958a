"""The project's pages and the commands in them."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING = ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md"
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [
        README,
        CONTRIBUTING,
        *(
            page
            for top in ("hf_dp", "recipes", "model_cards")
            for page in ROOT.glob(f"{top}/**/*.md")
            # but cards, whose programs need the Hub, and their templates
            if not (page.parent / "privacy.json").exists() and page.parent.name != "cards"
        ),
    ]
}


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of this language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page].read_text(), flags=re.S | re.M)


_FENCE = re.compile(r"^ *```(\w*)\n.*?^ *```$", flags=re.S | re.M)


def languages(text: str) -> list[str]:
    """The languages of the fenced blocks; '' for one that names none, or code that is indented."""
    prose = _FENCE.sub("", text)
    return _FENCE.findall(text) + [""] * len(re.findall(r"\n\n {4}[^\s*-]", prose))


def calls_in_prose(text: str) -> Iterator[ast.Call]:
    """The calls in a text's inline code, also in the form ``argument=call(...)``."""
    for code in re.findall(r"`([^`]+)`", _FENCE.sub("", text)):
        try:
            tree = ast.parse(f"of({code.replace(', ...)', ')')})")
        except SyntaxError:
            continue
        yield from (
            each
            for each in ast.walk(tree)
            if isinstance(each, ast.Call) and ast.unparse(each.func) != "of"
        )


def commands(page: str) -> list[list[str]]:
    """The words of each shell command of a page; lines that end in a backslash are joined."""
    lines = [
        line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def command_of(recipe: Path) -> list[str]:
    """The words of the command that a recipe's first lines name; none where they name none."""
    found = re.search(r"^# command: (.*)$", recipe.read_text(), flags=re.M)
    return shlex.split(found[1]) if found else []
