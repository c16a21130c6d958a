"""Events: what is written is read back, bad values are named, and what they compose to."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from hf_dp.accounting import (
    BestOfRandomRuns,
    Gaussian,
    Ledger,
    PoissonSampledGaussian,
    PublishedForwardNoise,
    RandomAllocationGaussian,
    RecordRelease,
    SampledRecordRelease,
    SumAndRows,
    TruncatedPoissonSampledGaussian,
    UserRowsGaussian,
    epsilon,
    event_from_dict,
)
from hf_dp.accounting.composition import compose
from hf_dp.errors import InvalidArgumentError, UnsupportedEventError

LOSS = {"beside": {"loss": 3}}
EVENTS = [
    Gaussian(1.5),
    PoissonSampledGaussian(0.8, 0.015, 198),
    PoissonSampledGaussian(1, 0.1, 7, **LOSS),
    TruncatedPoissonSampledGaussian(1, 0.1, 7, 40, 9, **LOSS),
    UserRowsGaussian(1.5, 0.1, 3, 4),
    RandomAllocationGaussian(0.8, 66, 198),
    BestOfRandomRuns((Gaussian(1.0), PoissonSampledGaussian(1.0, 0.1, 2)), 3.0, shape=0),
    BestOfRandomRuns(Gaussian(1.0), 3.0, "poisson", None),
    RecordRelease(1.5, 2),
    SampledRecordRelease(1.5, 0.1, 3, 4),
    SumAndRows(1.0, 2.0, 0.1, 2),
    PublishedForwardNoise(0.3, 0.01, 8, 5),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_they_are_read_back_as_written(event):
    assert event_from_dict(json.loads(json.dumps(event.to_dict()))) == event
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.relations = ()


SAMPLED, TRUNCATED = PoissonSampledGaussian, TruncatedPoissonSampledGaussian


@pytest.mark.parametrize(
    ("cls", "values", "match"),
    [
        (SAMPLED, (-1, 0.1, 1), "`noise_multiplier`"),
        (SAMPLED, (math.nan, 0.1, 1), "`noise_multiplier`"),
        (SAMPLED, (True, 0.1, 1), "`noise_multiplier`"),
        (SAMPLED, (1, 1.71, 1), "`sample_rate`.*expected_batch_size / num_examples"),
        (SAMPLED, (1, -0.1, 1), "`sample_rate`"),
        (SAMPLED, (1, "0.1", 1), "`sample_rate`"),
        (SAMPLED, (1, 0.1, 1.5), "`steps`"),
        (SAMPLED, (1, 0.1, -1), "`steps`"),
        (TRUNCATED, (1, 0.1, 1, 40, 0), "`max_batch_size`"),
        (UserRowsGaussian, (1.0, 0.1, 1, 0), "`max_rows`"),
        (UserRowsGaussian, (1.0, 0.1, 1, True), "`max_rows`"),
        (RandomAllocationGaussian, (0.8, 66, 100), "`steps` to be a multiple of.*as a whole"),
        (RandomAllocationGaussian, (0.8, 1, 100), "`steps_per_allocation` to be a whole number"),
        (RecordRelease, (-1.0,), "`noise_multiplier`"),
        (SampledRecordRelease, (1.0, 1.5, 2), "`sample_rate`"),
        (SampledRecordRelease, (1.0, 0.5, 2, 0), "`num_micro_batches`"),
        (SumAndRows, (1.0, -1.0, 0.5, 2), "`record_noise_multiplier`"),
        (PublishedForwardNoise, (1.0, 0.5, 0, 2), "`num_micro_batches`"),
        (BestOfRandomRuns, ((), 10), "`run`"),
        (BestOfRandomRuns, (("run",), 10), "`run`"),
        (BestOfRandomRuns, (None, 10), "`run`"),
        (BestOfRandomRuns, ((BestOfRandomRuns(Gaussian(1.0), 3),), 10), "`run`"),
        (BestOfRandomRuns, (Gaussian(1.0), 0.5), "`mean_runs`"),
        (BestOfRandomRuns, (Gaussian(1.0), 1e305), "from 1 to 10"),
        (BestOfRandomRuns, (Gaussian(1.0), 1), "single run"),
        (BestOfRandomRuns, (Gaussian(1.0), 1 + 1e-12), "above 1 by"),
        (BestOfRandomRuns, (Gaussian(1.0), 10, "poisson"), "`shape`"),
        (BestOfRandomRuns, (Gaussian(1.0), 10, "uniform"), "`distribution`"),
        (BestOfRandomRuns, (Gaussian(1.0), 10, "truncated_negative_binomial", 1e300), "`shape`"),
        (BestOfRandomRuns, (Gaussian(1.0), 10, "truncated_negative_binomial", 1e-320), "`shape`"),
    ],
)
def test_bad_values_are_named(cls, values, match):
    with pytest.raises(InvalidArgumentError, match=match):
        cls(*values)


@pytest.mark.parametrize("noise", [-1, "1", math.nan])
def test_bad_noise_of_another_part_is_named(noise):
    with pytest.raises(InvalidArgumentError, match="`loss`"):
        PoissonSampledGaussian(1, 0.1, 1, beside={"loss": noise})
    with pytest.raises(InvalidArgumentError, match="`beside`"):
        PoissonSampledGaussian(1, 0.1, 1, beside={"sum": 1.0})


GAUSSIAN = {"type": "Gaussian", "noise_multiplier": 1, "steps": 1}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({**GAUSSIAN, "type": "Laplace"}, "Unknown event type 'Laplace'"),
        ({"noise_multiplier": 1, "steps": 1}, "Unknown event type None"),
        ({**GAUSSIAN, "cap": 3}, r"unknown here: \['cap'\]"),
        ({"type": "Gaussian", "noise_multiplier": 1}, r"missing: \['steps'\]"),
        ({**GAUSSIAN, "noise_multiplier": -1}, "cannot be read"),
        ({**EVENTS[5].to_dict(), "steps": 100}, "cannot be read"),
        ({**EVENTS[6].to_dict(), "run": "Gaussian"}, "cannot be read"),
        ("Gaussian", "mapping"),
    ],
)
def test_unreadable_descriptions_are_refused(data, match):
    with pytest.raises(UnsupportedEventError, match=match):
        event_from_dict(data)


def test_composition_merges_and_drops_what_touches_no_record():
    one = PoissonSampledGaussian(1.0, 0.1, 5)
    others = PoissonSampledGaussian(1.0, 0.1, 7), PoissonSampledGaussian(2.0, 1.0, 3)
    nothing = PoissonSampledGaussian(1.0, 0.0, 9), Gaussian(3.0, 0)
    composition = compose([one, Gaussian(2.0), *others, *nothing])
    (sampled,) = composition.sampled
    assert (sampled.noise_multiplier, sampled.sample_rate, sampled.steps) == (1.0, 0.1, 12)
    assert composition.gaussian_mu == pytest.approx(1.0)  # sqrt(4 / 2^2)
    assert composition.steps == 16
    assert compose(one) == compose([one])
    assert compose(Gaussian(2.0, 3)) == compose([Gaussian(2.0)] * 3) == compose(others[1])
    assert compose(RecordRelease(2.0, 3)).events == compose(others[1]).events


def test_composition_refuses_a_subclass_and_a_stranger():
    class Special(Gaussian):
        pass

    for event in (Special(1.0), "Gaussian", None):
        with pytest.raises(UnsupportedEventError, match="got"):
            compose([event])


@pytest.mark.parametrize("event", EVENTS[2:4])
def test_parts_and_steps_of_a_sum_and_a_loss(event):
    assert event.noise_multipliers == {"sum": 1.0, "loss": 3.0}
    assert event.joint_noise_multiplier == pytest.approx(1 / math.sqrt(1 + 1 / 9), rel=1e-15)
    assert compose(event).steps == 7 and event.established
    ledger = Ledger()
    for _ in range(7):
        ledger.append(event_from_dict({**event.to_dict(), "steps": 1}), "training")
    assert ledger.events == (event,)


NOISELESS = [
    RecordRelease(0.0),
    SampledRecordRelease(0.0, 0.1, 1),
    SumAndRows(1.0, 0.0, 0.1, 1),
    UserRowsGaussian(0.0, 0.1, 1, 5),
    RandomAllocationGaussian(0.0, 5, 5),
    PoissonSampledGaussian(0.0, 0.1, 3, **LOSS),
    PoissonSampledGaussian(1.0, 0.1, 3, beside={"loss": 0.0}),
]


@pytest.mark.parametrize("event", NOISELESS, ids=lambda event: type(event).__name__)
def test_no_noise_in_any_part_has_no_finite_epsilon_unless_nothing_ran(event):
    assert compose(event).noiseless and math.isinf(epsilon(event, 1e-5).value)
    assert epsilon(event.with_steps(0), 1e-5).value == 0
    search = BestOfRandomRuns((PoissonSampledGaussian(0.0, 0.1, 1),), 10)
    assert epsilon(search, 1e-5, "rdp").value == math.inf
    nothing = BestOfRandomRuns((PoissonSampledGaussian(1.0, 0.0, 9),), 10)
    assert epsilon(nothing, 1e-5, "rdp").value == 0
