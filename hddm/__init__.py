"""Heterogeneous decentralized diffusion: train experts alone, combine them in velocity space.

x_t = alpha_t x_0 + sigma_t eps;  t runs from 0 (data) to 1 (noise);  velocity = dx_t/dt
"""

from typing import TYPE_CHECKING, Any

from hddm import schedules as schedules
from hddm.ensemble import Ensemble as Ensemble
from hddm.errors import HddmError as HddmError
from hddm.load import load as load
from hddm.sampling import sample as sample
from hddm.velocity import VelocityField as VelocityField

if TYPE_CHECKING:
    from hddm.pipeline import HDDMPipeline as HDDMPipeline


def __getattr__(name: str) -> Any:
    # The pipelines of diffusers take seconds to import, and only some users need one.
    if name == "HDDMPipeline":
        from hddm.pipeline import HDDMPipeline

        return HDDMPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
