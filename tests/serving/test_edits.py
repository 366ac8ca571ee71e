"""Requests for images that begin with a picture: forms as OpenAI's clients send them."""

import asyncio
import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from hddm.experts.assembly import assemble
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.serving.front import Front
from tests.ensemble_files import flow_expert, load_pipeline, saved, write_ensemble, write_text
from tests.serving.test_front import IMAGES, STEPS, files_in, front_of, sampled, talk
from tests.shard_files import bomb

EDITS = "/v1/images/edits"
HALF = np.array([[True] * 4] * 2 + [[False] * 4] * 2)
"""What is new: the upper half."""


def encoded(image: Image.Image, kind: str = "png") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def photo(side: int = 4, seed: int = 0) -> Image.Image:
    """Pixels of any colour."""
    noise = np.random.default_rng(seed)
    return Image.fromarray(noise.integers(0, 256, (side, side, 3), dtype=np.uint8))


def white(scale: int = 1) -> Image.Image:
    """The mask of `HALF`, as ``hddm sample`` takes it: white where the picture is new."""
    return Image.fromarray(np.kron(HALF, np.ones((scale, scale))).astype(np.uint8) * 255)


def erased(image: Image.Image, scale: int = 1) -> Image.Image:
    """A picture that is transparent where `HALF` is new, as OpenAI's masks are."""
    alpha = Image.fromarray(255 - np.array(white(scale)))
    image = image.convert("RGBA")
    image.putalpha(alpha)
    return image


def edit(front: Front, files: Mapping[str, bytes], **texts: Any) -> httpx.Response:
    """The answer to one form."""
    data = {name: str(value) for name, value in ({"steps": STEPS, "seed": 3} | texts).items()}
    parts = {name: (f"{name}.png", content) for name, content in files.items()}
    return talk(front, lambda client: client.post(EDITS, data=data, files=parts))


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three flow experts of classes, behind a router."""
    experts = [flow_expert(seed, num_classes=3) for seed in range(3)]
    return write_ensemble(tmp_path_factory.mktemp("classes"), experts)


@pytest.fixture(scope="module")
def front(classes: Path) -> Front:
    return front_of(classes, batching=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts of prompts in latents, which a VAE encodes and decodes."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("strategy", ["draw", "full", "commit-0.5"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_images_are_those_of_hddm_sample(
    front: Front, classes: Path, tmp_path: Path, strategy: str, has_mask: bool
) -> None:
    """With a strength of its own and with the default one; a mask is transparent where ours is white."""
    photo().save(tmp_path / "photo.png")
    white().save(tmp_path / "mask.png")
    files, options = {"image": encoded(photo())}, {"init_image": tmp_path / "photo.png"}
    if has_mask:
        files["mask"] = encoded(erased(photo(seed=1)))
        options |= {"mask": tmp_path / "mask.png", "resampling_steps": 2}
    repeats = {"resampling_steps": 2} if has_mask else {}
    for place, strength in enumerate(({}, {"strength": 0.5})):
        found = files_in(
            edit(front, files, prompt="dog", n=5, strategy=strategy, **strength, **repeats)
        )
        expected = sampled(
            classes,
            tmp_path / str(place),
            num_images=5,
            class_labels="dog",
            strategy=strategy,
            **options,
            **strength,
        )
        assert found == expected
        assert len(set(found)) == 5
        if has_mask:
            for one in found:
                made = np.asarray(Image.open(io.BytesIO(one)))
                assert (made[2:] == np.array(photo())[2:]).all()
                assert (made[:2] != np.array(photo())[:2]).any()


def test_under_draw_a_picture_is_one_message(classes: Path) -> None:
    """Of experts in this process, all that an image needs is in its one job."""
    front = front_of(classes, batching=False)
    files = {"image": encoded(photo()), "mask": encoded(erased(photo()))}
    files_in(edit(front, files, prompt="dog", n=6, strategy="draw"))
    jobs = [job for handle in front.workers for job in handle.jobs]
    assert sum(map(len, jobs)) == 6
    assert len(jobs) <= 3
    for job in jobs:
        assert job.picture.pixels is None


@pytest.mark.parametrize("strategy", ["draw", "top-2"])
def test_latents_of_a_picture_begin_where_the_pipeline_s_do(text: Path, strategy: str) -> None:
    """Encoded and decoded by the front; a picture of another size is brought to the experts'."""
    image, pipe = photo(16), load_pipeline(text)
    front = front_of(text)
    for mask in (None, white(4)):
        expected = pipe(
            ["a cat"],
            image=image,
            mask_image=mask,
            strength=0.7,
            num_images_per_prompt=4,
            num_inference_steps=STEPS,
            strategy=strategy,
            seed=3,
        ).images
        files = {"image": encoded(image)}
        if mask is not None:
            files["mask"] = encoded(erased(image, 4))
        found = files_in(edit(front, files, prompt="a cat", n=4, strategy=strategy, strength=0.7))
        for one, other in zip(found, expected, strict=True):
            levels = np.asarray(Image.open(io.BytesIO(one))).astype(int)
            assert np.abs(levels - np.asarray(other).astype(int)).max() <= 1


def test_an_edit_from_one_prompt_to_another_is_that_of_the_pipeline(text: Path) -> None:
    image, pipe, front = photo(8), load_pipeline(text), front_of(text)
    for strategy in ("draw", "full"):
        made = pipe(
            ["a cat"],
            image=image,
            edit_from="a dog",
            guidance_scale=2.0,
            num_images_per_prompt=3,
            num_inference_steps=STEPS,
            strategy=strategy,
            seed=3,
        ).images
        texts = {"prompt": "a cat", "edit_from": "a dog", "guidance_scale": 2.0, "n": 3}
        found = files_in(edit(front, {"image": encoded(image)}, strategy=strategy, **texts))
        for one, other in zip(found, made, strict=True):
            levels = np.asarray(Image.open(io.BytesIO(one))).astype(int)
            assert np.abs(levels - np.asarray(other).astype(int)).max() <= 1


def test_pairs_by_noise_continue_a_picture(tmp_path: Path) -> None:
    ranges = ((0.0, 0.6), (0.6, 1.0))
    folders = [
        saved(tmp_path / f"one{k}", flow_expert(k, {"noise_range": part}))
        for k, part in enumerate(ranges)
    ]
    assemble(folders, tmp_path / "pair", strategy="draw", domain=[["one0", "one1"]])
    photo().save(tmp_path / "photo.png")
    begin = {"strength": 0.8, "n": 3}
    found = files_in(
        edit(front_of(tmp_path / "pair", batching=False), {"image": encoded(photo())}, **begin)
    )
    settings = {"init_image": tmp_path / "photo.png", "strength": 0.8, "num_images": 3}
    assert found == sampled(tmp_path / "pair", tmp_path / "out", **settings)


def test_pictures_of_one_moment_are_one_batch_and_those_of_other_strengths_are_not(
    classes: Path,
) -> None:
    front = front_of(classes)
    batches = list[int]()
    for handle in front.workers:

        def counted(batch: Any, run: Any = handle.worker._run) -> Any:
            batches.append(len(batch))
            return run(batch)

        handle.worker._run = counted
    bodies = [
        ({"image": (f"{k}.png", encoded(photo(seed=k)))}, {"strength": ("0.4", "0.9")[k % 2]})
        for k in range(8)
    ]
    shared = {"prompt": "cat", "model": "ensemble/0", "steps": str(STEPS)}

    async def together(client: httpx.AsyncClient) -> Any:
        sent = []
        for seed, (files, texts) in enumerate(bodies):
            data = {**shared, **texts, "seed": str(seed)}
            sent.append(client.post(EDITS, data=data, files=files))
        return await asyncio.gather(*sent)

    found = [files_in(answer)[0] for answer in talk(front, together)]
    assert sum(batches) == 8
    assert max(batches) > 1
    alone = front_of(classes, batching=False)
    for seed, ((files, texts), one) in enumerate(zip(bodies, found, strict=True)):
        content = {"image": files["image"][1]}
        given = {"prompt": "cat", "model": "ensemble/0", **texts, "seed": seed}
        (expected,) = files_in(edit(alone, content, **given))
        levels = [np.asarray(Image.open(io.BytesIO(x))).astype(int) for x in (one, expected)]
        assert np.abs(levels[0] - levels[1]).max() <= 1


def test_the_client_of_openai_edits_pictures(front: Front) -> None:
    """With one picture, a mask, our own keys, and a list of one picture, which has another name."""

    async def asked(client: httpx.AsyncClient) -> list[bytes]:
        api = openai.AsyncOpenAI(base_url="http://front/v1", api_key="none", http_client=client)
        extra = {
            "seed": 3,
            "steps": STEPS,
            "strength": 0.5,
            "guidance_scale": 2.0,
            "guidance_interval": [0.1, 0.9],
        }
        image, mask = ("photo.png", encoded(photo())), ("mask.png", encoded(erased(photo())))
        how: dict[str, Any] = {"prompt": "dog", "model": "ensemble", "n": 2, "size": "4x4"}
        answers = [
            await api.images.edit(
                image=image, mask=mask, response_format="b64_json", extra_body=extra, **how
            ),
            await api.images.edit(image=[image], mask=mask, extra_body=extra, **how),
        ]
        found = []
        for answer in answers:
            found += [base64.b64decode(one.b64_json) for one in answer.data]
        with pytest.raises(openai.BadRequestError, match="cannot be read as an image"):
            await api.images.edit(image=("a.png", b"no picture"), prompt="dog")
        return found

    found = talk(front, asked)
    files = {"image": encoded(photo()), "mask": encoded(erased(photo()))}
    texts = {"strength": 0.5, "guidance_scale": 2.0, "prompt": "dog", "n": 2}
    data = {"seed": "3", "steps": str(STEPS), "guidance_interval[]": ["0.1", "0.9"]}
    data |= {name: str(value) for name, value in texts.items()}
    parts = {name: (name, content) for name, content in files.items()}
    same = files_in(talk(front, lambda client: client.post(EDITS, data=data, files=parts)))
    assert found == same * 2


def test_transparency_says_what_is_new(front: Front) -> None:
    """OpenAI's convention; a mask without transparency has ours, and a picture may be its own mask."""
    image, how = encoded(photo()), {"prompt": "dog", "n": 2}
    by_alpha = files_in(edit(front, {"image": image, "mask": encoded(erased(photo()))}, **how))
    by_white = files_in(edit(front, {"image": image, "mask": encoded(white())}, **how))
    own = files_in(edit(front, {"image": encoded(erased(photo()))}, **how))
    assert by_alpha == by_white == own
    # Half transparent is not erased.
    veiled = photo().convert("RGBA")
    veiled.putalpha(128)
    plain = files_in(edit(front, {"image": image}, **how))
    assert files_in(edit(front, {"image": encoded(veiled)}, **how)) == plain
    assert plain != own
    refused = edit(front, {"image": image, "mask": encoded(veiled)}, **how)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "mask"
    assert "mask has no fully transparent pixel" in refused.json()["error"]["message"]


WHOLE = encoded(photo(64))
FORMS: dict[str, tuple[dict[str, bytes], dict[str, Any], int, str | None, str]] = {
    "no picture": ({}, {}, 400, "image", "has no file image"),
    "text": ({"image": b"hello"}, {}, 400, "image", "image: cannot be read as an image"),
    "empty": ({"image": b""}, {}, 400, "image", "image: cannot be read as an image"),
    "cut": ({"image": WHOLE[: len(WHOLE) // 2]}, {}, 400, "image", "image: cannot be read"),
    "bomb": ({"image": bomb()}, {}, 400, "image", "has more than 16777216 pixels"),
    "large": ({"image": bomb(5000, 5000)}, {}, 400, "image", "is 5000×5000, more than 16777216"),
    "mask": ({"image": WHOLE, "mask": WHOLE[:60]}, {}, 400, "mask", "mask: cannot be read"),
    "other shape": (
        {"image": WHOLE, "mask": encoded(Image.new("L", (64, 32), 255))},
        {},
        400,
        "mask",
        "mask_image of 64×32 pixels is cropped unlike image of 64×64",
    ),
    "file": ({"image": WHOLE, "poster": WHOLE}, {}, 400, "poster", "no file is taken as 'poster'"),
    "key": ({"image": WHOLE}, {"strenght": 0.3}, 400, "strenght", "did you mean 'strength'?"),
    "strength": ({"image": WHOLE}, {"strength": 1.5}, 400, "strength", "must be 1 or less"),
    "not finite": (
        {"image": WHOLE},
        {"guidance_scale": "nan"},
        400,
        "guidance_scale",
        "guidance_scale",
    ),
    "many": ({"image": WHOLE}, {"n": 11}, 400, "n", "this service makes at most 10"),
    "repeats": (
        {"image": WHOLE},
        {"resampling_steps": 3},
        400,
        "resampling_steps",
        "`mask`, and there is none",
    ),
    "too often": (
        {"image": WHOLE},
        {"resampling_steps": 999},
        400,
        "resampling_steps",
        "must be 100 or less",
    ),
    "both": (
        {"image": WHOLE, "mask": encoded(erased(photo(64), 16))},
        {"edit_from": "a cat"},
        400,
        "edit_from",
        "`edit_from` changes the whole picture",
    ),
}


@pytest.mark.parametrize(("files", "texts", "status", "param", "words"), FORMS.values(), ids=FORMS)
def test_a_wrong_form_is_told_what_is_wrong(
    front: Front,
    files: dict[str, bytes],
    texts: dict[str, Any],
    status: int,
    param: str | None,
    words: str,
) -> None:
    # Without a file it would be no form.
    answer = edit(front, files or {"mask": WHOLE}, prompt="dog", **texts)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert words in error["message"]
    assert "\n" not in error["message"]


def test_bodies_that_are_no_forms_are_refused(front: Front) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    part = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    bodies = [
        ({}, b"{}"),
        ({"Content-Type": "application/json"}, b'{"prompt": "dog"}'),
        ({"Content-Type": "multipart/form-data"}, part),
        (form, b""),
        (form, b"--x"),
        (form, part + b"abc"),
        (form, part.replace(b'name="image"; ', b"") + b"abc\r\n--x--"),
        (form, b"--y" + part),
        (form, part.replace(b'; filename="a.png"', b"") + b"abc\r\n--x--"),
        (form, (part + b"abc\r\n") * 2 + b"--x--"),
        (form, b"\0" * 3000),
    ]

    async def throw(client: httpx.AsyncClient) -> list[int]:
        found = []
        for headers, body in bodies:
            answer = await client.post(EDITS, content=body, headers=headers)
            assert "\n" not in answer.json()["error"]["message"]
            found.append(answer.status_code)
        return found

    assert talk(front, throw) == [400] * len(bodies)


def test_an_upload_has_a_limit_and_a_place_in_the_queue(classes: Path) -> None:
    """JSON keeps its own limit, which is smaller."""
    front = front_of(classes, max_upload="100KB", max_queue=1)
    assert edit(front, {"image": b"a" * 200_000}).status_code == 413
    assert front.active == 0
    assert edit(front, {"image": encoded(photo())}, prompt="cat").status_code == 200
    large = {"prompt": "a" * 90_000}
    assert talk(front, lambda client: client.post(IMAGES, json=large)).status_code == 413
    front.active = 1
    assert edit(front, {"image": encoded(photo())}, prompt="cat").status_code == 429


def test_a_slow_decoder_stops_neither_the_service_nor_the_samples_of_others(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = front_of(text, max_queue=7)
    decode, held = HDDMPipeline.decode, asyncio.Event()

    def slow(self: HDDMPipeline, *arguments: Any) -> Any:
        asyncio.run_coroutine_threadsafe(held.wait(), front.loop).result()
        return decode(self, *arguments)

    monkeypatch.setattr(HDDMPipeline, "decode", slow)

    async def talks(client: httpx.AsyncClient) -> list[int]:
        async def sampled_by(model: str, strategy: str) -> None:
            before = sum(len(handle.jobs) for handle in front.workers)
            body = {"prompt": "a cat", "steps": 3, "seed": 1, "model": model}
            if strategy:
                body["strategy"] = strategy
            waiting.append(asyncio.ensure_future(client.post(IMAGES, json=body)))
            needed = 3 if strategy else 1
            while sum(len(handle.jobs) for handle in front.workers) < before + needed:
                await asyncio.sleep(0.01)

        waiting: list[Any] = []
        await sampled_by("ensemble/0", "")
        # The first one is being decoded meanwhile, and soon others wait for that.
        for _ in range(3):
            await sampled_by("ensemble", "full")
            await sampled_by("ensemble/1", "")
        assert (await client.get("/healthz")).status_code == 200
        assert not any(one.done() for one in waiting)
        held.set()
        return [answer.status_code for answer in await asyncio.gather(*waiting)]

    found = talk(front, lambda client: asyncio.wait_for(talks(client), 60))
    assert found == [200] * 7


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["draw", "full"])
def test_on_a_gpu_the_front_has_all_its_parts_there(text: Path, strategy: str) -> None:
    """VAE, text encoder and router; images are those of a CPU up to rounding, in TF32."""
    on_gpu, on_cpu = (front_of(text, device=one, dtype="float32") for one in ("cuda", "cpu"))
    for part in on_gpu.pipeline.beside_experts(False):
        assert {one.device.type for one in part.parameters()} == {"cuda"}
    assert on_gpu.ensemble.device.type == "cuda"
    files = {"image": encoded(photo(8)), "mask": encoded(erased(photo(8), 2))}
    texts = {"prompt": "a cat", "n": 4, "strategy": strategy}
    for sent in (files, {"image": files["image"]}):
        found, expected = (files_in(edit(one, sent, **texts)) for one in (on_gpu, on_cpu))
        for one, other in zip(found, expected, strict=True):
            levels = [np.asarray(Image.open(io.BytesIO(x))).astype(int) for x in (one, other)]
            assert np.abs(levels[0] - levels[1]).max() <= 4
