"""One batch of images and captions → rows of tensors as they are stored."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hddm.components.text import cuts, hidden_states
from hddm.components.vae import encode
from hddm.data.encoding_plan import EncodingPlan
from hddm.data.encoding_records import DEVIATION, MEAN, MIRRORED, PIXELS, TOKENS
from hddm.data.images import to_unit_range
from hddm.data.shard_records import ImageEntry
from hddm.errors import HddmError


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
