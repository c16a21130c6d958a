"""No row's ids end a run, and whatever else raises in a step costs no step that ran."""

import datasets
import pytest
import tiny
import torch
import transformers as hf
from transformers import default_data_collator

from hf_dp.batches.examples import Examples
from hf_dp.batches.limits import Limits
from hf_dp.batches.loader import BatchOptions
from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import Layout
from hf_dp.errors import DataError, StepError
from hf_dp.noise import SecretRandomness
from hf_dp.run import training_data
from hf_dp.run.training_data import TrainingData, refuse_ids_beyond_tables
from hf_dp.run.witnesses import checkpoints

SMALL = {
    "vocab_size": 19, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "num_labels": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


def luke():
    config = hf.LukeConfig(**SMALL, entity_vocab_size=20, entity_emb_size=16)
    return hf.LukeForSequenceClassification(config)


def layoutlm():
    return hf.LayoutLMForSequenceClassification(
        hf.LayoutLMConfig(**SMALL, max_2d_position_embeddings=64)
    )


def rocbert():
    config = hf.RoCBertConfig(**SMALL, shape_vocab_size=30, pronunciation_vocab_size=12)
    return hf.RoCBertForSequenceClassification(config)


def rows(**columns) -> list[dict]:
    """Rows of five tokens; ``columns``: made from the number of the row."""
    return [
        {
            "input_ids": [2, 5 + i % 7, 6, 7 + i // 7, 3], "attention_mask": [1] * 5, "labels": i % 2,
            **{name: of(i) for name, of in columns.items()},
        }
        for i in range(24)
    ]  # fmt: skip


def box(i: int) -> list[list[int]]:
    return [[j, i, j + 2, i + 3] for j in range(5)]


ENTITIES = {
    "entity_ids": lambda i: [1 + i % 18], "entity_attention_mask": lambda i: [1],
    "entity_position_ids": lambda i: [[1, 2, -1, -1]],
}  # fmt: skip
KINDS = {
    "shape ids": (rocbert, {"input_shape_ids": lambda i: [i] * 5, "input_pronunciation_ids": lambda i: [i % 12] * 5},
                  ("input_shape_ids", [1, 1, 30, 1, 1]), "looks up 30 in `.*shape_embed.*0 to 29"),
    "boxes": (layoutlm, {"bbox": box}, ("bbox", [[0, 0, 70, 3]] * 5), "looks up 70 in .*0 to 63"),
    "boxes whose sides are exchanged": (layoutlm, {"bbox": box}, ("bbox", [[0, 9, 2, 3]] * 5),
                                        "looks up -6 in `.*h_position_embeddings"),
    "below 0": (rocbert, {"input_shape_ids": lambda i: [i] * 5, "input_pronunciation_ids": lambda i: [3] * 5},
                ("input_pronunciation_ids", [3, -1, 3, 3, 3]), "looks up -1 in .*0 to 11"),
    "entities": (luke, ENTITIES, ("entity_ids", [20]), "looks up 20 in .*entity_emb.*0 to 19"),
}  # fmt: skip


def trainer_of(folder, model, data, **options):
    given = {"model": model, "train_dataset": datasets.Dataset.from_list(data), "eval_dataset": None,
             "data_collator": default_data_collator}  # fmt: skip
    return tiny.trainer(folder, given=given, accountant="rdp", **options)


@pytest.mark.parametrize("name", KINDS)
def test_ids_beyond_their_table_are_found_before_the_first_draw(name, tmp_path):
    model, columns, (column, wrong), message = KINDS[name]
    data = rows(**columns)
    trainer_of(tmp_path / "right", model(), data, max_steps=1).train()
    data[17][column] = wrong
    trainer = trainer_of(tmp_path / "wrong", model(), data)
    with pytest.raises(DataError, match=f"Row 17 of the training set .*{message}.*{column}"):
        trainer.train()
    assert trainer.ledger.steps() == 0


@pytest.mark.parametrize(("sharded", "whole"), [(False, 1), (True, 24)])
def test_a_forward_ends_after_its_last_table_except_of_shards(sharded, whole, monkeypatch):
    """The first shows how many lookups there are."""
    monkeypatch.setattr(training_data, "is_sharded", lambda model: sharded)
    model, ended = layoutlm(), []
    model.classifier.register_forward_hook(lambda *_: ended.append(1))
    data = datasets.Dataset.from_list(rows(bbox=box))
    examples, layout = Examples(data, default_data_collator, SecretRandomness()), Layout()
    layout.add(examples[0])
    known = ("input_ids", "labels")
    refuse_ids_beyond_tables(model, lambda batch: model(**batch).loss, examples, layout, known)
    assert len(ended) == whole


def test_spans_whose_places_were_checked_are_not_tried(tmp_path, monkeypatch):
    """With a loss of one's own nothing is known of them, and they are."""
    monkeypatch.setattr(training_data, "_Lookups", lambda *_, **__: pytest.fail("a pass"))
    model = hf.BertForQuestionAnswering(hf.BertConfig(**SMALL))
    places = {"start_positions": lambda i: 1 + i % 3, "end_positions": lambda i: 3}
    data = [{k: v for k, v in row.items() if k != "labels"} for row in rows(**places)]
    data = datasets.Dataset.from_list(data)

    def check(own_loss: bool) -> None:
        randomness, padding = SecretRandomness(), Padding.of(model, None)
        options, limits = BatchOptions(4, quiet=True), Limits.of(model, own_loss)
        found = TrainingData(data, default_data_collator, padding, limits, randomness, options)
        found.check(model, lambda batch: model(**batch).loss.reshape(1), needs_labels=True)

    check(own_loss=False)
    with pytest.raises(pytest.fail.Exception, match="a pass"):
        check(own_loss=True)


# -- what still raises inside a step ---


class FailsAt:
    """A loss that raises in one step, as a row that none has foreseen."""

    def __init__(self, trainer, step: int, error: Exception):
        self.trainer, self.step, self.error = trainer, step, error
        self.of_model = trainer.run._of_model

    def __call__(self, model, batch):
        if self.trainer.state.global_step == self.step and self.trainer.run._step_is_open:
            raise self.error
        return self.of_model(model, batch)


@pytest.mark.parametrize(
    ("error", "kind", "save"),
    [
        (ValueError("odd row"), StepError, "no"),
        (RuntimeError("odd row: shapes cannot be multiplied"), StepError, "no"),  # of no memory
        (DataError("odd row."), DataError, "steps"),
    ],
)
def test_what_ran_is_saved_and_what_it_cost_is_said(error, kind, save, tmp_path):
    options = {"max_steps": 4, "save_strategy": save, "save_steps": 100, "accountant": "rdp"}
    trainer = tiny.trainer(tmp_path, **options)
    trainer.run._of_model = FailsAt(trainer, 3, error)
    with pytest.raises(kind, match="odd row.*3 steps ran before it.*checkpoint-3") as raised:
        trainer.train()
    spent = trainer.epsilon()
    said = f"Epsilon {spent.rounded_up()} is spent at delta {trainer.privacy_plan.delta:g}."
    assert said in str(raised.value) and trainer.ledger.steps() == 3
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]
    saved = hf.BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-3")
    for name, value in saved.named_parameters():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=0)
    again = tiny.resumed(tiny.trainer(tmp_path, **options))
    assert again.ledger.steps() == again.state.global_step == 4


def test_in_the_first_step_nothing_is_spent_nor_saved(tmp_path):
    trainer = tiny.trainer(tmp_path, accountant="rdp")
    trainer.run._of_model = FailsAt(trainer, 0, ValueError("odd row"))
    with pytest.raises(StepError, match="Step 1 failed .*nothing is spent.*start again.$"):
        trainer.train()
    assert not checkpoints(tmp_path)


def test_a_row_that_cannot_be_fetched_any_more_costs_no_step_either(tmp_path, monkeypatch):
    trainer = tiny.trainer(tmp_path, max_steps=4, accountant="rdp")
    examples = trainer.run.training_data().examples
    fetch = type(examples)._row

    def gone(self, index):
        if trainer.state.global_step == 2:
            raise DataError(f"Row {index} of the training set cannot be read.")
        return fetch(self, index)

    monkeypatch.setattr(type(examples), "_row", gone)
    with pytest.raises(DataError, match="cannot be read. 2 steps ran before it.*checkpoint-2"):
        trainer.train()


def test_planted_rows_that_are_not_tried_end_the_run_in_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(training_data, "refuse_ids_beyond_tables", lambda *args: None)
    model, columns, (column, wrong), _ = KINDS["boxes"]
    data = rows(**columns)
    data[17][column] = wrong
    trainer = trainer_of(tmp_path, model(), data, max_steps=30, save_strategy="no")
    with pytest.raises(StepError, match="IndexError"):
        trainer.train()
