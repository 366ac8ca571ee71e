"""What a pipeline's call takes: prompts, class labels and pictures, as conditions and samples to begin with.

Pictures come back as well: a VAE decodes samples to them.
"""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from hddm.classes import Labels, class_indices
from hddm.condition_names import LABELS, TEXT
from hddm.conditions import Conditions
from hddm.data.images import as_trained, to_unit_range
from hddm.editing import Picture
from hddm.ensemble import Ensemble
from hddm.experts.components import how_to_add
from hddm.experts.ensemble_records import numbered
from hddm.networks.clip_reading import PromptReading
from hddm.networks.encoders import T5
from hddm.networks.families import Family
from hddm.networks.prompts import PromptEncoders, text_parts
from hddm.networks.text_encoder import embed, refuse_for_others
from hddm.networks.tokenizer import refuse_half_characters
from hddm.networks.vae import decode, latents_of, scale_of
from hddm.networks.vae_types import Vae
from hddm.networks.wrappers import family_behind
from hddm.pipelines.parts import Offloading
from hddm.running import Batch, Plan
from hddm.utils.errors import HddmError, in_words, one_line
from hddm.utils.records import composed


class Encoding(Offloading):
    """Encoder of a pipeline's prompts and class labels."""

    ensemble: Any
    _folder: Path | None = None

    def vae_of(self, expert: int) -> Vae | None:
        """The VAE of an expert's latents; None for pixels, and if there is none."""
        number = self.ensemble.vaes[expert]
        return None if number < 0 else getattr(self, numbered("vae", number))

    def _family_of(self, expert: int) -> Family | None:
        """The family of an expert's network; None for a network of none."""
        return family_behind(self.ensemble.experts[expert].network)

    @property
    def _adding(self) -> str:
        """Words on how to add all that is missing for prompts and pictures."""
        missing, trusts = list[str](), False
        for k, record in enumerate(self.experts.records):
            if self.vae_of(k) is None and not record.makes_pictures:
                missing.append("vae")
                # Where no record says which one it was, the caller does.
                trusts |= record.latent_space is None
            if record.takes_text and self._reader(self.ensemble.texts[k]) is None:
                missing += text_parts(self._family_of(k), record.conditions)
                trusts |= record.text_encoder is None
        if self._topics is not None and self._reader(self._topics) is None:
            missing += ["text_encoder", "tokenizer"]
        kinds = list(dict.fromkeys(missing))
        if self._folder is None:
            how = ", ".join(f"{name}=" for name in kinds)
        else:
            how = how_to_add(self._folder, kinds, trusts)
        return f"add {in_words(kinds)} ({how})"

    def encode(
        self,
        prompt: str | Sequence[str] | None = None,
        class_labels: Labels | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        guided: bool = False,
        conditions: Mapping[str, Tensor] | None = None,
        negative_conditions: Mapping[str, Tensor] | None = None,
        long_prompt: bool = False,
        clip_skip: int = 0,
    ) -> Conditions:
        """Conditions by network keyword, and p(k | prompt), one row per prompt or class.

        Arguments are those of a call; ``guided`` is true if guidance uses a negative branch. Each text expert
        gets the tokens of its own text encoder. A class expert gets the longest class name in the prompt, and
        p = 0 for prompts that name no class of its own; without a topic, its share of the other prompts is
        its share of all images. An expert that takes neither has p = 0 for every prompt.

        Raises:
            HddmError: for prompts that the model cannot read, or that would have no effect beside the other
                arguments, and arguments that exclude each other.
        """
        given, against, prior = dict(conditions or {}), dict(negative_conditions or {}), None
        texts = _texts_of(prompt, "prompt")
        negatives = _texts_of(negative_prompt, "negative_prompt")
        if not any(negatives or ()):
            # The empty text is what guidance moves away from anyway.
            negatives = None
        has_labels = class_labels is not None or LABELS in given
        self._refuse_unread(texts, negatives, has_labels, TEXT in given)
        reading = self._reading_of([*(texts or []), *(negatives or [])], long_prompt, clip_skip)
        if LABELS in given:
            given[LABELS] = class_indices(given[LABELS], self.ensemble.classes)
        if class_labels is not None:
            _add(given, {LABELS: class_indices(class_labels, self.ensemble.classes)})
        if texts is not None:
            tokens, pooled = self._embed(texts, reading)
            _add(given, tokens)
            labels, prior = self._routed(texts, has_labels, pooled)
            if labels is not None:
                given[LABELS] = labels
        if negatives is None and texts is not None and guided and TEXT not in against:
            negatives = [""]
        if negatives is not None and self.readers:
            alone = negatives * len(texts or [""]) if len(negatives) == 1 else negatives
            _add(against, self._embed(alone, reading, is_negative=True)[0])
        if texts is not None and has_labels:
            prior = self._of_both(given, prior)
        return Conditions(given, against, prior)

    def _refuse_unread(
        self,
        texts: Sequence[str] | None,
        negatives: Sequence[str] | None,
        has_labels: bool,
        has_tokens: bool,
    ) -> None:
        """Raise an `HddmError` for texts that no expert would read.

        ``has_labels`` and ``has_tokens`` are true where class labels, or text tokens, are passed as such.
        """
        reads_text = bool(self._reads_text.any())
        if texts is not None and not self.readers and not self._takes_classes.any():
            raise HddmError("`prompt`: the model is unconditional; drop the option")
        if texts is not None and has_labels and not self.readers:
            raise HddmError(
                "`prompt`, `class_labels`: these experts take classes alone; pass one of the two"
            )
        if negatives is not None and not reads_text:
            raise HddmError("`negative_prompt`: no expert reads text; drop the option")
        if negatives is not None and texts is None and not has_tokens:
            raise HddmError(
                '`negative_prompt`: guides a `prompt` away from it, and there is none (may be "")'
            )

    def _of_both(self, given: dict[str, Tensor], prior: Tensor | None) -> Tensor | None:
        """p(k | prompt, class), 0 for experts that do not take both; ``prior`` is p(k | prompt) if known.

        Raises an `HddmError` where no expert takes both.
        """
        ensemble: Ensemble = self.ensemble
        # Prompts and labels may be cycled over the images, each by itself. Which experts take a text depends
        # on the names of its conditions alone, so its rows, which are large, stay as they are.
        num = math.lcm(*map(len, given.values()))
        cycled = Conditions({LABELS: given[LABELS]}, {}, prior).cycled(range(num))
        text = {name: value for name, value in given.items() if name != LABELS}
        found = (ensemble.able(num, text), ensemble.able(num, cycled.given))
        able = [one for one in found if one is not None]
        if not able:
            return prior
        shares = ensemble.prior_of(num, text | cycled.given, cycled.prior)
        for one in able:
            shares = shares * one
        if not (shares.sum(1) > 0).all():
            raise HddmError("`prompt`, `class_labels`: no expert takes both; pass one of the two")
        return shares / shares.sum(1, keepdim=True)

    @property
    def readers(self) -> set[int]:
        """Numbers of the text encoders that a prompt needs: for text experts, and for topics."""
        found = set()
        for record, number in zip(self.experts.records, self.ensemble.texts, strict=True):
            if record.takes_text:
                found.add(number)
        if self._topics is not None:
            found.add(self._topics)
        return found

    @property
    def takes_prompts(self) -> bool:
        """True if an expert takes text, and all text encoders for it are there."""
        is_read = any(record.takes_text for record in self.experts.records)
        return is_read and all(self._reader(number) is not None for number in self.readers)

    @property
    def _topics(self) -> int | None:
        """Number of the text encoder that prompts are routed by; None for one expert alone."""
        number: int | None = self.experts.topics
        return number if len(self.experts.records) > 1 else None

    @property
    def _takes_classes(self) -> Tensor:
        """Which experts get the class that a prompt names (K,)."""
        found = []
        for record in self.experts.records:
            found.append(record.takes_classes and not record.takes_text)
        return torch.tensor(found)

    @property
    def _reads_text(self) -> Tensor:
        """Which experts read prompts as text (K,)."""
        return torch.tensor([one.takes_text for one in self.experts.records])

    def _reader(self, number: int) -> tuple[Any, Any] | None:
        """Text encoder and tokenizer of that number, None where one is missing; some have theirs inside."""
        encoder = getattr(self, numbered("text_encoder", number), None)
        words = getattr(self, numbered("tokenizer", number), None)
        is_whole = isinstance(encoder, PromptEncoders) or None not in (encoder, words)
        return (encoder, words) if is_whole else None

    def _reading_of(self, texts: Sequence[str], long_prompt: bool, clip_skip: int) -> PromptReading:
        """How all prompts of a call are read: in as many chunks as the longest needs.

        Raises an `HddmError` where that would have no effect.
        """
        reading = PromptReading(long_prompt, clip_skip)
        if not (texts and self.readers) and (long_prompt or clip_skip):
            name = "clip_skip" if clip_skip else "long_prompt"
            raise HddmError(f"`{name}`: says how a `prompt` is read, and none is; drop the option")
        for number in self.readers if long_prompt else ():
            encoder, words = self._reader(number) or (None, None)
            if isinstance(encoder, PromptEncoders):
                if encoder.prompts.other_readers:
                    refuse_for_others(reading, encoder.prompts.other_readers)
                words = next(iter(encoder.tokenizers.values()))
                encoder = next(iter(encoder.encoders.values()))
            elif hasattr(encoder, "shared"):
                refuse_for_others(reading, (T5,))
            if words is not None:
                reading = reading.of_all(encoder, words, texts)
        return reading

    def _embed(
        self, texts: Sequence[str], reading: PromptReading, is_negative: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Conditions by the ensemble's names of them, and embeddings that topics compare."""
        found, pooled = dict[str, Tensor](), None
        for number in sorted(self.readers):
            reader = self._reader(number)
            if reader is None:
                names = f"{numbered('text_encoder', number)} and {numbered('tokenizer', number)}"
                raise HddmError(f"`prompt`: needs {names}; {self._adding}, or pass `conditions`")
            with self.present(reader[0]) as present:
                if isinstance(present, PromptEncoders):
                    made = present.embed(texts, is_negative, reading=reading)
                else:
                    made = embed(present, reader[1], texts, reading=reading)
            pooled = made.pooled if number == self._topics else pooled
            for keyword, value in made.conditions.items():
                name = numbered(keyword, number)
                if name in self.ensemble.conditions:
                    found[name] = value
        return found, pooled

    def _routed(
        self, texts: Sequence[str], has_labels: bool, pooled: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The classes that prompts name, for experts that take no text, and p(k | prompt).

        ``pooled`` are the prompts' embeddings for topics. With ``has_labels`` the classes are known already.
        p(k | prompt) is None where the router sees what the prompt says: its text, or where nobody else reads
        text the class that it names. The router was trained on pairs of images and conditions, which says
        more than topics and counts.
        """
        ensemble, takes_classes = self.ensemble, self._takes_classes
        sees = ensemble.router_condition
        sees_text = sees is not None and sees.name == TEXT
        sees_class = sees is not None and sees.name == LABELS and not self.readers
        if sees_text:
            pooled = None
        if pooled is None and not takes_classes.any():
            return None, None
        rows = ensemble.prior.expand(len(texts), -1)
        is_described = torch.zeros(len(takes_classes)).bool()
        router = None if pooled is None else ensemble.prompt_router
        if router is not None:
            rows = router(pooled)
            is_described = torch.tensor([part.topic is not None for part in ensemble.parts])
        if not takes_classes.any() or has_labels:
            return None, None if pooled is None else rows
        labels = torch.tensor([_named_in(text, ensemble.classes) for text in texts])
        if sees_text and self._reads_text.any():
            # Experts of classes are able where a class is named (`Parts.able`), which no share need say.
            return labels, None
        is_named = (labels < len(ensemble.classes))[:, None]
        by_class = ensemble.prior_of(len(texts), {LABELS: labels}) * is_named * takes_classes
        # Class experts without a topic share their part of the images among those that know the class.
        named = by_class * ~is_described
        part = (ensemble.prior * takes_classes * ~is_described).sum()
        part = part * (named.sum(1, keepdim=True) > 0)
        named = part * named / named.sum(1, keepdim=True).clamp_min(1e-300)
        rows = torch.where(
            takes_classes, rows * is_described * (by_class > 0), rows * self._reads_text
        )
        # Topics may give p = 0 to all experts that know the class; the class was requested, so it wins.
        rows = torch.where(rows.sum(1, keepdim=True) == 0, by_class * is_described, rows)
        rows = named + (1 - part) * rows / rows.sum(1, keepdim=True).clamp_min(1e-300)
        for text, row in zip(texts, rows, strict=True):
            # So that NaN is refused as well.
            if not row.sum() > 0:
                some = ", ".join(ensemble.classes[:5])
                raise HddmError(
                    f"prompt {text[:60]!r}: these experts take classes, and it names none of {some}, …"
                )
        has_shares = rows.shape[1] > 1 and not sees_class
        return labels, rows / rows.sum(1, keepdim=True) if has_shares else None


def _texts_of(prompt: str | Sequence[str] | None, name: str) -> list[str] | None:
    """Prompts as a list, None for none; raises an `HddmError` for an empty list and for what is no text."""
    if prompt is None:
        return None
    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not texts:
        raise HddmError(f"`{name}`: an empty list; pass a text, or leave it out")
    for text in texts:
        if not isinstance(text, str):
            raise HddmError(f"`{name}` {one_line(repr(text), 60)}: must be text")
        refuse_half_characters(text, f"`{name}`")
    return texts


def _named_in(text: str, classes: Sequence[str]) -> int:
    """Number of the longest class name in a text; the number of classes where it has none."""
    text = composed(text)
    found = [name for name in classes if re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE)]
    longest = max(found, key=len, default="")
    others = [name for name in found if name.lower() not in longest.lower()]
    if others:
        warnings.warn(
            f"prompt {text[:60]!r}: taken as {longest}, not {' and '.join(others)}", stacklevel=2
        )
    return classes.index(longest) if found else len(classes)


def _add(into: dict[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Add conditions; raises an `HddmError` for one that is there already."""
    twice = into.keys() & new.keys()
    if twice:
        raise HddmError(f"{min(twice)} has two sources (prompt, labels, conditions): pass one")
    into |= new


def repeated(
    conditions: Conditions, times: int, batch: int | None = None
) -> tuple[Conditions, int]:
    """Repeat each row of the conditions ``times`` times; also return the resulting number of images.

    Single rows are expanded to the number of rows of the others, and to ``batch`` rows if provided.
    """
    values = [*conditions.given.values(), *conditions.negative.values()]
    values += [] if conditions.prior is None else [conditions.prior]
    found = max(map(len, values), default=1) if batch is None else batch

    def spread(value: Tensor) -> Tensor:
        value = value.expand(found, *value.shape[1:]) if len(value) == 1 else value
        return value.repeat_interleave(times, dim=0)

    return conditions.map(spread), found * times


Images = Image.Image | np.ndarray[Any, Any] | Tensor | Sequence[Image.Image]
"""As in diffusers: Pillow images, arrays (N, H, W, C) in [0, 1], or tensors (N, C, H, W) in [-1, 1]."""


@dataclass(frozen=True)
class Begin:
    """What the images of a call begin with; see `hddm.HDDMPipeline.__call__`.

    Raises `HddmError` for what changes a picture where there is none.
    """

    image: Images | None = None
    mask_image: Images | None = None
    strength: float | None = None
    resampling_steps: int | None = None
    edit_from: str | None = None
    long_prompt: bool = False
    clip_skip: int = 0
    """How ``edit_from`` is read, which is as the prompt is."""

    def __post_init__(self) -> None:
        if self.image is not None:
            return
        changes = {
            "strength": self.strength,
            "mask": self.mask_image,
            "resampling_steps": self.resampling_steps,
            "edit_from": self.edit_from,
        }
        for name, value in changes.items():
            if value is not None:
                shown = f" {value:g}" if isinstance(value, int | float) else ""
                raise HddmError(
                    f"`{name}`{shown} needs a picture: pass image= (`init_image` on the command line)"
                )


def pixels_of(images: Images, channels: int, size: tuple[int, int], name: str = "image") -> Tensor:
    """Pictures (N, C, H, W) in [-1, 1]; Pillow images are cropped and resized to ``size`` (H, W).

    Raises `HddmError` for arrays of another range.
    """
    if isinstance(images, np.ndarray):
        if images.size and not 0 <= images.min() <= images.max() <= 1:
            raise HddmError(
                f"{name}: array of {images.min():g} to {images.max():g}; pass pixels from 0 to 1"
            )
        images = torch.from_numpy(images).float().movedim(-1, -3) * 2 - 1
    if isinstance(images, Tensor):
        pixels = images.float() if images.ndim == 4 else images.float()[None]
    else:
        listed = [images] if isinstance(images, Image.Image) else list(images)
        mode = "L" if channels == 1 else "RGB"
        rows = []
        for one in listed:
            picture = as_trained(one, name).convert(mode)
            fitted = ImageOps.fit(picture, size[::-1], Image.Resampling.LANCZOS)
            rows.append(torch.from_numpy(np.array(fitted)).view(*size, channels))
        pixels = to_unit_range(torch.stack(rows).movedim(-1, 1))
    return pixels


def mask_of(masks: Images, images: Images, size: tuple[int, int]) -> Tensor:
    """Masks (N, 1, H, W) of ``images``, True where they are at least half white.

    Raises `HddmError` as `pixels_of`, and for a Pillow image of another aspect ratio than its picture, which
    would be cropped differently.
    """
    if isinstance(masks, np.ndarray | Tensor):
        # As in diffusers, a mask is in [0, 1], also as a tensor.
        found = torch.as_tensor(masks).float()
        if found.shape[-1] == 1 and found.ndim > 2:
            found = found.movedim(-1, -3)
        if found.ndim < 4:
            found = found.view(-1, 1, *found.shape[-2:])
        is_open = found >= 0.5
    else:
        is_open = pixels_of(masks, 1, size, "mask_image") >= 0
        sizes = []
        for side in (masks, images):
            for one in side if isinstance(side, Sequence) else [side]:
                if isinstance(one, Image.Image):
                    sizes.append(one.size)
        ratios = [width / height for width, height in sizes]
        if max(ratios) > 1.02 * min(ratios):
            mask, image = "×".join(map(str, sizes[0])), "×".join(map(str, sizes[-1]))
            raise HddmError(
                f"mask_image of {mask} pixels is cropped unlike image of {image}; crop both"
            )
    return is_open


class Pictures(Encoding):
    """What a pipeline does with pictures and its VAEs."""

    def picture(
        self, begin: Begin, expert: int, source: Conditions | None = None
    ) -> Picture | None:
        """What images begin with, in an expert's units, encoded by its VAE, and conditions that describe it.

        A latent is new if any of its pixels is. Raises `HddmError` for pictures that do not fit.
        """
        image, mask_image, strength = begin.image, begin.mask_image, begin.strength
        if image is None:
            return None
        if strength is None:
            strength = 0.8 if mask_image is None else 1.0
        record = self.experts.records[expert]
        part, shape, size = self.vae_of(expert), self._shape_of(expert), self.size_of(expert)
        if part is None and not record.makes_pictures and not isinstance(image, Tensor):
            raise HddmError(
                f"image: expert {expert} makes latents {shape} and has no VAE; {self._adding}, "
                "or pass latents"
            )
        channels = shape[0] if part is None else part.config.in_channels
        x_0 = pixels = pixels_of(image, channels, size)
        mask = pixel_mask = None if mask_image is None else mask_of(mask_image, image, size)
        if part is not None:
            with self.present(part) as vae:
                x_0 = latents_of(vae, pixels)
            if pixel_mask is not None:
                mask = adaptive_max_pool2d(pixel_mask.float(), shape[1:]) > 0
        return Picture(
            x_0.cpu(), strength, mask, begin.resampling_steps, pixels, pixel_mask, source
        )

    def images_of(self, how: Plan, batch: Batch, samples: Tensor) -> Tensor:
        """Images of a batch's samples (`decode`), in which its picture keeps its own pixels."""
        picture = how.picture(batch.kind)
        own = None if picture is None else picture.rows(batch.rows)
        return self.decode(samples, batch.kind, own)

    def decode(self, latents: Tensor, expert: int = 0, picture: Picture | None = None) -> Tensor:
        """Images (N, C, H, W) in [-1, 1] of an expert's samples: decoded by its VAE, or clipped pixels.

        Pixels that a ``picture`` keeps are its own.
        """
        part = self.vae_of(expert)
        if part is None:
            images = latents.float().clamp(-1, 1)
        else:
            with self.present(part) as vae:
                images = decode(vae, latents.to(vae.device))
        return images if picture is None else picture.kept_in(images)

    @property
    def image_size(self) -> tuple[int, int]:
        """Image height and width in pixels; of the first expert if they differ."""
        return self.size_of(0)

    def size_of(self, expert: int) -> tuple[int, int]:
        """Height and width in pixels of an expert's images."""
        factor, (_, height, width) = self.pixels_of(expert), self._shape_of(expert)
        return factor * height, factor * width

    def pixels_of(self, expert: int) -> int:
        """Pixels of an image to one side of an expert's samples."""
        vae = self.vae_of(expert)
        return 1 if vae is None else scale_of(vae)

    def _shape_of(self, expert: int) -> tuple[int, ...]:
        """Shape (C, H, W) of an expert's samples."""
        shape: tuple[int, ...] | None = self.ensemble.experts[expert].sample_shape
        assert shape is not None
        return shape
