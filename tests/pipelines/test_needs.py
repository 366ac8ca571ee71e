"""What --dry-run says of samples, held against the calls and the weights of the command itself."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from PIL import Image
from torch import nn

from hddm.experts.assembly import assemble
from hddm.networks.offload import Shelf, StoredNetwork
from hddm.pipelines import needs as needs_module
from hddm.pipelines.needs import Sampling, beside_experts, needs_of_sampling, of_weights
from hddm.pipelines.networks_measured import Measured
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.pipelines.samples import opened, sample_to_folder
from hddm.settings import SampleSettings
from hddm.utils.errors import UsageError
from hddm.utils.machine import Room
from tests.artefacts import Command
from tests.conftest import Trio
from tests.ensemble_files import write_text

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
        # Parts of cases below.
        pytest.param({"strategy": "full"}, marks=pytest.mark.slow),
        pytest.param({"expert": 1}, marks=pytest.mark.slow),
        {"strategy": "top-2"},
        {"strategy": "commit-0.6"},
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


def test_compiling_is_no_part_of_a_dry_run_which_says_so_before_it_measures(
    three: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("hddm.experts.expert_set.compile_blocks", refused)
    measured = list[int]()

    def measure_experts(found: Sampling, free: int) -> dict[str, Measured]:
        measured.append(len(caplog.messages))
        return measured_by_hand(found, free)

    measured_by_hand = needs_module.measure_experts
    monkeypatch.setattr("hddm.pipelines.needs.measure_experts", measure_experts)
    caplog.set_level(logging.INFO, "hddm")
    for is_compiled in (False, True):
        caplog.clear()
        settings = SampleSettings.model_validate(SHORT | {"compile": is_compiled})
        needs = needs_of_sampling(three, settings)
        said = "\n".join(caplog.messages[: measured.pop()])
        assert "dry run: runs each kind of network a few times" in said
        assert ("without `compile`" in said) == is_compiled
        assert ("without `compile`" in "\n".join(needs.lines())) == is_compiled


def test_a_sum_of_times_says_that_it_begins_after_the_start(three: Path) -> None:
    needs = needs_of_sampling(three, SampleSettings.model_validate(SHORT))
    (line,) = [line for line in needs.lines() if "in all" in line and " s " in line]
    assert line.endswith("after the start, which loads libraries and files")


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


@pytest.fixture(scope="module")
def text(root: Path) -> Path:
    """Experts that take text, with a VAE, text encoders and a router."""
    return write_text(root / "of_text")


ELSEWHERE = torch.device("meta")
"""A device with memory of its own, as a GPU's, on which nothing runs."""


@pytest.mark.parametrize("offload", ["none", "ram", "disk"])
def test_parts_beside_experts_are_counted_where_the_pipeline_puts_them(
    text: Path, offload: Any
) -> None:
    pipe = HDDMPipeline.from_pretrained(text, offload=offload)
    rows = beside_experts(pipe, ELSEWHERE)
    before = {one.name: one.size for one in rows if not one.is_on_host}
    idle = {one.name.removesuffix(", idle"): one.size for one in rows if one.is_on_host}
    pipe.to(ELSEWHERE)
    stays, waits = dict[str, int](), dict[str, int]()
    for name, part in (
        ("router", pipe.router),
        ("vae", pipe.vae),
        ("text encoder", pipe.text_encoder),
    ):
        there = {one.device.type for one in part.parameters()}
        size = sum(one.nbytes for one in [*part.parameters(), *part.buffers()])
        (stays if there == {"meta"} else waits)[name] = size
    assert idle == waits
    largest = max(waits, key=lambda name: waits[name], default=None)
    assert before == (stays if largest is None else stays | {largest: waits[largest]})
    # One object decides: what a limit leaves to experts is what is not counted here.
    limit = 10**9
    if offload != "none":
        pipe.limit_memory(limit)
        parameters = [one.nbytes for part in pipe.beside_experts(True) for one in part.parameters()]
        assert pipe.experts.shelf.budget == limit - sum(parameters)


def test_nothing_comes_to_a_device_that_has_no_room_for_what_stays(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("moved")

    monkeypatch.setattr("hddm.pipelines.needs.room_on", lambda device: Room("a thimble", 1000, 900))
    monkeypatch.setattr("hddm.pipelines.needs.has_own_memory", lambda device: True)
    monkeypatch.setattr(HDDMPipeline, "to", refused)
    needs = needs_of_sampling(text, SampleSettings.model_validate(SHORT))
    assert not needs.fits
    said = "\n".join(needs.lines())
    assert "vae" in said
    assert "does not fit: pass `offload` disk" in said


@pytest.mark.parametrize(
    ("options", "is_held"),
    [
        ({}, True),
        ({"output_type": "latent"}, False),
        # It encodes the picture, or says how many pixels a latent has.
        ({"output_type": "latent", "init_image": True}, True),
        ({"output_type": "latent", "height": 8, "width": 8}, True),
    ],
    ids=str,
)
def test_a_vae_that_does_not_run_is_neither_held_nor_counted(
    text: Path, tmp_path: Path, options: dict[str, Any], is_held: bool
) -> None:
    if "init_image" in options:
        Image.new("RGB", (8, 8)).save(tmp_path / "begin.png")
        options = options | {"init_image": tmp_path / "begin.png"}
    settings = SampleSettings.model_validate(
        SHORT | {"strategy": "draw", "prompts": ("a cat",)} | options
    )
    pipeline, _, _ = opened(text, settings)
    assert (pipeline.vae is not None) == is_held
    needs = needs_of_sampling(text, settings)
    assert ("vae" in {one.name for one in needs.memory}) == is_held
    is_decoded = "output_type" not in options
    assert ("decoding" in {one.name for one in needs.memory}) == is_decoded
    assert any(one.name == "decoding, PNG files" for one in needs.work) == is_decoded


def test_latents_have_no_sheet_in_a_dry_run_either(text: Path) -> None:
    settings = SampleSettings.model_validate(SHORT | {"output_type": "latent"})
    with pytest.raises(UsageError, match="`grid`"):
        needs_of_sampling(text, settings, grid=True)


def test_the_network_that_is_brought_ahead_counts(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hddm.networks.offload.free_memory", lambda device: 10**12)
    shelf = Shelf("ram")
    gpu = SimpleNamespace(type="cuda")
    for size in (10, 20, 30):
        shelf.add(
            cast(StoredNetwork, SimpleNamespace(size=size, placement=SimpleNamespace(device=gpu)))
        )
    assert shelf.budget == 30
    shelf.look_for_room()
    assert shelf.budget == 50

    def found(one: Shelf) -> None:
        one._has_room_for_next = True

    monkeypatch.setattr(Shelf, "look_for_room", found)
    experts = HDDMPipeline.from_pretrained(three, offload="disk").experts
    fields = experts.fields()
    size = experts.stored[0].size
    assert of_weights(experts, fields)[0].size == 2 * size


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("offload", ["ram", "disk"])
@pytest.mark.parametrize("number", [1, 2, 100])
def test_a_limit_says_how_many_experts_are_there_at_once(
    three: Path, monkeypatch: pytest.MonkeyPatch, offload: str, number: int, is_gpu: bool
) -> None:
    """Below the size of all experts and above it, on a device with and without memory of its own."""
    if is_gpu:
        monkeypatch.setattr("hddm.pipelines.needs.has_own_memory", lambda device: True)
    pipe = HDDMPipeline.from_pretrained(three)
    size = pipe.experts.stored[0].size
    limit = number * size + sum(one.nbytes for one in pipe.router.parameters())
    options = {"strategy": "full", "offload": offload, "max_memory": f"{limit}B"}
    needs = needs_of_sampling(three, SampleSettings.model_validate(SHORT | options))
    found = {one.name: one for one in needs.memory}
    reading = next(one for one in needs.work if one.name == "reading weights")
    if offload == "ram" and not is_gpu:
        assert found["experts"].note == "3 networks in float32, all in memory"
        assert found["experts"].size == 3 * size
        assert reading.seconds is not None
        return
    fitting = min(number, 3)
    assert found["experts"].size == fitting * size
    assert found["experts"].note == f"{fitting} of 3 networks at once, in float32"
    assert (reading.seconds is None) == (fitting < 3)
    assert ("idle experts" in found) == (offload == "ram")
    if offload == "ram":
        assert found["idle experts"].size == 3 * size
