"""Heterogeneous decentralized diffusion: train experts alone, combine them in velocity space.

x_t = alpha_t x_0 + sigma_t eps;  t runs from 0 (data) to 1 (noise);  velocity = dx_t/dt
"""

import logging
from importlib import import_module
from typing import Any

from hddm.utils.errors import HddmError as HddmError

# torch and diffusers take seconds to import, and reading a record or a mistyped option needs neither. Type
# checkers and editors read `__init__.pyi` instead.
_HOMES = {
    "Ensemble": "hddm.ensemble",
    "HDDMPipeline": "hddm.pipelines.pipeline",
    "VelocityField": "hddm.velocity",
    "assemble": "hddm.experts.assembly",
    "convert": "hddm.checkpoints.convert",
    "drop_in": "hddm.pipelines.drop_in",
    "evaluate": "hddm.evaluation.evaluate",
    "export": "hddm.experts.export",
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
