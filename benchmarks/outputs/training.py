"""Data, and everything that is trained on it: losses of every step, weights, records and velocities."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

import hddm
from benchmarks.outputs.digests import Outputs, files_of, under
from benchmarks.outputs.workshop import SHORT, Workshop, command, noise, options_of, states
from tests.checkpoint_files import SD_BETAS, dit, pipeline, text_unet
from tests.component_files import texts_in, write_clip, write_vae
from tests.shard_files import noise as noisy_images
from tests.shard_files import write_shard

SCALE = 0.4
"""Of latents."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "flow of velocity": {"objective": "flow", "prediction": "flow_prediction"},
    "flow of the sample": {"objective": "flow"},
    "flow of v": {"objective": "flow", "prediction": "v_prediction"},
    "ddpm of noise": {"objective": "ddpm"},
    "ddpm of v": {"objective": "ddpm", "prediction": "v_prediction"},
    "ddpm of the sample": {"objective": "ddpm", "prediction": "sample"},
    "min-SNR": {"objective": "ddpm", "snr_gamma": 5.0},
    "uniform times": {"objective": "flow", "time_sampling": "uniform"},
    "velocity loss of noise": {"objective": "ddpm", "weighting": "velocity"},
    "classes": {"objective": "flow", "class_conditional": True},
    "muon": {"objective": "flow", "optimizer": "muon"},
    "without rotary positions": {"objective": "flow", "rotary": False},
    "mirrored": {"objective": "flow", "random_flip": True},
    "high noise alone": {"objective": "ddpm", "noise_range": (0.6, 1.0)},
    "low noise alone": {"objective": "flow", "noise_range": (0.0, 0.6)},
    "parts of a batch": {"objective": "flow", "gradient_accumulation_steps": 2},
    "a size by numbers": {"objective": "flow", "size": "3x40/1"},
    "without a weak model": {"objective": "flow", "weak_at": 0.0},
}


def losses_of(run: Path) -> Tensor:
    """The loss of every step that a run has logged."""
    logs = next(run.rglob("events.out.*")).parent
    reader = EventAccumulator(str(logs), {"scalars": 0})
    reader.Reload()
    return torch.tensor([one.value for one in reader.Scalars("train/loss")])


def conditions_for(field: hddm.VelocityField, rows: int) -> dict[str, Tensor]:
    """A class or text of any kind for each row, where the expert takes one."""
    given: dict[str, Tensor] = {}
    if "class_labels" in field.conditions:
        given["class_labels"] = torch.arange(rows) % len(field.classes)
    if "encoder_hidden_states" in field.conditions:
        width = field.null_conditions["encoder_hidden_states"].shape[-1]
        given["encoder_hidden_states"] = noise(rows, 6, width, seed=4)
    return given


def of_expert(name: str, folder: Path, workshop: Workshop) -> Outputs:
    """The files of an expert, its velocity, and the losses of the run that is kept beside it."""
    yield from under(name, files_of(folder, workshop.root))
    field = hddm.load(folder)
    x, t = states(field.sample_shape)
    # A student of few steps takes the end of its step.
    over = {"then": t / 2} if field.sampling_steps else {}
    given = conditions_for(field, len(x))
    yield f"{name}/velocity", field.velocity(x, t.clamp(*field.noise_range), **over, **given)
    run = folder.with_name(f"{folder.name}.run")
    if run.is_dir():
        yield f"{name}/losses", losses_of(run)


def data(workshop: Workshop) -> Outputs:
    """Partitions, by content, by class and with held-out images; pixels, latents and tokens of shards."""
    folder, images = workshop.folder("data"), workshop.images
    hddm.partition(images, folder / "by content", 3)
    hddm.partition(images, folder / "held out", 1, held_out=0.4, seed=5)
    by_class = {"classes": [["columns"], ["rows"]]}
    hddm.partition(images, folder / "by class", 2, **by_class)
    command("encode", folder / "by class", "--out", folder / "pixels", "--resolution", 8)
    command(
        "encode", _captioned(folder / "captioned"), "--out", folder / "latents", *_encoders(folder)
    )
    for name in ("by content", "held out", "by class", "pixels", "latents"):
        files = files_of(folder / name, workshop.root, kept=lambda path: "images" not in path.parts)
        yield from under(name, files)


def _captioned(folder: Path) -> Path:
    """A shard of 32 images with classes and captions."""
    captions = [("a cat", "two dogs", "")[n % 3] for n in range(32)]
    write_shard(folder, noisy_images(32), [n % 2 for n in range(32)], captions)
    return folder


def _encoders(folder: Path) -> list[object]:
    """Options that encode images and captions by networks with random weights."""
    write_vae(folder / "vae", scaling_factor=SCALE)
    write_clip(folder, tokens=8)
    parts = {"vae": folder / "vae", **texts_in(folder)}
    return options_of(parts)


def training(workshop: Workshop) -> Outputs:
    """Experts of every objective and kind of data, and of schedules in files."""
    folder, shard = workshop.folder("training"), workshop.shards / "shard_1"
    for name, settings in OBJECTIVES.items():
        hddm.train(shard, folder / name, **SHORT | settings)
        yield from of_expert(name, folder / name, workshop)
    DDPMScheduler(**SD_BETAS, prediction_type="v_prediction").save_pretrained(folder)
    file = folder / "scheduler_config.json"
    hddm.train(shard, folder / "schedule of a file", objective="ddpm", schedule=file, **SHORT)
    yield from of_expert("schedule of a file", folder / "schedule of a file", workshop)
    command(
        "encode", _captioned(folder / "images"), "--out", folder / "latents", *_encoders(folder)
    )
    for objective in ("ddpm", "flow"):
        for name in ("class_conditional", "text_conditional"):
            out = folder / f"latents, {objective}, {name}"
            hddm.train(folder / "latents", out, **SHORT, objective=objective, **{name: True})
            yield from of_expert(out.name, out, workshop)


def continuation(workshop: Workshop) -> Outputs:
    """Experts made of others: trained on, as a whole or by an adapter, calibrated, and merged."""
    folder, shard = workshop.folder("continuation"), workshop.shards / "shard_2"
    ddpm, flow, _ = workshop.experts
    own: dict[str, Any] = {name: value for name, value in SHORT.items() if name != "size"}
    own |= {"steps": 4, "class_conditional": True}
    made: dict[str, dict[str, Any]] = {
        "ddpm by ddpm": {"init": ddpm, "objective": "ddpm"},
        "ddpm by flow": {"init": ddpm, "objective": "flow"},
        "flow by flow": {"init": flow, "objective": "flow"},
        "high noise alone": {"init": ddpm, "objective": "flow", "noise_range": (0.7, 1.0)},
        "adapter of flow": {"init": flow, "objective": "flow", "lora_rank": 2},
        "adapter of ddpm": {"init": ddpm, "objective": "flow", "lora_rank": 3, "lora_alpha": 1.0},
        "another adapter of flow": {"init": flow, "objective": "flow", "lora_rank": 2, "seed": 8},
    }
    for name, settings in made.items():
        hddm.train(shard, folder / name, **own | settings)
    hddm.train(shard, folder / "twice", **own, init=folder / "ddpm by flow", objective="flow")
    yield from _of_diffusers(folder, own, workshop)
    parts = [folder / "flow by flow", flow]
    command("merge", *parts, "--weights", "0.25,0.75", "--out", folder / "merged")
    adapters = [folder / "adapter of flow", folder / "another adapter of flow"]
    command("merge", *adapters, "--out", folder / "merged adapters")
    own_shard = workshop.shards / "shard_0"
    command("calibrate", ddpm, "--data", own_shard, "--out", folder / "calibrated on a shard")
    drawn = ("--num-images", 32, "--steps", 5)
    command("calibrate", ddpm, *drawn, "--out", folder / "calibrated on samples")
    others = (
        "twice",
        "merged",
        "merged adapters",
        "calibrated on a shard",
        "calibrated on samples",
    )
    for name in (*made, *others):
        yield from of_expert(name, folder / name, workshop)


def _of_diffusers(folder: Path, own: dict[str, Any], workshop: Workshop) -> Outputs:
    """Networks of diffusers that are trained on, as a whole and by an adapter."""
    write_shard(
        folder / "images", noisy_images(16, 16, 16), [n % 2 for n in range(16)], ["a cat"] * 16
    )
    command("encode", folder / "images", "--out", folder / "latents", *_encoders(folder))
    networks = {"DiT": dit(num_embeds_ada_norm=2), "UNet": text_unet()}
    for name, network in networks.items():
        source = pipeline(folder / f"{name} pipeline", network)
        write_vae(source / "vae", scaling_factor=SCALE)
        hddm.convert(source, folder / f"{name} converted")
        # A DiT trained on without classes keeps the one for no class.
        condition = {"class_conditional": False, "text_conditional": name == "UNet"}
        for kind, changes in (("whole", {}), ("adapter", {"lora_rank": 2})):
            out = folder / f"{name}, {kind}"
            start = {"init": folder / f"{name} converted", "objective": "flow"}
            hddm.train(folder / "latents", out, **own | condition | start | changes)
            yield from of_expert(out.name, out, workshop)


STUDENTS: dict[str, dict[str, Any]] = {
    "of shards": {},
    "of the mixture": {"teacher": "routed", "strategy": "top-2"},
    "one step": {"sampling_steps": 1, "teacher": "routed"},
    "two steps": {"sampling_steps": 2, "teacher": "routed"},
    "four steps, guided": {"sampling_steps": 4, "teacher": "routed", "guidance_scale": 2.0},
}


def students(workshop: Workshop) -> Outputs:
    """Students of an ensemble, of any number of steps and of few; their samples, alone and drawn."""
    folder = workshop.folder("students")
    hddm.assemble(workshop.experts, folder / "teacher", workshop.router, strategy="full")
    few = []
    for name, changes in STUDENTS.items():
        settings, init = SHORT | changes, []
        if "sampling_steps" in changes:
            del settings["size"]
            settings |= {"trajectories": 64}
            init = ["--init", workshop.experts[1]]
            few.append(folder / name)
        given = (
            "--data",
            workshop.shards,
            "--out",
            folder / name,
            *init,
            *workshop.config(settings),
        )
        command("distill", folder / "teacher", *given)
        yield from of_expert(name, folder / name, workshop)
        model = hddm.load(folder / name)
        yield (
            f"{name}/samples",
            hddm.sample(model, 4, seed=2, class_labels=torch.tensor([0, 1, 1, 0])),
        )
        yield f"{name}/samples of three steps", hddm.sample(model, 4, seed=2, steps=3)
    shares = {"one step": 0.2, "two steps": 0.5, "four steps, guided": 0.3}
    hddm.assemble(few, folder / "ensemble", share=shares)
    yield "drawn students/samples", hddm.sample(hddm.load(folder / "ensemble"), 6, seed=2)
