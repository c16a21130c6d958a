"""``hf-dp generate``: synthetic rows from a private model, with its epsilon in the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp._arguments import argument
from hf_dp._validate import integer, one_of
from hf_dp.cli.config import CommandParser
from hf_dp.cli.launch import refuse_several
from hf_dp.cli.tasks import parse_evaluation
from hf_dp.errors import ConfigError
from hf_dp.tasks.generation.arguments import NUCLEUS, DecodingArguments, TextArguments
from hf_dp.tasks.models import CAUSAL, SEQ2SEQ, TextModelArguments

if TYPE_CHECKING:
    from datasets import Dataset

DESCRIPTION = """\
Let a trained model write rows in the columns of its training rows. What a private model writes is
post-processing: its epsilon holds for the texts, however many there are, and stands in the file's
metadata. It does not hold for the prompts, which stand in the rows as you give them. Texts are
sampled (nucleus), whatever the configuration says, unless --decoding is given here.
"""
EXAMPLES = """\
example:
  hf-dp generate --config recipes/e2e/gpt2_full_eps8.yaml --prompts tables.parquet --num 10000 \\
      --out synthetic.parquet
"""


@dataclass
class GenerateArguments:
    """What is written."""

    num: int = argument(MISSING, "Number of rows.")
    out: str = argument(MISSING, "File to write, .parquet.")
    trained: str | None = argument(
        None, "The model, a folder or Hub name. Default: the output_dir of the configuration."
    )
    prompts: str | None = argument(
        None, "File with the columns of the prompts, which are used in turn; they must be public."
    )
    use_cpu: bool = argument(False, "Leave a GPU alone.")

    def __post_init__(self) -> None:
        integer("num", self.num, 1)


ARGUMENTS = (GenerateArguments, TextModelArguments, TextArguments, DecodingArguments)


def main(argv: Sequence[str]) -> int:
    """Write the rows; print what they carry."""
    parser = CommandParser("hf-dp generate", "--config FILE --num N --out FILE [--NAME VALUE ...]")
    _, values, words = parser.read(argv, lambda task: (DESCRIPTION, EXAMPLES, ARGUMENTS), CAUSAL)
    refuse_several("hf-dp generate")
    one_of("task", values["task"], (CAUSAL, SEQ2SEQ), "Only these write texts.")
    values["decoding"] = NUCLEUS  # a recipe says how scored texts are written; the words may differ
    asked, model_args, data, decoding = parse_evaluation(
        ARGUMENTS, values, words, prog="hf-dp generate"
    )
    name = asked.trained or values.get("output_dir")
    if name is None:
        raise ConfigError("Expected `trained`, the model's folder or Hub name, got none.")
    rows, facts = _written(name, values["task"], asked, model_args, data, decoding)

    from hf_dp.tasks.generation.evaluation import save

    save(rows, Path(asked.out), facts)
    print(f"{len(rows)} rows: {facts['claim']}")
    if "not_covered" in facts:
        print(f"Not covered: {facts['not_covered']}.")
    print(asked.out)
    return 0


def _written(
    name: str,
    kind: str,
    asked: GenerateArguments,
    model_args: TextModelArguments,
    data: TextArguments,
    decoding: DecodingArguments,
) -> tuple[Dataset, dict[str, object]]:
    """Return the rows, and what is to stand in the file's metadata."""
    import torch

    from hf_dp.cli.verify import fetched
    from hf_dp.tasks.generation.encoding import encoding_of
    from hf_dp.tasks.generation.evaluation import check_out, write_rows
    from hf_dp.tasks.models import load_trained
    from hf_dp.tasks.sources import load_file

    check_out(Path(asked.out))
    prompts = asked.prompts
    if prompts and data.train_file and Path(prompts).resolve() == Path(data.train_file).resolve():
        raise ConfigError(
            f"Expected `prompts` to be public, got {Path(prompts).name!r}, the configuration's "
            "train_file, but no epsilon covers prompts. Give a file of public ones."
        )
    folder = fetched(name)
    facts = claim_of(folder)
    if "differential_privacy" in facts:
        _refuse_another_base(folder, model_args)
    model, tokenizer = load_trained(str(folder), model_args, kind)
    if torch.cuda.is_available() and not asked.use_cpu:
        model = model.to("cuda")
    encoding = encoding_of(kind, tokenizer, data)
    given = None if prompts is None else load_file(prompts)
    rows = write_rows(model, tokenizer, data, encoding, given, decoding, asked.num)
    # The name of a folder may tell where it lies; its last part is enough to know it by.
    facts |= {"model": Path(name).name, "prompts": None, "decoding": dataclasses.asdict(decoding)}
    if prompts is not None:
        facts["prompts"] = Path(prompts).name
        facts["not_covered"] = "the prompts, which are in the rows as they were given"
    return rows, facts


def _refuse_another_base(folder: Path, model_args: TextModelArguments) -> None:
    """Raise ConfigError for an adapter on another base than it was trained on, of which its claim
    says nothing. Where it was trained, the same base may lie in another folder."""
    from hf_dp.tasks.sources import resolve_model

    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    own = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    base = model_args.model_name_or_path
    given = Path(resolve_model(base, model_args.gguf_file))
    same = own and Path(own).resolve() == given.resolve()
    if not same and not (own and not Path(own).exists() and Path(own).name == given.name):
        raise ConfigError(
            f"The claim of {folder.name!r} is that of an adapter on the base {own!r}, but "
            f"`model_name_or_path` is {base!r}. Name the adapter's base."
        )


def claim_of(folder: Path) -> dict[str, Any]:
    """Return what is claimed of a model, after a look at whether its files bear it out."""
    from hf_dp.cards.verify import FAILED, verify
    from hf_dp.statement.evidence import file_of, read

    if not file_of(folder).is_file():
        return {"claim": "the model states no privacy, so nothing protects its training rows"}
    report = verify(folder)
    if report.outcome == FAILED:
        raise ConfigError(
            f"The claim of {folder.name!r} is not supported by its files. See: hf-dp verify."
        )
    statement = read(folder).restated()
    return {
        "claim": statement.sentence(),
        "verified": report.outcome,
        "differential_privacy": statement.to_dict(),
    }
