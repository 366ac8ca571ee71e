"""Adapters: what they make of their base's weights, and what of a folder is believed."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    ModelMixin,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

import hddm
from hddm.experts.adapter_records import ADAPTER_WEIGHTS, adapter_of
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import open_expert
from hddm.experts.records import EXPERT_FILE, ExpertRecord
from hddm.networks.families import known_family
from hddm.schedules import LinearSchedule
from hddm.training.adapters import add_adapter, targets_of
from hddm.utils.errors import HddmError
from hddm.utils.files import sha256_of
from hddm.utils.records import WEIGHTS
from tests.artefacts import contents, edit_json, refusal, seal
from tests.checkpoint_files import dit, randomised, record_of
from tests.ensemble_files import flow_expert
from tests.lora_files import states, write_adapter, write_base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_adapter(base, tmp_path / "adapter")


def _velocity(folder: Path, **options: object) -> Tensor:
    field = hddm.load(folder, **options)
    x, t = states()
    with torch.no_grad():
        return field.velocity(x.to(options.get("dtype", torch.float32)), t)


def test_merged_weights_are_the_bases_plus_alpha_over_rank_b_a(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(base, tmp_path / "adapter", rank=3, alpha=12.0)
    factors = {
        key.removeprefix("base_model.model.").replace("base_layer.", ""): value.double()
        for key, value in load_file(folder / ADAPTER_WEIGHTS).items()
    }
    after = open_expert(folder).read().network.state_dict()
    changed = 0
    for name, weight in load_file(base / WEIGHTS).items():
        expected, module = weight.double(), name.rpartition(".")[0]
        if weight.ndim == 2 and f"{module}.lora_A.weight" in factors:
            expected = (
                expected
                + 4 * factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
            )
            changed += 1
            assert (expected - weight).abs().max() > 0.01
        torch.testing.assert_close(after[name].double(), expected, rtol=0, atol=1e-6)
    assert 2 * changed == len(factors) == 8


def _dit() -> Expert:
    facts = {
        "objective": "ddpm",
        "prediction_type": "flow_prediction",
        "schedule": LinearSchedule().config,
        "schedule_source": "the test",
        "time_scale": 1000.0,
        "sample_shape": (4, 8, 8),
        "variance_head": True,
        "conditions": ("class_labels",),
    }
    return Expert(dit(2), ExpertRecord.model_validate(facts), None)


@torch.no_grad()
@pytest.mark.parametrize(
    ("expert", "given"),
    [
        (flow_expert(0, depth=3), {}),
        (
            flow_expert(0, text_dim=8, depth=2),
            {"encoder_hidden_states": torch.linspace(-1, 1, 120).view(3, 5, 8)},
        ),
        (_dit(), {"class_labels": torch.tensor([0, 1, 2])}),
    ],
    ids=["ours", "text", "dit"],
)
def test_the_merged_network_is_that_of_peft(
    expert: Expert, given: dict[str, Tensor], tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", expert)
    folder = write_adapter(base, tmp_path / "adapter", alpha=3.0, size=0.1)
    mine, network = open_expert(folder).read(), open_expert(base).read().network
    x, t = states(mine.record.sample_shape)
    found, plain = (
        known_family(one).call(one, x, 1000 * t, given) for one in (mine.network, network)
    )
    of_peft = peft.PeftModel.from_pretrained(network, folder).get_base_model()
    expected = known_family(of_peft).call(of_peft, x, 1000 * t, given)
    size = expected.abs().max()
    assert (found - expected).abs().max() < 1e-6 * max(size, 1)
    assert (plain - expected).abs().max() > 0.01 * size


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_of_zeros_leaves_every_bit(stored: torch.dtype, tmp_path: Path) -> None:
    run = torch.bfloat16
    base = write_base(tmp_path / "base", dtype=stored)
    folder = write_adapter(base, tmp_path / "adapter", size=0)
    before, after = (open_expert(one).read(run).network.state_dict() for one in (base, folder))
    for name, weight in before.items():
        assert weight.dtype == after[name].dtype == run
        assert torch.equal(weight, after[name])


def test_weights_are_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype=torch.bfloat16)
    folder = write_adapter(base, tmp_path / "adapter")
    wide, narrow = (
        open_expert(folder).read(dtype).network.state_dict()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in wide.values())
    for name, weight in wide.items():
        assert torch.equal(weight.bfloat16(), narrow[name])


def test_merging_one_adapter_changes_neither_base_nor_another(base: Path, adapter: Path) -> None:
    folders = (base, adapter, write_adapter(base, base.with_name("other"), seed=2))
    files = contents(base.parent)
    alone = [_velocity(folder) for folder in folders]
    fields = [hddm.load(folder) for folder in folders]
    x, t = states()
    for field, expected in zip(fields, alone, strict=True):
        assert torch.equal(field.velocity(x, t), expected)
    assert not torch.equal(alone[1], alone[2])
    assert contents(base.parent) == files


def test_loading_needs_no_peft(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _velocity(adapter)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert torch.equal(_velocity(adapter), expected)


def test_a_base_that_was_moved_can_be_named(base: Path, adapter: Path, tmp_path: Path) -> None:
    expected = _velocity(adapter)
    moved = base.rename(tmp_path / "elsewhere")
    with pytest.raises(
        HddmError, match=r"adapter: is an adapter of base \(SHA-256 [0-9a-f]{16}….*name its base"
    ):
        hddm.load(adapter)
    assert torch.equal(_velocity(adapter, base=moved), expected)


def test_another_base_is_refused_by_name(base: Path, adapter: Path, tmp_path: Path) -> None:
    other = write_base(tmp_path / "other", flow_expert(9))
    # Where it was at training it still is.
    assert torch.equal(_velocity(adapter, base=other), _velocity(adapter))
    shutil.copyfile(other / WEIGHTS, base / WEIGHTS)
    with pytest.raises(
        HddmError, match=rf"{base / WEIGHTS}: has SHA-256 .*, and {adapter} is an adapter of"
    ):
        hddm.load(adapter)
    with pytest.raises(
        HddmError, match=r"holds no diffusion_pytorch_model.safetensors; a base is an expert"
    ):
        hddm.load(other, base=adapter)


def _tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        change(tensors)
        save_file(tensors, folder / ADAPTER_WEIGHTS)
        seal(folder)

    return spoil


def _record(**changes: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        edit_json(folder / EXPERT_FILE, adapter=record_of(folder)["adapter"] | changes)

    return spoil


def test_factors_and_weights_in_float8_are_widened(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    for path in (base / WEIGHTS, adapter / ADAPTER_WEIGHTS):
        tensors = {name: value.to(torch.float8_e4m3fn) for name, value in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
        seal(path.parent)
    edit_json(
        adapter / EXPERT_FILE,
        adapter=record_of(adapter)["adapter"] | {"base_sha256": sha256_of(base / WEIGHTS)},
    )
    assert not torch.equal(_velocity(adapter), _velocity(base))


MLP = "base_model.model.layers.0.mlp.0.lora_A.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_tensors(lambda t: t.pop(MLP)), f"missing {MLP} (2, 16)"),
        (_tensors(lambda t: t.update(x=torch.zeros(2))), "left over x (2,)"),
        (_tensors(lambda t: t.update({MLP: torch.zeros(3, 16)})), "is (3, 16), not (2, 16)"),
        (_tensors(lambda t: t.update({MLP: torch.zeros(2, 16).int()})), f"{MLP} is of torch.int32"),
        (_tensors(lambda t: t[MLP].fill_(float("nan"))), f"'{MLP}' holds NaN or Inf"),
        (_record(rank=3), "is (2, 16), not (3, 16)"),
        (_record(rank=2**62), "key 'adapter.rank' (is 4611686018427387904)"),
        (
            _tensors(lambda t: [one.fill_(1e25) for one in t.values()]),
            "merged with alpha 2' holds NaN or Inf",
        ),
        (
            _record(targets=["layers.0.mlp.9.weight"]),
            "'layers.0.mlp.9.weight' is no matrix or convolution",
        ),
        (_record(base="/etc"), "its base is at '/etc', which is no relative path; refused"),
        (lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), "no such file"),
    ],
)
def test_an_adapter_must_fit_its_record(
    spoil: Callable[[Path], None], message: str, adapter: Path
) -> None:
    spoil(adapter)
    said = refusal(hddm.load, adapter)
    assert message in said
    assert str(adapter) in said


def _small(kind: type[ModelMixin], **config: object) -> ModelMixin:
    with torch.device("meta"):
        network: ModelMixin = kind(**config)
    return network


UNET = {
    "block_out_channels": (32, 32),
    "sample_size": 8,
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
OWN = ("to_q", "to_k", "to_v", "to_out.0")
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
MLP_LAYERS = {"ff.net.0.proj", "ff.net.2"}


@pytest.mark.parametrize(
    ("network", "leaves"),
    [
        (
            # Its only block is the last, which gives no text and so has no layers for it.
            _small(SD3Transformer2DModel, num_layers=1, sample_size=8, joint_attention_dim=8,
                   caption_projection_dim=32, pooled_projection_dim=8, pos_embed_max_size=8, **HEADS),
            {f"attn.{one}" for one in OWN + ADDED} | MLP_LAYERS,
        ),
        (
            _small(FluxTransformer2DModel, num_layers=0, num_single_layers=1, joint_attention_dim=8,
                   pooled_projection_dim=8, in_channels=16, axes_dims_rope=(4, 6, 6), **HEADS),
            {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"},
        ),
        (
            _small(UNet2DConditionModel, cross_attention_dim=8, attention_head_dim=2,
                   down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                   up_block_types=("UpBlock2D", "UpBlock2D"), mid_block_type=None, **UNET),
            {f"transformer_blocks.0.{one}"
             for one in {f"attn{n}.{one}" for n in (1, 2) for one in OWN} | MLP_LAYERS},
        ),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_attention_and_mlps_of_diffusers_networks_are_adapted(
    network: ModelMixin, leaves: set[str]
) -> None:
    found = targets_of(network)
    stems = {_in_block(name).removesuffix(".weight") for name in found}
    assert stems == leaves
    assert len(found) == len(leaves)


def _in_block(name: str) -> str:
    """A name after that of its outermost block."""
    return re.split(r"attentions\.0\.|(?:^|single_)transformer_blocks\.0\.", name, maxsplit=1)[1]


def test_a_new_adapter_depends_on_its_seed_alone(base: Path, tmp_path: Path) -> None:
    def drawn(seed: int) -> dict[str, Tensor]:
        network = randomised(open_expert(base).read().network, 3)
        add_adapter(network, adapter_of(base, tmp_path / "out", 2, 2.0, targets_of(network)), seed)
        return {name: p for name, p in network.named_parameters() if p.requires_grad}

    state = torch.get_rng_state()
    one, same, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(one) == 8
    for name, value in one.items():
        assert torch.equal(value, same[name])
        assert torch.equal(value, other[name]) == (".lora_B." in name)
        assert (".lora_B." in name) == (not value.any())
