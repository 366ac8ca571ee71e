"""An old model that is grown: domains by class, models that begin with others, and what is kept of each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hddm.benchmark.data import divide, prepare_images, read_reference, reference_job
from hddm.benchmark.domains import Unchanged
from hddm.benchmark.jobs import Job, Store
from hddm.benchmark.models import SeedModels
from hddm.benchmark.report import about_domains, tables_text
from hddm.benchmark.results import Results, read_results
from hddm.benchmark.run import run_benchmark
from hddm.benchmark.samples import SampledModel
from hddm.benchmark.scores import Scoring, features_job_of
from hddm.benchmark.settings import BenchmarkSettings
from hddm.data.images import to_bytes
from hddm.data.shards import load_shard
from hddm.experts.loading import load
from hddm.experts.records import read_expert
from hddm.sampling import sample
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.artefacts import CLASSES, write_images
from tests.benchmark_files import of_models, run_inline

OLD, TUNED, REPLAYED, SOUP, GROWN = "old alone", "fine-tuned on new", "replayed", "soup", "grown"
BY_CLASS = {"training": {"class_conditional": True, "steps": 4}}
MODELS: list[dict[str, Any]] = [
    {
        "name": OLD,
        "kind": "single",
        "domain": "old",
        "objectives": "ddpm",
        "training": {"steps": 9, "prediction": "sample"},
    },
    {"name": TUNED, "kind": "single", "domain": "new", "begins_with": OLD},
    {"name": REPLAYED, "kind": "single", "domain": "new", "begins_with": OLD, "replay": True},
    {"name": "adapted", "kind": "single", "domain": "new", "begins_with": OLD, "training": {"lora_rank": 2}},
    {"name": SOUP, "kind": "merged", "of": [OLD, TUNED]},
    {"name": GROWN, "kind": "grown", "of": [OLD, TUNED]},
    {"name": "old by class", "kind": "single", "domain": "old", "objectives": "ddpm", **BY_CLASS},
    {"name": "new by class", "kind": "single", "domain": "new", "begins_with": "old by class", **BY_CLASS},
    {"name": "grown by class", "kind": "grown", "of": ["old by class", "new by class"]},
]


def growing(**changes: Any) -> BenchmarkSettings:
    classes = {"old": [CLASSES[0]], "new": [CLASSES[1]]}
    chosen = {"partition": {"shards": 2, "classes": classes}, "features": "classifier"} | changes
    return of_models(*MODELS, **chosen)


class Run:
    """A benchmark that ran once for this module."""

    def __init__(self, folder: Path) -> None:
        self.data, self.out, self.settings = folder / "data", folder / "out", growing()
        # More training images of each domain than features, since their distance is measured.
        write_images(self.data / "train", per_class=130)
        write_images(self.data / "test", per_class=20)
        self.results: Results = run_inline(self.settings, self.out, self.data)
        self.store = Store(self.out / "jobs")
        sources = prepare_images(self.settings.data, self.data, self.store)
        self.divided = divide(sources, self.settings.data, self.settings.partition, self.store)
        self.reference = reference_job(sources, self.divided, "validation", has_domains=True)
        fewest = min(self.results.images["fresh"], 40)
        self.features = features_job_of(self.settings, self.reference, fewest)
        self.models = SeedModels(self.settings, 0, self.divided, self.store)

    def source(self, name: str) -> SampledModel:
        return self.models.open(self.settings.model(name)).source

    def scores(self, name: str) -> dict[str, Any]:
        return next(one.scores for one in self.results.scored if one.model == name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("grown"))


def test_compute_of_the_old_model_counts_for_itself_alone(run: Run) -> None:
    flop = {one.model: one.experts_flop for one in run.results.models}
    seen = {one.model: one.images_seen for one in run.results.models}
    # Batches of twice an expert's 8; five steps but for the old model's nine.
    assert (seen[OLD], seen[TUNED], seen[SOUP], seen[GROWN]) == (9 * 16, 5 * 16, 5 * 16, 5 * 16)
    assert flop[TUNED] == flop[SOUP] == flop[GROWN]
    # An adapter's base has no gradients of its own.
    assert flop["adapted"] != flop[TUNED]
    ratio = (flop["adapted"] or 0) / (flop[TUNED] or 1)
    assert 0.5 < ratio < 1.5


def test_replay_trains_on_the_new_images_and_on_as_many_samples_as_the_old_model_had_images(run: Run) -> None:
    (training,) = run.models.trainings(run.settings.model(REPLAYED))
    (replay,) = run.store.folder.glob("replay-*/shards/shard_0")
    found = to_bytes(load_shard(replay).images)
    old, new = (to_bytes(load_shard(folder).images) for folder in run.divided.shard_folders)
    samples = to_bytes(sample(load(run.source(OLD).folder), len(old), training.settings.seed))
    assert {image.numpy().tobytes() for image in found} == {
        image.numpy().tobytes() for image in (*new, *samples)
    }
    assert training.job != run.models.trainings(run.settings.model(TUNED))[0].job


def test_a_soup_is_the_mean_of_weights_and_a_grown_model_holds_both_models_drawn_by_size(run: Run) -> None:
    old, tuned, soup = (read_expert(run.source(name).folder) for name in (OLD, TUNED, SOUP))
    others = old.network.state_dict(), tuned.network.state_dict()
    for name, mean in soup.network.state_dict().items():
        torch.testing.assert_close(mean, (others[0][name] + others[1][name]) / 2)
    grown: Any = load(run.source(GROWN).folder)
    sizes = torch.tensor([len(one.images) for one in run.divided.manifests], dtype=torch.float64)
    torch.testing.assert_close(grown.prior, sizes / sizes.sum())
    for k, expert in enumerate(grown.experts):
        for name, weight in expert.network.state_dict().items():
            assert torch.equal(weight, others[k][name])


def test_models_of_different_classes_do_not_merge(run: Run, tmp_path: Path) -> None:
    soup = {"name": "odd soup", "kind": "merged", "of": [OLD, "old by class"]}
    chosen = of_models(
        *MODELS,
        soup,
        **growing().model_dump(mode="json", include={"partition", "features"}),
    )
    with pytest.raises(HddmError, match="cannot be merged") as refused:
        run_inline(chosen, tmp_path / "out", run.data, jobs=run.out / "jobs")
    assert "class_labels" in str(refused.value)


def test_samples_of_the_old_expert_are_those_of_the_old_model_and_others_would_be_found(run: Run) -> None:
    for name in (GROWN, "grown by class"):
        found = run.scores(name)["unchanged"]
        assert found["images"] == found["equal"] > 10
    point = run.settings.sampling
    grown, tuned = run.source(GROWN), run.source(TUNED)
    other = Unchanged(tuned, grown, point, 0)
    other.do(run.store, lambda done: None)
    assert run.store.result(other.job)["equal"] == 0
    assert "unchanged" not in run.scores(OLD)


def test_real_images_of_one_domain_are_all_in_it_and_at_no_distance(run: Run) -> None:
    tensors = read_reference(run.store.path(run.reference))
    of_new = tensors["training"][tensors["shard"] == 1]
    samples = Job("samples", {"made": "by hand"})
    labels = torch.tensor([1, 0]).repeat(len(of_new))[: len(of_new)]

    def make(folder: Path) -> None:
        save_file({"pixels": of_new, "labels": labels}, folder / "samples.safetensors")

    run.store.once(samples, make)
    scoring = Scoring(run.settings, (samples,), run.reference, run.features)
    scoring.do(run.store, lambda done: None)
    found = run.store.result(scoring.job)
    old, new = found["domains"]
    assert (old["share"], new["share"]) == (0.0, 1.0)
    assert old["to_training"] is None
    # Half of the labels that were asked for are another class.
    assert found["label_accuracy"] == pytest.approx(0.5, abs=0.02)
    assert new["on_validation"]["recall"] > 0.5 > old["on_validation"]["recall"]
    assert new["to_training"]["value"] == pytest.approx(0, abs=1e-6)
    # Of no more images than the 64 features no distance is given.
    assert len(read_reference(run.store.path(run.reference))["fresh"]) < 2 * 64
    assert new["to_validation"] is None


def test_tables_say_what_is_left_of_each_domain(run: Run) -> None:
    text = tables_text(run.results)
    assert "old: share" in text
    assert "bit-equal (" in text
    assert "The old model's own training: it is not counted in" in text
    assert "(old: columns; new: rows)" in about_domains(run.results)


def test_a_report_begins_with_a_strip_of_samples_of_each_row(run: Run, tmp_path: Path) -> None:
    chosen = growing(tables=[{"name": "models", "models": [OLD, GROWN]}])
    run_benchmark(chosen, tmp_path / "out", run.data, jobs=run.out / "jobs")
    page = (tmp_path / "out" / "report.html").read_text()
    assert 0 < page.index('class="strips" src="data:image/png') < page.index("<table")
    assert read_results(tmp_path / "out").scored


@pytest.mark.parametrize("name", [OLD, TUNED, "adapted", SOUP])
def test_models_are_sampled_as_single_networks(name: str, run: Run) -> None:
    assert isinstance(load(run.source(name).folder), VelocityField)
