"""What a picture says about how it was made: text chunks of its PNG file.

``parameters`` is in the form that viewers of pictures read (prompt, negative prompt, then a line of keys and
values); ``hddm`` has the same and more as JSON. Neither names a path of the machine.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hddm.guidance import OPTIONS, Guidance
from hddm.utils.errors import HddmError

PARAMETERS = "parameters"
KEY = "hddm"
_TELLING = {PARAMETERS, KEY, "prompt", "workflow", "invokeai_metadata", "sd-metadata", "Dream"}
"""Keywords of texts: of this module, and those of ComfyUI and InvokeAI."""
_SIGNATURE, _TEXT_CHUNKS = b"\x89PNG\r\n\x1a\n", (b"tEXt", b"zTXt", b"iTXt")
_FRAME, _LONGEST_KEYWORD = 12, 79
"""Bytes of a chunk besides its content, and of a keyword, which a zero ends (the PNG specification)."""
_SHORT = 10
"""Digits of the model's hash in ``parameters``, as viewers show it."""


@dataclass(frozen=True)
class PictureTexts:
    """What all pictures of one call have in common.

    Args:
        model: name of the ensemble's or expert's folder, without the path to it.
        model_sha256: hash of its records and weights; None where it is not known.
        seed: of the noise; a picture depends on it and on its number.
        steps, solver, strategy: how it was sampled; ``strategy`` is None for one expert.
        guidance: its other options than the scale are named in ``hddm`` alone, where they are no defaults.
        prompts, labels: cycled over the numbers of pictures.
        clip_skip: layers of CLIP that are left out.
        long_prompt: prompts were read in chunks.
    """

    model: str
    model_sha256: str | None
    seed: int
    steps: int
    solver: str
    strategy: str | None
    guidance: Guidance
    prompts: Sequence[str] = ()
    labels: Sequence[str] = ()
    negative_prompt: str | None = None
    clip_skip: int = 0
    long_prompt: bool = False

    def of(self, number: int, size: Sequence[int], expert: str | None = None) -> dict[str, str]:
        """Texts of picture ``number`` of ``size`` (H, W), which ``expert`` made if one of several did."""
        prompt = self.prompts[number % len(self.prompts)] if self.prompts else None
        label = self.labels[number % len(self.labels)] if self.labels else None
        height, width = size
        content: dict[str, Any] = {
            "prompt": prompt,
            "negative_prompt": self.negative_prompt,
            "class": label,
            "clip_skip": self.clip_skip or None,
            "long_prompt": self.long_prompt or None,
            "steps": self.steps,
            "solver": self.solver,
            "guidance_scale": self.guidance.scale,
            "seed": self.seed,
            "number": number,
            "size": f"{width}x{height}",
            "strategy": self.strategy,
            "expert": expert,
            "model": self.model,
            "model_sha256": self.model_sha256,
            "hddm": version("hddm-diffusion"),
        }
        kept = {name: value for name, value in content.items() if value is not None}
        for name, option in OPTIONS.items():
            value = getattr(self.guidance, name)
            if name != "scale" and value != getattr(Guidance(1.0), name):
                kept[option] = value
        return {PARAMETERS: _parameters(kept), KEY: json.dumps(kept, ensure_ascii=False)}


def says_how_it_was_made(picture: Path) -> bool:
    """True for a PNG file with texts of this module, or of another tool for making pictures.

    Chunks are walked through to the end, and not decoded. Raises `HddmError` for a PNG file that is broken.
    """
    with picture.open("rb") as file:
        if file.read(len(_SIGNATURE)) != _SIGNATURE:
            return False
        size = picture.stat().st_size
        left = size - len(_SIGNATURE)
        while left >= _FRAME:
            length, kind = struct.unpack(">I4s", file.read(8))
            if kind == b"IEND":
                return False
            left -= _FRAME + length
            if left < 0:
                break
            keyword = b""
            if kind in _TEXT_CHUNKS:
                keyword = file.read(min(length, _LONGEST_KEYWORD + 1)).partition(b"\0")[0]
            if keyword.decode("latin-1") in _TELLING:
                return True
            file.seek(size - left)
    raise HddmError(f"{picture}: is a PNG file without its end; save it again, or name another")


_TITLES = {
    "steps": "Steps",
    "solver": "Sampler",
    "guidance_scale": "CFG scale",
    "seed": "Seed",
    "number": "Picture",
    "size": "Size",
    "class": "Class",
    "clip_skip": "Clip skip",
    "long_prompt": "Long prompt",
    "strategy": "Strategy",
    "expert": "Expert",
    "model": "Model",
    "model_sha256": "Model hash",
    "hddm": "Version",
}
"""Keys of ``parameters``, as viewers call them, in order."""


def _parameters(content: dict[str, Any]) -> str:
    lines = []
    if "prompt" in content:
        lines.append(content["prompt"])
    if "negative_prompt" in content:
        lines.append(f"Negative prompt: {content['negative_prompt']}")
    pairs = []
    for name, title in _TITLES.items():
        if name in content:
            pairs.append(f"{title}: {_quoted(_shown(name, content[name]))}")
    return "\n".join([*lines, ", ".join(pairs)])


def _shown(name: str, value: Any) -> str:
    if name == "model_sha256":
        return str(value)[:_SHORT]
    if name == "clip_skip":
        # Viewers count from 1.
        return str(value + 1)
    return f"hddm {value}" if name == "hddm" else str(value)


def _quoted(text: str) -> str:
    """A value as viewers read it: in quotes where it has a sign that ends a value."""
    return json.dumps(text, ensure_ascii=False) if set(text) & set(',:"\n') else text
