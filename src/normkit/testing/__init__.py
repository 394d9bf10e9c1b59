"""The conformance kit: reported faults, hard rows, layouts and error bounds, run on anybody's norm.

`check` runs them; the pytest plugin `normkit_pytest` offers them as the fixture ``norm_conformance``.
"""

from normkit.testing.check import check as check
from normkit.testing.conformance import Conformance as Conformance
from normkit.testing.conformance import Failure as Failure
from normkit.testing.inputs import Inputs as Inputs
from normkit.testing.inputs import adversarial as adversarial
