"""Infilling from the command line: train, evaluate before and after, sweep, pretrain a base; data
from a local hub folder."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers as hf
import yaml
from families import SENTENCES, bert, decoder, saved_masked_lm
from models import llama
from recipe import Recipe
from warm import run_the_cards_lines

from hf_dp.accounting import epsilon
from hf_dp.cli.tasks.classification import TEXTS
from hf_dp.statement import evidence as document
from hf_dp.tasks.masked_lm_trainer import MaskedLMTrainer, Stop

ROWS = [{"sentence": sentence, "label": index % 2} for index, sentence in enumerate(SENTENCES * 6)]
HELD_OUT = [
    {"sentence": f"{row['sentence']} {row['sentence']}", "label": row["label"]} for row in ROWS
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return saved_masked_lm(tmp_path_factory.mktemp("base"), pretraining_sources=["sst"])


@pytest.fixture
def recipe(base, tmp_path, capsys) -> Recipe:
    """A recipe of a folder laid out like a data set on the Hub, with two evaluation splits."""
    hub = tmp_path / "hub"
    (hub / "tiny").mkdir(parents=True)
    made = Recipe(
        tmp_path, capsys, model_name_or_path=str(base), infilling="sst2", dataset_name=str(hub),
        dataset_config="sst2", validation_split=["validation_matched", "validation_mismatched"],
        class_names=["negative", "positive"], metrics=["accuracy", "f1"], max_length=24,
        noise_multiplier=1.0, expected_batch_size=8, max_steps=2,
    )  # fmt: skip
    sets = {
        "train": ROWS,
        "validation_matched": HELD_OUT[:10],
        "validation_mismatched": HELD_OUT[:7],
    }
    for split, rows in sets.items():
        made.lines(f"hub/tiny/{split}.jsonl", rows)
    splits = [{"split": split, "path": f"tiny/{split}.jsonl"} for split in sets]
    header = {"configs": [{"config_name": "sst2", "data_files": splits}]}
    (hub / "README.md").write_text(f"---\n{yaml.safe_dump(header)}---\n")
    return made


def printed_metrics(text: str) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in re.findall(r"^(\w+ on the .*): ([\d.]+)$", text, re.MULTILINE)
    }


def test_train_then_evaluate(recipe):
    """Two evaluation splits by name; the evaluation command gives what training printed."""
    trained = printed_metrics(recipe.run())
    assert set(trained) == {
        f"{metric} on the {rows} evaluation rows"
        for metric in ("accuracy", "f1")
        for rows in ("10 matched", "7 mismatched")
    }
    assert printed_metrics(recipe.run("eval", "--use_cpu", "True")) == trained
    expected = trained["accuracy on the 10 matched evaluation rows"]
    saved = recipe.saved("eval_results.json")["eval_matched_accuracy"]
    assert saved == pytest.approx(expected, abs=1e-4)
    card = (recipe.out / "README.md").read_text()
    assert "pretrained on sst, the same text as the training data" in card
    assert "| Pretraining data, as far as listed | sst |" in card


def test_zero_shot_is_the_base_itself(recipe, base):
    from hf_dp.tasks.infilling import load_infilling
    from hf_dp.tasks.templates import GLUE

    printed = recipe.run("eval", "--zero-shot", "--use_cpu", "True")
    found = printed_metrics(printed)["accuracy on the 10 matched evaluation rows"]
    model, tokenizer = load_infilling(str(base), bert(), GLUE["sst2"], ["negative", "positive"])
    texts = [row["sentence"] for row in HELD_OUT[:10]]
    labels = torch.tensor([row["label"] for row in HELD_OUT[:10]])
    with torch.no_grad():
        logits = model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    right = logits.argmax(1) == labels
    assert found == pytest.approx(float(right.float().mean()), abs=1e-4)
    assert not recipe.out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"infilling": "mnli"}, "takes 2 text column.s., but `text_columns` names"),
        ({"class_names": ["bad", "good"]}, "no word for .'bad', 'good'."),
        ({"dataset_config": "mnli"}, "'mnli'. could not be loaded"),
        ({"validation_split": ["test"]}, "The split 'test' .* could not be loaded"),
        ({"max_length": 49}, "`max_length` to be no more tokens than the model has positions"),
        ({"max_length": 12.5}, "--max_length/--max-length: invalid int value: '12.5'"),
        ({"model_name_or_path": "package:json"}, "'json' contains no model"),
        ({"validation_split": ["train[:20]"]}, "the evaluation set holds rows equal to training rows.*Pass a held-out set"),
        ({"validation_split": ["validation_matched+train"]}, "the evaluation set holds rows equal to training rows"),
        ({"freeze": ["bert", "cls"]}, "no trainable parameter"),
        ({"peft": "lora"}, "`peft` to be a block"),
        ({"peft": {"peft_type": "lora", "target_modules": ["nothing"]}}, "peft cannot apply `peft_config`"),
    ],
)  # fmt: skip
def test_bad_input(recipe, change, message):
    recipe.refused(message, **change)
    assert not recipe.out.exists()


ADAPTERS = (
    {"peft_type": "lora", "r": 2, "target_modules": ["query"]},
    {"peft_type": "frost", "unfreeze_ratio": 0.5, "selection_noise_multiplier": 1.0},
    {"peft_type": "adapter", "bottleneck_size": 2, "target_modules": ["output.dense"]},
    {"peft_type": "pval"},
)


@pytest.mark.parametrize(
    ("peft", "infilling"), zip(ADAPTERS, ("sst2", None, None, "sst2"), strict=True)
)
def test_what_was_chosen_to_train_is_evaluated(recipe, peft, infilling):
    trained = printed_metrics(recipe.run(infilling=infilling, peft=peft))
    assert printed_metrics(recipe.run("eval")) == trained


def test_random_weights_that_an_adapter_would_not_hold_are_named(recipe, caplog):
    TEXTS.trainer_of({**recipe.values, "infilling": None, "peft": ADAPTERS[0]}, [])
    messages = [each.getMessage() for each in caplog.records]
    (said,) = [each for each in messages if "The checkpoint of the base has no" in each]
    assert "bert.pooler.dense.weight" in said and "classifier" not in said
    assert "model.save_pretrained" in said


def test_from_scratch_has_no_base(recipe):
    recipe.run(infilling=None, from_scratch=True)
    card = (recipe.out / "README.md").read_text()
    assert "Base model" not in card and "base_model" not in card
    recipe.refused("know no words", infilling="sst2")
    recipe.refused("`from_scratch`", infilling=None, peft={"peft_type": "head"})


def test_bad_evaluations(recipe):
    recipe.refused("There is no model in", "eval")
    recipe.refused("--zero-shot needs `infilling`", "eval", "--zero-shot", infilling=None)
    recipe.refused("did you mean `max_length`", "eval", max_lenght=3)


def sweep(recipe: Recipe, *words: str, folder: str = "sweep", **more: Any) -> str:
    return recipe.run("sweep", "--output-dir", str(recipe.folder / folder), *words, **more)


@pytest.mark.slow
def test_a_sweep_is_resumed_and_adds_up(recipe, in_this_process):
    folder = recipe.folder / "sweep"
    words = ["--set", "max_steps=1", "--grid", "infilling=sst2,null"]

    def spent(pattern: str) -> str:
        records = [document.read(path) for path in sorted(folder.glob(pattern))]
        events = [event for record in records for event in record.ledger.events]
        together = epsilon(events, records[0].plan.delta, "rdp").rounded_up()
        return f"all {len(records)} private runs together: epsilon {together}"

    out = sweep(recipe, *words)
    assert re.search(r"^infilling=sst2: .*matched_accuracy 0\.\d{4}; .*epsilon \d", out, re.M)
    assert re.search(r"^infilling=None: ", out, re.M) and spent("*/run1") in out
    times = [path.stat().st_mtime_ns for path in sorted(folder.glob("*/log.txt"))]
    assert sweep(recipe, *words) == out
    again = [path.stat().st_mtime_ns for path in sorted(folder.glob("*/log.txt"))]
    assert again == times, "nothing ran again"
    # An interrupted run starts again in a folder of its own, and what it had spent counts.
    next(folder.glob("*/run1/eval_results.json")).unlink()
    printed = sweep(recipe, *words)
    assert spent("*/run*") in printed and len(list(folder.glob("*/run*"))) == 3
    sweep(recipe, "--grid", "peft.r=1", folder="sweep2", code=2)
    assert "Expected the key 'peft.r' to be inside a block of the recipe" in recipe.said
    sweep(recipe, *words, code=2, learning_rate=0.5)
    assert "was run with other values of ['learning_rate']" in recipe.said


@pytest.mark.slow
def test_a_sweep_says_which_runs_failed(recipe):
    sweep(recipe, "--grid", "infilling=imdb", code=1)
    assert "failed: infilling=imdb seed=0; see" in recipe.said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "infilling"], "KEY=A,B), got 'infilling'"),
        (["--grid", "seed=1,2"], "`seed` is the sweep's own: use --seeds"),
        (["--set", "output_dir=x"], "`output_dir` is the sweep's own"),
        (["--grid", "max_steps=1,1"], "values of max_steps to be different"),
        (["--seeds", "0", "0"], "values of --seeds to be different"),
        (["--set", "a=[1"], "is not a plain YAML value"),
        (["--grid", "learning_rate=2020-01-01"], "is not a plain YAML value"),
    ],
)
def test_bad_words_of_a_sweep(recipe, words, message):
    sweep(recipe, *words, code=2)
    assert message in recipe.said


def test_a_file_is_no_folder_of_a_sweep(recipe):
    sweep(recipe, folder=recipe.file.name, code=2)
    assert "is a file" in recipe.said


def test_pretraining_gives_a_base_its_head(base, tmp_path, capsys):
    """From an encoder without a masked-LM head to a base that infilling accepts."""
    hf.BertModel.from_pretrained(base).save_pretrained(tmp_path / "encoder")
    bert().save_pretrained(tmp_path / "encoder")
    made = Recipe(
        tmp_path, capsys, task="masked_lm", model_name_or_path=str(tmp_path / "encoder"),
        text_columns=["nested.text"], pretraining_sources=["here"], held_out=0.2, max_steps=20,
        eval_strategy="steps", eval_steps=5, learning_rate="1e-2", smallest_gain=-1,
    )  # fmt: skip
    nested = ({"nested": [{"text": f"{n} {s}"}]} for n, s in enumerate(SENTENCES * 5))
    words = ["--text_files", made.lines("text.jsonl", nested)]
    assert "stopped: all steps were taken" in made.run("train", *words)
    accuracies = made.saved("pretraining.json")["held_out_accuracy"]
    assert len(accuracies) == 5 and accuracies[-1] > accuracies[0]
    model, info = hf.AutoModelForMaskedLM.from_pretrained(made.out, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.pretraining_sources == ["sst", "here"]
    made.refused(r"none of \['x'\]", "train", *words, "--text_columns", "x")


def test_accumulated_batches_of_a_masked_lm_have_the_gradient_of_one(base, tmp_path):
    names = ["input_ids", "attention_mask"]
    texts = bert()(SENTENCES[:4], padding="max_length", max_length=16, truncation=True)
    labels = [[-100, *ids[1:3], *[-100] * 13] for ids in texts["input_ids"]]  # two in each row
    rows = datasets.Dataset.from_dict({**{n: texts[n] for n in names}, "labels": labels})

    def logged(physical: int) -> dict[str, float]:
        args = hf.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=physical, max_steps=1, logging_steps=1,
            gradient_accumulation_steps=4 // physical, save_strategy="no", use_cpu=True,
            disable_tqdm=True, report_to="none", dataloader_pin_memory=False,
        )  # fmt: skip
        model = hf.AutoModelForMaskedLM.from_pretrained(base)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainer = MaskedLMTrainer(Stop(1.0, -1.0), model, args, train_dataset=rows)
        trainer.train()
        return trainer.state.log_history[0]

    for name in ("loss", "grad_norm"):
        assert logged(1)[name] == pytest.approx(logged(4)[name], rel=1e-3)


def test_a_base_without_a_language_models_head_gets_no_label_words(base, tmp_path, capsys):
    hf.BertModel.from_pretrained(base).save_pretrained(tmp_path / "encoder")
    bert().save_pretrained(tmp_path / "encoder")
    made = Recipe(tmp_path, capsys, class_names=["great", "terrible"], target_epsilon=3)
    for folder, proposed in ((base, True), (tmp_path / "encoder", False)):
        said = made.run("suggest", "--num-examples", "5000", model_name_or_path=str(folder))
        assert ("infilling" in yaml.safe_load(said)) is proposed


def test_words_that_the_tokenizer_does_not_have_are_not_suggested(base, tmp_path, capsys):
    """The reason is a comment, and the new recipe does not name the folder of the old one."""
    made = Recipe(tmp_path, capsys, class_names=["great", "xyzzy"], target_epsilon=3)
    new = tmp_path / "new.yaml"
    said = made.run(
        "suggest", "--num-examples", "5000", "--output", str(new), model_name_or_path=str(base)
    )
    assert "# Left out, so that a new head is trained: No word of" in said
    for found in (yaml.safe_load(said), written := yaml.safe_load(new.read_text())):
        assert found.get("infilling") is None and "learning_rate" in found
    assert "infilling" not in written
    assert written["output_dir"] == f"{made.out}_suggested"


@pytest.mark.slow
def test_a_sweep_over_label_words_beside_their_zero_shot_accuracy(recipe):
    """Figure 8 of Li et al. in small: a point for each choice of words; the zero-shot accuracy is
    `hf-dp eval`'s."""
    words = "{negative: terrible, positive: great}"
    grid = f"infilling={{template: '<S1> It was [MASK] .', label_words: {words}}}"
    out = sweep(recipe, "--set", "max_steps=1", "--grid", grid, "--zero-shot")
    found = re.search(r"=terrible/great in .*zero-shot matched_accuracy (\d\.\d{4})", out)[1]
    printed = recipe.run("eval", "--zero-shot", "--json").strip().splitlines()[-1]
    zero_shot = json.loads(printed)["eval_matched_accuracy"]
    assert float(found) == pytest.approx(zero_shot, abs=1e-4)


@pytest.fixture(scope="module")
def decoder_base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    tokens = {"pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 1}  # padding is the end token
    sizes = {"vocab_size": len(decoder()), "num_hidden_layers": 1, "tie_word_embeddings": True}
    llama(dtype=torch.float32, **sizes, **tokens).save_pretrained(folder)
    decoder().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("classes", "peft"),
    [(["great", "terrible", "dull"], {"peft_type": "lora", "r": 2}), (["great", "not long"], None)],
)
def test_a_decoder_and_named_classes(decoder_base, tmp_path, capsys, classes, peft):
    """From rows and names alone: suggested, seen untrained, trained, evaluated, and served by the
    lines of the card, which need hf_dp only for words of several tokens."""
    rows = [
        {"sentence": text, "label": classes[place % len(classes)]}
        for place, text in enumerate(SENTENCES * 6)
    ]
    made = Recipe(
        tmp_path, capsys, model_name_or_path=str(decoder_base), class_names=classes, peft=peft,
        max_length=40, noise_multiplier=1.0, expected_batch_size=8, max_steps=2, text_columns="sentence", train_file="",
    )  # fmt: skip
    held_out = [{**row, "sentence": row["sentence"] * 2} for row in rows[:9]]
    dev = made.lines("dev.jsonl", held_out)
    made.change(train_file=made.lines("train.jsonl", rows), validation_file=dev)
    suggested = tmp_path / "suggested.yaml"
    said = made.run("suggest", "--target_epsilon", "3", "--output", str(suggested))
    infilling = yaml.safe_load(suggested.read_text())["infilling"]
    assert infilling["template"] == "Text: <S1>\nLabel:"
    assert ("each text is read once per class" in said) == ("several_tokens" in infilling)
    infilling["template"] = "Read: <S1>\nWord:"  # one's own
    untrained = made.run("eval", "--zero-shot", infilling=infilling)
    listed = [line.split(":")[0] for line in untrained.splitlines()[1:]]
    assert listed == [f"class {name}" for name in classes]
    made.run()
    if peft is None:
        kept = made.saved("config.json")["label_words"]
        of_classes = [infilling["label_words"][name] for name in classes]
        assert (kept["template"], kept["words"]) == (infilling["template"], of_classes)
    found = printed_metrics(made.run("eval"))["accuracy on the 9 evaluation rows"]
    texts = [row["sentence"] for row in held_out]
    more = "[classify(text) for text in texts], 'hf_dp' in sys.modules"
    more = f"import sys\ntexts = {texts!r}\nprint(json.dumps([{more}]))"
    served, with_hf_dp = run_the_cards_lines(tmp_path, decoder_base, more)
    assert with_hf_dp == ("several_tokens" in infilling)
    best = [max(each, key=each.get) for each in served]
    right = sum(word == row["label"] for word, row in zip(best, held_out, strict=True))
    assert right / 9 == pytest.approx(found, abs=1e-4)
