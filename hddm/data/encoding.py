"""One-time encoding of image shards to pixels of one size, VAE latents and text tokens."""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.data.entries import Entries, ImageEntry
from hddm.data.images import THREADS, fit_image, open_image, read_ahead, to_unit_range, too_many_bad
from hddm.data.shard_records import (
    DEVIATION,
    FORMAT,
    MEAN,
    MIRRORED,
    NULL,
    PARTITION_FILE,
    PIXELS,
    SHARD_FILE,
    TOKENS,
    EncodingRecord,
    FileRecord,
    ShardManifest,
    Skipped,
    captions_of,
    find_held_out,
    find_shards,
    read_content,
    read_images_manifest,
    read_manifest,
    refuse_without_tables,
    write_list,
    write_manifest,
)
from hddm.data.shards import RowLayout, layout_of
from hddm.networks.encoders import CLIP
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.networks.text_encoder import embed, read_text_encoder, text_encoder_record_of
from hddm.networks.tokenizer import cuts, read_tokenizer
from hddm.networks.vae import encode, read_vae, scale_of, vae_record_of
from hddm.settings import EncodingSettings
from hddm.utils.addresses import Address, on_disk
from hddm.utils.errors import HddmError, UsageError, an
from hddm.utils.files import refuse_full_disk, sha256_of, write_whole
from hddm.utils.progress import Progress
from hddm.utils.records import Record
from hddm.utils.tensors import available_device
from hddm.utils.work import open_draft

if TYPE_CHECKING:
    from hddm.networks.vae_types import Vae

log = logging.getLogger(__name__)

FILE_BYTES = 64 * 2**20
"""Bytes of a data file: held in memory, and encoded again after a kill."""
_AHEAD = 2
"""Batches read ahead while the networks encode one."""


class DataFile(Record):
    """A data file, and the images skipped in it."""

    facts: FileRecord
    skipped: tuple[Skipped, ...] = ()


class EncodedShard(NamedTuple):
    """What an encoded shard holds: its number of rows, how they were encoded, and images left out."""

    rows: int
    encoding: EncodingRecord
    skipped: tuple[Skipped, ...]


class ShardOutline(NamedTuple):
    """What is known of a shard while others are read: all but the list of its images."""

    hash: str
    images: int
    channels: int
    size: tuple[int, int] | None


def encode_shards(
    source: Path,
    out: Path,
    settings: EncodingSettings,
    overwrite: bool = False,
    rows: int | None = None,
) -> dict[Path, "EncodedShard"]:
    """Encode a shard of images, or a partition and its held-out images, to ``out``; what is in each folder.

    ``out`` appears complete or not at all. A killed run continues at its first incomplete data file, to the
    same bytes as without the kill, but for rounding if batch size, device or torch have changed since. The
    list of one shard is in memory at a time.

    ``overwrite`` replaces ``out`` and any draft of an encoding with other options. A data file has ``rows``,
    by default about `FILE_BYTES`.
    Raises `HddmError` for a text encoder without a tokenizer or captions, images of several sizes without a
    resolution, a size that the VAE does not take, more bad images than allowed, latents outside the dtype's
    range, and a full disk.
    """
    source = on_disk(source)
    if isinstance(out, Address):
        return _encoded_to(source, out, settings, overwrite, rows)
    is_partition = (source / PARTITION_FILE).is_file()
    folders = _shards_in(source)
    with Progress(None, "read the networks", is_drawn=False):
        # Networks take minutes to read, so what needs none is checked first.
        has_text = _has_text(settings)
        shards = {folder: _outline_of(folder, has_text) for folder in folders}
        encoder = _open_encoder(shards, settings)
    row_bytes = 0
    for shape, dtype in encoder.layout.values():
        row_bytes += torch.Size(shape).numel() * dtype.itemsize
    rows = rows or max(1, FILE_BYTES // row_bytes)
    total = 0
    hashes: dict[str, str] = {}
    for folder, outline in shards.items():
        total += outline.images
        hashes[folder.relative_to(source).as_posix()] = outline.hash
    # Plain values that decide the content, apart from rounding: batches may become smaller. The format
    # decides how the parts of a draft are recorded.
    identity = {
        "shards": hashes,
        "encoding": encoder.encoding.model_dump(mode="json"),
        "vae": encoder.vae_record and encoder.vae_record.model_dump(),
        "text_encoder": encoder.text_record and encoder.text_record.model_dump(),
        "rows_of_a_file": rows,
        "format": FORMAT,
    }
    record = PARTITION_FILE if is_partition else SHARD_FILE
    kept = "what is encoded is kept, and the same command continues"
    encoded: dict[Path, EncodedShard] = {}
    bad: list[str] = []
    with (
        open_draft(out, record, identity, "encoding", lambda: kept, overwrite) as draft,
        ThreadPoolExecutor(THREADS) as pool,
        Progress(total, "encode") as advance,
    ):
        written = sum(path.stat().st_size for path in draft.whole.rglob("data-*.safetensors"))
        refuse_full_disk(out, total * row_bytes - written)
        for folder, outline in shards.items():
            place = folder.relative_to(source)
            files: list[DataFile] = []
            shard = read_images_manifest(folder)
            if shard.hash != outline.hash:
                raise HddmError(f"{folder}: changed since it was opened; encode again")
            _warn_of_cuts(folder, shard.images, encoder)
            (draft.whole / place).mkdir(parents=True, exist_ok=True)
            for number, start in enumerate(range(0, len(shard.images), rows)):
                name = place / f"data-{number:05d}.safetensors"
                entries = shard.images[start : start + rows]
                found = draft.done(draft.parts / name)
                if found is not None:
                    done = DataFile.model_validate(found)
                    advance.skip(len(entries))
                else:
                    done = _write_file(draft.whole / name, encoder, folder, entries, pool, advance)
                    written_files = {f"whole/{name.as_posix()}": done.facts.sha256}
                    draft.finish(draft.parts / name, done.model_dump(mode="json"), written_files)
                for one in done.skipped:
                    bad.append(f"{folder / one.file}: {one.reason}")
                if len(bad) > settings.max_bad:
                    raise too_many_bad(source, bad, settings.max_bad)
                files.append(done)
            manifest = _write_manifest(draft.whole / place, encoder, shard, files)
            encoded[out / place] = EncodedShard(
                manifest.num_rows, encoder.encoding, manifest.skipped
            )
        if is_partition:
            shutil.copyfile(source / PARTITION_FILE, draft.whole / PARTITION_FILE)
    return encoded


def _shards_in(source: Path) -> list[Path]:
    """A shard itself, or all shards of a partition."""
    if not (source / PARTITION_FILE).is_file():
        return [source]
    return [*find_shards(source), *find_held_out(source)]


def _encoded_to(
    source: Path, out: Address, settings: EncodingSettings, overwrite: bool, rows: int | None
) -> dict[Path, "EncodedShard"]:
    """`encode_shards` to an address."""
    from hddm.utils.uploading import produced

    record = PARTITION_FILE if (source / PARTITION_FILE).is_file() else SHARD_FILE
    # Batch size and device change nothing but rounding.
    chosen = settings.model_dump(mode="json", exclude={"batch_size", "device"})
    identity = {**chosen, "source": sha256_of(source / record), "rows_of_a_file": rows}

    def make(folder: Path) -> object:
        return encode_shards(source, folder, settings, rows=rows)

    named = (settings.vae, settings.text_encoder, settings.tokenizer)
    reads = [Path(one) for one in named if one is not None and Path(one).exists()]
    folder = produced(out, record, identity, reads, overwrite, make)
    encoded: dict[Path, EncodedShard] = {}
    for shard in _shards_in(folder):
        made = read_manifest(shard)
        assert made.encoding is not None
        place = out / shard.relative_to(folder)
        encoded[place] = EncodedShard(made.num_rows, made.encoding, made.skipped)
    return encoded


def _write_file(
    path: Path,
    encoder: "_Encoder",
    folder: Path,
    entries: Entries,
    pool: ThreadPoolExecutor,
    advance: Callable[[int], None],
) -> DataFile:
    """Encode the images ``entries`` of the shard in ``folder`` to the data file ``path``."""
    size = encoder.settings.batch_size
    batches = [entries[start : start + size] for start in range(0, len(entries), size)]
    # No rows at first, since every image may be skipped.
    encoded = [encoder.no_rows()]
    skipped: list[Skipped] = []
    read = read_ahead(pool, partial(encoder.read, folder), batches, _AHEAD)
    for batch, images in zip(batches, read, strict=True):
        pixels: list[Tensor] = []
        kept: list[ImageEntry] = []
        for image, entry in zip(images, batch, strict=True):
            if isinstance(image, Skipped):
                skipped.append(image)
            else:
                pixels.append(image)
                kept.append(entry)
        if kept:
            encoded.append(encoder.rows(torch.stack(pixels), kept))
        advance(len(batch))
    tensors: dict[str, Tensor] = {}
    for key in encoder.layout:
        tensors[key] = torch.cat([rows[key] for rows in encoded])
    write_whole(path, partial(save_file, tensors))
    facts = FileRecord(file=path.name, sha256=sha256_of(path), rows=len(entries) - len(skipped))
    return DataFile(facts=facts, skipped=tuple(skipped))


def _write_manifest(
    folder: Path, encoder: "_Encoder", source: ShardManifest, files: Sequence[DataFile]
) -> ShardManifest:
    """Write the tokens of the empty prompt, and the manifest."""
    null = None
    if encoder.text is not None:
        tokens = encoder.narrowed(TOKENS, embed(*encoder.text, [""]).tokens, [])
        save_file({TOKENS: tokens}, folder / NULL)
        null = FileRecord(file=NULL, sha256=sha256_of(folder / NULL), rows=1)
    skipped: list[Skipped] = []
    for done in files:
        skipped += done.skipped
    added = {
        "format": FORMAT,
        "encoding": encoder.encoding,
        "vae": encoder.vae_record,
        "text_encoder": encoder.text_record,
        "data": tuple(done.facts for done in files),
        "null": null,
        "skipped": tuple(skipped),
    }
    listed = write_list(folder, source.images.parts(), len(source.images), source.classes)
    manifest = source.model_copy(update={**added, "table": listed.table})
    write_manifest(folder, manifest)
    return manifest


@dataclass(frozen=True)
class _Encoder:
    """Settings and networks; ``images`` is the shape (C, H, W) of stored pixels, or of the VAE's input."""

    settings: EncodingSettings
    encoding: EncodingRecord
    images: tuple[int, int, int]
    vae: "Vae | None"
    vae_record: VaeRecord | None
    text: tuple[Any, Any] | None
    text_record: TextEncoderRecord | None

    @cached_property
    def layout(self) -> RowLayout:
        """Shape of a row and dtype of each tensor."""
        return layout_of(self.encoding, self.vae_record, self.text_record)

    def no_rows(self) -> dict[str, Tensor]:
        """Every tensor of a data file, with zero rows."""
        empty: dict[str, Tensor] = {}
        for name, (shape, dtype) in self.layout.items():
            empty[name] = torch.empty((0, *shape), dtype=dtype)
        return empty

    def read(self, folder: Path, entry: ImageEntry) -> Tensor | Skipped:
        """Pixels (C, H, W) of an image in uint8, gray repeated to RGB, or why it is skipped."""
        path = folder / entry.file
        try:
            image = open_image(read_content(folder, entry), path)
            if self.settings.resolution is not None:
                image = fit_image(image, self.settings.resolution, name=path)
            pixels = torch.from_numpy(np.array(image))
            pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
            return pixels.expand(self.images).contiguous()
        except HddmError as error:
            # A shard given away should not reveal where it was stored.
            return Skipped(file=entry.file, reason=error.message.removeprefix(f"{path}: "))

    def rows(self, pixels: Tensor, entries: Sequence[ImageEntry]) -> dict[str, Tensor]:
        """Rows (n, …) of every tensor for ``pixels`` (n, C, H, W) in uint8 and their entries."""
        rows: dict[str, Tensor] = {}
        if self.vae is None:
            rows[PIXELS] = pixels
        else:
            images = to_unit_range(pixels)
            prefixes = ("", MIRRORED) if self.encoding.mirrored else ("",)
            for prefix in prefixes:
                moments = encode(self.vae, images.flip(-1) if prefix else images)
                for name, values in zip((MEAN, DEVIATION), moments, strict=True):
                    if values is not None:
                        rows[prefix + name] = self.narrowed(prefix + name, values, entries)
        if self.text is not None:
            captions = [str(entry.caption) for entry in entries]
            tokens = embed(*self.text, captions, warns=False).tokens
            rows[TOKENS] = self.narrowed(TOKENS, tokens, entries)
        return rows

    def narrowed(self, name: str, values: Tensor, entries: Sequence[ImageEntry]) -> Tensor:
        """``values`` on the CPU in the dtype on disk; values outside its range are refused."""
        dtype = self.layout[name][1]
        stored = values.cpu().to(dtype)
        if not stored.isfinite().all():
            row = int((~stored.isfinite()).flatten(1).any(1).nonzero()[0])
            where = entries[row].file if entries else "the empty prompt"
            raise HddmError(
                f"{where}: its {name} reaches {values.abs().max().item():.3g}, beyond "
                f"{str(dtype).removeprefix('torch.')}; store `dtype` float32"
            )
        return stored


def _open_encoder(shards: Mapping[Path, ShardOutline], settings: EncodingSettings) -> _Encoder:
    """Open the networks for ``shards`` by folder; raises as `encode_shards`."""
    vae = settings.vae
    device = available_device(settings.device)
    settings = settings.model_copy(update={"device": str(device)})
    shape = images = _shape(shards, settings.resolution)
    _, height, width = shape
    network, vae_record = None, None
    if vae is not None:
        network = read_vae(vae)
        vae_record = vae_record_of(vae)
        # Not diffusers' own `to`, which warns of casts that do not happen here.
        nn.Module.to(network, device)
        factor = scale_of(network)
        if height % factor or width % factor:
            raise HddmError(
                f"{vae}: encodes sides that are multiples of {factor}, not {width}×{height}; "
                "change `resolution`"
            )
        images = int(network.config.in_channels), height, width
        shape = int(network.config.latent_channels), height // factor, width // factor
    text, text_record = None, None
    if settings.text_encoder is not None and settings.tokenizer is not None:
        words = read_tokenizer(settings.tokenizer)
        text_record = text_encoder_record_of(
            settings.text_encoder, words.model_max_length, pad=words.pad_token
        )
        if text_record.kind != CLIP.name:
            raise HddmError(
                f"{settings.text_encoder}: is {an(text_record.kind)}, but captions need a {CLIP.name}"
            )
        text = (read_text_encoder(settings.text_encoder), words)
        nn.Module.to(text[0], device)
    is_fitted = settings.resolution is not None
    encoding = EncodingRecord(
        space="pixels" if network is None else "latents",
        shape=shape,
        dtype="uint8" if network is None else settings.dtype,
        resolution=settings.resolution,
        crop="center" if is_fitted else None,
        interpolation="lanczos" if is_fitted else None,
        mirrored=settings.random_flip and network is not None,
        text_dtype=None if text is None else settings.dtype,
    )
    return _Encoder(settings, encoding, images, network, vae_record, text, text_record)


def _has_text(settings: EncodingSettings) -> bool:
    """True if captions are to be encoded; raises as `encode_shards`."""
    if (settings.text_encoder is None) != (settings.tokenizer is None):
        lacking = "`tokenizer`" if settings.tokenizer is None else "`text_encoder`"
        raise UsageError(
            f"{lacking}: text needs a text encoder and its tokenizer; name both folders"
        )
    return settings.text_encoder is not None


def _outline_of(folder: Path, has_text: bool) -> ShardOutline:
    """Read the list of the shard in ``folder``; raises as `encode_shards`."""
    shard = read_images_manifest(folder)
    refuse_without_tables(len(shard.images))
    if has_text and captions_of(shard.images) is None:
        remedy = "drop `text_encoder` or partition images with captions"
        raise HddmError(f"{folder}: not all of its images have captions; {remedy}")
    return ShardOutline(shard.hash, len(shard.images), shard.channels, shard.size)


def _warn_of_cuts(folder: Path, images: Entries, encoder: _Encoder) -> None:
    if encoder.text is None or encoder.text_record is None:
        return
    length = encoder.text_record.tokens
    cut = 0
    for part in images.parts():
        cut += len(cuts(encoder.text[1], part.captions, length))
    if cut:
        message = "%s: %d of %d captions have more than %d tokens and are cut"
        log.warning(message, folder, cut, len(images), length)


def _shape(shards: Mapping[Path, ShardOutline], resolution: int | None) -> tuple[int, int, int]:
    """Shape (C, H, W) of all images, after resizing; refused if sizes differ."""
    if resolution:
        sizes: set[tuple[int, int] | None] = {(resolution, resolution)}
    else:
        sizes = {shard.size for shard in shards.values()}
    size = sizes.pop()
    if sizes or size is None:
        text = "holds images of several sizes; bring them to one with `resolution`"
        raise HddmError(f"{next(iter(shards))}: {text}")
    return max(shard.channels for shard in shards.values()), *size
