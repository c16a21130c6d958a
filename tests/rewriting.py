"""Edit a ``privacy.json`` by hand, as somebody would who also makes its digests anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_dp.statement.digests import digest_of


def rewrite(path: Path, change: Callable[[Any], Any], *, renew: bool = True) -> None:
    """Change a document in place. Args: renew: whether its digest then agrees with it again."""
    data = json.loads(path.read_text())
    change(data)
    if renew and isinstance(data, dict):
        data.pop("digest", None)
        data["digest"] = digest_of(data)
    path.write_text(json.dumps(data))
