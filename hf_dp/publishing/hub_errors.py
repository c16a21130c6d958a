"""What the Hub or the way to it refuses, as one error that names the next move and no token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hf_dp.errors import HfDpError, PublishError
from hf_dp.publishing.private_words import scrubbed

Result = TypeVar("Result")

LOG_IN = (
    "Run `hf auth login`, or set HF_TOKEN, with a token that may write "
    "(https://huggingface.co/settings/tokens)."
)


def asked(what: str, repository: str, token: str | None, act: Callable[[], Result]) -> Result:
    """Return ``act()``, which talks to the Hub.

    Args: what: is being done, for the message.

    Raises: PublishError for whatever fails. The original error is not attached, since its request
        holds the token.
    """
    try:
        return act()
    except HfDpError:
        raise
    except Exception as error:  # the client's HTTP library, and so its errors, changes by version
        text = scrubbed(f"{type(error).__name__}: {error}", (token,))
        said = " ".join(text.split())[:500]
        problem = PublishError(
            f"{what} {repository!r} did not succeed. {_next_move(error, repository)} ({said})"
        )
    raise problem


def _next_move(error: BaseException, repository: str) -> str:
    while not isinstance(error, HfHubHTTPError) and error.__cause__ is not None:
        error = error.__cause__  # the client wraps what fails in an upload
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, HFValidationError):
        return (
            "Expected the name of a repository, such as 'you/model': letters, digits, '-', '_' and "
            f"'.', at most 96 characters, got {repository!r}."
        )
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it to publish."
    if isinstance(error, RevisionNotFoundError):
        return "There is no such branch."
    if status == 401 or isinstance(error, LocalTokenNotFoundError):
        return f"The Hub does not accept the token. {LOG_IN}"
    if status == 403:
        return (
            f"The token may not write there. Use a name of your own, or a token with write rights "
            f"for that name. {LOG_IN}"
        )
    if isinstance(error, RepositoryNotFoundError):
        return "It does not exist, or the token may not see it. Check the name and the token."
    if status in (409, 412):
        return "Something else changed the repository meanwhile. Publish again."
    if status == 400 or isinstance(error, ValueError):
        return "The Hub refuses what was sent. Nothing was committed."
    if status is not None and status >= 500:
        return "The Hub has a problem. Publish again later; what was sent is not committed."
    return (
        f"{constants.ENDPOINT} could not be reached, or the connection broke. A commit is there as "
        "a whole or not at all. Publish again when the network is back."
    )
