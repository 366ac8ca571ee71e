"""Parts of a pipeline: read from a folder, by hddm or by diffusers' loader, and moved off the device.

    DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)

This loader, once it may run ``pipeline.py``, reads each part of ``model_index.json`` by ``from_pretrained``
of a class, where that is derived from what its module calls ``ModelMixin``. `StockPart` is such a class, and
reads as `hddm.HDDMPipeline` does.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from hddm.experts.ensemble_folders import COMPONENTS, unnumbered
from hddm.experts.expert_set import ExpertSet
from hddm.experts.loading import open_ensemble
from hddm.networks.prompts import read_texts
from hddm.networks.text_encoder import read_tokenizer
from hddm.networks.vae import read_vae
from hddm.utils.errors import HddmError, choose, did_you_mean

_NO_EFFECT: Mapping[str, Collection[object]] = {
    "local_files_only": (True, False),
    "low_cpu_mem_usage": (True, False),
    "use_safetensors": (True,),
    "safe_serialization": (True,),
    "device_map": ("cpu",),
    "subfolder": ("",),
}
"""Values of diffusers' keywords that request what is done anyway; so do None and, for all others, False."""
_REMEDIES = {
    "device_map": '; move the pipeline with .to("cuda")',
    "push_to_hub": '; call push_to_hub("OWNER/NAME") of the pipeline',
}
_OF_DOWNLOADS = ("cache_dir", "token", "proxies")
"""Keywords without effect on a local folder, whatever their value; a token must not get into a message."""
_KNOWN = {
    *(*_NO_EFFECT, *_REMEDIES, *_OF_DOWNLOADS, "variant", "revision", "custom_revision", "custom_pipeline"),
    *("quantization_config", "offload_folder", "safety_checker", "max_memory", "trust_remote_code"),
    *("force_download", "load_connected_pipeline", "use_onnx", "offload_state_dict", "output_loading_info"),
    *("requires_safety_checker", "use_flashpack", "disable_mmap", "provider", "sess_options"),
    *("provider_options", "max_shard_size", "repo_id", "commit_message", "private", "create_pr"),
}
"""Keywords of diffusers' loaders and writers."""
PARTS = ("scheduler", "router", *COMPONENTS)
"""Parts that may be passed to `from_pretrained` in place of those in the folder."""

NETWORKS = ("experts", "router", "vae", "text_encoder")
"""Parts that have a dtype."""

Dtype = torch.dtype | str | Mapping[str, torch.dtype | str] | None


def refuse_options(call: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse unknown ``options`` of ``call``, and those of diffusers that request what hddm does not do."""
    for name, value in options.items():
        if name not in _KNOWN:
            near = did_you_mean(name, [*inspect.signature(call).parameters, *_KNOWN, *PARTS])
            raise HddmError(f"{call.__name__} takes no {name!r}{near}")
        if name not in _OF_DOWNLOADS and value is not None and value not in _NO_EFFECT.get(name, (False,)):
            raise HddmError(
                f"{call.__name__}({name}={value!r}) is not supported: hddm reads and writes local folders of "
                f"safetensors only, and runs no code from them{_REMEDIES.get(name, '')}"
            )


def dtypes_of(dtype: Dtype, torch_dtype: Dtype) -> dict[str, torch.dtype]:
    """Dtype of each of `NETWORKS`: one for all, or a dictionary by part, as diffusers' loaders take it.

    Parts that a dictionary leaves out get its ``default``, else float32, as does ``auto``. ``torch_dtype`` is
    the old name. Raises `HddmError` for both names at once, an unknown part, and other values.
    """
    if dtype is not None and torch_dtype is not None:
        raise HddmError(f"pass dtype={dtype} or torch_dtype={torch_dtype}, its old name, not both")
    requested = torch_dtype if dtype is None else dtype
    by_part = dict(requested) if isinstance(requested, Mapping) else {"default": requested}
    for name, value in by_part.items():
        if name not in (*NETWORKS, "default"):
            raise HddmError(f"dtype: {choose(name, (*NETWORKS, 'default'))}, not {name!r}")
        if value not in ("auto", None) and not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise HddmError(f"dtype {value!r}: pass a floating dtype of torch, such as torch.bfloat16")
    found = {name: by_part.get(name, by_part.get("default")) for name in NETWORKS}
    return {name: one if isinstance(one, torch.dtype) else torch.float32 for name, one in found.items()}


def read_parts(
    folder: Path, places: Mapping[str, str], dtypes: Mapping[str, torch.dtype], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Components of a pipeline: those ``given``, the others from their ``places`` in a folder."""
    found = dict(given)
    for name in places.keys() - given.keys():
        place, kind = folder / places[name], unnumbered(name)
        if kind == "tokenizer":
            found[name] = read_tokenizer(place)
        else:
            found[name] = (read_vae if kind == "vae" else read_texts)(place, dtypes[kind])
    return found


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


class Offloading:
    """Offload methods of a diffusers pipeline whose experts run in any order.

    Diffusers moves models in one fixed order, but here the router decides at each step. Experts alone are
    offloaded by ``pipe.experts.offload`` (`hddm.experts.expert_set.ExpertSet`).
    """

    experts: ExpertSet
    router: Callable[..., Tensor] | None
    _visits: torch.device | None = None

    def enable_model_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """Keep all weights in main memory; at most two chosen experts are on ``device``.

        ``gpu_id`` is the number of a CUDA device, ``device`` replaces it; the default is the current
        accelerator, else the CPU.
        """
        self._offload_to(gpu_id, device, budget=None)

    def enable_sequential_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """As `enable_model_cpu_offload`, with one expert at a time."""
        largest = max((network.size for network in self.experts.stored), default=None)
        self._offload_to(gpu_id, device, budget=largest)

    def _offload_to(self, gpu_id: int | None, device: torch.device | str | None, budget: int | None) -> None:
        if device is None and torch.accelerator.is_available():
            current = torch.accelerator.current_accelerator()
            device = None if current is None else torch.device(current.type, gpu_id or 0)
        self.experts.offload("ram", budget)
        self._visits = torch.device(device or "cpu")
        self.experts.to(self._visits)
        if isinstance(self.router, nn.Module):
            self.router.to(self._visits)
        for part in (getattr(self, name, None) for name in COMPONENTS):
            if isinstance(part, nn.Module):
                part.to("cpu")

    @contextmanager
    def present(self, part: nn.Module) -> Iterator[Any]:
        """Open a block in which ``part`` is on its device; an offloaded part then returns to the CPU."""
        if self._visits is None:
            yield part
            return
        try:
            yield part.to(self._visits)
        finally:
            part.to("cpu")
