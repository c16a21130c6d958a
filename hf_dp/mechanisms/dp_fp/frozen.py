"""DP-FP with everything below the noise frozen.

What trains is a function of released vectors, so post-processing covers it. There are two ways to
release them.

``once``: the representation of each example is released one time with Gaussian noise. Under
zero-out a vector moves by at most C, so this is the Gaussian mechanism with ``mu = C / sigma``.
Nothing composes, whatever is trained on the vectors.

``fresh``: a new noisy vector is released each time the example is drawn. The example takes part in
k of T M draws, and everyone can see which. So ``delta(epsilon) = sum_k Binomial(k; T M, p)
delta_Gauss(epsilon; sqrt(k) C / sigma)``.

The encoder does not change, so representations are computed once, in the precision of the weights.
They stay in memory and never leave it without noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_dp.accounting import RandomizedResponse
from hf_dp.errors import LedgerError, UnsupportedArgumentError
from hf_dp.mechanisms.base import Clipped, Mechanism, register_mechanism, zero
from hf_dp.mechanisms.dp_fp.last_layer import LastLayer
from hf_dp.mechanisms.dp_fp.vectors import check_classes
from hf_dp.plans.dp_fp import FrozenPlan
from hf_dp.run.gate import Release

# The file holds released values only, so it may be kept. Names that start with "_" are never pushed
# to the Hub.
RELEASED_ROWS = "_released_rows.safetensors"


@register_mechanism
class Frozen(Mechanism):
    """Trains the last layer on noisy vectors."""

    plan_type = FrozenPlan
    needs_whole_weights = "DP-FP with a frozen encoder trains one layer on released vectors."
    _last: LastLayer
    _vectors: Tensor | None = None  # released ("once") or secret ("fresh")
    _labels: Tensor | None = None

    def start(self, checkpoint: str | None = None) -> None:
        if not self.run.processes.alone:
            raise UnsupportedArgumentError(
                "Expected one process with dp_fp_variant='frozen', got "
                f"{self.run.processes.count}. Each row passes the encoder once, and what trains on "
                "the vectors is one layer: launch a single process."
            )
        self._last = LastLayer(self.run, self.plan)
        for parameter in self._last.below():
            parameter.requires_grad_(False)
        if self._vectors is not None:
            if not (self.run.folder / RELEASED_ROWS).exists():
                self._keep()
            return
        kept = self._read() if checkpoint is not None else {}
        if not self.plan.releases_each_step and checkpoint is not None:
            self._vectors, self._labels = kept["rows"], kept["labels"]
            return
        vectors, labels = self._last.all_vectors()
        self._release_before(self._last.clipped(vectors, labels), labels, kept.get("labels"))
        if self.plan.labels_in_vector:
            # Overwritten, so that no later code can read the labels.
            self._labels = torch.zeros_like(labels)
        self._keep()

    def _release_before(self, vectors: Tensor, labels: Tensor, kept: Tensor | None) -> None:
        """Let out what is released once: labels by randomized response, and vectors (``once``).

        Nothing is kept before all of it is out: what a failed release left would be taken for
        released the next time.
        """
        labels = labels if kept is None else kept
        for planned in self.run.plan.releases_before():
            if not isinstance(planned.event, RandomizedResponse):
                with self.run.release(planned) as release:
                    vectors = release.vectors(vectors)
            elif kept is None:
                check_classes(labels, planned.event.num_classes)
                with self.run.release(planned) as release:
                    labels = release.labels(labels)
        self._vectors, self._labels = vectors, labels

    def _keep(self) -> None:
        """Write what was released: after a resume, a second release would cost privacy again."""
        released = {} if self.plan.releases_each_step else {"rows": self._vectors}
        if self.plan.label_epsilon is not None or released:
            released["labels"] = self._labels
        if released:
            tensors = {
                name: value.cpu().contiguous()
                for name, value in released.items()
                if value is not None
            }
            of_run = {"run_id": self.run.book.run_id}
            save_file(tensors, self.run.folder / RELEASED_ROWS, metadata=of_run)

    def _read(self) -> dict[str, Tensor]:
        if self.plan.releases_each_step and self.plan.label_epsilon is None:
            return {}
        path, device = Path(self.run.folder, RELEASED_ROWS), str(self.run.device)
        try:
            with safe_open(path, framework="pt", device=device) as file:
                if (file.metadata() or {}).get("run_id") != self.run.book.run_id:
                    raise LedgerError(
                        f"Cannot resume: {RELEASED_ROWS} in output_dir is of another run. Restore "
                        "this run's own file, or start a new run in a new output_dir (both count "
                        "together)."
                    )
                names = file.keys()
                return {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as problem:
            raise LedgerError(
                f"Cannot resume: {RELEASED_ROWS}, the vectors that this run released, is missing "
                f"or damaged ({problem}). Releasing them again would cost epsilon again. Restore "
                "it, or start a new run in a new output_dir (both count together)."
            ) from problem

    def loader(self) -> DataLoader:
        plan = self.run.plan
        sampler = plan.sampler(plan.epoch, random_bytes=self.run.randomness.random_bytes)
        return DataLoader(
            range(plan.num_examples),  # type: ignore[arg-type]
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=list,
        )

    def clip(self, batches: Any) -> Clipped:
        """Return the vectors of the drawn examples, already released or clipped, with labels."""
        assert self._vectors is not None and self._labels is not None
        self.run.model.eval()  # below the noise nothing is random and no buffer changes
        self._last.layer.train()
        chosen = torch.tensor(batches, dtype=torch.long, device=self._vectors.device)
        return Clipped((self._vectors[chosen], self._labels[chosen]), zero(self.run))

    def gradients(self, clipped: Clipped, release: Release) -> Mapping[nn.Parameter, Tensor]:
        vectors, labels = clipped.values
        if self.plan.releases_each_step:
            vectors = release.vectors(vectors)
        parameters = self._last.parameters
        with self.run.randomness.streams():
            loss = self._last.loss(vectors, labels)
            scaled = loss / self.run.plan.expected_batch_size
            found = torch.autograd.grad(scaled, parameters, allow_unused=True)
        clipped.loss_sum = loss.detach()
        pairs = zip(parameters, found, strict=True)
        return {p: gradient for p, gradient in pairs if gradient is not None}
