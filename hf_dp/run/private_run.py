"""One private run without a Trainer: model, plan, durable ledger, secret randomness."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.utils import logging

from hf_dp._validate import invalid
from hf_dp.accounting import EARLIER, Epsilon, Ledger
from hf_dp.batches.examples import Collator, texts_in
from hf_dp.batches.groups import in_groups
from hf_dp.batches.limits import Limits
from hf_dp.batches.loader import Masked
from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import Batch, DataSet, Example, Rows
from hf_dp.batches.units import UnitBatch, UnitTable, check_units, rows_to_draw, split_off_units
from hf_dp.batches.views import refuse_views
from hf_dp.batches.when_drawn import FirstRows
from hf_dp.clipping import ClippingEngine, refuse_coupling
from hf_dp.clipping.sharding import is_sharded
from hf_dp.distributed.draws import SharedDraws
from hf_dp.distributed.processes import Processes, others_present
from hf_dp.errors import (
    ConfigError,
    DataError,
    LedgerError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from hf_dp.losses import each_row_read_as_alone, per_example_loss
from hf_dp.noise import SecretRandomness
from hf_dp.overlap import TrainingRows, TrainingUsers
from hf_dp.planning import of_repeated_rows
from hf_dp.plans.bands import BandedSampler, InTurn, OfStep, square_root_column
from hf_dp.plans.mechanism import PlannedRelease
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.samplers import Draws, Sampler
from hf_dp.plans.units import EXAMPLE, USER
from hf_dp.run import checks
from hf_dp.run.banded_noise import BandedNoise
from hf_dp.run.clock import Clock
from hf_dp.run.earlier import earlier_evidence, same_users
from hf_dp.run.engine_check import EngineCheck
from hf_dp.run.gate import Gate, IndependentNoise, NothingReleased, Observer, Release
from hf_dp.run.gguf import dequantized
from hf_dp.run.ledger import RunLedger
from hf_dp.run.options import RunOptions
from hf_dp.run.other_training import OtherTraining, note_training, pay_for_step
from hf_dp.run.precision import Precision, autocast_around, run_facts
from hf_dp.run.training_data import TrainingData
from hf_dp.statement.audited import AuditResult
from hf_dp.statement.facts import ALL, ANY, EVALUATION_ON_TRAINING_ROWS, WHEN_DRAWN, Flags, RunFacts
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.streams.reading import OF_SHARDS, Reading, Stream, check_for_stream, sampler_of

logger = logging.get_logger(__name__)

_RESUMED = "; and, after a resume, "

PerExampleLoss = Callable[[nn.Module, Batch], Tensor]


class PrivateRun:
    """What one private run needs, and the gate through which its values leave.

    Args:
        model: what trains. Replace :attr:`model` when it is wrapped.
        plan: what the run does.
        output_dir: its folder; ``privacy.json`` is kept there.
        train_dataset: anything with ``len`` and ``[i]``. data_collator: of lists of rows.
        units: who the rows belong to, where the plan protects users and ``train_dataset`` has lost
            the column that says so; None to remove it here.
        processing_class: the tokenizer or processor, which says how to pad.
        compute_per_example_loss: ``(model, batch) -> (b,)`` losses, each from its example alone;
            None for that of the model's own task.
        accelerator: which the model was prepared with; None for one device and full precision.
        options: speed, memory, and what is known of the rows.
        earlier_runs: folders of earlier private runs on the same rows.
        released: names of un-noised quantities that the user asked to release.
        insecure_seed: for tests only; the run is then not private.
        forward_context, synthetic_batches, training_rows: a Trainer's own ways.

    Attributes:
        engine_check: compares the clipping engine with one-by-one gradients.
        arguments: which all processes must have in common.
        columns: returns the training set without what the model does not take, and its collator.
        add_to_losses: given the losses' function, model and batch, returns what trains: the losses
            with what a mechanism adds to each. None: as they are.
        inside: who sees what is not noised. audit: what an audit among them found.
        selections: which this run made, and its ledger counts.
        other: what else trained the weights.
        before: the facts of the checkpoint that the run went on from.
        reading: of rows that are sharded, what was read.

    Raises: LedgerError, InvalidArgumentError for ``earlier_runs`` that do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PrivacyPlan,
        output_dir: str | os.PathLike[str],
        *,
        train_dataset: DataSet,
        data_collator: Collator,
        processing_class: Any = None,
        compute_per_example_loss: PerExampleLoss | None = None,
        accelerator: Accelerator | None = None,
        options: RunOptions | None = None,
        earlier_runs: Sequence[str] = (),
        released: Iterable[str] = (),
        insecure_seed: int | None = None,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        synthetic_batches: Callable[[], list[Example]] | None = None,
        training_rows: TrainingRows | None = None,
        units: UnitTable | None = None,
    ):
        stream = train_dataset if isinstance(train_dataset, Stream) else None
        if stream is not None:
            unit, views = USER if plan.users else EXAMPLE, plan.mechanism.views_per_example
            look_over = (options or RunOptions()).look_over
            given = {"privacy_unit": unit, "views_per_example": views, "look_over": look_over}
            check_for_stream(stream, plan.selection, **given)
        if plan.users is not None and units is None:
            units, train_dataset = split_off_units(train_dataset, plan.users.column)
            train_dataset = rows_to_draw(train_dataset, units, plan.users)
        check_units(units, plan.users, plan.num_examples)
        if not plan.releases_each_step and not plan.releases_before():
            raise ConfigError(
                f"Expected a plan that releases something, got {type(plan.mechanism).__name__}, "
                "which releases nothing before the steps and nothing in them. Plan what it "
                "releases."
            )
        self.model, self.plan = dequantized(model), plan
        self.options = options or RunOptions()
        self.clock, self.engine_check = Clock(), EngineCheck(self, synthetic_batches)
        self.units, self._rows_of_units = units, train_dataset
        self.train_dataset, self.data_collator = train_dataset, data_collator
        self.processing_class, self.accelerator = processing_class, accelerator
        self.add_to_losses: Callable[[PerExampleLoss, nn.Module, Batch], Tensor] | None = None
        self.has_own_loss = compute_per_example_loss is not None
        self._drawn_in: Precision | None = None
        self._cut_into = 1
        self._of_model: PerExampleLoss = compute_per_example_loss or per_example_loss
        self.forward_context = forward_context
        self.columns: Callable[[], tuple[Rows, Collator]] = self._all_columns
        self.arguments: Mapping[str, object] = {}
        self.inside: list[Observer] = []
        self.audit: AuditResult | None = None
        self.before: RunFacts | None = None
        self.selections: Sequence[object] = ()
        self._step_is_open = False
        self._drawn_for: int | None = None  # the step whose draw went through the model last
        self._data: TrainingData | None = None
        self._data_of: tuple[Rows, Collator] | None = None
        self._training_rows = training_rows
        self._training_users = None if units is None else TrainingUsers(units)
        self.processes = Processes.here()
        earlier = earlier_evidence(
            earlier_runs, plan.num_examples, plan.privacy_unit, plan.neighboring_relation, units
        )
        self.book = RunLedger(output_dir, plan, earlier=earlier, processes=self.processes)
        self.reading = None if stream is None else Reading(stream, self.book)
        chunks = self.options.rows_are_chunks
        experts = any("Expert" in type(module).__name__ for module in model.modules())
        self.book.weaken(Flags(released=tuple(released), rows_are_chunks=chunks, experts=experts))
        self.other = OtherTraining(self)
        self.randomness = SecretRandomness(insecure_seed, self.processes.rank)

    # -- what was released --

    def let_inside(self, observer: Observer) -> None:
        """Let an observer see what is not noised.

        No epsilon is established for a run with an observer that is not part of hf_dp.
        """
        kind = type(observer)
        if kind.__module__.partition(".")[0] != "hf_dp":
            self.book.weaken(Flags(observers=(f"{kind.__module__}.{kind.__qualname__}",)))
        self.inside.append(observer)

    @property
    def established(self) -> bool:
        """Whether a bound on what this run releases is known, and holds, by what decides for its
        ``privacy.json``."""
        known = replace(self.book.lines.evidence(), weaknesses=self.book.weaknesses)
        return not known.no_epsilon

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
        """Use another source, for tests; one that can be reproduced is not private, for good."""
        self.book.weaken(Flags(insecure_seed=randomness.insecure))
        self._randomness = randomness
        self._begin_noise()

    def _begin_noise(self) -> None:
        """Let no noise to come depend on that of the steps so far, which is forgotten."""
        bands, noise = self.plan.correlated_steps, IndependentNoise(self.randomness)
        if bands > 1:
            noise = BandedNoise(self.randomness, square_root_column(bands))
        self._gate = Gate(self.book, noise)

    def release(self, planned: PlannedRelease) -> AbstractContextManager[Release]:
        """Record a release, durably, and give what lets its values out: noise of the planned
        standard deviation is added on the way.

        Raises: BudgetExceededError, before anything is recorded, when it would pass the target.
        """
        return self._gate.release(planned)

    def release_step(self) -> AbstractContextManager[Release]:
        """Record one training step, as :meth:`release`; where it releases nothing, nothing leaves.

        Raises:
            LedgerError: a second time for one logical batch. Sampled once, it may be released once.
            BudgetExceededError: as :meth:`release`.
        """
        if not self._step_is_open:
            raise LedgerError(
                "Expected a logical batch for each step, but there is none, or its step was "
                "released. Take one with `for batches in mechanism.logical_batches():`."
            )
        self._step_is_open = False
        self.other.resting.forget()
        pay_for_step(self.model)
        if not self.plan.releases_each_step:
            return self._noting(nullcontext(NothingReleased()))
        return self._noting(self._gate.release(self.plan.step_release(), self._drawn_for))

    @contextmanager
    def _noting(self, release: AbstractContextManager[Release]) -> Iterator[Release]:
        """Leave on the model how far the ledger is with a step, before anything of it is out."""
        with release as each:
            note_training(self.model, self.folder, self.book.lines.head)
            yield each

    def begin_step(self) -> None:
        """Note that a logical batch was sampled: one step may be released for it.

        Raises: UnsupportedModelError when anything but the steps so far trained the model.
        """
        self.other.refuse_in_memory()
        self._step_is_open, self._drawn_for = True, None

    def open(self) -> None:
        """Take the output folder, and record what ``earlier_runs`` released of the same rows.

        Raises:
            LedgerError, BudgetExceededError: as :meth:`hf_dp.run.ledger.RunLedger.open` and
                :meth:`hf_dp.run.ledger.RunLedger.record_earlier`.
            UnsupportedModelError, UnsupportedArgumentError: the run cannot be private.
        """
        self._drawn_in = None
        refuse_coupling(self.model)
        checks.refuse_named_adapters(self.model)
        try:
            checks.refuse_data_in_adapters(self.model, self.selections)
        except UnsupportedModelError:
            if not self.options.adapter_init_data_is_public:
                raise
            self.book.weaken(Flags(public_adapter=True))
        self.other.refuse()
        checks.check_launch(self.processes, self.accelerator)
        self._of_rows(self.plan.sampler())  # refuses a plan that does not fit a stream
        checks.meet(self)
        self.book.open()
        if self.reading is not None:
            self.processes.on_main(self.reading.check)
        if (units := self.units) is not None:
            book, begun = self.book, self.ledger.steps() > self.ledger.steps(EARLIER)
            self.processes.on_main(lambda: same_users(book.folder, book.run_id, units, begun))
        self.book.record_earlier()

    def start(self, planned_steps: int, planned_releases: int = 0) -> None:
        """Begin or continue training steps, as :meth:`hf_dp.run.ledger.RunLedger.start`; those of a
        stream that are paid for are to come, whatever else is."""
        reading = self.reading
        if reading is None:
            return self.book.start(planned_steps, planned_releases)
        of_stream = lambda: (reading.to_pay(planned_steps), reading.paid)  # noqa: E731
        to_pay, paid = self.processes.on_main(of_stream)
        self.book.start(to_pay, planned_releases)
        self.book.paid = paid

    def stop(self) -> None:
        """Let another process continue this run."""
        self._begin_noise()
        self.book.stop()

    # -- what may be claimed --

    def epsilon(self, accountant: str | None = None) -> Epsilon:
        """Return the epsilon spent so far, at the plan's delta; None: by the plan's accountant."""
        return self.ledger.epsilon(self.plan.delta, accountant or self.plan.accountant)

    def statement(self, trained: str) -> PrivacyStatement:
        """Return what may be said about the run so far.

        Args: trained: what trains, in words.
        """
        return PrivacyStatement.from_ledger(self.plan, self.ledger, self.facts(trained))

    def facts(self, trained: str) -> RunFacts:
        """Return what the ledger does not know of the run."""
        precision = self._drawn_in or self.precision()
        found = run_facts(self.device, precision, self.book.weaknesses, trained, self.audit)
        if (before := self.before) is not None:
            found = replace(
                found,
                precision=_and_then(before.precision, found.precision),
                noise_generator=_and_then(before.noise_generator, found.noise_generator),
            )
        return found if self.reading is None else replace(found, sampling_generator=OF_SHARDS)

    def check_evaluation(self, evaluation: DataSet) -> None:
        """Note that rows are evaluated on, whose metrics are not noised.

        Raises: UnsupportedArgumentError for a set with rows of the training set, unless their
            metrics are released on purpose. In a private search already for one equal row, and for
            a set that cannot be compared.
        """
        search = self.plan.mechanism.is_searched
        asked_for = EVALUATION_ON_TRAINING_ROWS in self.book.weaknesses.released and not search
        if asked_for or self.train_dataset is None:
            return
        for training in filter(None, (self.training_rows(), self._training_users)):
            compared = training.refuse(evaluation, search=search)
            self.book.weaken(Flags(evaluation_compared=compared))

    # -- rows --

    def training_rows(self) -> TrainingRows:
        """Return the training set as evaluation sets are compared with it."""
        rows = self._training_rows
        if rows is None or rows.dataset is not self.train_dataset:
            rows = TrainingRows(self.train_dataset)
        self._training_rows = rows
        return rows

    def training_data(self) -> TrainingData:
        """Return the training set, checked.

        Raises: DataError for other data than planned, or rows that cannot be trained on.
        """
        users, units, rows = self.plan.users, self.units, len(self.train_dataset)
        planned = self.plan.num_examples if users is None else self.plan.drawn_from
        if units is not None and users is not None and not users.by_row:
            planned = units.num_rows
        replaced = units is not None and self.train_dataset is not self._rows_of_units
        stream = None if self.reading is None else self.reading.stream
        if stream is not None or isinstance(self.train_dataset, Stream):
            replaced |= self.train_dataset is not stream
        if self._data_of is not None and len(self.ledger):
            replaced |= self.train_dataset is not self._data_of[0]
        if replaced or rows != planned:
            said = f"has {rows} rows, but the privacy plan was made for {planned}"
            if replaced:
                said = "was replaced after it was used, and one statement cannot be about two"
            raise DataError(
                f"The train_dataset {said}. Create a new DPTrainer (and output_dir) for other data."
            )
        of = (self.train_dataset, self.data_collator)
        known = self._data
        if known is None or any(a is not b for a, b in zip(of, self._data_of or (), strict=True)):
            known, self._data_of = self._looked_over(), of
        known.options = self.options.batches
        self._data = known
        return known

    def _all_columns(self) -> tuple[Rows, Collator]:
        return self.train_dataset, self.data_collator

    def _looked_over(self) -> TrainingData:
        dataset, collator = self.columns()
        checks.check_collator(collator)
        padding, users, views = (
            self.padding(),
            self.plan.users,
            self.plan.mechanism.views_per_example,
        )
        limits = Limits.of(self.model, self.has_own_loss, padding.side)
        units = None
        if self.units is not None and users is not None and not users.by_row:
            units = (self.units, users)
        options, first = self.options, None
        if options.look_over == WHEN_DRAWN or options.batches.shapes != ANY:
            first = FirstRows(options.longest_row, all_rows=options.look_over == ALL)
        data = TrainingData(
            in_groups(dataset, self.plan.mechanism.draw),
            collator,
            padding,
            limits,
            self.randomness,
            options.batches,
            units,
            views,
            first,
        )
        if dataset is not self.train_dataset or collator is not self.data_collator:
            data.examples.removed = texts_in(self.train_dataset)
        checks.refuse_rows_in_code(data.examples.reached, self.training_rows())
        data.check(self.model, self.losses, needs_labels=not self.has_own_loss)
        data.warn_of_no_targets()
        if not self.options.rows_are_chunks and limits.ignorable and users is None:
            data.warn_of_chunks()
        adds_rows = any(each.adds_rows for each in self.inside)
        if users is None and not adds_rows and not data.when_drawn and self.processes.is_main:
            most, compared = self.training_rows().repeats()
            if most > 1:
                logger.warning(of_repeated_rows(self.plan, most, compared))
        return data

    def padding(self) -> Padding:
        """Return how examples are padded together."""
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        return Padding.of(self.model, tokenizer, self.options.padding_values, self.has_own_loss)

    def draws(self, sampler: Sampler) -> DataLoader:
        """Return the sampler's draws from the training set, each a list of padded physical batches
        of this process's examples.

        Raises: DataError, as :meth:`training_data`.
        """
        data = self.training_data()  # which also sees in what precision the loss computes
        self._drawn_in = self.precision()
        self._cut_into = data.options.physical_batch_size
        short = self._drawn_in.is_short
        if short:
            data.check_padded(self.model, self.losses)
        sampler = self._of_rows(sampler)
        loader = lambda own: data.loader(own, short, self._watched)  # noqa: E731
        if isinstance(sampler, BandedSampler):
            return cast(DataLoader, InTurn(sampler, loader, lambda: self.book.steps_made))
        return loader(sampler)

    def _watched(self, sampler: Sampler) -> Draws:
        """Return what goes through the model here, of what is drawn for all processes."""
        begin: Callable[[], None] | None = None
        if self.plan.mechanism.draw.steps_released_together(self.plan) > 1:
            begin = self._pay_ahead
        draws: Draws = SharedDraws(sampler, self.processes, begin)
        for each in self.inside:
            draws = each.drawn(draws)
        return draws

    def _pay_ahead(self) -> None:
        """Record a whole allocation, before it is drawn; not one that a stream goes on with."""
        reading = self.reading
        if reading is None or self.processes.on_main(lambda: reading.begins):
            self._gate.pay_ahead(self.plan.step_release())

    def _of_rows(self, sampler: Sampler) -> Sampler:
        """Return a sampler, or what reads sharded rows for it."""
        reading = self.reading
        return sampler if reading is None else sampler_of(sampler, reading)

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

    def losses(self, batch: Batch) -> Tensor:
        """Return the per-example losses, (b,), of a collated physical batch.

        Raises: UnsupportedArgumentError under an autocast that did not surround the draws: they are
            checked, cut and padded for the precision that ran then, which is what the card states.
        """
        around = autocast_around(self.device)
        if self._drawn_in is not None and around != self._drawn_in.around:
            raise invalid(
                "torch.autocast",
                around,
                f"to be {self._drawn_in.around} as when the draws began",
                'Use Accelerator(mixed_precision="bf16") or DPTrainingArguments(bf16=True), or '
                "enter torch.autocast before the loop over the draws.",
                UnsupportedArgumentError,
            )
        with self.forward_context():
            return self.loss_of(self.model, self.placed(batch))

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the per-example losses, (b,), by a model, of a batch that is on its device."""
        with each_row_read_as_alone(model):
            if self.add_to_losses is not None:
                return self.add_to_losses(self._of_model, model, batch)
            return self._of_model(model, batch)

    def own_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return :meth:`loss_of` without what a mechanism adds."""
        with each_row_read_as_alone(model):
            return self._of_model(model, batch)

    def placed(self, batch: Batch) -> Batch:
        """Return a physical batch on the model's device. Nothing else may happen to it here: a hook
        that mixed its examples would be called outside what the self-check compares."""
        return send_to_device(batch, self.device)

    def engine(self) -> ClippingEngine:
        """Return the engine that clips per-example gradients as the plan says."""
        plan, ratio = self.plan, self.options.clipping_memory_ratio
        engine = ClippingEngine(self.model, plan.clips_to, plan.clipping, self.strategy(), ratio)
        engine.compiled = self.engine_check.compiled
        return engine

    def strategy(self) -> str:
        """Return how clipped sums are computed: as asked for; else two passes for a model that
        checkpoints, whose memory the held activations would fill again."""
        if self.options.clipping_strategy is not None:
            return self.options.clipping_strategy
        checkpoints = any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules())
        return "two_pass" if checkpoints else "book_keeping"

    def check_engine(self) -> None:
        """Raise SelfCheckError when the engine disagrees, on synthetic examples, with one-by-one
        gradients; and then the errors of :func:`hf_dp.batches.views.refuse_views`.
        """
        self.engine_check.check()
        mechanism = self.plan.mechanism
        views = mechanism.views_per_example
        if views > 1 and not mechanism.views_are_completions:
            # It reads rows in training mode. A layer that keeps something of its first batch was
            # refused above, on synthetic examples.
            data = self.training_data()
            rows, batches = data.looked_over.rows, self.options.batches
            refuse_views(views, data.examples, rows, self.losses, self.model, batches)

    def feed(
        self,
        engine: ClippingEngine,
        batches: Iterable[Batch],
        watch: Sequence[Callable[[Tensor], object]] = (),
    ) -> Tensor:
        """Run this process's part of a logical batch through the model into the engine, and return
        the sum of its losses, which is not private.

        Each ``watch`` is called with the losses of each physical batch, (b,), of users with the
        means over their rows. A sharded model is gathered by all processes for each forward, so
        that all make as many: those that are missing run on synthetic examples, which add nothing.
        """
        self._drawn_for = batches.step if isinstance(batches, OfStep) else None
        # What a loader cuts keeps its size; a new one holds from the next loader on.
        size = max(self._cut_into, self.options.batches.physical_batch_size)
        if self.engine_check.alone and size > 1:
            raise UnsupportedArgumentError(
                "Expected `per_device_train_batch_size` (in a loop of your own, "
                "BatchOptions.physical_batch_size) to be 1, as when the self-check ran, got "
                f"{size}: the self-check never saw two examples together. Call check_engine(), or "
                "set the size before training starts."
            )
        # The most others that one example more or less moves to another physical batch.
        engine.regrouped = self.plan.mechanism.draw.moved * size
        loss_sum = torch.zeros((), device=self.device)
        # Processes of a sharded model meet inside each forward, where nobody could listen.
        heard = others_present() if is_sharded(self.model) else self.processes.telling()
        with heard, self.randomness.streams():
            own, made_up = list(batches), 0
            if is_sharded(self.model):
                made_up = self.processes.largest(len(own)) - len(own)
            for losses in self._clipped(engine, own):
                loss_sum += losses.nan_to_num().sum()
                for each in watch:
                    each(losses)
            for _ in range(made_up):
                engine.backward(self.losses(self.engine_check.made_up), counted=False)
        return loss_sum

    def _clipped(self, engine: ClippingEngine, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Feed each physical batch to the engine, and yield the losses of its units, (units,); NaN
        for a unit that does not count, since none of its rows does."""
        sum_so_far, rows_so_far = torch.zeros((), device=self.device), 0
        counted_so_far: list[Tensor | None] = []
        for batch in batches:
            if not isinstance(batch, UnitBatch):
                losses, counted = self._counted(batch)
                engine.backward(losses, True if counted is None else counted)
                yield _of_counted(losses.detach(), counted)
                continue
            losses, rows = self._counted(batch.inputs)
            counted_so_far.append(None if rows is None else rows.view(-1, batch.rows).any(1))
            counted = _any(counted_so_far)
            engine.backward(
                losses * batch.scale,
                True if counted is None else counted,
                rows_per_unit=batch.rows,
                unit_continues=batch.continues,
            )
            of_units = losses.detach().view(-1, batch.rows).sum(1)
            sum_so_far, rows_so_far = sum_so_far + of_units, rows_so_far + batch.rows
            if not batch.continues:
                yield _of_counted(sum_so_far / rows_so_far, counted)
                sum_so_far, rows_so_far = torch.zeros((), device=self.device), 0
                counted_so_far = []

    def _counted(self, batch: Batch | Masked) -> tuple[Tensor, Tensor | None]:
        """Return the losses of a physical batch, (b,), 0 without a gradient for examples that do
        not count, and which do, (b,); None: all."""
        if not isinstance(batch, Masked):
            return self.losses(batch), None
        losses, counts = self.losses(batch.inputs), batch.counts.to(self.device)
        return losses.where(counts, losses.new_zeros(())), counts


def _and_then(before: str, now: str) -> str:
    """Return what held before a resume and what holds after it, each said once."""
    return _RESUMED.join(dict.fromkeys([*before.split(_RESUMED), now]))


def _any(parts: list[Tensor | None]) -> Tensor | None:
    """Return which units count, of whose parts any does; None: all."""
    known = [part for part in parts if part is not None]
    return torch.stack(known).any(0) if len(known) == len(parts) else None


def _of_counted(losses: Tensor, counted: Tensor | None) -> Tensor:
    return losses if counted is None else losses.where(counted, losses.new_tensor(torch.nan))
