"""A dry run of every command of the pages, and of those that recipes name in their first lines.

Each goes as far as it can without the Hub, rows, or training: its words are read by its own parser,
its recipe is found, every key is known, and what it would train on is named. A sweep goes through
its runs.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from all_recipes import RECIPES
from pages import PAGES, ROOT, command_of, commands

from hf_dp._validate import one_of
from hf_dp.benchmarks import modes
from hf_dp.benchmarks.workload import SHAPES
from hf_dp.cli import bench, cells, plan
from hf_dp.cli.cells import Cell
from hf_dp.cli.main import main
from hf_dp.cli.tasks import SIGNALS
from hf_dp.tuners.frost.tuner import Chosen, Part

SOURCES: dict[str, list[list[str]]] = {
    **{page: commands(page) for page in PAGES if commands(page)},
    **{name: [command_of(path)] for name, path in RECIPES.items() if command_of(path)},
}
# The commands of a page by the file that they print to.
PRINTED = {
    (source, words[words.index(">") + 1]): words[1 : words.index(">")]
    for source, found in SOURCES.items()
    for words in found
    if ">" in words
}
# Where the work of a command begins that its own parser does not lead to.
WORK = (
    "hf_dp.cli.tasks.classification.Classification.build_trainer",
    "hf_dp.cli.tasks.masked_lm.build_trainer", "hf_dp.cli.tasks.generation.Writing.build_trainer",
    "hf_dp.cli.tasks.generation.load_evaluation",
    "hf_dp.cli.tasks.classification.load_evaluation", "hf_dp.cli.generate._written",
    "hf_dp.cli.train.launch", "hf_dp.cli.plan.Planned.plan", "hf_dp.cli.suggest._suggestion",
    "hf_dp.cli.audit.train_with_canaries", "hf_dp.cli.audit.measure",
)  # fmt: skip
# What says which rows a command reads.
TRAINED_ON = ("train_file", "dataset_name", "text_files")
EVALUATED_ON = ("validation_file", "dataset_name")

# What a run of any task may have.
SCORES = ("accuracy", "bleu", "perplexity", "validation_matched_accuracy", "DEV_accuracy")
# The axes of the figures of the papers: horizontal, vertical.
FIGURES = {
    "outputs/glue/figure6_mnli.png": ("parameters", "validation_matched_accuracy"),
    **{
        f"outputs/glue/figure6_{x}.png": ("parameters", "accuracy") for x in ("sst2", "qqp", "qnli")
    },
    "outputs/glue/figure7.png": ("expected_batch_size", "noise_multiplier"),
    "outputs/glue/figure8.png": ("accuracy", "accuracy"),
    "outputs/glue/figure8_non_private.png": ("accuracy", "accuracy"),
    "outputs/e2e/figure1.png": ("parameters", "bleu"),
    "outputs/dart/figure6.png": ("parameters", "bleu"),
    "outputs/e2e/figure2.png": ("expected_batch_size", "learning_rate"),
    "outputs/e2e/figure3_left.png": ("sample_rate", "effective_noise_multiplier"),
    "outputs/e2e/figure3.png": ("measured_signal_to_noise", "perplexity"),
    "outputs/e2e/figure4.png": ("per_example_max_grad_norm", "learning_rate"),
    "outputs/dp_fp/figure1.png": ("learning_rate", "expected_batch_size"),
    "outputs/dp_fp/figure2.png": ("learning_rate", "representation_clipping_norm"),
    "outputs/dp_fp/figure3.png": ("num_micro_batches", "accuracy"),
    "chosen.png": ("kind", "block"),
}


class Reached(Exception):
    """The words were understood; the command would begin its work now."""


def stop(*args: Any, **kwargs: Any) -> None:
    raise Reached


def stop_with_rows(names: Sequence[str], *args: Any, **kwargs: Any) -> None:
    """Stop, but only where the rows to read are named."""
    for each in args:
        known = [name for name in names if hasattr(each, name)]
        assert not known or any(getattr(each, name) for name in known), "no rows are named"
    raise Reached


@pytest.fixture
def dry_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., None]:
    """A function that takes the words of a command up to its work, and asserts that it came so
    far."""
    monkeypatch.chdir(ROOT)
    for place in WORK:
        names = {"build_trainer": TRAINED_ON, "load_evaluation": EVALUATED_ON}
        rows = names.get(place.rsplit(".", 1)[1])
        monkeypatch.setattr(place, stop if rows is None else partial(stop_with_rows, rows))

    def stopped(parse: Callable[..., object]) -> Callable[..., None]:
        def parse_and_stop(self: argparse.ArgumentParser, args: Sequence[str]) -> None:
            parse(self, args)
            raise Reached

        return parse_and_stop

    def reaches(words: list[str]) -> None:
        with pytest.raises(Reached):
            assert main(words) is Reached, (words, capsys.readouterr().err)

    def run(words: list[str], page: str = "recipes/e2e/README.md") -> None:
        words = words[: words.index(">")] if ">" in words else words
        command = words[0]
        if "--help" in words:
            with pytest.raises(SystemExit) as end:
                main(words)
            assert end.value.code == 0
        elif command == "sweep":
            goes_through_its_runs(words, reaches, monkeypatch, tmp_path)
        elif command == "figure":
            capsys.readouterr()
            assert (page, words[1]) in PRINTED, "no command prints this file"
            prints_made_up_results(PRINTED[page, words[1]], monkeypatch, tmp_path)
            (tmp_path / "a.json").write_text(capsys.readouterr().out)
            draws(words, tmp_path, monkeypatch)
        elif command == "plan":  # which only calculates: until it would, or to its end
            try:
                assert main(words) == 0, (words, capsys.readouterr().err)
            except Reached:
                pass
        elif command == "bench":
            names_what_is_measured(words[1:])
        elif command in ("train", "eval", "generate", "audit", "suggest"):  # several parsers
            reaches(words)
        else:
            with monkeypatch.context() as patched:
                for name in ("parse_args", "parse_intermixed_args"):
                    parse = getattr(argparse.ArgumentParser, name)
                    patched.setattr(argparse.ArgumentParser, name, stopped(parse))
                reaches(words)

    return run


def without(words: list[str], *options: str) -> list[str]:
    """The words without these options and their values."""
    for option in options:
        if option in words:
            place = words.index(option)
            words = words[:place] + words[place + 2 :]
    return words


def goes_through_its_runs(
    words: list[str],
    reaches: Callable[[list[str]], None],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
) -> None:
    """Run a sweep whose runs are taken up to their work, in this process.

    Of its combinations, so many are run that each value occurs.
    """
    assert main([*words, "--dry-run"]) == 0, words
    # A search draws how many runs it makes. Each of them is one of the grid all the same.
    words = without(words, "--private-selection", "--score")
    place = words.index("--output-dir") + 1
    words = [*words[:place], str(folder / Path(words[place]).name), *words[place + 1 :]]
    reached = []

    def child(command: list[str], **kwargs: Any) -> SimpleNamespace:
        reaches(command[command.index("train") :])
        reached.append(command)
        return SimpleNamespace(returncode=1)  # nothing was trained

    every = cells.grid
    with monkeypatch.context() as patched:
        patched.setattr("hf_dp.cli.cells.subprocess.run", child)
        patched.setattr(cells, "grid", lambda *args: covering(list(every(*args))))
        assert main(words) == 1 and reached


def prints_made_up_results(words: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let a command print JSON of synthetic results: of all runs of a sweep, of plans, of FROST."""

    def result(cell: Cell, **asked: bool) -> dict[str, Any]:
        metrics = dict.fromkeys((*SCORES, *SIGNALS), 0.5 + cell.seed / 10)
        return {
            "settings": cell.settings,
            "seed": cell.seed,
            "metrics": metrics,
            "zero_shot": {SCORES[0]: 0.5} if asked["untrained"] else {},
            "logs": [{"step": 1, "signal_to_noise": 0.1}] if asked["logs"] else [],
            "size": {"family": "bert", "parameters": 85.1},
        }

    def planned(settings: dict[str, Any]) -> dict[str, Any]:
        rate = settings["expected_batch_size"] / settings["num_examples"]
        numbers = {"sample_rate": rate, "noise_multiplier": 1.0}
        return {"plan": numbers, "effective_noise_multiplier": 1 / rate}

    def settings_of(self: plan.Planned, changes: dict[str, Any]) -> tuple[dict[str, Any], None]:
        return {**vars(self.options), **self.recipe, **changes}, None

    chosen = Chosen((Part("a", "0", "query", 1.0, 1),), "mgna", 1, True)
    if "--output-dir" in words:
        place = words.index("--output-dir") + 1
        words = [*words[:place], str(folder / "drawn" / words[place]), *words[place + 1 :]]
    with monkeypatch.context() as patched:
        patched.setattr(cells, "run_cell", lambda *args: True)
        patched.setattr(cells, "result", result)
        patched.setattr(plan.Planned, "plan", settings_of)
        patched.setattr(plan.Planned, "forecast", lambda self, settings: settings)
        patched.setattr(plan, "_json", planned)
        patched.setattr("hf_dp.tuners.frost.tuner.read_chosen", lambda folder: [chosen])
        assert main(words) == 0, words


def draws(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw what was printed, and check the axes."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    found: list[tuple[str, str]] = []

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        axes = self.axes[0]
        found.append((axes.get_xlabel(), axes.get_ylabel()))

    place = words.index("-o") + 1
    with monkeypatch.context() as patched:
        patched.setattr(Figure, "savefig", save)
        assert main(["figure", str(folder / "a.json"), *words[2:place], str(folder / "a.png")]) == 0
    assert found == [FIGURES.get(words[place], found[0])], words


def covering(cells: list[Cell]) -> list[Cell]:
    """A few of the cells, in which each value of each setting occurs."""
    values = {cell: {(key, str(value)) for key, value in cell.settings.items()} for cell in cells}
    chosen, missing = [cells[0]], set().union(*values.values()) - values[cells[0]]
    while missing:
        chosen.append(max(cells, key=lambda cell: len(values[cell] & missing)))
        missing -= values[chosen[-1]]
    return chosen


def names_what_is_measured(words: list[str]) -> None:
    """Parse a benchmark; its model and modes exist, whether or not Opacus is installed."""
    args = bench.build_parser().parse_args(words)
    one_of("model", args.model, SHAPES)
    for name in bench.chosen_modes(args.modes):
        one_of("modes", name, modes.MODES)


def program(words: list[str]) -> list[str]:
    """The words from ``hf-dp`` on, also where another program starts the training."""
    if words[:2] == ["accelerate", "launch"] or words[0] == "torchrun":
        return ["hf-dp", "train", *words[words.index("recipes/text_classification.py") + 1 :]]
    return words[1:] if words[0] == "time" else words


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param(source, words, id=f"{source}: {' '.join(words)[:100]}")
        for source, all_words in SOURCES.items()
        for words in all_words
    ],
)
def test_every_command_runs_up_to_its_work(source, words, dry_run):
    for path in (word for word in words if word.startswith("recipes/")):
        assert (ROOT / path).exists(), path
    words = program(words)
    if words[0] == "hf-dp":
        dry_run(words[1:], source)


def test_every_figure_of_the_papers_is_drawn_by_a_command():
    every = [words for found in SOURCES.values() for words in found if words[1:2] == ["figure"]]
    assert {words[words.index("-o") + 1] for words in every} >= set(FIGURES)


def test_the_command_of_a_recipe_is_of_this_recipe():
    named = {name: SOURCES[name][0] for name in RECIPES if name in SOURCES}
    found = {name: words[words.index("--config") + 1] for name, words in named.items()}
    assert found and all(name == other for name, other in found.items())


@pytest.mark.parametrize(
    "command",
    [
        "hf-dp train --config recipes/demo/minilm_dp_adam.yaml --leaning_rate 1",
        "hf-dp train --config recipes/demo/missing.yaml",
        "hf-dp train --config recipes/e2e/gpt2_full_eps8.yaml",
        "hf-dp sweep --config recipes/demo/minilm_dp_adam.yaml --grid leaning_rate=1,2 --output-dir x",
        "hf-dp sweep --config recipes/demo/minilm_dp_adam.yaml --grid peft.r=1,2 --output-dir x",
        "hf-dp sweep --config recipes/demo/minilm_dp_adam.yaml --set privacy_mod=dp_sgd --output-dir x",
        # over epsilon
        "hf-dp figure figure1.json --x target_epsilon --y bleu -o outputs/e2e/figure1.png",
        # the columns of another figure
        "hf-dp figure figure2.json --x expected_batch_size --y learning_rate --color bleu "
        "--beside recipes/e2e/figure4.csv -o a.png",
        "hf-dp figure figure5.json --x recipe --y bleu -o a.png",
        "hf-dp plan --config recipes/demo/minilm_dp_adam.yaml --num-exampels 10",
        "hf-dp bench throughput --model gpt2 --modes non_private,goast",
        "hf-dp bench throughput --model gpt3 --modes non_private",
        "hf-dp partitions roberta-base --chosne x",
        "hf-dp plam --num-examples 10",
    ],
)
def test_a_wrong_command_is_found(command, dry_run):
    with pytest.raises((AssertionError, SystemExit, ValueError, pytest.fail.Exception)):
        dry_run(command.split()[1:])
