"""Logs of a training, TensorBoard's and on request that of Weights & Biases; a resumed run stays one run."""

import logging
import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from torch import Tensor

from hddm.utils.errors import optional

log = logging.getLogger(__name__)


class Log(Protocol):
    """Where figures and pictures go."""

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, Tensor]) -> None:
        """Write ``figures``, and ``pictures`` (C, H, W) in bytes, by name."""

    def close(self, failed: bool) -> None:
        """End the log of this process."""


class TensorBoardLog:
    """TensorBoard events in ``folder``.

    Each process writes a file of its own, which first declares void what earlier ones hold from ``first`` on,
    its first step: a killed process may have logged steps after its last checkpoint.
    """

    def __init__(self, folder: Path, first: int) -> None:
        optional("tensorboard", "this log", "train")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first)

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, Tensor]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        for name, pixels in pictures.items():
            self._writer.add_image(name, pixels, step)
        # A checkpoint may follow, and no step before it may be missing.
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


TIMEOUT = 60.0
"""Seconds that W&B's server may take for its first answer."""


class WandbLog:
    """A W&B run, with its files in ``folder``/wandb and its id in ``folder``/wandb.id.

    It never prompts: without an API key it is written offline, for ``wandb sync``. ``settings`` are shown
    beside the figures. A missing wandb raises `HddmError`.
    """

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]) -> None:
        self._wandb = wandb = optional("wandb", "--wandb", "wandb")
        path = folder / "wandb.id"
        if not path.exists():
            path.write_text(secrets.token_hex(8))
        self._run: Any = wandb.init(
            project=project,
            id=path.read_text(),
            name=folder.stem,
            dir=str(folder),
            config=dict(settings),
            resume="allow",
            mode=_mode(),
            settings=wandb.Settings(console="off", silent=True, init_timeout=TIMEOUT),
        )

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, Tensor]) -> None:
        # Of a step that a killed process had logged already, W&B keeps the first values.
        image = self._wandb.Image
        shown = {name: image(pixels.permute(1, 2, 0).numpy()) for name, pixels in pictures.items()}
        self._run.log({**figures, **shown}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _mode() -> str:
    requested = os.environ.get("WANDB_MODE")
    if requested in ("offline", "disabled"):
        return requested
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    # As W&B itself looks a key up: a server's port belongs to its name.
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        if netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None:
            return "online"
    except (netrc.NetrcParseError, OSError):
        pass
    log.info(
        "W&B: no API key in WANDB_API_KEY or ~/.netrc, so the run is written offline; wandb sync sends it"
    )
    return "offline"
