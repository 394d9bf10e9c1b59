"""On somebody's model: what its norms compute, found by behaviour, and fused operators put in their place."""

from normkit.surgery.findings import Evidence as Evidence
from normkit.surgery.findings import Identified as Identified
from normkit.surgery.findings import Unidentified as Unidentified
from normkit.surgery.identify import identify as identify
from normkit.surgery.report import SwapReport as SwapReport
from normkit.surgery.swap import swap_ as swap_
from normkit.surgery.swap import unswap_ as unswap_
