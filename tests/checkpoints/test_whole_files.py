"""Whole single files of Stable Diffusion, with VAE and text encoders, compared with the model's folder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.artefacts import Command
from tests.checkpoint_files import converted, record_of, written_back
from tests.ldm_files import tiny_pipeline, whole_file

PRESETS = {"1": "sd1", "2": "sd2", "XL": "sdxl"}
SIDE = ("--sample-size", 8)
PROMPT = ("--prompt", "a cat!", "--negative-prompt", "dog", "--guidance-scale", 3, "--steps", 3)


def _pictures(hddm: Command, expert: Path, out: Path) -> np.ndarray[Any, Any]:
    code, _, error = hddm("sample", expert, "--out", out, "--num-images", 2, *PROMPT)
    assert code == 0, error
    found = [np.asarray(Image.open(path)) for path in sorted(out.glob("*.png"))]
    assert len(found) == 2
    return np.stack(found)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["1", "2", "XL"])
def test_a_whole_file_makes_the_pictures_of_its_folder_and_comes_back_bit_for_bit(
    hddm: Command, tmp_path: Path, kind: str
) -> None:
    pipe = tiny_pipeline(tmp_path / "made", kind)
    content = {name: one.contiguous() for name, one in whole_file(pipe, kind).items()}
    source, header = tmp_path / "whole.safetensors", {"modelspec.title": "tiny"}
    save_file(content, source, header)
    words = tmp_path / "made/parts/tokenizer"
    options = ("--preset", PRESETS[kind], "--tokenizer", words, *SIDE)
    text = converted(hddm, source, tmp_path / "file", *options)
    assert "so hddm sample makes pictures of it" in text
    converted(hddm, tmp_path / "made/pipeline", tmp_path / "folder")
    one, other = record_of(tmp_path / "file"), record_of(tmp_path / "folder")
    for key in ("vae", "text_encoder", "latent_scale", "prediction_type", "sample_shape"):
        assert one[key] == other[key], key
    pictures = _pictures(hddm, tmp_path / "file", tmp_path / "a")
    assert np.array_equal(pictures, _pictures(hddm, tmp_path / "folder", tmp_path / "b"))
    assert pictures.std() > 1

    back = (
        written_back(hddm, tmp_path / "file", tmp_path / "back", "ldm") / "checkpoint.safetensors"
    )
    found = load_file(back)
    assert found.keys() == content.keys()
    for name, tensor in content.items():
        assert found[name].shape == tensor.shape
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with safe_open(back, "pt") as opened:
        assert opened.metadata() == header
