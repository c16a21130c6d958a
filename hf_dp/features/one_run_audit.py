"""Audit a run while it trains: canaries that secret coins put in or leave out, and what its
releases tell of them.

A canary is one of the rows that the sampler draws from. If its coin left it out, it contributes
nothing when drawn: that is the run's neighbor under zero-out. If not, then by its kind:

    gradients   one coordinate of length C enters the clipped sum in its place (a Dirac canary;
                Nasr et al. 2023, arXiv 2302.07956); the noised sums tell of that coordinate
    directions  it contributes as any row; the noised sums tell of the direction of its gradient
    losses      it contributes as any row; its loss is compared before and after
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler as BatchSampler

from hf_dp.accounting.one_run import best_number_of_guesses
from hf_dp.errors import ConfigError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.samplers import RandomBytes, Sampler
from hf_dp.statement.audited import DIRECTIONS, GRADIENTS, AuditResult

GradientOf = Callable[[int], dict[str, Tensor]]


class OneRunAudit:
    """The canaries of a run: the last ``count`` of its N rows.

    Args:
        scores: "gradients", "directions" or "losses".
        count: m.
        plan: of the run, DP-SGD on rows.
        random_bytes: where coins, places and signs come from; not kept anywhere.
    """

    def __init__(self, scores: str, count: int, plan: PrivacyPlan, random_bytes: RandomBytes):
        self.scores, self.count, self.plan = scores, count, plan
        self.first = plan.num_examples - count  # the first canary's row
        self._random = np.random.default_rng(np.frombuffer(random_bytes(32), np.uint32))
        self._in: np.ndarray = np.frombuffer(random_bytes(count), np.uint8) % 2 == 1
        self.drawn: deque[list[int]] = deque()
        self._likelihood = np.zeros(count)  # log-likelihood ratio of in and out
        self._places: tuple[list[str], np.ndarray, np.ndarray, np.ndarray] | None = None
        self._before: np.ndarray | None = None
        self.gradient_of: GradientOf | None = None  # for directions: of a canary, by parameter

    # -- what takes part --

    def draws(self, sampler: Sampler) -> BatchSampler[list[int]]:
        """Return the sampler's draws without the canaries that are left out, and without those
        that enter as coordinates."""
        return _Draws(self, sampler)

    def split(self, drawn: list[int]) -> list[int]:
        """Return what of a draw goes through the model; note the canaries that are drawn."""
        rows = [index for index in drawn if index < self.first]
        canaries = [index - self.first for index in drawn if index >= self.first]
        canaries = [canary for canary in canaries if self._in[canary]]
        if self.scores == GRADIENTS:
            self.drawn.append(canaries)
            return rows
        return rows + [self.first + canary for canary in canaries]

    @torch.no_grad()
    def insert(self, sums: dict[str, Tensor]) -> None:
        """Add the coordinates of the canaries of this step's draw to the clipped sums."""
        if self.scores != GRADIENTS:
            return
        if not self.drawn:
            raise ConfigError(
                "The audit has seen fewer draws than steps, so it does not know whose canaries "
                "take part. Train with this trainer's own data loader."
            )
        names, which, places, signs = self._coordinates(sums)
        for canary in self.drawn.popleft():
            total = sums[names[which[canary]]]
            place = np.unravel_index(int(places[canary]), tuple(total.shape))
            total[tuple(map(int, place))] += float(signs[canary]) * self.plan.clipping_norm

    @torch.no_grad()
    def score(self, noised: dict[str, Tensor]) -> None:
        """Add up what this step's noised sums tell of each canary's coordinate.

        A coordinate in units of C is N(0, s^2) without the canary, and with it N(1, s^2) with the
        probability q. So its log-likelihood ratio is log(1 - q + q exp((2 x - 1) / (2 s^2))). (The
        rows' gradients in that coordinate add to both alike.)
        """
        if self.scores == DIRECTIONS:
            self._score_directions(noised)
        if self.scores != GRADIENTS:
            return
        names, which, places, signs = self._coordinates(noised)
        found = np.empty(self.count)
        for number, name in enumerate(names):
            here = which == number
            index = torch.as_tensor(places[here], device=noised[name].device)
            found[here] = noised[name].reshape(-1)[index].double().cpu().numpy()
        x = signs * found / self.plan.clipping_norm
        s, q = self.plan.noise_std / self.plan.clipping_norm, self.plan.sample_rate
        with np.errstate(divide="ignore"):
            absent = np.log1p(-q)
        self._likelihood += np.logaddexp(absent, np.log(q) + (2 * x - 1) / (2 * s**2))

    def _score_directions(self, noised: dict[str, Tensor]) -> None:
        """Add up the part of the noised sum along each canary's own gradient, of length 1."""
        if self.gradient_of is None:
            raise ConfigError("Expected `gradient_of` to be set for scores by directions.")
        for canary in range(self.count):
            gradient = self.gradient_of(canary)
            if gradient.keys() != noised.keys():
                raise ConfigError(
                    "Expected audit_scores='gradients' for what trains here: the sums that are "
                    "noised are not the gradients of parameters, so they have no direction of a "
                    "canary's own."
                )
            length = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradient.values()]))
            along = sum(float((g * noised[name]).sum()) for name, g in gradient.items())
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

    def note_losses(self, losses: np.ndarray) -> None:
        """Note the canaries' losses, (m,): before the first step, and again after the last."""
        if self._before is None:
            self._before = losses
        else:
            self._likelihood = self._before - losses

    def result(self, epsilon: float) -> AuditResult:
        """Guess, compare with the coins, and return what follows. Args: epsilon: as claimed."""
        return guess(self.scores, self._likelihood, self._in, epsilon, self.plan.delta)

    @property
    def outcome(self) -> tuple[float, bool]:
        """The first canary's score, and whether it took part; for audits of many runs."""
        return float(self._likelihood[0]), bool(self._in[0])


def guess(
    scores: str, values: np.ndarray, took_part: np.ndarray, epsilon: float, delta: float
) -> AuditResult:
    """Guess that the highest values took part and the lowest did not; return what follows.

    Args:
        scores: what the values (m,) are of. took_part: the coins, (m,).
        epsilon: that is claimed; it decides how many guesses are made.
    """
    order, count = np.argsort(values), len(values)
    half = best_number_of_guesses(count, epsilon, delta) // 2
    correct = int(took_part[order[-half:]].sum() + (~took_part[order[:half]]).sum())
    return AuditResult(scores, count, 2 * half, correct, delta)


class _Draws(BatchSampler[list[int]]):
    def __init__(self, audit: OneRunAudit, sampler: Sampler):
        self.audit, self.sampler = audit, sampler

    def __iter__(self) -> Iterator[list[int]]:
        self.audit.drawn.clear()  # what was drawn ahead
        for drawn in self.sampler:
            yield self.audit.split(drawn)

    def __len__(self) -> int:
        return len(self.sampler)
