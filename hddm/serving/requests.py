"""Requests of the images API, checked, and its errors.

The interface is that of OpenAI's ``POST /v1/images/generations``, so that its clients work unchanged; what it
has no word for (seed, steps, strategy, …) is named as by ``hddm sample``. A request holds numbers and texts
only: nothing in it is opened, imported or run.
"""

import secrets
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from hddm.sampling import KnownStrategy, SamplingSettings
from hddm.serving.answers import Refusal
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, one_line
from hddm.utils.records import parse_record

LARGEST_BODY = 1 << 16
"""Bytes of a request's body at most."""
LONGEST_PROMPT = 4000
SEEDS = 1 << 53
"""Seeds that are not given are below this, since JavaScript has no larger whole numbers."""


Prompt = Annotated[str, Field(max_length=LONGEST_PROMPT)]


class ImageRequest(SamplingSettings):
    """Body of a request for images.

    Image i of it is image ``start`` + i of ``hddm sample`` with the same settings.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    prompt: Prompt | None = None
    """A text, or the name of a class; None for any images."""
    model: str | None = None
    """The ensemble by default, or one of its experts; see ``GET /v1/models``."""
    n: Annotated[int, Field(ge=1)] = 1
    """Images to make."""
    size: Annotated[str, Field(pattern=r"^(auto|\d{1,5}x\d{1,5})$")] = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    output_format: Literal["png"] = "png"
    user: str | None = None
    """Without effect."""
    stream: bool = False
    """Tell the progress in server-sent events."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(default_factory=lambda: secrets.randbelow(SEEDS))
    start: Annotated[int, Field(ge=0, lt=1 << 62)] = 0
    strategy: Annotated[KnownStrategy, Field(max_length=40)] | None = None
    negative_prompt: Prompt | None = None


def read_request(body: bytes, most_images: int, most_steps: int) -> ImageRequest:
    """Check a body; raises a `Refusal` with status 400 that names the key, the value and what is known."""
    try:
        request = parse_record(parse_object(body, "request"), ImageRequest, "request")
    except HddmError as error:
        raise Refusal(400, error.message) from error
    refuse_more("n", request.n, most_images)
    refuse_more("steps", request.steps or 0, most_steps)
    return request


def refuse_more(name: str, value: int, most: int) -> None:
    """Raise a `Refusal` with status 400 where a number is beyond what a service makes."""
    if value > most:
        raise Refusal(400, f"{name} is {one_line(value, 30)}, and this service makes at most {most}", name)
