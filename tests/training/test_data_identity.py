"""Runs on encoded shards: what was encoded otherwise is not gone on with, though its images are the same."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hddm.data.encoding import encode_shards
from hddm.data.shards import open_shard
from hddm.training.continuation import continue_expert
from hddm.training.distill import distill
from hddm.training.expert import train_expert
from hddm.training.resume import encoding_of
from hddm.training.router import train_router
from hddm.training.settings import DistillSettings, RunOptions
from hddm.utils.errors import HddmError
from hddm.utils.settings import EncodingSettings
from tests.artefacts import expert_settings, router_settings
from tests.component_files import write_clip, write_vae
from tests.shard_files import noise, write_shard

Train = Callable[[Path, Path, RunOptions], object]


def _encode(source: Path, out: Path, **options: Any) -> Path:
    folders = {key: options.pop(key, None) for key in ("vae", "text_encoder", "tokenizer")}
    encode_shards(source, out, EncodingSettings(**options, **folders), overwrite=True)
    return out


@pytest.fixture
def trainings(ddpm_expert: Path, ensemble: Path) -> dict[str, Train]:
    """Each of one step, on an encoded partition."""
    tiny = {"steps": 1, "batch_size": 4, "size": "tiny", "condition_dropout": 0.0}
    one = expert_settings("flow", steps=1)
    return {
        "expert": lambda shards, out, run: train_expert(shards / "shard_0", out, one, run=run),
        "init": lambda shards, out, run: continue_expert(ddpm_expert, shards / "shard_0", out, one, run=run),
        "router": lambda shards, out, run: train_router(shards, out, router_settings(steps=1), run=run),
        "student": lambda shards, out, run: distill(ensemble, shards, out, DistillSettings(**tiny), run=run),
    }


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["expert", "init", "router", "student"])
def test_a_run_is_not_resumed_on_images_that_were_encoded_otherwise(
    kind: str, trainings: dict[str, Train], shards: Path, tmp_path: Path
) -> None:
    train, out, encoded = trainings[kind], tmp_path / "out", tmp_path / "encoded"
    _encode(shards, encoded)
    train(encoded, out, RunOptions())
    shutil.rmtree(out)
    _encode(shards, encoded, resolution=4, image_interpolation_mode="bicubic")
    with pytest.raises(HddmError, match="used other data, another") as refused:
        train(encoded, out, RunOptions(resume=True))
    found = "\n".join(refused.value.details)
    assert "data.encoding.resolution: was None, is 4" in found
    assert "data.encoding.interpolation: was None, is 'bicubic'" in found
    # An image of this side is not changed by it.
    assert "data.files" not in found
    _encode(shards, encoded)
    train(encoded, out, RunOptions(resume=True))
    assert out.is_dir()


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of 20 images with captions, VAEs and text encoders, and the shard encoded with one of each."""
    root = tmp_path_factory.mktemp("captioned")
    write_shard(root / "source", noise(20, 12, 15), captions=["cat"] * 20)
    for name in ("a", "b"):
        write_vae(root / f"vae_{name}", seed=ord(name))
        write_clip(root / f"text_{name}", tokens=8, seed=ord(name))
    _encode(root / "source", root / "encoded", **_options(root))
    return root


def _options(root: Path, vae: str = "a", text: str = "a", **changes: Any) -> dict[str, Any]:
    folders = {name: root / f"text_{text}" / name for name in ("text_encoder", "tokenizer")}
    return {"resolution": 8, "vae": root / f"vae_{vae}", **folders, **changes}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"dtype": "float32"}, "encoding"),
        ({"random_flip": True}, "encoding"),
        ({"vae": "b"}, "vae"),
        ({"text": "b"}, "text_encoder"),
    ],
)
def test_all_that_changes_what_is_encoded_is_recorded(
    changes: dict[str, Any], key: str, captioned: Path, tmp_path: Path
) -> None:
    one = open_shard(captioned / "encoded")
    other = open_shard(_encode(captioned / "source", tmp_path / "other", **_options(captioned, **changes)))
    assert one.hash == other.hash
    before, now = encoding_of([one.folder]), encoding_of([other.folder])
    assert {name for name in before if before[name] != now[name]} == {key, "files"}
    again = open_shard(_encode(captioned / "source", tmp_path / "again", **_options(captioned)))
    assert encoding_of([again.folder]) == before
    assert encoding_of([one.folder, other.folder])["files"] not in (before["files"], now["files"])


def test_images_that_were_skipped_are_recorded(tmp_path: Path) -> None:
    write_shard(tmp_path / "source", noise(20))
    assert encoding_of([tmp_path / "source"]) == {}
    whole = open_shard(_encode(tmp_path / "source", tmp_path / "whole"))
    (tmp_path / "source" / "images" / "003.png").write_bytes(b"no image")
    less = open_shard(_encode(tmp_path / "source", tmp_path / "less", max_bad=1))
    assert whole.hash == less.hash
    before, now = encoding_of([whole.folder]), encoding_of([less.folder])
    assert (before["rows"], now["rows"]) == (20, 19)
    assert {name for name in before if before[name] != now[name]} == {"rows", "files"}
