"""The way to the Hub: a repository of this run alone, and one commit that makes it the publication.

``upload_folder`` is never used: it would take what lies in the folder, and may split it into
several commits, the card in the last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import RevisionNotFoundError

from hf_dp._version import __version__
from hf_dp.errors import LedgerError, PublishError
from hf_dp.publishing.hub_errors import LOG_IN, Result, asked
from hf_dp.publishing.publication import CARD, Publication
from hf_dp.run.mark import Mark
from hf_dp.statement.record import FILE_NAME, read

# What the Hub and its web page put into a new repository.
_OF_THE_PAGE = (".gitattributes", CARD, "LICENSE")
# What stays when a commit replaces all other files.
_KEPT = (".gitattributes", "LICENSE")
_OTHER_NAME = "Choose another name, or delete that repository on its page if nobody needs it."


@dataclass(frozen=True)
class Remote:
    """A branch of a repository, as the Hub shows it.

    Attributes:
        head: its last commit.
        files: all paths.
        private: whether the repository is.
        mark: of the private run whose ``privacy.json`` is there, or None.
    """

    head: str | None
    files: tuple[str, ...]
    private: bool
    mark: Mark | None


class Hub:
    """Pushes publications with one token.

    Args: token: None for that of ``hf auth login`` or HF_TOKEN.

    Raises: PublishError when there is none.
    """

    def __init__(self, token: str | None = None):
        self.token = token or get_token()
        if not self.token:
            raise PublishError(f"There is no token of the Hub. {LOG_IN}")
        self.api = HfApi(token=self.token, library_name="hf_dp", library_version=__version__)
        self._own: dict[tuple[str, str | None], str | None] = {}  # commits that this object made

    def create(self, repository: str, private: bool | None = None) -> str:
        """Make a repository, unless it is there, and return its full name.

        Args: private: None for what the account's settings say.
        """
        return self._ask(
            "Creating the repository",
            repository,
            lambda: self.api.create_repo(repository, private=private, exist_ok=True).repo_id,
        )

    def look(self, repository: str, revision: str | None = None) -> Remote:
        """Return what a branch holds. A branch that is not there yet is made, without files.

        Raises: PublishError, also for a ``privacy.json`` that cannot be read.
        """
        return self._ask(
            "Reading the repository", repository, lambda: self._look(repository, revision)
        )

    def _look(self, repository: str, revision: str | None) -> Remote:
        try:
            info = self.api.model_info(repository, revision=revision)
        except RevisionNotFoundError:
            self._make_branch(repository, revision)
            info = self.api.model_info(repository, revision=revision)
        files = tuple(sorted(each.rfilename for each in info.siblings or ()))
        mark = self._mark(repository, info.sha) if FILE_NAME in files else None
        return Remote(info.sha, files, bool(info.private), mark)

    def refuse_others(
        self,
        remote: Remote,
        repository: str,
        revision: str | None,
        mark: Mark | None,
        private: bool | None = None,
    ) -> None:
        """Raise PublishError unless a branch is empty, or holds an earlier state of the same run.

        Args: mark: of the run to be pushed; None for a model that was not trained privately.
        """
        if private and not remote.private:
            raise PublishError(
                f"{repository!r} exists and is public, and it was to be private. Make it private "
                "in its settings on the Hub, or choose another name."
            )
        others = [name for name in remote.files if name not in _OF_THE_PAGE]
        if remote.mark is None:
            pushed_here = self._own.get((repository, revision), "") == remote.head
            if others and not (pushed_here and mark is None):
                raise PublishError(
                    f"{repository!r} exists and holds {others[0]!r} and no {FILE_NAME}, so it is "
                    "not an earlier push of this run. Its files would stand beside a statement "
                    f"that does not cover them. {_OTHER_NAME}"
                )
        elif mark is None or mark.run_id != remote.mark.run_id:
            raise PublishError(
                f"{repository!r} exists and holds the private run {remote.mark.run_id}, and this "
                f"is {'no private run' if mark is None else f'run {mark.run_id}'}. {_OTHER_NAME}"
            )
        elif lost := mark.lacks(remote.mark):
            raise PublishError(
                f"{repository!r} holds a newer state of this run: it knows {lost}. Publish the "
                "run's newest state, or choose another name for an older checkpoint."
            )

    def push(
        self,
        publication: Publication,
        repository: str,
        *,
        revision: str | None = None,
        private: bool | None = None,
        message: str = "Publish with hf_dp",
    ) -> CommitInfo:
        """Make a branch hold exactly the publication, by one commit.

        Files that are there and not in it are deleted by the same commit; the history keeps them.

        Raises: PublishError when the publication or the repository is refused, before anything is
            uploaded, and when the Hub or the network fails.
        """
        operations: list[Any] = [*publication.additions()]
        remote = self.look(repository, revision)
        self.refuse_others(remote, repository, revision, publication.mark, private)
        gone = [name for name in remote.files if name not in (*publication.files, *_KEPT)]
        operations += [CommitOperationDelete(name, is_folder=False) for name in gone]
        done = self._ask(
            "Publishing to",
            repository,
            lambda: self.api.create_commit(
                repository,
                operations,
                commit_message=message,
                revision=revision,
                parent_commit=remote.head,
            ),
        )
        self._own[repository, revision] = done.oid
        return done

    def in_background(self, act: Callable[[], Result]) -> Future[Result]:
        """Run ``act`` in the thread of this object's uploads, one after another."""
        return self.api.run_as_future(act)

    def _ask(self, what: str, repository: str, act: Callable[[], Result]) -> Result:
        return asked(what, repository, self.token, act)

    def _make_branch(self, repository: str, branch: str | None) -> None:
        """Make a branch that begins where the repository began, before any model was in it."""
        assert branch is not None
        *_, first = self.api.list_repo_commits(repository)
        self.api.create_branch(repository, branch=branch, revision=first.commit_id, exist_ok=True)

    def _mark(self, repository: str, head: str | None) -> Mark:
        with tempfile.TemporaryDirectory() as folder:
            path = self.api.hf_hub_download(repository, FILE_NAME, revision=head, local_dir=folder)
            try:
                return Mark.of(read(Path(path)))
            except LedgerError as problem:
                why = str(problem).replace(folder, repository)
                raise PublishError(
                    f"{repository!r} holds a {FILE_NAME} that cannot be read, so nothing shows "
                    f"which run it is of: {why} {_OTHER_NAME}"
                ) from None


def publish(
    folder: str | Path,
    repository: str,
    *,
    private: bool | None = None,
    base_model: str | None = None,
    revision: str | None = None,
    not_private: bool = False,
    token: str | None = None,
    message: str = "Publish with hf_dp",
) -> CommitInfo:
    """Publish a run's folder, or one of its checkpoints.

    Args:
        folder: with weights, ``privacy.json`` and what loading needs.
        repository: "you/model"; made unless it is there.
        private: whether to make it so; None for what the account's settings say.
        base_model: the id on the Hub of an adapter's base, where it was loaded from a folder.
        revision: a branch; made unless it is there.
        not_private: whether to publish what no epsilon covers, as what it is.
        token: None for that of ``hf auth login`` or HF_TOKEN.

    Raises: PublishError. Refusals come before anything is sent.
    """
    hub = Hub(token)

    def look_through(name: str) -> Publication:
        return Publication.of(
            folder,
            name,
            base_model,
            not_private=not_private,
            tokens=(token,),
        )

    publication = look_through(repository)
    publication.refuse()
    full_name = hub.create(repository, private)
    if full_name != repository:  # which the card is to name
        publication = look_through(full_name)
    return hub.push(publication, full_name, revision=revision, private=private, message=message)
