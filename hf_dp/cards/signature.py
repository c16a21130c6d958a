"""Who vouches for a ``privacy.json``: a signature by an SSH key, made and checked by ssh-keygen.

Digests show that files belong together. Only a signature shows that they come from somebody: who
changes a file can write new digests, but not sign them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hf_dp.errors import ConfigError
from hf_dp.statement.record import FILE_NAME

SIGNATURE = f"{FILE_NAME}.sig"
NAMESPACE = "hf_dp"  # so that a signature of something else cannot be passed off as one of this


@dataclass(frozen=True)
class Signed:
    """What ssh-keygen says of a signature.

    Attributes:
        good: whether it is a signature of these bytes (by somebody).
        trusted: whether it is by the identity that was asked for.
        words: what ssh-keygen said.
    """

    good: bool
    trusted: bool
    words: str


def sign(document: bytes, key: str | os.PathLike[str]) -> bytes:
    """Return the signature of a ``privacy.json``. Args: key: an SSH private key's file.

    Raises: ConfigError when ssh-keygen is missing or refuses the key.
    """
    if not Path(key).is_file():
        raise ConfigError(
            f"Expected --sign-with to be the file of an SSH private key, got {str(key)!r}. "
            "`ssh-keygen -t ed25519` makes one."
        )
    done = _ssh_keygen(["-Y", "sign", "-f", str(key), "-n", NAMESPACE], document)
    if done.returncode:
        raise ConfigError(
            f"ssh-keygen could not sign with {Path(key).name}: {_words(done)}. Give an SSH private "
            "key that it can read (one with a passphrase from ssh-agent)."
        )
    return done.stdout


def check(
    document: bytes,
    signature: Path,
    allowed_signers: str | os.PathLike[str] | None = None,
    identity: str | None = None,
) -> Signed:
    """Return what ssh-keygen says of a signature.

    Args:
        allowed_signers: a file of lines "identity key-type key", as ssh-keygen reads it.
        identity: who is expected to have signed. Without both nobody is trusted.

    Raises: ConfigError when ssh-keygen is missing.
    """
    who = ["-n", NAMESPACE, "-s", str(signature)]
    if allowed_signers is None or identity is None:
        done = _ssh_keygen(["-Y", "check-novalidate", *who], document)
        return Signed(done.returncode == 0, False, _words(done))
    asked = ["-Y", "verify", "-f", str(allowed_signers), "-I", identity, *who]
    done = _ssh_keygen(asked, document)
    return Signed(done.returncode == 0, done.returncode == 0, _words(done))


def _ssh_keygen(words: list[str], document: bytes) -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise ConfigError(
            "Signatures need ssh-keygen, which is not on the PATH. Install OpenSSH 8.2 or newer."
        )
    return subprocess.run([program, *words], input=document, capture_output=True, check=False)


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    return " ".join((done.stdout + done.stderr).decode(errors="replace").split())
