"""Print, as a table, how often audits refute a run with a fault in it, by fault and kind of audit.

    python tests/audit/share_of_faults.py [FAULT ...]

It takes an hour on one core. The task is the tests' tiny one.
"""

import gc
import itertools
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import tiny
from faults import FAULTS, planted

from hf_dp.errors import AuditError
from hf_dp.features.canaries import Canaries, guess

COMMON: dict[str, Any] = {
    "target_delta": 1e-6, "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True,
    "report_to": "none",
}  # fmt: skip


@contextmanager
def audited(**options: Any) -> Iterator[Any]:
    """A trainer of a run with canaries, whose folder goes away."""
    with tempfile.TemporaryDirectory() as folder:
        yield tiny.trainer(Path(folder), **COMMON, **options)


def in_one_run(scores: str, canaries: int, steps: int) -> bool:
    """Say whether one audited run refutes its claim: epsilon 1.5 or so."""
    audit = {"audit_canaries": canaries, "audit_scores": scores, "per_example_max_grad_norm": 0.1}
    batch = canaries // 10 + 4  # a tenth of all rows
    plan = {"expected_batch_size": batch, "noise_multiplier": 2.0, "max_steps": steps}
    with audited(**audit, **plan) as trainer:
        try:
            trainer.train()
        except AuditError:
            return True
        return False


def leaving_one_out(runs: int, batch: int, steps: int, epsilon: float) -> bool:
    """Say whether runs with one canary, in every other, refute what each claims.

    C is small, so that weights and hence the other rows' gradients differ little between runs.
    """
    outcomes, claims = [], []
    one = {"audit_canaries": 1, "audit_scores": "directions", "per_example_max_grad_norm": 1e-4}
    plan = {"expected_batch_size": batch, "target_epsilon": epsilon, "max_steps": steps}
    with _alternating_coins():
        for _ in range(runs):
            with audited(**one, **plan) as trainer:
                trainer.train()
                (audit,) = (each for each in trainer.run.inside if isinstance(each, Canaries))
                outcomes.append((audit._likelihood[0], audit._in[0]))
                claims.append((trainer.epsilon().value, trainer.ledger.events))
    claim, events = max(claims, key=lambda each: each[0])
    scores, took_part = (np.array(each) for each in zip(*outcomes, strict=True))
    result = guess("directions", scores, took_part, claim, COMMON["target_delta"])
    return bool(result.refutation(claim, events, "rdp"))


AUDITS: dict[str, tuple[int, Callable[[], bool]]] = {  # how often, and what
    "gradients, 100": (5, lambda: in_one_run("gradients", 100, 30)),
    "gradients, 400": (5, lambda: in_one_run("gradients", 400, 30)),
    "gradients, 1000": (5, lambda: in_one_run("gradients", 1000, 30)),
    "directions, 40": (3, lambda: in_one_run("directions", 40, 15)),
    "leave one out, a quarter drawn": (1, lambda: leaving_one_out(100, 10, 8, 0.5)),
    "leave one out, all drawn": (1, lambda: leaving_one_out(40, 41, 1, 0.2)),
}


@contextmanager
def _alternating_coins() -> Iterator[None]:
    """Luck with few coins is not what is measured."""
    coins, made = itertools.cycle([True, False]), Canaries.enter

    def with_coin(self: Canaries, *args: Any) -> None:
        made(self, *args)
        self._in[:] = next(coins)

    with mock.patch.object(Canaries, "enter", with_coin):
        yield


def main(names: list[str]) -> None:
    logging.disable(logging.WARNING)
    gc.freeze()
    print("| Fault | " + " | ".join(AUDITS) + " |", flush=True)
    print("|---" * (1 + len(AUDITS)) + "|", flush=True)
    for name in names or FAULTS:
        found = []
        for times, audit in AUDITS.values():
            with planted(name):
                found.append(f"{sum(audit() for _ in range(times))} of {times}")
        print(f"| {name} | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
