"""``hf-dp train``, YAML and command line, on files. (By ``accelerate launch``: test_launch.py.)"""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import tiny
import yaml
from quick import run_quickly

import hf_dp
from hf_dp._arguments import own_fields
from hf_dp.cli import config
from hf_dp.cli.config import (
    PRIVACY,
    BudgetArguments,
    LengthArguments,
    check_early,
    load_yaml,
    parse,
    peft_config,
    read_yaml,
    training_arguments,
)
from hf_dp.cli.main import main
from hf_dp.cli.options import check_names
from hf_dp.cli.tasks import TASKS, EvalArguments, check_recipe, private_tasks, training_module
from hf_dp.cli.tasks.classification import TEXTS
from hf_dp.errors import ConfigError, DataError, InvalidArgumentError
from hf_dp.streams.reading import load
from hf_dp.tasks.classification import DataArguments, EncodeWhenDrawn, encode
from hf_dp.tasks.models import ModelArguments
from hf_dp.trainer.arguments import GROUPS, DPTrainingArguments


def test_train_prints_accuracy_epsilons_and_last_the_folder(task):
    text = task.run()
    assert text.strip().splitlines()[-1] == str(task.out)
    assert "accuracy on the 20 evaluation rows" in text and f"hf-dp inspect {task.out}" in text
    for accountant in ("pld", "rdp", "prv", "gdp_clt"):
        assert accountant in text
    files = {path.name for path in task.out.iterdir()}
    assert {"README.md", "privacy.json", "model.safetensors", "config.json"} <= files
    card = (task.out / "README.md").read_text()
    assert str(task.folder) not in card
    assert "# Text classification, trained with differential privacy" in card  # on data unnamed
    assert "datasets:" not in card
    assert task.saved("config.json")["id2label"] == {"0": "negative", "1": "positive"}


def test_the_command_line_wins_and_hyphens_are_accepted(task):
    task.change(target_epsilon=None, noise_multiplier=1.0)
    task.run("train", "--max-steps", "2", "--expected_batch_size=10")
    plan = task.saved()["plan"]
    assert (plan["steps"], plan["expected_batch_size"]) == (2, 10)


@pytest.mark.parametrize("mode", ["dp_sgd", "non_private"])
def test_a_run_goes_on_by_the_words_that_its_help_has(task, mode, caplog, monkeypatch):
    compared: list[str] = []
    monkeypatch.setattr("transformers.trainer_utils.logger.warning_once", compared.append)
    noise = None if mode == "non_private" else 1.0
    task.change(target_epsilon=None, noise_multiplier=noise, save_strategy="steps")
    if noise is None:
        task.change(privacy_mode=mode, expected_batch_size=None, accountant=None)
    task.run()
    shutil.rmtree(task.out / "checkpoint-3")
    task.run("train", "--resume_from_checkpoint", "True")
    assert noise is None or "Continuing from checkpoint-2" in caplog.text
    task.run(resume_from_checkpoint=True)  # in the recipe, after the end
    assert noise is None or task.saved()["statement"]["steps"] == 4
    differing = "do not match"
    assert not [each for each in compared if differing in each]  # a tenth of the run is what it was
    task.run("train", "--save_steps", "2", resume_from_checkpoint="true")
    (said,) = [each for each in compared if differing in each]
    assert "save_steps: 2 (from args) != 1" in said and "logging_steps" not in said
    if noise is not None:
        task.refused("'nowhere' is not a folder", resume_from_checkpoint="nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rat": 1}, "`learning_rat` .did you mean `learning_rate`"),
        ({"peft": {"peft_type": "lorra"}}, "`peft.peft_type` to be one of"),
        ({"peft": {"peft_type": "lora", "rank": 2}}, "Unknown configuration key `rank`"),
        ({"train_file": "nowhere.jsonl"}, "'nowhere.jsonl' does not exist"),
        ({"train_file": "data.xlsx"}, "'data.xlsx' does not exist. Expected one ending in"),
        ({"label_column": "target"}, r"`label_column` names \['target'\]"),
        ({"class_names": ["only"]}, "`class_names` to name at least two"),
        ({"class_names": ["bad", "good", "bad"]}, "`class_names` to name at least two different"),
        ({"dataset_name": "imdb"}, "`train_file` to be unset with dataset_name='imdb'"),
        ({"dataset_name": "no/such", "train_file": None, "validation_file": None}, "'no/such' .* could not be loaded"),
        ({"validation_file": []}, "`validation_file` .* to be given"),
        ({"max_train_rows": 41}, "`max_train_rows` to be from 1 to 40, got 41"),
        ({"text_columns": ["sentence"] * 3}, "`text_columns` to name one or two columns"),
        ({"target_epsilon": None}, "target_epsilon"),
        ({"target_epsilon": -1}, "target_epsilon"),
        ({"privacy_mode": "dpsgd"}, "privacy_mode"),
        ({"model_name_or_path": "package:no_such_package"}, "pip install"),
        ({"model_name_or_path": "no/such-model"}, "'no/such-model' could not be loaded"),
        ({"freeze": ["encoder.wrong"]}, "`freeze` names 'encoder.wrong'"),
        ({"without_dropout": ["wrong"]}, "`without_dropout` names 'wrong', .* are .'bert.embedd"),
        ({"task": "translation"}, "`task` to be one of"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_nothing_is_written(task, change, message):
    assert "Traceback" not in task.refused(message, **change)
    assert not task.out.exists()


def test_unreadable_files(task):
    (task.folder / "train.jsonl").write_text("{not json")
    task.refused("could not be read as json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(str(task.folder / "none.yaml"))
    for text, message in (("a: [", "not valid YAML"), ("- 1", "mapping")):
        task.file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_yaml(str(task))


def test_every_unknown_key_is_reported():
    with pytest.raises(ConfigError, match="`foo`.*`bar`"):
        check_names({"foo": 1, "bar": 2}, {"baz"}, "key")
    assert peft_config(None) is None


IN_A_FRESH_PROCESS = """
import contextlib, io, json, sys
from hf_dp.cli.main import main
said = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(words)
        except SystemExit as end:
            assert end.code == 0
    said[" ".join(words)] = out.getvalue()
assert not {"torch", "transformers"} & set(sys.modules)
print(json.dumps(said))
"""


# Each command with each task that it has.
COMMANDS = [*(("train", name) for name in TASKS), *(("eval", name) for name in private_tasks())]


@pytest.fixture(scope="module")
def helps(tmp_path_factory) -> dict[str, str]:
    """The help of commands, by their words. All together come quickly, and without transformers."""
    of_masked_lm = tmp_path_factory.mktemp("recipe") / "run.yaml"
    of_masked_lm.write_text("task: masked_lm\n")
    asked = [["train", "--help"], ["train", "--task=text_classification", "-h"]]
    asked += [[command, "--task", name, "--help"] for command, name in COMMANDS]
    asked += [["train", "--config", str(of_masked_lm), "--help"]]
    done = run_quickly("-c", IN_A_FRESH_PROCESS, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found | {"of a recipe": found.pop(" ".join(asked[-1]))}


@pytest.mark.parametrize(("command", "task_name"), COMMANDS)
def test_help_lists_the_arguments_of_the_task(command, task_name, helps):
    text = helps[f"{command} --task {task_name} --help"]
    groups = training_module(task_name).ARGUMENTS
    if command == "train":
        assert all(f"  {name}" in text and row.help in text for name, row in TASKS.items())
        assert ("--target_epsilon" in text) is TASKS[task_name].private
    else:
        assert "--zero-shot" in text and "--trained" in text
        groups = (EvalArguments, *groups)
    for field in itertools.chain(*map(dataclasses.fields, groups)):
        assert f"  --{field.name} " in text
    assert f"example:\n  hf-dp {command}" in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_of_train_describes_the_task_that_would_run(helps):
    assert helps["train --help"] == helps["train --task=text_classification -h"]
    assert "--pretraining_sources" in helps["of a recipe"]


def test_every_task_of_the_registry_has_what_the_commands_read():
    for name, row in TASKS.items():
        assert callable(training_module(name).train)
        if row.private:
            assert callable(training_module(name).evaluate)
    classifying = ["text_classification", "image_classification"]
    assert private_tasks() == [*classifying, "causal_lm", "seq2seq"]


def test_a_task_without_evaluation_is_refused(task):
    for words in (["--task", "masked_lm"], ["--task=masked_lm"]):
        task.refused(r"`task` to be one of \['text_classification', ", "eval", *words)
    task.refused("`task` to be one of", "train", "--task=translation")


def test_the_help_of_a_private_task_has_every_privacy_argument(helps):
    text = helps["train --help"]
    own = {field.name for group in (*GROUPS, LengthArguments) for field in own_fields(group)}
    assert own == {field.name for group in PRIVACY for field in own_fields(group)}
    assert all(f"  --{name} " in text or f"  --{name}," in text for name in own)


def test_shared_arguments_have_the_defaults_of_transformers():
    fields = DPTrainingArguments.__dataclass_fields__
    for field in own_fields(LengthArguments):
        assert field.default == fields[field.name].default


@dataclasses.dataclass
class Kinds:
    whole: int = 1
    number: float = 1.0
    maybe: int | None = 1
    text: str = ""
    texts: list[str] = dataclasses.field(default_factory=list)
    flag: bool = False
    block: dict | str | None = None


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("whole", 12, 12),
        ("whole", True, "invalid int value: 'True'"),
        ("whole", 12.5, "invalid int value: '12.5'"),
        ("number", 1, 1.0),
        ("number", "1e-3", 1e-3),
        ("number", True, "invalid float value"),
        ("number", "many", "invalid float value: 'many'"),
        ("maybe", None, None),
        ("maybe", 1.5, "invalid int value"),
        ("text", 5, "5"),
        ("texts", ["a", "b"], ["a", "b"]),
        ("texts", "a", ["a"]),
        ("texts", 2024, ["2024"]),
        ("texts", [0, 1.5], ["0", "1.5"]),
        ("texts", None, []),
        ("whole", None, 1),
        ("number", None, 1.0),
        ("flag", None, False),
        ("flag", True, True),
        ("flag", "perhaps", "Truthy value expected"),
        ("block", {"a": 1}, {"a": 1}),
    ],
)
def test_kinds_of_values_in_yaml(name, value, found):
    if isinstance(found, str) and found != "5":
        with pytest.raises(ConfigError, match=f"argument --{name}: .*{found}"):
            parse([Kinds], {name: value}, [], prog="hf-dp")
        return
    read = getattr(parse([Kinds], {name: value}, [], prog="hf-dp")[0], name)
    assert read == found and type(read) is type(found)


@pytest.mark.parametrize("value", [[False, True], [None, "a"], True, {"a": "b"}])
def test_what_yaml_reads_as_no_text_is_refused_in_a_list_of_texts(value):
    with pytest.raises(InvalidArgumentError, match="`texts` to hold texts, got .*put quotes"):
        parse([Kinds], {"texts": value}, [], prog="hf-dp")


def test_classes_named_by_numbers_and_truth_values(task):
    task.run(class_names=[0, 1])
    assert task.saved("config.json")["id2label"] == {"0": "0", "1": "1"}
    for command in ("train", "plan"):
        task.refused("`class_names` to hold texts, got False", command, class_names=[False, True])
    printed = task.run("plan", "--class_names", "no", "yes", "--json", class_names=None)
    assert json.loads(printed)["plan"]["num_examples"] == 40


def test_an_empty_value_means_the_default(task):
    names = ("freeze", "without_dropout", "metrics", "text_columns", "num_train_epochs", "seed")
    names += ("logging_steps", "label_column", "from_scratch")
    task.file.write_text(task.file.read_text() + "".join(f"{name}:\n" for name in names))
    for command in ("train", "eval"):
        task.capsys.readouterr()
        assert main([command, "--config", str(task.file)]) == 0
        assert "accuracy on the 20" in task.capsys.readouterr().out
    assert main(["plan", "--config", str(task.file), "--num_train_epochs", "null"]) == 0


def test_a_key_that_stands_twice_is_named(task):
    task.file.write_text(task.file.read_text() + "target_epsilon: 3\n")
    assert main(["train", "--config", str(task.file)]) == 2
    assert "the key 'target_epsilon' stands twice" in task.capsys.readouterr().err
    with pytest.raises(yaml.YAMLError, match="the key 'r' stands twice"):
        load_yaml("peft: {r: 8, r: 4}")
    merged = load_yaml("a: &a {r: 8, s: 1}\nb: {<<: *a, r: 4}\n1: 0\n'1': 0\n")
    assert merged["b"] == {"r": 4, "s": 1}


def test_a_block_on_the_command_line_is_yaml():
    def infilling(word):
        values = {"model_name_or_path": "base"}
        return parse([ModelArguments], values, ["--infilling", word], prog="hf-dp")[0].infilling

    words = {"no": "bad", "yes": "good"}
    block = "{template: '<S1> It was [MASK] .', label_words: {'no': bad, 'yes': good}}"
    assert infilling(block) == {"template": "<S1> It was [MASK] .", "label_words": words}
    assert infilling("sst2") == "sst2"
    with pytest.raises(ConfigError, match="is not valid YAML"):
        infilling("{template: 'x")


def test_null_on_the_command_line_takes_a_value_of_the_file_away():
    values = {"model_name_or_path": "base", "infilling": "sst2", "gguf_file": "weights.gguf"}
    words = ["--infilling", "null", "--gguf_file", "null"]
    made = parse([ModelArguments], values, words, prog="hf-dp")[0]
    assert made.infilling is None and made.gguf_file is None
    (budget,) = parse(
        [BudgetArguments], {"target_epsilon": 3}, ["--target_epsilon=null"], prog="hf-dp"
    )
    assert budget.target_epsilon is None
    with pytest.raises(ConfigError, match="invalid float value: 'none'"):
        parse([BudgetArguments], {}, ["--target_epsilon", "none"], prog="hf-dp")
    values = {"whole": 5, "texts": ["a"], "flag": True, "maybe": 5}
    words = ["--whole", "null", "--texts", "null", "--flag=null", "--maybe", "null"]
    assert parse([Kinds], values, words, prog="hf-dp")[0] == Kinds(maybe=None)
    words = ["--whole", "null", "--whole", "7", "--texts", "null", "b", "--text", "-1"]
    made = parse([Kinds], values, words, prog="hf-dp")[0]
    assert (made.whole, made.texts, made.text) == (7, ["null", "b"], "-1")
    words = ["--model_name_or_path", "null"]
    with pytest.raises(ConfigError, match="required: --model_name_or_path"):
        parse([ModelArguments], {"model_name_or_path": "base"}, words, prog="hf-dp")


def test_every_argument_has_a_help_that_can_be_printed(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    said = capsys.readouterr().out
    assert "at the cost of ~20% slower" in said and "train[1000:]" in said
    assert "--max_grad_norm" in said and "--per_example_max_grad_norm" in said


def test_a_csv_with_labels_in_words(task):
    """From YAML alone: three classes, given as words."""
    words = ["negative", "neutral", "positive"]
    files = {}
    for name, rows in (("train", tiny.rows(40)), ("validation", tiny.held_out_rows())):
        lines = [f"{row['sentence']},{words[i % 3]}" for i, row in enumerate(rows)]
        (task.folder / f"{name}.csv").write_text("\n".join(["sentence,label", *lines]))
        files[f"{name}_file"] = str(task.folder / f"{name}.csv")
    tiny.model().bert.save_pretrained(task.folder / "model")  # without a head for two
    task.run(**files, class_names=words)
    assert "accuracy" in task.run("eval")
    found = task.saved("config.json")["id2label"]
    assert found == {"0": "negative", "1": "neutral", "2": "positive"}


# -- names that no command knows: found at once, with the nearest that it knows ---

# Words, or a configuration file, and what is said of them.
TYPOS = [
    (["train", "--learnin_rate", "1"], "`learnin_rate` (did you mean `learning_rate`?)"),
    (["train", "--learnin-rate=1"], "`learnin_rate` (did you mean `learning_rate`?)"),
    (["train", "--config", "FILE"], "`traget_epsilon` (did you mean `target_epsilon`?)"),
    (["train", "--confg", "FILE"], "`confg` (did you mean `config`?)"),
    (["eval", "--config", "FILE"], "`traget_epsilon` (did you mean `target_epsilon`?)"),
    (["eval", "--label_colum", "x"], "`label_colum` (did you mean `label_column`?)"),
    (["plan", "--config", "FILE"], "`traget_epsilon` (did you mean `target_epsilon`?)"),
]
WITHOUT_TRANSFORMERS = """
import json, sys
from hf_dp.cli.main import main
codes = [main(words) for words in json.loads(sys.argv[1])]
print(json.dumps([codes, sorted({"transformers", "torch"} & sys.modules.keys())]))
"""


def test_unknown_names_are_found_before_transformers_is_imported(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("traget_epsilon: 3\n")
    words = [[str(file) if word == "FILE" else word for word in given] for given, _ in TYPOS]
    given = [sys.executable, "-c", WITHOUT_TRANSFORMERS, json.dumps(words)]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    codes, imported = json.loads(done.stdout)
    assert codes == [2] * len(TYPOS)
    assert "transformers" not in imported
    said = done.stderr.splitlines()
    for line, (_, expected) in zip(said, TYPOS, strict=True):
        assert expected in line


def test_the_names_read_from_source_are_those_of_the_class():
    assert training_arguments() == {field.name for field in dataclasses.fields(DPTrainingArguments)}


def test_known_names_pass_in_every_form():
    words = ["--learning-rate", "-1", "--no_dataloader_pin_memory", "--bf16=True", "--help"]
    check_early({"peft": {}, "card": {}, "task": "x", "data_seed": 1}, words, TEXTS.ARGUMENTS)


def test_planted_names_that_are_not_looked_for_are_seen(monkeypatch):
    monkeypatch.setattr(config, "check_names", lambda *given: None)
    check_recipe({"traget_epsilon": 3})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="target_epsilon"):
        check_recipe({"traget_epsilon": 3})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["plan", "--traget-epsilon", "1"], "(did you mean `target_epsilon`?)"),
        (
            "account epsilon --noise-multiplier 1 --sample-rate 0.1 --steps 1 --delta 1e-5 --jsn".split(),
            "(did you mean `json`?)",  # an option of the question, not of the command
        ),
    ],
)
def test_the_nearest_command_and_option_are_named(words, expected, capsys):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2 and expected in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-dp {hf_dp.__version__}\n"


def test_a_reader_who_stops_reading_is_no_error(monkeypatch):
    here, there = os.pipe()
    os.close(here)
    with os.fdopen(there, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert main(["--help"]) == 141


STREAMED = {
    "sampling": "random_allocation", "look_over": "when_drawn", "longest_row": 24,
    "num_train_epochs": 2, "max_steps": -1, "expected_batch_size": 10,
    "accountant": "pld", "target_epsilon": None, "noise_multiplier": 1.0,
}  # fmt: skip


def test_a_folder_of_shards_is_streamed_at_the_epsilon_of_its_file_which_plan_says(task):
    folder, file = str(task.folder / "shards"), task.values["train_file"]
    words = ["--expected_batch_size", "10", "--num_train_epochs", "2", "-o", folder]
    assert main(["shard", file, *words]) == 0
    planned = task.run("plan", **STREAMED)
    assert task.run("plan", train_file=folder) == planned and "8 steps" in planned
    task.run()
    read, said = load(Path(folder)), task.saved()
    assert [read.recorded(epoch) for epoch in range(2)] == [4, 4]
    assert "keyed with 256 bits" in json.dumps(said)
    assert f" {said['statement']['epsilon']}\n" in planned
    task.refused("were begun by the run", output_dir=str(task.folder / "other"))
    task.refused("`max_steps` to be at most 8, the steps of 2", "plan", num_train_epochs=3)
    task.refused("`expected_batch_size` to be 10 for these shards", "plan", expected_batch_size=8)
    task.refused("`sampling` to be 'random_allocation' for a stream", "plan", sampling=None)
    task.refused("`sampling` to be 'random_allocation' for a stream", expected_batch_size=10)
    for name, value in {"train_split": "train[:9]", "max_train_rows": 9}.items():
        task.refused(f"`{name}` to be unset with a folder of shards", **STREAMED, **{name: value})
        task.change(**{name: None})
    (Path(folder) / "epoch-1" / "manifest.json").unlink()
    task.refused("manifest.json' is not as .*it is missing")
    for command in ("plan", "train"):
        (Path(folder) / "plan.json").unlink(missing_ok=True)
        task.refused("has no plan.json. Give the folder that `hf-dp shard` has made", command)


def test_texts_of_a_stream_are_encoded_as_those_of_a_file():
    reader, rows = tiny.tokenizer(), datasets.Dataset.from_list(tiny.rows(40))
    data, names = DataArguments(max_length=5), ["negative", "positive"]
    made = EncodeWhenDrawn(reader, data, names, None, lambda rows: rows)
    encoded = encode(rows, reader, data.text_columns, data.label_column, names, 5)
    assert [dict(one) for one in encoded] == made(list(rows))
    for bad in ({"sentence": ["two", "texts"], "label": 1}, {"sentence": "a", "label": 2}):
        with pytest.raises((DataError, KeyError)):
            made([bad])
