"""A published model beside its conversion: the convention, one call of its network, and one picture.

The reference is diffusers' own network and pipeline, read as the table of `entries` says, by formulas of
this file's own.
"""

import math
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.utils import logging
from huggingface_hub import snapshot_download
from PIL import Image
from torch import Tensor

import hddm
from benchmarks.acceptance.entries import Convention, Entry
from benchmarks.acceptance.stages import Kit, NotRun, code_digest, relative_error
from benchmarks.figures import Figure, Result, at_least, at_most, holds, told
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.files import read_json
from hddm.utils.hub import local, origin_of
from hddm.utils.memory import release
from hddm.velocity import VelocityField

SHARES = (0.1, 0.5, 0.9)
"""Of the way from data to noise, where the network is called."""
TOKENS = 20
STAND_IN_SIDE, STAND_IN_STEPS = 64, 3
_INDEX = "model_index.json"
_PAPERS = ["*.json", "*.txt", "*.model", "**/*.json", "**/*.txt", "**/*.model"]
_LEAST_SPREAD = 2.0
"""Standard deviation of a picture's pixels, at least, in steps of 255: an empty one has none."""


def sized(entry: Entry, kit: Kit) -> Entry:
    """The entry as this machine compares it: in float32 on a CPU, and stand-ins at their own sizes."""
    if not kit.is_gpu:
        entry = replace(entry, dtype="float32", most=1e-4, most_of_picture=0.5)
    if kit.is_real:
        return entry
    conversion = dict(entry.conversion)
    if "sample_size" in conversion or entry.file:
        conversion["sample_size"] = 8
    # Its commit is that of the content.
    configs = entry.configs and f"{entry.configs.partition('@')[0]}@main"
    lora = entry.lora and replace(entry.lora, revision="main")
    return replace(
        entry,
        side=STAND_IN_SIDE,
        conversion=conversion,
        call={**entry.call, "num_inference_steps": STAND_IN_STEPS},
        revision="main",
        configs=configs,
        lora=lora,
    )


def compare(entry: Entry, kit: Kit) -> Result:
    """Download, convert and compare one row of the table; and sample it."""
    be_exact()
    entry = sized(entry, kit)
    began = time.perf_counter()
    folder = download(entry)
    fetched = time.perf_counter() - began
    origin = origin_of(folder) or ""
    commit = origin.partition("@")[2]
    size = sum(path.stat().st_size for path in folder.parent.rglob("*") if path.is_file())
    figures = [told("download", size / 1e9, " GB", f"expected: {entry.gigabytes:g} GB")]
    figures += [told("time of the download", fetched, " s")]
    expert = expert_folder(entry, commit, kit)
    if expert.exists():
        figures.append(told("conversion", "converted by an earlier start"))
    else:
        began = time.perf_counter()
        convert(entry, folder, expert, kit.device)
        figures.append(told("time of the conversion", time.perf_counter() - began, " s"))
    figures.append(convention_error(entry, expert))
    figures += network_errors(entry, folder, expert, kit.device)
    found, pictures = picture_errors(entry, folder, expert, kit)
    figures += found
    notes = [f"Licence of the weights: {entry.licence}.", f"Layout: {entry.layout}."]
    return Result(figures, notes, not kit.is_real, commit or "unknown", pictures)


def be_exact() -> None:
    """Compute in full precision, and say nothing of deprecations."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    # TF32 keeps ten bits of each factor.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def download(entry: Entry) -> Path:
    """The folder or file of an entry in the cache of the hub."""
    if entry.conversion.get("allow_pickle"):
        # hddm itself downloads no pickles.
        patterns = [*_PAPERS, "**/*.bin"]
        folder = snapshot_download(entry.repo, revision=entry.revision, allow_patterns=patterns)
        return Path(folder)
    return local(entry.source)


def configs_of(entry: Entry) -> Path:
    """The folder of configs and vocabularies that a single file lacks."""
    repo, _, revision = entry.configs.partition("@")
    return Path(snapshot_download(repo, revision=revision, allow_patterns=_PAPERS))


def expert_folder(entry: Entry, commit: str, kit: Kit) -> Path:
    """Where the expert of an entry is kept, by the commit that it was made of and the code that made it.

    Experts of other commits or other code are deleted: they are large, and nothing compares them again.
    """
    return kept_expert(kit.work / "experts" / entry.name, commit)


def kept_expert(place: Path, commit: str) -> Path:
    """The folder in ``place`` for this commit and this code, without its siblings."""
    folder = place / f"{commit[:12]}-{code_digest()[:12]}"
    for other in place.glob("*"):
        if other != folder:
            shutil.rmtree(other)
    return folder


def convert(entry: Entry, folder: Path, out: Path, device: str) -> None:
    """Convert an entry; where hddm can, it is named as on the hub."""
    options = dict(entry.conversion)
    if entry.configs:
        options["tokenizer"] = configs_of(entry) / "tokenizer"
    source: Any = folder if options.get("allow_pickle") else entry.source
    out.parent.mkdir(parents=True, exist_ok=True)
    # Verified below, by formulas that share nothing with the library's.
    hddm.convert(source, out, device=device, **options)


def convention_error(entry: Entry, expert: Path) -> Figure:
    """How far the expert's schedule is from the published one; infinite for another prediction."""
    field = hddm.load(expert)
    assert isinstance(field, VelocityField)
    convention, error = entry.convention, 0.0
    if field.prediction_type != convention.prediction:
        error = math.inf
    for share in SHARES:
        alpha, sigma, moment = convention.level(share)
        native = moment / convention.time_scale if convention.betas is None else moment
        found = field.schedule.alpha_sigma(torch.tensor(native, dtype=torch.float64))
        error = max(error, abs(float(found[0]) - alpha), abs(float(found[1]) - sigma))
    return at_most("schedule and prediction beside the published ones", error, 1e-5)


def network_errors(entry: Entry, folder: Path, expert: Path, device: str) -> list[Figure]:
    """Relative differences of the expert's velocity from that of diffusers' network, by noise level."""
    dtype = getattr(torch, entry.dtype)
    network = stock_network(entry, folder, dtype).to(device).eval()
    given = conditions_of(network)
    states, expected = [], []
    shape = state_shape(network, entry)
    noise = torch.Generator().manual_seed(0)
    for share in SHARES:
        states.append(torch.randn(1, *shape, generator=noise))
        expected.append(stock_velocity(network, entry.convention, states[-1], share, given, device))
    del network
    release()
    field = hddm.load(expert, dtype, device)
    found = []
    for share, x, theirs in zip(SHARES, states, expected, strict=True):
        t = common_time(entry.convention, share)
        ours = field.velocity(x.to(device), torch.tensor([t]), **moved(given, device))
        error = relative_error(ours, theirs)
        what = f"one call at t = {t:.3f}, relative difference ({entry.dtype})"
        found.append(at_most(what, error, entry.most))
    return found


def stock_network(entry: Entry, folder: Path, dtype: torch.dtype) -> Any:
    """The network of an entry as diffusers reads it."""
    if entry.file:
        return stock_pipeline(entry, folder, dtype).unet
    part, (_, name) = network_part(folder)
    return getattr(diffusers, name).from_pretrained(folder / part, torch_dtype=dtype)


def network_part(folder: Path) -> tuple[str, tuple[str, str]]:
    """Name, library and class of the network in a pipeline folder."""
    index = read_json(folder / _INDEX)
    part = "unet" if "unet" in index else "transformer"
    return part, tuple(index[part])


def stock_pipeline(entry: Entry, folder: Path, dtype: torch.dtype, **parts: Any) -> Any:
    """The pipeline of an entry as diffusers reads it; what was not downloaded is left out."""
    if entry.file:
        configs = str(configs_of(entry))
        pipe = diffusers.StableDiffusionXLPipeline.from_single_file(
            str(folder), config=configs, torch_dtype=dtype, **parts
        )
        stated = {
            "prediction_type": entry.convention.prediction,
            "rescale_betas_zero_snr": entry.convention.is_zero_snr,
        }
        pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(
            pipe.scheduler.config, **stated
        )
    else:
        absent = dict(parts)
        for name, kind in read_json(folder / _INDEX).items():
            is_part = isinstance(kind, list) and kind[0] is not None
            if is_part and not (folder / name).is_dir():
                absent[name] = None
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def state_shape(network: Any, entry: Entry) -> tuple[int, int, int]:
    """Channels, height and width of what the network denoises."""
    config = network.config
    if type(network).__name__ == "FluxTransformer2DModel":
        # Its rows are patches of 2×2.
        side = int(entry.conversion["sample_size"])
        return config.in_channels // 4, side, side
    return config.in_channels, config.sample_size, config.sample_size


def conditions_of(network: Any) -> dict[str, Tensor]:
    """Random conditions of one sample, under hddm's names."""
    noise, config = torch.Generator().manual_seed(1), network.config
    kind = type(network).__name__
    if kind == "DiTTransformer2DModel":
        return {"class_labels": torch.tensor([3])}
    if kind in ("SD3Transformer2DModel", "FluxTransformer2DModel"):
        pooled = torch.randn(1, config.pooled_projection_dim, generator=noise)
        text = torch.randn(1, TOKENS, config.joint_attention_dim, generator=noise)
        return {"encoder_hidden_states": text, "pooled_projections": pooled}
    width = config.cross_attention_dim
    if kind == "PixArtTransformer2DModel":
        width = config.caption_channels
    given = {"encoder_hidden_states": torch.randn(1, TOKENS, width, generator=noise)}
    if config.get("addition_embed_type") == "text_time":
        sizes = 6 * config.addition_time_embed_dim
        pooled_width = config.projection_class_embeddings_input_dim - sizes
        given["text_embeds"] = torch.randn(1, pooled_width, generator=noise)
        given["time_ids"] = torch.tensor([[512.0, 512, 0, 0, 512, 512]])
    return given


def moved(given: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """Conditions on a device."""
    return {name: one.to(device) for name, one in given.items()}


def common_time(convention: Convention, share: float) -> float:
    """The time on the common path: sigma / (alpha + sigma)."""
    alpha, sigma, _ = convention.level(share)
    return sigma / (alpha + sigma)


@torch.no_grad()
def stock_velocity(
    network: Any,
    convention: Convention,
    x: Tensor,
    share: float,
    given: Mapping[str, Tensor],
    device: str,
) -> Tensor:
    """Eps - x_0 of diffusers' network for a state of the common path, by the published convention."""
    alpha, sigma, moment = convention.level(share)
    y = (alpha + sigma) * x.double()
    output = raw(network, y.float().to(device), moment, moved(given, device))
    said = output[:, : x.shape[1]].double().cpu()
    if convention.prediction == "flow_prediction":
        return said
    if convention.prediction == "v_prediction":
        return (sigma * y + alpha * said) - (alpha * y - sigma * said)
    return said - (y - sigma * said) / alpha


def raw(network: Any, y: Tensor, moment: float, given: Mapping[str, Tensor]) -> Tensor:
    """The output of the network itself, called as its pipeline calls it."""
    dtype = next(network.parameters()).dtype
    named = {k: one.to(dtype) if one.is_floating_point() else one for k, one in given.items()}
    timestep = torch.tensor([moment], dtype=torch.float32, device=y.device)
    y = y.to(dtype)
    kind = type(network).__name__
    if kind == "FluxTransformer2DModel":
        return _flux(network, y, timestep, named)
    if kind == "PixArtTransformer2DModel":
        named["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}  # type: ignore[assignment]
    elif "text_embeds" in named:
        added = {name: named.pop(name) for name in ("text_embeds", "time_ids")}
        named["added_cond_kwargs"] = added  # type: ignore[assignment]
    return network(y, timestep=timestep, return_dict=False, **named)[0]


def _flux(network: Any, y: Tensor, timestep: Tensor, named: Mapping[str, Tensor]) -> Tensor:
    pipeline = diffusers.FluxPipeline
    batch, channels, height, width = y.shape
    rows = pipeline._pack_latents(y, batch, channels, height, width)
    places = pipeline._prepare_latent_image_ids(
        batch, height // 2, width // 2, y.device, torch.float32
    )
    tokens = named["encoder_hidden_states"].shape[1]
    texts = torch.zeros(tokens, 3, device=y.device)
    found = network(
        rows, timestep=timestep, img_ids=places, txt_ids=texts, return_dict=False, **named
    )[0]
    return pipeline._unpack_latents(found, 8 * height, 8 * width, 8)


def picture_errors(
    entry: Entry, folder: Path, expert: Path, kit: Kit
) -> tuple[list[Figure], dict[str, str]]:
    """Differences of a picture of diffusers' pipeline from one of the expert in it; and hddm's own."""
    dtype, place = getattr(torch, entry.dtype), kit.work / "pictures"
    place.mkdir(parents=True, exist_ok=True)
    pipe = stock_pipeline(entry, folder, dtype).to(kit.device)
    theirs, seconds = _picture(pipe, entry)
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    stand_in = hddm.drop_in(expert, pipe)
    setattr(pipe, part, stand_in)
    ours, of_ours = _picture(pipe, entry)
    error = float(np.abs(theirs - ours).mean() * 255)
    del pipe, stand_in
    release()
    own, of_own = own_picture(entry, expert, dtype, kit.device)
    figures = [
        at_most("picture, mean difference in steps of 255", error, entry.most_of_picture),
        told("seconds of a picture: diffusers", seconds, " s"),
        told("seconds of a picture: the expert in its pipeline", of_ours, " s"),
        told("seconds of a picture: hddm's own pipeline", of_own, " s"),
        holds("hddm's own picture is finite", bool(np.isfinite(own).all())),
        at_least("spread of its pixels in steps of 255", float(own.std() * 255), _LEAST_SPREAD),
    ]
    pictures = {}
    for way, pixels in (("diffusers", theirs), ("expert in its place", ours), ("hddm", own)):
        path = place / f"{entry.name}-{way.replace(' ', '-')}.png"
        Image.fromarray((pixels * 255).round().clip(0, 255).astype(np.uint8)).save(path)
        pictures[way] = str(path)
    return figures, pictures


def _picture(pipe: Any, entry: Entry) -> tuple[np.ndarray, float]:
    """Pixels (H, W, 3) from 0 to 1 of a pipeline, and seconds."""
    given = dict(entry.call)
    if "class_labels" not in given:
        given |= {"height": entry.side, "width": entry.side}
    if type(pipe).__name__ == "PixArtSigmaPipeline":
        given["use_resolution_binning"] = False
    began = time.perf_counter()
    made = pipe(**given, generator=torch.Generator().manual_seed(0), output_type="np").images
    return np.asarray(made[0], dtype=np.float64), time.perf_counter() - began


def own_pipeline(
    entry: Entry, expert: Path, dtype: Mapping[str, torch.dtype], device: str
) -> HDDMPipeline:
    """Hddm's own pipeline of an expert; a VAE in a pickle, which no expert keeps, is added."""
    parts = {}
    if entry.conversion.get("allow_pickle"):
        vae = diffusers.AutoencoderKL.from_pretrained(download(entry) / "vae")
        parts["vae"] = vae.to(dtype.get("vae", dtype["default"]))
    pipe = HDDMPipeline.from_pretrained(expert, dtype=dict(dtype), **parts).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def own_picture(
    entry: Entry, expert: Path, dtype: torch.dtype, device: str
) -> tuple[np.ndarray, float]:
    """Pixels (H, W, 3) from 0 to 1 of hddm's own pipeline, and seconds."""
    pipe = own_pipeline(entry, expert, {"default": dtype}, device)
    given = dict(entry.call)
    if not given["guidance_scale"]:
        # Diffusers' word for none.
        given["guidance_scale"] = 1.0
    began = time.perf_counter()
    made = pipe(**given, seed=0, output_type="np").images
    return np.asarray(made[0], dtype=np.float64), time.perf_counter() - began


def converted(entry: Entry, kit: Kit) -> Path:
    """The expert that the entry's own stage made; `NotRun` without one."""
    found = [*(kit.work / "experts" / entry.name).glob(f"*-{code_digest()[:12]}")]
    if not found:
        raise NotRun(f"the stage checkpoint-{entry.name} has made no expert")
    return found[0]
