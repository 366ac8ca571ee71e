"""Any shard folder → what training reads."""

from pathlib import Path

from hddm.data.shards import Shard, load_shard


def open_shard(folder: Path) -> Shard:
    """The shard in ``folder``.

    Raises:
        HddmError: as `hddm.data.shards.load_shard`.
    """
    return load_shard(folder)
