"""GPUs are asked for without torch where the system has no device for one."""

import os
from typing import Any

import pytest
import torch

from hddm.utils.accelerators import count_gpus, gpu_name


def test_torch_is_asked_only_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found: dict[str, Any] = {}
    for name in ("null", "nvme0", "nvidia0", "nvhost-gpu", "kfd", "dxg"):
        monkeypatch.setattr(os, "listdir", lambda folder, name=name: ["zero", name])
        found[name] = count_gpus(), gpu_name()
    absent, present = (0, None), (3, "a GPU")
    assert found == {
        **{"null": absent, "nvme0": absent},
        **{"nvidia0": present, "nvhost-gpu": present, "kfd": present, "dxg": present},
    }


def test_torch_is_asked_where_devices_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> list[str]:
        raise PermissionError(folder)

    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert count_gpus() == 2


def test_macs_have_none_and_windows_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = {}
    for system in ("darwin", "win32"):
        monkeypatch.setattr("sys.platform", system)
        found[system] = count_gpus()
    assert found == {"darwin": 0, "win32": 2}
