"""An encoded shard, opened: every file checked against its hash, every tensor mapped."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hddm.data.encoding_layout import Layout, layout_of
from hddm.data.encoding_records import (
    DEVIATION,
    MEAN,
    MIRRORED,
    PIXELS,
    TOKENS,
    EncodedManifest,
    FileFacts,
    read_encoded_manifest,
    read_entries,
)
from hddm.data.latents import LatentStore, MappedPixels, Rows
from hddm.data.shard_records import MANIFEST, MIN_IMAGES, ImageEntry, check_entries
from hddm.data.shards import Shard, captions_of, labels_of
from hddm.data.stored import Stored
from hddm.data.texts import TokenStore
from hddm.errors import HddmError
from hddm.paths import inside
from hddm.verified import Verified
from hddm.weight_files import read_safetensors


def load_encoded(folder: Path) -> Shard:
    """The encoded shard in ``folder``; its tensors stay on disk until they are taken.

    Files that were hashed by an earlier call, and are untouched since, are not read (`hddm.verified`).

    Raises:
        HddmError: for a file that is outside the folder, missing or changed, for files that do not hold what
            the manifest says, and for fewer than `MIN_IMAGES` samples to train on.
    """
    manifest = read_encoded_manifest(folder)
    if manifest.num_rows < MIN_IMAGES and manifest.held_out_of is None:
        raise HddmError(
            f"{folder}: has {manifest.num_rows} images; an expert needs at least {MIN_IMAGES} to train on"
        )
    verified = Verified(folder)
    entries = _entries(folder, manifest, verified)
    try:
        layout = layout_of(manifest.encoding, manifest.vae, manifest.text_encoder)
    except HddmError as error:
        raise HddmError(f"{folder / MANIFEST}: {error}") from error
    parts = [_open(folder, one, layout, verified) for one in manifest.data]
    texts = None
    if manifest.null is not None:
        shape, dtype = layout[TOKENS]
        null = _open(folder, manifest.null, {TOKENS: (shape, dtype)}, verified)[TOKENS]
        texts = TokenStore(_rows(parts, TOKENS), null[0].float())
    verified.keep()
    return Shard(
        folder,
        manifest.shard,
        manifest.num_shards,
        manifest.hash,
        tuple(manifest.classes),
        _stored(manifest, parts),
        labels_of(entries),
        manifest.partition,
        manifest.held_out_of,
        captions_of(entries),
        manifest.vae,
        manifest.text_encoder,
        texts,
    )


def _entries(folder: Path, manifest: EncodedManifest, verified: Verified) -> list[ImageEntry]:
    """The images that have a row, in its order."""
    path = _checked(folder, manifest.images, verified)
    entries = read_entries(path)
    check_entries(path, entries, manifest.classes, manifest.hash)
    skipped = {one.file for one in manifest.skipped}
    entries = [entry for entry in entries if entry.file not in skipped]
    if len(entries) != manifest.num_rows:
        raise HddmError(
            f"{folder / MANIFEST}: {manifest.num_rows} rows of data for {len(entries)} images; encode again"
        )
    return entries


def _open(folder: Path, facts: FileFacts, layout: Layout, verified: Verified) -> Mapping[str, Tensor]:
    tensors = read_safetensors(_checked(folder, facts, verified))
    expected = {name: ((facts.rows, *shape), dtype) for name, (shape, dtype) in layout.items()}
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if found != expected:
        raise HddmError(f"{folder / facts.file}: holds {found}, not {expected}; encode the shard again")
    return tensors


def _checked(folder: Path, facts: FileFacts, verified: Verified) -> Path:
    path = inside(folder, facts.file)
    if not path.is_file():
        raise HddmError(f"{folder / facts.file}: named by the manifest, and missing; take the shard anew")
    if not verified.matches(facts.file, facts.sha256):
        raise HddmError(f"{folder / facts.file}: changed since it was encoded; take the shard anew")
    return path


def _stored(manifest: EncodedManifest, parts: list[Mapping[str, Tensor]]) -> Stored:
    vae = manifest.vae
    if vae is None:
        return MappedPixels(_rows(parts, PIXELS))
    found = {name: _rows(parts, name) for name in parts[0] if name != TOKENS}
    return LatentStore(
        found[MEAN],
        found.get(DEVIATION),
        vae.scale,
        vae.shift,
        found.get(MIRRORED + MEAN),
        found.get(MIRRORED + DEVIATION),
    )


def _rows(parts: list[Mapping[str, Tensor]], name: str) -> Rows:
    return Rows(tuple(part[name] for part in parts))
