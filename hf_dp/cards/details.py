"""What a card says beside the privacy statement (the model, its data, license, scores, settings),
and its YAML block, with ``differential_privacy`` for programs."""

from __future__ import annotations

import math
import numbers
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from hf_dp._arguments import argument
from hf_dp._dataclasses import Kept, plain
from hf_dp._validate import invalid
from hf_dp.errors import InvalidArgumentError
from hf_dp.statement.statement import PrivacyStatement

# Where the names go in `usage`, once they are known.
REPOSITORY = "@repository@"
BASE_MODEL = "@base_model@"
BASE_WEIGHTS = "base_weights"  # among the settings, but shown below the base


@dataclass(frozen=True, kw_only=True)
class CardDetails(Kept):
    """What the card says.

    It is what does not follow from the statement. A local path is reduced to a name.

    Args:
        metrics: numbers computed on evaluation data, by the Trainer's names ("eval_accuracy"); one
            that is not finite becomes None, and what is no number is left out.
        training: public settings (learning rate, batch sizes, ...), shown as given.
        given: names of the fields that the user set; they survive every later save.

    Raises: InvalidArgumentError for a value of another type.
    """

    model_name: str = argument("model", "What the card's title begins with. Unset means the task.")
    repository: str | None = argument(
        None, "The model's id on the Hub, for the lines that check and load it."
    )
    base_model: str | None = argument(None, "Its id on the Hub, else its name.")
    dataset: str | None = argument(
        None,
        "Its id on the Hub, else its name; with a configuration, nyu-mll/glue/sst2. The card warns "
        "where the base has seen it.",
    )
    evaluation_split: str | None = argument(
        None, "The split that the metrics were computed on, for example validation."
    )
    task_tag: str | None = argument(
        None, "The Hub's pipeline tag, for example text-classification."
    )
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    training: Mapping[str, object] = field(default_factory=dict)
    recipe: str | None = argument(None, "The file or command that trained it.")
    license: str | None = argument(
        None, "As the Hub spells it: apache-2.0, mit, cc-by-4.0, ..., other."
    )
    license_name: str | None = argument(None, "With license other.")
    license_link: str | None = argument(None, "With license other.")
    language: tuple[str, ...] = argument((), "ISO 639 codes.")
    tags: tuple[str, ...] = argument((), "Tags to add.")
    library_name: str = argument("transformers", "transformers or peft.")
    pretraining_sources: tuple[str, ...] = argument(
        (), "Names of public data sets that the base has seen."
    )
    usage: str | None = argument(
        None, f"Python lines that load the model, named {REPOSITORY}, on its base, {BASE_MODEL}."
    )
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        made: dict[str, object] = {}
        for item in fields(self):
            name, value = item.name, getattr(self, item.name)
            if item.type.startswith("tuple"):
                made[name] = (value,) if isinstance(value, str) else tuple(value or ())
            elif item.type.startswith("Mapping") and not isinstance(value, Mapping):
                raise invalid(name, value, "to be a mapping of names to values")
            elif item.type.startswith("str") and not isinstance(value, (str, type(None))):
                raise invalid(name, value, "to be text")
        # Text and tables are no scores; a diverged run has scores that are none.
        made["metrics"] = {
            str(key): _shown(value)
            for key, value in self.metrics.items()
            if value is None or _is_number(value)
        }
        made["training"] = {str(key): _shown(value) for key, value in self.training.items()}
        # Cards are published: what is kept of a path is a name.
        made |= {name: public_name(getattr(self, name)) for name in ("model_name", "recipe")}
        made |= {name: source_name(getattr(self, name)) for name in ("base_model", "dataset")}
        for name, value in made.items():
            object.__setattr__(self, name, value)
        for tag in self.tags:
            if not isinstance(tag, str) or not 0 < len(tag) <= 100 or not tag.isprintable():
                raise invalid("tags", tag, "to be texts of at most 100 characters on one line")
        _refuse_unknown(self.given)

    @property
    def hub_dataset(self) -> str | None:
        """The id of the data set on the Hub, without its configuration; None if it is none."""
        parts = (self.dataset or "").split("/")
        name = "/".join(parts[:2])
        return name if len(parts) <= 3 and is_repository(name) else None

    @property
    def hub_base(self) -> str | None:
        """The id of the base model on the Hub; None if its name is none."""
        return self.base_model if is_repository(self.base_model) else None

    def with_given(self, **given: Any) -> CardDetails:
        """Return these details with what the user says instead; what is a path here is local.
        Raises: InvalidArgumentError."""
        _refuse_unknown(given)
        given |= {name: here(value) for name, value in given.items() if name in _MAY_BE_PATHS}
        return replace(self, **given, given=tuple(dict.fromkeys((*self.given, *given))))


def dequantized_from(gguf_file: str) -> str:
    """Return what a card says of the weights of a base that were read from a GGUF file."""
    return f"dequantized from {gguf_file}, to which all that was measured applies"


def _refuse_unknown(names: Iterable[str]) -> None:
    for name in names:
        if name not in SETTABLE:
            raise InvalidArgumentError(
                f"A card has no {name!r}. It has {', '.join(SETTABLE)}; all else follows from the "
                "run."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _shown(value: object) -> object:
    """Return a value as JSON has it; a number that is not finite becomes None."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_shown(item) for item in value]
    return str(value)


# Whether one exists is asked where it is named, and never of what a card says: elsewhere a folder
# may have the name of a repository.
_MAY_BE_PATHS = ("base_model", "dataset", "recipe")
_FROM_THE_RUN = ("given", "metrics", "training", "repository")
SETTABLE = tuple(item.name for item in fields(CardDetails) if item.name not in _FROM_THE_RUN)


FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.MULTILINE | re.DOTALL)
# Metrics of `evaluate` that a leaderboard can compare.
METRICS = frozenset(
    "accuracy bertscore bleu exact_match f1 matthews_correlation mean_iou meteor nist pearsonr "
    "perplexity precision recall rouge rouge1 rouge2 rougeL rougeLsum sacrebleu spearmanr ter "
    "wer".split()
)
# The Hub's names of our metrics that begin with a task's name, which is no evaluation set.
_OF_A_TASK = {"e2e_nist": "nist", "bertscore_f1": "bertscore", "dialog_f1": "f1"}
KEY = "differential_privacy"
TAG = "hf_dp"
CLAIMS = ("differential-privacy", "dp-sgd")  # a search for them must not find what is not private


def card_data(statement: PrivacyStatement, details: CardDetails) -> ModelCardData:
    """Return a card's YAML block, without what the Hub checks against its lists, or links to, when
    it is unknown."""
    results = eval_results(details)
    return ModelCardData(
        license=details.license or "unknown",
        license_name=details.license_name,
        license_link=details.license_link,
        language=list(details.language) or None,
        library_name=one_line(details.library_name),
        base_model=details.hub_base,
        datasets=None if details.hub_dataset is None else [details.hub_dataset],
        pipeline_tag=details.task_tag,
        tags=_tags(statement, details.tags),
        model_name=details.model_name if results else None,
        eval_results=results or None,
        **{KEY: plain(statement.to_dict())},
    )


def _tags(statement: PrivacyStatement, given: tuple[str, ...]) -> list[str]:
    tags = [tag for tag in map(public_name, given) if tag]
    if statement.proven:
        tags += [CLAIMS[0], statement.plan.words.tag]
    else:
        tags = [tag for tag in tags if tag not in CLAIMS]
    return list(dict.fromkeys([*tags, TAG]))


def eval_results(details: CardDetails) -> list[EvalResult]:
    """Return the scores for the Hub's ``model-index``: metrics of a data set that the Hub knows."""
    if details.hub_dataset is None or details.task_tag is None:
        return []
    dataset = details.dataset or details.hub_dataset
    scores = [
        (*of_metric(name, details.evaluation_split), value)
        for name, value in details.metrics.items()
        if value is not None
    ]
    return [
        EvalResult(
            task_type=details.task_tag,
            dataset_type=details.hub_dataset,
            dataset_name=dataset,
            dataset_config="/".join(dataset.split("/")[2:]) or None,
            dataset_split=split,
            metric_type=metric,
            metric_value=float(value),
        )
        for split, metric, value in scores
        if metric in METRICS
    ]


def of_metric(name: str, split: str | None) -> tuple[str | None, str]:
    """Return split and metric of a Trainer's name: "eval_validation_matched_f1" is the f1 of
    "validation_matched"; where the name has no split, it is ``split``."""
    text = name.removeprefix("eval_")
    for known in sorted((*METRICS, *_OF_A_TASK), key=len, reverse=True):
        metric = _OF_A_TASK.get(known, known)
        if text == known:
            return split, metric
        if text.endswith(f"_{known}"):
            return text.removesuffix(f"_{known}"), metric
    return split, text


def front_matter(card: str) -> dict[str, object]:
    """Return the YAML block at the beginning of a card; empty without one.

    Raises: ValueError for one that cannot be read, or in which a key stands twice."""
    found = FRONT_MATTER.match(card)
    if found is None:
        return {}
    try:
        node = yaml.compose(found[1], Loader=yaml.SafeLoader)
        values = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        raise ValueError(f"its YAML block is not valid: {error}") from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise ValueError("its YAML block is not a mapping of names to values")
    keys = [getattr(key, "value", None) for key, _ in node.value]
    if len(set(keys)) < len(keys):
        raise ValueError("a key stands twice in its YAML block")
    return values


# -- text from a run, made safe for YAML and Markdown; what can be a name on the Hub ---

_IN_CACHE = re.compile(r"(?:models|datasets)--([\w.-]+)[\\/]snapshots[\\/]")
_SAYS_NOTHING = re.compile(r"model|models|checkpoint(-\d+)?|final|best|latest|outputs?|files|main")


def one_line(value: object) -> str:
    """Return text without line breaks, control and formatting characters (bidirectional overrides
    and zero-width ones among the latter)."""
    text = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in str(value))
    return " ".join(text.split())


def public_name(value: object) -> str | None:
    """Return one line, with a local path reduced to its last component; None for no text.

    Where that says nothing ("model", "checkpoint-12"), the one before it stands, too. A folder of
    the Hub's cache is named by its repository."""
    if value is None:
        return None
    text = one_line(value)
    if not _is_local(text):
        return text or None
    if cached := _IN_CACHE.search(text):
        return "/".join(cached[1].split("--"))
    path = PureWindowsPath(text) if "\\" in text else PurePosixPath(text)
    parts = [part for part in path.parts if part not in ("/", "\\", ".", "..", "~", path.anchor)]
    says_nothing = len(parts) > 1 and _SAYS_NOTHING.fullmatch(parts[-1])
    return "/".join(parts[-2:] if says_nothing else parts[-1:]) or None


def source_name(value: object) -> str | None:
    """Return the name of a model or data set, as :func:`public_name`, that says of a local one that
    it is local: "bert (local)" cannot be taken for a repository."""
    name, text = public_name(value), one_line(value)
    if name is not None and name.startswith("package:"):
        return f"{name.removeprefix('package:')} (in a Python package)"
    if name is None or not _is_local(text) or _IN_CACHE.search(text):
        return name
    return f"{name} (local)"


def markdown(value: object) -> str:
    """Escape a value, as one line, so that Markdown and HTML see only text."""
    text = re.sub(r"([\\`*{}\[\]<>#|~!&$@^])", r"\\\1", one_line(value))
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    # A list item or an underlined heading.
    return re.sub(r"^(\d*)([-+=.)])(?=[\s=-]|$)", r"\1\\\2", text)


def is_repository(value: str | None) -> bool:
    """Return whether a text can be the id of a repository on the Hub."""
    if not value:
        return False
    try:
        validate_repo_id(value)
    except HFValidationError:
        return False
    return not value.startswith(("~", "."))


def here(name: str | None) -> str | None:
    """Return the name of a model, data set or file so that it is seen to be local, if it exists."""
    if not isinstance(name, str) or _is_local(name) or not os.path.exists(name):
        return name
    return f"./{name}"


def _is_local(text: str) -> bool:
    starts = text.startswith((".", "/", "~", "\\", "file:"))
    return starts or re.match(r"[A-Za-z]:[\\/]", text) is not None
