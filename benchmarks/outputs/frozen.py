"""Freeze what hddm computes, and show after a change that nothing is different.

    python -m benchmarks.outputs write before.json       # before the change
    python -m benchmarks.outputs compare before.json     # after it; exits with 1 if anything differs

About 1,700 outputs are computed: tensors and files, nearly all through the names that users call. A file
holds a hash of each, and the versions, the processor and the number of threads, on which the bits depend. So
write and compare on one machine, in one environment.
"""

import json
import platform
import random
import sys
import tempfile
import time
import traceback
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.outputs.digests import Digest, digest
from benchmarks.outputs.workshop import Workshop

AREAS = {
    "method": "schedules velocity sampling mixing",
    "training": "data training continuation students",
    "ensembles": "routers ensembles evaluation",
    "pipelines": "pictures prompts drop_in service",
    "checkpoints": "conversion loras",
}
"""Areas by the module that has a function for each."""
MODULES = {area: module for module, areas in AREAS.items() for area in areas.split()}
PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "safetensors",
    "numpy",
    "scikit-learn",
    "peft",
    "pillow",
)
"""Packages whose versions can change the bits."""
FAILED = "fails"
"""Name of the output of an area that ends with an error, which is its value."""

Found = dict[str, dict[str, Digest]]
"""Digests of outputs by area and name."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Only = Annotated[
    list[str] | None, typer.Option(help=f"An area, of {', '.join(MODULES)}. Default: all.")
]


def environment() -> dict[str, Any]:
    """What the bits of outputs depend on."""
    return {
        **{name: metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "processor": _processor(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def compute(areas: list[str]) -> Found:
    """Compute the outputs of these areas, with a line about each."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder).resolve())
        for area in areas:
            begun = time.perf_counter()
            found[area] = _outputs_of(area, workshop)
            seconds = time.perf_counter() - begun
            print(
                f"{area}: {len(found[area])} outputs, {seconds:.0f} s", file=sys.stderr, flush=True
            )
    return found


def _outputs_of(area: str, workshop: Workshop) -> dict[str, Digest]:
    """The outputs of one area; an error ends it, and is its last output."""
    # Nothing may depend on what was computed before.
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    found: dict[str, Digest] = {}
    try:
        # Only now, so that what one area cannot import leaves the others alone.
        module = import_module(f"benchmarks.outputs.{MODULES[area]}")
        for name, value in getattr(module, area)(workshop):
            if name in found:
                raise ValueError(f"two outputs are called {name!r}")
            found[name] = digest(value)
    except Exception as error:
        traceback.print_exc()
        found[FAILED] = {"sha256": "", "kind": f"{type(error).__name__}: {error}"}
    return found


def differences(before: Found, now: Found) -> list[str]:
    """A line for each output that is missing, new or another one."""
    lines = []
    for area in {**before, **now}:
        old, new = before.get(area, {}), now.get(area, {})
        for name in {**old, **new}:
            if (change := _change(old.get(name), new.get(name))) is not None:
                lines.append(f"{area}: {name}: {change}")
    return lines


def _change(old: Digest | None, new: Digest | None) -> str | None:
    if old is None:
        assert new is not None
        return f"is new ({new['kind']})"
    if new is None:
        return f"is missing ({old['kind']})"
    if old["kind"] != new["kind"]:
        return f"{old['kind']} became {new['kind']}"
    if old["sha256"] == new["sha256"]:
        return None
    if "norm" in old:
        return f"other bits; norm {old['norm']!r} became {new['norm']!r}"
    return "other bytes"


def _chosen(only: list[str] | None) -> list[str]:
    unknown = [name for name in only or () if name not in MODULES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]}: choose from {', '.join(MODULES)}")
    return [name for name in MODULES if not only or name in only]


@app.command()
def write(file: Path, only: Only = None) -> None:
    """Compute the outputs, and write their hashes to FILE."""
    areas = _chosen(only)
    found = compute(areas)
    failed = [area for area in areas if FAILED in found[area]]
    if failed:
        sys.exit(f"nothing was written: {', '.join(failed)} failed")
    content = {"environment": environment(), "outputs": found}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"{file}: {sum(map(len, found.values()))} outputs")


@app.command()
def compare(file: Path, only: Only = None) -> None:
    """Compute the outputs again, and list those that differ from FILE; exit with 1 if any does."""
    areas = _chosen(only)
    content = json.loads(file.read_text())
    here = environment()
    for name, value in content["environment"].items():
        if here.get(name) != value:
            print(
                f"{name}: {value} in {file}, {here.get(name)} here; other bits may come from that"
            )
    now = compute(areas)
    before = {
        area: outputs for area, outputs in content["outputs"].items() if not only or area in only
    }
    lines = differences(before, now)
    print("\n".join([*lines, f"{len(lines)} of {sum(map(len, now.values()))} outputs differ"]))
    sys.exit(1 if lines else 0)
