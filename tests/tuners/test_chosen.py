"""What DP-FROST chose, read from ``selection.json``."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from hf_dp.cli.main import main
from hf_dp.errors import ConfigError
from hf_dp.tuners.frost.select import estimate
from hf_dp.tuners.frost.tuner import KINDS, FrostConfig, _placed, read_chosen
from hf_dp.tuners.public_choice import RandomConfig
from tests import tiny

GIVEN = {
    "unfreeze_ratio": 0.3, "selection_sample_rate": 0.3, "selection_iterations": 2,
    "selection_noise_multiplier": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run of two selections."""
    folder = tmp_path_factory.mktemp("frost")
    config = FrostConfig(**GIVEN, num_selections=2)
    given = {"model": tiny.model(num_hidden_layers=2), "peft_config": config}
    trainer = tiny.trainer(folder, given=given, max_steps=2)
    trainer.train()
    trainer.save_model()
    return folder


def test_each_partition_has_its_estimate_and_its_place_in_the_order(run):
    made = json.loads((run / "selection.json").read_text())["made"]
    selections = read_chosen(str(run))
    assert len(selections) == 2
    for one, found in zip(made, selections, strict=True):
        assert one["candidates"] == len(found.parts) == 21
        ordered = sorted((p for p in found.parts if p.order), key=lambda part: part.order)
        assert [part.name for part in ordered] == one["partitions"]
        names = [part.name for part in found.parts]
        rows = one["noisy_magnitudes"]
        table = np.array([[row.get(name, np.nan) for name in names] for row in rows])
        expected = estimate(table, one["sensitivities"], 0.3)
        assert [part.magnitude for part in found.parts] == pytest.approx(expected)
        assert (found.magnitude, found.norm_order, found.noised) == ("mgna", 1, True)


def test_the_command_prints_what_a_figure_reads(run, capsys):
    """tests/cli/test_figure.py draws such a record."""
    assert main(["partitions", "--chosen", str(run)]) == 0
    for printed, found in zip(
        json.loads(capsys.readouterr().out), read_chosen(str(run)), strict=True
    ):
        assert printed["parts"] == [asdict(part) for part in found.parts]


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32
}  # fmt: skip
FAMILIES = {
    "bert": SMALL,
    "roberta": SMALL,
    "mpnet": SMALL,
    "distilbert": {"n_layers": 2, "dim": 16, "n_heads": 2, "hidden_dim": 32},
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2},
    "llama": {**SMALL, "num_key_value_heads": 2},
    "modernbert": {**SMALL, "global_attn_every_n_layers": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_block_has_a_known_kind_of_its_own(family):
    config = AutoConfig.for_model(family, **FAMILIES[family])
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    parts = FrostConfig(task_type="SEQ_CLS").candidate_partitions(model)
    placed = _placed([part.name for part in parts])
    inside = [(block, kind) for _, block, kind in placed if block]
    assert len(inside) == len(set(inside))
    assert {block for block, _ in inside} == {"0", "1"}
    kinds = {kind.rstrip(" 12") for _, kind in inside}
    assert kinds <= set(KINDS), kinds - set(KINDS)
    assert {"attention output", "intermediate", "output", "layer norm"} <= kinds
    assert ("query" in kinds) != ("query, key, value" in kinds)


def test_other_matrices_keep_their_names():
    names = ["a.layers.0.scale", "a.layers.0.query", "b.layers.0.query", "embeddings.word"]
    assert _placed(names) == [
        ("a.layers.0.scale", "a.layers 0", "scale"),
        ("a.layers.0.query", "a.layers 0", "query"),
        ("b.layers.0.query", "b.layers 0", "query"),
        ("embeddings.word", "", "embeddings.word"),
    ]


def test_what_holds_no_selection_of_frost_is_named(tmp_path):
    with pytest.raises(ConfigError, match="selection.json"):
        read_chosen(str(tmp_path))
    RandomConfig(parameters=["a"]).write_details(str(tmp_path))
    with pytest.raises(ConfigError, match="the method 'frost', got 'random'"):
        read_chosen(str(tmp_path))
    FrostConfig(made=[{"partitions": []}]).write_details(str(tmp_path))
    with pytest.raises(ConfigError, match="another version of hf_dp"):
        read_chosen(str(tmp_path))


@pytest.mark.parametrize("words", [[], ["bert", "--chosen", "a"]])
def test_a_model_or_a_run_but_not_both(words, capsys):
    with pytest.raises(SystemExit):
        main(["partitions", *words])
    assert "--chosen FOLDER" in capsys.readouterr().err
