"""What pictures say about how they were made."""

import json
from pathlib import Path

import pytest
from PIL import Image

from hddm.data.images import have_equal_pixels
from hddm.guidance import Guidance
from hddm.pipelines.hub import plan_upload
from hddm.pipelines.picture_texts import KEY, PARAMETERS, PictureTexts
from hddm.utils.records import model_hash
from tests.artefacts import Command

TEXTS = PictureTexts(
    model="my ensemble",
    model_sha256="0123456789abcdef",
    seed=7,
    steps=25,
    solver="heun",
    strategy="top-2",
    guidance=Guidance(3.0, interval=(0.2, 0.9)),
    prompts=("a cat, asleep", "a dog"),
    negative_prompt="blurry",
)


def test_parameters_are_in_the_form_that_viewers_read() -> None:
    texts = TEXTS.of(2, (48, 64), "experts/1 (cats, dogs)")
    assert texts[PARAMETERS].startswith(
        "a cat, asleep\n"
        "Negative prompt: blurry\n"
        "Steps: 25, Sampler: heun, CFG scale: 3.0, Seed: 7, Picture: 2, Size: 64x48, "
        'Strategy: top-2, Expert: "experts/1 (cats, dogs)", Model: my ensemble, '
        "Model hash: 0123456789, Version: hddm "
    )
    content = json.loads(texts[KEY])
    assert content["model_sha256"] == "0123456789abcdef"
    assert content["guidance_interval"] == [0.2, 0.9]
    assert json.loads(TEXTS.of(3, (8, 8))[KEY])["prompt"] == "a dog"
    assert "expert" not in json.loads(TEXTS.of(3, (8, 8))[KEY])


@pytest.mark.integration
def test_samples_say_how_they_were_made_and_their_pixels_do_not_depend_on_it(
    ensemble: Path, tmp_path: Path, hddm: Command
) -> None:
    options = ["--num-images", "3", "--steps", "2", "--seed", "5", "--strategy", "draw"]
    hddm("sample", str(ensemble), "--out", str(tmp_path / "told"), *options, "--grid")
    hddm("sample", str(ensemble), "--out", str(tmp_path / "silent"), *options, "--no-metadata")
    made_by = json.loads((tmp_path / "told" / "sampling.json").read_text())["expert_use"]
    makers = made_by["made_by"]["00000"].split()
    for number in range(3):
        told = tmp_path / "told" / f"{number:05d}.png"
        silent = tmp_path / "silent" / told.name
        assert have_equal_pixels(told, silent)
        with Image.open(silent) as picture:
            assert not {PARAMETERS, KEY} & picture.info.keys()
        with Image.open(told) as picture:
            content = json.loads(picture.info[KEY])
            assert f"Seed: 5, Picture: {number}" in picture.info[PARAMETERS]
        assert content["model_sha256"] == model_hash(ensemble)
        assert content["expert"] == made_by["names"][int(makers[number])]
        assert str(tmp_path) not in json.dumps(content)
        assert str(ensemble.parent) not in json.dumps(content)
    with Image.open(tmp_path / "told.grid.png") as sheet:
        assert json.loads(sheet.info[KEY])["seed"] == 5
    # A finished run is the same run, whatever its files say.
    hddm("sample", str(ensemble), "--out", str(tmp_path / "told"), *options, "--resume")
    chosen = {"told": tmp_path / "told" / "00000.png", "silent": tmp_path / "silent" / "00000.png"}
    notes = {}
    for name, picture in chosen.items():
        notes[name] = "\n".join(plan_upload(ensemble, "me/mine", "mit", picture).notes)
    assert "pictures say how they were made, prompts included" in notes["told"]
    assert "say how" not in notes["silent"]
