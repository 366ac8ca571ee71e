"""The forms in which LoRA files come: each becomes W + alpha/rank · B A, or what its kind says, in full."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, ModelMixin, StableDiffusionPipeline
from diffusers.loaders.single_file_utils import (
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_sd3_transformer_checkpoint_to_diffusers,
)
from diffusers.utils import convert_state_dict_to_diffusers
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.checkpoints.convert import write
from hddm.checkpoints.lora import convert_lora
from hddm.checkpoints.lora_names import LayerNames
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.adapter_records import ADAPTER_WEIGHTS
from hddm.experts.expert_folders import open_expert
from hddm.inspection.folders import inspected
from hddm.networks.families import known_family
from hddm.settings import Conversion
from hddm.utils.errors import HddmError
from hddm.utils.files import write_json
from hddm.utils.records import WEIGHTS
from tests.artefacts import Command
from tests.checkpoint_files import SD_BETAS, pipeline, record_of, refused, text_unet
from tests.flow_models import chroma, flow_pipeline, flux, lumina2, sd3, z_image
from tests.ldm_files import XL, ldm_unet

Files = dict[str, Tensor]
Namer = Callable[[str, str], str]
RANK, ALPHA = 3, 2.0
AUTHORS: dict[str, Callable[..., ModelMixin]] = {
    "sd3": sd3,
    "flux": flux,
    "chroma": chroma,
    "z-image": z_image,
    "lumina2": lumina2,
}
PATTERN = ("to_q", "to_k", "to_v", "to_out.0")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("bases"), {}
    for name, network in {"unet": text_unet(), "xl": text_unet(**XL)}.items():
        source = root / f"{name}-source"
        pipeline(source, network, DDIMScheduler(**SD_BETAS, prediction_type="epsilon"))
        found[name] = root / name
        write(plan_conversion(source, Conversion()), found[name])
    for name, make in AUTHORS.items():
        flow_pipeline(root / f"{name}-source", make())
        found[name] = root / name
        write(plan_conversion(root / f"{name}-source", Conversion(sample_size=8)), found[name])
    return found


def _attention(network: ModelMixin) -> dict[str, Tensor]:
    """Weights of the linear layers of attention, by layer."""
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(PATTERN):
            found[name] = module.weight
    return found


def _factors(weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by layer."""
    noise, found = torch.Generator().manual_seed(7), {}
    for name, weight in weights.items():
        out, width, *window = weight.shape
        a = 0.1 * torch.randn(RANK, width, *window, generator=noise)
        found[name] = a, 0.1 * torch.randn(out, RANK, *[1] * len(window), generator=noise)
    return found


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("or,r...->o...", b.double().flatten(1), a.double())


def _check(out: Path, before: ModelMixin, changes: Mapping[str, Tensor]) -> None:
    """Compare all weights of the expert in ``out`` with those ``before`` plus ``changes``, by tensor."""
    after = open_expert(out).read().network.state_dict()
    known = before.state_dict()
    assert after.keys() == known.keys() >= changes.keys()
    assert changes
    for name, weight in known.items():
        expected = weight.double() + changes.get(name, 0.0)
        assert after[name].shape == expected.shape, name
        # Of NaN, too, it is false.
        assert (after[name].double() - expected).abs().max() <= 2e-6, name


def _dotted(prefix: str, factors: tuple[str, str]) -> Namer:
    down, up = factors
    return lambda layer, part: f"{prefix}{layer}{down if part == 'down' else up}"


_LORA_AB = (".lora_A.weight", ".lora_B.weight")
_DEFAULT = (".lora_A.default.weight", ".lora_B.default.weight")
_OLD = (".lora.down.weight", ".lora.up.weight")
_KOHYA = (".lora_down.weight", ".lora_up.weight")


def _processor(prefix: str) -> Namer:
    def name(layer: str, part: str) -> str:
        module, _, leaf = layer.removesuffix(".0").rpartition(".")
        return f"{prefix}{module}.processor.{leaf}_lora.{part}.weight"

    return name


def _underscored(prefix: str) -> Namer:
    return lambda layer, part: f"{prefix}{layer.replace('.', '_')}.lora_{part}.weight"


NAMINGS: dict[str, Namer] = {
    "training scripts of diffusers": _dotted("unet.", _OLD),
    "training scripts, without prefix": _dotted("", _OLD),
    "attention processors": _processor(""),
    "attention processors, with prefix": _processor("unet."),
    "peft in diffusers": _dotted("unet.", _LORA_AB),
    "peft, the adapter's name inside": _dotted("unet.", _DEFAULT),
    "peft by itself": _dotted("base_model.model.", _LORA_AB),
    "peft by itself, the adapter's name inside": _dotted("base_model.model.", _DEFAULT),
    "peft around a pipeline": _dotted("base_model.model.unet.", _LORA_AB),
    "diffusion_model": _dotted("diffusion_model.", _LORA_AB),
    "model.diffusion_model": _dotted("model.diffusion_model.", _KOHYA),
    "kohya": _underscored("lora_unet_"),
    "kohya, doubled": _underscored("lora_unet_unet_"),
    "LyCORIS by itself": _underscored("lycoris_"),
}


@pytest.mark.parametrize("naming", NAMINGS)
def test_a_file_of_every_naming_is_the_product_of_its_factors(
    naming: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    network, name = text_unet(), NAMINGS[naming]
    content, changes = {}, {}
    for layer, (a, b) in _factors(_attention(network)).items():
        content[name(layer, "down")], content[name(layer, "up")] = a, b
        changes[f"{layer}.weight"] = _product(a, b)
    save_file(content, tmp_path / "lora.safetensors")
    lines = convert_lora(tmp_path / "lora.safetensors", bases["unet"], tmp_path / "out")
    assert "alpha: not stated, so it is the rank" in lines
    _check(tmp_path / "out", network, changes)
    assert inspected(tmp_path / "lora.safetensors")["layers_by_kind"] == {"LoRA": len(changes)}


def test_the_names_that_diffusers_writes_for_its_training_scripts_are_read(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """As ``train_text_to_image_lora`` of diffusers does it, which does not state alpha."""
    network = text_unet()
    state, changes = {}, {}
    for layer, (a, b) in _factors(_attention(network)).items():
        state[f"{layer}.lora_A.weight"], state[f"{layer}.lora_B.weight"] = a, b
        changes[f"{layer}.weight"] = _product(a, b)
    written = convert_state_dict_to_diffusers(state)
    assert any(".lora.down.weight" in name for name in written)
    StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=written)
    # A folder is read like the file in it.
    convert_lora(tmp_path, bases["unet"], tmp_path / "out")
    _check(tmp_path / "out", network, changes)


@pytest.mark.parametrize("prefix", ["lora_unet_", "diffusion_model.", "model.diffusion_model."])
@pytest.mark.parametrize("kind", ["unet", "xl"])
def test_names_of_latent_diffusion_are_read_behind_every_prefix(
    kind: str, prefix: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    network = text_unet(**(XL if kind == "xl" else {}))
    by_place = {one.data_ptr(): name for name, one in ldm_unet(network).items()}
    content, changes = {}, {}
    for layer, (a, b) in _factors(_attention(network)).items():
        place = network.state_dict()[f"{layer}.weight"].data_ptr()
        name = by_place[place].removeprefix("model.diffusion_model.").removesuffix(".weight")
        stem = prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
        content[f"{stem}.lora_down.weight"], content[f"{stem}.lora_up.weight"] = a, b
        content[f"{stem}.alpha"] = torch.tensor(ALPHA)
        changes[f"{layer}.weight"] = ALPHA / RANK * _product(a, b)
    save_file(content, tmp_path / "lora.safetensors")
    lines = convert_lora(tmp_path / "lora.safetensors", bases[kind], tmp_path / "out")
    assert "alpha: in the file" in lines
    _check(tmp_path / "out", network, changes)


def _as_authors_name_it(network: ModelMixin) -> dict[str, Tensor]:
    """Weights by the names of the network's authors, put together by the family's table; none of norms."""
    weights, found = network.state_dict(), {}
    for name, layer in known_family(network).foreign_layers(network.config).items():
        known = [f"{one}.weight" for one in layer.layers]
        if all(one in weights and weights[one].ndim > 1 for one in known):
            whole = torch.cat([weights[one] for one in known])
            found[name] = torch.cat(whole.chunk(2)[::-1]) if layer.swaps_halves else whole
    return found


@pytest.mark.parametrize("prefix", ["lora_unet_", "diffusion_model.", "base_model.model."])
@pytest.mark.parametrize("kind", AUTHORS)
def test_names_of_the_authors_of_transformers_are_read(
    kind: str, prefix: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    network = AUTHORS[kind]()
    authors, family = _as_authors_name_it(network), known_family(network)
    table = family.foreign_layers(network.config)
    content, changes = {}, {}
    for name, (a, b) in _factors(authors).items():
        stem = prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
        content[f"{stem}.lora_down.weight"], content[f"{stem}.lora_up.weight"] = a, b
        content[f"{stem}.alpha"] = torch.tensor(ALPHA)
        whole = ALPHA / RANK * _product(a, b)
        layer = table[name]
        if layer.swaps_halves:
            whole = torch.cat(whole.chunk(2)[::-1])
        start = 0
        for one in layer.layers:
            rows = len(network.state_dict()[f"{one}.weight"])
            changes[f"{one}.weight"] = whole[start : start + rows]
            start += rows
    save_file(content, tmp_path / "lora.safetensors")
    convert_lora(tmp_path / "lora.safetensors", bases[kind], tmp_path / "out")
    _check(tmp_path / "out", network, changes)


def test_the_table_of_sd3s_names_is_that_of_diffusers_own_conversion() -> None:
    network = sd3(dual_attention_layers=(0,))
    checkpoint = {f"{name}.weight": one for name, one in _as_authors_name_it(network).items()}
    checkpoint |= {name.replace(".weight", ".bias"): one[:, 0] for name, one in checkpoint.items()}
    checkpoint["pos_embed"] = torch.zeros(1)
    converted = convert_sd3_transformer_checkpoint_to_diffusers(checkpoint)
    weights, compared = network.state_dict(), 0
    for name, value in converted.items():
        if name.endswith(".weight"):
            assert torch.equal(value, weights[name]), name
            compared += 1
    linear = [one for one in network.modules() if isinstance(one, nn.Linear | nn.Conv2d)]
    assert compared == len(linear)


def test_the_table_of_fluxs_names_is_that_of_diffusers_own_conversion() -> None:
    # diffusers divides by the published width; a column of each weight is enough.
    network = flux(num_layers=1, num_single_layers=1, guidance_embeds=True)
    wide, mlp = 3072, 4 * 3072
    layers = known_family(network).foreign_layers(network.config)
    checkpoint, expected = {}, {}
    noise = torch.Generator().manual_seed(0)
    for name, layer in layers.items():
        parts = []
        for one in layer.layers:
            rows = mlp if one.endswith("proj_mlp") else wide
            parts.append(torch.randn(rows, 1, generator=noise))
            expected[f"{one}.weight"] = parts[-1]
        whole = torch.cat(parts)
        checkpoint[f"{name}.weight"] = (
            torch.cat(whole.chunk(2)[::-1]) if layer.swaps_halves else whole
        )
        checkpoint[f"{name}.bias"] = whole[:, 0]
    for block in ("double_blocks.0.img_attn", "double_blocks.0.txt_attn", "single_blocks.0"):
        for leaf in ("query_norm", "key_norm"):
            checkpoint[f"{block}.norm.{leaf}.scale"] = torch.ones(1)
    converted = convert_flux_transformer_checkpoint_to_diffusers(checkpoint)
    found = {name for name in converted if name.endswith(".weight") and ".norm_" not in name}
    assert found == expected.keys()
    for name in found:
        assert torch.equal(converted[name], expected[name]), name
    assert found == {
        f"{name}.weight" for name, one in network.named_modules() if isinstance(one, nn.Linear)
    }


@pytest.mark.parametrize(
    "network", [text_unet(), text_unet(**XL), sd3(), flux(), chroma()], ids=str
)
def test_no_two_layers_of_a_network_have_one_name_in_a_file(network: ModelMixin) -> None:
    known = LayerNames(network)
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            for prefix in ("", "lora_unet_", "unet.", "lora_unet_unet_", "base_model.model."):
                layer = known.find(prefix + name.replace(".", "_") * (prefix[-1:] == "_"))
                if prefix[-1:] != "_":
                    layer = known.find(prefix + name)
                assert layer is not None
                assert layer.layers == (name,)


def _stated(folder: Path, where: str, config: dict[str, object]) -> dict[str, str]:
    """Put a config of peft into the header that is returned, or beside the file."""
    if where == "beside":
        write_json(folder / "adapter_config.json", {"peft_type": "LORA", **config})
        return {}
    stated = {f"unet.{key}": value for key, value in config.items()}
    return {"lora_adapter_metadata": json.dumps(stated)}


@pytest.mark.parametrize(
    ("config", "scale", "scale_of_keys"),
    [
        ({"r": RANK, "lora_alpha": 6}, 2.0, 2.0),
        ({"r": RANK, "lora_alpha": 6, "alpha_pattern": {"attn1.to_k": 3}}, 2.0, 1.0),
        ({"r": RANK, "lora_alpha": 6, "use_rslora": True}, 6 / RANK**0.5, 6 / RANK**0.5),
    ],
)
@pytest.mark.parametrize("where", ["header", "beside"])
def test_alpha_is_that_of_the_adapters_config_in_the_header_or_beside_the_file(
    where: str,
    config: dict[str, object],
    scale: float,
    scale_of_keys: float,
    bases: dict[str, Path],
    tmp_path: Path,
) -> None:
    network, content, changes = text_unet(), {}, {}
    prefix = "base_model.model." if where == "beside" else "unet."
    for layer, (a, b) in _factors(_attention(network)).items():
        content[f"{prefix}{layer}.lora_A.weight"], content[f"{prefix}{layer}.lora_B.weight"] = a, b
        own = scale_of_keys if layer.endswith("attn1.to_k") else scale
        changes[f"{layer}.weight"] = own * _product(a, b)
    save_file(content, tmp_path / ADAPTER_WEIGHTS, _stated(tmp_path, where, config))
    lines = convert_lora(tmp_path / ADAPTER_WEIGHTS, bases["unet"], tmp_path / "out")
    place = "adapter_config.json" if where == "beside" else "lora_adapter_metadata"
    assert f"alpha: by {place}" in lines
    _check(tmp_path / "out", network, changes)


def test_an_alpha_in_the_file_comes_before_that_of_a_config(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    network = text_unet()
    layer = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    ((a, b),) = _factors({layer: network.state_dict()[f"{layer}.weight"]}).values()
    content = {f"unet.{layer}.lora_A.weight": a, f"unet.{layer}.lora_B.weight": b}
    content[f"unet.{layer}.alpha"] = torch.tensor(ALPHA)
    header = _stated(tmp_path, "header", {"lora_alpha": 17})
    save_file(content, tmp_path / "lora.safetensors", header)
    convert_lora(tmp_path / "lora.safetensors", bases["unet"], tmp_path / "out")
    _check(tmp_path / "out", network, {f"{layer}.weight": ALPHA / RANK * _product(a, b)})


CONV = "down_blocks.0.resnets.0.conv1"
LINEAR = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
ONE = "mid_block.attentions.0.proj_in"
Parts = tuple[dict[str, Tensor], Tensor]
"""Tensors of a change by part, and the change that they make, in float64."""


def _noise(*shape: int) -> Tensor:
    return 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _locon(weight: Tensor) -> Parts:
    out, width, *window = weight.shape
    parts = {
        "lora_down.weight": _noise(RANK, width, 1, 1),
        "lora_mid.weight": _noise(RANK, RANK, *window),
        "lora_up.weight": _noise(out, RANK, 1, 1),
    }
    down, mid, up = (one.double() for one in parts.values())
    # Three convolutions in a row, of every unit picture: the definition, and no formula of ours.
    impulse = torch.zeros(width, width, 5, 5, dtype=torch.float64)
    impulse[:, :, 2, 2] = torch.eye(width)
    convolve = nn.functional.conv2d
    answer = convolve(convolve(convolve(impulse, down), mid, padding=1), up)
    return parts, ALPHA / RANK * answer[:, :, 1:4, 1:4].flip(2, 3).transpose(0, 1)


def _loha(weight: Tensor) -> Parts:
    out, width = weight.shape[0], weight[0].numel()
    parts = {}
    for number in (1, 2):
        parts[f"hada_w{number}_a"] = _noise(out, RANK + number)[:, :RANK].contiguous()
        parts[f"hada_w{number}_b"] = _noise(RANK + number, width)[:RANK].contiguous()
    a, b, c, d = (one.double() for one in parts.values())
    return parts, ALPHA / RANK * ((a @ b) * (c @ d)).reshape(weight.shape)


def _loha_with_core(weight: Tensor) -> Parts:
    out, width, *window = weight.shape
    parts, product = {}, torch.ones(weight.shape, dtype=torch.float64)
    for number in (1, 2):
        left, right = _noise(RANK, out + number)[:, :out], _noise(RANK, width + number)[:, :width]
        core = _noise(RANK, RANK, *window)
        parts[f"hada_w{number}_a"], parts[f"hada_w{number}_b"] = (
            left.contiguous(),
            right.contiguous(),
        )
        parts[f"hada_t{number}"] = core
        one = torch.zeros(weight.shape, dtype=torch.float64)
        for i in range(RANK):
            for j in range(RANK):
                outer = left[i].double()[:, None] * right[j].double()[None]
                one += outer[..., None, None] * core[i, j].double()
        product *= one
    return parts, ALPHA / RANK * product


def _lokr(weight: Tensor, first: str, second: str) -> Parts:
    """Sides of a Kronecker product, ``whole`` or ``factors``."""
    out, width, *window = weight.shape
    parts: dict[str, Tensor] = {}
    sides = []
    shapes = ((4, 4), (out // 4, width // 4, *window))
    for number, (kind, shape) in enumerate(zip((first, second), shapes, strict=True), 1):
        if kind == "whole":
            side = parts[f"lokr_w{number}"] = _noise(*shape)
        else:
            left, right = _noise(shape[0], RANK), _noise(RANK, *shape[1:])
            parts[f"lokr_w{number}_a"], parts[f"lokr_w{number}_b"] = left, right
            side = torch.einsum("or,r...->o...", left.double(), right.double())
        sides.append(side.double())
    change = torch.zeros(weight.shape, dtype=torch.float64)
    rows, columns = shapes[1][:2]
    for i in range(4):
        for j in range(4):
            block = sides[0][i, j] * sides[1]
            change[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = block
    return parts, change * (1.0 if first == second == "whole" else ALPHA / RANK)


def _difference(weight: Tensor) -> Parts:
    change = _noise(*weight.shape)
    return {"diff": change}, change.double()


def _lora(weight: Tensor) -> Parts:
    ((a, b),) = _factors({"": weight}).values()
    return {"lora_down.weight": a, "lora_up.weight": b}, ALPHA / RANK * _product(a, b)


def _dora(by: str, inner: Callable[[Tensor], Parts] = _lora) -> Callable[[Tensor], Parts]:
    def make(weight: Tensor) -> Parts:
        parts, change = inner(weight)
        whole = weight.double() + change
        ones = [1] * (weight.ndim - 2)
        if by == "input":
            norms = (whole**2).sum([0, *range(2, whole.ndim)]).sqrt().reshape(1, -1, *ones)
        else:
            norms = (whole**2).sum(list(range(1, whole.ndim))).sqrt().reshape(-1, 1, *ones)
        magnitude = 0.5 + _noise(*norms.shape).abs()
        after = whole * (magnitude.double() / norms)
        key = "dora_scale"
        if by == "peft":
            key = "lora_magnitude_vector"
            magnitude = magnitude.reshape(1, -1, *ones) if ones else magnitude.flatten()
        return parts | {key: magnitude.contiguous()}, after - weight.double()

    return make


KINDS: dict[str, tuple[str, str, Callable[[Tensor], Parts]]] = {
    "LoHa of a linear layer": ("LoHa", LINEAR, _loha),
    "LoHa of a convolution": ("LoHa", CONV, _loha),
    "LoHa of a convolution, with cores": ("LoHa", CONV, _loha_with_core),
    "LoKr, whole": ("LoKr", LINEAR, lambda one: _lokr(one, "whole", "whole")),
    "LoKr, one side whole": ("LoKr", LINEAR, lambda one: _lokr(one, "whole", "factors")),
    "LoKr, of factors": ("LoKr", LINEAR, lambda one: _lokr(one, "factors", "factors")),
    "LoKr of a convolution": ("LoKr", CONV, lambda one: _lokr(one, "whole", "factors")),
    "a difference": ("plain difference", CONV, _difference),
    "DoRA by output": ("DoRA", LINEAR, _dora("output")),
    "DoRA by input": ("DoRA", LINEAR, _dora("input")),
    "DoRA of peft": ("DoRA", LINEAR, _dora("peft")),
    "DoRA of a convolution": ("DoRA", CONV, _dora("output")),
    "DoRA of a convolution by input": ("DoRA", CONV, _dora("input")),
    "DoRA of a convolution of peft": ("DoRA", CONV, _dora("peft")),
    "DoRA of a LoHa": ("DoRA", LINEAR, _dora("output", _loha)),
}


@pytest.mark.parametrize("case", KINDS)
def test_what_an_adapter_cannot_hold_is_merged_into_full_weights(
    case: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    kind, layer, make = KINDS[case]
    network = text_unet()
    weights = network.state_dict()
    parts, change = make(weights[f"{layer}.weight"])
    stem = f"lora_unet_{layer.replace('.', '_')}"
    content = {f"{stem}.{part}": one for part, one in parts.items()}
    content[f"{stem}.alpha"] = torch.tensor(ALPHA)
    # A plain LoRA in the same file is merged with it.
    other = _lora(weights[f"{ONE}.weight"])
    content |= {f"lora_unet_{ONE.replace('.', '_')}.{part}": one for part, one in other[0].items()}
    content[f"lora_unet_{ONE.replace('.', '_')}.alpha"] = torch.tensor(ALPHA)
    save_file(content, tmp_path / "lora.safetensors")
    said = inspected(tmp_path / "lora.safetensors")
    assert said["layers_by_kind"] == {kind: 1, "LoRA": 1}
    assert said["becomes"].startswith("full weights")
    convert_lora(tmp_path / "lora.safetensors", bases["unet"], tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).is_file()
    assert record_of(tmp_path / "out")["adapter"] is None
    _check(tmp_path / "out", network, {f"{layer}.weight": change, f"{ONE}.weight": other[1]})


def test_locon_with_a_middle_stays_an_adapter(bases: dict[str, Path], tmp_path: Path) -> None:
    network = text_unet()
    parts, change = _locon(network.state_dict()[f"{CONV}.weight"])
    stem = f"lora_unet_{CONV.replace('.', '_')}"
    content = {f"{stem}.{part}": one for part, one in parts.items()}
    content[f"{stem}.alpha"] = torch.tensor(ALPHA)
    save_file(content, tmp_path / "lora.safetensors")
    assert inspected(tmp_path / "lora.safetensors")["layers_by_kind"] == {"LoCon": 1}
    convert_lora(tmp_path / "lora.safetensors", bases["unet"], tmp_path / "out")
    assert not (tmp_path / "out" / WEIGHTS).exists()
    _check(tmp_path / "out", network, {f"{CONV}.weight": change})


def test_differences_of_biases_and_of_norms_are_added(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    network, norm = text_unet(), "down_blocks.0.resnets.0.norm1"
    weights = network.state_dict()
    bias, scale = _noise(*weights[f"{CONV}.bias"].shape), _noise(*weights[f"{norm}.weight"].shape)
    parts, change = _lora(weights[f"{CONV}.weight"])
    stem, normed = (f"lora_unet_{one.replace('.', '_')}" for one in (CONV, norm))
    content = {f"{stem}.{part}": one for part, one in parts.items()}
    content |= {f"{stem}.alpha": torch.tensor(ALPHA), f"{stem}.diff_b": bias}
    content[f"{normed}.w_norm"] = scale
    save_file(content, tmp_path / "lora.safetensors")
    convert_lora(tmp_path / "lora.safetensors", bases["unet"], tmp_path / "out")
    changes = {f"{CONV}.weight": change, f"{CONV}.bias": bias, f"{norm}.weight": scale}
    _check(tmp_path / "out", network, changes)


def test_factors_of_a_linear_layer_fit_a_1x1_convolution_and_the_other_way_round(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    network, content, changes = text_unet(), {}, {}
    weights = network.state_dict()
    assert weights[f"{ONE}.weight"].ndim == 4
    for layer in (ONE, LINEAR):
        weight = weights[f"{layer}.weight"]
        ((a, b),) = _factors({layer: weight.flatten(1)}).values()
        changes[f"{layer}.weight"] = _product(a, b).reshape(weight.shape)
        if layer == LINEAR:
            a, b = a[..., None, None], b[..., None, None]
        content[f"unet.{layer}.lora_A.weight"] = a.contiguous()
        content[f"unet.{layer}.lora_B.weight"] = b.contiguous()
    save_file(content, tmp_path / "lora.safetensors")
    convert_lora(tmp_path / "lora.safetensors", bases["unet"], tmp_path / "out")
    _check(tmp_path / "out", network, changes)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lora_unet_a.oft_blocks", "1 tensor of OFT ('lora_unet_a.oft_blocks')"),
        ("unet.a.ia3_l", "1 tensor of IA³"),
        ("lora_unet_a.b1.weight", "1 tensor of GLoRA"),
        ("unet.a.lora_A.bias", "1 tensor of biases of factors"),
        ("double_blocks.0.processor.qkv_lora1.down.weight", "1 tensor of XLabs' processors"),
        ("unet.conv_in.surprise", "1 tensor of no change that hddm knows ('unet.conv_in.surprise')"),
    ],
)  # fmt: skip
def test_kinds_that_are_not_read_are_called_by_their_name_with_what_else_is_in_the_file(
    name: str, said: str, bases: dict[str, Path], tmp_path: Path, hddm: Command
) -> None:
    content = {
        "unet.conv_in.lora_A.weight": torch.ones(4, 4, 3, 3),
        "unet.conv_in.lora_B.weight": torch.ones(32, 4, 1, 1),
        name: torch.ones(2, 2),
    }
    path = tmp_path / "lora.safetensors"
    save_file(content, path)
    for error in (refused(hddm, path, "--base", bases["unet"]), hddm("inspect", path)[2]):
        assert said in error
        assert "beside layers that it reads (1 of LoRA), which hddm does not read" in error


def test_a_pickle_is_read_when_that_is_allowed(
    bases: dict[str, Path], tmp_path: Path, hddm: Command
) -> None:
    network, content, changes = text_unet(), {}, {}
    name = NAMINGS["attention processors"]
    for layer, (a, b) in _factors(_attention(network)).items():
        content[name(layer, "down")], content[name(layer, "up")] = a, b
        changes[f"{layer}.weight"] = _product(a, b)
    path = tmp_path / "pytorch_lora_weights.bin"
    torch.save(content, path)
    assert "is a pickle" in refused(hddm, path, "--base", bases["unet"])
    taken = ("convert", path, "--base", bases["unet"], "--out", tmp_path / "out", "--allow-pickle")
    assert hddm(*taken)[0] == 0
    _check(tmp_path / "out", network, changes)
    assert inspected(path, allow_pickle=True)["kind"] == "LoRA"
    torch.save({"state_dict": content}, path)
    with pytest.raises(HddmError, match="holds dict under 'state_dict', no tensor"):
        convert_lora(path, bases["unet"], tmp_path / "other", allow_pickle=True)


def test_every_form_in_the_guide_has_a_test() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "lora.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", guide))
    assert len(named) > 10
    own = "".join(path.read_text() for path in Path(__file__).parent.glob("test_lora_*.py"))
    assert [name for name in sorted(named) if f"def {name}(" not in own] == []
