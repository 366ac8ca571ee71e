"""What answers at an address: requests to ``hddm serve``, which ComfyUI's *Cancel* ends."""

import contextlib
import http.client
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any
from urllib.parse import urlsplit

from hddm.utils.errors import HddmError

logger = logging.getLogger(__name__)

LIMIT = 3600.0
"""Seconds to wait for an answer."""
TO_CONNECT = 10.0
"""Seconds to wait for a connection."""
BEAT, SELDOM = 0.2, 20.0
"""Seconds between looks for *Cancel*, and between lines that say how long it has taken."""
EXAMPLE = "http://127.0.0.1:8000"


class Service:
    """An ``hddm serve`` at an address: with or without ``http://`` in front and ``/v1`` behind.

    A service with a token gets the one of the environment variable ``HDDM_TOKEN``. A widget would write it
    into every picture, as ComfyUI saves workflows in them. It goes to this machine, and to the address in
    ``HDDM_ADDRESS``, and nowhere else: an address in a workflow may be that of a stranger.

    Raises:
        HddmError: for a text that is no address.
    """

    def __init__(self, address: str) -> None:
        text = address.strip()
        if "://" not in text:
            text = f"http://{text}"
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme not in ("http", "https"):
            raise HddmError(
                f"address {address!r}: it must say where hddm serve listens, such as {EXAMPLE}"
            )
        self._host, self._port = host, port
        self._path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        self.address = f"{parts.scheme}://{parts.netloc}{self._path}"
        own = os.environ.get("HDDM_ADDRESS", "").strip()
        own = own if "://" in own else f"http://{own}"
        known = urlsplit(own)
        is_own = (known.scheme, known.netloc) == (parts.scheme, parts.netloc)
        self._is_trusted = is_own or host in ("127.0.0.1", "localhost", "::1")
        self._is_encrypted = parts.scheme == "https"

    def model(self, expert: str) -> str:
        """The name by which the service knows an expert, given by that, its own name or its number.

        Raises:
            HddmError: for another name, with those that there are.
        """
        listed = self.request("GET", "/v1/models")
        try:
            names = [str(one["id"]) for one in listed["data"]]
        except (KeyError, TypeError) as error:
            raise HddmError(
                f"{self.address}: its list of models is not one of an hddm serve"
            ) from error
        experts = [name for name in names if "/" in name]
        wanted = expert.strip()
        if wanted in names:
            return wanted
        named = [name for name in experts if name.partition("/")[2] == wanted]
        if named:
            return named[0]
        if wanted.isdecimal() and int(wanted) < len(experts):
            return experts[int(wanted)]
        short = [name.partition("/")[2] for name in experts]
        raise HddmError(
            f"expert {expert!r}: the service at {self.address} has {', '.join(short)}; leave it empty for all"
        )

    def request(self, method: str, path: str, body: bytes = b"", kind: str = "") -> Any:
        """The answer, parsed; refusals and a missing service are an `HddmError` with the remedy."""
        headers = {"Content-Type": kind} if kind else {}
        token = os.environ.get("HDDM_TOKEN", "").strip()
        is_sent = bool(token) and self._is_trusted
        if is_sent:
            headers["Authorization"] = f"Bearer {token}"
        connect = http.client.HTTPSConnection if self._is_encrypted else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=TO_CONNECT)
        is_cancelled = threading.Event()

        def exchange() -> tuple[int, bytes]:
            connection.connect()
            if is_cancelled.is_set():
                raise OSError("cancelled")
            connection.sock.settimeout(LIMIT)
            connection.request(method, f"{self._path}{path}", body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

        try:
            status, content = _unless_cancelled(exchange, self.address)
        except (OSError, http.client.HTTPException) as error:
            raise HddmError(
                f"{self.address}: no answer of an hddm serve ({error}); start one with: hddm serve ENSEMBLE"
            ) from error
        finally:
            is_cancelled.set()
            # A read that waits in another thread ends with its socket.
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
        answer = _parsed(content)
        if status != http.client.OK or answer is None:
            raise HddmError(f"{self.address}: {_reason(status, answer, is_sent, bool(token))}")
        return answer


def _unless_cancelled(exchange: Callable[[], tuple[int, bytes]], address: str) -> tuple[int, bytes]:
    """What ``exchange`` returns; ComfyUI's own exception once its user cancels."""
    found: Future[tuple[int, bytes]] = Future()

    def run() -> None:
        try:
            found.set_result(exchange())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True, name="waits for hddm serve").start()
    begun = spoken = time.monotonic()
    while not wait([found], BEAT).done:
        _stop_if_cancelled()
        now = time.monotonic()
        if now - spoken >= SELDOM:
            spoken = now
            logger.info("hddm: %s has not answered for %.0f s", address, now - begun)
    return found.result()


def _stop_if_cancelled() -> None:
    # ComfyUI's own module, where this runs inside of it.
    management = sys.modules.get("comfy.model_management")
    if management is not None:
        management.throw_exception_if_processing_interrupted()


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _reason(status: int, answer: Any, is_sent: bool, has_token: bool) -> str:
    """The service's own words if it said any, in those of someone who uses ComfyUI."""
    if status == http.client.UNAUTHORIZED and has_token and not is_sent:
        return (
            "it wants a token, and HDDM_TOKEN goes to this machine alone; start ComfyUI with this address in "
            "HDDM_ADDRESS as well"
        )
    if status == http.client.UNAUTHORIZED and has_token:
        return "its token is another one; start ComfyUI with the service's token in HDDM_TOKEN"
    if status == http.client.UNAUTHORIZED:
        return "it wants a token; start ComfyUI with the service's token in the variable HDDM_TOKEN"
    try:
        return str(answer["error"]["message"])
    except (KeyError, TypeError):
        return f"status {status}, which is no answer of an hddm serve; is something else there?"
