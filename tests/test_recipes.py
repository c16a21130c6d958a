"""Every recipe parses, by the task it names, and spends what its first lines say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_dp.accounting import PoissonSampledGaussian, RecordRelease, SampledRecordRelease, epsilon
from hf_dp.cli import sweep
from hf_dp.cli.config import parse, peft_config, read_yaml
from hf_dp.cli.tasks import generation
from hf_dp.cli.tasks.masked_lm import PretrainingArguments
from hf_dp.errors import ConfigError
from hf_dp.plans.privacy import PrivacyPlan, PrivacyRequest
from hf_dp.statement.provenance import seen_in_pretraining
from hf_dp.tasks.classification_data import DataArguments
from hf_dp.tasks.image_classifier import ImageModelArguments
from hf_dp.tasks.image_data import ImageArguments
from hf_dp.tasks.templates import Infilling
from hf_dp.tasks.text_classifier import ModelArguments
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.forward_arguments import forward_plan

ROOT = Path(__file__).parent.parent
RECIPES = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "recipes").rglob("*.yaml"))}
RECIPES = {name: path for name, path in RECIPES.items() if "accelerate" not in name}
GIVEN_BY_THE_USER = {"text_files": ["a.parquet"]}
ARGUMENTS: dict[str, list[type]] = {
    "text_classification": [ModelArguments, DataArguments, DPTrainingArguments],
    "image_classification": [ImageModelArguments, ImageArguments, DPTrainingArguments],
    "causal_lm": [*generation.ARGUMENTS, DPTrainingArguments],
    "seq2seq": [*generation.ARGUMENTS, DPTrainingArguments],
    "masked_lm": [PretrainingArguments, TrainingArguments],
}


def parsed(values: dict[str, Any]) -> tuple[Any, ...]:
    values = {**values, "use_cpu": True}
    if values["task"] == "masked_lm":
        values |= GIVEN_BY_THE_USER
    return parse(ARGUMENTS[values["task"]], values, [], prog="", extra=("task", "peft", "card"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_parses_and_refuses_an_unknown_key(name):
    values = read_yaml(str(RECIPES[name]))
    *_, args = parsed(values)
    peft_config(values.get("peft"))
    assert args.output_dir.startswith("outputs/")
    with pytest.raises(ConfigError, match="leaning_rate.*did you mean `learning_rate`"):
        parsed({**values, "leaning_rate": 1})


# -- what the first lines of a GLUE recipe say ---

GLUE_RECIPES = [name for name in RECIPES if name.startswith("recipes/glue/")]
GLUE_ROWS = {"sst2": 67_349, "qnli": 104_743, "qqp": 363_846, "mnli": 392_702}
HEADER = re.compile(
    r"# privacy: epsilon (\S+) \(rdp, bound\), (\S+) \(pld, bound\) at delta (\S+) = 1/\(2 N\), N = (\d+)"
)


@cache
def spent(
    num_examples: int, batch: float, epochs: float, target: float
) -> tuple[float, float, float]:
    """(delta, epsilon by rdp, by pld) of the noise that the recipe's own accountant, rdp,
    calibrates."""
    plan = PrivacyPlan.create(
        num_examples=num_examples,
        expected_batch_size=batch,
        clipping_norm=0.1,
        num_train_epochs=epochs,
        target_epsilon=target,
        accountant="rdp",
    )
    return plan.delta, *(
        epsilon(plan.event(), plan.delta, name).rounded_up() for name in ("rdp", "pld")
    )


@pytest.mark.parametrize("name", GLUE_RECIPES)
def test_a_glue_recipe_spends_what_its_header_says(name):
    text = RECIPES[name].read_text()
    model, data, args = parsed(read_yaml(str(RECIPES[name])))
    by_rdp, by_pld, delta, rows = HEADER.search(text).groups()
    assert int(rows) == GLUE_ROWS[data.dataset_config]
    assert (args.accountant, args.per_example_max_grad_norm) == ("rdp", 0.1)
    found = spent(int(rows), args.expected_batch_size, args.num_train_epochs, args.target_epsilon)
    assert found == (pytest.approx(float(delta), rel=1e-5), float(by_rdp), float(by_pld))
    assert f"--config {name}\n" in text
    assert re.search(r"# expected: accuracy [\d./]+", text)
    # The paper's: batch 1024 and 3 epochs on SST-2, both 2, 6 and 6 times that on the larger sets
    # (Table 1).
    factor = {"sst2": 1, "qnli": 2, "qqp": 6, "mnli": 6}[data.dataset_config]
    assert (args.expected_batch_size, args.num_train_epochs) == (1024 * factor, 3 * factor)


def test_the_32_glue_recipes_are_there():
    expected = {
        f"recipes/glue/{task}/roberta_{size}_{how}_eps{target}.yaml"
        for task in GLUE_ROWS
        for size in ("base", "large")
        for how in ("head", "infilling")
        for target in (3, 8)
    }
    assert set(GLUE_RECIPES) == expected


# -- the tables of Li et al. on generation ---

# Rows of the data set, epochs, and tokens of a sequence (tables 4, 7 and 8; section 5.2).
GENERATION = {
    "e2e": (42_061, 10, 100),
    "dart": (62_659, 15, 120),
    "persona_chat": (131_438, 10, 256),
}
GENERATION_RECIPES = [name for name in RECIPES if name.split("/")[1] in GENERATION]


@pytest.mark.parametrize("name", GENERATION_RECIPES)
def test_a_generation_recipe_spends_what_its_header_says(name):
    text = RECIPES[name].read_text()
    _, data, decoding, args = parsed(read_yaml(str(RECIPES[name])))
    rows, epochs, tokens = GENERATION[name.split("/")[1]]
    by_rdp, by_pld, delta, stated = HEADER.search(text).groups()
    assert (int(stated), args.num_train_epochs, data.max_length) == (rows, epochs, tokens)
    assert (args.expected_batch_size, args.per_example_max_grad_norm) == (1024, 0.1)
    assert (decoding.decoding, decoding.num_beams, args.lr_scheduler_type) == (
        "beam",
        5,
        "constant",
    )
    found = spent(rows, args.expected_batch_size, args.num_train_epochs, args.target_epsilon)
    assert found == (pytest.approx(float(delta), rel=1e-5), float(by_rdp), float(by_pld))
    assert f"--config {name} " in text and "(the paper's; not run here)" in text


def test_every_row_of_the_generation_tables_is_there():
    methods = ("full", "lora", "prefix", "rgp", "top2", "retrain")
    expected = {f"recipes/{task}/gpt2_{m}_eps8.yaml" for task in ("e2e", "dart") for m in methods}
    models = ("gpt2", "gpt2_medium", "dialogpt_medium")
    expected |= {f"recipes/persona_chat/{model}_full_eps8.yaml" for model in models}
    assert set(GENERATION_RECIPES) == expected


# -- DP-FROST's tables ---

FROST_RECIPES = [name for name in RECIPES if name.startswith("recipes/frost/")]
FROST_METHODS = ("full", "random", "pval", "lora", "adapter", "frost")


@cache
def spent_with_selection(
    num_examples: int,
    batch: float,
    epochs: float,
    peft: str,
    target: float = 0.5,
    accountant: str = "rdp",
) -> tuple[float, float, float]:
    """As :func:`spent`, with the selection of the recipe's ``peft`` block (as JSON)."""
    config = peft_config(json.loads(peft))
    plan = PrivacyPlan.create(
        num_examples=num_examples,
        expected_batch_size=batch,
        clipping_norm=0.1,
        num_train_epochs=epochs,
        target_epsilon=target,
        accountant=accountant,
        selection=config.selection_plan(0.1) if hasattr(config, "selection_plan") else None,
    )
    return plan.delta, *(
        epsilon(plan.events(), plan.delta, name).rounded_up() for name in ("rdp", "pld")
    )


@pytest.mark.parametrize("name", FROST_RECIPES)
def test_a_frost_recipe_spends_what_its_header_says(name):
    text, values = RECIPES[name].read_text(), read_yaml(str(RECIPES[name]))
    _, data, args = parsed(values)
    by_rdp, by_pld, delta, rows = HEADER.search(text).groups()
    assert int(rows) == GLUE_ROWS[data.dataset_config]
    # Section 5: the share of the data that SST-2's 1024 are, and the epochs of Li et al.
    assert args.expected_batch_size == round(1024 * int(rows) / GLUE_ROWS["sst2"])
    assert (
        args.num_train_epochs == {"sst2": 3, "qnli": 6, "qqp": 18, "mnli": 18}[data.dataset_config]
    )
    peft = json.dumps(values.get("peft"))
    found = spent_with_selection(int(rows), args.expected_batch_size, args.num_train_epochs, peft)
    assert found == (pytest.approx(float(delta), rel=1e-5), float(by_rdp), float(by_pld))
    assert re.search(r"# expected: accuracy [\d.]+ / [\d.]+ / [\d.]+ at epsilon 0.5 / 2 / 8", text)


# -- the images of DP-FROST's Table 2, and a small ViT ---

TABLES = [name for name in RECIPES if name.startswith("recipes/images/cifar")]
IMAGE_RECIPES = [name for name in RECIPES if name.startswith("recipes/images/")]
PUBLIC = "recipes/images/small_vit/public.yaml"
# Table 2: accuracy at epsilon 0.5, 2 and 8.
TABLE_2 = {
    "full": (75.15, 84.36, 86.57),
    "random": (78.22, 84.02, 86.42),
    "pval": (82.52, 87.19, 88.65),
    "lora": (80.61, 87.02, 88.55),
    "adapter": (75.17, 84.40, 86.67),
    "frost": (83.51, 87.31, 88.72),
}


def test_the_image_recipes_are_there():
    small = {f"recipes/images/small_vit/{m}.yaml" for m in ("full", "lora", "frost", "random")}
    table = {f"recipes/images/cifar{k}/vit_base_{m}.yaml" for k in (10, 100) for m in TABLE_2}
    assert set(IMAGE_RECIPES) == small | table | {PUBLIC}


@pytest.mark.parametrize("name", [name for name in IMAGE_RECIPES if name != PUBLIC])
def test_an_image_recipe_spends_what_its_header_says(name):
    text, values = RECIPES[name].read_text(), read_yaml(str(RECIPES[name]))
    model, data, args = parsed(values)
    by_rdp, by_pld, delta, rows = HEADER.search(text).groups()
    peft = json.dumps(values.get("peft"))
    plan = (args.expected_batch_size, args.num_train_epochs, peft)
    found = spent_with_selection(int(rows), *plan, args.target_epsilon, args.accountant)
    assert found == (pytest.approx(float(delta), rel=1e-5), float(by_rdp), float(by_pld))
    assert data.image_column == "img" and not data.augmentation
    if "small_vit" in name:
        assert (int(rows), data.train_split, model.new_head) == (5000, "train[5000:]", True)
        return
    # Section 5: 50,000 training images, batch 1,000, 3 epochs, Adam.
    assert (int(rows), args.expected_batch_size, args.num_train_epochs) == (50_000, 1000, 3)
    assert (args.accountant, args.weight_decay, args.target_epsilon) == ("rdp", 0, 0.5)
    assert " learning_rate=3e-3,1e-3,3e-4" in text
    method = name.removesuffix(".yaml").rpartition("_")[2]
    values = " / ".join(f"{value:.2f}" for value in TABLE_2[method])
    assert (f"# expected: accuracy {values} at epsilon 0.5 / 2 / 8" in text) == ("cifar100" in name)


def test_the_page_on_images_has_the_values_of_table_2():
    text = (ROOT / "recipes/images/README.md").read_text()
    for method, values in TABLE_2.items():
        row = f"(cifar100/vit_base_{method}.yaml) | " + " | ".join(f"{v:.2f}" for v in values)
        assert row in text


def test_the_public_half_and_the_private_half_share_no_row():
    """And the card of a private run does not take one for the other."""
    _, public, args = parsed(read_yaml(str(RECIPES[PUBLIC])))
    assert (public.train_split, args.privacy_mode) == ("train[:5000]", "non_private")
    for name in IMAGE_RECIPES:
        if "small_vit" in name and name != PUBLIC:
            model, private, _ = parsed(read_yaml(str(RECIPES[name])))
            assert model.model_name_or_path == args.output_dir
            assert private.train_split == "train[5000:]"
            assert not seen_in_pretraining(private.public_name, [public.public_name])
            assert seen_in_pretraining("cifar10", [public.public_name])


@pytest.mark.parametrize("name", [*FROST_RECIPES, "recipes/frost/README.md", *TABLES])
def test_the_commands_of_the_frost_tables_name_their_runs(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = re.findall(
        r"^(?:# command: )?hf-dp sweep (.*)$", (ROOT / name).read_text(), flags=re.MULTILINE
    )
    assert lines and (name.endswith(".md") or f"--config {name} " in lines[0])
    for line in lines:
        words = shlex.split(line)
        assert sweep.main([*words, "--dry-run"]) == 0
        recipe = read_yaml(words[words.index("--config") + 1])
        axes = [
            word.split("=")[0] for word in words if "=" in word and not word.startswith("model_")
        ]
        for key in axes:
            values = sweep.with_settings(recipe, {key: {} if key == "peft" else 1})
            parsed(
                {k: v for k, v in values.items() if k not in axes or key == k}
                | {"target_epsilon": 1}
            )
    assert "seed=0" in capsys.readouterr().out


def test_the_24_frost_recipes_are_there():
    expected = {
        f"recipes/frost/{task}/roberta_base_{method}.yaml"
        for task in GLUE_ROWS
        for method in FROST_METHODS
    }
    assert set(FROST_RECIPES) == expected


@pytest.mark.parametrize("name", [name for name in RECIPES if "infilling" in name])
def test_a_template_takes_the_recipes_columns(name):
    model, data, _ = parsed(read_yaml(str(RECIPES[name])))
    assert Infilling.of(model.infilling).template.texts == len(data.text_columns)


def test_table_1_of_the_paper():
    """The composed row of Table 1 is PRV's estimate of these plans; the bound printed in the
    headers lies just above."""
    printed = {("sst2", 3): 2.41, ("sst2", 8): 6.69, ("qnli", 3): 2.57, ("qnli", 8): 6.87}
    for (task, target), value in printed.items():
        values = read_yaml(str(RECIPES[f"recipes/glue/{task}/roberta_base_head_eps{target}.yaml"]))
        _, _, by_pld = spent(
            GLUE_ROWS[task], values["expected_batch_size"], values["num_train_epochs"], target
        )
        assert by_pld == pytest.approx(value, abs=0.012)


# -- DP-FP's ---

DP_FP_RECIPES = [name for name in RECIPES if name.startswith("recipes/dp_fp/")]
PUBLISHED_RECIPES = [name for name in DP_FP_RECIPES if "frozen" not in name]
DP_FP_BUDGETS = {
    "sst2": (1.73, 4.33),
    "qnli": (2.0, 4.75),
    "qqp": (2.52, 5.85),
    "mnli": (2.52, 5.83),
}


@pytest.mark.parametrize("name", PUBLISHED_RECIPES)
def test_a_published_dp_fp_recipe_says_that_nothing_is_established_and_has_the_papers_noise(name):
    text = RECIPES[name].read_text()
    _, data, args = parsed(read_yaml(str(RECIPES[name])))
    task = data.dataset_config
    assert "NO differential privacy guarantee is established for it." in text.splitlines()[0]
    figure = re.search(
        r"GDP-CLT (\S+) at delta (\S+) = 1/\(2 N\), N = (\d+); noise multiplier (\S+); no epsilon of what runs",
        text,
    )
    plan = PrivacyRequest(
        num_examples=GLUE_ROWS[task],
        expected_batch_size=args.expected_batch_size,
        num_train_epochs=args.num_train_epochs,
        target_epsilon=args.target_epsilon,
        accountant=args.accountant,
        mechanism=forward_plan(args, None),
    ).plan()
    assert (float(figure[1]), int(figure[3])) == (args.target_epsilon, plan.num_examples)
    assert float(figure[2]) == pytest.approx(plan.delta, rel=1e-5)
    assert float(figure[4]) == pytest.approx(plan.noise_multiplier, abs=1e-6)
    # section 4.1
    assert (
        args.expected_batch_size,
        args.num_micro_batches,
        args.representation_clipping_norm,
    ) == (32, 32, 1.0)
    assert (args.num_train_epochs, args.learning_rate, data.max_length) == (3, 5e-6, 128)
    first, second = (f"{budget:.2f}" for budget in DP_FP_BUDGETS[task])
    assert f"--config {name} --grid target_epsilon={first},{second} " in text
    assert re.search(
        r"# expected: accuracy [\d./]+ / [\d./]+ at the paper's two budgets, [\d./]+ without privacy",
        text,
    )


def test_the_12_published_recipes_and_a_sound_one_are_there():
    encoders = ("bert_base", "roberta_base", "roberta_large")
    expected = {
        f"recipes/dp_fp/{task}/{encoder}.yaml" for task in GLUE_ROWS for encoder in encoders
    }
    assert set(DP_FP_RECIPES) == expected | {"recipes/dp_fp/sst2/minilm_frozen.yaml"}


def test_the_frozen_recipe_spends_what_its_header_says():
    name = "recipes/dp_fp/sst2/minilm_frozen.yaml"
    _, _, args = parsed(read_yaml(str(RECIPES[name])))
    plan = PrivacyRequest(
        num_examples=GLUE_ROWS["sst2"],
        expected_batch_size=args.expected_batch_size,
        num_train_epochs=args.num_train_epochs,
        target_epsilon=args.target_epsilon,
        mechanism=forward_plan(args, None),
    ).plan()
    header = r"# privacy: epsilon (\S+) \(pld, bound\) of each sentence at delta (\S+) ="
    stated = re.search(header, RECIPES[name].read_text())
    assert epsilon(plan.events(), plan.delta).rounded_up() == float(stated[1])
    assert plan.delta == pytest.approx(float(stated[2]), rel=1e-5)


@pytest.mark.parametrize("name", [*PUBLISHED_RECIPES, "recipes/dp_fp/README.md"])
def test_the_commands_of_the_dp_fp_tables_name_their_runs(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = re.findall(
        r"^(?:# command: )?hf-dp sweep (.*?)(?: --plot \S+)?$",
        (ROOT / name).read_text(),
        flags=re.MULTILINE,
    )
    assert lines
    for line in lines:
        assert sweep.main([*shlex.split(line), "--dry-run"]) == 0
    assert "seed=0" in capsys.readouterr().out


def test_the_table_of_assumptions_is_what_the_accountants_say():
    text = (ROOT / "recipes/dp_fp/README.md").read_text()
    sigma, rate, steps = 0.346135114, 32 / (32 * 67_349), 6_313
    for event, stated in (
        (PoissonSampledGaussian(sigma, rate, steps * 32), "5.90"),
        (SampledRecordRelease(sigma, rate, steps, 32), "67.7"),
        (RecordRelease(sigma), "16.1"),
    ):
        digits = len(stated.split(".")[1])
        assert (
            round(epsilon(event, 1 / (2 * 67_349)).value, digits) == float(stated)
            and f"| {stated} |" in text
        )


@pytest.mark.slow
def test_the_demonstration_shows_what_it_says():
    done = subprocess.run(
        [sys.executable, "recipes/dp_fp/why_not_proven.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts = re.findall(
        r"^(published|frozen) +(\S+) +(\d+) +(\d+)$", done.stdout, flags=re.MULTILINE
    )
    assert [(there, without) for _, _, there, without in counts] == [("20", "0")] * 4 + [
        ("0", "0")
    ] * 4
    assert (
        "post-processing does not cover it" in done.stdout
        and "nothing below it can tell" in done.stdout
    )
