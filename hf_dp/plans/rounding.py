"""How far rounding can move a sum beyond its clipping norm, so that noise is scaled to cover it.

A sum over a draw is made of products, one for each physical batch, which are added in float64. If
one example leaves, three things change beside its own part.

* *Products that lose it.* A product over a group of examples is off by ``sum_i w_i s_i`` at most,
  with w_i the weight and s_i the slack of example i (:class:`hf_dp.clipping.rounding.Norms`).
  Groups do not move (:func:`hf_dp.batches.loader.physical_batches`): at most R other examples get
  into another group, R the size of a physical batch. Each is rounded once with the example and once
  without it. The engine's weights keep ``w_i s_i <= cap C`` (:func:`slack_cap`), so this moves the
  sum by at most ``2 R cap C``. The example's own slack is part of what is clipped:
  ``w (n + s) <= C``.
* *Norms* are believed with a relative error of up to e = 5e-5 (:mod:`hf_dp.clipping.norms`): the
  example's own once, those of the R others with it and without it, so ``(1 + 2 R) e C``.
* *The order of additions*: each is off by 2^-53 of a partial sum of at most n C, in both sums. With
  1,024 additions an example to one number of the sum: ``n^2 2^-42 C``.

Gradients are therefore clipped to :func:`clipping_share` of C, and the noise, of which records and
cards tell, is scaled to C and :func:`rounding_margin` as ever.

What is not derived, but tested (tests/clipping/test_rounding.py and
tests/trainer/test_sums_through_train.py): that a product of a processor's library is off by no more
than its slack; and that norm and gradient of a regrouped example, forward and backward included,
change by no more than its slack. They can change by more where a rounding decides between two
branches (a ReLU exactly at 0: 2.3 C were measured for made-up weights), and in sums inside a module
that has no rule. At most R examples are concerned.

*How small may a clipping norm r C get?* All of the above is relative to it, so slack asks for no
limit down to what float32 can tell from 0. But a softmax rounds 1 - p absolutely, in steps of
2^-23: a row's gradient, of norm sqrt(2) J (1 - p) with J that of an output, changes by J 2^-23 if
other neighbors flip a step, however small it is. In a sum that is divided by r this counts 1/r
times, for up to R rows. The margin has 2 R cap C for them, enough (if nothing else uses it) where

    r C >= J 2^-24 / cap: or, of a C that is the norm of a row with J_0 and q_0 = 1 - p,
    r >= 2^-10.5 J / (J_0 q_0) with physical batches of 64, 2^-12.5 J / (J_0 q_0) with up to 16.

So from the norm of a row that is not fitted (q_0 near 1/2) to r = 1/30, J may be 24 J_0. Nothing
bounds J, which is of the model and the rows. So no limit always holds, neither for r nor for a
fixed C: :data:`hf_dp.plans.quantile.LOWEST` is a choice. (In scaled norms a regrouped gradient has
changed by 1.8 times its slack: by 7e-6 of its norm, where the margin has 2 (cap + e) = 2.2e-4.)
"""

from __future__ import annotations

import math

# The least margin, in units of C, by which noise is scaled up.
ROUNDING_MARGIN = 2.0**-12

# Rows of real texts and images have a slack of 4e-6 to 6e-5 of their norm, and no cap shall lower
# their weights. It is 2.4e-4 for groups of up to 16, and falls to 6.1e-5 for 64. What that moves,
# 2^-7 C, is the same for all from 16 on; larger groups than 64 keep the cap, and move more.
_SLACK = 2.0**-7
SMALL_GROUP, _LARGE_GROUP = 16, 64

_NORM_ERROR = 5e-5


def rounding_margin(expected_draw: float, most: float = math.inf) -> float:
    """Return by how much of C noise is scaled up, for sums over draws of ``expected_draw`` examples
    on average and ``most`` at the most.

    It grows with the draw, as the rounding of float32 sums did when ledgers began to record it.
    """
    return max(ROUNDING_MARGIN, _largest(expected_draw, most) * 2.0**-23)


def clipping_share(
    expected_draw: float, most: float = math.inf, margin: float | None = None
) -> float:
    """Return the share of C that gradients are clipped to, so that sums over such draws move by no
    more than C (1 + margin), with physical batches of up to 64.

    Args: margin: :func:`rounding_margin` of the draw by default.
    """
    history = _largest(expected_draw, most) ** 2 * 2.0**-42
    margin = rounding_margin(expected_draw, most) if margin is None else margin
    return min(1.0, (1 + margin) / (1 + _moved(_LARGE_GROUP) + history))


def slack_cap(regrouped: int) -> float:
    """Return the most of C that the slack of one example may be, once it is weighted.

    Args: regrouped: R, the most other examples that one example moves to another group.
    """
    return _SLACK / (2 * min(max(SMALL_GROUP, regrouped), _LARGE_GROUP))


def regrouping_share(regrouped: int, moves: float = 1.0) -> float:
    """Return the further share of C to which gradients in large groups are clipped: 1 up to 64
    regrouped examples, 0.960 for 256. Args: moves: how many times as far as these a sum moves."""
    large = max(regrouped, _LARGE_GROUP)
    return (1 + moves * _moved(_LARGE_GROUP)) / (1 + moves * _moved(large))


# w: a count of norms falls from 1/2 to -1/2 between (1 - w) C and (1 + w) C. What norms move by
# moves it this many times as far, in units of 1/2.
RAMP = 0.25
COUNT_MOVES = (1 + RAMP) / RAMP


def count_margin() -> float:
    """Return by how much of its sensitivity, 1/2, the noise on a count of norms is scaled up, for
    physical batches of up to 64 (:mod:`hf_dp.plans.quantile`).

    A regrouped example's norm was found with a relative error of up to a = e + cap, with the
    example that leaves and without it. (Slack moves the norms that weights are computed from by at
    most cap, relative to them: :func:`slack_cap`.) Where one of the two is below (1 + w) C, they
    differ by at most 2 a (1 + w) C / (1 - a), and what is counted by that / (2 w C). For R examples
    this is at most ``(2 R cap + 2 R e) (1 + w) / (2 w)``, with one e more for 1 - a.
    """
    return COUNT_MOVES * _moved(_LARGE_GROUP)


def _moved(regrouped: int) -> float:
    return 2 * regrouped * slack_cap(regrouped) + (1 + 2 * regrouped) * _NORM_ERROR


def _largest(expected_draw: float, most: float) -> float:
    """Return how large a draw can be.

    A Poisson draw exceeds its mean m by 12 sqrt(m) with a probability below exp(-60) (Bernstein,
    from m = 1,000 on, below which the constant is larger).
    """
    return min(most, expected_draw + 12 * math.sqrt(expected_draw))
