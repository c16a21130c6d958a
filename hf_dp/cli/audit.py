"""``hf-dp audit``: try to refute a claim, by canaries in or out by coins, or by their exposure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp._arguments import argument, own_fields
from hf_dp._validate import integer, one_of
from hf_dp.cli import config
from hf_dp.cli.config import DEFAULT_TASK, NON_PRIVATE, PRIVACY, Recipe, parse
from hf_dp.cli.launch import refuse_several
from hf_dp.cli.options import Parser, add_fields, aligned
from hf_dp.cli.tasks import generation, private_task
from hf_dp.errors import ConfigError
from hf_dp.tasks.models import CAUSAL
from hf_dp.trainer.row_arguments import AuditArguments

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from hf_dp.tasks.generation.encoding import CausalEncoding

Report = dict[str, Any]  # what exposure.json says of a model
RUN = """\
Train a recipe as `hf-dp train` does, with canaries among its rows, and try to refute its claim
(Steinke, Nasr and Jagielski 2023; Mahloujifar, Melis and Chaudhuri 2024). A secret coin puts each
canary in or leaves it out. After the run their scores are ordered, and the clearest are guessed.
Many right guesses bound epsilon from below. A bound that contradicts the claim is an error.

The canaries are synthetic. They count as rows, so a step of the same size has fewer real ones. The
result is in privacy.json and on the card; the coins are not kept.

audit_canaries is 1,000 unless it is given.
"""
EXPOSURE = "exposure.json"
EXPOSURE_NOTE = """\
Train a decoder with canaries among its rows, and measure how much of a search for them it saves
(Carlini et al., 2019; Li et al., 2021, appendix M). A canary is a synthetic row: a prompt of three
random words and a suffix of five, of ten words of the model's vocabulary. Its exposure is
log2 |R| - log2 rank, with its rank among all |R| = 100,000 suffixes by the model's perplexity.

The output of each run is a folder OUTPUT_DIR_exposure/MODE_rR with canaries.json (what was
inserted) and exposure.json (what the latest measurement found). Canaries are public, and exposure
is computed from the released weights alone: it is post-processing, and costs no privacy.

The other audit: hf-dp audit run --help.
"""
EXPOSURE_EXAMPLES = """\
examples:
  hf-dp audit exposure --config recipes/small_gpt2/e2e_eps8.yaml --train_file train.parquet \\
      --validation_file test.parquet --target_epsilon 3 --repetitions 1 10 100 --exact
  hf-dp audit exposure --config recipes/small_gpt2/e2e_eps8.yaml --exact \\
      --trained outputs/small_gpt2/e2e_eps8_exposure/*
"""


def main(argv: Sequence[str]) -> int:
    """Run one of the audits."""
    refuse_several("hf-dp audit")
    if not argv or argv[0].startswith("-"):
        return _exposure(argv)
    audits = {"exposure": _exposure, "run": _run}
    return audits[one_of("audit", argv[0], audits)](list(argv[1:]))


def _run(argv: Sequence[str]) -> int:
    """Train with canaries; the last lines say what they told."""
    example = "--config recipes/demo/minilm_dp_adam.yaml --audit_canaries 200 --audit_scores losses"
    parser = Parser(
        "hf-dp audit run",
        usage="hf-dp audit run --config FILE [--NAME VALUE ...]",
        description=RUN,
        epilog=f"example:\n  hf-dp audit run {example}",
    )
    parser.option("--config", "the recipe, as `hf-dp train` reads it", "FILE", required=True)
    beside = "default: that of the recipe, with _audit after it"
    parser.option("--output-dir", beside, "FOLDER")
    add_fields(parser, AuditArguments)
    args, words = parser.parse_known_args(argv)
    given = vars(args)
    values = {"task": DEFAULT_TASK, **config.read_yaml(args.config)}
    values["audit_canaries"] = values.get("audit_canaries") or 1000
    values |= {own.name: given[own.name] for own in own_fields(AuditArguments) if own.name in given}
    if args.output_dir is None and values.get("output_dir") is None:
        raise ConfigError("Expected `output_dir`, next to which the audit's folder goes, got none.")
    values["output_dir"] = args.output_dir or f"{str(values['output_dir']).rstrip('/')}_audit"
    return private_task(values["task"]).train(values, words)


# -- exposure ---


@dataclass
class ExposureArguments:
    """What is inserted and measured."""

    repetitions: list[int] = argument(
        [], "Copies of each canary among the rows; a model is trained for each number."
    )
    trained: list[str] = argument(
        [], "Train nothing: measure these folders, which this command trained."
    )
    canaries: int = argument(3, "Canaries in each model.")
    candidates: int = argument(
        4096, "Random suffixes to which a skew-normal is fitted, for each canary."
    )
    exact: bool = argument(False, "Also rank each canary among all suffixes.")
    canary_seed: int = argument(0, "Seed of the random words.")

    def __post_init__(self) -> None:
        if bool(self.repetitions) == bool(self.trained):
            raise ConfigError(
                "Expected `repetitions` (train models and measure them) or `trained` (measure), "
                f"got {'both' if self.trained else 'neither'}. For example --repetitions 1 10 100."
            )
        self.repetitions = list(dict.fromkeys(self.repetitions))
        for each in self.repetitions:
            integer("repetitions", each, 1)
        integer("canaries", self.canaries, 1)
        integer("candidates", self.candidates, 100)


EXPOSED = (ExposureArguments, *generation.CAUSAL.ARGUMENTS)


def _exposure(argv: Sequence[str]) -> int:
    """Train and measure, or only measure; print a table."""
    parser = config.CommandParser(
        "hf-dp audit exposure", "--config FILE --repetitions R [R ...] [--NAME VALUE ...]"
    )
    parser.add_task()
    mode = "default: that of the recipe; with non_private, its privacy arguments are left out"
    parser.option("--privacy-mode", mode, "NAME")
    args, values, words = parser.read(
        argv, lambda task: (EXPOSURE_NOTE, EXPOSURE_EXAMPLES, (*EXPOSED, *PRIVACY))
    )
    if values["task"] != CAUSAL:
        raise ConfigError(
            f"`hf-dp audit exposure` is for decoders (task: {CAUSAL}), got the task "
            f"{values['task']!r}. Give the recipe of a decoder."
        )
    if args.privacy_mode == NON_PRIVATE:
        values = config.without_privacy(values, words)
    elif args.privacy_mode is not None:
        values["privacy_mode"] = args.privacy_mode
    asked, *_, training = _parsed(values, words)
    folders = [Path(folder) for folder in asked.trained]
    if not folders:
        top = Path(training.output_dir)
        folders = [
            top.with_name(f"{top.name}_exposure") / f"{training.privacy_mode}_r{repetitions}"
            for repetitions in asked.repetitions
        ]
        if full := [str(folder) for folder in folders if folder.is_dir() and any(folder.iterdir())]:
            raise ConfigError(
                f"Expected new folders, but {full} are not empty. Measure the models in them: "
                f"--trained {' '.join(full)}. Or train others: choose another `output_dir`."
            )
        for repetitions, folder in zip(asked.repetitions, folders, strict=True):
            train_with_canaries(values, words, repetitions, folder)
    reports = [measure(values, words, folder) for folder in folders]
    print(table(reports))
    for folder in folders:
        print(folder / EXPOSURE)
    return 0


def _parsed(values: Recipe, words: Sequence[str]) -> tuple[Any, ...]:
    from hf_dp.trainer.arguments import DPTrainingArguments

    return parse([*EXPOSED, DPTrainingArguments], values, words, prog="hf-dp audit exposure")


def train_with_canaries(
    values: Recipe, words: Sequence[str], repetitions: int, folder: Path
) -> None:
    """Train one model with canaries among its rows, into a folder that says so."""
    from hf_dp.audit import canaries as made

    words = [*words, "--output_dir", str(folder)]
    asked, model_args, data, decoding, args = _parsed(values, words)
    if args.push_to_hub or args.resume_from_checkpoint:
        raise ConfigError(
            "An audited model holds canaries, so it is not published, and its training is not "
            "resumed. Leave `push_to_hub` and `resume_from_checkpoint` out."
        )
    data.metrics = []  # nothing is decoded
    card = config.card_block(values.get("card"))
    adapter = config.peft_config(values.get("peft"))
    inserted: list[made.Canaries] = []

    def change_rows(
        rows: Dataset, tokenizer: PreTrainedTokenizerBase, encoding: CausalEncoding
    ) -> Dataset:
        how = {"count": asked.canaries, "repetitions": repetitions, "seed": asked.canary_seed}
        inserted.append(made.make(tokenizer, data, **how))
        made.check_encoding(inserted[0], data, encoding)
        return made.insert(rows, data, inserted[0])

    trainer, _ = generation.CAUSAL.build_trainer(
        model_args, data, decoding, args, adapter, change_rows
    )
    (canaries,) = inserted
    if args.is_private:
        source = card.get("dataset") or trainer.card["dataset"]
        said = f"{source}, with {canaries.num_rows} inserted rows of canaries (an audit's model)"
        tags = (*card.get("tags", ()), "canaries-inserted")
        trainer.describe(**{**card, "dataset": said, "tags": tags})
    canaries.save(folder)  # before the first step, so that no folder hides what is in its model
    trainer.train()
    trainer.save_model()


def measure(values: Recipe, words: Sequence[str], folder: Path) -> Report:
    """Return what a trained folder tells of its canaries; write it to ``exposure.json`` there."""
    import numpy as np

    from hf_dp.audit import canaries as made
    from hf_dp.audit.exposure import approximate, exact, log_perplexities, most_exposed
    from hf_dp.cli.generate import claim_of
    from hf_dp.tasks.generation.encoding import CausalEncoding, encoding_of
    from hf_dp.tasks.models import load_trained

    canaries = made.load(folder)
    asked, model_args, data, _, args = _parsed(values, words)
    if data.data_format != canaries.data_format:
        raise ConfigError(
            f"The canaries of {folder.name!r} are rows of data_format {canaries.data_format!r}, "
            f"but the configuration says {data.data_format!r}. Give the one it was trained with."
        )
    facts = claim_of(folder)
    model, tokenizer = load_trained(str(folder), model_args, CAUSAL)
    model.to(args.device)
    encoding = encoding_of(CAUSAL, tokenizer, data)
    assert isinstance(encoding, CausalEncoding)  # as every layout of canaries is written
    made.check_encoding(canaries, data, encoding)
    space = made.every_suffix(canaries, tokenizer)
    drawn = made.candidates(canaries, asked.candidates, asked.canary_seed)
    found: list[dict[str, Any]] = []
    for canary in canaries.canaries:
        own = made.number(canary, canaries)
        rows = list(range(len(space))) if asked.exact else [own, *drawn]
        prefix = made.prefix(canary, data, encoding)
        bits = log_perplexities(model, prefix, space[rows], progress=not args.disable_tqdm)
        mine, sample = (bits[own], bits[drawn]) if asked.exact else (bits[0], bits[1:])
        ranked = exact(mine, np.delete(bits, own)) if asked.exact else None
        found.append(
            {
                "prompt": canary.prompt,
                "suffix": canary.suffix,
                "log_perplexity_bits": float(mine),
                "exact": None if ranked is None else asdict(ranked),
                "skew_normal": asdict(approximate(mine, sample)),
            }
        )
    privacy, r = facts.get("differential_privacy", {}), canaries.repetitions
    epsilon, delta = privacy.get("epsilon"), privacy.get("delta")
    allowed = None if epsilon is None else most_exposed(epsilon, delta, r, canaries.size)
    report = {
        "model": folder.name,
        "claim": facts["claim"],
        "epsilon": epsilon,
        "delta": delta,
        "repetitions": r,
        "space": canaries.size,
        "mean_exposure_that_epsilon_allows": allowed,
        "exact": _summary([each["exact"] for each in found]),
        "skew_normal": _summary([each["skew_normal"] for each in found]),
        "canaries": found,
    }
    (folder / EXPOSURE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _summary(found: list[dict[str, Any] | None]) -> dict[str, float | None] | None:
    """Return mean and standard deviation of exposures; no deviation of one."""
    bits = [each["exposure"] for each in found if each is not None]
    if not bits:
        return None
    spread = statistics.stdev(bits) if len(bits) > 1 else None
    return {"mean": statistics.mean(bits), "standard_deviation": spread}


def table(reports: Sequence[Report]) -> str:
    """Return a line for each model."""
    from hf_dp.audit.exposure import AT_RANDOM

    def said(summary: dict[str, float | None] | None) -> str:
        if summary is None:
            return "-"
        spread = summary["standard_deviation"]
        return f"{summary['mean']:.2f}" + ("" if spread is None else f" ± {spread:.2f}")

    header = ["model", "epsilon", "r", "canaries", "exact", "skew-normal", "extrapolated"]
    header += ["KS", "epsilon allows"]
    rows = []
    for report in reports:
        fits = [each["skew_normal"] for each in report["canaries"]]
        epsilon, allowed = report["epsilon"], report["mean_exposure_that_epsilon_allows"]
        rows.append(
            [
                report["model"],
                "-" if epsilon is None else f"{epsilon:.3f}",
                str(report["repetitions"]),
                str(len(fits)),
                said(report["exact"]),
                said(report["skew_normal"]),
                f"{sum(fit['extrapolated'] for fit in fits)} of {len(fits)}",
                f"{max(fit['distance'] for fit in fits):.3f}",
                "-" if allowed is None else f"{allowed:.2f}",
            ]
        )
    space, sample = reports[0]["space"], reports[0]["canaries"][0]["skew_normal"]["sample"]
    return f"""exposure in bits, mean and standard deviation over canaries
{aligned(header, rows)}

A model that knows nothing of a canary gives {AT_RANDOM:.2f} on average, one that has memorized it
log2 |R| = {math.log2(space):.2f}. exact: by the rank among all suffixes, a tie against the canary.
skew-normal: by a distribution fitted to {sample:,} random ones; more than
{math.log2(sample + 1):.2f} is extrapolated. KS: the largest distance of a fit from its sample.
epsilon is that of one row. A canary of r rows has r times as much, and epsilon allows the mean
exposure in the last column (exact, over the random draw of canaries)."""
