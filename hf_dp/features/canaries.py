"""``audit_canaries``: audit a run while it trains, and say at its end what canaries told."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset

from hf_dp._validate import invalid
from hf_dp.batches.padding import LABELS
from hf_dp.errors import AuditError, DataError, UnsupportedArgumentError
from hf_dp.features.base import Inside, Seen, register
from hf_dp.features.one_run_audit import OneRunAudit
from hf_dp.noise import untouched_generators
from hf_dp.overlap import TrainingRows
from hf_dp.plans.samplers import Sampler as LogicalSampler
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.synthetic import made_up_rows, synthetic_examples
from hf_dp.statement.audited import DIRECTIONS, GRADIENTS, LOSSES
from hf_dp.statement.statement import REFUTED_BY_AUDIT
from hf_dp.tuners.base import Tuner

_TOKENS = 12  # in a canary
_AS_TOKENS = {"token_type_ids", "special_tokens_mask"}  # 0 for each token of a plain text


@register
class Canaries(Inside):
    """Puts canaries among the rows, and guesses at the end which of them took part.

    Attributes: audit: what is known of the canaries, once the run was made.
    """

    asked_for_by = "audit_canaries"
    adds_rows = True
    audit: OneRunAudit

    def __init__(self, args: Any):
        super().__init__(args)
        self.scores = args.audit_scores or GRADIENTS

    def rows(self, dataset: Any, model: nn.Module | None, known: TrainingRows) -> Any:
        """Return the training set with canaries. Raises: DataError."""
        if model is None:
            raise UnsupportedArgumentError(
                "Expected `model` to be given with `audit_canaries`, got None: canaries are made "
                "up for it. Pass the model, not model_init."
            )
        alike = self.scores == GRADIENTS
        return with_canaries(dataset, model, self.args.audit_canaries, alike=alike, rows=known)

    def enter(self, run: PrivateRun, tuner: Tuner) -> None:
        """Toss the coins.

        Raises: UnsupportedArgumentError with several processes, each of which draws rows of its
            own; and for directions among sums that are no gradients.
        """
        count = self.args.audit_canaries
        if not run.processes.alone:
            raise UnsupportedArgumentError(
                f"Expected `audit_canaries` to be unset with {run.processes.count} processes, got "
                f"{count}: each draws from rows of its own. Audit in one process."
            )
        if self.scores == DIRECTIONS and not tuner.gradients_are_noised_sums:
            raise invalid(
                "audit_scores",
                DIRECTIONS,
                f"to be {GRADIENTS!r} or {LOSSES!r} with this peft_config",
                "Its noised sums are of factors, in which a row's gradient has no direction.",
                UnsupportedArgumentError,
            )
        super().enter(run, tuner)
        self.audit = OneRunAudit(self.scores, count, run.plan, run.randomness.random_bytes)
        if self.scores == DIRECTIONS:
            self.audit.gradient_of = self._gradient

    def call(self, checkpoint: str | None, seen: Seen) -> None:
        """Raise UnsupportedArgumentError for an audited run that is resumed, or trained again."""
        if checkpoint is not None or len(seen.book.ledger):
            raise UnsupportedArgumentError(
                "An audited run is not resumed: the coins of its canaries are not kept, so what "
                "the first part told of them is lost. Start again in a new output_dir, or train "
                "without `audit_canaries`."
            )

    def start(self, seen: Seen) -> None:
        if self.scores == LOSSES:
            self.audit.note_losses(self._losses())

    def drawn(self, sampler: LogicalSampler) -> Any:
        return self.audit.draws(sampler)

    def clipped(self, sums: dict[str, Tensor]) -> None:
        self.audit.insert(sums)

    def noised(self, sums: dict[str, Tensor]) -> None:
        self.audit.score(sums)

    def conclude(self) -> None:
        """Guess which canaries took part, and keep what follows for the statement."""
        if self.scores == LOSSES:
            self.audit.note_losses(self._losses())
        if self.audit.count > 1:  # of many runs with one each, `hf-dp audit leave-one-out` guesses
            self.run.found["audit"] = self.audit.result(self.run.epsilon().value)

    def end(self, seen: Seen) -> None:
        """Raise AuditError for a statement that its own audit refutes."""
        statement = seen.statement()
        if statement.accountant_note == REFUTED_BY_AUDIT:
            raise AuditError(
                f"The run is not as private as it claims: {statement.status_reason}. Do not "
                "publish this model. Look at what draws, clips and noises (a subclass, a callback, "
                "an optimizer); if you changed nothing there, please report it, with privacy.json."
            )

    def _gradient(self, canary: int) -> dict[str, Tensor]:
        """Return the gradient of a canary's loss, without dropout, by the names of what trains."""
        run, row = self.run, self.audit.first + canary
        data, model = run.training_data(), run.model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        model.eval()  # until the next step begins
        with torch.enable_grad():
            batch = data.padding.together([data.examples[row]], data.looked_over.layout)
            loss = run.losses(batch).sum()
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {
            name: torch.zeros_like(p) if each is None else each
            for (name, p), each in zip(trained.items(), found, strict=True)
        }

    @torch.no_grad()
    def _losses(self) -> np.ndarray:
        run, audit = self.run, self.audit
        data = run.training_data()
        examples = data.examples.__getitems__([audit.first + each for each in range(audit.count)])
        found, batches = np.empty(audit.count), data.batches()
        run.model.eval()  # until the next step begins
        for group in batches.cut(examples, range(len(examples))):
            batch = data.padding.together([examples[each] for each in group], batches.layout)
            found[group] = run.losses(batch).double().cpu().numpy()
        return found


def audit_of(run: PrivateRun) -> OneRunAudit:
    """Return the audit of a run that has one."""
    return next(each.audit for each in run.inside if isinstance(each, Canaries))


def with_canaries(
    dataset: Any, model: nn.Module, count: int, *, alike: bool, rows: TrainingRows | None = None
) -> Any:
    """Return a data set and, after its rows, ``count`` made-up ones in the same format.

    Their tokens, pictures and labels are random. Of the rows names and types are read; shapes, too,
    where the model never sees what is made.

    Args:
        alike: whether one row serves as all canaries, which the model then never sees.
        rows: a ``datasets.Dataset`` as canaries are compared with it, unless they are alike.

    Raises: DataError for rows in whose format none can be made up, or canaries that are rows.
    """
    different = 1 if alike else count
    plain = dataset.with_format(None) if isinstance(dataset, datasets.Dataset) else dataset
    templates = [plain[0], plain[len(plain) // 2]]
    try:
        with untouched_generators():
            # Not as the global generators were seeded: rows may have been made with the same seed.
            torch.manual_seed(int.from_bytes(os.urandom(7), "little"))
            random.seed(os.urandom(16))
            np.random.seed(list(os.urandom(16)))
            lengths = [_TOKENS] * different
            contents = synthetic_examples(model, lengths, lengths)
            made = made_up_rows(templates, contents)
    except DataError as problem:
        raise DataError(
            f"Expected `audit_canaries` to be unset for this training set: rows in its format "
            f"cannot be made up ({problem})."
        ) from problem
    if not alike:
        _refuse_shapes_of_rows(templates[0], contents[0])
        # By name: whether they are as long as the tokens must not be read off the rows.
        made = [
            {**row, **{name: [0] * _TOKENS for name in _AS_TOKENS & row.keys()}} for row in made
        ]
    made = made * count if alike else made
    if not isinstance(dataset, datasets.Dataset):
        parts: list[Any] = [dataset, made]
        return ConcatDataset(parts)
    columns = {name: [_plain(row[name]) for row in made] for name in dataset.column_names}
    canaries = datasets.Dataset.from_dict(columns, features=dataset.features)
    if rows is not None and not alike:
        _refuse_known(canaries, rows)
    joined = datasets.concatenate_datasets([plain, canaries])
    shown = {**dataset.format}
    return joined.with_format(**shown.pop("format_kwargs"), **shown)


def _refuse_shapes_of_rows(template: Any, made: Mapping[str, Tensor]) -> None:
    """Raise DataError for a column whose length or size a made-up row would take from a row.

    The model sees such a row in every step, so a training row would move it beyond its bound.
    """
    row = template if isinstance(template, Mapping) else {"(no columns)": template}
    for name, value in row.items():
        known = "labels" if name in LABELS else name
        fixed = value is None or isinstance(value, (bool, int, float, str))
        if not fixed and known not in made and name not in _AS_TOKENS:
            raise DataError(
                f"Expected audit_scores='gradients' for a training set with the column {name!r}: "
                "a made-up row would take its length or size from a training row, and the model "
                "would see it. Or remove the column, if the model does not read it."
            )


def _refuse_known(canaries: Any, rows: TrainingRows) -> None:
    known = len(rows.compare(canaries).equal)
    if known:
        raise DataError(
            f"{known} of {len(canaries)} canaries stand among the training rows already, so a coin "
            "would not decide whether they take part. Use audit_scores='gradients', whose canaries "
            "are no rows."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
