"""nn.Module faces of the functions, one screen each."""

from normkit.modules.batch import BatchNorm as BatchNorm
from normkit.modules.gated import GatedRMSNorm as GatedRMSNorm
from normkit.modules.pointwise import Derf as Derf
from normkit.modules.pointwise import DyT as DyT
from normkit.modules.positions import GroupNorm as GroupNorm
from normkit.modules.positions import InstanceNorm as InstanceNorm
from normkit.modules.qk import QKNorm as QKNorm
from normkit.modules.rows import LayerNorm as LayerNorm
from normkit.modules.rows import RMSNorm as RMSNorm
from normkit.modules.rows import ScaleNorm as ScaleNorm
