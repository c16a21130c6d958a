"""Edit a ``privacy.json`` by hand, as somebody would who also makes its digests anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_dp.statement.digests import PARTS, digest_of


def rewrite(path: Path, change: Callable[[Any], Any], *, renew: bool = True) -> None:
    """Change a document in place. Args: renew: whether its digests then agree with it again."""
    data = json.loads(path.read_text())
    change(data)
    if renew and isinstance(data, dict) and isinstance(data.get("digests"), dict):
        data["digests"] |= {part: digest_of(data[part]) for part in PARTS if part in data}
    path.write_text(json.dumps(data))
