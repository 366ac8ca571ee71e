"""What is right for a device by default."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import hddm as library
from hddm.pipelines import networks_measured
from hddm.pipelines.samples import read_model
from hddm.settings import SampleSettings
from hddm.training.device import float32_products
from hddm.training.settings import ExpertRecipe, ExpertSettings, resolve
from hddm.utils.machine import main_memory, room_on
from hddm.utils.memory import free_memory
from hddm.utils.needs import Memory, Needs
from hddm.utils.tensors import best_dtype, dtype_on, report_choice
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


@pytest.mark.parametrize(
    ("device", "chosen", "is_said"),
    [
        ("cpu", "float32", False),
        ("cpu", "no", False),
        ("cpu", "bfloat16", True),
        ("cuda:1", "float32", True),
        ("mps", "no", True),
    ],
)
def test_a_choice_is_told_unless_there_is_none(
    device: str, chosen: str, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hddm"):
        report_choice("dtype", chosen, torch.device(device))
    said = [f"`dtype` auto: chose {chosen} on {device}"] if is_said else []
    assert caplog.messages == said


def test_what_auto_chose_is_told_when_a_training_or_sampling_begins(
    ddpm_expert: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hddm")

    def begin(number_format: str, precision: str, before: Any = None) -> list[str]:
        caplog.clear()
        read_model(ddpm_expert, SampleSettings(dtype=number_format, device="cpu"))
        settings = ExpertSettings(
            objective="flow", steps=1, mixed_precision=precision, device="cpu"
        )
        resolve(ExpertRecipe, settings, before=before)
        return [line for line in caplog.messages if "auto" in line]

    assert begin("auto", "auto") == []
    monkeypatch.setattr("hddm.utils.tensors.best_dtype", lambda device: torch.bfloat16)
    assert begin("bfloat16", "bf16") == []
    dtype, precision = "`dtype` auto: chose bfloat16 on cpu", "`mixed_precision` auto: chose"
    assert begin("auto", "auto") == [dtype, f"{precision} bf16 on cpu"]
    # A run that goes on keeps what it had.
    before = {"mixed_precision": "fp16", "objective": "flow"}
    assert begin("auto", "auto", before) == [dtype, f"{precision} fp16 on cpu"]


class Accelerator:
    """What torch says of a device other than CUDA's, which keeps a cache of 100 bytes, 60 of them in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
        self.waits: list[torch.device] = []
        self.tells = tells
        for name in ("get_memory_info", "memory_reserved", "memory_allocated", "synchronize"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))

    def get_memory_info(self, device: torch.device) -> tuple[int, int]:
        if not self.tells:
            raise RuntimeError("this backend does not support it")
        return 700, 1000

    def memory_reserved(self, device: torch.device) -> int:
        return 100

    def memory_allocated(self, device: torch.device) -> int:
        return 60

    def synchronize(self, device: torch.device) -> None:
        self.waits.append(device)


def test_every_device_with_memory_of_its_own_tells_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Accelerator(monkeypatch, tells=True)
    for device in (torch.device("xpu", 0), CUDA):
        room = room_on(device)
        assert room is not None
        assert (room.total, room.free, free_memory(device)) == (1000, 800, 740)


def test_a_device_that_does_not_tell_its_memory_holds_neither_everything_nor_main_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Accelerator(monkeypatch, tells=False)
    device = torch.device("xpu", 0)
    assert room_on(device) is None
    assert free_memory(device) is None
    needs = Needs("sampling", [Memory("experts", 10**15)], (), room_on(device), main_memory())
    assert needs.left == 0
    assert "not known" in needs.lines()[-1]
    # MPS shares main memory, of which nothing is kept free for it.
    assert room_on(torch.device("mps")) is not None
    assert free_memory(torch.device("mps")) is free_memory(torch.device("cpu")) is None


def test_clocks_are_read_when_the_device_is_done_whatever_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Accelerator(monkeypatch, tells=True)
    devices = [torch.device(kind, 0) for kind in ("cuda", "mps", "xpu")]
    for device in (*devices, torch.device("cpu")):
        networks_measured._now(device)
    assert seen.waits == devices


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
