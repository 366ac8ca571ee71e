"""Folders of pipelines, read and written without any loader that takes orders from them.

`open_pipeline` and `save_pipeline` read and write an ensemble folder; `Offloading` is where its weights wait.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from hddm.experts.ensembles import ENSEMBLE_FILE, link_bases, places, write_ensemble_records
from hddm.experts.loading import ExpertSet, expert_set, open_ensemble
from hddm.experts.lora import ADAPTER_CONFIG, check_base
from hddm.experts.records import save_router
from hddm.networks.folders import WEIGHTS
from hddm.networks.offload import Offload
from hddm.networks.text_encoder import read_text_encoder, read_tokenizer
from hddm.networks.transformers import RouterTransformer
from hddm.networks.vae import read_vae
from hddm.utils.errors import HddmError
from hddm.utils.files import new_folder

LOADING: Mapping[str, Collection[object]] = {
    "local_files_only": (True, False, None),
    "use_safetensors": (True, None),
    "low_cpu_mem_usage": (True, False, None),
    "trust_remote_code": (False, None),
    "variant": (None,),
    "device_map": (None,),
    "safety_checker": (None,),
}
"""Keywords of diffusers' loaders, with the values that change nothing here."""
SAVING: Mapping[str, Collection[object]] = {"safe_serialization": (True, None), "variant": (None,)}


def refuse_options(call: str, options: Mapping[str, Any], harmless: Mapping[str, Collection[object]]) -> None:
    """Refuse keywords that would change something which hddm does in one way only.

    Raises:
        HddmError: with the first of them.
    """
    for name, value in options.items():
        if not any(value is one for one in harmless.get(name, ())):
            known = "; nothing but a local folder of safetensors is read or written, and no code of it runs"
            raise HddmError(f"{call}({name}={value!r}) is not supported{known}")


def open_pipeline(
    folder: Path,
    dtype: torch.dtype,
    experts: Sequence[int] | None,
    offload: Offload,
    max_memory: int | None,
) -> dict[str, Any]:
    """The arguments of `hddm.HDDMPipeline` for a folder.

    Raises:
        HddmError: as `hddm.load`, for a part that cannot be read, and for a limit of memory that leaves no
            room for an expert.
    """
    if not folder.is_dir():
        raise HddmError(f"{folder}: no such folder; nothing is downloaded, so fetch the ensemble first")
    parts = open_ensemble(folder, dtype, experts)
    has = parts.components
    vae = read_vae(folder / "vae", dtype) if "vae" in has else None
    text_encoder = read_text_encoder(folder / "text_encoder", dtype) if "text_encoder" in has else None
    others = [part for part in (vae, text_encoder) if part is not None]
    return {
        "experts": expert_set(parts, dtype, "cpu", offload, max_memory, others),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=parts.facts.shift),
        "router": parts.router,
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": read_tokenizer(folder / "tokenizer") if "tokenizer" in has else None,
        "facts": parts.facts,
        "router_facts": parts.router_facts,
    }


def save_pipeline(pipeline: Any, folder: Path, overwrite: bool) -> None:
    """Write the parts of a `hddm.HDDMPipeline` as an ensemble folder, complete or not at all.

    Raises:
        HddmError: for a folder that exists, unless ``overwrite``, and for the one that experts are read from.
    """
    read_from = [
        path.resolve() for one in pipeline.experts.experts for path in (one.folder, one.base) if path
    ]
    if any(one.is_relative_to(folder.resolve()) for one in read_from):
        raise HddmError(f"{folder}: these experts are read from it as they are needed; save elsewhere")
    with new_folder(folder, ENSEMBLE_FILE, overwrite) as draft:
        pipeline.experts.save_pretrained(draft / "experts")
        names = tuple(f"experts/{k}" for k in range(len(pipeline.experts.facts)))
        bases = _bases(pipeline, draft, names)
        held = places(bases, {name: draft / name for name in names})
        link_bases(draft, held, bases)
        if pipeline.router is not None:
            (draft / "router").mkdir()
            save_router(draft / "router", pipeline.router, pipeline.router_facts)
        components = {}
        for name, kind in _kinds(pipeline).items():
            getattr(pipeline, name).save_pretrained(draft / name)
            components[name] = kind
        facts = pipeline.facts.model_copy(
            update={
                "experts": names,
                "bases": held,
                "router": None if pipeline.router is None else "router",
                "shift": pipeline.ensemble.shift,
                "strategy": pipeline.ensemble.strategy,
            }
        )
        write_ensemble_records(draft, facts, components)


def _bases(pipeline: Any, draft: Path, names: Sequence[str]) -> dict[str, Path]:
    """Folders of the weights that those experts change which were saved as adapters, by SHA-256."""
    found = {}
    for expert, name in zip(pipeline.experts.experts, names, strict=True):
        if (draft / name / ADAPTER_CONFIG).exists():
            check_base(expert.folder, expert.facts.adapter, expert.base / WEIGHTS)
            found[expert.facts.adapter.base_sha256] = expert.base
    return found


def _kinds(pipeline: Any) -> dict[str, tuple[str, str]]:
    """Library and class of the parts of latents that are there, as every version of them is called."""
    kinds = {
        "vae": ("diffusers", type(pipeline.vae).__name__),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "tokenizer": ("transformers", "CLIPTokenizer"),
    }
    return {name: kind for name, kind in kinds.items() if getattr(pipeline, name) is not None}


class Offloading:
    """The offload methods of a diffusers pipeline, for one whose experts take turns in any order.

    Diffusers moves models in one fixed order; here the router decides at each step.
    """

    experts: ExpertSet
    router: RouterTransformer | None
    vae: nn.Module | None
    text_encoder: nn.Module | None
    _visits: torch.device | None = None

    def enable_model_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """Keep all weights in main memory; experts come to ``device`` as they are chosen, two at most.

        Args:
            gpu_id: of the CUDA device.
            device: instead; by default the current accelerator, or the CPU where there is none.
        """
        self._offload_to(_device(gpu_id, device), budget=None)

    def enable_sequential_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """As `enable_model_cpu_offload`, with one expert at a time."""
        largest = max(network.size for network in self.experts.stored)
        self._offload_to(_device(gpu_id, device), budget=largest)

    def enable_expert_offload(self, mode: Offload = "disk", max_memory: int | None = None) -> None:
        """Let experts come and go; see `hddm.networks.offload`. The other parts stay where they are.

        Args:
            mode: ``none``, ``ram`` or ``disk``.
            max_memory: bytes of experts' weights on the device at most.

        Raises:
            HddmError: as `ExpertSet.offload`.
        """
        self.experts.offload(mode, max_memory)

    def _offload_to(self, device: torch.device, budget: int | None) -> None:
        self.experts.offload("ram", budget)
        self.experts.to(device)
        if self.router is not None:
            self.router.to(device)
        for part in (self.text_encoder, self.vae):
            if part is not None:
                part.to("cpu")
        self._visits = device

    def present(self, part: nn.Module) -> "Visit":
        """A context in which ``part`` is where it can run."""
        return Visit(part, self._visits)


class Visit:
    """A part that is on a device inside a ``with`` block, and back on the CPU afterwards."""

    def __init__(self, part: nn.Module, device: torch.device | None) -> None:
        self._part, self._device = part, device

    def __enter__(self) -> Any:
        return self._part if self._device is None else self._part.to(self._device)

    def __exit__(self, *_: object) -> None:
        if self._device is not None:
            self._part.to("cpu")


def _device(gpu_id: int | None, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, gpu_id or 0)
