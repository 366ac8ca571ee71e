"""Errors that clients of a service get."""

from typing import Any

from hddm.utils.errors import HddmError, one_line


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
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.status,
            }
        }


def refuse_more(name: str, value: int, most: int) -> None:
    """Raise a `Refusal` with status 400 for a number above a limit."""
    if value > most:
        raise Refusal(
            400, f"{name} is {one_line(value, 30)}, and this service makes at most {most}", name
        )
