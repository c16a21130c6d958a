"""Processes act together or not at all. Three of them answer most questions, one after the other."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes, outcomes

from hf_dp.distributed.processes import Processes
from hf_dp.errors import LedgerError


def _error(act) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_one_process_needs_no_group():
    here = Processes.here()
    assert here.alone and here.is_main
    assert here.together(lambda: 3) == 3
    assert here.on_main(lambda: 4) == 4
    assert here.largest(5) == 5
    here.refuse_equal("source", "same", "")


def answers() -> dict[str, Any]:
    here = Processes.here()
    own = torch.full((3,), float(here.rank + 1))

    def fail(rank: int):
        def act():
            if here.rank == rank:
                raise LedgerError("the disk is full")

        return _error(lambda: here.together(act)), _error(lambda: here.on_main(act))

    def late():
        if here.is_main:
            time.sleep(0.3)
        return time.monotonic()

    here.refuse_differences({"the argument `seed`": "1"})
    here.refuse_equal("source", str(here.rank), "")
    return {
        "from main": here.on_main(lambda: ("found by", here.rank)),
        "largest": here.largest(10 * here.rank),
        "failed": {rank: fail(rank) for rank in (0, 1)},
        "goes on": here.together(lambda: "goes on"),
        "disagree": _error(lambda: here.agree(f"entry {here.rank // 2}")),
        "differ": _error(
            lambda: here.refuse_differences({"the argument `max_steps`": f"{4 + here.rank // 2}"})
        ),
        "lack": _error(lambda: here.refuse_differences({"a": "1"} if here.is_main else {})),
        "equal": _error(lambda: here.refuse_equal("source", str(here.rank % 2), "Fork later.")),
        "late": (here.together(late), time.monotonic()),
        "tensors": (here.summed(own.clone()).tolist(), here.from_main(own.clone()).tolist()),
    }


@pytest.fixture(scope="module")
def found():
    return on_processes(3, answers)


SAID = {
    "disagree": "Ranks [2] of 3 disagree with rank 0",
    "differ": "differ in the argument `max_steps`: rank 2 has 5, rank 0 has 4",
    "lack": "differ in a: rank 1 has None",
    "equal": "DistributedError: Ranks 0 and 2 have the same source. Fork later.",
}


@pytest.mark.parametrize("what", SAID)
def test_what_must_be_equal_or_differ_is_named_in_all(what, found):
    assert all(SAID[what] in each[what] for each in found)


def test_what_the_main_process_finds_all_have(found):
    assert [(each["from main"], each["largest"]) for each in found] == [(("found by", 0), 20)] * 3


def test_tensors_are_summed_and_shared(found):
    assert [each["tensors"] for each in found] == [([6.0] * 3, [1.0] * 3)] * 3


@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_fails_all_stop_and_know_why(failing, found):
    own, *others = sorted(found, key=lambda each: each is not found[failing])
    assert own["failed"][failing][0] == "LedgerError: the disk is full"
    for each in others:
        together, on_main = each["failed"][failing]
        assert together.startswith(f"DistributedError: Rank {failing} of 3 failed")
        assert "LedgerError: the disk is full" in together
        assert ("Rank 0 of 3 failed" in on_main) == (failing == 0)
    assert (own["failed"][failing][1] == "LedgerError: the disk is full") == (failing == 0)
    assert [each["goes on"] for each in found] == ["goes on"] * 3


def test_nobody_goes_on_before_all_have_acted(found):
    acted, after = zip(*(each["late"] for each in found), strict=True)
    assert min(after) >= max(acted)


def test_a_failure_before_the_others_arrive_is_told():
    def act():
        here = Processes.here()
        if here.rank == 1:

            def fail():
                with here.telling():
                    raise torch.OutOfMemoryError("out of memory")

            return _error(fail)
        return _error(lambda: here.together(lambda: None))

    main, failed = on_processes(2, act)
    assert failed == "OutOfMemoryError: out of memory"
    assert "Rank 1 of 2 failed" in main and "OutOfMemoryError: out of memory" in main


def test_a_lost_process_ends_the_others_with_a_clear_error():
    def act():
        dist.init_process_group("gloo")
        here = Processes.here()
        here.together(lambda: None)
        if here.rank == 1:
            os._exit(7)
        return _error(lambda: here.together(lambda: None))

    main, _ = outcomes(2, act)
    assert "Another process of this run has ended" in main.result
    assert "resume from the last checkpoint" in main.result


def test_an_error_is_told_once_however_many_stand_around():
    """One fails inside ``telling``, where another is already in a message that follows; or in one
    that all are in. Then all go on."""

    def nested(rank: int, on_the_way: bool) -> str:
        here = Processes.here()

        def fail():
            if here.rank == rank:
                raise LedgerError("the disk is full")

        def act():
            with here.telling():
                if on_the_way:
                    fail()
                here.on_main(fail)

        return _error(act)

    def all_of_them():
        found = [nested(0, False), nested(0, True), nested(1, True)]
        return found, Processes.here().together(lambda: "goes on")

    (main, went_on), (other, too) = on_processes(2, all_of_them)
    heard = "DistributedError: Rank {} of 2 failed"
    assert [each[:12] for each in (*main[:2], other[2])] == ["LedgerError:"] * 3
    assert main[2].startswith(heard.format(1)) and other[0].startswith(heard.format(0))
    assert other[1].startswith(heard.format(0)) and went_on == too == "goes on"
