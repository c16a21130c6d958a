"""``DPSeq2SeqTrainer``: DPTrainer with generation during evaluation and prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments

from hf_dp._arguments import Problems
from hf_dp.errors import DataError, InvalidArgumentError
from hf_dp.losses import IGNORED_LABEL, base_model, padding_moves_prompts, positions_of
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.inherited import Refusal, only
from hf_dp.trainer.trainer import DPTrainer

# Concern evaluation alone, and may change once the trainer exists.
SEQ2SEQ_FREE = frozenset(
    """
    predict_with_generate generation_max_length generation_num_beams generation_config
    """.split()
)
SEQ2SEQ_REFUSED: Mapping[str, Refusal] = {
    "sortish_sampler": only("transformers ignores it. Remove it.", False)
}
_DEFAULT_LENGTH = 20  # transformers' own
_BESIDE_TOKENS = ("attention_mask", "token_type_ids")
_MADE_ANEW = ("labels", "position_ids")


@dataclass
class DPSeq2SeqTrainingArguments(  # type: ignore[misc]  # learning_rate: float
    DPTrainingArguments, Seq2SeqTrainingArguments
):
    r"""
    Configuration of [`DPSeq2SeqTrainer`]: the arguments of [`DPTrainingArguments`] and of
    [`~transformers.Seq2SeqTrainingArguments`].

    For a decoder-only model, `generation_max_length` counts new tokens, as it does for the decoder
    of an encoder-decoder: it does not depend on the prompts of a batch.

    Raises:
        UnsupportedArgumentError, InvalidArgumentError: as [`DPTrainingArguments`], and for
            `predict_with_generate` with DP-FP.
    """

    _INHERITED: ClassVar[type[TrainingArguments]] = Seq2SeqTrainingArguments
    _FREE: ClassVar[frozenset[str]] = SEQ2SEQ_FREE
    _REFUSED: ClassVar[Mapping[str, Refusal]] = SEQ2SEQ_REFUSED

    def _setting_problems(self) -> Problems:
        found = super()._setting_problems()
        if self.predict_with_generate and self.privacy_mode == DP_FP:
            found.unsupported(
                "predict_with_generate",
                "to be False with privacy_mode='dp_fp'",
                "DP-FP clips and noises one representation of each text, and a model that "
                "generates has one for each token. Use privacy_mode='dp_sgd'.",
            )
        return found


class DPSeq2SeqTrainer(DPTrainer, Seq2SeqTrainer):
    """Train privately, and generate during evaluation and prediction: a drop-in for
    :class:`transformers.Seq2SeqTrainer`, for encoder-decoders and for decoder-only models.

    With ``predict_with_generate``, predictions are the generated tokens. An encoder-decoder
    generates as in transformers. A decoder-only model is given what comes before a row's first
    label that is not -100, padded on the left, so labels must mask the prompt; ``predictions`` are
    the new tokens alone and ``label_ids`` the target tokens. Keywords of ``generate`` may be passed
    to ``evaluate`` and ``predict``; lengths count new tokens. Sampling draws from torch's public
    generators, which private steps never use.

    Args: those of :class:`DPTrainer`; ``args`` are :class:`DPSeq2SeqTrainingArguments`.

    Raises: as :class:`DPTrainer`; in evaluation, DataError for rows that have no prompt, several
        answers, or do not fit into the model's context.
    """

    args: DPSeq2SeqTrainingArguments
    arguments_class: ClassVar[type[DPTrainingArguments]] = DPSeq2SeqTrainingArguments
    _gen_kwargs: dict[str, Any]

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Tensor | None, Tensor | None]:
        """Return (loss, new tokens, target tokens) of a batch, as
        :class:`transformers.Seq2SeqTrainer` does.
        """
        config = getattr(base_model(self.model), "config", None)
        generates = self.args.predict_with_generate and not prediction_loss_only
        if not generates or getattr(config, "is_encoder_decoder", False):
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
            )
        inputs = self._prepare_inputs(inputs)
        given = gen_kwargs or getattr(self, "_gen_kwargs", {})
        options = {name: value for name, value in given.items() if value is not None}
        pad = options.pop("pad_token_id", None)
        pad = self._pad_token_id() if pad is None else pad
        prompts, targets = split_rows(inputs, pad)
        new = self._number_of_new_tokens(options, prompts["input_ids"].shape[1])
        loss = None
        if targets is not None:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        options |= {"pad_token_id": pad, "max_new_tokens": new}
        return loss, self._answers(prompts, options), targets

    def _answers(self, prompts: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
        """Return new tokens, (b, max_new_tokens)."""
        lengths = prompts["attention_mask"].sum(1)
        if not padding_moves_prompts(self.model):
            lengths = torch.full_like(lengths, prompts["attention_mask"].shape[1])
        new, places, found = options["max_new_tokens"], [], []
        for length in lengths.unique().tolist():  # of one length each where padding would matter
            own = (lengths == length).nonzero()[:, 0]
            inputs = {name: value[own, -length:] for name, value in prompts.items()}
            with torch.no_grad():
                answers = self.model.generate(**inputs, **options)[:, length:]
            places.append(own.repeat_interleave(len(answers) // len(own)))
            found.append(F.pad(answers, (0, new - answers.shape[1]), value=options["pad_token_id"]))
        return torch.cat(found)[torch.cat(places).argsort(stable=True)]

    def _number_of_new_tokens(self, options: dict[str, Any], prompt: int) -> int:
        """Return how many tokens are generated at most, taking the lengths out of ``options``."""
        known, context = self.model.generation_config, positions_of(self.model)
        given = (options.pop("max_new_tokens", None), options.pop("max_length", None))
        of_model = (known.max_new_tokens, known.max_length)
        new = next((int(each) for each in (*given, *of_model) if each), _DEFAULT_LENGTH)
        if context is not None and prompt + new > context:
            raise DataError(
                f"The longest prompt has {prompt} tokens, and {new} new ones do not fit beside it "
                f"in a context of {context}. Truncate the prompts, or lower generation_max_length."
            )
        return new

    def _pad_token_id(self) -> int:
        known = (self.processing_class, self.model.generation_config, base_model(self.model).config)
        for name in ("pad_token_id", "eos_token_id"):
            for each in known:
                token = getattr(each, name, None)
                token = token[0] if isinstance(token, (list, tuple)) and token else token
                if isinstance(token, int):
                    return token
        raise InvalidArgumentError(
            "Expected a padding token to generate in batches. Set tokenizer.pad_token and pass the "
            "tokenizer as `processing_class`."
        )


def split_rows(
    inputs: Mapping[str, Tensor], pad_token_id: int
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Cut each row of a collated batch before its first label that is not -100.

    Returns: what stands before, for ``generate``, (b, P), padded on the left with ``pad_token_id``;
    and the targets, (b, T), padded on the right with -100, None without labels. A row without a
    target is a prompt as a whole.
    """
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor):
        raise _uncut(f"there are no `input_ids` and `attention_mask` among {sorted(inputs)}")
    if other := sorted(set(inputs) - {"input_ids", *_BESIDE_TOKENS, *_MADE_ANEW}):
        raise _uncut(f"it is not known how to cut {other} (remove_unused_columns=True drops them)")
    attended, labels = mask != 0, inputs.get("labels")
    is_target = torch.zeros_like(attended)
    if labels is not None:
        if labels.shape != tokens.shape:
            raise _uncut(f"`labels` have the shape {tuple(labels.shape)}, not {tuple(mask.shape)}")
        is_target = attended & (labels != IGNORED_LABEL)
    is_prompt = attended & (is_target.cumsum(1) == 0)
    begins = is_target & ~F.pad(is_target[:, :-1], (1, 0))
    if bool((begins.sum(1) > 1).any()):
        raise _uncut("a row has labels in several places. Label earlier turns -100")
    if not bool(is_prompt.any(1).all()):
        raise _uncut("a row has no prompt. Set the labels of prompts to -100")

    def taken(name: str, kept: Tensor, fill: int, side: str) -> Tensor:
        rows = [row[own] for row, own in zip(inputs[name], kept, strict=True)]
        return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)

    prompts = {
        name: taken(name, is_prompt, pad_token_id if name == "input_ids" else 0, "left")
        for name in ("input_ids", *_BESIDE_TOKENS)
        if name in inputs
    }
    if labels is None:
        return prompts, None
    return prompts, taken("labels", is_target, IGNORED_LABEL, "right")


def _uncut(why: str) -> DataError:
    return DataError(
        f"predict_with_generate cannot cut prompts out of these rows: {why}. Or set "
        "predict_with_generate=False."
    )
