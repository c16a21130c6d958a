"""A row that could end the run when it is sampled is refused before, with its index."""

import functools
import math

import datasets
import pytest
import tiny
import torch
from data_paths import bert, gpt2, t5
from transformers import (
    BertForMaskedLM,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)

from hf_dp.batches import look_over
from hf_dp.batches.limits import Limits
from hf_dp.errors import DataError
from hf_dp.trainer.trainer import DPTrainer


def rows(change=None, at=7, **columns):
    made = tiny.dataset().to_dict() | columns
    if change:
        name, value = change
        made[name] = [value if i == at else each for i, each in enumerate(made[name])]
    return datasets.Dataset.from_dict(made)


def with_tokens(ids):
    made = rows(("input_ids", ids))
    return rows(
        input_ids=list(made["input_ids"]),
        attention_mask=[[1] * len(row) for row in made["input_ids"]],
    )


token_model = functools.partial(bert, BertForTokenClassification, num_labels=3)


def token_labels(last=0):
    return [
        [0] * (len(ids) - 1) + [last if i == 7 else 0]
        for i, ids in enumerate(tiny.dataset()["input_ids"])
    ]


def assert_refused(folder, message, train_dataset, options=None, **given):
    given = {"eval_dataset": None, "train_dataset": train_dataset, **given}
    trainer = tiny.trainer(folder, given=given, **(options or {}))
    with pytest.raises(DataError, match=message):
        trainer.train()
    assert trainer.ledger.steps() == 0 and not (folder / "ledger.jsonl").exists()


CASES = {
    "a label out of range": (lambda: rows(("label", 2)), {}, "Row 7 .*`labels` holds 2. Expected "
    "whole numbers from 0 to 1"),
    "a negative label": (lambda: rows(("label", -1)), {}, "Row 7 .*`labels` holds -1"),
    "a token out of range": (
        lambda: with_tokens([2, 19, 3]), {}, "Row 7 .*`input_ids` holds 19. Expected whole numbers "
        "from 0 to 18",
    ),
    "a label that is no number": (
        lambda: rows(("label", math.nan), label=[0.5] * 40), {"model": lambda: bert(num_labels=1)},
        "Row 7 .*`labels` holds NaN",
    ),
    "a token label out of range": (
        lambda: rows(labels=token_labels(3)).remove_columns("label"),
        {"model": token_model,
         "data_collator": DataCollatorForTokenClassification(tiny.tokenizer())},
        "Row 7 .*`labels` holds 3.*or -100 where nothing is predicted",
    ),
    "too many tokens": (
        lambda: with_tokens([4] * 25), {},
        "Model and loss fail on a synthetic row as large as the largest .*row 7 is the longest",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_bad_row_is_refused_with_its_index(case, tmp_path):
    make, given, message = CASES[case]
    given = {name: value() if name == "model" else value for name, value in given.items()}
    assert_refused(tmp_path, message, make(), **given)


def ids_as_they_are(rows):
    """A collator that makes tensors of lists, and nothing else."""
    return {
        ("labels" if k == "label" else k): torch.tensor([row[k] for row in rows]) for k in rows[0]
    }


def with_row(model=bert, side="right", **columns):
    """Rows of three tokens, but for row 7."""
    ordinary = {"input_ids": [2, 4, 3], "attention_mask": [1, 1, 1], "label": 0}
    of_tokens = {name: [0, 1, 2] for name in ("label", "position_ids") if name in columns}
    words = tiny.tokenizer()
    words.padding_side = side
    return model, [ordinary | of_tokens | (columns if i == 7 else {}) for i in range(12)], words


BESIDE_TOKENS = {
    "fewer labels than tokens": (with_row(model=token_model, label=[0, 1]), r"`labels` has shape \(1, 2\), but `input_ids`"),
    "a longer mask": (with_row(attention_mask=[1] * 4), r"`attention_mask` has shape \(1, 4\)"),
    "no tokens": (with_row(input_ids=[], attention_mask=[]), "it has no tokens|is a tensor of float32"),
    "a mask of zeros": (with_row(attention_mask=[0, 0, 0]), "its attention_mask is 0 everywhere"),
    "a mask that begins with zero": (with_row(attention_mask=[0, 1, 1]), "its attention_mask begins with 0"),
    "a hole beside left padding": (with_row(model=gpt2, side="left", label=[4, 5, 6], attention_mask=[1, 0, 1]), "has a hole"),
    "positions beyond the table": (with_row(position_ids=[0, 1, 24]), "`position_ids` holds 24. Expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE_TOKENS)
def test_columns_that_do_not_fit_the_tokens(case, tmp_path):
    (model, data, words), message = BESIDE_TOKENS[case]
    given = {"model": model(), "data_collator": ids_as_they_are, "processing_class": words}
    assert_refused(tmp_path, f"Row 7 .*({message})", data, **given)


def test_labels_that_are_not_of_tokens_are_never_padded(tmp_path):
    data = [
        {"input_ids": [2, 4, 3], "attention_mask": [1, 1, 1], "labels": [1] * (2 + i % 2)}
        for i in range(40)
    ]
    model = bert(num_labels=3, problem_type="multi_label_classification")
    message = "`labels` .int64. differs in length between rows"
    assert_refused(tmp_path, message, data, model=model, data_collator=ids_as_they_are)


def listed(change):
    made = [dict(row) for row in tiny.dataset()]
    change(made[7])
    return made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("label"), r"Row 7 .*it lacks \['labels'\]"),
        (lambda row: row.update(label=0.5), "Row 7 .*`labels` is a tensor of float32"),
        (lambda row: row.update(label="good"), "Row 7 of the training set has the text 'good' as `label`"),
    ],
)  # fmt: skip
def test_rows_whose_columns_differ(change, message, tmp_path):
    assert_refused(tmp_path, message, listed(change))


def words_left_out(rows):
    """A collator that drops text, as transformers' default one does."""
    return ids_as_they_are([{k: v for k, v in row.items() if k != "labels"} for row in rows])


def words_passed_on(rows):
    return {**words_left_out(rows), "labels": [row["labels"] for row in rows]}


WORDS = ["good" if i % 2 else "bad" for i in range(40)]


@pytest.mark.parametrize("collator", [words_left_out, words_passed_on])
def test_labels_in_words_are_named_though_the_collator_takes_them(collator, tmp_path):
    data = rows(labels=WORDS).remove_columns("label")
    message = r"Row 0 .*the text 'bad' as `labels`.*dataset.cast_column\('labels'"
    assert_refused(tmp_path, message, data, data_collator=collator)


def test_a_loss_of_the_users_own_may_leave_labels_in_words_alone(tmp_path):
    class Own(DPTrainer):
        def compute_per_example_loss(self, model, inputs):
            return model(**inputs).logits.square().mean(1)

    data = rows(labels=WORDS).remove_columns("label")
    given = {"train_dataset": data, "eval_dataset": None, "data_collator": words_left_out}
    trainer = tiny.trainer(tmp_path, cls=Own, given=given, accountant="rdp")
    assert tiny.trained(trainer).ledger.steps() == 4


def test_a_column_that_cannot_be_padded_is_named_before_the_first_draw(tmp_path):
    data = rows(weights=[[1.0] * (1 + i % 3) for i in range(40)])

    class Weighted(DPTrainer):
        def compute_per_example_loss(self, model, inputs):
            weights = inputs.pop("weights")
            return super().compute_per_example_loss(model, inputs) * (1 + weights.sum(1))

    pad = DataCollatorWithPadding(tiny.tokenizer())

    def collate(features):
        batch = pad([{k: v for k, v in row.items() if k != "weights"} for row in features])
        return {**batch, "weights": torch.tensor([row["weights"] for row in features])}

    options = {"cls": Weighted, "remove_unused_columns": False, "accountant": "rdp"}
    options["given"] = {"train_dataset": data, "eval_dataset": None, "data_collator": collate}
    message = r"`weights` \(float32\) differs in length between rows \(1 to 3 in dimension 1\)"
    with pytest.raises(DataError, match=message):
        tiny.trainer(tmp_path / "a", **options).train()
    trainer = tiny.trainer(tmp_path / "b", padding_values={"weights": 0}, **options)
    assert tiny.trained(trainer).ledger.steps() == 4


def test_every_row_is_looked_at_by_workers_too(tmp_path):
    assert_refused(tmp_path, "Row 39 ", rows(("label", 5), at=39), {"dataloader_num_workers": 2})


def test_the_limits_of_tasks():
    labels = {name: Limits.of(model).below.get("labels") for name, model in {
        "classes": bert(num_labels=4), "one value": bert(num_labels=1), "decoder": gpt2(), "both": t5(),
        "masked": bert(BertForMaskedLM), "several": bert(num_labels=3, problem_type="multi_label_classification"),
    }.items()}  # fmt: skip
    of_tokens = dict.fromkeys(("decoder", "both", "masked"), 19)
    assert labels == {"classes": 4, "one value": None, "several": None, **of_tokens}
    below = {"input_ids": 19, "decoder_input_ids": 19, "token_type_ids": 2, "position_ids": 24}
    assert Limits.of(bert(), own_loss=True).below == below


def test_planted_look_at_the_first_rows_only_is_seen(tmp_path, monkeypatch):
    original = look_over._all
    monkeypatch.setattr(look_over, "_all", lambda *given: iter(list(original(*given))[:5]))
    given = {"train_dataset": rows(("label", 2)), "eval_dataset": None}
    trainer = tiny.trainer(tmp_path, given=given)
    trainer.run.training_data()  # does not raise, as it must in the test above


@pytest.mark.parametrize(
    ("lengths", "said"),
    [([8] * 40, True), ([8] * 37 + [3] * 3, True), ([8] * 20 + [5] * 20, False)],
)
def test_rows_that_look_like_pieces_of_documents(lengths, said, tmp_path, warnings_of):
    said_so = warnings_of("run.training_data")
    data = datasets.Dataset.from_dict(
        {"input_ids": [[4 + (i + j) % 15 for j in range(n)] for i, n in enumerate(lengths)],
         "attention_mask": [[1] * n for n in lengths]}
    )  # fmt: skip
    collator = DataCollatorForTokenClassification(tiny.tokenizer())
    given = {"train_dataset": data.add_column("labels", data["input_ids"]), "eval_dataset": None, "model": gpt2(),
             "data_collator": collator}  # fmt: skip
    tiny.trainer(tmp_path, given=given).run.training_data()
    assert any("chunks of longer documents" in text for text in said_so) == said
    assert all(text.startswith("If the rows are not chunks") for text in said_so)
    said_so.clear()
    tiny.trainer(tmp_path, given=given, rows_are_chunks=True).run.training_data()
    assert not said_so
