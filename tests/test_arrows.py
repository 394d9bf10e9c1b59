"""Imports point one way: the picture in ARCHITECTURE.md, enforced."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"

# Lowest first; the longest matching prefix decides. Modules of one rank may import each other, but never in a circle.
RANKS = [
    ["normkit.spec", "normkit.environment"],
    ["normkit.conventions", "normkit.coverage", "normkit.checks"],
    ["normkit.kernels.statistics", "normkit.kernels.rounding", "normkit.kernels.layout"],
    ["normkit.kernels.column_layout"],
    ["normkit.kernels.reference"],
    ["normkit.kernels.contract"],
    ["normkit.kernels.refusals"],
    ["normkit.kernels.cpu", "normkit.kernels.gpu"],
    ["normkit.kernels.registry"],
    ["normkit.kernels"],
    ["normkit.ops"],
    ["normkit.functional"],
    ["normkit.modules"],
    ["normkit.placement"],
    ["normkit"],
    ["normkit.testing.truth", "normkit.testing.inputs", "normkit.testing.ulp"],
    ["normkit.testing.subject", "normkit.testing.gates"],
    ["normkit.testing.judges"],
    ["normkit.testing.layouts", "normkit.testing.shrink", "normkit.testing.operators"],
    ["normkit.testing.cases"],
    ["normkit.testing.cases_backward", "normkit.testing.conformance", "normkit.testing.errors"],
    ["normkit.testing.check", "normkit.testing.error_page"],
    ["normkit.testing"],
    ["normkit.testing.command"],
    ["normkit.surgery.findings", "normkit.surgery.stand_in", "normkit.surgery.probes", "normkit.surgery.candidates"],
    ["normkit.surgery.epsilon", "normkit.surgery.screens", "normkit.surgery.accuracy"],
    ["normkit.surgery.search", "normkit.surgery.fused"],
    ["normkit.surgery.identify"],
    ["normkit.surgery.flow.record", "normkit.surgery.flow"],
    ["normkit.surgery.flow.paths"],
    ["normkit.surgery.flow.sightings"],
    ["normkit.surgery.flow.stream"],
    ["normkit.surgery.flow.positions"],
    ["normkit.surgery.auditing.example", "normkit.surgery.auditing.untouched"],
    ["normkit.surgery.auditing.finding", "normkit.surgery.auditing.checkpoint"],
    ["normkit.surgery.auditing.load"],
    ["normkit.surgery.auditing.norm", "normkit.surgery.auditing"],
    ["normkit.surgery.auditing.asked"],
    ["normkit.surgery.auditing.notes", "normkit.surgery.auditing.survey", "normkit.surgery.auditing.outline"],
    ["normkit.surgery.auditing.rules"],
    ["normkit.surgery.audit", "normkit.surgery.auditing.report"],
    ["normkit.surgery.auditing.loaded"],
    ["normkit.surgery.auditing.command"],
    ["normkit.surgery.proof", "normkit.surgery.report"],
    ["normkit.surgery.swap"],
    ["normkit.surgery.no_decay", "normkit.surgery.folding.flow", "normkit.surgery.folding.linears"],
    ["normkit.surgery.folding.unseen"],
    ["normkit.surgery.folding.rules", "normkit.surgery.folding.forwards", "normkit.surgery.folding.values"],
    ["normkit.surgery.folding.norms", "normkit.surgery.folding.permission", "normkit.surgery.folding.wide"],
    ["normkit.surgery.folding.trace", "normkit.surgery.folding.report"],
    ["normkit.surgery.folding"],
    ["normkit.surgery.fold"],
    ["normkit.surgery"],
    ["normkit.watching.reading", "normkit.watching.attention", "normkit.watching.taps"],
    ["normkit.watching.log", "normkit.watching.flags"],
    ["normkit.watching.report"],
    ["normkit.watching.session"],
    ["normkit.watching"],
    ["normkit.bench.shapes", "normkit.bench.timing", "normkit.bench.ratios", "normkit.bench"],
    ["normkit.bench.truth", "normkit.bench.onnx_session", "normkit.bench.device", "normkit.bench.peer"],
    ["normkit.bench.gpu_peers"],
    ["normkit.bench.peers"],
    ["normkit.bench.measure"],
    ["normkit.bench.goals", "normkit.bench.figure", "normkit.bench.roofline"],
    ["normkit.bench.table", "normkit.bench.export"],
    ["normkit.bench.command"],
    ["normkit.lab.settings", "normkit.lab.draws", "normkit.lab.verdict", "normkit.lab.figures", "normkit.lab.fit"],
    ["normkit.lab.numbers"],
    ["normkit.lab.corpus"],
    ["normkit.lab.claim", "normkit.lab.untestable"],
    ["normkit.lab.language", "normkit.lab.rule_changes"],
    [
        "normkit.lab.model.attention",
        "normkit.lab.model.feedforward",
        "normkit.lab.model.norms",
        "normkit.lab.model.steps",
        "normkit.lab.model",
    ],
    ["normkit.lab.model.initial"],
    ["normkit.lab.model.transformer", "normkit.lab.model.fresh"],
    ["normkit.lab.model.training", "normkit.lab.model.zoo", "normkit.lab.model.padded"],
    ["normkit.lab.model.ngpt", "normkit.lab.model.inside", "normkit.lab.grid.reading"],
    ["normkit.lab.grid.figures"],
    ["normkit.lab.claims"],
    ["normkit.lab.runs.lines", "normkit.lab.runs.lock", "normkit.lab.runs.code", "normkit.lab.runs.interrupts"],
    ["normkit.lab.runs.judged", "normkit.lab.runs", "normkit.lab"],
    ["normkit.lab.grid.options", "normkit.lab.grid.curves", "normkit.lab.grid"],
    ["normkit.lab.grid.own_models", "normkit.lab.grid.shards"],
    ["normkit.lab.grid.study"],
    ["normkit.lab.grid.estimate"],
    ["normkit.lab.grid.verdicts"],
    ["normkit.lab.runs.plan", "normkit.lab.runs.folder", "normkit.lab.report"],
    ["normkit.lab.runs.worker"],
    ["normkit.lab.runs.pool", "normkit.lab.runs.pace"],
    ["normkit.lab.runs.rendering"],
    ["normkit.lab.runs.engine"],
    ["normkit.lab.runs.ranks"],
    ["normkit.lab.terminal.tables", "normkit.lab.terminal.compare", "normkit.lab.terminal"],
    ["normkit.lab.terminal.progress"],
    ["normkit.lab.terminal.commands"],
    ["normkit.lab.terminal.following"],
    ["normkit.lab.terminal.train"],
    ["normkit.cli"],
]


def rank(module: str) -> int:
    """Return the rank of the longest listed prefix of ``module``."""
    matches = [
        (len(prefix), level)
        for level, prefixes in enumerate(RANKS)
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    return max(matches)[1]


def imports(source: str, known: set[str]) -> set[str]:
    """Return every module of ours that ``source`` imports, lazily or not; ``from pkg import module`` is the module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide arrows"
            base = node.module or ""
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names}
    return {name for name in found if name.split(".")[0] == "normkit"}


def modules() -> dict[str, str]:
    """Return name → source of every module."""
    result: dict[str, str] = {}
    for path in sorted((SRC / "normkit").rglob("*.py")):
        parts = list(path.relative_to(SRC).with_suffix("").parts)
        result[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return result


def violations(sources: dict[str, str]) -> list[str]:
    """Return every arrow that points up, and one circle if there is any."""
    known = set(sources)
    graph = {name: imports(source, known) - {name} for name, source in sources.items()}
    up = [f"{a} → {b}" for a, targets in graph.items() for b in sorted(targets) if rank(b) > rank(a)]
    return up + circle(graph)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return one import circle, as text, or nothing."""
    state: dict[str, int] = {}

    def visit(node: str, path: list[str]) -> list[str]:
        state[node] = 1
        for target in sorted(graph.get(node, ())):
            if state.get(target) == 1:
                return [" → ".join([*path[path.index(target) :], target])] if target in path else []
            if target not in state and (found := visit(target, [*path, target])):
                return found
        state[node] = 2
        return []

    for node in sorted(graph):
        if node not in state and (found := visit(node, [node])):
            return found
    return []


def test_arrows_point_down() -> None:
    assert violations(modules()) == []


@pytest.mark.slow
def test_the_test_can_fail() -> None:
    sources = modules()
    assert violations({**sources, "normkit.spec": "from normkit.modules.rows import RMSNorm"})
    assert violations(
        {
            **sources,
            "normkit.modules.rows": "import normkit.modules.qk",
            "normkit.modules.qk": "import normkit.modules.rows",
        }
    )
    lazy = "def f():\n    from normkit import cli"
    assert violations({**sources, "normkit.kernels.reference": lazy})


def test_no_module_is_called_utils_and_files_stay_short() -> None:
    for path in (SRC / "normkit").rglob("*.py"):
        assert path.stem not in {"utils", "util", "helpers", "misc", "common"}, path
        assert len(path.read_text().splitlines()) <= 420, f"{path} has grown past one idea"
