"""Heterogeneous decentralized diffusion: train experts alone, combine them in velocity space.

x_t = alpha_t x_0 + sigma_t eps;  t runs from 0 (data) to 1 (noise);  velocity = dx_t/dt
"""

from hddm import schedules as schedules
from hddm.ensemble import Ensemble as Ensemble
from hddm.errors import HddmError as HddmError
from hddm.load import load as load
from hddm.sampling import sample as sample
from hddm.velocity import VelocityField as VelocityField
