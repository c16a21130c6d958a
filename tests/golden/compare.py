"""Run the golden runs at this checkout and at another one, and compare what comes of them, bit for
bit.

    python tests/golden/compare.py OTHER_CHECKOUT [WORD ...]
    python tests/golden/compare.py --write

WORDs choose the runs that have one of them in their names (``seeded``, ``secret: users``). Both
sides run this checkout's ``runs.py``, at the same time. The exit status is 1 where one differs.
``--write`` renews ``expected.json`` instead, which ``test_golden_runs.py`` compares with.

``seeded`` runs agree in every bit: weights, ledger, log, statement, warnings, names of files. Their seed makes them not private, so ``secret`` runs are compared in what noise does not
touch: the statement and its epsilons, the ledger, names in the log. A ``pair`` of features is
compared in whether it is refused.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected.json"
WORDS = {"sentence", "mechanism", "trained", "precision"}  # of the statement; the rest is codes


def difference(ours: Any, theirs: Any, where: str = "") -> str | None:
    """Return the first place at which two outcomes differ, and how; None where they do not."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return f"{where}: {ours.dtype} {[*ours.shape]}, {theirs.dtype} {[*theirs.shape]}"
        if torch.equal(ours, theirs):
            return None
        return f"{where}: by up to {float((ours.double() - theirs.double()).abs().max()):.3g}"
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if name not in ours or name not in theirs:
                return f"{where}/{name}: only {'here' if name in ours else 'there'}"
            if (found := difference(ours[name], theirs[name], f"{where}/{name}")) is not None:
                return found
        return None
    if isinstance(ours, list) and isinstance(theirs, list):
        for place, (one, other) in enumerate(zip(ours, theirs)):
            if (found := difference(one, other, f"{where}/{place}")) is not None:
                return found
        if len(ours) == len(theirs):
            return None
        longer, shorter = sorted((ours, theirs), key=len, reverse=True)
        return f"{where}: {len(ours)} and {len(theirs)}, one without {longer[len(shorter)]!r}"
    return None if repr(ours) == repr(theirs) else f"{where}: {ours!r}, there {theirs!r}"


def summary(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return what is committed of an outcome: ledger, names in the log, statement, and of weights
    in float64 eight each."""
    found = {
        "ledger": outcome["ledger"],
        "log": sorted({name for entry in outcome["log"] for name in entry}),
        "files": [name for name in outcome["files"] if "checkpoint" not in name],
    }
    if outcome["statement"] is not None:
        stated = outcome["statement"].items()
        found["statement"] = {name: value for name, value in stated if name not in WORDS}
    weights = {
        name: [float(f"{x:.5g}") for x in value.flatten()[:: -(-value.numel() // 8)]]
        for name, value in outcome.get("weights", {}).items()
        if value.dtype == torch.float64
    }
    return {**found, "weights": weights} if weights else found


def committed(found: dict[str, Any]) -> str:
    """Return the text of ``expected.json``: a line for each run, and the pairs that are refused."""
    wanted = {name: summary(one) for name, one in found.items() if not name.startswith("pair: ")}
    wanted["refused"] = [name.removeprefix("pair: ") for name in found if found[name] == "refused"]
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in wanted.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def start(checkout: Path, results: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """Start the runs with a checkout's hf_dp, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{HERE.parent}"}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, HERE / "runs.py", checkout, results, *words]
    with results.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=results.parent)


def outcomes(checkouts: list[Path], words: list[str]) -> list[dict[str, Any]]:
    """Return what comes of the runs at each checkout, by name."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.pt") for number in range(len(checkouts))]
        children = [start(*each, words) for each in zip(checkouts, files)]
        for checkout, file, child in zip(checkouts, files, children):
            if child.wait():
                log = file.with_suffix(".log").read_text(errors="replace")
                raise SystemExit(f"{log[-3000:]}\nThe runs at {checkout} ended so.")
        return [torch.load(file) for file in files]


def main(first: str, *words: str) -> int:
    here = HERE.parents[1]
    if first == "--write":
        (found,) = outcomes([here], ["secret: ", "seeded: float64", "pair: "])
        EXPECTED.write_text(committed(found))
        return 0
    ours, theirs = outcomes([here, Path(first).resolve()], list(words))
    bad = 0
    for name in ours:
        found = difference(ours[name], theirs[name])
        if found is None and "error" in ours[name] and not name.startswith("pair"):
            found = f"fails at both: {ours[name]['error']}"
        bad += found is not None
        if found is not None or not name.startswith("pair"):
            word = "same   " if found is None else "DIFFERS"
            print(f"{word} {name} {found or ''}".rstrip())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    print(f"{len(ours) - bad} same, {bad} different; {seconds:.0f} processor seconds")
    return int(bad > 0 or not ours)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
