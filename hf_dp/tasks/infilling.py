"""Classify by filling in the missing word, with any masked language model (Li et al., section 3.2).

The template and the mask come from the tokenizer (:mod:`hf_dp.tasks.templates`). The
logits of the classes are those of their label words at the mask. No forward is copied: the
masked-LM model of the base runs, its head gets the hidden state at the mask only, and its
vocabulary projection is cut to the rows of the label words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from hf_dp._borrowed import attention_of
from hf_dp.clipping import register_rule
from hf_dp.clipping.gradients import Lookups, positions
from hf_dp.clipping.rounding import accumulation_dtype, outer_sums
from hf_dp.clipping.rules.rule import Found, Use
from hf_dp.errors import DataError, UnsupportedModelError
from hf_dp.losses import register_model_class
from hf_dp.tasks.classification import labels_of
from hf_dp.tasks.infilling_config import InfillingConfig
from hf_dp.tasks.templates import Infilling, label_word_ids, with_template


class LabelWordProjection(nn.Module):
    """A projection onto the logits of K of V words, (..., K): ``x W[ids]^T + b[ids]``.

    W, (V, d), usually the input embedding's own, and b, (V,) or None, stay the parameters of the
    language model's head that they come from.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ids: Sequence[int]):
        super().__init__()
        self.weight, self.ids = weight, tuple(ids)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        rows = list(self.ids)
        return F.linear(input, self.weight[rows], None if self.bias is None else self.bias[rows])

    def extra_repr(self) -> str:
        return f"vocabulary={len(self.weight)}, ids={self.ids}"


@register_rule(LabelWordProjection)
def _gradients(use: Use, kept: Sequence[Tensor], output_grad: Tensor) -> Found:
    """Return the gradients of weight and bias as lookups.

    Row ``ids[k]`` of the weight's gradient is ``sum_t g_tk a_t``, and of the bias's ``sum_t g_tk``;
    the other rows are zero. An embedding that looks ``ids`` up has such a gradient. The inner
    product with the tied embedding's own gradient (tokens of the text that are label words) is
    therefore that of two lookups.
    """
    activations, grads = positions(kept[0]), positions(output_grad)
    dtype = accumulation_dtype(grads.dtype)
    ids = torch.tensor(use.module.ids, device=grads.device).expand(len(grads), -1)
    found = {"weight": Lookups(ids, outer_sums(grads, activations))}
    if use.module.bias is not None:
        found["bias"] = Lookups(ids, grads.sum(1, dtype=dtype)[..., None])
    return found


class InfillingForSequenceClassification(PreTrainedModel):
    """A masked language model as a classifier: logits (b, K) of the label words at the mask.

    Args: masked_lm: the base with its weights; newly initialized when not given.
    """

    config_class = InfillingConfig
    base_model_prefix = "masked_lm"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: InfillingConfig, masked_lm: PreTrainedModel | None = None):
        super().__init__(config)
        self.masked_lm = (
            AutoModelForMaskedLM.from_config(config.base_config) if masked_lm is None else masked_lm
        )
        head = self.masked_lm.get_output_embeddings()
        if type(head) is not nn.Linear or self.masked_lm.base_model is self.masked_lm:
            raise UnsupportedModelError(
                f"The output embeddings of {type(self.masked_lm).__name__} are "
                f"{type(head).__name__}, but nn.Linear was expected. Train a classification head "
                "instead."
            )
        own = dict(head.named_parameters())
        rows = LabelWordProjection(own["weight"], own.get("bias"), config.label_word_ids)
        _replace(self.masked_lm, head, rows)
        self.supports_gradient_checkpointing = self.masked_lm.supports_gradient_checkpointing
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: object,
    ) -> SequenceClassifierOutput:
        """Return the logits, and a mean loss if labels, (b,), are given.

        Each example of ``input_ids``, (b, T), has the mask token exactly once.
        """
        if input_ids is None:
            raise DataError(
                "Infilling needs `input_ids`, in which it finds the mask; prompt tuning replaces "
                "them."
            )
        self.check_tokens(input_ids)
        where = (input_ids == self.config.mask_token_id).int().argmax(1)

        def only_mask(module: nn.Module, args: object, output: BaseModelOutput) -> BaseModelOutput:
            hidden = output.last_hidden_state
            assert hidden is not None
            index = where[:, None, None].expand(-1, 1, hidden.shape[2])
            output.last_hidden_state = hidden.gather(1, index)
            return output

        inputs["return_dict"] = True
        with self.masked_lm.base_model.register_forward_hook(only_mask):
            output = self.masked_lm(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        logits = output.logits[:, 0]
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )

    def check_tokens(self, input_ids: Tensor) -> None:
        """Raise DataError for token ids (..., T) with other than one mask token."""
        counts = (input_ids == self.config.mask_token_id).sum(-1)
        if not bool((counts == 1).all()):
            raise DataError(
                f"Expected the mask token exactly once in each example, got {counts.tolist()} of "
                "them. Encode texts with the tokenizer saved beside this model, which puts them "
                f"into its template {self.config.template!r}, as one text or as a pair, and leave "
                "out texts that hold the mask token themselves."
            )

    def valid_input_ids(self, input_ids: Tensor) -> Tensor:
        """Make random token ids (b, T) acceptable. Each example gets the mask token at a random
        place and nowhere else."""
        mask = self.config.mask_token_id
        input_ids = torch.where(input_ids == mask, self.config.label_word_ids[0], input_ids)
        return input_ids.scatter(1, torch.randint(input_ids.shape[1], (len(input_ids), 1)), mask)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace one module by another, in place, and change nothing else. ``set_output_embeddings``
    of BERT and others also ties biases that were not tied."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def load_infilling(
    name: str, tokenizer: PreTrainedTokenizerBase, infilling: Infilling, class_names: Sequence[str]
) -> tuple[InfillingForSequenceClassification, PreTrainedTokenizerFast]:
    """Return a masked language model as a classifier, and its tokenizer with the template."""
    ids = label_word_ids(tokenizer, infilling, class_names)
    masked_lm, info = AutoModelForMaskedLM.from_pretrained(name, output_loading_info=True)
    if info["missing_keys"]:
        raise DataError(
            f"The checkpoint {name!r} has no trained masked-LM head, so no word can be read off "
            "it. Use a masked language model, continue this one's pretraining "
            "(recipes/pretraining/masked_lm.py), or leave `infilling` out to train a "
            "classification head."
        )
    # It may be a path, and would be published with the configuration.
    masked_lm.config.name_or_path = ""
    config_class: Any = InfillingConfig
    config = config_class(
        base_config=masked_lm.config,
        label_word_ids=ids,
        label_words=[infilling.label_words[name] for name in class_names],
        mask_token_id=tokenizer.mask_token_id,
        template=infilling.template.text,
        pad_token_id=tokenizer.pad_token_id,
        **labels_of(class_names),
        pretraining_sources=getattr(masked_lm.config, "pretraining_sources", None),
        # Unset, it would also be reset in the configuration of the base.
        attn_implementation=attention_of(masked_lm.config),
    )
    config.name_or_path = name
    return InfillingForSequenceClassification(config, masked_lm), with_template(
        tokenizer, infilling.template
    )


register_model_class(InfillingForSequenceClassification, "sequence_classification")
AutoModelForSequenceClassification.register(
    InfillingConfig, InfillingForSequenceClassification, exist_ok=True
)
