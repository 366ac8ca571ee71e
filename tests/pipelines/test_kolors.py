"""Kolors as an expert: prompts, calls, pictures and mixtures against diffusers' own pipeline."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    KolorsImg2ImgPipeline,
    KolorsPipeline,
    UNet2DConditionModel,
)
from diffusers.pipelines.kolors import ChatGLMTokenizer
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import hddm as library
from hddm.checkpoints.write_back import write_back
from hddm.experts.assembly import assemble
from hddm.networks.families.stable_diffusion import STABLE_DIFFUSION
from hddm.networks.prompts import PipelineText, read_texts
from hddm.networks.tokenizer import read_tokenizer
from hddm.noise import Seeded
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.solvers import euler
from tests.artefacts import Command, copied, edit_json, printed, refusal
from tests.checkpoint_files import record_of, text_unet
from tests.checkpoints.test_lora_files import ldm_name
from tests.component_files import saved_in_parts, write_chatglm, write_vae
from tests.lora_files import kohya
from tests.pipelines.checks import (
    HALF_TYPES,
    check_int8,
    check_lora,
    check_mixture,
    graphs_of,
    quick_first,
)
from tests.pipelines.test_prompts_of_pipelines import stock

PROMPTS = ["a cat", "two dogs on a lawn"]
AGAINST = "a dog"
SIDE, STEPS = 8, 3
TEXT, VECTOR = "encoder_hidden_states", "text_embeds"
WIDE = {"encoder_hid_dim": 24, "encoder_hid_dim_type": "text_proj", "cross_attention_dim": 16}
ADDED = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
ADDED |= {"projection_class_embeddings_input_dim": 24 + 6 * 4}
BETAS = {"beta_start": 0.00085, "beta_end": 0.014, "beta_schedule": "scaled_linear"}
BETAS |= {"num_train_timesteps": 1100}
PUBLISHED = BETAS | {"steps_offset": 1, "timestep_spacing": "leading"}
SIZE = {"height": 8 * SIDE, "width": 8 * SIDE}


def unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    return text_unet(seed, **WIDE | ADDED | changes)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> KolorsPipeline:
    folder = tmp_path_factory.mktemp("kolors")
    made = KolorsPipeline(
        vae=write_vae(folder / "vae", factor=8, scaling_factor=0.13025),
        text_encoder=write_chatglm(folder, 24),
        tokenizer=ChatGLMTokenizer.from_pretrained(folder / "tokenizer"),
        unet=unet(),
        scheduler=EulerDiscreteScheduler(**PUBLISHED),
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def source(pipe: KolorsPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved_in_parts(pipe, tmp_path_factory.mktemp("source") / "pipeline", "unet")
    # Published ones name the code of ChatGLM's authors, which diffusers' classes replace.
    code = {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]}
    edit_json(folder / "tokenizer" / "tokenizer_config.json", auto_map=code, remove_space=False)
    code = {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"}
    edit_json(folder / "text_encoder" / "config.json", auto_map=code)
    assert len(list((folder / "text_encoder").glob("*.safetensors"))) > 1
    return folder


@pytest.fixture(scope="module")
def expert(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert") / "expert"
    library.convert(source, folder)
    return folder


def _theirs(pipe: KolorsPipeline, prompts: list[str], against: str) -> list[dict[str, Tensor]]:
    """Conditions of prompts, and of the negative prompt, by hddm's keywords."""
    found = pipe.encode_prompt(prompts, negative_prompt=[against] * len(prompts))
    return [{TEXT: found[0], VECTOR: found[2]}, {TEXT: found[1], VECTOR: found[3]}]


def _pictures(pipe: KolorsPipeline, **more: Any) -> Tensor:
    given = {"num_inference_steps": STEPS, "guidance_scale": 3.0, "output_type": "pt"} | SIZE
    noise = {"generator": torch.Generator().manual_seed(0)}
    made = pipe(PROMPTS, negative_prompt=[AGAINST] * 2, **given | noise | more)
    return torch.as_tensor(made.images)


@pytest.mark.parametrize("against", ["", AGAINST])
def test_prompts_become_the_pipelines_own_conditions(
    pipe: KolorsPipeline, expert: Path, against: str, no_network: None
) -> None:
    prompts = [*PROMPTS, "", "cat on a dog " * 80]
    with pytest.warns(UserWarning, match="^ChatGLM: a prompt of 1042 tokens is cut to 256"):
        encoded = HDDMPipeline.from_pretrained(expert).encode(
            prompts, negative_prompt=against or None, guided=True
        )
    theirs = _theirs(pipe, prompts, against)
    for ours, expected in zip((encoded.given, encoded.negative), theirs, strict=True):
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(ours[name].expand_as(value), value), name


def test_a_prompt_that_is_cut_loses_what_is_told(expert: Path) -> None:
    """No mark ends a text of ChatGLM: all tokens but the first ones are of it."""
    pipe, kept = HDDMPipeline.from_pretrained(expert), "a " * 127
    with pytest.warns(UserWarning, match="loses '(dogs|▁dogs)'$"):
        cut = pipe.encode([kept + "dogs"]).given
    with pytest.warns(UserWarning, match="loses 'two'$"):
        again = pipe.encode([kept + "two"]).given
    assert all(torch.equal(cut[name], again[name]) for name in cut)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_the_encoder_runs_in_half_types_as_the_pipelines(
    dtype: torch.dtype, source: Path, expert: Path
) -> None:
    own = KolorsPipeline.from_pretrained(source, torch_dtype=dtype)
    ours = HDDMPipeline.from_pretrained(expert, dtype=dtype).encode(PROMPTS).given
    for name, value in _theirs(own, PROMPTS, "")[0].items():
        assert ours[name].dtype == dtype
        assert torch.equal(ours[name], value)


def test_a_variant_in_several_files_is_the_same_model_in_its_precision(
    source: Path, tmp_path: Path
) -> None:
    own = KolorsPipeline.from_pretrained(source, torch_dtype=torch.float16)
    own.set_progress_bar_config(disable=True)
    folder = saved_in_parts(own, tmp_path / "pipeline", "unet", variant="fp16")
    assert list((folder / "text_encoder").glob("model*.fp16*.safetensors"))
    library.convert(folder, tmp_path / "expert", variant="fp16")
    ours = HDDMPipeline.from_pretrained(tmp_path / "expert").encode(PROMPTS).given
    float32 = KolorsPipeline.from_pretrained(folder, variant="fp16", torch_dtype=torch.float32)
    for name, value in _theirs(float32, PROMPTS, "")[0].items():
        assert torch.equal(ours[name], value)
    write_back(tmp_path / "expert", tmp_path / "back", "diffusers-unet2d-condition")
    again = UNet2DConditionModel.from_pretrained(tmp_path / "back" / "unet").state_dict()
    for name, weight in own.unet.state_dict().items():
        assert torch.equal(again[name], weight.float())


@pytest.mark.parametrize("size", [(SIDE, SIDE), (SIDE, 14), (12, 6)], ids=str)
def test_one_call_at_each_of_the_pipelines_times_is_one_of_its_network(
    size: tuple[int, int], pipe: KolorsPipeline, expert: Path
) -> None:
    """The sizes that the network is told are the pipeline's own at every size."""
    calls: list[tuple[tuple[Any, ...], Tensor]] = []
    hook = pipe.unet.register_forward_hook(lambda _, inputs, out: calls.append((inputs, out[0])))
    try:
        _pictures(pipe, height=8 * size[0], width=8 * size[1], output_type="latent")
    finally:
        hook.remove()
    field = library.load(expert).at_size(size)
    given, against = _theirs(pipe, PROMPTS, AGAINST)
    both = {name: torch.cat([against[name], one]) for name, one in given.items()}
    assert len(calls) == STEPS
    for (y, time), eps in calls:
        alpha = float(pipe.scheduler.alphas_cumprod[int(time)].sqrt())
        sigma = (1 - alpha**2) ** 0.5
        expected = eps - (y - sigma * eps) / alpha
        t = torch.full((4,), sigma / (alpha + sigma))
        found = field.velocity(y / (alpha + sigma), t, **both)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_time_the_text_its_vector_and_the_sizes_each_change_the_output(expert: Path) -> None:
    """So that the comparison above would see what is lost."""
    pipe, x = HDDMPipeline.from_pretrained(expert), torch.randn(2, 4, SIDE, SIDE)
    given, t = pipe.encode(PROMPTS).given, torch.full((2,), 0.4)
    field = library.load(expert)
    own, sizes = field.velocity(x, t, **given), field.null_conditions["time_ids"]
    assert sizes.tolist() == [8 * SIDE, 8 * SIDE, 0, 0, 8 * SIDE, 8 * SIDE]
    others = [given | {name: given[name] + 1} for name in (TEXT, VECTOR)]
    others.append(given | {"time_ids": (sizes + 64).expand(2, -1)})
    for other in others:
        assert (field.velocity(x, t, **other) - own).abs().max() > 1e-5 * own.abs().max()
    assert (field.velocity(x, t + 0.01, **given) - own).abs().max() > 1e-4 * own.abs().max()


@pytest.mark.parametrize("strategy", ["full", "draw"])
def test_a_drop_in_makes_the_pipelines_own_pictures_of_prompts(
    strategy: str, source: Path, expert: Path
) -> None:
    pipe = KolorsPipeline.from_pretrained(source)
    pipe.set_progress_bar_config(disable=True)
    theirs = _pictures(pipe)
    model = library.Ensemble([library.load(expert)], strategy=strategy)
    pipe.unet = library.drop_in(model, pipe)
    torch.testing.assert_close(_pictures(pipe), theirs, rtol=0, atol=1e-4)
    # Its pipeline for another task has the same network.
    parts = {name: one for name, one in pipe.components.items() if name != "unet"}
    other = KolorsImg2ImgPipeline(**parts, unet=unet())
    other.set_progress_bar_config(disable=True)
    begun = {"image": torch.rand(2, 3, 8 * SIDE, 8 * SIDE), "strength": 0.7}
    torch.manual_seed(0)
    theirs = _pictures(other, **begun)
    other.unet = library.drop_in(model, other)
    torch.manual_seed(0)
    torch.testing.assert_close(_pictures(other, **begun), theirs, rtol=0, atol=1e-4)


def test_a_picture_to_imitate_is_refused_by_a_drop_in(source: Path, expert: Path) -> None:
    pipe = KolorsPipeline.from_pretrained(source)
    network = library.drop_in(library.load(expert), pipe)
    given = {VECTOR: torch.ones(1, 24), "time_ids": torch.ones(1, 6)}
    added = given | {"image_embeds": [torch.ones(1, 1, 4)]}
    told = refusal(network, torch.ones(1, 4, 8, 8), 400, torch.ones(1, 5, 24), None,
                   added_cond_kwargs=added)  # fmt: skip
    assert "image_embeds: the experts have no such input" in told


def test_eulers_method_on_the_pipelines_times_makes_its_pictures(
    pipe: KolorsPipeline, expert: Path
) -> None:
    """In the common space its step is that of the pipeline's scheduler."""
    noise = Seeded(0).initial(range(2), (4, SIDE, SIDE))
    theirs = _pictures(pipe, latents=noise, output_type="latent")
    field, sigmas = library.load(expert), pipe.scheduler.sigmas.double()
    given, against = _theirs(pipe, PROMPTS, AGAINST)

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        t = torch.full((2,), float(now), dtype=torch.float64)
        return field.velocity(x, t, guidance_scale=3.0, negative=against, **given)

    first = (sigmas[0] ** 2 + 1).sqrt() / (sigmas[0] + 1)
    found = euler(velocity, float(first) * noise, sigmas / (sigmas + 1))
    assert (found - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.integration
def test_samples_on_the_times_of_ddim_are_the_pipelines_pictures(
    source: Path, expert: Path, hddm: Command, tmp_path: Path
) -> None:
    prompts = ("--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--negative-prompt", AGAINST)
    printed(hddm, "sample", expert, "--out", tmp_path / "out", "--num-images", 2, "--steps", 4,
            "--native", "ddim", "--guidance-scale", 3, *prompts)  # fmt: skip
    pipe = KolorsPipeline.from_pretrained(source)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = DDIMScheduler(**BETAS, timestep_spacing="trailing", clip_sample=False)
    noise = Seeded(0).initial(range(2), (4, SIDE, SIDE))
    made = _pictures(pipe, latents=noise, num_inference_steps=4, output_type="np")
    for number, theirs in enumerate(made):
        ours = np.asarray(Image.open(tmp_path / "out" / f"0000{number}.png"), int)
        assert np.abs(ours - 255 * theirs.numpy()).max() <= 1
        assert ours.std() > 1


@pytest.mark.integration
def test_samples_of_two_sizes_are_pictures(expert: Path, hddm: Command, tmp_path: Path) -> None:
    for name, sizes, shown in (
        ("own", (), (64, 64)),
        ("other", ("--height", 48, "--width", 104), (104, 48)),
    ):
        printed(hddm, "sample", expert, "--out", tmp_path / name, "--num-images", 2, "--steps", STEPS,
                "--solver", "euler", "--prompt", PROMPTS[1], "--guidance-scale", 3, *sizes)  # fmt: skip
        made = sorted((tmp_path / name).glob("0*.png"))
        assert [Image.open(path).size for path in made] == [shown] * 2


def test_an_expert_goes_back_to_a_pipeline_of_the_same_pictures(
    pipe: KolorsPipeline, source: Path, expert: Path, tmp_path: Path
) -> None:
    write_back(expert, tmp_path / "back", "diffusers-unet2d-condition")
    again = KolorsPipeline.from_pretrained(tmp_path / "back")
    again.set_progress_bar_config(disable=True)
    for name in ("beta_end", "num_train_timesteps", "timestep_spacing", "steps_offset"):
        assert again.scheduler.config[name] == pipe.scheduler.config[name]
    torch.testing.assert_close(_pictures(again), _pictures(pipe), rtol=0, atol=1e-5)
    library.convert(tmp_path / "back", tmp_path / "again")
    for key in ("text_encoder", "vae", "conditions", "sample_shape", "schedule"):
        assert record_of(tmp_path / "again")[key] == record_of(expert)[key]
    text = record_of(expert)["text_encoder"]
    assert (text["kind"], text["tokens"], text["width"]) == ("KolorsPipeline", 256, 24)
    for name in ("tokenizer/tokenizer.model", "text_encoder/config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    # No single file is known.
    assert "`to_layout` ldm" in refusal(write_back, expert, tmp_path / "file.safetensors", "ldm")


def test_a_saved_pipeline_reads_prompts_as_before(expert: Path, tmp_path: Path) -> None:
    pipe = HDDMPipeline.from_pretrained(expert)
    pipe.save_pretrained(tmp_path / "saved")
    again = HDDMPipeline.from_pretrained(tmp_path / "saved").encode(PROMPTS)
    for name, one in pipe.encode(PROMPTS).given.items():
        assert torch.equal(again.given[name], one)


@pytest.mark.parametrize("kind", ["KolorsImg2ImgPipeline", "KolorsPAGPipeline"])
def test_a_pipeline_for_another_task_has_the_same_prompts(
    kind: str, source: Path, tmp_path: Path
) -> None:
    """Also where its index asks for zeros, by which diffusers' pipelines fail without a negative prompt."""
    other = copied(source, tmp_path)
    edit_json(other / "model_index.json", _class_name=kind, force_zeros_for_empty_prompt=True)
    assert PipelineText(other).record == PipelineText(source).record


@pytest.mark.parametrize(
    "names", quick_first(["lora_unet_ of latent diffusion", "lora_unet_", "unet."])
)
def test_a_lora_of_common_names_changes_the_layers_that_it_names(
    names: str, expert: Path, tmp_path: Path
) -> None:
    network, content, changes = unet(), {}, {}
    named = ldm_name(text_unet(**ADDED, cross_attention_dim=16))
    made = kohya(network, ranks=(2,))
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear) and ".attn" in name:
            stem = f"lora_unet_{name.replace('.', '_')}"
            down, up = (made[f"{stem}.lora_{part}.weight"] for part in ("down", "up"))
            changes[f"{name}.weight"] = up @ down
            parts = ("lora_A", "lora_B") if names == "unet." else ("lora_down", "lora_up")
            if names == "unet.":
                stem = f"unet.{name}"
            elif names != "lora_unet_":
                stem = f"lora_unet_{named(name).replace('.', '_')}"
            content |= {f"{stem}.{parts[0]}.weight": down, f"{stem}.{parts[1]}.weight": up}
    check_lora(content, changes, network, expert, PROMPTS, tmp_path, least=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_int8_makes_nearly_the_same(expert: Path) -> None:
    check_int8(expert, PROMPTS)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled_before")
def test_blocks_of_one_width_share_a_compiled_graph(expert: Path) -> None:
    given = HDDMPipeline.from_pretrained(expert).encode(PROMPTS).given
    given["time_ids"] = torch.full((2, 6), 64.0)
    network = unet(transformer_layers_per_block=2)
    # Two widths; the first block behind a convolution, whose input has another layout, and the others.
    assert graphs_of(network, torch.tensor([200.0, 800.0]), given) == 4


@pytest.mark.slow
def test_kolors_and_sdxl_are_drawn_and_mixed_in_their_one_latent_space(
    pipe: KolorsPipeline, expert: Path, tmp_path: Path, hddm: Command
) -> None:
    """Described by texts, the prompt decides who draws it."""
    own = copied(expert, tmp_path / "own")
    even = check_mixture(stock("sdxl", tmp_path / "parts"), pipe.vae, own, PROMPTS, tmp_path, hddm)
    assert even.encode(PROMPTS).given.keys() == {TEXT, VECTOR, f"{TEXT}_2", f"{VECTOR}_2"}
    folders = (tmp_path / "experts" / "of-this-vae", own)
    for folder, words in zip(folders, ("a cat, cats", "dogs on a lawn"), strict=True):
        printed(hddm, "describe", folder, "--text", words, "--text-encoder",
                folders[0] / "text_encoder")  # fmt: skip
    assemble(folders, tmp_path / "described")
    described = HDDMPipeline.from_pretrained(tmp_path / "described")
    prior = described.encode(["a cat", "dogs on a lawn"]).prior
    assert prior is not None
    assert prior.argmax(1).tolist() == [0, 1]


def test_prompts_cannot_be_read_in_chunks_or_from_another_layer(expert: Path) -> None:
    pipe = HDDMPipeline.from_pretrained(expert)
    for option in ({"long_prompt": True}, {"clip_skip": 1}):
        told = refusal(pipe.encode, PROMPTS, **option)
        assert "is for networks of CLIP alone, and this one reads prompts by ChatGLM" in told


def test_without_its_package_the_tokenizer_says_what_to_install(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    told = refusal(read_tokenizer, source / "tokenizer")
    assert "a ChatGLMTokenizer needs sentencepiece: pip install '.[kolors]'" in told


def test_code_beside_a_tokenizer_is_not_run(
    source: Path, pipe: KolorsPipeline, tmp_path: Path, no_network: None
) -> None:
    """Not even under the name that published configs give to it."""
    other = copied(source, tmp_path)
    for name in ("tokenization_chatglm.py", "modeling_chatglm.py", "configuration_chatglm.py"):
        for part in ("tokenizer", "text_encoder"):
            (other / part / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    library.convert(other, tmp_path / "expert")
    given = HDDMPipeline.from_pretrained(tmp_path / "expert").encode(PROMPTS).given
    assert torch.equal(given[TEXT], _theirs(pipe, PROMPTS, "")[0][TEXT])
    assert not (tmp_path / "ran").exists()
    assert not list((tmp_path / "expert").rglob("*.py"))


WORDS, ENCODER = "tokenizer/tokenizer_config.json", "text_encoder/config.json"
HOSTILE = [
    (ENCODER, {"num_layers": 10**6}, "num_layers is 1000000 for"),
    (ENCODER, {"hidden_size": 10**12}, "does not fit its config.json"),
    (ENCODER, {"padded_vocab_size": 10**15}, "does not fit its config.json"),
    (ENCODER, {"kv_channels": -1}, "no text encoder can be built from it (kv_channels is -1)"),
    (ENCODER, {"ffn_hidden_size": "x"}, "no text encoder can be built"),
    (ENCODER, {"multi_query_group_num": 3}, "num_attention_heads is 4, not divided by 3"),
    (ENCODER, {"architectures": ["Evil"]}, "is of no ChatGLMModel"),
    (ENCODER, {"auto_map": {"AutoModel": "evil.ChatGLMModel"}}, "names code of its own"),
    (WORDS, {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}, "names code of its own"),
    (
        WORDS,
        {"auto_map": {"AutoTokenizer": ["a/b--tokenization_chatglm.ChatGLMTokenizer", None]}},
        "names code of its own",
    ),
    (WORDS, {"trust_remote_code": True}, "names code of its own"),
    (WORDS, {"vocab_file": "/etc/passwd"}, "has an unknown key 'vocab_file'"),
    (WORDS, {"padding_side": "right"}, "its files do not make a tokenizer"),
    (WORDS, {"tokenizer_class": "Evil"}, "holds an Evil"),
    ("model_index.json", {"text_encoder": ["mine", "Evil"]}, "must be a ChatGLMModel"),
    ("model_index.json", {"tokenizer": None}, "tokenizer is missing"),
    ("unet/config.json", {"encoder_hid_dim": None}, "encoder_hid_dim is None, and the text"),
    ("unet/config.json", {"encoder_hid_dim": -3}, "encoder_hid_dim is -3, and the text"),
    ("unet/config.json", {"encoder_hid_dim": 10**9}, "encoder_hid_proj.weight"),
    ("unet/config.json", {"transformer_layers_per_block": 10**6}, "its depth is 2000000"),
]


@pytest.mark.parametrize(("file", "changes", "said"), HOSTILE, ids=lambda one: str(one)[:60])
def test_hostile_files_are_refused_in_one_line(
    file: str, changes: dict[str, Any], said: str, source: Path, tmp_path: Path, no_network: None
) -> None:
    other = copied(source, tmp_path)
    edit_json(other / file, **changes)
    if file.startswith("unet"):
        assert said in refusal(library.convert, other, tmp_path / "out")
        return
    text = PipelineText(other)
    try:
        told = text.missing
    except library.HddmError as error:
        told = str(error)
    told = told or refusal(lambda: read_texts(text.components["text_encoder"]))
    assert said in told
    assert "\n" not in told.partition("\n  ")[0]


@pytest.mark.parametrize("content", [b"", b"pieces", b"\x0a\xff\xff\xff\xff\x0f"], ids=repr)
def test_a_broken_vocabulary_is_refused_in_one_line(
    content: bytes, source: Path, tmp_path: Path
) -> None:
    other = copied(source, tmp_path)
    (other / "tokenizer" / "tokenizer.model").write_bytes(content)
    assert "its files do not make a tokenizer" in refusal(read_tokenizer, other / "tokenizer")
    (other / "tokenizer" / "tokenizer.model").unlink()
    told = refusal(read_tokenizer, other / "tokenizer")
    assert "no tokenizer.model" in told
    (other / "tokenizer" / "tokenizer.model").symlink_to("/etc/passwd")
    assert "outside" in refusal(read_tokenizer, other / "tokenizer")


def test_a_vocabulary_of_another_encoder_is_refused(source: Path, tmp_path: Path) -> None:
    other = copied(source, tmp_path)
    edit_json(other / ENCODER, padded_vocab_size=20)
    own = KolorsPipeline.from_pretrained(source).text_encoder
    own.embedding.word_embeddings = nn.Embedding(20, 24)
    own.output_layer = nn.Linear(24, 20, bias=False)
    for path in (other / "text_encoder").glob("*.safetensors*"):
        path.unlink()
    save_file(own.state_dict(), other / "text_encoder" / "model.safetensors", {"format": "pt"})
    texts = read_texts(PipelineText(other).components["text_encoder"])
    told = refusal(texts.embed, PROMPTS)
    assert "and the text encoder has 20; use the tokenizer that belongs to it" in told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"encoder_hid_dim_type": "ip_image_proj"},
            "'ip_image_proj' of UNet2DConditionModel is not supported: it takes pictures beside",
        ),
        (
            {"encoder_hid_dim_type": "text_image_proj"},
            "'text_image_proj' of UNet2DConditionModel is not supported: it takes pictures beside",
        ),
    ],
    ids=str,
)
def test_models_that_take_pictures_are_refused_for_that(
    changes: dict[str, Any], said: str, source: Path, tmp_path: Path
) -> None:
    other = copied(source, tmp_path)
    edit_json(other / "unet" / "config.json", **changes)
    assert said in refusal(library.convert, other, tmp_path / "out")


def test_a_model_for_inpainting_is_refused_for_that(
    source: Path, pipe: KolorsPipeline, tmp_path: Path
) -> None:
    parts = dict(pipe.components) | {"unet": unet(in_channels=9, out_channels=4)}
    KolorsPipeline(**parts).save_pretrained(tmp_path / "pipeline")
    told = refusal(library.convert, tmp_path / "pipeline", tmp_path / "out")
    assert "takes 9 channels and gives 4: that is not a plain denoiser (an inpainting" in told


def test_a_unet_projects_its_text_where_its_config_gives_a_width_alone() -> None:
    """As diffusers' class has it."""
    config = dict(unet().config)
    assert STABLE_DIFFUSION.text_width(config | {"encoder_hid_dim_type": None}) == 24
    assert STABLE_DIFFUSION.pipeline(config).name == "KolorsPipeline"
    plain = config | {"encoder_hid_dim": None, "encoder_hid_dim_type": None}
    assert STABLE_DIFFUSION.text_width(plain) == 16
    assert STABLE_DIFFUSION.pipeline(plain).name == "StableDiffusionXLPipeline"
