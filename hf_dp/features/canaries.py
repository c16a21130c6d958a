"""``audit_canaries``: canaries that secret coins put in or leave out, and what the releases of a
run tell of them at its end.

A canary is one of the rows that the sampler draws from. If its coin left it out, it contributes
nothing when drawn: that is the run's neighbor under zero-out. If not, then by its kind:

    gradients   one coordinate of length C enters the clipped sum in its place (a Dirac canary;
                Nasr et al. 2023, arXiv 2302.07956); the noised sums tell of that coordinate
    directions  it contributes as any row; the noised sums tell of the direction of its gradient
    losses      it contributes as any row; its loss is compared before and after
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset

from hf_dp._validate import invalid
from hf_dp.accounting.one_run import best_number_of_guesses
from hf_dp.batches.padding import LABELS
from hf_dp.batches.structure import DataSet, Row
from hf_dp.errors import AuditError, ConfigError, DataError, UnsupportedArgumentError
from hf_dp.features.base import Inside, Seen, register
from hf_dp.noise import untouched_generators
from hf_dp.overlap import TrainingRows
from hf_dp.plans.samplers import Draws
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.synthetic import made_up_rows, synthetic_examples
from hf_dp.statement.audited import DIRECTIONS, GRADIENTS, LOSSES, AuditResult
from hf_dp.statement.facts import Flags
from hf_dp.statement.statement import REFUTED_BY_AUDIT
from hf_dp.tuners.base import Tuner

_TOKENS = 12  # in a canary
_AS_TOKENS = {"token_type_ids", "special_tokens_mask"}  # 0 for each token of a plain text


@register
class Canaries(Inside):
    """Puts canaries behind the rows, and guesses at the end which of them took part.

    Attributes: first: the first canary's row, of N, once the run was made. waiting: of "gradients",
        which canaries are in each draw whose step was not made yet.
    """

    asked_for_by = "audit_canaries"
    adds_rows = True

    def __init__(self, args: Any):
        super().__init__(args)
        self.scores: str = args.audit_scores or GRADIENTS
        self.count: int = args.audit_canaries
        self.waiting: deque[list[int]] = deque()
        self._likelihood = np.zeros(self.count)  # log-likelihood ratio of in and out
        self._places: tuple[list[str], np.ndarray, np.ndarray, np.ndarray] | None = None
        self._before: np.ndarray | None = None

    def rows(self, dataset: DataSet, model: nn.Module | None, known: TrainingRows) -> DataSet:
        """Return the training set with canaries. Raises: DataError."""
        if model is None:
            raise UnsupportedArgumentError(
                "Expected `model` to be given with `audit_canaries`, got None: canaries are "
                "generated for it. Pass the model, not model_init."
            )
        alike = self.scores == GRADIENTS
        return with_canaries(dataset, model, self.count, alike=alike, rows=known)

    def enter(self, run: PrivateRun, tuner: Tuner) -> None:
        """Toss the coins, which are kept nowhere."""
        if not run.processes.alone:
            raise UnsupportedArgumentError(
                f"Expected `audit_canaries` to be unset with {run.processes.count} processes, got "
                f"{self.count}: each would toss its own coins. Audit in one process."
            )
        if self.scores == DIRECTIONS and not tuner.gradients_are_noised_sums:
            raise invalid(
                "audit_scores",
                DIRECTIONS,
                f"to be {GRADIENTS!r} or {LOSSES!r} with this peft_config",
                "Its noised sums are of factors, in which a row's gradient has no direction.",
                UnsupportedArgumentError,
            )
        if tuner.selects_again:
            raise invalid(
                "audit_canaries",
                self.count,
                "to be unset with num_selections above 1",
                "Each canary has a coordinate of its own, in what trains throughout. Audit with "
                "num_selections=1.",
                UnsupportedArgumentError,
            )
        super().enter(run, tuner)
        self._tuner = tuner
        self.first = run.plan.num_examples - self.count
        secret = run.randomness.random_bytes
        self._random = np.random.default_rng(np.frombuffer(secret(32), np.uint32))
        self._in: np.ndarray = np.frombuffer(secret(self.count), np.uint8) % 2 == 1

    def call(self, checkpoint: str | None, seen: Seen) -> None:
        """Raise UnsupportedArgumentError for an audited run that is resumed, or trained again."""
        if checkpoint is not None or len(seen.book.ledger):
            raise UnsupportedArgumentError(
                "An audited run is not resumed, since the coins of its canaries are not stored. "
                "Start again in a new output_dir, or train without `audit_canaries`."
            )

    def start(self, seen: Seen) -> None:
        if self.scores == LOSSES:
            self._before = self._losses()

    # -- what takes part --

    def drawn(self, draws: Draws) -> Draws:
        """Return the draws without what does not go through the model."""
        return _Draws(self, draws)

    def split(self, drawn: list[int]) -> list[int]:
        """Return what of a draw goes through the model; note the canaries that are drawn."""
        rows = [index for index in drawn if index < self.first]
        canaries = [index - self.first for index in drawn if index >= self.first]
        canaries = [canary for canary in canaries if self._in[canary]]
        if self.scores == GRADIENTS:
            self.waiting.append(canaries)
            return rows
        return rows + [self.first + canary for canary in canaries]

    @torch.no_grad()
    def clipped(self, sums: dict[str, Tensor]) -> None:
        """Add the coordinates of the canaries of this step's draw to the clipped sums."""
        if self.scores != GRADIENTS:
            return
        if not self.waiting:
            raise ConfigError(
                "The audit has seen fewer draws than steps, so it does not know whose canaries "
                "take part. Train with this trainer's own data loader."
            )
        names, which, places, signs = self._coordinates(sums)
        for canary in self.waiting.popleft():
            total = sums[names[which[canary]]]
            place = np.unravel_index(int(places[canary]), tuple(total.shape))
            total[tuple(map(int, place))] += float(signs[canary]) * self.run.plan.clipping_norm

    @torch.no_grad()
    def noised(self, sums: dict[str, Tensor]) -> None:
        """Add up what this step's noised sums tell of each canary's coordinate.

        A coordinate in units of C is N(0, s^2) without the canary, and with it N(1, s^2) with the
        probability q. So its log-likelihood ratio is log(1 - q + q exp((2 x - 1) / (2 s^2))). (The
        rows' gradients in that coordinate add to both alike.)
        """
        if self.scores == DIRECTIONS:
            self._score_directions(sums)
        if self.scores != GRADIENTS:
            return
        names, which, places, signs = self._coordinates(sums)
        found = np.empty(self.count)
        for number, name in enumerate(names):
            here = which == number
            index = torch.as_tensor(places[here], device=sums[name].device)
            found[here] = sums[name].reshape(-1)[index].double().cpu().numpy()
        plan = self.run.plan
        x = signs * found / plan.clipping_norm
        s, q = plan.noise_std / plan.clipping_norm, plan.sample_rate
        with np.errstate(divide="ignore"):
            absent = np.log1p(-q)
        self._likelihood += np.logaddexp(absent, np.log(q) + (2 * x - 1) / (2 * s**2))

    def _score_directions(self, sums: dict[str, Tensor]) -> None:
        """Add up the part of the noised sum along each canary's own gradient, of length 1."""
        for canary in range(self.count):
            gradient = self._gradient(canary)
            if gradient.keys() != sums.keys():
                raise ConfigError(
                    "Expected audit_scores='gradients' for what trains here: its noised sums are "
                    "not gradients of parameters, so a canary has no direction in them."
                )
            length = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradient.values()]))
            along = sum(float((g * sums[name]).sum()) for name, g in gradient.items())
            self._likelihood[canary] += along / max(float(length), 1e-30)

    def _coordinates(
        self, sums: dict[str, Tensor]
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """Return the parts of the sum, and each canary's part, place in it and sign."""
        if self._places is None:
            names = list(sums)
            sizes = np.array([sums[name].numel() for name in names])
            if sizes.sum() < self.count:
                raise ConfigError(
                    f"Expected `audit_canaries` to be at most the {sizes.sum():,} numbers that "
                    f"train, got {self.count}: each canary has a coordinate of its own."
                )
            places = self._random.choice(int(sizes.sum()), self.count, replace=False)
            ends = sizes.cumsum()
            which = np.searchsorted(ends, places, side="right")
            signs = self._random.choice([-1.0, 1.0], self.count)
            self._places = (names, which, places - (ends - sizes)[which], signs)
        return self._places

    # -- what is concluded --

    def conclude(self) -> None:
        """Guess which canaries took part, and keep what follows for the statement. A run that its
        audit refutes is so for good: its ledger notes it."""
        if self._before is not None:
            self._likelihood = self._before - self._losses()
        if self.count > 1:  # one alone tells nothing; of many runs with one each, tests guess
            run = self.run
            claim, delta = run.epsilon().value, run.plan.delta
            run.audit = guess(self.scores, self._likelihood, self._in, claim, delta)
            statement = run.statement(self._tuner.describe(run.model))
            run.book.weaken(Flags(refuted=statement.accountant_note == REFUTED_BY_AUDIT))

    def end(self, seen: Seen) -> None:
        """Raise AuditError for a statement that its own audit refutes."""
        if seen.book.weaknesses.refuted:
            raise AuditError(
                f"The run is not as private as it claims: {seen.statement().status_reason}. Do not "
                "publish this model, nor any of its checkpoints, which now say so, too. Look at "
                "what draws, clips and noises (a subclass, a callback, an optimizer); if you "
                "changed nothing there, please report it, with privacy.json."
            )

    def _gradient(self, canary: int) -> dict[str, Tensor]:
        """Return the gradient of a canary's loss, without dropout, by the names of what trains."""
        run, row = self.run, self.first + canary
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
        """Return the canaries' losses, (m,): before the first step, and again after the last."""
        run, data = self.run, self.run.training_data()
        examples = data.examples.__getitems__([self.first + each for each in range(self.count)])
        found, batches = np.empty(self.count), data.batches()
        run.model.eval()  # until the next step begins
        for group in batches.cut(examples, range(len(examples))):
            batch = data.padding.together([examples[each] for each in group], batches.layout)
            found[group] = run.losses(batch).double().cpu().numpy()
        return found


class _Draws:
    def __init__(self, audit: Canaries, draws: Draws):
        self.audit, self.draws = audit, draws

    def __iter__(self) -> Iterator[list[int]]:
        self.audit.waiting.clear()  # what was drawn ahead
        for drawn in self.draws:
            yield self.audit.split(drawn)

    def __len__(self) -> int:
        return len(self.draws)


def guess(
    scores: str, values: np.ndarray, took_part: np.ndarray, epsilon: float, delta: float
) -> AuditResult:
    """Guess, of m canaries, that the highest values took part and the lowest did not. The claimed
    ``epsilon`` decides how many guesses are made."""
    order, count = np.argsort(values), len(values)
    half = best_number_of_guesses(count, epsilon, delta) // 2
    correct = int(took_part[order[-half:]].sum() + (~took_part[order[:half]]).sum())
    return AuditResult(scores, count, 2 * half, correct, delta)


def with_canaries(
    dataset: DataSet, model: nn.Module, count: int, *, alike: bool, rows: TrainingRows | None = None
) -> DataSet:
    """Return a data set and, after its rows, ``count`` synthetic ones in the same format. Of the
    rows, names and types are read; shapes, too, where the model never sees what is made: where they
    are ``alike``, one row that serves as all canaries."""
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
        parts: list[DataSet] = [dataset, made]
        return ConcatDataset(parts)
    columns = {name: [_plain(row[name]) for row in made] for name in dataset.column_names}
    canaries = datasets.Dataset.from_dict(columns, features=dataset.features)
    if rows is not None and not alike:
        _refuse_known(canaries, rows)
    joined = datasets.concatenate_datasets([plain, canaries])
    shown = {**dataset.format}
    return joined.with_format(**shown.pop("format_kwargs"), **shown)


def _refuse_shapes_of_rows(template: Row, made: Mapping[str, Tensor]) -> None:
    """Raise DataError for a column whose length or size a synthetic row would take from a row: the
    model sees it in every step, so a training row would move it beyond its bound."""
    row = template if isinstance(template, Mapping) else {"(no columns)": template}
    for name, value in row.items():
        known = "labels" if name in LABELS else name
        fixed = value is None or isinstance(value, (bool, int, float, str))
        if not fixed and known not in made and name not in _AS_TOKENS:
            raise DataError(
                f"Expected audit_scores='gradients' for a training set with the column {name!r}: "
                "a synthetic row would take its size from a training row. Or remove the column."
            )


def _refuse_known(canaries: datasets.Dataset, rows: TrainingRows) -> None:
    known = len(rows.compare(canaries).equal)
    if known:
        raise DataError(
            f"{known} of {len(canaries)} canaries are already among the training rows, whatever "
            "their coins say. Use audit_scores='gradients', whose canaries are not rows."
        )


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
