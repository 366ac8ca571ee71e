"""Heterogeneous decentralized diffusion: train experts alone, combine them in velocity space.

x_t = alpha_t x_0 + sigma_t eps;  t runs from 0 (data) to 1 (noise);  velocity = dx_t/dt
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hddm.utils.errors import HddmError as HddmError

if TYPE_CHECKING:
    from hddm import schedules
    from hddm.checkpoints.convert import convert as convert
    from hddm.data.partition import partition as partition
    from hddm.ensemble import Ensemble as Ensemble
    from hddm.evaluation.evaluate import evaluate as evaluate
    from hddm.experts.assembly import assemble as assemble
    from hddm.experts.loading import load as load
    from hddm.pipelines.drop_in import drop_in as drop_in
    from hddm.pipelines.pipeline import HDDMPipeline as HDDMPipeline
    from hddm.pipelines.samples import sample_to_folder as sample_to_folder
    from hddm.sampling import sample as sample
    from hddm.training.train import train as train
    from hddm.velocity import VelocityField as VelocityField

# torch and diffusers take seconds to import, and reading a record or a mistyped option needs neither.
_HOMES = {
    "Ensemble": "hddm.ensemble",
    "HDDMPipeline": "hddm.pipelines.pipeline",
    "VelocityField": "hddm.velocity",
    "assemble": "hddm.experts.assembly",
    "convert": "hddm.checkpoints.convert",
    "drop_in": "hddm.pipelines.drop_in",
    "evaluate": "hddm.evaluation.evaluate",
    "load": "hddm.experts.loading",
    "partition": "hddm.data.partition",
    "sample": "hddm.sampling",
    "sample_to_folder": "hddm.pipelines.samples",
    "train": "hddm.training.train",
}
# Where torchao is installed, importing diffusers logs warnings about parts of it that hddm does not use.
logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").addFilter(
    lambda record: "Enum subclass" not in record.getMessage()
)
__all__ = ["HddmError", "schedules", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "schedules":
        return import_module("hddm.schedules")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
