"""Tiny ensembles, in memory and as folders, whose experts and routers have random weights."""

import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

import hddm
from hddm.calibration import Calibration, Moments
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.assembly import assemble
from hddm.experts.ensemble_records import EnsembleRecord, Member, read_ensemble_record
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import save_expert
from hddm.experts.expert_set import ExpertSet
from hddm.experts.loading import open_ensemble
from hddm.experts.record_folders import save_router
from hddm.experts.records import ExpertRecord, RouterRecord
from hddm.networks.families import known_family
from hddm.networks.offload import Shelf
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.networks.unread import Unread
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.schedules import LinearSchedule, from_diffusers
from hddm.settings import Conversion
from tests.artefacts import edit_json
from tests.checkpoint_files import SD_BETAS, dit, pipeline, plain_unet, randomised
from tests.component_files import texts_in, write_clip, write_vae

WEIGHTS = "diffusion_pytorch_model.safetensors"
FLOW = {
    "sample_size": 4,
    "in_channels": 3,
    "patch_size": 2,
    "hidden_size": 16,
    "depth": 1,
    "num_heads": 2,
}
CLASSES = ("cat", "dog", "7")


def load_ensemble(folder: Path, **options: Any) -> hddm.Ensemble:
    """`hddm.load` of what must be an ensemble."""
    model = hddm.load(folder, **options)
    assert isinstance(model, hddm.Ensemble)
    return model


def flow_expert(seed: int = 0, facts: Mapping[str, Any] | None = None, **network: Any) -> Expert:
    """A flow expert of 3×4×4 pixels, or of what ``network`` and ``facts`` say."""
    made = randomised(ExpertTransformer(**FLOW | network), seed)
    interface = known_family(made).interface(made.config)
    classes = (
        CLASSES
        if interface.num_classes == len(CLASSES)
        else map(str, range(interface.num_classes or 0))
    )
    stated = {
        "objective": "flow",
        "prediction_type": "flow_prediction",
        "schedule": LinearSchedule().config,
        "schedule_source": "the test",
        "time_scale": 1000.0,
        "sample_shape": interface.sample_shape,
        "conditions": interface.conditions,
        "classes": tuple(classes),
        "null_class": interface.null_class,
    }
    nulls = {}
    if "encoder_hidden_states" in interface.conditions:
        nulls["encoder_hidden_states"] = torch.zeros(77, made.config.text_dim)
    return Expert(made, ExpertRecord.model_validate(stated | dict(facts or {})), None, nulls)


def three_ends() -> list[Expert]:
    """Three experts, whose schedules end where Stable Diffusion's does, where DDPM's does, and at t = 1."""
    experts = []
    for k, betas in enumerate((SD_BETAS, {"beta_schedule": "linear"})):
        config = from_diffusers(DDPMScheduler(**betas)).config
        facts = {"prediction_type": "v_prediction", "schedule": config, "time_scale": 1.0}
        experts.append(flow_expert(k, facts))
    return [*experts, flow_expert(2)]


def calibration_of(seed: int = 0, shape: Sequence[int] = (3, 4, 4)) -> Calibration:
    """A calibration of random data of this shape, which acts from t = 0.9 on."""
    noise = torch.Generator().manual_seed(seed)
    data = torch.randn(40, 1, *shape[1:], generator=noise) + torch.randn(
        40, *shape, generator=noise
    )
    moments = Moments.of(data / 2 + 0.1 * seed)
    weights = torch.zeros(3, len(moments.variances))
    weights[-1] = 1
    return Calibration(moments, torch.tensor([0, 0.9, 1]), weights)


def saved(folder: Path, expert: Expert) -> Path:
    """A new folder of this expert."""
    folder.mkdir(parents=True)
    save_expert(folder, expert)
    return folder


def shard_of(
    name: str, images: int, class_images: Sequence[int] = (), **more: Any
) -> dict[str, Any]:
    """The record of the only shard of a partition, whose hash is ``name``."""
    counted = {"hash": name, "images": images, "class_images": class_images}
    return {"index": 0, "num_shards": 1, **counted, **more}


def random_router(
    num: int, shape: Sequence[int] = (3, 4, 4), seed: int = 0
) -> tuple[RouterTransformer, RouterRecord]:
    """A router that prefers other experts for other samples, none of them on the whole."""
    network = RouterTransformer(
        num, shape[1], shape[0], patch_size=2, hidden_size=16, depth=1, num_heads=2
    )
    randomised(network, seed)
    for block in network.layers:
        block.attn.in_proj_weight.data *= 5
    noise = torch.Generator().manual_seed(seed)
    logits = network(torch.randn(256, *shape, generator=noise), torch.linspace(0, 1000, 256))
    last, scale = network.head[-1], 2 / logits.std(0).mean()
    last.weight.data *= scale
    last.bias.data = (last.bias - logits.mean(0)) * scale
    hashes = tuple(f"shard {k}" for k in range(num))
    facts = RouterRecord(
        time_scale=1000.0, sample_shape=tuple(shape), shard_hashes=hashes, shard_images=(1,) * num
    )
    return network, facts


def pipeline_in_memory(
    experts: Sequence[Expert],
    strategy: str = "top-1",
    prior: Sequence[float] | None = None,
    class_prior: Sequence[Sequence[float]] = (),
    shift: float = 1.0,
    shelf: Shelf | None = None,
    **parts: Any,
) -> HDDMPipeline:
    """A pipeline of experts that lie on no disk, behind a random router."""
    num = len(experts)
    router, router.record = random_router(num, experts[0].record.sample_shape)
    classes = next((one.record.classes for one in experts if one.record.classes), ())
    members = [
        Member(
            folder=f"experts/{k}",
            share=None if prior is None else prior[k],
            class_shares={name: row[k] for name, row in zip(classes, class_prior, strict=False)},
        )
        for k in range(num)
    ]
    record = EnsembleRecord(experts=tuple(members), router="router", strategy=strategy)
    pipe = HDDMPipeline(
        ExpertSet([expert for expert in experts], shelf=shelf),
        FlowMatchEulerDiscreteScheduler(shift=shift),
        router,
        record=record,
        **parts,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def edit_members(whole: Path, **changes: Sequence[Any]) -> None:
    """Set keys of the experts in ``ensemble.json``, by lists with one value per expert."""
    experts = json.loads((whole / "ensemble.json").read_text())["experts"]
    for key, values in changes.items():
        experts = [one | {key: value} for one, value in zip(experts, values, strict=True)]
    edit_json(whole / "ensemble.json", experts=experts)


def load_pipeline(folder: Path, **options: Any) -> HDDMPipeline:
    """A pipeline without progress bars."""
    pipe = HDDMPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def write_ensemble(
    root: Path,
    experts: Sequence[Expert | Path],
    strategy: str = "nucleus-0.9",
    dtype: torch.dtype = torch.float32,
    classes: Mapping[str, Sequence[str]] | None = None,
    **components: Path,
) -> Path:
    """An ensemble folder of ``experts``, in memory or converted, behind a random router."""
    folders, shapes = [], []
    for index, expert in enumerate(experts):
        folder = expert if isinstance(expert, Path) else root / "parts" / str(index)
        if isinstance(expert, Expert):
            expert.network.to(dtype)
            saved(folder, expert)
            shapes.append(expert.record.sample_shape)
        folders.append(folder)
    network, facts = random_router(len(experts), shapes[0])
    (root / "router").mkdir()
    save_router(root / "router", network.to(dtype), facts)
    assemble(
        folders,
        root / "ensemble",
        root / "router",
        # Records of these experts name no VAE and no text encoder.
        trust_components=True,
        strategy=strategy,
        classes=classes,
        **components,
    )
    return root / "ensemble"


def write_mixed(root: Path) -> Path:
    """A UNet (DDPM, epsilon), a DiT (another schedule, v_prediction, classes) and a flow transformer."""
    unet = plain_unet(1, in_channels=4, out_channels=4, block_out_channels=(32, 32))
    unet_source = pipeline(root / "unet", unet, DDPMScheduler(beta_schedule="linear"))
    scheduler = DDIMScheduler(**SD_BETAS, prediction_type="v_prediction")
    dit_source = pipeline(root / "dit", dit(2), scheduler)
    for name, source in (("unet", unet_source), ("dit", dit_source)):
        write(plan_conversion(source, Conversion()), root / "converted" / name)
    sizes = {"in_channels": 4, "sample_size": 8, "hidden_size": 48, "depth": 2, "num_classes": 5}
    flow = flow_expert(3, {"space": "latents", "latent_scale": None}, **sizes)
    write_vae(root / "vae")
    experts = [root / "converted" / "unet", root / "converted" / "dit", flow]
    # All make the same five classes, one of them without being asked.
    return write_ensemble(root, experts, classes={"unet": tuple("01234")}, vae=root / "vae")


def text_experts(num: int = 2, width: int = 16, **changes: Any) -> list[Expert]:
    """Experts of latents 4×4×4 that take text."""
    facts = {"space": "latents", "latent_scale": None}
    sizes = {"in_channels": 4, "text_dim": width, **changes}
    experts = [flow_expert(seed, facts, **sizes) for seed in range(10, 10 + num)]
    for expert in experts:
        # So that prompts tell.
        expert.network.text_proj.weight.data *= 10
    return experts


def write_unlike(root: Path, strategy: str = "draw") -> Path:
    """An ensemble of two experts of text with an expert of nothing between them, its VAE and text encoder."""
    first, last = text_experts(2)
    blind = flow_expert(5, {"space": "latents", "latent_scale": None}, in_channels=4)
    write_vae(root / "vae")
    write_clip(root / "clip")
    texts = texts_in(root / "clip")
    return write_ensemble(root, [first, blind, last], strategy, vae=root / "vae", **texts)


def write_text(root: Path, kind: Literal["kl", "tiny"] = "kl", strategy: str = "top-1") -> Path:
    """An ensemble of text experts with its VAE, text encoder and tokenizer."""
    write_vae(root / "vae", kind)
    write_clip(root / "clip")
    texts = texts_in(root / "clip")
    return write_ensemble(root, text_experts(), strategy, vae=root / "vae", **texts)


@dataclass(frozen=True)
class Derived:
    """What an ensemble's folder holds and what follows from it, as plain values."""

    names: tuple[str | None, ...]
    prior: tuple[float, ...]
    classes: tuple[str, ...]
    class_prior: tuple[tuple[float, ...], ...]
    class_lists: tuple[tuple[str, ...], ...]
    domains: tuple[int, ...]
    outputs: tuple[int, ...]
    """Of the learned router, for each expert; empty without one."""
    router: str | None
    texts: tuple[int, ...]
    vaes: tuple[int, ...]
    topics: int | None
    strategy: str
    shift: float


def derived(folder: Path) -> Derived:
    """What is in an ensemble's folder."""
    model, record = load_ensemble(folder), read_ensemble_record(folder)
    router = getattr(model.router, "outputs", ())
    rows = [] if model.class_prior is None else model.class_prior.tolist()
    outputs = range(len(record.experts)) if router is None else router
    return Derived(
        tuple(one.name for one in record.experts),
        tuple(model.prior.tolist()),
        model.classes,
        tuple(map(tuple, rows)),
        tuple(one.classes for one in record.experts),
        model.domains,
        tuple(outputs),
        record.router,
        model.texts,
        model.vaes,
        open_ensemble(folder, torch.float32).topics,
        record.strategy,
        record.shift,
    )


class Scales:
    """Experts whose weights are weighed for as long as anything holds them."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[np.ndarray]] = []
        self.most = 0
        self.reads: list[int] = []

    def expert(self, seed: int, noise_range: Sequence[float] = (0, 1), **network: int) -> Expert:
        expert = flow_expert(seed, {"noise_range": noise_range}, **network)
        stored = {name: value.numpy() for name, value in expert.network.state_dict().items()}

        def read(dtype: torch.dtype) -> dict[str, Tensor]:
            self.on_read(seed)
            fresh = {name: array.copy() for name, array in stored.items()}
            self.alive += map(weakref.ref, fresh.values())
            self.most = max(self.most, self.held())
            return {name: torch.from_numpy(array) for name, array in fresh.items()}

        return replace(expert, opened=Unread(expert.network, read), folder=Path())

    def on_read(self, seed: int) -> None:
        """Called before the weights of an expert are read."""
        self.reads.append(seed)

    def held(self) -> int:
        arrays = [one() for one in self.alive]
        return sum(array.nbytes for array in arrays if array is not None)
