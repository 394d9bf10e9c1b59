"""Reading a compiler's assembly: functions, the loops in them, and what those loops do with their data."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# On x86 a jump is `jne .LBB0_3`, on AArch64 `b.lt .LBB0_3`, `cbz x0, .LBB0_3`, `tbnz w1, #3, .LBB0_3`.
JUMP = re.compile(r"^(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)$")
ALWAYS = {"jmp", "b", "retq", "ret", "ud2", "brk"}
CALL = re.compile(r"^(?:callq?|bl|blr)$")
LABEL = re.compile(r"^(\.L\w+):")
NAME = re.compile(r"^([A-Za-z_]\w*):")
# Arithmetic on one number instead of a vector.
SCALAR = re.compile(
    r"^(?:v(?:add|sub|mul|div|max|min|sqrt|rcp14|rsqrt14|fn?m(?:add|sub)\d+)s[sdh]|vcvts[sdh]2s[sdh])\b"
    r"|^f(?:add|sub|mul|div|max|min|maxnm|minnm|madd|msub|nmadd|nmsub|sqrt|cvt)\s+[shd]\d"
)
FUSED = re.compile(r"^(?:vfn?m(?:add|sub)\d+ps|fml[as])\b")
PACKED = re.compile(r"^(?:v(?:add|sub|mul|max)ps|vfn?m(?:add|sub)\d+ps|f(?:add|sub|mul|mla|mls|abs|cmgt)\s+v)")
# How threads draw their next piece: a loop over the threads' shares, not over data.
DRAWING = re.compile(r"^(?:lock\b|ldadd|ldaxr|ldxr|stlxr|stxr)")
LANE_BY_LANE = re.compile(r"^v?pextr[bwd]|^v?pinsr[bwd]|^vextractps|^vinsertps|^(?:ld1|st1)\s+\{ v\d+\.[bhs] \}\[")


@dataclass
class Block:
    """Instructions without a jump between them, and where they may go on."""

    lines: list[str] = field(default_factory=list)
    next: set[int] = field(default_factory=set)


def functions(assembly: str) -> dict[str, list[Block]]:
    """Return the blocks of every function."""
    found: dict[str, list[str]] = {}
    name = ""
    for raw in assembly.splitlines():
        line = re.sub(r"\s+", " ", raw.split("//")[0].strip())
        if start := NAME.match(line):
            name = start.group(1)
            found[name] = []
        elif line.startswith(".Lfunc_end") or line.startswith(".section"):
            name = ""
        elif name and line and (not line.startswith(".") or LABEL.match(line)):
            found[name].append(line)
    return {name: _blocks(lines) for name, lines in found.items() if lines}


def _blocks(lines: list[str]) -> list[Block]:
    blocks, at = [Block()], {}
    for line in lines:
        if label := LABEL.match(line):
            if blocks[-1].lines:
                blocks.append(Block())
            at[label.group(1)] = len(blocks) - 1
            continue
        blocks[-1].lines.append(line)
        operation = line.split()[0]
        if JUMP.match(operation) or operation in ALWAYS:
            blocks.append(Block())
    for number, block in enumerate(blocks):
        operation, *operands = (block.lines or ["nop"])[-1].replace(",", " ").split()
        if JUMP.match(operation) and operands and operands[-1] in at:
            block.next.add(at[operands[-1]])
        if operation not in ALWAYS and number + 1 < len(blocks):
            block.next.add(number + 1)
    return blocks


def innermost_loops(blocks: list[Block]) -> list[list[str]]:
    """Return the instructions of each loop that has no other within: blocks dominated by the one jumped back to."""
    dominators = _dominators(blocks)
    loops: dict[int, set[int]] = {}
    for tail, block in enumerate(blocks):
        for head in block.next & dominators[tail]:
            body, waiting = {head}, [tail]
            while waiting:
                here = waiting.pop()
                if here not in body:
                    body.add(here)
                    waiting += [n for n, other in enumerate(blocks) if here in other.next]
            loops[head] = loops.get(head, set()) | body
    inner = [body for head, body in loops.items() if not any(other in body for other in loops if other != head)]
    return [[line for number in sorted(body) for line in blocks[number].lines] for body in inner]


def _dominators(blocks: list[Block]) -> list[set[int]]:
    everything = set(range(len(blocks)))
    before = [{n for n, other in enumerate(blocks) if here in other.next} for here in everything]
    result = [{0}, *(everything for _ in blocks[1:])]
    changed = True
    while changed:
        changed = False
        for here in range(1, len(blocks)):
            known = [result[n] for n in before[here]]
            new = {here} | (set.intersection(*known) if known else set())
            if new != result[here]:
                result[here], changed = new, True
    return result


def operations(lines: list[str], pattern: re.Pattern[str]) -> list[str]:
    return [line for line in lines if pattern.match(line)]


def faults(assembly: str, register: str) -> list[str]:
    """Return what a kernel's hot loops do that they should not: anything but full vectors in ``register``.

    A hot loop is an innermost loop that computes floating-point numbers or touches full vectors. The loop over rows
    does neither: it calls the code of a row, or has that code's loops within.
    """
    found: list[str] = []
    code = functions(assembly)
    for name, blocks in code.items():
        for loop in innermost_loops(blocks):
            calls = [line for line in loop if CALL.match(line.split()[0])]
            packed, single = operations(loop, PACKED), operations(loop, SCALAR)
            if not packed and not single and not any(register in line for line in loop):
                found += [] if calls or operations(loop, DRAWING) else [f"{name}: a loop moves single elements: {loop}"]
                continue
            found += [f"{name}: a hot loop calls: {line}" for line in calls]
            found += [f"{name}: a hot loop computes single numbers: {line}" for line in single]
            found += [f"{name}: a narrow vector: {line}" for line in packed if register not in line]
            if not packed:
                found.append(f"{name}: a loop over data computes no vector: {loop}")
        lines = [line for block in blocks for line in block.lines]
        found += [f"{name}: lane by lane: {line}" for line in operations(lines, LANE_BY_LANE)]
    outside = set(re.findall(r"(?<![\w.])([A-Za-z_]\w*)@(?:PLT|GOT\w*)", assembly)) - set(code)
    return found + [f"calls out: {name}" for name in outside if not name.startswith((".L", "_GLOBAL_OFFSET_TABLE_"))]


def hot_loops(assembly: str) -> list[list[str]]:
    """Return the innermost loops that compute."""
    loops = [loop for blocks in functions(assembly).values() for loop in innermost_loops(blocks)]
    return [loop for loop in loops if operations(loop, PACKED)]
