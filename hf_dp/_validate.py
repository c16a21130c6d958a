"""One form of message for every bad value: argument, what was expected, value, the next move."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable

from hf_dp.errors import InvalidArgumentError, UnknownArgumentError


def invalid(
    name: str,
    value: object,
    expected: str,
    next_move: str = "",
    error: type[InvalidArgumentError] = InvalidArgumentError,
) -> InvalidArgumentError:
    """Return the error for one bad value; the caller raises it."""
    message = f"Expected `{name}` {expected}, got {value!r}."
    return error(f"{message} {next_move}".rstrip())


def real(name: str, value: object, next_move: str = "") -> float:
    """Return a finite real number; refuse bool, strings, NaN and infinity."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise invalid(name, value, "to be a number", next_move)
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise invalid(name, value, "to be finite", next_move)
    return number


def positive(name: str, value: object, next_move: str = "") -> float:
    """Return a finite number > 0."""
    number = real(name, value, next_move)
    if number <= 0:
        raise invalid(name, value, "to be > 0", next_move)
    return number


def non_negative(name: str, value: object, next_move: str = "") -> float:
    """Return a finite number >= 0."""
    number = real(name, value, next_move)
    if number < 0:
        raise invalid(name, value, "to be >= 0", next_move)
    return number


def in_unit_interval(
    name: str, value: object, next_move: str = "", *, zero: bool = False, one: bool = False
) -> float:
    """Return a number between 0 and 1; each end is allowed only on request."""
    number = real(name, value, next_move)
    if not ((0 < number or (zero and number == 0)) and (number < 1 or (one and number == 1))):
        raise invalid(
            name, value, f"to be in {'[' if zero else '('}0, 1{']' if one else ')'}", next_move
        )
    return number


def integer(name: str, value: object, minimum: int, next_move: str = "") -> int:
    """Return a whole number >= ``minimum``; accept 3.0, refuse 3.5 and True."""
    number = real(name, value, next_move)
    if number != int(number) or number < minimum:
        raise invalid(name, value, f"to be a whole number >= {minimum}", next_move)
    return int(number)


def one_of(name: str, value: object, choices: Iterable[str], next_move: str = "") -> str:
    """Return one of the listed strings; the error lists them and suggests the nearest."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        hint = did_you_mean(str(value), known)
        raise invalid(
            name, value, f"to be one of {known}", " ".join(filter(None, (hint, next_move)))
        )
    return value


def did_you_mean(word: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Return a question about the nearest of the known words; empty where none is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=alike)
    return f"Did you mean {close[0]!r}?" if close else ""


_WRITTEN_FOR = {
    "delta": "target_delta",
    "epsilon": "target_epsilon",
    "noise": "noise_multiplier",
    "sigma": "noise_multiplier",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "expected_batch_size",
}


def refuse_unknown(init: Callable[..., None], given: Iterable[str]) -> None:
    """Raise UnknownArgumentError for the first name that an ``__init__`` does not take."""
    takes = inspect.getfullargspec(init)
    known = [*takes.args[1:], *takes.kwonlyargs]
    for name in given:
        if takes.varkw is None and name not in known:
            owner = init.__qualname__.removesuffix(".__init__")
            hint = did_you_mean(_WRITTEN_FOR.get(name, name), known, 0.75) or "Remove it."
            raise UnknownArgumentError(f"Expected an argument of {owner}, got `{name}`. {hint}")
