"""HunyuanDiT as an expert: prompts, calls, pictures and mixtures against diffusers' own pipeline."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    HunyuanDiT2DControlNetModel,
    HunyuanDiT2DModel,
    HunyuanDiTControlNetPipeline,
    HunyuanDiTPipeline,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BertTokenizer, T5Tokenizer

import hddm as library
from hddm.checkpoints.write_back import write_back
from hddm.networks.families.hunyuan import HUNYUAN
from hddm.networks.prompts import PipelineText, read_texts
from hddm.networks.text_encoder import read_text_encoder
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.records import WEIGHTS
from tests.artefacts import Command, copied, edit_json, printed, refusal
from tests.checkpoint_files import randomised, record_of
from tests.component_files import saved_in_parts, write_bert, write_t5, write_vae
from tests.pipelines.checks import (
    HALF_TYPES,
    check_int8,
    check_lora,
    check_mixture,
    graphs_of,
    quick_first,
)
from tests.pipelines.test_prompts_of_pipelines import stock

PROMPTS = ["A Cat ", "two dogs on a lawn"]
AGAINST = "a dog"
SIDE, STEPS = 8, 3
WIDE = {"num_attention_heads": 2, "attention_head_dim": 8, "hidden_size": 16, "num_layers": 4}
WIDE |= {"in_channels": 4, "patch_size": 2, "sample_size": SIDE, "pooled_projection_dim": 12}
WIDE |= {"cross_attention_dim": 24, "cross_attention_dim_t5": 32}
BETAS = {"beta_start": 0.00085, "beta_end": 0.03, "beta_schedule": "scaled_linear"}
V = {"prediction_type": "v_prediction", "clip_sample": False, "steps_offset": 1}
TEXT = ("encoder_hidden_states", "encoder_hidden_states_t5")
MASKS = ("encoder_attention_mask", "text_embedding_mask_t5")
VERSIONS = {"1.1": True, "1.2": False}
"""Whether the network takes the size of the picture and a style."""


def hunyuan(seed: int = 0, **changes: Any) -> HunyuanDiT2DModel:
    return randomised(HunyuanDiT2DModel(**WIDE | changes), seed)


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pipe(version: str, tmp_path_factory: pytest.TempPathFactory) -> HunyuanDiTPipeline:
    folder = tmp_path_factory.mktemp("hunyuan")
    made = HunyuanDiTPipeline(
        vae=write_vae(folder / "vae", factor=8, scaling_factor=0.13025),
        text_encoder=write_bert(folder / "first", 24),
        tokenizer=BertTokenizer.from_pretrained(folder / "first" / "tokenizer"),
        text_encoder_2=write_t5(folder / "second", 32),
        tokenizer_2=T5Tokenizer.from_pretrained(folder / "second" / "tokenizer"),
        transformer=hunyuan(use_style_cond_and_image_meta_size=VERSIONS[version]),
        scheduler=DDPMScheduler(**BETAS, **V),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def source(pipe: HunyuanDiTPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_in_parts(pipe, tmp_path_factory.mktemp("source") / "pipeline")


@pytest.fixture(scope="module")
def expert(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert") / "expert"
    library.convert(source, folder)
    return folder


def _theirs(pipe: HunyuanDiTPipeline, prompts: list[str], against: str) -> list[dict[str, Tensor]]:
    """Conditions of prompts, and of the negative prompt, by hddm's keywords."""
    branches: list[dict[str, Tensor]] = [{}, {}]
    for number, length in enumerate((77, 256)):
        found = pipe.encode_prompt(
            prompts,
            negative_prompt=[against] * len(prompts),
            max_sequence_length=length,
            text_encoder_index=number,
        )
        for branch, own in enumerate(branches):
            own |= {TEXT[number]: found[branch], MASKS[number]: found[2 + branch]}
    return branches


@pytest.mark.parametrize("against", ["", AGAINST])
def test_prompts_become_the_pipelines_own_conditions(
    pipe: HunyuanDiTPipeline, expert: Path, against: str
) -> None:
    prompts = [*PROMPTS, "", "cat on a dog " * 80]
    with pytest.warns(UserWarning, match="is cut to") as warned:
        encoded = HDDMPipeline.from_pretrained(expert).encode(
            prompts, negative_prompt=against or None, guided=True
        )
    said = [str(one.message).partition(": a prompt")[0] for one in warned]
    assert said == ["BERT", "T5"]
    theirs = _theirs(pipe, prompts, against)
    for ours, expected in zip((encoded.given, encoded.negative), theirs, strict=True):
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(ours[name].expand_as(value), value), name
    # Each encoder counts its own tokens.
    assert encoded.given[MASKS[0]][3].sum() == 77
    assert encoded.given[MASKS[1]][3].sum() == 256


@pytest.mark.parametrize("size", [(SIDE, SIDE), (SIDE, 14), (12, 6)], ids=str)
def test_one_call_at_each_of_the_pipelines_times_is_one_of_its_network(
    size: tuple[int, int], pipe: HunyuanDiTPipeline, expert: Path
) -> None:
    """Places and sizes are the pipeline's own at every size."""
    calls: list[tuple[tuple[Any, ...], Tensor]] = []

    def keep(module: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
        calls.append((inputs, output[0]))

    hook = pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    height, width = 8 * size[0], 8 * size[1]
    try:
        pipe(PROMPTS, height, width, STEPS, negative_prompt=[AGAINST] * 2, output_type="latent",
             use_resolution_binning=False)  # fmt: skip
    finally:
        hook.remove()
    field = library.load(expert).at_size(size)
    given, against = _theirs(pipe, PROMPTS, AGAINST)
    both = {name: torch.cat([against[name], one]) for name, one in given.items()}
    assert len(calls) == STEPS
    for (y, times), output in calls:
        alpha = pipe.scheduler.alphas_cumprod[times.long()].sqrt().view(-1, 1, 1, 1)
        sigma = (1 - alpha**2).sqrt()
        v = output[:, :4]
        expected = (sigma * y + alpha * v) - (alpha * y - sigma * v)
        t = (sigma / (alpha + sigma)).flatten()
        found = field.velocity(y / (alpha + sigma), t, **both)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_time_both_texts_and_their_padding_each_change_the_output(
    expert: Path, version: str
) -> None:
    """So that the comparison above would see what is lost."""
    pipe, x = HDDMPipeline.from_pretrained(expert), torch.randn(2, 4, SIDE, SIDE)
    given, t = pipe.encode(PROMPTS).given, torch.full((2,), 0.4)
    field = library.load(expert)
    own = field.velocity(x, t, **given)
    others = [given | {name: given[name] + 1} for name in TEXT]
    others += [given | {name: torch.ones_like(given[name])} for name in MASKS]
    if VERSIONS[version]:
        sizes = field.null_conditions["image_meta_size"]
        assert sizes.tolist() == [1024, 1024, 8 * SIDE, 8 * SIDE, 0, 0]
        others.append(given | {"image_meta_size": (sizes + 64).expand(2, -1)})
    else:
        assert set(field.conditions or ()) == {*TEXT, *MASKS}
    for other in others:
        assert (field.velocity(x, t, **other) - own).abs().max() > 1e-5 * own.abs().max()
    assert (field.velocity(x, t + 0.01, **given) - own).abs().max() > 1e-4 * own.abs().max()


def _pictures(pipe: Any, **more: Any) -> Tensor:
    # The pipeline of ControlNet encodes its picture by noise of its own.
    torch.manual_seed(0)
    made = pipe(
        PROMPTS,
        negative_prompt=[AGAINST] * 2,
        height=8 * SIDE,
        width=8 * SIDE,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(0),
        use_resolution_binning=False,
        output_type="pt",
        **more,
    )
    return torch.as_tensor(made.images)


@pytest.mark.parametrize("rescale", [0.0, 0.7])
@pytest.mark.parametrize("strategy", ["full", "draw"])
def test_a_drop_in_makes_the_pipelines_own_pictures_of_prompts(
    strategy: str, rescale: float, source: Path, expert: Path
) -> None:
    """The pipelines of both versions pass the size and a style, which 1.2 does not take."""
    pipe = HunyuanDiTPipeline.from_pretrained(source)
    pipe.set_progress_bar_config(disable=True)
    theirs = _pictures(pipe, guidance_rescale=rescale)
    model = library.Ensemble([library.load(expert)], strategy=strategy)
    pipe.transformer = library.drop_in(model, pipe)
    ours = _pictures(pipe, guidance_rescale=rescale)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_controlnet_adds_to_the_skips_of_the_experts_network(
    pipe: HunyuanDiTPipeline, expert: Path
) -> None:
    config = {name: one for name, one in WIDE.items() if name != "num_layers"}
    control = HunyuanDiT2DControlNetModel(
        **config,
        transformer_num_layers=WIDE["num_layers"],
        conditioning_channels=4,
        use_style_cond_and_image_meta_size=bool(
            pipe.transformer.config.use_style_cond_and_image_meta_size
        ),
    )
    parts = {name: one for name, one in pipe.components.items() if name != "controlnet"}
    own = HunyuanDiTControlNetPipeline(
        **parts, controlnet=randomised(control, 3), requires_safety_checker=False
    )
    own.set_progress_bar_config(disable=True)
    picture = {"control_image": torch.rand(2, 3, 8 * SIDE, 8 * SIDE)}
    theirs, without = _pictures(own, **picture), _pictures(pipe)
    assert (theirs - without).abs().max() > 1e-3
    own.transformer = library.drop_in(library.load(expert), own)
    torch.testing.assert_close(_pictures(own, **picture), theirs, rtol=0, atol=1e-4)


@pytest.mark.integration
def test_samples_of_two_sizes_are_pictures(expert: Path, hddm: Command, tmp_path: Path) -> None:
    prompt = ("--prompt", PROMPTS[1], "--negative-prompt", AGAINST, "--guidance-scale", 3)
    for name, sizes, shown in (
        ("own", (), (64, 64)),
        ("other", ("--height", 48, "--width", 96), (96, 48)),
    ):
        printed(hddm, "sample", expert, "--out", tmp_path / name, "--num-images", 2, "--steps", STEPS,
                *prompt, "--guidance-rescale", 0.5, *sizes)  # fmt: skip
        made = sorted((tmp_path / name).glob("0*.png"))
        assert len(made) == 2
        for path in made:
            picture = Image.open(path)
            assert picture.size == shown
            assert any(low < high for low, high in picture.getextrema())
    code, _, error = hddm("sample", expert, "--out", tmp_path / "no", "--num-images", 1, "--height", 56,
                          "--width", 64, *prompt)  # fmt: skip
    assert code
    assert "multiples of 16" in error


def test_an_expert_goes_back_to_a_pipeline_of_the_same_pictures(
    pipe: HunyuanDiTPipeline, expert: Path, tmp_path: Path
) -> None:
    write_back(expert, tmp_path / "back", "diffusers-hunyuandit")
    again = HunyuanDiTPipeline.from_pretrained(tmp_path / "back", requires_safety_checker=False)
    again.set_progress_bar_config(disable=True)
    for name in ("prediction_type", "beta_end", "beta_schedule", "steps_offset"):
        assert again.scheduler.config[name] == pipe.scheduler.config[name]
    for name, weight in pipe.transformer.state_dict().items():
        assert torch.equal(again.transformer.state_dict()[name], weight), name
    torch.testing.assert_close(_pictures(again), _pictures(pipe), rtol=0, atol=1e-5)
    library.convert(tmp_path / "back", tmp_path / "again")
    for key in ("text_encoder", "vae", "conditions", "sample_shape", "schedule"):
        assert record_of(tmp_path / "again")[key] == record_of(expert)[key]
    record = record_of(expert)
    text = record["text_encoder"]
    assert (text["kind"], text["tokens"], text["width"]) == ("HunyuanDiTPipeline", 77, 24)
    assert record["prediction_type"] == "v_prediction"
    assert record["variance_head"]


def test_a_saved_pipeline_reads_prompts_as_before(expert: Path, tmp_path: Path) -> None:
    pipe = HDDMPipeline.from_pretrained(expert)
    pipe.save_pretrained(tmp_path / "saved")
    again = HDDMPipeline.from_pretrained(tmp_path / "saved").encode(PROMPTS)
    for name, one in pipe.encode(PROMPTS).given.items():
        assert torch.equal(again.given[name], one)


def test_a_schedule_that_ends_without_signal_is_read_as_it_is(
    pipe: HunyuanDiTPipeline, source: Path, tmp_path: Path
) -> None:
    other = copied(source, tmp_path)
    edit_json(other / "scheduler" / "scheduler_config.json", rescale_betas_zero_snr=True)
    library.convert(other, tmp_path / "expert")
    field = library.load(tmp_path / "expert")
    assert field.range[1] == 1.0
    given = HDDMPipeline.from_pretrained(tmp_path / "expert").encode(PROMPTS).given
    assert field.velocity(torch.randn(2, 4, SIDE, SIDE), torch.ones(2), **given).isfinite().all()


@pytest.mark.parametrize("prefix", quick_first(["lora_unet_", "transformer."]))
def test_a_lora_of_common_names_changes_the_layers_that_it_names(
    prefix: str, pipe: HunyuanDiTPipeline, expert: Path, tmp_path: Path
) -> None:
    noise, content, changes = torch.Generator().manual_seed(7), {}, {}
    for name, layer in pipe.transformer.named_modules():
        if isinstance(layer, nn.Linear) and ".attn" in name:
            a = 0.3 * torch.randn(2, layer.in_features, generator=noise)
            b = 0.3 * torch.randn(layer.out_features, 2, generator=noise)
            stem = prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
            parts = ("lora_down", "lora_up") if prefix.endswith("_") else ("lora_A", "lora_B")
            content |= {
                f"{stem}.{part}.weight": one for part, one in zip(parts, (a, b), strict=True)
            }
            changes[f"{name}.weight"] = b @ a
    network = hunyuan(
        use_style_cond_and_image_meta_size=pipe.transformer.config.use_style_cond_and_image_meta_size
    )
    check_lora(content, changes, network, expert, PROMPTS, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_int8_makes_nearly_the_same(expert: Path) -> None:
    check_int8(expert, PROMPTS)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_weights_of_half_types_are_compared_in_float32(
    pipe: HunyuanDiTPipeline, dtype: torch.dtype, tmp_path: Path
) -> None:
    """One of its modules joins the biases of three layers, in a list."""
    source = saved_in_parts(pipe, tmp_path / "source")
    shutil.rmtree(source / "transformer")
    hunyuan(seed=1, **pipe.transformer.config).to(dtype).save_pretrained(source / "transformer")
    library.convert(source, tmp_path / "expert")
    weights = load_file(tmp_path / "expert" / WEIGHTS)
    assert {one.dtype for one in weights.values()} == {dtype}


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_it_runs_in_half_types_to_their_rounding(expert: Path, dtype: torch.dtype) -> None:
    x, t = torch.randn(2, 4, SIDE, SIDE), torch.full((2,), 0.4)
    given = HDDMPipeline.from_pretrained(expert).encode(PROMPTS).given
    exact = library.load(expert).velocity(x, t, **given)
    found = library.load(expert, dtype=dtype).velocity(x, t, **given)
    assert (found - exact).norm() < 0.1 * exact.norm()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled_before")
def test_blocks_with_and_without_a_skip_share_compiled_graphs(expert: Path) -> None:
    field = library.load(expert)
    given = HDDMPipeline.from_pretrained(expert).encode(PROMPTS).given
    given |= {"image_meta_size": torch.ones(2, 6), "style": torch.zeros(2).long()}
    assert field.sample_shape == (4, SIDE, SIDE)
    # Blocks without a skip; the first one with a skip, whose input still has the layout of the patches'
    # embedding, transposed; and those behind it, whose input is a linear layer's.
    assert graphs_of(hunyuan(num_layers=8), torch.tensor([200.0, 800.0]), given) == 3


@pytest.mark.slow
def test_hunyuan_and_sdxl_are_drawn_and_mixed_in_their_one_latent_space(
    pipe: HunyuanDiTPipeline, expert: Path, tmp_path: Path, hddm: Command
) -> None:
    """Each gets its own conditions."""
    peer = stock("sdxl", tmp_path / "parts")
    even = check_mixture(peer, pipe.vae, expert, PROMPTS, tmp_path, hddm)
    own = {f"{name}_2" for name in (*TEXT, *MASKS)}
    assert even.encode(PROMPTS).given.keys() == {"encoder_hidden_states", "text_embeds", *own}


def test_bert_alone_reads_no_prompts(source: Path, tmp_path: Path) -> None:
    """Only a pipeline that says how its tokens are used has it."""
    told = refusal(read_text_encoder, source / "text_encoder")
    assert "holds ['BertModel'], not a CLIPTextModel or a T5EncoderModel" in told
    other = copied(source, tmp_path)
    edit_json(other / "model_index.json", _class_name="StableDiffusionPipeline")
    assert "BertModel" in PipelineText(other).missing


def test_a_bert_without_the_pooler_that_is_not_read_is_the_same_one(
    source: Path, tmp_path: Path
) -> None:
    other = copied(source, tmp_path)
    weights = {}
    for path in (other / "text_encoder").glob("*.safetensors*"):
        weights |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    file = other / "text_encoder" / "model.safetensors"
    assert weights.pop("pooler.dense.weight").shape == (24, 24)
    del weights["pooler.dense.bias"]
    save_file(weights, file, {"format": "pt"})
    assert PipelineText(other).record == PipelineText(source).record
    weights.pop("embeddings.LayerNorm.weight")
    save_file(weights, file, {"format": "pt"})
    told = refusal(getattr, PipelineText(other), "record")
    assert "missing embeddings.LayerNorm.weight" in told


def test_an_expert_keeps_every_file_of_a_vocabulary(source: Path, tmp_path: Path) -> None:
    """Published ones of T5 have no tokenizer.json, but this one."""
    other = copied(source, tmp_path)
    (other / "tokenizer_2" / "spiece.model").write_bytes(b"pieces")
    library.convert(other, tmp_path / "expert")
    kept = tmp_path / "expert" / "text_encoder" / "tokenizer_2" / "spiece.model"
    assert kept.read_bytes() == b"pieces"


HOSTILE = {
    "num_layers": (5, "num_layers is 5, and skips join pairs of layers"),
    "attention_head_dim": (6, "attention_head_dim is 6, and places take a multiple of 4"),
    "hidden_size": (24, "hidden_size is 24, and num_attention_heads × attention_head_dim is 16"),
    "cross_attention_dim_t5": (36, "cross_attention_dim_t5 is 36, and is divided by 8 heads"),
    "text_len": (12, "text_len is 12, and prompts have 77 tokens"),
    "text_len_t5": (300, "text_len_t5 is 300, and prompts have 256 tokens"),
    "patch_size": (0, "patch_size is 0, and must be 1 or more"),
}


@pytest.mark.parametrize("key", HOSTILE)
def test_a_config_of_a_network_that_cannot_run_is_refused_in_one_line(key: str) -> None:
    value, said = HOSTILE[key]
    config = dict(hunyuan().config) | {key: value}
    told = refusal(HUNYUAN.conditions, config)
    assert said in told
    assert told.endswith("; correct the config")


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("text_encoder/config.json", {"hidden_act": "evil"}, "no text encoder can be built"),
        ("text_encoder/config.json", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ("tokenizer/tokenizer_config.json", {"auto_map": {"a": "b"}}, "names code of its own"),
        ("tokenizer/tokenizer_config.json", {"tokenizer_class": "Evil"}, "holds an Evil"),
        ("model_index.json", {"text_encoder": ["mine", "Evil"]}, "must be a BertModel"),
        ("transformer/config.json", {"num_layers": 10**6}, "its depth is 1000000"),
    ],
    ids=str,
)
def test_hostile_files_are_refused_in_one_line(
    file: str, changes: dict[str, Any], said: str, expert: Path, source: Path, tmp_path: Path
) -> None:
    other = copied(source, tmp_path)
    edit_json(other / file, **changes)
    if file.startswith("transformer"):
        assert said in refusal(library.convert, other, tmp_path / "out")
        return
    text = PipelineText(other)
    told = text.missing or refusal(lambda: read_texts(text.components["text_encoder"]))
    assert said in told
    assert "\n" not in told
