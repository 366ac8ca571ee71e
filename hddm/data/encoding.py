"""One-time encoding of image shards to pixels of one size, VAE latents and text tokens."""

import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hddm.data.encoding_plan import EncodingPlan, ShardToEncode
from hddm.data.images import THREADS, read_ahead, to_unit_range, too_many_bad
from hddm.data.shard_records import (
    DEVIATION,
    ENCODED_FORMAT,
    IMAGES,
    MANIFEST,
    MEAN,
    MIRRORED,
    NULL,
    PARTITION_FILE,
    PIXELS,
    TOKENS,
    Computed,
    EncodedManifest,
    FileRecord,
    ImageEntry,
    Skipped,
    write_entries,
)
from hddm.networks.text_encoder import cuts, embed
from hddm.networks.vae import encode
from hddm.utils.errors import HddmError
from hddm.utils.files import refuse_full_disk, sha256_of, write_json, write_whole
from hddm.utils.records import Record
from hddm.utils.tensors import Planned, write_safetensors
from hddm.utils.work import Draft, open_draft

FILE_BYTES = 64 * 2**20
"""Bytes of a data file: held in memory, and encoded again after a kill."""
_AHEAD = 2
"""Batches read ahead while the networks encode one."""
_BESIDE = (PARTITION_FILE, "clusters.safetensors")


def encode_shards(
    plan: EncodingPlan,
    out: Path,
    overwrite: bool = False,
    on_images: Callable[[int], None] = lambda number: None,
    file_bytes: int = FILE_BYTES,
) -> list[EncodedManifest]:
    """Encode the plan's shards to ``out``, which appears complete or not at all; returns their manifests.

    A killed run continues at its first incomplete data file, to the same bytes as without the kill. If batch
    size, device or torch have changed since, latents and tokens of the remaining files differ by rounding,
    and the manifest names both settings in ``computed``. The record of a partition is copied.

    ``overwrite`` replaces ``out`` and any draft of an encoding with other options. ``on_images`` is called
    with the number of images done. A data file, and the memory it takes, has about ``file_bytes``. Raises
    `HddmError` for more bad images than allowed, latents outside the dtype's range, and a full disk.
    """
    rows = max(1, file_bytes // plan.row_bytes)
    # The format decides how the parts of a draft are recorded.
    identity = {**plan.identity(), "rows_of_a_file": rows, "format": ENCODED_FORMAT}
    kept = "what is encoded is kept, and the same command continues"
    with (
        open_draft(out, plan.record, identity, "encoding", lambda: kept, overwrite) as draft,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        written = sum(path.stat().st_size for path in draft.whole.rglob("data-*.safetensors"))
        refuse_full_disk(out, plan.num_images * plan.row_bytes - written)
        run = _Run(plan, draft, pool, rows, on_images)
        manifests = [run.encode(shard) for shard in plan.shards]
        if plan.record == PARTITION_FILE:
            for name in _BESIDE:
                if (plan.source / name).is_file():
                    shutil.copyfile(plan.source / name, draft.whole / name)
    cut = sum(manifest.cut_captions for manifest in manifests)
    if cut and plan.text_record is not None:
        warnings.warn(
            f"{cut} of {plan.num_images} captions have more than {plan.text_record.tokens} tokens and "
            f"were cut",
            UserWarning,
            stacklevel=2,
        )
    return manifests


class DataFile(Record):
    """A data file, the images skipped in it, those with cut captions, and how networks ran, if any."""

    facts: FileRecord
    skipped: tuple[Skipped, ...] = ()
    cut: tuple[str, ...] = ()
    computed: Computed | None = None


@dataclass
class _Run:
    """State of an encoding; ``bad`` has a line for each skipped image."""

    plan: EncodingPlan
    draft: Draft
    pool: ThreadPoolExecutor
    rows: int
    on_images: Callable[[int], None]
    bad: list[str] = field(default_factory=list)

    def encode(self, shard: ShardToEncode) -> EncodedManifest:
        """Write one shard's folder to the draft."""
        total, files = len(shard.manifest.images), []
        for number, start in enumerate(range(0, total, self.rows)):
            name = (Path(shard.place) / f"data-{number:05d}.safetensors").as_posix()
            indices = range(start, min(start + self.rows, total))
            if (found := self.draft.done(self.draft.parts / name)) is None:
                files.append(self._write(name, shard, indices))
            else:
                files.append(DataFile.model_validate(found))
                self._count(shard, files[-1].skipped)
                self.on_images(len(indices))
        if not any(done.facts.rows for done in files):
            raise HddmError(f"{shard.folder}: holds no image that can be read")
        return self._finish(shard, files)

    def _write(self, name: str, shard: ShardToEncode, indices: range) -> DataFile:
        """Encode the images ``indices`` of a shard to the data file ``name``."""
        plan, entries, size = self.plan, shard.manifest.images, self.plan.settings.batch_size
        batches = [indices[start : start + size] for start in range(0, len(indices), size)]
        # No rows at first, since every image may be skipped.
        encoded = [
            {key: torch.empty((0, *shape), dtype=dtype) for key, (shape, dtype) in plan.layout.items()}
        ]
        skipped: list[Skipped] = []
        cut: list[str] = []
        read = read_ahead(self.pool, lambda index: _read(plan, shard, index), batches, _AHEAD)
        for batch, images in zip(batches, read, strict=True):
            bad = [image for image in images if isinstance(image, Skipped)]
            self._count(shard, bad)
            skipped += bad
            kept = [entries[k] for k, image in zip(batch, images, strict=True) if isinstance(image, Tensor)]
            if kept:
                pixels = torch.stack([image for image in images if isinstance(image, Tensor)])
                encoded.append(_encoded(plan, pixels, kept))
                if plan.text is not None and plan.text_record is not None:
                    captions = [str(entry.caption) for entry in kept]
                    found = cuts(plan.text[1], captions, plan.text_record.tokens)
                    cut += [kept[index].file for index, _ in found]
            self.on_images(len(batch))
        tensors = {key: torch.cat([rows[key] for rows in encoded]) for key in plan.layout}
        path = self.draft.whole / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda part: _write_tensors(part, tensors))
        facts = FileRecord(file=path.name, sha256=sha256_of(path), rows=len(indices) - len(skipped))
        done = DataFile(facts=facts, skipped=tuple(skipped), cut=tuple(cut), computed=plan.computed)
        hashes = {f"whole/{name}": facts.sha256}
        self.draft.finish(self.draft.parts / name, done.model_dump(mode="json"), hashes)
        return done

    def _count(self, shard: ShardToEncode, skipped: Sequence[Skipped]) -> None:
        """Add to the bad images; refuse more than allowed."""
        self.bad += [f"{shard.folder / one.file}: {one.reason}" for one in skipped]
        if len(self.bad) > self.plan.settings.max_bad:
            raise too_many_bad(self.plan.source, self.bad, self.plan.settings.max_bad)

    def _finish(self, shard: ShardToEncode, files: list[DataFile]) -> EncodedManifest:
        """Write the list of images, the tokens of the empty prompt, and the manifest."""
        plan, source, folder = self.plan, shard.manifest, self.draft.whole / shard.place
        write_entries(folder / IMAGES, source.images)
        computed, null = [done.computed for done in files], None
        if plan.text is not None:
            computed.append(plan.computed)
            tokens = _narrowed(plan, TOKENS, embed(*plan.text, [""]).tokens, [])
            (folder / NULL).unlink(missing_ok=True)
            _write_tensors(folder / NULL, {TOKENS: tokens})
            null = FileRecord(file=NULL, sha256=sha256_of(folder / NULL), rows=1)
        manifest = EncodedManifest(
            **source.model_dump(exclude={"format", "images"}),
            format=ENCODED_FORMAT,
            encoding=plan.encoding,
            vae=plan.vae_record,
            text_encoder=plan.text_record,
            images=FileRecord(file=IMAGES, sha256=sha256_of(folder / IMAGES), rows=len(source.images)),
            data=[done.facts for done in files],
            null=null,
            skipped=tuple(one for done in files for one in done.skipped),
            cut_captions=sum(len(done.cut) for done in files),
            computed=tuple(dict.fromkeys(one for one in computed if one is not None)),
        )
        write_json(folder / MANIFEST, manifest.model_dump(mode="json"))
        return manifest


def _read(plan: EncodingPlan, shard: ShardToEncode, index: int) -> Tensor | Skipped:
    """Read one image, or say why it is skipped."""
    file = shard.manifest.images[index].file
    try:
        return plan.read_image(shard, index)
    except HddmError as error:
        # A shard given away should not reveal where it was stored.
        return Skipped(file=file, reason=error.message.removeprefix(f"{shard.folder / file}: "))


def _encoded(plan: EncodingPlan, pixels: Tensor, entries: Sequence[ImageEntry]) -> dict[str, Tensor]:
    """Rows (n, …) of every tensor for ``pixels`` (n, C, H, W) in uint8 and their entries."""
    rows: dict[str, Tensor] = {}
    if plan.vae is None:
        rows[PIXELS] = pixels
    else:
        images = to_unit_range(pixels)
        for prefix in ("", MIRRORED) if plan.encoding.mirrored else ("",):
            moments = encode(plan.vae, images.flip(-1) if prefix else images)
            for name, values in zip((MEAN, DEVIATION), moments, strict=True):
                if values is not None:
                    rows[prefix + name] = _narrowed(plan, prefix + name, values, entries)
    if plan.text is not None:
        tokens = embed(*plan.text, [str(entry.caption) for entry in entries], warns=False).tokens
        rows[TOKENS] = _narrowed(plan, TOKENS, tokens, entries)
    return rows


def _narrowed(plan: EncodingPlan, name: str, values: Tensor, entries: Sequence[ImageEntry]) -> Tensor:
    """``values`` on the CPU in the dtype on disk; values outside its range are refused."""
    dtype = plan.layout[name][1]
    stored = values.cpu().to(dtype)
    if not stored.isfinite().all():
        row = int((~stored.isfinite()).flatten(1).any(1).nonzero()[0])
        where = entries[row].file if entries else "the empty prompt"
        raise HddmError(
            f"{where}: its {name} reaches {values.abs().max().item():.3g}, beyond "
            f"{str(dtype).removeprefix('torch.')}; store --dtype float32"
        )
    return stored


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    write_safetensors(
        path, [Planned(name, tuple(one.shape), one.dtype, one.detach) for name, one in tensors.items()]
    )
