"""DP-FP with everything below the noise frozen: what trains is a function of released rows, so
post-processing covers it.

``once``: each example's representation is released one time with Gaussian noise. Under zero-out a
record's row moves by C at the most, so this is the Gaussian mechanism with ``mu = C / sigma``: no
composition, whatever is trained on the rows. ``fresh``: a new noisy row each time the example is
drawn. It takes part in k of T M draws and is seen to, so ``delta(epsilon) = sum_k Binomial(k; T M,
p) delta_Gauss(epsilon; sqrt(k) C / sigma)``. (Nothing of the encoder moves, so representations are
computed once, in the precision of the weights; they stay in memory and never leave it un-noised.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader

from hf_dp.accounting import RELEASE, TRAINING
from hf_dp.errors import LedgerError
from hf_dp.trainer.modes.base import Mode, nominal_epoch
from hf_dp.trainer.modes.last_layer import LastLayer, released_labels

# Not pushed to the Hub, which leaves out names with an underscore; what is in it is released, so it
# may be kept.
RELEASED_ROWS = "_released_rows.safetensors"


class FrozenEncoder(Mode):
    """Trains the last layer on noisy rows."""

    _last: LastLayer
    _rows: Tensor | None = None  # released ("once") or secret ("fresh")
    _labels: Tensor | None = None

    def start(self, trainer: Any, checkpoint: str | None) -> None:
        plan, _ = trainer.private_run()
        self._last = LastLayer(trainer)
        for parameter in self._last.below():
            parameter.requires_grad_(False)
        if self._rows is not None:
            if not Path(trainer.folder, RELEASED_ROWS).exists():
                self._keep(trainer)
            return
        kept = self._read(trainer) if checkpoint is not None else {}
        if not plan.releases_each_step and checkpoint is not None:
            self._rows, self._labels = kept["rows"], kept["labels"]
            return
        rows, labels = self._last.all_rows(trainer)
        self._labels = kept["labels"] if "labels" in kept else released_labels(trainer, labels)
        if plan.releases_each_step:
            self._rows = self._last.clipped(rows, labels)
        else:
            self._rows = self._release_once(trainer, self._last.clipped(rows, labels))
        if plan.forward.labels_in_vector:
            self._labels = torch.zeros_like(self._labels)  # from here on nothing can look at them
        self._keep(trainer)

    def _release_once(self, trainer: Any, clipped: Tensor) -> Tensor:
        plan, run = trainer.private_run()
        event = plan.forward.releases_before(plan.noise_multiplier)[0]
        noised = clipped + trainer.randomness.gaussian_like(clipped, plan.record_noise_std)
        run.append(event, RELEASE)
        return noised

    def _keep(self, trainer: Any) -> None:
        """Write what was released, for a resume: a second release would cost again."""
        plan, run = trainer.private_run()
        released = {} if plan.releases_each_step else {"rows": self._rows}
        if plan.forward.label_epsilon is not None or released:
            released["labels"] = self._labels
        if released:
            tensors = {
                name: value.cpu().contiguous()
                for name, value in released.items()
                if value is not None
            }
            save_file(tensors, Path(trainer.folder, RELEASED_ROWS), metadata={"run_id": run.run_id})

    def _read(self, trainer: Any) -> dict[str, Tensor]:
        plan, run = trainer.private_run()
        if plan.releases_each_step and plan.forward.label_epsilon is None:
            return {}
        try:
            with safe_open(
                Path(trainer.folder, RELEASED_ROWS), framework="pt", device=str(trainer.args.device)
            ) as file:
                if (file.metadata() or {}).get("run_id") != run.run_id:
                    raise LedgerError(
                        f"Cannot resume: {RELEASED_ROWS} in output_dir is of another run."
                    )
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as problem:
            raise LedgerError(
                f"Cannot resume: {RELEASED_ROWS}, the rows that this run released, is missing or "
                f"damaged ({problem}). Releasing them again would cost epsilon again. Restore it, "
                "or start a new run in a new output_dir (both count together)."
            ) from problem

    def loader(self, trainer: Any) -> DataLoader:
        plan, _ = trainer.private_run()
        sampler = plan.micro_batch_sampler(
            nominal_epoch(plan), random_bytes=trainer.randomness.random_bytes
        )
        return DataLoader(range(plan.num_examples), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]

    def step(self, trainer: Any, inputs: Any) -> Tensor:
        plan, run = trainer.private_run()
        assert self._rows is not None and self._labels is not None
        trainer.model.eval()  # below the noise nothing is random and no buffer changes
        self._last.layer.train()
        chosen = torch.tensor(inputs, dtype=torch.long, device=self._rows.device)
        rows = self._rows[chosen]
        if plan.releases_each_step:
            run.append(plan.event(steps=1), TRAINING)
            rows = rows + trainer.randomness.gaussian_like(rows, plan.record_noise_std)
        with trainer.randomness.streams():
            loss = self._last.loss(rows, self._labels[chosen])
            (loss / plan.expected_batch_size).backward()
        return loss.detach()
