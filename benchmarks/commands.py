"""Run a command in a process of its own, and say what it used: seconds, time of the processor and memory."""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import environment_of
from hddm.utils.errors import HddmError

# A small process between: a process that is started counts the memory of the one that starts it in its peak.
_BETWEEN = """
import json, os, subprocess, sys, time

def anonymous(pid):
    try:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("RssAnon"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0

began = time.perf_counter()
process = subprocess.Popen(sys.argv[2:])
ended, most = 0, 0
while not ended:
    most = max(most, anonymous(process.pid))
    time.sleep(0.01)
    ended, status, usage = os.wait4(process.pid, os.WNOHANG)
used = {
    "seconds": time.perf_counter() - began,
    "cpu": usage.ru_utime + usage.ru_stime,
    "peak": usage.ru_maxrss * 1024,
    "anonymous": most,
    "status": os.waitstatus_to_exitcode(status),
}
with open(sys.argv[1], "w") as file:
    json.dump(used, file)
"""


@dataclass(frozen=True)
class Used:
    """What a process used, and what it printed."""

    seconds: float
    """On the clock."""
    cpu: float
    """Of the processor, user and system."""
    peak: int
    """Bytes of memory at the peak, mapped files included."""
    anonymous: int
    """The most bytes that no file held, looked up every 10 ms; 0 where the system does not say."""
    status: int
    """Exit status of the command; below 0, the number of the signal that ended it."""
    said: str

    @property
    def figures(self) -> dict[str, float]:
        """All but what it printed, which may name places of this machine."""
        figures = asdict(self)
        del figures["said"]
        return figures


def used_by(
    *words: object,
    checkout: Path | None = None,
    threads: int | None = None,
    may_fail: bool = False,
) -> Used:
    """Run a command and measure it. It imports hddm from ``checkout``, and runs there.

    Without ``checkout`` it imports this checkout, and runs in the present folder. ``threads`` are OpenMP's;
    by default the environment decides. Raises `HddmError` for a status other than 0, unless it ``may_fail``;
    then its errors are not shown either.
    """
    if checkout is not None:
        # Python would look for a relative one from inside it.
        checkout = checkout.resolve()
    environment = environment_of(checkout or Path(__file__).parent.parent)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "used.json"
        between = [sys.executable, "-S", "-c", _BETWEEN, str(result), *map(str, words)]
        errors = subprocess.PIPE if may_fail else None
        run = subprocess.run(
            between, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=checkout
        )
        if run.returncode:
            raise HddmError(f"{' '.join(map(str, words))}: was not measured")
        used = Used(**json.loads(result.read_text()), said=run.stdout)
    if used.status and not may_fail:
        raise HddmError(f"{' '.join(map(str, words))}: ended with status {used.status}")
    return used
