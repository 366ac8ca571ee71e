"""What a run records of the data that it is on; known from the shards' manifests alone.

An encoded shard has the hash of the images that it was made from, by which experts and routers match. Crop,
VAE, text encoder, precision and images that could not be read change what is trained on, and not that hash.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hddm.data.encoding_records import EncodedManifest, is_encoded, read_encoded_manifest
from hddm.data.shard_records import MANIFEST, read_manifest


def expert_data(shard: Path, schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values for the record of an expert on the shard in a folder, with `Schedule.config`.

    Raises:
        HddmError: as `hddm.data.shard_records.read_manifest`.
    """
    return {"shard": hash_of(shard), **encoding_of([shard]), "schedule": dict(schedule)}


def data_of(shards: Sequence[Path]) -> dict[str, Any]:
    """Plain values for the record of a run on the shards in all these folders; raises as `expert_data`."""
    return {"shards": [hash_of(shard) for shard in shards], **encoding_of(shards)}


def hash_of(shard: Path) -> str:
    """The hash by which experts and routers know the shard in a folder; raises as `expert_data`."""
    if (shard / MANIFEST).is_file() and is_encoded(shard):
        return read_encoded_manifest(shard).hash
    return read_manifest(shard).hash


def encoding_of(shards: Sequence[Path]) -> dict[str, Any]:
    """Plain values for the record of a run on the shards in these folders; none where they are images.

    ``encoding``, ``vae`` and ``text_encoder`` say how the first was made, ``rows`` counts the samples of all,
    and ``files`` is a SHA-256 of all that their data files hold.
    """
    manifests = [read_encoded_manifest(shard) for shard in shards if is_encoded(shard)]
    if not manifests:
        return {}
    first = manifests[0]
    return {
        "encoding": first.encoding.model_dump(mode="json"),
        "vae": first.vae and first.vae.model_dump(mode="json"),
        "text_encoder": first.text_encoder and first.text_encoder.model_dump(mode="json"),
        "rows": sum(one.num_rows for one in manifests),
        "files": hashlib.sha256("\n".join(map(_content, manifests)).encode()).hexdigest(),
    }


def _content(manifest: EncodedManifest) -> str:
    files = [*manifest.data, *([manifest.null] if manifest.null else [])]
    return " ".join([*(one.sha256 for one in files), *(one.file for one in manifest.skipped)])
