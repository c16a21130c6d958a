"""``DPTrainingArguments``: ``TrainingArguments`` and what a private run needs, checked before the
run starts."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from transformers import TrainingArguments

from hf_dp._dataclasses import default_of
from hf_dp._validate import invalid, one_of
from hf_dp.accounting import ACCOUNTANTS
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.forms import MEMORY_RATIO
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.dp_fp import DP_FP, PUBLISHED
from hf_dp.plans.noised_loss import BOUND, RATIO
from hf_dp.plans.sampling import POISSON, SAMPLINGS
from hf_dp.statement.unnoised import RELEASABLE
from hf_dp.statement.weaknesses import OTHER_TRAINING
from hf_dp.trainer.adam_bc import adam_bc_problems
from hf_dp.trainer.argument_checks import (
    Problems,
    attempt,
    check_budget,
    check_mechanism,
    check_noised_loss,
    check_release,
    raise_all,
    surrounding_problems,
)
from hf_dp.trainer.argument_table import (
    ARGUMENT_TABLE,
    ArgumentRow,
    environment_problems,
    table_problems,
)
from hf_dp.trainer.audit_arguments import AuditArguments, audit_problems
from hf_dp.trainer.forward_arguments import (
    ForwardArguments,
    forward_problems,
    resolve_forward,
)
from hf_dp.trainer.launch import processes_without_device, use_cpu_without_accelerator
from hf_dp.trainer.privacy_modes import MODES
from hf_dp.trainer.text_numbers import numbers_from_text
from hf_dp.trainer.unit_arguments import UnitArguments, unit_problems

NON_PRIVATE = "non_private"
# Of the steps of a run. Private runs have few steps, and 500, transformers' default, saves none of
# them.
_SHARE = 0.1
# Memory and speed only, and read when they are used. All other arguments that transformers does not
# have are fixed once a trainer was made of them.
_FREE = frozenset(
    {
        "clipping_strategy",
        "clipping_memory_ratio",
        "max_tokens_per_physical_batch",
        "auto_physical_batch_size",
        "auto_physical_batch_length",
    }
)


@dataclass
class DPTrainingArguments(AuditArguments, UnitArguments, ForwardArguments, TrainingArguments):
    r"""
    Configuration of [`DPTrainer`]: every argument of [`~transformers.TrainingArguments`], and those
    below.

    In private modes each inherited argument works as documented, has no effect, or is refused with
    a reason: see `hf_dp.trainer.argument_table`. All problems of arguments and environment
    variables are reported at once, before anything is written, a device taken or a process group
    started; the numbers of processes and GPUs are checked next. Numbers given as text (YAML leaves
    `5e-4` a string) are converted.

    A trainer works with a copy. In that copy, `trainer.args`, what plan, checks or statement read
    cannot change; physical batches, paths, logs, evaluation and how often to save can.

    > Parameters that control the privacy budget

        privacy_mode (`str`, *optional*, defaults to `"dp_sgd"`):
            How privacy is obtained: `"dp_sgd"` (per-example clipping and Gaussian noise, with any
            optimizer), `"dp_fp"` (noise on the representation; its arguments are those of
            [`ForwardArguments`]) or `"non_private"` (the plain Trainer; privacy arguments are then
            refused).
        target_epsilon (`float`, *optional*):
            Epsilon to spend over the whole run, above 0; the noise is calibrated to it. In private
            modes give exactly one of `target_epsilon` and `noise_multiplier`.
        target_delta (`float`, *optional*):
            Delta, a probability in (0, 1). `None` means 1/(2N) for N training examples, resolved by
            `PrivacyPlan`.
        noise_multiplier (`float`, *optional*):
            Standard deviation of the noise in units of `per_example_max_grad_norm`, above 0.
        accountant (`str`, *optional*):
            Who computes epsilon: `"pld"` (unset means this), `"rdp"`, `"prv"` (bounds) or
            `"gdp_clt"` (an estimate, labelled so; not with `target_epsilon`, since calibration
            needs a bound). For DP-FP as published, which has no bound, it is `"gdp_clt"`, the
            paper's own figure.
        privacy_unit (`str`, *optional*, defaults to `"example"`):
            What is protected: `"example"`, one row of the training data (a person in k rows is
            protected k-fold weaker), or `"user"`, all rows of one user. For `"user"`, see
            [`UnitArguments`]; `expected_batch_size`, delta and all else that counts examples then
            counts users.
        neighboring_relation (`str`, *optional*, defaults to `"zero_out"`):
            Which data sets count as neighbors: one example's contribution is replaced by nothing, N
            is public.

    > Parameters that control the mechanism

        expected_batch_size (`int`, *optional*):
            Expected number of examples in a logical batch: a Poisson draw, the unit of one
            optimizer step and one noise. Required in private modes. `per_device_train_batch_size`
            is the physical batch: memory only.
        sampling (`str`, *optional*, defaults to `"poisson"`):
            Which examples join a logical batch. `"poisson"`: each with the same probability,
            independently in each step. `"random_allocation"`: each once an epoch, in a uniformly
            random step; the same noise then costs less epsilon. An epoch is paid for before its
            first step, and one that is broken off is paid for in full: save checkpoints with
            `save_strategy="epoch"`. Only `accountant="pld"` knows it.
        private_selection_mean_runs (`float`, *optional*):
            Makes this run one of a search: of a secret, random number of runs with this mean, only
            the best is released. `target_epsilon` and the stated epsilon are then those of the
            whole search. That holds only under the conditions of
            [`~hf_dp.accounting.BestOfRandomRuns`], which `hf-dp sweep --private-selection` meets.
            A single evaluation row that equals a training row is refused, and an evaluation set
            that cannot be compared. Only `accountant="rdp"` knows it.
        max_logical_batch_size (`int`, *optional*):
            Most examples of a draw that a step uses; of a larger draw a random part is left out
            (truncated Poisson sampling). Bounds the time and memory of a step; costs little epsilon
            from about 1.2 times `expected_batch_size` on, and much below. Only `accountant="pld"`
            knows it.
        per_example_max_grad_norm (`float`, *optional*, defaults to `0.1`):
            Largest L2 norm with which one example's gradient enters the sum, above 0.
        clipping (`str`, *optional*, defaults to `"flat"`):
            How a norm becomes a weight. `"flat"`: one norm over all trainable parameters, larger
            ones are scaled down to it. `"automatic"`: every example is scaled to about it (AUTO-S;
            wants a smaller learning rate where gradients are small). `"per_layer"`: each of the K
            layers to it divided by sqrt(K). The sensitivity is the same.
        clipping_strategy (`str`, *optional*):
            How clipped sums are computed, never what they are: `"book_keeping"` (one backward pass,
            all records held), `"two_pass"` (two backward passes over one graph, the least memory)
            or `"per_example"` (explicit per-example gradients, slow; to compare with). Unset means
            `"two_pass"` under gradient checkpointing, else `"book_keeping"`.
        clipping_memory_ratio (`float`, *optional*, defaults to `1.05`):
            How much memory `"book_keeping"` may take for speed, at least 1: an estimate of its peak
            relative to training without privacy. More than 1.05 pays for sequences of some hundred
            tokens. Memory and speed only.
        chunked_loss (`bool`, *optional*, defaults to `False`):
            Form a causal language model's loss by blocks of the vocabulary, so that no logits of a
            batch are held: for large vocabularies and long rows. It costs one more product of the
            head, or two where the head trains on rows with fewer positions than hidden features.
        max_tokens_per_physical_batch (`int`, *optional*):
            Largest number of tokens of a physical batch, padding included, beside
            `per_device_train_batch_size`: short examples then come in larger batches than long
            ones. Memory and speed only.
        auto_physical_batch_size (`bool`, *optional*, defaults to `False`):
            Whether to find, before training, the largest physical batch that fits into the GPU,
            and to write it into `per_device_train_batch_size` and, for text,
            `max_tokens_per_physical_batch`. It is found on made-up examples and does not depend on
            the rows. Where one of the two is given (for the former: anything but its default, 8),
            it is an upper limit.
        auto_physical_batch_length (`int`, *optional*):
            With `auto_physical_batch_size`, the number of tokens at which rows are truncated, which
            the made-up examples then have. Unset means the largest number that tokenizer and model
            take. A longer row is refused.
        max_grad_norm (`float`, *optional*):
            The Trainer's own clip, of the averaged gradient after noise. `None` becomes 0 (off) in
            private modes and 1.0 in `"non_private"`.
        adam_bc_floor (`float`, *optional*):
            Take the known noise off Adam's second moment (DP-AdamBC, Tang et al. 2024, arXiv
            2312.14334), which costs no privacy. The number is the least that is left of it, as a
            share of the noise's variance, above 0, in place of `adam_epsilon`; a smaller one allows
            larger steps, so lower the learning rate with it. Unset means plain Adam.
        clip_noised_gradient (`bool`, *optional*, defaults to `False`):
            Whether `max_grad_norm` above 0 is meant: it clips the noised gradient, which costs no
            privacy, but is easily taken for the per-example clip.

        earlier_runs (`list[str]`, *optional*, defaults to `[]`):
            Folders (or `privacy.json` files) of earlier private runs on the same rows, for example
            the one that made the base: what they released is put into this run's ledger and paid
            from the same target.
        other_training (`str`, *optional*):
            What rows any other training of the model was on: `"public_rows"`, or `"other_rows"`,
            which the statement is not about. The card repeats it. A model that anything but counted
            steps has trained is refused otherwise.
        start_over (`bool`, *optional*, defaults to `False`):
            Whether to leave the run in `output_dir` behind and begin a new one on the same rows.
            All that is in `output_dir` moves into its sub folder `_earlier-run-ID`, nothing is
            deleted, and the new run counts the old one as one of its `earlier_runs`.

    > Parameters that control the rows

        padding_values (`dict[str, float]`, *optional*, defaults to `{}`):
            By column, the value with which a column of your own is padded where rows differ in
            length. The columns of transformers are known; others are refused until declared here.
        rows_are_chunks (`bool`, *optional*, defaults to `False`):
            Whether a row is a piece of a longer text. Then a piece is what is protected, and the
            card says so.
        adapter_init_data_is_public (`bool`, *optional*, defaults to `False`):
            Whether the data from which an adapter's initial weights were computed (EVA, CorDA,
            LoRA-GA), or by which another run selected what it trains (`FrostConfig`), is public.
            Such an adapter is refused otherwise.
        evaluate_on_training_rows (`bool`, *optional*, defaults to `False`):
            Whether evaluation sets may hold rows of the training set. Their metrics are then
            released without noise, and the card says so.

    > Parameters that control what leaves the run

        noised_loss_budget_ratio (`float`, *optional*):
            Only for `"dp_sgd"`, together with `noised_loss_bound`: releases the training loss of
            each step with noise, as `noised_loss` in the logs, and epsilon covers it. The share of
            the privacy budget, in (0, 1), that it gets; the gradient's noise grows by the factor
            1/sqrt(1 - share). A hundredth is enough for a curve. Off when unset.
        noised_loss_bound (`float`, *optional*):
            With `noised_loss_budget_ratio`: each example's loss is clipped to [0, bound] before the
            losses are added up and noised. Above 0, and public: choose it without looking at the
            rows, for example twice the loss of a guess (log of the number of classes).
        release (`list[str]`, *optional*, defaults to `[]`):
            Names of un-noised quantities to log and publish anyway: `"training_loss"`, or, for
            `"dp_sgd"`, `"clipped_gradient_norm"` (the norm of each logged step's clipped mean
            before noise). Epsilon does not cover them and the card says so. For experiments on
            public rows.
        learning_rate (`float`, *optional*):
            Of the optimizer. Unset means 5e-5, transformers' default, and 5e-6 for DP-FP as
            published, the paper's.
        save_steps (`float`, *optional*, defaults to `0.1`):
            How often to save a checkpoint: a number of steps, or below 1 a share of them all.
            Unset, and with `load_best_model_at_end`, it is as often as `eval_steps` says.
        save_total_limit (`int`, *optional*, defaults to `2`):
            How many checkpoints to keep; `None` for all.
        logging_steps (`float`, *optional*, defaults to `0.1`):
            How often to log: a number of steps, or below 1 a share of them all.
        hub_strategy (`str`, *optional*, defaults to `"end"`):
            When to push to the Hub: when the model is saved, or with every checkpoint, too. Each
            push is the noised weights with their card. `"checkpoint"` and `"all_checkpoints"` are
            refused in private modes.

    > Parameters that control tests

        insecure_seed (`int`, *optional*):
            Makes noise and draws reproducible. For tests only: whoever knows the seed can remove
            the noise, and the card says that the run is not private.

    > [!NOTE]
    > Defaults that differ from [`~transformers.TrainingArguments`]:
    > - `max_grad_norm`: `None` instead of `1.0`; it becomes 0 in private modes and 1.0 in
    >   `"non_private"`.
    > - `hub_strategy`: `"end"` instead of `"every_save"`.
    > - `learning_rate`: `None` instead of `5e-5`; it becomes that, and 5e-6 for DP-FP as published.
    > - `save_steps` and `logging_steps`: `0.1`, a tenth of the steps, instead of `500`, which is
    >   more than many private runs have.
    > - `save_total_limit`: `2` instead of `None`.
    > - `average_tokens_across_devices`: always `False` in private modes instead of `True`.

    Raises:
        UnsupportedArgumentError: an argument that transformers knows would break the privacy
            statement.
        InvalidArgumentError: a value is out of range, missing or contradicts another one.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "padding_values"]
    # The class whose arguments a private run judges, and rows for those of them that
    # TrainingArguments does not have.
    _INHERITED: typing.ClassVar[type[TrainingArguments]] = TrainingArguments
    _ROWS: typing.ClassVar[Mapping[str, ArgumentRow]] = MappingProxyType({})

    # --- privacy budget ---
    privacy_mode: str = field(
        default="dp_sgd",
        metadata={
            "help": f"How privacy is obtained: one of {', '.join((NON_PRIVATE, *MODES))}, or a "
            "mode that register_mode added."
        },
    )
    target_epsilon: float | None = field(
        default=None,
        metadata={
            "help": "Epsilon to spend over the whole run, above 0; the noise is calibrated to it. "
            "In private modes give exactly one of target_epsilon and noise_multiplier."
        },
    )
    target_delta: float | None = field(
        default=None,
        metadata={
            "help": "Delta, a probability in (0, 1). Unset means 1/(2N) for N training examples."
        },
    )
    noise_multiplier: float | None = field(
        default=None,
        metadata={
            "help": "Standard deviation of the noise in units of per_example_max_grad_norm, above "
            "0."
        },
    )
    accountant: str | None = field(
        default=None,
        metadata={
            "help": f"Who computes epsilon: one of {', '.join(ACCOUNTANTS)}. Unset means pld. "
            "gdp_clt is an estimate, the others are bounds."
        },
    )
    privacy_unit: str = field(
        default="example",
        metadata={
            "help": "What is protected: example (one row of the training data) or user (all rows "
            "of one user; needs privacy_unit_column)."
        },
    )
    neighboring_relation: str = field(
        default="zero_out",
        metadata={
            "help": "Which data sets count as neighbors: zero_out (one example's contribution is "
            "replaced by nothing)."
        },
    )

    # --- mechanism ---
    expected_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Expected number of examples in a logical batch (one optimizer step). Required "
            "in private modes. per_device_train_batch_size is the physical batch: memory only."
        },
    )
    sampling: str = field(
        default=POISSON,
        metadata={
            "help": f"Which examples join a logical batch: {' or '.join(SAMPLINGS)} (each once an "
            "epoch, in a random step: less epsilon for the same noise)."
        },
    )
    private_selection_mean_runs: float | None = field(
        default=None,
        metadata={
            "help": "Expected number of runs of a search that releases only its best run, this "
            "one; epsilon is the search's. Use `hf-dp sweep --private-selection`."
        },
    )
    max_logical_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Most examples of a draw that a step uses; of a larger draw a random part is "
            "left out. Unset: no limit. Only accountant pld knows it."
        },
    )
    per_example_max_grad_norm: float = field(
        default=0.1,
        metadata={
            "help": "Largest L2 norm with which one example's gradient enters the sum, above 0."
        },
    )
    clipping: str = field(
        default="flat",
        metadata={
            "help": "How a norm becomes a weight: flat (one norm over all trainable parameters), "
            "automatic (AUTO-S: every example is scaled) or per_layer (each of K layers to C / "
            "sqrt(K))."
        },
    )
    clipping_strategy: str | None = field(
        default=None,
        metadata={
            "help": "How clipped sums are computed, never what they are: one of "
            f"{', '.join(STRATEGIES)}. Unset means two_pass under gradient checkpointing, else "
            "book_keeping."
        },
    )
    clipping_memory_ratio: float = field(
        default=MEMORY_RATIO,
        metadata={
            "help": "How much memory book_keeping may take for speed, at least 1: an estimate of "
            "its peak relative to training without privacy."
        },
    )
    chunked_loss: bool = field(
        default=False,
        metadata={
            "help": "Form a causal language model's loss by blocks of the vocabulary, so that no "
            "logits of a batch are held."
        },
    )
    max_tokens_per_physical_batch: int | None = field(
        default=None,
        metadata={
            "help": "Largest number of tokens of a physical batch, padding included, beside "
            "per_device_train_batch_size."
        },
    )
    auto_physical_batch_size: bool = field(
        default=False,
        metadata={
            "help": "Whether to find the largest physical batch that fits into the GPU, on "
            "made-up examples. Sizes that are given are upper limits."
        },
    )
    auto_physical_batch_length: int | None = field(
        default=None,
        metadata={
            "help": "With auto_physical_batch_size, the number of tokens at which rows are "
            "truncated. Unset means what tokenizer and model take at most."
        },
    )
    max_grad_norm: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "The Trainer's own clip, of the averaged gradient after noise. Unset means 0 "
            "(off) in private modes and 1.0 in non_private."
        },
    )
    adam_bc_floor: float | None = field(
        default=None,
        metadata={
            "help": "Take the known noise off Adam's second moment (DP-AdamBC); the least that is "
            "left, as a share of the noise's variance. Unset: plain Adam."
        },
    )
    clip_noised_gradient: bool = field(
        default=False,
        metadata={
            "help": "Whether max_grad_norm above 0 is meant: it clips the gradient after noise."
        },
    )

    earlier_runs: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Folders of earlier private runs on the same rows: their releases count in "
            "this run's ledger and target."
        },
    )
    other_training: str | None = field(
        default=None,
        metadata={
            "help": "What rows other training of the model was on, which no ledger counts: "
            f"{' or '.join(OTHER_TRAINING)}. The card repeats it."
        },
    )
    start_over: bool = field(
        default=False,
        metadata={
            "help": "Leave the run in output_dir behind and begin a new one: its files move into a "
            "sub folder, and both runs count."
        },
    )

    # --- rows ---
    padding_values: dict[str, float] = field(
        default_factory=dict,
        metadata={
            "help": "Fill values, by name, of columns of your own whose rows differ in length."
        },
    )
    rows_are_chunks: bool = field(
        default=False,
        metadata={
            "help": "Whether a row is a piece of a longer text: a piece is then what is protected."
        },
    )
    adapter_init_data_is_public: bool = field(
        default=False,
        metadata={
            "help": "Whether the data that an adapter was initialized from (EVA, CorDA, LoRA-GA), "
            "or that selected what it trains (FROST), is public."
        },
    )
    evaluate_on_training_rows: bool = field(
        default=False,
        metadata={
            "help": "Whether evaluation sets may hold training rows; their metrics are then "
            "released without noise."
        },
    )

    # --- what leaves the run ---
    noised_loss_budget_ratio: float | None = field(
        default=None,
        metadata={
            "help": "Only for dp_sgd, with noised_loss_bound: the share of the privacy budget, in "
            "(0, 1), for a noised training loss in the logs. Unset: none is released."
        },
    )
    noised_loss_bound: float | None = field(
        default=None,
        metadata={
            "help": "With noised_loss_budget_ratio: each example's loss is clipped to [0, bound]. "
            "Above 0, and public."
        },
    )
    release: list[str] = field(
        default_factory=list,
        metadata={
            "help": f"Un-noised quantities to log and publish anyway: {', '.join(RELEASABLE)}. "
            "Epsilon does not cover them."
        },
    )
    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "Of the optimizer. Unset means 5e-5, and 5e-6 for DP-FP as published."},
    )
    save_steps: float = field(
        default=_SHARE,
        metadata={
            "help": "How often to save a checkpoint: a number of steps, or below 1 a share of them."
        },
    )
    save_total_limit: int | None = field(
        default=2, metadata={"help": "How many checkpoints to keep; None for all."}
    )
    logging_steps: float = field(
        default=_SHARE,
        metadata={"help": "How often to log: a number of steps, or below 1 a share of them."},
    )
    hub_strategy: str = field(
        default="end",
        metadata={
            "help": "When to push to the Hub: end or every_save; checkpoint and all_checkpoints "
            "only in non_private."
        },
    )

    # --- tests ---
    insecure_seed: int | None = field(
        default=None,
        metadata={
            "help": "Tests only: makes noise and draws reproducible; the run is then not private."
        },
    )

    def __post_init__(self) -> None:
        problems = numbers_from_text(self)
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
        use_cpu_without_accelerator(self)
        if (excess := processes_without_device(self)) is not None:
            problems["LOCAL_RANK"] = excess
        # Settings first: `super().__post_init__` takes devices, starts process groups, writes
        # environment variables.
        raise_all({**self._setting_problems(), **problems})
        every = self.eval_steps or 0.0
        if self.load_best_model_at_end and self.save_steps == _SHARE and every >= 1:
            self.save_steps = every  # Trainer wants a multiple of it
        super().__post_init__()
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # as with use_cpu; torch would warn at every loader
        raise_all(surrounding_problems(self))

    @property
    def is_private(self) -> bool:
        """Whether this run claims an epsilon."""
        return self.privacy_mode != NON_PRIVATE

    @property
    def is_published_dp_fp(self) -> bool:
        """Whether no epsilon is established for what this run does."""
        return self.privacy_mode == DP_FP and self.dp_fp_variant == PUBLISHED

    def __getstate__(self) -> dict[str, typing.Any]:
        """Leave the token out: `training_args.bin`, in every checkpoint, is a pickle of this.

        A copy belongs to no trainer, so it may be changed.
        """
        return {**vars(self), "hub_token": None, "_fixed": {}}

    def __setattr__(self, name: str, value: typing.Any) -> None:
        """Set an argument. Raises: UnsupportedArgumentError for one that is fixed."""
        fixed = vars(self).get("_fixed", {})
        if name in fixed:
            _refuse_change(name, value, fixed[name])
        super().__setattr__(name, value)

    def fix(self) -> dict[str, typing.Any]:
        """Fix what plan, checks and statement of a trainer read, and return it, by name."""
        ours = next(one for one in type(self).__mro__ if one.__module__.startswith("hf_dp."))
        rows = {**ARGUMENT_TABLE, **self._ROWS}.items()
        free = _FREE | {name for name, row in rows if row.free or not self.is_private}
        names = [field.name for field in dataclasses.fields(ours) if field.name not in free]
        self._fixed = {name: copy.deepcopy(getattr(self, name)) for name in names}
        return self._fixed

    def refuse_changes(self, fixed: dict[str, typing.Any]) -> None:
        """Raise UnsupportedArgumentError where these, or what they hold, are not what was fixed."""
        for name, value in fixed.items():
            _refuse_change(name, getattr(self, name), value)

    def check(self) -> None:
        """Repeat all checks, since arguments can be assigned after construction.

        Raises:
            UnsupportedArgumentError, InvalidArgumentError: as on construction.
        """
        raise_all({**self._setting_problems(), **surrounding_problems(self)})

    def _setting_problems(self) -> Problems:
        """Return what is wrong with the arguments and the environment variables, by name."""
        problems: Problems = {}
        attempt(self, problems, "privacy_mode", one_of, (NON_PRIVATE, *MODES))
        if problems:  # which checks apply is not known
            return problems
        if not self.is_private:
            return self._ignored_privacy_arguments()
        check_budget(self, problems)
        check_mechanism(self, problems)
        check_release(self, problems)
        check_noised_loss(self, problems)
        forward_problems(self, partial(attempt, self), problems)
        problems |= {**unit_problems(self), **audit_problems(self), **adam_bc_problems(self)}
        inherited = table_problems(self, self._INHERITED, self._ROWS)
        return {**inherited, **environment_problems(self.report_to), **problems}

    def _ignored_privacy_arguments(self) -> Problems:
        """Return the privacy arguments that were set although the mode does not read them."""
        moves = {
            "expected_batch_size": "Use `per_device_train_batch_size` and "
            "`gradient_accumulation_steps`",
            **dict.fromkeys((BOUND, RATIO), "Its logs hold the loss as it is: remove it"),
        }
        problems: Problems = {}
        of_forward = {each.name for each in dataclasses.fields(ForwardArguments)}
        for own in _own_fields():
            value, default = getattr(self, own.name), default_of(own)
            mode = DP_FP if own.name in of_forward else "dp_sgd"
            if value != default:
                problems[own.name] = invalid(
                    own.name,
                    value,
                    f"to be left at {default!r} when privacy_mode='non_private'",
                    "That mode has no epsilon: it clips nothing per example and adds no noise. "
                    f"{moves.get(own.name, 'Remove it')}, or set privacy_mode={mode!r}.",
                )
        return problems


def _refuse_change(name: str, value: object, fixed: object) -> None:
    if value != fixed:
        raise invalid(
            name,
            value,
            f"to stay as it was when the trainer was created, {fixed!r}",
            "Plan, checks and statement of this trainer were made for that. Set it in arguments of "
            "your own, and create a new DPTrainer of them with a new output_dir.",
            UnsupportedArgumentError,
        )


def _own_fields() -> list[dataclasses.Field[typing.Any]]:
    """Return the fields that transformers does not have, except the mode itself."""
    inherited = {inherited.name for inherited in dataclasses.fields(TrainingArguments)}
    own = dataclasses.fields(DPTrainingArguments)
    return [one for one in own if one.name not in inherited and one.name != "privacy_mode"]
