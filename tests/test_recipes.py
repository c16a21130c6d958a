"""Every recipe parses, by the task it names; what it says of a paper is what the paper says, and it
spends what its first lines say.

What the papers say is in tests/golden/papers.yaml, and nowhere else in the tests.
"""

import itertools
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from all_recipes import RECIPES, values_of
from pages import ROOT
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    TrainingArguments,
)

from hf_dp.accounting import PoissonSampledGaussian, RecordRelease, SampledRecordRelease, epsilon
from hf_dp.cli import cells, sweep
from hf_dp.cli.config import parse, peft_config
from hf_dp.cli.tasks import generation
from hf_dp.cli.tasks.masked_lm import PretrainingArguments
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.statement.facts import seen_in_pretraining
from hf_dp.tasks.classification import DataArguments, ImageArguments
from hf_dp.tasks.models import ImageModelArguments, ModelArguments
from hf_dp.tasks.templates import Infilling
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.forward_arguments import forward_plan
from hf_dp.tuners.base import Tuner, apply_peft
from hf_dp.tuners.methods import tuner_for

GIVEN_BY_THE_USER = {"text_files": ["a.parquet"]}
ARGUMENTS: dict[str, list[type]] = {
    "text_classification": [ModelArguments, DataArguments, DPTrainingArguments],
    "causal_lm": [*generation.CAUSAL.ARGUMENTS, DPTrainingArguments],
    "seq2seq": [*generation.CAUSAL.ARGUMENTS, DPTrainingArguments],
    "image_classification": [ImageModelArguments, ImageArguments, DPTrainingArguments],
    "masked_lm": [PretrainingArguments, TrainingArguments],
}


def parsed(values: dict[str, Any]) -> tuple[Any, ...]:
    values = {**values, "use_cpu": True}
    if values["task"] == "masked_lm":
        values |= GIVEN_BY_THE_USER
    return parse(ARGUMENTS[values["task"]], values, [], prog="")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_parses(name):
    values = values_of(name)
    *_, args = parsed(values)
    peft_config(values.get("peft"))
    assert args.output_dir.startswith("outputs/")


@pytest.mark.parametrize("name", [name for name in RECIPES if "infilling" in name])
def test_a_template_takes_the_recipes_columns(name):
    model, data, _ = parsed(values_of(name))
    assert Infilling.of(model.infilling).template.texts == len(data.text_columns)


# -- recipes that reproduce a paper ---

PAPERS = yaml.safe_load((ROOT / "tests/golden/papers.yaml").read_text(encoding="utf-8"))
# Keys that say where data are and how a run is carried out. Every other key of a recipe decides its
# result, and must be in papers.yaml.
NO_SETTINGS = {
    "task", "dataset_name", "dataset_config", "data_name", "data_format", "cut_prompts",
    "text_columns", "image_column", "label_column", "validation_split", "metrics",
    "max_new_tokens", "output_dir", "privacy_mode", "per_device_train_batch_size",
    "per_device_eval_batch_size", "seed", "logging_steps", "save_strategy", "peft.peft_type",
    "peft.task_type", "peft.fan_in_fan_out",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reproduction:
    """A recipe beside the experiment of a paper.

    Args: parts: of its name, ``{"task": "sst2", ...}``.
    """

    name: str
    experiment: dict[str, Any]
    parts: dict[str, str]

    @cached_property
    def text(self) -> str:
        return RECIPES[self.name].read_text(encoding="utf-8")

    @cached_property
    def values(self) -> dict[str, Any]:
        return flat(values_of(self.name))

    def of(self, entry: dict[str, Any], what: str = "value") -> Any:
        """What an entry of papers.yaml says of this recipe; None if nothing."""
        return pick(entry.get(what), entry.get("by", []), self.parts)

    @property
    def rows(self) -> int:
        return self.of(self.experiment["rows"])

    def line(self, start: str) -> str:
        (found,) = re.findall(rf"^# {start}(.*)$", self.text, flags=re.M)
        return found


def pick(value: Any, by: str | list[str], parts: dict[str, str]) -> Any:
    """Follow these parts of the name into ``value``, as far as it is a mapping by them."""
    for part in [by] if isinstance(by, str) else by:
        value = value.get(parts[part]) if isinstance(value, dict) else value
    return value


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a recipe, those of its ``peft`` block as ``peft.r``."""
    inside = {f"peft.{key}": value for key, value in (values.get("peft") or {}).items()}
    return {key: value for key, value in values.items() if key != "peft"} | inside


def plain(value: Any) -> Any:
    """Numbers as floats, also where YAML reads text, like 1e-3; anything else as it is."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, bool):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def reproductions() -> dict[str, Reproduction]:
    found = {}
    for experiment in PAPERS["experiments"]:
        for each in itertools.product(*experiment["names"].values()):
            parts = dict(zip(experiment["names"], each, strict=True))
            name = experiment["recipes"].format(**parts)
            found[name] = Reproduction(name, experiment, parts)
    return found


REPRODUCTIONS = reproductions()


def of_paper(paper: str) -> list[str]:
    return [name for name, each in REPRODUCTIONS.items() if each.experiment["paper"] == paper]


def test_every_recipe_of_a_paper_is_there_and_no_other_claims_to_be_one():
    assert set(REPRODUCTIONS) <= set(RECIPES)
    claims = {name for name, path in RECIPES.items() if "(the paper's" in path.read_text()}
    assert claims == set(REPRODUCTIONS)


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_a_recipe_has_the_papers_settings(name):
    recipe = REPRODUCTIONS[name]
    settings = recipe.experiment["settings"]
    assert set(recipe.values) - NO_SETTINGS <= set(settings), "settings that papers.yaml lacks"
    for key, entry in settings.items():
        assert "where" in entry or "ours" in entry
        expected = recipe.of(entry, "value" if "where" in entry else "ours")
        assert plain(recipe.values.get(key)) == plain(expected), (key, entry)
        if "ours" in entry and expected is not None:
            assert re.search(rf"\b{key.split('.')[-1]}: .*# ours", recipe.text), key


def scores(recipe: Reproduction) -> str:
    """What the recipe's line of expected scores begins with, numbers in their shortest form."""
    leaf = recipe.of(recipe.experiment["scores"])
    if isinstance(leaf, dict):
        by_metric = (f"{metric} {' / '.join(map(str, each))}" for metric, each in leaf.items())
        given = ["; ".join(by_metric)]
    else:
        given = leaf if isinstance(leaf, list) else [leaf]
    return shortest(recipe.experiment["scores"]["header"].format(*given))


def shortest(text: str) -> str:
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):g}", text)


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_a_recipes_first_lines_name_the_table_and_its_scores(name):
    recipe = REPRODUCTIONS[name]
    assert recipe.experiment["first_line"] in recipe.text.splitlines()[0]
    line = shortest(recipe.line("expected: "))
    which = r"(, matched/mismatched)? \(the paper's"
    assert re.match(re.escape(scores(recipe)) + which, line), (line, scores(recipe))
    assert "not run here)" in line


PRIVACY = re.compile(
    r"epsilon (\S+) \(rdp, bound\), (\S+) \(pld, bound\) at delta (\S+?)(?: = 1/\(2 N\))?, N = (\d+)"
)


@cache
def plan_of(rows: int, batch: float, epochs: float, target: float, **options: Any) -> PrivacyPlan:
    """The plan that an accountant, by default RDP, calibrates; many recipes have the same."""
    given = {"accountant": "rdp", "clipping_norm": 0.1, "num_examples": rows, **options}
    length = {"expected_batch_size": batch, "num_train_epochs": epochs}
    return PrivacyPlan.create(**given, **length, target_epsilon=target)


@cache
def spent(plan: PrivacyPlan, accountant: str) -> float:
    return epsilon(plan.events(), plan.delta, accountant).rounded_up()


def ours_and_private() -> list[str]:
    """Recipes that are no paper's, whose rows are protected by DP-SGD: each must say what it
    spends. A user's rows are not known before the data is, and DP-FP has tests of its own."""
    found = []
    for name in RECIPES:
        values = values_of(name)
        private = values.get("privacy_mode", "dp_sgd") == "dp_sgd" and values["task"] != "masked_lm"
        if private and name not in REPRODUCTIONS and "privacy_unit" not in values:
            found.append(name)
    return found


OF_PAPERS = of_paper("li") + of_paper("frost")
# It takes seconds to calibrate a selection beside its training by PLD; the small ViT's is in every
# run of the tests.
SECONDS = "recipes/sst2/half_epoch/frost.yaml"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == SECONDS))
        for name in OF_PAPERS + ours_and_private()
    ],
)
def test_a_private_recipe_spends_what_its_header_says(name):
    values = values_of(name)
    *_, args = parsed(values)
    by_rdp, by_pld, delta, rows = PRIVACY.search(RECIPES[name].read_text()).groups()
    if name in OF_PAPERS:
        recipe = REPRODUCTIONS[name]
        assert PRIVACY.fullmatch(recipe.line("privacy: ")) and int(rows) == recipe.rows
        assert (args.accountant, args.per_example_max_grad_norm) == ("rdp", 0.1)
    tuner = tuner_for(peft_config(values.get("peft")), True) or Tuner()
    clipping_norm = args.per_example_max_grad_norm
    options = {"clipping_norm": clipping_norm, "selection": tuner.plan(clipping_norm)}
    options |= {"accountant": args.accountant, "target_delta": args.target_delta}
    length = args.expected_batch_size, args.num_train_epochs, args.target_epsilon
    plan = plan_of(int(rows), *length, **options)
    assert plan.delta == pytest.approx(float(delta), rel=1e-5)
    assert (spent(plan, "rdp"), spent(plan, "pld")) == (float(by_rdp), float(by_pld))
    assert args.target_epsilon - 0.01 < spent(plan, args.accountant) <= args.target_epsilon


@pytest.mark.parametrize(
    "name", [name for name, each in REPRODUCTIONS.items() if "grid" in each.experiment]
)
def test_the_command_of_a_recipe_sweeps_what_the_paper_does(name):
    recipe = REPRODUCTIONS[name]
    words = sweep.build_parser().parse_args(shlex.split(recipe.line("command: hf-dp sweep ")))
    runs = list(cells.grid(words.grid, words.seeds, Path(words.output_dir)))
    found: dict[str, list[Any]] = {}
    for key, value in ((key, v) for cell in runs for key, v in cell.settings.items()):
        values = found.setdefault(key, [])
        if plain(value) not in values:
            values.append(plain(value))
    wanted = {key: plain(recipe.of(entry)) for key, entry in recipe.experiment["grid"].items()}
    assert found == {key: value for key, value in wanted.items() if value is not None}
    assert words.config == [name] and words.seeds == [0, 1, 2]


def trained(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """What trains of a model under the ``peft`` block of a recipe."""
    config = peft_config(values_of(name)["peft"])
    wrapped = apply_peft(model, config, torch.device("meta"))
    return {key: each for key, each in wrapped.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("task", ["sst2", "mnli"])
def test_frosts_lora_is_beside_every_matrix_of_the_encoder_and_the_head_trains_whole(task):
    with torch.device("meta"):
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
        model = RobertaForSequenceClassification(RobertaConfig(hidden_size=16, **sizes))
    blocks = [
        name
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and ".encoder." in name
    ]
    head = [name for name, _ in model.named_parameters() if name.startswith("classifier.")]
    found = trained(model, f"recipes/frost/{task}/roberta_base_lora.yaml")
    beside = [f"{name}.lora_{which}.default.weight" for name in blocks for which in "AB"]
    whole = [name.replace("classifier.", "classifier.modules_to_save.default.") for name in head]
    assert len(blocks) == 12
    assert set(found) == {f"base_model.model.{name}" for name in beside + whole}


@pytest.mark.parametrize(
    ("method", "numbers"),
    [("lora", 0.15e6), ("prefix", 10e6)],  # Li et al., section 5.2
)
def test_what_trains_of_gpt2_is_as_large_as_the_paper_says(method, numbers):
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    found = trained(model, f"recipes/e2e/gpt2_{method}_eps8.yaml")
    assert sum(each.numel() for each in found.values()) == pytest.approx(numbers, rel=0.05)


# -- the epsilons that Li et al. print beside their scores ---

PRINTED = [
    pytest.param(experiment, id=experiment["what"])
    for experiment in PAPERS["experiments"]
    if "epsilons" in experiment
]


@pytest.mark.parametrize("experiment", PRINTED)
def test_batch_and_epochs_fit_the_epsilons_that_the_paper_prints(experiment):
    """ "Composed" in the tables is PRV's estimate, and our bound by PLD lies beside it."""
    printed, accountant = experiment["epsilons"], {"composed": "pld", "gdp_clt": "gdp_clt"}
    checked = set()
    for recipe in REPRODUCTIONS.values():
        if recipe.experiment is not experiment:
            continue
        values = recipe.values
        for kind, name in accountant.items():
            row = recipe.of(printed, kind)
            for target, stated in zip((3, 8), row or (), strict=bool(row)):
                plan = plan_of(
                    recipe.rows, values["expected_batch_size"], values["num_train_epochs"], target
                )
                found = epsilon(plan.events(), plan.delta, name).value
                assert found == pytest.approx(stated, abs=printed["within"][kind]), recipe.name
                checked.add((kind, target))
    assert len(checked) == 4


@pytest.mark.parametrize(
    ("batch", "fitting"), [(1024, {"pld": (2.41, 6.69)}), (2048, {"gdp_clt": (1.73, 4.33)})]
)
def test_the_two_lines_of_sst_2_below_table_1_are_of_two_batch_sizes(batch, fitting):
    page = (ROOT / "recipes/glue/README.md").read_text()
    cells = [f"B = {batch}"]
    for name in ("pld", "gdp_clt"):
        plans = [plan_of(67_349, batch, 3, target) for target in (3, 8)]
        found = [epsilon(plan.events(), plan.delta, name).value for plan in plans]
        if name in fitting:
            assert found == pytest.approx(fitting[name], abs=0.012)
        cells.append(" / ".join(f"{value:.2f}" for value in found))
    assert f"| {' | '.join(cells)} |" in page


@pytest.mark.parametrize("task", ["sst2", "qnli", "qqp", "mnli"])
def test_the_noise_of_rgp_by_both_deltas_is_on_the_page(task):
    page = (ROOT / "recipes/glue/README.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| delta 1")]
    place = ["sst2", "qnli", "qqp", "mnli"].index(task)
    stated = [float(row.strip("|").split("|")[1 + place]) for row in rows]
    recipe = REPRODUCTIONS[f"recipes/glue/{task}/roberta_base_rgp_eps8.yaml"]
    length = recipe.values["expected_batch_size"], recipe.values["num_train_epochs"]
    plan = plan_of(recipe.rows, *length, 8)
    assert plan.noise_multiplier == pytest.approx(stated[1], abs=6e-4)
    (event,) = plan.events()
    at = replace(event, noise_multiplier=stated[0])
    assert epsilon(at, 1e-5, "rdp").value == pytest.approx(8, abs=0.02)


def test_the_rule_of_appendix_i_does_not_fit_table_1():
    """The rate and the steps of SST-2 on the larger sets; recipes/glue/README.md says so."""
    page = (ROOT / "recipes/glue/README.md").read_text()
    (experiment,) = (
        each for each in PAPERS["experiments"] if "glue" in each["recipes"] and "epsilons" in each
    )
    rows, stated = experiment["rows"]["value"], experiment["epsilons"]
    for task, name in (("qnli", "QNLI"), ("qqp", "QQP"), ("mnli", "MNLI")):
        ours = (
            experiment["settings"][key]["value"][task]
            for key in ("expected_batch_size", "num_train_epochs")
        )
        cells = [name]
        for batch, epochs in ((round(1024 * rows[task] / rows["sst2"]), 3), ours):
            plan = plan_of(rows[task], batch, epochs, 3)
            found = [epsilon(plan.events(), plan.delta, each).value for each in ("pld", "gdp_clt")]
            cells += [f"B = {batch}, {epochs} epochs", *(f"{value:.2f}" for value in found)]
            if epochs == 3:
                assert plan.steps == 198
                assert stated["composed"][task][0] - found[0] > 0.14
                assert stated["gdp_clt"][task][0] - found[1] > 0.4
        cells += [f"{stated[kind][task][0]:.2f}" for kind in ("composed", "gdp_clt")]
        assert f"| {' | '.join(cells)} |" in page


# -- DP-FP's ---


@pytest.mark.parametrize("name", of_paper("dp_fp"))
def test_a_published_dp_fp_recipe_says_that_nothing_is_established_and_has_the_papers_noise(name):
    recipe = REPRODUCTIONS[name]
    _, _, args = parsed(values_of(name))
    assert "NO differential privacy guarantee is established for it." in recipe.text.splitlines()[0]
    figure = re.search(
        r"GDP-CLT (\S+) at delta (\S+) = 1/\(2 N\), N = (\d+); noise multiplier (\S+); no epsilon of what runs",
        recipe.text,
    )
    plan = plan_of_vectors(args, recipe.rows)
    assert (float(figure[1]), int(figure[3])) == (args.target_epsilon, plan.num_examples)
    assert float(figure[2]) == pytest.approx(plan.delta, rel=1e-5)
    assert float(figure[4]) == pytest.approx(plan.noise_multiplier, abs=1e-6)


def plan_of_vectors(args: DPTrainingArguments, rows: int) -> PrivacyPlan:
    names = ("expected_batch_size", "num_train_epochs", "target_epsilon", "accountant")
    given = {name: getattr(args, name) for name in names}
    return PrivacyPlan.solve(num_examples=rows, mechanism=forward_plan(args, None), **given)


def test_the_page_says_what_the_noise_is_with_the_numbers_of_rows_of_table_3():
    page = (ROOT / "recipes/dp_fp/README.md").read_text()
    (experiment,) = (each for each in PAPERS["experiments"] if each["paper"] == "dp_fp")
    for task, theirs in experiment["paper_rows"]["value"].items():
        recipe = REPRODUCTIONS[f"recipes/dp_fp/{task}/bert_base.yaml"]
        _, _, args = parsed(values_of(recipe.name))
        ours, with_theirs = (
            plan_of_vectors(args, rows).noise_multiplier for rows in (recipe.rows, theirs)
        )
        row = f"{theirs:,} | {recipe.rows:,} | {with_theirs:.4f} | {ours:.4f} |"
        assert row in page, row


def test_the_frozen_recipe_spends_what_its_header_says():
    name = "recipes/dp_fp/sst2/minilm_frozen.yaml"
    _, _, args = parsed(values_of(name))
    plan = plan_of_vectors(args, 67_349)
    header = r"# privacy: epsilon (\S+) \(pld, bound\) of each sentence at delta (\S+) ="
    stated = re.search(header, RECIPES[name].read_text())
    assert epsilon(plan.events(), plan.delta).rounded_up() == float(stated[1])
    assert plan.delta == pytest.approx(float(stated[2]), rel=1e-5)


def test_the_table_of_assumptions_is_what_the_accountants_say():
    text = (ROOT / "recipes/dp_fp/README.md").read_text()
    sigma, rate, steps = 0.346135114, 32 / (32 * 67_349), 6_313
    for event, stated, digits in (
        (PoissonSampledGaussian(sigma, rate, steps * 32), "5.90", 2),
        (SampledRecordRelease(sigma, rate, steps, 32), "67.7", 1),
        (RecordRelease(sigma), "16.1", 1),
    ):
        assert round(epsilon(event, 1 / (2 * 67_349)).value, digits) == float(stated)
        assert f"| {stated} |" in text


@pytest.mark.slow
def test_the_demonstration_shows_what_it_says():
    words = [sys.executable, "recipes/dp_fp/why_not_proven.py"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = re.findall(r"^(?:published|frozen) +\S+ +(\d+) +(\d+)$", done.stdout, flags=re.M)
    assert counts == [("20", "0")] * 4 + [("0", "0")] * 4
    for said in ("post-processing does not cover it", "nothing below it can tell"):
        assert said in done.stdout


# -- images that no paper has values for, and the halves of a small ViT ---

METHODS = ("full", "random", "pval", "lora", "adapter", "frost")
PUBLIC = "recipes/images/small_vit/public.yaml"
SMALL = [f"recipes/images/small_vit/{m}.yaml" for m in ("full", "lora", "rgp", "frost", "random")]
CIFAR_10 = [f"recipes/images/cifar10/vit_base_{method}.yaml" for method in METHODS]
VIEWS = {f"recipes/images/views/{n}.yaml": k for n, k in {"one": 1, "four": 4, "eight": 8}.items()}


def test_the_image_recipes_are_there():
    found = {name for name in RECIPES if name.startswith("recipes/images/")}
    table = {name for name in REPRODUCTIONS if name.startswith("recipes/images/")}
    assert len(table) == 6 and found == {PUBLIC, *SMALL, *CIFAR_10, *VIEWS, *table}


def test_the_recipes_of_views_differ_in_views_alone():
    found = [values_of(name) for name in VIEWS]
    assert [values.get("views_per_example") for values in found] == [*VIEWS.values()]
    differ = ("views_per_example", "output_dir")
    alike = [{k: v for k, v in values.items() if k not in differ} for values in found]
    assert all(each == alike[0] for each in alike)


@pytest.mark.parametrize("name", CIFAR_10)
def test_cifar_10_runs_as_cifar_100_does(name):
    beside = name.replace("cifar10/", "cifar100/")
    ours, theirs = (values_of(each) for each in (name, beside))
    privacy = [PRIVACY.search(RECIPES[each].read_text()).group() for each in (name, beside)]
    assert privacy[0] == privacy[1]  # which test_recipes.py computes again
    data = ("dataset_name", "label_column", "output_dir")
    assert {k: v for k, v in ours.items() if k not in data} == {
        k: v for k, v in theirs.items() if k not in data
    }


def test_the_page_on_images_has_the_values_of_table_2():
    page = (ROOT / "recipes/images/README.md").read_text()
    for name, recipe in REPRODUCTIONS.items():
        if name.startswith("recipes/images/"):
            values = " | ".join(f"{v:.2f}" for v in recipe.of(recipe.experiment["scores"]))
            assert f"({name.removeprefix('recipes/images/')}) | {values}" in page


def test_the_public_half_and_the_private_half_share_no_row():
    """And the card of a private run does not take one for the other."""
    _, public, args = parsed(values_of(PUBLIC))
    assert (public.train_split, args.privacy_mode) == ("train[:5000]", "non_private")
    for name in SMALL:
        model, private, _ = parsed(values_of(name))
        _, _, _, rows = PRIVACY.search(RECIPES[name].read_text()).groups()
        assert (int(rows), private.train_split, model.new_head) == (5000, "train[5000:]", True)
        assert model.model_name_or_path == args.output_dir and private.image_column == "img"
        assert not private.augmentation
        assert not seen_in_pretraining(private.public_name, [public.public_name])
        assert seen_in_pretraining("cifar10", [public.public_name])
