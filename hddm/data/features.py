"""Image features for clustering: images with similar features go to the same shard.

`PixelPca` serves small, simple images; for photographs take a pretrained `VisionModel`, DINOv2 or CLIP.
Features of all images are computed in parts on disk, so that a killed run resumes at the next part:

features/                            a `hddm.utils.work.Work`
  features.json                      number and hash of the images, extractor
  part_00000.safetensors             features (n, d) float32, SHA-256 of files and of pixels (n, 32), and
                                     shapes (n, 3), of 1,024 images in the order of the source
  part_00000.safetensors.done.json   its hash, and its broken images with reasons
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save_file

from hddm.data.images import decode_image, in_colour, pixel_digest, too_many_bad
from hddm.data.shards import Rows
from hddm.data.sources.base import ImageSource
from hddm.networks.efficientnet import EFFICIENTNET, SHA256, EfficientNetFeatures
from hddm.utils.errors import HddmError, UsageError, did_you_mean, one_line, optional
from hddm.utils.files import read_json, sha256_of, write_whole
from hddm.utils.progress import Progress
from hddm.utils.records import FEATURES_FILE
from hddm.utils.streams import Use, seed_of, stream
from hddm.utils.tensors import read_safetensors
from hddm.utils.work import Work

PIXEL_FEATURES = "pixels"
SHORT_NAMES = {"dinov2": "facebook/dinov2-base", "clip": "openai/clip-vit-large-patch14"}
"""Short names of models on Hugging Face's hub."""


def open_feature_extractor(features: str, seed: int = 0) -> "Extractor":
    """Open the extractor that ``--features`` names; ``seed`` selects the images that `PixelPca` is fitted on.

    ``features`` is ``pixels``, ``efficientnet-lite0``, ``dinov2``, ``clip``, a local folder of a DINOv2 or
    CLIP vision model, or such a model's name on Hugging Face's hub. Only hub names use the network. Raises
    `HddmError` for other names or types, and a failed download.
    """
    if features == PIXEL_FEATURES:
        return PixelPca(seed=seed)
    if features == EFFICIENTNET:
        return Photographs()
    name = SHORT_NAMES.get(features, features)
    if Path(name).is_dir():
        folder = Path(name)
    elif name.count("/") == 1 and not name.startswith((".", "/", "~")):
        folder = _from_hub(name)
    else:
        known = ("pixels", EFFICIENTNET, "dinov2", "clip")
        raise UsageError(
            f"`features` {name}: no folder, and not a name on the hub; use {', '.join(known)}, a folder "
            f"of a DINOv2 or CLIP model, or OWNER/NAME{did_you_mean(name, known)}"
        )
    kind = read_json(folder / _CONFIG).get("model_type")
    processor = str(read_json(folder / _PROCESSOR).get("image_processor_type")).removesuffix("Fast")
    if kind not in MODELS or processor not in _PROCESSORS:
        raise HddmError(
            f"{folder}: its model_type is {kind!r}, with {processor}; use one of {', '.join(MODELS)}, with "
            f"{' or '.join(_PROCESSORS)}"
        )
    return VisionModel(folder, name, MODELS[kind], processor)


SIDE = 32
"""Pixels of the longest side of the small copies."""
DIMENSIONS = 32
SAMPLE = 8192
"""Random images on which the components are fitted: 100 MB of small copies."""
_BASIS = "pixel_pca.safetensors"


class PixelPca:
    """Images → principal components (n, ≤ `DIMENSIONS`) of RGB pixels in [0, 1].

    All images are first shrunk to one size, the median height and width of a random sample, at most `SIDE`.
    The components are fitted on the same sample, with its mean subtracted.
    """

    name = "pixel_pca"
    batch = 256

    def __init__(self, dimensions: int = DIMENSIONS, sample: int = SAMPLE, seed: int = 0) -> None:
        self._dimensions, self._sample, self._seed = dimensions, sample, seed
        self._size = (0, 0)
        self._mean: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self._components: NDArray[np.float32] = self._mean

    @property
    def identity(self) -> str:
        """Hash of the settings."""
        settings = f"{self.name} {SIDE} {self._dimensions} {self._sample} {self._seed}"
        return hashlib.sha256(settings.encode()).hexdigest()

    def prepare(self, source: ImageSource, folder: Path) -> None:
        """Fit the components to ``source``, or read them from ``folder``, where they are kept."""
        path, work = folder / _BASIS, Work(folder)
        if work.done(path) is None:
            fitted = self._fitted(source)
            write_whole(path, lambda draft: save_file(fitted, draft))
            work.finish(path, {}, {path.name: sha256_of(path)})
        basis = {name: tensor.numpy() for name, tensor in read_safetensors(path).items()}
        height, width = basis["size"].tolist()
        self._size = (height, width)
        self._mean = basis["mean"]
        self._components = basis["components"]

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Features of images (H, W, 3) of any size."""
        centred = self._flat(images) - self._mean
        reduced: NDArray[np.float32] = np.matmul(centred, self._components.T, dtype=np.float32)
        return reduced

    def _fitted(self, source: ImageSource) -> dict[str, np.ndarray]:
        count = min(self._sample, len(source))
        draws = np.random.default_rng(stream(self._seed, Use.FEATURE_IMAGES))
        rows = np.sort(draws.choice(len(source), count, replace=False))
        # Each is shrunk when read, since a sample of full photographs would take gigabytes.
        small, sizes = [], []
        for row in rows.tolist():
            try:
                image = in_colour(decode_image(source.read(row), source.root / source.files[row]))
            except HddmError:
                # Extraction reads every image and will count this one as broken.
                continue
            height, width = image.shape[:2]
            sizes.append((height, width))
            small.append(_shrunk(image, (min(SIDE, height), min(SIDE, width))))
        if not small:
            raise HddmError(
                f"{source.root}: none of {count} images can be read; hddm data check shows why"
            )
        height, width = np.median(sizes, axis=0).astype(int).tolist()
        self._size = (min(SIDE, height), min(SIDE, width))
        flat = self._flat(small)
        decomposition = optional("sklearn.decomposition", "hddm partition", "train")
        start = seed_of(self._seed, Use.FEATURE_COMPONENTS) % 2**32
        pca = decomposition.PCA(min(self._dimensions, *flat.shape), random_state=start).fit(flat)
        return {
            "size": np.array(self._size),
            "mean": pca.mean_.astype(np.float32),
            "components": np.ascontiguousarray(pca.components_, dtype=np.float32),
        }

    def _flat(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        small = np.stack([_shrunk(image, self._size) for image in images])
        values = small.reshape(len(small), -1).astype(np.float32)
        flat: NDArray[np.float32] = values / np.float32(255)
        return flat


def _shrunk(image: NDArray[np.uint8], size: tuple[int, ...]) -> NDArray[np.uint8]:
    """Pixels (*size, 3), each the mean of the area that it covers."""
    if image.shape[:2] == size:
        return image
    height, width = size
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BOX))


MODELS = {
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    "clip": "CLIPVisionModelWithProjection",
    "clip_vision_model": "CLIPVisionModelWithProjection",
}
"""transformers classes by ``model_type``; no code from a model's repository is run."""
_PROCESSORS = ("BitImageProcessor", "CLIPImageProcessor")
_CONFIG, _PROCESSOR = "config.json", "preprocessor_config.json"
_FILES = (_CONFIG, _PROCESSOR, "model.safetensors")


class VisionModel:
    """Images → the CLS token after the last norm (DINOv2), or the projected image embedding (CLIP).

    Images are prepared by the model's own image processor. Runs on a GPU if there is one.
    """

    batch = 32

    def __init__(self, folder: Path, name: str, kind: str, processor: str) -> None:
        self.name = name
        self._folder, self._kinds = folder, (kind, processor)
        self._model: Any = None
        self._processor: Any = None

    @property
    def identity(self) -> str:
        """Hash of config, processor and weights."""
        lines = [f"{file} {sha256_of(self._folder / file)}" for file in _FILES]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def prepare(self, source: ImageSource, folder: Path) -> None:
        """Load the model; nothing is fitted."""
        import transformers

        kind, processor = self._kinds
        options: dict[str, Any] = {"use_safetensors": True, "dtype": torch.float32}
        try:
            self._model, loaded = getattr(transformers, kind).from_pretrained(
                str(self._folder), local_files_only=True, output_loading_info=True, **options
            )
            self._processor = getattr(transformers, processor).from_pretrained(
                str(self._folder), local_files_only=True
            )
        # Damaged files make transformers raise errors of many kinds.
        except Exception as error:
            reason = one_line(error)
            text = f"cannot be opened as {kind} ({reason}); fetch it again"
            raise HddmError(f"{self._folder}: {text}") from error
        missing = sorted(loaded["missing_keys"])
        if missing:
            text = f"its weights lack {len(missing)} tensors of {kind}, as {missing[0]}; fetch it again"
            raise HddmError(f"{self._folder}: {text}")
        self._model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    @torch.no_grad()
    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Features of images (H, W, 3) of any size."""
        pixels = self._processor(
            list(images), input_data_format="channels_last", return_tensors="pt"
        )
        out = self._model(pixel_values=pixels["pixel_values"].to(self._model.device))
        embedded = out.image_embeds if hasattr(out, "image_embeds") else out.last_hidden_state[:, 0]
        features: NDArray[np.float32] = embedded.float().cpu().numpy()
        return features


class Photographs:
    """Images → features by EfficientNet-lite0 (`hddm.networks.efficientnet`)."""

    name = EFFICIENTNET
    batch = 32

    def __init__(self) -> None:
        self._network = EfficientNetFeatures(f"`features` {EFFICIENTNET}")

    @property
    def identity(self) -> str:
        """Hash of the weights."""
        return SHA256

    def prepare(self, source: ImageSource, folder: Path) -> None:
        """Nothing is fitted."""

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Features of images (H, W, 3) of any size."""
        return self._network(images)


Extractor = PixelPca | VisionModel | Photographs
"""Images → features (n, d) in float32, ``batch`` at once; equal settings lead to equal bits on a device."""


def _from_hub(name: str) -> Path:
    """Folder of the cache with the files of a model, fetched where they are missing."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    # Of many kinds: a name that the hub does not take, or no network.
    except Exception as error:
        reason = one_line(error)
        text = (
            f"is not in the cache and cannot be fetched ({reason}); connect to the network, or name "
            "a folder"
        )
        raise HddmError(f"`features` {name}: {text}") from error


FORMAT = "2.1"
PART = 1024
"""Images per part."""


@dataclass(frozen=True)
class ImageFeatures:
    """Features (M, d) of the readable images, mapped from disk; ``features[rows]`` selects rows.

    Row j is image ``rows[j]`` of the source. ``files`` (M, 32) and ``pixels`` (M, 32) are the SHA-256 of its
    file and of its RGB pixels, ``shapes`` (M, 3) height, width and channels. ``broken`` maps the number of an
    unreadable image to the reason.
    """

    rows: NDArray[np.int64]
    files: NDArray[np.uint8]
    pixels: NDArray[np.uint8]
    shapes: NDArray[np.int64]
    broken: dict[int, str]
    features: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.features.take(torch.from_numpy(rows)).numpy()
        return found


def compute_features(
    source: ImageSource,
    extractor: Extractor,
    folder: Path,
    max_bad: int = 0,
    replace: bool = False,
    part: int = PART,
) -> ImageFeatures:
    """Features of ``source``: parts found in ``folder`` are read, others are computed and written there.

    Parts are equal bit for bit wherever a run on the same device was killed. At most ``max_bad`` images may
    be broken; they get no features. ``replace`` allows removing features of other images or another
    extractor. A part has ``part`` images. Raises `HddmError` for a ``folder`` of something else, more than
    ``max_bad`` broken images, and features that are not finite.
    """
    busy = f"{folder}: another process computes features in it"
    work = Work(folder, FEATURES_FILE, busy, "another `cache`")
    identity = {
        "format": FORMAT,
        "images": len(source),
        "source": _fingerprint(source),
        "features": extractor.name,
        "extractor": extractor.identity,
        "part": part,
    }
    text = "holds features of other images, of these before they changed, or by another extractor"
    broken: dict[int, str] = {}
    with work.held(), Progress(len(source), "features") as advance:
        work.begin(
            identity, f"{folder}: {text}; remove it, or name another folder with `cache`", replace
        )
        num_parts = -(-len(source) // part)
        paths = [folder / f"part_{number:05d}.safetensors" for number in range(num_parts)]
        known: dict[Path, dict[Any, Any]] = {}
        for path in paths:
            done = work.done(path)
            if done is not None:
                known[path] = done["broken"]
        if len(known) < len(paths):
            extractor.prepare(source, folder)
        for number, path in enumerate(paths):
            rows = range(number * part, min((number + 1) * part, len(source)))
            found = known.get(path)
            if found is None:
                found = _write_part(work, path, source, extractor, rows)
            for row, reason in found.items():
                broken[int(row)] = str(reason)
            if len(broken) > max_bad:
                raise too_many_bad(source.root, list(broken.values()), max_bad)
            count = advance.skip if path in known else advance
            count(len(rows))
        read = [one for one in map(read_safetensors, paths) if len(one["sound"])]

    def all_of(name: str) -> NDArray[Any]:
        return torch.cat([one[name] for one in read]).numpy()

    return ImageFeatures(
        rows=all_of("sound"),
        files=all_of("files"),
        pixels=all_of("pixels"),
        shapes=all_of("shapes"),
        broken=broken,
        features=Rows(tuple(one["features"] for one in read)),
    )


def _write_part(
    work: Work, path: Path, source: ImageSource, extractor: Extractor, rows: range
) -> dict[int, str]:
    """Write the part of the images ``rows``; returns the broken ones, number to reason."""
    sound: list[int] = []
    shapes: list[tuple[int, int, int]] = []
    features: list[NDArray[np.float32]] = []
    files, digests = bytearray(), bytearray()
    broken: dict[int, str] = {}
    for start in range(rows.start, rows.stop, extractor.batch):
        images, names = [], []
        for row in range(start, min(start + extractor.batch, rows.stop)):
            name = source.root / source.files[row]
            try:
                content = source.read(row)
                pixels = decode_image(content, name)
            except HddmError as error:
                broken[row] = error.message
                continue
            files += hashlib.sha256(content).digest()
            digests += pixel_digest(pixels)
            shapes.append((*pixels.shape[:2], 1 if pixels.ndim == 2 else 3))
            images.append(in_colour(pixels))
            names.append(name)
            sound.append(row)
        if images:
            features.append(_finite(extractor(images), names, extractor.name))
    made = np.concatenate(features) if features else np.zeros((0, 0))
    tensors: dict[str, NDArray[Any]] = {
        "sound": np.array(sound, dtype=np.int64),
        "files": np.frombuffer(files, dtype=np.uint8).reshape(-1, 32),
        "pixels": np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32),
        "shapes": np.array(shapes, dtype=np.int64).reshape(-1, 3),
        "features": np.ascontiguousarray(made, dtype=np.float32),
    }
    write_whole(path, lambda draft: save_file(tensors, draft))
    work.finish(path, {"broken": broken}, {path.name: sha256_of(path)})
    return broken


def _finite(
    features: NDArray[np.float32], names: Sequence[Path], extractor: str
) -> NDArray[np.float32]:
    worst = np.flatnonzero(~np.isfinite(features).all(1))
    if len(worst):
        raise HddmError(
            f"{names[worst[0]]}: {extractor} gives NaN or Inf for it; use other `features`"
        )
    return features


def _fingerprint(source: ImageSource) -> str:
    digest = hashlib.sha256()
    for number, name in enumerate(source.files):
        digest.update(f"{name} {source.images[number].size}\n".encode())
    return digest.hexdigest()
