"""One private run, without a Trainer: model, plan, durable ledger, secret randomness.

In a loop of one's own (:class:`hf_dp.trainer.trainer.DPTrainer` runs the same lines)::

    run = PrivateRun(model, plan, "outputs/run", train_dataset=rows, data_collator=collator)
    mechanism = mechanism_for(run)
    for batches in mechanism.logical_batches():
        clipped = mechanism.clip(batches)
        with run.release_step() as release:
            mechanism.set_gradients(clipped, release)
        optimizer.step()
        optimizer.zero_grad()
    print(save_run(mechanism))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.utils import logging

from hf_dp.accounting import EARLIER, Epsilon, Ledger
from hf_dp.batches.limits import Limits
from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import numbers
from hf_dp.batches.units import UnitBatch, UnitTable, rows_to_draw, split_off_units
from hf_dp.clipping import ClippingEngine, refuse_coupling, self_check
from hf_dp.clipping.self_check import AUTOCAST_TOLERANCE, refuse_notice_of_length
from hf_dp.clipping.sharding import is_sharded
from hf_dp.distributed.processes import Processes, others_present
from hf_dp.errors import (
    ConfigError,
    DataError,
    LedgerError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from hf_dp.losses import any_number_of_end_tokens, per_example_loss
from hf_dp.noise import SecretRandomness, untouched_generators
from hf_dp.overlap import TrainingRows, TrainingUsers
from hf_dp.plans.mechanism import PlannedRelease
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.samplers import Sampler, Share
from hf_dp.run.checks import (
    check_collator,
    check_launch,
    refuse_adapters_from_data,
    refuse_rows_in_code,
    refuse_selections_from_data,
)
from hf_dp.run.clock import Clock
from hf_dp.run.earlier import earlier_claims, earlier_entries
from hf_dp.run.facts import run_facts
from hf_dp.run.gate import Gate, IndependentNoise, NothingReleased, Release
from hf_dp.run.inside import Observer
from hf_dp.run.ledger import RunLedger
from hf_dp.run.meeting import facts_in_common, share_weights
from hf_dp.run.options import RunOptions
from hf_dp.run.other_training import (
    RestingWeights,
    left_by_trainers,
    note_training,
    pay_for_step,
    trained_in_files,
    trained_in_memory,
)
from hf_dp.run.outlook import of_repeated_rows
from hf_dp.run.own_loss import refuse_another_loss
from hf_dp.run.precision import Precision, computes_in_full, in_full_precision
from hf_dp.run.training_data import TrainingData, padded_together
from hf_dp.run.user_grouping import same_users
from hf_dp.statement.facts import EVALUATION_ON_TRAINING_ROWS, Flags, RunFacts
from hf_dp.statement.statement import PrivacyStatement

logger = logging.get_logger(__name__)

PerExampleLoss = Callable[[nn.Module, Any], Tensor]


class PrivateRun:
    """What one private run needs, and the gate through which its values leave.

    Args:
        model: what trains. Replace :attr:`model` when it is wrapped.
        plan: what the run does.
        output_dir: its folder; ``privacy.json`` is kept there.
        train_dataset: anything with ``len`` and ``[i]``. data_collator: of lists of rows.
        units: whose the rows are, where the plan protects users and ``train_dataset`` has lost the
            column that says so; None to take it off here.
        processing_class: the tokenizer or processor, which says how to pad.
        compute_per_example_loss: ``(model, batch) -> (b,)`` losses, each from its example alone;
            None for that of the model's own task.
        accelerator: which the model was prepared with; None for one device and full precision.
        options: speed, memory, and what is known of the rows.
        earlier_runs: folders of earlier private runs on the same rows.
        released: names of un-noised quantities that the user lets out.
        insecure_seed: for tests only; the run is then not private.
        forward_context, synthetic_batches, training_rows: a Trainer's own ways.

    Raises: LedgerError, InvalidArgumentError for ``earlier_runs`` that do not fit.
    """

    def __init__(
        self,
        model: Any,
        plan: PrivacyPlan,
        output_dir: str | os.PathLike[str],
        *,
        train_dataset: Any,
        data_collator: Callable[[list[Any]], Any],
        processing_class: Any = None,
        compute_per_example_loss: PerExampleLoss | None = None,
        accelerator: Accelerator | None = None,
        options: RunOptions | None = None,
        earlier_runs: Sequence[str] = (),
        released: Iterable[str] = (),
        insecure_seed: int | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        synthetic_batches: Callable[[], list[Any]] | None = None,
        training_rows: TrainingRows | None = None,
        units: UnitTable | None = None,
    ):
        if plan.users is not None and units is None:
            units, train_dataset = split_off_units(train_dataset, plan.users.column)
            train_dataset = rows_to_draw(train_dataset, units, plan.users)
        self._check_units(plan, units)
        self.units, self._rows_of_units = units, train_dataset
        self.model, self.plan, self.options = model, plan, options or RunOptions()
        self.clock, self.resting = Clock(), RestingWeights()
        self.train_dataset, self.data_collator = train_dataset, data_collator
        self.processing_class, self.accelerator = processing_class, accelerator
        self.has_own_loss = compute_per_example_loss is not None
        self._of_model: PerExampleLoss = compute_per_example_loss or per_example_loss
        self._forward_context, self._synthetic = forward_context, synthetic_batches
        self.has_own_examples = synthetic_batches is not None
        self._columns: Callable[[], tuple[Any, Any]] = lambda: (
            self.train_dataset,
            self.data_collator,
        )
        self.arguments: Mapping[str, Any] = {}  # which all processes must have in common
        self._made_up: Any = (
            None  # a batch for the forwards that only other processes have rows for
        )
        self.checked_alone = False  # whether the self-check ran as if no example had a neighbor
        self.inside: list[Observer] = []
        self.found: dict[str, Any] = {}  # facts for the statement that an observer found
        self.selections: Sequence[Any] = ()  # which this run made, and its ledger counts
        self._step_is_open = False
        self._data: TrainingData | None = None
        self._data_of: tuple[Any, Any] = (None, None)
        self._training_rows = training_rows
        self._training_users = None if units is None else TrainingUsers(units)
        if not plan.releases_each_step and not plan.releases_before():
            raise ConfigError(
                f"Expected a plan that releases something, got {type(plan.mechanism).__name__}, "
                "which releases nothing before the steps and nothing in them. Plan what it lets "
                "out."
            )
        self.processes = Processes.here()
        self.earlier = earlier_entries(
            earlier_runs,
            plan.num_examples,
            plan.privacy_unit,
            plan.neighboring_relation,
            units,
        )
        self.book = RunLedger(
            output_dir,
            plan,
            insecure_seed=insecure_seed is not None,
            released=released,
            earlier=earlier_claims(earlier_runs),
            earlier_entries=self.earlier,
            processes=self.processes,
        )
        self.book.rows_are_chunks = self.options.rows_are_chunks
        self.randomness = SecretRandomness(insecure_seed, self.processes.rank)

    def _check_units(self, plan: PrivacyPlan, units: UnitTable | None) -> None:
        if (plan.users is None) != (units is None):
            raise ConfigError(
                "Expected `units` exactly with a plan that protects users (privacy_unit='user')."
            )
        if units is not None and len(units) != plan.num_examples:
            raise DataError(
                f"The column {units.column!r} names {len(units)} users, but the privacy plan was "
                f"made for {plan.num_examples}. Set num_examples to the number of users."
            )
        users = plan.users
        if units is not None and users is not None and users.by_row:
            rows = len(units.capped(users.max_rows))
            if rows != users.num_rows:
                raise DataError(
                    f"There are {rows} rows to draw from, at most {users.max_rows} of each user, "
                    f"but the privacy plan was made for {users.num_rows}. Set num_rows to {rows}."
                )

    # -- what was released --

    def let_inside(self, observer: Observer) -> None:
        """Let an observer see what is not noised. No epsilon is established for a run with one that
        is not hf_dp's own."""
        kind = type(observer)
        if kind.__module__.partition(".")[0] != "hf_dp":
            self.book.weaken(Flags(observers=(f"{kind.__module__}.{kind.__qualname__}",)))
        self.inside.append(observer)

    @property
    def established(self) -> bool:
        """Whether a bound on what this run releases is known."""
        return self.plan.mechanism.established and not self.book.observers

    @property
    def folder(self) -> Path:
        """The run's output folder."""
        return self.book.folder

    @property
    def ledger(self) -> Ledger:
        """What ran so far on the training set, append-only."""
        return self.book.ledger

    @property
    def randomness(self) -> SecretRandomness:
        """Where noise, draws and all that is random about an example come from."""
        return self._randomness

    @randomness.setter
    def randomness(self, randomness: SecretRandomness) -> None:
        """Use another source, for tests: the gate's noise comes from the same one.

        A source that can be reproduced makes the run not private, for good.
        """
        self.book.insecure_seed = self.book.insecure_seed or randomness.insecure
        self._randomness, self._gate = randomness, Gate(self.book, IndependentNoise(randomness))

    def release(self, planned: PlannedRelease) -> AbstractContextManager[Release]:
        """Record a release, durably, and give what lets its values out: noise of the planned
        standard deviation is added on the way.

        Raises: BudgetExceededError, before anything is recorded, when it would pass the target.
        """
        return self._gate.release(planned)

    def release_step(self) -> AbstractContextManager[Release]:
        """Record one training step, as :meth:`release`.

        Where steps release nothing (:attr:`PrivacyPlan.releases_each_step`), nothing can leave.

        Raises: LedgerError a second time for one logical batch: sampled once, it may be released
            once.
        """
        if not self._step_is_open:
            raise LedgerError(
                "Expected a logical batch for each step, but there is none, or its step was "
                "released. Take one with `for batches in mechanism.logical_batches():`."
            )
        self._step_is_open = False
        self.resting.forget()
        pay_for_step(self.model)
        note_training(self.model, self.book.run_id, self.folder)
        if not self.plan.releases_each_step:
            return nullcontext(NothingReleased())
        return self._gate.release(self.plan.step_release())

    def _begin_allocation(self) -> None:
        """Record a whole allocation, before it is drawn; nothing of it is left of one before it."""
        self._gate.pay_ahead(self.plan.step_release())

    def begin_step(self) -> None:
        """Note that a logical batch was sampled: one step may be released for it.

        Raises: UnsupportedModelError when anything but the steps so far trained the model.
        """
        self._refuse_training_by(trained_in_memory(self.model, self._counted))
        self._step_is_open = True

    def open(self) -> None:
        """Take the output folder, and record what ``earlier_runs`` released of the same rows.

        Raises: LedgerError, BudgetExceededError; UnsupportedModelError, UnsupportedArgumentError
            for what cannot be private.
        """
        refuse_coupling(self.model)
        if not self.options.adapter_init_data_is_public:
            refuse_adapters_from_data(self.model)
            refuse_selections_from_data(self.model, self.selections)
        self.refuse_other_training()
        check_launch(self.processes, self.accelerator)
        self.share(self.plan.sampler())  # refuses what several processes cannot draw
        self._meet()
        self.book.open()
        if (units := self.units) is not None:
            book, begun = self.book, self.ledger.steps() > self.ledger.steps(EARLIER)
            self.processes.on_main(lambda: same_users(book.folder, book.run_id, units, begun))
        self.book.record_earlier(self.earlier)

    def refuse_other_training(self, *, before_save: bool = False) -> None:
        """Refuse weights that are not the result of what the statement counts, unless the user
        says what rows that training was on; the statement then repeats it.

        Raises: UnsupportedModelError.
        """
        # Without a step the ledger holds nothing of earlier runs, either.
        counted = () if before_save and not len(self.ledger) else self._counted
        self._refuse_training_by(
            chain(
                trained_in_memory(self.model, counted),
                trained_in_files(self.model, counted),
                self._changes_at_rest(),
            )
        )
        folder = None if before_save else left_by_trainers(self.model)
        if folder is not None and self.options.other_training is None and self.processes.is_main:
            logger.warning(
                "The base model comes from %s, where a Trainer left its files. If it was trained "
                "on the training rows, this run's statement does not hold. If on others, set "
                "other_training='public_rows' or 'other_rows', which the card repeats.",
                folder,
            )

    @property
    def _counted(self) -> set[str]:
        """The ids of the runs that the statement counts."""
        return {self.book.run_id, *(claim.run_id for claim in self.book.earlier)}

    def _changes_at_rest(self) -> Iterator[str]:
        if (name := self.resting.changed(self.model)) is not None:
            yield f"something else since the last step ({name!r} has other values)"

    def _refuse_training_by(self, found: Iterator[str]) -> None:
        answer = self.options.other_training
        self.book.weaken(Flags(other_training=answer))
        if answer is None and (trained_by := next(found, None)) is not None:
            raise UnsupportedModelError(
                f"Expected a model that only counted steps have trained, got one that was trained "
                f"by {trained_by}. The privacy statement of this run does not count that. If it "
                "was on the same rows, name its folder in `earlier_runs`; without privacy, or "
                "without a folder, no statement covers both: load the model anew. If it was on "
                "public rows, set other_training='public_rows'; on rows that this statement is not "
                "about, other_training='other_rows'. The card repeats it. Weights that you made "
                "from released ones can be saved by model.save_pretrained, in another folder."
            )

    def _meet(self) -> None:
        """Compare this process with the others, and take over the main one's weights.

        Raises: DistributedError naming what differs, or when two random sources are the same.
        """
        if self.processes.alone:
            return
        self.processes.refuse_differences(
            facts_in_common(
                plan=self.plan,
                options=self.options,
                arguments=self.arguments,
                weaknesses=vars(self.book.weaknesses),
                train_dataset=self.train_dataset,
                units=self.units,
                data_collator=self.data_collator,
                model=self.model,
            )
        )
        self.processes.refuse_equal(
            "source of random numbers",
            self.randomness.fingerprint(),
            "Noise that is drawn twice can be subtracted. Create the trainer in each process, not "
            "before processes are forked.",
        )
        share_weights(self.model, self.processes)

    def stop(self) -> None:
        """Let another process go on with this run."""
        self.book.stop()

    # -- what may be claimed --

    def epsilon(self, accountant: str | None = None) -> Epsilon:
        """Return the epsilon spent so far, at the plan's delta; None: by the plan's accountant."""
        return self.ledger.epsilon(self.plan.delta, accountant or self.plan.accountant)

    def statement(self, trained: str) -> PrivacyStatement:
        """Return what may be said about the run so far. Args: trained: what trains, in words."""
        return PrivacyStatement.from_ledger(self.plan, self.ledger, self.facts(trained))

    def facts(self, trained: str) -> RunFacts:
        """Return what the ledger does not know of the run."""
        return run_facts(self.device, self.precision(), self.book.weaknesses, trained, **self.found)

    def check_evaluation(self, evaluation: Any) -> None:
        """Note that rows are evaluated on, whose metrics are not noised.

        Raises: UnsupportedArgumentError for a set with rows of the training set, unless their
            metrics are released on purpose. In a private search already for one equal row, and for
            a set that cannot be compared.
        """
        search = self.plan.mechanism.is_searched
        asked_for = EVALUATION_ON_TRAINING_ROWS in self.book.released and not search
        if asked_for or self.train_dataset is None:
            return
        for training in filter(None, (self.training_rows(), self._training_users)):
            if not training.refuse(evaluation, search=search):
                self.book.evaluation_compared = False

    def training_rows(self) -> TrainingRows:
        """Return the training set as evaluation sets are compared with it."""
        rows = self._training_rows
        if rows is None or rows.dataset is not self.train_dataset:
            rows = TrainingRows(self.train_dataset)
        self._training_rows = rows
        return rows

    # -- rows --

    def read_columns_with(self, columns: Callable[[], tuple[Any, Any]]) -> None:
        """Take the training set and its collator from ``columns()``, which leaves out columns that
        the model does not take."""
        self._columns = columns

    def training_data(self) -> TrainingData:
        """Return the training set, looked over.

        Raises: DataError for other data than planned, or rows that cannot be trained on.
        """
        if self.units is not None and self.train_dataset is not self._rows_of_units:
            raise DataError(
                "The train_dataset was replaced after it was noted whose each row is. Create a new "
                "DPTrainer (and output_dir) for other data."
            )
        users = self.plan.users
        by_row = users is None or users.by_row
        planned = self.plan.drawn_from if by_row or self.units is None else self.units.num_rows
        if len(self.train_dataset) != planned:
            raise DataError(
                f"The train_dataset has {len(self.train_dataset)} rows, but the privacy plan was "
                f"made for {planned}. Create a new DPTrainer (and output_dir) for "
                "other data."
            )
        known, of = self._data, self._data_of
        if known is not None and of[0] is not self.train_dataset and len(self.ledger):
            raise DataError(
                "The train_dataset was replaced after rows of it were used, and one statement "
                "cannot be about both. Create a new DPTrainer (and output_dir) for other data."
            )
        made_of = (self.train_dataset, self.data_collator)
        if known is None or any(one is not other for one, other in zip(of, made_of, strict=True)):
            known = self._looked_over()
            self._data_of = made_of
        known.options = self.options.batches
        self._data = known
        return known

    def _looked_over(self) -> TrainingData:
        dataset, collator = self._columns()
        check_collator(collator)
        padding = self.padding()
        limits = Limits.of(self.model, self.has_own_loss, padding.side)
        users = self.plan.users
        units = None
        if self.units is not None and users is not None and not users.by_row:
            units = (self.units, users)
        data = TrainingData(
            dataset, collator, padding, limits, self.randomness, self.options.batches, units
        )
        refuse_rows_in_code(data.examples.reached, self.training_rows())
        data.check(self.model, self.losses, needs_labels=not self.has_own_loss)
        data.warn_of_no_targets()
        if not self.options.rows_are_chunks and limits.ignorable and users is None:
            data.warn_of_chunks()
        adds_rows = any(each.adds_rows for each in self.inside)
        if users is None and not adds_rows and self.processes.is_main:
            most, compared = self.training_rows().repeats()
            if most > 1:
                logger.warning(of_repeated_rows(self.plan, most, compared))
        return data

    def padding(self) -> Padding:
        """Return how examples are padded together."""
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        return Padding.of(self.model, tokenizer, self.options.padding_values, self.has_own_loss)

    def draws(self, sampler: Sampler) -> DataLoader:
        """Return the sampler's draws from the training set, each a list of padded physical
        batches."""
        data = self.training_data()  # which also sees in what precision the loss computes
        if self.plan.pays_ahead:
            sampler = replace(sampler, begin=self._begin_allocation)
        return data.loader(self.share(sampler), self.precision().is_short, self._watched)

    def _watched(self, sampler: Sampler) -> Any:
        """Return a sampler of what goes through the model."""
        for each in self.inside:
            sampler = each.drawn(sampler)
        return sampler

    def share(self, sampler: Sampler) -> Sampler:
        """Return a sampler of this process's examples; all processes' draws are one together.

        Raises: UnsupportedArgumentError for a draw whose size is limited, with several processes.
        """
        return replace(sampler, share=Share(self.processes.rank, self.processes.count))

    # -- losses and their clipped sums --

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        if self.accelerator is not None:
            return self.accelerator.device
        return next(self.model.parameters()).device

    def precision(self) -> Precision:
        """Return in which precision forward and backward run."""
        mixed = None if self.accelerator is None else self.accelerator.mixed_precision
        computed = () if self._data is None else self._data.computed
        return Precision.of(self.model, mixed, self.device, computed)

    def losses(self, batch: Any) -> Tensor:
        """Return the per-example losses, (b,), of a collated physical batch."""
        with self._forward_context():
            return self._loss(self.model, self._placed(batch))

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        with any_number_of_end_tokens(model):
            return self._of_model(model, batch)

    def _placed(self, batch: Any) -> Any:
        """Return a physical batch on the model's device. Nothing else may happen to it here: a hook
        that mixed its examples would be called outside what the self-check compares."""
        return send_to_device(batch, self.device)

    def engine(self) -> ClippingEngine:
        """Return the engine that clips per-example gradients as the plan says."""
        plan = self.plan
        return ClippingEngine(
            self.model,
            plan.clips_to,
            plan.clipping,
            self.strategy(),
            self.options.clipping_memory_ratio,
        )

    def strategy(self) -> str:
        """Return how clipped sums are computed: as asked for; else two passes for a model that
        checkpoints, whose memory the held activations would fill again."""
        if self.options.clipping_strategy is not None:
            return self.options.clipping_strategy
        checkpoints = any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules())
        return "two_pass" if checkpoints else "book_keeping"

    def feed(
        self,
        engine: ClippingEngine,
        batches: Iterable[Any],
        watch: Callable[[Tensor], object] | None = None,
    ) -> Tensor:
        """Run this process's part of a logical batch through the model into the engine, and return
        the sum of its losses, which is not private.

        ``watch``, where given, is called with the losses, (b,), of each physical batch of rows; of
        users with the means over their rows.

        A model that is sharded is gathered by all processes for each forward, so that all make as
        many; the forwards that are missing run on made-up examples, which count nothing.
        """
        loss_sum = torch.zeros((), device=self.device)
        if self.checked_alone and self._has_neighbors:
            raise UnsupportedArgumentError(
                "Expected `per_device_train_batch_size` (in a loop of your own, "
                "BatchOptions.physical_batch_size) to be 1 as when the self-check ran, got "
                f"{self.options.batches.physical_batch_size}: that examples share nothing was not "
                "checked. Call check_engine(), or set the size before training starts."
            )
        # Processes of a sharded model meet inside each forward, where nobody could listen.
        engine.regrouped = self.regrouped
        heard = others_present() if is_sharded(self.model) else self.processes.telling()
        with heard, self.randomness.streams():
            own, made_up = list(batches), 0
            if is_sharded(self.model):
                made_up = self.processes.largest(len(own)) - len(own)
            for losses in self._clipped(engine, own):
                loss_sum += losses.nan_to_num().sum()
                if watch is not None:
                    watch(losses)
            for _ in range(made_up):
                engine.backward(self.losses(self._made_up), counted=False)
        return loss_sum

    @property
    def regrouped(self) -> int:
        """The most other examples that one example more or less moves to another physical batch.

        It is the size of a batch for each example that moves with it (:meth:`MechanismPlan.moved`).
        """
        size = self.options.batches.physical_batch_size
        return self.plan.mechanism.draw.moved * size

    def _clipped(self, engine: ClippingEngine, batches: Iterable[Any]) -> Iterator[Tensor]:
        """Feed each physical batch to the engine, and yield the losses of its units, (units,)."""
        sum_so_far, rows_so_far = torch.zeros((), device=self.device), 0
        for batch in batches:
            if not isinstance(batch, UnitBatch):
                losses = self.losses(batch)
                engine.backward(losses)
                yield losses.detach()
                continue
            losses = self.losses(batch.inputs)
            engine.backward(
                losses * batch.scale, rows_per_unit=batch.rows, unit_continues=batch.continues
            )
            of_units = losses.detach().view(-1, batch.rows).sum(1)
            sum_so_far, rows_so_far = sum_so_far + of_units, rows_so_far + batch.rows
            if not batch.continues:
                yield sum_so_far / rows_so_far
                sum_so_far, rows_so_far = torch.zeros((), device=self.device), 0

    # -- the self-check --

    def check_engine(self) -> None:
        """Raise SelfCheckError when the engine disagrees, on synthetic examples, with one-by-one
        gradients.

        In 16 bits the tolerance is wide. So where the model can compute in float32, it is compared
        in float32 first, as if it did.
        """
        with self.randomness.streams(), self._forward_context():
            padded, alone = self.check_batches()
            self._made_up = padded
            self.checked_alone = not self._has_neighbors
            logger.info("Clipping strategy: %s.", self.strategy())
            longest = self._longest_beside(alone[0])
            precision = self.precision()
            if precision.is_rounded:
                with in_full_precision(self.model), untouched_generators():
                    if computes_in_full(self.model, lambda: self._loss(self.model, padded)):
                        self._compare(padded, alone, None)
            # accelerate's autocast is inside the model's forward, where self_check does not see it
            self._compare(padded, alone, AUTOCAST_TOLERANCE if precision.is_rounded else None)
            # In 16 bits only examples of one length are neighbors.
            if self._has_neighbors and not precision.is_short:
                self._compare_beside(longest, min(alone, key=numbers))

    @property
    def _has_neighbors(self) -> bool:
        return self.options.batches.physical_batch_size > 1

    def _compare(self, padded: Any, alone: list[Any], rtol: float | None) -> None:
        self_check(
            self.model,
            self._loss,
            padded,
            alone,
            clipping=self.plan.clipping,
            strategy=self.strategy(),
            rtol=rtol,
            have_neighbors=self._has_neighbors,
        )
        if not self.has_own_loss:
            refuse_another_loss(self.model, self._loss, alone[0], rounded=rtol is not None)

    def _longest_beside(self, made_up: Any) -> Any:
        """Return a made-up example as long as the longest row, the same in all processes of a
        sharded model."""
        data = self.training_data()

        def make() -> Any:
            return data.longest_beside(made_up, self.model)

        return self.processes.on_main(make) if is_sharded(self.model) else make()

    def _compare_beside(self, longest: Any, short: Any) -> None:
        if not self.training_data().looked_over.layout.varies:  # none is padded
            return
        if numbers(longest) > numbers(short):
            beside, _ = padded_together([short, self._placed(longest)], self.padding())
            with untouched_generators():  # what is drawn later must not depend on the options
                refuse_notice_of_length(self.model, self._loss, short, beside)

    def check_batches(self) -> tuple[Any, list[Any]]:
        """Return the synthetic examples as one padded batch and one by one, on the model's
        device; the same in all processes of a sharded model, which check them together."""
        layout = self.training_data().looked_over.layout if self.has_own_examples else None
        make = self._synthetic or self.synthetic_batches
        if is_sharded(self.model):
            self.training_data()  # which all processes look over together
            examples = self.processes.on_main(make)
        else:
            examples = make()
        padded, alone = padded_together(examples, self.padding(), layout)
        return self._placed(padded), [self._placed(example) for example in alone]

    def own_examples(self) -> list[Any]:
        """Return the user's made-up examples, each a batch of one; none if they are not given."""
        return self._synthetic() if self._synthetic and self.has_own_examples else []

    def synthetic_batches(self) -> list[Any]:
        """Return made-up examples in the training set's format that went through the collator, each
        a batch of one."""
        return self.training_data().synthetic_examples(self.model)
