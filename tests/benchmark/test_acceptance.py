"""The acceptance kit: what is broken on purpose is seen in its report, while all else goes on."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import httpx
import numpy as np
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.acceptance.checkpoints import compare, kept_expert
from benchmarks.acceptance.device_tests import counted
from benchmarks.acceptance.entries import ENTRIES, STEPS, Convention, entry_named, gigabytes
from benchmarks.acceptance.offloading import (
    Trace,
    bytes_per_second,
    integrated,
    judged,
    measured,
    with_waits,
)
from benchmarks.acceptance.plan import all_stages, chosen
from benchmarks.acceptance.report import Report
from benchmarks.acceptance.stages import (
    FAILED,
    NOT_RUN,
    ROOT,
    Finished,
    Kit,
    NotRun,
    Stage,
    costs,
    has_problem,
    run_stages,
)
from benchmarks.acceptance.stand_ins import put_stand_in
from benchmarks.figures import (
    MEASURED,
    MET,
    MISSED,
    Result,
    at_least,
    at_most,
    holds,
    told,
)
from benchmarks.inference import models
from benchmarks.inference.memory import ALL, write_ensembles
from hddm.networks.offload import Shelf
from hddm.utils.machine import Room
from hddm.utils.records import WEIGHTS
from tests.artefacts import edit_json, refusal, seal
from tests.browser import CHROMIUM, Browser
from tests.hub import Hub, running_hub


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    (tmp_path / "work").mkdir()
    return Kit("cpu", False, tmp_path / "work")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub whose address huggingface_hub has in this process."""
    with running_hub() as hub:
        template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def _run(stages: list[Stage], kit: Kit, **options: Any) -> dict[str, Finished]:
    return {one.stage: one for one in run_stages(stages, kit, is_apart=False, **options)}


def _noted(path: Path, result: Result, kit: Kit) -> Result:
    """A stage that notes each of its calls in a file."""
    with path.open("a") as file:
        file.write("x")
    return result


def _raising(error: Exception, kit: Kit) -> Result:
    raise error


def _stage(name: str, run: Any, **options: Any) -> Stage:
    return Stage(name, "group", name.capitalize(), run, **options)


def test_a_figure_meets_its_goal_or_misses_it_and_nan_misses_every_goal() -> None:
    assert [at_most("a", 1.0, 1.0).verdict, at_most("a", 1.1, 1.0).verdict] == [MET, MISSED]
    assert [at_least("a", 1.0, 1.0).verdict, at_least("a", 0.9, 1.0).verdict] == [MET, MISSED]
    for made in (at_most, at_least):
        assert made("a", float("nan"), 1.0).verdict == MISSED
    assert Result([told("a", 1.0)]).outcome == MEASURED
    assert Result([told("a", 1.0), holds("b", True)]).outcome == MET
    assert Result([at_most("a", 2.0, 1.0), holds("b", True)]).outcome == MISSED
    assert at_most("a", 2.0, 1.0, " s").line == "a: 2 s (goal: at most 1 s): missed"


def test_stages_go_on_after_one_that_fails_or_cannot_run(kit: Kit, tmp_path: Path) -> None:
    missed = Result([at_most("a", 2.0, 1.0)])
    fine = Result([holds("b", True)])
    stages = [
        _stage("fails", partial(_raising, RuntimeError("broken\nin two lines"))),
        _stage("cannot", partial(_raising, NotRun("needs --statistics"))),
        _stage("gpu", partial(_noted, tmp_path / "gpu", fine), needs_gpu=True),
        _stage("misses", partial(_noted, tmp_path / "misses", missed)),
        _stage("meets", partial(_noted, tmp_path / "meets", fine)),
    ]
    found = _run(stages, kit)
    outcomes = {name: (one.outcome, one.reason) for name, one in found.items()}
    assert outcomes == {
        "fails": (FAILED, "RuntimeError: broken"),
        "cannot": (NOT_RUN, "needs --statistics"),
        "gpu": (NOT_RUN, "needs a GPU"),
        "misses": (MISSED, ""),
        "meets": (MET, ""),
    }
    assert not (tmp_path / "gpu").exists()
    assert has_problem(found.values())
    assert not has_problem([found["cannot"], found["meets"]])


def test_a_stage_that_is_done_is_not_run_again_unless_asked_for_or_for_other_settings(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, result = tmp_path / "calls", Result([holds("a", True)], ["note"], True, "abc")
    stages = [_stage("one", partial(_noted, calls, result), uses=("samples",))]
    first = _run(stages, kit)["one"]
    kept = _run(stages, kit)["one"]
    assert kept == replace(first, was_kept=True)
    assert len(calls.read_text()) == 1
    for again in (["one"], ["group"]):
        assert not _run(stages, kit, again=again)["one"].was_kept
    assert len(calls.read_text()) == 3
    # Settings that it does not use change nothing.
    assert _run(stages, replace(kit, threads=9))["one"].was_kept
    for other in (replace(kit, samples=7), replace(kit, is_real=True)):
        assert not _run(stages, other)["one"].was_kept
    stages = [replace(stages[0], identity="another row of the table")]
    assert not _run(stages, kit)["one"].was_kept
    assert _run(stages, kit)["one"].was_kept
    monkeypatch.setattr("benchmarks.acceptance.stages.code_digest", lambda: "other code")
    assert not _run(stages, kit)["one"].was_kept


@pytest.mark.parametrize("error", [NotRun("no network"), RuntimeError("no")])
def test_a_stage_that_did_not_succeed_is_tried_again(kit: Kit, error: Exception) -> None:
    stages = [_stage("one", partial(_raising, error))]
    assert not any(_run(stages, kit)["one"].was_kept for _ in range(2))


def test_stages_are_chosen_by_name_or_group() -> None:
    stages = all_stages("cpu")
    names = [one.name for one in stages]
    assert len(names) == len({*names})
    assert [one.name for one in chosen(stages, ["fid", "loras"], [])] == [
        *(f"lora-{one.name}" for one in ENTRIES if one.lora is not None),
        "fid",
    ]
    assert refusal(chosen, stages, [], ["speeed"]).startswith("speeed: no stage; choose tests, ")


SCHEDULERS = {
    "epsilon": diffusers.DDIMScheduler,
    "v_prediction": diffusers.EulerDiscreteScheduler,
}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda one: one.name)
def test_a_published_convention_is_the_schedule_that_diffusers_makes_of_its_betas(
    entry: Any,
) -> None:
    convention: Convention = entry.convention
    if convention.betas is None:
        assert convention.level(0.3)[:2] == (0.7, 0.3)
        return
    spacing, first, last = convention.betas
    made = SCHEDULERS[convention.prediction](
        beta_schedule=spacing,
        beta_start=first,
        beta_end=last,
        rescale_betas_zero_snr=convention.is_zero_snr,
    )
    expected = made.alphas_cumprod.double().sqrt().numpy()
    if convention.is_zero_snr:
        # Of diffusers' own: it divides by the last one.
        expected[-1] = 0.0
    assert len(expected) == STEPS
    np.testing.assert_allclose(convention.signal, expected, atol=2e-5)


def test_every_row_names_a_commit_a_licence_and_what_it_downloads() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    for entry in ENTRIES:
        assert re.fullmatch("[0-9a-f]{40}", entry.revision), entry.name
        assert entry.gigabytes > 0
        assert entry.licence
        assert entry.repo in readme
        if entry.lora is not None:
            assert re.fullmatch("[0-9a-f]{40}|main", entry.lora.revision), entry.name
    assert f"{gigabytes():.0f} GB" in readme


def test_offloading_that_waits_misses_its_goal_and_one_that_reads_ahead_meets_it() -> None:
    serial = judged(compute=0.3, copy=0.2, offloaded=0.5)
    overlapped = judged(compute=0.3, copy=0.2, offloaded=0.33)
    assert [figures[-1].verdict for figures in (serial, overlapped)] == [MISSED, MET]
    # More copying than computing: the copies are the bound.
    assert judged(compute=0.1, copy=0.4, offloaded=0.45)[-1].verdict == MET
    assert judged(compute=0.3, copy=0.2, offloaded=0.5, is_judged=False)[-1].verdict == ""


def _event(category: str, name: str, begins: float, ends: float, **more: Any) -> dict[str, Any]:
    """An event as torch's profiler writes it, in microseconds."""
    return {"cat": category, "name": name, "ts": 1e6 * begins, "dur": 1e6 * (ends - begins)} | more


def test_a_trace_tells_which_copies_happen_while_kernels_run() -> None:
    copy, moved = "Memcpy HtoD (Pinned -> Device)", {"args": {"bytes": 100}}
    copies = [
        _event("gpu_memcpy", copy, 1.5, 3.0, **moved),
        _event("gpu_memcpy", copy, 5.2, 5.4, **moved),
    ]
    kernels = [_event("kernel", "gemm", *times) for times in ((0, 1), (0.5, 2), (5, 6))]
    others = [
        {"ph": "M", "name": "process_name"},
        _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 9, **moved),
    ]
    trace = Trace.of([*others, *kernels, *copies])
    assert trace.copied == 200
    assert trace.share == pytest.approx((0.5 + 0.2) / (1.5 + 0.2))
    assert Trace.of([*copies, *others]) == Trace.of(kernels) == Trace()


@pytest.mark.integration
def test_steps_with_and_without_offloading_are_timed(tmp_path: Path) -> None:
    size, router = write_ensembles(models.QUICK, tmp_path)
    step = partial(integrated, f"{tmp_path}/{ALL}", models.QUICK, "cpu")
    ways = {"none": step(), "ram": step(offload="ram", max_memory=2 * size + router)}
    found = measured(ways, 1)
    assert all(seconds > 0 for seconds in found.values())
    assert bytes_per_second(size, "cpu") > 0


@pytest.mark.slow
def test_hddms_own_offloading_meets_its_goal_on_a_cpu(kit: Kit) -> None:
    """The one that is broken on purpose below."""
    found = with_waits(kit)
    assert found.outcome == MET, [figure.line for figure in found.figures]


def _raised_while_handling(
    handled: Exception, error: Exception, is_cause: bool, kit: Kit
) -> Result:
    try:
        raise handled
    except type(handled) as problem:
        if is_cause:
            raise error from problem
        raise error  # noqa: B904


@pytest.mark.parametrize("handled", [OfflineModeIsEnabled("offline"), httpx.ConnectError("no")])
def test_only_what_the_hub_caused_is_laid_on_the_network(kit: Kit, handled: Exception) -> None:
    run = partial(_raised_while_handling, handled, KeyError("unet"))
    found = _run([_stage("one", partial(run, False)), _stage("other", partial(run, True))], kit)
    assert (found["one"].outcome, found["one"].reason) == (FAILED, "KeyError: 'unet'")
    assert found["other"].reason == "no network: the hub cannot be reached"
    broken = _run([_stage("pipe", partial(_raising, BrokenPipeError("a process died")))], kit)
    assert broken["pipe"].outcome == FAILED


def test_a_stage_that_runs_out_of_memory_has_failed(kit: Kit) -> None:
    text = "CUDA out of memory. Tried to allocate 20.00 MiB"
    found = _run([_stage("one", partial(_raising, torch.OutOfMemoryError(text)))], kit)["one"]
    assert (found.outcome, found.reason) == (FAILED, f"OutOfMemoryError: {text}")
    assert has_problem([found])


@pytest.mark.parametrize(("total", "outcome"), [(24e9, NOT_RUN), (80e9, MET), (None, MET)])
def test_a_stage_that_states_more_memory_than_the_device_has_is_not_run(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, total: float | None, outcome: str
) -> None:
    """A device that does not tell its memory is tried."""
    room = None if total is None else Room("the memory of a GPU", int(total), 0)
    monkeypatch.setattr("benchmarks.acceptance.stages.room_on", lambda device: room)
    fine = partial(_noted, kit.work / "calls", Result([holds("b", True)]))
    stages = [_stage("large", fine, memory=60.0)]
    found = _run(stages, replace(kit, device="cuda", is_real=True))["large"]
    assert found.outcome == outcome
    if outcome == NOT_RUN:
        assert found.reason == "needs 60 GB, and the memory of a GPU has 24 GB"
    # Stand-ins are tiny.
    assert _run(stages, replace(kit, device="cuda"))["large"].outcome == MET


def _busy(seconds: float, kit: Kit) -> Result:
    """Take so many seconds of the processor here, and as many in another process."""
    code = f"import time\nwhile time.process_time() < {seconds}: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    return Result([holds("a", True)])


@pytest.mark.slow
def test_seconds_of_the_processor_are_counted_in_all_processes_of_a_stage(kit: Kit) -> None:
    stages = [_stage("idle", partial(_busy, 0.0)), _stage("busy", partial(_busy, 1.0))]
    idle, busy = run_stages(stages, kit)
    assert (idle.outcome, busy.outcome) == (MET, MET)
    assert 2 <= busy.processor < idle.processor + 4
    assert costs([idle, busy]).endswith(
        f"most took busy {busy.processor:.0f} s, idle {idle.processor:.0f} s"
    )


def test_results_of_pytest_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='a' name='b'/>"
        "<testcase classname='a' name='c'><failure>no</failure></testcase>"
        "<testcase classname='a' name='d'><skipped/></testcase></testsuite></testsuites>"
    )
    assert counted(report) == (1, ["a::c"], 1)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["sd35", "dit"], ids=["by hddm", "pickles, by the hub's client"])
@pytest.mark.parametrize(
    ("problem", "reason"), [("gated", "needs a token"), ("gone", "shows no such repository")]
)
def test_a_model_that_the_hub_does_not_give_is_not_run_with_the_reason(
    hub: Hub, kit: Kit, problem: str, reason: str, name: str
) -> None:
    entry = entry_named(name)
    if problem == "gated":
        hub.repos[entry.repo] = {"model_index.json": b"{}"}
        hub.gated.add(entry.repo)
    found = _run([_stage("one", partial(compare, entry))], kit)["one"]
    assert (found.outcome, reason in found.reason) == (NOT_RUN, True), found.reason


@pytest.mark.integration
@pytest.mark.parametrize("name", ["sd35", "dit"], ids=["by hddm", "pickles, by the hub's client"])
def test_without_a_network_a_model_is_not_run(
    hub: Hub, kit: Kit, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    found = _run([_stage("one", partial(compare, entry_named(name)))], kit)["one"]
    assert (found.outcome, found.reason) == (NOT_RUN, "no network: the hub cannot be reached")


def test_an_expert_of_other_code_or_of_another_commit_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first := kept_expert(tmp_path, "a" * 40)).mkdir()
    assert kept_expert(tmp_path, "a" * 40) == first
    assert first.exists()
    monkeypatch.setattr("benchmarks.acceptance.checkpoints.code_digest", lambda: "f" * 64)
    (second := kept_expert(tmp_path, "a" * 40)).mkdir()
    assert not first.exists()
    assert kept_expert(tmp_path, "b" * 40) != second
    assert not second.exists()


def _missed(one: Finished) -> list[str]:
    return [figure.what for figure in one.result.figures if figure.verdict == MISSED]


@pytest.mark.slow
def test_three_broken_stages_are_seen_in_the_report_while_others_go_on(
    hub: Hub, kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network off by 1 %, another scheduler than the published one, and offloading that waits."""
    network, schedule, whole = (entry_named(name) for name in ("sd35", "dit", "pixart-sigma"))
    for entry in (network, schedule, whole):
        put_stand_in(hub, entry, tmp_path / "stand-ins")
    stages = [
        Stage(f"checkpoint-{one.name}", "checkpoints", one.title, partial(compare, one))
        for one in (network, schedule, whole)
    ]
    before = _run(stages[:1], kit)["checkpoint-sd35"]
    assert (before.outcome, before.reason) == (MET, "")

    (expert,) = (kit.work / "experts" / "sd35").glob("*")
    weights = load_file(expert / WEIGHTS)
    for name in ("proj_out.weight", "proj_out.bias"):
        weights[name] = 1.01 * weights[name]
    save_file(weights, expert / WEIGHTS, {"format": "pt"})
    seal(expert)
    folder = tmp_path / "stand-ins" / "dit" / "repo"
    edit_json(folder / "scheduler" / "scheduler_config.json", beta_schedule="scaled_linear")
    hub.put(schedule.repo, folder)
    monkeypatch.setattr(Shelf, "_bring_next", lambda shelf: None)
    waiting = Stage("offload", "offload", "Offload", with_waits)

    report = Report(kit, "a test", tmp_path / "report")
    for one in run_stages([*stages, waiting], kit, ["checkpoints"], is_apart=False):
        report.finished.append(one)
    found = {one.stage: one for one in report.finished}
    outcomes = {name: one.outcome for name, one in found.items()}
    assert outcomes == {
        "checkpoint-sd35": MISSED,
        "checkpoint-dit": MISSED,
        "checkpoint-pixart-sigma": MET,
        "offload": MISSED,
    }
    missed = {name: _missed(one) for name, one in found.items()}
    assert len([what for what in missed["checkpoint-sd35"] if what.startswith("one call")]) == 3
    assert missed["checkpoint-dit"][0] == "schedule and prediction beside the published ones"
    assert any(what.startswith("one call") for what in missed["checkpoint-dit"])
    # Both ways read the same wrong schedule, so that their pictures agree.
    assert not any(what.startswith("picture") for what in missed["checkpoint-dit"])
    assert missed["offload"] == ["reads while a network computes, share of their time"]
    page = report.write()
    stated = {one["stage"]: one["outcome"] for one in _json(page)["stages"]}
    assert stated == outcomes
    assert page.read_text().count('<td class="text outcome missed">missed</td>') == sum(
        map(len, missed.values())
    )


def _json(page: Path) -> Any:
    return json.loads(page.with_suffix(".json").read_text())


def _filled(report: Report) -> Path:
    """A report of three stages, of which two have a picture."""
    pictures = {"hddm": str(report.kit.work / "picture.png")}
    Image.new("RGB", (8, 8), "red").save(pictures["hddm"])
    figures = [at_most("a <difference>", 2.0, 1.0), holds("b", True), told("c", 3.0, " s")]
    real = Result(figures, ["a note"], False, "0123abcd", pictures)
    report.finished += [
        Finished("one", "first", "Stage one", MISSED, real, seconds=1.5, ended="2026-01-01"),
        Finished("two", "second", "Stage two", NOT_RUN, Result(), "needs a token"),
        Finished("three", "second", "Stage three", MET, replace(real, is_stand_in=True)),
    ]
    return report.write()


def test_a_report_tells_stage_goal_figure_verdict_reason_machine_and_commit(
    kit: Kit, tmp_path: Path
) -> None:
    page = _filled(Report(kit, "python -m benchmarks.acceptance", tmp_path / "report"))
    text, content = page.read_text(), _json(page)
    for told_in in (
        *("Stage one", "a &lt;difference&gt;", "at most 1", "missed", "needs a token", "1.5 s"),
        *("a note", "0123abcd", "stand-in", "python -m benchmarks.acceptance"),
        *(content["commit"], content["machine"]["processor"]),
        *(content["machine"]["packages"]["torch"], "No published model was downloaded"),
    ):
        assert told_in in text, told_in
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    # A stand-in makes noise.
    assert text.count("<img") == 1
    assert str(kit.work) not in text + page.with_suffix(".json").read_text()
    assert [one["outcome"] for one in content["stages"]] == [MISSED, NOT_RUN, MET]
    assert content["stages"][0]["result"]["figures"][0]["number"] == 2.0


@pytest.mark.integration
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_shows_the_report_without_other_files(
    kit: Kit, tmp_path: Path, width: int
) -> None:
    page = _filled(Report(kit, "python -m benchmarks.acceptance", tmp_path / "report"))
    with Browser(tmp_path / "profile") as browser:
        browser.open(page, width)
        assert browser.complaints == []
        assert len(browser.requests) == 1
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        colour = "getComputedStyle(document.querySelector('td.missed')).color"
        assert browser.evaluate(colour) == "rgb(179, 38, 30)"


@pytest.mark.slow
def test_the_whole_kit_runs_on_a_cpu_and_meets_its_goals(tmp_path: Path) -> None:
    options = ["--work", tmp_path / "work", "--out", tmp_path / "report", "--threads", 1]
    command = [sys.executable, "-m", "benchmarks.acceptance", *map(str, options)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    page = next((tmp_path / "report").glob("*.html"))
    stages = {one["stage"]: one for one in _json(page)["stages"]}
    assert [*stages] == [one.name for one in all_stages("cpu")]
    for name, one in stages.items():
        if one["outcome"] == NOT_RUN:
            assert one["reason"] == "needs a GPU", name
        else:
            assert one["outcome"] in (MET, MEASURED), name
            assert one["result"]["is_stand_in"], name
    # A second start reads what the first one has found.
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert again.stdout.count("by an earlier start") == len(stages) - 2
