"""Reading and writing a pipeline's folder, without any loader that takes orders from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from hddm.adapters import ADAPTER_CONFIG, check_base
from hddm.components.text import read_text_encoder
from hddm.components.tokenizer import read_tokenizer
from hddm.components.vae import read_vae
from hddm.ensemble_bases import link_bases, places
from hddm.ensemble_folders import ENSEMBLE_FILE, write_ensemble_records
from hddm.errors import HddmError
from hddm.experts import save_router
from hddm.files import new_folder
from hddm.loading import expert_set
from hddm.model_folders import WEIGHTS
from hddm.offload import Offload
from hddm.parts import open_parts


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
    parts = open_parts(folder, dtype, experts)
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
    """Write the parts of a `hddm.HDDMPipeline` as an ensemble folder, whole or not at all.

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
