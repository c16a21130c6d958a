"""Bad input ends before anything is written, with the argument, its value and the next move."""

import inspect

import datasets
import pytest
import tiny
import torch
from peft import LoraConfig
from transformers import (
    BertForNextSentencePrediction,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_dp import errors
from hf_dp.trainer.given import MAY_OVERRIDE, check_subclass
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.tuners.frost.tuner import FrostConfig


def overriding(name: str) -> type[DPTrainer]:
    return type("Overriding", (DPTrainer,), {name: getattr(DPTrainer, name)})


class BatchMean(DPTrainer):
    def compute_per_example_loss(self, model, inputs):
        losses = super().compute_per_example_loss(model, inputs)
        return losses * inputs["attention_mask"].sum() / 10


class WithBatchNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = tiny.model(), torch.nn.BatchNorm1d(2)
        self.config, self.main_input_name = self.inner.config, "input_ids"

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        return self.norm(self.inner(input_ids=input_ids, attention_mask=attention_mask).logits)


def without_length(rows):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows)

    return Stream()


def unlabeled():
    return tiny.dataset().remove_columns("label")


def without_mask(rows):
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"input_ids": padded, "labels": torch.tensor([row["label"] for row in rows])}


class Codebook(torch.nn.Module):
    """Keeps a running mean of what it saw in a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(16), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x


def with_codebook():
    model = tiny.model()
    model.bert.encoder.layer.insert(0, model.bert.encoder.layer[0])
    codebook = Codebook()
    model.codebook = codebook
    model.bert.embeddings.LayerNorm.register_forward_hook(
        lambda module, args, output: codebook(output)
    )
    return model


def plain_arguments(folder):
    args = TrainingArguments(str(folder), use_cpu=True)
    DPTrainer(model=tiny.model(), args=args, train_dataset=tiny.dataset())


def given(**keywords):
    return {"given": keywords}


ALLOCATED, CAPPED = {"sampling": "random_allocation"}, {"max_logical_batch_size": 12}
SEARCH = {"private_selection_mean_runs": 5, "accountant": "rdp"}
LOSS = {"noised_loss_bound": 1.0, "noised_loss_budget_ratio": 0.1}
FROZEN = {"privacy_mode": "dp_fp", "dp_fp_variant": "frozen"}
PUBLISHED = FROZEN | {"dp_fp_variant": "published"}
NEW_HEAD_FROZEN = LoraConfig(r=2, target_modules=["query"], task_type="FEATURE_EXTRACTION")
# Of what has no bound, tests/accounting/test_knows.py asks every combination.
AT_CREATION = {  # what a trainer is made with, or what makes it; the error and its words
    "training_step overridden": ({"cls": overriding("training_step")}, errors.UnsupportedArgumentError, "training_step"),
    "compute_loss overridden": ({"cls": overriding("compute_loss")}, errors.UnsupportedArgumentError, "compute_per_example_loss"),
    "optimizer_cls_and_kwargs": (given(optimizer_cls_and_kwargs=(torch.optim.SGD, {})), errors.UnsupportedArgumentError, "`optimizer_cls_and_kwargs` to be None"),
    "compute_loss_func": (given(compute_loss_func=lambda *a, **k: 0), errors.UnsupportedArgumentError, "`compute_loss_func` to be None"),
    "plain TrainingArguments": (plain_arguments, errors.InvalidArgumentError, "DPTrainingArguments"),
    "no length": (given(train_dataset=without_length(tiny.dataset())), errors.DataError, "has no length"),
    "one row": (given(train_dataset=tiny.dataset().select([0])), errors.DataError, "at least two rows, got 1"),
    "no rows": (given(train_dataset=tiny.dataset().select([])), errors.DataError, "at least two rows, got 0"),
    "all splits": (
        given(train_dataset=datasets.DatasetDict(test=tiny.dataset(), train=tiny.dataset())), errors.DataError,
        r"`train_dataset` to be one data set, got a DatasetDict with the splits \['test', 'train'\]. Pass .* data\['train'\]",
    ),
    "one split under another name": (
        given(train_dataset=datasets.IterableDatasetDict(all=tiny.dataset())), errors.DataError, r"data\['all'\]",
    ),
    "batch larger than the data": (
        {"expected_batch_size": 41}, errors.InvalidArgumentError, r"`expected_batch_size` to be at most num_examples \(40\)",
    ),
    "DP-FP's batch larger than the data": ({**PUBLISHED, "expected_batch_size": 41}, errors.InvalidArgumentError, "`expected_batch_size` to be at most num_"),
    "DP-FP by an estimate": ({**FROZEN, "accountant": "gdp_clt"}, errors.InvalidArgumentError, "`accountant` to be a bound with dp_fp_variant='fr"),
    "a private encoder without noise of vectors": (
        {**FROZEN, "dp_fp_variant": "private_encoder"}, errors.InvalidArgumentError, "`representation_noise_multiplier` to be given beside",
    ),
    "delta of at least 1/N": ({"target_delta": 0.03}, errors.InvalidArgumentError, "`target_delta` to be < 1/num_examples"),
    "target that cannot be met": (
        {"target_epsilon": 1e-6, "target_delta": 1e-9, "accountant": "rdp"}, errors.CalibrationError,
        "1e-06 is not met.*Raise `target_epsilon`, take fewer steps",
    ),
    "evaluation on the training set": (
        given(**dict.fromkeys(("train_dataset", "eval_dataset"), tiny.dataset())), errors.UnsupportedArgumentError, "held-out set",
    ),
    "evaluation on an equal copy of the training set": (given(eval_dataset={"a": tiny.dataset()}), errors.UnsupportedArgumentError, "held-out set"),
    "batch normalization": (given(model=WithBatchNorm()), errors.UnsupportedModelError, "`norm` is a BatchNorm1d.*GroupNorm"),
    "allocation with a largest draw": ({**ALLOCATED, **CAPPED}, errors.InvalidArgumentError, "`max_logical_batch_size` to be left out"),
    "allocation by RDP": ({**ALLOCATED, "accountant": "rdp"}, errors.InvalidArgumentError, "`accountant` to be 'pld'"),
    "allocation with a noised loss": ({**ALLOCATED, **LOSS}, errors.InvalidArgumentError, "`noised_loss_bound` to be left"),
    "allocation with FROST": ({**ALLOCATED, **given(peft_config=FrostConfig())}, errors.InvalidArgumentError, "`peft_config` to be left out"),
    "allocation to one step": ({**ALLOCATED, "expected_batch_size": 30}, errors.InvalidArgumentError, "`expected_batch_size` to be at most 26.6667"),
    "allocation of DP-FP": ({**ALLOCATED, **PUBLISHED}, errors.InvalidArgumentError, "sampling"),
    "another sampling": ({"sampling": "shuffle"}, errors.InvalidArgumentError, "`sampling` to be one of"),
    "a largest draw by RDP": ({**CAPPED, "accountant": "rdp"}, errors.UnsupportedArgumentError, "`accountant` to be 'pld'"),
    "a search by PLD": ({**SEARCH, "accountant": "pld"}, errors.InvalidArgumentError, "`accountant` to be 'rdp' with private_selection_mean_runs"),
    "a search with allocation": ({**SEARCH, **ALLOCATED}, errors.InvalidArgumentError, "`sampling` to be left out with private_selection"),
    "a search with a largest draw": ({**SEARCH, **CAPPED}, errors.InvalidArgumentError, "`max_logical_batch_size` to be left out with private"),
    "a search with a noised loss": ({**SEARCH, **LOSS, "target_epsilon": 8}, errors.InvalidArgumentError, "`noised_loss_bound` to be left out with private"),
    "a search with FROST": (
        {**SEARCH, **given(peft_config=FrostConfig(unfreeze_ratio=0.5, selection_noise_multiplier=1.0))},
        errors.InvalidArgumentError, "`peft_config` to be left out with private",
    ),
    "a new head frozen under LoRA": (given(peft_config=NEW_HEAD_FROZEN), errors.UnsupportedModelError, r"modules_to_save=\['classifier'\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", AT_CREATION)
def test_refused_at_creation(case, tmp_path):
    made_with, error, message = AT_CREATION[case]
    folder = tmp_path / "run"
    with pytest.raises(error, match=message):
        made_with(folder) if callable(made_with) else tiny.trainer(folder, **made_with)
    assert not folder.exists()


def two_of_one(rows):
    ids = torch.tensor([row["input_ids"] for row in rows for _ in range(2)])
    return {"input_ids": ids, "labels": torch.tensor([row["label"] for row in rows])}


def second(rows):
    return {"labels": torch.tensor(rows[1]["label"])}


def of_text(beside=None):
    made = datasets.Dataset.from_list(tiny.rows())
    return made if beside is None else beside.add_column("sentence", made["sentence"])


def of_sentences(rows):
    return tiny.tokenizer()([row["sentence"] for row in rows], return_tensors="pt")


KEPT = {"remove_unused_columns": False}
NOT_TOKENIZED = (
    r"not tokenized: they have text in \['sentence'\], and no `input_ids`\. "
    r"Use data\.map\(lambda rows: tokenizer\(rows\['sentence'\]\), batched=True\)\.$"
)
AT_TRAINING = {
    "no attention mask": (given(data_collator=without_mask), errors.DataError, "no `attention_mask`"),
    "a frozen parameter that a forward changes": (given(model=with_codebook()), errors.SelfCheckError, "codebook.mean"),
    "no labels": (given(train_dataset=unlabeled()), errors.DataError, "no `labels`"),
    "flattening collator": (given(data_collator=DataCollatorWithFlattening()), errors.DataError, "DataCollatorWithPadding"),
    "collator that makes two rows of one": (
        given(data_collator=two_of_one), errors.DataError,
        r"Row 0 of the training set, collated alone, gives `input_ids` of shape \(2, 3\).*first dimension of 1",
    ),
    "collator that wants two rows": (
        given(data_collator=second), errors.DataError,
        r"Row 0 of the training set, collated alone, failed \(IndexError.*It must work on one\. .* set remove_unused_columns=False",
    ),
    "collator that wants two rows, and all columns": (
        {**given(data_collator=second), **KEPT}, errors.DataError, r"\(IndexError.*It must work on one\.$",
    ),
    "rows of text": (given(train_dataset=of_text()), errors.DataError, NOT_TOKENIZED),
    "rows of text, with all columns": (
        {**given(train_dataset=of_text()), **KEPT}, errors.DataError, NOT_TOKENIZED,
    ),
    "a list of rows of text": (given(train_dataset=tiny.rows()), errors.DataError, NOT_TOKENIZED),
    "rows of text with the default collator": (
        given(train_dataset=of_text(), data_collator=default_data_collator), errors.DataError,
        r"no `input_ids` \(they have \['labels'\]\)\. Tokenize the rows: data.map",
    ),
    "tokens, and text that is kept": (
        {**given(train_dataset=of_text(tiny.dataset())), **KEPT}, errors.DataError,
        r"take the text in \['sentence'\], remove it \(dataset.remove_columns\(\['sentence'\]\)\), or leave remove_unused_columns at True\.$",
    ),
    "a collator of ones own that misses text": (
        given(train_dataset=of_text(), data_collator=of_sentences), errors.DataError,
        r"\(KeyError: 'sentence'\).* set remove_unused_columns=False",
    ),
    "loss that depends on neighbors": ({"cls": BatchMean}, errors.SelfCheckError, "neighbors"),
    "a class without a known loss": (
        given(model=BertForNextSentencePrediction(tiny.model().config)), errors.UnsupportedLossError,
        "BertForNextSentencePrediction.*compute_per_example_loss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AT_TRAINING)
def test_refused_before_the_first_draw(case, tmp_path):
    made_with, error, message = AT_TRAINING[case]
    trainer = tiny.trainer(tmp_path, **made_with)
    with pytest.raises(error, match=message):
        trainer.train()
    assert trainer.ledger.steps() == 0
    assert not (tmp_path / "ledger.jsonl").exists()


def test_evaluation_on_the_training_set_and_a_search_are_refused(tmp_path):
    trainer = tiny.trainer(tmp_path)
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(errors.UnsupportedArgumentError, match="held-out"):
            call(tiny.dataset())
    trainer.eval_dataset = trainer.train_dataset  # the effective one counts
    with pytest.raises(errors.UnsupportedArgumentError, match="held-out"):
        trainer.evaluate()
    with pytest.raises(errors.UnsupportedArgumentError, match="public data"):
        tiny.trainer(tmp_path).hyperparameter_search()


class OwnLoader(DPTrainer):
    """With a loader of its own over the rows of ``self.others``, a list of batches if it is told so."""

    others, as_list = tiny.evaluation_set(), False

    def get_eval_dataloader(self, eval_dataset=None):
        loader = torch.utils.data.DataLoader(self.others, 8, collate_fn=self.data_collator)
        return list(loader) if self.as_list else loader

    get_test_dataloader = get_eval_dataloader


class OwnEvaluation(DPTrainer):
    def evaluate(self, *args, **kwargs):
        return {"eval_loss": 0.0}


def compared(trainer):
    return trainer.run.book.weaknesses.evaluation_compared


def test_rows_of_a_loader_of_ones_own_are_compared(tmp_path):
    trainer = tiny.trainer(tmp_path, cls=OwnLoader, eval_strategy="steps", eval_steps=1)
    trainer.evaluate()
    trainer.predict(tiny.evaluation_set())
    assert compared(trainer)
    for rows in (trainer.train_dataset, trainer.train_dataset.with_format("torch")):  # a copy, too
        trainer.others = rows
        for call in (
            trainer.evaluate,
            trainer.train,
            lambda: trainer.predict(trainer.eval_dataset),
        ):
            with pytest.raises(errors.UnsupportedArgumentError, match="held-out"):
                call()
    with pytest.raises(errors.UnsupportedArgumentError, match="held-out"):
        trainer.evaluation_loop(DPTrainer.get_eval_dataloader(trainer, tiny.dataset()), "Mine")
    assert not any("eval_loss" in logs for logs in trainer.state.log_history[1:]) and compared(
        trainer
    )
    trainer.as_list = True
    trainer.evaluate()
    assert not compared(trainer)


def test_an_evaluation_out_of_sight_is_not_called_compared(tmp_path):
    searched = {"private_selection_mean_runs": 2.0, "accountant": "rdp"}
    unseen = tiny.trainer(tmp_path / "unseen", cls=OwnEvaluation)
    assert not compared(unseen) and compared(tiny.trainer(tmp_path / "seen"))
    with pytest.raises(errors.UnsupportedArgumentError, match=r"OwnEvaluation\.evaluate may read"):
        tiny.trainer(tmp_path / "search", cls=OwnEvaluation, **searched)
    trainer = tiny.trainer(tmp_path / "list", cls=OwnLoader, **searched)
    trainer.evaluate()
    trainer.as_list = True
    with pytest.raises(errors.UnsupportedArgumentError, match="cannot be compared"):
        trainer.evaluate()


def test_what_is_not_known_to_be_harmless_cannot_be_overridden(tmp_path):
    for name in dir(DPTrainer):
        if name not in MAY_OVERRIDE and name != "compute_loss" and not name.startswith("__"):
            message = f"Overriding overrides {name}, wh"
            with pytest.raises(errors.UnsupportedArgumentError, match=message):
                check_subclass(overriding(name), DPTrainer)
    # Of what Trainer calls with a batch of the training set, only the loss is among them.
    for name in MAY_OVERRIDE:
        check_subclass(overriding(name), DPTrainer)
    assert not MAY_OVERRIDE & {"_prepare_inputs", "_prepare_input", "training_step", "train"}
    tiny.trainer(tmp_path, cls=type("Own", (DPTrainer,), {"teacher": 1, "distill": Mixing}))


class Mixing:
    """A mixin before or after the trainer: Trainer's hook for batches, as recipes for mixup do."""

    def _prepare_inputs(self, inputs):
        return inputs


@pytest.mark.parametrize(
    "bases",
    [(Mixing, DPTrainer), (DPTrainer, Mixing), (DPTrainer, type("M", (Mixing, Trainer), {}))],
)
def test_a_mixin_that_overrides_is_named(tmp_path, bases):
    message = r"(Mixing|M) overrides _prepare_inputs"
    with pytest.raises(errors.UnsupportedArgumentError, match=message):
        tiny.trainer(tmp_path, cls=type("Mixed", bases, {}))
    assert not list(tmp_path.iterdir())


def test_an_optimizer_with_other_parameters_or_made_late_is_refused(tmp_path):
    head = torch.nn.Linear(2, 2)

    class Outside(DPTrainer):
        def create_optimizer(self, *args, **kwargs):
            super().create_optimizer(*args, **kwargs)
            self.optimizer.add_param_group({"params": list(head.parameters())})
            return self.optimizer

    with pytest.raises(errors.UnaccountedGradientError, match="not in the model"):
        tiny.trainer(tmp_path, cls=Outside).train()

    nothing = dict.fromkeys(("create_optimizer", "create_scheduler"), lambda *args, **kwargs: None)
    trainer = tiny.trainer(tmp_path / "late", cls=type("Late", (DPTrainer,), nothing))
    with pytest.raises(errors.UnaccountedGradientError, match="no optimizer before the first step"):
        trainer.train()
    assert trainer.ledger.steps() == 0


def test_a_folder_with_other_weights_and_another_training_set_are_refused(tmp_path):
    tiny.trained(tiny.trainer(tmp_path, privacy_mode="non_private", max_steps=1)).save_model()
    with pytest.raises(errors.LedgerError, match="model.safetensors"):
        tiny.trainer(tmp_path).train()
    assert not (tmp_path / "ledger.jsonl").exists()
    # Of other length, and any after the first was used.
    trainer = tiny.trainer(tmp_path / "rows", max_steps=1)
    trainer.train_dataset = tiny.dataset(30)
    with pytest.raises(errors.DataError, match="30 rows"):
        trainer.train()
    trainer.train_dataset = tiny.dataset()
    trainer.train()
    trainer.train_dataset = tiny.dataset().shuffle(seed=1)
    with pytest.raises(errors.DataError, match="replaced after it was used"):
        trainer.train()


def test_the_arguments_have_the_order_of_transformers():
    theirs = list(inspect.signature(Trainer).parameters)
    assert list(inspect.signature(DPTrainer).parameters) == [*theirs, "peft_config"]
