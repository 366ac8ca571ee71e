"""Packages that take seconds to import are imported only where the work needs them."""

import json
import subprocess
import sys
from pathlib import Path

from tests.artefacts import Command

# Each takes seconds, most of them with torch below.
HEAVY = {"torch", "diffusers", "transformers", "accelerate", "peft", "sklearn", "scipy", "matplotlib", "rich"}
VERBS = (
    "quickstart",
    "benchmark",
    "data check",
    "partition",
    "encode",
    "train expert",
    "train router",
    "train all",
)
VERBS += ("convert", "calibrate", "verify", "assemble", "distill", "sample", "evaluate", "compare", "inspect")


def _imported(code: str, *arguments: object) -> set[str]:
    """Names of all modules that are there when ``code`` has run."""
    code = f"import atexit, sys\natexit.register(lambda: print('modules', *sys.modules))\n{code}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" not in run.stderr, run.stderr
    return set(run.stdout.rpartition("modules")[2].split())


def test_importing_hddm_or_reading_a_record_imports_nothing_heavy() -> None:
    light = ["hddm", "hddm.utils.records", "hddm.utils.files", "hddm.data.shard_records", "hddm.data.check"]
    assert not _imported(f"import {', '.join(light)}") & HEAVY


def test_loading_a_model_imports_no_network_of_diffusers() -> None:
    """The class that a folder names is imported when the folder is opened."""
    imported = _imported("import hddm; hddm.load")
    assert "hddm.networks.wrappers" in imported
    networks = {f"diffusers.models.{name}" for name in ("transformers", "unets", "autoencoders")}
    assert not imported & (networks | {"diffusers.pipelines", "hddm.checkpoints"})


def test_a_function_stays_what_it_is_when_its_module_has_been_imported() -> None:
    code = "import hddm.experts.loading; assert callable(hddm.load) and callable(hddm.sample)\n"
    _imported(code + "from hddm import *\nassert Ensemble and load and schedules.LinearSchedule")


def _imported_by(*line: object) -> set[str]:
    """Names of all modules that are there when a command has run."""
    return _imported("from hddm_cli.app import app\napp()", *line)


def test_looking_at_images_imports_nothing_heavy(images: Path) -> None:
    assert not _imported_by("data", "check", images) & HEAVY
    assert not _imported_by("inspect", images) & HEAVY


SLIPS = """
train expert {shard} --out {out} --objective flow --steps 3 --lerning-rate 1
train expert {shard} --out {out} --objective flow --steps 3 --learning-rate -1
train expert {shard} --out {out} --objective flow --steps 3 --size huge
train all --shards {shards} --out {out} --objective flwo --steps 3
sample {shard} --out {out} --solver eulr
sample {shard} --out {out} --strategy best
sample {shard} --out {out} --device gpu
convert {shard} --out {out} --prediction-type noise
benchmark digts --out {out}
data check {gone}
partition {gone} --out {out} --shards 2
encode {gone} --out {out}
train expert {gone} --out {out} --objective flow --steps 3
train router {gone} --out {out} --steps 3
train all --shards {gone} --out {out} --objective flow --steps 3
distill {gone} --data {shards} --out {out} --steps 3
convert {gone} --out {out}
calibrate {gone}
calibrate {shard} --data {gone}
verify {gone}
assemble {gone} --out {out}
assemble {shard} --router {gone} --out {out}
sample {gone} --out {out}
evaluate {gone} --reference {shard}
compare {gone} {gone}
inspect {gone}
"""


def _in_one_process(lines: list[list[str]]) -> list[tuple[int, str, set[str]]]:
    """Of each command its exit code, its output, and the heavy packages that are there after it."""
    code = """
import contextlib, io, json, sys
from hddm_cli.app import app
for line in json.loads(sys.argv[1]):
    sys.argv = ["hddm", *line]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            app()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    print(json.dumps([code, said.getvalue(), list(sys.modules)]))
"""
    run = subprocess.run([sys.executable, "-c", code, json.dumps(lines)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = map(json.loads, run.stdout.splitlines())
    return [(code, output, HEAVY & set(modules)) for code, output, modules in found]


def test_a_slip_of_the_keyboard_is_refused_by_name_before_anything_heavy_is_imported(
    shards: Path, tmp_path: Path
) -> None:
    names = {
        "shards": shards,
        "shard": shards / "shard_0",
        "gone": tmp_path / "gone",
        "out": tmp_path / "out",
    }
    templates = SLIPS.split("\n")[1:-1]
    lines = [template.format(**names).split() for template in templates]
    for template, (code, output, heavy) in zip(templates, _in_one_process(lines), strict=True):
        assert (code, output.count("\n"), heavy) == (2, 1, set()), (template, output)
        assert "{gone}" not in template or str(names["gone"]) in output, template
    assert not list(tmp_path.iterdir())


def test_no_help_imports_anything_heavy() -> None:
    verbs = [verb.split() for verb in ("", "train", "data", *VERBS)]
    for verb, (code, output, heavy) in zip(
        verbs, _in_one_process([[*one, "--help"] for one in verbs]), strict=True
    ):
        assert (code, "--help" in output, heavy) == (0, True, set()), verb


def test_to_go_on_with_what_is_finished_imports_nothing_heavy(
    shards: Path, tmp_path: Path, hddm: Command
) -> None:
    options = ["--steps", 2, "--batch-size", 8, "--size", "tiny", "--resume"]
    flow, ddpm = ["--objective", "flow"], ["--objective", "ddpm"]
    lines: list[list[object]] = [
        ["train", "expert", shards / "shard_0", "--out", tmp_path / "all" / "expert_0", *ddpm, *options],
        ["train", "expert", shards / "shard_1", "--out", tmp_path / "all" / "expert_1", *flow, *options],
        ["train", "router", shards, "--out", tmp_path / "router", *options],
    ]
    for line in lines:
        assert hddm(*line)[0] == 0
    whole = ["train", "all", "--shards", shards, "--out", tmp_path / "all", "--objective", "0=ddpm,*=flow"]
    for line in (*lines, [*whole, *options]):
        assert hddm(*line)[:2] == (0, "")
        assert not _imported_by(*line) & HEAVY
    code, _, error = hddm(*whole, *options, "--seed", 5)
    assert (code, error.count("\n"), error.count("settings.seed: was 0, is 5")) == (1, 3, 1)
    assert "2 of 2 experts failed" in error
