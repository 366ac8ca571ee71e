"""Benchmarks that are run, killed, changed and confirmed: nothing is done twice, nothing is confused."""

import json
import shutil
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hddm
from hddm.benchmark import jobs, run
from hddm.benchmark.jobs import together
from hddm.benchmark.presets import chosen
from hddm.benchmark.results import read_results
from hddm.utils.errors import HddmError
from hddm.utils.progress import Progress
from tests.artefacts import copied, edit_json
from tests.benchmark_files import (
    CONTENT,
    Finished,
    again,
    life,
    of_models,
    run_inline,
    settings,
    write_sides,
)

MOMENTS = [
    # Within the first training, within the second, with its weights written and its record not, between two.
    ("os.rename", "step_00000004"),
    ("os.rename", "step_00000006"),
    ("open", ".work/job.json"),
    ("os.rename", ".work"),
    ("os.rename", "router-"),
    ("os.rename", "ensemble-"),
    ("os.rename", "samples-"),
    ("os.rename", "scores-"),
    ("os.rename", "results.json"),
]


def _figures(out: Path) -> dict[str, Any]:
    """Results without what another run of the same cannot repeat: the time that it took."""
    text = (out / "results.json").read_text()
    found: dict[str, Any] = json.loads(text, object_hook=lambda one: one | {"seconds": None})
    return found


def _jobs(out: Path, kind: str) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "jobs").glob(f"{kind}-*")}


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(MOMENTS[1::3], id="some moments"),
        pytest.param(MOMENTS, id="all moments", marks=pytest.mark.slow),
    ],
)
def test_a_benchmark_that_is_killed_again_and_again_finds_what_one_in_one_go_does(
    moments: list[tuple[str, str]], miniature: Finished, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for moment in moments:
        assert life(miniature.settings, out, miniature.data, moment) == -signal.SIGKILL, moment
        assert moment[1] == "results.json" or not (out / "results.json").exists()
    assert life(miniature.settings, out, miniature.data, None) == 0
    assert _figures(out) == _figures(miniature.out)
    for kind in ("expert", "samples", "scores"):
        assert len(_jobs(out, kind)) == len(_jobs(miniature.out, kind))
    assert not list((out / "jobs").glob(".*"))


def test_a_finished_benchmark_does_nothing_again(
    miniature: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _jobs(miniature.out, "*")
    assert run_inline(miniature.settings, miniature.out, miniature.data) == miniature.results
    assert _jobs(miniature.out, "*") == before
    assert f"{miniature.out}: was finished on {miniature.results.date}" in capsys.readouterr().err


def _copy_of_results(miniature: Finished, out: Path, **changes: Any) -> Path:
    """A folder of the miniature's results, changed."""
    out.mkdir()
    for name in ("benchmark.json", "results.json"):
        shutil.copy(miniature.out / name, out)
    edit_json(out / "results.json", **changes)
    return out


def test_results_that_are_written_again_say_when_and_where_they_were_found(
    miniature: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = _copy_of_results(miniature, tmp_path / "out", date="2001-02-03")
    monkeypatch.setattr(jobs, "machine", lambda: {"platform": "another"})
    found = again(miniature, out, miniature.settings)
    assert (found.date, found.machine) == ("2001-02-03", miniature.results.machine)
    assert read_results(out) == found


def test_machines_that_differ_are_all_named() -> None:
    one = {"cores": 2, "packages": {"torch": "2.1", "numpy": "2"}}
    found = together([one, one | {"packages": {"torch": "2.0", "numpy": "2"}}])
    assert found == {"cores": 2, "packages": {"torch": "2.0; 2.1", "numpy": "2"}}


def test_results_of_more_seeds_stay_until_all_of_them_are_in_again(
    miniature: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = settings(seeds=[0, 7])
    out = _copy_of_results(miniature, tmp_path / "out", seeds=[0, 7])
    edit_json(out / "benchmark.json", settings=both.model_dump(mode="json"))
    before = (out / "results.json").read_bytes()
    one_seed = run.SeedRun.run
    monkeypatch.setattr(
        run.SeedRun, "run", lambda self, *given: one_seed(self, *given) if self.seed == 0 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        again(miniature, out, both)
    assert (out / "results.json").read_bytes() == before


def test_another_strategy_draws_other_samples_of_the_same_experts(
    miniature: Finished, tmp_path: Path
) -> None:
    changed, out = settings(tables=[{"name": "models", "base": {"strategy": "top-1"}}]), tmp_path / "out"
    results = again(miniature, out, changed)
    assert not (out / "jobs").exists()
    assert [one.hash for one in results.models] == [one.hash for one in miniature.results.models]
    known = {one.row: one.samples for one in miniature.results.scored}
    # Of the mixture these had been drawn already; a single model has no strategy.
    drawn = {one.row: one.samples for one in results.scored}
    assert drawn["mixed 1:1"] == known["top-1"]
    assert drawn["single model"] == known["single model"]


def test_progress_ends_with_all_that_was_planned_whatever_was_done_before(
    miniature: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[int, int]] = []

    class Kept(Progress):
        def __exit__(self, *ended: object) -> None:
            super().__exit__(*ended)
            if self._total is not None:
                counted.append((self._done, self._total))

    monkeypatch.setattr(run, "Progress", Kept)
    again(
        miniature, tmp_path / "out", settings(tables=[{"name": "a", "vary": {"strategy": ["draw", "top-1"]}}])
    )
    ((done, planned),) = counted
    assert done == planned > 0


def test_another_training_setting_trains_anew_what_depends_on_it(miniature: Finished, tmp_path: Path) -> None:
    changed = settings(training=CONTENT["training"] | {"ddpm": {"learning_rate": 1e-3}})
    results = again(miniature, tmp_path / "out", changed)
    before = {one.model: one.experts for one in miniature.results.models}
    after = {one.model: one.experts for one in results.models}
    assert after["homogeneous flow"] == before["homogeneous flow"]
    assert after["mixed 1:1"][1] == before["mixed 1:1"][1]
    assert after["mixed 1:1"][0] != before["mixed 1:1"][0]


def test_results_of_other_settings_are_not_replaced_unasked(miniature: Finished) -> None:
    changed = settings(resamples=3)
    with pytest.raises(HddmError, match=r"has results of other settings.*overwrite=True") as error:
        run_inline(changed, miniature.out, miniature.data)
    assert error.value.details == ("resamples: was 2, is 3",)
    with pytest.raises(HddmError, match="holds no benchmark"):
        run_inline(changed, miniature.data, miniature.data)


def test_settings_differ_by_the_names_of_models_and_tables() -> None:
    first, second = {"name": "a", "converted": None}, {"name": "b", "converted": None}
    for before, now, said in (
        ([first], [first | {"converted": 0.5}], "models.a.converted: was None, is 0.5"),
        ([first], [first, second], "models.b: is new"),
        ([first, second], [first], "models.b: is gone"),
        ([first, second], [second, first], "models: in another order"),
    ):
        assert run.differences({"models": before}, {"models": now}) == [said]


def test_results_are_read_back_as_they_were_written(miniature: Finished) -> None:
    read = read_results(miniature.out)
    assert read == miniature.results
    assert read.complete
    assert read.machine["packages"]["torch"] == version("torch")


def test_every_model_of_a_benchmark_opens_under_its_name(miniature: Finished) -> None:
    for name in ("single-model", "ensembles/homogeneous-flow", "ensembles/mixed-1-1"):
        samples = hddm.sample(hddm.load(miniature.out / "seed_0" / name), 2, steps=2)
        assert samples.isfinite().all()


def test_choosing_never_reads_held_out_images_and_says_what_it_scored_on(
    miniature: Finished, tmp_path: Path
) -> None:
    assert miniature.results.score_on == "validation"
    scores = miniature.results.scored[0].scores
    assert "to_validation" in scores
    assert "held_out" not in json.dumps(scores)
    data = write_sides(tmp_path / "data")
    for image in (data / "test").rglob("*.png"):
        image.write_bytes(b"no image")
    run_inline(settings(), tmp_path / "out", data)


def test_confirming_takes_fresh_seeds_and_held_out_images(miniature: Finished, tmp_path: Path) -> None:
    confirming = chosen(miniature.settings, held_out=True)
    assert (confirming.score_on, confirming.seeds) == ("held-out", (5,))
    results = again(miniature, tmp_path / "out", confirming)
    assert results.images["fresh"] == 40
    assert {one.seed for one in results.scored} == {5}
    assert "to_held_out" in results.scored[0].scores
    assert "validation" not in json.dumps(results.scored[0].scores)
    # The same images were trained on, and the same features measure both.
    for name in ("training", "shards", "features"):
        assert results.hashes[name] == miniature.results.hashes[name]


def test_converted_experts_share_their_steps_between_both_objectives(
    miniature: Finished, tmp_path: Path
) -> None:
    model = {"name": "converted", "converted": 0.5, "training": {"prediction": "epsilon"}}
    changed, out = of_models(model), tmp_path / "out"
    (model,) = again(miniature, out, changed).models
    assert model.steps == (6, 6)
    record = json.loads((out / model.folder / "experts" / "0" / "expert.json").read_text())
    assert (record["objective"], record["prediction_type"]) == ("flow", "epsilon")
    assert record["training"]["steps"] == 3


def test_a_finished_model_is_compared_by_its_path(miniature: Finished, tmp_path: Path) -> None:
    path = miniature.out / "seed_0" / "ensembles" / "mixed-1-1"
    mine = {"name": "mine", "kind": "finished", "path": str(path)}
    changed = of_models(mine, tables=[{"name": "models", "base": {"strategy": "top-1"}}])
    results = again(miniature, tmp_path / "out", changed)
    known = next(one for one in miniature.results.scored if (one.table, one.row) == ("strategies", "top-1"))
    assert results.scored[0].scores == known.scores
    assert results.first[0].training_flop is None
    assert results.models[0].objectives == ("ddpm", "flow")
    assert results.one_model == {"mine"}
    assert not miniature.results.one_model


def test_the_weights_and_the_device_of_a_row_are_those_that_drew_it(
    miniature: Finished, tmp_path: Path
) -> None:
    assert all(one.sampled_as == {"weights": "ema", "device": "cpu"} for one in miniature.results.scored)
    raw = copied(miniature.out / "seed_0" / "ensembles" / "mixed-1-1", tmp_path)
    edit_json(raw / "experts" / "0" / "expert.json", weights="raw")
    finished = {"name": "raw", "kind": "finished", "path": str(raw)}
    jobs = copied(miniature.out / "jobs", tmp_path)
    for record in jobs.glob("samples-*/job.json"):
        result = json.loads(record.read_text())["result"]
        del result["device"]
        edit_json(record, format="1.0", result=result)
    changed = of_models(finished, {"name": "homogeneous flow"}, device="auto")
    results = run_inline(changed, tmp_path / "out", miniature.data, jobs=jobs)
    drawn, found = (one.sampled_as for one in results.scored)
    assert drawn == {"weights": "ema and raw", "device": "cuda" if torch.cuda.is_available() else "cpu"}
    assert found == {"weights": "ema", "device": None}
    assert results.sampled_as["weights"] == "ema, ema and raw"
    assert results.sampled_as["device"] == f"{drawn['device']}, not recorded"


def test_a_job_that_was_changed_since_is_refused(miniature: Finished, tmp_path: Path) -> None:
    jobs = copied(miniature.out / "jobs", tmp_path)
    # Other tests may have left scores of other settings there.
    before = {path: path.read_text() for path in jobs.glob("scores-*/job.json")}
    for change in ({"result": []}, {"seconds": -1}, {"seal": None}):
        for path in before:
            edit_json(path, **change)
        with pytest.raises(
            HddmError, match=r"job\.json: was changed after it was written; delete its folder"
        ):
            run_inline(miniature.settings, tmp_path / "out", miniature.data, jobs=jobs)
        for path, text in before.items():
            path.write_text(text)


@pytest.mark.parametrize("name", ["samples", "reference"])
def test_tensors_of_a_job_that_are_not_what_was_written_are_refused(
    name: str, miniature: Finished, tmp_path: Path
) -> None:
    jobs = copied(miniature.out / "jobs", tmp_path)
    shutil.rmtree(next(jobs.glob("scores-*")))
    for path in jobs.glob(f"{name}-*/*.safetensors"):
        tensors = load_file(path)
        save_file({key: value.float() for key, value in tensors.items()}, path)
    with pytest.raises(HddmError, match="is not what was written"):
        run_inline(miniature.settings, tmp_path / "out", miniature.data, jobs=jobs)


def test_experts_of_classes_are_sampled_in_turn(miniature: Finished, tmp_path: Path) -> None:
    mine = {"name": "mine", "objectives": "ddpm", "training": {"class_conditional": True}}
    changed = of_models(mine, tables=[{"name": "all", "base": {"guidance_scale": 2}}])
    jobs = copied(miniature.out / "jobs", tmp_path)
    (row,) = run_inline(changed, tmp_path / "out", miniature.data, jobs=jobs).scored
    drawn = load_file(jobs / row.samples[0] / "samples.safetensors")
    assert drawn["labels"].tolist() == [0, 1] * 20


def test_results_of_an_older_format_are_refused_with_the_remedy(miniature: Finished, tmp_path: Path) -> None:
    out = _copy_of_results(miniature, tmp_path / "out", format="2.3")
    with pytest.raises(HddmError, match=r"format 2\.3 was written by an older hddm; repeat the benchmark"):
        read_results(out)


def test_samples_in_pieces_are_those_in_one(
    miniature: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hddm.benchmark.samples.PIECE", 15)
    cut = again(miniature, tmp_path / "out", miniature.settings).scored[0].samples
    (whole,) = miniature.results.scored[0].samples
    files = [miniature.out / "jobs" / name / "samples.safetensors" for name in (*cut, whole)]
    pixels = [load_file(file)["pixels"] for file in files]
    assert [len(part) for part in pixels] == [15, 15, 10, 40]
    assert torch.cat(pixels[:3]).int().sub(pixels[3].int()).abs().max() <= 1
