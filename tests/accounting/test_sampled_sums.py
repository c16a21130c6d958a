"""Truncated samples, and sampled rows of which several are one user's: against quadrature."""

import functools
import itertools
import math

import mpmath as mp
import numpy as np
import pytest
from scipy.stats import binom, norm

from hf_dp.accounting import (
    Gaussian,
    GroupedGaussian,
    PoissonSampledGaussian,
    TruncatedPoissonSampledGaussian,
    UserRowsGaussian,
    calibrate_noise_multiplier,
    epsilon,
    one_step,
)
from hf_dp.errors import UnsupportedEventError

GRID = np.linspace(-30, 45, 60_001)


@functools.cache
def noise_around(total, sigma):
    """Return the density of the noise on GRID; many samples have the same sum."""
    return norm.pdf(GRID, total, sigma)


def output_density(gradients, sigma, q, cap):
    """Return the density of one step's noisy sum, over all samples and all their truncations."""
    density = np.zeros_like(GRID)
    n = len(gradients)
    for size in range(n + 1):
        for drawn in itertools.combinations(range(n), size):
            chance = q**size * (1 - q) ** (n - size)
            parts = list(itertools.combinations(drawn, min(cap, size)))
            for part in parts:
                density += (
                    chance / len(parts) * noise_around(sum(gradients[i] for i in part), sigma)
                )
    return density


def hockey_stick(p, q, epsilon):
    return float(np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), GRID))


@pytest.mark.parametrize(
    ("n", "cap"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
        (3, 2),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("sigma", "q"), [(2.0, 0.9), pytest.param(1.0, 0.3, marks=pytest.mark.slow)]
)
def test_the_bound_holds_for_every_choice_of_unit_gradients(n, cap, sigma, q):
    """Zero-out of one of n examples, in both directions.

    The gradients are all those of 1-dimensional examples in {-1, 0, 1}.
    """
    delta = 1e-3
    bound = epsilon(TruncatedPoissonSampledGaussian(sigma, q, 1, n, cap), delta).value
    worst = 0.0
    for others in itertools.product((-1, 0, 1), repeat=n - 1):
        with_it = output_density((1, *others), sigma, q, cap)
        for without in (
            output_density((0, *others), sigma, q, cap),
            output_density(others, sigma, q, cap),
        ):
            worst = max(
                worst, hockey_stick(with_it, without, bound), hockey_stick(without, with_it, bound)
            )
    assert worst <= delta + 1e-9


def test_one_more_example_is_not_answered():
    """With cap = N and one example added, others are left out.

    Exact quadrature gives 9.577 where plain Poisson sampling has 4.378.
    """
    event = TruncatedPoissonSampledGaussian(1.0, 1.0, 1, 3, 3)
    three, four = (
        output_density((-1, -1, -1), 1.0, 1.0, 3),
        output_density((-1, -1, -1, 1), 1.0, 1.0, 3),
    )
    assert hockey_stick(four, three, epsilon(event, 1e-5).value) > 1e-5, (
        "what add_remove would have to cover"
    )
    with pytest.raises(UnsupportedEventError, match="add_remove.*zero_out"):
        epsilon(event, 1e-5, relation="add_remove")


@pytest.mark.parametrize(
    ("n", "batch", "cap"), [(67_349, 1024, 2465), (392_702, 2048, 4013), (10_000, 100, 680)]
)
def test_a_cut_that_never_happens_is_none(n, batch, cap):
    """Where the tail underflows, dp-accounting divides by it; here the draws are plain ones."""
    event = TruncatedPoissonSampledGaussian(1.0, batch / n, 10, n, cap)
    assert epsilon(event, 1e-6) == epsilon(PoissonSampledGaussian(1.0, batch / n, 10), 1e-6)


@pytest.mark.parametrize("eps", [20.0, 33.0, 34.5, 35.0, 35.05])
def test_an_addition_near_the_largest_loss_is_that_of_60_digits(eps):
    """Of a user of whom hardly ever no row is drawn: the loss of no row is -35.0656."""
    mp.mp.dps = 60
    sigma, q, rows = mp.mpf("0.8"), mp.mpf("0.97"), 10
    chances = [mp.binomial(rows, i) * q**i * (1 - q) ** (rows - i) for i in range(rows + 1)]

    def loss(y):
        terms = (p * mp.exp(i * y / sigma - (i / sigma) ** 2 / 2) for i, p in enumerate(chances))
        return mp.log(mp.fsum(terms))

    low, high = mp.mpf(-40), mp.mpf(40)  # the outcome of the loss -eps
    for _ in range(150):
        middle = (low + high) / 2
        low, high = (middle, high) if loss(middle) < -eps else (low, middle)
    below = mp.fsum(p * mp.ncdf(low - i / sigma) for i, p in enumerate(chances))
    exact = mp.ncdf(low) - mp.exp(eps) * below
    (found,) = one_step._Rows(0.8, 0.97, rows).addition(np.array([eps]))
    assert found == pytest.approx(float(exact), rel=1e-9)


def test_a_user_whose_rows_are_nearly_all_drawn_has_an_epsilon():
    """It ended with an error: deltas computed near the largest loss rose with epsilon."""
    found = epsilon(UserRowsGaussian(0.5, 0.99, 1, 7), 1e-5)
    assert 100 < found.value <= epsilon(Gaussian(0.5 / 7, 1), 1e-5).value + 1e-3


def densities(sigma, q, rows):
    """The density of a step's sum with the user, all of whose rows point the same way; without."""
    chances = binom.pmf(np.arange(rows + 1), rows, q)
    with_user = sum(p * norm.pdf(GRID, i, sigma) for i, p in enumerate(chances))
    return with_user, norm.pdf(GRID, 0, sigma)


def delta_of_two_steps(p, q, eps):
    """The hockey-stick divergence of two independent steps, on a grid of their outcomes."""
    p, q = p[::30] * 30 * (GRID[1] - GRID[0]), q[::30] * 30 * (GRID[1] - GRID[0])
    return float(np.maximum(np.outer(p, p) - math.exp(eps) * np.outer(q, q), 0).sum())


CASES = [(1.0, 0.3, 2), (2.0, 0.05, 7), (0.8, 0.5, 3)]


@pytest.mark.parametrize(("sigma", "q", "rows"), CASES)
def test_one_step_is_what_quadrature_gives(sigma, q, rows):
    loss = one_step.sampled_rows(sigma, q, rows, 1e-4)
    with_user, without = densities(sigma, q, rows)
    for eps in (0.0, 0.3, 1.0, 3.0):
        for pmf, one, other in (
            (loss._pmf_remove, with_user, without),
            (loss._pmf_add, without, with_user),
        ):
            exact = hockey_stick(one, other, eps)
            assert exact - 1e-7 <= pmf.get_delta_for_epsilon(eps) <= exact * 1.001 + 1e-7


def test_planted_a_row_forgotten_is_seen(monkeypatch):
    honest = one_step.sampled_rows
    monkeypatch.setattr(
        one_step, "sampled_rows", lambda sigma, q, rows, step: honest(sigma, q, rows - 1, step)
    )
    with pytest.raises(AssertionError):
        test_one_step_is_what_quadrature_gives(*CASES[0])


@pytest.mark.parametrize(("sigma", "q", "rows"), CASES)
def test_two_steps_are_what_quadrature_gives(sigma, q, rows):
    delta = 1e-4
    found = epsilon(UserRowsGaussian(sigma, q, 2, rows), delta).value
    with_user, without = densities(sigma, q, rows)
    pairs = ((with_user, without), (without, with_user))
    assert max(delta_of_two_steps(*pair, found) for pair in pairs) <= delta
    assert max(delta_of_two_steps(*pair, found - 0.005) for pair in pairs) > delta


@functools.cache
def of_two_rows(sigma, q):
    return one_step.sampled_rows(sigma, q, 2, 1e-4)


@pytest.mark.parametrize("angle", [0.0, 1.0, 2.5, math.pi])
def test_rows_in_any_directions_lose_no_more(angle):
    """Two rows of a user at an angle, against the bound, which is of rows that are aligned."""
    sigma, q, eps = 0.7, 0.4, 1.0
    rows = [np.array([1.0, 0.0]), np.array([math.cos(angle), math.sin(angle)])]
    axis = np.linspace(-6, 7, 521)

    def density(mean):
        return np.outer(*(norm.pdf(axis, each, sigma) for each in mean))

    with_user = sum(
        q ** sum(drawn)
        * (1 - q) ** (2 - sum(drawn))
        * density(sum((d * r for d, r in zip(drawn, rows, strict=True)), np.zeros(2)))
        for drawn in itertools.product((0, 1), repeat=2)
    )
    cell = (axis[1] - axis[0]) ** 2
    loss = of_two_rows(sigma, q)
    for one, other, pmf in (
        (with_user, density([0, 0]), loss._pmf_remove),
        (density([0, 0]), with_user, loss._pmf_add),
    ):
        found = np.maximum(one - math.exp(eps) * other, 0).sum() * cell
        assert found <= pmf.get_delta_for_epsilon(eps) + 1e-7
        if angle == 0:
            assert found == pytest.approx(pmf.get_delta_for_epsilon(eps), rel=1e-3)


def test_special_cases():
    def value(event):
        return epsilon(event, 1e-5).value

    assert value(UserRowsGaussian(1.0, 0.02, 100, 1)) == value(
        PoissonSampledGaussian(1.0, 0.02, 100)
    )
    assert value(UserRowsGaussian(6.0, 1.0, 10, 3)) == value(Gaussian(2.0, 10))
    assert value(UserRowsGaussian(1.0, 0.0, 100, 5)) == 0
    assert value(UserRowsGaussian(1.0, 0.1, 0, 5)) == 0
    rising = [value(UserRowsGaussian(2.0, 0.02, 200, rows)) for rows in (1, 2, 5)]
    assert rising == sorted(rising)
    # Less than if all five rows came whenever one does.
    assert rising[2] < 0.8 * value(PoissonSampledGaussian(2 / 5, 1 - 0.98**5, 200))


def test_events_add_up():
    one = UserRowsGaussian(2.0, 0.02, 40, 5)
    twice = epsilon([one, one], 1e-5).value
    assert twice == epsilon(UserRowsGaussian(2.0, 0.02, 80, 5), 1e-5).value
    both = epsilon([one, PoissonSampledGaussian(2.0, 0.02, 40)], 1e-5).value
    assert epsilon(one, 1e-5).value < both < twice


def test_noise_is_calibrated_to_it():
    def event(sigma, steps):
        return UserRowsGaussian(sigma, 0.02, steps, 3)

    sigma = calibrate_noise_multiplier(0.3, 1e-5, 0.02, 10, event=event)
    assert epsilon(event(sigma, 10), 1e-5).value <= 0.3
    assert epsilon(event(sigma * 0.99, 10), 1e-5).value > 0.3


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.1), (2.0, 0.5)])
def test_a_row_costs_what_a_group_does_that_becomes_any_other(sigma, q):
    def density(side):
        return (1 - q) * noise_around(0, sigma) + q * noise_around(side, sigma)

    found = epsilon(GroupedGaussian(sigma, q, 1), 1e-3).value - 1e-3  # pld's slack
    for p, other in ((1, -1), (-1, 1)):
        assert hockey_stick(density(p), density(other), found) <= 1e-3 * (1 + 1e-6)
        assert hockey_stick(density(p), density(other), found - 3e-3) > 1e-3
    of_row, of_group = GroupedGaussian(sigma, q, 50), PoissonSampledGaussian(sigma, q, 50)
    cost = epsilon(of_row, 1e-5).value
    assert cost == epsilon(of_group, 1e-5, relation="replace_one").value
    assert cost > 1.2 * epsilon(of_group, 1e-5).value  # planted: as if a row moved it by C
    assert epsilon((of_row, of_group), 1e-5).value > cost
    always = epsilon(GroupedGaussian(2 * sigma, 1.0, 3), 1e-5).value
    assert always == pytest.approx(epsilon(Gaussian(sigma, 3), 1e-5).value, abs=3e-3)
    with pytest.raises(UnsupportedEventError, match="into other groups"):
        epsilon(of_row, 1e-5, relation="add_remove")


@pytest.mark.parametrize(("sigma", "q"), [(0.5, 0.02), (1.0, 0.3)])
def test_a_group_turned_in_any_direction_loses_no_more_than_in_the_opposite_one(sigma, q):
    axis = np.linspace(-1 - 8 * sigma, 1 + 8 * sigma, 401)
    x, y = np.meshgrid(axis, axis)

    def density(angle, length=1.0):
        def around(a, b):
            squares = (x - a) ** 2 + (y - b) ** 2
            return np.exp(-squares / (2 * sigma**2)) / (2 * np.pi * sigma**2)

        moved = around(length * np.cos(angle), length * np.sin(angle))
        return (1 - q) * around(0, 0) + q * moved

    before, cell = density(0.0), (axis[1] - axis[0]) ** 2
    for eps in (0.0, 0.5, 2.0, 4.0):

        def delta(p, other, eps=eps):
            return np.maximum(p - math.exp(eps) * other, 0).sum() * cell

        most = delta(before, density(math.pi))
        for angle in np.linspace(0, math.pi, 7):
            for length in (0.0, 0.5, 1.0):
                after = density(angle, length)
                assert max(delta(before, after), delta(after, before)) <= most * (1 + 1e-9) + 1e-15
