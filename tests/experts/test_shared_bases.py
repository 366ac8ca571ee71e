"""LoRA experts that keep their base once: the velocities of merged weights, in one call, in less memory."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, ModelMixin
from safetensors.torch import save_file
from torch import Tensor

import hddm
from hddm.checkpoints.convert import write
from hddm.checkpoints.lora import convert_lora
from hddm.checkpoints.plan import plan_conversion
from hddm.ensemble import Ensemble
from hddm.experts.adapter_records import ADAPTER_WEIGHTS
from hddm.experts.assembly import assemble
from hddm.experts.expert_folders import open_expert
from hddm.experts.expert_set import ExpertSet
from hddm.guidance import Guidance
from hddm.networks.offload import Offload, Shelf
from hddm.networks.shared import AdaptedNetwork, SharedNetwork
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.serving.workers import _read
from hddm.settings import Computing, Conversion, ServeSettings
from tests.cases import in_parts
from tests.checkpoint_files import SD_BETAS, conditions_of, dit, pipeline, pixart, text_unet
from tests.ensemble_files import flow_expert
from tests.flow_models import chroma, flow_pipeline, flux, sd3
from tests.flow_models import text as flow_text
from tests.ldm_files import XL
from tests.lora_files import kohya, write_adapter, write_base

NETWORKS: dict[str, Callable[[], ModelMixin]] = {
    "unet": text_unet,
    "xl": lambda: text_unet(**XL),
    "dit": dit,
    "pixart": pixart,
    "sd3": sd3,
    "flux": flux,
    "chroma": chroma,
}
FLOW = ("sd3", "flux", "chroma")
ROUNDING = 1e-5
"""Of the velocity in float32, relative to that of merged weights."""
ORDER = torch.tensor([3, 0, 2, 1, 1, 0, 2, 3])
"""Experts of a mixed batch; two neighbours have the same."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of hddm's own transformer, one of another rank, and their base."""
    root = tmp_path_factory.mktemp("own")
    base = write_base(root / "base", flow_expert(0, hidden_size=32, depth=2))
    folders = []
    for k, rank in enumerate((2, 2, 3)):
        folders.append(write_adapter(base, root / f"adapter{k}", rank, seed=k + 1))
    return [*folders, base]


@pytest.fixture(scope="module")
def out(own: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ensemble of these."""
    folder = tmp_path_factory.mktemp("ensemble") / "out"
    assemble(own, folder)
    return folder


def _held(folders: Sequence[Path], shares: bool = True, shelf: Shelf | None = None) -> ExpertSet:
    return ExpertSet([open_expert(one) for one in folders], shelf=shelf, shares=shares)


def _mixed(held: ExpertSet, strategy: str = "draw") -> Ensemble:
    return Ensemble(held.fields(), _even_router(len(held.experts)), strategy)


def _even_router(num: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, t: torch.full((len(x), num), 1 / num)


def _states(num: int = 8, shape: Sequence[int] = (3, 4, 4)) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(5)
    return torch.randn(num, *shape, generator=noise), torch.rand(num, generator=noise).double()


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@torch.no_grad()
def _velocity(model: Ensemble, **options: object) -> Tensor:
    x, t = _states()
    return model.velocity(x, t, **{"expert": ORDER, **options})  # type: ignore[arg-type]


def _sharers(held: ExpertSet) -> list[int]:
    found = []
    for k, field in enumerate(held.fields()):
        if isinstance(field.network, AdaptedNetwork) and field.network.is_sharing:
            found.append(k)
    return found


def _lora(network: ModelMixin, path: Path, seed: int, ranks: Sequence[int]) -> Path:
    """A file that changes every linear layer and convolution, with ranks and alphas in turn."""
    content, noise = kohya(network, ranks, alphas=(2.0, 1.0)), torch.Generator().manual_seed(seed)
    for name, value in content.items():
        if "lora_" in name.rpartition(".")[0] and value.ndim:
            content[name] = 0.1 * torch.randn(value.shape, generator=noise)
    save_file(content, path)
    return path


def _converted(kind: str, root: Path) -> list[Path]:
    """Two adapters of one rank, one of several ranks, and their base."""
    network = NETWORKS[kind]()
    if kind in FLOW:
        flow_pipeline(root / "source", network)
    else:
        scheduler = DDIMScheduler(**SD_BETAS, prediction_type="epsilon")
        pipeline(root / "source", network, scheduler)
    write(plan_conversion(root / "source", Conversion(sample_size=8)), root / "base")
    folders = []
    for k, ranks in enumerate([(2,), (2,), (3, 5)]):
        file = _lora(network, root / f"style{k}.safetensors", k, ranks)
        convert_lora(file, root / "base", root / f"style{k}")
        folders.append(root / f"style{k}")
    return [*folders, root / "base"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_mixed_batch_has_the_velocities_of_merged_weights(kind: str, tmp_path: Path) -> None:
    """Linear layers and convolutions, adapters of several ranks, the base itself, in any order of rows."""
    folders = _converted(kind, tmp_path)
    held, network = _held(folders), NETWORKS[kind]()
    assert _sharers(held) == [0, 1, 2, 3]
    is_flow = kind in FLOW
    given = flow_text(network) if is_flow else conditions_of(network, len(ORDER))
    given = {name: one[torch.arange(len(ORDER)) % len(one)] for name, one in given.items()}
    x, t = _states(shape=held.records[0].sample_shape or ())
    shared, merged = _mixed(held), _mixed(_held(folders, shares=False))
    with torch.no_grad():
        found = shared.velocity(x, t, expert=ORDER, **given)
        expected = merged.velocity(x, t, expert=ORDER, **given)
        base = merged.velocity(x, t, expert=torch.full_like(ORDER, 3), **given)
    assert _sharers(held) == [0, 1, 2, 3]
    assert _difference(found, expected) <= ROUNDING
    # The base's own rows have no more than the rounding of another size of batch, others have a change.
    for row, expert in enumerate(ORDER.tolist()):
        assert (_difference(base[row], expected[row]) > 1e-3) == (expert != 3)
        assert _difference(found[row], expected[row]) <= ROUNDING


def test_every_order_of_rows_gives_each_row_its_own_adapter(own: list[Path]) -> None:
    shared, merged = _mixed(_held(own)), _mixed(_held(own, shares=False))
    for seed in range(8):
        order = torch.randint(4, (8,), generator=torch.Generator().manual_seed(seed))
        difference = _difference(_velocity(shared, expert=order), _velocity(merged, expert=order))
        assert difference <= ROUNDING


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_holds_in_other_dtypes_to_their_rounding(own: list[Path], dtype: torch.dtype) -> None:
    held, merged = _held(own), _held(own, shares=False)
    for one in (held, merged):
        one.to(dtype)
    found, expected = _velocity(_mixed(held)), _velocity(_mixed(merged))
    assert _difference(found, expected) <= (ROUNDING if dtype == torch.float64 else 0.03)
    # And back.
    held.to(torch.float32)
    exact = _velocity(_mixed(_held(own, shares=False)))
    assert _difference(_velocity(_mixed(held)), exact) <= ROUNDING


def _rows_of_calls(held: ExpertSet) -> list[int]:
    """Rows of every call of the base from now on."""
    rows: list[int] = []
    held.stored[0].network.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    return rows


@pytest.mark.parametrize(
    ("strategy", "rows"), [("draw", [8]), ("full", [8] * 4), ("top-2", [8] * 2), ("top-1", [8])]
)
def test_a_call_of_the_base_never_has_more_rows_than_the_batch(
    own: list[Path], strategy: str, rows: list[int]
) -> None:
    held = _held(own)
    model, calls = _mixed(held, strategy), _rows_of_calls(held)
    weights = torch.tensor([[4.0, 3, 2, 1], [1, 2, 4, 3]]).repeat(4, 1)
    model.router = lambda x, t: weights / weights.sum(1, keepdim=True)
    found = _velocity(model, expert=ORDER if strategy == "draw" else None)
    assert calls == rows
    plain = _mixed(_held(own, shares=False), strategy)
    plain.router = model.router
    expected = _velocity(plain, expert=ORDER if strategy == "draw" else None)
    assert _difference(found, expected) <= ROUNDING


def test_samples_are_those_of_merged_weights_and_each_step_calls_the_base_once(
    own: list[Path],
) -> None:
    held = _held(own)
    calls = _rows_of_calls(held)
    found = hddm.sample(_mixed(held), 8, 3, 4)
    assert calls == [8] * 4
    expected = hddm.sample(_mixed(_held(own, shares=False)), 8, 3, 4)
    assert _difference(found, expected) <= ROUNDING


def _bytes(held: ExpertSet) -> int:
    """Of all distinct weights that are in memory."""
    found = {}
    for network in {id(one): one for one in held.stored}.values():
        tensors = list(network.network.state_dict().values())
        if isinstance(network, SharedNetwork):
            for k in range(len(network.adapters)):
                for pair in network.factors(k).values():
                    tensors += pair
        for value in tensors:
            found[value.data_ptr()] = value.numel() * value.element_size()
    return sum(found.values())


def test_eight_experts_take_the_memory_of_their_base_and_of_what_they_change(
    tmp_path: Path,
) -> None:
    base = write_base(tmp_path / "base", flow_expert(0, hidden_size=256, depth=2, num_heads=4))
    folders = [write_adapter(base, tmp_path / str(k), rank=1, seed=k) for k in range(8)]
    one, held = _held([base]), _held(folders)
    _velocity(_mixed(one), expert=torch.zeros(8, dtype=torch.long))
    _velocity(_mixed(held), expert=torch.arange(8))
    added = sum((folder / ADAPTER_WEIGHTS).stat().st_size for folder in folders)
    assert held.stored[0].size == _bytes(held) <= _bytes(one) + added
    assert _bytes(held) <= 1.15 * _bytes(one)


def test_adapters_that_nobody_runs_are_not_read(own: list[Path]) -> None:
    held = _held(own)
    _velocity(_mixed(held), expert=torch.ones_like(ORDER))
    network = held.stored[0]
    assert isinstance(network, SharedNetwork)
    assert list(network._loaded) == [1]


def test_alone_with_its_base_an_adapter_is_merged_bit_for_bit(own: list[Path]) -> None:
    held = _held([own[0]])
    assert _sharers(held) == []
    order = torch.zeros(8, dtype=torch.long)
    field = Ensemble([hddm.load(own[0])], strategy="draw")  # type: ignore[list-item]
    assert torch.equal(_velocity(_mixed(held), expert=order), _velocity(field, expert=order))


def test_adapters_of_two_bases_share_each_its_own(own: list[Path], tmp_path: Path) -> None:
    other = write_base(tmp_path / "other", flow_expert(7, hidden_size=32, depth=2))
    theirs = [write_adapter(other, tmp_path / str(k), seed=k + 5) for k in range(2)]
    folders = [own[0], theirs[0], own[1], theirs[1]]
    held = _held(folders)
    first, second, third, fourth = held.stored
    assert first is third
    assert second is fourth
    assert first is not second
    calls = _rows_of_calls(held)
    found = _velocity(_mixed(held))
    assert calls == [4]
    assert _difference(found, _velocity(_mixed(_held(folders, shares=False)))) <= ROUNDING


def test_experts_of_one_base_may_predict_by_other_schedules_and_parts_of_t(
    own: list[Path], tmp_path: Path
) -> None:
    base = own[3]
    parts = ((0.5, 1.0), (0.0, 0.5))
    folders = []
    for k, part in enumerate(parts):
        folders.append(write_adapter(base, tmp_path / str(k), seed=k + 1, noise_range=part))
    held, merged = _held(folders), _held(folders, shares=False)
    assert _sharers(held) == [0, 1]
    found, expected = (
        hddm.sample(Ensemble(in_parts(one.fields(), [0, 0])), 4, 0, 6) for one in (held, merged)
    )
    assert _difference(found, expected) <= ROUNDING


@pytest.mark.slow
def test_guidance_runs_both_branches_of_all_experts_in_one_call(tmp_path: Path) -> None:
    folders = _converted("unet", tmp_path)
    held, merged = _held(folders), _held(folders, shares=False)
    calls = _rows_of_calls(held)
    x, t = _states(shape=(4, 8, 8))
    text = conditions_of(text_unet(), 8)
    shorter = {name: one[:, :4] for name, one in conditions_of(text_unet(), 8).items()}
    for negative, rows in ((text, [16]), (shorter, [8, 8])):
        with torch.no_grad():
            found, expected = (
                _mixed(one).velocity(x, t, 3.0, negative, ORDER, **text) for one in (held, merged)
            )
        assert calls == rows
        assert _difference(found, expected) <= 3 * ROUNDING
        calls.clear()


def test_a_weak_model_guides_as_before(own: list[Path]) -> None:
    weak = open_expert(own[3]).unread
    experts = [replace(open_expert(one), weak=weak) for one in own[:2]]
    order = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
    guidance = Guidance(2.0, by="weak")
    found, expected = (
        _velocity(_mixed(ExpertSet(experts, shares=shares)), expert=order, guidance_scale=guidance)
        for shares in (True, False)
    )
    assert _difference(found, expected) <= ROUNDING


@pytest.mark.parametrize("mode", ["ram", "disk"])
def test_offloaded_they_make_the_same_bits_and_leave_the_device_together(
    out: Path, own: list[Path], mode: Offload
) -> None:
    expected = hddm.sample(hddm.load(out), 6, steps=2, strategy="draw")
    model = hddm.load(out, offload=mode)
    for _ in range(2):
        assert torch.equal(hddm.sample(model, 6, steps=2, strategy="draw"), expected)
    held = _held(own)
    held.offload(mode)
    _velocity(_mixed(held))
    network = held.stored[0]
    assert isinstance(network, SharedNetwork)
    assert network._loaded
    network.shelf.forget(network)
    assert not network._loaded
    assert all(one.is_meta for one in network.network.parameters())
    assert _difference(_velocity(_mixed(held)), _velocity(_mixed(_held(own)))) == 0


def test_where_the_base_and_all_adapters_do_not_fit_they_are_merged_and_that_is_said(
    own: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    expected = _velocity(_mixed(_held(own, shares=False)))
    one = _held([own[3]]).stored[0].size
    for held in (_held(own, shelf=Shelf("disk", one)), _held(own)):
        held.offload("disk", one)
        assert _sharers(held) == []
        assert torch.equal(_velocity(_mixed(held)), expected)
    lines = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len([line for line in lines if "`max_memory` has no room" in line]) == 2
    assert held.shelf.budget == one


def test_compiled_they_are_merged_and_that_is_said(
    own: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    held = _held(own)
    held.compile(backend="eager")
    assert _sharers(held) == []
    assert "4 experts of one base run with merged weights" in caplog.text
    assert "compiled" in caplog.text
    assert held.shelf._networks == held.stored
    expected = _velocity(_mixed(_held(own, shares=False)))
    assert _difference(_velocity(_mixed(held)), expected) <= ROUNDING


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_in_int8_they_share_a_base_in_int8(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    base = write_base(tmp_path / "base", flow_expert(0, hidden_size=128, num_heads=4))
    folders = [write_adapter(base, tmp_path / str(k), seed=k, size=0.1) for k in range(2)]
    exact = _velocity(_mixed(_held(folders, shares=False)), expert=ORDER % 2)
    held = _held(folders)
    whole = held.stored[0].size
    held.prepare(Computing(quantize="int8"))
    assert held.stored[0].size < 0.4 * whole
    assert _sharers(held) == [0, 1]
    assert 1e-5 < _difference(_velocity(_mixed(held), expert=ORDER % 2), exact) < 0.05


@pytest.mark.integration
def test_a_layer_that_computes_in_its_own_way_is_merged_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The patches of hddm's transformer are a convolution's weights in a product of its own."""
    expert = flow_expert(0, hidden_size=32, depth=1)
    base = write_base(tmp_path / "base", expert)
    folders = []
    for k in range(2):
        file = _lora(expert.network, tmp_path / f"{k}.safetensors", k, (2,))
        convert_lora(file, base, tmp_path / str(k))
        folders.append(tmp_path / str(k))
    folders += [write_adapter(base, tmp_path / f"plain{k}", seed=k) for k in range(2)]
    held = _held(folders)
    assert _sharers(held) == [2, 3]
    assert "does not share its base" in caplog.text
    assert "patch" in caplog.text
    found, expected = _velocity(_mixed(held)), _velocity(_mixed(_held(folders, shares=False)))
    assert _difference(found, expected) <= ROUNDING
    caplog.clear()
    # With nobody to share with, nothing is lost, and nothing is said.
    assert _sharers(_held(folders[:1])) == []
    assert not caplog.records


@pytest.mark.gpu
def test_on_a_gpu_they_have_the_velocities_of_merged_weights(own: list[Path]) -> None:
    held, merged = _held(own), _held(own, shares=False)
    for one in (held, merged):
        one.to("cuda")
    x, t = _states()
    found, expected = (
        _mixed(one).velocity(x.cuda(), t, expert=ORDER).cpu() for one in (held, merged)
    )
    assert _sharers(held) == [0, 1, 2, 3]
    # TF32 keeps ten bits of each factor.
    assert _difference(found, expected) <= 1e-3


def test_threads_may_sample_one_model(out: Path) -> None:
    model = hddm.load(out)
    expected = {seed: hddm.sample(hddm.load(out), 4, seed, 4, "draw") for seed in range(4)}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: hddm.sample(model, 4, k % 4, 4, "draw"), range(12)))
    assert all(torch.equal(images, expected[k % 4]) for k, images in enumerate(found))


def test_an_expert_whose_weights_are_taken_has_its_own_from_then_on(own: list[Path]) -> None:
    held, plain = _held(own), _velocity(_mixed(_held(own)))
    fields = held.fields()
    with torch.no_grad():
        next(p for p in fields[1].network.parameters() if p.ndim == 2).mul_(2)  # type: ignore[attr-defined]
    assert _sharers(held) == [0, 2, 3]
    found = _velocity(_mixed(held))
    for row, expert in enumerate(ORDER.tolist()):
        assert (_difference(found[row], plain[row]) > 1e-3) == (expert == 1)


def test_a_worker_of_the_service_holds_one_merged_expert(out: Path, own: list[Path]) -> None:
    x, t = _states()
    found = _read(out, 2, ServeSettings())
    assert not isinstance(found.network, AdaptedNetwork)
    with torch.no_grad():
        assert torch.equal(found.velocity(x, t), hddm.load(own[2]).velocity(x, t))


@pytest.mark.integration
def test_a_pipeline_and_a_saved_copy_of_it_share_too(out: Path, tmp_path: Path) -> None:
    pipe = HDDMPipeline.from_pretrained(out)
    pipe.set_progress_bar_config(disable=True)
    options = {"num_images_per_prompt": 6, "num_inference_steps": 3, "output_type": "latent"}
    expected = pipe(seed=1, strategy="draw", **options).images
    assert _sharers(pipe.experts) == [0, 1, 2, 3]
    pipe.save_pretrained(tmp_path / "saved")
    again = HDDMPipeline.from_pretrained(tmp_path / "saved")
    again.set_progress_bar_config(disable=True)
    assert torch.equal(again(seed=1, strategy="draw", **options).images, expected)
    assert _sharers(again.experts) == [0, 1, 2, 3]
    again.to(torch.float64)
    again.to(torch.float32)
    assert torch.equal(again(seed=1, strategy="draw", **options).images, expected)
