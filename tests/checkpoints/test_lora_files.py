"""LoRA files of other tools: the expert that they become is the network that their own tools make."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import (
    ChromaPipeline,
    DDIMScheduler,
    FluxPipeline,
    ModelMixin,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.training_utils import _collate_lora_metadata
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.checkpoints.convert import write
from hddm.checkpoints.lora import convert_lora
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.adapter_records import ADAPTER_WEIGHTS
from hddm.experts.expert_folders import open_expert
from hddm.networks.families import known_family
from hddm.settings import Conversion
from hddm.utils.errors import HddmError
from hddm.utils.files import sha256_of
from hddm.utils.tensors import read_header
from tests.artefacts import Command, edit_json
from tests.checkpoint_files import SD_BETAS, conditions_of, pipeline, record_of, refused, text_unet
from tests.component_files import write_clip, write_vae
from tests.flow_models import chroma, flow_pipeline, flux, sd3
from tests.flow_models import text as flow_text
from tests.ldm_files import XL, ldm_unet
from tests.lora_files import kohya

Files = dict[str, Tensor]
_NONE = dict.fromkeys(("vae", "text_encoder", "tokenizer", "scheduler"))
_SD = {**_NONE, "safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
_TWO = {**_NONE, "text_encoder_2": None, "tokenizer_2": None}
PIPELINES: dict[str, Callable[[ModelMixin], Any]] = {
    "unet": lambda network: StableDiffusionPipeline(unet=network, **_SD),
    "xl": lambda network: StableDiffusionXLPipeline(unet=network, **_TWO),
    "sd3": lambda network: StableDiffusion3Pipeline(
        transformer=network, **_TWO, text_encoder_3=None, tokenizer_3=None
    ),
    "flux": lambda network: FluxPipeline(transformer=network, **_TWO),
    "chroma": lambda network: ChromaPipeline(transformer=network, **_NONE),
}
NETWORKS: dict[str, Callable[[], ModelMixin]] = {
    "unet": text_unet,
    "xl": lambda: text_unet(**XL),
    "sd3": sd3,
    "flux": flux,
    "chroma": chroma,
}
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Experts of each kind of network; that of the UNet keeps its VAE, CLIP and tokenizer."""
    root, found = tmp_path_factory.mktemp("bases"), {}
    for name, make in NETWORKS.items():
        source = root / f"{name}-source"
        if name in ("unet", "xl"):
            pipeline(source, make(), DDIMScheduler(**SD_BETAS, prediction_type="epsilon"))
        else:
            flow_pipeline(source, make())
        if name == "unet":
            write_vae(source / "vae")
            write_clip(source)
        found[name] = root / name
        write(plan_conversion(source, Conversion(sample_size=8)), found[name])
    return found


def _fused(kind: str, path: Path) -> ModelMixin:
    """The network after diffusers' own reading and fusing of a LoRA file."""
    pipe = PIPELINES[kind](NETWORKS[kind]())
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="lora")
    pipe.fuse_lora(components=[part])
    pipe.unload_lora_weights()
    network: ModelMixin = getattr(pipe, part)
    return network


@torch.no_grad()
def _outputs(*networks: ModelMixin) -> list[Tensor]:
    is_unet = isinstance(networks[0], UNet2DConditionModel)
    given = conditions_of(networks[0], 2) if is_unet else flow_text(networks[0])
    given = {name: one.double() for name, one in given.items()}
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5)).double()
    # In float64, so that rounding of the weights is all that is seen.
    times = torch.tensor([7.0, 640.0])
    return [known_family(one).call(one.double(), x, times, given) for one in networks]


def _check(kind: str, path: Path, base: Path, out: Path) -> None:
    """Compare the expert's network with that of diffusers, and both with the base's."""
    convert_lora(path, base, out)
    found, plain, expected = _outputs(
        open_expert(out).read().network, NETWORKS[kind](), _fused(kind, path)
    )
    size = expected.abs().max()
    assert (found - expected).abs().max() <= 1e-6
    assert (plain - expected).abs().max() > 0.01 * size


def ldm_name(network: UNet2DConditionModel) -> Callable[[str], str]:
    """Names of latent diffusion by those of diffusers, from diffusers' own conversion."""
    by_place = {tensor.data_ptr(): name for name, tensor in ldm_unet(network).items()}
    weights = network.state_dict()
    cut = len("model.diffusion_model."), -len(".weight")
    return lambda name: by_place[weights[f"{name}.weight"].data_ptr()][slice(*cut)]


def _peft_file(kind: str, folder: Path, patterns: bool = False, stated: bool = True) -> Path:
    """A LoRA of rank 4 and alpha 2 (``stated`` in the metadata), written by diffusers itself."""
    network, patterned = NETWORKS[kind](), {"rank_pattern": {"attn1.to_q": 2, "conv_in": 6}}
    layers = [*ATTENTION, "ff.net.2"]
    if kind in ("unet", "xl"):
        layers += ["conv_in", "conv1", "time_emb_proj", "proj_in", "conv"]
    elif patterns:
        patterned = {"rank_pattern": {"0.attn.to_q": 2}}
    patterned["alpha_pattern"] = {
        name: 3.0 + at for at, name in enumerate(patterned["rank_pattern"])
    }
    config = peft.LoraConfig(
        r=4, lora_alpha=2, target_modules=layers, **(patterned if patterns else {})
    )
    network.add_adapter(config)
    noise = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.1, generator=noise)
    part = "unet" if kind in ("unet", "xl") else "transformer"
    state = peft.get_peft_model_state_dict(network)
    save = {
        "unet": StableDiffusionPipeline,
        "xl": StableDiffusionXLPipeline,
        "sd3": StableDiffusion3Pipeline,
    }
    metadata = _collate_lora_metadata({part: network}) if stated else {}
    save.get(kind, FluxPipeline).save_lora_weights(
        folder, **{f"{part}_lora_layers": state}, **metadata
    )
    return folder / "pytorch_lora_weights.safetensors"


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["unet", "xl"])
def test_kohyas_file_is_what_diffusers_makes_of_it(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    network = NETWORKS[kind]()
    # kohya trains SDXL under the names of latent diffusion.
    content = kohya(network, ranks=(3, 5), named=ldm_name(network) if kind == "xl" else None)
    save_file(content, tmp_path / "lora.safetensors")
    _check(kind, tmp_path / "lora.safetensors", bases[kind], tmp_path / "out")
    assert record_of(tmp_path / "out")["adapter"]["rank"] == 5


def test_factors_in_half_precision_stay_as_they_are(bases: dict[str, Path], tmp_path: Path) -> None:
    content = {name: tensor.half() for name, tensor in kohya(text_unet()).items()}
    save_file(content, tmp_path / "lora.safetensors")
    _check("unet", tmp_path / "lora.safetensors", bases["unet"], tmp_path / "out")
    written = load_file(tmp_path / "out" / ADAPTER_WEIGHTS).values()
    given = [tensor for name, tensor in content.items() if "alpha" not in name]
    assert {one.numpy().tobytes() for one in written} == {one.numpy().tobytes() for one in given}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "stated"),
    [("unet", True), ("unet", False), ("sd3", True), ("flux", True), ("chroma", True)],
)
def test_diffusers_file_is_what_it_makes_of_it(
    kind: str, stated: bool, bases: dict[str, Path], tmp_path: Path
) -> None:
    path = _peft_file(kind, tmp_path, patterns=stated, stated=stated)
    assert ("lora_adapter_metadata" in read_header(path)[1]) == stated
    _check(kind, path, bases[kind], tmp_path / "out")


def test_every_layer_has_its_own_rank_and_alpha(bases: dict[str, Path], tmp_path: Path) -> None:
    """Diffusers 0.42 gives attention the most common alpha, so this is held against the formula, and peft."""
    content = kohya(text_unet(), ranks=(3, 5, 2), alphas=(1.0, 4.0))
    (first, *_) = [name for name in content if name.endswith("alpha")]
    # Without one, alpha is the rank.
    del content[first]
    save_file(content, tmp_path / "lora.safetensors")
    convert_lora(tmp_path / "lora.safetensors", bases["unet"], tmp_path / "out")
    merged, changed = open_expert(tmp_path / "out").read().network, 0
    after = merged.state_dict()
    for name, weight in text_unet().state_dict().items():
        stem, expected = (
            f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}",
            weight.double(),
        )
        if f"{stem}.lora_down.weight" in content:
            down, up = (content[f"{stem}.lora_{part}.weight"].double() for part in ("down", "up"))
            alpha = content.get(f"{stem}.alpha", torch.tensor(float(len(down))))
            product = torch.einsum("or,r...->o...", up.flatten(1), down)
            expected, changed = expected + alpha / len(down) * product, changed + 1
        torch.testing.assert_close(after[name].double(), expected, rtol=0, atol=1e-6)
    assert 3 * changed - 1 == len(content) > 200
    of_peft = peft.PeftModel.from_pretrained(text_unet(), tmp_path / "out").get_base_model()
    found, expected = _outputs(merged, of_peft)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "style.safetensors"
    save_file(kohya(text_unet()), path)
    return path


@pytest.mark.integration
def test_it_is_an_expert_like_any_other(
    bases: dict[str, Path], lora: Path, tmp_path: Path, hddm: Command
) -> None:
    base, out = Path(shutil.copytree(bases["unet"], tmp_path / "base")), tmp_path / "expert"
    edit_json(base / "expert.json", licence="openrail")
    code, said, error = hddm("convert", lora, "--base", base, "--out", out, "--licence", "mit")
    assert (code, error) == (0, "")
    assert "kohya" in said
    facts, before = record_of(out), record_of(base)
    for key in ("prediction_type", "schedule", "time_scale", "conditions", "vae", "text_encoder"):
        assert facts[key] == before[key]
    assert facts["licence"] == "mit AND openrail"
    assert facts["source"]["files"] == {"style.safetensors": sha256_of(lora)}
    assert facts["source"]["before"] == before["source"]
    assert hddm("verify", out)[0] == 0
    prompt = ("--num-images", 1, "--steps", 2, "--prompt", "a cat")
    assert hddm("sample", out, "--out", tmp_path / "alone", *prompt)[0] == 0
    back = ("convert", out, "--out", tmp_path / "back", "--to-layout", "diffusers-unet2d-condition")
    assert hddm(*back)[0] == 0


DOWN = "lora_unet_conv_in.lora_down.weight"


def _with(name: str, tensor: Tensor) -> Callable[[Files], object]:
    return lambda content: content.update({name: tensor})


def _again(content: Files) -> Files:
    """The factors of a layer under another name of it."""
    own = {name: one.clone() for name, one in content.items() if "_conv_in" in name}
    return {name.replace("conv_in", "input_blocks_0_0"): one for name, one in own.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_with("lora_te_a.lora_down.weight", torch.ones(2, 2)), "1 tensor in it change a text encoder"),
        (_with("lora_unet_a.dora_scale", torch.ones(2)), "1 of 84 layers of kohya): 'a' is no layer of it"),
        (lambda content: content.pop(DOWN), "is not whole: 'conv_in' has no factor 'down'"),
        (_with("unet.conv_in.lora_A.weight", torch.ones(2)), f"twice, as '{DOWN}' and 'unet.conv_in.lora_A"),
        (lambda content: content.update(_again(content)), "'input_blocks_0_0' is 'conv_in' once more"),
        (_with(DOWN, torch.ones(3, 9, 3, 3)), "'conv_in' has factors down (3, 9, 3, 3) in torch.float32"),
        (_with(DOWN, torch.full((3, 4, 3, 3), torch.nan)), f"'{DOWN}' holds NaN or Inf"),
        (_with("lora_unet_conv_in.alpha", torch.zeros(())), "is 0.0, not a positive number"),
    ],
)  # fmt: skip
def test_what_is_no_lora_of_the_base_is_refused(
    change: Callable[[Files], object],
    said: str,
    bases: dict[str, Path],
    tmp_path: Path,
    hddm: Command,
) -> None:
    content = kohya(text_unet())
    change(content)
    save_file(content, tmp_path / "lora.safetensors")
    assert said in refused(hddm, tmp_path / "lora.safetensors", "--base", bases["unet"])


def test_the_header_of_a_lora_file_says_its_licence_and_what_it_was_trained_on(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    header = {"modelspec.license": "CC-BY-4.0", "modelspec.prediction_type": "v"}
    save_file(kohya(text_unet()), tmp_path / "lora.safetensors", header)
    lines = convert_lora(tmp_path / "lora.safetensors", bases["unet"], tmp_path / "out")
    assert record_of(tmp_path / "out")["licence"] == "CC-BY-4.0"
    (note,) = [line for line in lines if line.startswith("note: ")]
    assert "says that the LoRA was trained on v_prediction" in note
    assert "predicts epsilon" in note
    with pytest.raises(HddmError, match=r"`licence` mit: the header of .* states 'CC-BY-4.0'"):
        convert_lora(tmp_path / "lora.safetensors", bases["unet"], tmp_path / "other", "mit")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"lora_alpha": 2, "lora_bias": True},
            "lora_bias is True, a variant of LoRA that is not read",
        ),
        (
            {"lora_alpha": 2, "alpha_pattern": {"conv_o.*": 1}},
            "alpha_pattern 'conv_o.*' ends the name of no l",
        ),
        ({"lora_alpha": "two"}, "is two, not a positive number"),
    ],
)
def test_metadata_that_means_something_else_is_refused(
    config: dict[str, object], said: str, bases: dict[str, Path], tmp_path: Path, hddm: Command
) -> None:
    content = {
        "unet.conv_in.lora_A.weight": torch.ones(4, 4, 3, 3),
        "unet.conv_in.lora_B.weight": torch.ones(32, 4, 1, 1),
    }
    metadata = {
        "lora_adapter_metadata": json.dumps({f"unet.{key}": value for key, value in config.items()})
    }
    save_file(content, tmp_path / "lora.safetensors", metadata)
    assert said in refused(hddm, tmp_path / "lora.safetensors", "--base", bases["unet"])


def test_a_base_is_needed_that_is_an_expert_with_weights_of_its_own(
    bases: dict[str, Path], lora: Path, tmp_path: Path, hddm: Command
) -> None:
    path, base = Path(shutil.copy(lora, tmp_path)), bases["unet"]
    assert "is a LoRA, which changes another network; pass" in refused(hddm, path)
    assert "not an expert folder; convert its checkpoint" in refused(hddm, path, "--base", tmp_path)
    torch.save({"a": torch.ones(2)}, tmp_path / "lora.pt")
    assert "is a pickle" in refused(hddm, tmp_path / "lora.pt", "--base", base)
    assert "is the base" in refused(hddm, path, "--base", base, "--overwrite", out=base)
    dry = ("convert", path, "--base", base, "--out", tmp_path / "out", "--dry-run")
    assert "nothing written" in hddm(*dry)[1]
    assert not (tmp_path / "out").exists()
    convert_lora(path, base, tmp_path / "adapter")
    error = refused(hddm, path, "--base", tmp_path / "adapter")
    assert (
        "holds no diffusion_pytorch_model.safetensors that could be adapted; name its base" in error
    )
