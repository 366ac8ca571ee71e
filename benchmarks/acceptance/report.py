"""The report of a start: one page without any other file, and its numbers as JSON."""

import base64
import io
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

import hddm
from benchmarks.acceptance.stages import ROOT, Finished, Kit
from benchmarks.harness import plain
from hddm.utils.files import write_json
from hddm.utils.progress import duration
from hddm.utils.work import machine

PACKAGES = ("peft", "torchao", "accelerate", "huggingface_hub", "ray")
"""Beside those of `machine`."""
THUMBNAIL = 160
ORDER = ("failed", "missed", "met", "measured", "not run")


@dataclass
class Report:
    """What is written after each stage: a start that is cut off leaves the stages that it has made."""

    kit: Kit
    command: str
    out: Path
    finished: list[Finished] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    origin: Mapping[str, Any] = field(default_factory=lambda: origin())

    @property
    def stem(self) -> Path:
        """Path of both files, without suffix."""
        device = self.kit.device.replace(":", "-")
        return self.out / f"{date.today().isoformat()}-acceptance-{device}"

    def write(self) -> Path:
        """Write both files, and return the page."""
        self.out.mkdir(parents=True, exist_ok=True)
        content = {
            "format": "1.0",
            "date": date.today().isoformat(),
            "command": self.command,
            "device": self.kit.device,
            "published_models": self.kit.is_real,
            "seconds": round(time.perf_counter() - self.began),
            **self.origin,
            "stages": [_without_places(asdict(one)) for one in self.finished],
        }
        write_json(self.stem.with_suffix(".json"), plain(content))
        page = self.stem.with_suffix(".html")
        page.write_text(self._page(content), encoding="utf-8")
        return page

    def _page(self, content: Mapping[str, Any]) -> str:
        loader = FileSystemLoader(Path(__file__).parent)
        templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
        templates.globals["duration"] = duration
        style = (Path(hddm.__file__).parent / "utils" / "pages.css").read_text(encoding="utf-8")
        counts = Counter(one.outcome for one in self.finished)
        summary = [f"{counts[name]} {name}" for name in ORDER if counts[name]]
        return templates.get_template("report.html.j2").render(
            content=content,
            finished=self.finished,
            pictures={one.stage: _thumbnails(one) for one in self.finished},
            summary=", ".join(summary),
            style=style,
        )


def origin() -> dict[str, Any]:
    """The machine, versions and the commit of this checkout."""
    found = machine()
    for name in PACKAGES:
        try:
            found["packages"][name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["accelerator_memory_gb"] = round(properties.total_memory / 1e9, 1)
        found["cuda"] = torch.version.cuda
    return {"machine": found, "commit": commit()}


def commit() -> str:
    """Commit of the checkout, and whether files differ from it."""
    if shutil.which("git") is None:
        return "unknown"
    said = _git("rev-parse", "HEAD")
    if not said:
        return "unknown"
    changed = _git("status", "--porcelain", "--", "hddm", "cli", "benchmarks", "tests")
    return f"{said} with changes" if changed else said


def _git(*words: str) -> str:
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def _without_places(stage: Mapping[str, Any]) -> dict[str, Any]:
    """A stage without the paths of its pictures, which mean nothing elsewhere."""
    result = {key: value for key, value in stage["result"].items() if key != "pictures"}
    return {**stage, "result": result}


def _thumbnails(stage: Finished) -> Sequence[tuple[str, str]]:
    """Captions and data addresses of a stage's pictures; stand-ins make noise, which is left out."""
    found: list[tuple[str, str]] = []
    if stage.result.is_stand_in:
        return found
    for caption, place in stage.result.pictures.items():
        if not Path(place).is_file():
            continue
        with Image.open(place) as picture:
            small = picture.convert("RGB")
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        data = io.BytesIO()
        small.save(data, "PNG")
        address = base64.b64encode(data.getvalue()).decode()
        found.append((caption, f"data:image/png;base64,{address}"))
    return found
