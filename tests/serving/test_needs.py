"""What --dry-run says of a service."""

import logging
from pathlib import Path

import pytest
import torch

from hddm.experts.loading import load
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.serving.needs import needs_of_service
from hddm.serving.service import Placement
from hddm.settings import ServeSettings
from hddm.utils.errors import HddmError, size_text
from hddm.utils.machine import Room, main_memory
from hddm.utils.needs import Needs
from tests.artefacts import Command

pytestmark = pytest.mark.integration


def test_a_worker_holds_one_expert_and_the_front_the_router(ensemble: Path) -> None:
    placement = Placement({"": 2, "flow": 3})
    needs, lines = needs_of_service(ensemble, ServeSettings(), placement)
    assert [one.what for one in needs] == [
        "a worker of ddpm (2 workers)",
        "a worker of flow (3 workers)",
        "front",
    ]
    whole = load(ensemble)
    for one, field in zip(needs, whole.experts, strict=False):
        networks = [field.network] if field.weak is None else [field.network, field.weak.network]
        parameters = [p for network in networks for p in network.parameters()]
        assert one.memory[0].size == sum(p.numel() * p.element_size() for p in parameters)
        assert all(part.seconds for part in one.work)
    router = sum(p.numel() * p.element_size() for p in whole.router.network.parameters())
    assert next(one.size for one in needs[-1].memory if one.name == "router") == router
    memory = [one.on_device for one in needs]
    assert 2 * memory[0] + 3 * memory[1] + memory[2] > 5e8
    assert lines[0].startswith("all processes together: about ")


def test_workers_elsewhere_are_not_measured_and_their_weights_are_known(ensemble: Path) -> None:
    needs, lines = needs_of_service(ensemble, ServeSettings(), Placement(), "ray://cluster:10001")
    assert lines == []
    for one in needs:
        assert one.memory[0].size
        assert one.memory[-1].size is None
        said = "\n".join(one.lines())
        assert "not measured     the workers run on other machines" in said
        assert "whether it fits: not known" in said
        assert " 0 s" not in said


class Machine:
    """A machine with GPUs, whose networks run on the CPU; what it was asked for is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int, size: int = 10**12) -> None:
        self.rooms = [Room(f"GPU {k}", size, size) for k in range(gpus)]
        self.device = torch.device("cpu", 0)
        for name, found in {
            "gpu_rooms": lambda: self.rooms,
            "available_device": lambda name: torch.device("cpu") if name == "cpu" else self.device,
            "has_own_memory": self.is_gpu,
            "room_on": lambda device: self.rooms[0] if self.is_gpu(device) else main_memory(),
        }.items():
            monkeypatch.setattr(f"hddm.serving.needs.{name}", found)
        monkeypatch.setattr("hddm.pipelines.needs.has_own_memory", self.is_gpu)

    def is_gpu(self, device: torch.device) -> bool:
        return device == self.device


def held(needs: list[Needs]) -> dict[str, int]:
    """Bytes on a GPU by the names of processes; 0 for those on a CPU."""
    found = {}
    for one in needs:
        name = one.what.removeprefix("a worker of ").split(" ")[0]
        found[name] = 0 if one.host is None else one.on_device
    return found


@pytest.mark.parametrize(
    ("gpus", "resources", "replicas", "on_gpus", "on_cpu"),
    [
        (1, {}, {}, [["ddpm", "flow", "front"]], []),
        (2, {}, {}, [["ddpm", "front"], ["flow"]], []),
        (2, {"": {"num_gpus": 1}}, {}, [["ddpm"], ["flow"]], ["front"]),
        (2, {"": {"num_gpus": 0.6}}, {}, [["ddpm", "front"], ["flow"]], []),
        (2, {"": {"num_gpus": 0.25}}, {"flow": 2}, [["ddpm", "flow", "flow", "front"], []], []),
        (1, {"ddpm": {"num_gpus": 0}, "front": {"num_gpus": 0}}, {}, [["flow"]], ["ddpm", "front"]),
    ],
)
def test_memory_is_added_up_per_gpu_as_the_service_places_processes(
    ensemble: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    resources: dict[str, dict[str, float]],
    replicas: dict[str, int],
    on_gpus: list[list[str]],
    on_cpu: list[str],
) -> None:
    Machine(monkeypatch, gpus)
    needs, lines = needs_of_service(ensemble, ServeSettings(), Placement(replicas, resources))
    sizes = held(needs)
    assert [name for name, size in sizes.items() if not size] == on_cpu
    shown = [line for line in lines if line.startswith("GPU ")]
    expected = []
    for k, there in enumerate(on_gpus):
        if there:
            total = size_text(sum(sizes[name] for name in there))
            what = f"GPU {k} with {', '.join(there)}, without what CUDA itself takes for each"
            expected.append(f"{what}: about {total} of")
    assert [line.partition(" of 1,000.00 GB")[0] + " of" for line in shown] == expected
    # Main memory holds the processes, wherever their networks are.
    assert lines[-2].startswith("all processes together: about ")


def test_the_front_on_a_gpu_is_measured_there(
    ensemble: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, asked = Machine(monkeypatch, 1), list[torch.device]()
    to = HDDMPipeline.to

    def noted(pipeline: HDDMPipeline, device: torch.device) -> HDDMPipeline:
        asked.append(device)
        return to(pipeline, device)

    monkeypatch.setattr(HDDMPipeline, "to", noted)
    needs, _ = needs_of_service(ensemble, ServeSettings(), Placement())
    assert asked == [machine.device]
    front = needs[-1]
    on_gpu = {one.name for one in front.memory if not one.is_on_host}
    assert {"router", "decoding"} <= on_gpu
    assert front.on_host == next(one.size for one in front.memory if one.name == "process")


def test_what_shares_a_gpu_must_fit_it_together(
    ensemble: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, 1)
    needs, _ = needs_of_service(ensemble, ServeSettings(), Placement())
    largest = max(held(needs).values())
    Machine(monkeypatch, 1, largest + 1)
    needs, lines = needs_of_service(ensemble, ServeSettings(), Placement())
    assert all(one.fits for one in needs)
    assert lines[1].startswith("  does not fit: pass `quantize` int8")


def test_gpus_that_are_not_there_are_refused_as_by_the_service(
    ensemble: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, 1)
    with pytest.raises(HddmError, match="need 2 GPU, and the cluster has 1"):
        needs_of_service(ensemble, ServeSettings(), Placement({}, {"": {"num_gpus": 1}}))


def test_unknown_names_are_refused_as_by_the_service(ensemble: Path) -> None:
    with pytest.raises(HddmError, match="`num_replicas` flaw"):
        needs_of_service(ensemble, ServeSettings(), Placement({"flaw": 2}))


def test_compiling_is_no_part_of_what_is_measured(
    ensemble: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("hddm.experts.expert_set.compile_blocks", refused)
    caplog.set_level(logging.INFO, "hddm")
    needs, _ = needs_of_service(ensemble, ServeSettings(compile=True), Placement())
    assert "without `compile`" in caplog.messages[0]
    assert "without `compile`" in "\n".join(needs[0].lines())


def test_a_dry_run_starts_nothing(hddm: Command, ensemble: Path) -> None:
    code, said, told = hddm("serve", ensemble, "--batch-size", 2, "--dry-run")
    assert code == 0, told
    assert "a call of" in said
    assert "dry run: nothing is written" in said
