"""A finished benchmark of ``hddm benchmark``, on whose models an experiment is made: OUT is its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from hddm.benchmark.jobs import RECORD, Job, Store
from hddm.benchmark.results import Results, number, read_results
from hddm.benchmark.scores import Scoring
from hddm.data.images import to_bytes
from hddm.ensemble import Ensemble
from hddm.experts.loading import load
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json

DDPM = "homogeneous DDPM"


@dataclass(frozen=True)
class FinishedBenchmark:
    """Its models, shards and results, and the jobs that samples are scored by."""

    out: Path
    results: Results
    store: Store
    reference: Job
    features: Job

    @classmethod
    def read(cls, out: Path) -> "FinishedBenchmark":
        """The benchmark in ``out``, whose jobs must lie in ``out/jobs``.

        Raises:
            HddmError: where there is none, or its jobs lie elsewhere.
        """
        results, store = read_results(out), Store(out / "jobs")
        scores = store.folder / results.scored[0].scores_job / RECORD
        if not scores.is_file():
            raise HddmError(f"{scores}: is not there; run the benchmark without --jobs")
        inputs = read_json(scores)["inputs"]
        reference, features = (_job(store, kind, inputs[kind]) for kind in ("reference", "features"))
        return cls(out, results, store, reference, features)

    def ensemble(self, name: str, seed: int) -> Ensemble:
        """One of its ensembles, by name."""
        model = load(self.folder(name, seed))
        if not isinstance(model, Ensemble):
            raise HddmError(f"{self.out}: {name} is no ensemble")
        return model

    def folder(self, name: str, seed: int) -> Path:
        """Where a model of it lies."""
        found = [one.folder for one in self.results.models if (one.model, one.seed) == (name, seed)]
        if not found:
            raise HddmError(f"{self.out}: has no model {name!r}, which this experiment is made of")
        return self.out / found[0]

    def shard(self, index: int) -> Path:
        """The folder of a shard."""
        return self.out / "shards" / f"shard_{index}"

    def scores(self, images: Tensor, **made_by: Any) -> dict[str, Any]:
        """Scores of samples (n, C, H, W) in [-1, 1] as the benchmark's own; ``made_by`` tells them apart."""
        samples, tensors = Job("experiment", made_by), {"pixels": to_bytes(images)}
        self.store.once(samples, lambda folder: save_file(tensors, folder / "samples.safetensors"))
        scoring = Scoring(self.results.settings, (samples,), self.reference, self.features)
        scoring.do(self.store, lambda units: None)
        return self.store.result(scoring.job)

    def line(self, name: str, seed: int, scores: dict[str, Any]) -> str:
        """The deciding distance of one row."""
        found = scores[self.results.decides]
        return f"{name}, seed {seed}: {number(found['value'])} ± {number(found['half_width'])}"


def _job(store: Store, kind: str, content: str) -> Job:
    for path in store.folder.glob(f"{kind}-*/{RECORD}"):
        record = read_json(path)
        if record["hash"] == content:
            return Job(kind, record["settings"], record["inputs"])
    raise HddmError(f"{store.folder}: has no job {kind} of {content[:16]}")
