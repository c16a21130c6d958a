"""The arguments of the generation tasks: which rows, which model, how it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_dp._arguments import argument
from hf_dp._validate import in_unit_interval, integer, one_of, positive
from hf_dp.tasks.generation.formats import NAMES
from hf_dp.tasks.sources import SourceArguments

if TYPE_CHECKING:
    from datasets import DatasetDict


@dataclass
class TextArguments(SourceArguments):
    """Which rows, and how they become a prompt and a target."""

    demo_name = "hf_dp demo tables (synthetic)"

    data_format: str = argument("pairs", f"Layout of the rows: {', '.join(NAMES)}.")
    prompt_column: str | None = argument(None, "With pairs: the column that the model is given.")
    target_column: str | None = argument(None, "With pairs: the column that it should write.")
    text_column: str | None = argument(None, "With text: the column that it should write.")
    messages_column: str = argument(
        "messages", "With messages: the column of turns, each with role and content."
    )
    separator: str | None = argument(
        None,
        "Text between prompt and target, for a decoder. Default: the token that begins "
        "and ends texts where it is one (GPT-2), else a line break.",
    )
    max_length: int = argument(
        100,
        "Longest sequence in tokens: prompt and target of a decoder, the prompt of an "
        "encoder-decoder. Targets are cut.",
    )
    max_target_length: int = argument(100, "Longest target of an encoder-decoder, in tokens.")
    cut_prompts: bool = argument(False, "Cut prompts that are too long, rather than refuse them.")
    metrics: list[str] = argument(
        ["bleu", "rougeL"], "Scores of what the model writes; none: decode nothing."
    )

    bertscore_model: str | None = argument(
        None, "With bertscore_f1: the local folder of an encoder."
    )

    def __post_init__(self) -> None:
        from hf_dp.tasks.generation.scores import check_metrics

        check_metrics(self.metrics, bertscore_model=self.bertscore_model)
        one_of("data_format", self.data_format, NAMES)
        integer("max_length", self.max_length, 2)
        integer("max_target_length", self.max_target_length, 1)

    def demo(self) -> DatasetDict:
        """Return the demonstration tables."""
        from hf_dp.tasks.generation.formats import demo_tables

        return demo_tables()


BEAM, NUCLEUS, GREEDY = "beam", "nucleus", "greedy"


@dataclass
class DecodingArguments:
    """How the model writes.

    Beams, and the share of probability, are those of Li et al. (2021), appendix K.
    """

    decoding: str = argument(BEAM, f"{BEAM}, {NUCLEUS} (sampling) or {GREEDY}.")
    num_beams: int = argument(5, "Beams, with beam.")
    top_p: float = argument(0.9, "Share of probability to sample from, with nucleus.")
    temperature: float = argument(1.0, "Of sampling, with nucleus.")
    max_new_tokens: int = argument(100, "Longest text, in tokens.")
    stop: list[str] = argument([], "Texts that end the writing, beside the model's end token.")
    decoding_batch_size: int = argument(16, "Prompts at a time.")
    decoding_seed: int = argument(0, "Seed of sampling.")
    max_decoded: int | None = argument(None, "Decode and score the first prompts only.")

    def __post_init__(self) -> None:
        one_of("decoding", self.decoding, (BEAM, NUCLEUS, GREEDY))
        for name in ("num_beams", "max_new_tokens", "decoding_batch_size"):
            integer(name, getattr(self, name), 1)
        in_unit_interval("top_p", self.top_p, one=True)
        positive("temperature", self.temperature)
        if self.max_decoded is not None:
            integer("max_decoded", self.max_decoded, 1)
