"""Images of a benchmark: sides stay apart, and nothing that was made of some passes for others."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from hddm.benchmark.data import (
    PartitionedImages,
    SourceImages,
    divide,
    fewest_images,
    hash_of_images,
    prepare_images,
    reference_job,
)
from hddm.benchmark.jobs import Job, Store
from hddm.benchmark.scores import features_job_of, training_set
from hddm.benchmark.settings import DataSettings, PartitionSettings
from hddm.data.images import load_images
from hddm.evaluation.features import INCEPTION
from hddm.utils.errors import HddmError
from tests.artefacts import number_of_pixels, write_images
from tests.benchmark_files import Finished, run_inline, settings, write_sides


def test_held_out_images_that_would_be_trained_on_are_refused(miniature: Finished, tmp_path: Path) -> None:
    for training, held_out in ((".", "test"), ("train", "."), ("train", "train")):
        data = {"source": "folder", "training": training, "held_out": held_out, "validation_share": 0.4}
        with pytest.raises(HddmError, match=r"data\.held_out: .*would be trained on"):
            run_inline(settings(data=data), tmp_path / "out", miniature.data)
    assert not (tmp_path / "out").exists()


def test_a_benchmark_does_not_write_among_its_images(miniature: Finished) -> None:
    for inner in ("train/out", "test/out"):
        with pytest.raises(HddmError, match="is inside the image folder"):
            run_inline(settings(), miniature.data / inner, miniature.data)
        assert not (miniature.data / inner).exists()


def test_results_of_other_images_are_not_replaced_unasked(miniature: Finished, tmp_path: Path) -> None:
    other, out = write_sides(tmp_path / "data"), tmp_path / "out"
    next((other / "train").rglob("*.png")).unlink()
    out.mkdir()
    for name in ("benchmark.json", "results.json"):
        shutil.copy(miniature.out / name, out)
    with pytest.raises(HddmError, match="holds results of other images"):
        run_inline(miniature.settings, out, other)
    assert (out / "results.json").read_bytes() == (miniature.out / "results.json").read_bytes()


def _divided(images: Path, folder: Path) -> tuple[SourceImages, PartitionedImages]:
    sides = SourceImages(images, None, hash_of_images(images))
    folder.mkdir()
    return sides, divide(
        sides, DataSettings(validation_share=0.4), PartitionSettings(shards=1), Store(folder)
    )


def test_another_validation_image_is_another_reference(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 40)
    sides, divided = _divided(images, tmp_path / "before")
    before = reference_job(sides, divided, "validation")
    held = next(level for level in range(256) if number_of_pixels(np.full((4, 4, 3), level, np.uint8)) < 0.4)
    folder = next(path for path in images.iterdir() if path.is_dir())
    Image.fromarray(np.full((4, 4, 3), held, np.uint8)).save(folder / "another.png")
    sides, divided = _divided(images, tmp_path / "after")
    after = reference_job(sides, divided, "validation")
    assert before.inputs["training"] == after.inputs["training"]
    assert before.hash != after.hash
    assert fewest_images(sides, divided) == len(divided.validation_manifests[0].images)


def test_a_classifier_learns_images_in_one_order_however_shards_are_cut(tmp_path: Path) -> None:
    pixels = torch.randint(0, 2, (40, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 3
    store = Store(tmp_path)

    def learnt(name: str, order: torch.Tensor) -> list[Any]:
        def make(folder: Path) -> dict[str, list[str]]:
            shard = torch.zeros(len(order), dtype=torch.int64)
            tensors = {"training": pixels[order], "labels": labels[order], "shard": shard, "fresh": pixels}
            save_file(tensors, folder / "images.safetensors")
            return {"classes": ["0", "1", "2"]}

        reference = Job("reference", {}, {"training": name})
        store.once(reference, make)
        found = training_set(store, reference)
        assert found.labels is not None
        return list(zip(found.pixels.tolist(), found.labels.tolist(), strict=True))

    first = learnt("a", torch.arange(40))
    assert first == learnt("b", torch.arange(39, -1, -1))
    assert sorted(first) == sorted(zip(pixels.tolist(), labels.tolist(), strict=True))


def test_features_are_settled_anew_when_inception_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Job("reference", {}, {"training": "a"})
    hashes = []
    for path in (None, Path("inception.pt")):
        monkeypatch.setattr(type(INCEPTION), "find", lambda self, path=path: path)
        hashes.append(features_job_of(settings(), reference, 40).hash)
    assert hashes[0] != hashes[1]
    assert features_job_of(settings(features="classifier"), reference, 40).hash not in hashes


def test_images_of_some_classes_are_resized_on_both_sides(tmp_path: Path) -> None:
    write_sides(tmp_path / "data")
    chosen = DataSettings(training="train", held_out="test", classes=("rows",), resolution=2)
    sides = prepare_images(chosen, tmp_path / "data", Store(tmp_path / "jobs"))
    assert sides.held_out is not None
    for side, of_class in ((sides.training, 64), (sides.held_out, 20)):
        found = load_images(side)
        assert found.classes == ("rows",)
        assert found.pixels.shape == (of_class, 1, 2, 2)
    wrong = chosen.model_copy(update={"classes": ("rows", "gnu")})
    with pytest.raises(HddmError, match="has no class gnu; it has"):
        prepare_images(wrong, tmp_path / "data", Store(tmp_path / "jobs"))
