"""Runs of trackers, W&B and Trackio, which show the figures of many trainings on one dashboard.

Both have the same functions: ``init`` opens a run of a project, and ``log`` and ``finish`` are of the run. A
training that is resumed continues its run.
"""

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.utils.errors import optional

TIMEOUT = 60.0
"""Seconds that W&B's server may take for its first answer."""

log = logging.getLogger(__name__)


class TrackerLog:
    """A run ``name`` of ``project``; the file ``<tracker>.id`` in ``folder`` says that it was opened.

    ``settings`` are shown beside the figures. A missing package raises `HddmError`. What a tracker prints
    goes to standard error.
    """

    module: str

    def __init__(self, folder: Path, project: str, name: str, settings: Mapping[str, Any]) -> None:
        self._tracker: Any = optional(self.module, "`tracker`", self.module)
        mark = folder / f"{self.module}.id"
        was_opened = mark.exists()
        if not was_opened:
            mark.write_text(secrets.token_hex(8))
        how = self._options(folder, mark.read_text(), was_opened)
        with contextlib.redirect_stdout(sys.stderr):
            self._run: Any = self._tracker.init(
                project=project, name=name, config=dict(settings), **how
            )

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, Tensor]) -> None:
        """Log ``figures``, and ``pictures`` (C, H, W) in bytes, by name."""
        logged: dict[str, Any] = dict(figures)
        for name, pixels in pictures.items():
            # Trackio takes no pictures of one channel.
            coloured = pixels.expand(3, -1, -1).permute(1, 2, 0)
            logged[name] = self._tracker.Image(coloured.numpy())
        self._run.log(logged, step=step)

    def close(self, failed: bool) -> None:
        """Send what is left."""
        with contextlib.redirect_stdout(sys.stderr):
            self._finish(failed)

    def _options(self, folder: Path, number: str, was_opened: bool) -> dict[str, Any]:
        """What else this tracker's ``init`` takes."""
        raise NotImplementedError

    def _finish(self, failed: bool) -> None:
        raise NotImplementedError


class WandbLog(TrackerLog):
    """A run of W&B, with its files in ``folder``/wandb.

    Without WANDB_API_KEY it is written offline, for ``wandb sync``, so that nothing prompts; WANDB_MODE
    decides otherwise. Of a step that a killed process had logged already, W&B keeps the first values.
    """

    module = "wandb"

    def _options(self, folder: Path, number: str, was_opened: bool) -> dict[str, Any]:
        quiet = self._tracker.Settings(console="off", silent=True, init_timeout=TIMEOUT)
        place = {"id": number, "dir": str(folder), "resume": "allow"}
        return {**place, "mode": _mode(), "settings": quiet}

    def _finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class TrackioLog(TrackerLog):
    """A run of Trackio, in TRACKIO_DIR, by default in the user's cache, or at TRACKIO_SERVER_URL.

    Of a step that a killed process had logged already, both entries are kept; they are equal.
    """

    module = "trackio"

    def _options(self, folder: Path, number: str, was_opened: bool) -> dict[str, Any]:
        # It knows runs by their names, which another training may have used before.
        return {"resume": "allow" if was_opened else "never", "embed": False}

    def _finish(self, failed: bool) -> None:
        # The run's own method would be called again when Python ends.
        self._tracker.finish()


def _mode() -> str:
    chosen = os.environ.get("WANDB_MODE") or (
        "online" if "WANDB_API_KEY" in os.environ else "offline"
    )
    if chosen == "offline":
        log.info(
            "W&B: the run is written offline; wandb sync sends it, and WANDB_MODE=online at once"
        )
    return chosen


TRACKER_LOGS: Mapping[str, type[TrackerLog]] = {one.module: one for one in (WandbLog, TrackioLog)}
"""By the names of `hddm.training.settings.TRACKERS`."""
