"""A headless Chromium, asked over the DevTools protocol through a pair of pipes."""

import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_SWITCHES = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--no-first-run",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
    ),
    *("--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    "--disable-component-update",
)
_PATIENCE = 60.0
# The browser reads commands from descriptor 3 and writes answers to 4.
_FREE_DESCRIPTOR = 10


class Browser:
    """One page, what it logged and what it asked the network for.

    Args:
        profile: an empty folder for what the browser keeps.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self.complaints: list[str] = []
        """Console errors and warnings, exceptions, and what the browser itself logged."""
        self.requests: list[str] = []
        """Addresses that were asked for, without data within the page."""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self._rest = b""
        ends = [_moved(end) for end in (*os.pipe(), *os.pipe())]
        theirs, self._commands, self._answers, answering = ends
        quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, theirs, 3), (os.POSIX_SPAWN_DUP2, answering, 4)]
        arguments = [CHROMIUM, *_SWITCHES, f"--user-data-dir={profile}", "about:blank"]
        self._process = os.posix_spawn(
            CHROMIUM, arguments, os.environ, file_actions=[*quiet, *pipes]
        )
        os.close(theirs)
        os.close(answering)

    def __enter__(self) -> "Browser":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            # Killed, it would leave processes behind that write into the profile.
            self._session = None
            self.call("Browser.close")
        else:
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """The answer to a command."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                found: dict[str, Any] = answer["result"]
                return found
            self._note(answer)

    def open(self, page: Path | str, width: int, height: int = 900) -> None:
        """Load a file or an address in a window of this size, as a phone's up to 600 pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width <= 600)
        self._events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._note(self._read())

    def evaluate(self, expression: str) -> Any:
        """The plain value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def _note(self, event: Mapping[str, Any]) -> None:
        self._events.append(dict(event))
        given = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.complaints.append(f"{given['type']}: {given['args']}")
            case "Runtime.exceptionThrown":
                self.complaints.append(str(given["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(str(given["entry"]))
            case "Network.requestWillBeSent" if not given["request"]["url"].startswith("data:"):
                self.requests.append(given["request"]["url"])

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            part = os.read(self._answers, 1 << 16) if ready else b""
            assert part, "the browser ended, or said nothing for a minute"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


def _moved(descriptor: int) -> int:
    """The same pipe at a descriptor that is not one of the browser's."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FREE_DESCRIPTOR)
    os.close(descriptor)
    return moved
