"""``hf-dp bench`` as a user calls it."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
import tiny
from quick import run_quickly

from hf_dp.benchmarks import memory
from hf_dp.benchmarks.shapes import SHAPES
from hf_dp.cli.main import main
from hf_dp.clipping.engine import STRATEGIES

SPEED = [
    "bench",
    "throughput",
    "--model",
    "tiny",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--rounds",
    "3",
    "--repeats",
    "1",
]
MEMORY = ["bench", "memory", "--model", "tiny", "--device", "cpu", "--threads", "1"]
TRAINING = [
    "bench",
    "training",
    "--train-file",
    "no.csv",
    "--model",
    "tiny",
    "--device",
    "cpu",
    "--threads",
    "1",
]


COMMON = (
    "default: fp32",
    "example",
    "--gradient-checkpointing",
    *SHAPES,
    STRATEGIES[0],
    "opacus_ghost",
)


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("throughput", COMMON),
        ("memory", COMMON),
        ("throughput", ("--processes", "fsdp2", "--physical-batches")),
        ("scale", ("predictions", "--bandwidth", "default: 2.5e+10", *SHAPES)),
        (
            "training",
            ("example", "default: 1024", "--train-file", "stock_by_length", "ours_by_tokens"),
        ),
    ],
)
def test_help_is_quick_and_complete(command, texts):
    code = (
        "import sys; from hf_dp.cli.main import main\n"
        "try: main()\nfinally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = run_quickly("-c", code, "bench", command, "--help")
    assert done.returncode == 0, done.stderr
    unbroken = re.sub(r"-\n +", "-", done.stdout)
    for text in texts:
        assert text in unbroken


def test_throughput_end_to_end(tmp_path, capsys):
    path = tmp_path / "speed.json"
    assert (
        main(
            [*SPEED, "--batch_size", "2", "--length=8", "--precision", "bf16", "--json", str(path)]
        )
        == 0
    )
    report = json.loads(path.read_text())
    assert (report["workload"]["batch_size"], report["workload"]["length"]) == (2, 8)
    assert set(report["modes"]) == {"non_private", "book_keeping"}
    assert len(report["runs"][0]) == 3
    output = capsys.readouterr()
    assert "bf16" in output.out and "book_keeping" in output.out
    assert "round 3 of 3" in output.err


@pytest.mark.slow
def test_memory_end_to_end(tmp_path, capsys):
    path = tmp_path / "memory.json"
    assert (
        main(
            [
                *MEMORY,
                "--modes",
                "non_private",
                "--gradient_checkpointing",
                "--steps",
                "2",
                "--json",
                str(path),
            ]
        )
        == 0
    )
    report = json.loads(path.read_text())
    assert report["modes"]["non_private"]["mebibytes"] > 0
    assert report["workload"]["gradient_checkpointing"] is True
    assert "MiB" in capsys.readouterr().out


def test_training_end_to_end(tmp_path, capsys):
    rows = [f"{row['sentence']},{row['label']}" for row in tiny.rows(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,class", *rows]))
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    words = [
        "bench",
        "training",
        "--train_file",
        str(tmp_path / "rows.csv"),
        "--model",
        str(tmp_path / "model"),
    ]
    words += [
        "--text-columns",
        "text",
        "--label-column",
        "class",
        "--class-names",
        "bad, good",
        "--rows=20",
    ]
    words += [
        "--logical-batch-size",
        "8",
        "--physical-batch-size",
        "4",
        "--rounds",
        "1",
        "--max-length",
        "8",
    ]
    words += ["--modes", "stock,ours"]
    path = tmp_path / "training.json"
    assert main([*words, "--device", "cpu", "--threads", "1", "--json", str(path)]) == 0
    text = path.read_text()
    report = json.loads(text)
    assert str(tmp_path) not in text
    assert list(report["modes"]) == ["stock", "ours"]
    assert report["runs"]["stock"][0]["examples"] == 24
    assert report["workload"]["steps"] == 3
    output = capsys.readouterr()
    assert "ours/stock" in output.out
    assert "round 1 of 1" in output.err


def test_all_modes_that_are_installed(monkeypatch, tmp_path, capsys):
    def run(workload, mode, steps):
        return {"bytes": 2**20, "measured": "invented", "note": ""}

    monkeypatch.setattr(memory.measure_memory, "__defaults__", (1, 3, run, lambda line: None))
    assert main([*MEMORY, "--modes", "all"]) == 0
    output = capsys.readouterr().out
    opacus = importlib.util.find_spec("opacus") is not None
    assert [name in output for name in (*STRATEGIES, "opacus_ghost")] == [True] * len(
        STRATEGIES
    ) + [opacus]


def test_both_bars_in_one_figure(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")

    def run(workload, mode, steps):
        return {"bytes": 2**20, "measured": "invented", "note": ""}

    monkeypatch.setattr(memory.measure_memory, "__defaults__", (1, 3, run, lambda line: None))
    report, one, both = tmp_path / "memory.json", tmp_path / "one.png", tmp_path / "both.png"
    assert main([*MEMORY, "--json", str(report), "--plot", str(one)]) == 0
    assert main([*SPEED, "--plot", str(both), "--beside", str(report)]) == 0
    from PIL import Image

    widths = [Image.open(path).size[0] for path in (one, both)]
    assert widths[1] == 2 * widths[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SPEED[:3], "tinny"], "Did you mean 'tiny'"),
        ([*SPEED, "--modes", "non_private,ghost"], "`modes`"),
        ([*SPEED, "--max-batch"], "`max_batch`"),
        ([*SPEED, "--precision", "fp64"], "`precision`"),
        ([*SPEED, "--rounds", "2"], "`rounds`"),
        ([*SPEED, "--json", "no/such/folder/x.json"], "`json`.*folder"),
        ([*SPEED, "--beside", "x.json"], "`beside`.*--plot"),
        ([*SPEED, "--processes", "0"], "`processes`"),
        ([*SPEED, "--processes", "2", "--modes", "dp_fp"], "`modes`"),
        ([*SPEED, "--processes", "2", "--plot", "x.png"], "`processes`.*--plot"),
        (["bench", "scale", "--model", "tiny", "--latency", "0"], "`latency`"),
        ([*MEMORY, "--steps", "1"], "`steps`"),
        ([*TRAINING, "--modes", "stock,our"], "`modes`.*'ours'"),
        ([*TRAINING, "--logical-batch-size", "1000"], "multiple of `physical_batch_size`"),
        ([*TRAINING, "--json", "no/such/folder/x.json"], "`json`.*folder"),
    ],
)
def test_wrong_arguments_are_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("hf-dp bench: Expected")
    assert "\n" not in error
    assert re.search(message, error)


def test_a_figure_of_different_work_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_dp._plotting.require_matplotlib", lambda path: None)
    report = tmp_path / "memory.json"
    plot = ["--plot", str(tmp_path / "x.png"), "--beside", str(report)]
    other = {"model": "gpt2", "length": 12, "precision": "fp32", "device": "cpu"}
    report.write_text(json.dumps({"benchmark": "memory", "workload": other}))
    assert main([*SPEED, *plot]) == 2
    assert "another model" in capsys.readouterr().err
    report.write_text(
        json.dumps({"benchmark": "throughput", "workload": {**other, "model": "tiny"}})
    )
    assert main([*SPEED, *plot]) == 2
    assert "other command" in capsys.readouterr().err
    report.write_text("[]")
    assert main([*SPEED, *plot]) == 2
    assert "Measure it first" in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*SPEED, "--plot", "x.png"]) == 2
    assert "pip install hf-dp[plot]" in capsys.readouterr().err
