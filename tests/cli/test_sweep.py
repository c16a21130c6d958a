"""A sweep: sizes of models, grids of papers, times, and its JSON."""

import json
import os
import re
from pathlib import Path

import pytest
import tiny
import yaml
from transformers import BertConfig, DistilBertConfig, GPT2Config

from hf_dp.accounting import Ledger, epsilon
from hf_dp.cli import cells
from hf_dp.cli.cells import Cell, grid, model_size, result, spent_together
from hf_dp.cli.main import main
from hf_dp.cli.sweep import table
from hf_dp.errors import ConfigError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import Users
from hf_dp.run.clock import VARIABLE
from hf_dp.run.witnesses import read_run
from hf_dp.statement import evidence as document
from hf_dp.statement.facts import Weaknesses

# -- model sizes ---


@pytest.mark.parametrize(
    ("config", "without", "family"),
    [  # the published numbers: 124.4 M, 109.5 M and 66.4 M in all
        (GPT2Config(), 124_439_808 - (50_257 + 1_024) * 768, "gpt2"),
        (BertConfig(), 109_482_240 - (30_522 + 512 + 2) * 768, "bert"),
        (DistilBertConfig(), 66_362_880 - (30_522 + 512) * 768, "bert"),
    ],
)
def test_the_size_of_a_model(tmp_path, config, without, family):
    config.save_pretrained(tmp_path)
    assert model_size(str(tmp_path)) == {"family": family, "parameters": without / 1e6}


def test_a_model_that_is_not_there_has_no_size():
    assert model_size("no/such-model") == {}


# -- grids of papers ---


def test_the_searches_of_tables_5_and_6_are_grids(tmp_path):
    """By the ranges of Li et al., appendix I, with a rank and its scale together."""
    common = ["expected_batch_size=512,1024", "lr_scheduler_type=linear,constant"]
    full = [*common, "learning_rate=2e-3,1e-3,3e-4,1e-4,3e-5", "num_train_epochs=10,30,50"]
    lora = [*common, "learning_rate=3e-3,1e-3,3e-4,1e-4,3e-5", "num_train_epochs=5,10,30,50"]
    ranks = ",".join(f"{{peft_type: lora, r: {r}, lora_alpha: {r}}}" for r in (1, 2, 4, 8))
    rgp = [*lora, "per_example_max_grad_norm=0.1,1,10", "peft.rank=1,2,4,8"]
    sizes = [
        len(list(grid(words, [0], tmp_path))) for words in (full, [*lora, f"peft={ranks}"], rgp)
    ]
    assert sizes == [60, 320, 960]
    cell = next(grid([f"peft={ranks}"], [0], tmp_path))
    assert cell.settings["peft"] == {"peft_type": "lora", "r": 1, "lora_alpha": 1}


# -- one real sweep: models, logs and times ---


def test_a_sweep_over_models_without_and_with_privacy(task, in_this_process, monkeypatch):
    other = tiny.save(task.folder / "larger")
    words = ["sweep", "--output-dir", str(task.folder / "s")]
    words += ["--grid", "privacy_mode=dp_sgd,non_private", "target_epsilon=3"]
    words += [f"model_name_or_path={task.folder / 'model'},{other}", "--set", "logging_steps=1"]
    said = task.run(*words)
    assert said.count("M parameters without embeddings") == 4
    rows = re.findall(r"; training [\d.]+ s \(processor [\d.]+ s\)", said)
    assert len(rows) == 4 and "epsilon does not cover them" in said
    assert "all 2 private runs together" in said
    run_folders = [path.parent for path in (task.folder / "s").glob("*/run1/config.json")]
    assert len(run_folders) == 4
    for folder in run_folders:
        times = json.loads((folder.parent / "times.json").read_text())
        assert times["training"]["wall"] > 0 and times["training"]["processor"] > 0
        assert not any("times" in path.name for path in folder.iterdir())
    assert VARIABLE not in os.environ
    # Again as JSON: nothing runs, and a row has what the table says, and the logs.
    monkeypatch.setattr(cells.subprocess, "run", None)
    found = json.loads(task.run(*words, "--json", "--logs"))
    assert found["together"] in said and "all 2 private runs" in found["together"]
    rows = found["rows"]
    assert [row["settings"].get("target_epsilon") for row in rows] == [3, 3, None, None]
    assert len({row["size"]["parameters"] for row in rows}) == 1  # both are equally large
    for row in rows:
        assert f"accuracy {row['metrics']['accuracy']:.4f}" in said
        private = row["settings"]["privacy_mode"] == "dp_sgd"
        assert (row["epsilon"] is not None) == (row["status"] is not None) == private
        assert {1, 2, 3} <= {log["step"] for log in row["logs"]} and row["seed"] == 0
        assert row["times"]["training"]["wall"] > 0


def test_logs_belong_to_the_json(task):
    task.refused("Add --json", "sweep", "--output-dir", str(task.folder / "s"), "--logs")


def test_a_run_without_logs_is_named(tmp_path):
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1" / "eval_results.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"trainer_state.json cannot be read.*leave --logs out"):
        result(Cell({}, 0, tmp_path), logs=True)


# -- what all runs cost together ---


def written(folder, number=0, *, insecure=False, weak=(), **options) -> Cell:
    """A run of two steps that left its record, as a cell with one attempt."""
    given = {"num_examples": 100, "expected_batch_size": 10, "clipping_norm": 0.1}
    plan = PrivacyPlan.create(**given, noise_multiplier=1.0, max_steps=2, **options)
    ledger = Ledger()
    ledger.append(plan.event(), "training")
    weaknesses = Weaknesses(insecure_seed=insecure, **dict(weak))
    record = document.Evidence(plan, ledger, str(number), weaknesses)
    document.write(folder / str(number) / "run1", record)
    return Cell({"a": number}, 0, folder / str(number))


def trained(folder, **options) -> Cell:
    tiny.trainer(folder / "run1", **options).train()
    return Cell({"mode": folder.name}, 0, folder)


def test_at_the_smallest_delta_and_nothing_beside_a_fixed_seed(tmp_path):
    runs = [written(tmp_path, n, target_delta=delta) for n, delta in enumerate((1e-3, 1e-6))]
    events = [event for cell in runs for event in document.read(cell.attempts[0]).ledger.events]
    total = epsilon(events, 1e-6, "rdp").rounded_up()
    assert f"epsilon {total} at delta 1e-06" in spent_together(runs)
    unbegun = written(tmp_path, 9)
    (unbegun.folder / "run1" / "privacy.json").unlink()
    (unbegun.folder / "run1" / "ledger.jsonl").touch()  # of a full disk
    assert "all 2 private runs together" in spent_together([*runs, unbegun])
    found = spent_together([*runs, written(tmp_path, 3, insecure=True)])
    assert "no epsilon holds" in found and "of run 3, noise and sampling came from a fixed" in found
    for number, (weak, expected) in enumerate(
        (
            (
                {"observers": ("spy",)},
                "no epsilon holds for all private runs.*: of run 4, spy, which",
            ),
            ({"rows_are_chunks": True}, r"for one row \(a chunk of a longer text\); that is"),
            ({"released": ("training_loss",)}, "some also released values without noise"),
        ),
        4,
    ):
        found = spent_together([*runs, written(tmp_path, number, weak=weak)])
        assert re.search(expected, found) and ("(rdp" in found) == ("observers" not in weak)


def test_runs_with_different_units_have_no_epsilon_together(tmp_path):
    row = written(tmp_path, 0)
    first, other = (
        written(tmp_path, n, users=Users(column), privacy_unit="user")
        for n, column in ((1, "owner"), (2, "firm"))
    )
    for several in ([row, first], [first, other]):
        found = spent_together(several)
        assert "these 2 private runs protect different units" in found and "epsilon 1" not in found
        assert "one user by 'owner'" in found and "no epsilon is stated" in found
    assert "(rdp, a bound) for one user by 'owner'; that is" in spent_together([first])
    assert "(rdp, a bound) for one row; that is" in spent_together([row])


def test_dp_fp_among_the_runs(tmp_path):
    """Where labels are public nothing is claimed for them; as published, nothing at all."""
    frozen = trained(tmp_path / "f", privacy_mode="dp_fp", dp_fp_variant="frozen")
    sums = trained(tmp_path / "s")
    published = trained(tmp_path / "p", privacy_mode="dp_fp", dp_fp_variant="published")
    for some in ([frozen], [frozen, sums]):  # the weaker of the two holds for both
        assert "for one row without its label, which is public; that" in spent_together(some)
    assert "for one row; that" in spent_together([sums])
    found = spent_together([sums, published])
    assert re.search(r"no epsilon holds for all .* together: of run \w+, no bound is known", found)
    assert "(rdp" not in found
    status = read_run(published.attempts[0]).status
    row = {"metrics": {"accuracy": 0.5}, "epsilon": None, "status": status}
    assert table([published], [row]) == "mode=p: accuracy 0.5000; not established"


# -- several recipes: which runs there are, and what each of them reads ---


@pytest.fixture
def recipes(task) -> dict[str, Path]:
    """Two recipes in one folder, the second with LoRA and a rate of its own."""
    full, lora = task.folder / "full.yaml", task.folder / "lora.yaml"
    full.write_bytes(task.file.read_bytes())
    task.change(peft={"peft_type": "lora", "r": 2, "lora_alpha": 2}, learning_rate=6e-3)
    lora.write_bytes(task.file.read_bytes())
    return {"full": full, "lora": lora}


def files_of(children: list[list[str]]) -> list[dict]:
    """The configurations of runs, with their folders."""
    configs = [Path(command[command.index("--config") + 1]) for command in children]
    return [yaml.safe_load(each.read_text()) | {"folder": each.parent} for each in configs]


def words_of(recipes, folder, *words):
    return ["sweep", "--config", *map(str, recipes), "--output-dir", str(folder), *words]


def test_each_recipe_runs_with_its_own_settings_over_the_same_grid(recipes, children, tmp_path):
    words = ["--grid", "target_epsilon=2,8", "--seeds", "0", "1", "--set", "max_steps=5"]
    # No child left a result.
    assert main(words_of(recipes.values(), tmp_path / "s", *words)) == 1
    runs = files_of(children)
    keys = ("learning_rate", "target_epsilon", "seed")
    assert [(*(run[key] for key in keys), "peft" in run) for run in runs] == [
        (rate, epsilon, seed, lora)
        for rate, lora in ((1e-3, False), (6e-3, True))
        for epsilon in (2, 8)
        for seed in (0, 1)
    ]
    assert {run["max_steps"] for run in runs} == {5}
    assert all("recipe" not in run for run in runs)
    assert {run["card"]["recipe"] for run in runs} == {"full.yaml", "lora.yaml"}
    names = {run["folder"].name.rpartition("-")[0].rpartition("-")[0] for run in runs}
    assert names == {
        f"recipe={name}-target_epsilon={target}" for name in ("full", "lora") for target in (2, 8)
    }


def test_one_recipe_needs_no_name(recipes, children, tmp_path):
    assert main(words_of([recipes["full"]], tmp_path / "s", "--grid", "max_steps=5")) == 1
    (run,) = files_of(children)
    assert run["folder"].name.startswith("max_steps=5-") and run["card"] == {"recipe": "full.yaml"}


def test_recipes_of_one_name_are_told_apart_by_their_folders(recipes, children, tmp_path):
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "full.yaml"
    twin.write_bytes(recipes["full"].read_bytes())
    main(words_of([recipes["full"], twin], tmp_path / "s"))
    names = [run["folder"].name.split("-")[0] for run in files_of(children)]
    assert names == ["recipe=full", "recipe=other_full"]


def test_numbers_with_an_exponent_are_numbers(tmp_path):
    """PyYAML takes 1e-3 for text: such rates would be no axis, and 0.001 another value."""
    (first, _) = grid(["learning_rate=1e-3,2E+1", "peft={r: 1e0}"], [0], tmp_path)
    assert first.settings == {"learning_rate": 1e-3, "peft": {"r": 1.0}}
    for words in ("learning_rate=1e-3,0.001", "target_epsilon=1,1.0"):
        with pytest.raises(ConfigError, match="to be different, got"):
            list(grid([words], [0], tmp_path))
    assert len(list(grid(["a=1,true,1x3,e-3"], [0], tmp_path))) == 4


@pytest.mark.parametrize(
    ("names", "words", "message"),
    [
        (("full", "full"), [], "to have different names, got"),
        (("lora", "full"), ["--grid", "peft.r=1,2"], "no block `peft`"),  # the second has none
        (("full", "lora"), ["--grid", "recipe=a,b"], "use --config A.yaml B.yaml"),
        (("full", "lora"), ["--set", "recipe=a"], "use --config A.yaml B.yaml"),
        (("full", "lora"), ["--private-selection", "3", "--score", "accuracy"], "one recipe in `--config`"),
    ],
)  # fmt: skip
def test_what_is_refused_before_the_first_run(
    recipes, children, tmp_path, refused, names, words, message
):
    refused(words_of([recipes[name] for name in names], tmp_path / "s", *words), message)
    assert not children


def test_each_example_of_the_help_stands_on_lines_of_its_own(capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    said = capsys.readouterr().out
    assert "privacy_mode=dp_sgd,non_private target_epsilon=3,8 \\\n" in said
    assert max(map(len, said.splitlines())) <= 100
