"""Heterogeneous decentralized diffusion: train experts alone, combine them in velocity space.

x_t = alpha_t x_0 + sigma_t eps;  t runs from 0 (data) to 1 (noise);  velocity = dx_t/dt
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hddm.utils.errors import HddmError as HddmError

if TYPE_CHECKING:
    from hddm import schedules
    from hddm.ensemble import Ensemble as Ensemble
    from hddm.experts.loading import load as load
    from hddm.pipelines.drop_in import drop_in as drop_in
    from hddm.pipelines.pipeline import HDDMPipeline as HDDMPipeline
    from hddm.sampling import sample as sample
    from hddm.velocity import VelocityField as VelocityField

# torch and diffusers take seconds to import, and reading a record or a mistyped option needs neither.
_HOMES = {
    "Ensemble": "hddm.ensemble",
    "HDDMPipeline": "hddm.pipelines.pipeline",
    "VelocityField": "hddm.velocity",
    "drop_in": "hddm.pipelines.drop_in",
    "load": "hddm.experts.loading",
    "sample": "hddm.sampling",
}
__all__ = ["Ensemble", "HDDMPipeline", "HddmError", "VelocityField", "drop_in", "load", "sample", "schedules"]


def __getattr__(name: str) -> Any:
    if name == "schedules":
        return import_module("hddm.schedules")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
