"""``hf-dp sweep --private-selection``: what is drawn, what is released, what goes on."""

import json
import shutil
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny

from hf_dp.accounting import BestOfRandomRuns
from hf_dp.cards.verify import verify
from hf_dp.cli import private_selection
from hf_dp.cli.cells import METRICS, grid
from hf_dp.cli.private_selection import Search, select
from hf_dp.errors import ConfigError, InvalidArgumentError
from hf_dp.statement.evidence import read

RATES = "learning_rate=1e-3,2e-3,4e-3"


class Runs:
    """Trains a run in this process, once for all of its options; the test says its score."""

    def __init__(self, trained: dict[str, Path], folders: pytest.TempPathFactory):
        self.trained, self.folders = trained, folders
        self.made, self.options = [], {}

    def draw(self, *scores: float, failing: int | None = None) -> None:
        """Let a search draw so many runs, of these scores, of which one may fail."""
        self.scores, self.failing, self.number = scores, failing, len(scores)

    def __call__(self, recipe, cell, which, launched, timed):
        assert not timed  # the times of a search would tell how many runs there were
        number = int(which.removeprefix("run ")) - 1
        if number == self.failing:
            cell.folder.mkdir(parents=True, exist_ok=True)
            (cell.folder / "log.txt").write_text("1/2\rMaking rows\nhf-dp: no such column\n\n")
            return False
        if cell.done is not None:
            return True
        assert recipe["accountant"] == "rdp" and recipe["card"] == {"model_name": "search"}
        assert recipe["report_to"] == "none"
        folder = cell.folder / f"run{len(cell.attempts) + 1}"
        options = {"private_selection_mean_runs": recipe["private_selection_mean_runs"]}
        options |= self.options.get(number, {})
        if str(options) not in self.trained:
            self.trained[str(options)] = self.folders.mktemp("trained")
            folder_of_all = self.trained[str(options)]
            made = tiny.trainer(folder_of_all, accountant="rdp", max_steps=2, **options)
            tiny.trained(made).save_model()
        shutil.copytree(self.trained[str(options)], folder)
        score = {"eval_accuracy": self.scores[number], "eval_perplexity": 10 - self.scores[number]}
        (folder / METRICS).write_text(json.dumps(score))
        self.made.append(number)
        return True


@pytest.fixture(scope="module")
def trained() -> dict[str, Path]:
    """Folders of runs by their options."""
    return {}


@pytest.fixture
def runs(monkeypatch, trained, tmp_path_factory):
    made = Runs(trained, tmp_path_factory)
    monkeypatch.setattr(private_selection, "run_cell", made)
    monkeypatch.setattr(private_selection, "check_runs", lambda search: None)
    monkeypatch.setattr(private_selection, "_geometric", lambda mean: made.number)
    return made


def search(folder, *, mean=3.0, score="accuracy", words=(RATES,), seeds=(0,), **recipe) -> Search:
    return Search(recipe, list(grid(words, seeds, folder)), mean, score)


def test_only_the_best_is_released(tmp_path, runs):
    runs.draw(0.5, float("nan"), 0.75, 0.75)
    folder = tmp_path / "search"
    found = select(search(folder))
    assert runs.made == [0, 1, 2, 3]
    assert found.score == 0.75 and found.folder == folder / "best"
    assert sorted(path.name for path in folder.iterdir()) == ["best", "search.json"]
    # Nothing there says how many runs there were.
    noted = json.loads((folder / "search.json").read_text())
    assert "runs" not in noted and noted["released"] == 0
    (event,) = read(found.folder).ledger.events
    assert isinstance(event, BestOfRandomRuns) and event.mean_runs == 3 and event.steps == 2
    assert verify(found.folder).outcome != "FAILED"
    assert f"epsilon {found.epsilon:.3f}" in found.in_words() and "learning_rate=" in found.label
    # The same command again finds it and runs nothing.
    assert select(search(folder)) == found and len(runs.made) == 4


def test_smaller_is_better_for_a_perplexity(tmp_path, runs):
    runs.draw(0.5, 0.9)
    found = select(search(tmp_path / "search", score="perplexity"))
    assert found.score == 10 - 0.9


def test_an_interrupted_search_goes_on_with_what_was_drawn(tmp_path, runs):
    runs.draw(0.5, 0.9, 0.7, failing=1)
    folder = tmp_path / "search"
    why = r"failed; see .*trial-.*log.txt. hf-dp: no such column\nNothing is .* must stay as it is"
    with pytest.raises(ConfigError, match=why):
        select(search(folder))
    with pytest.raises(ConfigError, match="belongs to another search"):  # run 1 has been paid for
        select(search(folder, weight_decay=0.1))
    assert not (folder / "best").exists()
    drawn = json.loads((folder / "search.json").read_text())["runs"]
    runs.number, runs.failing = 99, None  # not drawn again
    assert select(search(folder)).score == 0.9
    assert runs.made == [0, 1, 2] and len(drawn) == 3


def test_a_search_that_has_spent_nothing_goes_on_with_a_mended_recipe(tmp_path, runs):
    """And with the number of runs that was drawn."""
    runs.draw(0.5, 0.9, 0.7, failing=0)
    folder = tmp_path / "search"
    with pytest.raises(ConfigError, match=r"no such column\n.* The recipe may change, too"):
        select(search(folder))
    runs.number, runs.failing = 99, None
    found = select(search(folder, weight_decay=0.1, words=("learning_rate=5e-3",)))
    assert found.score == 0.9 and runs.made == [0, 1, 2] and "learning_rate=0.005" in found.label
    assert sorted(path.name for path in folder.iterdir()) == ["best", "search.json"]


def test_planted_search_that_forgets_what_it_spent_is_seen(tmp_path, runs, monkeypatch):
    runs.draw(0.5, 0.9, failing=1)
    folder = tmp_path / "search"
    monkeypatch.setattr(private_selection, "_unspent", lambda search: True)
    with pytest.raises(ConfigError, match="failed"):
        select(search(folder))
    runs.failing = None
    assert select(search(folder, weight_decay=0.1)).score == 0.9
    assert runs.made == [0, 0, 1]  # run 1 was paid for twice, and counted once


@pytest.mark.parametrize("stage", ["moved", "deleted"])
def test_an_interruption_while_the_best_is_released(tmp_path, runs, monkeypatch, stage):
    runs.draw(0.5, 0.9, 0.7)
    folder, honest = tmp_path / "search", private_selection._write
    killed = Mock(side_effect=KeyboardInterrupt)

    def killed_at_the_end(path, values):
        return honest(path, values) if "runs" in values else killed()

    where = (shutil, "rmtree", killed)
    if stage == "deleted":
        where = (private_selection, "_write", killed_at_the_end)
    with monkeypatch.context() as patched:
        patched.setattr(*where)
        with pytest.raises(KeyboardInterrupt):
            select(search(folder))
    found = select(search(folder))
    assert found.score == 0.9 and runs.made == [0, 1, 2]
    assert sorted(path.name for path in folder.iterdir()) == ["best", "search.json"]


def test_runs_that_cost_differently_release_nothing(tmp_path, runs):
    """The bound is that of equal runs."""
    runs.draw(0.5, 0.6)
    runs.options = {1: {"noise_multiplier": 0.9}}
    with pytest.raises(ConfigError, match="did not all release the same events"):
        select(search(tmp_path / "search"))
    assert not (tmp_path / "search" / "best").exists()


def test_another_search_in_the_same_folder_is_refused(tmp_path, runs):
    runs.draw(0.5)
    folder = tmp_path / "search"
    select(search(folder))
    for change in (
        {"mean": 4.0},
        {"score": "perplexity"},
        {"words": ("learning_rate=1e-3",)},
        {"seeds": (1,)},
        {"weight_decay": 0.1},
    ):
        with pytest.raises(ConfigError, match="belongs to another search"):
            select(search(folder, **change))
    (folder / "search.json").unlink()
    with pytest.raises(ConfigError, match=r"not empty and has no search\.json"):
        select(search(folder))


def test_what_no_run_could_do_is_refused_before_anything_is_drawn(task, tmp_path):
    left_out = ("task", "output_dir", "learning_rate", "accountant", "save_strategy")
    good = {name: value for name, value in task.values.items() if name not in left_out}
    folder = tmp_path / "search"
    for change, match in (
        ({"validation_file": good["train_file"]}, "training row"),
        ({"accountant": "pld"}, "Expected `accountant` to be 'rdp'"),
        ({"learning_rat": 1e-3}, "Unknown configuration key `learning_rat`"),
        ({"text_columns": ["text"]}, r"`text_columns` names \['text'\]"),
    ):
        with pytest.raises(ConfigError, match=f"cannot run, and nothing was started: .*{match}"):
            select(search(folder, words=("learning_rate=1e-3",), **{**good, **change}))
    with pytest.raises(ConfigError, match=r"`--score` to be one of \['accuracy'\], got 'f1'"):
        select(search(folder, words=(), score="f1", **good))
    assert not folder.exists()


def test_an_unknown_score(tmp_path, runs):
    runs.draw(0.5, 0.6)
    with pytest.raises(ConfigError, match=r"`--score` to be one of \['accuracy'"):
        select(search(tmp_path / "search", score="f1"))
    assert runs.made == [0]  # the second run is not spent


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"words": ("num_train_epochs=1,2",)}, "cannot vary 'num_train_epochs'"),
        ({"words": ("target_epsilon=1,2",)}, "cannot vary 'target_epsilon'"),
        ({"words": ("train_file=a,b",)}, "cannot vary 'train_file'"),
        ({"privacy_mode": "dp_fp"}, "needs privacy_mode dp_sgd"),
        ({"push_to_hub": True}, "push_to_hub"),
        ({"drop_long_rows": True}, "drop_long_rows"),
        ({"report_to": "wandb"}, "report_to"),
        ({"release": ["clipped_gradient_norm"]}, "`release` to be unset in a private selection"),
    ],
)
def test_what_cannot_be_searched(tmp_path, change, match):
    with pytest.raises(ConfigError, match=match):
        search(tmp_path, **change)


def test_a_mean_of_one_is_no_search(tmp_path):
    with pytest.raises(InvalidArgumentError, match="`--private-selection` to be above 1"):
        search(tmp_path, mean=1)


@pytest.mark.parametrize("mean", [1.5, 3.0, 10.0])
def test_the_number_of_runs_is_geometric(mean):
    draws = Counter(private_selection._geometric(mean) for _ in range(20_000))
    assert min(draws) == 1
    for count in (1, 2, 3):
        share = draws[count] / 20_000
        exact = (1 - 1 / mean) ** (count - 1) / mean
        assert abs(share - exact) < 6 * (exact / 20_000) ** 0.5  # one in 10^8


def test_settings_are_drawn_from_the_whole_grid(tmp_path, monkeypatch):
    monkeypatch.setattr(private_selection, "_geometric", lambda mean: 600)
    monkeypatch.setattr(private_selection, "check_runs", lambda search: None)
    runs = private_selection._drawn(search(tmp_path / "search", seeds=(0, 1)))["runs"]
    drawn = Counter(run["cell"] for run in runs)
    assert drawn.keys() == set(range(6)) and all(40 < count < 160 for count in drawn.values())
    assert len({run["folder"] for run in runs}) == 600


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--private-selection", "3"], "--score accuracy"),
        (["--score", "accuracy"], "Add --private-selection K"),
        (["--private-selection", "3", "--score", "accuracy", "--zero-shot"], "`--zero-shot`"),
        (["--private-selection", "3", "--score", "accuracy", "--json"], "`--json`"),
    ],
)
def test_bad_words(tmp_path, words, said, refused):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_steps: 1\n")
    out = str(tmp_path / "out")
    refused(["sweep", "--config", str(recipe), "--output-dir", out, *words], said)
