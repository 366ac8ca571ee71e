"""Pipelines and ``hddm sample`` that begin with a picture, as diffusers' users know them."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

import hddm
from hddm.data.images import to_unit_range
from hddm.editing import Picture
from hddm.networks.vae import read_vae
from hddm.pipelines.inputs import Begin
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.errors import HddmError
from tests.artefacts import Command, printed, refusal
from tests.component_files import write_vae
from tests.ensemble_files import flow_expert, pipeline_in_memory

STEPS: dict[str, Any] = {"num_inference_steps": 4, "seed": 5}
MASK = torch.zeros(4, 4, dtype=torch.bool)
MASK[2:] = True


def picture(seed: int = 0, side: int = 4) -> Image.Image:
    """Pixels of any colour."""
    noise = np.random.default_rng(seed)
    return Image.fromarray(noise.integers(0, 256, (side, side, 3), dtype=np.uint8))


def white(mask: torch.Tensor, scale: int = 1) -> Image.Image:
    """The mask as a picture."""
    return Image.fromarray(np.kron(mask.numpy(), np.ones((scale, scale))).astype(np.uint8) * 255)


def units(image: Image.Image) -> torch.Tensor:
    """(1, 3, H, W) in [-1, 1]."""
    return to_unit_range(torch.from_numpy(np.array(image)).movedim(-1, 0)[None])


@pytest.fixture(scope="module")
def pipe() -> HDDMPipeline:
    return pipeline_in_memory([flow_expert(seed) for seed in range(3)])


@pytest.mark.parametrize("strategy", ["draw", "top-2", "commit-0.5"])
def test_strength_goes_from_the_picture_to_the_plain_sample(
    pipe: HDDMPipeline, strategy: str
) -> None:
    image, how = picture(), {"strategy": strategy, "batch_size": 3, **STEPS}
    assert all(
        one.tobytes() == image.tobytes() for one in pipe(image=image, strength=0, **how).images
    )
    plain = pipe(output_type="pt", **how).images
    assert torch.equal(pipe(image=image, strength=1, output_type="pt", **how).images, plain)
    between = pipe(image=image, strength=0.6, output_type="latent", **how)
    start = Picture(units(image), 0.6)
    same = hddm.sample(pipe.ensemble, 3, 5, 4, strategy, picture=start)
    torch.testing.assert_close(between.images, same, rtol=1e-5, atol=1e-5)
    # By default 0.8; one picture each is the same as one for all.
    default = pipe(image=[image] * 3, output_type="latent", **how).images
    assert torch.equal(default, pipe(image=image, strength=0.8, output_type="latent", **how).images)


def test_pictures_are_read_as_images_of_a_data_set_are(pipe: HDDMPipeline, tmp_path: Path) -> None:
    turned, deep = Image.Exif(), np.arange(16, dtype=np.uint16).reshape(4, 4) * 17
    turned[ExifTags.Base.Orientation] = 6
    image = picture()
    image.save(tmp_path / "turned.png", exif=turned)
    Image.fromarray(deep * 257).save(tmp_path / "deep.png")
    for name, pixels in (
        ("turned", np.rot90(np.array(image), -1)),
        ("deep", np.stack([deep] * 3, -1)),
    ):
        with Image.open(tmp_path / f"{name}.png") as opened:
            assert (np.array(pipe(image=opened, strength=0, **STEPS).images[0]) == pixels).all()


def test_what_a_mask_leaves_black_keeps_its_pixels(pipe: HDDMPipeline) -> None:
    image, how = picture(), {"strategy": "top-2", "batch_size": 3, **STEPS}
    made = pipe(image=image, mask_image=white(MASK), resampling_steps=2, **how).images
    pixels = np.stack([np.array(one) for one in made])
    assert (pixels[:, ~MASK] == np.array(image)[~MASK]).all()
    assert (pixels[:, MASK] != np.array(image)[MASK]).any()
    again = pipe(
        image=units(image), mask_image=MASK[None].float(), resampling_steps=2, **how
    ).images
    assert [one.tobytes() for one in again] == [one.tobytes() for one in made]
    # Noise of a step depends on the seed and the image's number alone.
    last = pipe(
        image=image, mask_image=white(MASK), resampling_steps=2, start=2, **how | {"batch_size": 1}
    )
    assert last.images[0].tobytes() == made[2].tobytes()


def test_pictures_of_latents_are_encoded_and_keep_their_pixels(tmp_path: Path) -> None:
    write_vae(tmp_path / "vae")
    expert = flow_expert(0, {"space": "latents", "latent_scale": None}, in_channels=4)
    bare = pipeline_in_memory([expert])
    with pytest.raises(HddmError, match=r"makes latents \(4, 4, 4\) and has no VAE"):
        bare(image=picture(), strength=0.5, output_type="latent", **STEPS)
    pipe = pipeline_in_memory([expert], vae=read_vae(tmp_path / "vae"))
    begun = pipe.picture(Begin(picture(), white(MASK)), 0)
    latents = torch.zeros(1, 4, 4, 4)
    kept = pipe.decode(latents, 0, begun)
    assert torch.equal(kept, begun.kept_in(pipe.decode(latents)))
    height, width = pipe.image_size
    image, mask = picture(1, 2 * width), white(MASK, height // 4)
    fitted = image.resize((width, height), Image.Resampling.LANCZOS)
    assert pipe(image=image, strength=0, **STEPS).images[0].tobytes() == fitted.tobytes()
    made = np.array(pipe(image=image, mask_image=mask, **STEPS).images[0])
    kept = np.array(mask) == 0
    assert (made[kept] == np.array(fitted)[kept]).all()
    assert (made[~kept] != np.array(fitted)[~kept]).any()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"strength": 0.5}, "`strength` 0.5 needs a picture: pass image="),
        ({"mask_image": white(MASK)}, "`mask` needs a picture: pass image="),
        (
            {"image": torch.zeros(1, 3, 8, 8)},
            r"the picture is \(1, 3, 8, 8\), and 1 samples need \(1, 3, 4, 4\)",
        ),
        (
            {"image": picture(), "mask_image": torch.ones(1, 8, 8)},
            r"the mask is .*, and the picture \(1, 3, 4, 4\)",
        ),
        (
            {"image": picture(), "mask_image": white(MASK).resize((8, 4))},
            "of 8×4 pixels is cropped unlike",
        ),
        (
            {"image": np.full((4, 4, 3), 200, np.uint8)},
            "image: array of 200 to 200; pass pixels from 0 to 1",
        ),
        ({"image": [picture()] * 2, "batch_size": 3}, "the picture is .*, and 3 samples need"),
    ],
    ids=lambda one: str(one) if isinstance(one, str) else "",
)
def test_what_does_not_fit_is_refused(
    pipe: HDDMPipeline, asked: dict[str, Any], words: str
) -> None:
    assert re.search(words, refusal(pipe, **asked, **STEPS))


def test_the_command_line_makes_the_same(pipe: HDDMPipeline, tmp_path: Path, hddm: Command) -> None:
    pipe.save_pretrained(tmp_path / "model")
    picture().save(tmp_path / "old.png")
    white(MASK).save(tmp_path / "mask.png")
    base = (
        "sample",
        tmp_path / "model",
        "--num-images",
        2,
        "--seed",
        5,
        "--steps",
        4,
        "--strategy",
        "top-2",
    )
    begin = (
        "--init-image",
        tmp_path / "old.png",
        "--mask",
        tmp_path / "mask.png",
        "--resampling-steps",
        2,
    )
    printed(hddm, *base, *begin, "--out", tmp_path / "out")
    how = {"strategy": "top-2", "batch_size": 2, "resampling_steps": 2, **STEPS}
    made = pipe(image=picture(), mask_image=white(MASK), **how).images
    for i, one in enumerate(made):
        with Image.open(tmp_path / "out" / f"{i:05d}.png") as found:
            assert found.tobytes() == one.tobytes()
    # Another picture is another run.
    picture(1).save(tmp_path / "old.png")
    assert "init_image_sha256" in hddm(*base, *begin, "--out", tmp_path / "out", "--resume")[2]
    code, _, error = hddm(*base, "--strength", 0.5, "--out", tmp_path / "no")
    assert (code, "--strength 0.5 needs a picture: pass image= (--init-image" in error) == (2, True)
    assert not (tmp_path / "no").exists()


def test_an_edit_goes_from_one_prompt_to_another(tmp_path: Path, hddm: Command) -> None:
    pipe = pipeline_in_memory(
        [flow_expert(seed, num_classes=3) for seed in range(2)], strategy="full"
    )
    first, second = pipe.ensemble.classes[:2]
    how = {"edit_from": first, "image": picture(), "batch_size": 1, **STEPS}
    # What stays the same cancels.
    same = pipe(f"a {first}", output_type="latent", **how).images
    torch.testing.assert_close(same, units(picture()), rtol=0, atol=1e-6)
    made = pipe(f"a {second}", guidance_scale=2.0, **how).images[0]
    assert made.tobytes() != picture().tobytes()
    pipe.save_pretrained(tmp_path / "model")
    picture().save(tmp_path / "old.png")
    begin = (
        "--init-image",
        tmp_path / "old.png",
        "--edit-from",
        f"a {first}",
        "--guidance-scale",
        2,
    )
    options = ("--num-images", 1, "--seed", 5, "--steps", 4, "--out", tmp_path / "out")
    printed(hddm, "sample", tmp_path / "model", *begin, "--prompt", f"a {second}", *options)
    with Image.open(tmp_path / "out" / "00000.png") as found:
        assert found.tobytes() == made.tobytes()
    assert "`edit_from` needs a picture: pass image=" in refusal(pipe, edit_from=first, **STEPS)


def test_threads_share_a_vae_one_at_a_time(tmp_path: Path) -> None:
    """One of float16, which decodes in float32 and is cast back, while others would use it."""
    write_vae(tmp_path, factor=8)
    vae = read_vae(tmp_path, torch.float16)
    facts = {"space": "latents", "latent_scale": None}
    pipe = pipeline_in_memory([flow_expert(0, facts, in_channels=4)], "draw", vae=vae)
    latents = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    alone = pipe.decode(latents)
    with ThreadPoolExecutor(8) as pool:
        for images in pool.map(lambda _: pipe.decode(latents), range(24)):
            assert torch.equal(images, alone)
    assert vae.dtype == torch.float16
