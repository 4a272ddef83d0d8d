"""Checkpoint files: written whole or not at all, and read without running what is in them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with what can be done about it."""


def is_full(error: BaseException) -> bool:
    """Whether this error says that there is no room for a file."""
    return isinstance(error, OSError) and error.errno in FULL


def write_checkpoint(checkpoint: Mapping[str, Any], path: str | os.PathLike) -> None:
    """Writes under another name, waits for the disk, and renames: at every moment the path holds a whole file or none.

    Raises:
        CheckpointError: when the file cannot be written; what was under the path before still is.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")  # one name: a killed process leaves one file at most
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # By way of memory: torch's own writer reports a full disk as an internal error, without its number.
        buffer = io.BytesIO()
        torch.save(dict(checkpoint), buffer)
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} could not be written: {error.strerror or error}. {_what_is_left(path, whole=path)}"
        ) from error


def read_checkpoint(
    path: str | os.PathLike, map_location: Any = "cpu", key: str | None = "state_dict"
) -> dict[str, Any]:
    """Reads tensors and plain values, and nothing that could run code; a checkpoint has this key.

    Raises:
        CheckpointError: when the file is missing, damaged, or holds anything else.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}. {_what_is_left(path)}")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("Please file")[0].strip().splitlines()
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors and plain values, and might run code. "
            f"({next((line for line in reason if 'GLOBAL' in line or 'Unsupported' in line), reason[0])})"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"{path} is damaged ({path.stat().st_size:,} bytes are left of it). {_what_is_left(path)}"
        ) from error
    if not isinstance(checkpoint, dict) or (key is not None and key not in checkpoint):
        raise CheckpointError(f"{path} is not a checkpoint: it has no {key}.")
    return checkpoint


class SafeCheckpointIO(TorchCheckpointIO):
    """What a Trainer writes and reads checkpoints with: `write_checkpoint` and `read_checkpoint`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        # Whatever weights_only says. Processes that Lightning forked hand over bare weights in a file of this name.
        return read_checkpoint(path, map_location, None if Path(path).name == ".temp.ckpt" else "state_dict")


def is_whole(path: Path) -> bool:
    """Whether a checkpoint can be read to its end."""
    try:
        return "state_dict" in torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        return False


def _what_is_left(path: Path, whole: Path | None = None) -> str:
    """Names the checkpoints beside a missing or damaged one that can be used in its place."""
    others = [other for other in sorted(path.parent.glob("*.ckpt")) if (other == whole or other != path)]
    usable = [str(other) for other in others if is_whole(other)]
    if not usable:
        return "There is no other checkpoint beside it."
    if whole is not None and str(whole) in usable:
        return f"The last good one is still there: {whole}"
    return f"Usable: {', '.join(usable)}"


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where folders can be opened."""
    with contextlib.suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
