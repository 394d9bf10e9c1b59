"""What people call. Row norms, residual and gated forms, norms across positions, pointwise stand-ins."""

from normkit.functional.explain import Explanation as Explanation
from normkit.functional.explain import explain as explain
from normkit.functional.gated import gated_rms_norm as gated_rms_norm
from normkit.functional.pointwise import derf as derf
from normkit.functional.pointwise import dyt as dyt
from normkit.functional.positions import batch_norm as batch_norm
from normkit.functional.positions import group_norm as group_norm
from normkit.functional.positions import instance_norm as instance_norm
from normkit.functional.positions import moments as moments
from normkit.functional.residual import add_layer_norm as add_layer_norm
from normkit.functional.residual import add_rms_norm as add_rms_norm
from normkit.functional.rows import l2_norm as l2_norm
from normkit.functional.rows import layer_norm as layer_norm
from normkit.functional.rows import normalize as normalize
from normkit.functional.rows import rms_norm as rms_norm
from normkit.functional.rows import scale_norm as scale_norm
