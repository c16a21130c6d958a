"""The ledger: append-only, coalescing, prefix order, round trip."""

import dataclasses
import json

import pytest

from hf_dp.accounting import BestOfRandomRuns, Gaussian, Ledger, PoissonSampledGaussian, epsilon
from hf_dp.accounting.ledger import EARLIER, TRAINING
from hf_dp.errors import InvalidArgumentError, LedgerError, UnsupportedEventError

STEP = PoissonSampledGaussian(1.0, 0.01, 1)
DELTA = 1e-4


def ledger(*rows):
    result = Ledger()
    for event, purpose in rows:
        result.append(event, purpose)
    return result


def test_consecutive_steps_of_one_mechanism_are_one_entry():
    book = ledger(*[(STEP, "a")] * 3, (STEP, "b"), (STEP, "a"), (Gaussian(2.0), "a"))
    found = [(entry.purpose, entry.event.steps) for entry in book.entries]
    assert found == [("a", 3), ("b", 1), ("a", 1), ("a", 1)] and len(book) == 4
    assert [book.steps(), book.steps("a"), book.steps("b"), book.steps("c")] == [6, 5, 1, 0]
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
    first = {"type": "Gaussian", "purpose": "selection", "noise_multiplier": 5.0, "steps": 1}
    assert rows[0] == first
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
    search = BestOfRandomRuns((Gaussian(2.0, 4),), 5)
    history = [(search, EARLIER), (STEP, "t"), (STEP, "t"), (STEP, "eval"), (STEP, "t")]
    books = [ledger(*history[:n]) for n in range(len(history) + 1)]
    for longer, a in enumerate(books):
        for shorter, b in enumerate(books):
            assert a.extends(b) == (longer >= shorter), (longer, shorter)
    branch = ledger(*history[:3], (Gaussian(9.0), "t"))
    assert not branch.extends(books[4])
    assert not books[4].extends(branch)
    # the same mechanism with another purpose, or fewer steps before another entry, is another
    # history
    twice, other = [(STEP, "t"), (STEP, "t")], (Gaussian(5.0), "t")
    assert not ledger(*twice).extends(ledger((STEP, "b")))
    assert not ledger(*twice, other).extends(ledger(twice[0], other))


def test_a_run_goes_on_with_its_own_search_and_no_other():
    step = BestOfRandomRuns((Gaussian(2.0, 1),), 5)
    book = ledger(*[(step, TRAINING)] * 3)
    (entry,) = book.entries
    assert entry.event == step.with_steps(3) and book.steps(TRAINING) == 3
    for _ in range(2):
        book.append(step.with_steps(3), EARLIER)
    assert len(book.entries) == 3
    again = Ledger.from_list(book.to_list())
    assert again == book and book.extends(again)
    assert book.epsilon(DELTA, "rdp") == epsilon([step.with_steps(3)] * 3, DELTA, "rdp")
    # Two searches of three steps cost more than one of six.
    two = epsilon([step.with_steps(3)] * 2, DELTA, "rdp").value
    assert two > epsilon(step.with_steps(6), DELTA, "rdp").value
    with pytest.raises(InvalidArgumentError, match="`steps`.*several events"):
        BestOfRandomRuns((STEP, STEP), 10).with_steps(3)


NAMED = {"type": "Gaussian", "purpose": "t", "noise_multiplier": 1.0, "steps": 1}


@pytest.mark.parametrize(
    "rows",
    [
        [{key: value for key, value in NAMED.items() if key != "purpose"}],
        [{key: value for key, value in NAMED.items() if key != "steps"}],
        [{"type": "Unknown", "purpose": "t"}],
        [{**NAMED, "steps": 0}],
        [{**NAMED, "purpose": ""}],
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
