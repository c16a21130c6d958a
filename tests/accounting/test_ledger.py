"""The ledger: append-only, coalescing, prefix order, round trip."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hf_dp.accounting import Gaussian, Ledger, PoissonSampledGaussian, epsilon
from hf_dp.errors import InvalidArgumentError, LedgerError, UnsupportedEventError

STEP = PoissonSampledGaussian(1.0, 0.01, 1)


def ledger(*rows):
    result = Ledger()
    for event, purpose in rows:
        result.append(event, purpose)
    return result


def test_consecutive_steps_of_one_mechanism_are_one_entry():
    book = ledger(
        *[(STEP, "training")] * 3,
        (STEP, "selection"),
        (STEP, "training"),
        (Gaussian(2.0), "training"),
    )
    assert [(entry.purpose, entry.event.steps) for entry in book.entries] == [
        ("training", 3),
        ("selection", 1),
        ("training", 1),
        ("training", 1),
    ]
    assert len(book) == 4
    assert (book.steps(), book.steps("training"), book.steps("selection"), book.steps("other")) == (
        6,
        5,
        1,
        0,
    )
    other_rate = PoissonSampledGaussian(1.0, 0.02, 1)
    other_noise = PoissonSampledGaussian(1.1, 0.01, 1)
    assert len(ledger((STEP, "t"), (other_rate, "t"), (other_noise, "t"))) == 3


def test_epsilon_is_that_of_all_events():
    book = ledger((Gaussian(5.0), "selection"), (dataclasses.replace(STEP, steps=100), "training"))
    assert book.epsilon(1e-6, "rdp") == epsilon(book.events, 1e-6, "rdp")
    assert book.epsilon(1e-6, "rdp").value > epsilon(book.events[0], 1e-6, "rdp").value
    assert Ledger().epsilon(1e-6).value == 0


def test_round_trip_through_json():
    book = ledger((Gaussian(5.0), "selection"), (STEP, "training"), (STEP, "training"))
    rows = json.loads(json.dumps(book.to_list()))
    assert rows[0] == {
        "type": "Gaussian",
        "purpose": "selection",
        "noise_multiplier": 5.0,
        "steps": 1,
    }
    assert Ledger.from_list(rows) == book
    assert Ledger.from_list([]) == Ledger()


def test_history_cannot_be_changed_from_outside():
    book = ledger((STEP, "training"))
    taken = book.entries
    book.append(STEP, "training")
    assert taken[0].event.steps == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        taken[0].purpose = "nothing"
    book.to_list().clear()
    assert book.steps() == 2
    with pytest.raises(AttributeError):
        book.events = ()


def test_extends_is_the_prefix_order():
    history = [(Gaussian(5.0), "s"), (STEP, "t"), (STEP, "t"), (STEP, "eval"), (STEP, "t")]
    books = [ledger(*history[:n]) for n in range(len(history) + 1)]
    for longer, a in enumerate(books):
        for shorter, b in enumerate(books):
            assert a.extends(b) == (longer >= shorter), (longer, shorter)
    branch = ledger(*history[:3], (Gaussian(9.0), "t"))
    assert not branch.extends(books[4])
    assert not books[4].extends(branch)
    # the same mechanism with another purpose, or fewer steps before another entry, is another
    # history
    assert not ledger((STEP, "a"), (STEP, "a")).extends(ledger((STEP, "b")))
    assert not ledger((STEP, "t"), (STEP, "t"), (Gaussian(5.0), "t")).extends(
        ledger((STEP, "t"), (Gaussian(5.0), "t"))
    )


@pytest.mark.parametrize(
    "rows",
    [
        [{"type": "Gaussian", "noise_multiplier": 1.0, "steps": 1}],
        [{"type": "Unknown", "purpose": "t"}],
        [{"type": "Gaussian", "purpose": "t", "noise_multiplier": 1.0, "steps": 0}],
        [{"type": "Gaussian", "purpose": "", "noise_multiplier": 1.0, "steps": 1}],
        [{"type": "Gaussian", "purpose": "t", "noise_multiplier": 1.0}],
        [None],
        {"type": "Gaussian"},
        "[]",
        None,
    ],
)
def test_damaged_ledgers_are_refused(rows):
    with pytest.raises(LedgerError):
        Ledger.from_list(rows)


def test_append_checks():
    with pytest.raises(InvalidArgumentError, match="what ran"):
        Ledger().append(Gaussian(1.0, 0), "training")
    with pytest.raises(InvalidArgumentError, match="purpose"):
        Ledger().append(STEP, "")
    with pytest.raises(UnsupportedEventError):
        Ledger().append({"type": "Gaussian"}, "training")
