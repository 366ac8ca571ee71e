"""The images of a shard in columns: path, SHA-256, label and caption of each.

A million images take about 0.2 GB so, and would take several as objects. `ImageEntry` is one of them, made
when it is asked for.
"""

import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hddm.utils.records import Record, Sha256

PART = 65_536
"""Images that are handled at a time, and a row group of a table."""
LARGEST_CLASS = 2**31 - 1
NO_LABEL = -1


class ImageEntry(Record):
    """One image of a shard: its path inside the folder, its SHA-256 and its label."""

    file: str
    sha256: Sha256
    label: Annotated[int, Field(ge=0, le=LARGEST_CLASS)] | None
    caption: str | None = None


@dataclass(frozen=True, eq=False)
class Texts(Sequence[str]):
    """Texts (N,); text i is ``data[starts[i]:ends[i]]`` in UTF-8, decoded when it is asked for."""

    data: bytes | bytearray
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Texts":
        """Hold ``texts``; one at a time is in memory besides."""
        growing = GrowingTexts()
        for text in texts:
            growing.append(text)
        return growing.texts()

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, i: int) -> str: ...

    @overload
    def __getitem__(self, i: slice | NDArray[np.bool_ | np.int64]) -> "Texts": ...

    def __getitem__(self, i: int | slice | NDArray[np.bool_ | np.int64]) -> "str | Texts":
        if isinstance(i, slice | np.ndarray):
            return Texts(self.data, self.starts[i], self.ends[i])
        return self.data[self.starts[i] : self.ends[i]].decode()

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), PART):
            starts = self.starts[first : first + PART].tolist()
            ends = self.ends[first : first + PART].tolist()
            for start, end in zip(starts, ends, strict=True):
                yield self.data[start:end].decode()


class GrowingTexts:
    """Texts that are added one by one, to become `Texts`."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ends = array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, text: str) -> None:
        """Add a text."""
        self._data += text.encode()
        self._ends.append(len(self._data))

    def extend(self, texts: Texts) -> None:
        """Add all of ``texts``."""
        first = len(self._data)
        spans = zip(texts.starts.tolist(), texts.ends.tolist(), strict=True)
        self._data += b"".join(texts.data[start:end] for start, end in spans)
        ends = first + np.cumsum(texts.ends - texts.starts)
        self._ends.frombytes(ends.astype(np.int64).tobytes())

    def fill(self, number: int) -> None:
        """Add empty texts until there are ``number``."""
        missing = number - len(self._ends)
        self._ends.extend(itertools.repeat(len(self._data), missing))

    def texts(self) -> Texts:
        """All texts; none is added afterwards."""
        ends = np.frombuffer(self._ends, dtype=np.int64)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), ends])[:-1]
        return Texts(self._data, starts, ends)


@dataclass(frozen=True, eq=False)
class Entries(Sequence[ImageEntry]):
    """The images (N,) of a shard, in order.

    ``sha256`` (N, 32) are bytes, ``labels`` (N,) are `NO_LABEL` for an image without one, and ``captions``
    are empty where ``are_captioned`` (N,) is false.
    """

    files: Texts
    sha256: NDArray[np.uint8]
    labels: NDArray[np.int32]
    captions: Texts
    are_captioned: NDArray[np.bool_]

    @classmethod
    def of(cls, images: Iterable[ImageEntry]) -> "Entries":
        """Hold ``images`` in columns."""
        files: list[str] = []
        captions: list[str] = []
        are_captioned: list[bool] = []
        labels: list[int] = []
        digests = bytearray()
        for one in images:
            files.append(one.file)
            digests += bytes.fromhex(one.sha256)
            labels.append(NO_LABEL if one.label is None else one.label)
            captions.append(one.caption or "")
            are_captioned.append(one.caption is not None)
        return cls(
            Texts.of(files),
            np.frombuffer(bytes(digests), dtype=np.uint8).reshape(-1, 32),
            np.array(labels, dtype=np.int32),
            Texts.of(captions),
            np.array(are_captioned, dtype=np.bool_),
        )

    @classmethod
    def joined(cls, parts: Iterable["Entries"]) -> "Entries":
        """The images of all ``parts``, one after the other; no more than one part is in memory twice."""
        files, captions = GrowingTexts(), GrowingTexts()
        digests, labels, are_captioned = bytearray(), bytearray(), bytearray()
        for part in parts:
            files.extend(part.files)
            digests += part.sha256.tobytes()
            labels += part.labels.tobytes()
            captions.extend(part.captions)
            are_captioned += part.are_captioned.tobytes()
        return cls(
            files.texts(),
            np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32),
            np.frombuffer(labels, dtype=np.int32),
            captions.texts(),
            np.frombuffer(are_captioned, dtype=np.bool_),
        )

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, i: int) -> ImageEntry: ...

    @overload
    def __getitem__(self, i: slice | NDArray[np.bool_]) -> "Entries": ...

    def __getitem__(self, i: int | slice | NDArray[np.bool_]) -> "ImageEntry | Entries":
        if isinstance(i, slice | np.ndarray):
            return Entries(
                self.files[i],
                self.sha256[i],
                self.labels[i],
                self.captions[i],
                self.are_captioned[i],
            )
        label = int(self.labels[i])
        return ImageEntry.model_construct(
            file=self.files[i],
            sha256=self.sha256[i].tobytes().hex(),
            label=None if label == NO_LABEL else label,
            caption=self.captions[i] if self.are_captioned[i] else None,
        )

    def __iter__(self) -> Iterator[ImageEntry]:
        for part in self.parts():
            for file, sha256, label, caption in part.values():
                yield ImageEntry.model_construct(
                    file=file, sha256=sha256, label=label, caption=caption
                )

    def parts(self) -> Iterator["Entries"]:
        """The images, `PART` at a time."""
        for first in range(0, len(self), PART):
            yield self[first : first + PART]

    def values(self) -> Iterator[tuple[str, str, int | None, str | None]]:
        """The fields of each image, in the order of `ImageEntry`."""
        columns = (
            self.files,
            self.hashes(),
            self.labels.tolist(),
            self.captions,
            self.are_captioned.tolist(),
        )
        for file, sha256, label, caption, is_captioned in zip(*columns, strict=True):
            yield (
                file,
                sha256,
                None if label == NO_LABEL else label,
                caption if is_captioned else None,
            )

    def hashes(self) -> Iterator[str]:
        """The SHA-256 of each image, in hexadecimal digits."""
        for first in range(0, len(self), PART):
            digits = self.sha256[first : first + PART].tobytes().hex()
            for start in range(0, len(digits), 64):
                yield digits[start : start + 64]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In JSON a list of `ImageEntry`."""
        listed = handler.generate_schema(list[ImageEntry])
        return core_schema.no_info_wrap_validator_function(
            lambda value, read: value if isinstance(value, cls) else cls.of(read(value)),
            listed,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda entries: [one.model_dump() for one in entries]
            ),
        )


def in_parts(images: Iterable[ImageEntry]) -> Iterator[Entries]:
    """Hold ``images`` in columns, `PART` at a time."""
    left = iter(images)
    while part := Entries.of(itertools.islice(left, PART)):
        yield part


class ShardHash:
    """SHA-256 of a shard's classes, and of its files, contents, labels and captions, part by part."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._digest = hashlib.sha256(json.dumps(list(classes)).encode())

    def update(self, part: Entries) -> None:
        """Add the images that come next."""
        lines: list[str] = []
        for file, sha256, label, caption in part.values():
            text = "" if caption is None else f" {json.dumps(caption)}"
            lines.append(f"\n{file} {sha256} {label}{text}")
        self._digest.update("".join(lines).encode())

    def hexdigest(self) -> str:
        """The hash of all images so far."""
        return self._digest.hexdigest()


def shard_hash(entries: Entries, classes: Sequence[str]) -> str:
    """SHA-256 of a shard's files, contents, labels and captions."""
    digest = ShardHash(classes)
    for part in entries.parts():
        digest.update(part)
    return digest.hexdigest()
