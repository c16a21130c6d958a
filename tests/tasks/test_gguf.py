"""Bases in GGUF files: read, dequantized, trained, saved as ordinary ones, and named on the card."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import loops
import pytest
import tiny
import tiny_gguf
import torch
from peft import LoraConfig
from recipe import Recipe
from tiny_gguf import FILE
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from hf_dp.clipping import refuse_coupling
from hf_dp.errors import ConfigError, DataError, UnsupportedModelError
from hf_dp.run.gguf import dequantized, gguf_file_of
from hf_dp.tasks import models
from hf_dp.tasks.models import (
    CAUSAL,
    ModelArguments,
    TextModelArguments,
    load_classifier,
    load_language_model,
)
from hf_dp.tasks.sources import resolve_model

PACKAGE = "tiny_llm_in_a_package"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> tuple[Path, Any]:
    """A Python package that holds a GGUF file and cannot be imported, and what the file holds."""
    folder = tmp_path_factory.mktemp("site") / PACKAGE
    held = tiny_gguf.write(folder / "weights")
    (folder / "__init__.py").write_text("import llama_cpp_that_is_not_here\n")
    return folder, held


@pytest.fixture
def installed(base, monkeypatch) -> str:
    monkeypatch.syspath_prepend(str(base[0].parent))
    return f"package:{PACKAGE.replace('_', '-')}"


def with_file(base: tuple[Path, Any]) -> Any:
    """The model as a user loads it."""
    return AutoModelForCausalLM.from_pretrained(base[0] / "weights", gguf_file=FILE)


def logits(model: Any) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(torch.randint(3, 300, (2, 9))).logits


def rows(words: Any, count: int = 20) -> datasets.Dataset:
    texts = [f"{row['sentence']}{words.eos_token}" for row in tiny.rows(count)]
    encoded = words(texts)
    labels = {"labels": encoded["input_ids"]}
    return datasets.Dataset.from_dict({**encoded, **labels})


@pytest.mark.parametrize("where", ["folder", "package"])
def test_a_base_is_read_dequantized_and_saved_as_an_ordinary_one(where, base, installed, tmp_path):
    name = str(base[0] / "weights") if where == "folder" else installed
    model, words = load_language_model(TextModelArguments(name, gguf_file=FILE), CAUSAL)
    assert torch.equal(logits(model), logits(base[1]))
    assert words.pad_token_id == words.eos_token_id == model.config.pad_token_id
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    assert "gguf" not in "".join(each.read_text() for each in tmp_path.glob("*.json"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(base[1]))
    said = "a film was good<|im_end|>"
    assert AutoTokenizer.from_pretrained(tmp_path)(said).input_ids == words(said).input_ids
    assert gguf_file_of(model) == FILE and gguf_file_of(again) is None


def test_a_classifier_gets_a_new_head_and_a_fresh_model_only_the_shape(base):
    name = str(base[0] / "weights")
    model, _ = load_classifier(ModelArguments(name, gguf_file=FILE), ["text"], ["a", "b", "c"])
    assert model.newly_initialized == ["score.weight"] and model.num_labels == 3
    kept = dict(base[1].named_parameters())["model.norm.weight"]
    assert torch.equal(model.model.norm.weight, kept)
    arguments = TextModelArguments(name, from_scratch=True, gguf_file=FILE)
    fresh, _ = load_language_model(arguments, CAUSAL)
    assert fresh.config.hidden_size == 32 and gguf_file_of(fresh) is None
    assert not torch.equal(fresh.model.embed_tokens.weight, base[1].model.embed_tokens.weight)
    found = models.architecture(name, lambda config: AutoModelForCausalLM, gguf_file=FILE)
    shapes = [{name: p.shape for name, p in m.named_parameters()} for m in (found, base[1])]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("given", ["model", "model_init", "lora", "non_private"])
def test_a_trainer_saves_a_model_that_the_user_read_from_a_file(given, base, tmp_path):
    words = AutoTokenizer.from_pretrained(base[0] / "weights", gguf_file=FILE)
    of_trainer: dict[str, Any] = {
        "model": with_file(base), "train_dataset": rows(words), "eval_dataset": None,
        "data_collator": DataCollatorForSeq2Seq(words), "processing_class": words,
    }  # fmt: skip
    options = {"accountant": "rdp"}
    if given == "model_init":
        of_trainer |= {"model": None, "model_init": lambda: with_file(base)}
    elif given == "lora":
        of_trainer["peft_config"] = LoraConfig(r=2, target_modules=["q_proj"])
    elif given == "non_private":
        options = {"privacy_mode": "non_private"}
    made = tiny.trainer(tmp_path, given=of_trainer, max_steps=1, **options)
    made.train()
    made.save_model()
    trained = made.model.eval()
    assert not torch.equal(logits(trained), logits(base[1]))
    if given == "non_private":
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        card = (tmp_path / "README.md").read_text()
        assert f"| Weights of the base | dequantized from {FILE}" in card
        (lines,) = re.findall(r"```python\n(.*?)```", card, flags=re.S)
        lines = lines.replace("path/to/this/folder", str(tmp_path))
        space: dict[str, Any] = {}
        exec(lines.replace("BASE_MODEL", str(base[0] / "weights")), space)
        again = space["model"].model
    assert torch.equal(logits(again), logits(trained))


def test_a_loop_of_ones_own_runs_on_it(base, tmp_path):
    run = loops.run(tmp_path, model=with_file(base))
    assert not run.model.is_quantized and gguf_file_of(run.model) == FILE
    refuse_coupling(run.model)


def test_weights_that_are_still_packed_are_refused(base):
    model = with_file(base)
    packed = type("GgufLinear", (torch.nn.Linear,), {})
    packed.__module__ = "transformers.integrations.gguf.utils"
    model.model.layers[0].mlp.up_proj = packed(32, 64)
    with pytest.raises(UnsupportedModelError, match=r"GgufConfig\(dequantize=True\)"):
        dequantized(model)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, rf"`gguf_file` to be one of .*{PACKAGE}.* It has \['{FILE}'\]"),
        ("another.gguf", rf"got 'another.gguf'. It has \['{FILE}'\]"),
    ],
)
def test_the_file_of_a_package_is_named(file, message, installed):
    with pytest.raises(DataError, match=message):
        resolve_model(installed, file)


def test_a_package_is_found_without_importing_it(base, installed):
    assert resolve_model(installed, FILE) == str(base[0] / "weights")
    assert PACKAGE not in sys.modules
    assert resolve_model("org/repository", FILE) == "org/repository"  # the Hub's, as transformers
    with pytest.raises(DataError, match="pip install no-such-package"):
        resolve_model("package:no-such-package", FILE)
    with pytest.raises(DataError, match="neither get_model_path nor a GGUF file"):
        resolve_model("package:json")


def test_what_reads_the_file_must_be_installed(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    arguments = TextModelArguments(str(base[0] / "weights"), gguf_file=FILE)
    with pytest.raises(ConfigError, match="pip install gguf"):
        load_language_model(arguments, CAUSAL)


def test_a_file_that_is_not_there_is_said(base):
    arguments = TextModelArguments(str(base[0] / "weights"), gguf_file="none.gguf")
    with pytest.raises(DataError, match=r"none\.gguf.*gguf_file"):
        load_language_model(arguments, CAUSAL)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", ["causal_lm", "lora", "head", "words"])
def test_a_recipe_trains_and_evaluates_it(kind, tmp_path, capsys):
    """From the file in a package; an adapter's base is read from it again, to evaluate."""
    values: dict[str, Any] = {
        "model_name_or_path": f"package:{PACKAGE}", "gguf_file": FILE, "max_length": 48,
        "target_epsilon": 8, "accountant": "rdp", "expected_batch_size": 8, "max_steps": 2,
        "learning_rate": "1e-2",
    }  # fmt: skip
    if kind in ("head", "words"):
        values |= {"task": "text_classification", "class_names": ["negative", "positive"]}
    else:
        values |= {"task": "causal_lm", "data_format": "text", "text_column": "sentence"}
        values |= {"metrics": []}
    if kind == "words":
        words = {"negative": "bad", "positive": "good"}
        block = {"template": "<S1> It was", "label_words": words, "several_tokens": True}
        values["infilling"] = block
    if kind != "causal_lm":
        values["peft"] = {"peft_type": "lora", "r": 2, "target_modules": ["q_proj", "v_proj"]}
    task = Recipe(tmp_path, capsys, **values)
    task.change(train_file=task.lines("train.jsonl", tiny.rows(40)))
    task.change(validation_file=task.lines("dev.jsonl", tiny.held_out_rows()))
    task.run()
    found = task.saved("eval_results.json")
    scores = {name: found[name] for name in found if name in ("eval_accuracy", "eval_perplexity")}
    assert json.loads(task.run("eval", "--json").splitlines()[-1]) == pytest.approx(scores)
    card = (task.out / "README.md").read_text()
    assert f"| Base model | {PACKAGE} (in a Python package) |" in card
    assert f"| Weights of the base | dequantized from {FILE}" in card
