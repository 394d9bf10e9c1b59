"""The run for machines: seconds throughout, every sample in the JSON, one line a contender in the CSV."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normkit.bench.goals import last_level_cache, losses, means, shares
from normkit.bench.measure import Measured
from normkit.bench.ratios import Ratio
from normkit.bench.roofline import Roofline, rooflines

FORMAT = 1


def to_json(
    run: Sequence[Measured], settings: dict[str, Any], environment: dict[str, Any], warnings: list[str]
) -> dict[str, Any]:
    """Return the whole run: settings, environment, raw samples, and what follows from them."""
    cache = last_level_cache()
    return {
        "format": FORMAT,
        "settings": settings,
        "environment": environment,
        "last_level_cache_bytes": cache,
        "cases": [_case(measured) for measured in run],
        "means": [asdict(mean) | {"reached": mean.reached} for mean in means(run)],
        "shares": [asdict(share) | {"reached": share.reached} for share in shares(run, cache)],
        "rooflines": [_roofline(roof) for roof in rooflines(run)],
        "losses": [
            {"case": str(loss.measured.case), "peer": loss.peer, "ratio": asdict(loss.ratio)} for loss in losses(run)
        ],
        "warnings": warnings,
    }


def _case(measured: Measured) -> dict[str, Any]:
    case = measured.case
    return {
        "op": case.op,
        "pass": case.which,
        "shape": list(case.shape.sizes),
        "heads": case.shape.heads,
        "dtype": case.dtype,
        "device": case.device,
        "bytes_moved": case.moved,
        "bytes_copied": case.copied,
        "noise": asdict(measured.noise) | {"noisy": measured.noise.noisy},
        "contenders": [_contender(measured, name) for name in measured.samples],
        "absent": dict(measured.absent),
        "failed": dict(measured.failed),
    }


def _contender(measured: Measured, name: str) -> dict[str, Any]:
    samples, ratio = measured.samples[name], measured.ratio(name)
    return {
        "name": name,
        "calls_per_sample": samples.calls,
        "seconds": list(samples.seconds),
        "median_seconds": statistics.median(samples.seconds),
        "ratio_base": measured.base(name),
        "ratio_to_normkit": None if ratio is None else asdict(ratio),
        "differs_from_normkit": ratio is not None and ratio.differs(measured.noise.again),
        "share_of_copy": asdict(measured.share(name)),
        "error_of_allowed": measured.errors[name],
    }


def _roofline(roof: Roofline) -> dict[str, Any]:
    return {
        "case": str(roof.case),
        "width": roof.case.shape.width,
        "share": asdict(roof.share),
        "held_by_a_program": roof.held,
        "goal": roof.goal,
        "reached": roof.reached,
    }


_FIELDS: tuple[str, ...] = (
    "op", "pass", "shape", "dtype", "device", "contender", "median_seconds", "ratio", "ratio_low", "ratio_high",
    "share_of_copy", "bytes_moved", "calls_per_sample", "rounds", "noisy", "reason_missing",
)  # fmt: skip


def write_csv(run: Sequence[Measured], path: Path) -> None:
    """Write a line for each contender of each case; those that are missing have a reason in place of numbers."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _FIELDS)
        writer.writeheader()
        for measured in run:
            case = measured.case
            shape = "x".join(map(str, case.shape.sizes)) + (":heads" if case.shape.heads else "")
            head = {"op": case.op, "pass": case.which, "shape": shape, "dtype": case.dtype, "device": case.device}
            head |= {"bytes_moved": case.moved, "noisy": int(measured.noise.noisy)}
            writer.writerows(head | {"contender": name} | _numbers(measured, name) for name in measured.samples)
            missing = {**measured.absent, **measured.failed}
            writer.writerows(head | {"contender": name, "reason_missing": why} for name, why in missing.items())


def _numbers(measured: Measured, name: str) -> dict[str, Any]:
    samples = measured.samples[name]
    ratio: Ratio | None = measured.ratio(name)
    of = {} if ratio is None else {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
    return of | {
        "median_seconds": statistics.median(samples.seconds),
        "share_of_copy": measured.share(name).median,
        "calls_per_sample": samples.calls,
        "rounds": len(samples.seconds),
    }
