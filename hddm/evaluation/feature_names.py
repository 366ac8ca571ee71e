"""Which features distances are measured on, by name, and whether this machine has their weights."""

import os
from pathlib import Path

from hddm.evaluation.score_records import FeaturesRecord
from hddm.networks.efficientnet import EFFICIENTNET, EfficientNetFeatures
from hddm.utils.errors import HddmError, UsageError, did_you_mean
from hddm.utils.files import sha256_of

DIGITS = "digits-classifier"
NAMES = ("auto", "inception", "classifier", DIGITS, EFFICIENTNET)
CLASSIFIER_FILE = ".safetensors"
"""Ending of the file of a saved classifier."""
INCEPTION = FeaturesRecord(
    name="Inception (clean-fid)",
    dimensions=2048,
    hash="f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4",
    resize="each channel by Pillow's bicubic filter to 299×299 in float32, not rounded",
)
"""The network of clean-fid, StyleGAN2-ADA and most published FIDs, as TorchScript; its hash is the file's."""
INCEPTION_FILE = "inception-2015-12-05.pt"
_URL = f"https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/{INCEPTION_FILE}"


def refuse_unknown(features: str) -> None:
    """Raise `UsageError` for what `hddm.evaluation.features.open_extractor` does not know by its name."""
    if features not in NAMES and not features.endswith(CLASSIFIER_FILE):
        raise UsageError(
            f"`features` {features}: choose one of {', '.join(NAMES)}, or the {CLASSIFIER_FILE} file of a "
            f"saved classifier{did_you_mean(features, NAMES)}"
        )


def refuse_absent(features: str) -> None:
    """Raise `HddmError` for a network whose weights are not on this machine.

    `hddm.evaluation.features.open_extractor` would too; a benchmark asks before it trains anything.
    """
    option = f"`features` {features}"
    if features == "inception":
        inception_file(option)
    if features == EFFICIENTNET:
        EfficientNetFeatures(option)


def find_inception() -> Path | None:
    """Path of Inception's weights, None if absent; the content is not checked."""
    return next((path for path in _places() if path.is_file()), None)


def _places() -> list[Path]:
    """Where Inception's weights may be: the folder that the environment names comes first."""
    folders = [os.environ.get("HDDM_INCEPTION"), Path.home() / ".cache/clean-fid"]
    return [Path(folder) / INCEPTION_FILE for folder in folders if folder]


def inception_file(option: str) -> Path:
    """Path of Inception's weights, whose hash is checked."""
    path = find_inception()
    sha256 = INCEPTION.hash
    if path is None or sha256_of(path) != sha256:
        problem = f"{INCEPTION_FILE} is not on disk" if path is None else f"{path} is another file"
        remedy = f"fetch {_URL} (SHA-256 {sha256}) and put it into {_places()[0].parent}"
        raise HddmError(f"{option}: {problem}; {remedy}")
    return path
