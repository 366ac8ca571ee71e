"""Parts of an ensemble's folder as the loader of diffusers asks for them, once it may run ``pipeline.py``.

    DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)

This loader reads each part of ``model_index.json`` by ``from_pretrained`` of a class, where that is derived
from what its module calls ``ModelMixin``. `StockPart` is such a class, and reads as `hddm.HDDMPipeline` does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from hddm.experts.loading import open_ensemble
from hddm.experts.model_index import unnumbered
from hddm.pipelines.inputs import NETWORKS, dtypes_of, read_parts, refuse_options

ModelMixin = nn.Module
"""Base of what may be passed to the loader in place of a part."""


class StockPart(diffusers.ModelMixin):  # type: ignore[misc]
    """A network of an ensemble, by its folder."""

    @classmethod
    def from_pretrained(cls, folder: str, torch_dtype: torch.dtype | None = None, **options: Any) -> Any:
        """Read the part in ``folder``, which lies in that of the ensemble.

        Raises `HddmError` as `hddm.HDDMPipeline.from_pretrained`.
        """
        refuse_options(cls.from_pretrained, options)
        whole, name = Path(folder).parent, Path(folder).name
        dtypes = dtypes_of(torch_dtype, None)
        if name not in ("experts", "router"):
            return read_parts(whole, {name: name}, dtypes, {})[name]
        opened = open_ensemble(whole, dtypes["router"])
        return opened.router if name == "router" else opened.expert_set("cpu", dtypes["experts"])


def parts_for_loader(index: Mapping[str, Any]) -> dict[str, Any]:
    """Library and class of each part of ``model_index.json``, with `StockPart` for those of `NETWORKS`."""
    here = (__name__, StockPart.__name__)
    return {
        name: here if kind[0] is not None and unnumbered(name) in NETWORKS else kind
        for name, kind in index.items()
    }
