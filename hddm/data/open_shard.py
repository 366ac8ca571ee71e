"""Any shard folder → what training reads."""

from pathlib import Path

from hddm.data.encoded_shards import load_encoded
from hddm.data.encoding_records import is_encoded
from hddm.data.shard_records import MANIFEST
from hddm.data.shards import Shard, load_shard


def open_shard(folder: Path) -> Shard:
    """The shard in ``folder``: of images, as `hddm partition` writes it, or encoded, as `hddm encode` does.

    Raises:
        HddmError: as `hddm.data.shards.load_shard` and `hddm.data.encoded_shards.load_encoded`; for a folder
            that is neither, with what it is.
    """
    if (folder / MANIFEST).is_file() and is_encoded(folder):
        return load_encoded(folder)
    return load_shard(folder)
