"""Processes act together or not at all."""

from __future__ import annotations

import os
import time

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


def test_what_the_main_process_finds_all_have():
    def act():
        here = Processes.here()
        return here.on_main(lambda: ("found by", here.rank)), here.largest(10 * here.rank)

    assert on_processes(3, act) == [(("found by", 0), 20)] * 3


@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_fails_all_stop_and_know_why(failing):
    def act():
        here = Processes.here()

        def fail():
            if here.rank == failing:
                raise LedgerError("the disk is full")

        first = _error(lambda: here.together(fail))
        on_main = _error(lambda: here.on_main(fail))
        return first, on_main, here.together(lambda: "goes on")

    found = on_processes(2, act)
    own, other = found[failing], found[1 - failing]
    assert own[0] == "LedgerError: the disk is full"
    assert other[0].startswith("DistributedError: Rank")
    assert f"Rank {failing} of 2 failed" in other[0] and "LedgerError: the disk is full" in other[0]
    if failing == 0:
        assert own[1] == "LedgerError: the disk is full" and "Rank 0 of 2 failed" in other[1]
    assert [each[2] for each in found] == ["goes on"] * 2


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


def test_processes_that_disagree_stop():
    def act():
        here = Processes.here()
        return _error(lambda: here.agree(f"entry {here.rank // 2}"))

    for message in on_processes(3, act):
        assert "Ranks [2] of 3 disagree with rank 0" in message


def test_what_differs_is_named_with_both_values():
    def act():
        here = Processes.here()
        facts = {"the argument `seed`": "1", "the argument `max_steps`": f"{4 + here.rank}"}
        here.refuse_differences({"the argument `seed`": "1"})
        return _error(lambda: here.refuse_differences(facts))

    for message in on_processes(2, act):
        assert "differ in the argument `max_steps`: rank 1 has 5, rank 0 has 4" in message


def test_a_fact_that_one_process_lacks_is_named():
    def act():
        here = Processes.here()
        return _error(lambda: here.refuse_differences({"a": "1"} if here.is_main else {}))

    assert all("differ in a: rank 1 has None" in message for message in on_processes(2, act))


def test_what_must_differ_is_compared():
    def act():
        here = Processes.here()
        here.refuse_equal("source", str(here.rank), "")
        return _error(lambda: here.refuse_equal("source", str(here.rank % 2), "Fork later."))

    for message in on_processes(3, act):
        assert message == "DistributedError: Ranks 0 and 2 have the same source. Fork later."


def test_a_lost_process_ends_the_others_with_a_clear_error():
    def act():
        dist.init_process_group("gloo")
        here = Processes.here()
        here.together(lambda: None)
        if here.rank == 1:
            os._exit(7)
        return _error(lambda: here.together(lambda: None))

    main, _ = outcomes(2, act)
    assert "Another process of this run is gone" in main.result
    assert "resume from the last checkpoint" in main.result


def test_nobody_goes_on_before_all_have_acted():
    def act():
        here = Processes.here()

        def late():
            if here.is_main:
                time.sleep(0.3)
            return time.monotonic()

        acted = here.together(late)
        return acted, time.monotonic()

    found = on_processes(2, act)
    assert min(after for _, after in found) >= max(acted for acted, _ in found)


def test_tensors_are_summed_and_shared():
    def act():
        here = Processes.here()
        own = torch.full((3,), float(here.rank + 1))
        return here.summed(own.clone()).tolist(), here.from_main(own.clone()).tolist()

    assert on_processes(3, act) == [([6.0] * 3, [1.0] * 3)] * 3
