"""The FID of DiT-XL/2 at 256 pixels beside the published one, and a partition by DINOv2."""

import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.acceptance.checkpoints import converted, own_pipeline, sized
from benchmarks.acceptance.entries import DINO, entry_named
from benchmarks.acceptance.stages import Kit, NotRun, relative_error
from benchmarks.figures import Figure, Result, at_most, holds, told
from hddm.data.features import open_feature_extractor
from hddm.data.images import write_digits
from hddm.data.partition import partition
from hddm.data.shards import open_shard
from hddm.data.sources import open_source
from hddm.evaluation.feature_names import find_inception
from hddm.evaluation.features import FeatureClassifier, inception_features
from hddm.evaluation.measures import Gaussian, frechet_distance
from hddm.guidance import Guidance
from hddm.utils.hub import origin_of

PUBLISHED, OF_SAMPLES, WITH_STEPS = 2.27, 50_000, 250
"""Of DiT-XL/2 with guidance 1.5 (arXiv:2212.09748), by DDPM's own sampler."""
MARGIN = 1.1
GUIDANCE, GUIDED, STEPS, BATCH = 1.5, 3, 50, 64
"""Scale of guidance, channels that it acts on as in DiT's own code, solver steps, and pictures at once."""
CLASSES = 1000
STATISTICS = (
    "https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches/imagenet/256/"
    "VIRTUAL_imagenet256_labeled.npz"
)
SMALL = 96
"""Pictures of a stand-in."""
Features = Callable[[Tensor], Tensor]


def fid(kit: Kit) -> Result:
    """Sample DiT-XL/2, and measure its distance from ADM's reference statistics of ImageNet."""
    expert = converted(entry_named("dit"), kit)
    features, extractor = _features(kit)
    reference = reference_statistics(kit, features)
    number = kit.samples if kit.is_real else SMALL
    steps = STEPS if kit.is_real else 2
    began = time.perf_counter()
    found = sampled_features(kit, expert, features, number, steps)
    seconds = time.perf_counter() - began
    distance = frechet_distance(Gaussian.of(found.numpy()), reference)
    what = f"FID of {number:,} samples"
    beside = f"published: {PUBLISHED} with {OF_SAMPLES:,} samples"
    if kit.is_real and number >= OF_SAMPLES:
        distance_figure = at_most(what, distance, round(MARGIN * PUBLISHED, 2))
    else:
        distance_figure = told(what, distance, goal=beside)
    notes = [
        f"Sampler: hddm's default solver, {steps} steps, with guidance {GUIDANCE} on the first {GUIDED} "
        f"channels. Published: DDPM's ancestral sampler of {WITH_STEPS} steps, with the same guidance.",
        "FID falls with the number of samples: with 10,000 it is larger than with 50,000 by some units.",
        "Features: clean-fid's Inception with its resizing to 299 pixels (Pillow's bicubic filter). The "
        "published figure is of ADM's evaluation in TensorFlow, whose network resizes by itself.",
        f"Features are those of: {extractor}. Classes are drawn in turn, equally often.",
        "The VAE is the one in DiT's repository, in float32.",
    ]
    figures = [
        distance_figure,
        told("samples per second", number / seconds),
        holds("samples are finite", bool(found.isfinite().all())),
    ]
    return Result(figures, notes, not kit.is_real)


def _features(kit: Kit) -> tuple[Features, str]:
    """Features of images in [-1, 1], and what they are called."""
    if not kit.is_real:
        torch.manual_seed(0)
        return FeatureClassifier(3, 10).eval().features, "a network of random weights (stand-in)"
    weights = find_inception()
    if weights is None:
        raise NotRun(
            "needs Inception's weights, inception-2015-12-05.pt, in ~/.cache/clean-fid "
            "(docs/guides/fid.md says where they are)"
        )
    return inception_features(weights, kit.device), "Inception (clean-fid)"


def reference_statistics(kit: Kit, features: Features) -> Gaussian:
    """Moments of the reference, of the file or address that ``--statistics`` names."""
    if not kit.is_real:
        images = torch.rand(2 * SMALL, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        path = kit.work / "statistics.npz"
        rows = features(2 * images - 1).double().numpy()
        np.savez(path, mu=rows.mean(0), sigma=np.cov(rows, rowvar=False))
    elif kit.statistics is None:
        raise NotRun(f"needs --statistics: ADM's file, or its address {STATISTICS}")
    else:
        path = _local_statistics(kit.statistics, kit.work)
    with np.load(path) as content:
        if "mu" not in content or "sigma" not in content:
            raise NotRun(f"--statistics {path}: holds no mu and sigma")
        return Gaussian(content["mu"].astype(np.float64), content["sigma"].astype(np.float64))


def _local_statistics(place: str, work: Path) -> Path:
    if not place.startswith(("http://", "https://")):
        path = Path(place)
        if not path.is_file():
            raise NotRun(f"--statistics {place}: no such file")
        return path
    path = work / Path(place).name
    if not path.exists():
        draft = path.with_suffix(".part")
        try:
            urllib.request.urlretrieve(place, draft)
        except (urllib.error.URLError, OSError) as error:
            raise NotRun(f"--statistics {place}: cannot be fetched ({error})") from error
        draft.rename(path)
    return path


def sampled_features(kit: Kit, expert: Path, features: Features, number: int, steps: int) -> Tensor:
    """Features of ``number`` samples; a run that was cut off goes on after its last batch."""
    kept = kit.work / "fid" / f"{expert.name}-{steps}-{GUIDANCE}-{kit.device}"
    kept.mkdir(parents=True, exist_ok=True)
    dtype = {"default": torch.bfloat16 if kit.is_gpu else torch.float32, "vae": torch.float32}
    pipe: Any = None
    parts = []
    for start in range(0, number, BATCH):
        size = min(BATCH, number - start)
        path = kept / f"{start}-{size}.safetensors"
        if not path.exists():
            if pipe is None:
                entry = sized(entry_named("dit"), kit)
                pipe = own_pipeline(entry, expert, dtype, kit.device)
            labels = [(start + k) % CLASSES for k in range(size)]
            images = pipe(
                class_labels=labels,
                guidance_scale=Guidance(GUIDANCE, channels=GUIDED),
                num_inference_steps=steps,
                seed=0,
                start=start,
                output_type="pt",
            ).images
            draft = path.with_suffix(".part")
            save_file({"features": features(2 * images.cpu() - 1).contiguous()}, draft)
            draft.rename(path)
        parts.append(load_file(path)["features"])
    return torch.cat(parts)


def dino(kit: Kit) -> Result:
    """Partition images by DINOv2's features, and compare these with transformers' own."""
    repo, revision, _, licence = DINO
    folder = Path(snapshot_download(repo, revision=revision if kit.is_real else "main"))
    commit = (origin_of(folder) or "").partition("@")[2] or "unknown"
    images, shards_of = kit.images, 4
    notes = [f"Licence of the weights: {licence}."]
    if images is None:
        place = kit.work / "digits"
        if not place.exists():
            write_digits(place)
        images = place / "train"
        notes.append(
            "Images: scikit-learn's digits of 8×8 pixels, which say little of DINOv2; name "
            "photographs by --images."
        )
    out = kit.work / "dino-shards"
    began = time.perf_counter()
    shards = partition(
        images, out, shards_of, features=str(folder), cache=None, overwrite=out.exists()
    )
    seconds = time.perf_counter() - began
    sizes = [len(open_shard(shard)) for shard in shards]
    source = open_source(images)
    figures: list[Figure] = [
        holds("every image is in one shard", sum(sizes) == len(source)),
        at_most("largest shard over smallest", max(sizes) / max(min(sizes), 1), 1.2),
        at_most(
            "features beside transformers' own, relative difference",
            _feature_error(folder, images),
            1e-4,
        ),
        told("images per second", len(source) / seconds),
        told("images", f"{len(source):,}"),
    ]
    return Result(figures, notes, not kit.is_real, commit)


@torch.no_grad()
def _feature_error(folder: Path, images: Path) -> float:
    """Relative difference of hddm's features of some images from those that transformers computes."""
    from transformers import AutoImageProcessor, AutoModel

    from hddm.data.images import decode_image, in_colour

    source = open_source(images)
    pixels = []
    for row in range(min(8, len(source))):
        pixels.append(in_colour(decode_image(source.read(row), source.root / source.files[row])))
    extractor = open_feature_extractor(str(folder))
    extractor.prepare(source, folder)
    ours = torch.from_numpy(extractor(pixels))
    model = AutoModel.from_pretrained(folder).eval()
    given = AutoImageProcessor.from_pretrained(folder)(pixels, return_tensors="pt")
    theirs = model(**given).last_hidden_state[:, 0]
    if not math.isfinite(float(theirs.sum())):
        return math.nan
    return relative_error(ours, theirs)
