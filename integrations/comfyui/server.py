"""A client of ``hddm serve``: pictures from an ensemble that runs elsewhere."""

import base64
import io
import json
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hddm.utils.errors import HddmError
from hddm.utils.streams import NUMBERS

from .service import EXAMPLE, Service
from .widgets import strategy_widget

AT_ONCE = 10
"""Pictures of a request; a service allows as many unless it says otherwise."""


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
                    {"default": EXAMPLE, "tooltip": "Where hddm serve listens."},
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
                        "tooltip": "One expert alone, by its name or number; empty for all.",
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
        service = Service(address)
        asked: dict[str, Any] = {"seed": seed, "size": size.strip()}
        # What is left out has the service's default; a key without effect is refused there.
        model = service.model(expert) if expert.strip() else ""
        texts = {"prompt": prompt, "strategy": strategy.strip(), "model": model}
        asked |= {key: value for key, value in texts.items() if value}
        if guidance_scale != 1:
            asked["guidance_scale"] = guidance_scale
        files = {}
        if image is not None:
            asked["strength"] = strength
            files["image"] = _png(image[0])
        if mask is not None:
            files["mask"] = _png(mask.reshape(-1, *mask.shape[-2:])[0])
        pictures = []
        for start in range(0, n, AT_ONCE):
            # Picture i is the same in one request or in several.
            part = {**asked, "n": min(AT_ONCE, n - start), "start": start}
            if files:
                body, kind = _form(part, files)
                answer = service.request("POST", "/v1/images/edits", body, kind)
            else:
                body = json.dumps(part).encode()
                answer = service.request("POST", "/v1/images/generations", body, "application/json")
            try:
                pictures += [_picture(one["b64_json"]) for one in answer["data"]]
            except (KeyError, TypeError, ValueError, OSError) as error:
                raise HddmError(
                    f"{service.address}: its answer holds no pictures, as one of an hddm serve does; is "
                    "something else there?"
                ) from error
        return (torch.stack(pictures),)


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
