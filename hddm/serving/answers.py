"""What the service answers instead of images: refusals, and errors of the proxy around it."""

from typing import Any

from hddm.utils.errors import HddmError


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


class Answering:
    """Middleware of Ray Serve's proxy: refuses WebSockets, and turns Ray's errors into the API's."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import JSONResponse

        is_answered, refusal = scope["type"] == "lifespan", FAILED

        async def answer(message: Any) -> None:
            nonlocal is_answered, refusal
            if message["type"] == "http.response.start":
                # If the front died, Ray sends a text, or nothing.
                is_json = b"json" in dict(message["headers"]).get(b"content-type", b"")
                is_answered = is_json or message["status"] < 500
                # The status stays: after 503 a client may try again.
                refusal = Refusal(message["status"], FAILED.message)
            if is_answered:
                await send(message)

        if scope["type"] == "websocket":
            refusal = Refusal(400, "this service speaks HTTP, and no WebSocket")
        else:
            await self._app(scope, receive, answer)
        if not is_answered:
            await JSONResponse(refusal.body, refusal.status)(scope, receive, send)


def middlewares() -> list[Any]:
    """Middlewares of Ray Serve's proxy."""
    from starlette.middleware import Middleware

    return [Middleware(Answering)]
