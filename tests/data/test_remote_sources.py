"""Images at addresses: archives are streamed, and a partition of them is that of the same files here."""

import tarfile
from pathlib import Path

import pytest

from hddm.data.partition import partition
from hddm.data.shard_records import SHARD_FILE
from tests.artefacts import refusal


@pytest.mark.integration
def test_a_partition_of_archives_at_an_address_is_that_of_the_same_archives_here(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    monkeypatch.setenv("HDDM_CACHE", str(tmp_path / "cache"))
    # Less than all archives, so that they are fetched more than once.
    monkeypatch.setenv("HDDM_CACHE_SIZE", "0.05MB")
    tars = tmp_path / "tars"
    tars.mkdir()
    files = sorted(images.rglob("*.png"))
    for number in range(4):
        with tarfile.open(tars / f"{number}.tar", "w") as archive:
            for path in files[number::4]:
                archive.add(path, f"{path.parent.name}_{path.name}")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.put(str(tars), "/tars", recursive=True)
    here = partition(tars, tmp_path / "here", 2)
    there = partition("memory://tars", tmp_path / "there", 2)
    for one, other in zip(here, there, strict=True):
        assert (other / SHARD_FILE).read_bytes() == (one / SHARD_FILE).read_bytes()
    uploaded = partition("memory://tars", "memory://kept/shards", 2)
    assert [str(one) for one in uploaded] == [
        "memory://kept/shards/shard_0",
        "memory://kept/shards/shard_1",
    ]
    assert memory.exists("/kept/shards/partition.json")
    assert "is already a partition" in refusal(
        partition, "memory://kept/shards", tmp_path / "other", 2
    )
