"""Figures and columns of a sweep beside its settings: model size, another metric, logs, times."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import tiny
from drawing import drawn
from transformers import BertConfig, DistilBertConfig, GPT2Config

from hf_dp.cli import cell_runs, sweep_figures
from hf_dp.cli.cells import Cell
from hf_dp.cli.main import main
from hf_dp.cli.model_size import ModelSize, model_size
from hf_dp.cli.points import read_points
from hf_dp.cli.settings_figure import plot_sweep
from hf_dp.cli.sweep import grid
from hf_dp.cli.sweep_report import best, table
from hf_dp.errors import ConfigError, DataError
from hf_dp.run.clock import VARIABLE

# -- model sizes ---


@pytest.mark.parametrize(
    ("config", "parameters", "without", "family"),
    [  # the published numbers: 124.4 M, 109.5 M and 66.4 M in all
        (GPT2Config(), 124_439_808, 124_439_808 - (50_257 + 1_024) * 768, "gpt2"),
        (BertConfig(), 109_482_240, 109_482_240 - (30_522 + 512 + 2) * 768, "bert"),
        (DistilBertConfig(), 66_362_880, 66_362_880 - (30_522 + 512) * 768, "bert"),
    ],
)
def test_the_size_of_a_model(tmp_path, config, parameters, without, family):
    config.save_pretrained(tmp_path)
    assert model_size(str(tmp_path)) == ModelSize(parameters, without, family)


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="'no/such-model' is not known"):
        model_size("no/such-model")


def test_a_line_for_each_family_and_setting_over_the_size(tmp_path, monkeypatch):
    found = drawn(monkeypatch)
    sizes = {"a": ("bert", 40), "b": ("bert", 85), "c": ("roberta", 85)}
    results = {
        Cell({"model_name_or_path": name, "target_epsilon": target}, seed, tmp_path): {
            "metrics": {"accuracy": size / 100 + target / 1000 + seed / 100},
            "epsilon": target,
            "size": ModelSize(0, size * 10**6, family),
        }
        for name, (family, size) in sizes.items()
        for target in (3, 8)
        for seed in (0, 2)
    }
    sweep_figures.plot_against(results, "accuracy", "parameters", str(tmp_path / "a.png"))
    lines = {label: (x, pytest.approx(y)) for x, y, label in found}
    assert lines["bert target_epsilon=3"] == ([40, 85], [0.413, 0.863])
    assert lines["roberta target_epsilon=8"] == ([85], [0.868])
    assert len(lines) == 4 and (tmp_path / "a.png").exists()
    assert "85,000,000 parameters without embeddings" in table(results)


def test_a_point_for_each_combination_over_another_metric(tmp_path, monkeypatch):
    found = drawn(monkeypatch)
    results = {
        Cell({"expected_batch_size": batch}, seed, tmp_path): {
            "metrics": {"perplexity": 10 - batch, "signal_to_noise": batch * (1 + seed)}
        }
        for batch in (1, 2)
        for seed in (0, 1)
    }
    metric = sweep_figures.metric_of(results, None)
    assert metric == "perplexity"
    sweep_figures.plot_against(results, metric, "signal_to_noise", str(tmp_path / "a.png"))
    assert found == [([1.5], [9], "expected_batch_size=1"), ([3], [8], "expected_batch_size=2")]
    with pytest.raises(ConfigError, match=r"one of \['perplexity', 'signal_to_noise'\], got 'x'"):
        sweep_figures.plot_against(results, metric, "x", str(tmp_path / "b.png"))
    with pytest.raises(ConfigError, match="--plot-metric"):
        sweep_figures.metric_of(results, "bleu")
    with pytest.raises(ConfigError, match="--grid model_name_or_path"):
        sweep_figures.plot_against(results, metric, "parameters", str(tmp_path / "b.png"))


# -- logs ---


def cell_with_logs(folder: Path, logs, **settings) -> Cell:
    cell = Cell(settings, len(list(folder.iterdir())), folder / f"c{len(list(folder.iterdir()))}")
    run = cell.folder / "run1"
    run.mkdir(parents=True)
    (run / "eval_results.json").write_text("{}")
    (run / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
    return cell


def test_a_log_over_the_steps(tmp_path, monkeypatch):
    found = drawn(monkeypatch)
    (tmp_path / "runs").mkdir()
    results = {}
    for batch, seed in ((8, 0), (8, 1), (16, 0)):
        logs = [{"step": step, "signal_to_noise": batch * step + seed} for step in (1, 2)]
        cell = cell_with_logs(
            tmp_path / "runs", [*logs, {"step": 2, "eval_loss": 1}], expected_batch_size=batch
        )
        results[cell] = {"metrics": {}}
    sweep_figures.plot_log(results, "signal_to_noise", str(tmp_path / "a.png"))
    assert found == [
        ([1, 2], [8.5, 16.5], "expected_batch_size=8"),
        ([1, 2], [16, 32], "expected_batch_size=16"),
    ]
    with pytest.raises(ConfigError, match=r"one of \['eval_loss', 'signal_to_noise'\], got 'loss'"):
        sweep_figures.plot_log(results, "loss", str(tmp_path / "b.png"))
    (next(iter(results)).folder / "run1" / "trainer_state.json").unlink()
    with pytest.raises(ConfigError, match="trainer_state.json"):
        sweep_figures.plot_log(results, "signal_to_noise", str(tmp_path / "b.png"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot-against", "parameters"], "Add --plot PATH"),
        (["--plot-log", "a", "--plot", "a.png", "--zero-shot"], "draw different figures"),
        (["--plot-metric", "a"], "Add --plot PATH"),
        (
            ["--plot-metric", "a", "--plot", "a.png", "--zero-shot"],
            "`--zero-shot` draws without it",
        ),
        (["--plot-beside", "a.csv"], "adds points to a figure. Add --plot PATH"),
        (
            ["--plot-beside", "a.csv", "--plot", "a.png", "--plot-log", "b"],
            "Leave `--plot-log` out",
        ),
        (["--plot-beside", "a.csv", "--plot", "a.png"], "to be a CSV file, got 'a.csv'"),
    ],
)
def test_options_of_figures_that_are_not_drawn(task, capsys, words, message):
    folder = str(task.parent / "s")
    assert main(["sweep", "--config", str(task), "--output-dir", folder, *words]) == 2
    assert message in capsys.readouterr().err


# -- curves and bars over the settings, and points beside them ---


def over_epsilon(folder: Path, **settings) -> dict[Cell, dict]:
    """Two recipes at two epsilons, two seeds."""
    return {
        Cell({"recipe": recipe, "target_epsilon": target, **settings}, seed, folder): {
            "metrics": {"accuracy": 0.5 + target / 100 + seed / 10 + (recipe == "lora") / 5}
        }
        for recipe in ("full", "lora")
        for target in (2, 8)
        for seed in (0, 1)
    }


def test_a_curve_for_each_recipe_and_the_points_of_a_paper_beside_them(tmp_path, monkeypatch):
    found = drawn(monkeypatch)
    file = tmp_path / "table2.csv"
    file.write_text("label,target_epsilon,accuracy\nfull,8,0.9\nfull,2,0.8\npval,2,0.7\n")
    results = over_epsilon(tmp_path)
    plot_sweep(results, "accuracy", str(tmp_path / "a.png"), str(file))
    assert found == [
        ([2, 8], pytest.approx([0.57, 0.63]), "full"),
        ([2, 8], pytest.approx([0.77, 0.83]), "lora"),
        ([2, 8], [0.8, 0.9], "table2: full"),
        ([2], [0.7], "table2: pval"),
    ]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    found.clear()
    plot_sweep(over_epsilon(tmp_path, peft="x"), "accuracy", str(tmp_path / "a.png"))
    assert [label for *_, label in found] == ["recipe=full peft=x", "recipe=lora peft=x"]


def test_points_beside_bars(tmp_path, monkeypatch):
    found = drawn(monkeypatch)
    file = tmp_path / "paper.csv"
    file.write_text("label,accuracy\nlora,0.8\nfull,0.6\n")
    results = {
        Cell({"recipe": recipe}, seed, tmp_path): {"metrics": {"accuracy": 0.5 + seed / 10}}
        for recipe in ("full", "lora")
        for seed in (0, 1)
    }
    plot_sweep(results, "accuracy", str(tmp_path / "a.png"), str(file))
    assert found == [([0.8, 0.6], [1, 0], "paper")]
    for rows in ("pval,0.7", "full,0.7\nfull,0.7"):
        file.write_text(f"label,accuracy\n{rows}\n")
        with pytest.raises(ConfigError, match=r"one of the bars \['full', 'lora'\], once, got"):
            plot_sweep(results, "accuracy", str(tmp_path / "a.png"), str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", r"columns \['label', 'target_epsilon', 'accuracy'\].*it has \[\] and lacks"),
        (b"label,epsilon,accuracy\nfull,2,0.8\n", r"lacks \['target_epsilon'\]"),
        (b"label,target_epsilon,accuracy\n", "has no points"),
        (b"label,target_epsilon,accuracy\nfull,2,86 %\n", "'accuracy' in line 2 .* got '86 %'"),
        (b"label,target_epsilon,accuracy\nfull,2\n", "'accuracy' in line 2 .* got None"),
        (b"label,target_epsilon,accuracy\nfull,nan,1\n", "'target_epsilon' in line 2 .* 'nan'"),
        (b"label,target_epsilon,accuracy\nfull\xff,2,1\n", "cannot read"),
    ],
)
def test_files_of_points_that_cannot_be_shown(tmp_path, text, message):
    file = tmp_path / "points.csv"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        read_points(str(file), "target_epsilon", "accuracy")
    with pytest.raises(ConfigError, match="cannot read"):
        read_points(str(tmp_path / "none.csv"), None, "accuracy")


def heat_map(folder: Path, values: dict[tuple[float, int], float], beside=None, monkeypatch=None):
    """Draw a heat map; return {(row, column): (text, color)} of its cells, and the axes' labels."""
    from matplotlib.axes import Axes

    cells, original = {}, Axes.text

    def noted(self, x, y, text, **options):
        cells[y, x] = (text, options["color"])
        return original(self, x, y, text, **options)

    monkeypatch.setattr(Axes, "text", noted)
    results = {
        Cell({"learning_rate": rate, "expected_batch_size": batch}, seed, folder): {
            "metrics": {"bleu": value + seed}
        }
        for (rate, batch), value in values.items()
        for seed in (-1, 1)
    }
    plot_sweep(results, "bleu", str(folder / "a.png"), beside)
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    return cells


def test_a_heat_map_can_be_read_in_its_bright_cells_too(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    values = {(1e-3, 8): 62.94, (1e-3, 16): 40, (5e-4, 8): 10}
    assert heat_map(tmp_path, values, monkeypatch=monkeypatch) == {
        (0, 0): ("10", "white"),
        (0, 1): ("", "black"),  # not run
        (1, 0): ("62.94", "black"),
        (1, 1): ("40", "black"),
    }


def test_the_values_of_a_paper_below_those_of_a_heat_map(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    file = tmp_path / "figure2.csv"
    file.write_text("expected_batch_size,learning_rate,bleu\n8,1e-3,61.5\n8,5e-4,20\n32,1e-3,70\n")
    values = {(1e-3, 8): 62.94, (5e-4, 8): 10}
    assert heat_map(tmp_path, values, str(file), monkeypatch) == {
        (0, 0): ("10\n(20)", "white"),
        (0, 1): ("", "black"),
        (1, 0): ("62.94\n(61.5)", "black"),
        (1, 1): ("(70)", "black"),  # the paper's alone
    }
    file.write_text(f"{file.read_text()}8,1e-3,1\n")
    with pytest.raises(ConfigError, match=r"once in .*figure2.csv', got \(0.001, 8.0\) twice"):
        heat_map(tmp_path, values, str(file), monkeypatch)
    file.write_text("learning_rate,bleu\n1e-3,1\n")
    with pytest.raises(ConfigError, match=r"lacks \['expected_batch_size'\]"):
        heat_map(tmp_path, values, str(file), monkeypatch)


def test_the_points_of_a_paper_over_the_size_of_models(tmp_path, monkeypatch):
    found = drawn(monkeypatch)
    file = tmp_path / "figure6.csv"
    file.write_text("label,parameters,accuracy\nbert,40,0.4\nbert,85,0.5\n")
    results = {
        Cell({"model_name_or_path": "a"}, 0, tmp_path): {
            "metrics": {"accuracy": 0.3},
            "size": ModelSize(0, 40 * 10**6, "bert"),
        }
    }
    sweep_figures.plot_against(
        results, "accuracy", "parameters", str(tmp_path / "a.png"), str(file)
    )
    assert found == [([40], [0.3], "bert"), ([40, 85], [0.4, 0.5], "figure6: bert")]


def test_signal_to_noise_is_shown_only_where_it_is_asked_for(tmp_path):
    names = {"signal_to_noise": 1e-3, "validation_matched_accuracy": 0.8}
    results = {Cell({}, 0, tmp_path): {"metrics": names}}
    assert sweep_figures.metric_of(results, None) == "validation_matched_accuracy"
    assert sweep_figures.metric_of(results, "signal_to_noise") == "signal_to_noise"


# -- which combination is the best ---


def test_the_best_combination_by_the_mean_over_its_seeds(tmp_path):
    given = {1: (0.2, 0.9), 2: (0.6, 0.6), 3: (0.1, float("nan"))}
    results = {
        Cell({"learning_rate": rate}, seed, tmp_path): {
            "metrics": {"bleu": value, "perplexity": value}
        }
        for rate, values in given.items()
        for seed, value in enumerate(values)
    }
    assert best(results, "bleu") == "best by bleu: learning_rate=2: 0.6000"
    assert best(results, "perplexity") == "best by perplexity: learning_rate=1: 0.5500"
    with pytest.raises(ConfigError, match=r"`--best` to be one of \['bleu', 'perplexity'\]"):
        best(results, "accuracy")


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


def test_a_sweep_over_models_without_and_with_privacy(task, capsys, monkeypatch):
    """In this process, where hf_dp is imported already."""

    def run(command, stdout, env, **options):
        words = command[command.index("hf_dp.cli.main") + 1 :]
        monkeypatch.setenv(VARIABLE, env[VARIABLE])
        code = main(words)
        monkeypatch.delenv(VARIABLE)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(cell_runs.subprocess, "run", run)
    found = drawn(monkeypatch)
    other = task.parent / "larger"
    tiny.model(num_labels=2).save_pretrained(other)
    tiny.tokenizer().save_pretrained(other)
    words = ["sweep", "--config", str(task), "--output-dir", str(task.parent / "s")]
    words += ["--grid", "privacy_mode=dp_sgd,non_private", "target_epsilon=3,8"]
    words += [f"model_name_or_path={task.parent / 'model'},{other}", "--set", "logging_steps=1"]
    picture = str(task.parent / "a.png")
    assert main([*words, "--plot", picture, "--plot-against", "parameters"]) == 0
    said = capsys.readouterr().out
    assert len(found) == 3  # epsilon 3, epsilon 8, without privacy
    assert all(len(x) == 1 for x, _, _ in found)  # both models are equally large
    rows = re.findall(r"; training [\d.]+ s \(processor [\d.]+ s\)", said)
    assert len(rows) == 6 and "epsilon does not cover them" in said
    assert "all 4 private runs together" in said
    run_folders = [path.parent for path in (task.parent / "s").glob("*/run1/config.json")]
    assert len(run_folders) == 6
    for folder in run_folders:
        times = json.loads((folder.parent / "times.json").read_text())
        assert times["training"]["wall"] > 0 and times["training"]["processor"] > 0
        assert not any("times" in path.name for path in folder.iterdir())
    assert VARIABLE not in os.environ
