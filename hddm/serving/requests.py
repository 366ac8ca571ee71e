"""Requests of the images API, their checks, and refusals.

The interface is OpenAI's ``POST /v1/images/generations``, so that its clients work unchanged; further keys
(seed, steps, strategy, …) are named as in ``hddm sample``. A request holds numbers and texts only: nothing in
it is opened, imported or run.
"""

import secrets
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, one_line
from hddm.utils.records import Seed, parse_record
from hddm.utils.settings import Limits, SamplingSettings, StrategyName
from hddm.utils.streams import NUMBERS

LARGEST_BODY = 1 << 16
"""Bytes of a request's body at most."""
LONGEST_PROMPT = 4000
LARGEST_GUIDANCE = 1000
"""Guidance beyond this could overflow, and would look like damaged weights."""


Prompt = Annotated[str, Field(max_length=LONGEST_PROMPT)]


class Refusal(HddmError):
    """An error that a client gets: its HTTP status, and the parameter that caused it."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def __reduce__(self) -> Any:
        return type(self), (self.status, self.message, self.param)

    @property
    def body(self) -> dict[str, Any]:
        """The error as clients of the API read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


FAILED = Refusal(500, "the service failed; its log says why")


class ImageRequest(SamplingSettings):
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
    size: Annotated[str, Field(pattern=r"^(auto|\d{1,5}x\d{1,5})$")] = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    output_format: Literal["png"] = "png"
    user: str | None = None
    """Without effect."""
    stream: bool = False
    """Report the progress in server-sent events."""
    seed: Seed = Field(default_factory=lambda: secrets.randbelow(NUMBERS))
    start: Seed = 0
    strategy: Annotated[StrategyName, Field(max_length=40)] | None = None
    guidance_scale: Annotated[float, Field(ge=-LARGEST_GUIDANCE, le=LARGEST_GUIDANCE)] = 1.0
    negative_prompt: Prompt | None = None


def read_request(body: bytes, limits: Limits) -> ImageRequest:
    """Parse a body; raises a `Refusal` with status 400 that names the key and the value."""
    try:
        request = parse_record(parse_object(body, "request"), ImageRequest, "request")
    except HddmError as error:
        raise Refusal(400, error.message) from error
    refuse_more("n", request.n, limits.max_images)
    refuse_more("steps", request.steps or 0, limits.max_steps)
    return request


def refuse_more(name: str, value: int, most: int) -> None:
    """Raise a `Refusal` with status 400 for a number above a limit."""
    if value > most:
        raise Refusal(400, f"{name} is {one_line(value, 30)}, and this service makes at most {most}", name)
