"""``hf-dp train`` and ``hf-dp eval`` of the tasks that write, on the built-in tables."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
import tiny_text
import torch
import yaml
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    pipeline,
)

from hf_dp.cli.config import read_yaml
from hf_dp.cli.main import main
from hf_dp.tasks.generation.language_models import load_language_model
from hf_dp.tasks.models import StartArguments

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def task(of_tables) -> Path:
    return of_tables(
        60,
        metrics=["bleu", "rougeL"],
        target_epsilon=8,
        expected_batch_size=8,
        decoding="greedy",
        max_new_tokens=8,
    )


def change(task: Path, **values) -> None:
    merged = yaml.safe_load(task.read_text()) | values
    task.write_text(yaml.safe_dump({k: v for k, v in merged.items() if v is not None}))


def pairs(task: Path, rows: list[dict], dev: list[dict]) -> None:
    """Let the configuration read these rows of prompts and answers."""
    files = {}
    for name, part in (("train", rows), ("validation", dev)):
        files[f"{name}_file"] = str(task.parent / f"{name}.jsonl")
        Path(files[f"{name}_file"]).write_text("".join(json.dumps(row) + "\n" for row in part))
    columns = {"data_format": "pairs", "prompt_column": "q", "target_column": "r"}
    change(task, dataset_name=None, metrics=[], **columns, **files)


def plan_of(task: Path) -> dict:
    return json.loads((task.parent / "out" / "privacy.json").read_text())["plan"]


THAI = [{"q": "food", "r": ["Thai food"]}]


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


def test_what_was_trained_is_kept_when_scoring_fails(task, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no Java")

    monkeypatch.setattr("hf_dp.tasks.generation.evaluation.score", fail)
    with pytest.raises(OSError, match="no Java"):
        main(["train", "--config", str(task)])
    assert {"model.safetensors", "README.md", "privacy.json"} <= {
        path.name for path in (task.parent / "out").iterdir()
    }


def test_a_blank_reference_is_found_before_training(task, refused):
    blank = task.parent / "blank.parquet"
    rows = [*tiny_text.tables()["validation"], {"meaning_representation": "food[Thai]"}]
    datasets.Dataset.from_list([{"human_reference": " ", **row} for row in rows]).to_parquet(blank)
    tiny_text.tables()["train"].to_parquet(task.parent / "train.parquet")
    files = {"train_file": str(task.parent / "train.parquet"), "validation_file": [str(blank)]}
    change(task, dataset_name=None, **files)
    refused(["train", "--config", str(task)], "'blank' has a blank target")
    assert not (task.parent / "out").exists()
    change(task, metrics=[])
    assert main(["train", "--config", str(task)]) == 0


def test_a_model_stops_at_the_end_token_that_it_is_trained_to_write(task):
    """Its own configuration names another one, as that of a base whose tokenizer was changed."""
    base = tiny_text.gpt2()
    base.config.eos_token_id = base.generation_config.eos_token_id = 7
    name = tiny_text.saved(task.parent / "other_end", base)
    arguments = StartArguments(name)
    model, words = load_language_model(arguments, "causal_lm")
    assert set(model.generation_config.eos_token_id) == {7, words.eos_token_id}

    class Always(torch.nn.Module):
        def forward(self, hidden):
            scores = torch.zeros(*hidden.shape[:-1], len(words))
            scores[..., words.eos_token_id] = 1.0
            return scores

    model.lm_head = Always()
    found = model.generate(torch.tensor([[3, 4]]), max_new_tokens=9, do_sample=False)
    assert found.tolist() == [[3, 4, words.eos_token_id]]


def test_zero_shot_evaluates_the_base(task, capsys, refused):
    assert main(["eval", "--config", str(task), "--zero-shot", "--json"]) == 0
    assert "eval_bleu" in json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert not (task.parent / "out").exists()
    words = ["--zero-shot", "--from_scratch", "True"]
    refused(["eval", "--config", str(task), *words], "from_scratch")


def test_seq2seq_trains_and_writes(task, capsys):
    folder = tiny_text.saved(task.parent / "t5", tiny_text.t5())
    words = ["--task", "seq2seq", "--model_name_or_path", folder, "--metrics", "rougeL"]
    assert main(["train", "--config", str(task), *words]) == 0
    metrics = json.loads((task.parent / "out" / "eval_results.json").read_text())
    assert {"eval_rougeL", "eval_perplexity"} <= metrics.keys()


@pytest.mark.parametrize("method", ["full", "lora", "prefix", "rgp", "top2", "retrain"])
def test_every_method_of_the_table_trains_and_writes_as_its_recipe_says(method, task, capsys):
    """With the `peft` block of the recipe; sizes are those of the tiny model."""
    recipe = read_yaml(str(ROOT / f"recipes/e2e/gpt2_{method}_eps8.yaml"))
    values = yaml.safe_load(task.read_text()) | {"metrics": [], "max_steps": 1}
    values |= {key: recipe[key] for key in ("peft", "from_scratch") if key in recipe}
    if method == "top2":
        values["peft"]["blocks"] = 1  # of two
    if method == "rgp":
        values["peft"]["rank"] = 2
    task.write_text(yaml.safe_dump(values))
    assert main(["train", "--config", str(task)]) == 0
    statement = json.loads((task.parent / "out" / "privacy.json").read_text())["statement"]
    assert statement["status"] == "proven"
    words = ["--metrics", "rougeL", "--max_decoded", "2"]
    assert main(["eval", "--config", str(task), *words]) == 0
    assert "rougeL on 2 different prompts of the 12 evaluation rows" in capsys.readouterr().out


@pytest.mark.parametrize("several", [True, False])
def test_a_row_with_several_references_is_not_the_unit(several, task):
    references = ["b", "c"] if several else ["b"]
    pairs(task, [{"q": f"a {i}", "r": references} for i in range(20)], THAI)
    assert main(["train", "--config", str(task)]) == 0
    plan = plan_of(task)
    assert plan["rows_are_chunks"] is several
    assert plan["num_examples"] == (40 if several else 20)


def test_several_references_train_without_privacy(task):
    """There a row need not be the unit, and the argument that says so is not the user's."""
    row = {"q": "a", "r": ["b", "c"]}
    pairs(task, [row], [row])
    private = dict.fromkeys(("target_epsilon", "accountant", "expected_batch_size"))
    change(task, privacy_mode="non_private", **private)
    assert main(["train", "--config", str(task)]) == 0
    assert (task.parent / "out" / "model.safetensors").exists()


def test_a_recipe_protects_users(task, capsys, refused):
    """All references of all rows of a user are one unit, for train and plan alike."""
    rows = [{"q": f"a {i}", "r": ["b", "c"], "who": f"user{i % 10}"} for i in range(20)]
    pairs(task, rows, [{**THAI[0], "who": "user3"}])
    change(task, privacy_unit="user", privacy_unit_column="who", max_rows_per_unit=3)
    refused(["train", "--config", str(task)], "of the same values in 'who'")
    pairs(task, rows, [{**THAI[0], "who": "another"}])
    assert main(["plan", "--config", str(task)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("10 users") and "20 rows of 10 users: 2 to 2 each" in out
    assert main(["train", "--config", str(task)]) == 0
    plan = plan_of(task)
    assert (plan["num_examples"], plan["rows_are_chunks"]) == (10, False)
    assert plan["users"]["column"] == "who" and plan["evaluation_compared"]
    capsys.readouterr()
    assert main(["plan", "--config", str(task), "--num-examples", "99"]) == 0
    assert capsys.readouterr().out.startswith("99 users")


def test_a_plan_counts_references(task, capsys):
    pairs(task, [{"q": "a", "r": ["b", "c", "d"]}, {"q": "e", "r": ["f"]}] * 20, THAI)
    assert main(["plan", "--config", str(task)]) == 0
    assert capsys.readouterr().out.startswith("80 examples")


def test_without_metrics_nothing_is_decoded(task, capsys):
    change(task, metrics=[])
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
        (["--max_new_tokens", "150"], "positions of the model"),
    ],
)
def test_what_cannot_be_done_is_named_before_anything_is_written(task, refused, words, message):
    refused(["train", "--config", str(task), *words], message)
    assert not (task.parent / "out").exists()


def test_a_chat_model_with_lora_from_yaml_loads_with_stock_peft(task, capsys):
    """A Qwen3-shaped model and TRL's copy of its template, which marks nothing by itself."""
    utils = pytest.importorskip("trl.chat_template_utils")
    words = copy.deepcopy(tiny_text.tokenizer())
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.eos_token, words.chat_template = "<|im_end|>", utils.qwen3_chat_template
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        eos_token_id=words.eos_token_id, bos_token_id=None, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    base = task.parent / "qwen"
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(base)
    words.save_pretrained(base)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Where is pub {i}?"},
                {"role": "assistant", "content": f"In area {i % 3}."},
            ]
        }
        for i in range(46)
    ]
    pairs(task, rows[:40], rows[40:])
    lora = {"peft_type": "lora", "r": 2, "target_modules": ["q_proj", "v_proj"]}
    change(task, model_name_or_path=str(base), data_format="messages", metrics=["rougeL"])
    change(task, prompt_column=None, target_column=None, peft=lora)
    assert main(["train", "--config", str(task)]) == 0
    out = task.parent / "out"
    assert json.loads((out / "privacy.json").read_text())["statement"]["status"] == "proven"

    first = json.loads((out / "generations.jsonl").read_text().splitlines()[0])
    assert first["prompt"].count("<|im_start|>assistant") == 1 and "In area" not in first["prompt"]
    assert first["references"] == ["In area 1."]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    words = AutoTokenizer.from_pretrained(out)
    ids = words(first["prompt"], return_tensors="pt")
    text = words.decode(
        model.generate(**ids, max_new_tokens=8)[0][ids["input_ids"].shape[1] :],
        skip_special_tokens=True,
    )
    assert text.strip() == first["text"]


# -- hf-dp generate --


def facts(path: Path) -> dict:
    return json.loads(pq.read_schema(path).metadata[b"hf_dp"])


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.parquet"
    tiny_text.tables()["validation"].select_columns(["meaning_representation"]).to_parquet(path)
    return path


def test_synthetic_rows_carry_the_epsilon_and_train_by_the_same_recipe(task, prompts, capsys):
    assert main(["train", "--config", str(task)]) == 0
    out, real = task.parent / "synthetic.parquet", task.parent / "real.parquet"
    tiny_text.tables()["train"].to_parquet(real)
    words = ["--num", "30", "--out", str(out), "--prompts", str(prompts)]
    assert main(["generate", "--config", str(task), *words]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1] == str(out)

    rows = datasets.Dataset.from_parquet(str(out))
    given = datasets.Dataset.from_parquet(str(prompts))["meaning_representation"]
    assert len(rows) == 30
    assert (
        rows["meaning_representation"][:12] == given[:12] == rows["meaning_representation"][12:24]
    )
    assert len(set(rows["human_reference"])) > 20  # sampled anew each time
    stated = json.loads((task.parent / "out" / "privacy.json").read_text())["statement"]
    assert facts(out)["differential_privacy"]["epsilon"] == stated["epsilon"]
    assert facts(out)["verified"] == "ok" and str(stated["epsilon"]) in facts(out)["claim"]
    assert str(task.parent) not in json.dumps(facts(out))

    files = {"train_file": str(out), "validation_file": str(real)}
    change(task, dataset_name=None, metrics=[], output_dir=str(task.parent / "again"), **files)
    assert main(["train", "--config", str(task)]) == 0


def test_a_model_without_a_statement_says_so(task, prompts):
    out = task.parent / "synthetic.parquet"
    words = ["--num", "2", "--out", str(out), "--prompts", str(prompts)]
    model = yaml.safe_load(task.read_text())["model_name_or_path"]
    assert main(["generate", "--config", str(task), *words, "--trained", model]) == 0
    assert "states no privacy" in facts(out)["claim"]
    assert "differential_privacy" not in facts(out)


def test_a_claim_that_its_files_do_not_bear_out_is_not_carried_on(task, prompts, refused):
    assert main(["train", "--config", str(task)]) == 0
    weights = task.parent / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    out = task.parent / "synthetic.parquet"
    words = ["--num", "2", "--out", str(out), "--prompts", str(prompts)]
    refused(["generate", "--config", str(task), *words], "not borne out")
    assert not out.exists()


def test_prompts_of_the_training_file_are_refused(task, prompts, capsys, refused):
    change(task, dataset_name=None, train_file=str(prompts))
    values = yaml.safe_load(task.read_text())
    out = task.parent / "synthetic.parquet"
    words = ["--num", "2", "--out", str(out), "--prompts", str(prompts)]
    words += ["--trained", values["model_name_or_path"]]
    refused(["generate", "--config", str(task), *words], "prompts.parquet")
    assert not out.exists()
    public = task.parent / "public.parquet"
    public.write_bytes(prompts.read_bytes())
    assert main(["generate", "--config", str(task), *words, "--prompts", str(public)]) == 0
    assert "Not covered: the prompts" in capsys.readouterr().out
    assert "prompts" in facts(out)["not_covered"]


def test_the_claim_of_an_adapter_is_not_carried_on_to_another_base(task, prompts, refused):
    lora = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"], "task_type": "CAUSAL_LM"}
    change(task, peft=lora)
    assert main(["train", "--config", str(task)]) == 0
    other = tiny_text.saved(task.parent / "other", tiny_text.gpt2(seed=1))
    out = task.parent / "synthetic.parquet"
    words = ["--num", "2", "--out", str(out), "--prompts", str(prompts)]
    refused(
        ["generate", "--config", str(task), *words, "--model_name_or_path", other],
        "Name the adapter's base",
    )
    assert not out.exists()
    assert main(["generate", "--config", str(task), *words]) == 0
    assert facts(out)["verified"] == "ok"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "x.csv"], ".parquet"),
        ([], "needs `prompts`"),
        (["--num", "0"], "num"),
    ],
)
def test_what_generate_cannot_do_is_named(task, refused, words, message):
    model = yaml.safe_load(task.read_text())["model_name_or_path"]
    given = ["--num", "2", "--out", str(task.parent / "x.parquet"), "--trained", model, *words]
    refused(["generate", "--config", str(task), *given], message)
