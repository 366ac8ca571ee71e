"""What tells apart two trainings on the same images: how these were encoded.

An encoded shard has the hash of the images that it was made from, by which experts and routers match. Crop,
VAE, text encoder, precision and images that could not be read change what is trained on, and not that hash.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from hddm.data.encoding_records import EncodedManifest, is_encoded, read_encoded_manifest
from hddm.data.shards import Shard


def encoding_of(shards: Sequence[Shard]) -> dict[str, Any]:
    """Plain values for the record of a run on ``shards``; none where they are images.

    ``encoding``, ``vae`` and ``text_encoder`` say how the first was made, ``rows`` counts the samples of all,
    and ``files`` is a SHA-256 of all that their data files hold.
    """
    manifests = [read_encoded_manifest(shard.folder) for shard in shards if is_encoded(shard.folder)]
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
