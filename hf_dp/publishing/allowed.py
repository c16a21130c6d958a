"""The one allow-list: which files of a folder may be published, by their names, and why each of the
others stays. What no rule knows stays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_dp.errors import PublishError

_TEMPLATES = "additional_chat_templates"  # the only folder of which anything goes

# Patterns of whole names, with "/" between folders; the first that matches counts.
_GOES = {
    r"model(-\d{5}-of-\d{5})?\.safetensors|adapter_model\.safetensors": (
        "noised weights, which epsilon covers"
    ),
    r"model\.safetensors\.index\.json": "which shard holds which weight",
    r"\d+_[A-Za-z]+/model\.safetensors": "noised weights, of a module beside the transformer",
    r"modules\.json|config_sentence_transformers\.json|sentence_bert_config\.json"
    r"|\d+_[A-Za-z]+/config\.json": "which modules an embedding model has",
    r"adapter_config\.json": "how the adapter is built, and on which base",
    r"config\.json": "what the model is built from",
    r"generation_config\.json": "defaults of generation",
    r"tokenizer\.(json|model)|tokenizer_config\.json|tekken\.json|vocab\.(json|txt)|merges\.txt"
    r"|dict\.txt|bpe\.codes|(emoji|entity_vocab|special_tokens_map|added_tokens)\.json"
    r"|(spiece|spm|spm_char|sentencepiece|sentencepiece\.bpe)\.model|(source|target)\.spm": (
        "the tokenizer"
    ),
    rf"chat_template\.(jinja|json)|{_TEMPLATES}/[\w.-]+\.jinja": "a chat template",
    r"(video_)?preprocessor_config\.json|(processor|audio_tokenizer)_config\.json": "the processor",
    r"selection\.json|selection_masks\.safetensors": "what trained, and how it was chosen",
    r"README\.md": "the card",
    r"privacy\.json": "the evidence: plan, ledger and facts",
    r"(LICENSE|NOTICE)(\.txt|\.md)?": "the license",
}
_STAYS = {
    r"(optimizer|scheduler|scaler)(_\d+)?\.(pt|bin)": "state of the training",
    r"rng_state(_\d+)?\.pth": "states of random generators",
    r"ledger\.jsonl": "the run's own ledger; privacy.json has what it adds up to",
    r"training_args\.bin": "a pickle of all arguments: paths, seeds, perhaps a token",
    r"trainer_state\.json": "the log of the training",
    r".*_results\.json": "metrics and timings",
    r"(runs|logs|wandb|mlruns)/.*|.*\.(log|out|err)|events\.out\.tfevents.*": "logs",
    r"(.*/)?_.*": "its name starts with '_': hf_dp's own notes",
    r"checkpoint-.*/.*": "a checkpoint; it can be published by its own path",
    r".*\.py": "code, which would run on other machines",
    r".*\.(bin|pt|pth|ckpt|pkl|pickle|joblib|h5|msgpack)": "not safetensors: a pickle can run code",
}
UNKNOWN = "not on the list of what may leave"
LINK = "a link: what it leads to may be anything"


def sort_files(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return which files of a folder may be published, and all others (folders of which nothing
    goes end in "/"); of each, why."""
    goes, stays, shards = {}, {}, _shards(folder)
    for name in sorted(_files(folder)):
        top, inside, _ = name.partition("/")
        if why_goes(name) is None:
            name = f"{top}/" if inside and top != _TEMPLATES else name  # one line for a folder
            stays[name] = why_stays(name)
        elif (folder / name).is_symlink():
            stays[name] = LINK
        elif re.fullmatch(r"model-.*\.safetensors", name) and name not in shards:
            stays[name] = "a shard that the index does not name: of an earlier save"
        else:
            goes[name] = str(why_goes(name))
    return goes, stays


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
                f"({why_stays(name)}). Nothing was. Please report this bug of hf_dp."
            )


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
