"""Show why no epsilon is established for DP-FP as published: one row shows in every update.

    python recipes/dp_fp/why_not_proven.py

There are sixteen made-up rows, and one of them holds a word that no other row has. The table counts
the steps that move this word's embedding, with and without the word, at rising noise. If the noise
hid a row, nobody could tell the two counts apart.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import datasets
import torch
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, TrainerCallback
from transformers.utils import logging

from hf_dp import DPTrainer, DPTrainingArguments

CANARY, ROWS, STEPS = 29, 16, 20
NOISES = (0.346, 1.0, 10.0, 100.0)  # the first is the paper's for "epsilon 1.73" on SST-2


class CanaryMoves(TrainerCallback):
    """Count the steps that change the canary's embedding."""

    def __init__(self) -> None:
        self.moved = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.before = model.bert.embeddings.word_embeddings.weight[CANARY].clone()

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.moved += not torch.equal(
            self.before, model.bert.embeddings.word_embeddings.weight[CANARY]
        )


def rows(with_canary: bool) -> datasets.Dataset:
    """Return as many rows in both cases; without the canary, its row holds ordinary words only."""
    tokens = torch.randint(4, CANARY, (ROWS, 8), generator=torch.Generator().manual_seed(0))
    if with_canary:
        tokens[0, 3] = CANARY
    columns = {
        "input_ids": tokens.tolist(),
        "attention_mask": [[1] * 8] * ROWS,
        "labels": [i % 2 for i in range(ROWS)],
    }
    return datasets.Dataset.from_dict(columns)


def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    return BertForSequenceClassification(
        BertConfig(vocab_size=30, max_position_embeddings=16, **sizes)
    )


def count(variant: str, noise: float, with_canary: bool) -> int:
    """Count the steps, of STEPS in which every row takes part, that move the canary's embedding."""
    watch = CanaryMoves()
    with tempfile.TemporaryDirectory() as folder:
        args = DPTrainingArguments(
            output_dir=str(Path(folder, "run")),
            privacy_mode="dp_fp",
            dp_fp_variant=variant,
            representation_release="fresh",
            noise_multiplier=noise,
            expected_batch_size=ROWS,
            num_micro_batches=1,
            max_steps=STEPS,
            learning_rate=1e-3,
            weight_decay=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = DPTrainer(model(), args, train_dataset=rows(with_canary), callbacks=[watch])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return watch.moved


def main() -> None:
    """Print the table and what follows from it."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # with a model this small, threads only wait for each other
    print(f"steps out of {STEPS} that move the embedding of a word that only one row holds\n")
    print(f"{'variant':<12}{'noise / C':>10}{'row there':>12}{'row without the word':>24}")
    seen: dict[str, set[tuple[int, int]]] = {}
    for variant in ("published", "frozen"):
        for noise in NOISES:
            both = (count(variant, noise, True), count(variant, noise, False))
            seen.setdefault(variant, set()).add(both)
            print(f"{variant:<12}{noise:>10g}{both[0]:>12}{both[1]:>24}")
    told_apart = all(there != without for there, without in seen["published"])
    print()
    if told_apart:
        print(
            "published: one update shows whether the row was there, at every noise. The encoder's "
            "gradient is what comes back\nthrough the noise times the activations below it, and "
            "the activations are not noised. So the update is not a\nfunction of the noised "
            "representation, and post-processing does not cover it."
        )
    if seen["frozen"] == {(0, 0)}:
        print("frozen: nothing below the noise moves, so nothing below it can tell.")


if __name__ == "__main__":
    main()
