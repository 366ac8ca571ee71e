"""What commands import: records are shown and slips refused without torch."""

import json
from copy import deepcopy
from pathlib import Path

import pytest

from tests.artefacts import in_a_fresh_process, in_fresh_processes, variant
from tests.evaluation.test_compare import RESULT

TORCH = {"torch", "diffusers", "transformers", "accelerate", "peft", "matplotlib", "sklearn"}
"""`hddm compare` needs Student's distribution, of scipy."""
FOREIGN = (
    "diffusers.models.unets.",
    "diffusers.models.autoencoders.",
    "diffusers.pipelines.pipeline_utils.",
    "transformers.models.clip.modeling_clip.",
    "transformers.models.t5.modeling_t5.",
)


def _result(path: Path, images: str, distance: float) -> Path:
    content = deepcopy(RESULT)
    content["data"]["images"]["hash"] = images
    content["splits"][0]["distance"]["value"] = distance
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.integration
def test_records_and_results_are_shown_without_torch(
    ensemble: Path,
    flow_expert: Path,
    ddpm_expert: Path,
    router: Path,
    shards: Path,
    tmp_path: Path,
) -> None:
    for seed in range(3):
        _result(tmp_path / "a" / f"{seed}.json", f"a{seed}", 20.0 + seed)
        _result(tmp_path / "b" / f"{seed}.json", f"b{seed}", 30.0 + seed)
    models = (flow_expert, ddpm_expert, router, ensemble, shards, shards / "shard_0")
    lines = [["inspect", one, *words] for one in models for words in ([], ["--json"])]
    lines.append(["compare", tmp_path / "a", tmp_path / "b"])
    lines.append(["compare", tmp_path / "a" / "0.json"])
    for line, (code, output, heavy) in zip(lines, in_a_fresh_process(lines), strict=True):
        assert (code, heavy & TORCH) == (0, set()), (line, output)


@pytest.mark.integration
def test_benchmarks_are_planned_and_refused_without_torch(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("name: wrong\nsteps: {one: train nothing}\nrows: {}\n")
    lines = [["benchmark", "quickstart", "--dry-run"], ["benchmark", "digits", "--dry-run"]]
    lines += [["benchmark", wrong], ["benchmark", "quickstart", "--set", "steps=3"]]
    codes = []
    for line, (code, output, heavy) in zip(lines, in_a_fresh_process(lines), strict=True):
        codes.append(code)
        # Charts, and the digits of the preset, have libraries of their own.
        assert heavy & TORCH <= {"matplotlib", "sklearn"}, (line, output)
    assert codes == [0, 0, 2, 2]


@pytest.mark.integration
def test_what_is_no_model_or_no_shard_is_refused_without_torch(
    images: Path, shards: Path, ensemble: Path, tmp_path: Path
) -> None:
    out, expert = tmp_path / "out", ensemble / "experts" / "0"
    of_no_model = {
        "sample": ["--out", out],
        "play": [],
        "serve": [],
        "verify": [],
        "describe": ["--text", "cats"],
        "calibrate": ["--data", shards / "shard_0"],
        "distill": ["--data", shards, "--out", out, "--steps", 1],
    }
    lines = [[verb, images, *words] for verb, words in of_no_model.items()]
    train = ["train", "expert", "--out", out, "--objective", "flow", "--steps", 1]
    lines += [[*train, images], [*train, shards], [*train, expert]]
    for line, (code, output, heavy) in zip(lines, in_a_fresh_process(lines), strict=True):
        assert (code, output.count("\n"), heavy) == (2, 1, set()), (line, output)
    assert not out.exists()


@pytest.mark.slow
def test_verbs_that_run_hddms_own_networks_import_no_other(
    ensemble: Path, shards: Path, tmp_path: Path
) -> None:
    """`hddm sample` does, with `DiffusionPipeline`, whose module imports all VAEs of diffusers."""
    expert = ensemble / "experts" / "0"
    one = ["--out", tmp_path / "out", "--overwrite"]
    short = ["--objective", "flow", "--size", "tiny", "--steps", 1]
    lines = [
        ["verify", expert],
        ["merge", expert, expert, *one],
        ["train", "expert", shards / "shard_0", *one, *short],
    ]
    for (code, output, modules), line in zip(in_fresh_processes(lines), lines, strict=True):
        assert code == 0, output
        foreign = []
        for name in modules:
            if f"{name}.".startswith(FOREIGN):
                foreign.append(name)
        assert not foreign, line


def test_an_expert_of_an_unknown_schedule_is_still_refused_by_inspect(
    ddpm_expert: Path, tmp_path: Path
) -> None:
    odd = variant(ddpm_expert, tmp_path / "odd", schedule={"name": "odd"})
    ((code, output, _),) = in_a_fresh_process([["inspect", odd]])
    assert code == 1
    assert "schedule {'name': 'odd'} is unknown" in output
