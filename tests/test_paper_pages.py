"""The pages of recipes/ have a row for each table and figure of a paper, and the paper's numbers."""

import re

import pytest
from pages import PAGES
from test_recipes import PAPERS, REPRODUCTIONS, ROOT, plan_of

from hf_dp.accounting import epsilon
from hf_dp.cli.figure import read_beside


def read_points(path, over, metric):
    """{label: [(place, value)]} of the points that a figure shows beside ours."""
    found = {}
    for row in read_beside(path, True, [over, metric]):
        found.setdefault(row["label"], []).append((row[over], row[metric]))
    return found


OF_PAPERS = [paper for paper in PAPERS if "pages" in PAPERS[paper]]
HEADER = "| In the paper | Command | The paper's | Ours | How we read it |"
INFILLING = "infilling"
RUNS = re.compile(r"^(?:time )?(?:hf-dp|accelerate launch) ", flags=re.M)


def overview(page: str) -> list[list[str]]:
    """The cells of the rows of a page's table of tables and figures."""
    _, _, rest = PAGES[page].read_text().partition(HEADER + "\n")
    found = []
    for line in rest.splitlines()[1:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def sections(page: str) -> dict[str, str]:
    """The text under each heading, by its anchor; a section holds those below it."""
    lines = PAGES[page].read_text().splitlines()
    starts = [
        (number, len(found[1]), found[2])
        for number, line in enumerate(lines)
        if (found := re.match(r"(#+) (.*)", line))
    ]
    result = {}
    for index, (number, depth, title) in enumerate(starts):
        end = next((other for other, deep, _ in starts[index + 1 :] if deep <= depth), len(lines))
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        result[anchor] = "\n".join(lines[number:end])
    return result


def numbered(kind: str, label: str) -> set[int]:
    """The numbers of tables, or of figures, in ``Figures 6a to 6d`` or ``Tables 11, 12, 13``."""
    parts = re.split(r"(Tables?|Figures?)", label.split(":")[0])
    return {
        int(number)
        for word, text in zip(parts[1::2], parts[2::2], strict=True)
        if word.rstrip("s") == kind
        for number in re.findall(r"\d+", text)
    }


@pytest.mark.parametrize("paper", OF_PAPERS)
def test_every_table_and_figure_of_a_paper_has_a_row(paper):
    labels = [row[0] for page in PAPERS[paper]["pages"] for row in overview(page)]
    for kind, count in (("Table", "tables"), ("Figure", "figures")):
        found = set().union(*(numbered(kind, label) for label in labels))
        assert found == set(range(1, PAPERS[paper][count] + 1)), kind


@pytest.mark.parametrize("page", [page for paper in OF_PAPERS for page in PAPERS[paper]["pages"]])
def test_every_row_leads_to_a_command(page):
    rows = overview(page)
    assert rows and all(len(row) == 5 for row in rows)
    assert all(all(row) for row in rows)
    for label, command, *_ in rows:
        anchor = re.search(r"\]\(#(.*?)\)", command)
        if anchor:  # a row that another page has leads there
            assert RUNS.search(sections(page)[anchor[1]]), label
        else:
            assert "](" in command or command == "`recipes/images`", label


@pytest.mark.parametrize("page", PAPERS["printed"])
def test_the_papers_numbers_on_a_page_are_the_papers(page):
    text = sections(page)
    for heading, rows in PAPERS["printed"][page].items():
        start = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        (section,) = (each for anchor, each in text.items() if re.match(rf"{start}(?!\w)", anchor))
        for row in rows:
            assert f"| {row} |" in section, (heading, row)


def test_the_printed_epsilons_of_the_generation_page():
    """Each row: batch, epochs, our epsilons of both budgets, and the paper's."""
    page = PAGES["recipes/e2e/README.md"].read_text()
    checked = set()
    for recipe in REPRODUCTIONS.values():
        if recipe.name.split("/")[1] not in ("e2e", "dart", "persona_chat"):
            continue
        values, printed = recipe.values, recipe.experiment["epsilons"]
        batch, epochs = values["expected_batch_size"], values["num_train_epochs"]
        plans = [plan_of(recipe.rows, batch, epochs, target) for target in (3, 8)]
        cells = [f"{batch}, {epochs}"]
        for name in ("pld", "gdp_clt"):
            found = [epsilon(plan.events(), plan.delta, name).value for plan in plans]
            cells.append(", ".join(f"{value:.2f}" for value in found))
        for kind in ("composed", "gdp_clt"):
            cells.append(", ".join(f"{value:.2f}" for value in recipe.of(printed, kind)))
        row = f"| {' | '.join(cells)} |"
        assert row in page, (recipe.name, row)
        checked.add(row)
    assert len(checked) == 7


@pytest.mark.parametrize(
    ("points", "recipes"),
    [
        ("recipes/images/table2.csv", "recipes/images/cifar100/"),
        ("recipes/frost/table1_sst2.csv", "recipes/frost/sst2/"),
    ],
)
def test_the_points_beside_our_figures_are_the_papers(points, recipes):
    wanted = {
        recipe.parts["method"]: [
            (epsilon, pytest.approx(score / 100))
            for epsilon, score in zip(
                (0.5, 2, 8), recipe.of(recipe.experiment["scores"]), strict=True
            )
        ]
        for name, recipe in REPRODUCTIONS.items()
        if name.startswith(recipes)
    }
    assert len(wanted) == 6
    assert read_points(str(ROOT / points), "target_epsilon", "accuracy") == wanted


MILLIONS = {"base": 85.1, "large": 302.3}  # parameters without embeddings


@pytest.mark.parametrize("task", ["mnli", "qqp", "qnli", "sst2"])
def test_the_points_beside_our_figure_6_are_those_of_table_1(task):
    found = {
        (recipe.parts["epsilon"], recipe.parts["size"]): recipe.of(recipe.experiment["scores"])
        for recipe in REPRODUCTIONS.values()
        if recipe.name.startswith(f"recipes/glue/{task}/") and recipe.parts.get("how") == INFILLING
    }
    names = ["accuracy"]
    if task == "mnli":
        names = ["validation_matched_accuracy", "validation_mismatched_accuracy"]
    for place, name in enumerate(names):
        points = read_points(str(ROOT / f"recipes/glue/{task}/figure6.csv"), "parameters", name)
        assert points == {
            f"roberta target_epsilon={target}": [
                (MILLIONS[size], pytest.approx(float(str(score).split("/")[place]) / 100))
                for size in MILLIONS
                for score in [found[target, size]]
            ]
            for target in ("3", "8")
        }


@pytest.mark.parametrize(("folder", "figure"), [("e2e", "figure1"), ("dart", "figure6")])
def test_the_points_beside_our_figures_of_generation_are_gpt2s(folder, figure):
    recipe = REPRODUCTIONS[f"recipes/{folder}/gpt2_full_eps8.yaml"]
    scores = recipe.of(recipe.experiment["scores"])["BLEU"]
    points = read_points(str(ROOT / f"recipes/{folder}/{figure}.csv"), "parameters", "bleu")
    assert points == {
        f"gpt2 target_epsilon={target}": [(MILLIONS["base"], score)]
        for target, score in zip((3, 8), scores, strict=False)
    }


@pytest.mark.parametrize(
    ("file", "heading", "column", "places"),
    [
        ("figure2", "Figures 2 and 9", "expected_batch_size", (16, 32, 64, 512, 1024, 2048)),
        ("figure4", "Figure 4", "per_example_max_grad_norm", (0.1, 0.4, 1.6, 6.4, 25.6)),
    ],
)
def test_the_values_beside_our_heat_maps_are_the_papers(file, heading, column, places):
    wanted = {}
    for row in PAPERS["printed"]["recipes/e2e/README.md"][heading]:
        rate, *values = row.split(" | ")
        rate = eval(rate.replace("^", "**")) * (1e-3 if file == "figure2" else 1)
        wanted |= {(rate, at): float(value) for at, value in zip(places, values, strict=True)}
    path = str(ROOT / f"recipes/e2e/{file}.csv")
    rows = read_beside(path, False, ["learning_rate", column, "bleu"])
    assert [((row["learning_rate"], row[column]), row["bleu"]) for row in rows] == list(
        wanted.items()
    )
