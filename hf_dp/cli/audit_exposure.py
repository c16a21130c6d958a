"""``hf-dp audit exposure``: insert canaries, train, and measure what the model tells of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dp._validate import integer, one_of
from hf_dp.cli.argument_groups import PRIVACY
from hf_dp.cli.config import card_block, parse, peft_config, read_yaml
from hf_dp.cli.non_private import NON_PRIVATE, asked_for, without_privacy
from hf_dp.cli.options import Parser, command_parser
from hf_dp.cli.tasks import DEFAULT_TASK, generation
from hf_dp.errors import ConfigError
from hf_dp.tasks.generation.arguments import TextArguments
from hf_dp.tasks.generation.language_models import CAUSAL

FILE_NAME = "exposure.json"
DESCRIPTION = """\
Train a decoder with canaries among its rows, and measure how much of a search for them it saves
(Carlini et al., 2019; Li et al., 2021, appendix M). A canary is a synthetic row: a prompt of three
random words and a suffix of five, of ten words of the model's vocabulary. Its exposure is
log2 |R| - log2 rank, with its rank among all |R| = 100,000 suffixes by the model's perplexity.

The output of each run is a folder OUTPUT_DIR_exposure/MODE_rR with canaries.json (what was
inserted) and exposure.json (what the latest measurement found). Canaries are public, and exposure
is computed from the released weights alone: it is post-processing, and costs no privacy.
"""
EXAMPLES = """\
examples:
  hf-dp audit exposure --config recipes/small_gpt2/e2e_eps8.yaml --train_file train.parquet \\
      --validation_file test.parquet --target_epsilon 3 --repetitions 1 10 100 --exact
  hf-dp audit exposure --config recipes/small_gpt2/e2e_eps8.yaml --train_file train.parquet \\
      --validation_file test.parquet --privacy_mode non_private --repetitions 1 10 100 --exact
  hf-dp audit exposure --config recipes/small_gpt2/e2e_eps8.yaml --exact \\
      --trained outputs/small_gpt2/e2e_eps8_exposure/*
"""


@dataclass
class ExposureArguments:
    """What is inserted and measured."""

    repetitions: list[int] = field(
        default_factory=list,
        metadata={"help": "Rows of each canary; for each number a model is trained."},
    )
    trained: list[str] = field(
        default_factory=list,
        metadata={"help": "Train nothing: measure these folders, which this command trained."},
    )
    canaries: int = field(default=3, metadata={"help": "Canaries in each model."})
    candidates: int = field(
        default=4096,
        metadata={"help": "Random suffixes to which a skew-normal is fitted, for each canary."},
    )
    exact: bool = field(
        default=False, metadata={"help": "Rank each canary among all suffixes, too."}
    )
    canary_seed: int = field(default=0, metadata={"help": "Seed of the random words."})

    def __post_init__(self) -> None:
        if bool(self.repetitions) == bool(self.trained):
            raise ConfigError(
                "Expected `repetitions` (train models and measure them) or `trained` (measure), "
                f"got {'both' if self.trained else 'neither'}. For example --repetitions 1 10 100."
            )
        for each in self.repetitions:
            integer("repetitions", each, 1)
        if len(set(self.repetitions)) < len(self.repetitions):
            raise ConfigError(
                f"Expected `repetitions` to differ from each other, got {self.repetitions}."
            )
        integer("canaries", self.canaries, 1)
        integer("candidates", self.candidates, 100)


ARGUMENTS = (ExposureArguments, *generation.ARGUMENTS)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that decide what runs and where."""
    parser = Parser(
        "hf-dp audit",
        add_help=False,
    )
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this text and exit")
    add("--config", metavar="FILE", help="the recipe, as `hf-dp train` reads it")
    add("--task", help=argparse.SUPPRESS)
    add("--output-dir", metavar="FOLDER", help="default: that of the recipe")
    add(
        "--privacy-mode",
        metavar="NAME",
        help="default: that of the recipe; with non_private, its privacy arguments are left out",
    )
    return parser


def help_text() -> str:
    """Return the help of ``hf-dp audit``."""
    parser = command_parser(
        "hf-dp audit exposure",
        "hf-dp audit exposure --config FILE --repetitions R [R ...] [--NAME VALUE ...]",
        DESCRIPTION,
        EXAMPLES,
        build_parser(),
        (*ARGUMENTS, *PRIVACY),
    )
    return parser.format_help()


def main(argv: Sequence[str]) -> int:
    """Train and measure, or only measure; print a table."""
    args, words = build_parser().parse_known_args(list(argv))
    if args.help or not argv:
        print(help_text())
        return 0 if argv else 2
    one_of("audit", words[0] if words else None, ["exposure", "run", "leave-one-out"])
    values = {} if args.config is None else read_yaml(args.config)
    named = {"task": args.task, "output_dir": args.output_dir, "privacy_mode": args.privacy_mode}
    given = {key: value for key, value in named.items() if value is not None}
    values = recipe_of(values, given, words)
    asked = _parsed(values, words[1:])[0]
    folders = [Path(folder) for folder in asked.trained]
    if not folders:
        folders = [place(values, repetitions) for repetitions in asked.repetitions]
        refuse_trained(folders)
        for repetitions, folder in zip(asked.repetitions, folders, strict=True):
            train(values, words[1:], repetitions, folder)
    reports = [measure(values, words[1:], folder) for folder in folders]
    print("\n".join([table(reports), "", *notes(reports)]))
    for folder in folders:
        print(folder / FILE_NAME)
    return 0


def recipe_of(
    values: dict[str, Any], given: dict[str, Any], words: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values of a recipe with what the command line says instead.

    Args: words: the rest of the command line.

    Raises: ConfigError for a task that has no canaries.
    """
    task = given.get("task", values.get("task", DEFAULT_TASK))
    if task != CAUSAL:
        raise ConfigError(
            f"`hf-dp audit exposure` is for decoders (task: {CAUSAL}), got the task {task!r}: an "
            "encoder-decoder or a classifier does not write what stands in its rows in this form. "
            "Give the recipe of a decoder."
        )
    if given.get("privacy_mode") == NON_PRIVATE:
        values = without_privacy(values, asked_for(words))
    return {**values, **given}


def place(values: dict[str, Any], repetitions: int) -> Path:
    """Return the folder of a model. Raises: ConfigError without ``output_dir``."""
    if values.get("output_dir") is None:
        raise ConfigError("Expected `output_dir`, where the audited models go, got none.")
    top = Path(values["output_dir"])
    mode = values.get("privacy_mode", "dp_sgd")
    return top.with_name(f"{top.name}_exposure") / f"{mode}_r{repetitions}"


def refuse_trained(folders: Sequence[Path]) -> None:
    """Raise ConfigError for folders that hold an audited model already."""
    from hf_dp.run.weights_file import weights_files

    if full := [str(folder) for folder in folders if folder.is_dir() and weights_files(folder)]:
        raise ConfigError(
            f"Expected new folders, but {full} hold models already. Measure them: --trained "
            f"{' '.join(full)}. Or train others: choose another `output_dir`."
        )


def _parsed(values: dict[str, Any], words: Sequence[str]) -> tuple[Any, ...]:
    from hf_dp.trainer.arguments import DPTrainingArguments

    return parse(
        [*ARGUMENTS, DPTrainingArguments],
        values,
        words,
        prog="hf-dp audit exposure",
        extra=("task", "peft", "card"),
    )


def train(values: dict[str, Any], words: Sequence[str], repetitions: int, folder: Path) -> None:
    """Train one model with canaries among its rows, into a folder that says so.

    Raises: ConfigError for arguments that would publish or resume it.
    """
    from hf_dp.audit import canaries as made

    asked, model_args, data, decoding, args = _parsed({**values, "output_dir": str(folder)}, words)
    if args.push_to_hub or args.resume_from_checkpoint:
        raise ConfigError(
            "An audited model holds canaries and is not for others, and its training is not "
            "resumed. Leave `push_to_hub` and `resume_from_checkpoint` out."
        )
    data.metrics = []  # nothing is decoded
    card = card_block(values.get("card"))
    adapter = peft_config(values.get("peft"))
    canaries: made.Canaries | None = None

    def change_rows(rows: Any, tokenizer: Any, encoding: Any) -> Any:
        nonlocal canaries
        canaries = made.make(
            tokenizer,
            data,
            count=asked.canaries,
            repetitions=repetitions,
            seed=asked.canary_seed,
        )
        made.check_encoding(canaries, data, encoding)
        return made.insert(rows, data, canaries)

    trainer, _ = generation.build_trainer(
        CAUSAL, model_args, data, decoding, args, adapter, change_rows
    )
    assert canaries is not None
    if args.is_private:
        source = card.get("dataset") or trainer.card["dataset"]
        said = f"{source}, with {canaries.num_rows} inserted rows of canaries (an audit's model)"
        tags = (*card.get("tags", ()), "canaries-inserted")
        trainer.describe(**{**card, "dataset": said, "tags": tags})
    canaries.save(folder)  # before the first step, so that no folder hides what is in its model
    trainer.train()
    trainer.save_model()


def measure(values: dict[str, Any], words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return what a trained folder tells of its canaries; write it to ``exposure.json`` there."""
    import numpy as np

    from hf_dp.audit import canaries as made
    from hf_dp.audit.exposure import approximate, exact, log_perplexities, most_exposed
    from hf_dp.cli.generate import claim_of
    from hf_dp.tasks.generation.encoding import CausalEncoding, encoding_of
    from hf_dp.tasks.generation.language_models import load_trained

    canaries = made.load(folder)
    asked, model_args, data, _, args = _parsed(values, words)
    _check_layout(data, canaries, folder)
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
        bits = log_perplexities(
            model,
            made.prefix(canary, data, encoding),
            space[rows],
            progress=not args.disable_tqdm,
        )
        mine, sample = (bits[own], bits[drawn]) if asked.exact else (bits[0], bits[1:])
        ranked = exact(mine, np.delete(bits, own)) if asked.exact else None
        found.append(
            {
                "prompt": canary.prompt,
                "suffix": canary.suffix,
                "log_perplexity_bits": float(mine),
                "exact": None if ranked is None else dataclasses.asdict(ranked),
                "skew_normal": dataclasses.asdict(approximate(mine, sample)),
            }
        )
    privacy = facts.get("differential_privacy", {})
    epsilon, delta = privacy.get("epsilon"), privacy.get("delta")
    r = canaries.repetitions
    report = {
        "model": folder.name,
        "claim": facts["claim"],
        "epsilon": epsilon,
        "delta": delta,
        "repetitions": r,
        "space": canaries.size,
        "mean_exposure_that_epsilon_allows": None
        if epsilon is None
        else most_exposed(epsilon, delta, r, canaries.size),
        "exact": _summary([each["exact"] for each in found]),
        "skew_normal": _summary([each["skew_normal"] for each in found]),
        "canaries": found,
    }
    text = json.dumps(report, indent=1)
    (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")
    return report


def _check_layout(data: TextArguments, canaries: Any, folder: Path) -> None:
    if data.data_format != canaries.data_format:
        raise ConfigError(
            f"The canaries of {folder.name!r} are rows of data_format {canaries.data_format!r}, "
            f"and the configuration says {data.data_format!r}. Give the one it was trained with."
        )


def _summary(found: list[dict[str, Any] | None]) -> dict[str, float | None] | None:
    """Return mean and standard deviation of exposures; no deviation of one."""
    bits = [each["exposure"] for each in found if each is not None]
    if not bits:
        return None
    return {
        "mean": statistics.mean(bits),
        "standard_deviation": statistics.stdev(bits) if len(bits) > 1 else None,
    }


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Return a line for each model."""
    from hf_dp.benchmarks.tables import aligned

    header = ["model", "epsilon", "r", "canaries", "exact", "skew-normal", "extrapolated"]
    header += ["KS", "epsilon allows"]
    rows = []
    for report in reports:
        fits = [each["skew_normal"] for each in report["canaries"]]
        epsilon, allowed = report["epsilon"], report["mean_exposure_that_epsilon_allows"]
        rows.append(
            [
                report["model"],
                "-" if epsilon is None else f"{epsilon:.2f}",
                str(report["repetitions"]),
                str(len(fits)),
                _in_words(report["exact"]),
                _in_words(report["skew_normal"]),
                f"{sum(fit['extrapolated'] for fit in fits)} of {len(fits)}",
                f"{max(fit['distance'] for fit in fits):.3f}",
                "-" if allowed is None else f"{allowed:.2f}",
            ]
        )
    return "exposure in bits, mean and standard deviation over canaries\n" + aligned(header, rows)


def _in_words(summary: dict[str, float | None] | None) -> str:
    if summary is None:
        return "-"
    spread = summary["standard_deviation"]
    return f"{summary['mean']:.2f}" + ("" if spread is None else f" ± {spread:.2f}")


def notes(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the numbers mean, to read."""
    from hf_dp.audit.exposure import AT_RANDOM

    space = reports[0]["space"]
    sample = reports[0]["canaries"][0]["skew_normal"]["sample"]
    lines = [
        f"A model that knows nothing of a canary gives {AT_RANDOM:.2f} on average, one that has it "
        f"by heart log2 |R| = {math.log2(space):.2f}.",
        "exact: by the rank among all suffixes, a tie against the canary. skew-normal: by a "
        f"distribution fitted to {sample:,} random ones; more than {math.log2(sample + 1):.2f} is "
        "extrapolated. KS: the largest distance of a fit from its sample.",
    ]
    if any(report["epsilon"] is not None for report in reports):
        lines.append(
            "epsilon is that of one row. A canary of r rows has r times as much, and epsilon "
            "allows the mean exposure in the last column (exact, over the random draw of canaries)."
        )
        for report in reports:
            epsilon, r = report["epsilon"], report["repetitions"]
            if epsilon is not None and r > 1:
                lines.append(f"{report['model']}: {r} x {epsilon:.2f} = {r * epsilon:.4g}")
    return lines
