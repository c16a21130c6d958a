"""METEOR 1.5 of the E2E challenge's script, from 0 to 1, by its authors' program. It needs Java."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluate

from hf_dp.tasks.generation.java import conversation
from hf_dp.tasks.generation.ptb import ptb_rows
from hf_dp.tasks.generation.text_metric import text_metric_info


class Meteor(evaluate.Metric):
    """``{"meteor": float, "how": text}``, from the statistics of all rows.

    The program gets texts that PTBTokenizer has tokenized, and for each row finds the best
    reference. Its data is English.

    Raises: MetricUnavailableError where Java is missing or fails.
    """

    def _info(self) -> evaluate.MetricInfo:
        return text_metric_info(__doc__)

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        from pycocoevalcap.meteor import meteor

        jar = str(Path(meteor.__file__).with_name(meteor.METEOR_JAR))
        rows = zip(*ptb_rows(list(predictions), list(references)), strict=True)
        with conversation(["-jar", jar, "-", "-", "-stdio", "-l", "en", "-norm"]) as ask:
            # PTBTokenizer has put spaces between the marks of a "|||" in a text.
            statistics = [ask(" ||| ".join(["SCORE", *row, words]), 1)[0] for words, row in rows]
            *_, total = ask(" ||| ".join(["EVAL", *statistics]), len(statistics) + 1)
        return {"meteor": float(total), "how": "METEOR 1.5 -l en -norm, PTBTokenizer"}
