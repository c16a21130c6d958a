"""What leaves a run: the Trainer's pushes, each one commit of exactly what may leave with its card,
the folder that a loop of one's own saves, and what a trainer knows for its card."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from huggingface_hub import CommitInfo
from safetensors.torch import save_model
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import logging

from hf_dp._validate import invalid
from hf_dp.cards.details import (
    BASE_MODEL,
    BASE_WEIGHTS,
    REPOSITORY,
    CardDetails,
    dequantized_from,
    here,
)
from hf_dp.cards.verify import write_card
from hf_dp.clipping.sharding import is_sharded
from hf_dp.distributed.processes import Processes
from hf_dp.errors import HfDpError, PublishError, UnsupportedArgumentError
from hf_dp.losses import base_model, known_task, reads_before_padding
from hf_dp.mechanisms.base import Mechanism
from hf_dp.publishing.hub import Hub
from hf_dp.publishing.publication import Publication, refuse_claims
from hf_dp.run.gguf import gguf_file_of
from hf_dp.run.ledger_file import LEDGER
from hf_dp.run.witnesses import read_run, refuse_foreign
from hf_dp.statement.evidence import FILE_NAME, Evidence, read
from hf_dp.statement.facts import WHEN_DRAWN
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.tasks.infilling import LabelWordClassifier
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.checkpointing import Checkpointing
from hf_dp.trainer.launch import without_tied_copies
from hf_dp.tuners.adapter import AdapterConfig

logger = logging.get_logger(__name__)

_NOT_PRIVATE = (
    "insecure_seed makes the noise known, so this run is not private. To publish it as NOT "
    "PRIVATE, leave push_to_hub off and call trainer.push_to_hub(not_private=True)."
)


class Publishing(Checkpointing):
    """A Trainer that pushes of a private run what the allow-list names; without privacy a push is
    Trainer's business, unless the folder claims privacy. The main process alone talks to the Hub.
    """

    hub_model_id: Any
    _hub: Hub | None = None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository before any budget is spent.

        Raises: PublishError when it holds anything but an earlier state of this run; of a run that
            is not private, when its folder claims privacy."""
        if not self._is_private:
            self._refuse_claims()
            return super().init_hf_repo(token, private)
        if self.args.push_to_hub and self._is_insecure:
            raise PublishError(_NOT_PRIVATE)
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

        Returns: in the main process the commit, else None.

        Raises: PublishError, before anything is uploaded when the folder or the repository is
            refused; DistributedError when another process failed; UnsupportedArgumentError for
            ``blocking=False``.
        """
        tags = kwargs.get("tags") or []
        tags = [tags] if isinstance(tags, str) else list(tags)
        tags += getattr(self.model, "model_tags", None) or ()
        if not self._is_private:
            self._refuse_claims(tags)
            return super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        if not blocking:
            raise invalid(
                "blocking",
                blocking,
                "to be True",
                "The files must not change between the check and the push. To push meanwhile, run "
                "`hf-dp publish` on a checkpoint in a process of its own.",
                UnsupportedArgumentError,
            )
        if self._is_insecure and not not_private:
            raise PublishError(_NOT_PRIVATE)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        kwargs["tags"] = tags or None
        self.create_model_card(**kwargs)
        done: list[CommitInfo] = []

        def push() -> None:
            self._the_hub(token)
            publication = self._publication(Path(str(self.args.output_dir)), not_private)
            message = commit_message or "End of training"
            done.append(self._push(publication, message, revision, private))

        Processes.here().on_main(push)
        return done[0] if done else None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a complete checkpoint, with the epsilon spent so far; a push that fails is a
        warning."""
        if self.is_saving:  # it is pushed when it is complete
            return
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        folder = Path(checkpoint_folder)
        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        try:
            if not self._is_private:
                refuse_claims(Path(str(self.args.output_dir)))
                return super()._push_from_checkpoint(checkpoint_folder)
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            found = self._publication(folder)
            self._push(found, f"Training in progress, step {step} ({found.in_words()})")
        except (HfDpError, OSError) as problem:
            logger.warning("%s was not pushed, and training continues: %s", folder.name, problem)

    def _refuse_claims(self, tags: Iterable[str] = ()) -> None:
        folder = Path(str(self.args.output_dir))
        Processes.here().on_main(lambda: refuse_claims(folder, tags))

    def _create(self, token: str | None, private: bool | None) -> str:
        args, hub = self.args, self._the_hub(token)
        folder = Path(str(args.output_dir))
        full_name = hub.create(args.hub_model_id or folder.absolute().name, private)
        run = read_run(folder) if (folder / LEDGER).exists() else None
        # A resume may begin at an older checkpoint than was pushed.
        hub.check(full_name, args.hub_revision, run, private, older=True)
        return full_name

    def _push(
        self,
        publication: Publication,
        message: str,
        revision: str | None = None,
        private: bool | None = None,
    ) -> CommitInfo:
        return self._the_hub().push(
            str(self.hub_model_id),
            publication,
            revision=revision or self.args.hub_revision,
            private=self.args.hub_private_repo if private is None else private,
            message=message,
        )

    def _publication(self, folder: Path, not_private: bool = False) -> Publication:
        tokens = (self._the_hub().token, self.args.hub_token)
        return Publication.of(folder, self.hub_model_id, not_private=not_private, tokens=tokens)

    def _the_hub(self, token: str | None = None) -> Hub:
        if self._hub is None or (token is not None and token != self._hub.token):
            self._hub = Hub(token or self.args.hub_token)
        return self._hub

    @property
    def _is_private(self) -> bool:
        return bool(self.args.is_private)  # type: ignore[attr-defined]

    @property
    def _is_insecure(self) -> bool:
        return self.args.insecure_seed is not None  # type: ignore[attr-defined]


def save_run(
    mechanism: Mechanism,
    processing_class: Any = None,
    *,
    metrics: Mapping[str, float] | None = None,
    **card: object,
) -> PrivacyStatement:
    """Save model, tokenizer, card and ``privacy.json`` into the run's folder, and return the
    statement.

    All of it is then as ``hf-dp verify`` and ``hf-dp publish`` want it. With several processes,
    each calls this.

    Args:
        processing_class: the tokenizer or processor; None for the run's own.
        metrics: of evaluation data, for the card, by names that begin with ``eval_``.
        card: fields of :class:`~hf_dp.cards.details.CardDetails`: license, dataset, ...

    Raises: InvalidArgumentError for what a card cannot say; LedgerError for a folder of another
        run; UnsupportedModelError for weights that anything but the run's steps has changed.
    """
    run = mechanism.run
    run.other.refuse(before_save=True)
    model, weights = run.model, None
    if run.accelerator is not None:
        weights = run.accelerator.get_state_dict(model) if is_sharded(model) else None
        model = run.accelerator.unwrap_model(model)
    settings = of_rows(run.options.look_over)
    details = details_of_model(model, run.folder.name, metrics or {}, settings).with_given(**card)
    statement = mechanism.statement()
    reader = processing_class or run.processing_class

    def write() -> None:
        refuse_foreign(run.folder, run.book.run_id)
        with run.book.held():
            save: Callable[..., object] | None = getattr(model, "save_pretrained", None)
            if save is None:
                save_model(model, str(run.folder / "model.safetensors"))
            elif weights is None:
                save(run.folder)
            else:
                save(run.folder, state_dict=without_tied_copies(model, weights))
            if reader is not None:
                reader.save_pretrained(run.folder)
            mechanism.tuner.save(str(run.folder))
            run.book.go_with(run.folder)
            write_card(run.folder, statement, details, run.book)

    run.processes.on_main(write)
    return statement


# -- what a trainer knows for its card, and the lines with which a reader loads the model ---

_PIPELINES = {
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
    "image_classification": "image-classification",
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "question_answering": "question-answering",
}
# What `create_model_card` of transformers and TRL calls a field of CardDetails.
_OTHER_NAMES = {
    "finetuned_from": "base_model",
    "dataset_name": "dataset",
    "dataset_tags": "dataset",
    "tasks": "task_tag",
}


def details_of(trainer: Any, given: Mapping[str, object]) -> CardDetails:
    """Return what the card of a trainer says beside its statement; ``given`` takes precedence."""
    args = trainer.args
    known = details_of_model(
        trainer.model,
        args.hub_model_id or str(args.output_dir),
        trainer.evaluation_metrics(),
        {
            **_public_settings(args, trainer.training.length),
            **trainer.data_settings,
            **trainer.training.words(),
        },
    )
    return known.with_given(**given)


def describe(trainer: Any, details: Mapping[str, object]) -> None:
    """Note what the user says of a trainer's card.

    Raises: InvalidArgumentError for what the Hub would refuse; nothing is taken over then.
    """
    details_of(trainer, {**trainer.card, **details})
    trainer.card.update(details)


def details_of_model(
    model: nn.Module,
    name: str,
    metrics: Mapping[str, float] = MappingProxyType({}),
    training: Mapping[str, object] = MappingProxyType({}),
) -> CardDetails:
    """Return what a card says of a model. Args: name: its folder or repository."""
    base = base_model(model)
    tag, file = _PIPELINES.get(known_task(base)), gguf_file_of(model)
    return CardDetails(
        model_name=name.rstrip("/\\").replace("\\", "/").split("/")[-1],
        base_model=here(getattr(getattr(base, "config", None), "name_or_path", None) or None),
        task_tag=tag,
        library_name="peft" if hasattr(model, "peft_config") else "transformers",
        pretraining_sources=tuple(pretraining_sources(base)),
        usage=usage(model, tag),
        metrics=metrics,
        training={**({} if file is None else {BASE_WEIGHTS: dequantized_from(file)}), **training},
    )


def evidence_before(checkpoint: str) -> Evidence | None:
    """Return the ``privacy.json`` in a checkpoint, or None in a process that does not see it."""
    return read(checkpoint) if Path(checkpoint, FILE_NAME).exists() else None


def given_before(checkpoint: str) -> dict[str, object]:
    """Return what the user said of the card of a run, as one of its checkpoints has it."""
    evidence = evidence_before(checkpoint)
    kept = None if evidence is None else evidence.card
    if kept is None:
        return {}
    details = CardDetails.from_dict(kept)
    return {name: getattr(details, name) for name in details.given}


def in_our_names(options: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a ``create_model_card`` by the names of CardDetails, without those
    that are None."""
    given = {name: value for name, value in options.items() if value is not None}
    part = given.pop("dataset_args", None)
    if (tags := given.get("dataset_tags")) is not None:  # `dataset` is a title then
        given.pop("dataset", None)
        if isinstance(tags, str) and isinstance(part, str) and "/" not in tags:
            given["dataset_tags"] = f"{tags}/{part}"
    return {_OTHER_NAMES.get(name, name): value for name, value in given.items()}


def pretraining_sources(model: nn.Module) -> list[str]:
    """List the public data sets that the base has seen, as far as its configuration names them."""
    return list(
        getattr(getattr(base_model(model), "config", None), "pretraining_sources", None) or []
    )


def _public_settings(args: DPTrainingArguments, length: str) -> dict[str, object]:
    names = [
        "learning_rate",
        "optim",
        "lr_scheduler_type",
        "warmup_steps",
        "weight_decay",
        length,
        "per_device_train_batch_size",
        "seed",
    ]
    if args.max_tokens_per_physical_batch is not None:
        names.append("max_tokens_per_physical_batch")
    values = {name: getattr(args, name) for name in names} | of_rows(args.look_over)
    return {name: getattr(value, "value", value) for name, value in values.items()}


def of_rows(look_over: str) -> dict[str, object]:
    """Return what a card's settings say of rows that nobody looked at before they were drawn."""
    said = f"{WHEN_DRAWN} (a row that could not be trained on added 0, and nobody was told of it)"
    return {"look_over": said} if look_over == WHEN_DRAWN else {}


def usage(model: nn.Module, task_tag: str | None) -> str | None:
    """Return Python lines that load a model from where the card is, or None where there is no
    pipeline for the task.

    transformers knows hf_dp's own classes after ``import hf_dp``. To load an adapter of a
    classifier, the base is first made one again: a pipeline would give it the classes that it had
    before."""
    config: Any = getattr(base_model(model), "config", None)
    adapters = getattr(model, "peft_config", {})
    ours = any(isinstance(each, AdapterConfig) for each in adapters.values())
    kind = type(base_model(model)).__name__
    classifies = kind.endswith("Classification")
    file = gguf_file_of(model)
    first = "import hf_dp  # makes the adapter known\n" if ours else ""
    if isinstance(base_model(model), LabelWordClassifier):
        return first + _infilling_usage(config, file, bool(adapters))
    if task_tag is None:
        return None
    if task_tag == "question-answering":  # for which transformers has no pipeline
        return f"""{first}from transformers import AutoModelForQuestionAnswering, AutoTokenizer

model = AutoModelForQuestionAnswering.from_pretrained({REPOSITORY!r})
tokenizer = AutoTokenizer.from_pretrained({REPOSITORY!r})"""
    # transformers by itself loads only the adapters that PEFT knows
    if ours or (adapters and (classifies or file)):
        reader, reads = "tokenizer", "AutoTokenizer"
        if task_tag == "image-classification":
            reader, reads = "image_processor", "AutoImageProcessor"
        options = ""
        if classifies:
            options = f", id2label={config.id2label!r}, ignore_mismatched_sizes=True"
            if reads_before_padding(model):
                options += f", pad_token_id={config.pad_token_id}"
        of_file, names = _from_file(file)
        options += of_file
        return f"""{first}from peft import PeftModel
from transformers import {", ".join(sorted([reads, kind, *names]))}, pipeline

base = {kind}.from_pretrained({BASE_MODEL!r}{options})
model = PeftModel.from_pretrained(base, {REPOSITORY!r})
model = pipeline({task_tag!r}, model=model, {reader}={reads}.from_pretrained({REPOSITORY!r}))"""
    return f"""from transformers import pipeline

model = pipeline({task_tag!r}, model={REPOSITORY!r})"""


def _from_file(gguf_file: str | None) -> tuple[str, list[str]]:
    """Return what reads a base from a GGUF file, and what it needs of transformers. Without it the
    weights would stay packed where kernels for them are installed."""
    if gguf_file is None:
        return "", []
    option = f", gguf_file={gguf_file!r}, quantization_config=GgufConfig(dequantize=True)"
    return option, ["GgufConfig"]


def _infilling_usage(config: Any, gguf_file: str | None, adapters: bool) -> str:
    """Return lines that make ``classify(text)``. What was saved is a language model; only words of
    several tokens need hf_dp to put their probabilities together."""
    kept, names = config.label_words, [label for _, label in sorted(config.id2label.items())]
    if any(len(tokens) != 1 for tokens in kept["ids"]):
        return _with_several_tokens(kept, names, gguf_file, adapters)
    if kept["mask_token_id"] is None:
        auto, place = "AutoModelForCausalLM", "logits[0, -1]"
    else:
        auto, place = (
            "AutoModelForMaskedLM",
            "logits[inputs.input_ids == tokenizer.mask_token_id][0]",
        )
    tokens = {name: token for name, (token,) in zip(names, kept["ids"], strict=True)}
    first, name, last, options = "", REPOSITORY, "", ""
    imports = [auto, "AutoTokenizer"]
    if adapters:
        first, name = "from peft import PeftModel\n", BASE_MODEL
        options, of_file = _from_file(gguf_file)
        imports = [*imports, *of_file]
        last = f"\nmodel = PeftModel.from_pretrained(model, {REPOSITORY!r})"
    return f"""{first}from transformers import {", ".join(imports)}

tokenizer = AutoTokenizer.from_pretrained({REPOSITORY!r})  # puts a text into the template
model = {auto}.from_pretrained({name!r}{options}){last}
words = {json.dumps(tokens)}  # their tokens


def classify(*texts):
    inputs = tokenizer(*texts, return_tensors="pt")
    logits = model.eval()(**inputs).{place}
    return dict(zip(words, logits[[*words.values()]].softmax(0).tolist()))"""


def _with_several_tokens(
    kept: Mapping[str, Any], names: Sequence[str], gguf_file: str | None, adapters: bool
) -> str:
    if adapters:
        file = "" if gguf_file is None else f", gguf_file={gguf_file!r}"
        words = dict(zip(names, kept["words"], strict=True))
        block = {"template": kept["template"], "label_words": words, "several_tokens": True}
        load = f"""tokenizer = AutoTokenizer.from_pretrained({BASE_MODEL!r}{file})
infilling = Infilling.of({block!r})
model, tokenizer = load_infilling({BASE_MODEL!r}, tokenizer, infilling, {names!r}{file})
model = PeftModel.from_pretrained(model, {REPOSITORY!r})"""
        imports = """from peft import PeftModel
from transformers import AutoTokenizer

from hf_dp.tasks.infilling import load_infilling
from hf_dp.tasks.templates import Infilling"""
    else:
        imports = "from hf_dp.tasks.infilling import load_trained"
        load = f"model, tokenizer = load_trained({REPOSITORY!r})"
    return f"""{imports}

{load}


def classify(*texts):
    logits = model.eval()(**tokenizer(*texts, return_tensors="pt")).logits[0]
    return dict(zip({names!r}, logits.softmax(0).tolist()))"""
