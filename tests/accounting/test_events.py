"""Events and the canonical composition."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from hf_dp.accounting import (
    BestOfRandomRuns,
    Gaussian,
    PoissonSampledGaussian,
    epsilon,
    event_from_dict,
)
from hf_dp.accounting.composition import compose
from hf_dp.errors import InvalidArgumentError, UnsupportedEventError


@pytest.mark.parametrize(
    "event", [Gaussian(1.5), Gaussian(2, 3), PoissonSampledGaussian(0.8, 0.015, 198)]
)
def test_round_trip_through_json(event):
    assert event_from_dict(json.loads(json.dumps(event.to_dict()))) == event


def test_dict_shape():
    assert PoissonSampledGaussian(1, 0.5, 3.0).to_dict() == {
        "type": "PoissonSampledGaussian",
        "noise_multiplier": 1.0,
        "sample_rate": 0.5,
        "steps": 3,
    }


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((-1, 0.1, 1), "noise_multiplier"),
        ((math.nan, 0.1, 1), "noise_multiplier"),
        ((1, 1.71, 1), "sample_rate.*expected_batch_size / num_examples"),
        ((1, -0.1, 1), "sample_rate"),
        ((1, 0.1, 1.5), "steps"),
        ((1, 0.1, -1), "steps"),
        ((True, 0.1, 1), "noise_multiplier"),
        ((1, "0.1", 1), "sample_rate"),
    ],
)
def test_bad_values_are_refused_on_construction(arguments, match):
    with pytest.raises(InvalidArgumentError, match=match):
        PoissonSampledGaussian(*arguments)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"type": "Laplace", "noise_multiplier": 1}, "Unknown event type 'Laplace'"),
        ({"noise_multiplier": 1, "steps": 1}, "Unknown event type None"),
        (
            {"type": "Gaussian", "noise_multiplier": 1, "steps": 1, "cap": 3},
            r"unknown here: \['cap'\]",
        ),
        ({"type": "Gaussian", "noise_multiplier": 1}, r"missing: \['steps'\]"),
        ({"type": "Gaussian", "noise_multiplier": -1, "steps": 1}, "cannot be read"),
        ("Gaussian", "mapping"),
    ],
)
def test_unreadable_descriptions_are_refused(data, match):
    with pytest.raises(UnsupportedEventError, match=match):
        event_from_dict(data)


def test_events_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Gaussian(1.0).steps = 2


def test_composition_merges_and_drops_what_touches_no_record():
    one = PoissonSampledGaussian(1.0, 0.1, 5)
    composition = compose(
        [
            one,
            Gaussian(2.0),
            PoissonSampledGaussian(1.0, 0.1, 7),
            PoissonSampledGaussian(1.0, 0.0, 9),
            Gaussian(3.0, 0),
            PoissonSampledGaussian(2.0, 1.0, 3),
        ]
    )
    assert composition.sampled == ((1.0, 0.1, 12),)
    assert composition.gaussian_mu == pytest.approx(1.0)  # sqrt(4 / 2^2)
    assert composition.steps == 16
    assert compose(one) == compose([one])


def test_composition_refuses_a_subclass_and_a_stranger():
    class Special(Gaussian):
        pass

    for event in (Special(1.0), "Gaussian", None):
        with pytest.raises(UnsupportedEventError, match="got"):
            compose([event])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mean_runs": 1 + 1e-12}, "above 1 by"),
        ({"mean_runs": 1e305}, "from 1 to 10"),
        ({"mean_runs": 10, "shape": 1e300}, "`shape` to be 0 or from"),
        ({"mean_runs": 10, "shape": 1e-320}, "`shape` to be 0 or from"),
    ],
)
def test_searches_beyond_what_can_be_computed_are_refused(arguments, match):
    with pytest.raises(InvalidArgumentError, match=match):
        BestOfRandomRuns((Gaussian(1.0, 1),), **arguments)


@pytest.mark.parametrize("shape", [0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("mean_runs", [1 + 1e-6, 2.0, 1e9])
def test_searches_at_the_edge_are_computed(mean_runs, shape):
    search = BestOfRandomRuns((Gaussian(1.0, 1),), mean_runs, shape=shape)
    assert epsilon(search, 1e-6, "rdp").value >= epsilon(Gaussian(1.0, 1), 1e-6, "rdp").value
