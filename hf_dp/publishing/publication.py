"""What a push puts on the Hub: an explicit list of bytes and files, made before any upload."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from huggingface_hub import CommitOperationAdd

from hf_dp.cards.details import FRONT_MATTER, CardDetails, is_repository
from hf_dp.cards.verify import CARD, CONFIGS, card_files
from hf_dp.errors import LedgerError, PublishError
from hf_dp.publishing.allowed import refuse_others, sort_files, why_goes
from hf_dp.publishing.scan import Scan
from hf_dp.run.ledger_file import LEDGER
from hf_dp.run.witnesses import head_in, last_with_weights, weights_files
from hf_dp.statement.durable import digest_of_file
from hf_dp.statement.evidence import FILE_NAME, Evidence, read
from hf_dp.statement.wording import NOT_PRIVATE, STATUSES, delta_text

_MASKS = "selection_masks.safetensors"
_CLAIM = re.compile(r"differential[-_]privacy")  # a key, and tags, of a private run's card


@dataclass(frozen=True)
class Publication:
    """The files that go (bytes, or where weights are), why each of the others stays, what was taken
    out or replaced, and why the folder cannot be published, each with its next move.

    Attributes: evidence: the ``privacy.json``; None where it cannot be read, which is refused.
    """

    folder: Path
    files: Mapping[str, bytes | Path]
    stays: Mapping[str, str]
    changes: tuple[str, ...]
    refusals: tuple[str, ...]
    evidence: Evidence | None

    @classmethod
    def of(
        cls,
        folder: str | os.PathLike[str],
        repository: str | None = None,
        base_model: str | None = None,
        *,
        not_private: bool = False,
        tokens: Iterable[str | None] = (),
    ) -> Publication:
        """Look through a folder; nothing is written, and no network is used.

        Args: base_model: the id on the Hub of the base, for card and adapter. tokens: secrets to
            look for, besides those that this process knows.

        Raises: PublishError for no folder, a file that cannot be read, or a ``base_model`` or
            ``repository`` that is no id."""
        folder = Path(folder)
        if not folder.is_dir():
            raise PublishError(f"Expected a folder of a run to publish, got {str(folder)!r}.")
        if base_model is not None and not is_repository(base_model):
            raise PublishError(
                f"Expected `base_model` to be an id on the Hub, for example "
                f"'FacebookAI/roberta-base', got {base_model!r}."
            )
        if repository is not None and not is_repository(repository):
            raise PublishError(
                "Expected `repository` to be the name of a repository on the Hub, for example "
                f"'you/model', got {repository!r}."
            )
        evidence, refusals = None, []
        try:
            evidence = read(folder)
        except LedgerError as error:
            refusals = [str(error)]
        scan = Scan(folder, base_model or _base_of_card(evidence), tokens)
        scan.refusals += refusals
        goes, stays = sort_files(folder)
        files = _contents(folder, goes)
        if not any(isinstance(each, Path) and name != _MASKS for name, each in files.items()):
            last = last_with_weights(folder)
            scan.refusals.append(
                f"{folder} holds no model.safetensors and no adapter_model.safetensors. "
                + ("" if last is None else f"Weights are in {last}. ")
                + "Name the folder into which the model was saved."
            )
        for name, content in files.items():
            if isinstance(content, Path):
                scan.look_at_weights(name, content)
            elif name not in (CARD, FILE_NAME):  # which are made anew
                files[name] = scan.published(name, content)
        if evidence is not None:
            given = {} if base_model is None else {"base_model": base_model}
            configs = {
                name: content
                for name, content in files.items()
                if name in CONFIGS and isinstance(content, bytes)
            }
            try:
                made = card_files(folder, repository=repository, given=given, replaced=configs)
            except LedgerError as error:
                scan.refusals.append(str(error))
            else:
                files |= {name: scan.published(name, content) for name, content in made.items()}
                scan.refusals += _unfit(folder, evidence, files, not_private)
        return cls(
            folder,
            MappingProxyType(dict(sorted(files.items()))),
            stays,
            tuple(scan.changes),
            tuple(scan.refusals),
            evidence,
        )

    @property
    def goes(self) -> dict[str, str]:
        """Map each file that goes to the reason why it goes."""
        return {name: why_goes(name) or "" for name in self.files}

    def in_words(self) -> str:
        """Name the run and its claim."""
        if self.evidence is None:
            return "nothing is claimed"
        said, status = self.evidence.statement or {}, STATUSES[self.evidence.status]
        if said.get("epsilon") is None:
            return status
        return (
            f"{status}, epsilon {said['epsilon']} at delta {delta_text(said['delta'])}, "
            f"{self.evidence.ledger.steps():,} releases"
        )

    def refuse(self) -> None:
        """Raise PublishError when anything keeps the folder from being published."""
        if self.refusals:
            more = "".join(f"\n- {reason}" for reason in self.refusals)
            raise PublishError(f"{self.folder} cannot be published, and nothing was:{more}")

    def additions(self) -> list[CommitOperationAdd]:
        """Return the operations of a commit, after a last look at their names.

        Raises: PublishError as :meth:`refuse`, and for a file that changed since it was looked at.
        """
        self.refuse()
        refuse_others(self.files)
        operations = [
            CommitOperationAdd(name, each if isinstance(each, bytes) else str(each))
            for name, each in self.files.items()
        ]
        saved = self.evidence.files if self.evidence else {}
        for each in operations:
            name, found = each.path_in_repo, each.upload_info.sha256.hex()
            if isinstance(self.files[name], Path) and saved.get(name, found) != found:
                raise _changed(name)
        return operations

    def write(self, folder: Path) -> Path:
        """Fill a new or empty folder with the files of a commit, and return it.

        Raises: PublishError as :meth:`additions`, for a folder that holds anything, lies in that of
            the run, or cannot be written, and for a file that changes. Then nothing is left."""
        run = self.folder.resolve()
        run = run.parent if (run.parent / LEDGER).exists() else run  # of a checkpoint
        written: list[Path] = []
        try:
            inside = run in folder.resolve().parents
            if inside or (folder.exists() and any(folder.iterdir())):
                raise PublishError(
                    f"Expected `to_folder` to be a new or empty folder outside of {str(run)!r}, "
                    f"got {str(folder)!r}. Name another one."
                )
            for each in self.additions():
                path = folder / each.path_in_repo
                path.parent.mkdir(parents=True, exist_ok=True)
                with each.as_file() as content, path.open("xb") as file:
                    written.append(path)
                    shutil.copyfileobj(content, file)
                if digest_of_file(path) != each.upload_info.sha256.hex():
                    raise _changed(each.path_in_repo)
        except BaseException as error:
            for path in written:
                with suppress(OSError):
                    path.unlink()
                    while (path := path.parent) != folder:
                        path.rmdir()  # if it is empty now
            if isinstance(error, (OSError, ValueError)):  # or a file that is gone
                raise PublishError(
                    f"Copying from {self.folder} into {str(folder)!r} failed ({error}). Nothing "
                    "was published. Publish again when both can be used."
                ) from error
            raise
        return folder


def _changed(name: str) -> PublishError:
    return PublishError(
        f"{name} changed while it was published, and nothing is. Publish again when nothing "
        "writes into the folder."
    )


def _contents(folder: Path, names: Iterable[str]) -> dict[str, bytes | Path]:
    """Read files by their names, except weights, whose paths stand for them."""
    paths = {name: folder / name for name in names}
    try:
        return {
            name: path if path.suffix == ".safetensors" else path.read_bytes()
            for name, path in paths.items()
        }
    except OSError as error:
        raise PublishError(f"A file of {folder} cannot be read ({error}).") from error


def _base_of_card(evidence: Evidence | None) -> str | None:
    """Return the id on the Hub of the base, as the user gave it for the card; None without one."""
    if evidence is None or evidence.card is None:
        return None
    details = CardDetails.from_dict(evidence.card)
    return details.hub_base if "base_model" in details.given else None


def _unfit(
    folder: Path, evidence: Evidence, files: Mapping[str, bytes | Path], not_private: bool
) -> Iterator[str]:
    """Yield why what a run claims does not fit what is to be published."""
    if not len(evidence.ledger):
        yield (
            f"The run of {folder} has made no private step, so its epsilon of 0 is about weights "
            "that it did not train. Publish the folder of the run that trained them."
        )
    for name in evidence.files:
        if name not in files:
            yield (
                f"{name} was saved with {FILE_NAME} but is not in {folder}. Save the model again "
                "with trainer.save_model(), or restore the file."
            )
    if evidence.status == NOT_PRIVATE and not not_private:
        yield (
            f"This run is NOT private: {evidence.restated().status_reason}. To publish it as such, "
            "pass --not-private (in Python, not_private=True)."
        )


def refuse_claims(folder: Path, tags: Iterable[str] = ()) -> None:
    """Raise PublishError where a folder whose run is not private holds what is of a private run, or
    a card (with these tags) that claims to be: it would be pushed as a whole, past the allow-list.
    """
    held = [name for name in (FILE_NAME, LEDGER) if (folder / name).exists()]
    for place in (folder, *folder.glob("checkpoint-*")):
        for path in weights_files(place):
            if (head := head_in(path)) is not None:
                name = path.relative_to(folder).as_posix()
                held.append(f"{name}, weights of the private run {head.run_id}")
    if held:
        raise PublishError(
            f"A run that is not private pushes its whole folder, and {folder} holds {held[0]}. "
            f"Publish a private run by `hf-dp publish`, from the folder with its {FILE_NAME}, and "
            "train without privacy in another folder."
        )
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    metadata = FRONT_MATTER.match(text)
    if _CLAIM.search("\n".join([metadata[1] if metadata else "", *tags])):
        raise PublishError(
            f"The metadata of {CARD} claims differential privacy, but there is no {FILE_NAME}. "
            "Remove the claim from the card, or publish the folder that holds the evidence."
        )
