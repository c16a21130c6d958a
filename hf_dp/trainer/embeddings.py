"""``DPSentenceTransformerTrainer``: private embedding models, by sentence-transformers' losses."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer

try:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses as theirs
except ImportError as missing:
    raise ImportError(
        "This trainer needs sentence-transformers. Run `pip install hf-dp[embeddings]`."
    ) from missing

from hf_dp._validate import integer, invalid
from hf_dp.batches.structure import Batch, Row
from hf_dp.cards.details import REPOSITORY
from hf_dp.errors import (
    DataError,
    UnsupportedArgumentError,
    UnsupportedLossError,
    UnsupportedModelError,
)
from hf_dp.losses import widened
from hf_dp.overlap import TrainingRows
from hf_dp.plans.draws import GROUP
from hf_dp.run.checks import check_train_dataset, refuse_rows_in_code
from hf_dp.run.synthetic import synthetic_examples
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.tuners.methods import tuner_for

_SCORES = ("label", "labels", "score", "scores")  # as sentence-transformers knows them
_TEXTS, _LABELS = "texts", "labels"
_MODEL = "Load it by SentenceTransformer(name)."
_USAGE = f"""from sentence_transformers import SentenceTransformer

model = SentenceTransformer({REPOSITORY!r})
embeddings = model.encode(["A text.", "Another text."])"""

_RANKING = theirs.MultipleNegativesRankingLoss
# What says something of one row, and what compares rows. All compute a loss from embeddings, draw
# nothing and keep nothing. Exact classes: what a subclass does is not known.
_OF_A_ROW = (
    theirs.CosineSimilarityLoss,
    theirs.ContrastiveLoss,
    theirs.TripletLoss,
    theirs.MarginMSELoss,
)
_OF_ROWS = (
    _RANKING,
    theirs.CoSENTLoss,
    theirs.AnglELoss,
    theirs.OnlineContrastiveLoss,
    theirs.BatchAllTripletLoss,
    theirs.BatchHardTripletLoss,
    theirs.BatchHardSoftMarginTripletLoss,
    theirs.BatchSemiHardTripletLoss,
)


@dataclass
class TextCollator:
    """Make a batch of b examples, each a row, or a group of k rows: for each text column, and in
    it for each place in the group, the tokens (b, T) of one text of each example; and scores,
    (b, k, ...).

    Args:
        model: it makes tokens of texts.
        columns: those that hold texts, in their order.
        score: the column of scores; None: there is none.
        public: texts of which each row gets ``number`` random ones, as further columns.
    """

    model: SentenceTransformer
    columns: Sequence[str]
    score: str | None
    public: Dataset | None = None
    number: int = 0

    def __call__(self, rows: Sequence[Row | list[Row]]) -> dict[str, Any]:
        """Return the batch of these rows or groups."""
        groups = [row if isinstance(row, list) else [row] for row in rows]
        texts: list[list[list[str]]] = [
            [[row[name] for row in group] for group in groups] for name in self.columns
        ]
        for _ in range(self.number):
            texts.append([[self._drawn() for _ in group] for group in groups])
        places = range(len(groups[0]))
        tokens = (self.model.preprocess([each[k] for each in of]) for of in texts for k in places)
        batch: dict[str, Any] = {_TEXTS: tuple(map(dict, tokens))}
        if self.score is not None:
            batch[_LABELS] = torch.tensor([[row[self.score] for row in group] for group in groups])
        return batch

    def _drawn(self) -> str:
        assert self.public is not None
        (text,) = self.public[random.randrange(len(self.public))].values()
        return str(text)


class _InTheirLayout(Trainer):
    """Saves and loads a model as sentence-transformers does: a folder for each of its modules."""

    model: Any

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        folder = output_dir or str(self.args.output_dir)
        self.model.save_pretrained(folder, create_model_card=False)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        saved = SentenceTransformer(
            str(resume_from_checkpoint), device="cpu", local_files_only=True
        )
        (model or self.model).load_state_dict(saved.state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


class DPSentenceTransformerTrainer(DPTrainer, _InTheirLayout):
    """Train an embedding model privately, as sentence-transformers' ``SentenceTransformerTrainer``
    does without privacy.

    An example is a row with all of its texts, clipped as one, and its loss is that of the ``loss``
    module on its embeddings alone. With ``rows_per_group`` it is a group of k rows, formed by their
    places before any draw, and its loss is that of the module on its k rows: so rows of a group are
    each other's in-batch negatives, and one row, which is what is protected, pays for a whole group
    that changes (:class:`hf_dp.plans.draws.Groups`).

    Losses of a row: ``CosineSimilarityLoss``, ``ContrastiveLoss``, ``TripletLoss``,
    ``MarginMSELoss``, and ``MultipleNegativesRankingLoss`` where rows have negatives, their own or
    public ones. In groups, also the last one without negatives, ``CoSENTLoss``, ``AnglELoss``,
    ``OnlineContrastiveLoss`` and the four batch triplet losses. ``MatryoshkaLoss`` over any of
    them. For another, override :meth:`compute_per_example_loss`.

    Args:
        model: a ``SentenceTransformer`` whose first module is a transformer.
        args: :class:`DPTrainingArguments`.
        train_dataset, eval_dataset: rows of text columns, in the order that the loss expects, and
            perhaps a score named ``label``, ``labels``, ``score`` or ``scores``.
        loss: a module of ``sentence_transformers.sentence_transformer.losses``.
        public_negatives: a data set of one text column that you state to be public. Each row gets
            ``negatives_per_row`` random ones of them when it is read, as columns after its own. The
            card says so.
        peft_config: one of hf_dp's that chooses what trains. For LoRA, call
            ``model.add_adapter(config)`` beforehand.
        trainer_arguments: the other keywords of :class:`DPTrainer`, without ``data_collator``.

    Raises: as :class:`DPTrainer`; UnsupportedLossError for a loss that rows cannot have alone.
    """

    model: Any
    data_collator: Any

    def __init__(
        self,
        model: SentenceTransformer,
        args: DPTrainingArguments | None = None,
        *,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        loss: nn.Module,
        public_negatives: Dataset | None = None,
        negatives_per_row: int = 1,
        peft_config: PeftConfig | None = None,
        **trainer_arguments: Any,
    ):
        checked = self.arguments_class.own_copy(args)
        if not checked.is_private or checked.privacy_mode != "dp_sgd":
            why = "Without privacy, use SentenceTransformerTrainer."
            expected, error = "to be 'dp_sgd'", UnsupportedArgumentError
            raise invalid("privacy_mode", checked.privacy_mode, expected, why, error)
        _check_model(model)
        if peft_config is not None and tuner_for(peft_config, True) is None:
            why = "For LoRA, call model.add_adapter(config) beforehand, and leave this out."
            expected, error = "to be one of hf_dp's", UnsupportedArgumentError
            raise invalid("peft_config", type(peft_config).__name__, expected, why, error)
        check_train_dataset(train_dataset)
        columns, score = _columns(train_dataset, without=checked.privacy_unit_column)
        more = 0
        if public_negatives is not None:
            more = integer("negatives_per_row", negatives_per_row, 1)
            names, beside = _columns(public_negatives, "public_negatives")
            if len(names) != 1 or beside is not None:
                expected = "to have one column, of texts"
                raise invalid("public_negatives", public_negatives.column_names, expected)
            texts: list[str] = public_negatives[names[0]][:]
            renamed = [Dataset.from_dict({name: texts}) for name in columns]
            refuse_rows_in_code(renamed, TrainingRows(train_dataset))
        self.loss: Any = loss
        self._rows: Any = train_dataset
        own = DPSentenceTransformerTrainer.compute_per_example_loss
        if type(self).compute_per_example_loss is own:
            self._check_loss(checked.rows_per_group, len(columns) + more)
        super().__init__(
            model,
            checked,
            TextCollator(model, columns, score, public_negatives, more),
            train_dataset,
            eval_dataset,
            model.tokenizer,
            peft_config=peft_config,
            **trainer_arguments,
        )
        self.card.update(
            library_name="sentence-transformers", task_tag="sentence-similarity", usage=_USAGE
        )
        self.data_settings["loss_module"] = type(loss).__name__
        if public_negatives is not None:
            said = f"{len(public_negatives):,} texts that the user states to be public"
            self.data_settings["negatives"] = f"{more} of {said}, at random for each row"

    def _check_loss(self, rows_per_group: int | None, columns: int) -> None:
        """Raise UnsupportedLossError for a loss that examples cannot have alone."""
        whole, inner = type(self.loss).__name__, _inner(self.loss)
        name = type(inner).__name__
        if name.startswith("Cached") and type(inner) not in _OF_ROWS:
            move = f"Use {name.removeprefix('Cached')}: memory follows per_device_train_batch_size."
            raise UnsupportedLossError(f"{name} makes gradients that bypass the clip. {move}")
        if type(inner) not in (*_OF_A_ROW, *_OF_ROWS):
            known = ", ".join(each.__name__ for each in (*_OF_A_ROW, *_OF_ROWS))
            raise UnsupportedLossError(
                f"{name} is not known to depend on an example's own embeddings alone. Use one of "
                f"{known}, or override compute_per_example_loss."
            )
        if getattr(self.loss, "n_dims_per_step", -1) > 0:
            raise UnsupportedLossError(
                f"{whole} draws dimensions for a whole batch. Set n_dims_per_step=-1."
            )
        if getattr(inner, "gather_across_devices", False):
            raise UnsupportedLossError(
                f"{name} compares the rows of all processes. Set gather_across_devices=False."
            )
        if rows_per_group is not None or type(inner) in _OF_A_ROW:
            return
        if type(inner) is not _RANKING:
            raise UnsupportedLossError(
                f"{name} compares rows with each other, but each row is clipped by itself. Set "
                f"{GROUP}=8: fixed groups of rows are then clipped as one."
            )
        if columns < 3:
            raise UnsupportedLossError(
                f"{name} takes the other rows of a batch as negatives, but each row is clipped by "
                "itself. Give rows negatives of their own (columns negative_1, ...), or "
                f"public_negatives; or set {GROUP}=8: fixed groups of rows are clipped as one."
            )

    def compute_per_example_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Return the loss of each row or group, (b,)."""
        embeddings = [_embedded(model, each) for each in inputs[_TEXTS]]
        rows = self.args.rows_per_group or 1
        firsts = range(0, len(embeddings), rows)
        columns = [torch.stack(embeddings[first : first + rows], 1) for first in firsts]
        labels = inputs.get(_LABELS, [None] * len(columns[0]))
        examples = zip(zip(*columns, strict=True), labels, strict=True)
        with warnings.catch_warnings(action="ignore"):  # which tell of a row's label
            return torch.stack([self._of_embeddings(own, label) for own, label in examples])

    def _of_embeddings(self, columns: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        """Return the loss of rows, of which each column has the embeddings, (k, d)."""
        loss, inner = self.loss, _inner(self.loss)
        if inner is loss:
            return loss.compute_loss_from_embeddings(list(columns), labels)
        total = columns[0].new_zeros(())
        for dim, weight in zip(loss.matryoshka_dims, loss.matryoshka_weights, strict=True):
            cut = [F.normalize(each[:, :dim], dim=-1) for each in columns]
            total = total + weight * inner.compute_loss_from_embeddings(cut, labels)
        return total

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the loss of a whole batch, as sentence-transformers evaluates it, and no more."""
        with torch.no_grad(), self.compute_loss_context_manager():
            inputs = self._prepare_inputs(inputs)
            columns = [_embedded(model, each) for each in inputs[_TEXTS]]
            labels = inputs[_LABELS][:, 0] if _LABELS in inputs else None
            return self._of_embeddings(columns, labels), None, None

    def synthetic_batches(self) -> list[dict[str, Any]]:
        """Return synthetic examples, whose texts differ in length."""
        row = self._rows[0]  # of which names, types and shapes are read
        example = self.data_collator([[row] * (self.args.rows_per_group or 1)])
        made = itertools.cycle(synthetic_examples(self.model.transformers_model))
        batches = []
        for shift in range(3):
            next(made)
            batch: dict[str, Any] = {
                _TEXTS: tuple(_like(each, next(made)) for each in example[_TEXTS])
            }
            if _LABELS in example:
                batch[_LABELS] = _made_up_scores(example[_LABELS], shift)
            batches.append(batch)
        return batches

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = list(self._rows.column_names)


def _embedded(model: nn.Module, tokens: dict[str, Any]) -> Tensor:
    return widened(model(dict(tokens))["sentence_embedding"])


def _inner(loss: Any) -> Any:
    return loss.loss if type(loss) is theirs.MatryoshkaLoss else loss


def _like(tokens: dict[str, Any], made: dict[str, Tensor]) -> dict[str, Any]:
    """Return synthetic tokens in the columns of real ones."""
    ids = made["input_ids"]
    known = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    others = {
        name: torch.zeros_like(ids) if isinstance(value, Tensor) else value
        for name, value in tokens.items()
    }
    return {**others, **{name: value for name, value in known.items() if name in tokens}}


def _made_up_scores(scores: Tensor, shift: int) -> Tensor:
    """Return scores of both kinds: a loss may be 0 for rows that all have one."""
    if scores.is_floating_point():
        return torch.rand_like(scores)
    places = torch.arange(scores.numel()).view(scores.shape)
    return (places + shift) % 2


def _check_model(model: object) -> None:
    if not isinstance(model, SentenceTransformer):
        raise invalid("model", type(model).__name__, "to be a SentenceTransformer", _MODEL)
    if model.transformers_model is None:
        raise UnsupportedModelError(
            f"The first module of the model is a {type(model[0]).__name__}, but only for a "
            "transformer can hf_dp make up examples to check the clipping engine with. Override "
            "synthetic_batches, or choose another model."
        )


def _columns(
    dataset: object, name: str = "train_dataset", without: str | None = None
) -> tuple[list[str], str | None]:
    """Return the columns of texts, and that of scores; leave the one of users out."""
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"Expected `{name}` to be a datasets.Dataset, got {type(dataset).__name__}. Make one "
            "with Dataset.from_list(rows); load without streaming=True."
        )
    scores = [each for each in dataset.column_names if each in _SCORES]
    texts = [each for each in dataset.column_names if each not in (*_SCORES, without)]
    for each in texts:
        if getattr(dataset.features[each], "dtype", None) not in ("string", "large_string"):
            raise DataError(
                f"The column {each!r} of the {name} holds {dataset.features[each]}, but columns "
                f"must be texts, or a score named {' or '.join(_SCORES)}. Rename it, or remove it."
            )
    if len(scores) > 1:
        raise DataError(f"The {name} has two scores, {scores}. Remove one of the columns.")
    return texts, scores[0] if scores else None
