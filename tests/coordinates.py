"""Audits of whole runs in which each row moves one weight, by C: as many runs with and without a row
as there are weights.

A row's gradient does not depend on the weights, and it is clipped to C in a weight of its own. So that
weight shows when this row took part, whoever else did. Rows of every other weight are left out.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import tiny
import torch
from scipy import stats
from scipy.special import logsumexp
from torch import nn
from torch.nn.functional import one_hot
from transformers import TrainerCallback, default_data_collator

from hf_dp.trainer.trainer import DPTrainer

SIDE = 64
COUNT = SIDE**2 // 2  # of rows, and of weights without one
IN = np.arange(SIDE**2) % 2 == 0
REJECT, DELTA, C = 1e-5, 0.05, 0.1
# In which releases a row takes part, how often, with which probability; independently for each of
# the list.
Ways = list[dict[tuple[int, ...], float]]


class Square(nn.Module):
    """One matrix. A row's gradient is ``sum_t g_t x_t^T``, of whatever it gives as x and g."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.layer = nn.Linear(side, side, bias=False)
        self.config = SimpleNamespace(model_type="square", to_dict=dict)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class OneWeightEach(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        place = inputs["place"]
        row, column = (one_hot(at, SIDE).float() for at in (place // SIDE, place % SIDE))
        return (model(column) * row).sum(-1)

    def synthetic_batches(self) -> list[dict[str, torch.Tensor]]:
        return [{"place": torch.tensor([place])} for place in (1, 5, 9)]


class Released(TrainerCallback):
    """Keeps what each step lets out, of each weight, in units of C; may end the process after it."""

    def __init__(self, releases: list[np.ndarray], dies: int | None) -> None:
        self.releases, self.dies = releases, dies

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **others: Any) -> None:
        self.before = model.layer.weight.detach().clone()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **others: Any) -> None:
        moved = (self.before - model.layer.weight.detach()) * args.expected_batch_size / C
        self.releases.append(moved.flatten().numpy())
        if state.global_step == self.dies:
            raise KeyboardInterrupt


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"place": np.flatnonzero(IN)})


def trainer(
    folder: Path, data: Any, releases: list[np.ndarray], dies: int | None = None, **options: Any
) -> DPTrainer:
    """A run of plain steps, which does not depend on what was released before."""
    given = {"model": Square(SIDE), "eval_dataset": None, "data_collator": default_data_collator}
    given |= {"train_dataset": data, "callbacks": [Released(releases, dies)]}
    values = {
        "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "report_to": "none",
        "per_example_max_grad_norm": C, "per_device_train_batch_size": 64,
        "logging_strategy": "no", "remove_unused_columns": False,
    }  # fmt: skip
    return tiny.trainer(folder, cls=OneWeightEach, given=given, **{**values, **options})


def scores(releases: np.ndarray, ways: Ways, sigma: float) -> np.ndarray:
    """How much likelier what was released (R, n) is with each row than without, in logarithms."""

    def likelier(way: tuple[int, ...]) -> np.ndarray:
        times = np.bincount([*way], minlength=len(releases))
        return (times @ releases - times @ times / 2) / sigma**2

    each = ([np.log(p) + likelier(way) for way, p in one.items()] for one in ways)
    return np.sum([logsumexp(parts, axis=0) for parts in each], axis=0)


def refuted(hits: Any, alarms: Any, claim: float) -> Any:
    """Whether so many rows that are there, and that are not, look as if they were, beyond what epsilon
    allows: by bounds that fail in 2 of 10^5 runs."""
    least = stats.beta.ppf(REJECT, hits, COUNT - hits + 1)
    return least > np.exp(claim) * stats.beta.isf(REJECT, alarms + 1, COUNT - alarms) + DELTA


def refutes(releases: list[np.ndarray], ways: Ways, sigma: float, claim: float) -> bool:
    found = scores(np.array(releases), ways, sigma) > claim
    return bool(refuted(found[IN].sum(), found[~IN].sum(), claim))


def power(ways: Ways, sigma: float, claim: float) -> float:
    """The probability with which :func:`refutes` sees a run in which rows take part like this."""
    draw, count = np.random.default_rng(0), 2**17
    releases = {release for one in ways for way in one for release in way}
    noise = sigma * draw.standard_normal((len(releases), count))
    there = noise.copy()
    for one in ways:
        which = draw.choice(len(one), count, p=[*one.values()])
        for number, way in enumerate(one):
            there[:, which == number] += np.bincount([*way], minlength=len(noise))[:, None]
    chances = [np.mean(scores(each, ways, sigma) > claim) for each in (there, noise)]
    return float(np.mean(refuted(*(draw.binomial(COUNT, p, 2000) for p in chances), claim)))
