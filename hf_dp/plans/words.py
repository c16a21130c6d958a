"""How a statement speaks of a mechanism: sentences beside codes, which no program reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """How a statement speaks of a mechanism.

    Args:
        name: short, for example "DP-SGD".
        mechanism: what is clipped, noised and released, as a card describes it.
        sampling: who takes part in a step, as a card describes it.
        drawn: the sampling in two or three words, for "900 steps of DP-SGD with ...".
        proof: why the epsilon holds, as the reason of the status "proven".
        tag: on the Hub.
        sampling_code: the value of the argument ``sampling``, or "none" where all examples take
            part at once.
        also_covered: what epsilon covers beside the weights; empty if nothing is released beside
            them.
        tuning: what epsilon does not cover of other runs.
        conditions: what else epsilon rests on that a record holds no evidence of.
    """

    name: str
    mechanism: str
    sampling: str
    drawn: str
    proof: str
    tag: str
    sampling_code: str = "poisson"
    also_covered: str = ""
    tuning: str = (
        "hyperparameter tuning and other runs on the same data: each run adds its own epsilon"
    )
    conditions: tuple[str, ...] = ()
