"""The self-check of a run: its engine against one-by-one gradients, on made-up examples."""

from __future__ import annotations

from collections.abc import Callable

from transformers.utils import logging

from hf_dp.batches.structure import Batch, Example, numbers
from hf_dp.clipping import self_check
from hf_dp.clipping.self_check import AUTOCAST_TOLERANCE, refuse_notice_of_length
from hf_dp.clipping.sharding import is_sharded
from hf_dp.noise import untouched_generators
from hf_dp.run.options import Run
from hf_dp.run.own_loss import refuse_another_loss
from hf_dp.run.precision import computes_in_full, in_full_precision
from hf_dp.run.training_data import padded_together

logger = logging.get_logger(__name__)


class EngineCheck:
    """Compares what the engine of a run computes with single examples.

    Args: synthetic: makes up examples, each a batch of one; None for those of the run.

    Attributes:
        has_own_examples: whether these are the user's own.
        alone: whether the last check ran as if no example had a neighbor.
        made_up: its examples as one batch.
    """

    def __init__(self, run: Run, synthetic: Callable[[], list[Example]] | None):
        self.run, self._synthetic = run, synthetic
        self.has_own_examples = synthetic is not None
        self.alone, self.made_up = False, None

    def check(self) -> None:
        """Raise SelfCheckError when the engine disagrees.

        In 16 bits the tolerance is wide. So where the model can compute in float32, it is compared
        in float32 first, as if it did.
        """
        run = self.run
        with run.randomness.streams(), run.forward_context():
            padded, alone = self.batches()
            self.made_up, self.alone = padded, not self._have_neighbors
            logger.info("Clipping strategy: %s.", run.strategy())
            longest = self._on_main_of_shards(lambda: self._longest_beside(alone[0]))
            precision = run.precision()
            if precision.is_rounded:
                with in_full_precision(run.model), untouched_generators():
                    if computes_in_full(run.model, lambda: run.loss_of(run.model, padded)):
                        self._compare(padded, alone, None)
            # accelerate's autocast is inside the model's forward, where self_check does not see it
            self._compare(padded, alone, AUTOCAST_TOLERANCE if precision.is_rounded else None)
            # In 16 bits only examples of one length are neighbors.
            if self._have_neighbors and not precision.is_short:
                self._compare_beside(longest, min(alone, key=numbers))

    @property
    def _have_neighbors(self) -> bool:
        return self.run.options.batches.physical_batch_size > 1

    def _compare(self, padded: Batch, alone: list[Example], rtol: float | None) -> None:
        run = self.run
        self_check(
            run.model,
            run.loss_of,
            padded,
            alone,
            clipping=run.plan.clipping,
            strategy=run.strategy(),
            rtol=rtol,
            have_neighbors=self._have_neighbors,
        )
        if not run.has_own_loss:
            refuse_another_loss(run.model, run.loss_of, alone[0], rounded=rtol is not None)

    def _longest_beside(self, made_up: Example) -> Example:
        return self.run.training_data().longest_beside(made_up, self.run.model)

    def _compare_beside(self, longest: Example, short: Example) -> None:
        run = self.run
        if not run.training_data().looked_over.layout.varies:  # none is padded
            return
        if numbers(longest) > numbers(short):
            beside, _ = padded_together([short, run.placed(longest)], run.padding())
            with untouched_generators():  # what is drawn later must not depend on the options
                refuse_notice_of_length(run.model, run.loss_of, short, beside)

    def batches(self) -> tuple[Batch, list[Example]]:
        """Return the synthetic examples as one padded batch and one by one, on the model's
        device."""
        run = self.run
        data = run.training_data()  # which all processes look over together
        make = self._synthetic or (lambda: data.synthetic_examples(run.model))
        examples = self._on_main_of_shards(make)
        layout = data.looked_over.layout if self.has_own_examples else None
        padded, alone = padded_together(examples, run.padding(), layout)
        return run.placed(padded), [run.placed(example) for example in alone]

    def own_examples(self) -> list[Example]:
        """Return the user's made-up examples, each a batch of one; none if they are not given."""
        return self._synthetic() if self._synthetic and self.has_own_examples else []

    def _on_main_of_shards(self, make: Callable[[], Example]) -> Example:
        """Make the same in all processes of a sharded model, which check them together."""
        return self.run.processes.on_main(make) if is_sharded(self.run.model) else make()
