"""``hf-dp plan`` for recipes of DP-FP: the plan of the run, and what is known of its cost."""

from __future__ import annotations

import json

import pytest
import yaml

from hf_dp.accounting import (
    PoissonSampledGaussian,
    RecordRelease,
    SampledRecordRelease,
    epsilon,
    gdp_clt,
)
from hf_dp.cli.main import main
from hf_dp.trainer.arguments import DPTrainingArguments, plan_of
from hf_dp.tuners.base import Tuner

N = 4_000
COMMON = {"privacy_mode": "dp_fp", "expected_batch_size": 32, "num_train_epochs": 2}
PUBLISHED = {
    **COMMON,
    "dp_fp_variant": "published",
    "target_epsilon": 1.73,
    "num_micro_batches": 4,
}
VARIANTS = {
    "published": PUBLISHED,
    "frozen, once": {**COMMON, "dp_fp_variant": "frozen", "target_epsilon": 3},
    "frozen, fresh": {
        **COMMON,
        "dp_fp_variant": "frozen",
        "representation_release": "fresh",
        "target_epsilon": 3,
        "representation_clipping_norm": 0.5,
    },
    "frozen, labels": {
        **COMMON,
        "dp_fp_variant": "frozen",
        "target_epsilon": 3,
        "label_epsilon": 1,
        "class_names": ["a", "b"],
    },
    "private encoder": {
        **COMMON,
        "dp_fp_variant": "private_encoder",
        "target_epsilon": 3,
        "representation_budget_ratio": 0.25,
        "per_example_max_grad_norm": 0.2,
    },
    "private encoder, given noise": {
        **COMMON,
        "dp_fp_variant": "private_encoder",
        "noise_multiplier": 1.5,
        "representation_noise_multiplier": 3.0,
        "labels_in_vector": True,
        "class_names": ["a", "b"],
    },
}


@pytest.fixture
def recipe(tmp_path):
    def write(values):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return str(path)

    return write


def plan(recipe, values, *words):
    return main(["plan", "--config", recipe(values), "--num-examples", str(N), *words])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_plan_is_that_of_the_run(name, recipe, capsys, tmp_path):
    values = VARIANTS[name]
    assert plan(recipe, values, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    given = {key: value for key, value in values.items() if key != "class_names"}
    args = DPTrainingArguments(str(tmp_path), use_cpu=True, **given)
    expected = plan_of(args, N, Tuner(), 2)
    assert found["plan"] == json.loads(json.dumps(expected.to_dict()))
    assert found["effective_noise_multiplier"] is None


def test_the_published_variant_states_no_epsilon_and_what_a_bound_says(recipe, capsys):
    assert plan(recipe, PUBLISHED) == 0
    said = capsys.readouterr().out
    steps, rate, delta = 250, 32 / (4 * N), 1 / (2 * N)
    sigma = gdp_clt.noise_multiplier(1.73, delta, rate, steps * 4)
    assert f"noise multiplier {sigma:.6g}" in said and "250 steps" in said
    assert "has NO differential privacy guarantee: no epsilon is known for it" in said
    assert "The paper's figure is 1.730 (GDP-CLT, an estimate under assumptions" in said
    assert "labels: not protected" in said
    events = [
        PoissonSampledGaussian(sigma, rate, steps * 4),
        SampledRecordRelease(sigma, rate, steps, 4),
        RecordRelease(sigma, 1),
    ]
    table = said[said.index("if this were so") :].splitlines()[1:]
    for event, line in zip(events, table, strict=False):
        assert line.startswith(f"{epsilon(event, delta).rounded_up(2):.2f} ")
    assert table[3].startswith("unknown") and len(table) == 4
    assert "epsilon at delta" not in said  # the heading of what may be claimed


def test_the_noise_of_the_frozen_variant_on_sst2(recipe, capsys):
    """1.41 for epsilon 3 (the research behind this variant)."""
    values = {**VARIANTS["frozen, once"], "num_train_epochs": 20}
    assert main(["plan", "--config", recipe(values), "--num-examples", "67349"]) == 0
    said = capsys.readouterr().out
    assert "noise multiplier 1.4112" in said and "once for each row" in said
    assert "labels: not protected" in said and "pld        bound     3.000" in said


def test_another_variant_of_the_same_recipe_and_a_table(recipe, capsys):
    values = {**COMMON, "dp_fp_variant": "published", "target_epsilon": 3}
    assert plan(recipe, values, "--dp-fp-variant", "private_encoder") == 0
    said = capsys.readouterr().out
    assert "come from two independent draws" in said and "gradients below: noise multiplier" in said
    assert plan(recipe, values, "--sweep", "target_epsilon=1,3") == 0
    said = capsys.readouterr().out
    assert "paper's figure" in said and "NO differential privacy guarantee" in said
    assert plan(recipe, VARIANTS["frozen, once"], "--sweep", "target_epsilon=1,3") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["target_epsilon", "steps", "vector", "noise", "pld"]
    assert [row.split()[-1] for row in rows[1:3]] == ["1.000", "3.000"]


def test_rows_that_pass_the_model(recipe, capsys):
    """Once each with a frozen encoder, by two draws with a private one."""
    examples = []
    for name in ("published", "frozen, fresh", "private encoder"):
        assert plan(recipe, VARIANTS[name], "--json") == 0
        examples.append(json.loads(capsys.readouterr().out)["examples"])
    assert examples == [250 * 32, N, 2 * 250 * 32]


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({}, ["--parameters", "9"], "`--parameters` is for privacy_mode dp_sgd"),
        ({"sampling": "random_allocation"}, [], "`sampling` to be left at 'poisson'"),
        ({"noised_loss_bound": 2}, [], "`noised_loss_bound` to be left at None"),
        ({"label_epsilon": 1}, [], "--num_classes K"),
        ({}, ["--accountant", "gdp_clt"], "`accountant` to be a bound"),
        ({"privacy_mode": "dp_sgd"}, ["--dp-fp-variant", "frozen"], "`dp_fp_variant` to be left"),
        ({"privacy_unit": "user", "privacy_unit_column": "a"}, [], "a user of k rows"),
    ],
)
def test_what_cannot_be_planned_is_named(recipe, capsys, change, words, message):
    assert plan(recipe, {**VARIANTS["frozen, once"], **change}, *words) == 2
    assert message in capsys.readouterr().err
