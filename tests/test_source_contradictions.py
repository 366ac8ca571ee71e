"""Sources whose parts contradict each other, or what the user says, are never read by guessing."""

from pathlib import Path

import pytest

from tests.artefacts import Command
from tests.checkpoint_files import (
    DDPM_BETAS,
    check_velocity,
    converted,
    dit,
    facts_of,
    pipeline,
    refused,
)

WEIGHTS = "diffusion_pytorch_model"


@pytest.mark.parametrize(
    ("name", "seed", "chosen"),
    [
        (f"{WEIGHTS}.safetensors", 0, "ema"),
        (f"{WEIGHTS}.non_ema.safetensors", 1, "raw"),
        (f"{WEIGHTS}.fp16.safetensors", 2, "unstated"),
        (f"{WEIGHTS}.bin", 3, "ema"),
    ],
)
def test_exactly_the_file_that_is_named_is_read(
    hddm: Command, tmp_path: Path, name: str, seed: int, chosen: str
) -> None:
    folder = pipeline(tmp_path / "dit", dit(0)) / "transformer"
    dit(1).save_pretrained(folder, variant="non_ema")
    dit(2).save_pretrained(folder, variant="fp16")
    plain = (folder / f"{WEIGHTS}.safetensors").read_bytes()
    dit(3).save_pretrained(folder, safe_serialization=False)
    (folder / f"{WEIGHTS}.safetensors").write_bytes(plain)
    pickled = ("--allow-pickle",) if name.endswith("bin") else ()
    converted(hddm, folder / name, tmp_path / "expert", *pickled)
    facts = facts_of(tmp_path / "expert")
    assert (facts["weights"], list(facts["source"]["files"])) == (chosen, [name])
    check_velocity(tmp_path / "expert", dit(seed), DDPM_BETAS)
    error = refused(hddm, folder / name, "--variant", "other", *pickled, out=tmp_path / "no")
    assert "--variant other" in error
    other = "ema" if chosen == "raw" else "raw"
    assert f"--weights {other}" in refused(hddm, folder / name, "--weights", other, *pickled)


def test_a_shard_alone_is_no_model(hddm: Command, tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "dit", dit(), max_shard_size="10KB") / "transformer"
    shard = next(folder.glob("*-00001-of-*"))
    assert "name its folder" in refused(hddm, shard)
    converted(hddm, folder / f"{WEIGHTS}.safetensors.index.json", tmp_path / "expert")
    check_velocity(tmp_path / "expert", dit(), DDPM_BETAS)
