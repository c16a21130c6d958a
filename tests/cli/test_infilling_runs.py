"""Infilling from the command line: train, evaluate before and after, sweep, pretrain a base; data
from a local hub folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
import yaml
from families import SENTENCES, bert
from warm import run_program

from hf_dp.accounting import epsilon
from hf_dp.cli.main import main
from hf_dp.statement import record as document

ROWS = [{"sentence": sentence, "label": index % 2} for index, sentence in enumerate(SENTENCES * 6)]
HELD_OUT = [
    {"sentence": f"{row['sentence']} {row['sentence']}", "label": row["label"]} for row in ROWS
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    config = hf.BertConfig(
        vocab_size=len(bert()), max_position_embeddings=48, pad_token_id=0, **small
    )
    config.pretraining_sources = ["sst"]
    hf.BertForMaskedLM(config).save_pretrained(folder)
    bert().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(base, tmp_path) -> Path:
    """A configuration that reads a folder laid out like a data set on the Hub, with two evaluation
    splits."""
    hub = tmp_path / "hub"
    (hub / "tiny").mkdir(parents=True)
    for split, rows in (
        ("train", ROWS),
        ("validation_matched", HELD_OUT[:10]),
        ("validation_mismatched", HELD_OUT[:7]),
    ):
        (hub / "tiny" / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    splits = [
        {"split": split, "path": f"tiny/{split}.jsonl"}
        for split in ("train", "validation_matched", "validation_mismatched")
    ]
    header = {"configs": [{"config_name": "sst2", "data_files": splits}]}
    (hub / "README.md").write_text(f"---\n{yaml.safe_dump(header)}---\n")
    values = {
        "model_name_or_path": str(base), "infilling": "sst2", "dataset_name": str(hub), "dataset_config": "sst2",
        "validation_split": ["validation_matched", "validation_mismatched"], "class_names": ["negative", "positive"],
        "metrics": ["accuracy", "f1"], "max_length": 24, "output_dir": str(tmp_path / "out"), "noise_multiplier": 1.0,
        "expected_batch_size": 8, "max_steps": 2, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def changed(recipe: Path, **values) -> str:
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | values))
    return str(recipe)


def train(recipe: Path, **values) -> int:
    return main(["train", "--config", changed(recipe, **values)])


def printed_metrics(text: str) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in re.findall(r"^(\w+ on the .*): ([\d.]+)$", text, re.MULTILINE)
    }


def test_train_then_evaluate(recipe, capsys):
    """One block of YAML; two evaluation splits by name; the evaluation command gives what training
    printed."""
    assert train(recipe) == 0
    trained = printed_metrics(capsys.readouterr().out)
    assert set(trained) == {
        f"{metric} on the {rows} evaluation rows"
        for metric in ("accuracy", "f1")
        for rows in ("10 matched", "7 mismatched")
    }
    assert main(["eval", "--config", str(recipe), "--use_cpu", "True"]) == 0
    assert printed_metrics(capsys.readouterr().out) == trained
    out = recipe.parent / "out"
    saved = json.loads((out / "eval_results.json").read_text())
    assert saved["eval_matched_accuracy"] == pytest.approx(
        trained["accuracy on the 10 matched evaluation rows"], abs=1e-4
    )
    card = (out / "README.md").read_text()
    assert "pretrained on sst, the same text as the training data" in card
    assert "| Pretraining data, as far as listed | sst |" in card


def test_zero_shot_is_the_base_itself(recipe, base, capsys):
    from hf_dp.tasks.infilling import load_infilling
    from hf_dp.tasks.templates import GLUE

    assert main(["eval", "--config", str(recipe), "--zero-shot", "--use_cpu", "True"]) == 0
    found = printed_metrics(capsys.readouterr().out)
    model, tokenizer = load_infilling(str(base), bert(), GLUE["sst2"], ["negative", "positive"])
    texts, labels = (
        [row["sentence"] for row in HELD_OUT[:10]],
        torch.tensor([row["label"] for row in HELD_OUT[:10]]),
    )
    with torch.no_grad():
        right = (
            model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits.argmax(1)
            == labels
        )
    assert found["accuracy on the 10 matched evaluation rows"] == pytest.approx(
        float(right.float().mean()), abs=1e-4
    )
    assert not (recipe.parent / "out").exists()


def test_own_template_and_words(recipe, capsys):
    block = {
        "template": "<S1> Was it good ? [MASK] .",
        "label_words": {"negative": "No", "positive": "Yes"},
    }
    assert train(recipe, infilling=block) == 0
    config = json.loads((recipe.parent / "out" / "config.json").read_text())
    assert (config["template"], config["label_words"]) == (block["template"], ["No", "Yes"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"infilling": {"template": "<S1> It was .", "label_words": {"negative": "a", "positive": "b"}}}, "exactly once"),
        ({"infilling": "mnli"}, "takes 2 text column.s., but `text_columns` names"),
        ({"infilling": "imdb"}, "`infilling` to be one of"),
        ({"class_names": ["bad", "good"]}, "no word for .'bad', 'good'."),
        ({"class_names": ["negative", "positive", "neutral"]}, "no word for .'neutral'."),
        ({"dataset_config": "mnli"}, "'mnli'. could not be loaded"),
        ({"validation_split": ["test"]}, "The split 'test' .* could not be loaded"),
        ({"label_column": "answer"}, "`label_column` names .'answer'."),
        ({"max_length": 6}, "`max_length` to be above 6"),
        ({"max_length": 49}, "`max_length` to be no more tokens than the model has positions"),
        ({"max_length": 12.5}, "--max_length/--max-length: invalid int value: '12.5'"),
        ({"model_name_or_path": "package:json"}, "'json' carries no model"),
        ({"validation_split": ["train[:20]"]}, "the evaluation set holds rows equal to training rows.*Pass a held-out set"),
        ({"validation_split": ["validation_matched+train"]}, "the evaluation set holds rows equal to training rows"),
        ({"freeze": ["masked_lm"]}, "no trainable parameter"),
        ({"peft": "lora"}, "`peft` to be a block"),
        ({"peft": {"peft_type": "lora", "r": 4}}, "peft cannot apply `peft_config`"),
        ({"peft": {"peft_type": "lora", "target_modules": ["nothing"]}}, "peft cannot apply `peft_config`"),
    ],
)  # fmt: skip
def test_bad_input(recipe, capsys, change, message):
    assert train(recipe, **change) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (recipe.parent / "out").exists()


def test_a_label_outside_the_map(recipe, capsys):
    with open(recipe.parent / "hub" / "tiny" / "train.jsonl", "a") as file:
        file.write(json.dumps({"sentence": "it was good", "label": 2}) + "\n")
    assert train(recipe) == 2
    assert "a value outside the classes ['negative', 'positive']" in capsys.readouterr().err


def test_an_evaluation_file_that_is_a_copy_of_the_training_file(recipe, capsys, refused):
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name in ("train.jsonl", "copy.jsonl"):
        (recipe.parent / name).write_text(rows)
    files = {
        "train_file": str(recipe.parent / "train.jsonl"),
        "validation_file": str(recipe.parent / "copy.jsonl"),
    }
    values = {
        k: v
        for k, v in yaml.safe_load(recipe.read_text()).items()
        if not k.startswith(("dataset", "validation"))
    }
    recipe.write_text(yaml.safe_dump({**values, **files, "max_train_rows": 41}))
    assert train(recipe) == 2
    assert "the evaluation set holds rows equal to training rows" in capsys.readouterr().err
    refused(["train", "--config", str(recipe), "--nope", "1"], "`nope`")


ADAPTERS = (
    {"peft_type": "lora", "r": 2, "target_modules": ["query"]},
    {"peft_type": "frost", "unfreeze_ratio": 0.5, "selection_noise_multiplier": 1.0},
    {"peft_type": "adapter", "bottleneck_size": 2, "target_modules": ["output.dense"]},
    {"peft_type": "pval"},
)


@pytest.mark.parametrize(
    ("peft", "infilling"), zip(ADAPTERS, ("sst2", None, None, "sst2"), strict=True)
)
def test_what_was_chosen_to_train_is_evaluated(recipe, capsys, peft, infilling):
    config = changed(recipe, infilling=infilling, peft=peft)
    assert main(["train", "--config", config]) == 0
    trained = printed_metrics(capsys.readouterr().out)
    assert main(["eval", "--config", config]) == 0
    assert printed_metrics(capsys.readouterr().out) == trained


@pytest.mark.parametrize("infilling", ["sst2", None])
def test_an_adapter_is_evaluated_by_the_classes_of_its_training(recipe, refused, infilling):
    peft = {"peft_type": "lora", "r": 2, "target_modules": ["query"]}
    config = changed(recipe, infilling=infilling, peft=peft)
    assert main(["train", "--config", config]) == 0
    refused(
        ["eval", "--config", config, "--class_names", "positive", "negative"],
        "has the classes ['negative', 'positive'], and",
    )


def test_random_weights_that_an_adapter_would_not_hold_are_named(recipe, caplog):
    peft = {"peft_type": "lora", "r": 2, "target_modules": ["query"]}
    assert train(recipe, infilling=None, peft=peft) == 0
    (said,) = [
        each.getMessage()
        for each in caplog.records
        if "The checkpoint of the base has no" in each.message
    ]
    assert "bert.pooler.dense.weight" in said and "classifier" not in said
    assert "model.save_pretrained" in said


def test_from_scratch_has_no_base(recipe, capsys):
    config = changed(recipe, infilling=None, from_scratch=True)
    assert main(["train", "--config", config]) == 0
    card = (recipe.parent / "out" / "README.md").read_text()
    assert "Base model" not in card and "base_model" not in card
    for change, message in (
        ({"infilling": "sst2"}, "know no words"),
        ({"peft": {"peft_type": "head"}}, "`from_scratch`"),
    ):
        assert train(recipe, **({"infilling": None} | change)) == 2
        assert message in capsys.readouterr().err


def test_bad_evaluations(recipe, refused):
    refused(["eval", "--config", str(recipe)], "could not be loaded")
    refused(
        ["eval", "--config", changed(recipe, infilling=None), "--zero-shot"],
        "--zero-shot needs `infilling`",
    )
    refused(["eval", "--config", changed(recipe, max_lenght=3)], "did you mean `max_length`")


class Forked:
    """``subprocess`` for a sweep whose runs need not wait for torch to be imported."""

    STDOUT = subprocess.STDOUT

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, command: list[str], stdout, stderr, env) -> subprocess.CompletedProcess[str]:
        assert command[:2] == [sys.executable, "-m"] and stderr == self.STDOUT
        code = (
            f"import runpy; runpy.run_module({command[2]!r}, run_name='__main__', alter_sys=True)"
        )
        done = run_program(code, self.folder, command[3:])
        stdout.write(done.stdout + done.stderr)
        return done


def sweep(recipe: Path, *words: str, folder: str = "sweep") -> int:
    where = ["--output-dir", str(recipe.parent / folder)]
    return main(["sweep", "--config", str(recipe), *where, *words])


@pytest.mark.slow
def test_a_sweep_is_resumed_and_adds_up(recipe, capsys, tmp_path, monkeypatch):
    """(Its processes are started as they are in test_a_sweep_says_which_runs_failed.)"""
    monkeypatch.setattr("hf_dp.cli.cells.subprocess", Forked(tmp_path))
    folder = recipe.parent / "sweep"
    words = ["--set", "max_steps=1", "--grid", "infilling=sst2,null"]

    def spent(pattern: str) -> str:
        records = [document.read(path) for path in sorted(folder.glob(pattern))]
        events = [event for record in records for event in record.ledger.events]
        together = epsilon(events, records[0].plan.delta, "rdp").rounded_up()
        return f"all {len(records)} private runs together: epsilon {together}"

    assert sweep(recipe, *words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^infilling=sst2: .*matched_accuracy 0\.\d{4}; .*epsilon \d", out, re.M)
    assert re.search(r"^infilling=None: ", out, re.M) and spent("*/run1") in out
    times = [path.stat().st_mtime_ns for path in sorted(folder.glob("*/log.txt"))]
    assert sweep(recipe, *words) == 0
    assert capsys.readouterr().out == out
    again = [path.stat().st_mtime_ns for path in sorted(folder.glob("*/log.txt"))]
    assert again == times, "nothing ran again"
    # An interrupted run starts again in a folder of its own, and what it had spent counts.
    next(folder.glob("*/run1/eval_results.json")).unlink()
    assert sweep(recipe, *words) == 0
    assert spent("*/run*") in capsys.readouterr().out and len(list(folder.glob("*/run*"))) == 3
    assert sweep(recipe, "--grid", "peft.r=1", folder="sweep2") == 2
    assert "Expected the key 'peft.r' to be inside a block of the recipe" in capsys.readouterr().err
    changed(recipe, learning_rate=0.5)
    assert sweep(recipe, *words) == 2
    assert "was run with other values of ['learning_rate']" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_says_which_runs_failed(recipe, capsys):
    assert sweep(recipe, "--grid", "infilling=imdb") == 1
    assert "failed: infilling=imdb seed=0; see" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "infilling"], "KEY=A,B), got 'infilling'"),
        (["--grid", "seed=1,2"], "`seed` is the sweep's own: use --seeds"),
        (["--set", "output_dir=x"], "`output_dir` is the sweep's own"),
        (["--grid", "max_steps=1,1"], "values of max_steps to be different"),
        (["--seeds", "0", "0"], "values of --seeds to be different"),
        (["--set", "a=[1"], "is no plain YAML value"),
        (["--grid", "learning_rate=2020-01-01"], "is no plain YAML value"),
    ],
)
def test_bad_words_of_a_sweep(recipe, capsys, words, message):
    assert sweep(recipe, *words) == 2
    assert message in capsys.readouterr().err


def test_a_file_is_no_folder_of_a_sweep(recipe, capsys):
    assert sweep(recipe, folder=recipe.name) == 2
    assert "is a file" in capsys.readouterr().err


def test_pretraining_gives_a_base_its_head(base, tmp_path, capsys, refused):
    """From an encoder without a masked-LM head to a base that infilling accepts; sources are
    listed."""
    hf.BertModel.from_pretrained(base).save_pretrained(tmp_path / "encoder")
    bert().save_pretrained(tmp_path / "encoder")
    (tmp_path / "text.jsonl").write_text(
        "".join(
            json.dumps({"nested": [{"text": f"{n} {s}"}]}) + "\n"
            for n, s in enumerate(SENTENCES * 5)
        )
    )
    values = {
        "task": "masked_lm", "model_name_or_path": str(tmp_path / "encoder"), "text_columns": ["nested.text"],
        "pretraining_sources": ["here"], "held_out": 0.2, "output_dir": str(tmp_path / "out"), "max_steps": 20,
        "eval_strategy": "steps", "eval_steps": 5, "learning_rate": "1e-2", "save_strategy": "no", "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "smallest_gain": -1,
    }  # fmt: skip
    config = tmp_path / "pretraining.yaml"
    config.write_text(yaml.safe_dump(values))
    assert (
        main(["train", "--config", str(config), "--text_files", str(tmp_path / "text.jsonl")]) == 0
    )
    assert "stopped: all steps were taken" in capsys.readouterr().out
    saved = json.loads((tmp_path / "out" / "pretraining.json").read_text())
    assert len(saved["held_out_accuracy"]) == 5
    assert saved["held_out_accuracy"][-1] > saved["held_out_accuracy"][0]
    model, info = hf.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert model.config.pretraining_sources == ["sst", "here"]
    text = ["--text_files", str(tmp_path / "text.jsonl"), "--text_columns", "x"]
    refused(["train", "--config", str(config), *text], "none of ['x']")


@pytest.mark.slow
def test_a_sweep_over_label_words_beside_their_zero_shot_accuracy(recipe, capsys):
    """Figure 8 of Li et al. in small: a point for each choice of words; the zero-shot accuracy is
    `hf-dp eval`'s."""
    words = "{negative: terrible, positive: great}"
    grid = f"infilling={{template: '<S1> It was [MASK] .', label_words: {words}}}"
    assert sweep(recipe, "--set", "max_steps=1", "--grid", grid, "--zero-shot") == 0
    out = capsys.readouterr().out
    found = re.search(r"=terrible/great in .*zero-shot matched_accuracy (\d\.\d{4})", out)[1]
    assert main(["eval", "--config", str(recipe), "--zero-shot", "--json"]) == 0
    zero_shot = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert float(found) == pytest.approx(zero_shot["eval_matched_accuracy"], abs=1e-4)
