"""Private training: at each of Trainer's seams one call of the run and of its features. A step is
on one screen: :meth:`PrivateTraining.step`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import DynamoBackend
from peft import PeftConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput

from hf_dp._validate import invalid
from hf_dp.batches.structure import DataSet
from hf_dp.cards.verify import restate, write_card
from hf_dp.clipping.rounding import accumulation_dtype, squared_norms
from hf_dp.distributed.processes import others_present
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.features import Inside, Seen, features_of
from hf_dp.mechanisms import mechanism_for
from hf_dp.mechanisms.base import Batches
from hf_dp.overlap import TrainingRows
from hf_dp.plans.bands import AUTO, BANDS
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.checks import check_optimizer
from hf_dp.run.clock import TRAINING as TRAINING_TIME
from hf_dp.run.physical_size import named_memory_errors
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.witnesses import checkpoints, refuse_foreign
from hf_dp.statement.facts import EVALUATION_ON_TRAINING_ROWS, Flags
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.streams.reading import NEEDED, Stream, check_for_stream
from hf_dp.trainer import publishing
from hf_dp.trainer.arguments import DPTrainingArguments, options_of
from hf_dp.trainer.given import Given, Rows
from hf_dp.trainer.inherited import tracker_problems
from hf_dp.trainer.launch import without_ddp
from hf_dp.trainer.plain import Prepared, Training, loaded
from hf_dp.trainer.privacy_arguments import plan_of
from hf_dp.trainer.publishing import Publishing

# Arguments that concern one process alone: what it prints, and which one it is.
_OF_A_PROCESS = {"local_rank", "disable_tqdm", "log_level", "log_level_replica"}


class PrivateTraining(Training):
    """Private steps, and what else happens at a trainer's seams in private modes."""

    is_private = True
    plan: PrivacyPlan
    run: PrivateRun
    _trainer: Publishing
    _seen: Seen
    _given: Given
    _rows: Rows
    _training_rows: TrainingRows
    _compared: bool  # whether every evaluation set could be compared with the training rows

    def __init__(self, args: DPTrainingArguments, peft_config: PeftConfig | None):
        super().__init__(args, peft_config)
        self.features = features_of(args)
        self.inside = [each for each in self.features if isinstance(each, Inside)]

    # -- before the first step --

    def take(self, given: Given) -> nn.Module | None:
        """Check what the trainer was given, and plan the run. Returns: the model."""
        self._given, args = given, self.args
        given.check_private(args)
        if isinstance(given.train_dataset, Stream):
            check_for_stream(given.train_dataset, **{name: getattr(args, name) for name in NEEDED})
            args.ignore_data_skip = True  # it goes on after the last step that was read
        self._rows = rows = Rows.of(args, given.train_dataset, given.eval_dataset)
        given.train_dataset = rows.data
        given.model = model = loaded(given.model)
        self._training_rows = known = TrainingRows(rows.data)
        for each in self.inside:
            given.train_dataset = each.rows(given.train_dataset, model, known)
        num_examples = len(given.train_dataset if rows.units is None else rows.units)
        searches = args.private_selection_mean_runs is not None
        self._compared = args.evaluate_on_training_rows or (
            given.check_evaluation(searches)
            and known.refuse(given.eval_dataset, search=searches)
            and rows.compared
        )
        classes = getattr(getattr(model, "config", None), "num_labels", None)
        self.plan = plan_of(args, num_examples, self.tuner, classes, rows.units)
        args.max_steps = self.plan.steps
        args.ignore_data_skip |= args.bands is not None  # their draws belong to certain steps
        model = self.prepared_model(given)
        given.check_private_model(model, args)
        return model

    def attach(self, trainer: Publishing) -> None:
        self._trainer, args = trainer, self.args
        self._refuse_trackers()
        # The engine's own forward is compiled; accelerate would compile around the engine.
        trainer.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
        on_training_rows = [EVALUATION_ON_TRAINING_ROWS] * args.evaluate_on_training_rows
        trainer.privacy_plan = self.plan
        trainer._run = self.run = run = PrivateRun(
            trainer.model,
            self.plan,
            trainer.folder,
            train_dataset=trainer.train_dataset,
            data_collator=trainer.data_collator,
            compute_per_example_loss=lambda model, inputs: trainer.silent_loss(model, inputs),
            accelerator=trainer.accelerator,
            options=options_of(args),
            earlier_runs=args.earlier_runs,
            released=(*args.release, *on_training_rows),
            insecure_seed=args.insecure_seed,
            forward_context=lambda: trainer.compute_loss_context_manager(),
            synthetic_batches=lambda: trainer.synthetic_batches(),
            training_rows=self._training_rows,
            units=self._rows.units,
        )
        self.sync()
        run.has_own_loss = self._given.overrides("compute_per_example_loss")
        run.engine_check.has_own_examples = self._given.overrides("synthetic_batches")
        run.columns = trainer.columns_for_training
        run.book.weaken(Flags(evaluation_compared=self._compared))
        trainer.write_beside_weights = self.write_beside_weights
        trainer.mechanism = self.mechanism = mechanism_for(run, self.tuner)
        names = (n for each in self.features for n in each.names)
        trainer.known_names = frozenset((*names, *self.mechanism.logs))
        for inside in self.inside:  # which the statement names, whatever it overrides
            run.let_inside(inside)
            inside.enter(run, self.tuner)
        self.refuse_optimizers()
        if args.teacher_is_public:
            run.book.weaken(Flags(public_teacher=True))
        if args.bands == AUTO and (trainer.optimizer or trainer.lr_scheduler) is not None:
            expected = "to be a number with an optimizer or schedule of your own"
            why = "`hf-dp plan` compares numbers for those of the arguments."
            raise invalid(BANDS, AUTO, expected, why, UnsupportedArgumentError)
        self._seen = Seen(
            args=args,
            plan=self.plan,
            book=run.book,
            processes=run.processes,
            statement=self.statement,
            spent=trainer.spent,
            tuner=self.tuner,
            callbacks=trainer.callback_handler.callbacks,
            state=trainer.state,
            card=trainer.card,
        )
        for each in self.features:
            each.begin(self.seen())
            trainer.callback_handler.callbacks.append(each)
        self.tuner.check_arguments(args)
        self.tuner.prepare(run)

    def sync(self) -> PrivateRun:
        """Return the run, told of the trainer's present model, data and arguments."""
        run, trainer = self.run, self._trainer
        run.book.go_to(trainer.folder)
        run.model, run.options = trainer.model, options_of(self.args)
        run.train_dataset, run.data_collator = trainer.train_dataset, trainer.data_collator
        run.processing_class, run.accelerator = trainer.processing_class, trainer.accelerator
        return run

    def seen(self) -> Seen:
        """Return what a feature outside the gate sees at present."""
        seen, trainer = self._seen, self._trainer
        seen.state, seen.card, seen.optimizer = trainer.state, trainer.card, trainer.optimizer
        seen.schedule = trainer.lr_scheduler
        seen.noise_norm, seen.noised = self.mechanism.noise_norm, self.mechanism.noised
        return seen

    def _weaken(self) -> None:
        for each in self.features:
            each.weaken(self.seen())

    def prepare(self, max_steps: int, stock: Callable[[], Prepared]) -> Prepared:
        trainer, run = self._trainer, self.run
        with without_ddp(trainer.accelerator):
            prepared = stock()
        self.sync()
        check_optimizer(trainer.optimizer, trainer.model)
        with trainer.silent():
            self.mechanism.prepare()
        before = run.options.batches
        for inside in self.inside:
            inside.fit(self.mechanism, trainer.optimizer)
        if run.options.batches != before:
            trainer._train_batch_size = trainer.state.train_batch_size = self.args.train_batch_size
            prepared = (prepared[0], trainer.get_train_dataloader())
        # What weakens the claim is noted before the first step is recorded.
        self._weaken()
        run.facts(self.tuner.describe(trainer.model))
        to_come = self.tuner.releases_to_come()
        run.start(max_steps - trainer.state.global_step, to_come)
        parameters = trainer.model.parameters()
        self._seen.trained = sum(p.numel() for p in parameters if p.requires_grad)
        self._seen.pretraining_sources = publishing.pretraining_sources(trainer.model)
        with trainer.silent():
            for each in self.features:
                each.start(self.seen())
        return prepared

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        for each in self.features:
            optimizer = each.optimizer(optimizer, self.seen())
        return optimizer

    # -- the steps --

    def train(
        self, resume_from_checkpoint: str | bool | None, stock: Callable[..., TrainOutput]
    ) -> TrainOutput:
        trainer, run = self._trainer, self.sync()
        self._refuse_trackers()
        checkpoint = trainer._checkpoint_of(resume_from_checkpoint)
        for each in self.features:
            each.call(checkpoint, self.seen())
        trainer._evaluation.clear()  # of other weights
        if checkpoint is not None:
            trainer.card = {**publishing.given_before(checkpoint), **trainer.card}
            if (evidence := publishing.evidence_before(checkpoint)) is not None:
                run.before = evidence.facts
        run.arguments = {
            name: value for name, value in self.args.to_dict().items() if name not in _OF_A_PROCESS
        }
        self.mechanism.refuse_shards(trainer.in_shards)
        with ExitStack() as at_the_end:
            at_the_end.callback(run.stop)
            for each in self.features:
                at_the_end.callback(each.leave, self._seen)
            run.open()
            self.refuse_optimizers()
            with run.clock.part(TRAINING_TIME):
                with trainer.silent():
                    self.tuner.start(run, checkpoint)
                    trainer.train_model(run.model)
                    self.mechanism.start(checkpoint)
                with others_present():  # Trainer gathers, too
                    output = stock(checkpoint)
            if trainer.is_world_process_zero() and not checkpoint:
                run.clock.write()
            trainer.put_average()
            run.other.resting.note(trainer.model)
            with trainer.silent():
                for inside in self.inside:
                    inside.conclude()
            trainer.keep_released()
            self.write_files(trainer.folder)
            if run.book.weaknesses.refuted and trainer.is_world_process_zero():
                for folder in checkpoints(run.folder):  # saved before it was
                    restate(folder, self.statement(), run.book)
        for each in self.features:
            each.end(self.seen())
        if self._seen.loss is None:
            output = output._replace(training_loss=float("nan"))
        return output

    def step(self, model: nn.Module, inputs: Batches, stock: Callable[[], Tensor]) -> Tensor:
        """Make one step's gradient of a whole logical batch, cut into physical batches."""
        trainer, run, mechanism = self._trainer, self.sync(), self.mechanism
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):  # schedule-free optimizers
            trainer.optimizer.train()  # type: ignore[union-attr]
        with trainer.silent():
            self.tuner.before_step(run, trainer.state.global_step)
            run.begin_step()  # each call is given one Poisson sample

            with trainer.saves_what_ran(), named_memory_errors():
                clipped = mechanism.clip(inputs)  # per-example losses, norms, weights, clipped sum
                run.processes.agree("a step is clipped")
            with run.release_step() as release:  # the step is in the durable ledger from here on
                mechanism.set_gradients(clipped, release)  # + noise, / expected_batch_size: p.grad

        for observer in run.inside:
            observer.stepped(clipped.loss_sum)
        for each in self.features:
            each.released(self.seen())
        loss = self._seen.loss
        return torch.zeros((), device=self.args.device) if loss is None else loss

    def loader(self, stock: Callable[[], DataLoader]) -> DataLoader:
        self.sync()
        self._refuse_teachers()
        with self._trainer.silent():  # rows are looked over
            return self.mechanism.loader()

    def _refuse_trackers(self) -> None:
        """Raise UnsupportedArgumentError for trackers that `report_to` may not name, whoever added
        them, and for what the environment lets them send."""
        tracker_problems(self._trainer.callback_handler.callbacks).raise_all()

    def _refuse_teachers(self) -> None:
        """Raise UnsupportedArgumentError for another model that a loss of the user's own may read,
        unless it is stated to be public: it may know other rows."""
        trainer, model = self._trainer, {id(p) for p in self._trainer.model.parameters()}
        of_user, ours = [], set[str]()  # classes, and what hf_dp's own classes declare
        for each in type(trainer).__mro__[:-1]:  # the last is object
            package = each.__module__.partition(".")[0]
            if package == "hf_dp":
                ours |= inspect.get_annotations(each).keys()
            elif package != "transformers":
                of_user.append(each)
        if self.args.teacher_is_public or not of_user:
            return
        for name, value in vars(trainer).items():
            held: Any = list(value.values()) if isinstance(value, dict) else value
            several = held if isinstance(held, (list, tuple)) else [held]
            modules = [] if name in ours else [m for m in several if isinstance(m, nn.Module)]
            if any(id(parameter) not in model for m in modules for parameter in m.parameters()):
                expected = f"to be True for {of_user[0].__name__}, which has a model in `{name}`"
                why = (
                    "If that model was trained on the training rows, each row's loss would depend "
                    "on the others. If it saw only public data, say so; the card repeats it."
                )
                error = UnsupportedArgumentError
                raise invalid("teacher_is_public", False, expected, why, error)

    def operations(self, stock: Callable[[], int]) -> int:
        """Return 0: the sum over steps would reveal the sizes of the samples."""
        return 0

    def batch_size(self, stock: Callable[[], int]) -> int:
        """Return the expected logical batch."""
        return round(self.plan.expected_batch_size)

    def gradient_norm(self, stock: Callable[[], Tensor | float]) -> Tensor | float:
        """Return the norm of a step's gradient, a tensor of shape (), added up in blocks. On a CPU
        torch's float32 norm of 3e7 numbers is 0.2 % too small: ``signal_to_noise`` was 0.003 too
        low."""
        trainer = self._trainer
        if trainer.in_shards:
            return stock()
        found = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        wide = [each.reshape(1, -1).to(accumulation_dtype(each.dtype)) for each in found]
        return torch.cat([squared_norms(each).to(self.args.device) for each in wide]).sum().sqrt()

    # -- what is told and written --

    def evaluates(self, evaluation: DataSet) -> None:
        """Raise UnsupportedArgumentError for evaluation rows that are training rows."""
        self.sync().check_evaluation(evaluation)

    def search(self, stock: Callable[[], object]) -> NoReturn:
        """Refuse a search: each trial is a release on the same rows."""
        raise UnsupportedArgumentError(
            "hyperparameter_search trains on the private rows once per trial, and the epsilon of "
            "one run does not cover the search. Tune on public data; or run trials one by one, all "
            "of which count (epsilon of their ledgers' events together); or draw their number "
            "secretly and release only the best (`hf-dp sweep --private-selection`)."
        )

    def log(self, logs: dict[str, float], stock: Callable[[dict[str, float]], None]) -> None:
        """Log, without what a private run withholds, and with what the features add."""
        trainer = self._trainer
        if (known := trainer.only_known(logs)) is None:
            return
        for each in self.features:
            each.log(known, self.seen())
        trainer.withhold(known, self.args.release)
        if trainer.is_in_train:
            known |= trainer.spent()
        stock(known)

    def save(self, folder: str, stock: Callable[[], None]) -> None:
        # Before the weights: a folder must never hold one run's weights beside another's statement.
        refuse_foreign(Path(folder), self.run.book.run_id)
        self.sync().other.refuse(before_save=True)
        with self.run.book.held():  # nor older weights beside a newer statement
            stock()
            if self.args.should_save:
                self.write_beside_weights(folder)

    def write_beside_weights(self, folder: str) -> None:
        """Write what belongs beside a run's weights: selection, ledger, statement and card."""
        self.tuner.save(folder)
        self.mechanism.save(folder)
        self.run.book.go_with(folder)
        self.write_files(folder)

    def write_card(self, options: Mapping[str, object], stock: Callable[[], None]) -> None:
        """Write the card with the privacy statement, and ``privacy.json``."""
        trainer = self._trainer
        publishing.describe(trainer, publishing.in_our_names(options))
        self.write_files(trainer.folder)

    def statement(self) -> PrivacyStatement:
        run = self.sync()
        self._weaken()
        return run.statement(self.tuner.describe(self._trainer.model))

    def write_files(self, folder: str) -> None:
        """Write the card and ``privacy.json`` into a folder, in the main process."""
        trainer = self._trainer
        if trainer.is_world_process_zero():
            details = publishing.details_of(trainer, trainer.card)
            write_card(folder, self.statement(), details, self.run.book)

    def words(self) -> dict[str, object]:
        """Return what the features add to the card's table of settings."""
        return {name: value for each in self.features for name, value in each.words().items()}


class OnlyEvaluates(Training):
    """A private trainer without training rows: it has no plan, and evaluates."""

    is_private = True

    def take(self, given: Given) -> nn.Module | None:
        given.check_private(self.args)
        model = self.prepared_model(given)
        given.check_private_model(model, self.args)
        return model

    def attach(self, trainer: Publishing) -> None:
        self._trainer = trainer

    train = step = loader = search = Training.no_plan  # type: ignore[assignment]


def training_of(
    args: DPTrainingArguments, train_dataset: DataSet, peft_config: PeftConfig | None
) -> Training:
    """Return the kind of training that these arguments ask for."""
    if not args.is_private:
        return Training(args, peft_config)
    kind = OnlyEvaluates if train_dataset is None else PrivateTraining
    return kind(args, peft_config)
