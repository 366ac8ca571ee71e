"""Experts that come and go: the same images, no more memory than asked for, nothing read in vain."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import hddm
from hddm.ensemble import Ensemble
from hddm.experts.expert_folders import apart
from hddm.experts.expert_set import ExpertSet
from hddm.guidance import Guidance
from hddm.networks.offload import Offload, Shelf, StoredNetwork
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.pipelines.samples import sample_to_folder
from hddm.settings import Computing
from hddm.utils.errors import HddmError
from hddm.utils.tensors import read_safetensors
from tests.artefacts import Command, copied, refusal
from tests.cases import in_parts
from tests.ensemble_files import WEIGHTS, Scales, flow_expert, write_ensemble

NUM = 4
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four experts of the same size behind a router that uses them all."""
    experts = [flow_expert(seed) for seed in range(NUM)]
    return write_ensemble(tmp_path_factory.mktemp("offload"), experts)


def _loaded(
    folder: Path,
    offload: Offload = "none",
    max_memory: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Ensemble:
    model = hddm.load(folder, dtype, offload=offload, max_memory=max_memory)
    assert isinstance(model, Ensemble)
    return model


def _networks(model: Ensemble) -> list[StoredNetwork]:
    networks = [field.network for field in model.experts]
    assert all(isinstance(network, StoredNetwork) for network in networks)
    return networks  # type: ignore[return-value]


def _present(networks: Sequence[StoredNetwork]) -> list[int]:
    """Those whose weights are really there."""
    return [
        k for k, one in enumerate(networks) if not any(p.is_meta for p in one.network.parameters())
    ]


def _sampled(model: Ensemble, **options: object) -> Tensor:
    return hddm.sample(model, 5, 1, STEPS, **options)  # type: ignore[arg-type]


def _limit(folder: Path, experts: int) -> int:
    """Bytes of the router and of so many experts."""
    router = sum(t.numel() * 4 for t in read_safetensors(folder / "router" / WEIGHTS).values())
    return router + experts * _networks(_loaded(folder))[0].size


def _piped(pipe: HDDMPipeline) -> Tensor:
    """What `_sampled` gives, by the pipeline."""
    pipe.set_progress_bar_config(disable=True)
    options = {"num_images_per_prompt": 5, "num_inference_steps": STEPS, "output_type": "latent"}
    return pipe(seed=1, **options).images


@pytest.mark.integration
@pytest.mark.parametrize("strategy", ["full", "top-1", "draw"])
def test_images_are_the_same_bit_for_bit_wherever_weights_wait(folder: Path, strategy: str) -> None:
    plain = _sampled(_loaded(folder), strategy=strategy)
    modes: list[tuple[Offload, int | None]] = [("ram", None), ("disk", _limit(folder, 1))]
    for mode, limit in modes:
        model = _loaded(folder, mode, limit)
        for _ in range(2):
            assert torch.equal(_sampled(model, strategy=strategy), plain)


@pytest.mark.parametrize("mode", ["none", "ram", "disk"])
def test_experts_that_nobody_chose_need_no_file(
    folder: Path, tmp_path: Path, mode: Offload
) -> None:
    own = copied(folder, tmp_path)
    model, whole = _loaded(own, mode), _loaded(folder)
    model.router = whole.router = lambda x, t: torch.tensor([[0.0, 0.6, 0.4, 0.0]]).expand(
        len(x), -1
    )
    model.strategy = whole.strategy = "full"
    for k in (0, 3):
        (own / "experts" / str(k) / WEIGHTS).unlink()
    assert torch.equal(_sampled(model), _sampled(whole))
    assert torch.equal(_sampled(model, expert=1), _sampled(whole, expert=1))
    with pytest.raises(HddmError, match=f"experts/3/{WEIGHTS}"):
        _sampled(model, expert=3)


@pytest.mark.parametrize(
    ("mode", "limit", "room"),
    [("ram", 1, 1), ("disk", 3, 3), ("disk", None, 1), ("none", None, NUM)],
)
def test_no_more_is_on_the_device_than_the_limit_allows(
    folder: Path, mode: Offload, limit: int | None, room: int
) -> None:
    """By default the largest alone; without offload all stay."""
    model = _loaded(folder, mode, limit and _limit(folder, limit) + 100)
    networks, most = _networks(model), []
    for network in networks:
        network.network.register_forward_pre_hook(lambda *_: most.append(len(_present(networks))))
    _sampled(model, strategy="full")
    assert len(most) == NUM * STEPS
    assert max(most) <= room
    assert len(_present(networks)) == room


def test_eight_experts_never_take_the_memory_of_two() -> None:
    scales = Scales()
    experts = [scales.expert(seed, hidden_size=128, depth=2, num_heads=2) for seed in range(8)]
    held = ExpertSet(experts, shelf=Shelf("disk"))
    size = held.stored[0].size
    assert size > 2e6
    model = Ensemble(held.fields(), lambda x, t: torch.full((len(x), 8), 1 / 8), "full")
    _sampled(model)
    assert size <= scales.most < 2 * size
    assert scales.held() <= size


@pytest.mark.parametrize("strategy", ["draw", "full"])
@pytest.mark.parametrize("mode", ["ram", "disk"])
def test_of_a_pair_for_parts_of_t_one_is_on_the_device_and_the_switch_comes_once(
    strategy: str, mode: Offload
) -> None:
    parts = [(0.5, 1), (0, 0.5)]
    scales = Scales()
    held = ExpertSet([scales.expert(k, part) for k, part in enumerate(parts)], shelf=Shelf(mode))
    model, here = Ensemble(in_parts(held.fields(), [0, 0]), strategy=strategy), []
    for network in held.stored:
        network.clear()
        network.network.register_forward_pre_hook(lambda *_: here.append(_present(held.stored)))
    for run in range(2):
        hddm.sample(model, 5, 1, 8)
        # Five of eight steps begin at t = 0.5 or above.
        assert here == ([[0]] * 5 + [[1]] * 3) * (run + 1)
    assert scales.reads == ([0, 1, 0, 1] if mode == "disk" else [0, 1])
    assert mode == "ram" or scales.most == held.stored[0].size


def test_under_draw_each_expert_is_read_once_and_images_stay_the_same() -> None:
    scales = Scales()
    own = [scales.expert(seed) for seed in range(3)]
    plain = Ensemble(ExpertSet(own).fields(), strategy="draw")
    expected = hddm.sample(plain, 16, 3, STEPS)
    scales.reads.clear()
    held = ExpertSet(own, shelf=Shelf("disk"))
    found = hddm.sample(Ensemble(held.fields(), strategy="draw"), 16, 3, STEPS)
    torch.testing.assert_close(found, expected)
    assert sorted(scales.reads) == [0, 1, 2]


def test_an_expert_and_its_weak_model_stay_together() -> None:
    scales = Scales()
    own, weak = scales.expert(0), apart(scales.expert(1))
    held = ExpertSet([replace(own, weak=weak.unread)], shelf=Shelf("disk"))
    model = Ensemble(held.fields(), strategy="draw")
    hddm.sample(model, 2, 0, STEPS, guidance_scale=Guidance(2.0, by="weak"))
    assert sorted(scales.reads) == [0, 1]


@pytest.mark.parametrize("output_type", ["latent", "pt", "pil"])
def test_a_pipeline_keeps_the_order_of_images_when_experts_come_one_by_one(
    folder: Path, output_type: str
) -> None:
    pipe, given = HDDMPipeline.from_pretrained(folder), {"num_inference_steps": STEPS, "seed": 1}
    pictures = [
        pipe(batch_size=7, strategy="draw", output_type=output_type, **given).images
        for _ in (0, pipe.enable_model_cpu_offload(device="cpu"))
    ]
    for one, other in zip(*pictures, strict=True):
        tensors = [torch.tensor(np.asarray(image), dtype=torch.float32) for image in (one, other)]
        torch.testing.assert_close(*tensors, rtol=1e-4, atol=1 if output_type == "pil" else 1e-4)


def test_the_least_recently_used_leaves_first() -> None:
    experts = [flow_expert(seed) for seed in range(NUM)]
    held = ExpertSet(experts, shelf=Shelf("ram", 2 * 10**9))
    held.offload("ram", 3 * held.stored[0].size)
    for network in held.stored:
        network.clear()
    for index, left in [
        (2, [2]),
        (1, [1, 2]),
        (0, [0, 1, 2]),
        (2, [0, 1, 2]),
        (3, [0, 2, 3]),
        (1, [1, 2, 3]),
    ]:
        held.shelf.bring(held.stored[index])
        assert _present(held.stored) == left


@pytest.mark.integration
def test_another_dtype_and_another_mode_twice_do_no_harm(folder: Path) -> None:
    pipe, plain = HDDMPipeline.from_pretrained(folder), _sampled(_loaded(folder))
    for dtype in (torch.float64, torch.float32):
        pipe.to(dtype)
        assert torch.equal(_piped(pipe), _sampled(_loaded(folder, dtype=dtype)))
    for change in (
        lambda: pipe.experts.offload("disk"),
        pipe.enable_model_cpu_offload,
        lambda: pipe.experts.offload("none"),
        lambda: pipe.experts.offload("ram", pipe.experts.stored[0].size),
    ):
        change()
        assert torch.equal(_piped(pipe), plain)
        change()
        change()
        assert torch.equal(_piped(pipe), plain)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "disk"])
def test_several_threads_may_sample_one_model(folder: Path, mode: Offload) -> None:
    model, plain = _loaded(folder, mode), _loaded(folder)
    expected = {seed: hddm.sample(plain, 4, seed, STEPS, "full") for seed in range(4)}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: hddm.sample(model, 4, k % 4, STEPS, "full"), range(8)))
    assert all(torch.equal(images, expected[k % 4]) for k, images in enumerate(found))


def test_what_cannot_be_kept_is_refused(folder: Path) -> None:
    told = refusal(_loaded, folder, "disk", _limit(folder, 1) - 1)
    found = re.search(r"experts/0: its weights take (.*), and `max_memory` leaves (.*) for", told)
    assert found is not None
    assert found[1] != found[2]
    told = refusal(_loaded, folder, "disk", _limit(folder, 0) - 1)
    found = re.search(r"`max_memory` of (.*): router, .* alone take (.*); allow more", told)
    assert found is not None
    assert found[1] != found[2]
    assert "`max_memory` needs `offload` ram or disk" in refusal(_loaded, folder, "none", 10**9)
    held = ExpertSet([flow_expert(0)])
    assert "in memory only; load them from folders" in refusal(held.offload, "disk")


def test_a_file_that_changed_since_it_was_opened_is_refused(folder: Path, tmp_path: Path) -> None:
    own = copied(folder, tmp_path)
    model = _loaded(own)
    (own / "experts" / "1" / WEIGHTS).write_bytes((own / "router" / WEIGHTS).read_bytes())
    with pytest.raises(HddmError, match=f"experts/1/{WEIGHTS}: has changed since it was opened"):
        _sampled(model, expert=1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["none", "disk"])
def test_quantized_experts_take_a_third_of_the_memory_and_make_nearly_the_same(
    mode: Offload, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    folder = write_ensemble(
        tmp_path, [flow_expert(seed, hidden_size=128, num_heads=4) for seed in range(2)]
    )
    x, t = (
        torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(0)),
        torch.full((3,), 0.5).double(),
    )
    plain = [field.velocity(x, t) for field in _loaded(folder).experts]
    pipe = HDDMPipeline.from_pretrained(folder, offload=mode)
    whole, router = pipe.experts.stored[0].size, _limit(folder, 0)
    pipe.experts.prepare(Computing(quantize="int8"))
    assert pipe.experts.stored[0].size < 0.3 * whole
    if mode == "disk":
        room = router + pipe.experts.stored[0].size
        pipe.limit_memory(room)
        options = {
            "offload": "disk",
            "max_memory": f"{room}B",
            "quantize": "int8",
            "num_images": 1,
            "steps": 1,
        }
        sample_to_folder(folder, tmp_path / "samples", **options)  # type: ignore[call-arg]
    for _ in range(2):  # With room for one, weights are read and quantized again.
        for field, exact in zip(pipe.ensemble.experts, plain, strict=True):
            error = (field.velocity(x, t) - exact).norm() / exact.norm()
            assert 1e-5 < error < 0.05
    assert "quantized experts cannot be saved" in refusal(pipe.save_pretrained, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_int8_in_float64_is_refused_by_name(tmp_path: Path, hddm: Command) -> None:
    pytest.importorskip("torchao")
    folder = write_ensemble(tmp_path, [flow_expert(seed) for seed in range(2)])
    options = ("--num-images", 1, "--steps", 1, "--quantize", "int8", "--dtype", "float64")
    code, _, error = hddm("sample", folder, "--out", tmp_path / "samples", *options)
    assert (code, error.count("\n")) == (2, 1)
    assert "--quantize int8: does not run in --dtype float64; choose float32 or bfloat16" in error
    pipe = HDDMPipeline.from_pretrained(folder)
    pipe.experts.prepare(Computing(quantize="int8"))
    assert "does not run in `dtype` float64" in refusal(pipe.to, torch.float64)
