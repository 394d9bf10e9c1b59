"""The digest of the code behind a study, read from source files without importing them.

A measurement stays valid as long as the code that made it does: the modules that define it and everything of the
same packages that they import, however deep. Comments, docstrings and formatting are not code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_OURS = "normkit"


def digest(modules: Iterable[str]) -> str:
    """Return the SHA-256 over the source of ``modules`` and of all they import from normkit or their own package."""
    total = hashlib.sha256()
    for name, path in sorted(closure(modules).items()):
        total.update(f"{name} {_source(path)[0]}\n".encode())
    return total.hexdigest()


def closure(modules: Iterable[str]) -> dict[str, Path]:
    """Return every module reached from ``modules`` by imports, with its file.

    Followed are imports of normkit and of the top-level packages of ``modules`` themselves, wherever in the
    source they stand. A parent package counts only when it is imported by name: its ``__init__`` runs, but only
    what is taken from it can matter.
    """
    roots = list(modules)
    tops = {_OURS, *(name.partition(".")[0] for name in roots)}
    found: dict[str, Path] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        path = _locate(name)
        if name in found or path is None:
            continue
        found[name] = path
        for imported in _source(path)[1]:
            target = _absolute(imported, name, path)
            if target.partition(".")[0] in tops:
                waiting.append(target)
    return found


def _absolute(imported: str, module: str, path: Path) -> str:
    """Resolve a leading-dots name against the module that wrote it."""
    level = len(imported) - len(imported.lstrip("."))
    if level == 0:
        return imported
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - (level - 1)]
    return ".".join([*base, imported[level:]]).strip(".")


def _locate(name: str) -> Path | None:
    """Return the file of a module, or None when ``name`` is no module (a class taken from one, say)."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    for part in rest:
        if path.name != "__init__.py":
            return None
        module, package = path.parent / f"{part}.py", path.parent / part / "__init__.py"
        path = package if package.is_file() else module
        if not path.is_file():
            return None
    return path if path.suffix == ".py" else None


def _source(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the digest of one file's code and the names it imports."""
    return _scanned(path, path.stat().st_mtime_ns)


@cache
def _scanned(path: Path, _edited: int) -> tuple[str, tuple[str, ...]]:
    tree = ast.parse(path.read_bytes(), filename=str(path))
    imports = tuple(_imports(tree))
    for node in ast.walk(tree):
        _drop_docstring(node)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imports


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            separator = "" if base.endswith(".") else "."
            yield from (f"{base}{separator}{alias.name}" for alias in node.names)


def _drop_docstring(node: ast.AST) -> None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]
