"""Save what a private loop of one's own has trained, as DPTrainer saves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safetensors.torch import save_model

from hf_dp.cards.evidence import write_card
from hf_dp.clipping.sharding import is_sharded
from hf_dp.mechanisms.base import Mechanism
from hf_dp.run.witnesses import refuse_foreign
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.trainer.card_facts import details_of_model
from hf_dp.trainer.launch import without_tied_copies


def save_run(
    mechanism: Mechanism,
    processing_class: Any = None,
    *,
    metrics: Mapping[str, float] | None = None,
    **card: Any,
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
    details = details_of_model(model, run.folder.name, metrics=metrics or {}).with_given(**card)
    statement = mechanism.statement()
    reader = processing_class or run.processing_class

    def write() -> None:
        refuse_foreign(run.folder, run.book.run_id)
        if not hasattr(model, "save_pretrained"):
            save_model(model, str(run.folder / "model.safetensors"))
        elif weights is None:
            model.save_pretrained(run.folder)
        else:
            model.save_pretrained(run.folder, state_dict=without_tied_copies(model, weights))
        if reader is not None:
            reader.save_pretrained(run.folder)
        mechanism.tuner.save(str(run.folder))
        run.book.go_with(run.folder)
        write_card(
            run.folder,
            statement,
            details,
            lambda beside: run.book.save(run.folder, statement, beside),
        )

    run.processes.on_main(write)
    return statement
