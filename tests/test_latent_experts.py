"""Experts on encoded latents: trained, trained on, calibrated, and only on latents of their own VAE."""

import json
from pathlib import Path

import pytest
import torch

import hddm
from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.data.encoding import encode_shards
from hddm.data.encoding_plan import EncodingSettings, plan_encoding
from hddm.data.open_shard import open_shard
from hddm.errors import HddmError
from hddm.experts import EXPERT_FILE
from hddm.moments import Moments
from hddm.training.continuation import continue_expert
from hddm.training.expert import train_expert
from hddm.training.recalibrate import recalibrate
from tests.artefacts import contents, copied, edit_json, expert_settings
from tests.component_files import write_vae
from tests.shard_files import noise, write_shard

SCALE = 0.4


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents 4×4×4 of 32 images in two classes."""
    root = tmp_path_factory.mktemp("latents")
    write_shard(root / "source", noise(32), [n % 2 for n in range(32)])
    write_vae(root / "vae", scaling_factor=SCALE)
    encode_shards(plan_encoding(root / "source", EncodingSettings(), vae=root / "vae"), root / "out")
    return root / "out"


@pytest.fixture(scope="module")
def expert(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DDPM expert of them, by class."""
    out = tmp_path_factory.mktemp("expert") / "ddpm"
    train_expert(latents, out, expert_settings("ddpm", class_conditional=True))
    return out


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
    assert torch.equal(hddm.load(again).calibration.moments.mean, mean)


@pytest.mark.parametrize("change", ["scale", "fingerprint"])
def test_latents_of_another_vae_or_scale_are_refused(
    change: str, latents: Path, expert: Path, tmp_path: Path
) -> None:
    """A converted checkpoint states its scale and may not know its VAE."""
    other = copied(expert, tmp_path / "other")
    facts = json.loads((other / EXPERT_FILE).read_text())
    vae = None if change == "scale" else facts["vae"] | {"fingerprint": "0" * 16}
    edit_json(other / EXPERT_FILE, vae=vae, **({"latent_scale": 0.18215} if vae is None else {}))
    kept = contents(other)
    expected = "scaled by 0.4, the expert's by 0.18215" if vae is None else "the expert's of"
    with pytest.raises(HddmError, match=expected):
        continue_expert(other, latents, tmp_path / "out", expert_settings("flow", class_conditional=True))
    with pytest.raises(HddmError, match=expected):
        recalibrate(other, latents)
    assert contents(other) == kept
    assert not (tmp_path / "out").exists()
