"""Whether there is nothing left to do of a training that is gone on with, by records alone.

Its data is not opened, and neither torch nor a network is imported. What the records alone cannot tell, as of
an expert that began as another one, is left to the training itself (`hddm.training.runs.train`).
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hddm.data.shard_records import find_shards
from hddm.files import sha256_of
from hddm.manifest import refuse_damaged
from hddm.record_names import EXPERT_FILE, ROUTER_FILE
from hddm.training.data_identity import data_of, expert_data
from hddm.training.run_records import as_recorded, compare_records, recorded
from hddm.training.settings import ExpertSettings, LoopSettings, RouterSettings, RunOptions

NOTHING_LEFT = "%s: is finished; there is nothing to go on with"
# `Schedule.config` of each objective's own schedule.
_SCHEDULES = {"ddpm": {"name": "cosine"}, "flow": {"name": "linear"}}

log = logging.getLogger(__name__)


def expert_is_finished(
    shard: Path, out: Path, settings: ExpertSettings, run: RunOptions, overwrite: bool = False
) -> bool:
    """Whether an expert with its objective's own schedule, begun with random weights, is finished.

    Raises:
        HddmError: for a shard that cannot be read, and a run that was started otherwise.
    """
    data = lambda: expert_data(shard, _SCHEDULES[settings.objective])  # noqa: E731
    return _is_finished(out, EXPERT_FILE, settings, run, overwrite, data)


def router_is_finished(
    shards: Path, out: Path, settings: RouterSettings, run: RunOptions, overwrite: bool = False
) -> bool:
    """Whether a router is finished; raises as `expert_is_finished`."""
    return _is_finished(out, ROUTER_FILE, settings, run, overwrite, lambda: data_of(find_shards(shards)))


def refuse_spoilt(out: Path, record: str) -> None:
    """Hash every file of the finished folder ``out``, and refuse one that is not what was written.

    Raises:
        HddmError: with a line a file.
    """
    refuse_damaged(out, record, sha256=sha256_of, remedy="--overwrite trains it anew")


def _is_finished(
    out: Path,
    record: str,
    settings: LoopSettings,
    run: RunOptions,
    overwrite: bool,
    data: Callable[[], dict[str, Any]],
) -> bool:
    if overwrite or not run.resume or not (out / record).exists():
        return False
    before, used = recorded(out), as_recorded(settings, out)
    if not before or used.threads is None or used.warmup is None:
        return False
    now = {"settings": used.model_dump(mode="json"), "data": data()}
    # Nothing is computed any more, wherever this is.
    compare_records(out, {**now, "environment": before.get("environment", {})}, run)
    refuse_spoilt(out, record)
    log.info(NOTHING_LEFT, out)
    return True
