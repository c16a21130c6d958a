"""The cards of real runs in ``model_cards/``: each verifies, and is what would be made today."""

from pathlib import Path

import pytest
from leaderboard import CARDS, PAGES, folders, page

from hf_dp.cards.verify import CARD, NOT_CHECKED, card_files, verify
from hf_dp.statement.evidence import FILE_NAME

CARDS_OF = {
    "sst2": "full_eps8 frost_eps2 dp_fp_published dp_fp_private_encoder_eps8",
    "cifar10": "full_eps0.5",
    "e2e": "smollm2_lora_eps8",
}


def test_there_are_cards_of_what_the_papers_do() -> None:
    names = {folder.relative_to(CARDS).as_posix() for folder in folders()}
    assert names == {
        f"{data}/{name}" for data, listed in CARDS_OF.items() for name in listed.split()
    }


@pytest.mark.parametrize(
    "folder", folders(), ids=lambda folder: folder.relative_to(CARDS).as_posix()
)
def test_a_card_verifies_but_for_its_absent_weights_and_made_again_is_the_same(
    folder: Path,
) -> None:
    report = verify(folder)
    assert report.outcome == NOT_CHECKED, report
    assert {check.about for check in report.checks if check.outcome == NOT_CHECKED} == {"weights"}
    files = card_files(folder)
    for name in (CARD, FILE_NAME):
        assert files[name] == (folder / name).read_bytes(), "run `hf-dp card` on the folder"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name)
def test_a_page_shows_what_the_cards_and_results_say(path: Path) -> None:
    assert page(path) == path.read_text(), "run `python tests/leaderboard.py`"
