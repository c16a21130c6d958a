"""Kill small private runs with SIGKILL, again and again, and check what is on the disk after each.

    PYTHONPATH=tests python tests/run/kill_runs.py --kills 200 [--processes 2]

Each attempt is a fork of this process, which has everything imported, and starts a run or resumes
it. It is killed at a chosen point (the k-th sync, rename, deletion, release or optimizer step) or at
a random time; of several processes, one is, and the others must end with an error that says so. Two
counters in shared memory outlive it: noised values that were let out, and releases that were begun.
After each kill:

- the ledger on the disk holds at least what was let out, and at most one release more, which was
  begun and not let out;
- each checkpoint has all its files and loads, its copy of the ledger is a part of the run's, and
  its weights hold no more updates than both count;
- the run goes on from there, or has no checkpoint yet.

``--plant`` breaks the library on purpose; the script must then fail.
"""

import argparse
import json
import math
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import tiny
import torch
from processes import environment, held_port
from statements import comparison_by
from transformers import BertForSequenceClassification, TrainerCallback

from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.errors import DistributedError, LedgerError
from hf_dp.run.checkpoint import SAVING
from hf_dp.run.gate import Gate, Release
from hf_dp.run.ledger import RunLedger
from hf_dp.run.ledger_file import COPY, LEDGER, read_copy, read_own
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.witnesses import checkpoints, read_run
from hf_dp.statement import wording
from hf_dp.statement.evidence import FILE_NAME, read
from hf_dp.trainer.checkpointing import Checkpointing
from hf_dp.tuners.frost.tuner import FrostConfig

NOTHING_TO_RESUME, FAILED, LEFT_ALONE = 3, 4, 5  # exit codes of an attempt
STEPS = 6
PATIENCE = 5.0  # seconds
IN_EACH = (
    "trainer_state.json", "optimizer.pt", "scheduler.pt", "config.json", "README.md", FILE_NAME,
    COPY,
)  # fmt: skip
CONFIGS: dict[str, Any] = {
    "dp_sgd": lambda: None,
    "frost": lambda: FrostConfig(
        unfreeze_ratio=0.3, selection_sample_rate=0.3, selection_iterations=2,
        selection_noise_multiplier=2.0, num_selections=2,
    ),
}  # fmt: skip


class Counting(BertForSequenceClassification):
    """Its weights hold how often they were updated."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.register_buffer("updates", torch.zeros(()))


class CountUpdates(TrainerCallback):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any):
        model.updates += 1


Shared = Any  # counters by name


def shared_counters() -> Shared:
    """Counters that outlive a killed process."""
    names = ("let_out", "begun", "points")
    return np.frombuffer(mmap.mmap(-1, 8 * len(names)), [(name, "i8") for name in names])[0]


def warm() -> None:
    """Do once, before all forks, what costs seconds and is not about crashes."""
    torch.set_num_threads(1)
    epsilon(PoissonSampledGaussian(1.0, 0.2, 1), 1e-3, "rdp")  # imports the accountant
    wording.compare = comparison_by("rdp")  # type: ignore[assignment]
    PrivateRun.check_engine = lambda self: None  # type: ignore[method-assign]


# -- in the forked child --


def watch(shared: Shared, kill_at: int | None) -> None:
    """Count the points at which a kill is interesting, and die at one of them."""
    shared["points"] = 0

    def point() -> None:
        shared["points"] += 1
        if shared["points"] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            point()
            result = real(*args, **kwargs)
            point()
            return result

        setattr(owner, name, call)

    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        around(os, name)
    around(torch, "save")
    around(torch.optim.AdamW, "step")
    around(Checkpointing, "_save_checkpoint")

    append, let_out = RunLedger.append, Release.sum

    def begun(self: RunLedger, event: Any, purpose: str) -> None:
        shared["begun"] += event.steps
        append(self, event, purpose)

    def out(self: Release, sums: Any) -> Any:
        noised = let_out(self, sums)
        shared["let_out"] += self.planned.event.steps
        point()
        return noised

    RunLedger.append, Release.sum = begun, out  # type: ignore[method-assign]


def make(folder: Path, config: str) -> Any:
    torch.manual_seed(0)
    given = {"model": Counting(tiny.model().config), "peft_config": CONFIGS[config]()}
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    options = {"max_steps": STEPS, "logging_strategy": "no", "accountant": "rdp", **saving}
    return tiny.trainer(folder, given={**given, "callbacks": [CountUpdates()]}, **options)


def child(
    folder: Path, config: str, shared: Shared, kill_at: int | None, resume: bool | str
) -> int:
    torch.set_num_threads(1)
    with open(folder.with_suffix(".log"), "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            watch(shared, kill_at)
            make(folder, config).train(resume_from_checkpoint=resume)
        except (LedgerError, DistributedError) as error:
            if "has no checkpoint" in str(error):
                return NOTHING_TO_RESUME
            traceback.print_exc()
            return LEFT_ALONE if isinstance(error, DistributedError) else FAILED
        except BaseException:
            traceback.print_exc()
            return FAILED
    return 0


# -- in the parent --


def attempt(
    folder: Path,
    config: str,
    shared: Shared,
    *,
    kill_at: int | None = None,
    after: float | None = None,
    branch: bool = False,
    victim: int = 0,
    processes: int = 1,
) -> int:
    """Fork one attempt and return its exit code, negative for a signal.

    Args: victim: the rank that is killed.
    """
    resume: bool | str = _has_begun(folder)
    if branch and resume and (found := checkpoints(folder)):
        resume = str(found[-1])
    own = [shared_counters() for _ in range(processes)]
    with held_port() as port:
        children = []
        for rank in range(processes):
            pid = os.fork()
            if not pid:
                if processes > 1:
                    os.environ |= environment(rank, processes, port)
                at = kill_at if rank == victim else None
                os._exit(child(folder, config, own[rank], at, resume))
            children.append(pid)
        if after is not None:
            time.sleep(after)
            os.kill(children[victim], signal.SIGKILL)
        codes = _ended(children, victim)
    for name in ("let_out", "begun"):  # by whoever came farthest
        shared[name] += max(each[name] for each in own)
    shared["points"] = own[victim]["points"]
    killed = codes[victim] == -signal.SIGKILL
    unexpected = [c for c in codes if c not in (0, NOTHING_TO_RESUME, LEFT_ALONE, -signal.SIGKILL)]
    if unexpected or (LEFT_ALONE in codes and not killed and NOTHING_TO_RESUME not in codes):
        return FAILED
    return -signal.SIGKILL if killed else max(c for c in codes if c != LEFT_ALONE)


def _ended(children: list[int], victim: int) -> list[int]:
    """Wait for all; as launchers do, end those that a killed one leaves waiting for it."""
    found: dict[int, int] = {}
    deadline = math.inf
    while len(found) < len(children):
        for rank, pid in enumerate(children):
            if rank not in found and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                found[rank] = os.waitstatus_to_exitcode(ended[1])
                if found[rank] == -signal.SIGKILL:
                    deadline = min(deadline, time.monotonic() + PATIENCE)
            elif rank not in found and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [found[rank] for rank in range(len(children))]


def _has_begun(folder: Path) -> bool:
    """Return whether a line of the run's ledger is whole."""
    return (folder / LEDGER).exists() and read_own(folder) is not None


def recorded(folder: Path) -> int:
    """Return how many releases the run's files record. Raises: LedgerError when they disagree."""
    return read_run(folder).ledger.steps() if _has_begun(folder) else 0


def check(folder: Path, before: dict[str, int], shared: Shared) -> None:
    """Raise AssertionError when the disk shows less, or more, than what happened."""
    now = recorded(folder)
    let_out = shared["let_out"] - before["let_out"]
    begun = shared["begun"] - before["begun"]
    new = now - before["recorded"]
    assert new >= let_out, f"{let_out} noised values were let out, and {new} were recorded"
    assert new <= begun, f"{begun} releases were begun, and {new} were recorded"
    assert new <= let_out + 1, f"{new} releases were recorded for {let_out} values"
    for path in folder.glob("checkpoint-*"):
        lacking = {*IN_EACH} - {each.name for each in path.iterdir()}
        assert not lacking, f"{path.name} is not complete: it has no {sorted(lacking)}"
        own, copy = read_own(folder), read_copy(path)
        assert own is not None and copy is not None and own.contains(copy.head)
        with safetensors.safe_open(path / "model.safetensors", "pt") as weights:
            updates = int(weights.get_tensor("updates"))
        state = json.loads((path / "trainer_state.json").read_text())
        ledger = read(path).ledger
        assert ledger.extends(copy.ledger) and now >= ledger.steps()
        assert updates == state["global_step"] == int(path.name.rpartition("-")[2])
        assert updates <= STEPS, f"{path.name} has more steps than were planned"
        assert updates <= ledger.steps("training") <= now
        torch.load(path / "optimizer.pt", weights_only=True)


def kill_runs(
    kills: int, seed: int, root: Path, plant: str | None = None, processes: int = 1
) -> Counter[str]:
    """Kill and resume until ``kills`` attempts have died. Raises: AssertionError."""
    if plant is not None:
        PLANTS[plant]()
    warm()
    choose, shared, seen = random.Random(seed), shared_counters(), Counter()  # type: ignore[var-annotated]
    points, seconds = {}, {}
    for config in CONFIGS:  # one run of each that is left alone
        folder, start = root / f"whole-{config}", time.monotonic()
        whole = attempt(folder, config, shared, processes=processes)
        assert whole == 0, folder.with_suffix(".log").read_text()
        points[config], seconds[config] = int(shared["points"]), time.monotonic() - start
    number, folder, config = 0, root / "0", "dp_sgd"
    while seen["killed"] < kills:
        before = {name: int(shared[name]) for name in ("let_out", "begun")}
        before["recorded"] = recorded(folder)
        resumes, branch = before["recorded"] > 0, choose.random() < 0.25
        how: dict[str, Any]
        if choose.random() < 0.75:
            most = points[config] if not resumes or branch else max(2, points[config] * 2 // 3)
            how = {"kill_at": choose.randint(1, most)}
        else:
            how = {"after": choose.uniform(0.0, seconds[config])}
        how |= {"victim": choose.randrange(processes), "processes": processes}
        code = attempt(folder, config, shared, branch=branch, **how)
        where = f"{folder.name} ({config}), attempt {dict(seen)}, {how}: exit {code}"
        try:
            assert code in (0, NOTHING_TO_RESUME, -signal.SIGKILL), "the attempt failed"
            check(folder, before, shared)
        except (AssertionError, LedgerError, OSError) as error:
            log = folder.with_suffix(".log")
            tail = log.read_text()[-3000:] if log.exists() else ""
            raise AssertionError(f"{where}\n{error}\n{tail}") from error
        seen["attempts"] += 1
        seen["killed"] += code == -signal.SIGKILL
        seen["killed at a point"] += code == -signal.SIGKILL and "kill_at" in how
        seen["killed while saving"] += code != 0 and (folder / SAVING).exists()
        seen["resumed"] += resumes and code != NOTHING_TO_RESUME
        seen["branched"] += branch and resumes
        if code in (0, NOTHING_TO_RESUME):
            seen["finished"] += code == 0
            shutil.rmtree(folder, ignore_errors=True)
            number += 1
            folder, config = root / str(number), choose.choice(list(CONFIGS))
    seen["finished at last"] += _finish(folder, config, shared, processes)
    return seen


def _finish(folder: Path, config: str, shared: Shared, processes: int) -> int:
    code = attempt(folder, config, shared, processes=processes)
    assert code in (0, NOTHING_TO_RESUME), folder.with_suffix(".log").read_text()[-3000:]
    return int(code == 0)


# -- planted bugs --


def ledger_after_the_gradient() -> None:
    """The value leaves before its event is durable."""
    from contextlib import contextmanager

    @contextmanager
    def release(self: Any, planned: Any) -> Any:
        release = Release(planned, self._noise, self._ledger)
        yield release
        release.close()
        self._ledger.append(planned.event, planned.purpose)

    Gate.release = release  # type: ignore[method-assign, assignment]


def save_in_place() -> None:
    """A checkpoint is written under its own name."""
    from hf_dp.trainer import checkpointing

    checkpointing.SAVING = "."
    checkpointing.publish = lambda folder, name: folder / name  # type: ignore[assignment]


PLANTS = {each.__name__: each for each in (ledger_after_the_gradient, save_in_place)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--plant", choices=PLANTS)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        try:
            seen = kill_runs(args.kills, args.seed, Path(root), args.plant, args.processes)
        except AssertionError as error:
            print(f"FAILED (--seed {args.seed}): {error}")
            return 1
    print(f"seed {args.seed}: {dict(seen)} in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
