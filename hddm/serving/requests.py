"""What a request says: the JSON body of one for images, the form of one for changed images.

A form holds texts and pictures. These are decoded in memory, within bounds, by Pillow's decoders of common
formats; nothing in a request is opened as a file, imported or run.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from hddm.data.images import open_holes, open_image
from hddm.guidance import Interval
from hddm.pipelines.inputs import Begin
from hddm.serving.refusals import Refusal, refuse_more
from hddm.settings import Limits, SamplingMethod, StrategyName
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, one_line
from hddm.utils.records import Seed, Share, first_problem, parse_record
from hddm.utils.streams import NUMBERS

LONGEST_PROMPT = 4000
LARGEST_GUIDANCE = 1000
"""Guidance beyond this could overflow, and would look like damaged weights."""
MOST_REPEATS = 100
"""Repeats of a step inside a mask."""
LARGEST_PICTURE = 2**24
"""Pixels of an uploaded picture, 4096×4096."""
FIELDS = 100
"""Texts of a form."""
FORM = "multipart/form-data"
IMAGE, MASK = "image", "mask"
ARGUMENTS = {
    "mask_image": MASK,
    "init_image": IMAGE,
    "class_labels": "prompt",
    "height": "size",
    "width": "size",
}
"""Fields by the names of options and arguments that stand for them in messages."""
SEVERAL = "[]"
"""Ends the name of a field that has several values, as clients write lists."""

Prompt = Annotated[str, Field(max_length=LONGEST_PROMPT)]


def _size(text: str) -> str:
    """``text``, which says a size; whether experts make it, `hddm.serving.sizes` knows."""
    if re.fullmatch(r"auto|[0-9]{1,5}x[0-9]{1,5}", text) is None:
        raise HddmError("is no size; write WIDTHxHEIGHT, such as 64x64, or auto")
    return text


class ImageRequest(SamplingMethod):
    """Body of a request for images.

    Its image i is image ``start`` + i of ``hddm sample`` with the same settings.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    prompt: Prompt | None = None
    """A text, or the name of a class; None for any images."""
    model: str | None = None
    """The ensemble by default, or one of its experts; see ``GET /v1/models``."""
    n: Annotated[int, Field(ge=1)] = 1
    """Images to make."""
    size: Annotated[str, AfterValidator(_size)] = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    output_format: Literal["png"] = "png"
    user: str | None = None
    """Without effect."""
    seed: Seed = Field(default_factory=lambda: secrets.randbelow(NUMBERS))
    start: Seed = 0
    strategy: Annotated[StrategyName, Field(max_length=40)] | None = None
    guidance_scale: Annotated[float, Field(ge=-LARGEST_GUIDANCE, le=LARGEST_GUIDANCE)] = 1.0
    # A list of JSON is a pair, too.
    guidance_interval: Annotated[Interval, Field(strict=False)] = (0.0, 1.0)
    negative_prompt: Prompt | None = None


class EditRequest(ImageRequest):
    """Texts of a form for images that begin with a picture; as in ``hddm sample``."""

    model_config = ConfigDict(strict=False)

    strength: Share | None = None
    resampling_steps: Annotated[int, Field(ge=1, le=MOST_REPEATS)] | None = None
    edit_from: Prompt | None = None


@dataclass(frozen=True)
class Uploads:
    """Pictures of a form, encoded."""

    image: bytes
    mask: bytes | None = None

    def opened(self) -> tuple[Image.Image, Image.Image | None]:
        """The picture, and a mask that is white where it is to be new, None for all over.

        As OpenAI's API has it, fully transparent pixels are new: those of the mask, or without a mask those
        of the picture. A mask without transparency is white where the picture is new, as in ``hddm sample``.
        Raises a `Refusal` for damaged files, for pictures of more than `LARGEST_PICTURE` pixels, and for a
        mask that leaves all as it is.
        """
        image = _opened(open_image, IMAGE, self.image)
        if self.mask is None:
            holes = _opened(open_holes, IMAGE, self.image)
            return image, holes if _has_white(holes) else None
        holes = _opened(open_holes, MASK, self.mask)
        if holes is None:
            return image, _opened(open_image, MASK, self.mask)
        if not _has_white(holes):
            raise Refusal(
                400,
                "mask has no fully transparent pixel, so all would stay; erase what is to be new (or send a "
                "mask without transparency, white there)",
                MASK,
            )
        return image, holes


def _opened(read: Any, name: str, content: bytes) -> Any:
    """What ``read`` makes of an encoded picture."""
    try:
        return read(content, Path(name), LARGEST_PICTURE)
    except HddmError as error:
        raise Refusal(400, error.message, name) from error


def _has_white(mask: Image.Image | None) -> bool:
    return mask is not None and mask.getextrema()[1] == 255


def begin_of(wanted: ImageRequest, uploads: Uploads | None) -> Begin:
    """What the images of a request begin with; raises as `Uploads.opened` and `Begin`."""
    if not isinstance(wanted, EditRequest) or uploads is None:
        return Begin()
    image, mask = uploads.opened()
    return Begin(image, mask, wanted.strength, wanted.resampling_steps, wanted.edit_from)


def refusal_of(error: HddmError) -> Refusal:
    """The answer with status 400 to a request that caused an error: all that it says, and the field."""
    message, param = " ".join([error.message, *error.details]), None
    if isinstance(error.__cause__, ValidationError):
        place = first_problem(error.__cause__)["loc"]
        param = one_line(place[0], 100) if place else None
    return Refusal(400, message, param or _field_in(message))


def _field_in(message: str) -> str | None:
    """The field that a message begins with, else the first that it names as an option; None without one."""
    first = re.match(r"(?:request: )?`?(\w+)", message)
    named = [] if first is None else [first[1]]
    named += re.findall(r"`(\w+)", message)
    for name in named:
        field = ARGUMENTS.get(name, name)
        if field in EditRequest.model_fields or field in (IMAGE, MASK):
            return field
    return None


def read_request(body: bytes, limits: Limits) -> ImageRequest:
    """Parse a body; raises a `Refusal` with status 400 that names the key and the value."""
    try:
        request = parse_record(parse_object(body, "request"), ImageRequest, "request")
    except HddmError as error:
        raise refusal_of(error) from error
    _check_limits(request, limits)
    return request


def read_edit(headers: Headers, body: bytes, limits: Limits) -> tuple[EditRequest, Uploads]:
    """Parse a form with a picture; raises as `read_request`, and for one without a picture."""
    texts: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for key, value in _parts_of(headers, body):
        name = key.removesuffix(SEVERAL)
        if name in files or (name in texts and key == name):
            raise Refusal(400, f"request: {one_line(name, 100)} is there twice; send one", name)
        if isinstance(value, UploadFile):
            files[name] = value.file.read()
        elif key == name:
            texts[name] = value
        else:
            texts.setdefault(name, []).append(value)
    for name in files:
        if name not in (IMAGE, MASK):
            shown = one_line(name, 100)
            reason = f"request: no file is taken as {shown!r}; send {IMAGE}"
            raise Refusal(400, reason, shown)
    for name in (IMAGE, MASK):
        if name in texts:
            raise Refusal(400, f"{name} must be a file of the form, with a filename", name)
    if IMAGE not in files:
        raise Refusal(400, f"request: has no file {IMAGE}, the picture to begin with", IMAGE)
    try:
        request = parse_record(texts, EditRequest, "request")
    except HddmError as error:
        raise refusal_of(error) from error
    _check_limits(request, limits)
    return request, Uploads(files[IMAGE], files.get(MASK))


def _parts_of(headers: Headers, body: bytes) -> list[tuple[str, str | UploadFile]]:
    """Names and values of a form, all in memory."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise Refusal(400, f"send a form ({FORM}) with the picture as its file {IMAGE}")

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(headers, stream(), max_files=len((IMAGE, MASK)), max_fields=FIELDS)
    # Larger ones would go to a file.
    parser.spool_max_size = len(body) + 1
    try:
        return asyncio.run(parser.parse()).multi_items()
    except MultiPartException as error:
        raise Refusal(400, f"request: is not a whole form ({one_line(error.message)})") from error


def _check_limits(request: ImageRequest, limits: Limits) -> None:
    """Raise a `Refusal` for more images or steps than a request may have."""
    refuse_more("n", request.n, limits.max_images)
    refuse_more("steps", request.steps or 0, limits.max_steps)
