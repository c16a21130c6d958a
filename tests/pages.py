"""The project's pages and the commands in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING = ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md"
GENERATION = ROOT / "hf_dp" / "trainer" / "generation.md"
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [
        README,
        CONTRIBUTING,
        GENERATION,
        *(
            page
            for top in ("hf_dp", "recipes", "model_cards")
            for page in ROOT.glob(f"{top}/**/README.md")
            if not (page.parent / "privacy.json").exists()  # a card, whose program needs the Hub
        ),
    ]
}


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of this language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page].read_text(), flags=re.S | re.M)


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
