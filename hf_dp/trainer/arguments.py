"""``DPTrainingArguments``: ``TrainingArguments`` and what a private run needs, checked before the
run starts; and the plan and the options of that run."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from transformers import TrainingArguments

from hf_dp._arguments import (
    ArgumentGroup,
    Need,
    Problems,
    argument,
    check_groups,
    documented,
    numbers_from_text,
    own_fields,
)
from hf_dp._validate import invalid, one_of
from hf_dp.batches.loader import BatchOptions
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.features import problems_of
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.run.options import RunOptions
from hf_dp.trainer import launch
from hf_dp.trainer import privacy_arguments as privacy
from hf_dp.trainer.forward_arguments import ForwardArguments, resolve_forward
from hf_dp.trainer.inherited import (
    FREE,
    Refusal,
    environment_problems,
    inherited_problems,
    settle_checkpointing,
)
from hf_dp.trainer.row_arguments import AuditArguments, RowArguments, UnitArguments

# Of the steps of a run. Private runs have few steps, and 500, transformers' default, saves none of
# them.
_SHARE = 0.1


@dataclass
class OtherDefaults(ArgumentGroup):
    """Arguments of [`~transformers.TrainingArguments`] with other defaults."""

    learning_rate: float | None = argument(
        None, "Of the optimizer. Unset means 5e-5, or 5e-6 for DP-FP as published, as in the paper."
    )
    save_steps: float = argument(
        _SHARE,
        "How often to save a checkpoint: a number of steps, or if below 1 a share of all steps. "
        "Unset, with load_best_model_at_end, it is as often as eval_steps says.",
    )
    save_total_limit: int | None = argument(2, "How many checkpoints to keep; None for all.")
    logging_steps: float = argument(
        _SHARE, "How often to log: a number of steps, or if below 1 a share of all steps."
    )
    hub_strategy: str = argument(
        "end",
        "When to push to the Hub: end (when the model is saved) or every_save (also with every "
        "checkpoint). Each push is the noised weights with their card. checkpoint and "
        "all_checkpoints are for non_private only.",
    )


GROUPS: tuple[type[ArgumentGroup], ...] = (
    privacy.BudgetArguments,
    UnitArguments,
    privacy.StepArguments,
    RowArguments,
    privacy.ReleaseArguments,
    AuditArguments,
    privacy.MemoryArguments,
    ForwardArguments,
)
_SHARED = {"privacy_mode", "max_grad_norm"}  # which are read without privacy, too
_OWN = [field.name for group in GROUPS for field in own_fields(group) if field.name not in _SHARED]
# Read when they are used. All other arguments that transformers does not have are fixed once a
# trainer was made of them.
OWN_FREE = {field.name for field in own_fields(privacy.MemoryArguments)} - {"chunked_loss"}
_WITHOUT_PRIVACY = Need(
    " ".join(_OWN),
    "privacy_mode",
    lambda mode: mode != privacy.NON_PRIVATE,
    "It clips no example and adds no noise, and its batch is `per_device_train_batch_size` times "
    "`gradient_accumulation_steps`. Remove it, or set another privacy_mode.",
)


@dataclass
class DPTrainingArguments(  # type: ignore[misc]  # learning_rate, max_grad_norm: float
    privacy.BudgetArguments,
    UnitArguments,
    privacy.StepArguments,
    RowArguments,
    privacy.ReleaseArguments,
    AuditArguments,
    privacy.MemoryArguments,
    ForwardArguments,
    OtherDefaults,
    TrainingArguments,
):
    """
    Configuration of [`DPTrainer`]: every argument of [`~transformers.TrainingArguments`], and those
    below.

    In private modes each inherited argument works as documented, has no effect, or is refused with
    a reason: see `hf_dp.trainer.inherited`. All problems of arguments and environment variables are
    reported at once, before anything is written, a device taken or a process group started; the
    numbers of processes and GPUs are checked next. Numbers given as text (YAML leaves `5e-4` a
    string) are converted. `average_tokens_across_devices` is always `False` in private modes.

    A trainer works with a copy. In that copy, `trainer.args`, what plan, checks or statement read
    cannot change; physical batches, paths, logs, evaluation and how often to save can.

    %s

    Raises:
        UnsupportedArgumentError: an argument that transformers knows would break the privacy
            statement.
        InvalidArgumentError: a value is out of range, missing or contradicts another one.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "padding_values"]
    # The class whose arguments a private run judges, and what is known of those of them that
    # TrainingArguments does not have. What is refused there is refused without privacy, too.
    _INHERITED: ClassVar[type[TrainingArguments]] = TrainingArguments
    _WORK: ClassVar[frozenset[str]] = frozenset()
    _FREE: ClassVar[frozenset[str]] = frozenset()
    _REFUSED: ClassVar[Mapping[str, Refusal]] = {}

    def __post_init__(self) -> None:
        self.settle()
        if self.load_best_model_at_end and self.save_steps == _SHARE:
            # Trainer wants a multiple of it.
            self.save_steps = self.eval_steps or self.logging_steps
        super().__post_init__()
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # as with use_cpu; torch would warn at every loader
        if self.is_private:
            launch.launch_problems(self).raise_all()

    def settle(self) -> None:
        """Fill in what is unset and check all settings, before a device or process is touched.

        Raises: UnsupportedArgumentError, InvalidArgumentError.
        """
        unread = numbers_from_text(self)
        if self.max_grad_norm is None:
            self.max_grad_norm = 0.0 if self.is_private else 1.0
        if self.is_private:
            # True would divide every example's loss by the number of label tokens in the whole
            # logical batch.
            self.average_tokens_across_devices = False
            if self.privacy_mode == DP_FP:
                resolve_forward(self)
            if self.accountant is None:
                self.accountant = "gdp_clt" if self.is_published_dp_fp else "pld"
        if self.learning_rate is None:
            self.learning_rate = 5e-5
        launch.use_cpu_without_accelerator(self)
        if (excess := launch.processes_without_device(self)) is not None:
            unread["LOCAL_RANK"] = excess
        # Settings first: `super().__post_init__` takes devices, starts process groups, writes
        # environment variables.
        unread.join(self._setting_problems()).raise_all()

    @classmethod
    def own_copy(cls, args: object) -> Self:
        """Return a checked copy of the arguments: steps are written into it, and the caller's stay
        free and may serve another run.

        Raises: InvalidArgumentError for arguments of another class; and as :meth:`check`.
        """
        if not isinstance(args, cls):
            given = type(args).__name__
            theirs = "TrainingArguments" if args is None else given
            raise invalid(
                "args",
                given,
                f"to be {cls.__name__}",
                f"Replace {theirs}(...) by {cls.__name__}(..., target_epsilon=3, "
                "expected_batch_size=1024).",
            )
        copied = copy.copy(args)
        for name, value in vars(args).items():
            if isinstance(value, (list, dict)):  # which the caller may change in place
                setattr(copied, name, copy.deepcopy(value))
        copied.hub_token = args.hub_token  # a copy, like a pickle, goes without it
        copied.check()
        return copied

    def __getstate__(self) -> dict[str, object]:
        """Leave the token out: `training_args.bin` is a pickle of this. A copy may be changed."""
        return {**vars(self), "hub_token": None, "_fixed": {}}

    def __setattr__(self, name: str, value: object) -> None:
        """Set an argument. Raises: UnsupportedArgumentError for one that is fixed."""
        fixed = vars(self).get("_fixed", {})
        if name in fixed:
            _refuse_change(name, value, fixed[name])
        super().__setattr__(name, value)

    def fix(self) -> dict[str, object]:
        """Fix what plan, checks and statement of a trainer read, and return it, by name."""
        ours = next(one for one in type(self).__mro__ if one.__module__.startswith("hf_dp."))
        theirs = {field.name for field in dataclasses.fields(self._INHERITED)}
        free = OWN_FREE | (FREE | self._FREE if self.is_private else theirs)
        names = [field.name for field in dataclasses.fields(ours) if field.name not in free]
        self._fixed = {name: copy.deepcopy(getattr(self, name)) for name in names}
        return self._fixed

    def refuse_changes(self, fixed: Mapping[str, object]) -> None:
        """Raise UnsupportedArgumentError where these, or what they hold, are not what was fixed."""
        for name, value in fixed.items():
            _refuse_change(name, getattr(self, name), value)

    def check(self) -> None:
        """Repeat all checks, since arguments can be assigned after construction.

        Raises: UnsupportedArgumentError, InvalidArgumentError, as on construction.
        """
        found = self._setting_problems()
        if self.is_private:
            found.join(launch.launch_problems(self))
        found.raise_all()

    def _setting_problems(self) -> Problems:
        """Return what is wrong with the arguments and the environment variables, by name."""
        found = Problems(self)
        for name, refusal in self._REFUSED.items():
            refusal.note(name, found, f"with {type(self).__name__}")
        found.attempt("privacy_mode", one_of, (privacy.NON_PRIVATE, *privacy.MODES))
        if "privacy_mode" in found:  # which checks apply is not known
            return found
        if not self.is_private:
            _WITHOUT_PRIVACY.note(self, found)
            return found
        check_groups(GROUPS, self, found)
        problems_of(self, found)
        settle_checkpointing(self)
        known = self._WORK | self._FREE | self._REFUSED.keys()
        inherited = inherited_problems(self, self._INHERITED, known)
        return found.join(inherited).join(environment_problems(self.report_to))


# Without indentation: since Python 3.13 docstrings have none.
DPTrainingArguments.__doc__ = inspect.cleandoc(DPTrainingArguments.__doc__ or "").replace(
    "%s", documented((*GROUPS, OtherDefaults))
)


def _refuse_change(name: str, value: object, fixed: object) -> None:
    if value != fixed:
        raise invalid(
            name,
            value,
            f"to stay as it was when the trainer was created, {fixed!r}",
            "Set it in new arguments, and create a new DPTrainer from them with a new output_dir.",
            UnsupportedArgumentError,
        )


def options_of(args: DPTrainingArguments) -> RunOptions:
    """Return the options of a run, which do not change what epsilon means."""
    known = RunOptions.__dataclass_fields__.keys() & vars(args).keys()
    of_loader = [n for n in BatchOptions.__dataclass_fields__ if hasattr(args, f"dataloader_{n}")]
    batches = BatchOptions(
        physical_batch_size=args.per_device_train_batch_size,
        max_tokens=args.max_tokens_per_physical_batch,
        shapes=args.shapes,
        quiet=bool(args.disable_tqdm),
        **{name: getattr(args, f"dataloader_{name}") for name in of_loader},
    )
    return RunOptions(batches, **{name: getattr(args, name) for name in known})
