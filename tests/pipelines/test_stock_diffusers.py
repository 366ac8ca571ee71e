"""Stock diffusers opens an ensemble by its ``pipeline.py``, and makes the same bytes as hddm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hddm.experts.assembly import assemble, change
from hddm.experts.ensemble_records import PIPELINE_CODE, PIPELINE_FILE
from hddm.utils.files import sha256_of
from hddm.utils.records import MANIFEST
from tests.artefacts import Command, contents
from tests.ensemble_files import flow_expert, load_pipeline, write_ensemble, write_text

STOCK = """
import json, sys
import torch
from diffusers import DiffusionPipeline
assert "hddm" not in sys.modules
folder, given, options = sys.argv[1], *map(json.loads, sys.argv[2:])
options = {name: getattr(torch, value) for name, value in options.items()}
pipe = DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True, **options)
images = pipe(**given).images
import hddm
ours = hddm.HDDMPipeline.from_pretrained(folder, **options)(**given).images
print(images.dtype, tuple(images.shape), images.numpy().tobytes() == ours.numpy().tobytes())
"""


COMMON = {"seed": 3, "num_inference_steps": 3, "output_type": "pt", "num_images_per_prompt": 2}
GIVEN: dict[str, dict[str, object]] = {"pixels": {"class_labels": [0, 2], **COMMON}}
GIVEN["text"] = GIVEN["half"] = {"prompt": ["a cat", "a dog"], "guidance_scale": 3.0, **COMMON}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Ensembles of pixels and of text, to which the file was added at once, and later."""
    root = tmp_path_factory.mktemp("stock")
    (root / "pixels").mkdir()
    made = {
        "pixels": write_ensemble(
            root / "pixels", [flow_expert(seed, num_classes=3) for seed in range(3)]
        ),
        "text": write_text(root / "text"),
    }
    for folder in made.values():
        change(folder, diffusers_pipeline=True)
    # With weights in half precision, which transformers by itself would run as they are.
    pipe = load_pipeline(made["text"], dtype=torch.float16)
    pipe.save_pretrained(root / "half" / "ensemble")
    change(root / "half" / "ensemble", diffusers_pipeline=True)
    return made | {"half": root / "half" / "ensemble"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pixels", {}),
        pytest.param("half", {}, marks=pytest.mark.slow),
        pytest.param("text", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stock_diffusers_makes_the_same_bytes(
    name: str, options: dict[str, str], folders: dict[str, Path], tmp_path: Path
) -> None:
    """In a process that has nothing but diffusers to begin with."""
    line = [
        sys.executable,
        "-c",
        STOCK,
        folders[name],
        json.dumps(GIVEN[name]),
        json.dumps(options),
    ]
    made = subprocess.run(
        line, env=os.environ | {"HF_HOME": str(tmp_path)}, capture_output=True, text=True
    )
    shape = (4, 3, 8, 8) if name != "pixels" else (4, 3, 4, 4)
    assert made.stdout == f"torch.float32 {shape} True\n", made.stderr
    # Nothing is told but what diffusers tells of any such pipeline.
    assert "xpected" not in made.stderr


def test_it_is_written_when_asked_for_and_stays_through_changes(
    folders: dict[str, Path], tmp_path: Path, hddm: Command
) -> None:
    experts = [folders["pixels"] / f"experts/{k}" for k in range(3)]
    assemble(experts[:2], tmp_path / "plain")
    before = contents(tmp_path / "plain")
    assert PIPELINE_FILE not in before
    sealed = sha256_of(tmp_path / "plain" / MANIFEST)
    code, _, err = hddm("assemble", tmp_path / "plain", "--diffusers-pipeline")
    assert (code, err) == (0, "")
    after = contents(tmp_path / "plain")
    assert after.pop(PIPELINE_FILE) is not None
    assert (after, sha256_of(tmp_path / "plain" / MANIFEST)) == (before, sealed)
    assert hddm("assemble", *experts[:2], "--out", tmp_path / "new", "--diffusers-pipeline")[0] == 0
    assert contents(tmp_path / "new") == contents(tmp_path / "plain")
    assert hddm("assemble", tmp_path / "new", "--add", experts[2])[0] == 0
    assert hddm("assemble", tmp_path / "new", "--remove", "0")[0] == 0
    assert (tmp_path / "new" / PIPELINE_FILE).read_bytes() == PIPELINE_CODE


def test_another_file_of_that_name_is_replaced_only_when_asked_and_never_where_it_is_linked(
    folders: dict[str, Path], tmp_path: Path, hddm: Command
) -> None:
    experts = [folders["pixels"] / f"experts/{k}" for k in range(3)]
    assemble(experts, tmp_path / "mine")
    own = tmp_path / "mine" / PIPELINE_FILE
    own.write_text("raise SystemExit('was run')")
    load_pipeline(tmp_path / "mine")
    code, out, _ = hddm("inspect", tmp_path / "mine")
    assert (code, "pipeline_py: another's, which hddm does not run" in out) == (0, True)
    # The copy has the same file by a hard link.
    assert hddm("assemble", tmp_path / "mine", "--remove", "2", "--out", tmp_path / "copy")[0] == 0
    assert (tmp_path / "copy" / PIPELINE_FILE).read_text() == own.read_text()
    assert hddm("assemble", tmp_path / "copy", "--diffusers-pipeline")[0] == 0
    assert (tmp_path / "copy" / PIPELINE_FILE).read_bytes() == PIPELINE_CODE
    assert own.read_text() == "raise SystemExit('was run')"
