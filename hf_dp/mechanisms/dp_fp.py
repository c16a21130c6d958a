"""DP-FP's steps (Du and Mi 2021): noise on the representation that enters the last layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers.utils import logging

from hf_dp._validate import invalid
from hf_dp.errors import LedgerError, UnsupportedArgumentError
from hf_dp.mechanisms.base import Batches, Clipped, Mechanism, register_mechanism
from hf_dp.mechanisms.dp_sgd import DpSgd
from hf_dp.mechanisms.last_layer import LastLayer, last_layer, noising
from hf_dp.plans.dp_fp import FrozenPlan, PrivateEncoderPlan, PublishedPlan
from hf_dp.run.gate import Release

logger = logging.get_logger(__name__)

# The file holds released values only, so it may be kept. Names that start with "_" are never pushed
# to the Hub.
RELEASED_ROWS = "_released_rows.safetensors"


@register_mechanism
class Published(Mechanism):
    """DP-FP as published (Algorithm 1): clips and noises in the forward pass of M joined draws.
    Backward pass and optimizer are ordinary ones, and so no epsilon is established
    (:attr:`hf_dp.accounting.PublishedForwardNoise.reasons`)."""

    plan_type = PublishedPlan
    gradients_are_noised = False
    needs_whole_weights = "DP-FP as published trains on gradients that autograd writes."
    _layer: nn.Module

    def start(self, checkpoint: str | None = None) -> None:
        _, self._layer = last_layer(self.run)
        logger.warning(
            "DP-FP as published: NO differential privacy guarantee is established for this run,\n"
            "because un-noised gradients train the encoder. dp_fp_variant='frozen' and "
            "'private_encoder' have a guarantee."
        )

    def clip(self, batches: Batches) -> Clipped:
        """Return the batches as they are: this mechanism clips in the forward pass."""
        return Clipped(batches, torch.zeros((), device=self.run.device))

    def gradients(self, clipped: Clipped, release: Release) -> Mapping[nn.Parameter, Tensor]:
        """Return the gradient of all M micro-batches at once: their losses add up, so one padded
        batch gives the same as M passes."""
        run = self.run
        with run.randomness.streams():
            for batch in clipped.values:
                with noising(self._layer, self.plan.vector_clipping_norm, release.vectors):
                    losses = run.losses(batch)
                    (losses.sum() / run.plan.expected_batch_size).backward()
                clipped.loss_sum += losses.detach().sum()
        # A step without examples is still a step: Adam's moments decay.
        return {
            p: run.processes.summed(torch.zeros_like(p) if p.grad is None else p.grad)
            for p in run.model.parameters()
            if p.requires_grad
        }


@register_mechanism
class Frozen(Mechanism):
    """Trains the last layer on noisy vectors, with everything below the noise frozen.

    What trains is a function of released vectors, so post-processing covers it. ``once``: a vector
    of each example is released one time (:class:`hf_dp.accounting.RecordRelease`), and nothing
    composes, whatever is trained on it. ``fresh``: a new one each time the example is drawn
    (:class:`hf_dp.accounting.SampledRecordRelease`). The encoder does not change, so vectors are
    computed once. They stay in memory and never leave it without noise.
    """

    plan_type = FrozenPlan
    needs_whole_weights = "DP-FP with a frozen encoder trains one layer on released vectors."
    _last: LastLayer
    _vectors: Tensor | None = None  # released ("once") or secret ("fresh")
    _labels: Tensor | None = None

    def start(self, checkpoint: str | None = None) -> None:
        if not self.run.processes.alone:
            raise UnsupportedArgumentError(
                "Expected one process with dp_fp_variant='frozen', got "
                f"{self.run.processes.count}. Each row passes the encoder once, and only one layer "
                "trains on the vectors: launch a single process."
            )
        self._last = LastLayer(self.run, self.plan)
        for parameter in self._last.below():
            parameter.requires_grad_(False)
        once = not self.plan.releases_each_step
        if self._vectors is None and once and checkpoint is not None:
            self._vectors, self._labels = self._read()
        elif self._vectors is None:
            self._release_before()
            if once:
                self._keep()
        elif once and not Path(self.run.folder, RELEASED_ROWS).exists():
            self._keep()

    def _release_before(self) -> None:
        """Compute all vectors, and let out what is released once; keep nothing before it is out,
        which would be taken for released the next time."""
        vectors, labels = self._last.all_vectors()
        vectors = self._last.clipped(vectors, labels)
        for planned in self.run.plan.releases_before():
            with self.run.release(planned) as release:
                vectors = release.vectors(vectors)
        # Labels that are in the vectors are overwritten, so that no later code can read them.
        self._labels = torch.zeros_like(labels) if self.plan.labels_in_vector else labels
        self._vectors = vectors

    def _keep(self) -> None:
        """Write what was released: after a resume, a second release would cost privacy again."""
        assert self._vectors is not None and self._labels is not None
        kept = {"rows": self._vectors.cpu().contiguous(), "labels": self._labels.cpu().contiguous()}
        of_run = {"run_id": self.run.book.run_id}
        save_file(kept, self.run.folder / RELEASED_ROWS, metadata=of_run)

    def _read(self) -> tuple[Tensor, Tensor]:
        path, device = Path(self.run.folder, RELEASED_ROWS), str(self.run.device)
        restore = "Restore it, or start a new run in a new output_dir (both count together)."
        try:
            with safe_open(path, framework="pt", device=device) as file:
                if (file.metadata() or {}).get("run_id") != self.run.book.run_id:
                    raise LedgerError(
                        f"Cannot resume: {RELEASED_ROWS} in output_dir is another run's. {restore}"
                    )
                return file.get_tensor("rows"), file.get_tensor("labels")
        except (OSError, SafetensorError) as problem:
            raise LedgerError(
                f"Cannot resume: {RELEASED_ROWS}, the vectors that this run released, is missing "
                f"or damaged ({problem}). Releasing them again would cost epsilon again. {restore}"
            ) from problem

    def loader(self) -> DataLoader:
        plan = self.run.plan
        random_bytes = self.run.randomness.random_bytes
        sampler = replace(plan.sampler(plan.epoch), random_bytes=random_bytes)
        return DataLoader(
            range(plan.num_examples),  # type: ignore[arg-type]
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=list,
        )

    def clip(self, batches: Sequence[int]) -> Clipped:
        """Return the vectors of the drawn examples, already released or clipped, with labels."""
        assert self._vectors is not None and self._labels is not None
        self.run.model.eval()  # below the noise nothing is random and no buffer changes
        self._last.layer.train()
        chosen = torch.tensor(batches, dtype=torch.long, device=self._vectors.device)
        nothing = torch.zeros((), device=self._vectors.device)
        return Clipped((self._vectors[chosen], self._labels[chosen]), nothing)

    def gradients(self, clipped: Clipped, release: Release) -> Mapping[nn.Parameter, Tensor]:
        vectors, labels = clipped.values
        if self.plan.releases_each_step:
            vectors = release.vectors(vectors)
        clipped.loss_sum, found = self._last.gradients(vectors, labels)
        pairs = zip(self._last.parameters, found, strict=True)
        return {p: gradient for p, gradient in pairs if gradient is not None}


@register_mechanism
class PrivateEncoder(DpSgd):
    """DP-SGD below the noise, and an ordinary gradient from released vectors above it, of a draw of
    their own (why: :class:`hf_dp.accounting.SumAndRows`)."""

    plan_type = PrivateEncoderPlan
    masks_rows = False
    needs_whole_weights = "DP-FP with a private encoder trains the last layer on released vectors."
    _last: LastLayer
    _vector_draws: Iterator[Batches] | None = None

    def start(self, checkpoint: str | None = None) -> None:
        self._last = LastLayer(self.run, self.plan)
        if self.tuner.clips_in_its_own_way:
            expected = "to be FROST, a stock adapter or None with dp_fp_variant='private_encoder'"
            why, error = "It also clips the last layer, in its own way.", UnsupportedArgumentError
            raise invalid("peft_config", type(self.tuner).__name__, expected, why, error)

    def prepare(self) -> None:
        with self._below_only():
            super().prepare()

    def rehearse(self, batches: Batches, optimizer: Optimizer | None) -> None:
        with self._below_only():
            super().rehearse(batches, optimizer)

    def clip(self, batches: Batches) -> Clipped:
        """Return the clipped sum of the encoder's gradients, and clipped vectors with labels."""
        with self._below_only():
            below = super().clip(batches)
        vectors, labels = self._last.vectors_of(self._vector_draw())
        return Clipped((below, self._last.clipped(vectors, labels), labels), below.loss_sum)

    def gradients(self, clipped: Clipped, release: Release) -> Mapping[nn.Parameter, Tensor]:
        below, vectors, labels = clipped.values
        vectors = release.vectors(vectors)
        with self._below_only():
            gradients = dict(super().gradients(below, release))
        self.noise_norm = None  # that of the encoder alone, while all gradients are logged
        _, found = self._last.gradients(vectors, labels)
        for parameter, gradient in zip(self._last.parameters, found, strict=True):
            own = torch.zeros_like(parameter) if gradient is None else gradient
            gradients[parameter] = self.run.processes.summed(own)  # of released vectors: free
        return gradients

    def _vector_draw(self) -> Batches:
        """Return the next draw for vectors, independent of the draw for gradients."""
        if self._vector_draws is None:
            self._vector_draws = self._endless()
        return next(self._vector_draws)

    @contextmanager
    def _below_only(self) -> Iterator[None]:
        """Freeze the last layer inside."""
        above = {p: p.requires_grad for p in self._last.parameters}
        try:
            for parameter in above:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter, trains in above.items():
                parameter.requires_grad_(trains)
