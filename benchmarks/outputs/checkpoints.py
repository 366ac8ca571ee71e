"""Checkpoints of other tools: converted, written back, and the LoRA files that change them."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
    ModelMixin,
    SchedulerMixin,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import hddm
from benchmarks.outputs.digests import Outputs, files_of, under
from benchmarks.outputs.workshop import TIMES, Workshop, command, noise, states
from tests import flow_models
from tests.checkpoint_files import (
    SD_BETAS,
    conditions_of,
    dit,
    pipeline,
    pixart,
    plain_unet,
    text_unet,
)
from tests.checkpoints import test_lora_files as lora_files
from tests.component_files import write_clip, write_vae
from tests.flow_models import SD35, flow_pipeline, flux, sd3
from tests.ldm_files import XL, ldm_file, ldm_unet
from tests.lora_files import kohya
from tests.paris_files import TEXT, write_paris
from tests.transformer_files import dit_file, dit_network, pixart_file

SD2 = {"use_linear_projection": True, "attention_head_dim": 4, "block_out_channels": (64, 128)}
SIZES = {"use_additional_conditions": True, "attention_head_dim": 12, "cross_attention_dim": 24}
SIDE = {"sample_size": 8}
V_PREDICTION = {"prediction_type": "v_prediction"}


Write = Callable[[Path, ModelMixin], Path]
"""Writes a network into a folder, and returns the checkpoint there."""


@dataclass(frozen=True)
class Source:
    """A checkpoint: its network, what writes it, its layout, and the options that its conversion needs."""

    network: Callable[[], ModelMixin]
    write: Write
    layout: str
    options: dict[str, Any] = field(default_factory=dict)


def _in_a_pipeline(scheduler: SchedulerMixin | None = None, **saving: Any) -> Write:
    return lambda folder, network: pipeline(folder / "source", network, scheduler, **saving)


def _with_components(folder: Path, network: ModelMixin) -> Path:
    """A pipeline with its VAE and text encoder."""
    write_vae(folder / "source" / "vae")
    write_clip(folder / "source")
    return pipeline(folder / "source", network, DDIMScheduler(**SD_BETAS))


def _alone(folder: Path, network: ModelMixin) -> Path:
    network.save_pretrained(folder / "source")
    DDPMScheduler(**SD_BETAS, prediction_type="sample").save_pretrained(folder / "source")
    return folder / "source"


def _flow(folder: Path, network: ModelMixin) -> Path:
    return flow_pipeline(folder / "source", network, shift=3.0)


def _file(content: Callable[..., dict[str, Tensor]], dtype: torch.dtype = torch.float32) -> Write:
    """One file of safetensors."""

    def write(folder: Path, network: ModelMixin) -> Path:
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in content(network).items()}
        save_file(tensors, folder / "source.safetensors")
        return folder / "source.safetensors"

    return write


def _pickled(
    content: Callable[..., dict[str, Tensor]], raw: Callable[[], ModelMixin], names: tuple[str, str]
) -> Write:
    """One pickled file with averaged weights and others."""

    def write(folder: Path, network: ModelMixin) -> Path:
        file = folder / "source.pt"
        torch.save({names[0]: content(raw()), names[1]: content(network), "epoch": 3}, file)
        return file

    return write


def _averaged_ldm(folder: Path, network: ModelMixin) -> Path:
    torch.save({"state_dict": ldm_file(text_unet(1), network)}, folder / "source.ckpt")
    return folder / "source.ckpt"


def _with_scheduler(write: Write) -> Write:
    """The source, and a file of a scheduler beside it."""

    def both(folder: Path, network: ModelMixin) -> Path:
        EulerDiscreteScheduler(**SD_BETAS, prediction_type="epsilon").save_pretrained(folder)
        return write(folder, network)

    return both


V_SCHEDULER = DDIMScheduler(**SD_BETAS, **V_PREDICTION, rescale_betas_zero_snr=True)
DIT, PIXART, UNET, TEXT_UNET = (
    f"diffusers-{name}" for name in ("dit", "pixart", "unet2d", "unet2d-condition")
)
PICKLED = {"allow_pickle": True, "num_heads": 4}
SOURCES = {
    "DiT": Source(dit, _in_a_pipeline(), DIT),
    "DiT of v": Source(dit, _in_a_pipeline(V_SCHEDULER), DIT),
    "DiT of the sample": Source(dit, _alone, DIT),
    "DiT for high noise": Source(
        dit, _in_a_pipeline(DDPMScheduler()), DIT, {"noise_range": (0.5, 1.0)}
    ),
    "DiT in bfloat16": Source(lambda: dit().bfloat16(), _in_a_pipeline(), DIT),
    "DiT in a pickle": Source(
        dit, _in_a_pipeline(safe_serialization=False), DIT, {"allow_pickle": True}
    ),
    "DiT in several files": Source(dit, _in_a_pipeline(max_shard_size="20KB"), DIT),
    "DiT with a variant": Source(dit, _in_a_pipeline(variant="fp16"), DIT, {"variant": "fp16"}),
    "DiT with a licence": Source(dit, _in_a_pipeline(), DIT, {"licence": "MIT"}),
    "PixArt": Source(pixart, _in_a_pipeline(), PIXART),
    "PixArt with sizes": Source(functools.partial(pixart, **SIZES), _in_a_pipeline(), PIXART),
    "UNet": Source(plain_unet, _in_a_pipeline(), UNET),
    "gray UNet": Source(
        functools.partial(plain_unet, in_channels=1, out_channels=1), _in_a_pipeline(), UNET
    ),
    "Stable Diffusion 1": Source(text_unet, _with_components, TEXT_UNET),
    "Stable Diffusion 2": Source(
        functools.partial(text_unet, **SD2), _in_a_pipeline(V_SCHEDULER), TEXT_UNET
    ),
    "SDXL": Source(
        functools.partial(text_unet, **XL), _in_a_pipeline(DDIMScheduler(**SD_BETAS)), TEXT_UNET
    ),
    "SD3": Source(sd3, _flow, "diffusers-sd3"),
    "SD3.5": Source(functools.partial(sd3, **SD35), _flow, "diffusers-sd3"),
    "Flux schnell": Source(flux, _flow, "diffusers-flux", SIDE),
    "Flux dev": Source(
        functools.partial(flux, guidance_embeds=True), _flow, "diffusers-flux", SIDE
    ),
    "facebook's DiT": Source(dit_network, _file(dit_file), "facebook-dit", {"num_heads": 4}),
    "facebook's DiT in float16": Source(
        dit_network, _file(dit_file, torch.float16), "facebook-dit", {"num_heads": 4}
    ),
    "facebook's DiT, averaged": Source(
        dit_network,
        _pickled(dit_file, lambda: dit_network(1), ("model", "ema")),
        "facebook-dit",
        PICKLED,
    ),
    "facebook's DiT, not averaged": Source(
        dit_network,
        _pickled(dit_file, lambda: dit_network(1), ("model", "ema")),
        "facebook-dit",
        PICKLED | {"weights": "raw"},
    ),
    "PixArt's own file": Source(
        pixart,
        _pickled(pixart_file, lambda: pixart(1), ("state_dict", "state_dict_ema")),
        "pixart-original",
        {"allow_pickle": True, "num_heads": 2},
    ),
    "PixArt's own file without positions": Source(
        pixart,
        _file(functools.partial(pixart_file, positions=False)),
        "pixart-original",
        SIDE | {"num_heads": 2},
    ),
    "Stable Diffusion 1 in one file": Source(
        text_unet, _file(ldm_file), "ldm", SIDE | {"num_heads": 8, "prediction_type": "epsilon"}
    ),
    "Stable Diffusion 2 in one file": Source(
        functools.partial(text_unet, **SD2),
        _file(ldm_file),
        "ldm",
        SIDE | V_PREDICTION | {"num_heads": 4},
    ),
    "Stable Diffusion in one file, averaged": Source(
        text_unet,
        _averaged_ldm,
        "ldm",
        SIDE | {"num_heads": 8, "prediction_type": "epsilon", "allow_pickle": True},
    ),
    "SDXL in one file": Source(
        functools.partial(text_unet, **XL),
        _with_scheduler(_file(ldm_unet)),
        "ldm",
        SIDE | {"num_heads": 2, "schedule": "scheduler_config.json"},
    ),
}


def conversion(workshop: Workshop) -> Outputs:
    """Every layout: the expert, its velocity, and the source that is written back from it."""
    folder = workshop.folder("conversion")
    for name, source in SOURCES.items():
        own = folder / name
        own.mkdir()
        network = source.network()
        path, options = source.write(own, network), dict(source.options)
        if "schedule" in options:
            options["schedule"] = own / options["schedule"]
        hddm.convert(path, own / "expert", **options)
        yield from under(f"{name}/expert", files_of(own / "expert", workshop.root))
        yield from under(name, _velocities(own / "expert", network))
        command("convert", own / "expert", "--out", own / "back", "--to-layout", source.layout)
        yield from under(f"{name}/back", files_of(own / "back", workshop.root))
    again = {"once more": {}, "with text": {"text_dim": 12}}
    for name, options in again.items():
        hddm.convert(folder / "facebook's DiT" / "expert", folder / name, **options)
        yield from under(name, files_of(folder / name, workshop.root))
    # A merged expert has no source, whose scheduler it could give back.
    for name in ("DiT", "SD3", "Flux dev", "facebook's DiT"):
        merged, back = folder / f"merged {name}", folder / f"merged {name}, back"
        command("merge", folder / name / "expert", folder / name / "expert", "--out", merged)
        command("convert", merged, "--out", back, "--to-layout", SOURCES[name].layout)
        yield from under(back.name, files_of(back, workshop.root))
    yield from under("Paris", _paris(folder / "paris"))


def _conditions(network: ModelMixin, rows: int) -> dict[str, Tensor]:
    is_flow = type(network).__name__.startswith(("SD3", "Flux"))
    return flow_models.text(network, rows) if is_flow else conditions_of(network, rows)


def _velocities(expert: Path, network: ModelMixin) -> Outputs:
    """Velocities of an expert under its conditions, under none of them, and guided away from none."""
    field = hddm.load(expert)
    x, t = states(field.sample_shape)
    t = t.clamp(*field.noise_range)
    given = _conditions(network, len(x))
    yield "velocity", field.velocity(x, t, **given)
    needed = {name: one.flip(0) for name, one in given.items() if name not in field.null_conditions}
    if len(needed) < len(given):
        yield "velocity without conditions", field.velocity(x, t, **needed)
    if given:
        yield "guided velocity", field.velocity(x, t, 3.0, needed, **given)


def _paris(folder: Path) -> Outputs:
    """The Paris release, as it is."""
    write_paris(folder)
    model = hddm.load(folder)
    x, t = states((4, 8, 8))
    text = {"encoder_hidden_states": noise(len(TIMES), 5, TEXT, seed=2)}
    against = {"encoder_hidden_states": noise(len(TIMES), 5, TEXT, seed=3)}
    yield "probabilities", model.router(x, t)
    for strategy in ("top-1", "top-2", "full"):
        model.strategy = strategy
        yield f"velocity/{strategy}", model.velocity(x, t, **text)
        yield f"velocity/{strategy}/guided", model.velocity(x, t, 7.5, against, **text)
        yield f"samples/{strategy}", hddm.sample(model, len(TIMES), steps=3, **text)


def _in_order(file: Path) -> Path:
    """A LoRA file of diffusers with the same bytes in each run: it writes sets, and keys in any order."""
    key = "lora_adapter_metadata"
    with safe_open(file, "pt") as opened:
        adapter = json.loads(opened.metadata()[key])
    for name, value in adapter.items():
        if isinstance(value, list):
            adapter[name] = sorted(value)
    save_file(load_file(file), file, {key: json.dumps(adapter)})
    return file


def loras(workshop: Workshop) -> Outputs:
    """LoRA files of kohya's trainer and of diffusers, as experts of their bases."""
    folder = workshop.folder("loras")
    for kind, make in lora_files.NETWORKS.items():
        own, network = folder / kind, make()
        own.mkdir()
        is_unet = kind in ("unet", "xl")
        scheduler = DDIMScheduler(**SD_BETAS, prediction_type="epsilon")
        source = pipeline(own / "source", network, scheduler) if is_unet else _flow(own, network)
        hddm.convert(source, own / "base", **({"sample_size": 8} if kind == "flux" else {}))
        files = {"diffusers": _in_order(lora_files._peft_file(kind, own, patterns=is_unet))}
        if kind == "unet":
            files["kohya"] = own / "kohya.safetensors"
            save_file(kohya(network, ranks=(3, 5), alphas=(2.0, 1.0)), files["kohya"])
        for tool, file in files.items():
            out = own / f"of {tool}"
            command("convert", file, "--base", own / "base", "--out", out)
            yield from under(f"{kind}/{tool}", files_of(out, workshop.root))
            yield from under(f"{kind}/{tool}", _velocities(out, network))
