"""``DPGRPOTrainer``: private group relative policy optimization, a prompt with all its completions
at a time.

**One clip bounds a prompt.** A drawn prompt enters a step as G completions that the model writes to
it, its views (:mod:`hf_dp.batches.views`): the mean of their losses has one gradient, which is
clipped once. The proof there holds with r, what is random in a row's own views, for the secret
stream that writes the completions and that reward functions see. What else is in the prompt's
gradient is a function of the prompt's row, of r, and of what was released before:

- *The completions.* Each prompt is alone in its batch, whose shape is G times its own length, and
  has a stream of its own. Beside neighbors, kernels round differently by 1e-7. That may flip a
  sampled token, and then the gradient of the neighbor is another one, up to 2 C away.
- *The rewards.* Functions are called with one prompt's completions, as fresh copies
  (:mod:`hf_dp.batches.isolation`), so none remembers a prompt.
- *The advantages*, rewards less their mean over the prompt's own completions, over their own
  standard deviation (Shao et al. 2024, arXiv 2402.03300, section 4.1).
- *The divisor*: the number of a completion's own tokens, or ``max_completion_length``.

**Completions that cannot be scored do not end the run**, since an error would tell that their
prompt was drawn. The prompt keeps its place and adds exactly 0, as a bad row does
(:mod:`hf_dp.batches.when_drawn`, which has the proof).

**A draw is used once.** Each step draws, writes and updates, so that the ratio of old and new
probabilities is 1, in value, and clipping it does nothing.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    EvalPrediction,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput

from hf_dp._arguments import Problems
from hf_dp._validate import invalid
from hf_dp.batches.isolation import Isolated
from hf_dp.batches.loader import Masked, unheard
from hf_dp.batches.structure import Batch, Example, Row
from hf_dp.batches.units import UnitBatch
from hf_dp.batches.when_drawn import not_of_the_row
from hf_dp.errors import DataError, UnsupportedArgumentError, UnsupportedModelError
from hf_dp.losses import IGNORED_LABEL, widened, with_position_ids
from hf_dp.overlap import TrainingRows
from hf_dp.plans.units import USER
from hf_dp.run.checks import refuse_rows_in_code
from hf_dp.run.physical_size import named_memory_errors
from hf_dp.run.synthetic import synthetic_examples
from hf_dp.trainer import trl_preparation as trl
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.inherited import Refusal, only
from hf_dp.tuners.methods import tuner_for

RewardFunction = Callable[..., Sequence[float | None]]

# The prompt as text, by which equal prompts are one unit; as it was given; and the whole row.
_PROMPT, _GIVEN, _ROW = "prompt", "given_prompt", "pickled_row"
_TOKENS = ("input_ids", "attention_mask", "labels")  # (b, T) each
_ADVANTAGES, _REFERENCE = "advantages", "reference"
_TRIED = 64  # rows on which reward functions are tried before the first draw
_NONE = float("nan")  # the reward of a completion that a function does not judge

# Some of these are read only with what is refused. `epsilon` and `delta` clip a ratio that is 1.
GRPO_WORKS = frozenset(
    """model_init_kwargs trust_remote_code disable_dropout num_generations_eval
    max_completion_length ds3_gather_for_generation shuffle_dataset temperature top_p top_k
    min_p chat_template_kwargs repetition_penalty beta epsilon delta epsilon_high reward_weights
    mask_truncated_completions use_bias_correction_kl vllm_mode vllm_model_impl
    vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
    vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_cap sapo_temperature_neg
    sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
    ref_model_mixup_alpha ref_model_sync_steps entropy_coef_min entropy_coef_max
    entropy_coef_delta entropy_target max_tool_calling_iterations log_multimodal
    num_completions_to_print transformers_continuous_batching_config""".split()
)
_ONE_UNIT = "One prompt with all its completions is what is protected. Remove it."
_SAME_DRAW = "A draw would be used more than once, which epsilon does not count. Remove it."
_WRITES_ALONE = (
    "A prompt's completions are written in a batch of their own, by generate(). Remove it."
)
# Names in `generation_kwargs` that act on one completion's next token alone.
_OF_A_TOKEN = frozenset(
    """typical_p top_h epsilon_cutoff eta_cutoff no_repeat_ngram_size bad_words_ids min_new_tokens
    suppress_tokens begin_suppress_tokens sequence_bias renormalize_logits
    exponential_decay_length_penalty""".split()
)


def _names_of(settings: object) -> set[str]:
    """Return the names in a dict, or in JSON text as the command line has it."""
    with suppress(ValueError):
        settings = json.loads(settings) if isinstance(settings, str) else settings
    return (
        {"no dict"} if isinstance(settings, str) else set(cast(dict[str, object], settings) or ())
    )


_SHOWS = "Completions are not released: nobody noises them. Remove it."
_BY_ENTROPY = "Entropies of other prompts' tokens would enter. Remove it."
GRPO_REFUSED: Mapping[str, Refusal] = {
    "privacy_mode": only("Without privacy, use trl.GRPOTrainer.", "dp_sgd"),
    "privacy_unit": only(_ONE_UNIT, USER),
    "privacy_unit_column": only(_ONE_UNIT, _PROMPT),
    "max_rows_per_unit": only(_ONE_UNIT, 1),
    "unit_sampling": only(_ONE_UNIT, None, "users"),
    "max_tokens_per_physical_batch": only(
        "It would cut the completions of a prompt apart. Set `per_device_train_batch_size`.", None
    ),
    "noised_loss_bound": only(
        "The value of this loss says nothing about rewards. Evaluate on other prompts.", None
    ),
    "num_generations": Refusal(
        lambda count: isinstance(count, int) and count >= 2,
        "to be 2 or more",
        "Advantages compare the completions of a prompt with each other.",
    ),
    "loss_type": only(
        "Other losses divide or weight by the tokens of a batch, or need old probabilities. Set "
        '"dr_grpo", which divides by max_completion_length.',
        "dr_grpo",
        "grpo",
    ),
    "scale_rewards": only(
        "The standard deviation over a batch depends on other prompts, too. Set 'group' or 'none'.",
        "group",
        "none",
        True,
        False,
    ),
    "multi_objective_aggregation": only(
        "The other one normalizes advantages over the batch. Use `reward_weights`.",
        "sum_then_normalize",
    ),
    "importance_sampling_level": only(
        "With one step for each draw every ratio is 1. Remove it.", "token"
    ),
    "num_iterations": only(_SAME_DRAW, 1),
    "steps_per_generation": only(_SAME_DRAW, None, 1),
    "generation_batch_size": only(
        "A step writes the completions of its own draw. Set `expected_batch_size`.", None
    ),
    "top_entropy_quantile": only("The quantile is over the tokens of a batch. Remove it.", 1.0),
    "entropy_coef": only(_BY_ENTROPY, 0),
    "use_adaptive_entropy": only(_BY_ENTROPY, False),
    "off_policy_mask_threshold": only(
        "With one step for each draw no completion is off the policy. Remove it.", None
    ),
    "sync_ref_model": only("The reference is a frozen model. Remove it.", False),
    "use_vllm": only(_WRITES_ALONE, False),
    "use_transformers_continuous_batching": only(_WRITES_ALONE, False),
    "use_transformers_paged": only(_WRITES_ALONE, False),
    "cache_implementation": only(
        "A static cache is as long as the longest prompt so far required. Remove it.",
        None,
        "dynamic",
    ),
    "generation_kwargs": Refusal(
        lambda given: _names_of(given) <= _OF_A_TOKEN,
        f"to be a dict with names among {', '.join(sorted(_OF_A_TOKEN))}",
        "Others may carry something from prompt to prompt, or are not known here. Remove them.",
    ),
    "pad_to_multiple_of": only(_WRITES_ALONE, "auto", None),
    "cast_lm_head_to_fp32": only(
        "It replaces the head's forward, which the engine must see. Load the model in float32.",
        False,
    ),
    "router_aux_loss_coef": trl.LM_REFUSED["router_aux_loss_coef"],
    "log_completions": only(_SHOWS, False),
    "log_unique_prompts": only(_SHOWS, False),
    "log_completions_hub_repo": only(_SHOWS, None),
}
# Keywords of TRL's trainer that are refused.
_NOT_TAKEN = {
    "tools": "what they return would become part of completions.",
    "environment_factory": "environments persist from prompt to prompt.",
    "rollout_func": "completions are written by generate(), one prompt at a time.",
    "reward_processing_classes": "a function tokenizes for itself.",
}


@dataclass
class DPGRPOConfig(DPTrainingArguments, trl.GRPOConfig):  # type: ignore[misc]  # learning_rate
    r"""
    Configuration of [`DPGRPOTrainer`]: the arguments of [`DPTrainingArguments`] and of
    [`~trl.GRPOConfig`].

    Arguments of [`~transformers.TrainingArguments`] have the defaults of [`DPTrainingArguments`],
    not TRL's. `loss_type` is `"dr_grpo"` unless it is set: TRL's default, `"dapo"`, divides by
    the tokens of all completions of a batch. `metric_for_best_model`, where it is read, is
    `"reward"` unless it is set. `expected_batch_size` counts prompts, and
    `per_device_train_batch_size` completions; it is a multiple of `num_generations`.

    Raises:
        UnsupportedArgumentError, InvalidArgumentError: as [`DPTrainingArguments`].
    """

    loss_type: str = "dr_grpo"
    privacy_unit: str = USER
    privacy_unit_column: str | None = _PROMPT
    privacy_unit_name: str | None = "prompt with all its completions"
    max_rows_per_unit: int | None = 1

    views_are_completions: ClassVar[bool] = True
    _VALID_DICT_FIELDS = list(
        dict.fromkeys([*DPTrainingArguments._VALID_DICT_FIELDS, *trl.GRPOConfig._VALID_DICT_FIELDS])
    )
    _INHERITED: ClassVar[type[TrainingArguments]] = trl.GRPOConfig
    _WORK: ClassVar[frozenset[str]] = GRPO_WORKS
    _REFUSED: ClassVar[Mapping[str, Refusal]] = GRPO_REFUSED

    def __post_init__(self) -> None:
        by_metric = self.load_best_model_at_end or self.save_strategy == "best"
        by_metric |= self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        if by_metric and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"  # an evaluation has no loss
        super().__post_init__()
        self.views_per_example = self.num_generations or 0
        # TRL fills them in from the physical batch, which may change.
        self.generation_batch_size = self.steps_per_generation = None

    def _setting_problems(self) -> Problems:
        found, count = super()._setting_problems(), self.num_generations
        if "num_generations" in found or not isinstance(count, int):
            return found
        if self.views_per_example not in (1, count):
            why = "Its completions are a prompt's views. Remove it."
            found.refuse("views_per_example", f"to be num_generations, {count}", why)
        if self.per_device_train_batch_size % count:
            found.refuse(
                "per_device_train_batch_size",
                f"to be a multiple of num_generations, {count}",
                "It counts completions, and the completions of a prompt stay together.",
            )
        if not (isinstance(self.beta, (int, float)) and 0 <= self.beta < math.inf):
            found.refuse("beta", "to be >= 0", "TRL's default is 0.")
        return found


# -- rewards and advantages of one prompt --


class Rewards:
    """Scores the completions of one prompt at a time.

    Args: functions: each takes ``prompts``, ``completions``, ``completion_ids`` and the row's other
        columns, each G times, and returns G numbers; None or NaN for a completion that it does not
        judge. Each call gets a fresh copy. weights: of the functions; None: 1.
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float] | None):
        self.names = [getattr(each, "__name__", type(each).__name__) for each in functions]
        self._isolated = [Isolated(each) for each in functions]
        self._weights = [1.0] * len(functions) if weights is None else list(weights)

    @property
    def reached(self) -> list[object]:
        """The data sets that the functions reach."""
        return [data for each in self._isolated for data in each.data]

    def __call__(self, row: Row, completions: Sequence[Any], ids: Sequence[list[int]]) -> Tensor:
        """Return the weighted sum of the rewards of each completion, (G,), float64; NaN for one
        that no function judges.

        Raises: ValueError for another number of rewards, or one that is infinite; and what the
            functions raise.
        """
        columns = {
            name: [copy.deepcopy(value) for _ in completions]
            for name, value in row.items()
            if name not in (_PROMPT, "completion", "completion_ids")
        }
        found = []
        for name, isolated in zip(self.names, self._isolated, strict=True):
            with isolated.fresh() as function:
                given = function(
                    prompts=[copy.deepcopy(row[_PROMPT]) for _ in completions],
                    completions=copy.deepcopy(list(completions)),
                    completion_ids=[list(each) for each in ids],
                    **columns,
                )
            rewards = [_NONE if each is None else float(each) for each in given]
            if len(rewards) != len(completions) or any(map(math.isinf, rewards)):
                raise ValueError(
                    f"{name} returned {len(rewards)} rewards for {len(completions)} completions, "
                    f"{sum(map(math.isinf, rewards))} of them infinite"
                )
            found.append(rewards)
        each = torch.tensor(found, dtype=torch.float64)
        total = (each * torch.tensor(self._weights, dtype=torch.float64)[:, None]).nansum(0)
        return total.masked_fill(each.isnan().all(0), _NONE)


def advantages_of(rewards: Tensor, *, scaled: bool) -> Tensor:
    """Return the advantages, (G,), of one prompt's completions: rewards less their mean, over their
    own standard deviation where ``scaled``; 0 for a completion without a reward (NaN)."""
    known = rewards[~rewards.isnan()]
    advantages = rewards - known.mean()
    if scaled:
        advantages = advantages / ((known.std() if len(known) > 1 else 0.0) + 1e-4)  # as TRL
    return advantages.nan_to_num(nan=0.0)


# -- rows --


@dataclass
class PromptCollator:
    """Makes prompts into rows with as many places for a completion as it may have tokens, so that a
    row's shape does not depend on what is written there.

    The places are those with a label. ``input_ids``, ``attention_mask``, ``labels`` and, with a
    reference, its log-probabilities are (b, T), and ``advantages`` (b,).
    """

    places: int
    filler: int
    has_reference: bool

    def __call__(self, rows: list[Row]) -> Batch:
        """Return the batch of these rows."""
        ids = [[*row["input_ids"], *[self.filler] * self.places] for row in rows]
        longest = max(map(len, ids))
        batch = {
            "input_ids": [each + [self.filler] * (longest - len(each)) for each in ids],
            "attention_mask": [[1] * len(each) + [0] * (longest - len(each)) for each in ids],
            "labels": [
                [IGNORED_LABEL] * (len(each) - self.places)
                + [self.filler] * self.places
                + [IGNORED_LABEL] * (longest - len(each))
                for each in ids
            ],
        }
        made: Batch = {name: torch.tensor(values) for name, values in batch.items()}
        made[_ADVANTAGES] = torch.zeros(len(rows))
        if self.has_reference:
            made[_REFERENCE] = torch.zeros(made["labels"].shape)
        return made | {_ROW: [row[_ROW] for row in rows]}


def prompts_of(inputs: Batch) -> Iterator[tuple[Tensor, Row]]:
    """Yield the tokens of each row's prompt, (P,), and the row of the data set."""
    given = (inputs["attention_mask"] != 0) & (inputs["labels"] == IGNORED_LABEL)
    for ids, mask, row in zip(inputs["input_ids"], given, inputs[_ROW], strict=True):
        yield ids[mask], pickle.loads(row)


def with_prompts_as_text(dataset: object, name: str) -> Dataset:
    """Return a data set whose column ``prompt`` is text, of a conversation its JSON: rows with one
    text are one unit. The prompts as they were given stand beside it."""
    if not (isinstance(dataset, Dataset) and _PROMPT in dataset.column_names):
        found = getattr(dataset, "column_names", type(dataset).__name__)
        raise DataError(
            f"Expected the {name} set to be a datasets.Dataset with the column {_PROMPT!r}, got "
            f"{found}. Rename the column of prompts (dataset.rename_column)."
        )
    if _ROW in dataset.column_names:
        raise DataError(
            f"The {name} set has the column {_ROW!r}, so it was already prepared. Pass the rows "
            "that it was made from, or call evaluate() without a data set, for the trainer's."
        )
    rows: Any = dataset.with_format(None)
    texts = [
        each if isinstance(each, str) else json.dumps(each, sort_keys=True, default=str)
        for each in rows[_PROMPT]
    ]
    keyed: Dataset = rows.rename_column(_PROMPT, _GIVEN).add_column(_PROMPT, texts)
    return keyed


# -- what the model writes --


class Author:
    """Writes completions to one prompt at a time, scores them, and asks the reference of them.

    Args: eos: what ends a completion. reference: the reference model; None for ``model`` without
        its adapter.
    """

    def __init__(
        self,
        args: DPGRPOConfig,
        words: PreTrainedTokenizerBase,
        eos: list[int],
        rewards: Rewards,
        reference: nn.Module | None,
    ):
        self.args, self.words, self.rewards = args, words, rewards
        self._eos, self._reference = torch.tensor(eos), reference
        settings = {
            "max_new_tokens": args.max_completion_length,
            "do_sample": True,
            "pad_token_id": words.pad_token_id,
            "bos_token_id": words.bos_token_id,
            "eos_token_id": eos,
            # What is unset here would come from the model's own configuration.
            "cache_implementation": "dynamic",
            "num_return_sequences": 1,
            "return_dict_in_generate": False,
            **{
                name: getattr(args, name)
                for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            },
            **(args.generation_kwargs or {}),
        }
        self._settings = GenerationConfig(**settings, disable_compile=True)

    def write(self, model: nn.Module, prompt: Tensor, count: int) -> list[list[int]]:
        """Return the tokens of ``count`` completions of a prompt, (P,), each up to its end token,
        written beside each other and beside nothing else."""
        given = prompt.to(next(model.parameters()).device).expand(count, -1)
        found = model.generate(  # type: ignore[operator]
            input_ids=given, attention_mask=torch.ones_like(given), generation_config=self._settings
        )[:, len(prompt) :].cpu()
        ends = torch.isin(found, self._eos)
        before_end = F.pad(ends.cumsum(1)[:, :-1], (1, 0)) == 0
        return [ids[mask].tolist() for ids, mask in zip(found, before_end, strict=True)]

    def score(self, row: Row, ids: Sequence[list[int]]) -> Tensor:
        """Return the rewards of a row's completions, as :class:`Rewards`."""
        texts = self.words.batch_decode(list(ids), skip_special_tokens=True)
        if isinstance(row[_PROMPT], str):
            return self.rewards(row, texts, ids)
        talks = [[{"role": "assistant", "content": text}] for text in texts]
        return self.rewards(row, talks, ids)

    def complete(self, model: nn.Module, inputs: Batch, rows: slice) -> bool:
        """Do as :meth:`fill`, and return whether it worked; else the rows must not count.

        Raises: DataError, which names no row, for what is not the prompt's own error.
        """
        try:
            self.fill(model, inputs, rows)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as problem:  # of whatever kind: to stop would tell that it was drawn
            if (cause := not_of_the_row(problem)) is None:
                return False
            raise DataError(
                "The completions of a drawn prompt could not be written or scored, and the cause "
                f"may lie outside it ({cause}). This message does not say which prompt it was. Fix "
                "the cause, and resume."
            ) from None
        return True

    def fill(self, model: nn.Module, inputs: Batch, rows: slice) -> None:
        """Put completions into the rows of one prompt, with their advantages and what the reference
        says of them. Raises: ValueError for advantages that are not finite, and others."""
        part = {name: value[rows] for name, value in inputs.items()}
        prompt, row = next(prompts_of(part))
        places = (part["labels"][0] != IGNORED_LABEL).nonzero()[:, 0]
        written = self.write(model, prompt, len(part["labels"]))
        scaled = self.args.scale_rewards in ("group", True)
        advantages = advantages_of(self.score(row, written), scaled=scaled).float()
        if not advantages.isfinite().all():
            raise ValueError("Rewards are too large: advantages are not finite.")
        part[_ADVANTAGES].copy_(advantages)
        part["attention_mask"][:, places] = 0
        part["labels"][:, places] = IGNORED_LABEL
        for at, ids in enumerate(written):
            here = places[: len(ids)]
            part["input_ids"][at, here] = torch.tensor(ids)
            part["attention_mask"][at, here] = 1
            if not self.args.mask_truncated_completions or ids[-1] in self._eos:
                part["labels"][at, here] = torch.tensor(ids)
        if _REFERENCE in part:
            alone = slice(int(part["attention_mask"][0].argmax()), int(places[-1]) + 1)
            texts = {name: part[name][:, alone] for name in _TOKENS}
            part[_REFERENCE][:, alone] = self._of_reference(model, texts)

    def _of_reference(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
        reference, without = self._reference, cast("AbstractContextManager[None]", nullcontext())
        if reference is None:
            assert isinstance(model, PeftModel)
            reference, without = model, model.disable_adapter()
        device = next(model.parameters()).device
        # accelerate lets the policy's forward run so, and knows no other model.
        bf16 = self.args.mixed_precision == "bf16"
        with without, torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            on_device = {name: value.to(device) for name, value in rows.items()}
            return log_probs(reference.to(device), on_device, self.args.temperature).float().cpu()

    def look_over(
        self, model: nn.Module, rows: Dataset, collate: Callable[[list[Row]], Batch]
    ) -> None:
        """Complete the first row, and try the reward functions on the first rows, with synthetic
        completions: pieces of the prompts, and nothing.

        Raises: DataError, which names the row.
        """
        count, place = self.args.num_generations or 0, 0
        try:
            self.fill(model, collate([rows[0]] * count), slice(count))
            for place in range(min(len(rows), _TRIED)):
                pieces = [rows[place]["input_ids"][:at] for at in range(count)]
                advantages_of(self.score(pickle.loads(rows[place][_ROW]), pieces), scaled=False)
        except Exception as problem:
            raise DataError(
                f"Completions of row {place} of the training set cannot be written, or cannot be "
                f"scored by {self.rewards.names} ({type(problem).__name__}: {problem}). Reward "
                "functions are called as f(prompts=, completions=, completion_ids=, **columns), "
                "with one prompt's completions, and return a number or None for each, whatever "
                "text it is. log_metric, log_extra and trainer_state are not given: completions "
                "and rewards are not released."
            ) from problem


def log_probs(model: nn.Module, rows: Mapping[str, Tensor], temperature: float) -> Tensor:
    """Return the log-probability of each label given what precedes it, (b, T), at a temperature; 0
    where there is no label."""
    texts, labels = {name: rows[name] for name in _TOKENS[:2]}, rows["labels"][:, 1:]
    logits = widened(model(**with_position_ids(model, texts)).logits) / temperature
    logits = logits[:, -rows["labels"].shape[1] : -1]  # without tokens of a prompt that is learned
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return F.pad(-losses.view(labels.shape), (1, 0))


class DPGRPOTrainer(trl.PreparedByTRL):
    """Train privately by rewards: DPTrainer on prompts to which the model writes completions.

    A prompt with all its completions is one example: rows with the same prompt are one unit, of
    which a draw takes one. The loss of a completion is ``-advantage``, plus ``beta`` times the
    divergence from the reference, for each token; over its tokens it is summed and divided by
    ``max_completion_length`` ("dr_grpo"; Liu et al. 2025, arXiv 2503.20783), or their mean ("grpo";
    Shao et al. 2024, arXiv 2402.03300, eq. 3 with one update for each draw). An example's is the
    mean over its completions.

    Weights are released. Completions and rewards of the training prompts are not, and are not
    logged. An evaluation writes ``num_generations_eval`` completions to each of its prompts, and
    reports the mean and the standard deviation of their rewards; ``predictions`` are the rewards,
    (prompts, completions).

    Args:
        model: a model, or a name or path, loaded as TRL does.
        reward_funcs: a function or several, as TRL calls them, without ``trainer_state``,
            ``log_extra`` and ``log_metric``. What they know must not come from the training rows.
        args: :class:`DPGRPOConfig`.
        train_dataset, eval_dataset: with ``prompt``, texts or messages. Other columns are the
            reward functions' arguments.
        processing_class: the tokenizer; None for the model's.
        quantization_config: for a model that is loaded by name.
        peft_config: as in :class:`DPTrainer`, but none that chooses what trains. The reference is
            the model without the adapter; else a copy of the model as it is before training.
        trainer_arguments: the other keywords of :class:`DPTrainer`, without ``data_collator``.

    Raises: as :class:`DPTrainer`; DataError for rows that cannot be prepared, or rewarded.
    """

    args: DPGRPOConfig
    arguments_class: ClassVar[type[DPTrainingArguments]] = DPGRPOConfig
    preparation = trl.GRPOPreparation
    _preparation: trl.GRPOPreparation
    # The sets that were just made of several: Trainer evaluates on each by a call of its own. Those
    # objects alone may come in prepared, since the rows in them are unpickled.
    _ready: tuple[Dataset, ...] = ()

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardFunction | list[RewardFunction],
        args: DPGRPOConfig | None = None,
        *,
        train_dataset: Dataset | None = None,
        eval_dataset: trl.DataSets = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        quantization_config: object = None,
        peft_config: PeftConfig | None = None,
        **trainer_arguments: Any,
    ):
        for name, why in _NOT_TAKEN.items():
            if trainer_arguments.pop(name, None) is not None:
                expected, error = "to be left out", UnsupportedArgumentError
                raise invalid(name, "one", expected, f"In a private run {why}", error)
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        check_functions(functions)
        self._wraps = peft_config is not None and tuner_for(peft_config, True) is None
        of_trl = {
            "model": model,
            "reward_funcs": functions,
            "processing_class": processing_class,
            "quantization_config": quantization_config,
        }
        trl.report_metrics(reward_metrics, trainer_arguments, args)
        self._rewards = Rewards(functions, getattr(args, "reward_weights", None))
        with_text = with_prompts_as_text(train_dataset, "train")
        refuse_rows_in_rewards(self._rewards, train_dataset)
        super().__init__(
            args,
            with_text,
            trl.each_set(eval_dataset, with_prompts_as_text),
            of_trl,
            peft_config,
            **trainer_arguments,
        )
        if self.tuner.undecided:
            raise invalid(
                "peft_config",
                type(peft_config).__name__,
                "to be one that does not choose what trains",
                "It would choose by prompts without completions. Use LoRA, or top blocks.",
                UnsupportedArgumentError,
            )

    def _complete(self, made: trl.Preparation, args: Any) -> None:
        """Tokenize prompts, and keep a copy of the model as the reference."""
        assert isinstance(made, trl.GRPOPreparation)
        if args.disable_dropout:
            trl.disable_dropout(made.model)
        reference = None
        if args.beta and not self._wraps:
            reference = copy.deepcopy(made.model).requires_grad_(False).eval()
        words = getattr(made.processing_class, "tokenizer", made.processing_class)
        self._author = Author(args, words, made.eos_token_ids, self._rewards, reference)
        # The filler stands where nothing is read, or where a completion will be written.
        filler = int(words.pad_token_id)  # type: ignore[arg-type]
        made.data_collator = PromptCollator(args.max_completion_length, filler, args.beta > 0)
        fills = {"labels": IGNORED_LABEL} | ({_REFERENCE: 0.0} if args.beta else {})
        args.padding_values = fills | args.padding_values
        made.train_dataset = self._prepare(made.train_dataset, "train")
        made.eval_dataset = trl.each_set(made.eval_dataset, self._prepare)

    def _prepared(self, dataset: trl.DataSets) -> trl.DataSets:
        if any(dataset is each for each in self._ready):
            return dataset
        made = super()._prepared(trl.each_set(dataset, with_prompts_as_text))
        self._ready = tuple(made.values()) if isinstance(made, dict) else ()
        return made

    def _prepare(self, rows: Dataset, name: str) -> Dataset:
        words, options = self._author.words, self._author.args.chat_template_kwargs or {}

        def encoded(row: Row) -> Row:
            prompt = row[_GIVEN]
            if isinstance(prompt, str):
                ids = words(text=prompt)["input_ids"]
            else:
                found: Any = words.apply_chat_template(
                    prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **options
                )
                ids = found["input_ids"]
            if not ids:
                raise ValueError("its prompt has no token")
            others = {name: row[name] for name in row if name not in (_PROMPT, _GIVEN)}
            return {"input_ids": ids, _ROW: pickle.dumps({**others, _PROMPT: prompt})}

        gone = [each for each in rows.column_names if each != _PROMPT]
        return trl.by_row(rows, lambda some: some.map(encoded, remove_columns=gone), name)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = ["input_ids", _ROW]

    # -- steps --

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, as :class:`DPTrainer` does.

        Raises: DataError, before the first draw, for reward functions that fail on the first rows;
            UnsupportedModelError for a model in shards.
        """
        if self.in_shards:
            raise UnsupportedModelError(
                "Processes of a sharded model would all have to write the same number of tokens, "
                "which depends on the draw. Train with DDP (in accelerate, no FSDP)."
            )
        with self.silent(), self._alone():
            self._author.look_over(self.model, self.train_dataset, self.data_collator)
        return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Write the completions of a drawn batch of prompts, and make the step's gradient."""
        with self.saves_what_ran(), self.run.processes.telling(), self.silent():
            with named_memory_errors(), self._alone():
                inputs[:] = [self._completed(each) for each in inputs]
        return super().training_step(model, inputs, num_items_in_batch)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Write and score in silence, on streams of the run's own, without gradients or dropout."""
        training, model = self.model.training, self.model
        model.eval()
        try:
            with self.run.randomness.streams(), unheard(), torch.no_grad():
                with self.compute_loss_context_manager():
                    yield
                self._begin_stream()  # do not go on where the last prompt stopped
        finally:
            model.train(training)

    def _begin_stream(self, prompt: int | None = None) -> None:
        """Begin a secret stream, also on the device. Which prompt is named matters only in tests,
        as with :meth:`hf_dp.noise.SecretRandomness.reseed`."""
        randomness = self.run.randomness
        randomness.reseed(prompt)
        torch.manual_seed(randomness.example_seed(prompt))

    def _completed(self, batch: UnitBatch) -> UnitBatch:
        """Return a physical batch of prompts with their completions."""
        inputs, counts = batch.inputs, None
        if isinstance(inputs, Masked):
            inputs, counts = inputs
        if counts is None:
            counts = torch.ones(len(inputs["labels"]), dtype=torch.bool)
        for first in range(0, len(counts), batch.rows):
            rows = slice(first, first + batch.rows)
            if counts[rows].all():
                part = {name: value[rows] for name, value in inputs.items()}
                self._begin_stream(zlib.crc32(next(prompts_of(part))[0].numpy().tobytes()))
                counts[rows] = self._author.complete(self.model, inputs, rows)
        return batch._replace(inputs=inputs if counts.all() else Masked(inputs, counts))

    def compute_per_example_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Return the loss of each completion, (b,)."""
        logps = log_probs(model, inputs, self.args.temperature)
        ratio = (logps - logps.detach()).exp()  # 1, with the gradient of logps
        losses = -ratio * inputs[_ADVANTAGES][:, None]
        if _REFERENCE in inputs:
            apart = inputs[_REFERENCE] - logps
            divergence = apart.exp() - apart - 1
            if self.args.use_bias_correction_kl:
                divergence = divergence * ratio
            losses = losses + self.args.beta * divergence
        counted = inputs["labels"] != IGNORED_LABEL
        sums = losses.where(counted, 0.0).sum(1)
        if self.args.loss_type == "grpo":
            return sums / counted.sum(1).clamp(min=1)
        return sums / self.args.max_completion_length

    def synthetic_batches(self) -> list[Example]:
        """Return synthetic prompts with completions, of different lengths and advantages."""
        made = []
        for example, advantage in zip(synthetic_examples(self.model), (1.0, -0.5, 2.0)):
            ids = example["input_ids"]
            labels = ids.clone()
            labels[:, :2] = IGNORED_LABEL
            one: Example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            one |= {"labels": labels, _ADVANTAGES: torch.tensor([advantage])}
            if self.args.beta:
                one[_REFERENCE] = torch.full(ids.shape, -1.0)
            made.append(one | {_ROW: [b""]})
        return made

    # -- evaluation --

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return (None, rewards, zeros) of a batch of prompts: (b, completions) and (b,)."""
        count = self.args.num_generations_eval or self.args.num_generations
        found = []
        with torch.no_grad(), self.compute_loss_context_manager():
            for prompt, row in prompts_of(inputs):
                written = self._author.write(self.model, prompt.cpu(), count)
                found.append(self._author.score(row, written))
        rewards = torch.stack(found).to(self.args.device)
        return None, rewards, torch.zeros(len(rewards), device=rewards.device)


def check_functions(functions: Sequence[object]) -> None:
    """Raise UnsupportedArgumentError for rewards that are no plain functions."""
    for each in functions:
        call = each if inspect.isfunction(each) else getattr(each, "__call__", None)  # noqa: B004
        asynchronous = inspect.iscoroutinefunction(call)
        if isinstance(each, (str, nn.Module)) or not callable(each) or asynchronous:
            raise invalid(
                "reward_funcs",
                type(each).__name__,
                "to be functions, none of them asynchronous",
                "Wrap a reward model in a function that reads texts and returns numbers. The "
                "model must be public, or of a private run that `earlier_runs` names.",
                UnsupportedArgumentError,
            )


def refuse_rows_in_rewards(rewards: Rewards, train_dataset: object) -> None:
    """Raise DataError for a function that reaches rows of the training set."""
    try:
        refuse_rows_in_code(rewards.reached, TrainingRows(train_dataset))
    except DataError as problem:
        raise DataError(
            f"One of the reward functions {rewards.names} holds rows of the training set, so one "
            "prompt could enter the rewards of others. Put what a prompt's reward needs into a "
            "column of its row: the function gets it as an argument."
        ) from problem


def reward_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return what TRL logs of an evaluation: the mean reward, and its standard deviation within a
    prompt, on average."""
    rewards = trl.predictions_of(prediction)
    spread = np.nanstd(rewards, axis=1, ddof=min(1, rewards.shape[1] - 1))
    return {"reward": float(np.nanmean(rewards)), "reward_std": float(np.nanmean(spread))}
