"""What samples are scored by follows what models were trained on."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hddm.benchmark.data import read_reference
from hddm.benchmark.jobs import RECORD, Job, Store
from hddm.benchmark.scores import Scoring
from hddm.utils.files import read_json
from tests.benchmark_files import CONTENT, Finished, settings


def _finished(kind: str, miniature: Finished, store: Store) -> Job:
    """The job of a kind that the miniature's results are of, copied; other tests may have added others."""
    found = {folder: read_json(folder / RECORD) for folder in (miniature.out / "jobs").glob(f"{kind}-*")}
    wanted = miniature.results.hashes[kind]
    folder = next(path for path, one in found.items() if wanted in (one["hash"], one["result"].get("hash")))
    shutil.copytree(folder, store.folder / folder.name)
    record = found[folder]
    return Job(kind, record["settings"], record["inputs"])


def _flipped(**parts: Any) -> dict[str, Any]:
    return {name: CONTENT["training"].get(name, {}) | part for name, part in parts.items()}


@pytest.mark.parametrize(
    ("changes", "mirrored"),
    [
        (_flipped(router={"random_flip": True}), False),
        (_flipped(expert={"random_flip": False}), False),
        (_flipped(expert={"random_flip": True}), True),
        (_flipped(single={"random_flip": True}), True),
    ],
)
def test_a_mirrored_copy_is_a_copy_where_experts_are_trained_on_mirrored_images(
    changes: dict[str, Any], mirrored: bool, miniature: Finished, tmp_path: Path
) -> None:
    store = Store(tmp_path / "jobs")
    reference, features = (_finished(kind, miniature, store) for kind in ("reference", "features"))
    training = read_reference(store.path(reference))["training"]
    samples = Job("samples", {"made": "by hand"})
    half = torch.cat([training[:20], training[20:40].flip(-1)]).contiguous()
    store.once(samples, lambda folder: save_file({"pixels": half}, folder / "samples.safetensors"))
    chosen = settings(training=CONTENT["training"] | changes)
    scoring = Scoring(chosen, (samples,), reference, features)
    assert (scoring.job == replace(scoring, settings=settings()).job) is not mirrored
    scoring.do(store, lambda done: None)
    memory = store.result(scoring.job)["memorisation"]
    assert memory["mirrored"] is mirrored
    assert (memory["ratio"] == 0) is mirrored
    assert memory["ratio"] < 0.7
