"""The one allow-list: which files of a folder may be published, and why each of the others stays.

A file is known by its name. What no rule knows stays.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_dp.errors import PublishError

_WEIGHTS = "noised weights, which epsilon covers"
_CONFIG = "what the model is built from"
_TOKENIZER = "the tokenizer"
_PROCESSOR = "the processor"
_SELECTION = "what trained, and how it was chosen"
_LICENSE = "the license"

_TEMPLATES = "additional_chat_templates"  # the only folder of which anything goes

# Patterns of whole names, with "/" between folders; the first that matches counts.
_GOES = {
    r"model\.safetensors": _WEIGHTS,
    r"model-\d{5}-of-\d{5}\.safetensors": f"a shard of the {_WEIGHTS}",
    r"model\.safetensors\.index\.json": "which shard holds which weight",
    r"adapter_model\.safetensors": _WEIGHTS,
    r"adapter_config\.json": "how the adapter is built, and on which base",
    r"config\.json": _CONFIG,
    r"generation_config\.json": "defaults of generation",
    r"tokenizer\.(json|model)|tokenizer_config\.json|tekken\.json": _TOKENIZER,
    r"vocab\.(json|txt)|merges\.txt|dict\.txt|bpe\.codes": _TOKENIZER,
    r"(emoji|entity_vocab)\.json": _TOKENIZER,
    r"(spiece|spm|spm_char|sentencepiece|sentencepiece\.bpe)\.model": _TOKENIZER,
    r"(source|target)\.spm": _TOKENIZER,
    r"special_tokens_map\.json|added_tokens\.json": _TOKENIZER,
    rf"chat_template\.(jinja|json)|{_TEMPLATES}/[\w.-]+\.jinja": "a chat template",
    r"(video_)?preprocessor_config\.json|(processor|audio_tokenizer)_config\.json": _PROCESSOR,
    r"selection\.json": _SELECTION,
    r"selection_masks\.safetensors": _SELECTION,
    r"README\.md": "the card",
    r"privacy\.json": "the evidence: plan, ledger and statement",
    r"(LICENSE|NOTICE)(\.txt|\.md)?": _LICENSE,
}
_STAYS = {
    r"(optimizer|scheduler|scaler)(_\d+)?\.(pt|bin)": "state of the training",
    r"rng_state(_\d+)?\.pth": "states of random generators",
    r"ledger\.jsonl": "the run's own ledger; privacy.json has what it adds up to",
    r"training_args\.bin": "a pickle of all arguments: paths, seeds, perhaps a token",
    r"trainer_state\.json": "the log of the training",
    r".*_results\.json|all_results\.json": "metrics and timings",
    r"(runs|logs|wandb|mlruns)/.*|.*\.(log|out|err)|events\.out\.tfevents.*": "logs",
    r"(.*/)?_.*": "its name starts with '_': hf_dp's own notes",
    r"checkpoint-.*/.*": "a checkpoint; it can be published by its own path",
    r".*\.py": "code, which would run on other machines",
    r".*\.(bin|pt|pth|ckpt|pkl|pickle|joblib|h5|msgpack)": "not safetensors: a pickle can run code",
}
UNKNOWN = "not on the list of what may leave"
LINK = "a link: what it leads to may be anything"


@dataclass(frozen=True)
class Sorted:
    """The files of a folder, by their paths in it.

    Attributes:
        goes: of files that may be published, why.
        stays: of all others, why not; folders of which nothing goes end in "/".
    """

    goes: dict[str, str]
    stays: dict[str, str]


def sort_files(folder: Path) -> Sorted:
    """Sort every file of a folder into what may be published and what stays."""
    goes, stays = {}, {}
    named = _shards(folder)
    for name in sorted(_files(folder)):
        why = why_goes(name)
        if why is None:
            top, inside, _ = name.partition("/")
            whole = inside and top != _TEMPLATES  # one line for a folder of which nothing goes
            stays[f"{top}/" if whole else name] = why_stays(f"{top}/" if whole else name)
        elif (folder / name).is_symlink() or not _is_inside(folder / name, folder):
            stays[name] = LINK
        elif re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) and name not in named:
            stays[name] = "a shard that the index does not name: of an earlier save"
        else:
            goes[name] = why
    return Sorted(goes, stays)


def why_goes(name: str) -> str | None:
    """Say why a file of this name may be published; None if it may not."""
    return next((why for pattern, why in _GOES.items() if re.fullmatch(pattern, name)), None)


def why_stays(name: str) -> str:
    """Say why a file of this name may not be published."""
    return next((why for pattern, why in _STAYS.items() if re.fullmatch(pattern, name)), UNKNOWN)


def refuse_others(names: Iterable[str]) -> None:
    """Raise PublishError for a name that is not on the list: the last look before an upload."""
    for name in names:
        if why_goes(name) is None:
            raise PublishError(
                f"{name!r} was about to be uploaded and is not on the list of what may leave "
                f"({why_stays(name)}). Nothing was uploaded. Please report this: it is a bug of "
                "hf_dp."
            )


def _is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _files(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):  # links to folders are listed, not followed
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in (*names, *links):
            yield Path(parent, name).relative_to(folder).as_posix()


def _shards(folder: Path) -> set[str]:
    """Return the names of the shards in the index; empty if there is none that can be read."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
