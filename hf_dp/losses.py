"""Compute per-example losses from logits.

The model is called *without* labels: its own loss averages over the batch, which makes one
example's gradient depend on its neighbors (and on their number of tokens).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto import modeling_auto

from hf_dp._borrowed import shift_right
from hf_dp._validate import one_of
from hf_dp.clipping.chunked_loss import check_head, check_output, chunked_loss, without_logits
from hf_dp.errors import DataError, UnsupportedLossError, UnsupportedModelError


def _classes(table: str) -> frozenset[str]:
    """Return the class names in one of transformers' own tables."""
    mapping = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values()
    names = ([each] if isinstance(each, str) else each for each in mapping)
    return frozenset(name for several in names for name in several)


# Which classes belong to a task; the first that names a class decides.
_TASKS = {
    "sequence_classification": _classes("SEQUENCE_CLASSIFICATION"),
    "image_classification": _classes("IMAGE_CLASSIFICATION"),
    "token_classification": _classes("TOKEN_CLASSIFICATION"),
    # XLM stands in this table and in that of masked language models; its own loss is of the latter.
    "causal_lm": (_classes("CAUSAL_LM") | _classes("IMAGE_TEXT_TO_TEXT"))
    - _classes("SEQ_TO_SEQ_CAUSAL_LM")
    - {"XLMWithLMHeadModel"},
    "seq2seq_lm": _classes("SEQ_TO_SEQ_CAUSAL_LM"),
    "masked_lm": _classes("MASKED_LM"),
    "question_answering": _classes("QUESTION_ANSWERING"),
    "multiple_choice": _classes("MULTIPLE_CHOICE"),
}
_REGISTERED: dict[type[nn.Module], str] = {}
_OF_WHOLE_EXAMPLES = ("sequence_classification", "image_classification")
_SPANS, CHOICE = "question_answering", "multiple_choice"
Inputs = Mapping[str, Tensor]  # a collated batch
IGNORED_LABEL = -100
Args = tuple[object, ...]
Given = tuple[Args, dict[str, Tensor]]  # to a forward
Batch = TypeVar("Batch")
SPAN = ("start_positions", "end_positions")  # the first and last token of an answer in its text

# Decoders whose labels the user shifts: the logits at a position are for the label there.
_NOT_SHIFTED = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Bart BigBirdPegasus Blenderbot BlenderbotSmall CpmAnt MBart Marian Mvp PLBart Pegasus "
        "TrOCR Whisper"
    ).split()
) | {"XLNetLMHeadModel"}
# Without a problem_type, these take a distribution over the classes where others take several.
_SOFT_LABELS = frozenset({"DebertaForSequenceClassification", "DebertaV2ForSequenceClassification"})
# Classifiers that read at the last end token, and raise where rows have other numbers of them.
_READ_AT_THE_END = frozenset(
    f"{name}ForSequenceClassification"
    for name in "Bart BigBirdPegasus MBart MT5 Mvp PLBart T5 UMT5".split()
)
# Classifiers that read at the last token that is not padding, which they tell by its id.
_READ_BEFORE_PADDING = frozenset(
    f"{name}ForSequenceClassification"
    for name in "BioGpt Bloom CTRL Falcon GPT2 GPTBigCode GPTJ GPTNeo GPTNeoX ModernBertDecoder "
    "Mpt OPT OpenAIGPT Zamba Zamba2".split()
) | {"GenericForSequenceClassification"}
_DECODER_ONLY = frozenset(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - frozenset(
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
)


def is_decoder(config: object) -> bool:
    """Return whether a configuration is that of a decoder without an encoder."""
    return getattr(config, "model_type", None) in _DECODER_ONLY


def base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a PEFT wrapper or a SentenceTransformer, or the model
    itself."""
    unwrap: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    inside: nn.Module | None = getattr(model, "transformers_model", None)
    return unwrap() if unwrap is not None else model if inside is None else inside


def _config(model: nn.Module) -> Any:
    """Return the configuration of a model, which has the fields of its class."""
    return base_model(model).config


def _names(model: nn.Module) -> set[str]:
    """Return the names of a model's class and of its bases."""
    return {cls.__name__ for cls in type(base_model(model)).__mro__}


def padding_moves_prompts(model: nn.Module) -> bool:
    """Return whether padding on the left of a decoder's prompts changes what it writes. Prompt
    tuning puts its virtual tokens before the padding, and passes no position ids on."""
    config = getattr(model, "active_peft_config", None)
    if config is None or not config.is_prompt_learning:
        return False
    whole = getattr(base_model(model), "config", None)
    return config.peft_type != "PREFIX_TUNING" and not getattr(whole, "is_encoder_decoder", False)


def positions_of(model: nn.Module) -> int | None:
    """Return how many tokens a model has positions for, beside an adapter's; None for no limit."""
    limit = getattr(getattr(base_model(model), "config", None), "max_position_embeddings", None)
    virtual = getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None) or 0
    return limit - virtual if isinstance(limit, int) else None


def _forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    # The class is asked because an instance may have another forward inside the engine.
    return inspect.signature(type(model).forward).parameters


def takes_attention_mask(model: nn.Module) -> bool:
    """Return whether the forward of a model has an ``attention_mask``."""
    return "attention_mask" in _forward_parameters(base_model(model))


def register_model_class(model_class: type[nn.Module], task: str) -> None:
    """Declare that the logits of this class, and of its subclasses, are those of a task (one of
    those that :func:`task_of` returns)."""
    _REGISTERED[model_class] = one_of("task", task, _TASKS)


def task_of(model: nn.Module) -> str:
    """Return the model's kind of task: ``"sequence_classification"``, ``"causal_lm"``, ..."""
    for known in type(base_model(model)).__mro__:
        if known in _REGISTERED:
            return _REGISTERED[known]
    names = _names(model)
    for task, classes in _TASKS.items():
        if names & classes:
            return task
    raise UnsupportedLossError(
        f"No per-example loss is known for {type(base_model(model)).__name__}, only for "
        f"transformers' classes of {', '.join(_TASKS)}. Override "
        "DPTrainer.compute_per_example_loss(self, model, inputs) to return one loss per example, "
        "shape (b,), each from that example alone."
    )


def known_task(model: nn.Module | None) -> str:
    """Return the model's kind of task, "" where no loss is known."""
    try:
        return "" if model is None else task_of(model)
    except UnsupportedLossError:
        return ""


def means_over_rows(model: nn.Module | None) -> bool:
    """Return whether a transformers model's own loss is the mean over the rows of its batch."""
    return known_task(model) in (*_OF_WHOLE_EXAMPLES, _SPANS, CHOICE)


def targets_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of what a batch holds to be predicted."""
    return SPAN if known_task(model) == _SPANS else ("labels",)


def puts_images_into_text(model: nn.Module) -> bool:
    """Return whether a model may put what it makes of images between the tokens of a text."""
    return not _WITH_IMAGES.isdisjoint(_names(model))


_WITH_IMAGES = _classes("IMAGE_TEXT_TO_TEXT") - {"GitForCausalLM"}  # which puts them before it


def placeholders_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ids of tokens at whose places a model puts what it makes of images, videos and
    sound, and of those around them."""
    config = vars(getattr(base_model(model), "config", object))
    known = (value for name, value in config.items() if _PLACEHOLDER.fullmatch(name))
    return tuple(value for value in known if isinstance(value, int))


_PLACEHOLDER = re.compile("(image|video|audio|vision|boi|eoi).*_token_(id|index)")


def token_check(model: nn.Module) -> Callable[[Tensor], None] | None:
    """Return what raises DataError for attended token ids, (T,), that the forward would refuse."""
    base = base_model(model)
    if reads_before_padding(model):
        return partial(_refuse_padding_at_the_end, type(base).__name__, _padding_token(model))
    if _READ_AT_THE_END.isdisjoint(_names(model)):
        return getattr(base, "check_tokens", None)
    end = _config(model).eos_token_id

    def check(tokens: Tensor) -> None:
        if not bool((tokens == end).any()):
            raise DataError(
                f"`input_ids` has no end token ({end}), where {type(base).__name__} reads its "
                "class. Let the tokenizer add it (add_special_tokens=True) and truncate, so that "
                "the end token stays."
            )

    return check


def reads_before_padding(model: nn.Module) -> bool:
    """Return whether a classifier reads at the last token that is not padding, by its id."""
    return not _READ_BEFORE_PADDING.isdisjoint(_names(model))


def reads_by_tokens(model: nn.Module) -> bool:
    """Return whether a classifier finds the place where it reads by the ids of tokens, so that
    :func:`each_row_read_as_alone` shows it others than its backbone."""
    return not (_READ_BEFORE_PADDING | _READ_AT_THE_END).isdisjoint(_names(model))


def _padding_token(model: nn.Module) -> int | None:
    return _config(model).get_text_config().pad_token_id


def _refuse_padding_at_the_end(class_name: str, padding: int | None, tokens: Tensor) -> None:
    """Raise DataError for attended token ids, (T,), that end with the token that pads."""
    if len(tokens) and int(tokens[-1]) == padding:
        raise DataError(
            f"`input_ids` ends with the token that pads ({padding}). What is trained here reads "
            f"the class there, but whoever loads the {class_name} with transformers would read it "
            "at an earlier token. Leave that token out of the text, or give padding a token of "
            "its own: set tokenizer.pad_token to one that no text holds, and "
            "model.config.pad_token_id to its id."
        )


def _up_to_the_end(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ids that lead BART's classifier and its like to the last end token, and the ids of
    the decoder: other end tokens are hidden."""
    base, end, ids, mask = base_model(model), _config(model).eos_token_id, *_ids_and_mask(inputs)
    places = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where((ids == end) & mask, places, -1).amax(1, keepdim=True)
    shown = {"input_ids": ids.masked_fill((ids == end) & (places != last), int(end == 0))}
    no_decoder = inputs.get("decoder_input_ids") is None
    if no_decoder and (shifted := shift_right(base, ids)) is not None:
        shown["decoder_input_ids"] = shifted
    return shown


def _up_to_the_padding(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ids that lead a decoder's classifier to the last token that is attended to: all
    others are shown as padding, and it is not."""
    padding, ids, mask = _padding_token(model), *_ids_and_mask(inputs)
    if padding is None:
        if len(ids) == 1 and bool(mask.all()):
            return {}
        raise UnsupportedModelError(
            f"{type(base_model(model)).__name__} reads the class before the padding, and its "
            "configuration names no padding token. Set model.config.pad_token_id = "
            "tokenizer.pad_token_id."
        )
    places = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(mask, places, 0).amax(1, keepdim=True)
    return {"input_ids": torch.full_like(ids, padding).scatter(1, last, int(padding == 0))}


def _ids_and_mask(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the token ids, (b, T), and which of them are attended to."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    # An adapter of prefixes adds its own to the front of the mask.
    return ids, torch.ones_like(ids) != 0 if mask is None else mask[:, -ids.shape[1] :] != 0


@contextmanager
def each_row_read_as_alone(model: nn.Module) -> Iterator[None]:
    """Let a classifier read each row of a batch where it reads the row alone, without padding.

    BART's, T5's and the like read at the last end token, and raise where rows have other numbers of
    them. Those of decoders read at the last token that has not the id of padding, which may be the
    end token of the text, too. Inside, such a classifier is shown ids that lead it to the right
    place, and its backbone is shown all. Positions do not count padding on the left.
    """
    names = _names(model)
    if not _READ_BEFORE_PADDING.isdisjoint(names):
        ids_to_show = _up_to_the_padding
    elif not _READ_AT_THE_END.isdisjoint(names):
        ids_to_show = _up_to_the_end
    else:
        yield
        return
    base = base_model(model)
    all_tokens: list[Tensor] = []

    def hide(module: nn.Module, args: Args, inputs: dict[str, Tensor]) -> Given | None:
        if inputs.get("input_ids") is None:
            return None
        inputs = with_position_ids(model, inputs)
        all_tokens[:] = [inputs["input_ids"]]
        return args, {**inputs, **ids_to_show(model, inputs)}

    def show(module: nn.Module, args: Args, inputs: dict[str, Tensor]) -> Given | None:
        if not all_tokens:  # not called by the classifier
            return None
        ids = all_tokens.pop()
        return ((ids, *args[1:]), inputs) if args else (args, {**inputs, "input_ids": ids})

    backbone: nn.Module = getattr(base, str(base.base_model_prefix))
    hooks = [
        base.register_forward_pre_hook(hide, with_kwargs=True),
        # The first shows last, if another one is inside.
        backbone.register_forward_pre_hook(show, with_kwargs=True, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def per_example_loss(model: nn.Module, inputs: Inputs, chunked: bool = False) -> Tensor:
    """Return one loss per example, (b,), each a function of its own example only.

    Args:
        inputs: a collated batch with ``labels``: (b,) integers (single label, or the place of the
            right choice) or floats (regression, one output), (b, K) floats (multi-label), or (b, T)
            class or token ids with -100 where nothing is predicted. An example's loss is then the
            mean over its own labeled tokens, 0 when it has none. Or with ``start_positions`` and
            ``end_positions``, (b,).
        chunked: form a causal language model's loss by blocks of the vocabulary
            (:mod:`hf_dp.clipping.chunked_loss`).

    Raises: UnsupportedLossError; DataError when the labels are missing or do not fit.
    """
    task, base, inputs = task_of(model), base_model(model), dict(inputs)
    class_name = type(base).__name__
    for target in targets_of(model):
        if target not in inputs:
            hint = (
                f"Give each row the places of its answer's first and last token, as {SPAN}."
                if task == _SPANS
                else "Name the label column `label` or `labels`, or use a collator that makes them."
            )
            raise _missing(target, inputs, hint)
    _require_inputs(model, inputs)
    if task == _SPANS:
        return _span_loss(model, inputs)
    labels = labels_read(model, inputs.pop("labels"))
    if task == "seq2seq_lm" and "decoder_input_ids" not in inputs:
        shift = getattr(base, "prepare_decoder_input_ids_from_labels", None)
        if shift is None:
            hint = (
                f"{class_name} does not make them from labels: let the data collator return them."
            )
            raise _missing("decoder_input_ids", inputs, hint)
        inputs["decoder_input_ids"] = shift(labels=labels)
    if chunked and task != "causal_lm":
        raise UnsupportedLossError(
            f"`chunked_loss` is for causal language models, and {class_name} is for {task}. Set "
            "chunked_loss=False."
        )
    head = check_head(base) if chunked else None
    blocks = nullcontext() if head is None else without_logits(head)
    with each_row_read_as_alone(model), blocks as found:
        output = model(**with_position_ids(model, inputs))
    logits = getattr(output, "logits", None)
    if logits is None:
        raise UnsupportedLossError(
            f"{class_name} returned no logits, so no loss can be formed. Override "
            "DPTrainer.compute_per_example_loss to return one loss per example."
        )
    labels = counted_labels(model, {**inputs, "labels": labels})
    if task == "causal_lm" and base is not model and labels.dim() == 2:
        # Virtual tokens of prompt tuning stand before the example; nothing predicts them.
        virtual = max(0, logits.shape[1] - labels.shape[1])
        labels = F.pad(labels, (virtual, 0), value=IGNORED_LABEL)
    if head is None or found is None:
        return _LOSSES[task](base, logits, labels)
    hidden = check_output(base, found, logits)
    _require_one_per_token(labels, hidden)
    return chunked_loss(head, *_at_targets(model, hidden, labels), IGNORED_LABEL)


def _missing(name: str, inputs: Inputs, next_move: str) -> DataError:
    return DataError(f"The batches have no `{name}` (they have {sorted(inputs)}). {next_move}")


def _require_inputs(model: nn.Module, inputs: Inputs) -> None:
    """Raise for a batch without its images, or without the mask that hides padding."""
    base = base_model(model)
    if "pixel_values" not in inputs and getattr(base, "main_input_name", None) == "pixel_values":
        raise _missing(
            "pixel_values",
            inputs,
            "Let the data set's transform or the collator return the images. Their column is kept "
            "only with remove_unused_columns=False.",
        )
    # Without a mask an example attends to its padding, and how much padding there is depends on its
    # neighbors.
    only_images = "pixel_values" in inputs and not {"input_ids", "inputs_embeds"} & set(inputs)
    if takes_attention_mask(model) and not only_images and "attention_mask" not in inputs:
        tokens = getattr(base, "main_input_name", None) == "input_ids"
        if tokens and not {"input_ids", "inputs_embeds"} & set(inputs):
            tokenize = "data.map(lambda rows: tokenizer(rows['text']), batched=True)"
            why = f"Tokenize the rows: {tokenize}, with the name of your column."
            raise _missing("input_ids", inputs, why)
        raise _missing(
            "attention_mask",
            inputs,
            "An example would attend to padding. Let the tokenizer return it and keep it in the "
            "data collator (all ones where nothing is padded).",
        )


def _span_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the mean of the cross-entropies of an answer's first and last token, (b,). Padding
    takes no part: an example has more of it the longer its neighbors are, and transformers' own
    loss counts it among the places where an answer could be."""
    mask = inputs.get("attention_mask")
    if mask is not None and not bool(mask[:, 0].all()):
        raise DataError(
            "Examples are padded on the left, which moves the tokens that start_positions and "
            "end_positions count. Set tokenizer.padding_side = 'right'."
        )
    places = [inputs.pop(name).reshape(-1).long() for name in SPAN]
    output = model(**inputs)
    losses = []
    for logits, place in zip((output.start_logits, output.end_logits), places, strict=True):
        logits = widened(logits)
        if mask is not None:  # virtual tokens of an adapter stand before the example's own
            logits = logits[:, -mask.shape[1] :].masked_fill(mask == 0, -torch.inf)
        losses.append(F.cross_entropy(logits, place, reduction="none"))
    return (losses[0] + losses[1]) / 2


def with_position_ids(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give left-padded examples of a decoder-only model explicit position ids. They count from each
    example's first token on. Without them, absolute positions count the padding, which is as long
    as the longest example of the batch needs it."""
    mask = inputs.get("attention_mask")
    base = base_model(model)
    if mask is None or mask.dim() != 2 or "position_ids" in inputs or bool(mask[:, 0].all()):
        return inputs
    if not is_decoder(getattr(base, "config", None)) or "position_ids" not in _forward_parameters(
        base
    ):
        raise UnsupportedModelError(
            f"Examples are padded on the left, and {type(base).__name__} would count padding, of "
            "which there is as much as the neighbors need. Set tokenizer.padding_side = 'right'."
        )
    if padding_moves_prompts(model):
        virtual: Any = model.active_peft_config
        raise UnsupportedModelError(
            "Examples are padded on the left, where the virtual tokens of "
            f"{virtual.peft_type} stand before the padding: how far they are from "
            "the text depends on the neighbors. Use PrefixTuningConfig or LoraConfig; a language "
            "model can also be padded on the right (tokenizer.padding_side = 'right')."
        )
    tokens = mask != 0
    begins = tokens & ~F.pad(tokens[:, :-1], (1, 0))
    if bool((begins.sum(1) > 1).any()):
        # Without position ids, some models count over the hole and some (OPT) count only tokens.
        raise DataError(
            "Examples are padded on the left, and one attention_mask has a hole (0 between two 1), "
            "so positions would depend on neighbors. Set tokenizer.padding_side = 'right', leave "
            "masked tokens out, or let the collator make position_ids."
        )
    first = tokens.long().argmax(1, keepdim=True)
    positions = torch.arange(mask.shape[1], device=mask.device) - first
    return {**inputs, "position_ids": positions.clamp_min(0)}


def problem_type(model: nn.Module, labels: Tensor) -> str:
    """Return ``config.problem_type``, or what transformers infers from the labels."""
    config = _config(model)
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    several = labels.is_floating_point()
    return "multi_label_classification" if several else "single_label_classification"


def labels_read(model: nn.Module, labels: Tensor) -> Tensor:
    """Return labels in the type in which training and evaluation both read them. Transformers knows
    classes only by 32 or 64 bits: true and false, or a byte, it reads as several classes each."""
    of_tokens = task_of(model) not in _OF_WHOLE_EXAMPLES
    kind = None if of_tokens else problem_type(model, labels)
    if not labels.is_floating_point():
        return labels.long() if kind in (None, "single_label_classification") else labels.float()
    several = kind == "multi_label_classification" == _config(model).problem_type
    if labels.numel() and (
        of_tokens or (labels.dim() == 1 and kind != "regression" and not several)
    ):
        raise DataError(
            f"`labels` holds {float(labels.flatten()[0])}, a float, but the model takes class ids. "
            "Make the labels whole numbers: dataset.cast_column('label', datasets.Value('int64'))."
        )
    return labels


def with_labels_read(model: nn.Module, inputs: Batch) -> Batch | Inputs:
    """Return a batch with its labels as :func:`labels_read` does, where the loss is known."""
    if not isinstance(inputs, Mapping) or inputs.get("labels") is None or not known_task(model):
        return inputs
    return {**inputs, "labels": labels_read(model, inputs["labels"])}


def attended_targets(labels: Tensor, mask: Tensor) -> Tensor:
    """Return the labels (b, T) of a decoder without those that padding predicts or holds.

    A target counts if it and the position before it are both attended to. Beside left padding, an
    example's first token would be predicted from that padding, which the example alone does not
    have. Nothing stands before the first position, or a prompt does.
    """
    attended = mask != 0
    before = torch.cat([torch.ones_like(attended[:, :1]), attended[:, :-1]], 1)
    return labels.masked_fill(~(attended & before), IGNORED_LABEL)


def _labels_are_shifted(model: nn.Module) -> bool:
    """Return whether each label of a decoder stands at the position that predicts it."""
    return not _NOT_SHIFTED.isdisjoint(_names(model))


def counted_labels(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return a batch's labels without those, of a decoder, that padding predicts or holds."""
    labels, mask = inputs["labels"], inputs.get("attention_mask")
    if task_of(model) != "causal_lm" or mask is None or mask.shape != labels.shape:
        return labels
    if _labels_are_shifted(model):
        return labels.masked_fill(mask == 0, IGNORED_LABEL)
    return attended_targets(labels, mask)


def number_of_targets(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return how many labels each example's loss is the mean over, (b,)."""
    labels = counted_labels(model, inputs)
    if task_of(model) == "causal_lm":
        _, labels = _at_targets(model, labels, labels)
    return (labels != IGNORED_LABEL).sum(1)


def labels_at_their_tokens(model: nn.Module, labels: Tensor) -> Tensor:
    """Return the labels (b, T) that a decoder's loss takes for tokens to be predicted."""
    if _labels_are_shifted(model):
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return labels


def _at_targets(model: nn.Module, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a decoder gives at each position, (b, T, ...), and the label for it."""
    return (values, labels) if _labels_are_shifted(model) else (values[:, :-1], labels[:, 1:])


def _require_one_per_token(labels: Tensor, values: Tensor) -> None:
    if labels.shape != values.shape[:2]:
        raise DataError(
            f"Expected one label per token, shape {tuple(values.shape[:2])}, got "
            f"{tuple(labels.shape)}."
        )


def widened(logits: Tensor) -> Tensor:
    """Return logits in float32 where they have 16 bits."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def classification_loss(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """Return one loss per example, (b,), by the model's problem type, for logits (b, K)."""
    kind, logits = problem_type(model, labels), widened(logits)
    if kind == "single_label_classification":
        if labels.shape != logits.shape[:1]:
            raise DataError(
                f"Expected one label per example, shape {(len(logits),)}, got "
                f"{tuple(labels.shape)}. For several classes of an example, give floats and set "
                "config.problem_type='multi_label_classification'."
            )
        return F.cross_entropy(logits, labels.long(), reduction="none")
    if labels.numel() != logits.numel() or len(labels) != len(logits):
        raise DataError(
            f"Expected labels for {kind} of the shape of the logits, {tuple(logits.shape)}, got "
            f"{tuple(labels.shape)}. Check config.num_labels and config.problem_type."
        )
    labels = labels.to(logits.dtype).reshape(logits.shape)
    if kind == "regression":
        return F.mse_loss(logits, labels, reduction="none").flatten(1).mean(1)
    if kind != "multi_label_classification":
        raise UnsupportedLossError(
            "Expected `config.problem_type` to be regression, single_label_classification or "
            f"multi_label_classification, got {kind!r}."
        )
    if _config(model).problem_type is None and not _SOFT_LABELS.isdisjoint(_names(model)):
        return F.cross_entropy(logits, labels, reduction="none")
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses.flatten(1).mean(1)


def _choice(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of the right one of each example's k choices, logits (b, k)."""
    return F.cross_entropy(widened(logits), labels.reshape(-1), reduction="none")


def _tokens(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over each example's *own* labeled tokens; 0 if it has none."""
    _require_one_per_token(labels, logits)
    # With the classes last: a GPU took 75 times as long for a softmax over another dimension.
    tokens = F.cross_entropy(
        widened(logits).flatten(0, 1),
        labels.flatten(),
        reduction="none",
        ignore_index=IGNORED_LABEL,
    ).view(labels.shape)
    return tokens.sum(1) / (labels != IGNORED_LABEL).sum(1).clamp_min(1)


def _causal_lm(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    return _tokens(model, *_at_targets(model, logits, labels))


_LOSSES: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "sequence_classification": classification_loss,
    "image_classification": classification_loss,
    "multiple_choice": _choice,
    "token_classification": _tokens,
    "causal_lm": _causal_lm,
    "seq2seq_lm": _tokens,
    "masked_lm": _tokens,
}
