"""What `hddm convert` costs beside copying the file and beside doing it plainly."""

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.conversion.checkpoint import SMALL, XL, write_checkpoints
from benchmarks.conversion.processes import Measured, run_measured
from benchmarks.harness import Start
from benchmarks.reports import met, table

_PLAIN = """
import sys, torch
from safetensors.torch import load_file, save_file
source, out = sys.argv[1:]
tensors = load_file(source) if source.endswith("safetensors") else torch.load(source, weights_only=True)
save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, out)
"""
_IMPORTS = {
    "imports of hddm convert": "import hddm_cli.app, hddm.checkpoints.convert, hddm.checkpoints.plan, "
    "hddm.checkpoints.sources, hddm.checkpoints.convert, hddm.checkpoints.write_back, "
    "hddm.experts.records, hddm.utils.files",
    "imports of the plain way": "import sys, torch; from safetensors.torch import load_file, save_file",
}
COPY, CONVERT, CHECKED, PLAIN = "cp, sha256sum", "hddm convert --no-verify", "hddm convert", "plain way"
SYNCED = "cp, sha256sum, sync"
Results = dict[str, list[Measured]]


def measure_cost(quick: bool, repeats: int, start: Start) -> Path:
    """Write a checkpoint, convert it ``repeats`` times beside the other ways, and delete everything."""
    work = start.work
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as place:
        folder = Path(place)
        safetensors, pickle, weights = write_checkpoints(folder, SMALL if quick else XL)
        print(f"{weights / 1e6:,.0f} million weights, {safetensors.stat().st_size / 1e9:.2f} GB", flush=True)
        found: dict[str, Results] = {"imports": {}, "safetensors": {}, "pickle": {}}
        for repeat in range(repeats):
            for name, code in _IMPORTS.items():
                _note(found["imports"], name, repeat, [sys.executable, "-c", code], lambda: None)
            for kind, source in (("safetensors", safetensors), ("pickle", pickle)):
                _measure_source(found[kind], repeat, source, folder / "out")
        sizes = {"safetensors": safetensors.stat().st_size, "pickle": pickle.stat().st_size}
    content = {
        "weights": weights,
        "bytes": sizes,
        "measured": {
            kind: {name: [asdict(one) for one in each] for name, each in ways.items()}
            for kind, ways in found.items()
        },
    }
    name = f"conversion-{'cost-quick' if quick else 'cost'}"
    return start.write(name, _text(content, found, repeats), content)


def _measure_source(found: Results, repeat: int, source: Path, out: Path) -> None:
    """All ways of one source, each from a warm page cache and with nothing left to write to the disk."""
    convert = [str(Path(sys.executable).parent / "hddm"), "convert", str(source), "--out", str(out)]
    convert += ["--allow-pickle"] if source.suffix == ".pt" else []
    copy = f"cp '{source}' '{out}' && sha256sum '{out}' > /dev/null"
    ways: dict[str, Sequence[str]] = {
        COPY: ["sh", "-c", copy],
        SYNCED: ["sh", "-c", f"{copy} && sync '{out}'"],
        CONVERT: [*convert, "--no-verify"],
        CHECKED: convert,
        PLAIN: [sys.executable, "-c", _PLAIN, str(source), str(out)],
    }

    def ready() -> None:
        os.sync()
        with source.open("rb") as file:
            while file.read(1 << 24):
                pass

    for name, way in ways.items():
        _note(found, name, repeat, way, ready)
        shutil.rmtree(out) if out.is_dir() else out.unlink()


def _note(found: Results, name: str, repeat: int, command: Sequence[str], ready: Callable[[], None]) -> None:
    ready()
    measured = run_measured(command)
    found.setdefault(name, []).append(measured)
    print(
        f"{repeat}: {name}: {measured.seconds:.1f} s, processor {measured.cpu_seconds:.1f} s, "
        f"own {measured.anonymous / 1e6:,.0f} MB, resident {measured.total / 1e6:,.0f} MB",
        flush=True,
    )


def _text(content: Mapping[str, Any], found: dict[str, Results], repeats: int) -> list[str]:
    imports = found["imports"]
    bare, bare_plain = imports["imports of hddm convert"], imports["imports of the plain way"]
    lines = [
        f"# Cost of a conversion: {content['weights'] / 1e6:,.0f} million weights",
        "Random float32 weights in the layout of facebookresearch/DiT, "
        f"{content['bytes']['safetensors'] / 1e9:.2f} GB a file. Median of {repeats}, in brackets lowest and "
        "highest. The page cache is warm (the source is read once before each run) and nothing waits to be "
        "written. Memory is the peak of RssAnon, sampled every 10 ms, above that of a process with the same "
        'imports alone; "resident" is the peak of all resident pages, in which pages of the mapped source '
        "count although the kernel may drop them. Wall times include the imports: "
        f"{_times(bare)} s of `hddm convert`, {_times(bare_plain)} s of the plain way (load all, rename, "
        "save).",
    ]
    for kind in ("safetensors", "pickle"):
        ways = found[kind]
        rows = []
        for name, each in ways.items():
            base = {PLAIN: bare_plain, CONVERT: bare, CHECKED: bare}.get(name)
            rows.append(
                [
                    name,
                    _times(each),
                    f"{_median(each, 'seconds') / _median(ways[COPY], 'seconds'):.2f}",
                    f"{_median(each, 'cpu_seconds'):.1f}",
                    f"{_above(each, base) / 1e6:,.0f}" if base else "–",
                    f"{_above(each, base) / content['bytes'][kind]:.2f}" if base else "–",
                    f"{_median(each, 'total') / 1e6:,.0f}" if base else "–",
                ]
            )
        columns = [
            "way",
            "wall, s",
            "× cp, sha256sum",
            "processor, s",
            "own memory, MB",
            "× source",
            "resident, MB",
        ]
        lines += ["", f"From {kind}:", "", *table(columns, rows), "", *_targets(content, kind, ways, bare)]
    return lines


def _targets(content: Mapping[str, Any], kind: str, ways: Results, bare: Sequence[Measured]) -> list[str]:
    allowed = 300e6 + (content["bytes"][kind] if kind == "pickle" else 0)
    memory = _above(ways[CONVERT], bare)
    limit = 2 * _median(ways[COPY], "seconds") + _median(bare, "seconds")
    wall = _median(ways[CONVERT], "seconds")
    check = _median(ways[CHECKED], "seconds") - wall
    return [
        f"- Memory above the imports: {memory / 1e6:,.0f} MB; target below {allowed / 1e6:,.0f} MB: "
        f"{met(memory, allowed)}.",
        f"- Wall: {wall:.1f} s; target 2 × (cp, sha256sum) + imports = {limit:.1f} s: {met(wall, limit)}.",
        f"- The self-check takes {check:.1f} s more.",
    ]


def _median(each: Sequence[Measured], name: str) -> float:
    return statistics.median(getattr(one, name) for one in each)


def _above(each: Sequence[Measured], base: Sequence[Measured]) -> float:
    return _median(each, "anonymous") - _median(base, "anonymous")


def _times(each: Sequence[Measured]) -> str:
    seconds = [one.seconds for one in each]
    return f"{statistics.median(seconds):.1f} [{min(seconds):.1f}, {max(seconds):.1f}]"
