"""Scores of generated texts, as metrics of ``evaluate``; nothing is downloaded for them.

Each function takes predictions, one text a row, and references, a list of texts for each, and
returns numbers with ``how`` they were computed. Those that need Java raise MetricUnavailableError
where it is missing or fails.
"""

from __future__ import annotations

import re
import shutil
import string
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from itertools import cycle, islice, zip_longest
from math import log2
from pathlib import Path
from typing import Any

import datasets
import evaluate
import numpy as np

from hf_dp.errors import MetricUnavailableError

Texts = list[str]
Rows = list[list[str]]
Found = dict[str, Any]

_ORDERS = range(1, 6)
_SPACES = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Before Java 18 the locale decides how text is read, and many a server has none.
_JAVA_OPTIONS = ("-Dfile.encoding=UTF-8", "-Xmx2G")


class TextMetric(evaluate.Metric):
    """One of the functions below. Args: config_name: which one."""

    def _info(self) -> evaluate.MetricInfo:
        texts = datasets.Value("string")
        return evaluate.MetricInfo(
            description=FUNCTIONS[self.config_name].__doc__,
            citation="",
            inputs_description="predictions: texts; references: for each one or more texts",
            features=datasets.Features({"predictions": texts, "references": datasets.List(texts)}),
        )

    def _compute(self, predictions: Texts, references: Rows, **options: Any) -> Found:
        rows = [list(row) for row in references]
        return FUNCTIONS[self.config_name](list(predictions), rows, **options)


def bleu(predictions: Texts, references: Rows) -> Found:
    """Return BLEU of the corpus, with all references of a row. It is the number of the E2E
    challenge's script (mteval-v13a), but for a corpus without a single n-gram of some order up to
    4: 0 here."""
    from sacrebleu.metrics.bleu import BLEU

    # force: no warning about texts that end in " .", which data sets of this kind do.
    scorer = BLEU(lowercase=True, tokenize="13a", force=True)
    found = scorer.corpus_score(predictions, list(zip_longest(*references)))
    return {"bleu": found.score, "how": f"sacrebleu {scorer.get_signature()}"}


def e2e_nist(predictions: Texts, references: Rows) -> Found:
    """Return NIST-5 of the corpus, with all references of a row together, as pymteval does.

    An n-gram counts as often as the reference that has it most often. Its information is
    ``log2(times its first n - 1 words occur / times it occurs)`` in all references, those of other
    rows, too. Words of a row's references count once, on average, for the brevity penalty; the
    Perl script pads rows with empty references there, which differs where rows have different
    numbers of them.
    """
    from nltk.translate.nist_score import nist_length_penalty
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    words_of = Tokenizer13a()  # those of mteval-v13a
    predicted = [words_of(text.lower()).split() for text in predictions]
    expected = [[words_of(text.lower()).split() for text in row] for row in references]
    counts = [[_ngrams(words) for words in row] for row in expected]
    everywhere: Counter[tuple[str, ...]] = Counter()
    for row in counts:
        for each in row:
            everywhere.update(each)
    everywhere[()] = sum(len(words) for row in expected for words in row)

    gains, totals = dict.fromkeys(_ORDERS, 0.0), dict.fromkeys(_ORDERS, 0)
    for words, row in zip(predicted, counts, strict=True):
        own, there = _ngrams(words), _ngrams([])
        for each in row:
            there |= each
        for ngram, count in own.items():
            totals[len(ngram)] += count
        for ngram, count in (own & there).items():
            gains[len(ngram)] += count * log2(everywhere[ngram[:-1]] / everywhere[ngram])
    length = sum(sum(map(len, row)) / len(row) for row in expected)
    penalty = nist_length_penalty(length, totals[1]) if length else 0.0
    gain = sum(gains[order] / totals[order] for order in _ORDERS if totals[order])
    return {"e2e_nist": gain * penalty, "how": "NIST-5 after pymteval, lower case, 13a"}


def rouge(predictions: Texts, references: Rows) -> Found:
    """Return ROUGE-1, ROUGE-2 and ROUGE-L, means over rows of the reference with the best F1. Words
    are runs of a-z and 0-9; any other letter separates words, so texts of other alphabets score
    0."""
    from rouge_score.rouge_scorer import RougeScorer

    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names, use_stemmer=True)
    rows = [scorer.score_multi(row, text) for text, row in zip(predictions, references)]
    found = {name: float(np.mean([row[name].fmeasure for row in rows])) for name in names}
    how = f"rouge-score {version('rouge-score')}, F1, stemmed, best reference of a row"
    return {**found, "how": how}


def e2e_rouge_l(predictions: Texts, references: Rows) -> Found:
    """Return ROUGE-L of the E2E challenge's script, a mean over rows. A row's number weighs recall
    by 1.2 squared, and joins the best precision and the best recall, though they may come from
    different references."""
    from pycocoevalcap.rouge.rouge import Rouge

    scorer = Rouge()
    # To pycocoevalcap a text without a word has one, the empty one.
    rows = [
        scorer.calc_score([words], row) if words else 0.0
        for words, row in zip(*ptb_rows(predictions, references))
    ]
    return {"e2e_rouge_l": float(np.mean(rows)), "how": _coco()}


def cider(predictions: Texts, references: Rows) -> Found:
    """Return CIDEr of the E2E challenge's script, a mean over rows. N-grams that all rows have
    weigh nothing, so a corpus of one row scores 0."""
    from pycocoevalcap.cider.cider_scorer import CiderScorer

    scorer = CiderScorer()
    predicted, expected = ptb_rows(predictions, references)
    for words, row in zip(predicted, expected):
        scorer += (words, row)
    some = any(words for row in expected for words in row)  # else it has no most frequent one
    return {"cider": float(scorer.compute_score()[0]) if some else 0.0, "how": _coco()}


def meteor(predictions: Texts, references: Rows) -> Found:
    """Return METEOR 1.5 of the E2E challenge's script, by its authors' program. The program gets
    texts that PTBTokenizer has tokenized. Its data is English."""
    total = meteor_score(*ptb_rows(predictions, references))
    return {"meteor": total, "how": "METEOR 1.5 -l en -norm, PTBTokenizer"}


def bertscore(predictions: Texts, references: Rows, model: str | Path | None = None) -> Found:
    """Return BERTScore F1, a mean over rows of the best reference, not rescaled. ``how`` names the
    model's folder and the layer: the one that bert-score's authors chose for a model of that name,
    else the last. An empty prediction scores 0."""
    if model is None:
        raise MetricUnavailableError("no `bertscore_model` was given: name a local folder")
    from bert_score import BERTScorer
    from bert_score.utils import model2layers
    from transformers import AutoConfig

    folder = Path(model).resolve()  # a name that is no path would be looked for on the Hub
    config = AutoConfig.from_pretrained(folder)
    if "t5" in str(folder) and "t5" not in config.model_type:
        raise MetricUnavailableError("bert-score reads any model below a path with 't5' as T5")
    layer = model2layers.get(folder.name, config.num_hidden_layers)
    scorer = BERTScorer(model_type=str(folder), num_layers=layer)
    tokenizer = scorer._tokenizer
    if tokenizer.pad_token_id is None:
        raise MetricUnavailableError(f"the tokenizer in {folder.name} has no pad token")
    # Where its files name no limit this is 1e30, which tokenizers cannot cut at. RoBERTa keeps
    # two positions for itself.
    positions = getattr(config, "max_position_embeddings", 512) - 2
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)

    # bert-score 0.3.13 asks for a method of empty texts that transformers 5 has not.
    some = [index for index, text in enumerate(predictions) if text.strip()]
    rows = np.zeros(len(predictions))
    if some:
        texts = [predictions[index] for index in some]
        rows[some] = scorer.score(texts, [list(references[index]) for index in some])[2].numpy()
    used = f"{folder.name}, layer {layer} of {config.num_hidden_layers}"
    how = f"bert-score {version('bert-score')}, {used}, not rescaled"
    return {"bertscore_f1": float(rows.mean()), "how": how}


def dialog_f1(predictions: Texts, references: Rows) -> Found:
    """Return F1 of words as ParlAI scores dialog, a mean over rows of the best reference. A word
    counts as often as both texts have it. A row scores 0 where no word is in common, also between
    two texts without words."""
    rows = [
        max(_f1(_dialog_words(text), _dialog_words(reference)) for reference in row)
        for text, row in zip(predictions, references)
    ]
    how = "after ParlAI: words without case, punctuation and articles, best reference of a row"
    return {"dialog_f1": float(np.mean(rows)), "how": how}


FUNCTIONS: dict[str, Callable[..., Found]] = {
    each.__name__: each
    for each in (bleu, e2e_nist, rouge, e2e_rouge_l, cider, meteor, bertscore, dialog_f1)
}


def _coco() -> str:
    return f"pycocoevalcap {version('pycocoevalcap')}, PTBTokenizer"


def _ngrams(words: list[str]) -> Counter[tuple[str, ...]]:
    """Return how often each n-gram of up to five words occurs."""
    return Counter(
        tuple(words[start : start + order])
        for order in _ORDERS
        for start in range(len(words) - order + 1)
    )


def _dialog_words(text: str) -> Counter[str]:
    """Return how often each word occurs. A mark of punctuation separates words."""
    return Counter(_ARTICLES.sub(" ", text.lower().translate(_SPACES)).split())


def _f1(predicted: Counter[str], expected: Counter[str]) -> float:
    """Return the harmonic mean of precision and recall."""
    total = predicted.total() + expected.total()
    return 2 * (predicted & expected).total() / total if total else 0.0


# -- the Java programs that pycocoevalcap brings: the E2E challenge's words, and METEOR --


def _java(arguments: list[str], text: str = "") -> list[str]:
    """Return the lines that a program prints for this input."""
    java = shutil.which("java")
    if java is None:
        raise MetricUnavailableError("it needs Java, and no `java` is on the PATH")
    command = [java, *_JAVA_OPTIONS, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise MetricUnavailableError(f"{Path(arguments[1]).name} failed under Java: {last}")
    return done.stdout.removesuffix("\n").split("\n")


def ptb_rows(
    predictions: list[str], references: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return predictions and references in lower case, tokenized and without punctuation. Tokens
    are separated by one space. The program is Stanford's PTBTokenizer, the punctuation that of
    pycocoevalcap, as the script has it. A text of punctuation alone becomes empty."""
    words = iter(_tokenized((*predictions, *(text for row in references for text in row))))
    return [next(words) for _ in predictions], [[next(words) for _ in row] for row in references]


@lru_cache(maxsize=1)  # three metrics ask for the same texts, one after the other
def _tokenized(texts: tuple[str, ...]) -> tuple[str, ...]:
    from pycocoevalcap.tokenizer import ptbtokenizer

    # The program knows more ends of a line than \n. All of them are white space in Python, too.
    lines = [" ".join(text.split()) for text in texts]
    some = [line for line in lines if line]
    jar = Path(ptbtokenizer.__file__).with_name(ptbtokenizer.STANFORD_CORENLP_3_4_1_JAR)
    program = ["-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer"]
    text = "".join(f"{line}\n" for line in some)
    printed = _java([*program, "-preserveLines", "-lowerCase"], text) if some else []
    if len(printed) != len(some):
        raise MetricUnavailableError(
            f"{jar.name} printed {len(printed)} lines for {len(some)} texts"
        )
    dropped, words = ptbtokenizer.PUNCTUATIONS, iter(printed)
    return tuple(
        " ".join(word for word in next(words).split() if word not in dropped) if line else ""
        for line in lines
    )


def meteor_score(predictions: list[str], references: list[list[str]]) -> float:
    """Return METEOR 1.5 of tokenized texts, by its authors' program. The program wants as many
    references of each row, and takes the best one. So the references of a row are repeated."""
    from pycocoevalcap.meteor import meteor

    jar = Path(meteor.__file__).with_name(meteor.METEOR_JAR)
    most = max(map(len, references))
    padded = [each for row in references for each in islice(cycle(row), most)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("predictions", "references")]
        for file, texts in zip(files, (predictions, padded)):
            file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        options = ["-l", "en", "-norm", "-r", str(most)]
        printed = _java(["-jar", str(jar), *map(str, files), *options])
    try:
        return float(printed[-1].removeprefix("Final score:"))
    except ValueError:
        raise MetricUnavailableError(f"{jar.name} printed no score, but {printed[-1]!r}") from None
