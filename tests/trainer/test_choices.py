"""Multiple choice: the model folds (b, k, T) to (b k, T), and an example's k rows are clipped once.

Exactness is that of ``bert_choice`` in clipping/test_architectures.py.
"""

from typing import Any

import pytest
import tiny
import transformers as hf
from models import ARCHITECTURES, clipped, collate
from peft import LoraConfig
from transformers import DataCollatorForMultipleChoice

from hf_dp.cards.verify import verify
from hf_dp.errors import DataError, UnsupportedLossError, UnsupportedModelError


def row(number: int, choices: int = 3, label: int | None = None) -> dict[str, Any]:
    """A row whose choices differ in length."""
    ids = [[4 + (number + i + t) % 8 for t in range(3 + (number + i) % 4)] for i in range(choices)]
    mask = [[1] * len(each) for each in ids]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "label": number % 3 if label is None else label,
    }


def trainer(folder: Any, rows: list[dict[str, Any]] | None = None, **given: Any) -> Any:
    collator = DataCollatorForMultipleChoice(tiny.tokenizer())
    rows, held_out = rows or [row(i) for i in range(40)], [row(50 + i, 5) for i in range(8)]
    model = hf.BertForMultipleChoice(tiny.model(dropout=0.1).config)
    keywords = {"model": model, "train_dataset": rows, "eval_dataset": held_out, **given}
    return tiny.trainer(folder, given=keywords | {"data_collator": collator}, max_steps=1)


LORA = {"r": 2, "target_modules": ["query"]}


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**LORA, modules_to_save=["classifier"])])
def test_it_trains_through_the_collator(tmp_path, peft_config):
    made = trainer(tmp_path, peft_config=peft_config)
    made.train()
    assert {each["input_ids"].shape[:2] for each in made.synthetic_batches()} == {(1, 3)}
    assert made.evaluate()["eval_loss"] > 0
    made.save_model()
    assert verify(tmp_path).outcome == "ok"


def test_a_head_that_would_stay_random_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="modules_to_save=..classifier"):
        trainer(tmp_path, peft_config=LoraConfig(**LORA)).train()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0), row(1, label=3)], r"Row 1 .*`labels` holds \[3\].*one of the row's choices"),
        ([row(0), row(1, choices=2)], "`input_ids` .* differs in length .*2 to 3 in dimension 1"),
    ],
)
def test_rows_that_the_model_cannot_take_are_refused_before_the_first_draw(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        trainer(tmp_path, rows * 20).train()


def test_rows_that_are_taken_for_examples_are_refused(monkeypatch):
    """By a loss of one's own; and planted, by the engine."""
    architecture = ARCHITECTURES["bert_choice"]
    model = architecture.build()
    batch = collate(model, architecture.examples(model, (5, 3)))
    each = lambda model, batch: -model(**batch).logits.log_softmax(1).flatten()  # noqa: E731
    with pytest.raises(UnsupportedLossError, match="each of the 2 exam"):
        clipped(model, {name: batch[name] for name in batch if name != "labels"}, 1.0, loss=each)
    mine = type("Mine", (type(model),), {})  # a class of one's own, or FSDP2's
    model.__class__ = mine
    clipped(model, batch, 1.0)
    monkeypatch.setattr("hf_dp.clipping.engine._FOLDING", frozenset())
    with pytest.raises(Exception, match="cannot be split|must match|expand"):
        clipped(model, batch, 1.0)
