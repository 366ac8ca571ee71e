"""What pictures say about how they were made."""

import json
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from hddm.data.images import have_equal_pixels
from hddm.guidance import Guidance
from hddm.pipelines.hub import plan_upload
from hddm.pipelines.picture_texts import (
    KEY,
    PARAMETERS,
    PictureTexts,
    says_how_it_was_made,
)
from hddm.utils.records import model_hash
from tests.artefacts import Command, refusal

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


def _chunk(kind: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def _png(*texts: bytes, after: bytes = b"", side: int = 8) -> bytes:
    """A grey picture of ``side`` pixels with chunks before and after its pixels, which may be too few."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"".join([b"\0" + b"\0" * side] * min(side, 8)))
    inner = b"".join(texts) + _chunk(b"IDAT", rows) + after
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + inner + _chunk(b"IEND", b"")


TELLING = {
    "before its pixels": _png(_chunk(b"tEXt", b"parameters\0a cat")),
    "after its pixels": _png(after=_chunk(b"tEXt", b"parameters\0a cat")),
    "compressed": _png(_chunk(b"zTXt", b"hddm\0\0" + zlib.compress(b"{}"))),
    "in UTF-8": _png(_chunk(b"iTXt", b"parameters\0\0\0\0\0cat")),
    "that cannot be read": _png(_chunk(b"iTXt", b"parameters\0\1\0\0\0garbage")),
    "that bursts": _png(_chunk(b"zTXt", b"prompt\0\0" + zlib.compress(b"a" * 50_000_000))),
    "of ComfyUI": _png(_chunk(b"tEXt", b'prompt\0{"6": {"text": "a cat"}}')),
    "of ComfyUI's page": _png(_chunk(b"tEXt", b"workflow\0{}")),
    "of InvokeAI": _png(_chunk(b"tEXt", b"invokeai_metadata\0{}")),
}
SILENT = {
    "no text": _png(),
    "another text": _png(_chunk(b"tEXt", b"Software\0GIMP"), after=_chunk(b"tIME", b"parameters")),
    "a large picture": _png(side=60_000),
    "a long text": _png(_chunk(b"tEXt", b"a" * 10**6 + b"parameters\0b")),
    "another kind of file": b"\xff\xd8\xff\xe0 parameters",
    "an empty file": b"",
}
BROKEN = {
    "cut in a chunk": _png()[:30],
    "without an end": _png()[:-12],
    "a length beyond the file": _png()[:8] + b"\xff" * 4 + _png()[12:],
}


@pytest.mark.parametrize("case", [*TELLING, *SILENT])
def test_pictures_tell_by_texts_of_any_place_form_and_tool(case: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes((TELLING | SILENT)[case])
    assert says_how_it_was_made(picture) == (case in TELLING)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_picture_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(BROKEN[case])
    told = refusal(says_how_it_was_made, picture)
    assert told == f"{picture}: is a PNG file without its end; save it again, or name another"


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
