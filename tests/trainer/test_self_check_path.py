"""The self-check goes the way of the rows: through the user's collator and our padding."""

import re
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import tiny
import torch
from data_paths import PATHS, OwnTrainer, own, trainer_of, vectors
from peft import (
    LoKrConfig,
    LoraConfig,
    MissConfig,
    PrefixTuningConfig,
    TinyLoraConfig,
    get_peft_model,
)
from torch.nn import functional as F
from transformers import DataCollatorWithPadding, default_data_collator

from hf_dp.batches.padding import Padding
from hf_dp.errors import DataError, SelfCheckError, UnsupportedLossError, UnsupportedModelError
from hf_dp.run import checks
from hf_dp.run.synthetic import made_up_rows
from hf_dp.statement.evidence import earlier_runs, read
from hf_dp.trainer.trainer import DPTrainer

THROUGH_THE_COLLATOR = [
    "padding", "padding to a multiple", "token classification", "masked LM", "MixUp",
    "causal LM, padded on the left", "causal LM, labels given, padded on the left", "seq2seq",
    "decoder inputs given", "decoder as a classifier", "images", "photographs by a transform",
    "photographs of the task, augmented", "texts that the collator tokenizes", "multi-label",
    "regression", "torch tensors", "columns of one's own", "a collator that remembers",
    "a collator that pops labels of shared rows",
]  # fmt: skip


@pytest.mark.parametrize("name", THROUGH_THE_COLLATOR)
def test_made_up_rows_go_through_the_collator(name, tmp_path, warnings_of):
    warned = warnings_of("run.training_data")
    trainer = trainer_of(tmp_path, PATHS[name])
    layout = trainer.run.training_data().looked_over.layout
    examples = trainer.synthetic_batches()
    assert not any("skips the data collator" in text for text in warned)
    for example in examples:
        layout.check(example)  # the columns and types that rows have after the collator
    trainer.run.check_engine()


def test_a_row_that_cannot_be_made_up_is_said(tmp_path, warnings_of):
    warned = warnings_of("run.training_data")

    class Tokens:
        def __init__(self, row):
            self.row = row

    collator = DataCollatorWithPadding(tiny.tokenizer())
    given = {"train_dataset": [Tokens(dict(row)) for row in tiny.dataset()], "eval_dataset": None}
    given["data_collator"] = lambda rows: collator([row.row for row in rows])
    trainer = tiny.trained(tiny.trainer(tmp_path, given=given, max_steps=1))
    assert trainer.ledger.steps() == 1
    (said,) = warned
    for words in ("skips the data collator", "a Tokens cannot be made up", "synthetic_batches"):
        assert words in said


def test_a_padding_that_the_loss_sees_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Padding, "fill", lambda self, name, leaf: 1)
    with pytest.raises(SelfCheckError, match="beside a longer one|clipped sum"):
        tiny.trainer(tmp_path).train()


def of_own(folder: Any, cls: type[DPTrainer], data: Any = None, **options: Any) -> DPTrainer:
    """A trainer of a model of one's own, which takes `x`."""
    given = {"model": own(), "train_dataset": vectors() if data is None else data, "eval_dataset": None,
             "data_collator": default_data_collator}  # fmt: skip
    return tiny.trainer(folder, cls=cls, given=given, **{"remove_unused_columns": False, **options})


class Returns(OwnTrainer):
    what: Any = None

    def synthetic_batches(self):
        return self.what


x, y = torch.randn(1, 4), torch.randn(1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (None, "a list of at least two examples, each a batch of one, got a NoneType"),
        (({"x": x}, [{"x": x}]), "got a tuple"),
        ([{"x": x, "labels": y}], "got 1 of them"),
        ([{"x": torch.randn(3, 4), "labels": y}] * 2, r"item 0 has the shapes .*x.*3, 4"),
        ([{"x": x, "labels": torch.tensor(1.0)}] * 2, "item 0 has the shapes .*labels"),
        ([{"x": x, "labels": y}, {"x": x}], r"Item 1 of what synthetic_batches\(\) returns does not fit: .*lacks"),
        ([{"x": x}] * 2, r"Item 0 of what synthetic_batches\(\) returns does not fit: .*lacks \['labels'\]"),
        ([{}, {}], "but item 0"),
    ],
)  # fmt: skip
def test_a_wrong_return_value_of_synthetic_batches_is_named(what, message, tmp_path):
    class Wrong(Returns):
        pass

    Wrong.what = what
    with pytest.raises(DataError, match=message):
        of_own(tmp_path, Wrong).train()
    assert not (tmp_path / "ledger.jsonl").exists()


class WithoutSynthetic(DPTrainer):
    def compute_per_example_loss(self, model, inputs):
        return F.mse_loss(model(inputs["x"]), inputs.pop("labels"), reduction="none")


def test_what_the_made_up_rows_show_is_named(tmp_path):
    message = r"Own takes None.*Override DPTrainer.synthetic_batches"
    with pytest.raises(UnsupportedModelError, match=message):
        of_own(tmp_path, WithoutSynthetic).train()

    class Mean(DPTrainer):
        def compute_per_example_loss(self, model, inputs):
            return super().compute_per_example_loss(model, inputs).mean()

    message = r"one loss for each example, shape \(1,\) for a batch of one, got \(\)"
    with pytest.raises(UnsupportedLossError, match=message):
        tiny.trainer(tmp_path, cls=Mean).train()
    message = "padding_values names 'token_wieghts', but the collated rows have"
    with pytest.raises(DataError, match=message):
        tiny.trainer(tmp_path, padding_values={"token_wieghts": 0}).train()
    data = datasets.Dataset.from_list(vectors())
    message = r"fail on a synthetic row.*KeyError.*'x'.*If a column is missing, set remove"
    with pytest.raises(DataError, match=message):
        of_own(tmp_path, OwnTrainer, data, remove_unused_columns=True).train()
    with pytest.raises(DataError, match=r"KeyError.*'x'.*the sizes .*\}\. If rows are too long"):
        of_own(tmp_path, OwnTrainer, data.rename_column("x", "z")).train()


def test_a_model_of_ones_own_trains_saves_and_has_a_card(tmp_path):
    trainer = tiny.trained(of_own(tmp_path, OwnTrainer, max_steps=1))
    trainer.save_model()
    assert trainer.privacy_statement().status == "proven"
    assert "Privacy" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "privacy.json").exists()


def test_the_loss_gets_a_batch_of_its_own(tmp_path):
    class Popping(DPTrainer):
        def compute_per_example_loss(self, model, inputs):
            labels = inputs.pop("labels")
            inputs["input_ids"].clamp_(max=18)
            return F.cross_entropy(model(**inputs).logits, labels, reduction="none")

    assert tiny.trained(tiny.trainer(tmp_path, cls=Popping, max_steps=1)).ledger.steps() == 1


def test_nothing_of_a_real_row_is_in_a_made_up_one():
    secret = 77_777
    row = {
        "input_ids": [secret] * 4, "attention_mask": [secret] * 4, "number": secret, "text": f"{secret}", "flag": True,
        "words": [f"{secret}"] * 4, "floats": [77.777] * 3, "array": np.full((2, 2), secret), "score": 77.777,
        "tensor": torch.full((3,), float(secret)), "nested": {"pair": (secret, [secret])}, "none": None,
        "image": PIL.Image.new("L", (3, 2), 77), "labels": 1,
    }  # fmt: skip
    ids = [torch.ones(1, length, dtype=torch.long) for length in (3, 6)]
    examples = [{"input_ids": each, "labels": torch.tensor([0])} for each in ids]
    torch.manual_seed(0)
    made = made_up_rows([row, row], examples)
    shown = re.sub("0x[0-9A-F]+", "", repr(made))  # without addresses
    assert "777" not in shown and [len(each["attention_mask"]) for each in made] == [3, 6]
    types = {name: type(value) for name, value in row.items() if name != "image"}
    for each in made:
        image = each.pop("image")
        assert {name: type(value) for name, value in each.items()} == types
        assert image.size == (3, 2) and image.mode == "L" and each["flag"] is False


# -- what came before the run ---


def adapted(init: Any) -> Any:
    config = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    model = get_peft_model(tiny.model(), config)
    model.peft_config["default"].init_lora_weights = init
    return model


@pytest.mark.parametrize("init", ["eva", "corda", "lora_ga", "something_new", "mini_of_rows"])
def test_an_adapter_that_may_come_from_data_is_refused_unless_said_to_be_public(init, tmp_path):
    model = adapted(init)
    message = f"init_lora_weights='{init}'.*adapter_init_data_is_public=True"
    with pytest.raises(UnsupportedModelError, match=message):
        tiny.trainer(tmp_path / "a", given={"model": model})
    options = {"adapter_init_data_is_public": True, "max_steps": 1}
    made = tiny.trained(tiny.trainer(tmp_path / "b", given={"model": model}, **options))
    (claim,) = earlier_runs(read(tmp_path / "b"))  # which a later run names, too
    assert claim.public_adapter and made.privacy_statement().facts.public_adapter


@pytest.mark.parametrize(
    "init", [True, False, "gaussian", "olora", "pissa", "pissa_niter_4", "orthogonal"]
)
def test_an_adapter_from_weights_alone_is_taken(init, tmp_path):
    tiny.trainer(tmp_path, given={"model": adapted(init)})


MISS = {"r": 4, "target_modules": ["query"]}
FREE = {
    "bat": lambda: MissConfig(init_weights="bat", **MISS),
    "mini": lambda: MissConfig(init_weights="mini", mini_r=2, **MISS),
    "lycoris": lambda: LoKrConfig(init_weights="lycoris", target_modules=["query"]),
    "uniform": lambda: TinyLoraConfig(init_weights="uniform", target_modules=["query"]),
    "zero": lambda: PrefixTuningConfig(
        init_weights="zero", num_virtual_tokens=2, task_type="SEQ_CLS"
    ),
}


@pytest.mark.parametrize("init", FREE)
def test_other_adapters_from_no_data_are_taken(init):
    checks.refuse_data_in_adapters(get_peft_model(tiny.model(), FREE[init]()))


@pytest.mark.parametrize(
    "hold", [lambda data: data, lambda data: {"rows": data.select(range(9))}["rows"]]
)
def test_a_collator_that_holds_training_rows_is_refused(hold, tmp_path):
    data = tiny.dataset()
    held, pad = hold(data), DataCollatorWithPadding(tiny.tokenizer())

    def retrieving(rows):
        return pad([rows[0] | {"label": held[0]["label"]}])

    with pytest.raises(DataError, match="holds rows of the training set"):
        tiny.trainer(tmp_path, given={"train_dataset": data, "data_collator": retrieving}).train()
