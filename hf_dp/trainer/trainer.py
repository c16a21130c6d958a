"""``DPTrainer``: transformers' Trainer with differentially private steps.

Only seams of Trainer are overridden; its loop, schedulers, callbacks, evaluation and saving stay as
they are. What a private step does is on one screen: :meth:`DPTrainer.training_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer
from transformers.trainer_utils import SaveStrategy, TrainOutput, get_last_checkpoint
from transformers.utils import logging

from hf_dp._validate import invalid
from hf_dp.accounting import TRAINING, Epsilon, Ledger
from hf_dp.batches.units import UnitTable, rows_to_draw, split_off_units
from hf_dp.cards.evidence import write_card
from hf_dp.clipping import refuse_coupling
from hf_dp.clipping.sharding import is_sharded
from hf_dp.distributed.processes import Processes, others_present
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.losses import (
    any_number_of_end_tokens,
    means_over_rows,
    per_example_loss,
    with_labels_read,
)
from hf_dp.mechanisms import mechanism_for
from hf_dp.overlap import TrainingRows, TrainingUsers
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.checks import (
    check_head_is_trainable,
    check_optimizer,
    check_train_dataset,
    hint_at_users,
    refuse_adapters_from_data,
    refuse_selections_from_data,
    warn_of_users,
)
from hf_dp.run.clock import TRAINING as TRAINING_TIME
from hf_dp.run.clock import Clock
from hf_dp.run.folder import refuse_foreign_ledger
from hf_dp.run.memory_errors import named_memory_errors
from hf_dp.run.other_training import WITHOUT_PRIVACY, note_training, stamp_without_privacy
from hf_dp.run.outlook import doubts
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.start_over import runs_before
from hf_dp.run.training_data import TrainingData
from hf_dp.statement.provenance import seen_in_pretraining
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.statement.wording import EVALUATION_ON_TRAINING_ROWS
from hf_dp.trainer.adam_bc import corrected, refuse_other_noise
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.audits import (
    audit_for,
    conclude_audit,
    note_losses,
    refuse_refuted,
    refuse_second_audit,
    with_canaries_for,
)
from hf_dp.trainer.callbacks import (
    ExpectedEpochs,
    StopBeforeTarget,
    WeightsMove,
    with_epsilon,
)
from hf_dp.trainer.card_facts import (
    details_of,
    given_before,
    in_our_names,
    pretraining_sources,
)
from hf_dp.trainer.from_arguments import (
    find_physical_batch,
    options_of,
    own_copy,
    plan_of,
    shared_arguments,
)
from hf_dp.trainer.launch import without_ddp, without_tied_copies
from hf_dp.trainer.logs import NO_LOSS
from hf_dp.trainer.publishing import Publishing
from hf_dp.trainer.signals import StopOnSignal
from hf_dp.trainer.subclasses import check_subclass
from hf_dp.trainer.unit_arguments import users_of
from hf_dp.tuners.apply import apply_peft, load_model
from hf_dp.tuners.base import Tuner
from hf_dp.tuners.find import tuner_for
from hf_dp.tuners.without_privacy import PlainRun, sampled_batches

logger = logging.get_logger(__name__)


class DPTrainer(Publishing):
    """Train privately: a drop-in for :class:`transformers.Trainer`.

    The arguments are Trainer's, in Trainer's order, and ``peft_config``.

    Args:
        model: a model, or a name or path that is loaded with the class its config names.
        args: :class:`DPTrainingArguments`; says how privacy is obtained and how much of it.
        compute_loss_func: refused in private modes; override :meth:`compute_per_example_loss`
            instead.
        peft_config: a PEFT config; the model is wrapped after it was placed on its device.

    Attributes:
        privacy_plan: the :class:`PrivacyPlan`; None in ``non_private`` mode and before a training
            set is known. So is ``ledger``, the :class:`Ledger` of what ran so far.

    Raises: InvalidArgumentError, DataError, UnsupportedModelError, CalibrationError, before
        anything is written.
    """

    args: DPTrainingArguments
    arguments_class: ClassVar[type[DPTrainingArguments]] = DPTrainingArguments
    model: Any
    privacy_plan: PrivacyPlan | None
    card: dict[str, Any]
    tuner: Tuner
    _plain: PlainRun | None = None  # what a tuner sees of a run without privacy
    _signals: StopOnSignal
    _found_size: bool  # whether the size of physical batches was found for this machine
    _evaluation: dict[str, float]
    _units: UnitTable | None = None  # whose the training rows are, where users are protected
    _users_compared: bool = True  # whether every evaluation set says whose its rows are

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module | None = None,
        args: DPTrainingArguments | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., PreTrainedModel] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        peft_config: Any = None,
    ):
        args = own_copy(args, self.arguments_class)
        self.privacy_plan = None
        tuner = tuner_for(peft_config, args.is_private)
        self.tuner = tuner or Tuner()
        rows, compared = None, True
        if args.is_private:
            check_subclass(type(self), DPTrainer, Trainer)
            self._refuse_batch_losses(compute_loss_func, args)
            if train_dataset is not None:
                num_examples = check_train_dataset(train_dataset)
                train_dataset = self._by_user(args, train_dataset, eval_dataset)
                if self._units is not None:
                    num_examples = len(self._units)
                model = load_model(model) if isinstance(model, str) else model
                rows = TrainingRows(train_dataset)
                if args.audit_canaries is not None:
                    train_dataset = with_canaries_for(args, train_dataset, model, rows)
                    num_examples = len(train_dataset)
                compared = args.evaluate_on_training_rows or (
                    rows.refuse(eval_dataset, search=args.private_selection_mean_runs is not None)
                    and self._users_compared
                )
                args.earlier_runs = runs_before(
                    Path(str(args.output_dir)), args.earlier_runs, args.start_over
                )
                classes = getattr(getattr(model, "config", None), "num_labels", None)
                self.privacy_plan = plan_of(args, num_examples, self.tuner, classes, self._units)
                args.max_steps = self.privacy_plan.steps
        _refuse_model_init(model_init, args, peft_config)
        model = load_model(model) if isinstance(model, str) else model
        if peft_config is not None and tuner is None:
            model = apply_peft(model, peft_config, args.device, args.seed)
        if args.is_private and model is not None:
            refuse_coupling(model)
            check_head_is_trainable(model)
            if not args.adapter_init_data_is_public:
                refuse_adapters_from_data(model)
                if self.privacy_plan is not None:  # without one it can only evaluate
                    refuse_selections_from_data(model)
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            model_init,
            compute_loss_func,
            compute_metrics,
            callbacks,
            optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._fixed = self.args.fix()
        self._run = None
        self._found_size = False
        self._evaluation = {}
        self.card = {}
        self._noised_losses = NO_LOSS
        if self.privacy_plan is not None:
            self._make_run(self.privacy_plan, rows, compared)
        elif not args.is_private:
            self._refuse_optimizers()
            self.tuner.check_arguments(args)
            if means_over_rows(self.model):
                # Trainer would take the model, whose forward takes any keyword, to divide by the
                # rows of all accumulated batches, and would add up the means of the batches.
                self.model_accepts_loss_kwargs = False

    def _make_run(self, plan: PrivacyPlan, rows: TrainingRows | None, compared: bool) -> None:
        """Make the private run of this trainer. Nothing is written yet."""
        args = self.args
        on_training_rows = [EVALUATION_ON_TRAINING_ROWS] * args.evaluate_on_training_rows
        self._run = PrivateRun(
            self.model,
            plan,
            self.folder,
            train_dataset=self.train_dataset,
            data_collator=self.data_collator,
            compute_per_example_loss=lambda model, inputs: self.silent_loss(model, inputs),
            accelerator=self.accelerator,
            earlier_runs=args.earlier_runs,
            released=(*args.release, *on_training_rows),
            insecure_seed=args.insecure_seed,
            forward_context=lambda: self.compute_loss_context_manager(),
            synthetic_batches=lambda: self.synthetic_batches(),
            training_rows=rows,
            units=self._units,
        )
        run = self._sync_run()
        run.has_own_loss = self._has_own_loss()
        run.has_own_examples = type(self).synthetic_batches is not DPTrainer.synthetic_batches
        run.read_columns_with(self.columns_for_training)
        run.book.evaluation_compared, run.book.rows_are_chunks = compared, args.rows_are_chunks
        run.audit = audit_for(args, run, self.tuner.gradients_are_noised_sums)
        self.mechanism = mechanism_for(run, self.tuner)
        self.callback_handler.callbacks = [
            with_epsilon(callback, self.spent) for callback in self.callback_handler.callbacks
        ]
        if plan.releases_each_step:
            self.add_callback(StopBeforeTarget(run.book))
        self.add_callback(WeightsMove())
        self.add_callback(ExpectedEpochs(plan))
        self._signals = StopOnSignal(run.processes)
        self.add_callback(self._signals)
        self._refuse_optimizers()
        refuse_other_noise(args, self.optimizer, self.tuner.gradients_are_noised_sums)
        self.tuner.check_arguments(args)
        self.tuner.prepare(run)

    def _by_user(self, args: DPTrainingArguments, train_dataset: Any, eval_dataset: Any) -> Any:
        """Note whose the training rows are, once, and return those to train on, without the column
        that says so.

        Raises: DataError; UnsupportedArgumentError for an evaluation set with rows of the same
            users, unless their metrics are released on purpose.
        """
        users = users_of(args) if args.is_private else None
        if users is None and args.is_private:
            hint_at_users(train_dataset)
        if users is None or self._units is not None:
            return train_dataset
        self._units, train_dataset = split_off_units(train_dataset, users.column)
        train_dataset = rows_to_draw(train_dataset, self._units, users)
        warn_of_users(self._units, users)
        if not args.evaluate_on_training_rows:
            self._users_compared = TrainingUsers(self._units).refuse(
                eval_dataset, search=args.private_selection_mean_runs is not None
            )
        return train_dataset

    @property
    def folder(self) -> str:
        """The run's output folder."""
        return str(self.args.output_dir)

    @property
    def run(self) -> PrivateRun:
        """The private run. Reading it changes nothing.

        Raises: UnsupportedArgumentError when there is none.
        """
        if self._run is None:
            raise UnsupportedArgumentError(
                "There is no privacy plan: privacy_mode is 'non_private' or the trainer has no "
                "train_dataset."
            )
        return self._run

    def _sync_run(self) -> PrivateRun:
        """Return the private run, told of this trainer's present model, data and arguments."""
        run = self.run
        run.book.go_to(self.folder)
        run.model, run.options = self.model, options_of(self.args)
        run.train_dataset, run.data_collator = self.train_dataset, self.data_collator
        run.processing_class, run.accelerator = self.processing_class, self.accelerator
        return run

    # -- what was spent --

    @property
    def ledger(self) -> Ledger | None:
        """What ran so far on the training set, append-only."""
        return None if self._run is None else self._run.ledger

    def epsilon(self, accountant: str | None = None) -> Epsilon:
        """Return the epsilon spent so far, at the plan's delta.

        Raises: UnsupportedArgumentError in ``non_private`` mode, and for DP-FP as published, unless
            ``accountant`` is given.
        """
        run = self.run
        if accountant is None and not run.plan.mechanism.established:
            raise UnsupportedArgumentError(
                "No epsilon is established for DP-FP as published. epsilon('gdp_clt') gives the "
                "paper's own figure, whose kind is 'not established'."
            )
        return run.epsilon(accountant)

    def privacy_statement(self) -> PrivacyStatement:
        """Return what may be said about this run so far; the card and ``privacy.json`` say the
        same."""
        run = self._sync_run()
        self._note_model_selection()
        return run.statement(self.tuner.describe(self.model))

    # -- the private step --

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return one loss per example, (b,), each from that example alone: the point to override
        for a task of your own.

        Args: inputs: a collated physical batch of b examples, on the model's device.
        """
        return per_example_loss(model, inputs, self.args.chunked_loss)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Make one optimizer step's gradient. In private modes ``inputs`` is a whole logical batch,
        a Poisson sample cut into physical batches."""
        if not self.args.is_private:
            if self._plain is not None:
                self.tuner.before_plain_step(self._plain, self.state.global_step)
            return super().training_step(model, inputs, num_items_in_batch)
        run, mechanism = self._sync_run(), self.mechanism
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers
            self.optimizer.train()  # type: ignore[union-attr]
        with self.silent():
            self.tuner.before_step(run, self.state.global_step)
            run.begin_step()  # each call is given one Poisson sample

            with self.saves_what_ran(), named_memory_errors():
                clipped = mechanism.clip(inputs)  # per-example losses, norms, weights, clipped sum
                run.processes.agree("a step is clipped")
            with run.release_step() as release:  # the step is in the durable ledger from here on
                mechanism.set_gradients(clipped, release)  # + noise, / expected_batch_size: p.grad

        if mechanism.noised_loss is not None:
            total, steps = self._noised_losses
            self._noised_losses = (total + mechanism.noised_loss, steps + 1)
        if "training_loss" in run.book.released:
            return run.processes.summed(clipped.loss_sum) / run.plan.expected_batch_size
        return torch.zeros((), device=self.args.device)

    # -- Trainer's seams --

    def get_train_dataloader(self) -> DataLoader:
        """Return the loader of logical batches, in private modes."""
        if not self.args.is_private:
            return super().get_train_dataloader()
        self._sync_run()
        with self.silent():  # rows are looked over
            return self.mechanism.loader()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return a batch on the device, with its labels as :func:`per_example_loss` reads them."""
        inputs = super()._prepare_inputs(inputs)
        return inputs if self._has_own_loss() else with_labels_read(self.model, inputs)

    def training_data(self) -> TrainingData:
        """Return the training set, looked over.

        Raises: DataError for other data than planned, or rows that cannot be trained on.
        """
        return self._sync_run().training_data()

    def _has_own_loss(self) -> bool:
        return type(self).compute_per_example_loss is not DPTrainer.compute_per_example_loss

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train, as Trainer does. A resumed private run goes on with the *run's* ledger, and a run
        stops before its target is passed.

        Raises: LedgerError when resuming without, or with another, ledger; BudgetExceededError when
            nothing is left; SelfCheckError, before the first draw, when the clipping engine
            disagrees with one-by-one gradients; AuditError when an audit refutes the statement,
            with all files written; TrainingStopped, a SystemExit, after SIGTERM or
            SIGINT, when the step under way is finished and saved.
        """
        self._refuse_changed_arguments()
        if not self.args.is_private:
            return self._train_plainly(resume_from_checkpoint, *args, **kwargs)
        run = self._sync_run()
        checkpoint = self._checkpoint_of(resume_from_checkpoint)
        refuse_second_audit(run, checkpoint)
        self._evaluation.clear()  # of other weights
        if checkpoint is not None:
            self.card = {**given_before(checkpoint), **self.card}
        dataset = self.card.get("dataset")
        if seen := seen_in_pretraining(dataset, pretraining_sources(self.model)):
            logger.warning(
                "The base model was pretrained on %s, the same text as the training data %s: what "
                "it knows of these rows is not covered by epsilon. The card says so.",
                ", ".join(seen),
                dataset,
            )
        run.arguments = shared_arguments(self.args)
        self._noised_losses = NO_LOSS
        self.mechanism.refuse_shards(self.is_fsdp_enabled or is_sharded(self.model))
        try:
            run.open()
            self._refuse_optimizers()
            with run.clock.part(TRAINING_TIME):
                with self.silent():
                    self.tuner.start(run, checkpoint)
                    note_losses(run)
                    self._train_model(run.model)
                    self.mechanism.start(checkpoint)
                with others_present():  # Trainer gathers, too
                    output = super().train(checkpoint, *args, **kwargs)
            self._write_times(run.clock, checkpoint)
            self.put_average()
            run.resting.note(self.model)
            with self.silent():
                conclude_audit(run)
            self.keep_released()
            self._write_privacy_files(self.folder)
        finally:
            self._signals.restore()
            run.stop()
        self._signals.finish(self.folder, self.state.global_step, self.state.max_steps)
        refuse_refuted(self.privacy_statement() if run.audit else None)
        if "training_loss" not in run.book.released:
            output = output._replace(training_loss=float("nan"))
        return output

    def _train_plainly(
        self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as Trainer does, on what the tuner chooses."""
        clock = Clock()
        with clock.part(TRAINING_TIME):
            if self.tuner.undecided:
                self._choose_plainly(resume_from_checkpoint, clock)
            try:
                output = super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                if self.state.global_step:
                    note_training(self.model, WITHOUT_PRIVACY, Path(self.folder))
        self._write_times(clock, resume_from_checkpoint)
        return output

    def _write_times(self, clock: Clock, resumed_from: str | bool | None) -> None:
        """Write how long a whole run took, where that was asked for; a resumed one is a part."""
        if self.is_world_process_zero() and not resumed_from:
            clock.write()

    def _choose_plainly(self, resume_from_checkpoint: str | bool | None, clock: Clock) -> None:
        """Let the tuner choose what trains, in a run without privacy.

        Raises: UnsupportedArgumentError for a sharded model.
        """
        if self.is_fsdp_enabled or is_sharded(self.model):
            raise UnsupportedArgumentError(
                f"{type(self.tuner).__name__} chooses by whole weights, and the model is sharded "
                "(FSDP). Train it in one process, or without sharding."
            )
        random = np.random.default_rng(self.args.seed)
        dataset, collator = self.columns_for_training()

        def sample(rate: float) -> Iterator[Any]:
            size = self.args.per_device_train_batch_size
            for batch in sampled_batches(dataset, collator, rate, size, random):
                yield self._prepare_inputs(batch)

        def losses(model: nn.Module, batch: Any) -> Tensor:
            with self.compute_loss_context_manager():
                return self.compute_per_example_loss(model, batch)

        here = Processes.here()
        self._plain = PlainRun(self.model, self.args.device, here, sample, losses, clock)
        checkpoint: Any = resume_from_checkpoint or None
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.folder)
        self.tuner.start_plain(self._plain, checkpoint)
        self._train_model(self._plain.model)

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        private = self.args.is_private
        with without_ddp(self.accelerator) if private else nullcontext():
            prepared = super()._prepare_for_training(max_steps, *args, **kwargs)
        if self.args.is_private:
            run = self._sync_run()
            check_optimizer(self.optimizer, self.model)
            with self.silent():
                self.mechanism.prepare()
            if self.args.auto_physical_batch_size and not self._found_size:
                self._found_size = True
                find_physical_batch(self.args, self.mechanism, self.optimizer)
                self._train_batch_size = self.state.train_batch_size = self.args.train_batch_size
                prepared = (prepared[0], self.get_train_dataloader())
            # What weakens the claim is noted before the first step is recorded.
            self._note_model_selection()
            run.facts(self.tuner.describe(self.model))
            to_come = self.tuner.releases_to_come()
            run.book.start(max_steps - self.state.global_step, to_come)
            self._tell_outlook(max_steps)
            self._tell_doubts()
        return prepared

    def _tell_doubts(self) -> None:
        """Warn, before the first step of a new run, of settings with which it will learn little."""
        run = self._sync_run()
        if run.book.ledger.steps(TRAINING) or not run.processes.is_main:
            return
        trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
        for doubt in doubts(
            run.plan,
            parameters=trained,
            learning_rate=float(self.args.learning_rate or 0.0),
            optimizer=str(getattr(self.args.optim, "value", self.args.optim)),
        ):
            logger.warning(doubt)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create Trainer's optimizer, over all that may train at some time of the run."""
        new = self.optimizer is None
        with self.tuner.all_that_may_train(self.model):
            optimizer = super().create_optimizer(*args, **kwargs)
        floor = self.args.adam_bc_floor
        if new and floor is not None:
            plan = self.run.plan
            batch = plan.expected_batch_size
            optimizer = self.optimizer = corrected(optimizer, plan.noise_std, batch, floor)
        if new:
            self.tuner.tune(optimizer)
        return optimizer

    def _train_model(self, model: nn.Module) -> None:
        """Train the model that the tuner made, from before the optimizer exists."""
        if model is not self.model:
            self.model = self.model_wrapped = self.callback_handler.model = model
            check_head_is_trainable(model)

    def check_engine(self) -> None:
        """Raise SelfCheckError when the engine disagrees, on synthetic examples, with one-by-one
        gradients."""
        self._sync_run().check_engine()

    def synthetic_batches(self) -> list[Any]:
        """Return made-up examples for the self-check, each a batch of one, of different lengths and
        not sorted by them.

        They are rows in the training set's format that went through the data collator. Override it
        for a model whose inputs are not token ids or images. Must not look at the training data.
        """
        return self._sync_run().synthetic_batches()

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0 in private modes: the sum over steps would tell the sizes of the samples."""
        return 0 if self.args.is_private else super().floating_point_ops(inputs)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the expected logical batch in private modes."""
        if self.privacy_plan is None:
            return super().get_total_train_batch_size(args)
        return round(self.privacy_plan.expected_batch_size)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, as Trainer does.

        Raises: UnsupportedArgumentError for rows of the training set in private modes.
        """
        known: Any = self.eval_dataset
        effective = known if eval_dataset is None else eval_dataset
        self._compare_with_training_rows(
            known[effective] if isinstance(effective, str) else effective
        )
        with any_number_of_end_tokens(self.model):
            metrics = super().evaluate(eval_dataset, *args, **kwargs)
        self._evaluation.update(metrics)
        return metrics

    def record_evaluation(self, metrics: Mapping[str, float], eval_dataset: Any) -> None:
        """Log metrics that were computed outside :meth:`evaluate`; the card shows them.

        Args:
            metrics: by names that begin with ``eval_``.
            eval_dataset: the rows that they were computed on: one data set, or several by name.

        Raises: UnsupportedArgumentError for rows of the training set in private modes;
            InvalidArgumentError for another name.
        """
        for name in metrics:
            if not name.startswith("eval_"):
                raise invalid("metrics", name, "to have names that begin with eval_")
        self._compare_with_training_rows(eval_dataset)
        self._evaluation.update(metrics)
        self.log(dict(metrics))

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict, as Trainer does.

        Raises: UnsupportedArgumentError for rows of the training set in private modes.
        """
        self._compare_with_training_rows(test_dataset)
        with any_number_of_end_tokens(self.model):
            return super().predict(test_dataset, *args, **kwargs)

    def _compare_with_training_rows(self, evaluation: Any) -> None:
        """Raise UnsupportedArgumentError for an evaluation set with rows of the training set, whose
        metrics are not noised."""
        if self._run is not None:
            self._sync_run().check_evaluation(evaluation)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse in private modes: each trial is a release on the same rows."""
        if self.args.is_private:
            raise UnsupportedArgumentError(
                "hyperparameter_search trains on the private rows once per trial, and the epsilon "
                "of one run does not cover the search. Tune on public data; or run trials one by "
                "one, all of which count (epsilon of their ledgers' events together); or draw "
                "their number secretly and release only the best (`hf-dp account search` gives its "
                "cost)."
            )
        return super().hyperparameter_search(*args, **kwargs)

    # -- what is written ---

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        # Before the weights: a folder must never hold one run's weights beside another's statement.
        self._refuse_changed_arguments()
        refuse_foreign_ledger(
            output_dir or self.folder, None if self._run is None else self._run.book.run_id
        )
        if self._run is not None:
            self._sync_run().refuse_other_training(before_save=True)
        if state_dict is not None:
            state_dict = without_tied_copies(self.model, state_dict)
        super()._save(output_dir, state_dict)
        if self._run is not None and self.args.should_save:
            self._write_beside_weights(output_dir or self.folder)
        elif self._run is None and self.args.should_save:
            if self._plain is not None:
                self.tuner.save(output_dir or self.folder)
            if not self.args.is_private and self.state.global_step:
                stamp_without_privacy(output_dir or self.folder)

    def _write_beside_weights(self, folder: str) -> None:
        self.tuner.save(folder)
        self.run.book.mark_weights(folder)
        self._write_privacy_files(folder)

    def describe(self, **details: Any) -> None:
        """Say what the card of a private run should, in this and in every later save.

        Args: details: fields of :class:`~hf_dp.cards.details.CardDetails`: license, language,
            dataset, base_model, tags, recipe, evaluation_split, ...

        Raises: InvalidArgumentError for what the Hub would refuse; nothing is taken over then.
        """
        details_of(self, {**self.card, **details})
        self.card.update(details)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write, in private modes, the card with the privacy statement, and ``privacy.json``.

        Arguments are those of :meth:`transformers.Trainer.create_model_card` and of
        :meth:`describe`; every later save keeps them.
        """
        if self._run is None:
            return super().create_model_card(*args, **kwargs)
        names = ("language", "license", "tags", "model_name", "finetuned_from", "tasks")
        self.describe(**in_our_names({**dict(zip(names, args, strict=False)), **kwargs}))
        if self.is_world_process_zero():
            self._write_privacy_files(self.folder)

    def _write_privacy_files(self, folder: str) -> None:
        if not self.is_world_process_zero():
            return
        statement, book = self.privacy_statement(), self.run.book
        refuse_foreign_ledger(folder, book.run_id)  # whose card it would replace
        write_card(
            folder,
            statement,
            details_of(self, self.card),
            lambda beside: book.save(folder, statement, beside),
        )

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the latest metrics of each evaluation, without timings: what the card shows."""
        timings = ("_runtime", "_per_second", "_preparation_time")
        return {
            k: v
            for k, v in self._evaluation.items()
            if k.startswith("eval_") and not k.endswith(timings)
        }

    # -- helpers ---

    def _refuse_changed_arguments(self) -> None:
        self.args.refuse_changes(self._fixed)
        self.args.check()

    def _refuse_batch_losses(self, compute_loss_func: object, args: DPTrainingArguments) -> None:
        if self._has_own_loss() and args.privacy_mode == DP_FP and not args.is_published_dp_fp:
            raise UnsupportedArgumentError(
                f"{type(self).__name__} overrides compute_per_example_loss, which takes the "
                f"model's inputs; with dp_fp_variant={args.dp_fp_variant!r} the last layer trains "
                "on released rows, not on inputs. Use privacy_mode='dp_sgd' for a loss of your own."
            )
        if self._has_own_loss() and args.chunked_loss:
            raise invalid(
                "chunked_loss",
                True,
                f"to be False for {type(self).__name__}, which computes a loss of its own",
                "Remove it.",
                UnsupportedArgumentError,
            )
        if compute_loss_func is not None:
            raise invalid(
                "compute_loss_func",
                compute_loss_func,
                "to be None in private modes",
                "It returns one number for a batch. Override "
                "DPTrainer.compute_per_example_loss(self, model, inputs).",
                UnsupportedArgumentError,
            )

    def _refuse_optimizers(self) -> None:
        given = self.optimizer is not None or self.lr_scheduler is not None
        if self.tuner.undecided and given:
            raise invalid(
                "optimizers",
                type(self.optimizer).__name__,
                "to be (None, None) with this peft_config",
                "What trains is chosen when train() starts; set `optim` in the arguments instead.",
            )

    def _note_model_selection(self) -> None:
        """Note whether evaluation chooses a checkpoint or learning rates, once and for all."""
        selects = self.args.load_best_model_at_end or self.args.save_strategy == SaveStrategy.BEST
        early = any(isinstance(c, EarlyStoppingCallback) for c in self.callback_handler.callbacks)
        steered = self.args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        book = self.run.book
        book.model_selection = book.model_selection or bool(selects or early or steered)

    def columns_for_training(self) -> tuple[Any, Callable[..., Any]]:
        """Return dataset and collator, without the columns that the model's forward does not take,
        as Trainer does."""
        import datasets

        if isinstance(self.train_dataset, datasets.Dataset):
            return self._remove_unused_columns(
                self.train_dataset, description="Training"
            ), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(
            self.data_collator, description="Training"
        )


def _refuse_model_init(model_init: Any, args: DPTrainingArguments, peft_config: Any) -> None:
    if model_init is not None and args.privacy_mode == DP_FP:
        raise invalid(
            "model_init",
            model_init,
            "to be None with privacy_mode='dp_fp'",
            "The noise is put into one model, and train() would make another. Pass the model.",
        )
    if peft_config is not None and model_init is not None:
        raise invalid(
            "peft_config",
            peft_config,
            "to be None with `model_init`",
            "Wrap the model in model_init.",
        )
