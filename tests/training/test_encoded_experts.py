"""Experts on encoded shards: latents of their own VAE, captions, and no resuming on another encoding."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hddm.calibration import Moments
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.data.encoding import encode_shards
from hddm.data.shards import open_shard
from hddm.experts.assembly import assemble
from hddm.experts.loading import load
from hddm.experts.records import EXPERT_FILE, NULL_FILE
from hddm.experts.verify import verify_expert
from hddm.settings import EncodingSettings
from hddm.training.calibrate import recalibrate
from hddm.training.continuation import continue_expert
from hddm.training.distill import distill
from hddm.training.expert import train_expert
from hddm.training.resume import encoding_of
from hddm.training.router import train_router
from hddm.training.settings import DistillSettings, RunOptions
from hddm.utils.errors import HddmError, UsageError
from tests.artefacts import (
    Command,
    copied,
    edit_json,
    expert_settings,
    load_images,
    router_settings,
)
from tests.component_files import write_clip, write_vae
from tests.shard_files import noise, write_partition_record, write_shard

SCALE = 0.4


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents 4×4×4 of 32 images in two classes."""
    root = tmp_path_factory.mktemp("latents")
    write_shard(root / "source", noise(32), [n % 2 for n in range(32)])
    write_vae(root / "vae", scaling_factor=SCALE)
    encode_shards(root / "source", root / "out", EncodingSettings(vae=root / "vae"))
    return root / "out"


@pytest.fixture(scope="module")
def expert(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DDPM expert of them, by class."""
    out = tmp_path_factory.mktemp("expert") / "ddpm"
    train_expert(latents, out, expert_settings("ddpm", class_conditional=True))
    return out


@pytest.mark.integration
def test_an_expert_on_latents_is_trained_on_and_calibrated(
    latents: Path, expert: Path, tmp_path: Path
) -> None:
    settings = expert_settings("flow", class_conditional=True)
    continue_expert(expert, latents, tmp_path / "flow", settings)
    facts = json.loads((tmp_path / "flow" / EXPERT_FILE).read_text())
    before = json.loads((expert / EXPERT_FILE).read_text())
    assert facts["objective"] == "flow"
    for key in ("space", "vae", "latent_scale", "classes", "prediction_type"):
        assert facts[key] == before[key]
    assert (facts["space"], facts["latent_scale"]) == ("latents", SCALE)
    again = copied(expert, tmp_path / "again")
    (again / CALIBRATION).unlink()
    recalibrate(again, latents)
    mean = Moments.of(open_shard(latents).take(torch.arange(32))).mean
    assert torch.equal(load(again).calibration.moments.mean, mean)


def test_latents_of_another_vae_or_scale_are_refused(
    latents: Path, expert: Path, tmp_path: Path
) -> None:
    """A converted checkpoint states its scale and may not know its VAE."""
    vae = json.loads((expert / EXPERT_FILE).read_text())["vae"] | {"fingerprint": "0" * 16}
    other = copied(expert, tmp_path)
    for changes, expected in (
        ({"vae": vae}, "its VAE is kind=.*, the expert's kind=.* fingerprint='0{16}'"),
        (
            {"vae": None, "latent_scale": 0.18215},
            "its scale is 0.4, the expert's 0.18215; encode with the",
        ),
    ):
        edit_json(other / EXPERT_FILE, **changes)
        with pytest.raises(HddmError, match=expected):
            recalibrate(other, latents)
    with pytest.raises(HddmError, match=expected):
        continue_expert(
            other, latents, tmp_path / "out", expert_settings("flow", class_conditional=True)
        )


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 black and 16 white images with their captions, as pixels and tokens; the encoder lies beside."""
    root = tmp_path_factory.mktemp("captioned")
    shades = [np.full((8, 8, 3), 255 * (n % 2), np.uint8) for n in range(32)]
    write_shard(root / "source", shades, captions=[("black", "white")[n % 2] for n in range(32)])
    write_clip(root, tokens=8)
    networks = {name: root / name for name in ("text_encoder", "tokenizer")}
    encode_shards(root / "source", root / "out", EncodingSettings(**networks))
    return root


@pytest.fixture(scope="module")
def text_expert(captioned: Path) -> Path:
    """A flow expert of them, by caption, trained for ten steps."""
    train_expert(
        captioned / "out", captioned / "expert", expert_settings("flow", text_conditional=True)
    )
    return captioned / "expert"


def test_tokens_of_another_text_encoder_are_refused(
    captioned: Path, text_expert: Path, tmp_path: Path
) -> None:
    """Also those that are too wide for an expert that records no text encoder."""
    write_clip(tmp_path, tokens=8, width=32)
    networks = {name: tmp_path / name for name in ("text_encoder", "tokenizer")}
    other = tmp_path / "other"
    encode_shards(captioned / "source", other, EncodingSettings(**networks))
    silent = copied(text_expert, tmp_path / "silent")
    edit_json(silent / EXPERT_FILE, text_encoder=None)
    for expert, expected in (
        (
            text_expert,
            "its text encoder's fingerprint is [0-9a-f]{16}, the expert's [0-9a-f]{16}; encode",
        ),
        (silent, "its text encoder's width is 32, the expert's 16; encode with"),
    ):
        with pytest.raises(UsageError, match=expected):
            verify_expert(expert, other)
    with pytest.raises(HddmError, match=expected):
        continue_expert(
            silent, other, tmp_path / "on", expert_settings("flow", text_conditional=True)
        )


@pytest.mark.integration
def test_what_a_converted_checkpoint_does_not_record_is_filled_in_by_training_on(
    latents: Path, expert: Path, captioned: Path, text_expert: Path, tmp_path: Path
) -> None:
    silent = copied(expert, tmp_path / "latents")
    edit_json(silent / EXPERT_FILE, vae=None, latent_scale=None)
    continue_expert(
        silent, latents, tmp_path / "a", expert_settings("flow", steps=1, class_conditional=True)
    )
    before, found = (json.loads((at / EXPERT_FILE).read_text()) for at in (expert, tmp_path / "a"))
    assert (found["vae"], found["latent_scale"]) == (before["vae"], SCALE)
    silent = copied(text_expert, tmp_path / "text")
    (silent / NULL_FILE).unlink()
    edit_json(silent / EXPERT_FILE, text_encoder=None)
    told = expert_settings("flow", steps=1, text_conditional=True)
    for name, dropout in (("b", 0.1), ("c", 0.0)):
        settings = told.model_copy(update={"condition_dropout": dropout})
        continue_expert(silent, captioned / "out", tmp_path / name, settings)
        before, found = (
            json.loads((at / EXPERT_FILE).read_text()) for at in (text_expert, tmp_path / name)
        )
        assert found["text_encoder"] == before["text_encoder"]
        # Without dropout it has not learned what stands for no caption.
        assert (tmp_path / name / NULL_FILE).exists() == (dropout > 0)
    assert (tmp_path / "b" / NULL_FILE).read_bytes() == (text_expert / NULL_FILE).read_bytes()


@pytest.mark.slow
def test_an_expert_learns_what_captions_say_and_draws_what_prompts_ask(
    captioned: Path, tmp_path: Path, hddm: Command
) -> None:
    settings = expert_settings(
        "flow",
        text_conditional=True,
        steps=150,
        learning_rate=1e-2,
        ema_decay=0.5,
        condition_dropout=0.3,
    )
    train_expert(captioned / "out", tmp_path / "expert", settings)
    components = {name: captioned / name for name in ("text_encoder", "tokenizer")}
    assemble([tmp_path / "expert"], tmp_path / "all", **components)
    code, _, err = hddm(
        *(
            "sample",
            tmp_path / "all",
            "--out",
            tmp_path / "out",
            "--steps",
            10,
            "--guidance-scale",
            2,
        ),
        *("--prompt", "black", "--prompt", "white", "--num-images", 8),
    )
    assert code == 0, err
    drawn = load_images(tmp_path / "out").pixels.float().mean((1, 2, 3))
    assert (drawn > 128).tolist() == [False, True] * 4

    # Its student of one step, with the guidance inside.
    student = DistillSettings(
        teacher="routed",
        sampling_steps=1,
        trajectories=128,
        guidance_scale=2,
        steps=150,
        batch_size=16,
        learning_rate=1e-2,
        ema_decay=0.5,
    )
    shard = open_shard(Path(shutil.copytree(captioned / "out", tmp_path / "parts" / "shard_0")))
    write_partition_record(tmp_path / "parts", [len(shard)], [shard.hash])
    given = (tmp_path / "all", tmp_path / "parts", tmp_path / "student", student)
    distill(*given, init=tmp_path / "expert")
    assemble([tmp_path / "student"], tmp_path / "fast", **components)
    asked = ("--prompt", "black", "--prompt", "white", "--num-images", 8)
    code, _, err = hddm("sample", tmp_path / "fast", "--out", tmp_path / "one step", *asked)
    assert code == 0, err
    drawn = load_images(tmp_path / "one step").pixels.float().mean((1, 2, 3))
    assert (drawn > 128).tolist() == [False, True] * 4


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
        "init": lambda shards, out, run: continue_expert(
            ddpm_expert, shards / "shard_0", out, one, run=run
        ),
        "router": lambda shards, out, run: train_router(
            shards, out, router_settings(steps=1), run=run
        ),
        "student": lambda shards, out, run: distill(
            ensemble, shards, out, DistillSettings(**tiny), run=run
        ),
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
    _encode(shards, encoded, resolution=4)
    with pytest.raises(HddmError, match="used other data, another") as refused:
        train(encoded, out, RunOptions(resume=True))
    found = "\n".join(refused.value.details)
    assert "data.encoding.resolution: was None, is 4" in found
    assert "data.encoding.crop: was None, is 'center'" in found
    # An image of this side is not changed by it.
    assert "data.files" not in found
    _encode(shards, encoded)
    train(encoded, out, RunOptions(resume=True))
    assert out.is_dir()


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
