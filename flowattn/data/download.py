"""Files from elsewhere, checked before anybody reads them."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

SECONDS = 30  # without a byte


class DownloadError(RuntimeError):
    """A file that could not be had, or is not the one it should be; with what can be done about it."""


def sha256_of(path: str | os.PathLike) -> str:
    """The SHA-256 sum of a file, in hexadecimal.

    Example:
        >>> sha256_of(os.devnull)[:8]
        'e3b0c442'
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, path: str | os.PathLike, sha256: str) -> Path:
    """Makes sure that the path holds the file with this sum, and fetches it from the address if not.

    It is written under another name and renamed when its sum is right: the path never holds half a file or a wrong
    one. A file that is already there and has another sum is left alone.

    Raises:
        DownloadError: when the file cannot be fetched, or has another sum.
    """
    path = Path(path)
    if path.exists():
        found = sha256_of(path)
        if found == sha256:
            return path
        raise DownloadError(
            f"{path} is not the file it should be: its SHA-256 is {found}, not {sha256}. Move it away to fetch it anew."
        )

    def fetch(temporary: Path) -> None:
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as source, temporary.open("wb") as file:
                while block := source.read(1 << 20):
                    file.write(block)
        except (urllib.error.URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise DownloadError(
                f"{url} could not be fetched: {reason}. Get the file by other means and put it at {path}; "
                f"its SHA-256 must be {sha256}."
            ) from error
        found = sha256_of(temporary)
        if found != sha256:
            raise DownloadError(
                f"{url} gave another file than expected: its SHA-256 is {found}, not {sha256}. It was not kept."
            )

    write_atomically(path, fetch)
    return path


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a file of another name in the same folder, and gives it its name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
