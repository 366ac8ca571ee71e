"""LoRA files that count layers in place of naming them, as cloneofsimo's tool wrote them in 2023.

A wrong order can pass every check of shapes, so it is held against a recorded one: the names that the tool's
own walk gives (`RECORDED`), over the classes of diffusers 0.11.1 and transformers 4.25.1.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

from hddm.checkpoints.convert import write
from hddm.checkpoints.lora import convert_lora
from hddm.checkpoints.lora_files import LoraFile, read_lora
from hddm.checkpoints.lora_names import COUNTED_MODULES, counted_layers, counted_text_layers
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.expert_folders import open_expert
from hddm.experts.lora import Merged
from hddm.experts.record_folders import write_records
from hddm.experts.records import ExpertRecord, read_expert_record
from hddm.inspection.folders import inspected
from hddm.networks.text_encoder import read_text_encoder
from hddm.settings import Conversion
from hddm.utils.errors import HddmError
from hddm.utils.records import WEIGHTS, write_manifest
from hddm.utils.tensors import Planned, read_safetensors, write_safetensors
from tests.artefacts import Command
from tests.checkpoint_files import SD_BETAS, pipeline, refused, shared, text_unet
from tests.component_files import write_clip, write_tokenizer

_LEVELS = [f"down_blocks.{level}.attentions.{n}" for level in (0, 1, 2) for n in (0, 1)]
_LEVELS += [f"up_blocks.{level}.attentions.{n}" for level in (1, 2, 3) for n in (0, 1, 2)]
_BLOCKS = [*_LEVELS, "mid_block.attentions.0"]
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_LEAVES = (
    *(f"attn1.{one}" for one in _ATTENTION),
    "ff.net.0.proj",
    *(f"attn2.{one}" for one in _ATTENTION),
)
RECORDED = [f"{block}.transformer_blocks.0.{leaf}" for block in _BLOCKS for leaf in _LEAVES]
"""The 144 layers of Stable Diffusion 1, as the tool's walk lists them."""
RECORDED_TEXT = [
    f"encoder.layers.{n}.self_attn.{one}"
    for n in range(12)
    for one in ("k_proj", "v_proj", "q_proj", "out_proj")
]
"""The 48 layers of its CLIP."""
SMALL = [
    f"{block}.transformer_blocks.0.{leaf}"
    for block in (
        "down_blocks.0.attentions.0",
        "up_blocks.1.attentions.0",
        "up_blocks.1.attentions.1",
        "mid_block.attentions.0",
    )
    for leaf in _LEAVES
]
"""The same walk over the tests' own UNet."""
RANK = 2
SD1 = {"cross_attention_dim": 768, "attention_head_dim": 8}
SD2 = {
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}


def _published(**changes: object) -> UNet2DConditionModel:
    with torch.device("meta"):
        return UNet2DConditionModel(sample_size=64, **changes)


def test_the_order_of_stable_diffusions_layers_is_the_recorded_one() -> None:
    for network in (_published(**SD1), _published(**SD2)):
        assert counted_layers(network, COUNTED_MODULES) == RECORDED
        attention = [name for name in RECORDED if ".attn" in name]
        assert counted_layers(network, {"CrossAttention", "Attention"}) == attention
    with torch.device("meta"):
        config = CLIPTextConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=12)
        encoder = CLIPTextModel(config)
    names = [name.removeprefix("text_model.") for name, _ in encoder.named_modules()]
    # Blocks are numbered: 10 comes after 9, also in a list that is sorted by letters.
    assert counted_text_layers(sorted(names)) == RECORDED_TEXT


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    pipeline(root / "source", text_unet(), DDIMScheduler(**SD_BETAS, prediction_type="epsilon"))
    write_clip(root / "source", num_hidden_layers=2)
    write(plan_conversion(root / "source", Conversion()), root / "base")
    return root / "base"


def _content(layers: list[str], part: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Factors by number, in the order of ``layers``."""
    noise, content = torch.Generator().manual_seed(4), {}
    for number, layer in enumerate(layers):
        out, width = weights[f"{layer}.weight"].shape
        content[f"{part}:{number}:up"] = 0.1 * torch.randn(out, RANK, generator=noise)
        content[f"{part}:{number}:down"] = 0.1 * torch.randn(RANK, width, generator=noise)
    return content


def _metadata(content: dict[str, Tensor], modules: dict[str, list[str]]) -> dict[str, str]:
    ranks = {f"{name.rpartition(':')[0]}:rank": str(RANK) for name in content}
    return ranks | {part: json.dumps(names) for part, names in modules.items()}


def _products(content: dict[str, Tensor], layers: list[str], part: str) -> dict[str, Tensor]:
    found = {}
    for number, layer in enumerate(layers):
        up, down = content[f"{part}:{number}:up"], content[f"{part}:{number}:down"]
        found[f"{layer}.weight"] = up @ down
    return found


def test_numbers_are_layers_in_the_order_of_the_tool(base: Path, tmp_path: Path) -> None:
    network = text_unet()
    encoder = read_text_encoder(base / "text_encoder")
    words = encoder.state_dict()
    content = _content(SMALL, "unet", network.state_dict())
    texts = _content(RECORDED_TEXT[:8], "text_encoder", words)
    modules = {"unet": ["GEGLU", "CrossAttention", "Attention"], "text_encoder": ["CLIPAttention"]}
    path = tmp_path / "lora.safetensors"
    save_file(content | texts, path, _metadata(content | texts, modules))
    said = inspected(path)
    assert said["names_of"] == "cloneofsimo's lora"
    assert (said["layers"], said["text_encoder_tensors"]) == (36, 16)
    convert_lora(path, base, tmp_path / "out", text_encoder_lora="apply")
    after = open_expert(tmp_path / "out").read().network.state_dict()
    changes = _products(content, SMALL, "unet")
    for name, weight in network.state_dict().items():
        torch.testing.assert_close(after[name], weight + changes.get(name, 0.0), rtol=0, atol=1e-6)
    own = read_text_encoder(tmp_path / "out" / "text_encoder").state_dict()
    changes = _products(texts, RECORDED_TEXT[:8], "text_encoder")
    for name, weight in words.items():
        expected = weight + changes.get(name.removeprefix("text_model."), 0.0)
        torch.testing.assert_close(own[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("has_feed_forward", [True, False])
def test_a_list_in_a_pickle_is_up_and_down_in_turn(
    has_feed_forward: bool, base: Path, tmp_path: Path, hddm: Command
) -> None:
    layers = [name for name in SMALL if has_feed_forward or ".attn" in name]
    network = text_unet()
    content = _content(layers, "unet", network.state_dict())
    path = tmp_path / "lora.pt"
    torch.save([torch.nn.Parameter(one) for one in content.values()], path)
    assert "is a pickle" in refused(hddm, path, "--base", base)
    given = ("convert", path, "--base", base, "--out", tmp_path / "out", "--allow-pickle")
    assert hddm(*given)[0] == 0
    after = open_expert(tmp_path / "out").read().network.state_dict()
    changes = _products(content, layers, "unet")
    for name, weight in network.state_dict().items():
        torch.testing.assert_close(after[name], weight + changes.get(name, 0.0), rtol=0, atol=1e-6)
    code, said, _ = hddm("inspect", path, "--allow-pickle")
    assert code == 0
    assert "cloneofsimo" in said
    error = refused(hddm, path, "--allow-pickle", out=tmp_path / "other")
    assert "pass --base, the expert that it changes" in error


def test_other_numbers_of_layers_and_other_modules_are_refused(base: Path, tmp_path: Path) -> None:
    content = _content(SMALL[:-1], "unet", text_unet().state_dict())
    path = tmp_path / "lora.safetensors"
    save_file(content, path)
    text = r"counts 35 layers in place of names, and .* has 32 \(Attention, CrossAttention\) or 36"
    with pytest.raises(HddmError, match=text):
        convert_lora(path, base, tmp_path / "out")
    save_file(content, path, {"unet": '["ResnetBlock2D"]'})
    with pytest.raises(
        HddmError, match=r"unet in its header is .* hddm knows the order of Attention"
    ):
        convert_lora(path, base, tmp_path / "out")
    save_file(content | {"unet.conv_in.lora_A.weight": torch.ones(2, 4, 3, 3)}, path)
    with pytest.raises(HddmError, match="calls some layers by names and some by numbers"):
        convert_lora(path, base, tmp_path / "out")
    torch.save([torch.ones(2, 2)] * 3, tmp_path / "lora.pt")
    with pytest.raises(
        HddmError, match="is a list of 3, and no list of up and down tensors in turn"
    ):
        convert_lora(tmp_path / "lora.pt", base, tmp_path / "out", allow_pickle=True)


REAL = {
    "catundchat_MIT.safetensors": "sd1",
    "cloneofsimo_analog_svd_rank4_Apache.safetensors": "sd1",
    "cloneofsimo_lora_disney_Apache.safetensors": "sd1",
    "cloneofsimo_lora_illust_Apache.pt": "sd2",
}
"""Files of public repositories, and the models that they were trained on."""


def _by_layer(lora: LoraFile) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Layer, B and A of each change in a public file, by its names or by the recorded order."""
    for name, parts in lora.layers.items():
        stem = parts["up"].removesuffix("_lora.up.weight").replace(".processor", "")
        layer = f"{stem}.0" if stem.endswith("to_out") else stem
        if lora.is_counted:
            attention = [one for one in RECORDED if ".attn" in one]
            layer = (RECORDED if len(lora.layers) == len(RECORDED) else attention)[int(name)]
        yield layer, lora.tensors[parts["up"]], lora.tensors[parts["down"]]


@pytest.mark.parametrize("name", REAL)
def test_the_layers_of_public_files_have_the_shapes_of_their_models(name: str) -> None:
    lora = read_lora(shared("real/loras") / name, allow_pickle=True)
    weights = _published(**(SD1 if REAL[name] == "sd1" else SD2)).state_dict()
    changes = list(_by_layer(lora))
    assert len(changes) == (144 if "safetensors" in name and lora.is_counted else 128)
    for layer, up, down in changes:
        assert weights[f"{layer}.weight"].shape == (up.shape[0], down.shape[1]), layer
    if "illust" in name:
        # Its tool left all layers of one kind untrained, which tells where they are in the order.
        untrained = [layer for layer, up, _ in changes if not up.any()]
        assert untrained == [name for name in RECORDED if name.endswith("to_out.0")]


@pytest.fixture(scope="module", params=["sd1", "sd2"])
def published(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """An expert with the shapes of a published model and a CLIP of its width, of 3.4 GB."""
    shared("real/loras")
    folder = tmp_path_factory.mktemp(request.param) / "base"
    network = _published(**(SD1 if request.param == "sd1" else SD2))
    folder.mkdir()
    network.save_config(folder)
    noise = torch.Generator().manual_seed(0)

    def drawn(shape: torch.Size) -> Tensor:
        return 0.1 * torch.randn(shape, generator=noise)

    planned = []
    for name, one in network.state_dict().items():
        # Nothing but the layers that files change is looked at.
        make = drawn if ".attn" in name or ".ff." in name else torch.zeros
        planned.append(
            Planned(name, tuple(one.shape), torch.float32, lambda f=make, s=one.shape: f(s))
        )
    write_safetensors(folder / WEIGHTS, planned)
    words = write_tokenizer(folder / "tokenizer")
    sizes = {"hidden_size": SD1["cross_attention_dim"], "intermediate_size": 8}
    config = CLIPTextConfig(**sizes, num_hidden_layers=12, vocab_size=words)
    CLIPTextModel(config).save_pretrained(folder / "text_encoder")
    for part in ("text_encoder", "tokenizer"):
        write_manifest(folder / part)
    changes = {"sample_shape": (4, 64, 64), "text_encoder": None, "source": None}
    record = ExpertRecord.model_validate(read_expert_record(base).model_dump() | changes)
    write_records(folder, record, {})
    yield request.param, folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_public_files_change_bases_of_published_shapes_as_the_formula_says(
    name: str, published: tuple[str, Path], tmp_path: Path
) -> None:
    kind, base = published
    path = shared("real/loras") / name
    decision = "drop" if "cloneofsimo" in name and path.suffix == ".safetensors" else None
    given = {"allow_pickle": True, "text_encoder_lora": decision}
    if kind != REAL[name]:
        with pytest.raises(HddmError, match="does not fit the UNet2DConditionModel"):
            convert_lora(path, base, tmp_path / "out", **given)
        return
    lines = convert_lora(path, base, tmp_path / "out", **given)
    assert "alpha: not stated, so it is the rank" in lines
    record = read_expert_record(tmp_path / "out")
    before, after = (
        read_safetensors(base / WEIGHTS),
        Merged(tmp_path / "out", record.adapter, base)(),
    )
    changed = set()
    for layer, up, down in _by_layer(read_lora(path, allow_pickle=True)):
        weight = f"{layer}.weight"
        expected = before[weight].double() + up.double() @ down.double()
        torch.testing.assert_close(after[weight].double(), expected, rtol=0, atol=1e-6)
        changed.add(weight)
    assert any(not torch.equal(after[one], before[one]) for one in changed)
    for weight in before.keys() - changed:
        assert torch.equal(after[weight], before[weight])


@pytest.mark.slow
def test_a_public_file_changes_the_text_encoder_that_it_was_trained_with(
    published: tuple[str, Path], tmp_path: Path
) -> None:
    kind, base = published
    path = shared("real/loras") / "cloneofsimo_analog_svd_rank4_Apache.safetensors"
    if kind != REAL[path.name]:
        pytest.skip(f"{path.name} was trained on another model")
    convert_lora(path, base, tmp_path / "out", text_encoder_lora="apply")
    before = read_text_encoder(base / "text_encoder").state_dict()
    after = read_text_encoder(tmp_path / "out" / "text_encoder").state_dict()
    tensors = read_safetensors(path)
    for number, layer in enumerate(RECORDED_TEXT):
        up, down = (tensors[f"text_encoder:{number}:{part}"].double() for part in ("up", "down"))
        (name,) = [one for one in before if one.endswith(f"{layer}.weight")]
        expected = before[name].double() + up @ down
        torch.testing.assert_close(after[name].double(), expected, rtol=0, atol=1e-6)
