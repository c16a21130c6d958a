"""The cards of real runs in ``model_cards/``: each verifies, and is what would be made today."""

from __future__ import annotations

from pathlib import Path

import pytest
from leaderboard import CARDS, folders, page

from hf_dp.cards.evidence import CARD, card_files
from hf_dp.cards.verify import NOT_CHECKED, verify
from hf_dp.statement.record import FILE_NAME

METHODS = {
    "sst2": {
        "0.5": ("full", "lora", "rgp", "frost", "random"),
        "2": ("full", "lora", "rgp", "frost", "random"),
        "8": ("full", "lora", "rgp", "frost", "random"),
    },
    "cifar10": dict.fromkeys(("0.5", "2", "8"), ("full", "lora", "rgp", "frost", "random")),
}


def test_there_are_cards_of_what_the_papers_do() -> None:
    names = {folder.relative_to(CARDS).as_posix() for folder in folders()}
    assert names >= {
        f"{data}/{method}_eps{epsilon}"
        for data, by_epsilon in METHODS.items()
        for epsilon, methods in by_epsilon.items()
        for method in methods
    }
    assert names >= {"sst2/dp_fp_published", "sst2/dp_fp_private_encoder_eps8"}
    assert names >= {"sst2/head_eps8", "sst2/infilling_eps8"}
    assert names >= {f"sst2/frost_{x}_eps2" for x in ("mg", "mgn", "4_selections", "larger_budget")}


@pytest.mark.parametrize(
    "folder", folders(), ids=lambda folder: folder.relative_to(CARDS).as_posix()
)
def test_a_card_verifies_but_for_its_absent_weights(folder: Path) -> None:
    report = verify(folder)
    assert report.outcome == NOT_CHECKED, report
    assert {check.about for check in report.checks if check.outcome == NOT_CHECKED} == {"weights"}


@pytest.mark.parametrize(
    "folder", folders(), ids=lambda folder: folder.relative_to(CARDS).as_posix()
)
def test_a_card_made_again_is_the_same(folder: Path) -> None:
    files, _ = card_files(folder)
    for name in (CARD, FILE_NAME):
        assert files[name] == (folder / name).read_bytes(), "run `hf-dp card` on the folder"


def test_the_page_shows_what_the_cards_say() -> None:
    text = (CARDS / "README.md").read_text()
    assert page(text) == text, "run `python tests/leaderboard.py`"
