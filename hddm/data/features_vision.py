"""Features of a DINOv2 or CLIP vision model, as transformers runs it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hddm.data.sources import ImageSource
from hddm.errors import HddmError, UsageError, did_you_mean
from hddm.files import read_json, sha256_of
from hddm.paths import inside

MODELS = {
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    "clip": "CLIPVisionModelWithProjection",
    "clip_vision_model": "CLIPVisionModelWithProjection",
}
"""Classes of transformers by ``model_type``; no code of a model's own is run."""
_PROCESSORS = ("BitImageProcessor", "CLIPImageProcessor")
_CONFIG, _PROCESSOR = "config.json", "preprocessor_config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PATTERNS = [_CONFIG, _PROCESSOR, _INDEX, "model*.safetensors"]


class VisionModel:
    """Images → the CLS token after the last norm (DINOv2), or the projected image embedding (CLIP).

    Images are prepared as the model's own image processor says. On a GPU where there is one.
    """

    batch = 32

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._folder = folder
        self._model: Any = None
        self._processor: Any = None

    @property
    def identity(self) -> str:
        files = [_CONFIG, _PROCESSOR, *_weight_files(self._folder)]
        lines = [f"{file} {sha256_of(self._folder / file)}" for file in files]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def prepare(self, source: ImageSource, folder: Path) -> None:
        """Load the model; nothing is learnt."""
        import transformers

        kind = MODELS[read_json(self._folder / _CONFIG)["model_type"]]
        processor = str(read_json(self._folder / _PROCESSOR).get("image_processor_type"))
        if processor.removesuffix("Fast") not in _PROCESSORS:
            raise HddmError(
                f"{self._folder / _PROCESSOR}: image_processor_type {processor} is none of "
                f"{', '.join(_PROCESSORS)}; take the file that came with the model"
            )
        try:
            self._model, loaded = getattr(transformers, kind).from_pretrained(
                str(self._folder),
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
            self._processor = getattr(transformers, processor.removesuffix("Fast")).from_pretrained(
                str(self._folder), local_files_only=True
            )
        # Spoilt files make transformers raise errors of many kinds.
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise HddmError(
                f"{self._folder}: cannot be opened as {kind} ({reason}); fetch it again"
            ) from error
        missing = sorted(loaded["missing_keys"])
        if missing:
            raise HddmError(
                f"{self._folder}: its weights lack {len(missing)} tensors of {kind}, as {missing[0]}; "
                "fetch it again"
            )
        self._model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    @torch.no_grad()
    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        pixels = self._processor(list(images), input_data_format="channels_last", return_tensors="pt")
        out = self._model(pixel_values=pixels["pixel_values"].to(self._model.device))
        embedded = out.image_embeds if hasattr(out, "image_embeds") else out.last_hidden_state[:, 0]
        features: NDArray[np.float32] = embedded.float().cpu().numpy()
        return features


def open_vision_model(name: str) -> VisionModel:
    """The model in the folder ``name``, or of that name on Hugging Face's hub.

    Raises:
        HddmError: for anything else, a model of another type, one without safetensors, and a name that is
            neither in the cache nor to be fetched.
    """
    if Path(name).is_dir():
        folder = Path(name)
    elif name.count("/") == 1 and not name.startswith((".", "/", "~")):
        folder = _from_hub(name)
    else:
        raise UsageError(
            f"--features {name}: no such folder, and no name on the hub; take pixels, dinov2, clip, a folder "
            f"of a DINOv2 or CLIP model, or OWNER/NAME{did_you_mean(name, ('pixels', 'dinov2', 'clip'))}"
        )
    kind = read_json(folder / _CONFIG).get("model_type")
    if kind not in MODELS:
        raise HddmError(
            f"{folder / _CONFIG}: model_type {kind!r} is none of {', '.join(MODELS)}; take such a model"
        )
    for file in (_PROCESSOR, *_weight_files(folder)):
        if not (folder / file).is_file():
            raise HddmError(f"{folder}: holds no {file}; take the folder whole, its weights in safetensors")
    return VisionModel(folder, name)


def _weight_files(folder: Path) -> list[str]:
    """Names of the index and the weight files, whether there or not."""
    if not (folder / _INDEX).is_file():
        return [_WEIGHTS]
    names = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(names, dict):
        raise HddmError(f"{folder / _INDEX}: has no weight_map; fetch it again")
    files = sorted({str(name) for name in names.values()})
    for file in files:
        inside(folder, file)
    return [_INDEX, *files]


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=True))
        if (folder / _CONFIG).is_file() and all((folder / file).is_file() for file in _weight_files(folder)):
            return folder
    # Of many kinds: not in the cache, or a name that the hub would not take.
    except Exception:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise HddmError(
            f"--features {name}: is not in the cache and cannot be fetched ({reason}); connect to the "
            "network, or name a local folder"
        ) from error
