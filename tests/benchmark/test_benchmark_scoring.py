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
from hddm.data.images import to_unit_range
from hddm.evaluation.classifier import train_classifier
from hddm.evaluation.features import FeatureExtractor, of_classifier
from hddm.evaluation.scores import Recognised, Scorer
from hddm.utils.files import read_json
from tests.benchmark_files import CONTENT, MIXED, Finished, more_seeds, settings


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


def test_real_images_are_recognised_as_often_as_themselves_and_noise_is_not() -> None:
    noise = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2
    levels = torch.where(labels == 0, 40, 215).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    real = (levels + torch.randint(-30, 30, levels.shape, generator=noise)).clamp(0, 255).to(torch.uint8)
    classifier = train_classifier(to_unit_range(real), labels, epochs=3)
    scorer = Scorer(of_classifier(classifier), real[:200], real[200:], resamples=2)
    found = scorer.score(real[200:]).recognised
    assert found is not None
    assert found.share == found.real > 0.99
    between = torch.full((200, 1, 8, 8), 127, dtype=torch.uint8) + torch.randint(
        0, 3, (200, 1, 8, 8), dtype=torch.uint8, generator=noise
    )
    probability = classifier(to_unit_range(between)).softmax(1).amax(1)
    unsure = scorer.score(between).recognised
    assert unsure == Recognised((probability > 0.9).double().mean().item(), found.real)
    other = FeatureExtractor("pixels", 4, lambda images: images[:, 0, :2, :2].flatten(1))
    assert Scorer(other, real[:200], real[200:], resamples=2).score(real).recognised is None


def test_models_that_did_not_learn_get_no_verdict(miniature: Finished) -> None:
    scored = []
    for one in miniature.results.scored:
        share = 0.39 if one.model == MIXED else 0.41
        scores = one.scores | {"recognised": {"share": share, "real": 0.8}}
        scored.append(one.model_copy(update={"scores": scores}))
    results = more_seeds(miniature.results.model_copy(update={"scored": tuple(scored)}), {MIXED: [1.0, 2.0]})
    failed = {(one.row, one.against): one.verdict.why for one in results.answers}
    assert failed
    for pair, why in failed.items():
        assert (why is not None and "did not learn" in why) == any(MIXED in name for name in pair)
