"""``hf-dp train`` and ``hf-dp eval`` of the tasks that write, on the built-in tables."""

import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import chat
import datasets
import pyarrow.parquet as pq
import pytest
import tiny_text
import torch
from peft import PeftModel
from recipe import Recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from trl.chat_template_utils import qwen3_chat_template

from hf_dp.cli.config import read_yaml
from hf_dp.tasks.models import TextModelArguments, load_language_model

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def task(of_tables) -> Recipe:
    return of_tables(
        60, metrics=["bleu", "rougeL"], target_epsilon=8, expected_batch_size=8,
        decoding="greedy", max_new_tokens=8,
    )  # fmt: skip


def pairs(task: Recipe, rows: list[dict], dev: list[dict], **values: Any) -> None:
    """Let the recipe read these rows of prompts and answers."""
    files = {
        "train_file": task.lines("t.jsonl", rows),
        "validation_file": task.lines("d.jsonl", dev),
    }
    columns = {"data_format": "pairs", "prompt_column": "q", "target_column": "r"}
    task.change(**{"dataset_name": None, "metrics": [], **columns, **files, **values})


def text_after(prompt: str, model: Any, words: Any) -> str:
    """What a model writes, by transformers alone."""
    ids = words(prompt, return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=8)[0][ids["input_ids"].shape[1] :]
    return words.decode(made, skip_special_tokens=True).strip()


THAI = [{"q": "food", "r": ["Thai food"]}]


def test_train_writes_scores_texts_and_a_card_and_others_write_the_same(task):
    """``hf-dp eval`` finds what training found; ``generate`` and a pipeline write its texts."""
    out = task.out
    lines = task.run().strip().splitlines()
    assert lines[-1] == str(out)
    metrics = task.saved("eval_results.json")
    assert {"eval_bleu", "eval_rougeL", "eval_perplexity"} <= metrics.keys()
    assert f"perplexity on the 12 evaluation rows: {metrics['eval_perplexity']:.4f}" in lines
    written = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
    assert len(written) == len({row["prompt"] for row in written})
    assert written[0]["references"][0] == tiny_text.tables()["validation"][0]["human_reference"]
    card = (out / "README.md").read_text()
    assert "bleu" in card.lower()
    # A prompt ends with what stood between prompt and target in training.
    assert f'print(model("A prompt" + {AutoTokenizer.from_pretrained(out).eos_token!r}))' in card
    assert task.saved()["statement"]["status"] == "proven"

    found = json.loads(task.run("eval", "--json").strip().splitlines()[-1])
    for name, value in found.items():
        assert value == pytest.approx(metrics[name], rel=1e-6), name
    first, words = written[0], AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert text_after(first["prompt"], model, words) == first["text"]
    (piped,) = pipeline("text-generation", model=str(out), device="cpu")(
        first["prompt"], max_new_tokens=8, return_full_text=False, do_sample=False
    )
    assert piped["generated_text"].strip() == first["text"]


def test_what_was_trained_is_kept_when_scoring_fails(task, monkeypatch):
    fail = Mock(side_effect=OSError("no Java"))
    monkeypatch.setattr("hf_dp.tasks.generation.evaluation.score", fail)
    with pytest.raises(OSError, match="no Java"):
        task.run()
    files = {path.name for path in task.out.iterdir()}
    assert {"model.safetensors", "README.md", "privacy.json"} <= files


def test_a_blank_reference_is_found_before_training(task):
    rows = [{"q": f"a {i}", "r": "b"} for i in range(20)]
    pairs(task, rows, [{"q": "food", "r": "Thai"}, {"q": "c", "r": " "}])
    task.refused("'d' has a blank target", metrics=["bleu"])
    assert not task.out.exists()
    # Without metrics nothing is decoded.
    assert "perplexity on the" in task.run(metrics=[])
    assert not (task.out / "generations.jsonl").exists()


def test_a_model_stops_at_the_end_token_that_it_is_trained_to_write(task):
    """Its own configuration names another one, as that of a base whose tokenizer was changed."""
    base = tiny_text.gpt2()
    base.config.eos_token_id = base.generation_config.eos_token_id = 7
    name = tiny_text.saved(task.folder / "other_end", base)
    arguments = TextModelArguments(name)
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


def test_zero_shot_evaluates_the_base(task):
    printed = task.run("eval", "--zero-shot", "--json")
    assert "eval_bleu" in json.loads(printed.strip().splitlines()[-1])
    assert not task.out.exists()
    task.refused("from_scratch", "eval", "--zero-shot", "--from_scratch", "True")


def test_seq2seq_trains_and_writes(task):
    folder = tiny_text.saved(task.folder / "t5", tiny_text.t5())
    task.run(task="seq2seq", model_name_or_path=folder, metrics=["rougeL"])
    assert {"eval_rougeL", "eval_perplexity"} <= task.saved("eval_results.json").keys()


@pytest.mark.parametrize("method", ["full", "lora", "prefix", "rgp", "top2", "retrain"])
def test_every_method_of_the_table_trains_and_writes_as_its_recipe_says(method, task):
    """With the `peft` block of the recipe; sizes are those of the tiny model."""
    recipe = read_yaml(str(ROOT / f"recipes/e2e/gpt2_{method}_eps8.yaml"))
    own = {key: recipe[key] for key in ("peft", "from_scratch") if key in recipe}
    if method == "top2":
        own["peft"]["blocks"] = 1  # of two
    if method == "rgp":
        own["peft"]["rank"] = 2
    task.run(metrics=[], max_steps=1, **own)
    assert task.saved()["statement"]["status"] == "proven"
    printed = task.run("eval", "--metrics", "rougeL", "--max_decoded", "2")
    assert "rougeL on 2 different prompts of the 12 evaluation rows" in printed


@pytest.mark.parametrize("several", [True, False])
def test_a_row_with_several_references_is_not_the_unit(several, task):
    references = [["b", "c", "d"], ["e"]] if several else [["b"], ["e"]]
    pairs(task, [{"q": f"a {i}", "r": references[i % 2]} for i in range(20)], THAI)
    count = 40 if several else 20
    assert task.run("plan").startswith(f"{count} examples")
    task.run()
    plan = task.saved()["plan"]
    assert (plan["rows_are_chunks"], plan["num_examples"]) == (several, count)


def test_rows_left_out_are_said_and_do_not_hide_that_a_row_is_not_the_unit(task):
    """As many examples are left as there were rows, though two of them are of one row."""
    rows = [{"q": f"a {i}", "r": ["b", "c"] if i % 2 else ["b " * 50]} for i in range(20)]
    pairs(task, rows, THAI, max_length=40, drop_long_rows=True)
    task.refused("bands.*moves all later ones", "train", "--bands", "2")
    assert task.run("plan").startswith("20 examples")
    task.run()
    plan = task.saved()["plan"]
    assert (plan["num_examples"], plan["rows_are_chunks"]) == (20, True)
    card = (task.out / "README.md").read_text()
    # The rule alone: a number of long rows would tell more of the rows than N does.
    assert "drop_long_rows examples longer than 40 tokens, before any was counted" in card
    assert "10 of 30" not in card


def test_several_references_train_without_privacy(task):
    """There a row need not be the unit, and the argument that says so is not the user's."""
    row = {"q": "a", "r": ["b", "c"]}
    private = dict.fromkeys(("target_epsilon", "accountant", "expected_batch_size"))
    pairs(task, [row], [row], privacy_mode="non_private", **private)
    task.run()
    assert (task.out / "model.safetensors").exists()


def test_a_recipe_protects_users(task):
    """All references of all rows of a user are one unit, for train and plan alike."""
    rows = [{"q": f"a {i}", "r": ["b", "c"], "who": f"user{i % 10}"} for i in range(20)]
    users = {"privacy_unit": "user", "privacy_unit_column": "who", "max_rows_per_unit": 3}
    pairs(task, rows, [{**THAI[0], "who": "user3"}], **users)
    task.refused("of the same values in 'who'")
    pairs(task, rows, [{**THAI[0], "who": "another"}])
    printed = task.run("plan")
    assert printed.startswith("10 users") and "20 rows of 10 users: 2 to 2 each" in printed
    task.run()
    plan = task.saved()["plan"]
    assert (plan["num_examples"], plan["rows_are_chunks"]) == (10, False)
    assert plan["users"]["column"] == "who" and plan["evaluation_compared"]
    assert task.run("plan", "--num-examples", "99").startswith("99 users")


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
def test_what_cannot_be_done_is_named_before_anything_is_written(task, words, message):
    task.refused(message, "train", *words)
    assert not task.out.exists()


def test_packages_of_metrics_are_asked_for_before_training_and_not_to_plan(task, monkeypatch):
    real = importlib.util.find_spec
    missing = ("sacrebleu", "rouge_score")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in missing else real(name, *a)
    )
    for command in ("train", "eval"):
        task.refused("`metrics` with sacrebleu installed, got 'bleu'", command)
    assert not task.out.exists()
    assert json.loads(task.run("plan", "--json"))["plan"]["steps"] == 2


def test_a_chat_model_with_lora_from_yaml_loads_with_stock_peft(task):
    """With TRL's copy of Qwen3's template, which marks nothing by itself."""
    words, base = chat.tokenizer(qwen3_chat_template), task.folder / "qwen"
    chat.model().save_pretrained(base)
    words.save_pretrained(base)
    said = [(f"Where is pub {i}?", f"In area {i % 3}.") for i in range(46)]
    roles = ("user", "assistant")
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts)]}
        for texts in said
    ]
    lora = {"peft_type": "lora", "r": 2, "target_modules": ["q_proj", "v_proj"]}
    pairs(
        task, rows[:40], rows[40:], model_name_or_path=str(base), data_format="messages",
        metrics=["rougeL"], prompt_column=None, target_column=None, peft=lora,
    )  # fmt: skip
    task.run()
    out = task.out
    assert task.saved()["statement"]["status"] == "proven"

    first = json.loads((out / "generations.jsonl").read_text().splitlines()[0])
    assert first["prompt"].count("<|im_start|>assistant") == 1 and "In area" not in first["prompt"]
    assert first["references"] == ["In area 1."]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    assert text_after(first["prompt"], model, AutoTokenizer.from_pretrained(out)) == first["text"]


# -- hf-dp generate --


def facts(path: Path) -> dict:
    return json.loads(pq.read_schema(path).metadata[b"hf_dp"])


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.parquet"
    tiny_text.tables()["validation"].select_columns(["meaning_representation"]).to_parquet(path)
    return path


@pytest.fixture
def written(task, prompts) -> tuple[Path, list[str]]:
    """A file of rows to come, and the command that writes it."""
    out = task.folder / "synthetic.parquet"
    return out, ["generate", "--num", "30", "--out", str(out), "--prompts", str(prompts)]


def test_synthetic_rows_carry_the_epsilon_and_train_by_the_same_recipe(task, prompts, written):
    out, generate = written
    task.run()
    assert task.run(*generate).strip().splitlines()[-1] == str(out)
    rows = datasets.Dataset.from_parquet(str(out))
    given = datasets.Dataset.from_parquet(str(prompts))["meaning_representation"]
    assert len(rows) == 30
    asked = rows["meaning_representation"]
    assert asked[:12] == given[:12] == asked[12:24]
    assert len(set(rows["human_reference"])) > 20  # sampled anew each time
    stated = task.saved()["statement"]
    assert facts(out)["differential_privacy"]["epsilon"] == stated["epsilon"]
    assert facts(out)["verified"] == "ok" and str(stated["epsilon"]) in facts(out)["claim"]
    assert str(task.folder) not in json.dumps(facts(out))

    real = task.folder / "real.parquet"
    tiny_text.tables()["train"].to_parquet(real)
    files = {"train_file": str(out), "validation_file": str(real)}
    task.run(dataset_name=None, metrics=[], output_dir=str(task.folder / "again"), **files)
    # A claim that the files do not bear out is not carried on.
    out.unlink()
    weights = task.out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    task.refused("not supported by its files", *generate, output_dir=str(task.out))
    assert not out.exists()


def test_a_model_without_a_statement_says_so(task, written):
    out, generate = written
    task.run(*generate, "--trained", task.values["model_name_or_path"])
    assert "states no privacy" in facts(out)["claim"]
    assert "differential_privacy" not in facts(out)


def test_prompts_of_the_training_file_are_refused(task, prompts, written):
    out, generate = written
    generate += ["--trained", task.values["model_name_or_path"]]
    task.refused("prompts.parquet", *generate, dataset_name=None, train_file=str(prompts))
    assert not out.exists()
    public = task.folder / "public.parquet"
    public.write_bytes(prompts.read_bytes())
    assert "Not covered: the prompts" in task.run(*generate, "--prompts", str(public))
    assert "prompts" in facts(out)["not_covered"]


def test_the_claim_of_an_adapter_is_not_carried_on_to_another_base(task, written):
    out, generate = written
    lora = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"], "task_type": "CAUSAL_LM"}
    task.run(peft=lora)
    other = tiny_text.saved(task.folder / "other", tiny_text.gpt2(seed=1))
    task.refused("Name the adapter's base", *generate, "--model_name_or_path", other)
    assert not out.exists()
    task.run(*generate)
    assert facts(out)["verified"] == "ok"


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--out", "x.csv"], ".parquet"), ([], "needs `prompts`"), (["--num", "0"], "num")],
)
def test_what_generate_cannot_do_is_named(task, words, message):
    given = ["--num", "2", "--out", str(task.folder / "x.parquet")]
    trained = task.values["model_name_or_path"]
    task.refused(message, "generate", *given, "--trained", trained, *words)


def test_generate_refuses_a_task_that_writes_no_text(task):
    given = ["--num", "2", "--out", str(task.folder / "x.parquet")]
    said = "`task` to be one of .*'seq2seq'.* got 'text_classification'. .*Only these write texts"
    task.refused(said, "generate", *given, task="text_classification")
