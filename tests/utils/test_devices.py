"""What is right for a device by default."""

import json
from pathlib import Path

import pytest
import torch

import hddm as library
from hddm.settings import SampleSettings
from hddm.training.device import float32_products
from hddm.training.settings import ExpertRecipe, ExpertSettings, resolve
from hddm.utils.tensors import best_dtype, dtype_on
from tests.artefacts import Command
from tests.conftest import Trio

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("has_bfloat16", "best"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_computes_in_bfloat16_if_its_hardware_has_it(
    has_bfloat16: bool, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated, bfloat16 is slower than float32: the question is asked without emulation."""

    def is_supported(including_emulation: bool = True) -> bool:
        return including_emulation or has_bfloat16

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert dtype_on(CUDA, "auto") is getattr(torch, best)
    assert dtype_on(CUDA, "float16") is torch.float16


def test_a_cpu_computes_in_float32() -> None:
    assert best_dtype(torch.device("cpu")) is torch.float32
    settings = ExpertSettings(objective="flow", steps=1, device="cpu")
    assert settings.mixed_precision == "auto"
    assert resolve(ExpertRecipe, settings).mixed_precision == "no"


def test_the_precision_of_a_resumed_run_is_that_of_its_recipe() -> None:
    settings = ExpertSettings(objective="flow", steps=1, device="cpu")
    before = resolve(ExpertRecipe, settings).model_dump() | {"mixed_precision": "bf16"}
    assert resolve(ExpertRecipe, settings, before=before).mixed_precision == "bf16"


def test_products_of_float32_are_in_tf32_on_a_gpu_while_it_trains() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with float32_products(CUDA) as precision:
        assert precision == matmul.fp32_precision == "tf32"
    with float32_products(torch.device("cpu")) as precision:
        assert precision == "ieee"
        assert matmul.fp32_precision == before
    assert matmul.fp32_precision == before


@pytest.mark.integration
def test_samples_record_the_dtype_that_they_were_computed_in(
    trio: Trio, hddm: Command, tmp_path: Path
) -> None:
    assert SampleSettings().dtype == "auto"
    sizes = ("--num-images", 1, "--steps", 2, "--output-type", "latent")
    hddm("sample", trio.experts[0], "--out", tmp_path / "auto", *sizes)
    hddm("sample", trio.experts[0], "--out", tmp_path / "stated", *sizes, "--dtype", "float32")
    for name in ("auto", "stated"):
        record = json.loads((tmp_path / name / "sampling.json").read_text())
        assert record["dtype"] == "float32"
    # Two spellings of one decision are one run.
    code, _, error = hddm(
        "sample",
        trio.experts[0],
        "--out",
        tmp_path / "auto",
        *sizes,
        "--dtype",
        "float32",
        "--resume",
    )
    assert code == 0, error
    assert library.load(trio.experts[0], dtype="auto").network.dtype is torch.float32
