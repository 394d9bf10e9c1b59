"""Real text for the lab: bytes in two parts, one to train on and a tenth that training never sees.

By default the text is the source of the standard library of the Python that runs, which every machine has. Left
out are installed packages; test folders, which hold broken text on purpose; tables that a program wrote
(``encodings``, ``pydoc_data``); modules that name the machine they were built on; and packages that
distributions ship separately (``tkinter``, ``idlelib``, …). What remains is the same text on every machine with
the same Python version, and the recorded SHA-256 says so.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

STDLIB = "stdlib"
CONTEXT = 64  # bytes a window is judged on; a window holds one more, since every target has a predecessor
HELDOUT_WINDOWS = 256
# Why differences of held-out losses are judged to .01.
HELDOUT_TELLS = (
    f"what {HELDOUT_WINDOWS} windows can tell: their losses under two models differ by some .16 from window to window, "
    f"over √{HELDOUT_WINDOWS} = {HELDOUT_WINDOWS**0.5:g}"
)

_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
    | {"idlelib", "lib2to3", "tkinter", "turtledemo", "distutils", "ensurepip", "__phello__"}
)


class CorpusError(ValueError):
    """The text cannot be used; the message says what was found and what to give instead."""


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, split once and for all.

    Args:
        name: the path as given, or ``"stdlib"``.
        sha256: digest of everything read: of the file itself for a single file; for a folder, of every file's
            relative path, size and bytes in order.
        bytes: how many were read, both parts together.
        train, heldout: the two parts, as uint8 tensors.
    """

    name: str
    sha256: str
    bytes: int
    train: torch.Tensor = field(repr=False, compare=False)
    heldout: torch.Tensor = field(repr=False, compare=False)


class _File(NamedTuple):
    path: str
    text: bytes


def load_corpus(path: str | None = None) -> Corpus:
    """Read a file, a folder (every file in it that holds text), or the standard library's sources.

    A tenth is held out: the tenth of the files (rounded up) whose path, relative to the folder, has the smallest
    SHA-256, so that the choice depends on names alone; of a single file, its last tenth.

    Raises:
        CorpusError: the text is missing, unreadable, empty, binary or too short.

    Example:
        >>> corpus = load_corpus()
        >>> corpus.name, corpus.train.dtype
        ('stdlib', torch.uint8)
    """
    if path is None or path == STDLIB:
        return _split(STDLIB, _read(_stdlib_files()))
    root = Path(path).expanduser()
    try:
        if root.is_file():
            return _one_file(path, root.read_bytes())
        if root.is_dir():
            named = ((str(p.relative_to(root).as_posix()), p) for p in _walk(root, frozenset[str]()))
            return _split(path, _text_only(_read(named), path))
    except OSError as error:
        raise CorpusError(
            f"cannot read {path}: {error.strerror or error}; give a readable text file or folder"
        ) from error
    raise CorpusError(f"no corpus at {path}: give a text file or a folder of text files")


def unigram_entropy(text: torch.Tensor) -> float:
    """Return the entropy in nats of the bytes' frequencies: the least mean loss of any constant prediction.

    A model that ignores its context predicts one distribution q everywhere; on these bytes its loss is this
    entropy plus KL(frequencies ‖ q). A smaller loss on the same bytes therefore proves that context was used.
    """
    counts = torch.bincount(text.flatten().long(), minlength=256)
    return _entropy(counts)


def bigram_entropy(text: torch.Tensor) -> float:
    """Return the entropy in nats of a byte given the one before it, from counts over ``text`` itself.

    Counts of pairs understate it when pairs are rarer than bytes allow (65,536 cells), so give it megabytes.
    """
    x = text.flatten().long()
    pairs = torch.bincount(x[:-1] * 256 + x[1:], minlength=65536)
    return _entropy(pairs) - _entropy(pairs.view(256, 256).sum(1))


def _entropy(counts: torch.Tensor) -> float:
    p = counts[counts > 0].double() / counts.sum()
    return -float((p * p.log()).sum())


def _stdlib_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for p in _walk(root, _LEFT_OUT):
        machine_made = p.name.startswith("_sysconfigdata") or p.name in {"sitecustomize.py", "usercustomize.py"}
        if p.suffix == ".py" and not machine_made and not p.relative_to(root).parts[0].startswith("config-"):
            yield p.relative_to(root).as_posix(), p


def _walk(root: Path, without: frozenset[str]) -> Iterator[Path]:
    for entry in sorted(root.iterdir(), key=lambda p: p.name):
        if entry.is_dir() and not entry.is_symlink():  # a linked folder may lead back here
            if entry.name not in without:
                yield from _walk(entry, without)
        elif entry.is_file():
            yield entry


def _read(files: Iterable[tuple[str, Path]]) -> list[_File]:
    found = [_File(name, p.read_bytes()) for name, p in files]
    return sorted(found, key=lambda f: f.path)


def _text_only(files: Sequence[_File], path: str) -> list[_File]:
    kept = [f for f in files if f.text and _why_not_text(f.text) is None]
    if files and not kept:
        reason = "empty" if not any(f.text for f in files) else "empty or binary"
        raise CorpusError(f"every one of the {len(files)} files in {path} is {reason}: give text in UTF-8")
    return kept


def _why_not_text(text: bytes) -> str | None:
    """Say why these bytes are not text, or None. Bytes that no UTF-8 reader accepts may make up one in a hundred."""
    if b"\0" in text:
        return "it holds NUL bytes"
    wrong = text.decode("utf-8", "replace").count("\ufffd")
    return f"{wrong} places are not UTF-8" if wrong > len(text) / 100 else None


def _one_file(name: str, text: bytes) -> Corpus:
    if not text:
        raise CorpusError(f"{name} is empty: give a text file or a folder of text files")
    if (reason := _why_not_text(text)) is not None:
        raise CorpusError(f"{name} is not text ({reason}): give text in UTF-8")
    cut = len(text) - math.ceil(len(text) / 10)
    return _checked(name, hashlib.sha256(text).hexdigest(), text[:cut], text[cut:])


def _split(name: str, files: Sequence[_File]) -> Corpus:
    if not files:
        raise CorpusError(f"no files in {name}: give a text file or a folder of text files")
    if len(files) == 1:
        return _one_file(name, files[0].text)
    digest = hashlib.sha256()
    for f in files:
        digest.update(f"{f.path}\0{len(f.text)}\0".encode("utf-8", "surrogateescape") + f.text)
    by_hash = sorted(files, key=lambda f: hashlib.sha256(f.path.encode("utf-8", "surrogateescape")).digest())
    held = {f.path for f in by_hash[: math.ceil(len(files) / 10)]}
    train = b"".join(f.text for f in files if f.path not in held)
    return _checked(name, digest.hexdigest(), train, b"".join(f.text for f in files if f.path in held))


def _checked(name: str, sha256: str, train: bytes, heldout: bytes) -> Corpus:
    need = HELDOUT_WINDOWS * (CONTEXT + 1)
    why = f"held-out loss is the mean over {HELDOUT_WINDOWS} separate windows of {CONTEXT + 1} bytes"
    if len(heldout) < need:
        raise CorpusError(
            f"{name} is too short: {len(train) + len(heldout):,} bytes, of which {len(heldout):,} are held out, but "
            f"{need:,} must be ({why}); give about {10 * need:,} bytes or more"
        )
    if len(train) < need:
        raise CorpusError(
            f"{name} leaves {len(train):,} bytes to train on beside {len(heldout):,} held out; at least {need:,} are "
            f"needed, as many as are judged ({why}); give more files, or one file"
        )
    return Corpus(name, sha256, len(train) + len(heldout), _tensor(train), _tensor(heldout))


def _tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
