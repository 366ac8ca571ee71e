"""Parts of a pipeline: read from a folder, by hddm or by diffusers' loader, and moved off the device.

    DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)

This loader, once it may run ``pipeline.py``, reads each part of ``model_index.json`` by ``from_pretrained``
of a class, where that is derived from what its module calls ``ModelMixin``. `StockPart` is such a class, and
reads as `hddm.HDDMPipeline` does.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from hddm.experts.ensemble_records import COMPONENTS, unnumbered
from hddm.experts.expert_set import ExpertSet
from hddm.experts.loading import open_ensemble
from hddm.networks.offload import size_of
from hddm.networks.prompts import read_texts
from hddm.networks.tokenizer import read_tokenizer
from hddm.networks.vae import read_vae
from hddm.utils.errors import HddmError, choose

NETWORKS = ("experts", "router", "vae", "text_encoder")
"""Parts that have a dtype."""

DtypeOfParts = torch.dtype | Mapping[str, torch.dtype] | None


def dtypes_of(dtype: DtypeOfParts) -> dict[str, torch.dtype]:
    """Dtype of each of `NETWORKS`: one for all, or a dictionary by part, as diffusers' loaders take it.

    Parts that a dictionary leaves out get its ``default``, else float32. Raises `HddmError` for another part.
    """
    by_part: dict[str, torch.dtype | None]
    by_part = dict(dtype) if isinstance(dtype, Mapping) else {"default": dtype}
    for name in by_part:
        if name not in (*NETWORKS, "default"):
            raise HddmError(f"dtype: {choose(name, (*NETWORKS, 'default'))}, not {name!r}")
    others = by_part.get("default")
    return {name: by_part.get(name, others) or torch.float32 for name in NETWORKS}


def read_parts(
    folder: Path,
    places: Mapping[str, str],
    dtype: DtypeOfParts,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Components of a pipeline: those ``given``, the others from their ``places`` in a folder.

    Large text encoders in a half type stay in it, unless ``dtype`` states one for text encoders.
    """
    found, dtypes = dict(given), dtypes_of(dtype)
    widens = isinstance(dtype, Mapping) and "text_encoder" in dtype
    for name in places.keys() - given.keys():
        place, kind = folder / places[name], unnumbered(name)
        if kind == "tokenizer":
            found[name] = read_tokenizer(place)
        elif kind == "vae":
            found[name] = read_vae(place, dtypes[kind])
        else:
            found[name] = read_texts(place, dtypes[kind], widens)
    return found


ModelMixin = nn.Module
"""Base of what may be passed to the loader in place of a part."""


class StockPart(diffusers.ModelMixin):  # type: ignore[misc]
    """A network of an ensemble, by its folder."""

    @classmethod
    def from_pretrained(
        cls, folder: str, torch_dtype: torch.dtype | None = None, **options: Any
    ) -> Any:
        """Read the part in ``folder``, which lies in that of the ensemble.

        ``options`` of the loader have no effect. Raises `HddmError` as `hddm.HDDMPipeline.from_pretrained`.
        """
        whole, name = Path(folder).parent, Path(folder).name
        if name not in ("experts", "router"):
            return read_parts(whole, {name: name}, torch_dtype, {})[name]
        dtypes = dtypes_of(torch_dtype)
        opened = open_ensemble(whole, dtypes["router"])
        return opened.router if name == "router" else opened.expert_set("cpu", dtypes["experts"])


def parts_for_loader(index: Mapping[str, Any]) -> dict[str, Any]:
    """Library and class of each part of ``model_index.json``, with `StockPart` for those of `NETWORKS`."""
    found: dict[str, Any] = {}
    for name, kind in index.items():
        is_here = kind[0] is not None and unnumbered(name) in NETWORKS
        found[name] = (__name__, StockPart.__name__) if is_here else kind
    return found


_IN_USE = weakref.WeakKeyDictionary[nn.Module, Any]()
"""A lock for each part: decoding casts a VAE and sets its tiles, and a tokenizer serves one thread."""


class Offloading:
    """Offload methods of a diffusers pipeline whose experts run in any order.

    Diffusers moves models in one fixed order, but here the router decides at each step. Experts alone are
    offloaded by ``pipe.experts.offload`` (`hddm.experts.expert_set.ExpertSet`).
    """

    experts: ExpertSet
    router: Callable[..., Tensor] | None
    max_memory: int | None
    _visits: torch.device | None = None

    def enable_model_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """Keep all weights in main memory; the expert that runs is on ``device``.

        ``gpu_id`` is the number of a CUDA device, ``device`` replaces it; the default is the current
        accelerator, else the CPU.
        """
        if device is None and torch.accelerator.is_available():
            current = torch.accelerator.current_accelerator()
            device = None if current is None else torch.device(current.type, gpu_id or 0)
        self.experts.offload("ram", None)
        self.visit(torch.device(device or "cpu"))

    enable_sequential_cpu_offload = enable_model_cpu_offload

    def visit(self, device: torch.device) -> None:
        """Keep experts and router on ``device``, where VAEs and text encoders come while they run."""
        self._visits = device
        self.experts.to(device)
        router = self._router_module()
        if router is not None:
            router.to(device)
        for part in self.visitors:
            part.to("cpu")

    @property
    def visitors(self) -> list[nn.Module]:
        """VAEs and text encoders."""
        parts = [getattr(self, name, None) for name in COMPONENTS]
        return [part for part in parts if isinstance(part, nn.Module)]

    def _router_module(self) -> nn.Module | None:
        """The network that routes, if one does."""
        # A `hddm.routers.Router` is no module, but its network may be.
        router = self.router
        if not isinstance(router, nn.Module):
            router = getattr(router, "network", None)
        return router if isinstance(router, nn.Module) else None

    def _all_beside(self) -> list[nn.Module]:
        """Router, VAEs and text encoders."""
        router = self._router_module()
        return [*self.visitors, *([] if router is None else [router])]

    def comes_and_goes(self, device: torch.device) -> bool:
        """True if VAEs and text encoders are on ``device`` only while they run, as experts are offloaded."""
        return self.experts.shelf.offload != "none" and device.type != "cpu"

    def beside_experts(self, comes_and_goes: bool) -> list[nn.Module]:
        """Parts that are on the experts' device at once; of those that come and go the largest."""
        beside = self._all_beside()
        visitors = sorted(self.visitors, key=size_of) if comes_and_goes else []
        return [part for part in beside if not any(part is one for one in visitors[:-1])]

    def limit_memory(self, max_memory: int | None) -> None:
        """Limit the bytes of all weights on the device, as `from_pretrained` does; None for no limit.

        Quantized experts count with their size in int8. Raises `HddmError` for an expert that does not fit.
        """
        if max_memory is not None or self.max_memory is not None:
            mode = self.experts.shelf.offload
            self.experts.offload(mode, max_memory, self.beside_experts(self._visits is not None))
        self.max_memory = max_memory

    @contextmanager
    def present(self, part: nn.Module) -> Iterator[Any]:
        """Open a block in which ``part`` is on its device; an offloaded part then returns to the CPU.

        Threads that need the same part follow each other.
        """
        with _IN_USE.setdefault(part, threading.RLock()):
            if self._visits is None:
                yield part
                return
            self.experts.shelf.make_room(size_of(part), self._visits)
            try:
                yield part.to(self._visits)
            finally:
                part.to("cpu")
