"""``DPTrainer``: transformers' Trainer with differentially private steps.

Only seams of Trainer are overridden, and each is one call of the trainer's kind of training:
:class:`~hf_dp.trainer.private.PrivateTraining`, or :class:`~hf_dp.trainer.plain.Training` without
privacy. Trainer's loop, schedulers, callbacks, evaluation and saving stay as they are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from peft import PeftConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import DataCollator, PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_utils import (
    BestRun,
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    TrainOutput,
)

from hf_dp._validate import invalid
from hf_dp.accounting import Epsilon, Ledger
from hf_dp.batches.structure import Batch, DataSet, Example
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.losses import each_row_read_as_alone, per_example_loss, with_labels_read
from hf_dp.planning import Forecast, forecast
from hf_dp.run.gguf import dequantized
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.given import Given
from hf_dp.trainer.launch import without_tied_copies
from hf_dp.trainer.plain import Prepared, Training, no_plan
from hf_dp.trainer.private import training_of
from hf_dp.trainer.publishing import Publishing, describe


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
    training: Training

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module | None = None,
        args: DPTrainingArguments | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: DataSet = None,
        eval_dataset: DataSet = None,
        processing_class: Any = None,
        model_init: Callable[..., PreTrainedModel] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        peft_config: PeftConfig | None = None,
    ):
        args = self.arguments_class.own_copy(args)
        if optimizer_cls_and_kwargs is not None:
            raise invalid(
                "optimizer_cls_and_kwargs",
                optimizer_cls_and_kwargs,
                "to be None",
                "Set `optim` and `optim_args`, or pass an optimizer in `optimizers`.",
                UnsupportedArgumentError,
            )
        self.training = training_of(args, train_dataset, peft_config)
        self.tuner = self.training.tuner
        self.card, self._evaluation = {}, {}
        self.data_settings: dict[str, object] = {}  # how rows were made, for the card's settings
        # The sets, with all their columns, of which Trainer made loaders of some columns.
        self._made_of = WeakKeyDictionary[DataLoader, DataSet]()
        rows = (train_dataset, eval_dataset)
        given = Given(
            type(self), DPTrainer, model, *rows, model_init, compute_loss_func, peft_config
        )
        super().__init__(
            self.training.take(given),
            args,
            data_collator,
            given.train_dataset,
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
        self.training.attach(self)

    @property
    def run(self) -> PrivateRun:
        """The private run. Reading it changes nothing.

        Raises: UnsupportedArgumentError when there is none.
        """
        if self._run is None:
            raise no_plan()
        return self._run

    # -- what was spent --

    @property
    def ledger(self) -> Ledger | None:
        """What ran so far on the training set, append-only."""
        return None if self._run is None else self._run.ledger

    def epsilon(self, accountant: str | None = None) -> Epsilon:
        """Return the epsilon spent so far, at the plan's delta.

        Raises: UnsupportedArgumentError in ``non_private`` mode, and, unless ``accountant`` is
            given, for a run of which no epsilon holds.
        """
        run = self.run
        if accountant is None and not run.established:
            raise UnsupportedArgumentError(
                "No epsilon holds for this run; privacy_statement() says why. By its name an "
                "accountant answers for the ledger alone, such as epsilon('pld'), or gives the "
                "figure of DP-FP's paper, epsilon('gdp_clt')."
            )
        return run.epsilon(accountant)

    def forecast(self) -> Forecast:
        """Return what the run will cost, before anything is spent; print it to read it.

        It is the cost of this run alone, without ``earlier_runs``. Where a private selection
        decides what trains, the signal is not known before.

        Raises: UnsupportedArgumentError when there is no private run.
        """
        numbers = sum(p.numel() for p in self.run.model.parameters() if p.requires_grad)
        plan = self.run.plan
        return forecast(plan, parameters=numbers if plan.selection is None else None)

    def privacy_statement(self) -> PrivacyStatement:
        """Return what may be said about this run so far; the card and ``privacy.json`` say the
        same.
        """
        return self.training.statement()

    def call_model_init(self, trial: object = None) -> nn.Module:
        """Return what ``model_init`` makes, as Trainer does; it may be read from a GGUF file."""
        return dequantized(super().call_model_init(trial))

    # -- the steps --

    def compute_per_example_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Return one loss per example, (b,), each from that example alone: the point to override
        for a task of your own.

        Args: inputs: a collated physical batch of b examples, on the model's device.
        """
        return per_example_loss(model, inputs, self.args.chunked_loss)

    def synthetic_batches(self) -> list[Example]:
        """Return synthetic examples for the self-check, each a batch of one, of different lengths
        and not sorted by length.

        They are rows in the training set's format that went through the data collator. Override it
        for a model whose inputs are not token ids or images. Must not look at the training data.
        """
        run = self.training.sync()
        return run.training_data().synthetic_examples(run.model)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, as Trainer does. A resumed private run continues with the *run's* ledger, and a
        run stops before its target is exceeded.

        Raises: LedgerError when resuming without, or with another, ledger; BudgetExceededError when
            nothing is left; SelfCheckError, before the first draw, when the clipping engine
            disagrees with one-by-one gradients; AuditError when an audit refutes the statement,
            with all files written; TrainingStopped, a SystemExit, after SIGTERM or
            SIGINT, when the current step is finished and saved.
        """
        self._refuse_changed_arguments()
        # TrainingArguments declare it as text, so True in a recipe or a command arrives as "True".
        written = {"true": True, "false": None}
        resume_from_checkpoint = written.get(
            str(resume_from_checkpoint).lower(), resume_from_checkpoint
        )
        stock = partial(super().train, trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        return self.training.train(resume_from_checkpoint, stock)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Make one optimizer step's gradient. In private modes ``inputs`` is a whole logical batch,
        a Poisson sample cut into physical batches."""
        stock = partial(super().training_step, model, inputs, num_items_in_batch)
        return self.training.step(model, inputs, stock)

    def get_train_dataloader(self) -> DataLoader:
        """Return the loader of logical batches, in private modes."""
        return self.training.loader(super().get_train_dataloader)

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Return a batch on the device, with its labels as :func:`per_example_loss` reads them."""
        inputs = super()._prepare_inputs(inputs)
        own_loss = type(self).compute_per_example_loss is not DPTrainer.compute_per_example_loss
        return inputs if own_loss else with_labels_read(self.model, inputs)

    def _init_training_state(self, max_steps: int, *others: Any) -> tuple[int, int]:
        """Begin or resume with shares of a run (``logging_steps=0.1``) as numbers of steps.
        Checkpoints hold numbers, so transformers would warn that an unchanged run differs."""
        shares = {
            name: share
            for name in ("logging_steps", "eval_steps", "save_steps")
            if 0 < (share := getattr(self.args, name) or 0) < 1
        }
        for name, share in shares.items():
            setattr(self.args, name, math.ceil(max_steps * share))
        try:
            return super()._init_training_state(max_steps, *others)
        finally:
            for name, share in shares.items():
                setattr(self.args, name, share)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> Prepared:
        prepare = super()._prepare_for_training
        stock = partial(prepare, max_steps, train_dataloader, resume_from_checkpoint)
        return self.training.prepare(max_steps, stock)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create Trainer's optimizer, over all that may train at some time of the run."""
        if self.optimizer is not None:
            return super().create_optimizer(model)
        with self.tuner.all_that_may_train(self.model):
            made = super().create_optimizer(model)
        self.optimizer = self.training.optimizer(made)
        self.tuner.tune(self.optimizer)
        return self.optimizer

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: Tensor | float | None = None
    ) -> Tensor | float | None:
        stock = partial(super()._get_grad_norm, model, grad_norm)
        return stock() if grad_norm is not None else self.training.gradient_norm(stock)

    def floating_point_ops(self, inputs: Batch) -> int:
        """Return 0 in private modes: the sum over steps would reveal the sizes of the samples."""
        return self.training.operations(partial(super().floating_point_ops, inputs))

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the expected logical batch in private modes."""
        return self.training.batch_size(partial(super().get_total_train_batch_size, args))

    # -- evaluation and logs --

    def evaluate(self, eval_dataset: DataSet = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, as Trainer does.

        Raises: UnsupportedArgumentError for rows of the training set in private modes.
        """
        self.training.evaluates(self._evaluation_set(eval_dataset))
        with each_row_read_as_alone(self.model):
            metrics = super().evaluate(eval_dataset, *args, **kwargs)
        self._evaluation.setdefault(self.state.global_step, {}).update(metrics)
        return metrics

    def _evaluation_set(self, given: DataSet) -> DataSet:
        known: DataSet = self.eval_dataset
        effective = known if given is None else given
        return known[effective] if isinstance(effective, str) else effective

    def get_eval_dataloader(self, eval_dataset: DataSet = None) -> DataLoader:
        """Return the loader of an evaluation set, as Trainer does."""
        loader = super().get_eval_dataloader(eval_dataset)
        self._made_of.setdefault(loader, self._evaluation_set(eval_dataset))  # it may be kept
        return loader

    def get_test_dataloader(self, test_dataset: DataSet) -> DataLoader:
        """Return the loader of a test set, as Trainer does."""
        loader = super().get_test_dataloader(test_dataset)
        self._made_of.setdefault(loader, test_dataset)
        return loader

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate on what a loader yields, as Trainer does, whoever made the loader.

        Raises: as :meth:`evaluate`, for the loader's rows.
        """
        rows = getattr(dataloader, "dataset", None)
        for loader, dataset in self._made_of.items():
            rows = dataset if loader is dataloader else rows
        # What holds no rows that could be compared counts as a set that cannot be.
        self.training.evaluates(iter(()) if rows is None else rows)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def record_evaluation(self, metrics: Mapping[str, float], eval_dataset: DataSet) -> None:
        """Log metrics that were computed outside :meth:`evaluate`; the card shows them.

        Args:
            metrics: by names that begin with ``eval_``.
            eval_dataset: their rows: one data set, or several by name.

        Raises: as :meth:`evaluate`; InvalidArgumentError for another name.
        """
        for name in metrics:
            if not name.startswith("eval_"):
                raise invalid("metrics", name, "to have names that begin with eval_")
        self.training.evaluates(eval_dataset)
        self._evaluation.setdefault(self.state.global_step, {}).update(metrics)
        self.log(dict(metrics))

    def predict(self, test_dataset: DataSet, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict, as Trainer does.

        Raises: as :meth:`evaluate`.
        """
        self.training.evaluates(test_dataset)
        with each_row_read_as_alone(self.model):
            return super().predict(test_dataset, *args, **kwargs)

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the latest metrics of each evaluation of the present weights, without timings:
        what the card shows."""
        timings = ("_runtime", "_per_second", "_preparation_time")
        known = self._evaluation.get(self.state.global_step, {})
        metrics = {k: v for k, v in known.items() if not k.endswith(timings)}
        return {name: value for name, value in metrics.items() if name.startswith("eval_")}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; in private modes without what is withheld, with the epsilon spent so far and with
        what features add.
        """
        stock = super().log
        self.training.log(logs, lambda released: stock(released, start_time))

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> BestRun | list[BestRun]:
        """Refuse in private modes: each trial is a release on the same rows."""
        return self.training.search(partial(super().hyperparameter_search, *args, **kwargs))

    # -- what is written ---

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        self._refuse_changed_arguments()
        if state_dict is not None:
            state_dict = without_tied_copies(self.model, state_dict)
        stock = partial(super()._save, output_dir, state_dict)
        self.training.save(output_dir or self.folder, stock)

    def describe(self, **details: object) -> None:
        """Say what the card of a private run should hold, in this and every later save.

        Args: details: fields of :class:`~hf_dp.cards.details.CardDetails`: license, language,
            dataset, base_model, tags, recipe, evaluation_split, ...

        Raises: InvalidArgumentError for what the Hub would refuse; nothing is taken over then.
        """
        describe(self, details)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write, in private modes, the card with the privacy statement, and ``privacy.json``.

        Arguments are those of :meth:`transformers.Trainer.create_model_card` and of
        :meth:`describe`; every later save keeps them.
        """
        names = inspect.signature(super().create_model_card).parameters
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        self.training.write_card(options, partial(super().create_model_card, *args, **kwargs))

    def _refuse_changed_arguments(self) -> None:
        self.args.refuse_changes(self._fixed)
        self.args.check()
