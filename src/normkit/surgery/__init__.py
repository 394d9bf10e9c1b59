"""On somebody's model: what its norms compute, found by behaviour, and fused operators put in their place."""

from normkit.surgery.audit import Audit as Audit
from normkit.surgery.audit import audit as audit
from normkit.surgery.auditing.finding import Finding as Finding
from normkit.surgery.findings import Evidence as Evidence
from normkit.surgery.findings import Identified as Identified
from normkit.surgery.findings import Unidentified as Unidentified
from normkit.surgery.fold import fold_ as fold_
from normkit.surgery.folding.report import Folded as Folded
from normkit.surgery.folding.report import FoldError as FoldError
from normkit.surgery.folding.report import FoldReport as FoldReport
from normkit.surgery.folding.report import Refused as Refused
from normkit.surgery.identify import identify as identify
from normkit.surgery.no_decay import decay_groups as decay_groups
from normkit.surgery.no_decay import no_decay as no_decay
from normkit.surgery.report import SwapReport as SwapReport
from normkit.surgery.swap import swap_ as swap_
from normkit.surgery.swap import unswap_ as unswap_
