"""The step of a mechanism: what it clips, and what it makes of a release."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hf_dp._validate import invalid
from hf_dp.clipping.sharding import is_sharded
from hf_dp.errors import ConfigError, LedgerError, UnsupportedArgumentError, UnsupportedModelError
from hf_dp.noise import untouched_generators
from hf_dp.plans.mechanism import MechanismPlan
from hf_dp.run.gate import Release
from hf_dp.run.physical_size import largest_physical_batch
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.facts import ALL, ANY
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.tuners.base import Tuner

# The input of one step: physical batches of one draw, or what a mechanism's own loader gives.
Batches = Any


@dataclass
class Clipped:
    """What one logical batch contributes, clipped and not yet noised: nothing of it may leave.

    Args:
        values: the mechanism's own.
        loss_sum: the sum of the losses, (), where it is known.
        beside: other sums of bounded numbers over the draw, each (), by part of the step's event.
    """

    values: Any
    loss_sum: Tensor
    beside: Mapping[str, Tensor] = field(default_factory=dict)


class Mechanism(ABC):
    """How a run of :attr:`plan_type` obtains privacy: one subclass for each plan.

    Args:
        run: the private run.
        tuner: what trains.

    Attributes:
        noised: what the last step released beside the gradients, each (), by its name in logs.
        logs: what logs call these numbers, where the plan asks for them.
        noise_norm: the root of the expected squared norm of the noise in the last step's gradients,
            where these are the noised sum itself; else None.
    """

    plan_type: ClassVar[type[MechanismPlan]]
    gradients_are_noised: ClassVar[bool] = True  # so that the norm of one may be logged
    masks_rows: ClassVar[bool] = False  # whether drawn rows may be bad, and then add 0
    needs_whole_weights: str = ""  # why, where a sharded model cannot be trained
    logs: tuple[str, ...] = ()
    noised: Mapping[str, Tensor] = MappingProxyType({})
    noise_norm: float | None = None

    def __init__(self, run: PrivateRun, tuner: Tuner | None = None):
        self.run, self.tuner = run, tuner or Tuner()
        options, name, error = run.options, type(self.plan).__name__, UnsupportedArgumentError
        why = "Nothing else is implemented there. Use it."
        asked = (("look_over", options.look_over, ALL), ("shapes", options.batches.shapes, ANY))
        for argument, value, usual in asked:
            if value != usual and not self.masks_rows:
                raise invalid(argument, value, f"to be {usual!r} with {name}", why, error)

    @property
    def plan(self) -> Any:
        """The mechanism's own plan, of type :attr:`plan_type`."""
        return self.run.plan.mechanism

    # -- before the steps --

    def start(self, checkpoint: str | None = None) -> None:
        """Decide which part of the model trains, and release what is released once.

        This comes before the optimizer exists.

        Args: checkpoint: folder from which a run continues.
        """

    def save(self, folder: str) -> None:
        """Write into a checkpoint what :meth:`start` reads there."""

    def refuse_shards(self, sharded: bool) -> None:
        """Raise UnsupportedModelError for a sharded model that cannot be trained in this way."""
        for part in (self, self.tuner):
            if sharded and part.needs_whole_weights:
                raise UnsupportedModelError(
                    f"{part.needs_whole_weights} So the model cannot be sharded with FSDP2. Train "
                    "it with DDP (an accelerate configuration without FSDP), where each process "
                    "holds all weights."
                )

    def prepare(self) -> None:
        """Raise for what would not work, before the first step is recorded."""

    def loader(self) -> DataLoader:
        """Return one nominal epoch of logical batches; one item is one step's input."""
        return self.run.draws(self.run.plan.sampler(self.run.plan.epoch))

    # -- the step --

    @abstractmethod
    def clip(self, batches: Batches) -> Clipped:
        """Return what a logical batch contributes, clipped. It is not private."""

    @abstractmethod
    def gradients(self, clipped: Clipped, release: Release) -> Mapping[nn.Parameter, Tensor]:
        """Release the clipped values through ``release``, and return the gradients that the
        optimizer gets."""

    def set_gradients(self, clipped: Clipped, release: Release) -> None:
        """Set ``p.grad`` to :meth:`gradients`.

        Raises: LedgerError for a release that is not this run's step.
        """
        plan = self.run.plan
        if plan.releases_each_step and not release.is_of(self.run.book, plan.step_release()):
            raise LedgerError(
                "Expected the release of this run's step, got another one. Use "
                "`with run.release_step() as release:` of the same run."
            )
        gradients = dict(self.gradients(clipped, release))
        for parameter in list(gradients):
            parameter.grad = gradients.pop(parameter).to(parameter.dtype)

    # -- the size of physical batches --

    def rehearse(self, batches: Batches, optimizer: Optimizer | None) -> None:
        """Do what a step does to the memory, on synthetic physical batches, without drawing or
        releasing.

        Args: optimizer: makes a step, too, unless it is None.

        Raises: UnsupportedArgumentError for a mechanism that cannot.
        """
        raise UnsupportedArgumentError(
            f"The physical batch that fits cannot be found for {type(self.plan).__name__}: only "
            "steps of DP-SGD, and of DP-FP with a private encoder, can be rehearsed. Set the size "
            "yourself."
        )

    def find_physical_batch(
        self,
        optimizer: Optimizer | None,
        *,
        length: int | None = None,
        most_examples: int | None = None,
    ) -> int:
        """Find the largest physical batch that fits, and use it for the draws to come; arguments
        and errors as :func:`hf_dp.run.physical_size.largest_physical_batch`."""
        run = self.run
        if is_sharded(run.model):
            raise UnsupportedArgumentError(
                "The physical batch that fits cannot be found for a sharded model: a trial that "
                "runs out of memory in one process would leave the others waiting. Set "
                "`per_device_train_batch_size` or `max_tokens_per_physical_batch` yourself."
            )
        users = run.plan.users
        of_users = users is not None and users.max_rows > 1 and not users.by_row
        if of_users or run.plan.mechanism.views_per_example > 1:
            raise UnsupportedArgumentError(
                "The physical batch that fits cannot be found for users of several rows, nor for "
                "several views of a row: what these take together is not measured. Set "
                "`per_device_train_batch_size` yourself."
            )
        with untouched_generators():
            self.tuner.before_step(run, 0)  # again at the first step
        with self.tuner.all_that_may_train(run.model):
            found = largest_physical_batch(
                run, self.rehearse, optimizer, length=length, most_examples=most_examples
            )
        batches = replace(run.options.batches, physical_batch_size=found)
        run.options = replace(run.options, batches=batches)
        if run.engine_check.alone and found > 1:  # now they have neighbors
            run.check_engine()
        return found

    # -- what may be claimed --

    def statement(self) -> PrivacyStatement:
        """Return what may be said about the run so far."""
        return self.run.statement(self.tuner.describe(self.run.model))

    # -- a loop of one's own --

    def logical_batches(self) -> Iterator[Batches]:
        """Yield the planned logical batches, one per step, and stop before the target is exceeded.

        Opens the run's ledger at the start and leaves it at the end.

        Raises: LedgerError, BudgetExceededError; DataError; SelfCheckError, before the first draw.
        """
        run = self.run
        self.refuse_shards(is_sharded(run.model))
        try:
            run.open()
            self.tuner.start(run)
            self.start()
            self.prepare()
            run.start(run.plan.steps, self.tuner.releases_to_come())
            endless = self._endless()
            try:
                for step in range(run.plan.steps):
                    if run.plan.releases_each_step and run.book.exhausted:
                        break
                    if (batches := next(endless, None)) is None:  # of a stream, all were read
                        break
                    run.model.train()
                    self.tuner.before_step(run, step)
                    run.begin_step()
                    yield batches
            finally:  # also where the caller breaks off
                run.other.resting.note(run.model)
        finally:
            run.stop()

    def _endless(self) -> Iterator[Batches]:
        found = True
        while found:
            found = False
            for batches in self.loader():
                found = True
                yield batches


_MECHANISMS: dict[type[MechanismPlan], type[Mechanism]] = {}


def register_mechanism(cls: type[Mechanism]) -> type[Mechanism]:
    """Make known which class runs plans of ``cls.plan_type``: a class decorator."""
    _MECHANISMS[cls.plan_type] = cls
    return cls


def mechanism_for(run: PrivateRun, tuner: Tuner | None = None) -> Mechanism:
    """Return the mechanism that runs a plan.

    Raises: ConfigError for a plan whose mechanism is not registered.
    """
    plan = run.plan.mechanism
    if type(plan) not in _MECHANISMS:
        raise ConfigError(
            f"Expected a plan that a mechanism is registered for, got {type(plan).__name__}. "
            "Decorate its step's class with @register_mechanism."
        )
    return _MECHANISMS[type(plan)](run, tuner)
