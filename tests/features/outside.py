"""A feature and an observer as someone else would write them, outside hf_dp."""

from dataclasses import dataclass

from hf_dp import DPTrainingArguments
from hf_dp.features import Feature, Inside, register


@dataclass
class NormArguments(DPTrainingArguments):
    """Arguments with one more."""

    largest_noised_norm: float | None = None


@register
class NoisedNorms(Feature):
    """Logs the largest norm of a noised gradient so far, and says a limit on the card."""

    names = ("largest_noised_norm",)

    @classmethod
    def is_asked_for(cls, args):
        return getattr(args, "largest_noised_norm", None) is not None

    @classmethod
    def problems(cls, args, found):
        if cls.is_asked_for(args) and args.largest_noised_norm <= 0:
            found.refuse("largest_noised_norm", "to be above 0", "Remove it.")

    def begin(self, seen):
        self.steps, self.largest = 0, 0.0

    def released(self, seen):
        self.steps += 1

    def log(self, logs, seen):
        self.largest = max(self.largest, logs.get("grad_norm", 0.0))
        logs["largest_noised_norm"] = min(self.largest, self.args.largest_noised_norm)

    def words(self):
        return {"largest_noised_norm": self.args.largest_noised_norm}


class Peek(Inside):
    """Sees the clipped sums before their noise."""

    def begin(self, seen):
        self.seen_sums = []

    def clipped(self, sums):
        self.seen_sums.append(sum(float(total.square().sum()) for total in sums.values()))
