"""Wall time and memory of a command, sampled from outside while it runs."""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.01


@dataclass(frozen=True)
class Measured:
    """What a command took.

    ``anonymous`` is the peak of memory that is the process's own (RssAnon), ``total`` that of all resident
    pages, in which pages of mapped files count although the kernel may drop them; both in bytes. (What wait4
    gives as the maximum counts the parent before the fork.)
    """

    seconds: float
    cpu_seconds: float
    anonymous: int
    total: int


def run_measured(command: Sequence[str]) -> Measured:
    """Run ``command`` to its end.

    Raises:
        RuntimeError: where it fails; its output is in the message.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    status = Path(f"/proc/{process.pid}/status")
    anonymous = total = 0
    while True:
        pid, code, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        found = _resident(status)
        anonymous, total = max(anonymous, found[0]), max(total, found[1])
        time.sleep(INTERVAL)
    seconds = time.perf_counter() - began
    assert process.stdout is not None
    output = process.stdout.read()
    process.stdout.close()
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {process.returncode}\n{output}")
    return Measured(seconds, usage.ru_utime + usage.ru_stime, anonymous, total)


def _resident(status: Path) -> tuple[int, int]:
    try:
        lines = [line.split() for line in status.read_text().splitlines()]
    except OSError:
        return 0, 0
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "VmRSS:")}
    return sizes.get("RssAnon:", 0), sizes.get("VmRSS:", 0)
