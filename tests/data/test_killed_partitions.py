"""Partitions and encodings that are killed at any moment, and go on to the bytes of an uninterrupted run."""

import multiprocessing
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hddm.data import division as writing
from hddm.data import entries, shard_records
from hddm.data import partition as dividing
from hddm.data.features import compute_features
from hddm.data.partition import partition
from hddm.data.shard_records import find_held_out, find_shards
from hddm.data.shards import open_shard
from tests.artefacts import contents, copied, killing, refusal, write_images
from tests.component_files import write_vae
from tests.data.test_sources import write_tar
from tests.shard_files import encode, write_partition

SHARDS, SHARE = 2, 0.4
# Forked, a process has no libraries to import: that would take longer than all else.
CONTEXT = multiprocessing.get_context("fork")
LAUNCHES = 6
"""Runs that are killed before one may end, in tests of random moments."""


@pytest.fixture(autouse=True)
def _short() -> Iterator[None]:
    """Features, images and tables in small parts, so that a kill finds some done and some not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dividing, "compute_features", partial(compute_features, part=16))
        patched.setattr(dividing, "WRITTEN", 7)
        patched.setattr(writing, "WRITTEN", 7)
        patched.setattr(shard_records, "LARGEST_LIST", 18)
        patched.setattr(entries, "PART", 5)
        patched.setattr(writing, "PART", 5)
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same images in class folders, which are linked, and in a tar with captions, which are copied."""
    root = tmp_path_factory.mktemp("sources")
    folder = write_images(root / "folder", 40)
    files: dict[str, bytes] = {}
    for number, path in enumerate(sorted(folder.rglob("*.png"))):
        files[f"{number:04d}.png"] = path.read_bytes()
        files[f"{number:04d}.txt"] = f"picture {number}".encode()
    return {"folder": folder, "tar": write_tar(root / "a.tar", files)}


def _divide(
    source: Path, out: Path, cache: Path | None, moment: tuple[str, str] | None = None
) -> None:
    if moment is not None:
        sys.addaudithook(killing(*moment))
    partition(source, out, SHARDS, held_out=SHARE, cache=cache)


def _killed(call: Callable[..., object], *arguments: Any) -> None:
    """Run ``call`` in a process, which kills itself."""
    process = CONTEXT.Process(target=call, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


# In the middle of features, of images, and when all is written.
MOMENTS = {
    "folder": [
        ("os.rename", "part_00002.safetensors"),
        ("os.link", "whole/shard_1"),
        ("os.rename", ".out.partition/whole"),
    ],
    "tar": [
        ("os.rename", "part_00002.safetensors"),
        ("open", "images/0050.png"),
        ("os.rename", ".out.partition/whole"),
    ],
}


@pytest.mark.parametrize(("kind", "has_cache"), [("folder", True), ("tar", False)])
def test_a_partition_that_is_killed_goes_on_to_the_same_bytes(
    kind: str, has_cache: bool, sources: dict[str, Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache" if has_cache else None
    _divide(sources[kind], tmp_path / "whole", None)
    out = tmp_path / "out"
    numbers: list[int] = []
    for moment in MOMENTS[kind]:
        _killed(_divide, sources[kind], out, cache, moment)
        assert not out.exists()
        numbers.append(len(list((tmp_path / ".out.partition" / "parts").rglob("*.done.json"))))
    assert numbers[0] == 0 < numbers[1] < numbers[2]
    _divide(sources[kind], out, cache)
    assert contents(out) == contents(tmp_path / "whole")
    names = {"whole", "out", "cache"} if has_cache else {"whole", "out"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for folder in [*find_shards(out), *find_held_out(out)]:
        open_shard(folder)


def test_images_that_are_written_are_not_written_again(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    _killed(_divide, sources["tar"], out, tmp_path / "cache", ("open", "report.html"))
    kept = sorted((tmp_path / ".out.partition" / "whole").rglob("*.png"))
    numbers = {path.name: path.stat().st_ino for path in kept if "images" in path.parts}
    assert len(numbers) == 80
    _divide(sources["tar"], out, tmp_path / "cache")
    again = [path for path in out.rglob("*.png") if "images" in path.parts]
    assert {path.name: path.stat().st_ino for path in again} == numbers


def test_an_unfinished_partition_of_other_options_is_named(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    _killed(_divide, sources["folder"], out, cache, ("open", "report.html"))
    told = refusal(partition, sources["folder"], out, 1, cache=cache)
    assert f"{out}: {tmp_path / '.out.partition'} holds an unfinished partition of other" in told
    assert any(line.startswith("  sizes: was [") for line in told.splitlines())
    partition(sources["folder"], out, 1, cache=cache, overwrite=True)
    partition(sources["folder"], tmp_path / "whole", 1)
    assert contents(out) == contents(tmp_path / "whole")


def test_an_image_that_changes_while_shards_are_written_leaves_no_draft(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    images, out = copied(sources["folder"], tmp_path / "copy"), tmp_path / "out"
    cache = tmp_path / "cache"
    _killed(_divide, images, out, cache, ("open", "report.html"))
    shutil.rmtree(tmp_path / ".out.partition" / "parts" / "held_out")
    for path in images.rglob("*.png"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-1] + b"\0")
    told = refusal(_divide, images, out, cache)
    assert f"changed since its features were computed; remove {cache}" in told
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "cache"}


def _killed_at_random(call: Callable[[], object], out: Path, seed: int) -> int:
    """Start ``call`` again and again, killed at random moments but for the last; returns the kills."""
    draws = random.Random(seed)
    began = time.monotonic()
    call_once = CONTEXT.Process(target=call)
    call_once.start()
    call_once.join()
    longest = time.monotonic() - began
    assert call_once.exitcode == 0
    shutil.rmtree(out)
    kills = 0
    for _ in range(LAUNCHES):
        process = CONTEXT.Process(target=call)
        process.start()
        time.sleep(draws.uniform(0, longest))
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills += 1
        if out.exists():
            # Killed after the last rename.
            break
    if not out.exists():
        call()
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_a_partition_killed_at_random_moments_goes_on_to_the_same_bytes(
    kind: str, has_cache: bool, sources: dict[str, Path], tmp_path: Path
) -> None:
    _divide(sources[kind], tmp_path / "whole", None)
    expected = contents(tmp_path / "whole")
    kills = 0
    for seed in range(40):
        if kills >= 25:
            break
        place = tmp_path / str(seed)
        out, cache = place / "out", place / "cache" if has_cache else None
        kills += _killed_at_random(partial(_divide, sources[kind], out, cache), out, seed)
        assert contents(out) == expected
        shutil.rmtree(place)
    assert kills >= 25


@pytest.mark.slow
def test_an_encoding_killed_at_random_moments_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    write_partition(tmp_path / "shards", held_out=4)
    write_vae(tmp_path / "vae")

    def run(out: Path) -> None:
        encode(tmp_path / "shards", out, 5, vae=tmp_path / "vae", batch_size=3)

    run(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    kills = 0
    for seed in range(40):
        if kills >= 25:
            break
        out = tmp_path / str(seed) / "out"
        kills += _killed_at_random(partial(run, out), out, seed)
        assert contents(out) == expected
        shutil.rmtree(out.parent)
    assert kills >= 25
