"""``DPTrainer``: transformers' Trainer with differentially private steps.

Only seams of Trainer are overridden; its loop, schedulers, callbacks, evaluation and saving run as
ever. What a private step does is on one screen: :meth:`DPTrainer.training_step`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer
from transformers.trainer_utils import SaveStrategy, TrainOutput
from transformers.utils import logging

from hf_dp._validate import invalid
from hf_dp.accounting import Epsilon, Ledger, LedgerEntry
from hf_dp.batches.limits import Limits
from hf_dp.batches.padding import Padding
from hf_dp.cards.card import render_card
from hf_dp.cards.provenance import seen_in_pretraining
from hf_dp.cards.statement import PrivacyStatement, RunFacts
from hf_dp.cards.wording import EVALUATION_ON_TRAINING_ROWS
from hf_dp.clipping import ClippingEngine, refuse_coupling, self_check
from hf_dp.clipping.self_check import AUTOCAST_TOLERANCE
from hf_dp.errors import DataError, UnsupportedArgumentError
from hf_dp.losses import columns_read, per_example_loss
from hf_dp.noise import SecretRandomness
from hf_dp.overlap.compare import TrainingRows, refuse_training_rows
from hf_dp.plan import PrivacyPlan
from hf_dp.sampling import MicroBatchSampler, PoissonSampler
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.callbacks import NO_EPSILON, StopBeforeTarget, WeightsMove, with_epsilon
from hf_dp.trainer.checks import (
    check_collator,
    check_head_is_trainable,
    check_optimizer,
    check_subclass,
    check_train_dataset,
    refuse_adapters_from_data,
    refuse_rows_in_collator,
)
from hf_dp.trainer.choice import Choice, choice_of
from hf_dp.trainer.facts import card_details, earlier_run, pretraining_sources, run_facts
from hf_dp.trainer.forward_arguments import DP_FP
from hf_dp.trainer.from_arguments import earlier_claims, earlier_entries, own_copy, plan_of
from hf_dp.trainer.loading import apply_peft, load_model
from hf_dp.trainer.modes import mode_of
from hf_dp.trainer.precision import Precision
from hf_dp.trainer.run_ledger import RunLedger, checkpoint_of, refuse_foreign_ledger
from hf_dp.trainer.training_data import TrainingData, padded_together
from hf_dp.trainer.withheld import withhold

logger = logging.get_logger(__name__)

# Of these the plan, the look at the rows or the statement was made; others may change between two
# calls of train().
FIXED_ARGUMENTS = (
    "privacy_mode",
    "padding_values",
    "rows_are_chunks",
    "adapter_init_data_is_public",
    "evaluate_on_training_rows",
)


class DPTrainer(Trainer):
    """Drop-in for :class:`transformers.Trainer`; the arguments are Trainer's, in Trainer's order,
    and ``peft_config``.

    Args:
        model: a model, or a name or path that is loaded with the class its config names.
        args: :class:`DPTrainingArguments`; says how privacy is obtained and how much of it.
        compute_loss_func: refused in private modes; override :meth:`compute_per_example_loss`
            instead.
        peft_config: a PEFT config; the model is wrapped after it was placed on its device.

    Attributes: ``privacy_plan`` (:class:`PrivacyPlan`), ``ledger`` (:class:`Ledger`, what ran so
        far); both None in
    ``non_private`` mode and before a training set is known.

    Raises: InvalidArgumentError, DataError, UnsupportedModelError, CalibrationError, before
        anything is written.
    """

    args: DPTrainingArguments
    model: Any
    loss_is_scaled_for_ga = True
    privacy_plan: PrivacyPlan | None
    dataset_name: str | None  # for the card, as base_model_name: the trainer cannot know them
    base_model_name: str | None
    _run: RunLedger | None
    _training_rows: TrainingRows | None
    _evaluation: dict[str, float]
    _earlier: Sequence[LedgerEntry] = ()

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
        args = own_copy(args)
        self.privacy_plan = None
        self._training_rows, compared = None, True
        choice = choice_of(peft_config, args.is_private)
        if args.is_private:
            self._refuse_batch_losses(compute_loss_func, args)
            if train_dataset is not None:
                num_examples = check_train_dataset(train_dataset)
                model = load_model(model) if isinstance(model, str) else model
                self._training_rows = TrainingRows(train_dataset, columns_read(model))
                compared = args.evaluate_on_training_rows or refuse_training_rows(
                    eval_dataset, self._training_rows
                )
                classes = getattr(getattr(model, "config", None), "num_labels", None)
                self.privacy_plan = plan_of(args, num_examples, choice, classes)
                self._earlier = earlier_entries(args, self.privacy_plan.num_examples)
                args.max_steps = self.privacy_plan.steps
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
        model = load_model(model) if isinstance(model, str) else model
        if peft_config is not None and choice is None:
            model = apply_peft(model, peft_config, args.device)
        if args.is_private and model is not None:
            refuse_coupling(model)
            check_head_is_trainable(model)
            if not args.adapter_init_data_is_public:
                refuse_adapters_from_data(model)
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
        self.choice = choice or Choice()
        self._mode = mode_of(self.privacy_plan)
        self.randomness = SecretRandomness(args.insecure_seed)
        self._at_creation = {name: getattr(args, name) for name in FIXED_ARGUMENTS}
        self._run = None
        self._data: TrainingData | None = None
        self._data_of: tuple[Any, Any] = (None, None)
        self._evaluation = {}
        self.dataset_name = self.base_model_name = None
        if self.privacy_plan is not None:
            insecure = args.insecure_seed is not None
            self._run = RunLedger(
                self.folder,
                self.privacy_plan,
                insecure_seed=insecure,
                released=(
                    *args.release,
                    *([EVALUATION_ON_TRAINING_ROWS] if args.evaluate_on_training_rows else []),
                ),
                earlier=earlier_claims(args),
            )
            self._run.rows_are_chunks, self._run.evaluation_compared = (
                args.rows_are_chunks,
                compared,
            )
            self.callback_handler.callbacks = [
                with_epsilon(cb) for cb in self.callback_handler.callbacks
            ]
            if self.privacy_plan.releases_each_step:
                self.add_callback(StopBeforeTarget(self._run))
            self.add_callback(WeightsMove())
            self.choice.prepare(self)

    @property
    def folder(self) -> str:
        """The run's output folder."""
        return str(self.args.output_dir)

    # -- privacy: what was spent ---

    @property
    def ledger(self) -> Ledger | None:
        """What ran so far on the training set, append-only."""
        return None if self._run is None else self._run.ledger

    def epsilon(self, accountant: str | None = None) -> Epsilon:
        """Epsilon spent so far, at the plan's delta.

        Raises: UnsupportedArgumentError in ``non_private`` mode, and for DP-FP as published, unless
            ``accountant`` is given.
        """
        plan, run = self.private_run()
        if accountant is None and self.args.is_published_dp_fp:
            raise UnsupportedArgumentError(
                "No epsilon is established for DP-FP as published. epsilon('gdp_clt') gives the "
                "paper's own figure, whose kind is 'not established'."
            )
        return run.ledger.epsilon(plan.delta, accountant or plan.accountant)

    def privacy_statement(self) -> PrivacyStatement:
        """What may be said about this run so far; the card and ``privacy.json`` say the same."""
        plan, run = self.private_run()
        return PrivacyStatement.from_ledger(plan, run.ledger, self._facts())

    # -- the private step ---

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """One loss per example, (b,), each from that example alone: the point to override for a
        task of your own.

        Args: inputs: a collated physical batch of b examples, on the model's device.
        """
        return per_example_loss(model, inputs)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One optimizer step's gradient. In private modes ``inputs`` is a whole logical batch, a
        list of physical ones."""
        if not self.args.is_private:
            return super().training_step(model, inputs, num_items_in_batch)
        plan, run = self.private_run()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers
            self.optimizer.train()  # type: ignore[union-attr]
        self.choice.before_step(self)
        loss_sum = self._mode.step(self, inputs)
        if "training_loss" in run.released:
            return loss_sum / plan.expected_batch_size
        return torch.zeros((), device=self.args.device)

    def feed(self, engine: ClippingEngine, batches: Iterable[Any]) -> Tensor:
        """Run a logical batch through the model into the engine; returns the sum of its losses,
        which is not private."""
        loss_sum = torch.zeros((), device=self.args.device)
        with self.randomness.streams():
            for batch in batches:
                losses = self.losses_of(batch)
                engine.backward(losses)
                loss_sum += losses.detach().nan_to_num().sum()
        return loss_sum

    def losses_of(self, batch: Any) -> Tensor:
        """The per-example losses, (b,), of a collated physical batch."""
        with self.compute_loss_context_manager():
            return self.compute_per_example_loss(self.model, self._prepare_inputs(batch))

    def engine(self, plan: PrivacyPlan) -> ClippingEngine:
        chosen = self.choice.engine(self.model, plan)
        return chosen or ClippingEngine(
            self.model, plan.clipping_norm, plan.clipping, self._clipping_strategy()
        )

    def _clipping_strategy(self) -> str:
        """As asked for; else two passes for a model that checkpoints, whose memory held records
        would fill again."""
        if self.args.clipping_strategy is not None:
            return self.args.clipping_strategy
        checkpoints = any(
            getattr(module, "gradient_checkpointing", False) for module in self.model.modules()
        )
        return "two_pass" if checkpoints else "book_keeping"

    # -- Trainer's seams ---

    def get_train_dataloader(self) -> DataLoader:
        if not self.args.is_private:
            return super().get_train_dataloader()
        return self._mode.loader(self)

    def private_batches(self, sampler: PoissonSampler | MicroBatchSampler) -> DataLoader:
        """The sampler's draws from the training set, each a list of padded physical batches."""
        data = self.training_data()  # which also sees in what precision the loss computes
        return data.loader(sampler, one_shape=self._precision().is_short)

    def training_data(self) -> TrainingData:
        """The training set, looked over. Raises: DataError for other data than planned, or rows
        that cannot be trained on."""
        self.check_dataset(self.train_dataset)
        _, run = self.private_run()
        if (
            self._data is not None
            and self._data_of[0] is not self.train_dataset
            and len(run.ledger)
        ):
            raise DataError(
                "The train_dataset was replaced after rows of it were used, and one statement "
                "cannot be about both. Create a new DPTrainer (and output_dir) for other data."
            )
        made_of = (self.train_dataset, self.data_collator)
        if self._data is None or any(
            one is not other for one, other in zip(self._data_of, made_of, strict=True)
        ):
            dataset, collator = self.columns_for_training()
            check_collator(collator)
            own_loss = self._has_own_loss()
            padding = self._padding()
            limits = Limits.of(self.model, own_loss, padding.side)
            data = TrainingData(dataset, collator, padding, limits, self.randomness, self.args)
            refuse_rows_in_collator(data.examples.collator.data, self._rows_of_training())
            data.check(self.model, self.losses_of, needs_labels=not own_loss)
            if not self.args.rows_are_chunks and limits.ignorable:
                data.warn_of_chunks()
            self._data, self._data_of = data, made_of
        return self._data

    def _padding(self) -> Padding:
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        return Padding.of(self.model, tokenizer, self.args.padding_values, self._has_own_loss())

    def _has_own_loss(self) -> bool:
        return type(self).compute_per_example_loss is not DPTrainer.compute_per_example_loss

    def _precision(self) -> Precision:
        return Precision.of(
            self.model, self.accelerator, () if self._data is None else self._data.computed
        )

    def check_dataset(self, dataset: Any) -> None:
        """Raise DataError for another number of rows than was planned for."""
        plan, _ = self.private_run()
        if len(dataset) != plan.num_examples:
            raise DataError(
                f"The train_dataset has {len(dataset)} rows, but the privacy plan was made for "
                f"{plan.num_examples}. Create a new DPTrainer (and output_dir) for other data."
            )

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """As Trainer's. A resumed private run goes on with the *run's* ledger; a run stops before
        its target is passed.

        Raises: LedgerError when resuming without, or with another, ledger; BudgetExceededError when
            nothing is left; SelfCheckError, before the first draw, when the clipping engine
            disagrees with one-by-one gradients.
        """
        self._refuse_changed_arguments()
        if not self.args.is_private:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        _, run = self.private_run()
        checkpoint = checkpoint_of(resume_from_checkpoint, self.folder)
        if checkpoint is not None:
            run.resume(checkpoint)
        if seen := seen_in_pretraining(self.dataset_name, pretraining_sources(self.model)):
            logger.warning(
                "The base model was pretrained on %s, the same text as the training data %s: what "
                "it knows of these rows is not covered by epsilon. The card says so.",
                ", ".join(seen),
                self.dataset_name,
            )
        if (
            checkpoint is None
            and not self.args.earlier_runs
            and (earlier := earlier_run(self.model))
        ):
            logger.warning(
                "The base model is the result of a private run (%s). If that was on the same rows, "
                "both runs count together, and this run's statement covers this run alone: name it "
                "in `earlier_runs`.",
                earlier,
            )
        try:
            run.open()
            run.record_earlier(self._earlier)
            self.choice.start(self, checkpoint)
            self._mode.start(self, checkpoint)
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            self._write_privacy_files(self.folder)
        finally:
            run.stop()
        if "training_loss" not in run.released:
            output = output._replace(training_loss=float("nan"))
        return output

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, *args, **kwargs)
        if self.args.is_private:
            _, run = self.private_run()
            check_optimizer(self.optimizer, self.model)
            self._mode.prepare(self)
            self._facts()  # what weakens the claim is noted before the first step is recorded
            run.start(max_steps - self.state.global_step, self.choice.releases_to_come())
        return prepared

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, over all that may train at some time of the run."""
        new = self.optimizer is None
        with self.choice.all_that_may_train(self.model):
            optimizer = super().create_optimizer(*args, **kwargs)
        if new:
            self.choice.tune(optimizer)
        return optimizer

    def replace_model(self, model: nn.Module) -> None:
        """Train this model instead, from before the optimizer exists."""
        self.model = self.model_wrapped = self.callback_handler.model = model
        check_head_is_trainable(model)

    def check_engine(self) -> None:
        """Raise SelfCheckError when the engine disagrees, on synthetic examples, with one-by-one
        gradients."""
        plan, _ = self.private_run()
        with self.randomness.streams(), self.compute_loss_context_manager():
            padded, alone = self.check_batches()
            strategy = self._clipping_strategy()
            logger.info("Clipping strategy: %s.", strategy)
            self_check(
                self.model,
                self.compute_per_example_loss,
                padded,
                alone,
                clipping=plan.clipping,
                strategy=strategy,
                # accelerate's autocast is inside the model's forward, where self_check does not see
                # it
                rtol=AUTOCAST_TOLERANCE
                if self._precision().autocast or self._precision().computed
                else None,
            )

    def check_batches(self) -> tuple[Any, list[Any]]:
        """``(padded, alone)``: the synthetic examples as one padded batch and one by one, on the
        model's device."""
        own = type(self).synthetic_batches is not DPTrainer.synthetic_batches
        layout = self.training_data().looked_over.layout if own else None
        padded, alone = padded_together(self.synthetic_batches(), self._padding(), layout)
        return self._prepare_inputs(padded), [self._prepare_inputs(example) for example in alone]

    def synthetic_batches(self) -> list[Any]:
        """Return made-up examples for the self-check, each a batch of one, of different lengths and
        not sorted by them.

        They are rows in the training set's format that went through the data collator. Override it
        for a model whose inputs are not token ids or images. Must not look at the training data.
        """
        return self.training_data().synthetic_examples(self.model)

    def floating_point_ops(self, inputs: Any) -> int:
        """0 in private modes: the sum over steps would tell the sizes of the draws."""
        return 0 if self.args.is_private else super().floating_point_ops(inputs)

    def get_total_train_batch_size(self, args: Any) -> int:
        """The expected logical batch in private modes."""
        if self.privacy_plan is None:
            return super().get_total_train_batch_size(args)
        return round(self.privacy_plan.expected_batch_size)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer's, without what a private run withholds, with the epsilon spent so far."""
        if self.args.is_private:
            released = () if self._run is None else self._run.released
            withhold(logs, released, gradients_are_noised=not self.args.is_published_dp_fp)
            if self.is_in_train and self._run is not None:
                name = NO_EPSILON if self.args.is_published_dp_fp else "epsilon"
                logs[name] = self.epsilon(
                    self.privacy_plan.accountant if self.privacy_plan else None
                ).rounded_up()
        super().log(logs, start_time)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's. Raises: UnsupportedArgumentError for the training set in private modes."""
        known: Any = self.eval_dataset
        effective = known if eval_dataset is None else eval_dataset
        self._compare_with_training_rows(
            known[effective] if isinstance(effective, str) else effective
        )
        metrics = super().evaluate(eval_dataset, *args, **kwargs)
        self._evaluation.update(metrics)
        return metrics

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. Raises: UnsupportedArgumentError for the training set in private modes."""
        self._compare_with_training_rows(test_dataset)
        return super().predict(test_dataset, *args, **kwargs)

    def _compare_with_training_rows(self, evaluation: Any) -> None:
        """Raise UnsupportedArgumentError for an evaluation set with rows of the training set, whose
        metrics are not noised."""
        released = () if self._run is None else self._run.released
        if (
            not self.args.is_private
            or EVALUATION_ON_TRAINING_ROWS in released
            or self.train_dataset is None
        ):
            return
        if not refuse_training_rows(evaluation, self._rows_of_training()) and self._run is not None:
            self._run.evaluation_compared = False

    def _rows_of_training(self) -> TrainingRows:
        if self._training_rows is None or self._training_rows.dataset is not self.train_dataset:
            self._training_rows = TrainingRows(self.train_dataset, columns_read(self.model))
        return self._training_rows

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused in private modes: each trial is a release on the same rows."""
        if self.args.is_private:
            raise UnsupportedArgumentError(
                "hyperparameter_search trains on the private rows once per trial, and the epsilon "
                "of one run does not cover the search. Tune on public data; or run trials one by "
                "one, all of which count (epsilon of their ledgers' events together); or draw "
                "their number secretly and release only the best (accounting.BestOfRandomRuns)."
            )
        return super().hyperparameter_search(*args, **kwargs)

    # -- what is written ---

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        # Before the weights: a folder must never hold one run's weights beside another's statement.
        self._refuse_changed_arguments()
        refuse_foreign_ledger(
            output_dir or self.folder, None if self._run is None else self._run.run_id
        )
        if (
            self._run is not None
            and not len(self._run.ledger)
            and (earlier := earlier_run(self.model))
        ):
            raise UnsupportedArgumentError(
                "This trainer has made no private step, and its model is the result of a private "
                f"run ({earlier}), which a statement of this trainer would not count. Save it with "
                "model.save_pretrained, beside that run's README.md and privacy.json; or name that "
                "run in `earlier_runs` and train."
            )
        super()._save(output_dir, state_dict)
        if self._run is not None and self.args.should_save:
            self.choice.save(output_dir or self.folder)
            self._run.mark_weights(output_dir or self.folder)
            self._write_privacy_files(output_dir or self.folder)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._run is not None and self.is_world_process_zero():
            self._write_privacy_files(self.folder)  # so that no push leaves without its card
        super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """In private modes the card with the privacy statement, and ``privacy.json`` beside it."""
        if self._run is None:
            return super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            self._write_privacy_files(self.folder, **kwargs)

    def _write_privacy_files(self, folder: str, **card_options: Any) -> None:
        _, run = self.private_run()
        statement = self.privacy_statement()
        os.makedirs(folder, exist_ok=True)
        run.save(folder, statement)
        card = render_card(statement, **card_details(self, **card_options))
        Path(folder, "README.md").write_text(card, encoding="utf-8")

    def evaluation_metrics(self) -> dict[str, float]:
        """The latest metrics of each evaluation, without timings: what the card shows."""
        timings = ("_runtime", "_per_second", "_preparation_time")
        return {
            k: v
            for k, v in self._evaluation.items()
            if k.startswith("eval_") and not k.endswith(timings)
        }

    # -- helpers ---

    def _refuse_changed_arguments(self) -> None:
        for name, value in self._at_creation.items():
            if getattr(self.args, name) != value:
                raise invalid(
                    name,
                    getattr(self.args, name),
                    f"to stay as it was when the trainer was created, {value!r}",
                    "The statement of this trainer was made for that. Create a new DPTrainer with "
                    "a new output_dir.",
                    UnsupportedArgumentError,
                )
        self.args.check()

    def _refuse_batch_losses(self, compute_loss_func: object, args: DPTrainingArguments) -> None:
        check_subclass(type(self), DPTrainer, Trainer)
        if self._has_own_loss() and args.privacy_mode == DP_FP and not args.is_published_dp_fp:
            raise UnsupportedArgumentError(
                f"{type(self).__name__} overrides compute_per_example_loss, which takes the "
                f"model's inputs; with dp_fp_variant={args.dp_fp_variant!r} the last layer trains "
                "on released rows, not on inputs. Use privacy_mode='dp_sgd' for a loss of your own."
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

    def private_run(self) -> tuple[PrivacyPlan, RunLedger]:
        """The plan and the ledger on disk. Raises: UnsupportedArgumentError when there are none."""
        if self.privacy_plan is None or self._run is None:
            raise UnsupportedArgumentError(
                "There is no privacy plan: privacy_mode is 'non_private' or the trainer has no "
                "train_dataset."
            )
        return self.privacy_plan, self._run

    def _facts(self) -> RunFacts:
        _, run = self.private_run()
        selects = self.args.load_best_model_at_end or self.args.save_strategy == SaveStrategy.BEST
        early = any(
            isinstance(callback, EarlyStoppingCallback)
            for callback in self.callback_handler.callbacks
        )
        run.model_selection = run.model_selection or bool(selects or early)
        return run_facts(
            self.model,
            self.args,
            self._precision(),
            run.weaknesses,
            trained=self.choice.describe(self.model),
        )

    def columns_for_training(self) -> tuple[Any, Callable[..., Any]]:
        """Dataset and collator with the columns that the model's forward does not take removed, as
        Trainer does."""
        import datasets

        if isinstance(self.train_dataset, datasets.Dataset):
            return self._remove_unused_columns(
                self.train_dataset, description="Training"
            ), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(
            self.data_collator, description="Training"
        )
