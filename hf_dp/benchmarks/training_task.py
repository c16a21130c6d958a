"""What the end-to-end benchmark trains: how much, and on which rows and model.

Also how its batches are cut, and how its runs are counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import concatenate_datasets
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    set_seed,
)

from hf_dp import _validate
from hf_dp.batches import loader
from hf_dp.batches.examples import Examples
from hf_dp.benchmarks.workload import Workload
from hf_dp.errors import DataError, HfDpError
from hf_dp.tasks.classification import encode, label_names
from hf_dp.tasks.files import load_file, resolve_model


@dataclass(frozen=True)
class TrainingWork:
    """How much each run trains, and how often.

    Attributes:
        rows: examples in the data.
        logical_batch_size: examples of an optimizer step, in a private mode their expected number;
            a multiple of physical_batch_size.
        physical_batch_size: examples of one forward.
        steps: optimizer steps of a run; None for one pass, ``ceil(rows / logical_batch_size)``.
        rounds: runs of each mode.
        threads: torch's intra-op threads; None for torch's choice.
        device: None for CUDA where there is a device.

    Raises: InvalidArgumentError naming the field.
    """

    rows: int = 10_000
    logical_batch_size: int = 1024
    physical_batch_size: int = 32
    steps: int | None = None
    rounds: int = 3
    threads: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for name, least in {
            "rows": 2,
            "logical_batch_size": 1,
            "physical_batch_size": 1,
            "rounds": 1,
        }.items():
            object.__setattr__(self, name, _validate.integer(name, getattr(self, name), least))
        if self.logical_batch_size > self.rows:
            raise _validate.invalid(
                "logical_batch_size",
                self.logical_batch_size,
                f"to be at most `rows`, {self.rows}",
                "Use more rows.",
            )
        if self.logical_batch_size % self.physical_batch_size:
            raise _validate.invalid(
                "logical_batch_size", self.logical_batch_size,
                f"to be a multiple of `physical_batch_size`, {self.physical_batch_size}",
                "Gradient accumulation adds up whole batches.",
            )  # fmt: skip
        if self.steps is not None:
            object.__setattr__(self, "steps", _validate.integer("steps", self.steps, 1))
        _ = self.machine

    @property
    def optimizer_steps(self) -> int:
        """Return ``steps``, filled in."""
        return math.ceil(self.rows / self.logical_batch_size) if self.steps is None else self.steps

    @property
    def machine(self) -> Workload:
        """Return threads and device, checked and filled in; ignore the model that it names."""
        return Workload("tiny", threads=self.threads, device=self.device)

    def warm_up(self) -> TrainingWork:
        """Return the same with one step of at most two physical batches."""
        return replace(
            self,
            steps=1,
            logical_batch_size=min(2 * self.physical_batch_size, self.logical_batch_size),
        )


@dataclass(frozen=True)
class Task:
    """Data and model of one measurement; nothing of it changes while runs are timed.

    Attributes:
        rows: a ``datasets.Dataset`` of token ids and labels, in no particular order of length.
        model: a classifier with its initial weights.
        tokenizer: pads.
        names: for the report: ``model``, ``train_file``, ``max_length`` (tokens).
    """

    rows: Any
    model: nn.Module
    tokenizer: Any
    names: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each row."""
        return [len(ids) for ids in self.rows["input_ids"]]

    @property
    def dropout(self) -> float:
        """Return the model's largest dropout probability."""
        return max(
            (module.p for module in self.model.modules() if isinstance(module, nn.Dropout)),
            default=0.0,
        )


def load_task(
    train_file: str,
    model: str,
    rows: int,
    max_length: int = 128,
    text_columns: Sequence[str] = ("sentence",),
    label_column: str = "label",
    class_names: Sequence[str] = (),
) -> Task:
    """Load the first ``rows`` rows of a file, and a classifier with a new head.

    Texts are cut at ``max_length`` tokens. The rows are put into a fixed random order: in a file
    sorted by length, even unsorted batches would hold little padding.

    Args:
        model: a name or folder, or ``package:NAME``; NAME as pip or as Python spells it.
        class_names: by id, for files that declare none.

    Raises: InvalidArgumentError, DataError.
    """
    # Two special tokens and one of text.
    max_length = _validate.integer("max_length", max_length, 3)
    data = load_file(train_file)
    if len(data) < rows:
        raise _validate.invalid(
            "rows",
            rows,
            f"to be at most the {len(data)} rows of {Path(train_file).name!r}",
            "Lower it, or use a larger file.",
        )
    names = label_names(data, label_column, class_names)
    network, tokenizer = _load_classifier(model, len(names), max_length)
    encoded = encode(
        data.select(range(rows)), tokenizer, text_columns, label_column, names, max_length
    )
    # Flattened: reading through a permutation would slow every fetch.
    shuffled = encoded.shuffle(seed=0).flatten_indices(keep_in_memory=True)
    name = Path(model).name if Path(model).is_dir() else model  # no path of a machine in a report
    return Task(
        shuffled,
        network,
        tokenizer,
        {"model": name, "train_file": Path(train_file).name, "max_length": max_length},
    )


def _load_classifier(model: str, num_labels: int, max_length: int) -> tuple[Any, Any]:
    path = resolve_model(model)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        set_seed(0)  # the head's initial weights
        network = AutoModelForSequenceClassification.from_pretrained(path, num_labels=num_labels)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"The model {model!r} could not be loaded: {str(problem).splitlines()[0]} "
            "Give a Hub name, a folder with config.json, weights and tokenizer, or package:NAME."
        ) from problem
    if tokenizer.pad_token is None:
        raise DataError(
            f"The tokenizer of {model!r} has no padding token. Choose an encoder model."
        )
    positions = getattr(network.config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise _validate.invalid(
            "max_length",
            max_length,
            f"to be at most {positions}, the positions of the model",
            "Lower it.",
        )
    return network, tokenizer


def one_pass(rows: Any, count: int) -> Any:
    """Return a data set of ``count`` rows: ``rows`` repeated and cut.

    One pass over it is the stock trainer's whole run. A run that ended within an epoch, or
    continued past its end, would have an incomplete step or, with length grouping, a biased share
    of long rows, since they come first.
    """
    return concatenate_datasets([rows] * math.ceil(count / len(rows))).select(range(count))


@dataclass(frozen=True)
class Run:
    """One call of ``train()``.

    Attributes:
        seconds: wall time in all.
        cpu_seconds: processor time of all threads; with one thread, a much smaller number than
            `seconds` means that other processes had the processor.
        preparation: seconds before the first sample (data loader, optimizer, privately the
            self-check).
        finishing: seconds after the last step (privately epsilon and card).
        steps: optimizer steps made.
        examples: examples that went through the model.
        tokens: tokens of those examples.
        positions: tokens and padding.
        data: seconds in which rows were fetched, collated alone and padded; private modes only.
    """

    seconds: float
    cpu_seconds: float
    preparation: float
    finishing: float
    steps: int
    examples: int
    tokens: int
    positions: int
    data: float = 0.0

    @property
    def seconds_per_example(self) -> float:
        """Return the wall time over the examples that were really processed.

        Raises: HfDpError when there were none, since private samples can be empty.
        """
        if not self.examples:
            raise HfDpError(
                "All Poisson samples of a run were empty. Use a larger logical_batch_size or more "
                "steps."
            )
        return self.seconds / self.examples


class Counter(TrainerCallback):
    """Count what goes through the model once training has begun; earlier checks do not count.

    Attributes:
        examples, tokens, positions, data: as in a run.
        begun: when training began, in seconds of ``time.perf_counter``.
        stepped: when the latest step ended, likewise.
    """

    def __init__(self) -> None:
        self.begun = self.stepped = math.nan
        self.examples = self.tokens = self.positions = 0
        self.data = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].register_forward_pre_hook(self._count, with_kwargs=True)
        self.data, self.begun = 0.0, time.perf_counter()

    @contextmanager
    def timing_data(self) -> Iterator[None]:
        """Add up the time in which a private run's rows become batches, inside the context."""
        originals = [(Examples, "__getitems__"), (loader.PhysicalBatches, "__call__")]
        functions = [getattr(owner, name) for owner, name in originals]

        def timed(function: Any) -> Any:
            def run(*args: Any) -> Any:
                start = time.perf_counter()
                try:
                    return function(*args)
                finally:
                    self.data += time.perf_counter() - start

            return run

        try:
            for (owner, name), function in zip(originals, functions, strict=True):
                setattr(owner, name, timed(function))
            yield
        finally:
            for (owner, name), function in zip(originals, functions, strict=True):
                setattr(owner, name, function)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.stepped = time.perf_counter()

    def _count(self, model: nn.Module, args: Any, batch: dict[str, Tensor]) -> None:
        self.examples += len(batch["input_ids"])
        self.tokens += int(batch["attention_mask"].sum())
        self.positions += batch["input_ids"].numel()


def in_drawn_order(
    lengths: Sequence[int],
    keys: Sequence[int],
    size: int,
    max_tokens: int | None = None,
    shapes: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Cut positions 0..len(lengths)-1 into groups of at most ``size``, whatever the lengths.

    ``shapes`` must be None, as it is in float32.
    """
    assert shapes is None
    return [
        list(range(start, min(start + size, len(lengths))))
        for start in range(0, len(lengths), size)
    ]


@contextmanager
def unsorted_batches() -> Iterator[None]:
    """Make private data loaders cut samples in sampling order, inside the context.

    The context exists to measure what sorting gives; there is no such option.
    """
    sorting = loader.physical_batches
    loader.physical_batches = in_drawn_order
    try:
        yield
    finally:
        loader.physical_batches = sorting
