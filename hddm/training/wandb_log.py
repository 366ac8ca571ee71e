"""Weights & Biases on request: it never prompts, and a resumed run stays one run."""

import logging
import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field
from torch import Tensor

from hddm.utils.errors import optional
from hddm.utils.files import read_json, write_json, write_whole
from hddm.utils.records import OpenRecord, parse_record

log = logging.getLogger(__name__)

RECORD = "wandb.json"
TIMEOUT = 60.0
"""Seconds that the server may take for its first answer."""


class LoggedRun(OpenRecord):
    """``wandb.json``."""

    id: str | None = None
    step: Annotated[int, Field(ge=0, lt=2**53)] = 0


class WandbLog:
    """A W&B run, with its files in ``folder``/wandb and its id in ``folder``/wandb.json.

    Without an API key it is written offline, for ``wandb sync``. W&B cannot take back what a killed process
    logged after its last checkpoint, so those steps are left out when they come again. ``settings`` are shown
    beside the figures. A missing wandb raises `HddmError`.
    """

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]) -> None:
        self._wandb = wandb = optional("wandb", "--wandb", "wandb")
        self._path = folder / RECORD
        content = read_json(self._path) if self._path.exists() else {}
        known = parse_record(content, LoggedRun, str(self._path))
        self._id = known.id or secrets.token_hex(8)
        self._logged = self._last = known.step
        self._record(self._logged)
        self._run: Any = wandb.init(
            project=project,
            id=self._id,
            name=folder.stem,
            dir=str(folder),
            config=dict(settings),
            resume="allow",
            mode=_mode(),
            settings=wandb.Settings(console="off", silent=True, init_timeout=TIMEOUT),
        )

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, Tensor]) -> None:
        if step <= self._logged:
            return
        self._run.log(dict(figures), step=step)
        # Logged separately, since W&B names a picture's file by the step of the call before.
        if pictures:
            image = self._wandb.Image
            grids = {name: image(pixels.permute(1, 2, 0).numpy()) for name, pixels in pictures.items()}
            self._run.log(grids, step=step)
        if step > self._last:
            # W&B keeps a step back until the next one comes, so this one may still be lost.
            self._record(self._last)
            self._last = step

    def sync(self) -> None:
        """Do nothing: W&B's own process has everything already."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._record(self._last)

    def _record(self, step: int) -> None:
        write_whole(self._path, lambda draft: write_json(draft, {"id": self._id, "step": step}))


def _mode() -> Literal["online", "offline", "disabled"]:
    requested = os.environ.get("WANDB_MODE")
    if requested == "disabled":
        return "disabled"
    if requested != "offline" and _has_key():
        return "online"
    if requested != "offline":
        text = "so the run is written offline; wandb sync sends it"
        log.info("W&B: no API key in WANDB_API_KEY or ~/.netrc, %s", text)
    return "offline"


def _has_key() -> bool:
    """Tell whether W&B has a key, or its equal, and need not ask."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    # As W&B itself looks it up: a server's port belongs to its name.
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    places = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    path = next((path for place in places if place and (path := Path(place).expanduser()).is_file()), None)
    try:
        return path is not None and netrc.netrc(path).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return False
