"""Kinds of artefacts that hddm reads, a valid one of each, and the public function that reads it."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from diffusers import ModelMixin
from safetensors.torch import save_file

import hddm
from hddm.benchmark.file import read_benchmark
from hddm.benchmark.results import read_compared
from hddm.checkpoints.convert import write
from hddm.checkpoints.lora import convert_lora
from hddm.checkpoints.plan import plan_conversion
from hddm.data.partition import partition
from hddm.data.shard_records import find_shards, open_images
from hddm.data.shards import open_shard
from hddm.data.sources import open_source
from hddm.evaluation.compare import summary, table
from hddm.evaluation.images import conditions, read_data, read_sampling
from hddm.evaluation.results import read_groups, refuse_incomparable
from hddm.experts.expert_folders import open_expert
from hddm.experts.record_folders import read_router
from hddm.experts.topics import describe_topic
from hddm.inspection.folders import inspected
from hddm.networks.prompts import PipelineText
from hddm.networks.text_encoder import embed, read_text_encoder, text_encoder_record_of
from hddm.networks.tokenizer import read_tokenizer
from hddm.networks.vae import decode, read_vae, vae_record_of
from hddm.settings import Conversion
from hddm.training.expert import train_expert
from hddm.training.router import train_router
from hddm.training.settings import (
    DistillSettings,
    ExpertSettings,
    RouterSettings,
    RunOptions,
    settings_of,
)
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.artefacts import expert_settings, router_settings, write_images
from tests.benchmark_files import CONTENT
from tests.checkpoint_files import dit, pipeline, pixart, plain_unet, text_unet
from tests.component_files import write_clip, write_vae
from tests.data.test_sources import IMAGE, encoded, rows_of, write_parquet, write_tar
from tests.ensemble_files import write_text
from tests.evaluation.test_compare import RESULT
from tests.lora_files import kohya, write_adapter, write_base
from tests.paris_files import write_paris
from tests.shard_files import encode as encode_images
from tests.shard_files import noise, with_table, write_shard

LARGEST = 2**20
"""Bytes of the largest file that is spoiled."""


@dataclass(frozen=True)
class Kind:
    """A valid artefact in ``folder``: how it is made and read, and how often it is spoiled beside others."""

    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    weight: float = 1.0
    is_quick: bool = True
    root: Path = Path()

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def place(self) -> Path:
        """Where spoiled copies are read, beside what belongs to the artefact."""
        return self.root / "spoiled"

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Every file that may be spoiled, by its name in the folder."""
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        # Images have decoders of their own, and would be most of the files.
        paths = [path for path in paths if path.suffix != ".png" and not path.name.startswith(".")]
        names = {str(path.relative_to(self.folder)): path for path in paths}
        return {
            name: path.read_bytes()
            for name, path in names.items()
            if path.stat().st_size <= LARGEST
        }

    def seal(self, place: Path, name: str) -> None:
        """Write the new hash of a spoiled file wherever its old one stands, as an attacker would."""
        todo = [(self.files[name], (place / name).read_bytes())]
        while todo:
            before, after = (hashlib.sha256(content).hexdigest().encode() for content in todo.pop())
            for path in place.rglob("*.json"):
                content = path.read_bytes()
                if before != after and before in content and path != place / name:
                    path.write_bytes(content.replace(before, after))
                    todo.append((content, path.read_bytes()))


def kinds(root: Path, quick: bool = False, only: str = "") -> list[Kind]:
    """Kinds with artefacts in ``root``, made where they are missing; ``quick`` leaves out slow ones."""
    torch.set_num_threads(1)
    root.mkdir(parents=True, exist_ok=True)
    chosen = [one for one in _KINDS if (one.is_quick or not quick) and only in one.name]
    found = [replace(one, root=root) for one in chosen]
    for kind in found:
        if not kind.folder.exists():
            kind.make(kind.folder)
        # A kind whose valid artefact is refused would pass for one that refuses well.
        kind.read(shutil.copytree(kind.folder, kind.place, symlinks=True, dirs_exist_ok=True))
        shutil.rmtree(kind.place)
    return found


def _write_expert(folder: Path) -> None:
    shard = partition(
        write_images(folder.parent / "images-of-expert"), folder.parent / "expert-data", 1
    )[0]
    settings = expert_settings("ddpm", steps=2, prediction="epsilon", class_conditional=True)
    train_expert(shard, folder, settings)


def _read_expert(folder: Path) -> None:
    inspected(folder)
    field = hddm.load(folder)
    assert isinstance(field, VelocityField)
    with torch.no_grad():
        field.velocity(torch.zeros(1, 1, 4, 4), torch.tensor([0.9]), class_labels=torch.tensor([0]))


def _write_router(folder: Path) -> None:
    partition(write_images(folder.parent / "images-of-router"), folder.parent / "router-data", 2)
    train_router(folder.parent / "router-data", folder, router_settings(steps=2, calibrate=True))


def _read_router(folder: Path) -> None:
    inspected(folder)
    read_router(folder)


def _write_ensemble(folder: Path) -> None:
    write_text(folder.parent / f"parts-of-{folder.name}").rename(folder)
    for k, text in enumerate(("cats", "dogs")):
        describe_topic(folder / "experts" / str(k), text=text)


def _read_ensemble(folder: Path) -> None:
    inspected(folder)
    ensemble = hddm.load(folder)
    pipe = hddm.HDDMPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(ensemble, hddm.Ensemble)
    with torch.no_grad():
        given = pipe.encode(["a cat"]).given
        ensemble.velocity(torch.zeros(1, 4, 4, 4), torch.tensor([0.5]), **given)


def _write_adapter(folder: Path) -> None:
    base = folder.parent / "base-of-adapter"
    write_adapter(write_base(base), folder)


def _read_adapter(folder: Path) -> None:
    inspected(folder)
    field = hddm.load(folder, base=folder.parent / "base-of-adapter")
    assert isinstance(field, VelocityField)
    with torch.no_grad():
        field.velocity(torch.zeros(1, 3, 4, 4), torch.tensor([0.5]))


def _write_lora(folder: Path) -> None:
    base = write_base(folder.parent / "base-of-lora")
    folder.mkdir()
    save_file(kohya(open_expert(base).read().network, ranks=(2, 3)), folder / "kohya.safetensors")
    text = {"text_encoder:0:up": torch.ones(4, 1), "text_encoder:0:down": torch.ones(1, 4)}
    halves = {"lokr_w1": torch.ones(2, 2), "lokr_w2": torch.ones(8, 32)}
    merged = {f"lora_unet_layers_0_mlp_2.{part}": one for part, one in halves.items()}
    merged["lora_unet_layers_0_mlp_0.diff"] = torch.ones(64, 16)
    save_file(merged | text, folder / "merged.safetensors", {"text_encoder": '["CLIPAttention"]'})
    shapes = {"A": (2, 64), "B": (16, 2)}
    factors = {
        f"transformer.layers.0.mlp.2.lora_{part}.weight": torch.ones(one)
        for part, one in shapes.items()
    }
    config = {
        "r": 2,
        "lora_alpha": 3,
        "alpha_pattern": {"mlp.2": 4},
        "use_dora": False,
        "bias": "none",
    }
    stated = json.dumps({f"transformer.{key}": value for key, value in config.items()})
    save_file(factors, folder / "peft.safetensors", {"lora_adapter_metadata": stated})


def _read_lora(folder: Path) -> None:
    out, base = folder.with_name(f"{folder.name}.converted"), folder.parent / "base-of-lora"
    for path in folder.iterdir():
        inspected(path)
        decision: Any = "drop" if path.name.startswith("merged") else None
        convert_lora(path, base, out, overwrite=True, text_encoder_lora=decision)
        hddm.load(out)


def _read_paris(folder: Path) -> None:
    inspected(folder)
    hddm.load(folder)


def _write_shards(folder: Path) -> None:
    partition(write_images(folder.parent / "images-of-shards", 48), folder, 2, held_out=0.4)


def _read_shards(folder: Path) -> None:
    inspected(folder)
    for shard in find_shards(folder):
        inspected(shard)
        open_shard(shard)


def _write_tabled(folder: Path) -> None:
    listed = folder.parent / "listed-shard"
    write_shard(listed, noise(20), [n % 2 for n in range(20)], [f"picture {n}" for n in range(20)])
    with_table(listed, folder)


def _read_tabled(folder: Path) -> None:
    inspected(folder)
    shard = open_shard(folder)
    shard.take(torch.arange(len(shard)))
    assert all(isinstance(one, str) for one in shard.captions or ())
    source = open_images(folder)
    for index in range(len(source)):
        source.read(index)


def _write_encoded(folder: Path) -> None:
    write_vae(folder.parent / "vae-of-encoded")
    write_clip(folder.parent / "clip-of-encoded")
    images = write_images(folder.parent / "images-of-encoded", side=8)
    source = partition(images, folder.parent / "encoded-data", 1)[0]
    encode_images(source, folder, 20, vae=folder.parent / "vae-of-encoded")


def _read_encoded(folder: Path) -> None:
    inspected(folder)
    shard = open_shard(folder)
    shard.take(torch.arange(len(shard)))


def _read_checkpoint(folder: Path) -> None:
    out = folder.with_name(f"{folder.name}.converted")
    try:
        write(plan_conversion(folder, Conversion(allow_pickle=True)), out)
    except HddmError:
        assert not out.exists()
        raise
    finally:
        shutil.rmtree(out, ignore_errors=True)
    inspected(folder)


def _checkpoint(name: str, make: Callable[[int], ModelMixin], **saving: object) -> Kind:
    def write_source(folder: Path) -> None:
        pipeline(folder, make(1), **saving)

    return Kind(f"checkpoint-{name}", write_source, _read_checkpoint, 0.5, is_quick=False)


def _read_clip(folder: Path) -> None:
    encoder, tokenizer = (
        read_text_encoder(folder / "text_encoder"),
        read_tokenizer(folder / "tokenizer"),
    )
    embed(encoder, tokenizer, ["a cat and a dog"])
    text_encoder_record_of(folder / "text_encoder", 77)
    text = PipelineText(folder)
    _ = text.record
    text.empty_prompt()


def _read_vae(folder: Path) -> None:
    vae_record_of(folder)
    decode(read_vae(folder), torch.zeros(1, 4, 4, 4))


def _write_scheduler(folder: Path) -> None:
    pipeline(folder.parent / "pipeline-of-scheduler", dit(1))
    (folder.parent / "pipeline-of-scheduler" / "scheduler").rename(folder)


def _read_scheduler(folder: Path) -> None:
    schedule = hddm.schedules.from_diffusers(folder)
    schedule.time(schedule.log_snr(torch.tensor([0.0, 10.0])))


def _write_results(folder: Path) -> None:
    folder.mkdir()
    for name in "ab":
        result = json.loads(json.dumps(RESULT))
        result["data"]["images"]["hash"] = name
        labels = {"class_labels": [0, 1], "class_names": ["x", "y"], "num_images": 500}
        result["sampling"] |= labels
        result["versions"] = {"torch": "2.9"}
        own = result["splits"][0]["distance"]
        result["shards"] = [{"shard": 0, "images": 90, "all": own, "samples": 250, "own": own}]
        (folder / f"{name}.json").write_text(json.dumps(result))


def _compare(*paths: Path) -> None:
    for groups in read_compared(paths).values():
        if isinstance(groups, str):
            continue
        refuse_incomparable(groups, ("steps",))
        table(groups)


def _read_results(folder: Path) -> None:
    summary(read_groups([folder / "a.json"])[0])
    _compare(folder / "a.json", folder / "b.json")


def _write_settings(folder: Path) -> None:
    folder.mkdir()
    (folder / "benchmark.yaml").write_text(json.dumps(CONTENT, indent=1))
    training = {"size": "S/2", "steps": 5, "learning_rate": 1e-3}
    training |= {"mixed_precision": "no", "random_flip": True}
    (folder / "run.yaml").write_text(json.dumps(training, indent=1))


def _read_settings(folder: Path) -> None:
    read_benchmark(str(folder / "benchmark.yaml"))
    for kind in (ExpertSettings, RouterSettings, DistillSettings, RunOptions):
        values = {"objective": "flow", "steps": 3, "teacher": "shard"}
        known = {key: value for key, value in values.items() if key in kind.model_fields}
        settings_of(kind, folder / "run.yaml", known)


def _write_samples(folder: Path) -> None:
    write_images(folder)
    for path in sorted(folder.rglob("*.png")):
        path.rename(folder / f"{path.parent.name}-{path.name}")
    for path in folder.iterdir():
        if path.is_dir():
            path.rmdir()
    record = {
        "format": "1.2",
        "num_images": 48,
        "start": 0,
        "source": "x",
        "seed": 0,
        "prompts": None,
    }
    record |= {"class_labels": [0, 1], "class_names": ["a", "b"]}
    (folder / "sampling.json").write_text(json.dumps(record))


def _read_samples(folder: Path) -> None:
    inspected(folder)
    group = read_data({"images": folder})["images"]
    conditions(group.images, read_sampling(folder), ("a", "b"))


def _read_source(folder: Path) -> None:
    source = open_source(folder)
    for index in range(len(source.files)):
        source.read(index)


def _write_tar(folder: Path) -> None:
    files = {"1.png": encoded(1), "1.txt": b"a cat", "1.json": b'{"a": {"b": 1}}', "1.cls": b"3"}
    files |= {"2.png": encoded(2), "2.txt": b"a dog", "2.json": b'{"a": [1]}', "2.cls": b"0"}
    write_tar(folder / "a.tar", files)


def _write_parquet(folder: Path) -> None:
    names = {"names": ["cat", "dog"], "_type": "ClassLabel"}
    columns = {
        "image": pa.array(rows_of([1, 2, 3, 4]), IMAGE),
        "label": [0, 1, 1, 0],
        "text": list("abcd"),
    }
    write_parquet(folder / "a.parquet", columns, {"image": {"_type": "Image"}, "label": names})


def _write_described(folder: Path) -> None:
    folder.mkdir()
    lines = []
    for index in range(4):
        (folder / f"{index}.png").write_bytes(encoded(index))
        lines.append(json.dumps({"file_name": f"{index}.png", "text": "a cat", "label": index % 2}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


_KINDS = (
    Kind("expert", _write_expert, _read_expert, 4),
    Kind("router", _write_router, _read_router, 2),
    Kind("ensemble", _write_ensemble, _read_ensemble, 3, is_quick=False),
    Kind("adapter", _write_adapter, _read_adapter, 2),
    Kind("lora", _write_lora, _read_lora, 2),
    Kind("paris", write_paris, _read_paris, 1, is_quick=False),
    Kind("shards", _write_shards, _read_shards, 2),
    Kind("shard-with-table", _write_tabled, _read_tabled, 2),
    Kind("encoded-shard", _write_encoded, _read_encoded, 2),
    _checkpoint("dit", dit, max_shard_size="10KB"),
    _checkpoint("pixart", pixart),
    _checkpoint("unet", plain_unet),
    _checkpoint("text-unet", text_unet),
    Kind("clip", write_clip, _read_clip, 3),
    Kind("vae", write_vae, _read_vae, 2),
    Kind("scheduler", _write_scheduler, _read_scheduler, 3),
    Kind("results", _write_results, _read_results, 4),
    Kind("settings", _write_settings, _read_settings, 4),
    Kind("samples", _write_samples, _read_samples, 1),
    Kind("tar", _write_tar, _read_source, 3),
    Kind("parquet", _write_parquet, _read_source, 2),
    Kind("metadata", _write_described, _read_source, 2),
)
