"""What --dry-run says of samples, held against the calls and the weights of the command itself."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hddm.experts.assembly import assemble
from hddm.networks.offload import StoredNetwork
from hddm.pipelines.needs import needs_of_sampling
from hddm.pipelines.samples import sample_to_folder
from hddm.settings import SampleSettings
from hddm.utils.machine import Room
from tests.artefacts import Command
from tests.conftest import Trio

pytestmark = pytest.mark.integration


class Seen:
    """Samples that went through networks, and the bytes of their weights."""

    def __init__(self) -> None:
        self.samples = 0
        self.weights: dict[StoredNetwork, int] = {}


@contextmanager
def watched() -> Iterator[Seen]:
    """Watch every call of an expert's network in the block."""
    seen = Seen()

    def look(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, StoredNetwork):
            seen.samples += len(inputs[0])
            parameters = module.network.parameters()
            seen.weights[module] = sum(p.numel() * p.element_size() for p in parameters)

    hook = nn.modules.module.register_module_forward_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def three(trio: Trio, root: Path) -> Path:
    assemble(trio.experts, root / "of_needs", trio.router)
    return root / "of_needs"


SHORT = {"num_images": 9, "batch_size": 4, "steps": 3, "seed": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "draw"},
        {"strategy": "full"},
        {"strategy": "top-2"},
        {"strategy": "commit-0.6"},
        {"expert": 1},
        {"strategy": "full", "solver": "heun"},
        {"strategy": "full", "guidance_scale": 2.0, "class_labels": "rows"},
        {"strategy": "full", "class_labels": "rows,rows,rows,rows,rows,columns"},
        {"strategy": "draw", "guidance_scale": 2.0, "class_labels": "rows,columns"},
        {"expert": 2, "guidance_scale": 2.0, "class_labels": "0", "guidance_interval": (0.3, 0.8)},
    ],
    ids=str,
)
def test_calls_and_weights_are_those_of_the_command(
    three: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    settings = SampleSettings.model_validate(SHORT | options)
    needs = needs_of_sampling(three, settings)
    with watched() as seen:
        sample_to_folder(three, tmp_path / "out", settings)
    calls = next(one.calls for one in needs.work if one.name == "networks")
    assert calls == seen.samples
    weights = next(one.size for one in needs.memory if one.name == "experts")
    # Which experts a router chooses is not known, and all that it may choose count.
    assert weights is not None
    assert weights >= sum(seen.weights.values()) > 0
    if options.get("strategy") != "top-2":
        assert weights == sum(seen.weights.values())


def experts_of(source: Path, **options: Any) -> dict[str, int]:
    settings = SampleSettings.model_validate(SHORT | options)
    return {one.name: one.size or 0 for one in needs_of_sampling(source, settings).memory}


def test_offload_and_int8_hold_less_at_once(three: Path) -> None:
    pytest.importorskip("torchao")
    whole = experts_of(three, strategy="full")["experts"]
    assert experts_of(three, strategy="full", offload="disk")["experts"] == whole // 3
    # Main memory is the device's own here.
    assert experts_of(three, strategy="full", offload="ram")["experts"] == whole
    small = experts_of(three, strategy="full", quantize="int8")["experts"]
    assert small < whole
    both = experts_of(three, strategy="full", quantize="int8", offload="ram")
    assert both["experts"] == small // 3
    assert both["idle experts"] == whole
    assert experts_of(three, strategy="full", dtype="float64")["experts"] == 2 * whole


def test_turns_of_mixed_experts_are_not_measured_and_say_why(three: Path) -> None:
    settings = SampleSettings.model_validate(SHORT | {"strategy": "full", "offload": "disk"})
    needs = needs_of_sampling(three, settings)
    reading = next(one for one in needs.work if one.name == "reading weights")
    assert reading.seconds is None
    assert "not measured     experts that are mixed take turns" in "\n".join(needs.lines())


@pytest.mark.parametrize("steps", [2, 8])
def test_time_is_finite_and_in_proportion_to_the_steps(three: Path, steps: int) -> None:
    needs = needs_of_sampling(three, SampleSettings.model_validate(SHORT | {"steps": steps}))
    work = next(one for one in needs.work if one.name == "networks")
    assert work.seconds is not None
    assert 0 < work.seconds < math.inf
    assert work.calls % steps == 0
    assert work.total == work.calls * work.seconds


def test_activations_are_near_what_the_allocator_holds(three: Path) -> None:
    settings = SampleSettings.model_validate(
        SHORT | {"expert": 0, "num_images": 16, "batch_size": 16}
    )
    needs = needs_of_sampling(three, settings)
    said = next(one.size for one in needs.memory if one.name == "activations") or 0
    from hddm.experts.loading import load

    field = load(three).experts[0]
    x, t = torch.zeros(16, *field.sample_shape or ()), torch.full((16,), 0.5, dtype=torch.float64)
    labels = torch.zeros(16, dtype=torch.long)
    with torch.no_grad():
        field.velocity(x, t, class_labels=labels)
        with torch.profiler.profile(profile_memory=True) as profiled:
            field.velocity(x, t, class_labels=labels)
    alive = most = 0
    events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
    for one in sorted(events, key=lambda event: event.start_ns()):
        alive += one.nbytes()
        most = max(most, alive)
    assert 0.6 * most <= said <= 1.6 * most


def test_what_does_not_fit_is_not_measured_and_a_remedy_is_named(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hddm.pipelines.needs.room_on", lambda device: Room("a thimble", 1000, 900))
    needs = needs_of_sampling(three, SampleSettings.model_validate(SHORT | {"strategy": "full"}))
    assert needs.memory[-1].size is None
    said = "\n".join(needs.lines())
    assert "does not fit: pass `offload` disk, or pass `quantize` int8" in said
    assert "0 s" not in said


def test_a_dry_run_writes_nothing_and_nothing_is_in_its_way(
    hddm: Command, three: Path, tmp_path: Path
) -> None:
    out = tmp_path / "samples"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    code, said, told = hddm("sample", three, "--out", out, "--num-images", 2, "--dry-run")
    assert code == 0, told
    assert "dry run: nothing is written" in said
    assert "between" in said or "as the router decides" in said or "calls of one image" in said
    assert [path.name for path in tmp_path.rglob("*")] == ["samples", "mine.txt"]
