"""Single files of Flux, Chroma, Stable Diffusion 3, Z-Image and Lumina 2, by the names of their authors."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    ChromaTransformer2DModel,
    FluxTransformer2DModel,
    Lumina2Transformer2DModel,
    ModelMixin,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)
from diffusers.loaders.single_file_utils import (
    convert_chroma_transformer_checkpoint_to_diffusers,
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_lumina2_to_diffusers,
    convert_sd3_transformer_checkpoint_to_diffusers,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

import hddm as library
from hddm.checkpoints import quantised
from hddm.checkpoints.author_files import author_layouts
from hddm.checkpoints.sources import KeyTable
from hddm.networks.components import read_config
from hddm.networks.families import known_family
from hddm.schedules import CosineSchedule
from tests.artefacts import Command, edit_json
from tests.checkpoint_files import converted, randomised, record_of, refused, written_back
from tests.flow_models import flow_pipeline, velocity_by_hand
from tests.ldm_files import ldm_vae

SIDE = 8
FLUX: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 1,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 40,
}
CHROMA: dict[str, Any] = {
    **{name: value for name, value in FLUX.items() if name != "pooled_projection_dim"},
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 24,
    "approximator_layers": 3,
}
SD3: dict[str, Any] = {
    "sample_size": SIDE,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 3,
    "attention_head_dim": 64,
    "num_attention_heads": 1,
    "joint_attention_dim": 24,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 40,
    "pos_embed_max_size": 6,
}
SD35 = {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}
Z_IMAGE: dict[str, Any] = {
    "dim": 128,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 1,
    "n_kv_heads": 1,
    "cap_feat_dim": 24,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
}
LUMINA2: dict[str, Any] = {
    "hidden_size": 192,
    "num_layers": 3,
    "num_refiner_layers": 2,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "cap_feat_dim": 24,
    "axes_dim_rope": [32, 32, 32],
    "axes_lens": [300, 512, 512],
}
KINDS: dict[str, tuple[type[ModelMixin], dict[str, Any]]] = {
    "flux-dev": (FluxTransformer2DModel, FLUX | {"guidance_embeds": True}),
    "flux-schnell": (FluxTransformer2DModel, FLUX),
    "chroma": (ChromaTransformer2DModel, CHROMA),
    "sd3": (SD3Transformer2DModel, SD3),
    "sd3.5": (SD3Transformer2DModel, SD3 | SD35),
    "z_image": (ZImageTransformer2DModel, Z_IMAGE),
    "lumina2": (Lumina2Transformer2DModel, LUMINA2),
}
# Diffusers' functions take published widths for granted.
PUBLISHED = {
    "flux": {"num_attention_heads": 24},
    "chroma": {"num_attention_heads": 24},
    "sd3": {},
    "z-image": {},
    "lumina2": {"hidden_size": 2304, "num_attention_heads": 24, "num_kv_heads": 8},
}


SHIFTS = {
    "sd3": 3.0,
    "sd3.5": 3.0,
    "flux-schnell": 1.0,
    "chroma": 1.0,
    "z_image": 3.0,
    "lumina2": 6.0,
}
"""Those that do not depend on the size of a picture."""


def _rooted(usual: str) -> list[Any]:
    """Kinds and roots of their names: quick are all with the usual root, and one with the other."""
    cases = []
    for kind in KINDS:
        for root in ("", "model.diffusion_model."):
            is_quick = root == usual or kind == "flux-dev"
            cases.append(pytest.param(kind, root, marks=[] if is_quick else [pytest.mark.slow]))
    return cases


def _layout(kind: str) -> str:
    return kind.partition("-")[0].partition(".")[0].replace("_", "-")


def _table(network: ModelMixin) -> KeyTable:
    (layout,) = [one for one in author_layouts().values() if one.family is known_family(network)]
    return layout.table(network.state_dict(), network.config, "test")


def _vae() -> AutoencoderKL:
    torch.manual_seed(3)
    return AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _file(network: ModelMixin, root: str) -> dict[str, Tensor]:
    """The network's tensors as its authors store them; that the names are right is tested below."""
    planned = _table(network).to_foreign(network.state_dict(), {}, "test")
    return {f"{root}{one.name}": one.read().contiguous() for one in planned}


def _inputs(network: ModelMixin) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """States, their times, and conditions that the network takes."""
    noise = torch.Generator().manual_seed(0)
    given = {"encoder_hidden_states": torch.randn(2, 5, 24, generator=noise)}
    if isinstance(
        network, ChromaTransformer2DModel | ZImageTransformer2DModel | Lumina2Transformer2DModel
    ):
        given["encoder_attention_mask"] = (torch.arange(5) < 3).float().expand(2, 5)
    else:
        given["pooled_projections"] = torch.randn(2, 40, generator=noise)
    if network.config.get("guidance_embeds"):
        given["guidance"] = torch.full((2,), 2.0)
    return torch.randn(2, 16, SIDE, SIDE, generator=noise), torch.tensor([0.3, 0.8]), given


@pytest.mark.parametrize("kind", KINDS)
def test_names_lead_to_what_diffusers_own_function_makes_of_them(kind: str) -> None:
    """Each row of a tensor has a number of its own; halves, parts and swaps show in their order."""
    layout, (network_class, sizes) = _layout(kind), KINDS[kind]
    with torch.device("meta"):
        network = network_class(**sizes | PUBLISHED[layout])
    rows = {}
    for name, tensor in network.state_dict().items():
        rows[name] = torch.empty(tensor.shape[0], 1 if tensor.ndim > 1 else 0, device="meta")
    table = author_layouts()[layout].table(network.state_dict(), network.config, "test")
    probes, first = {}, 0
    for pair in table.pairs:
        (name,) = pair.foreign
        count = sum(rows[one].shape[0] for one in pair.ours)
        probes[name] = torch.arange(first, first + count, dtype=torch.float64)
        if name.endswith("context_embedder.weight"):
            # Its second dimension is asked for a width.
            probes[name] = probes[name][:, None].expand(count, 24)
        first += count
    convert = {
        "flux": convert_flux_transformer_checkpoint_to_diffusers,
        "chroma": convert_chroma_transformer_checkpoint_to_diffusers,
        "sd3": convert_sd3_transformer_checkpoint_to_diffusers,
        "z-image": convert_z_image_transformer_checkpoint_to_diffusers,
        "lumina2": convert_lumina2_to_diffusers,
    }[layout]
    # That of Lumina 2 fails on files with this prefix.
    root = "" if layout == "lumina2" else "model.diffusion_model."
    left = {f"{root}{name}": one for name, one in probes.items()}
    for name in table.benign:
        left[name] = torch.zeros(1)
    expected = convert(left)
    assert not left
    found = table.renamed(probes, "test")
    assert found.keys() == expected.keys() == network.state_dict().keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.integration
@pytest.mark.parametrize(("kind", "root"), _rooted("model.diffusion_model."))
def test_a_single_file_is_the_network_and_comes_back_bit_for_bit(
    kind: str, root: str, hddm: Command, tmp_path: Path
) -> None:
    network_class, sizes = KINDS[kind]
    network = randomised(network_class(**sizes)).eval()
    content, vae = _file(network, root), {}
    for name in known_family(network).unread:
        content[f"{root}{name}"] = torch.randn(4, generator=torch.Generator().manual_seed(1))
    if root:
        vae = {
            name.replace("first_stage_model.", "vae."): one for name, one in ldm_vae(_vae()).items()
        }
    source = tmp_path / "model.safetensors"
    save_file(content | vae, source, metadata={"modelspec.title": "Mine"})
    said = converted(hddm, source, tmp_path / "expert", "--sample-size", SIDE)
    record = record_of(tmp_path / "expert")
    layout = _layout(kind)
    assert (record["source"]["layout"], record["prediction_type"]) == (layout, "flow_prediction")
    scale = (1.5305, 0.0609) if layout == "sd3" else (0.3611, 0.1159)
    assert record["latent_scale"] == scale[0]
    if root:
        assert (record["vae"]["scale"], record["vae"]["shift"]) == scale
    else:
        assert record["vae"] is None
    # Flux by the number of its patches, here less than any published one.
    if kind in SHIFTS:
        assert record["shift"] == SHIFTS[kind]
    else:
        assert 1.5 < record["shift"] < 1.7, said

    config = read_config(tmp_path / "expert")
    for name, value in sizes.items():
        assert config[name] == (list(value) if isinstance(value, tuple) else value), name
    field = library.load(tmp_path / "expert")
    x, t, given = _inputs(network)
    expected = velocity_by_hand(network, x, t, given)
    torch.testing.assert_close(field.velocity(x, t, **given), expected, rtol=1e-4, atol=1e-4)

    back = written_back(hddm, tmp_path / "expert", tmp_path / "back", layout)
    again = load_file(back / "checkpoint.safetensors")
    assert again.keys() == (content | vae).keys()
    for name, tensor in (content | vae).items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.integration
def test_what_a_single_file_of_several_parts_leaves_out_is_recorded(
    hddm: Command, tmp_path: Path
) -> None:
    network = randomised(SD3Transformer2DModel(**SD3))
    text = {"text_encoders.clip_l.transformer.text_model.final_layer_norm.bias": torch.zeros(3)}
    source = tmp_path / "model.safetensors"
    save_file(_file(network, "model.diffusion_model.") | text, source)
    assert "sample_size is 128, and SD3Transformer2DModel has positions for 12" in refused(
        hddm, source
    )
    said = converted(hddm, source, tmp_path / "expert", "--sample-size", SIDE)
    assert "its text encoders (clip_l) are left out" in said
    unread = record_of(tmp_path / "expert")["unread_text_encoder"]
    assert (unread["kind"], unread["fingerprint"]) == ("clip_l", None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vae2.weight": torch.zeros(1)}, "its tensor 'vae2.weight' is no part of layout flux"),
        ({"model.diffusion_model.more.weight": torch.zeros(1)}, "left over more.weight (1,)"),
        (
            {"model.diffusion_model.img_in.weight": torch.zeros(3)},
            "missing img_in.weight of 2 dimensions",
        ),
    ],
)
def test_a_file_that_is_not_whole_is_refused(
    changes: dict[str, Tensor], said: str, hddm: Command, tmp_path: Path
) -> None:
    content = _file(FluxTransformer2DModel(**FLUX), "model.diffusion_model.")
    save_file(content | changes, tmp_path / "a.safetensors")
    assert said in refused(hddm, tmp_path / "a.safetensors", "--sample-size", SIDE)


def test_diffusers_reads_other_files_than_these_too() -> None:
    """Both functions are those that diffusers' own loaders use."""
    loaders = diffusers.loaders.single_file_model.SINGLE_FILE_LOADABLE_CLASSES
    for network_class, function in (
        (FluxTransformer2DModel, convert_flux_transformer_checkpoint_to_diffusers),
        (ChromaTransformer2DModel, convert_chroma_transformer_checkpoint_to_diffusers),
        (SD3Transformer2DModel, convert_sd3_transformer_checkpoint_to_diffusers),
    ):
        assert loaders[network_class.__name__]["checkpoint_mapping_fn"] is function


def _bytes(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["float8", "int8", "nvfp4"])
def test_text_encoders_that_are_left_out_are_left_as_they_are(
    kind: str, hddm: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network and the VAE beside them are read as the numbers that they stand for."""
    content = _file(randomised(Lumina2Transformer2DModel(**LUMINA2)), "model.diffusion_model.")
    layer = "model.diffusion_model.layers.0.feed_forward.w1"
    vae = "vae.decoder.conv_in"
    content |= {
        name.replace("first_stage_model.", "vae."): one for name, one in ldm_vae(_vae()).items()
    }
    for name in (layer, vae):
        content[f"{name}.weight"] = content[f"{name}.weight"].to(torch.float8_e4m3fn)
        content[f"{name}.scale_weight"] = torch.full((), 2.0)
    text = "text_encoders.gemma2_2b.transformer.model.layers.0.mlp.up_proj"
    stored = {
        "float8": {
            "weight": torch.zeros(8, 8).to(torch.float8_e4m3fn),
            "scale_weight": torch.ones(()),
        },
        "int8": {
            "weight": torch.zeros(8, 8, dtype=torch.int8),
            "weight_scale": torch.ones(8, 1),
            "comfy_quant": _bytes(b'{"format": "int8_tensorwise"}'),
        },
        "nvfp4": {
            "weight": torch.zeros(8, 4, dtype=torch.uint8),
            "weight_scale": torch.ones(128, 4).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.ones(()),
            "comfy_quant": _bytes(b'{"format": "nvfp4"}'),
        },
    }[kind]
    for leaf, tensor in stored.items():
        content[f"{text}.{leaf}"] = tensor
    content["text_encoders.gemma2_2b.spiece_model"] = _bytes(b"words")
    save_file(content, tmp_path / "model.safetensors")
    scaled, own = list[str](), quantised._scaled

    def count(weight: Tensor, scale: Tensor, name: str, path: Path) -> Tensor:
        scaled.append(name)
        return own(weight, scale, name, path)

    monkeypatch.setattr(quantised, "_scaled", count)
    source = tmp_path / "model.safetensors"
    said = converted(hddm, source, tmp_path / "expert", "--sample-size", SIDE)
    assert sorted(set(scaled)) == [f"{layer}.weight", f"{vae}.weight"]
    assert "2 tensors in float8 with a scale each are read in float32" in said
    left = (
        "its text encoders (gemma2_2b) are left out, as hddm does not read those in single files of"
    )
    assert f"{left} lumina2, nor the vocabulary beside them (spiece_model)" in said
    unread = record_of(tmp_path / "expert")["unread_text_encoder"]
    assert unread["kind"] == "gemma2_2b"
    assert "nor the vocabulary" in unread["reason"]


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_of_a_folder_goes_to_a_single_file_that_means_the_same(
    kind: str, hddm: Command, tmp_path: Path
) -> None:
    network_class, sizes = KINDS[kind]
    if known_family(network_class).states_size:
        sizes = sizes | {"sample_size": SIDE}
    network, layout = randomised(network_class(**sizes)), _layout(kind)
    scheduler = dict(known_family(network).file_scheduler(network.config))
    del scheduler["_class_name"]
    source = flow_pipeline(tmp_path / "source", network, **scheduler)
    side = ("--sample-size", SIDE)
    converted(hddm, source, tmp_path / "expert", *side)
    file = written_back(hddm, tmp_path / "expert", tmp_path / "back", layout)
    converted(hddm, file / "checkpoint.safetensors", tmp_path / "again", *side)
    first, again = record_of(tmp_path / "expert"), record_of(tmp_path / "again")
    for key in ("prediction_type", "schedule", "time_scale", "sample_shape", "shift", "conditions"):
        assert again[key] == first[key], key
    weights = "diffusion_pytorch_model.safetensors"
    expected = load_file(tmp_path / "expert" / weights)
    found = load_file(tmp_path / "again" / weights)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    x, t, given = _inputs(network)
    velocities = []
    for name in ("expert", "again"):
        velocities.append(library.load(tmp_path / name).velocity(x, t, **given))
    assert torch.equal(*velocities)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"schedule": CosineSchedule().config, "prediction_type": "v_prediction"},
            "means flow_prediction on the straight path, with times up to 1, and",
        ),
        ({"time_scale": 0.5}, "has flow_prediction on the straight path, with times up to 0.5"),
        ({"latent_scale": 0.18215}, "means latents times 0.3611, and"),
    ],
)
def test_what_a_single_file_would_say_otherwise_is_named(
    changes: dict[str, Any], said: str, hddm: Command, tmp_path: Path
) -> None:
    network = randomised(ZImageTransformer2DModel(**Z_IMAGE))
    source = flow_pipeline(tmp_path / "source", network, shift=3.0)
    expert = tmp_path / "expert"
    converted(hddm, source, expert, "--sample-size", SIDE)
    edit_json(expert / "expert.json", **changes)
    error = refused(hddm, expert, "--to-layout", "z-image")
    assert said in error
    if "schedule" in changes:
        assert "has v_prediction on CosineSchedule" in error


def test_another_shift_is_noted(hddm: Command, tmp_path: Path) -> None:
    network = randomised(ZImageTransformer2DModel(**Z_IMAGE))
    source = flow_pipeline(tmp_path / "source", network, shift=6.0)
    converted(hddm, source, tmp_path / "expert", "--sample-size", SIDE)
    told = ("convert", tmp_path / "expert", "--out", tmp_path / "back", "--to-layout", "z-image")
    assert "means steps with a shift of 3, and the expert wants 6" in hddm(*told)[1]


@pytest.mark.parametrize(("kind", "root"), _rooted(""))
def test_a_single_file_in_the_networks_own_names_is_the_network(
    kind: str, root: str, hddm: Command, tmp_path: Path
) -> None:
    network_class, sizes = KINDS[kind]
    network = randomised(network_class(**sizes))
    content = {}
    for name, tensor in network.state_dict().items():
        content[f"{root}{name}"] = tensor.contiguous()
    source = tmp_path / "model.safetensors"
    save_file(content, source)
    said = converted(hddm, source, tmp_path / "expert", "--sample-size", SIDE)
    assert "its tensors have diffusers' names" in said
    record, config = record_of(tmp_path / "expert"), read_config(tmp_path / "expert")
    assert record["source"]["layout"] == _layout(kind)
    for name, value in sizes.items():
        assert config[name] == (list(value) if isinstance(value, tuple) else value), name
    found = load_file(tmp_path / "expert" / "diffusion_pytorch_model.safetensors")
    assert found.keys() == network.state_dict().keys()
    for name, tensor in network.state_dict().items():
        assert torch.equal(found[name], tensor), name
    if root:
        return
    back = written_back(hddm, tmp_path / "expert", tmp_path / "back", _layout(kind))
    again = load_file(back / "checkpoint.safetensors")
    expected = _file(network, root)
    assert again.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layers.999999999.attention.to_q.weight", "left over layers.999999999.attention"),
        ("more.weight", "left over more.weight"),
    ],
)
def test_a_file_in_the_networks_own_names_that_is_not_whole_is_refused(
    name: str, said: str, hddm: Command, tmp_path: Path
) -> None:
    network = randomised(ZImageTransformer2DModel(**Z_IMAGE))
    save_file(dict(network.state_dict()) | {name: torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    assert said in refused(hddm, tmp_path / "a.safetensors", "--sample-size", SIDE)
