"""Requests for pictures of another size than the experts' own."""

import asyncio
import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from diffusers import DDPMScheduler
from PIL import Image

from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.assembly import assemble
from hddm.experts.record_folders import save_router
from hddm.serving.front import Front
from hddm.serving.refusals import Refusal
from hddm.serving.sizes import ServedSizes
from hddm.settings import Conversion
from hddm.utils.errors import HddmError
from tests.checkpoint_files import dit, pipeline, plain_unet
from tests.component_files import write_vae
from tests.ensemble_files import flow_expert, load_pipeline, random_router, saved
from tests.serving.test_edits import edit, encoded, photo
from tests.serving.test_front import IMAGES, STEPS, ask, files_in, front_of, sampled, talk

Size = tuple[int, int]


def unets(root: Path, **changes: Any) -> list[Path]:
    """Two UNets of latents 4×8×8, which take multiples of 2, and their VAE, which doubles those."""
    folders = []
    for seed in (1, 2):
        network = plain_unet(seed, in_channels=4, out_channels=4, block_out_channels=(32, 32))
        source = pipeline(root / f"net{seed}", network, DDPMScheduler(beta_schedule="linear"))
        ranges: dict[str, Any] = {}
        if changes:
            ranges["noise_range"] = changes["noise_ranges"][seed - 1]
        plan = plan_conversion(source, Conversion(**ranges))
        folders.append(root / f"one{seed}")
        write(plan, folders[-1])
    write_vae(root / "vae")
    return folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of 16×16, or of other multiples of 4, behind a router that sees their own size."""
    root = tmp_path_factory.mktemp("sizes")
    (root / "router").mkdir()
    save_router(root / "router", *random_router(2, (4, 8, 8)))
    assemble(
        unets(root),
        root / "ensemble",
        root / "router",
        strategy="draw",
        vae=root / "vae",
        trust_components=True,
        share={str(root / "one1"): 0.4},
    )
    return root / "ensemble"


@pytest.fixture(scope="module")
def front(folder: Path) -> Front:
    return front_of(folder, batching=False)


def sizes_in(files: Sequence[bytes]) -> set[Size]:
    """Widths and heights of PNG files."""
    return {Image.open(io.BytesIO(one)).size for one in files}


def levels(png: bytes) -> torch.Tensor:
    return torch.tensor(list(Image.open(io.BytesIO(png)).tobytes()))


@pytest.mark.filterwarnings("ignore:.*decide which expert")
@pytest.mark.parametrize(
    "size", [(24, 16), (8, 32), pytest.param((16, 16), marks=pytest.mark.slow)]
)
def test_pictures_of_a_size_are_those_of_hddm_sample(
    front: Front, folder: Path, tmp_path: Path, size: Size
) -> None:
    """With noise and with a picture to begin with, which is brought to the size."""
    width, height = size
    settings: dict[str, Any] = {"width": width, "height": height, "num_images": 4}
    found = files_in(ask(front, size=f"{width}x{height}", n=4))
    assert sizes_in(found) == {size}
    assert found == sampled(folder, tmp_path / "noise", **settings)
    photo(20).save(tmp_path / "photo.png")
    files = {"image": encoded(photo(20))}
    found = files_in(edit(front, files, size=f"{width}x{height}", n=4, strength=0.6))
    settings |= {"init_image": tmp_path / "photo.png", "strength": 0.6}
    expected = sampled(folder, tmp_path / "photo", **settings)
    for one, other in zip(found, expected, strict=True):
        assert (levels(one) - levels(other)).abs().max() <= 1


def test_experts_of_a_pair_by_noise_are_mixed_at_any_size(tmp_path: Path) -> None:
    """Each step is a message to the worker that covers its noise level."""
    folders = unets(tmp_path, noise_ranges=((0.0, 0.5), (0.5, 1.0)))
    assemble(
        folders,
        tmp_path / "pair",
        strategy="draw",
        domain=[[one.name for one in folders]],
        vae=tmp_path / "vae",
        trust_components=True,
    )
    front = front_of(tmp_path / "pair", batching=False)
    found = files_in(ask(front, size="24x8", n=2))
    assert found == sampled(tmp_path / "pair", tmp_path / "out", width=24, height=8, num_images=2)
    assert all(len(handle.jobs) > 1 for handle in front.workers)


def test_strategies_that_need_a_router_say_so_at_another_size(front: Front) -> None:
    for strategy in ("full", "top-1", "commit-0.5"):
        answer = ask(front, size="24x16", strategy=strategy)
        assert answer.status_code == 400
        told = (
            f"strategy '{strategy.replace('commit-0.5', 'full')}' needs a router and this one sees"
        )
        assert told in answer.json()["error"]["message"]
        assert ask(front, size="16x16", strategy=strategy).status_code == 200


@pytest.mark.parametrize("size", ["big", "64", "64X64", "64x", "auto\n", "٦٤x٦٤", "1234567x8"])
def test_what_is_no_size_is_told_what_a_size_looks_like(front: Front, size: str) -> None:
    error = ask(front, size=size).json()["error"]
    assert (error["code"], error["param"]) == (400, "size")
    said = f"(is {size!r}): is no size; write WIDTHxHEIGHT, such as 64x64, or auto"
    assert error["message"].endswith(said)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("18x16", "multiples of 4, at most 8192; the nearest are 16x16 and 20x16; or pass auto"),
        ("0x16", "the nearest are 4x16"),
        # Of the nearest two, one is too large.
        ("32x15", "the nearest are 32x12 and 32x16"),
        ("43x11", "the nearest are 40x8"),
        ("1024x1024", "at most 512 pixels, as 20x20; or pass auto"),
        ("99999x1", "at most 512 pixels"),
        ("64x16", "at most 512 pixels, as 44x8"),
    ],
)
def test_other_sizes_are_refused_with_the_nearest_that_work(
    front: Front, size: str, words: str
) -> None:
    error = ask(front, size=size).json()["error"]
    assert (error["code"], error["param"]) == (400, "size")
    assert words in error["message"]
    assert f"size is '{size}', and this" in error["message"]
    assert "\n" not in error["message"]
    # A picture's size is checked as well.
    answer = edit(front, {"image": encoded(photo())}, size=size)
    assert answer.json()["error"] == error


def test_sizes_that_are_told_are_made(folder: Path) -> None:
    """Every size that is read makes a pipeline, and every other one names some that do."""
    pipe = load_pipeline(folder)
    sizes = ServedSizes.of(pipe, 1000)
    sides = (1, 4, 6, 12, 16, 24, 31, 64, 1000)
    for height, width in itertools.product(sides, sides):
        told = ""
        try:
            size = sizes.read(f"{width}x{height}")
        except Refusal as error:
            told = error.message
        if not told:
            assert size == (height, width)
            assert pipe.at_size(*size).image_size == size
            continue
        if height * width <= 1000:
            with pytest.raises(HddmError):
                pipe.at_size(height, width)
        listed = re.findall(r"\d+x\d+", told.partition("this ")[2])
        assert listed
        for one in listed:
            assert sizes.read(one) is not None
    assert sizes.read("auto") is None


def test_the_option_bounds_pixels_and_the_own_size_is_always_made(folder: Path) -> None:
    front = front_of(folder, max_pixels=100)
    assert ask(front, size="8x12").status_code == 200
    assert ask(front, size="16x16").status_code == 200
    assert "at most 100 pixels, as 8x8" in ask(front, size="12x16").json()["error"]["message"]
    assert sizes_in(files_in(ask(front_of(folder, max_pixels=2000), size="40x48"))) == {(40, 48)}


def test_models_are_listed_with_their_sizes(front: Front, tmp_path: Path) -> None:
    def listed(one: Front) -> Any:
        answer = talk(one, lambda client: client.get("/v1/models"))
        return [model["sizes"] for model in answer.json()["data"]]

    others = {"multiple_of": 4, "max_side": 8192, "max_pixels": 512, "square": False}
    assert listed(front) == [{"default": "16x16", **others}] * 3
    # Networks that take one size alone.
    for k in range(2):
        saved(tmp_path / f"one{k}", flow_expert(k))
    assemble([tmp_path / "one0", tmp_path / "one1"], tmp_path / "flow", strategy="draw")
    alone = front_of(tmp_path / "flow")
    assert listed(alone) == [{"default": "4x4"}] * 3
    told = ask(alone, size="8x8").json()["error"]["message"]
    assert told == "size is '8x8', and this ensemble makes 4x4; or pass auto"
    assert ask(alone, size="4x4").status_code == 200


def test_squares_alone_are_told(tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit(0), DDPMScheduler())
    write(plan_conversion(source, Conversion()), tmp_path / "one")
    write_vae(tmp_path / "vae")
    parts: dict[str, Any] = {"vae": tmp_path / "vae", "trust_components": True}
    assemble([tmp_path / "one"], tmp_path / "whole", strategy="draw", **parts)
    front = front_of(tmp_path / "whole", max_pixels=4000)
    side = front.sizes.own[0]
    unit = front.sizes.others.multiple if front.sizes.others else 0
    wide = f"{side + unit}x{side}"
    error = ask(front, size=wide).json()["error"]
    assert "this ensemble makes squares with sides that are multiples of" in error["message"]
    assert f"the nearest are {side}x{side}" in error["message"]
    (one,) = files_in(ask(front, size=f"{side + unit}x{side + unit}"))
    assert sizes_in([one]) == {(side + unit, side + unit)}


def test_requests_of_two_sizes_are_never_one_batch(folder: Path) -> None:
    """Though they come at the same time and are alike in all else."""
    front = front_of(folder)
    batches = list[set[tuple[int, ...]]]()
    for handle in front.workers:

        def noted(batch: Any, run: Any = handle.worker._run) -> Any:
            batches.append({one.job.shape for one in batch})
            return run(batch)

        handle.worker._run = noted

    async def together(client: httpx.AsyncClient) -> Any:
        bodies = []
        for seed in range(8):
            size = ("16x16", "24x16")[seed % 2]
            bodies.append({"steps": STEPS, "seed": seed, "size": size, "model": "ensemble/one1"})
        return await asyncio.gather(*(client.post(IMAGES, json=body) for body in bodies))

    made = [sizes_in(files_in(answer)) for answer in talk(front, together)]
    assert made == [{(16, 16)}, {(24, 16)}] * 4
    assert len(batches) < 8
    assert {len(shapes) for shapes in batches} == {1}
    assert set.union(*batches) == {(4, 8, 8), (4, 8, 12)}


@pytest.mark.parametrize("strategy", ["draw", "full"])
@pytest.mark.filterwarnings("ignore:.*at once do not fit the memory")
def test_a_batch_that_does_not_fit_the_memory_is_halved(folder: Path, strategy: str) -> None:
    front, largest = front_of(folder), list[int]()
    whole = files_in(ask(front_of(folder), n=6, strategy=strategy))
    for handle in front.workers:
        network = handle.worker.field.network

        def narrow(x: torch.Tensor, *rest: Any, run: Any = network, **more: Any) -> Any:
            if len(x) > 2:
                raise torch.OutOfMemoryError("out of memory")
            largest.append(len(x))
            return run(x, *rest, **more)

        handle.worker.field.network = narrow
    found = files_in(ask(front, n=6, strategy=strategy))
    assert max(largest) <= 2
    for one, other in zip(found, whole, strict=True):
        assert (levels(one) - levels(other)).abs().max() <= 1


def test_the_front_reads_no_weights_of_experts(folder: Path) -> None:
    """Also where its other parts are moved to a device, and for another size."""
    front = front_of(folder)
    files_in(ask(front, size="24x16", n=3))
    for network in front.pipeline.experts.stored:
        assert all(one.is_meta for one in network.network.parameters())
    assert not any(one.is_meta for one in front.pipeline.vae.parameters())
