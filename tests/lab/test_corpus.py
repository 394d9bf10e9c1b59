import hashlib
import math
from pathlib import Path

import pytest
import torch

from normkit.lab.corpus import (
    CONTEXT,
    HELDOUT_WINDOWS,
    CorpusError,
    bigram_entropy,
    load_corpus,
    unigram_entropy,
)

NEED = HELDOUT_WINDOWS * (CONTEXT + 1)
LINE = b"the quick brown fox jumps over the lazy dog\n"


def text(size: int) -> bytes:
    return (LINE * (size // len(LINE) + 1))[:size]


def folder(root: Path, sizes: dict[str, int]) -> Path:
    for name, size in sizes.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text(size))
    return root


def test_the_default_is_the_standard_library_and_always_the_same():
    a, b = load_corpus(), load_corpus("stdlib")
    assert a.name == "stdlib"
    assert a == b
    assert torch.equal(a.train, b.train)
    assert torch.equal(a.heldout, b.heldout)
    assert len(a.train) + len(a.heldout) == a.bytes > 2_000_000
    assert a.train.dtype == torch.uint8
    assert b"def dumps(" in a.train.numpy().tobytes() + a.heldout.numpy().tobytes()  # json's


def test_nothing_installed_or_generated_is_in_the_default(monkeypatch, tmp_path):
    root = folder(
        tmp_path,
        {f"m{i}.py": 40_000 for i in range(10)}
        | {"site-packages/x.py": 9, "test/y.py": 9, "tkinter/z.py": 9, "_sysconfigdata__linux_.py": 9}
        | {"encodings/cp.py": 9, "notes.txt": 9, "config-3.11-x/q.py": 9},
    )
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    assert load_corpus().bytes == 400_000


def test_a_file_keeps_its_last_tenth_back_and_its_own_digest(tmp_path):
    content = text(10 * NEED + 3)
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    corpus = load_corpus(str(path))
    held = math.ceil(len(content) / 10)
    assert corpus.heldout.numpy().tobytes() == content[-held:]
    assert corpus.train.numpy().tobytes() == content[:-held]
    assert corpus.sha256 == hashlib.sha256(content).hexdigest()


def test_a_folder_holds_back_a_tenth_of_its_files_by_name_alone(tmp_path):
    names = {f"d{i % 3}/f{i}.txt": NEED + i for i in range(20)}
    a = load_corpus(str(folder(tmp_path / "a", names)))
    # Other contents under the same names: the same files are held out.
    b = load_corpus(str(folder(tmp_path / "b", {name: size + 1000 for name, size in names.items()})))
    assert len(b.heldout) - len(a.heldout) == 2 * 1000
    assert a.sha256 != b.sha256
    assert len(a.train) + len(a.heldout) == sum(names.values())


def test_a_moved_byte_or_a_renamed_file_is_another_digest(tmp_path):
    sizes = {f"f{i}": 2 * NEED for i in range(10)}
    base = load_corpus(str(folder(tmp_path / "a", sizes))).sha256
    assert load_corpus(str(folder(tmp_path / "b", sizes))).sha256 == base
    renamed = dict(zip(["g0", *list(sizes)[1:]], sizes.values(), strict=True))
    assert load_corpus(str(folder(tmp_path / "c", renamed))).sha256 != base


def test_binary_files_in_a_folder_are_passed_over(tmp_path):
    root = folder(tmp_path, {f"f{i}.txt": 2 * NEED for i in range(10)})
    (root / "image.png").write_bytes(b"\x89PNG\0\0" * 100)
    assert load_corpus(str(root)).bytes == 20 * NEED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"abc\0def" * 10_000, "NUL"),
        (bytes(range(128, 256)) * 2000, "not UTF-8"),
        (text(10 * NEED - 20), f"{NEED:,} must be"),
    ],
    ids=["empty", "nul", "latin", "short"],
)
def test_an_unusable_file_is_refused_with_the_reason(tmp_path, content, message):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        load_corpus(str(path))


def test_missing_unreadable_and_empty_places_are_refused(tmp_path, monkeypatch):
    with pytest.raises(CorpusError, match=r"no corpus at .*nowhere"):
        load_corpus(str(tmp_path / "nowhere"))
    with pytest.raises(CorpusError, match="no files"):
        load_corpus(str(tmp_path))
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    with pytest.raises(CorpusError, match="every one of the 1 files"):
        load_corpus(str(tmp_path))

    def denied(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(CorpusError, match=r"cannot read .*Permission denied"):
        load_corpus(str(tmp_path / "a.bin"))


def test_a_folder_whose_held_out_file_is_the_large_one_leaves_too_little(tmp_path):
    held = min(("a", "b"), key=lambda name: hashlib.sha256(name.encode()).digest())
    other = "b" if held == "a" else "a"
    with pytest.raises(CorpusError, match="to train on"):
        load_corpus(str(folder(tmp_path, {held: 2 * NEED, other: 10})))


def test_unigram_entropy_is_the_least_loss_of_a_constant_prediction():
    x = torch.tensor(list(b"aaab"), dtype=torch.uint8)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_entropy(x) == pytest.approx(expected, rel=1e-12)
    assert unigram_entropy(torch.arange(256, dtype=torch.uint8)) == pytest.approx(math.log(256), rel=1e-12)


def test_bigram_entropy_sees_what_the_byte_before_tells():
    alternating = torch.tensor(list(b"ab" * 500), dtype=torch.uint8)
    assert bigram_entropy(alternating) == pytest.approx(0.0, abs=1e-12)
    noise = torch.randint(0, 4, (400_000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert bigram_entropy(noise) == pytest.approx(math.log(4), abs=1e-3)
