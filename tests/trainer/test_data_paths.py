"""One row more or less moves what a run releases by the clipping norm and no further, whatever lies
before the engine.

A black box: whole runs of one step through ``DPTrainer.train()`` with plain SGD, learning rate 1,
every row drawn and the same noise, with and without one row. Each run's change of weights, times
its own expected batch size, is its noised sum.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from data_paths import PATHS, DataPath, trainer_of
from faults import FAULTS, collate_together, no_self_check, noise_times
from scipy import stats
from silence import Coupled, weights
from torch import Tensor

from hf_dp.accounting import Gaussian, epsilon
from hf_dp.batches.isolation import Isolated
from hf_dp.batches.padding import Padding
from hf_dp.errors import DataError
from hf_dp.plans.rounding import clipping_share
from hf_dp.run.precision import Precision
from hf_dp.run.private_run import PrivateRun

CLIPPING_NORM = 0.2
MARGIN = 2.0**-12  # the plan's, for the rounding of sums


def released(
    folder: Path, path: DataPath, kept: Sequence[int], coupled: bool = True, **others: Any
) -> tuple[dict[str, Tensor], float]:
    """By weight the noised sum over the rows kept, and how far rounding of the weights may have
    moved it.

    Not ``coupled``: noise and all else that is random is secret, as in a user's run.
    """
    rows = copy.deepcopy(path.rows())
    options = {
        "expected_batch_size": len(kept), "max_steps": 1, "per_device_train_batch_size": 64, "optim": "sgd",
        "learning_rate": 1.0, "lr_scheduler_type": "constant", "logging_strategy": "no",
        "per_example_max_grad_norm": CLIPPING_NORM, "report_to": "none",
        "insecure_seed": 5 if coupled else None,
    }  # fmt: skip
    given = {**options, **path.options, **others}
    trainer = trainer_of(folder, path, [rows[i] for i in kept], **given)
    if coupled:
        trainer.run.randomness = Coupled(5)
        trainer.run.randomness.rows = kept
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    sums = {name: (value - after[name]).double() * len(kept) for name, value in before.items()}
    size = sum(
        float(torch.maximum(value.abs(), after[name].abs()).square().sum())
        for name, value in before.items()
    )
    return sums, 2.0**-23 * size**0.5 * len(kept)


def moved(folder: Path, path: DataPath, without: int) -> float:
    """How far, in units of what gradients are clipped to, one row moves the release, beyond what
    rounding of the weights explains. No run checks its engine, which would see some planted bugs:
    tests/trainer/test_self_check_path.py is about that."""
    everything = range(len(path.rows()))
    kept = [i for i in everything if i != without % len(everything)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateRun, "check_engine", lambda self: None)
        one, rounding = released(folder / "all", path, everything)
        other, other_rounding = released(folder / "without", path, kept)
    distance = float(
        torch.stack([(one[name] - other[name]).square().sum() for name in one]).sum().sqrt()
    )
    clips_to = CLIPPING_NORM * clipping_share(len(kept), len(kept))
    return max(0.0, distance - rounding - other_rounding) / clips_to


LEFT_OUT = [(name, -1) for name, path in PATHS.items() if path.refused is None]
LEFT_OUT += [("masked LM", 3), ("a collator with a public generator", 3)]


@pytest.mark.parametrize(("name", "without"), LEFT_OUT)
def test_one_row_moves_a_run_by_the_clipping_norm_at_most(name, without, tmp_path):
    """Left out is the longest row, on which all others would depend, or an early one."""
    assert 0.05 < moved(tmp_path, PATHS[name], without) <= 1 + MARGIN


@pytest.mark.parametrize("name", [name for name, path in PATHS.items() if path.refused is not None])
def test_what_cannot_be_padded_is_refused_before_the_first_draw(name, tmp_path):
    path = PATHS[name]
    with pytest.raises(DataError, match=path.refused):
        released(tmp_path, path, range(len(path.rows())))
    assert not (tmp_path / "ledger.jsonl").exists()


# -- each guard broken on purpose ---


def share_the_collator(patch):
    patch.setattr(Isolated, "fresh", lambda self: contextlib.nullcontext(self._root))


def go_on_with_one_stream(patch):
    patch.setattr(Coupled, "reseed", lambda self, index=None: None)


def pad_labels_with(value):
    honest = Padding.fill

    def fill(self, name, leaf):
        return value if name == "labels" else honest(self, name, leaf)

    return lambda patch: patch.setattr(Padding, "fill", fill)


def predict_from_padding(patch):
    """Labels with padding's own values, and targets wherever a label stands."""
    pad_labels_with(5)(patch)
    patch.setattr("hf_dp.losses.attended_targets", lambda labels, mask: labels)


def collate_together_and_predict(patch):
    collate_together(patch)
    patch.setattr("hf_dp.losses.attended_targets", lambda labels, mask: labels)


PLANTED = {
    "collated together: token labels": (collate_together, "token labels padded with 0"),
    "collated together: masked LM": (collate_together, "masked LM, labels cloned from padding"),
    "collated together: causal LM": (collate_together_and_predict, "causal LM, labels cloned from padding"),
    "collated together: seq2seq": (collate_together, "seq2seq labels padded with the padding token"),
    "collated together: masks": (collate_together, "masks from a public seed"),
    "collated together: MixUp": (collate_together, "MixUp"),
    "shared state of an object": (share_the_collator, "a collator that remembers"),
    "shared state of a closure": (share_the_collator, "a collator that remembers in a closure"),
    "shared state of a generator": (share_the_collator, "a collator with a public generator"),
    "shared state of a transform's generator": (share_the_collator, "a transform with a public generator"),
    "shared generator of a data set": (share_the_collator, "a data set with a public generator"),
    "shared generator of a seed": (share_the_collator, "a data set that makes a generator of its seed"),
    "shared generator of a step": (share_the_collator, "a data set with a step that has a generator"),
    "shared generator in a global": (share_the_collator, "a data set with a generator in a global"),
    "shared generator in a class": (share_the_collator, "a data set with a generator in its class"),
    "shared state of a data set": (share_the_collator, "a data set that counts"),
    "one stream for all examples": (go_on_with_one_stream, "masked LM"),
    "labels padded with 0": (pad_labels_with(0), "token classification"),
    "labels of padding": (predict_from_padding, "causal LM, labels given, padded on the left"),
    "padding attended to": (FAULTS["padding attended to"], "padding"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name, tmp_path, monkeypatch):
    plant, path = PLANTED[name]
    plant(monkeypatch)
    early = any(word in name for word in ("generator", "stream", "data set"))
    assert moved(tmp_path, PATHS[path], 0 if early else -1) > 1 + 10 * MARGIN


def test_planted_rounding_by_the_longest_neighbor_is_seen(tmp_path, monkeypatch):
    """In 16 bits, examples of different length in one physical batch, told by their shapes."""
    monkeypatch.setattr(Precision, "is_short", property(lambda self: False))
    trainer = tiny.trainer(tmp_path, bf16=True, max_steps=8)
    plan = trainer.privacy_plan
    draws = [batch for draw in trainer.run.draws(plan.sampler()) for batch in draw]
    assert any(not bool(batch["attention_mask"].all()) for batch in draws)


# -- an audit: 2 x 64 secret runs ---

RUNS, CONFIDENCE, CROWD = 64, 0.999, 10
NOISE, DELTA = 3.2, 1e-5  # one step with every row drawn: epsilon 1.184


def epsilon_at_least(found_with: int, found_without: int, runs: int = RUNS) -> float:
    """Lower bound on epsilon, at this confidence, from how often a test took a run for one with the
    canary.

    With rates p of finding it where it is and f where it is not, ``p <= exp(epsilon) f + delta``
    and ``1 - f <= exp(epsilon) (1 - p) + delta``; for p a lower Clopper-Pearson bound, for f an
    upper one.
    """
    alpha = (1 - CONFIDENCE) / 2  # of each
    p = stats.beta.ppf(alpha, found_with, runs - found_with + 1) if found_with else 0.0
    most = stats.beta.ppf(1 - alpha, found_without + 1, runs - found_without)
    f = most if found_without < runs else 1.0
    return math.log(max((p - DELTA) / f, (1 - f - DELTA) / (1 - p), 1.0))


def audited(folder: Path, path: DataPath) -> float:
    """Lower bound on epsilon from whole runs. The test: a projection, its threshold half way, both
    from runs without noise."""
    *ordinary, canary = path.rows()
    # Each of the others may feel the canary.
    path = dataclasses.replace(path, rows=lambda: [*ordinary * CROWD, canary])
    everything = range(len(path.rows()))
    worlds = {"with": everything, "without": everything[:-1]}
    with pytest.MonkeyPatch.context() as patch:
        noise_times(0.0)(patch)
        quiet = {name: released(folder / name, path, kept)[0] for name, kept in worlds.items()}
    direction = {name: quiet["with"][name] - quiet["without"][name] for name in quiet["with"]}

    def score(sums: dict[str, Tensor]) -> float:
        return float(sum((sums[name] * direction[name]).sum() for name in direction))

    threshold = (score(quiet["with"]) + score(quiet["without"])) / 2
    found = dict.fromkeys(worlds, 0)
    options = {"noise_multiplier": NOISE, "target_delta": DELTA}
    for run in range(RUNS):
        for name, kept in worlds.items():
            sums, _ = released(folder / f"{name} {run}", path, kept, coupled=False, **options)
            found[name] += score(sums) > threshold
    return epsilon_at_least(found["with"], found["without"])


STATED = epsilon((Gaussian(NOISE),), DELTA).rounded_up()
TABLE = ("padding", *list(PATHS)[:7])


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_an_audit_does_not_refute_the_statement(name, tmp_path):
    assert STATED <= 1.5
    assert audited(tmp_path, PATHS[name]) <= STATED


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["token labels padded with 0", "masked LM, labels cloned from padding"]
)
def test_an_audit_refutes_a_planted_bug(name, tmp_path, monkeypatch):
    no_self_check(monkeypatch)
    collate_together(monkeypatch)
    assert audited(tmp_path, PATHS[name]) > STATED


def test_the_bound_of_the_audit():
    assert epsilon_at_least(RUNS, 0) > 2 > 1.5 >= STATED
    assert epsilon_at_least(RUNS // 2, RUNS // 2) < 0.1
