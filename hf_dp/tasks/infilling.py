"""Classify by filling in the missing word, with any language model (Li et al., section 3.2).

The template and the mask come from the tokenizer (:mod:`hf_dp.tasks.templates`). A masked language
model predicts the word in its mask's place, and a decoder after the last token. The logits of the
classes are those of their label words there.

The model stays the one of transformers, with the same names of parameters: it is saved, with an
adapter or without one, as the checkpoint of a language model, which loads without hf_dp. Its
configuration keeps the template and the words. No forward is copied: the language model runs, and
only the hidden state in the missing word's place meets the output matrix, cut to the rows of the
label words.

Label words of several tokens (decoders only) have their whole probability: each text is read once
for each class, followed by its word, and

    score_k = sum_j log p(w_kj | text, w_k1 ... w_k,j-1)

takes the place of a logit. For words of one token it differs from the logit by a constant of the
text, which the softmax over classes does not see. The output matrix is met at the K words' tokens
alone, by blocks of the vocabulary (:mod:`hf_dp.clipping.chunked_loss`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from hf_dp.clipping import register_rule
from hf_dp.clipping.chunked_loss import check_head, check_output, token_losses, without_logits
from hf_dp.clipping.gradients import Lookups, positions
from hf_dp.clipping.rounding import accumulation_dtype, outer_sums
from hf_dp.clipping.rules.rule import Found, Use
from hf_dp.errors import DataError, UnsupportedModelError
from hf_dp.losses import is_decoder, register_model_class, with_position_ids
from hf_dp.run.gguf import reading, with_weights
from hf_dp.tasks.classification import labels_of
from hf_dp.tasks.templates import Infilling, label_word_ids, last_words, with_template


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


@dataclass(frozen=True)
class LabelWords:
    """Hold what the configuration of an infilling classifier says (``config.label_words``).

    Args:
        template: as its tokenizer applies it.
        words: the word of each class, in the order of their ids.
        ids: the tokens of each word.
        mask_token_id: the token in whose place the word is predicted; None for a decoder.
        last_words: the tokens after the texts with which a decoder's template ends.
    """

    template: str
    words: Sequence[str]
    ids: Sequence[Sequence[int]]
    mask_token_id: int | None = None
    last_words: Sequence[int] = ()

    @property
    def one_token_each(self) -> bool:
        """Return whether each word is one token."""
        return all(len(each) == 1 for each in self.ids)


class LabelWordClassifier(PreTrainedModel):
    """Classify by label words; :func:`with_label_words` adds this to a language model's class."""

    label_words: LabelWords

    def classify(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: object,
    ) -> SequenceClassifierOutput:
        """Return the logits, (b, K), and a mean loss if labels, (b,), are given.

        Raises: DataError for examples, of ``input_ids`` (b, T), without the template.
        """
        words = self.label_words
        if input_ids is None and not (words.mask_token_id is None and words.one_token_each):
            raise DataError(
                "Infilling with a mask, or with label words of several tokens, needs `input_ids`, "
                "in which it finds its place; prompt tuning replaces them."
            )
        if not words.one_token_each and inputs.get("past_key_values") is not None:
            raise UnsupportedModelError(
                "Prefix tuning cannot be combined with label words of several tokens: one prefix "
                "would be read by several forwards. Choose words of one token, or LoRA."
            )
        if input_ids is not None:
            self._check_batch(input_ids, attention_mask)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, **inputs}
        given = {name: value for name, value in given.items() if value is not None}
        given["return_dict"] = True
        states = {}
        if not words.one_token_each:
            logits = self._scores(cast("dict[str, Tensor]", given))
        else:
            if words.mask_token_id is None:
                alone = self._last_alone(attention_mask)
            else:
                assert input_ids is not None
                alone = self._mask_alone(input_ids == words.mask_token_id)
            with alone:
                output = self._run(given)
            logits = output.logits[:, 0]
            states = {name: output.get(name) for name in ("hidden_states", "attentions")}
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, **states)

    def _run(self, inputs: Mapping[str, object]) -> Any:
        """Run the language model itself."""
        inputs = with_position_ids(self, cast("dict[str, Tensor]", dict(inputs)))
        return super().forward(**inputs)

    @contextmanager
    def _mask_alone(self, masks: Tensor) -> Iterator[None]:
        """Let the head of a masked language model get the hidden state at the mask alone."""
        where = masks.int().argmax(1)

        def only_mask(module: nn.Module, args: object, output: BaseModelOutput) -> BaseModelOutput:
            hidden = output.last_hidden_state
            assert hidden is not None
            index = where[:, None, None].expand(-1, 1, hidden.shape[2])
            output.last_hidden_state = hidden.gather(1, index)
            return output

        with self.base_model.register_forward_hook(only_mask):
            yield

    @contextmanager
    def _last_alone(self, attention_mask: Tensor | None, count: int = 1) -> Iterator[None]:
        """Let a decoder's head get the hidden states at the last ``count`` attended tokens alone.

        They are counted from the right: virtual tokens may stand on the left."""

        def only_last(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = args[0]
            end = torch.full((len(hidden),), hidden.shape[1], device=hidden.device)
            if attention_mask is not None:
                end = end - attention_mask.flip(1).int().argmax(1)
            index = end[:, None] - count + torch.arange(count, device=hidden.device)
            return (hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[2])),)

        with cast(nn.Module, self.get_output_embeddings()).register_forward_pre_hook(only_last):
            yield

    def _scores(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the log-probability of each class's word after each text, (b, K)."""
        ids = [
            torch.tensor(each, device=inputs["input_ids"].device) for each in self.label_words.ids
        ]
        head, at_words = check_head(self), []
        for word in ids:
            more = _continued(inputs, word[:-1])
            with self._last_alone(more["attention_mask"], len(word)), without_logits(head) as found:
                output = self._run(more)
            at_words.append(check_output(self, found, output.logits))
        hidden, tokens = torch.cat(at_words, 1), torch.cat(ids)
        losses = token_losses(head, hidden, tokens.expand(len(hidden), -1))
        parts = losses.split([len(word) for word in ids], 1)
        return -torch.stack([part.sum(1) for part in parts], 1)

    def _check_batch(self, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        """Raise DataError for token ids (b, T) without the template."""
        words = self.label_words
        if words.mask_token_id is not None:
            self.check_tokens(input_ids)
            return
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape:  # with a prefix
            mask = mask[:, -input_ids.shape[1] :]
        count = len(words.last_words)
        end = input_ids.shape[1] - mask.flip(1).int().argmax(1)
        index = end[:, None] - count + torch.arange(count, device=end.device)
        if bool((index < 0).any()):
            self._refuse()
        self.check_tokens(input_ids.gather(1, index))

    def check_tokens(self, input_ids: Tensor) -> None:
        """Raise DataError for attended token ids (..., T) with other than one mask token, or, of a
        decoder, with other last tokens than those of the template."""
        words = self.label_words
        if words.mask_token_id is not None:
            right = (input_ids == words.mask_token_id).sum(-1) == 1
        else:
            last = torch.tensor(list(words.last_words), dtype=input_ids.dtype).to(input_ids.device)
            there = input_ids[..., input_ids.shape[-1] - len(last) :]
            right = torch.tensor(there.shape[-1] == len(last)) and (there == last).all(-1)
        if not bool(right.all()):
            self._refuse()

    def _refuse(self) -> None:
        words = self.label_words
        expected = (
            f"to end with {words.template!r}, whose last tokens are {list(words.last_words)}"
            if words.mask_token_id is None
            else "to have the mask token exactly once"
        )
        raise DataError(
            f"Expected each example {expected}. Otherwise the place of the missing word is lost. "
            "Encode texts with the tokenizer saved beside this model, which puts them into its "
            f"template {words.template!r}, as one text or as a pair, cuts the texts alone, and "
            "leave out texts that hold the mask token themselves."
        )

    def valid_input_ids(self, input_ids: Tensor) -> Tensor:
        """Make random token ids (b, T) acceptable. Each example gets the mask token at a random
        place and nowhere else, or the last words of a decoder's template."""
        words = self.label_words
        mask, last = words.mask_token_id, torch.tensor(list(words.last_words), dtype=torch.long)
        if mask is None:
            kept = input_ids[..., : max(0, input_ids.shape[-1] - len(last))]
            return torch.cat([kept, last.expand(*kept.shape[:-1], -1)], -1)
        input_ids = torch.where(input_ids == mask, words.ids[0][0], input_ids)
        return input_ids.scatter(1, torch.randint(input_ids.shape[1], (len(input_ids), 1)), mask)


def _continued(inputs: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """Return inputs of a decoder with some tokens after the last attended one of each example."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    more, count = dict(inputs, attention_mask=mask), len(tokens)
    end = ids.shape[1] - mask.flip(1).int().argmax(1, keepdim=True)
    index = end + torch.arange(count, device=ids.device)
    new = {"input_ids": tokens.expand(len(ids), -1), "attention_mask": torch.ones_like(index)}
    if (places := inputs.get("position_ids")) is not None:
        new["position_ids"] = places.gather(1, end - 1) + 1 + torch.arange(count).to(ids.device)
    if (kinds := inputs.get("token_type_ids")) is not None:
        new["token_type_ids"] = kinds.gather(1, end - 1).expand(-1, count)
    for name, values in new.items():
        more[name] = F.pad(more[name], (0, count)).scatter(1, index, values.to(more[name].dtype))
    return more


def _class_of(base: type[PreTrainedModel]) -> type[LabelWordClassifier]:
    """Return a class of the same name, so that a saved configuration names a class of transformers.

    It has the signature of ``base``, from which Trainer knows the columns that a model takes."""

    @functools.wraps(base.forward)
    def forward(self: LabelWordClassifier, *args: Any, **inputs: Any) -> SequenceClassifierOutput:
        return self.classify(*args, **inputs)

    names = {
        "forward": forward,
        "accepts_loss_kwargs": False,  # its loss is a mean
        "config_class": base.config_class,
        "__module__": base.__module__,
        "__doc__": LabelWordClassifier.__doc__,
    }
    return type(base.__name__, (LabelWordClassifier, base), names)


def with_label_words(model: PreTrainedModel, words: LabelWords) -> LabelWordClassifier:
    """Make a classifier of a language model, in place, and return it. Its logits are (b, K).

    Raises: UnsupportedModelError for a head that is no linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or model.base_model is model:
        raise UnsupportedModelError(
            f"The output embeddings of {type(model).__name__} are {type(head).__name__}, but "
            "nn.Linear was expected. Train a classification head instead."
        )
    if words.one_token_each:
        own = dict(head.named_parameters())
        ids = [token for (token,) in words.ids]
        _replace(model, head, LabelWordProjection(own["weight"], own.get("bias"), ids))
    model.__class__ = _class_of(type(model))
    made = cast(LabelWordClassifier, model)
    made.label_words = words
    made.config.label_words = asdict(words)
    return made


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace one module by another, in place, and change nothing else. ``set_output_embeddings``
    of BERT and others also ties biases that were not tied."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def load_infilling(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    infilling: Infilling,
    class_names: Sequence[str],
    gguf_file: str | None = None,
) -> tuple[LabelWordClassifier, PreTrainedTokenizerFast]:
    """Return a language model as a classifier, and its tokenizer with the template.

    Args:
        name: a Hub name or folder of a masked language model or a decoder.
        tokenizer: that of the base, without a template.
        class_names: in the order of their ids, with a word each in ``infilling``.
        gguf_file: the GGUF file in ``name`` to read, if any.

    Raises:
        DataError: the checkpoint has no trained head, the tokenizer takes no template, or a class
            has no word.
        InvalidArgumentError: a template or word that this base cannot fill in.
        UnsupportedModelError: the head is no linear layer.
    """
    causal = is_decoder(AutoConfig.from_pretrained(name, **reading(gguf_file)))
    infilling = infilling.for_base(tokenizer, causal)
    ids = label_word_ids(tokenizer, infilling, class_names)
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    model, info = with_weights(auto, name, gguf_file)
    if info["missing_keys"]:
        raise DataError(
            f"The checkpoint {name!r} has no trained head of a language model, so it cannot "
            "predict a word. Use a language model, continue this one's pretraining "
            "(recipes/pretraining/masked_lm.py), or leave `infilling` out to train a "
            "classification head."
        )
    model.config.update(labels_of(class_names))
    template = infilling.template
    words = LabelWords(
        template.text,
        [infilling.label_words[name] for name in class_names],
        ids,
        None if causal else tokenizer.mask_token_id,
        last_words(tokenizer, template) if causal else (),
    )
    return with_label_words(model, words), with_template(tokenizer, template, causal)


def load_trained(folder: str) -> tuple[LabelWordClassifier, PreTrainedTokenizerBase] | None:
    """Return a saved infilling classifier and its tokenizer.

    Args: folder: what was saved, or its Hub name. None is returned where it has another model.
    """
    config = AutoConfig.from_pretrained(folder)
    kept, names = getattr(config, "label_words", None), config.architectures or [""]
    if kept is None or names[0].endswith("Classification"):  # a new head on what filled in words
        return None
    auto = AutoModelForCausalLM if is_decoder(config) else AutoModelForMaskedLM
    model = auto.from_pretrained(folder)
    return with_label_words(model, LabelWords(**kept)), AutoTokenizer.from_pretrained(folder)


register_model_class(LabelWordClassifier, "sequence_classification")
