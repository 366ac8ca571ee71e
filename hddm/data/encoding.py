"""Encoding of shards of images, once, to pixels of one size, VAE latents and text tokens."""

import functools
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hddm.data.encoding_draft import Done, Draft, open_draft
from hddm.data.encoding_plan import FILE_BYTES, EncodingPlan, ShardToEncode, read_image
from hddm.data.images import THREADS, read_ahead, to_unit_range
from hddm.data.shard_records import (
    DEVIATION,
    IMAGES,
    MANIFEST,
    MEAN,
    MIRRORED,
    NULL,
    PARTITION_FILE,
    PIXELS,
    TOKENS,
    EncodedManifest,
    FileRecord,
    ImageEntry,
    Skipped,
    write_entries,
)
from hddm.data.shard_records import ENCODED_FORMAT as FORMAT
from hddm.networks.text_encoder import cuts, hidden_states
from hddm.networks.vae import encode
from hddm.utils.errors import HddmError
from hddm.utils.files import sha256_of, write_json, writing
from hddm.utils.weights import Planned, write_safetensors


def encode_batch(plan: EncodingPlan, pixels: Tensor, entries: Sequence[ImageEntry]) -> dict[str, Tensor]:
    """Rows (n, …) of every tensor of the plan, for ``pixels`` (n, C, H, W) in uint8 and their entries.

    Raises:
        HddmError: for latents or tokens that are not finite, or not in the dtype that stores them.
    """
    rows = _latents(plan, pixels, entries) if plan.vae is not None else {PIXELS: pixels}
    if plan.text is not None:
        captions = [str(entry.caption) for entry in entries]
        rows[TOKENS] = _narrowed(plan, TOKENS, hidden_states(*plan.text, captions), entries)
    return rows


def empty_prompt(plan: EncodingPlan) -> Tensor:
    """Tokens (1, tokens, width) of the empty prompt, as they are stored."""
    assert plan.text is not None
    return _narrowed(plan, TOKENS, hidden_states(*plan.text, [""]), [])


def cut_captions(plan: EncodingPlan, entries: Sequence[ImageEntry]) -> tuple[str, ...]:
    """The images whose captions have more tokens than the text encoder takes."""
    if plan.text is None or plan.text_facts is None or not entries:
        return ()
    captions = [str(entry.caption) for entry in entries]
    return tuple(entries[index].file for index, _ in cuts(plan.text[1], captions, plan.text_facts.tokens))


def _latents(plan: EncodingPlan, pixels: Tensor, entries: Sequence[ImageEntry]) -> dict[str, Tensor]:
    assert plan.vae is not None
    images, rows = to_unit_range(pixels), {}
    for prefix in ("", MIRRORED) if plan.encoding.mirrored else ("",):
        found = encode(plan.vae, images.flip(-1) if prefix else images)
        for name, values in zip((MEAN, DEVIATION), found, strict=True):
            if values is not None:
                rows[prefix + name] = _narrowed(plan, prefix + name, values, entries)
    return rows


def _narrowed(plan: EncodingPlan, name: str, values: Tensor, entries: Sequence[ImageEntry]) -> Tensor:
    """``values`` on the CPU in the dtype that stores them."""
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


def empty_rows(plan: EncodingPlan) -> dict[str, Tensor]:
    """No rows, of every tensor of the plan."""
    return {name: torch.empty((0, *shape), dtype=dtype) for name, (shape, dtype) in plan.layout.items()}


_AHEAD = 2
"""Batches that are read while the networks are at one."""
_BESIDE = (PARTITION_FILE, "clusters.safetensors")


def encode_shards(
    plan: EncodingPlan,
    out: Path,
    overwrite: bool = False,
    on_images: Callable[[int], None] = lambda number: None,
    file_bytes: int = FILE_BYTES,
) -> list[EncodedManifest]:
    """Encode the plan's shards to ``out``, which is there in full at the end or not at all.

    A killed run continues at its first incomplete data file. The result has the same bytes as without the
    kill; where batch size, device or torch are others by then, latents and tokens of the files that were left
    differ by rounding, and the manifest names both in ``computed``.

    Of a partition, the records that `hddm.data.shard_records.find_shards` reads are carried over.

    Args:
        plan: what `plan_encoding` gave.
        out: folder to write.
        overwrite: replace it, and what is left of an encoding with other options.
        on_images: called with the number of images that are done.
        file_bytes: of a file of data, about; also what is held in memory.

    Returns:
        The manifests, in the plan's order.

    Raises:
        HddmError: for more bad images than allowed, latents that the dtype does not hold, a full disk.
    """
    rows = max(1, file_bytes // plan.row_bytes)
    identity = {**plan.identity(), "rows_of_a_file": rows}
    with open_draft(out, plan.record, identity, overwrite) as draft, ThreadPoolExecutor(THREADS) as pool:
        _refuse_full_disk(plan, out, draft)
        run = _Run(plan, draft, pool, rows, on_images)
        manifests = [run.encode(shard) for shard in plan.shards]
        if plan.record == PARTITION_FILE:
            for name in _BESIDE:
                if (plan.source / name).is_file():
                    with writing(out / name):
                        shutil.copyfile(plan.source / name, draft.whole / name)
    cut = sum(manifest.cut_captions for manifest in manifests)
    if cut and plan.text_facts is not None:
        warnings.warn(
            f"{cut} of {plan.num_images} captions have more than {plan.text_facts.tokens} tokens, and lost "
            "their ends",
            UserWarning,
            stacklevel=2,
        )
    return manifests


@dataclass
class _Run:
    """An encoding as it goes; ``bad`` are the images that were skipped so far, a line each."""

    plan: EncodingPlan
    draft: Draft
    pool: ThreadPoolExecutor
    rows: int
    on_images: Callable[[int], None]
    bad: list[str] = field(default_factory=list)

    def encode(self, shard: ShardToEncode) -> EncodedManifest:
        """Write the folder of one shard to the draft."""
        total, finished = len(shard.manifest.images), []
        for number, start in enumerate(range(0, total, self.rows)):
            name = (Path(shard.place) / f"data-{number:05d}.safetensors").as_posix()
            indices = range(start, min(start + self.rows, total))
            done = self.draft.done(name)
            if done is None:
                done = self._file(name, shard, indices)
            else:
                self._count(shard, done.skipped)
                self.on_images(len(indices))
            finished.append(done)
        if not any(done.facts.rows for done in finished):
            raise HddmError(f"{shard.folder}: holds no image that can be read")
        with writing(self.draft.whole / shard.place):
            return self._finish(shard, finished)

    def _file(self, name: str, shard: ShardToEncode, indices: range) -> Done:
        """Encode the images ``indices`` of a shard to the data file ``name``."""
        plan, entries = self.plan, shard.manifest.images
        size = plan.settings.batch_size
        batches = [indices[start : start + size] for start in range(0, len(indices), size)]
        parts: list[dict[str, Tensor]] = [empty_rows(plan)]
        skipped: list[Skipped] = []
        cut: list[str] = []
        found = read_ahead(self.pool, functools.partial(_read, plan, shard), batches, _AHEAD)
        for batch, images in zip(batches, found, strict=True):
            bad = [one for one in images if isinstance(one, Skipped)]
            self._count(shard, bad)
            skipped += bad
            good = [index for index, one in zip(batch, images, strict=True) if isinstance(one, Tensor)]
            if good:
                pixels = torch.stack([one for one in images if isinstance(one, Tensor)])
                kept = [entries[index] for index in good]
                parts.append(encode_batch(plan, pixels, kept))
                cut += cut_captions(plan, kept)
            self.on_images(len(batch))
        tensors = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        write = functools.partial(_write_tensors, tensors)
        rows = len(indices) - len(skipped)
        return self.draft.add(name, write, rows, tuple(skipped), tuple(cut), plan.computed)

    def _count(self, shard: ShardToEncode, skipped: "list[Skipped] | tuple[Skipped, ...]") -> None:
        """Add to the bad images; refuse more than are allowed."""
        self.bad += [f"{shard.folder / one.file}: {one.reason}" for one in skipped]
        allowed = self.plan.settings.max_bad
        if len(self.bad) > allowed:
            raise HddmError(
                f"{self.plan.source}: {len(self.bad)} bad images, and --max-bad {allowed}; mend them or "
                "leave more out",
                self.bad,
            )

    def _finish(self, shard: ShardToEncode, finished: list[Done]) -> EncodedManifest:
        """Write what is beside the data: list of images, tokens of the empty prompt, manifest."""
        plan, source, folder = self.plan, shard.manifest, self.draft.whole / shard.place
        write_entries(folder / IMAGES, source.images)
        null = None
        computed = [done.computed for done in finished]
        if plan.text is not None:
            computed.append(plan.computed)
            (folder / NULL).unlink(missing_ok=True)
            _write_tensors({TOKENS: empty_prompt(plan)}, folder / NULL)
            null = FileRecord(file=NULL, sha256=sha256_of(folder / NULL), rows=1)
        manifest = EncodedManifest(
            format=FORMAT,
            shard=source.shard,
            num_shards=source.num_shards,
            classes=source.classes,
            hash=source.hash,
            partition=source.partition,
            held_out_of=source.held_out_of,
            encoding=plan.encoding,
            vae=plan.vae_facts,
            text_encoder=plan.text_facts,
            images=FileRecord(file=IMAGES, sha256=sha256_of(folder / IMAGES), rows=len(source.images)),
            data=[done.facts for done in finished],
            null=null,
            skipped=tuple(one for done in finished for one in done.skipped),
            cut_captions=sum(len(done.cut) for done in finished),
            computed=tuple(dict.fromkeys(one for one in computed if one is not None)),
        )
        write_json(folder / MANIFEST, manifest.model_dump(mode="json"))
        return manifest


def _read(plan: EncodingPlan, shard: ShardToEncode, index: int) -> Tensor | Skipped:
    """One image, or why there is none.

    Raises:
        HddmError: for an image of another size than the rest.
    """
    entry = shard.manifest.images[index]
    try:
        image = read_image(shard.folder, entry, index, plan.channels, plan.fit)
    except HddmError as error:
        # Whoever is given the shard should not read where it lay.
        reason = error.message.removeprefix(f"{shard.folder / entry.file}: ")
        return Skipped(file=entry.file, reason=reason)
    if tuple(image.shape[1:]) != plan.size:
        height, width = image.shape[1:]
        raise HddmError(
            f"{shard.folder / entry.file}: is {width}×{height} as it is shown, and the rest "
            f"{plan.size[1]}×{plan.size[0]}; bring them to one size with --resolution"
        )
    return image


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    write_safetensors(
        path, [Planned(name, tuple(one.shape), one.dtype, one.detach) for name, one in tensors.items()]
    )


def _refuse_full_disk(plan: EncodingPlan, out: Path, draft: Draft) -> None:
    written = sum(path.stat().st_size for path in draft.whole.rglob("data-*.safetensors"))
    size, free = plan.num_images * plan.row_bytes - written, shutil.disk_usage(draft.root).free
    if free < size * 1.02:
        raise HddmError(f"{out}: needs {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on its disk")
