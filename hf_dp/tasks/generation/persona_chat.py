"""The Persona-Chat data set: a speaker's persona, the dialog so far, a reply (Zhang et al., 2018).

Li et al. mark the speakers by new tokens, as the code that they build on does. Here they are words,
so that no model needs new embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

# Two exchanges and the partner's last utterance, as in the code that Li et al. build on (appendix
# K): 2 * max_history + 1 with max_history 2.
LATEST_UTTERANCES = 5

_PARTNER, _SELF = "partner", "self"


def linearized(personality: Sequence[str], history: Sequence[str]) -> str:
    """Return a persona and the latest utterances as text; the reply follows.

    Args: history: utterances in turn, of which the partner's is the last.
    """
    latest = list(history)[-LATEST_UTTERANCES:]
    speakers = [_PARTNER if (len(latest) - i) % 2 else _SELF for i in range(len(latest))]
    turns = [f"{who} : {words}" for who, words in zip(speakers, latest)]
    return "\n".join(["persona : " + " ".join(personality), *turns, f"{_SELF} :"])
