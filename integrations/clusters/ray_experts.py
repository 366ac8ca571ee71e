"""Train an expert on each shard, as tasks of a Ray cluster: python ray_experts.py SHARDS OUT RUN_FILE.

Every node needs hddm, and sees these paths. A task whose node is lost starts again on another one, and
continues from the last checkpoint; so does one that a signal has stopped.
"""

import subprocess
import sys
from pathlib import Path

import ray

SAVED = (138, 143)
"""Exit codes of hddm after SIGUSR1 and SIGTERM, with the training saved."""


class Preempted(Exception):
    """The training was stopped, and is to continue."""


# On a cluster with GPUs: num_gpus=1.
@ray.remote(num_cpus=1, max_retries=10, retry_exceptions=[Preempted])
def expert(shard: str, out: str, config: str) -> str:
    """Train one expert, or continue its training."""
    command = ["hddm", "train", "expert", shard, "--out", out, "--config", config, "--resume"]
    code = subprocess.run(command).returncode
    if code in SAVED:
        raise Preempted(out)
    if code:
        raise RuntimeError(f"{out}: hddm ended with exit code {code}")
    return out


if __name__ == "__main__":
    shards, outs, config = map(Path, sys.argv[1:])
    ray.init()
    tasks = []
    for shard in sorted(shards.absolute().glob("shard_*")):
        out = outs.absolute() / shard.name.replace("shard", "expert")
        tasks.append(expert.remote(str(shard), str(out), str(config.absolute())))
    for out in ray.get(tasks):
        print(out)
