"""Tables of pages: of ``model_cards/README.md``, made from the ``privacy.json`` files beside it, and
of ``recipes/sst2/README.md``, made from the figures in ``half_epoch/results.csv``.

``python tests/leaderboard.py`` writes them into the pages.
"""

import csv
import math
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from hf_dp.cards.details import CardDetails, of_metric
from hf_dp.cli.config import read_yaml
from hf_dp.statement.evidence import read
from hf_dp.statement.wording import epsilon_text

ROOT = Path(__file__).parent.parent
CARDS, SST2 = ROOT / "model_cards", ROOT / "recipes" / "sst2"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_HEAD = """\
| Card | Task | Base | What was trained | Epsilon (PLD) | RDP | PRV | Score | Recipe |
|---|---|---|---|---|---|---|---|---|"""


def folders() -> list[Path]:
    """List the folders with a card."""
    return sorted(path.parent for path in CARDS.rglob("privacy.json"))


def table() -> str:
    """Return the table, a row for each card: by data set, then epsilon, then score."""
    rows = []
    for folder in folders():
        evidence = read(folder)
        assert evidence.card is not None
        statement = evidence.restated()
        details = CardDetails.from_dict(evidence.card)
        epsilons = {
            row.accountant: epsilon_text(row.epsilon and row.epsilon.value)
            for row in statement.epsilons
        }
        claimed = [epsilons[name] if statement.proven else "none" for name in ("pld", "rdp", "prv")]
        name = folder.relative_to(CARDS).as_posix()
        score, said = _score(details)
        rows.append(
            (
                details.dataset or "",
                round(statement.epsilon or math.inf, 1),  # 7.999 and 8.000 are of one target
                -score,
                f"| [{statement.plan.words.name}: {name}]({name}/README.md) "
                f"| {details.task_tag}, {details.dataset} | {details.base_model} "
                f"| {re.split(r': |, (?=[a-z])', statement.facts.trained)[0]} "
                f"| {' | '.join(claimed)} | {said} | {_link(details)} |",
            )
        )
    return "\n".join([_HEAD, *(row for *_, row in sorted(rows))])


def _score(details: CardDetails) -> tuple[float, str]:
    """Return the accuracy on the evaluation set that the card's data set has, or the only one, or
    BLEU; and the same in words."""
    found = {of_metric(name, None): value for name, value in details.metrics.items()}
    for split in (None, "validation"):
        if (accuracy := found.get((split, "accuracy"))) is not None:
            return accuracy, f"accuracy {100 * accuracy:.1f} %"
    bleu = found[None, "bleu"]
    return bleu, f"BLEU {bleu:.1f}"


def _link(details: CardDetails) -> str:
    """Link the recipe of this name for the card's data; other folders have recipes of this name."""
    (path,) = (
        path
        for path in (CARDS.parent / "recipes").rglob(str(details.recipe))
        if read_yaml(str(path)).get("data_name") == details.dataset
    )
    return f"[{details.recipe}](../{path.relative_to(CARDS.parent).as_posix()})"


_METHODS = {
    "rgp": "RGP, rank 8", "lora": "LoRA (r = 8; query and value)", "full": "full",
    "random": "random matrices, a quarter", "frost": "DP-FROST, a quarter",
}  # fmt: skip


def grid() -> str:
    """Return the table of methods by epsilon; each cell is held-out rows / development rows."""
    with (SST2 / "half_epoch" / "results.csv").open() as file:
        runs = {row["run"]: row for row in csv.DictReader(file)}
    rows = [
        "| Method | Learning rate | Epsilon 0.5 | Epsilon 2 | Epsilon 8 "
        "| Processor time at epsilon 2 |\n|---|---|---|---|---|---|"
    ]
    for name, words in _METHODS.items():
        cells = [runs[f"{name}_eps{epsilon}"] for epsilon in ("0.5", "2", "8")]
        rate = read_yaml(str(SST2 / "half_epoch" / f"{name}.yaml"))["learning_rate"]
        rows.append(
            f"| {words} | {rate:.0e} | {' | '.join(map(_cell, cells))} "
            f"| {cells[1]['processor_seconds']} s |".replace("e-0", "e-")
        )
    return "\n".join(rows)


def _cell(run: dict[str, str]) -> str:
    both = [run[name] for name in ("held_out_accuracy", "accuracy") if run[name]]
    tenth = Decimal("0.1")
    return " / ".join(str((100 * Decimal(x)).quantize(tenth, ROUND_HALF_UP)) for x in both) + " %"


PAGES = {CARDS / "README.md": table, SST2 / "README.md": grid}


def page(path: Path) -> str:
    """Return the text of a page with its table in its place."""
    between = f"{BEGIN}\n{PAGES[path]()}\n{END}"
    return re.sub(f"{BEGIN}.*{END}", lambda _: between, path.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path))
