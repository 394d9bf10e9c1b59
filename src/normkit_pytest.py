"""pytest plugin: the fixture ``norm_conformance`` checks somebody's norm.

    def test_my_norm(norm_conformance):
        norm_conformance(my_norm, spec=nk.OLMO2)

pytest loads plugins in every run of every project, so this module lies outside the package (importing anything of
`normkit` imports torch) and imports nothing but pytest until a test asks for the fixture. It adds no hook, option
or marker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from normkit.testing import Conformance


@pytest.fixture
def norm_conformance() -> Callable[..., Conformance]:
    """Return a function with the arguments of `normkit.testing.check` that fails the test with one readable report."""

    def run(fn: object, *arguments: Any, **options: Any) -> Conformance:
        from normkit.testing import check

        found = check(fn, *arguments, **options)
        if not found.ok:
            pytest.fail(found.report(), pytrace=False)
        return found

    return run
