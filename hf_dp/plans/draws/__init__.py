"""Who takes part in a step: each draw in one file, with its sampler, its event and its words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dp import _validate
from hf_dp._dataclasses import checked_fields
from hf_dp.accounting.knows import Asked
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans.draws.allocation import AllocationSampler as AllocationSampler
from hf_dp.plans.draws.allocation import RandomAllocation as RandomAllocation
from hf_dp.plans.draws.base import DRAWS as DRAWS
from hf_dp.plans.draws.base import Draw as Draw
from hf_dp.plans.draws.base import DrawWords as DrawWords
from hf_dp.plans.draws.base import RandomBytes as RandomBytes
from hf_dp.plans.draws.base import Sampler as Sampler
from hf_dp.plans.draws.base import Share as Share
from hf_dp.plans.draws.base import register_draw as register_draw
from hf_dp.plans.draws.poisson import Poisson as Poisson
from hf_dp.plans.draws.poisson import PoissonSampler as PoissonSampler
from hf_dp.plans.draws.poisson import TruncatedPoisson as TruncatedPoisson
from hf_dp.plans.draws.user_rows import UserRows as UserRows
from hf_dp.plans.draws.user_rows import UserRowsSampler as UserRowsSampler

POISSON = Poisson.sampling


def check_sampling(name: str, value: object) -> str:
    """Return the value of the argument ``sampling``. Raises: InvalidArgumentError."""
    return _validate.one_of(name, value, dict.fromkeys(draw.sampling for draw in DRAWS.values()))


def draw_of(
    sampling: str = POISSON, max_batch_size: int | None = None, by_row: bool = False
) -> Draw:
    """Return the draw that these arguments ask for.

    Args: max_batch_size: ``max_logical_batch_size``. by_row: whether rows of users are drawn.

    Raises: InvalidArgumentError; UnsupportedArgumentError for arguments that ask for two draws.
    """
    check_sampling("sampling", sampling)
    asked: list[Draw] = [draw() for draw in DRAWS.values() if draw.sampling == sampling != POISSON]
    if by_row:
        asked.append(UserRows())
    if max_batch_size is not None:
        asked.append(TruncatedPoisson(max_batch_size))
    for other in asked[1:]:
        refused: Asked = other.asked
        raise _validate.invalid(
            refused.argument,
            refused.value,
            f"to be left out with {asked[0].asked}",
            "A step has one draw. Remove one of the two.",
            UnsupportedArgumentError,
        )
    return asked[0] if asked else Poisson()


def draw_from_dict(values: Mapping[str, Any]) -> Draw:
    """Read back ``{"name": ..., **fields}``.

    Raises: ConfigError for an unknown draw, or fields that it does not have; InvalidArgumentError.
    """
    given = dict(values) if isinstance(values, Mapping) else {}
    name = given.pop("name", None)
    if name not in DRAWS:
        raise ConfigError(
            f"Expected the draw of a plan to be one of {sorted(DRAWS)}, got {name!r}. Import the "
            "module that registers it."
        )
    return DRAWS[name](**checked_fields(DRAWS[name], given, ConfigError))
