"""What a model cannot be sampled for is refused before anything is trained."""

import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hddm.benchmark.jobs import Job, Store, call_of, named
from hddm.benchmark.models import check_counts, check_rows
from hddm.benchmark.settings import BenchmarkSettings
from hddm.experts.assembly import assemble
from hddm.utils.errors import HddmError
from hddm.utils.processes import Call, Report, Stopped
from tests.artefacts import copied, edit_json, write_images
from tests.benchmark_files import Finished, of_models, run_inline, settings
from tests.lora_files import write_base


def _asking(model: dict[str, Any] | Path, **point: object) -> BenchmarkSettings:
    """One model, or the finished one at a path, at one point."""
    said = {"kind": "finished", "path": str(model)} if isinstance(model, Path) else model
    return of_models({"name": "mine", **said}, tables=[{"name": "models", "base": point}])


def test_what_a_model_lacks_is_told_with_its_table() -> None:
    message = "'top-3' needs more experts than the 2 of model 'mine'; use top-2 at most"
    with pytest.raises(HddmError, match=f"^table 'models': .*{message}"):
        check_rows(_asking({}, strategy="top-3"))
    with pytest.raises(HddmError, match="guidance_scale 2 needs classes, and model 'mine' has none"):
        check_rows(_asking({}, guidance_scale=2))
    check_rows(_asking({"kind": "single"}, strategy="top-3"))
    check_rows(_asking({"training": {"class_conditional": True}}, strategy="top-2", guidance_scale=2))


def test_a_finished_model_is_asked_for_what_it_has(
    ensemble: Path, ddpm_expert: Path, flow_expert: Path, router: Path, tmp_path: Path
) -> None:
    unrouted, spoilt = tmp_path / "unrouted", copied(ensemble, tmp_path)
    assemble([ddpm_expert, flow_expert], unrouted, None, "draw")
    edit_json(spoilt / "experts" / "0" / "config.json", in_channels=3)
    check_rows(_asking(ensemble, strategy="top-2"))
    check_rows(_asking(unrouted))
    for path, strategy, message in (
        (ensemble, "top-3", "more experts than the 2"),
        (unrouted, "full", "'full' needs a router, and model 'mine' has none; use draw"),
        (tmp_path / "nowhere", "draw", "no such file or folder"),
        (router, "draw", "is a router; a finished model is an expert or an ensemble"),
        (spoilt, "draw", r"does not fit its config\.json"),
    ):
        with pytest.raises(HddmError, match=message) as error:
            check_rows(_asking(path, strategy=strategy))
        assert "model 'mine'" in error.value.message


def test_a_finished_model_of_other_images_is_refused_before_anything_is_trained(
    miniature: Finished, tmp_path: Path
) -> None:
    path = write_base(tmp_path / "colour")
    jobs = Path(shutil.copytree(miniature.out / "jobs", tmp_path / "jobs"))
    for folder in jobs.glob("expert-*"):
        shutil.rmtree(folder)
    chosen = of_models({"name": "flow"}, {"name": "mine", "kind": "finished", "path": str(path)})
    with pytest.raises(HddmError, match=r"'mine': .* \(C, H, W\) of \(3, 4, 4\), .* \(1, 4, 4\)"):
        run_inline(chosen, tmp_path / "out", miniature.data, jobs=jobs)
    assert not list(jobs.glob("expert-*"))


def test_too_few_images_for_the_features_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    for side in ("train", "test"):
        write_images(tmp_path / side, per_class=100)
    with pytest.raises(HddmError, match=r"^num_images 40: .* over 64 features .*; allow_few: true in the"):
        run_inline(settings(allow_few=False), tmp_path / "out", tmp_path)
    assert list((tmp_path / "out" / "jobs").glob("features-*"))
    assert not list((tmp_path / "out" / "jobs").glob("expert-*"))


def test_every_side_needs_more_images_than_features() -> None:
    strict, few = settings(allow_few=False), {"num_images": 65, "training images": 64}
    check_counts(strict, few | {"training images": 70}, 64)
    check_counts(settings(), few, 64)
    with pytest.raises(HddmError, match=r"^training images 64: .* a side than 64; allow_few: true in the"):
        check_counts(strict, few, 64)


def test_samples_that_diverge_are_named(
    miniature: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = shutil.copytree(miniature.out / "jobs", tmp_path / "jobs")
    chosen = settings(tables=[{"name": "models", "base": {"steps": 3, "router_temperature": 2}}])
    broken = torch.full((40, 1, 4, 4), torch.nan)
    monkeypatch.setattr("hddm.benchmark.samples.sample", lambda *_, **__: broken)
    point = "strategy draw, solver euler, steps 3, router_temperature 2.0, num_images 40"
    with pytest.raises(HddmError, match=f"^model 'single model', seed 0, {point}: 40 images hold NaN or Inf"):
        run_inline(chosen, tmp_path / "out", miniature.data, jobs=jobs)


def test_samples_that_cannot_be_scored_are_named(
    miniature: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = shutil.copytree(miniature.out / "jobs", tmp_path / "jobs")
    monkeypatch.setattr("hddm.benchmark.scores.read_samples", Mock(side_effect=HddmError("too few")))
    point = "strategy draw, solver euler, steps 2, num_images 40"
    with pytest.raises(HddmError, match=f"^model 'single model', seed 0, {point}: too few$"):
        run_inline(settings(resamples=3), tmp_path / "out", miniature.data, jobs=jobs)


@dataclass(frozen=True)
class _Refusing:
    """A task that refuses."""

    job: Job
    units: int

    def do(self, store: Store, report: Report) -> None:
        raise HddmError("no", ("a", "b"))


def test_an_error_is_named_in_another_process_too(tmp_path: Path) -> None:
    made = call_of(Store(tmp_path), _Refusing(Job("refusal", {}), 3), "row 1")
    call: Call = pickle.loads(pickle.dumps(made))
    assert call.units == 3
    with pytest.raises(HddmError, match=r"^row 1: no") as error:
        call.function(**call.arguments, report=print)
    assert error.value.details == ("a", "b")
    with pytest.raises(Stopped), named("row 1"):
        raise Stopped("stopped", 2)


def test_a_benchmark_that_asks_for_too_much_leaves_no_trace(miniature: Finished, tmp_path: Path) -> None:
    with pytest.raises(HddmError, match="needs more experts"):
        run_inline(_asking({}, strategy="top-3"), tmp_path / "out", miniature.data)
    assert not (tmp_path / "out").exists()
