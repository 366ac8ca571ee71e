"""What an encoded shard says of itself.

shard_0/manifest.json            the source shard's identity, how it was encoded, every other file's SHA-256
shard_0/images.jsonl             the source's list of images, one `ImageEntry` a line
shard_0/data-00000.safetensors   rows of tensors, in the order of the images
shard_0/null.safetensors         tokens of the empty prompt, where captions were encoded
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from hddm.components.identity import TextEncoderFacts, VaeFacts
from hddm.data.shard_records import LARGEST_MANIFEST, MANIFEST, ImageEntry, ShardIdentity
from hddm.errors import HddmError
from hddm.facts import Facts, read_facts
from hddm.files import read_json

FORMAT = "1.1"
IMAGES = "images.jsonl"
NULL = "null.safetensors"

PIXELS = "pixels"
MEAN, DEVIATION = "mean", "std"
MIRRORED = "mirrored_"
TOKENS = "tokens"

Dtype = Literal["float16", "bfloat16", "float32"]


class EncodingFacts(Facts):
    """How images became rows of tensors.

    ``shape`` (C, H, W) is that of a row. ``resolution`` is the side of the square that images were fitted to,
    None where they were taken as they are, and ``crop`` what was kept of a longer side; the crop of image i
    depends on (``seed``, i) alone. ``mirrored``: latents of the mirrored images are there too.
    """

    space: Literal["pixels", "latents"]
    shape: tuple[int, int, int]
    dtype: Literal["uint8"] | Dtype
    resolution: int | None = None
    crop: Literal["center", "random"] | None = None
    interpolation: str | None = None
    mirrored: bool = False
    text_dtype: Dtype | None = None
    seed: int = 0


class Computed(Facts):
    """What networks ran with: on another device, or in other batches, their rows differ by rounding."""

    device: str
    batch_size: int
    torch: str
    """Its version."""


class FileFacts(Facts):
    """A file of an encoded shard, and how many rows (or lines) it holds."""

    file: str
    sha256: str
    rows: int


class Skipped(Facts):
    """An image that could not be read, and why."""

    file: str
    reason: str


class EncodedManifest(ShardIdentity):
    """``manifest.json`` of an encoded shard.

    ``hash``, ``partition`` and ``held_out_of`` are the source's, so that experts and routers match by them.
    Row k of the data is the k-th image of ``images`` that is not in ``skipped``; of ``cut_captions`` the
    end is not in the tokens. ``computed`` has each way in which networks ran, in the order of the files:
    several where a killed encoding was gone on with otherwise, none where images passed no network.
    """

    encoding: EncodingFacts
    vae: VaeFacts | None = None
    text_encoder: TextEncoderFacts | None = None
    images: FileFacts
    data: list[FileFacts]
    null: FileFacts | None = None
    skipped: tuple[Skipped, ...] = ()
    cut_captions: int = 0
    computed: tuple[Computed, ...] = ()

    @property
    def num_rows(self) -> int:
        """Samples in the shard."""
        return sum(one.rows for one in self.data)


def is_encoded(folder: Path) -> bool:
    """Whether the ``manifest.json`` in ``folder``, which is there, is of an encoded shard."""
    return "encoding" in read_json(folder / MANIFEST, LARGEST_MANIFEST)


def read_encoded_manifest(folder: Path) -> EncodedManifest:
    """The record of an encoded shard.

    Raises:
        HddmError: as `read_facts`.
    """
    return read_facts(folder / MANIFEST, EncodedManifest, FORMAT)


def write_entries(path: Path, entries: Iterable[ImageEntry]) -> None:
    """Write a list of images, one a line: a list of millions is no JSON file to read at once."""
    with path.open("w", encoding="utf-8") as file:
        for entry in entries:
            file.write(json.dumps(entry.model_dump(exclude_none=True), ensure_ascii=False) + "\n")


def read_entries(path: Path) -> list[ImageEntry]:
    """The list that `write_entries` wrote.

    Raises:
        HddmError: for a line that is no entry.
    """
    entries = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                entries.append(ImageEntry.model_validate({"label": None, **json.loads(line)}))
            except (ValueError, TypeError, ValidationError) as error:
                raise HddmError(f"{path}: line {number} is no image of a shard; encode it again") from error
    return entries
