"""Routers, and ensemble folders: owners, shares, classes, pairs by noise range, and changes of a folder."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hddm
from benchmarks.outputs.digests import Outputs, document, files_of, under
from benchmarks.outputs.training import losses_of
from benchmarks.outputs.workshop import SHORT, Workshop, command, states
from tests.ensemble_files import flow_expert, saved

ROUTERS: dict[str, dict[str, Any]] = {
    "learned": {},
    "mirrored": {"random_flip": True},
    "muon": {"optimizer": "muon"},
    "calibrated": {"calibrate": True},
    "wide": {"size": "2x64/1"},
}
SCORES = ("splits", "diversity", "memorisation", "recognised", "domains")
PAIR = ((0.5, 1.0), (0.0, 0.5))
"""Noise ranges of an expert for high and one for low noise."""


def routers(workshop: Workshop) -> Outputs:
    """Learned routers, of one partition and of two: their files, losses and probabilities."""
    folder = workshop.folder("routers")
    hddm.partition(workshop.images, folder / "other shards", 2, seed=1)
    for name, changes in ROUTERS.items():
        command(
            "train",
            "router",
            workshop.shards,
            "--out",
            folder / name,
            *workshop.config(SHORT | changes),
        )
    several = (workshop.shards, folder / "other shards")
    command(
        "train", "router", *several, "--out", folder / "of two partitions", *workshop.config(SHORT)
    )
    for name in (*ROUTERS, "of two partitions"):
        yield from under(name, files_of(folder / name, workshop.root))
        yield f"{name}/losses", losses_of(folder / f"{name}.run")
        hddm.assemble(workshop.experts, folder / f"{name}, assembled", folder / name)
        yield (
            f"{name}/probabilities",
            hddm.load(folder / f"{name}, assembled").router(*states((1, 4, 4))),
        )


def ensembles(workshop: Workshop) -> Outputs:
    """Ensemble folders: their records, the router, and samples of several strategies and classes."""
    folder, experts = workshop.folder("ensembles"), workshop.experts
    theirs, pair = _theirs(folder, workshop), _pair(folder, workshop)
    routed: dict[str, Any] = {"router": workshop.router}
    names = {"theirs": {"dots": "spots"}, "expert_0": {"rows": "lines"}}
    made: dict[str, tuple[list[Path], dict[str, Any]]] = {
        "one partition": (experts, routed | {"strategy": "nucleus-0.9"}),
        "without a router": (experts, {}),
        "router by moments": (experts, {"router": "moments", "strategy": "full"}),
        "two of three": (experts[1:], routed),
        "another order": (experts[::-1], routed),
        "a share": (experts, routed | {"share": {"expert_0": 0.7}}),
        "owners": ([experts[0], theirs], {}),
        "owners, by moments": ([experts[0], theirs], {"router": "moments"}),
        "owners, a share": ([experts[0], theirs], {"share": {"theirs": 0.2}}),
        "owners, named classes": ([experts[0], theirs], {"classes": names}),
        "a pair beside others": ([pair[0], *experts[1:], pair[1]], routed),
        "a pair alone": (pair, {}),
    }
    for name, (parts, options) in made.items():
        hddm.assemble(parts, folder / name, **options)
    whole = folder / "one partition"
    changes: dict[str, tuple[object, ...]] = {
        "one removed": ("--remove", 1),
        "one added": ("--add", theirs),
        "another strategy": ("--strategy", "top-2"),
        "another share": ("--share", "expert_2=0.6"),
        "moments instead": ("--router", "moments"),
    }
    for name, options in changes.items():
        command("assemble", whole, *options, "--out", folder / name)
    for name in (*made, *changes):
        yield from under(name, _of_ensemble(folder / name, workshop))
    yield from _of_several_sizes(folder)


def evaluation(workshop: Workshop) -> Outputs:
    """Scores of samples against training images, held-out ones and domains."""
    folder = workshop.folder("evaluation")
    (shard,) = hddm.partition(workshop.images, folder / "shards", 1, held_out=0.4)
    hddm.assemble(workshop.experts, folder / "ensemble")
    hddm.sample_to_folder(folder / "ensemble", folder / "samples", num_images=64, steps=3)
    settings = {"held_out": folder / "shards", "domain": {"upright": ["columns"], "flat": ["rows"]}}
    result = hddm.evaluate(
        folder / "samples", shard, allow_few=True, features="classifier", **settings
    )
    for name, score in result.model_dump(mode="json").items():
        if name in SCORES:
            yield name, document(score, workshop.root)


def _theirs(folder: Path, workshop: Workshop) -> Path:
    """An expert of another owner, whose classes are columns and dots."""
    shutil.copytree(workshop.images / "rows", folder / "their images" / "dots")
    shutil.copytree(workshop.images / "columns", folder / "their images" / "columns")
    (folder / "their images" / "dots" / "00.png").unlink()
    (shard,) = hddm.partition(folder / "their images", folder / "their shards", 1)
    return hddm.train(shard, folder / "theirs", objective="flow", class_conditional=True, **SHORT)


def _pair(folder: Path, workshop: Workshop) -> list[Path]:
    """Experts of the first shard, one for high noise and one for low."""
    shard, made = workshop.shards / "shard_0", []
    for name, objective, part in zip(("high", "low"), ("ddpm", "flow"), PAIR, strict=True):
        settings = {"objective": objective, "noise_range": part, "class_conditional": True}
        made.append(hddm.train(shard, folder / name, **SHORT | settings))
    return made


def _of_ensemble(folder: Path, workshop: Workshop) -> Outputs:
    yield from files_of(
        folder, workshop.root, kept=lambda path: path.parts[0] not in ("experts", "router")
    )
    model = hddm.load(folder)
    labels = torch.arange(256) % len(model.classes)
    # Many, so that a small change of a share shows.
    given = {"seed": 2, "steps": 1, "strategy": "draw"}
    yield "many drawn samples", hddm.sample(model, len(labels), **given)
    yield (
        "many drawn samples of classes",
        hddm.sample(model, len(labels), **given, class_labels=labels),
    )
    yield "samples by its own strategy", hddm.sample(model, 6, seed=2, steps=4)
    for strategy in ("draw", "full", "commit-0.5") if model.router else ("draw",):
        samples = hddm.sample(model, 6, seed=2, steps=4, strategy=strategy, class_labels=labels[:6])
        yield f"samples of classes/{strategy}", samples
    if model.router:
        x, t = states(model.sample_shape)
        yield "probabilities", model.router(x, t)
        model.strategy = "full"
        yield "velocity", model.velocity(x, t)
        yield "velocity of classes", model.velocity(x, t, class_labels=labels[: len(x)])


def _of_several_sizes(folder: Path) -> Outputs:
    """Images of two sizes, of which a pair makes the larger one."""
    kinds: list[tuple[int, dict[str, Any]]] = [
        (4, {}),
        *((8, {"noise_range": part}) for part in PAIR),
    ]
    parts = []
    for k, (size, record) in enumerate(kinds):
        parts.append(saved(folder / f"size {k}", flow_expert(k, record, sample_size=size)))
    hddm.assemble(parts, folder / "sizes", domain=[["size 1", "size 2"]], share={"size 0": 0.5})
    pipe = hddm.HDDMPipeline.from_pretrained(folder / "sizes")
    for k, image in enumerate(pipe(batch_size=6, seed=3, num_inference_steps=4).images):
        yield f"several sizes/image {k}", torch.from_numpy(np.array(image))
