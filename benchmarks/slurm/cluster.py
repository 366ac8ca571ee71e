"""A Slurm cluster of this machine alone: its daemons, in a folder of their own, and questions to it."""

import contextlib
import getpass
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from hddm.utils.errors import HddmError

DAEMONS = ("munged", "slurmctld", "slurmd")
GRACE = 30
"""Seconds that a job has to end after it is pre-empted."""
KILL_WAIT = 10
"""Seconds between SIGTERM and SIGKILL for a job that is cancelled, requeued or out of time."""

# Without systemd and cgroups, as in a container. Two experts run at once, whatever the number of cores.
CONFIG = """\
ClusterName=hddm
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait}
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=low Nodes={host} Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes={host} State=UP PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """Block in which a cluster runs, with its files in ``folder``; `environment` lets commands find it.

    Partition ``low`` is pre-empted by ``high``; the node has two CPUs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Slurm":
        missing = [name for name in (*DAEMONS, "sbatch") if shutil.which(name) is None]
        if missing:
            text = "install the packages slurmctld, slurmd, slurm-client and munge"
            raise HddmError(f"{', '.join(missing)}: not on PATH; {text}")
        folder, host = self.folder, platform.node().partition(".")[0]
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o700)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        values = {
            "host": host,
            "user": getpass.getuser(),
            "folder": folder,
            "ports": _free_ports(2),
        }
        text = CONFIG.format(**values, grace=GRACE, kill_wait=KILL_WAIT)
        (folder / "slurm.conf").write_text(text)
        places = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in _MUNGE]
        try:
            # Root may otherwise not use a folder that belongs to another user.
            self._start("munged", "--foreground", "--force", *places)
            self._until(lambda: (folder / "munge.socket").exists(), "munged")
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D")
            self._until(lambda: "idle" in self.said("sinfo", "-h", "-o", "%T"), "slurmd")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *ended: object) -> None:
        # Jobs would live on without their daemons.
        self.said("scancel", "--user", getpass.getuser())
        end = time.monotonic() + 2 * KILL_WAIT
        while time.monotonic() < end and self.said("squeue", "-h", "-t", "running,completing"):
            time.sleep(0.5)
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def said(self, *words: str) -> str:
        """Run a command and return what it printed, without failing."""
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False
        ).stdout.strip()

    def submit(self, folder: Path, *words: str | Path, path: str = "") -> str:
        """Submit a job in ``folder``, and return its number; ``path`` precedes PATH."""
        environment = self.environment | {"PATH": f"{path}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["sbatch", "--parsable", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise HddmError(f"sbatch: {done.stderr.strip()}")
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job or of one task of an array, as JOB_TASK; {} before it is there."""
        line = self.said("scontrol", "show", "job", "-o", job)
        return dict(re.findall(r"(\w+)=(\S*)", line.partition("\n")[0]))

    def state(self, job: str) -> str:
        return self.show(job).get("JobState", "")

    def restarts(self, job: str) -> int:
        return int(self.show(job).get("Restarts", "0"))

    def release(self, job: str) -> None:
        """Start a requeued job soon, for which Slurm waits two minutes; give it an hour.

        Not at once: a node refuses a job whose former life ended in the same second.
        """
        found = self.show(job)
        # The time is unknown for a moment.
        if found.get("Reason") != "BeginTime" or found["StartTime"] == "Unknown":
            return
        wait = datetime.fromisoformat(found["StartTime"]) - datetime.now()
        if wait > timedelta(seconds=5):
            self.update(job, "StartTime=now+3", "TimeLimit=60")

    def update(self, job: str, *values: str) -> None:
        self.said("scontrol", "update", f"jobid={job}", *values)

    def processes(self, job: str) -> list[int]:
        """Return the processes of the steps that srun has started for a job."""
        found: list[int] = []
        number = self.show(job).get("JobId", "")
        for line in self.said("scontrol", "listpids", number).splitlines()[1:]:
            process, _, step, task, *_ = line.split()
            # Not of the batch script, and not Slurm's own.
            if step.isdigit() and task.isdigit():
                found.append(int(process))
        return found

    def _start(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.log").open("ab") as log:
            # In a group of their own, so that Ctrl-C reaches them by `__exit__` alone.
            self._processes.append(
                subprocess.Popen(
                    words,
                    env=self.environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _until(self, is_true: Callable[[], bool], name: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not is_true():
            ended = [one for one in self._processes if one.poll() is not None]
            if time.monotonic() > end or ended:
                raise HddmError(
                    f"{self.folder / name}.log: {name} did not start, or another daemon ended"
                )
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


_MUNGE = ("socket", "key-file", "pid-file", "log-file", "seed-file")
