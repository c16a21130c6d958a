"""The Trainer's pushes: each is one commit of exactly what may leave, with its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import PushInProgress, logging

from hf_dp.cards.hub_rules import is_repository
from hf_dp.distributed.processes import Processes
from hf_dp.errors import HfDpError, PublishError
from hf_dp.publishing.contents import is_local
from hf_dp.publishing.hub import Hub
from hf_dp.publishing.publication import Publication
from hf_dp.publishing.staging import clear, clear_all, stage
from hf_dp.run.mark import Mark
from hf_dp.statement.record import FILE_NAME, read
from hf_dp.trainer.checkpointing import Checkpointing

logger = logging.get_logger(__name__)

_NOT_PRIVATE = (
    "insecure_seed makes the noise known, so this run is not private. To publish it as NOT "
    "PRIVATE, leave push_to_hub off and call trainer.push_to_hub(not_private=True)."
)


class Publishing(Checkpointing):
    """A Trainer that pushes what the allow-list names, and nothing else.

    The main process alone talks to the Hub; the others learn whether it succeeded.
    """

    card: dict[str, Any]
    hub_model_id: Any
    push_in_progress: Any = None
    _hub: Hub | None = None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository, as ``hub_private_repo`` says, before any budget is spent.

        Raises: PublishError when it holds anything but an earlier state of this run.
        """
        if self._pushes_as_trainer:
            return super().init_hf_repo(token, private)
        if self.args.push_to_hub and self._is_insecure:
            raise PublishError(_NOT_PRIVATE)
        self.push_in_progress = None
        private = self.args.hub_private_repo if private is None else private
        self.hub_model_id = Processes.here().on_main(lambda: self._create(token, private))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        not_private: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Save the model, and make the repository hold it, its card and ``privacy.json``.

        The arguments are Trainer's, and ``not_private``: whether to publish a run with
        ``insecure_seed``, as NOT PRIVATE.

        Returns: in the main process the commit, or a Future with ``blocking=False``; else None.

        Raises: PublishError, before anything is uploaded when the folder or the repository is
            refused; DistributedError when another process failed.
        """
        if self._pushes_as_trainer:
            return super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        if self._is_insecure and not not_private:
            raise PublishError(_NOT_PRIVATE)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        if not self._is_private:  # whose card Trainer writes
            kwargs.setdefault("model_name", str(self.hub_model_id).split("/")[-1])
        self.create_model_card(**self._with_model_tags(kwargs))
        self._finish_current_push()
        done: list[Any] = []
        message = commit_message or "End of training"
        Processes.here().on_main(
            lambda: done.append(
                self._push_folder(message, blocking, token, revision, private, not_private)
            )
        )
        return done[0] if done else None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a complete checkpoint in the background, with the epsilon spent so far.

        A push that fails is a warning, and training goes on.
        """
        if self.is_saving:  # it is pushed when it is complete
            return
        if self._pushes_as_trainer:
            return super()._push_from_checkpoint(checkpoint_folder)
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder, name = Path(str(self.args.output_dir)), Path(checkpoint_folder).name
        if not busy:
            clear_all(folder)
        try:
            publication = self._publication(Path(checkpoint_folder), not self._is_private)
            publication.refuse()
            staged, place = stage(publication, folder)
        except (HfDpError, OSError) as problem:
            return _warn(name, problem)
        step = name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        message = f"Training in progress, step {step} ({publication.in_words()})"

        def push() -> None:
            try:
                self._push(staged, message)
            except Exception as problem:  # of a thread, whose error nobody would see
                _warn(name, problem)
            finally:
                clear(place)

        self._add_push(self._the_hub().in_background(push))

    def _create(self, token: str | None, private: bool | None) -> str:
        args, hub = self.args, self._the_hub(token)
        folder = Path(str(args.output_dir))
        full_name = hub.create(args.hub_model_id or folder.absolute().name, private)
        mark = None
        if (folder / FILE_NAME).exists() and not self._starts_over:
            mark = Mark.of(read(folder))
        remote = hub.look(full_name, args.hub_revision)
        if mark is None or remote.mark is None or mark.run_id != remote.mark.run_id:
            hub.refuse_others(remote, full_name, args.hub_revision, mark, private)
        return full_name

    def _push_folder(
        self,
        message: str,
        blocking: bool,
        token: str | None,
        revision: str | None,
        private: bool | None,
        not_private: bool,
    ) -> Any:
        folder = Path(str(self.args.output_dir))
        self._the_hub(token)
        publication = self._publication(folder, not_private or not self._is_private)
        publication.refuse()
        for remark in publication.remarks:
            logger.warning("The card: %s", remark)
        if blocking:
            return self._push(publication, message, revision, private)
        # The next save writes into the same files.
        staged, place = stage(publication, folder, linked=False)

        def push() -> CommitInfo:
            try:
                return self._push(staged, message, revision, private)
            finally:
                clear(place)

        job = self._the_hub().in_background(push)
        self._add_push(job)
        return job

    def _push(
        self,
        publication: Publication,
        message: str,
        revision: str | None = None,
        private: bool | None = None,
    ) -> CommitInfo:
        return self._the_hub().push(
            publication,
            str(self.hub_model_id),
            revision=revision or self.args.hub_revision,
            private=self.args.hub_private_repo if private is None else private,
            message=message,
        )

    def _publication(self, folder: Path, not_private: bool) -> Publication:
        base = self.card.get("base_model")
        return Publication.of(
            folder,
            self.hub_model_id,
            base if base and is_repository(base) and not is_local(base) else None,
            not_private=not_private,
            tokens=(self._the_hub().token, self.args.hub_token),
        )

    def _the_hub(self, token: str | None = None) -> Hub:
        if self._hub is None or (token is not None and token != self._hub.token):
            self._hub = Hub(token or self.args.hub_token)
        return self._hub

    def _add_push(self, job: Any) -> None:
        jobs: Any = [job]
        if self.push_in_progress is None or self.push_in_progress.is_done():
            self.push_in_progress = PushInProgress(jobs)
        else:
            self.push_in_progress.jobs += jobs

    def _with_model_tags(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the card's options, with the tags of the model, as Trainer adds them."""
        own = getattr(self.model, "model_tags", None)
        if own is None:
            return options
        given = options.get("tags") or []
        given = [given] if isinstance(given, str) else list(given)
        return {**options, "tags": list(dict.fromkeys([*given, *own]))}

    @property
    def _pushes_as_trainer(self) -> bool:
        """Whether whole checkpoints are pushed, as only a run that claims nothing may."""
        whole = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
        return not self._is_private and self.args.hub_strategy in whole

    @property
    def _is_private(self) -> bool:
        return bool(self.args.is_private)  # type: ignore[attr-defined]

    @property
    def _is_insecure(self) -> bool:
        return self._is_private and self.args.insecure_seed is not None  # type: ignore[attr-defined]

    @property
    def _starts_over(self) -> bool:
        return bool(self.args.start_over)  # type: ignore[attr-defined]


def _warn(name: str, problem: Exception) -> None:
    logger.warning("%s was not pushed, and training goes on: %s", name, problem)
