"""Training and evaluation read one label alike, whatever type the rows hold it in."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.nn import functional as F
from transformers import BertForTokenClassification

from hf_dp.errors import DataError
from hf_dp.run.synthetic import made_up_rows
from hf_dp.trainer import trainer as trainer_module

ONE = torch.tensor([True, False, False, True])
SEVERAL = torch.tensor([[True, False], [True, True], [False, False], [False, True]])
SEVERAL_OPTIONS = {"problem_type": "multi_label_classification"}


def of_one(logits: Any) -> Any:
    return F.cross_entropy(logits, ONE.long(), reduction="none")


def of_several(logits: Any) -> Any:
    return F.binary_cross_entropy_with_logits(logits, SEVERAL.float(), reduction="none").mean(1)


def of_a_number(logits: Any) -> Any:
    return (logits[:, 0] - ONE.float()) ** 2


CASES: dict[str, tuple[list[Any], dict[str, Any], Callable[[Any], Any]]] = {
    "true and false": (ONE.tolist(), {}, of_one),
    "numpy's": (list(ONE.numpy()), {}, of_one),
    "numpy's ids": (list(ONE.numpy().astype(np.int64)), {}, of_one),
    "bytes": (list(ONE.to(torch.uint8)), {}, of_one),
    "16 bits": (list(ONE.to(torch.int16)), {}, of_one),
    "several, true and false": (SEVERAL.tolist(), SEVERAL_OPTIONS, of_several),
    "several, whole": (SEVERAL.long().tolist(), SEVERAL_OPTIONS, of_several),
    "a number, true and false": (ONE.tolist(), {"num_labels": 1}, of_a_number),
    "a number, whole": (ONE.long().tolist(), {"num_labels": 1}, of_a_number),
}


def rows(labels: list[Any], begin: int) -> list[dict[str, Any]]:
    ids = [[2, begin + i, 5 + i, 3] for i in range(len(labels))]
    masked = [{"input_ids": each, "attention_mask": [1] * 4} for each in ids]
    return [{**row, "labels": label} for row, label in zip(masked, labels, strict=True)]


def of(labels: list[Any], options: dict[str, Any], folder: Any, model: Any = None) -> Any:
    model = tiny.model(**options) if model is None else model
    data = {"train_dataset": rows(labels * 4, 4)[:8], "eval_dataset": rows(labels, 8)}
    return tiny.trainer(folder, given={"model": model.eval(), **data}, expected_batch_size=4)


@pytest.mark.parametrize("case", CASES)
def test_a_label_is_trained_on_and_evaluated_as_one_value(case, tmp_path):
    labels, options, loss = CASES[case]
    trainer = of(labels, options, tmp_path)
    (batch,) = trainer.get_eval_dataloader()
    (made,) = made_up_rows(trainer.train_dataset[:1], trainer.synthetic_batches()[:1])
    label = np.asarray(made["labels"])
    assert label.dtype == np.asarray(labels[0]).dtype and label.ndim == np.asarray(labels[0]).ndim
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        expected = loss(trainer.model.eval()(**inputs).logits)
        torch.testing.assert_close(trainer.compute_per_example_loss(trainer.model, batch), expected)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected.mean()), rel=1e-6)


def test_true_and_false_of_tokens_are_classes(tmp_path):
    """Also beside a longer row: -100, which pads labels, would be true in their type."""
    model = BertForTokenClassification(tiny.model().config)
    trainer = of([[True, False, False, True]] * 4, {}, tmp_path, model)
    trainer.run.check_engine()
    ids = torch.tensor([[2, 8, 5, 3]])
    labels = torch.tensor([[True, False, False, True]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        expected = F.cross_entropy(logits[0], labels[0].long())
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    found = trainer.compute_per_example_loss(model, batch)
    torch.testing.assert_close(found, expected[None])


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        ([0.0, 1.0, 1.0, 0.0], {}),
        ([0.0, 1.0, 1.0, 0.0], {"problem_type": "single_label_classification"}),
        ([0.0, 1.0, 1.0, 0.3], {"num_labels": 3, "problem_type": "single_label_classification"}),
    ],
)
def test_floats_for_classes_are_refused_before_the_first_draw(labels, options, tmp_path):
    with pytest.raises(DataError, match="Row 0 of .*`labels` holds 0.0, a float, .*cast_column"):
        of(labels, options, tmp_path).run.training_data()


def test_planted_evaluation_that_reads_labels_as_they_come_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "with_labels_read", lambda model, inputs: inputs)
    with pytest.raises(ValueError, match="Target size"):
        of(ONE.tolist(), {}, tmp_path).evaluate()
