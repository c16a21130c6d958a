"""The way to the Hub: a repository of this run alone, and one commit that makes it the publication.

``upload_folder`` is never used: it would take what lies in the folder, and may split it into
several commits, the card in the last.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitInfo, CommitOperationDelete, HfApi, ModelInfo, errors, get_token

from hf_dp._version import __version__
from hf_dp.cards.verify import CARD, is_as_made
from hf_dp.errors import HfDpError, LedgerError, PublishError
from hf_dp.publishing.publication import Publication
from hf_dp.publishing.scan import scrubbed
from hf_dp.statement.evidence import FILE_NAME, Evidence, read

# What stays when a commit replaces all other files; with a card, what a new repository may hold.
_KEPT = (".gitattributes", "LICENSE")
_LOG_IN = (
    "Run `hf auth login`, or set HF_TOKEN, with a token that may write "
    "(https://huggingface.co/settings/tokens)."
)
_MOVED = "Something else changed the repository in the meantime. Publish again."
_MOVES = {
    400: "The Hub refuses what was sent. Nothing was committed.",
    401: f"The Hub does not accept the token. {_LOG_IN}",
    403: f"The token may not write there. Use a name of your own, or another token. {_LOG_IN}",
    404: "It does not exist, or the token may not see it. Check the name and the token.",
    409: _MOVED,
    412: _MOVED,
}
_OTHER_NAME = "Choose another name, or delete that repository on its page if nobody needs it."

T = TypeVar("T")


class Hub:
    """Pushes publications with one token.

    Args: token: None for that of ``hf auth login`` or HF_TOKEN.

    Raises: PublishError when there is none, and for whatever the Hub or the network refuses.
    """

    def __init__(self, token: str | None = None):
        self.token = token or get_token()
        if not self.token:
            without = "Or fill a folder: `hf-dp publish DIR --to-folder FOLDER`."
            raise PublishError(f"There is no token for the Hub. {_LOG_IN} {without}")
        self.api = HfApi(token=self.token, library_name="hf_dp", library_version=__version__)

    def _asked(self, what: str, repository: str, ask: Callable[[], T]) -> T:
        """Return what the Hub answers; raise whatever fails as PublishError, by ``what`` was being
        done.

        The original error is not attached, since its request holds the token."""
        try:
            return ask()
        except HfDpError:
            raise
        except Exception as error:  # the client's HTTP library, and so its errors, vary
            said = " ".join(scrubbed(f"{type(error).__name__}: {error}", (self.token,)).split())
            problem = PublishError(
                f"{what} {repository!r} failed. {_next_move(error)} ({said[:500]})"
            )
        raise problem

    def create(self, repository: str, private: bool | None = None) -> str:
        """Make a repository, unless it is there, and return its full name.

        Args: private: None for what the account's settings say.
        """
        made = self._asked(
            "Creating the repository",
            repository,
            lambda: self.api.create_repo(repository, private=private, exist_ok=True),
        )
        return made.repo_id

    def push(
        self,
        repository: str,
        publication: Publication,
        *,
        revision: str | None = None,
        private: bool | None = None,
        message: str = "Publish with hf_dp",
    ) -> CommitInfo:
        """Make a branch hold exactly the publication, by one commit.

        Files that are there and not in it are deleted by the same commit; the history keeps them.

        Raises: PublishError when the publication or the repository is refused, before anything is
            uploaded.
        """
        additions = publication.additions()
        there = self.check(repository, revision, publication.evidence, private)
        gone = [name for name in _files(there) if name not in (*publication.files, *_KEPT)]
        deletions = [CommitOperationDelete(name, is_folder=False) for name in gone]
        return self._asked(
            "Publishing to",
            repository,
            lambda: self.api.create_commit(
                repository,
                [*additions, *deletions],
                commit_message=message,
                revision=revision,
                parent_commit=there.sha,
            ),
        )

    def check(
        self,
        repository: str,
        revision: str | None,
        run: Evidence | None,
        private: bool | None = None,
        *,
        older: bool = False,
    ) -> ModelInfo:
        """Return what a branch holds; make one that is not there yet, without files.

        Args:
            run: which is to be pushed; None before it has begun.
            older: whether the run may be at an older state than the branch.

        Raises: PublishError unless it is empty, or holds an earlier state of the same run with the
            card as it was pushed.
        """
        what = "Reading the repository"
        there = self._asked(what, repository, lambda: self._info(repository, revision))
        if private and not there.private:
            raise PublishError(
                f"{repository!r} exists and is public, but should be private. Make it private in "
                "its settings on the Hub, or choose another name."
            )
        others = [name for name in _files(there) if name not in (*_KEPT, CARD)]
        if FILE_NAME not in others:
            if others:
                raise PublishError(
                    f"{repository!r} exists and holds {others[0]!r} but no {FILE_NAME}, so it is "
                    f"not an earlier push of this run. {_OTHER_NAME}"
                )
            return there
        evidence, card = self._asked(what, repository, lambda: self._pushed(repository, there))
        if run is None or run.run_id != evidence.run_id:
            raise PublishError(
                f"{repository!r} exists and holds the private run {evidence.run_id}, but this is "
                f"{'another one' if run is None else f'run {run.run_id}'}. {_OTHER_NAME}"
            )
        if not older and (lost := run.lacks(evidence)):
            raise PublishError(
                f"{repository!r} holds a newer state of this run: it knows {lost}. Publish the "
                "run's newest state, or choose another name for an older checkpoint."
            )
        if card is not None and not is_as_made(evidence, card):
            raise PublishError(
                f"{CARD} in {repository!r} was edited on the Hub, or made by another version of "
                "hf_dp. State here what was added (trainer.describe(...) or `hf-dp card DIR`'s "
                "options), delete it on the repository's page, and publish again."
            )
        return there

    def _info(self, repository: str, branch: str | None) -> ModelInfo:
        try:
            return self.api.model_info(repository, revision=branch)
        except errors.RevisionNotFoundError:  # it begins before any model was in the repository
            *_, first = self.api.list_repo_commits(repository)
            self.api.create_branch(
                repository, branch=str(branch), revision=first.commit_id, exist_ok=True
            )
            return self.api.model_info(repository, revision=branch)

    def _pushed(self, repository: str, there: ModelInfo) -> tuple[Evidence, str | None]:
        """Return the evidence and the card that a branch holds."""
        with tempfile.TemporaryDirectory() as folder:
            for name in {FILE_NAME, CARD}.intersection(_files(there)):
                self.api.hf_hub_download(repository, name, revision=there.sha, local_dir=folder)
            try:
                evidence = read(folder)
            except LedgerError as problem:
                why = str(problem).replace(folder, repository)
                raise PublishError(
                    f"{repository!r} holds a {FILE_NAME} that cannot be read, so nothing shows "
                    f"which run it belongs to: {why} {_OTHER_NAME}"
                ) from None
            card = Path(folder, CARD)
            return evidence, card.read_text("utf-8", errors="replace") if card.exists() else None


def _files(there: ModelInfo) -> list[str]:
    return sorted(each.rfilename for each in there.siblings or ())


def _next_move(error: BaseException) -> str:
    while not isinstance(error, errors.HfHubHTTPError) and error.__cause__ is not None:
        error = error.__cause__  # the client wraps what fails in an upload
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if isinstance(error, errors.HFValidationError):
        return "Expected the name of a repository, such as 'you/model'."
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it to publish."
    if status >= 500:
        return "The Hub has a problem. Publish again later; what was sent is not committed."
    if isinstance(error, ValueError) or status in _MOVES:
        return _MOVES.get(status, _MOVES[400])
    return (
        "The Hub could not be reached, or the connection broke. A commit is there as a whole or "
        "not at all. Publish again when the network is back."
    )


def publish(
    folder: str | Path,
    repository: str | None = None,
    *,
    to_folder: str | Path | None = None,
    private: bool | None = None,
    base_model: str | None = None,
    revision: str | None = None,
    not_private: bool = False,
    token: str | None = None,
    message: str = "Publish with hf_dp",
) -> CommitInfo | Path:
    """Publish a run's folder, or one of its checkpoints, and return the commit or ``to_folder``.

    Args:
        folder: with weights, ``privacy.json`` and what loading needs.
        repository: "you/model"; created if it does not exist.
        to_folder: new or empty, to be filled instead of a repository, without the Hub.
        private: whether it is created as private; None for what the account's settings say.
        base_model: the id on the Hub of an adapter's base, where it was loaded from a folder.
        revision: a branch; created if it does not exist.
        not_private: whether to publish, as NOT PRIVATE, what no epsilon covers.
        token: None for that of ``hf auth login`` or HF_TOKEN.

    Raises: PublishError. Refusals come before anything is sent.
    """
    look_through = functools.partial(
        Publication.of, folder, base_model=base_model, not_private=not_private, tokens=(token,)
    )
    if to_folder is not None:
        for_hub = {"repository": repository, "private": private, "revision": revision}
        if given := {name: value for name, value in for_hub.items() if value is not None}:
            raise PublishError(
                f"`to_folder` fills a folder without the Hub, so these have no effect: {given}. "
                "Leave them out."
            )
        return look_through().write(Path(to_folder))
    if repository is None:
        raise PublishError("Expected `repository` ('you/model') or `to_folder`, got neither.")
    publication = look_through(repository=repository)
    publication.refuse()
    hub = Hub(token)
    full_name = hub.create(repository, private)
    if full_name != repository:  # which the card is to name
        publication = look_through(repository=full_name)
    return hub.push(full_name, publication, revision=revision, private=private, message=message)
