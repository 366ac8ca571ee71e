"""Noise schedules: (alpha, sigma) of native time, and the continuous inverse of the log-SNR.

x_t = alpha_t x_0 + sigma_t eps;  x_0 is data, eps is unit noise;  log_snr = 2 log(alpha/sigma)
"""

from hddm.schedules.base import Schedule as Schedule
from hddm.schedules.continuous import CosineSchedule as CosineSchedule
from hddm.schedules.continuous import LinearSchedule as LinearSchedule
from hddm.schedules.diffusers_configs import from_config as from_config
from hddm.schedules.diffusers_configs import from_diffusers as from_diffusers
from hddm.schedules.discrete import DiscreteSchedule as DiscreteSchedule
