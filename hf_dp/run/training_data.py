"""The training set of a private run: looked over once, each row collated alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.utils import logging

from hf_dp._validate import invalid
from hf_dp.batches.examples import Collator, Examples, refuse_words_as_label
from hf_dp.batches.limits import Limits
from hf_dp.batches.loader import (
    BatchOptions,
    Drawn,
    PhysicalBatches,
    Place,
    Watch,
    private_dataloader,
    shape_of,
)
from hf_dp.batches.look_over import LookedOver, has_target, look_over
from hf_dp.batches.padding import LABELS, Padding
from hf_dp.batches.structure import Batch, Example, Layout, Row, Rows, column, combined, leaves, own
from hf_dp.batches.units import Reduction, UnitBatches, UnitDraws, UnitTable
from hf_dp.batches.views import ViewDraws, Views
from hf_dp.batches.when_drawn import FirstRows, WhenDrawn
from hf_dp.clipping.sharding import is_sharded
from hf_dp.errors import (
    DataError,
    HfDpError,
    UnsupportedArgumentError,
    UnsupportedLossError,
    UnsupportedModelError,
)
from hf_dp.losses import base_model, puts_images_into_text, targets_of
from hf_dp.noise import SecretRandomness
from hf_dp.plans.samplers import Sampler
from hf_dp.plans.units import Users
from hf_dp.run.precision import Watched
from hf_dp.run.synthetic import made_up_rows, made_up_tokens, synthetic_examples, up_to_marks
from hf_dp.statement.facts import ALL, ANY, FEW, WHEN_DRAWN

logger = logging.get_logger(__name__)

# Columns by which a model does not decide how much it makes of an image.
_BESIDE_IMAGES = {
    *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids"),
    *("pixel_values", "pixel_attention_mask", *LABELS),
}
_TRIES = 20  # collations of a synthetic row, until a masking collator leaves something to predict


class TrainingData:
    """What a private run knows of its rows, without the columns that the model does not take.

    Args: units: whose the rows are, and how many of a user's rows take part; None: each by itself.
        views: as how many random views a drawn row enters a step.
        first: looks at the first rows, and the others are looked at when they are drawn; or says
            what all must be like. None: all are looked at beforehand, and say it themselves.

    Attributes:
        computed: types shorter than float32 that a forward was seen to compute in.
        made_up: an example as long as the longest row, once the model was seen to take it.
        fillers: such examples of each known shape, from short to long; none of any shape.
        when_drawn: whether some rows are looked at when they are drawn.
    """

    def __init__(
        self,
        dataset: Rows,
        collator: Collator,
        padding: Padding,
        limits: Limits,
        randomness: SecretRandomness,
        options: BatchOptions,
        units: tuple[UnitTable, Users] | None = None,
        views: int = 1,
        first: FirstRows | None = None,
    ):
        self.units, self.views, self.first = units, views, first
        self.when_drawn = first is not None and not first.all_rows
        if options.shapes != ANY and (units or views > 1 or options.max_tokens):
            raise invalid(
                "shapes",
                options.shapes,
                f"to be {ANY!r} with users of several rows, several views of a row, or "
                "max_tokens_per_physical_batch",
                "Batches of known shapes are of rows that are clipped alone. Remove one of them.",
                UnsupportedArgumentError,
            )
        self.examples = Examples(dataset, collator, randomness)
        self.padding, self.limits, self.options = padding, limits, options
        self.computed: frozenset[str] = frozenset()
        self.made_up: Example = None
        self.fillers: list[Example] = []

    @cached_property
    def looked_over(self) -> LookedOver:
        """The layout of all examples. Raises: DataError as :func:`look_over`."""
        ids = self.examples[0].get("input_ids") if self.limits.marks else None
        if isinstance(ids, Tensor):
            counts = {token: int((ids == token).sum()) for token in self.limits.marks}
            self.limits = replace(self.limits, marks=counts)
        look = look_over if self.first is None else self.first.look_over
        return look(
            self.examples,
            self.padding,
            self.limits,
            workers=self.options.num_workers,
            quiet=self.options.quiet,
        )

    def check(
        self, model: nn.Module, losses: Callable[[Batch], Tensor], *, needs_labels: bool
    ) -> None:
        """Look over the rows, and raise DataError or UnsupportedLossError where the model does not
        take one as long as the longest of them, or gives no loss for each example."""
        if needs_labels:
            self._check_labels(targets_of(model))
        if puts_images_into_text(model):
            self._check_images(model)
        layout, training = self.looked_over.layout, model.training
        self.made_up = longest = self._longest(model)
        self.fillers = self._fillers(model)
        shorter = self.fillers[:-1]
        if self.when_drawn:
            # A column of a fixed size may have to be as long as the tokens.
            tokens = layout.leaves["input_ids"].most[-1] if "input_ids" in layout.leaves else 1
            shorter.append(self._longest(model, max(1, tokens // 2)))
        try:
            model.eval()
            with torch.no_grad(), self.examples.randomness.streams(), Watched() as watched:
                found = losses(longest)
                for each in shorter:
                    losses(each)
            if not isinstance(found, Tensor) or found.shape != (1,):
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise UnsupportedLossError(
                    "Expected compute_per_example_loss to return one loss for each example, shape "
                    f"(1,) for a batch of one, got {shape}. Use reduction='none', and average "
                    "within each example."
                )
            self.computed = frozenset(watched.short)
        except HfDpError:
            raise
        except Exception as problem:
            raise DataError(self._why_it_fails(model, problem)) from problem
        finally:
            model.train(training)
        checked = (*self.limits.below, *self.limits.places, *LABELS)
        if not self.when_drawn:
            refuse_ids_beyond_tables(model, losses, self.examples, layout, checked)
        elif columns := looked_up(model, layout, checked):
            raise invalid(
                "look_over",
                WHEN_DRAWN,
                f"to be {ALL!r} for rows with the columns {columns}",
                "hf_dp does not know which whole numbers the model takes there, and one that it "
                "does not take would end the run at the drawn row. Use it, or leave them out.",
                UnsupportedArgumentError,
            )

    def check_padded(self, model: nn.Module, losses: Callable[[Batch], Tensor]) -> None:
        """Raise DataError where the model does not take the longest row padded by itself."""
        padded, training = self.batches(one_shape=True).shaped(self._longest(model)), model.training
        try:
            model.eval()
            with torch.no_grad(), self.examples.randomness.streams():
                losses(padded)
        except Exception as problem:
            sizes = {n: (*each.shape,) for n, each in leaves(padded) if isinstance(each, Tensor)}
            raise DataError(
                "Below float32 each row is padded to one of few lengths, and model and loss fail "
                f"on the longest row padded so ({type(problem).__name__}: {problem}). Its columns "
                f"have the sizes {sizes} then. Set the model's config.max_position_embeddings to "
                "the most tokens that it takes, or train in float32."
            ) from problem
        finally:
            model.train(training)

    def _longest(self, model: nn.Module, at_most: int | None = None) -> Example:
        """Return a synthetic example as long as the longest row, or ``at_most``."""
        row, layout = self.examples[self.looked_over.longest], self.looked_over.layout
        return _as_long_as_the_longest(row, layout, model, at_most)

    def _fillers(self, model: nn.Module) -> list[Example]:
        """Return synthetic examples of each shape that physical batches may have: as long as the
        longest row, and with few shapes a half, a quarter and an eighth of it."""
        if self.options.shapes == ANY:
            return []
        found = self.looked_over.layout.leaves.values()
        most = max((leaf.most[at] for leaf in found for at in leaf.varying), default=1)
        halvings = range(3, -1, -1) if self.options.shapes == FEW else range(1)
        made = [self._longest(model, -(-most >> at)) for at in halvings]  # rounded up
        return [*{shape_of(each): each for each in made}.values()]

    def _check_images(self, model: nn.Module) -> None:
        """Raise UnsupportedModelError for rows with images of which it is not known that each has
        the tokens for its own."""
        found, name = self.looked_over.layout.leaves, type(base_model(model)).__name__
        if not any(column(each).startswith("pixel_values") for each in found):
            return
        if not any(self.limits.marks.values()):
            raise UnsupportedModelError(
                f"Row 0 has an image, but no token that is known to stand for one in {name}. A row "
                "with too few or too many would take from its neighbor's image. Let the model's "
                "own processor make the rows, or choose a model whose config has image_token_id."
            )
        if other := sorted({column(each) for each in found} - _BESIDE_IMAGES):
            raise UnsupportedModelError(
                f"The rows have images, and {other}, by which {name} may make more or less of one "
                "than the tokens for it. Resize all images to one size, and leave the columns out; "
                "or choose a model without them (LLaVA, PaliGemma, Gemma 3)."
            )

    def _check_labels(self, targets: Sequence[str]) -> None:
        found = self.looked_over.layout.leaves
        given = [found.get(name) for name in targets]
        if "labels" not in targets or all(each is not None and each.is_tensor for each in given):
            return  # what a loss of other targets misses, it names
        # transformers' default collator drops text, and a user's own may pass it on.
        refuse_words_as_label(self.examples.row(0), "Row 0 of the training set")
        if "labels" not in found:
            raise DataError(
                f"The training batches have no `labels` (they have {sorted(found)}). Rename the "
                "label column to `label` or `labels` (dataset.rename_column), or use a collator "
                "that makes labels."
            )

    def _why_it_fails(self, model: nn.Module, problem: Exception) -> str:
        """Return what to say of a model that fails on a row as large as the largest."""
        found, longest = self.looked_over.layout.leaves, self.looked_over.longest
        sizes = {name: leaf.most[1:] for name, leaf in found.items() if leaf.is_tensor}
        config = getattr(base_model(model), "config", None)
        config = getattr(config, "vision_config", config)
        takes = {name: getattr(config, name, None) for name in ("num_channels", "image_size")}
        of_images = (
            f"The model's configuration says {takes}: make pixels, (channels, height, width), with "
            "its own image processor in a transform. "
        )
        of_columns = "If a column is missing, set remove_unused_columns=False. "
        return (
            "Model and loss fail on a synthetic row as large as the largest "
            f"({type(problem).__name__}: {problem}). Its columns have the sizes {sizes}. "
            f"{of_images if 'pixel_values' in found else ''}"
            f"{'' if self.examples.removed is None else of_columns}"
            f"If rows are too long (row {longest} is the longest), truncate them."
        )

    def warn_of_no_targets(self) -> None:
        """Warn on the local console when most rows have nothing to learn, so that noise trains."""
        without, rows = self.looked_over.without_target, self.looked_over.rows
        if 2 * without > rows:
            logger.warning(
                f"In {without:,} of {rows:,} rows every label is -100. These rows train nothing, "
                "and most of what the steps add is noise. Check the rows: prompts may fill all of "
                "max_length, or the template may mark nothing as the answer."
            )

    def warn_of_chunks(self) -> None:
        """Warn on the local console when the rows look like chunks of longer documents."""
        if self.looked_over.look_like_chunks:
            logger.warning(
                "If the rows are not chunks of longer documents, ignore this. Nearly all of them "
                "have the same number of tokens, as chunks do. If they are chunks, one chunk is "
                "protected, and a document of k chunks is protected k-fold weaker. Set "
                "rows_are_chunks=True, so that the card says so; or let each row be a whole "
                "document."
            )

    def batches(self, one_shape: bool = False) -> PhysicalBatches:
        """Return the object that cuts and pads drawn examples; see :class:`PhysicalBatches`."""
        options, layout = self.options, self.looked_over.layout
        size, most = options.physical_batch_size, options.max_tokens
        return PhysicalBatches(self.padding, layout, size, most, one_shape, self.fillers)

    def loader(
        self, sampler: Sampler, one_shape: bool, watched: Watch
    ) -> DataLoader[Drawn[Example]]:
        """Return a loader over the sampler's draws, from the run's secret source, as lists of
        padded physical batches. ``watched`` makes of a sampler what goes through the model here."""
        examples, batches, options = self.examples, self.batches(one_shape), self.options
        secret, count = examples.randomness.random_bytes, len(examples)
        draws = watched(replace(sampler, random_bytes=secret))
        drawn: Iterable[Sequence[Place]] = draws
        reduction: Reduction | None = None
        if self.units is not None:
            table, reduction = self.units
            drawn, count = UnitDraws(draws, table, reduction, secret), len(table)
        if self.views > 1:
            drawn, reduction = ViewDraws(drawn, self.views), Views(self.views, reduction)
        cut = batches if reduction is None else UnitBatches(batches, reduction)
        layout, made_up = self.looked_over.layout, self.made_up
        look = WhenDrawn(layout, self.limits, made_up) if self.when_drawn else None
        return private_dataloader(examples, drawn, cut, options, count, look)

    def synthetic_examples(self, model: nn.Module) -> list[Example]:
        """Return synthetic examples that passed through the collator like rows, each a batch of
        one; where the data set's format cannot be imitated, synthetic inputs of the model."""
        tokens = self.looked_over.layout.leaves.get("input_ids")
        choices = tokens.most[1] if tokens is not None and len(tokens.most) > 2 else 2
        made = [
            _of_the_size_of_rows(example, self.looked_over.layout)
            for example in synthetic_examples(
                model, *self._lengths(), choices=choices, row=self._with_images()
            )
        ]
        try:
            templates = [self.examples.row(index) for index in (0, self.looked_over.longest)]
            with self.examples.randomness.streams():
                rows = made_up_rows(templates, made)
            return [self._collated(row) for row in rows]
        except DataError as problem:
            logger.warning(
                "The self-check skips the data collator, because it could not be given synthetic "
                "rows: %s. Override DPTrainer.synthetic_batches(self) to return what the collator "
                "makes of some synthetic rows.",
                str(problem).rstrip("."),
            )
            return list(made)

    def _with_images(self) -> Tensor | None:
        """Return the tokens of the longest row, (1, T), where some stand for images."""
        if not any(self.limits.marks.values()):
            return None
        tokens: Tensor = self.examples[self.looked_over.longest]["input_ids"]
        return tokens

    def _lengths(self) -> tuple[tuple[int, ...], ...]:
        """Return the lengths of synthetic examples: those of the rows, where none is padded and a
        column beside the tokens could not be; otherwise none, for different ones."""
        leaves = self.looked_over.layout.leaves
        tokens = leaves.get("input_ids")
        if tokens is None or tokens.varying or len(tokens.most) != 2:
            return ()
        beside = (
            each.is_tensor
            and each.most[1:2] == tokens.most[1:]
            and self.padding.fill(n, each) is None
            for n, each in leaves.items()
        )
        return ((tokens.most[1],) * 3,) if any(beside) else ()

    def longest_beside(self, made_up: Example, model: nn.Module) -> Example:
        """Return a synthetic batch of one with the columns of ``made_up``, as long as the longest
        row, or as one with a neighbor where the tokens of a batch are limited."""
        layout, limit = self.looked_over.layout, self.options.max_tokens
        as_rows = _as_long_as_the_longest(
            self.examples[self.looked_over.longest],
            layout,
            model,
            at_most=None if limit is None else max(1, limit // 2),
        )
        if _tensors(as_rows) == _tensors(made_up) or "input_ids" not in layout.leaves:
            return as_rows
        # Synthetic rows could not go through the collator, and inputs of the model stand for them.
        tokens, labels = (
            layout.leaves[name].most[-1] if name in layout.leaves else 1
            for name in ("input_ids", "labels")
        )
        return synthetic_examples(model, (tokens,), (labels,))[0]

    def _collated(self, row: Row) -> Example:
        for _ in range(_TRIES):
            example = self.examples.collate(row)
            self.looked_over.layout.check(example)
            self.limits.check(example)
            if has_target(example):
                break
        if _attends_to_nothing(example):
            raise DataError("its attention mask is 0 everywhere")
        return example


def _tensors(example: Example) -> set[str]:
    return {name for name, leaf in leaves(example) if isinstance(leaf, Tensor)}


def _attends_to_nothing(example: Example) -> bool:
    mask = example.get("attention_mask") if isinstance(example, dict) else None
    return isinstance(mask, Tensor) and not bool(mask.any())


def _of_the_size_of_rows(example: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Return a synthetic example whose image or video is as large as those of the rows.

    A model may take other sizes than the one in its configuration, on another path: it then
    interpolates its position embeddings. How many frames a video has, only the rows say.
    """
    pixels, leaf = example.get("pixel_values"), layout.leaves.get("pixel_values")
    if pixels is None or leaf is None or not leaf.is_tensor:
        return example
    return {**example, "pixel_values": torch.randn(leaf.most, dtype=pixels.dtype)}


def _as_long_as_the_longest(
    example: Example, layout: Layout, model: nn.Module, at_most: int | None = None
) -> Example:
    """Return a synthetic batch of one, in which each column has its greatest length in any row, and
    one whose length varies ``at_most`` so much."""

    if at_most is not None and isinstance(example, dict) and "input_ids" in example:
        at_most = max(at_most, up_to_marks(model, example["input_ids"]))

    def made(name: str, values: list[Example]) -> object:
        (value,) = values
        if not isinstance(value, Tensor):
            return value
        leaf = layout.leaves[name]
        shape = leaf.most
        if at_most is not None:
            pairs = enumerate(leaf.most)
            shape = tuple(min(n, at_most) if at in leaf.varying else n for at, n in pairs)
        if column(name) == "position_ids":
            return torch.arange(shape[-1]).expand(shape)
        if column(name).endswith("input_ids"):
            return made_up_tokens(model, shape, value)
        # Images of zeros are padding in some models.
        ones = column(name).endswith(("attention_mask", "pixel_values"))
        filled = torch.ones if ones else torch.zeros
        return filled(shape, dtype=value.dtype)

    return combined([example], made)


def padded_together(
    examples: list[Example],
    padding: Padding,
    of_rows: Layout | None = None,
    by_themselves: bool = False,
) -> tuple[Batch, list[Example]]:
    """Return (one padded batch, the examples one by one) from batches of one, or raise DataError
    where these have other columns or types than each other or ``of_rows``. In the batch each may
    be padded ``by_themselves`` first."""
    if not isinstance(examples, list) or len(examples) < 2:
        kind = type(examples).__name__
        found = f"{len(examples)} of them" if isinstance(examples, list) else f"a {kind}"
        raise DataError(
            "Expected synthetic_batches() to return a list of at least two examples, each a batch "
            f"of one, got {found}. hf_dp pads them together itself."
        )
    alone, layout = [], Layout()
    for place, each in enumerate(examples):
        example = own(each)
        sizes = {name: leaf.shape for name, leaf in leaves(example) if isinstance(leaf, Tensor)}
        if not sizes or any(shape[:1] != (1,) for shape in sizes.values()):
            raise DataError(
                "Expected each item of what synthetic_batches() returns to be a batch of one "
                f"example, tensors of shape (1, ...), but item {place} has the shapes {sizes}."
            )
        try:
            layout.add(example)
            if of_rows is not None:
                of_rows.check(example)
        except DataError as problem:
            raise DataError(
                f"Item {place} of what synthetic_batches() returns does not fit: {problem}"
            ) from problem
        alone.append(example)
    padding.check(layout)
    shaped = [*map(padding.alone, alone)] if by_themselves else alone
    return padding.together(shaped, layout), alone


def looked_up(model: nn.Module, layout: Layout, checked: Collection[str]) -> list[str]:
    """Return the integer columns without a known range that a model may look up in its tables."""
    columns = [
        name
        for name, leaf in layout.leaves.items()
        if leaf.is_tensor
        and leaf.dtype.startswith(("int", "uint"))
        and not (column(name) in checked or name.endswith("_mask"))
    ]
    return columns if _tables(model) else []


def _tables(model: nn.Module) -> dict[nn.Embedding, str]:
    return {m: name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}


class _LookedUp(Exception):
    """Ends a forward after its last table."""


def refuse_ids_beyond_tables(
    model: nn.Module,
    losses: Callable[[Batch], Tensor],
    examples: Examples,
    layout: Layout,
    checked: Collection[str],
) -> None:
    """Look up every row's ids: raise DataError naming the first row whose ids the model's tables do
    not have, or on which it fails otherwise. Rows are tried only where an integer column has no
    known range: entity ids, boxes and tags have tables of their own, and some models look up sums
    or differences of them. A forward ends after its last lookup, which in most models is before the
    first layer.

    Args: checked: columns whose ranges were checked.
    """
    columns = looked_up(model, layout, checked)
    if not columns:
        return
    tables = _tables(model)
    training, lookups = model.training, _Lookups(tables, whole=is_sharded(model))
    try:
        model.eval()
        with torch.no_grad(), examples.randomness.streams(), ExitStack() as hooks:
            for table in tables:
                hooks.enter_context(table.register_forward_pre_hook(lookups.check))
                hooks.enter_context(table.register_forward_hook(lookups.counted))
            for index, example in enumerate(examples.all()):
                lookups.count = 0
                try:
                    losses(example)
                except _LookedUp:
                    continue
                except Exception as problem:
                    said = problem if isinstance(problem, HfDpError) else repr(problem)
                    raise DataError(
                        f"{examples.name(index)} cannot be trained on: {said} Correct "
                        f"one of its columns {columns}, or leave the row out."
                    ) from problem
                lookups.most = max(lookups.most, lookups.count)
    finally:
        model.train(training)


class _Lookups:
    """Checks lookups and counts them: ``most`` are those of a whole forward. With ``whole`` none
    ends early, since the shards of a model must meet in each."""

    def __init__(self, tables: Mapping[nn.Embedding, str], whole: bool):
        self.tables, self.whole, self.most, self.count = tables, whole, 0, 0

    def check(self, table: nn.Embedding, args: tuple[Tensor, ...]) -> None:
        """Raise DataError for an id that a table lacks; a GPU would end the process."""
        if not args or not args[0].numel():
            return
        low, high = (int(value) for value in args[0].aminmax())
        if low < 0 or high >= table.num_embeddings:
            raise DataError(
                f"the model looks up {low if low < 0 else high} in `{self.tables[table]}`, which "
                f"has the ids 0 to {table.num_embeddings - 1}."
            )

    def counted(self, *_: object) -> None:
        """End the forward after as many lookups as a whole one makes."""
        self.count += 1
        if self.count == self.most and not self.whole:
            raise _LookedUp
