"""Rows of users drawn one by one, where what is protected is a user with up to so many of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_dp import _validate
from hf_dp.accounting import Event, UserRowsGaussian
from hf_dp.accounting.knows import USER_ROWS, Asked
from hf_dp.errors import ConfigError
from hf_dp.plans.draws.base import DrawWords, register_draw
from hf_dp.plans.draws.poisson import Poisson, PoissonSampler
from hf_dp.plans.schedule import Schedule
from hf_dp.plans.units import BY_ROW, Users


@dataclass(frozen=True)
class UserRowsSampler(PoissonSampler):
    """Draws rows as :class:`PoissonSampler` does, and accounts for users.

    Args: rows_of_a_user: the most of the N rows that are one user's, >= 1.
    """

    rows_of_a_user: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer("rows_of_a_user", self.rows_of_a_user, 1)

    def event(self, noise_multiplier: float, steps: int = 1) -> Event:
        if self.rows_of_a_user == 1:
            return super().event(noise_multiplier, steps)
        return UserRowsGaussian(noise_multiplier, self.sample_rate, steps, self.rows_of_a_user)


@register_draw
@dataclass(frozen=True)
class UserRows(Poisson):
    """Each row that is drawn from joins each step independently, and is clipped by itself; the
    accountant counts how many of them one user can have (Charles et al. 2024, arXiv 2407.07737)."""

    name: ClassVar[str] = "user_rows"
    kind: ClassVar[str] = USER_ROWS

    @property
    def asked(self) -> Asked:
        return Asked(self.kind, "unit_sampling", BY_ROW)

    def sampler(self, schedule: Schedule, steps: int) -> UserRowsSampler:
        most = _users(schedule).max_rows
        rate = self.sample_rate(schedule)
        return UserRowsSampler(schedule.drawn_from, rate, steps, rows_of_a_user=most)

    def words(self, schedule: Schedule) -> DrawWords:
        poisson, users = super().words(schedule), _users(schedule)
        return DrawWords(
            f"{poisson.sampling}; at most {users.max_rows} rows of each {users.name} are drawn "
            f"from, {users.num_rows} rows in all, and the accountant counts how many of these a "
            "step can have",
            poisson.name,
        )


def _users(schedule: Schedule) -> Users:
    if schedule.users is None:
        raise ConfigError("Expected a plan whose `users` say how many rows are one user's.")
    return schedule.users
