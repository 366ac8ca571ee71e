"""A client of ``hddm serve``: pictures from an ensemble that runs elsewhere.

A service with a token gets the one of the environment variable ``HDDM_TOKEN``. A widget would write it into
every picture, as ComfyUI saves workflows in them.
"""

import base64
import io
import json
import os
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hddm.utils.errors import HddmError
from hddm.utils.streams import NUMBERS

from .widgets import strategy_widget

LIMIT = 3600.0
"""Seconds to wait for an answer."""


class Server:
    """Ask an ``hddm serve`` for pictures."""

    CATEGORY: ClassVar[str] = "hddm"
    RETURN_TYPES: ClassVar[tuple[str, ...]] = ("IMAGE",)
    FUNCTION: ClassVar[str] = "make"
    DESCRIPTION: ClassVar[str] = (
        "Pictures from an ensemble that `hddm serve` runs on this machine or another. With a picture, that "
        "one is changed; with a mask, only the part that is masked."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs and widgets, as ComfyUI asks for them."""
        return {
            "required": {
                "address": (
                    "STRING",
                    {"default": "http://127.0.0.1:8000", "tooltip": "Where hddm serve listens."},
                ),
                "prompt": (
                    "STRING",
                    {
                        "default": "",
                        "multiline": True,
                        "tooltip": "A text, or the name of a class; empty for any picture.",
                    },
                ),
                "size": (
                    "STRING",
                    {"default": "auto", "tooltip": "auto, or width x height, such as 768x512."},
                ),
                "n": (
                    "INT",
                    {"default": 1, "min": 1, "max": 1000, "tooltip": "Number of pictures."},
                ),
                "seed": (
                    "INT",
                    {
                        "default": 0,
                        "min": 0,
                        "max": NUMBERS - 1,
                        "tooltip": "With the same seed hddm sample makes the same pictures.",
                    },
                ),
                "guidance_scale": (
                    "FLOAT",
                    {
                        "default": 1.0,
                        "min": 0.0,
                        "max": 100.0,
                        "step": 0.1,
                        "tooltip": "1 for none; what ComfyUI calls cfg.",
                    },
                ),
                "strategy": strategy_widget(),
                "expert": (
                    "STRING",
                    {
                        "default": "",
                        "tooltip": "One expert alone, by the name that the server lists, such as grown/flow; "
                        "empty for all.",
                    },
                ),
                "strength": (
                    "FLOAT",
                    {
                        "default": 0.8,
                        "min": 0.0,
                        "max": 1.0,
                        "step": 0.01,
                        "tooltip": "With a picture: how much of it changes.",
                    },
                ),
            },
            "optional": {
                "image": ("IMAGE", {"tooltip": "The picture to change; of a batch, the first."}),
                "mask": ("MASK", {"tooltip": "Only what it masks changes."}),
            },
        }

    def make(
        self,
        address: str,
        prompt: str,
        size: str,
        n: int,
        seed: int,
        guidance_scale: float,
        strategy: str,
        expert: str,
        strength: float,
        image: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor]:
        """Pictures (n, H, W, 3) in [0, 1]."""
        if image is None and mask is not None:
            raise HddmError("mask: there is no picture that it belongs to; connect image as well")
        asked: dict[str, Any] = {"n": n, "seed": seed, "size": size}
        # What is left out has the server's default; a key without effect is refused there.
        texts = {"prompt": prompt, "strategy": strategy, "model": expert}
        asked |= {key: value for key, value in texts.items() if value}
        if guidance_scale != 1:
            asked["guidance_scale"] = guidance_scale
        base = address.rstrip("/")
        if image is None:
            body = json.dumps(asked).encode()
            answer = _sent(f"{base}/v1/images/generations", body, "application/json")
        else:
            asked["strength"] = strength
            files = {"image": _png(image[0])}
            if mask is not None:
                files["mask"] = _png(mask.reshape(-1, *mask.shape[-2:])[0])
            body, kind = _form(asked, files)
            answer = _sent(f"{base}/v1/images/edits", body, kind)
        return (torch.stack([_picture(one["b64_json"]) for one in answer["data"]]),)


def _sent(address: str, body: bytes, kind: str) -> Any:
    headers = {"Content-Type": kind}
    token = os.environ.get("HDDM_TOKEN", "").strip()
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(address, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise HddmError(f"{address}: {_reason(error)}") from error
    except (OSError, ValueError) as error:
        raise HddmError(
            f"{address}: no answer of an hddm serve ({error}); start one with: hddm serve ENSEMBLE"
        ) from error


def _reason(error: urllib.error.HTTPError) -> str:
    """The server's own words, if it said any."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"error {error.code}"


def _png(picture: Tensor) -> bytes:
    """A picture (H, W, 3) or mask (H, W) of values in [0, 1] as a file."""
    pixels = (picture.clamp(0, 1) * 255).round().byte().cpu().numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def _picture(encoded: str) -> Tensor:
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as picture:
        pixels = np.array(picture.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(pixels / 255)


def _form(texts: Mapping[str, Any], files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """A form of texts and PNG files, and its type."""
    border = uuid.uuid4().hex
    parts = []
    for name, value in texts.items():
        head = f'--{border}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        parts.append(f"{head}{value}\r\n".encode())
    for name, content in files.items():
        head = (
            f'--{border}\r\nContent-Disposition: form-data; name="{name}"; filename="{name}.png"\r\n'
            "Content-Type: image/png\r\n\r\n"
        )
        parts += [head.encode(), content, b"\r\n"]
    parts.append(f"--{border}--\r\n".encode())
    return b"".join(parts), f"multipart/form-data; boundary={border}"
