"""Text for terminals and pipes: plain aligned columns, whole words, no colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from normkit.lab.language import Words
from normkit.lab.numbers import number
from normkit.lab.runs.judged import NOT_IN_QUICK, Judged, summary_of
from normkit.lab.runs.plan import Plan


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns; the last column is as long as it is."""
    widths = [max(cell_len(row[i]) for row in (head, *rows)) for i in range(len(head) - 1)]
    lines = [head, ["─" * cell_len(word) for word in head], *rows]
    return [
        "  ".join([*(padded(cell, width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in lines
    ]


def padded(text: str, width: int) -> str:
    """Return ``text`` filled up to ``width`` columns of a terminal, in which a Chinese character takes two."""
    return text + " " * (width - cell_len(text))


def seconds(value: float) -> str:
    """Return a duration as people read it."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 90:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def verdict(judged: Judged) -> str:
    """Return the verdict in English words, which `Words` translate."""
    if judged.full_only:
        return "full only"
    if judged.judgement is None:
        return "could not run" if judged.error else "not measured"
    return judged.judgement.verdict.value


def control(judged: Judged, words: Words) -> str:
    """Say what the control came to."""
    if judged.control_judgement is None:
        return "–"
    flip = "" if judged.flipped else f" ({words('does not flip')})"
    return f"{words(judged.control_judgement.verdict)}{flip}"


def told(judged: Judged, words: Words) -> str:
    """Return the measured result in a line, or the reason why there is none."""
    if judged.full_only:
        return words(NOT_IN_QUICK)
    return words.told(summary_of(judged)).text if judged.claim.study is not None else words.said(judged.claim).reason


def verdict_table(all_judged: Sequence[Judged], words: Words) -> list[str]:
    """Return one line a claim: verdict, control, the numbers."""
    rows = [
        [j.claim.id, words(verdict(j)), control(j, words), words.said(j.claim).title, told(j, words)]
        for j in all_judged
    ]
    return table([words(head) for head in ("claim", "verdict", "control", "title", "measured")], rows)


def plan_table(plan: Plan) -> list[str]:
    """Return one line a study: its claims, how much there is to measure and how long it takes."""
    rows = [
        [
            ", ".join(claim.id for claim in step.claims),
            step.study.id,
            str(len(step.cells)),
            str(len(step.cached)),
            seconds(step.seconds) + (" (alone)" if step.study.timing and step.missing else ""),
        ]
        for step in plan.steps
    ]
    left: dict[str, list[str]] = {}
    for claim in plan.full_only:
        left.setdefault(claim.study.id, []).append(claim.id)
    rows += [[", ".join(claims), study, "0", "0", "nothing: full only"] for study, claims in left.items()]
    rows += [[claim.id, "–", "0", "0", "nothing: not testable"] for claim in plan.untestable]
    return table(["claims", "study", "measurements", "cached", "to measure"], rows)


def plan_line(plan: Plan, jobs: int) -> str:
    """Return the plan in one sentence."""
    cached = plan.cells - len(plan.missing)
    left = f" ({len(plan.full_only)} of them full only)" if plan.full_only else ""
    return (
        f"{len(plan.claims)} claims{left}, {plan.cells} measurements, {cached} of them cached; "
        f"about {seconds(plan.seconds(jobs))} of measuring with {jobs} worker{'s' if jobs > 1 else ''}"
    )


_LEGEND = [
    "claim: verdict in a | in b",
    "       criterion: mean (range) in a | in b  b − a over shared seeds [95 % interval], * if that leaves out zero",
    "",
]


def comparison(differences: Sequence[Mapping[str, Any]], everything: bool = False) -> list[str]:
    """Return the comparison of two runs: what differs, in full if ``everything``, and how much does not.

    After the means with their ranges stands the paired difference b − a with its 95 % interval, and an asterisk where
    that interval leaves out zero.
    """
    lines: list[str] = []
    for entry in differences:
        if not (everything or entry["differs"] or entry["rule_changed"] or entry["a"] is None or entry["b"] is None):
            continue
        mark = "≠" if entry["changed"] else "=" if entry["a"] == entry["b"] else " "
        rule = "  (the rule changed)" if entry["rule_changed"] else ""
        lines.append(
            f"{entry['id']:<4} {mark}  {entry['a'] or 'not measured'}  |  {entry['b'] or 'not measured'}{rule}"
        )
        lines.extend(_compared(c) for c in entry["criteria"] if everything or entry["changed"] or c["differs"])
    both = [entry for entry in differences if entry["a"] and entry["b"] and entry["criteria"]]
    criteria = [c for entry in both for c in entry["criteria"] if c["difference"] is not None]
    changed, moved = sum(bool(e["changed"]) for e in both), sum(bool(c["differs"]) for c in criteria)
    seeds = sorted({seed for c in criteria for seed in c["difference"]["seeds"]})
    shared = f"at the seeds that both have ({', '.join(map(str, seeds))})" if seeds else "for want of shared seeds"
    return [
        *(_LEGEND if lines else []),
        *lines,
        *([""] if lines else []),
        f"verdicts: {changed} of {len(both)} that both runs have differ",
        f"criteria: {moved} of {len(criteria)} differ that can be paired {shared}",
    ]


def _compared(c: Mapping[str, Any]) -> str:
    rule = ", by the corrected rule" if c.get("rule") == "corrected" else ""
    line = f"       {c['name']}{rule}: {_mean(c['a'])}  |  {_mean(c['b'])}"
    if c["outcomes"][0] != c["outcomes"][1] and None not in c["outcomes"]:
        line += f"  ({c['outcomes'][0]} → {c['outcomes'][1]})"
    found = c["difference"]
    if found is None:
        return line
    if len(found["seeds"]) == 1:
        return f"{line}  b − a {number(found['mean'])} (1 seed)"
    star = "" if found["low"] <= 0.0 <= found["high"] else " *"
    span = f"[{number(found['low'])}, {number(found['high'])}]"
    return f"{line}  b − a {number(found['mean'])} {span} ({len(found['seeds'])} seeds){star}"


def _mean(values: Sequence[float | None] | None) -> str:
    if not values:
        return "–"
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return "not finite"
    mean = sum(known) / len(known)
    return number(mean) if len(known) == 1 else f"{number(mean)} ({number(min(known))} to {number(max(known))})"
