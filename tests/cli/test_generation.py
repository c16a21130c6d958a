"""``hf-dp train`` and ``hf-dp eval`` of the tasks that write, on the built-in tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_text
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from hf_dp.cli.main import main


@pytest.fixture
def task(tmp_path, monkeypatch) -> Path:
    """A configuration of a tiny GPT-2 on the built-in tables."""
    monkeypatch.setattr(
        "hf_dp.tasks.generation.demo_tables.demo_tables", lambda *_: tiny_text.tables()
    )
    values = {
        "task": "causal_lm",
        "model_name_or_path": tiny_text.saved(tmp_path / "model", tiny_text.gpt2()),
        "dataset_name": "demo",
        "data_format": "e2e",
        "max_length": 150,
        "metrics": ["bleu", "rougeL"],
        "output_dir": str(tmp_path / "out"),
        "target_epsilon": 8,
        "accountant": "rdp",
        "expected_batch_size": 8,
        "max_steps": 2,
        "learning_rate": "1e-2",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "decoding": "greedy",
        "max_new_tokens": 8,
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    return config


def test_train_writes_scores_texts_and_a_card(task, capsys):
    assert main(["train", "--config", str(task)]) == 0
    out = task.parent / "out"
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1] == str(out)
    metrics = json.loads((out / "eval_results.json").read_text())
    assert {"eval_bleu", "eval_rougeL", "eval_perplexity"} <= metrics.keys()
    assert f"perplexity on the 12 evaluation rows: {metrics['eval_perplexity']:.4f}" in lines
    written = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
    assert len(written) == len({row["prompt"] for row in written})
    assert written[0]["references"][0] == tiny_text.tables()["validation"][0]["human_reference"]
    assert "bleu" in (out / "README.md").read_text().lower()
    assert json.loads((out / "privacy.json").read_text())["statement"]["status"] == "proven"


def test_eval_finds_what_train_found_and_generate_and_pipeline_write_the_same(task, capsys):
    assert main(["train", "--config", str(task)]) == 0
    out = task.parent / "out"
    trained = json.loads((out / "eval_results.json").read_text())
    capsys.readouterr()
    assert main(["eval", "--config", str(task), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    for name, value in found.items():
        assert value == pytest.approx(trained[name], rel=1e-6), name

    first = json.loads((out / "generations.jsonl").read_text().splitlines()[0])
    words = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = words(first["prompt"], return_tensors="pt")
    text = words.decode(model.generate(**ids, max_new_tokens=8)[0][ids["input_ids"].shape[1] :])
    assert text.replace(words.eos_token, "").strip() == first["text"]
    (piped,) = pipeline("text-generation", model=str(out), device="cpu")(
        first["prompt"], max_new_tokens=8, return_full_text=False, do_sample=False
    )
    assert piped["generated_text"].strip() == first["text"]


def test_zero_shot_evaluates_the_base(task, capsys):
    assert main(["eval", "--config", str(task), "--zero-shot", "--json"]) == 0
    assert "eval_bleu" in json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert not (task.parent / "out").exists()
    words = ["--zero-shot", "--from_scratch", "True"]
    assert main(["eval", "--config", str(task), *words]) == 2
    assert "from_scratch" in capsys.readouterr().err


def test_seq2seq_trains_and_writes(task, capsys):
    folder = tiny_text.saved(task.parent / "t5", tiny_text.t5())
    words = ["--task", "seq2seq", "--model_name_or_path", folder, "--metrics", "rougeL"]
    assert main(["train", "--config", str(task), *words]) == 0
    metrics = json.loads((task.parent / "out" / "eval_results.json").read_text())
    assert {"eval_rougeL", "eval_perplexity"} <= metrics.keys()


def test_without_metrics_nothing_is_decoded(task, capsys):
    values = yaml.safe_load(task.read_text()) | {"metrics": []}
    task.write_text(yaml.safe_dump(values))
    assert main(["train", "--config", str(task)]) == 0
    assert not (task.parent / "out" / "generations.jsonl").exists()
    assert "perplexity on the" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--privacy_mode", "dp_fp", "--dp_fp_variant", "frozen"], "has one for each token"),
        (["--data_format", "pairs"], "prompt_column"),
        (["--data_format", "messages"], "chat template"),
        (["--data_format", "poem"], "data_format"),
        (["--max_length", "20"], "Row 0 has a prompt"),
        (["--max_length", "500"], "max_length"),
        (["--metrics", "blue"], "metrics"),
    ],
)
def test_what_cannot_be_done_is_named_before_anything_is_written(task, capsys, words, message):
    assert main(["train", "--config", str(task), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (task.parent / "out").exists()
