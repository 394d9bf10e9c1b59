"""What every figure of a claim owes the report: numbers that can be drawn on its axes, and words beside them."""

from __future__ import annotations

import json
import math

from normkit.lab.claim import Claim, Evidence, Measurement
from normkit.lab.figures import Chart
from normkit.lab.settings import Settings


def check_pictures(claim: Claim, measured: list[Measurement], settings: Settings) -> None:
    """Assert that measurements are JSON and each figure, in the claim's roles and the control's, can be drawn."""
    json.dumps([m.values for m in measured], allow_nan=False)
    for plays in (claim.plays, claim.control.plays):
        figures = claim.figures(Evidence(measured, plays, settings))
        assert figures, f"{claim.id}: nothing to see"
        for figure in figures:
            assert isinstance(figure, Chart)
            assert figure.alt, f"{claim.id}: no text for those who cannot see it"
            assert figure.caption
            for panel in figure.panels:
                assert panel.x_label, panel.title
                assert panel.y_label, panel.title
                for s in panel.series:
                    assert len(s.x) == len(s.y), s.label
                    assert all(map(math.isfinite, s.y)), s.label
                    assert panel.y_scale == "linear" or min(s.y) > 0, s.label
                    assert panel.x_scale == "linear" or min(s.x) > 0, s.label
                    assert not panel.x_names or len(panel.x_names) == len(s.x), s.label
