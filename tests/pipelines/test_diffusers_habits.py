"""What users of diffusers do with any pipeline: here it works, or one line says why not."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from hddm.pipelines.pipeline import HDDMPipeline
from tests.artefacts import copied, refusal
from tests.ensemble_files import (
    WEIGHTS,
    flow_expert,
    load_pipeline,
    pipeline_in_memory,
    write_ensemble,
    write_text,
)

LATENT: dict[str, Any] = {"num_inference_steps": 3, "output_type": "latent", "seed": 0}
LABELS = [0, 1, 2, 0, 1, 2]
CLASS_PRIOR = [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three class-conditional experts of pixels behind a router."""
    experts = [flow_expert(seed, num_classes=3) for seed in range(3)]
    return write_ensemble(tmp_path_factory.mktemp("habits"), experts)


def _images(pipe: HDDMPipeline, **options: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    return pipe(**{"class_labels": LABELS, **LATENT, **options}).images


def test_components_make_the_same_pipeline(folder: Path) -> None:
    experts = [flow_expert(seed, num_classes=3) for seed in range(3)]
    in_memory = pipeline_in_memory(experts, "nucleus-0.7", [0.2, 0.3, 0.5], CLASS_PRIOR, shift=2.0)
    for pipe in (in_memory, load_pipeline(folder, experts=[2, 0])):
        again = HDDMPipeline(**pipe.components)
        assert torch.equal(_images(again), _images(pipe))
        assert again.record == pipe.record
        # As it was set, and not as it was read.
        pipe.ensemble.strategy = "top-2"
        again = HDDMPipeline(**pipe.components)
        assert again.ensemble.strategy == "top-2"
        assert torch.equal(_images(again), _images(pipe))
        assert torch.equal(_images(HDDMPipeline.from_pipe(pipe)), _images(pipe))


def _dtypes(pipe: HDDMPipeline) -> list[torch.dtype]:
    return [part.dtype for part in (pipe.experts, pipe.router, pipe.vae, pipe.text_encoder)]


def test_dtypes_are_taken_as_diffusers_takes_them(tmp_path: Path) -> None:
    folder = write_text(tmp_path)
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    for given, expected in (
        ({"dtype": half}, [half] * 4),
        ({"torch_dtype": half}, [half] * 4),
        ({"torch_dtype": None}, [single] * 4),
        ({"dtype": {"default": half, "vae": single}}, [half, half, single, half]),
        ({"torch_dtype": {"experts": half, "router": double}}, [half, double, single, single]),
    ):
        pipe = load_pipeline(folder, **given)
        assert _dtypes(pipe) == expected
        made = _images(pipe, class_labels=None, prompt="a cat", output_type="pt")
        assert made.isfinite().all()
    assert re.search(
        "did you mean 'vae'.*not 'vea'", refusal(load_pipeline, folder, dtype={"vea": half})
    )
    # No option runs code, or reads other files than the folder's own.
    for option in ("trust_remote_code", "custom_pipeline", "variant"):
        with pytest.raises(TypeError, match=option):
            load_pipeline(folder, **{option: "x"})


def test_parts_that_are_passed_replace_those_of_the_folder(tmp_path: Path) -> None:
    folder = write_text(tmp_path)
    other = load_pipeline(folder, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    assert other.vae is None
    assert other.ensemble.shift == 3.0
    with_vae = load_pipeline(
        folder, vae=load_pipeline(folder).vae, text_encoder=None, tokenizer=None
    )
    text = {"encoder_hidden_states": torch.zeros(2, 77, 16)}
    embeds = {"conditions": text, "class_labels": None, "output_type": "pt"}
    assert torch.equal(_images(with_vae, **embeds), _images(load_pipeline(folder), **embeds))
    assert with_vae.text_encoder is None


def test_an_empty_folder_is_filled_and_no_other(folder: Path, tmp_path: Path) -> None:
    pipe = load_pipeline(folder)
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        pipe.save_pretrained(name)
        assert torch.equal(_images(load_pipeline(Path(name))), _images(pipe))
        assert "exists: choose another folder" in refusal(pipe.save_pretrained, name)
    (tmp_path / "behind").mkdir()
    (tmp_path / "link").symlink_to("behind")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".hidden").touch()
    for taken, why in (("link", "is a link to behind"), ("full", "exists: choose another folder")):
        assert why in refusal(pipe.save_pretrained, tmp_path / taken)
    assert [path.name for path in (tmp_path / "full").iterdir()] == [".hidden"]


def test_the_working_folder_is_not_renamed_away(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "exists: choose another folder" in refusal(load_pipeline(folder).save_pretrained, ".")
    assert list(tmp_path.iterdir()) == []


def test_class_labels_are_taken_from_arrays(folder: Path) -> None:
    pipe = load_pipeline(folder)
    made = _images(pipe)
    for same in (
        np.array(LABELS, dtype=np.int32),
        np.array([["cat"], ["dog"], ["7"], ["cat"], ["dog"], ["7"]]),
        tuple(LABELS),
        (label for label in LABELS),
    ):
        assert torch.equal(_images(pipe, class_labels=same), made)
    assert torch.equal(_images(pipe, class_labels=np.int64(2)), _images(pipe, class_labels=[2]))
    for wrong in ([[0, 1], [2]], [0.5], 1.5, [None]):
        assert "no class" in refusal(_images, pipe, class_labels=wrong)


def test_a_folder_that_is_gone_is_named_when_weights_are_needed(
    folder: Path, tmp_path: Path
) -> None:
    own = copied(folder, tmp_path)
    pipe, whole = load_pipeline(own), load_pipeline(own)
    made = _images(whole, strategy="full")
    shutil.rmtree(own)
    # Weights that were read before are there.
    assert torch.equal(_images(whole, strategy="full"), made)
    for call in (lambda: _images(pipe), lambda: pipe.save_pretrained(tmp_path / "saved")):
        words = refusal(call)
        assert re.search(
            rf"{re.escape(str(own))}/experts/\d/{WEIGHTS}: was moved or deleted after the model was",
            words,
        )
        assert "keep the folder" in words
    assert not (tmp_path / "saved").exists()
