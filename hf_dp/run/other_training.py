"""What else trained the weights of a private run: before it, between its steps, or after them.

A statement counts what its run, and the earlier runs that it names, released. Weights that anything
else trained tell of rows that it does not count. Three things remember that:

- modules: a run of hf_dp leaves its id on those that it trains, and a deep copy keeps it;
- parameters: each that any optimizer steps is noted, unless a release has paid for that step;
- digests of the weights' values when a run ends, which are compared before they are saved or
  trained further.

Files remember, too: weights of a private run carry the head of its ledger, those of one without
privacy say so. Each knows how far its run was: what that released later is not what they tell of.

Out of reach: an adapter that was merged into its base before a run, copies of a model that another
trainer trained, weights from a cache of one's own (``cache_dir``), and values that are written by
hand (``parameter.data``) before a run or between its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils import logging

from hf_dp.clipping.sharding import held
from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import base_model
from hf_dp.run.ledger_file import LEDGER, read_own
from hf_dp.run.options import Run
from hf_dp.run.witnesses import (
    add_metadata,
    head_in,
    heads_in,
    read_metadata,
    read_run,
    weights_files,
)
from hf_dp.statement.durable import Head
from hf_dp.statement.evidence import FILE_NAME
from hf_dp.statement.facts import Flags
from hf_dp.statement.wording import STATUSES

logger = logging.get_logger(__name__)

_NOTE = "_trained_by_hf_dp"  # on modules: by id, the runs that trained them: (folder, head)
_WITHOUT_PRIVACY = ""  # instead of an id; it has no head
NOT_PRIVATE_KEY = "trained_without_privacy_by"  # in the metadata of weights
_LEFT_BY_TRAINERS = ("training_args.bin", "trainer_state.json")

# Parameters that an optimizer stepped although no release had paid for it, and those whose next
# step is paid for.
_unpaid = WeakTensorKeyDictionary()
_paid = WeakTensorKeyDictionary()

_CHUNK = 1 << 20  # numbers
_CASTS = (torch.bfloat16, torch.float16)


class _Step:
    """A step that is going on: by parameter, its gradient as it began, and what was paid inside."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.paid = id(optimizer), WeakTensorKeyDictionary()
        self.gradients = WeakTensorKeyDictionary()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.gradients[parameter] = _gradient(parameter)  # kept, so that no other is it

    def is_excused(self, parameter: Tensor) -> bool:
        """Return whether an optimizer inside this one made the step that was paid for, by the same
        gradient: what this one does then is of that payment."""
        then, version = self.gradients.get(parameter, (None, -1))
        now, changed = _gradient(parameter)
        return parameter in self.paid and then is now and version == changed


def _gradient(parameter: Tensor) -> tuple[Tensor | None, int]:
    return parameter.grad, 0 if parameter.grad is None else parameter.grad._version


# One inside the other. An optimizer whose step failed stays, and excuses no step but its own.
_going_on: list[_Step] = []


def _begin_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    _end_step(optimizer)  # one that failed
    _going_on.append(_Step(optimizer))


def _end_step(optimizer: torch.optim.Optimizer) -> _Step:
    """Return an optimizer's step, and forget it with those inside it."""
    for place, step in enumerate(_going_on):
        if step.optimizer == id(optimizer):
            del _going_on[place:]
            return step
    return _Step(optimizer)


def _note_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    step = _end_step(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _paid.pop(parameter, False) or step.is_excused(parameter):
                for around in _going_on[-1:]:
                    around.paid[parameter] = True
                continue
            if parameter.grad is None:
                continue
            # torch makes the state of an optimizer whose shards it loads by zeros at rate 0.
            if group.get("lr") != 0 or bool(held(parameter.grad).any()):
                _unpaid[parameter] = True


# For every optimizer of this process: fused and foreach steps leave no other trace.
register_optimizer_step_pre_hook(_begin_step)
register_optimizer_step_post_hook(_note_step)


def pay_for_step(model: nn.Module) -> None:
    """Let each weight that trains be stepped once, by released values or by synthetic examples."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            _paid[parameter] = True


def note_steps_before_own(model: nn.Module) -> None:
    """Note each weight whose step was paid for and made before the run's own optimizer steps."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter not in _paid:
            _unpaid[parameter] = True


def note_training(model: nn.Module, folder: Path, head: Head | None = None) -> None:
    """Leave on a model, and on each module whose weights train, which run trains it and how far
    its ledger is; without a head, that it is a run without privacy."""
    run_id = _WITHOUT_PRIVACY if head is None else head.run_id
    for module in model.modules():
        if module is model or any(p.requires_grad for p in module.parameters(recurse=False)):
            known = vars(module).get(_NOTE, {})
            vars(module)[_NOTE] = {**known, run_id: (str(folder), head)}  # a copy has its own


def stamp_without_privacy(folder: str | Path) -> None:
    """Put into the metadata of the weights in a folder that a run without privacy trained them."""
    for path in weights_files(Path(folder)):
        add_metadata(path, {NOT_PRIVATE_KEY: "hf_dp"})


class OtherTraining:
    """Refuses weights of a run that its statement does not count, unless the user says what rows
    that training was on. ``resting`` are the values that the run ended with."""

    def __init__(self, run: Run):
        self.run, self.resting = run, RestingWeights()

    def refuse(self, *, before_save: bool = False) -> None:
        """Raise UnsupportedModelError for what trained the weights in memory, or in their files."""
        run, model = self.run, self.run.model
        # Without a step the ledger holds nothing of earlier runs, either.
        counts = _nothing if before_save and not len(run.ledger) else self._counts
        self._refuse(
            chain(trained_in_memory(model, counts), _in_files(model, counts), self._at_rest(model))
        )
        folder = None if before_save else _left_by_trainers(model)
        if folder is not None and run.options.other_training is None and run.processes.is_main:
            logger.warning(
                "The base model comes from %s, where a Trainer left its files. If it was trained "
                "on the training rows, this run's statement does not hold. If it was on others, "
                "set other_training='public_rows' or 'other_rows', which the card repeats.",
                folder,
            )

    def refuse_in_memory(self) -> None:
        """Raise UnsupportedModelError for what trained the weights since they were loaded."""
        self._refuse(trained_in_memory(self.run.model, self._counts))

    def _counts(self, head: Head) -> bool:
        """Return whether the statement counts all that a run had released when it was that far: of
        an earlier run, what it released after it was counted is not."""
        book = self.run.book
        return head.run_id == book.run_id or any(
            claim.run_id == head.run_id and claim.counts(head) for claim in book.weaknesses.earlier
        )

    def _at_rest(self, model: nn.Module) -> Iterator[str]:
        if (name := self.resting.changed(model)) is not None:
            yield f"something else since the last step ({name!r} has other values)"

    def _refuse(self, found: Iterator[str]) -> None:
        answer = self.run.options.other_training
        self.run.book.weaken(Flags(other_training=answer))
        if answer is None and (trained_by := next(found, None)) is not None:
            raise UnsupportedModelError(
                "Expected a model that only counted steps have trained, got one that was trained "
                f"by {trained_by}. The privacy statement of this run does not count that. If it "
                "was on the same rows, name its folder in `earlier_runs`; if it was without "
                "privacy, or has no folder, no statement covers both: load the model again. If it "
                "was on public rows, set other_training='public_rows'; on rows that this "
                "statement is not about, other_training='other_rows'. The card repeats it. Save "
                "weights that you made from released ones by model.save_pretrained, elsewhere."
            )


class RestingWeights:
    """The values of weights that a run ended with, which may be cast, moved and resized: of a
    weight that grew, the first numbers are compared."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, set[int]]] = {}

    def note(self, model: nn.Module) -> None:
        """Take digests of all weights that this process holds."""
        self._known = {
            name: (part.numel(), set(_digests(part, (part.dtype, *_CASTS))))
            for name, part in _parts(model)
        }

    def forget(self) -> None:
        """Let them change from here on."""
        self._known = {}

    def changed(self, model: nn.Module) -> str | None:
        """Return the name of a weight that is not what it was; None if all are."""
        for name, part in _parts(model) if self._known else ():
            numbers, digests = self._known.get(name, (0, set()))
            known = part[:numbers]
            if 0 < numbers <= part.numel() and _digests(known, (part.dtype,))[0] not in digests:
                return name
        return None


def _nothing(head: Head) -> bool:
    return False


def trained_in_memory(model: nn.Module, counts: Callable[[Head], bool] = _nothing) -> Iterator[str]:
    """Yield, in words, what that does not count trained a model since it was loaded."""
    notes = (note for m in model.modules() for note in vars(m).get(_NOTE, {}).values())
    for folder, head in dict.fromkeys(notes):
        if head is None or not counts(head):
            yield _run_in_words(head, folder)
    for name, parameter in model.named_parameters():
        if parameter in _unpaid:
            yield f"an optimizer that no private step was recorded for (it stepped {name!r})"
            return


def _in_files(model: nn.Module, counts: Callable[[Head], bool]) -> Iterator[str]:
    """Yield, in words, what that does not count trained the weights in the folder that a model was
    loaded from, or in another that it may be from: a folder in that one, another revision. There it
    counts where it has weights of the model that the folder itself does not have."""
    folder = _loaded_from(model)
    own = [] if folder is None else weights_files(folder)
    for path in own:
        found = _trained_by(path, folder or path.parent, counts)
        if found and next(_weights_of(path, model), None) is not None:
            yield _run_in_words(found[0], str(folder))
            return
    known: set[str] | None = None
    for root in _roots(model):
        for path in sorted({*root.rglob("*.safetensors")} - {*own}):
            if any(part.startswith("_") for part in path.relative_to(root).parts):
                continue  # no model's weights, or what a killed save left
            if found := _trained_by(path, root, counts):
                if known is None:
                    known = {name for each in own for name in _weights_of(each, model)}
                if any(name not in known for name in _weights_of(path, model)):
                    yield _run_in_words(found[0], str(path.parent))
                    return


def _trained_by(path: Path, root: Path, counts: Callable[[Head], bool]) -> list[Head | None]:
    """Return what that does not count trained the weights in a file: heads, None for a run without
    privacy. A kill or ``save_pretrained`` leaves weights without a head: these are of the run whose
    files are nearest, beside them or in a folder above, up to ``root``."""
    head = head_in(path)
    if head is None and NOT_PRIVATE_KEY in read_metadata(path):
        return [None]
    heads = [] if head is None else [head]
    for place in (path.parent, *path.parent.parents):
        if not heads:
            heads = [each for where, each in heads_in(place) if where.suffix != path.suffix]
            heads += [] if (own := read_own(place)) is None else [own.head]
        if heads or place == root:
            break
    return [each for each in heads if not counts(each)]


def _left_by_trainers(model: nn.Module) -> Path | None:
    """Return the folder of a model's weights that say nothing, where a Trainer left its files."""
    folder = _loaded_from(model)
    if folder is None or not any((folder / name).exists() for name in _LEFT_BY_TRAINERS):
        return None
    return None if any(head_in(path) for path in weights_files(folder)) else folder


def _run_in_words(head: Head | None, folder: str) -> str:
    if head is None:
        return f"a run without privacy, in {folder!r}"
    spent = ""
    if any(Path(folder, name).exists() for name in (LEDGER, FILE_NAME)):
        evidence = read_run(folder)
        claim = "" if evidence.statement is None else f", epsilon {evidence.statement['epsilon']}"
        spent = (
            f": status {STATUSES[evidence.status]!r}{claim}, {evidence.ledger.steps():,} releases"
        )
    return f"the private run {head.run_id[:8]}, in {folder!r}{spent}"


def _loaded_from(model: nn.Module) -> Path | None:
    """Return the folder that a model was loaded from, also where the Hub's cache has it."""
    name = _name_of(model)
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        cached = try_to_load_from_cache(name, "config.json", cache_dir=HF_HUB_CACHE)
    except HFValidationError:  # no name of a repository
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _roots(model: nn.Module) -> list[Path]:
    """Return the folders that the files of a model's name are in: of the Hub's cache, those of all
    revisions, since a model does not say which one its weights are of."""
    name = _name_of(model)
    if not name or Path(name).is_dir():
        return [Path(name)] if name else []
    kept = Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
    return sorted(kept.glob("*"))


def _name_of(model: nn.Module) -> str | None:
    return getattr(getattr(base_model(model), "config", None), "name_or_path", None)


def _weights_of(path: Path, model: nn.Module) -> Iterator[str]:
    """Yield the names of a model's weights that are those of the file: the model may have been made
    from the configuration beside it alone."""
    own = {_plain_name(name): part for name, part in _parts(model)}
    with safe_open(path, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 (it is no mapping)
            part = own.get(_plain_name(name))
            value = stored.get_tensor(name).flatten() if part is not None else None
            if value is None or part is None or not value.dtype.is_floating_point:
                continue
            known = set(_digests(value[: part.numel()], (value.dtype, *_CASTS)))
            is_told = value.numel() > 1 and bool((value != value[0]).any())  # as zeros are not
            if is_told and known & set(_digests(part[: value.numel()], (part.dtype,))):
                yield _plain_name(name)


def _plain_name(name: str) -> str:
    """Return the name that a weight has before an adapter is put around its module."""
    for inserted in ("base_model.model.", "base_layer.", "modules_to_save.default."):
        name = name.replace(inserted, "")
    return name


def _parts(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers of each weight that this process holds, (n,), by the weight's name."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            # Its name tells a shard from the same weight when gathered.
            shard = " (a shard)" if isinstance(parameter, DTensor) else ""
            yield name + shard, held(parameter).detach().flatten()


def _digests(numbers: Tensor, dtypes: Sequence[torch.dtype]) -> list[int]:
    """Return a digest of the values (n,) after a cast to each of the types, in one pass.

    It is a sum of whole numbers, so it is the same on every device, and it does not tell a value
    from the same value in a wider type.
    """
    found = [torch.zeros((), dtype=torch.int64, device=numbers.device) for _ in dtypes]
    for chunk in numbers.split(_CHUNK):
        factors = _factors(chunk.device)[: len(chunk)]
        for index, dtype in enumerate(dtypes):
            if chunk.is_floating_point():
                bits = chunk.to(dtype).float().view(torch.int32)
            else:  # of quantized weights
                bits = chunk.to(torch.int32)
            found[index] = found[index] * 1_000_003 + (bits * factors).sum()
    return torch.stack(found).tolist()


@cache
def _factors(device: torch.device) -> Tensor:
    """Return an odd number for each place in a chunk."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**30), 2**30, (_CHUNK,), generator=generator, dtype=torch.int32)
    return (2 * drawn + 1).to(device)
