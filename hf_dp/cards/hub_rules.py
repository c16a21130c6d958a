"""What the Hub takes in a card's metadata: written down here, since its own validator is a server.

The lists are those of the Hub's documentation ("Model Cards", "Licenses", "Tasks").
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from huggingface_hub.utils import HFValidationError, validate_repo_id

from hf_dp._validate import invalid

LICENSES = frozenset(
    """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m
    bigscience-bloom-rail-1.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause
    bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0
    cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
    cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0
    epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0
    gpl-3.0 h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1
    llama3.2 llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0
    openrail openrail++ osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
    """.split()
)
# ISO 639-1, two letters. Longer codes (ISO 639-2 and 639-3) are checked by their form.
_LANGUAGES = frozenset(
    """
    aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da
    de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz
    ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln
    lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi
    pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti
    tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
    """.split()
)
_LANGUAGE_WORDS = ("multilingual", "code")
PIPELINE_TAGS = frozenset(
    """
    any-to-any audio-classification audio-text-to-text audio-to-audio automatic-speech-recognition
    depth-estimation document-question-answering feature-extraction fill-mask graph-ml
    image-classification image-feature-extraction image-segmentation image-text-to-text
    image-to-3d image-to-image image-to-text image-to-video keypoint-detection mask-generation
    object-detection question-answering reinforcement-learning robotics sentence-similarity
    summarization table-question-answering tabular-classification tabular-regression
    text-classification text-generation text-ranking text-to-3d text-to-audio text-to-image
    text-to-speech text-to-video time-series-forecasting token-classification translation
    unconditional-image-generation video-classification video-text-to-text
    visual-document-retrieval visual-question-answering voice-activity-detection
    zero-shot-classification zero-shot-image-classification zero-shot-object-detection
    """.split()
)
# Metrics of `evaluate` that a leaderboard can compare.
METRICS = frozenset(
    "accuracy bertscore bleu exact_match f1 matthews_correlation mean_iou meteor nist pearsonr "
    "perplexity precision recall rouge rouge1 rouge2 rougeL rougeLsum sacrebleu spearmanr ter "
    "wer".split()
)


def check_license(value: str, name: str | None, link: str | None) -> None:
    """Raise InvalidArgumentError for a license that the Hub does not know.

    Args: name, link: of a license that is none of the Hub's, whose identifier is then "other".
    """
    if value not in LICENSES:
        raise invalid(
            "license",
            value,
            "to be an identifier that the Hub knows, such as 'apache-2.0', 'mit' or 'cc-by-4.0'",
            f"{_nearest(value, LICENSES)}For any other license use 'other' with `license_name`.",
        )
    if (value == "other") != bool(name) or (link and not name):
        needed = "to be given with license='other', and with no other license"
        raise invalid("license_name", name, needed)


def check_languages(values: Iterable[str]) -> None:
    """Raise InvalidArgumentError for what is no code of a language."""
    for value in values:
        form = re.fullmatch(r"([a-z]{2,3})(-[A-Za-z0-9]{2,8})*", value)
        known = form and (len(form[1]) == 3 or form[1] in _LANGUAGES)
        if value not in _LANGUAGE_WORDS and not known:
            raise invalid("language", value, "to be an ISO 639 code, such as 'en'")


def check_pipeline_tag(value: str) -> None:
    """Raise InvalidArgumentError for a task that the Hub does not know."""
    if value not in PIPELINE_TAGS:
        expected = "to be a task of the Hub, such as 'text-classification'"
        raise invalid("task_tag", value, expected, _nearest(value, PIPELINE_TAGS))


def check_tags(values: Iterable[str]) -> None:
    """Raise InvalidArgumentError for a tag that is no short text on one line."""
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= 100 or not value.isprintable():
            raise invalid("tags", value, "to be texts of at most 100 characters on one line")


def is_repository(value: str | None) -> bool:
    """Return whether a text can be the id of a repository on the Hub."""
    if not value:
        return False
    try:
        validate_repo_id(value)
    except HFValidationError:
        return False
    return not value.startswith(("~", "."))


def check_repository(name: str, value: str, move: str) -> None:
    """Raise InvalidArgumentError, naming the argument, for what is no repository's id."""
    if not is_repository(value):
        raise invalid(name, value, "to be the id of a repository, like 'organization/name'", move)


def _nearest(value: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(re.sub("[ _]", "-", value.lower()), known, n=1)
    return f"Did you mean {near[0]!r}? " if near else ""
