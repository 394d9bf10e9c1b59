"""The catalogue: every claim of the lab, found in the modules of this package.

A module that holds claims names them in ``CLAIMS``; a file added here is a claim added to the lab. Sentences that no
experiment can settle stand among them: the article is answered in full, also where the answer is not a number.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from collections.abc import Sequence
from types import ModuleType

from normkit.lab.claim import Study
from normkit.lab.untestable import Entry


class UnknownClaimError(ValueError):
    """A claim was asked for that the lab does not have."""


def catalogue() -> tuple[Entry, ...]:
    """Return all claims, in the order of their modules' names."""
    return tuple(claim for claim, _ in located())


def find(ids: Sequence[str]) -> tuple[Entry, ...]:
    """Return the named claims in the catalogue's order; all of them when none is named.

    Raises:
        UnknownClaimError: naming the ids that come near.
    """
    return tuple(claim for claim, _ in select(located(), ids))


def located() -> list[tuple[Entry, str]]:
    """Return all claims, each with the name of the module that holds it."""
    names = sorted(f"{__name__}.{info.name}" for info in pkgutil.iter_modules(__path__))
    return collect([importlib.import_module(name) for name in names])


def collect(modules: Sequence[ModuleType]) -> list[tuple[Entry, str]]:
    """Return the claims of ``modules``; names are unique, and one study id means one study."""
    found = [(claim, module.__name__) for module in modules for claim in getattr(module, "CLAIMS", ())]
    claims: dict[str, str] = {}
    studies: dict[str, Study] = {}
    for claim, module in found:
        other = claims.setdefault(claim.id, module)
        assert other == module, f"claim {claim.id} stands in {other} and in {module}"
        study = claim.study
        assert study is None or studies.setdefault(study.id, study) is study, f"two studies {study.id}"
    assert len(claims) == len(found), "a module names a claim twice"
    return found


def select(found: Sequence[tuple[Entry, str]], ids: Sequence[str]) -> list[tuple[Entry, str]]:
    """Return the entries whose claims are named, upper or lower case; all when none is named.

    A name without its last letter means the whole family: ``F3`` is F3a, F3b, …

    Raises:
        UnknownClaimError: naming the ids that come near.
    """
    known = {claim.id.lower(): claim.id for claim, _ in found}
    named = {low: {name} for low, name in known.items()}
    for low, name in known.items():
        if re.fullmatch(r".*\d[a-z]", low) and low[:-1] not in known:
            named.setdefault(low[:-1], set()).add(name)
    unknown = [name for name in ids if name.lower() not in named]
    if unknown:
        raise UnknownClaimError("; ".join(_unknown(name, known) for name in unknown))
    wanted = {claim for name in ids for claim in named[name.lower()]}
    return [entry for entry in found if not ids or entry[0].id in wanted]


def _unknown(name: str, known: dict[str, str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(known[n] for n in near)}?" if near else f"there are {', '.join(known.values())}"
    return f"no claim {name!r}: {hint}"
