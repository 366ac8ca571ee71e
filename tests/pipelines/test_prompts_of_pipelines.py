"""Pipelines with several text encoders: conditions and images of prompts against the pipeline's own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
)
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Tokenizer

import hddm as library
from hddm.checkpoints.write_back import write_back
from hddm.data.images import have_equal_pixels
from hddm.experts.assembly import assemble
from hddm.networks import text_encoder
from hddm.networks.families.pixart import PIXART
from hddm.networks.identity import TextEncoderRecord
from hddm.networks.prompts import read_texts, texts_record_of
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.records import write_manifest
from tests.artefacts import Command, copied, edit_json, printed, refusal, seal
from tests.checkpoint_files import SD_BETAS, pixart, randomised, text_unet
from tests.component_files import write_clip, write_t5, write_vae
from tests.pipelines.checks import check_mixture

PROMPTS = ["a cat", "two dogs on a lawn"]
NAMES = ("sdxl", "sd3", "flux")
SIDE = 8
END = 517
"""Number of the last word of the tokenizers, which ends a text."""
SIZES = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}


def _clip(folder: Path, width: int, seed: int, is_projected: bool) -> tuple[Any, Any]:
    plain = write_clip(folder, width, seed=seed, num_hidden_layers=2, eos_token_id=END)
    words = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    if not is_projected:
        return plain, words
    config = plain.config.to_dict() | {"projection_dim": width}
    return randomised(CLIPTextModelWithProjection(CLIPTextConfig(**config)).eval(), seed), words


def _t5(folder: Path, width: int) -> tuple[Any, Any]:
    return write_t5(folder, width), T5Tokenizer.from_pretrained(folder / "tokenizer")


def _numbered(readers: list[tuple[Any, Any]]) -> dict[str, Any]:
    parts = {}
    for number, (encoder, words) in enumerate(readers):
        end = f"_{number + 1}" if number else ""
        parts |= {f"text_encoder{end}": encoder, f"tokenizer{end}": words}
    return parts


def stock(name: str, folder: Path) -> DiffusionPipeline:
    """A tiny pipeline with random weights."""
    first = _clip(folder / "first", 16, 1, is_projected=name == "sd3")
    second = None if name == "flux" else _clip(folder / "second", 16, 2, is_projected=True)
    third = None if name == "sdxl" else _t5(folder / "third", 32)
    parts = _numbered([one for one in (first, second, third) if one is not None])
    parts["vae"] = write_vae(folder / "vae", factor=8)
    if name == "sdxl":
        added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
        parts["unet"] = text_unet(
            **added, projection_class_embeddings_input_dim=16 + 24, cross_attention_dim=32
        )
        pipe = StableDiffusionXLPipeline(scheduler=EulerDiscreteScheduler(**SD_BETAS), **parts)
    elif name == "sd3":
        sizes = {
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": SIDE,
            "pos_embed_max_size": SIDE,
        }
        wide = {
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 32,
        }
        parts["transformer"] = randomised(SD3Transformer2DModel(**sizes, **wide, **SIZES))
        pipe = StableDiffusion3Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), **parts
        )
    else:
        sizes = {"in_channels": 16, "num_single_layers": 1, "axes_dims_rope": (4, 6, 6)}
        wide = {"joint_attention_dim": 32, "pooled_projection_dim": 16, "guidance_embeds": True}
        parts["transformer"] = randomised(FluxTransformer2DModel(**sizes, **wide, **SIZES))
        pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pipe(name: str, tmp_path_factory: pytest.TempPathFactory) -> DiffusionPipeline:
    return stock(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def source(pipe: DiffusionPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "pipeline"
    pipe.save_pretrained(folder)
    # As published, T5 is in several files.
    if getattr(pipe, "text_encoder_3", None) is not None:
        (folder / "text_encoder_3" / "model.safetensors").unlink()
        pipe.text_encoder_3.save_pretrained(folder / "text_encoder_3", max_shard_size="10KB")
        assert (folder / "text_encoder_3" / "model.safetensors.index.json").is_file()
    return folder


@pytest.fixture(scope="module")
def expert(source: Path, name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert") / "expert"
    size = {"sample_size": SIDE} if name == "flux" else {}
    library.convert(source, folder, **size)
    return folder


def _theirs(pipe: DiffusionPipeline, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Conditions of `PROMPTS` and of no prompt, by hddm's keywords."""
    others = {"prompt_2": None} | ({"prompt_3": None} if name == "sd3" else {})
    if name == "flux":
        found = [pipe.encode_prompt(texts, **others)[:2] for texts in (PROMPTS, ["", ""])]
    else:
        tokens, no_tokens, pooled, no_pooled = pipe.encode_prompt(PROMPTS, **others, device="cpu")
        found = [(tokens, pooled), (no_tokens, no_pooled)]
    vector = "text_embeds" if name == "sdxl" else "pooled_projections"
    given, against = ({"encoder_hidden_states": one, vector: other} for one, other in found)
    return given, against


def test_prompts_become_the_pipelines_own_conditions(
    pipe: DiffusionPipeline, expert: Path, name: str
) -> None:
    encoded = HDDMPipeline.from_pretrained(expert).encode(PROMPTS, guided=True)
    for ours, theirs in zip((encoded.given, encoded.negative), _theirs(pipe, name), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_large_text_encoder_in_a_half_type_stays_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widened, one of several billion weights takes more memory than most networks."""
    pipe = stock("flux", tmp_path / "parts")
    pipe.text_encoder_2.to(torch.bfloat16)
    pipe.save_pretrained(tmp_path / "pipeline")
    library.convert(tmp_path / "pipeline", tmp_path / "expert", sample_size=SIDE)
    number = pipe.text_encoder_2.num_parameters()
    wide, narrow = torch.float32, torch.bfloat16
    stated = {"default": wide, "text_encoder": wide}
    for least, dtype, found in (
        (number - 1, wide, narrow),
        (number - 1, stated, wide),
        (number - 1, torch.float16, torch.float16),
        (number, wide, wide),
    ):
        monkeypatch.setattr(text_encoder, "LARGE", least)
        read = HDDMPipeline.from_pretrained(tmp_path / "expert", dtype=dtype)
        encoders = read.text_encoder.encoders
        assert encoders["text_encoder_2"].dtype == found
        assert encoders["text_encoder"].dtype == (wide if dtype is stated else dtype)
    monkeypatch.setattr(text_encoder, "LARGE", number - 1)
    read = HDDMPipeline.from_pretrained(tmp_path / "expert")
    theirs, _ = _theirs(pipe, "flux")
    ours = read.encode(PROMPTS).given
    for name, one in theirs.items():
        assert torch.equal(ours[name].to(one), one), name
    made = read(prompt=PROMPTS, num_inference_steps=2, output_type="pt")
    assert torch.as_tensor(made.images).isfinite().all()


@pytest.mark.slow
def test_sd3_and_sd35_are_drawn_and_mixed_in_their_one_latent_space(
    tmp_path: Path, hddm: Command
) -> None:
    """The network of 3.5 attends twice in some blocks, and norms queries and keys."""
    newer, older = stock("sd3", tmp_path / "newer"), stock("sd3", tmp_path / "older")
    config = dict(newer.transformer.config) | {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}
    newer.register_modules(transformer=randomised(SD3Transformer2DModel(**config), 5))
    newer.save_pretrained(tmp_path / "pipeline")
    library.convert(tmp_path / "pipeline", tmp_path / "expert")
    older.register_modules(vae=write_vae(tmp_path / "vae", factor=8, seed=3))
    check_mixture(older, newer.vae, tmp_path / "expert", PROMPTS, tmp_path, hddm)


def test_an_expert_is_described_by_the_text_encoders_that_it_keeps(
    expert: Path, tmp_path: Path, hddm: Command
) -> None:
    texts = {"one": "a cat, cats", "other": "dogs on a lawn"}
    for name, text in texts.items():
        shutil.copytree(expert, tmp_path / name)
        assert hddm("describe", tmp_path / name, "--text", text)[0] == 0
    # A folder of prompts has its tokenizers inside.
    given = ("--text-encoder", expert / "text_encoder")
    assert hddm("describe", tmp_path / "one", "--text", texts["one"], *given)[0] == 0
    assemble([tmp_path / name for name in texts], tmp_path / "both")
    pipe = HDDMPipeline.from_pretrained(tmp_path / "both")
    prior = pipe.encode(["a cat", "dogs on a lawn"]).prior
    assert prior is not None
    assert prior.argmax(1).tolist() == [0, 1]


def test_one_call_of_the_expert_is_one_of_the_pipelines_network(
    pipe: DiffusionPipeline, expert: Path, name: str
) -> None:
    """The sizes that SDXL is given, and Flux's embedded guidance, are the pipeline's own."""
    x = torch.randn(2, 4, SIDE, SIDE, generator=torch.Generator().manual_seed(3))
    field, (given, _) = library.load(expert), _theirs(pipe, name)
    with torch.no_grad():
        if name == "sdxl":
            a, s = (float(one) for one in field.schedule.alpha_sigma(torch.tensor(400.0)))
            sizes = torch.tensor([8.0 * SIDE, 8.0 * SIDE, 0, 0, 8.0 * SIDE, 8.0 * SIDE]).expand(
                2, -1
            )
            text = {"encoder_hidden_states": given["encoder_hidden_states"]}
            added = {"text_embeds": given["text_embeds"], "time_ids": sizes}
            eps = pipe.unet(
                (a + s) * x, torch.tensor([400.0, 400.0]), **text, added_cond_kwargs=added
            ).sample
            t, expected = s / (a + s), eps - ((a + s) * x - s * eps) / a
        elif name == "sd3":
            t, expected = (
                0.4,
                pipe.transformer(x, timestep=torch.tensor([400.0, 400.0]), **given).sample,
            )
        else:
            rows = FluxPipeline._pack_latents(x, 2, 4, SIDE, SIDE)
            places = FluxPipeline._prepare_latent_image_ids(
                2, SIDE // 2, SIDE // 2, "cpu", torch.float32
            )
            others = {
                "img_ids": places,
                "txt_ids": torch.zeros(512, 3),
                "guidance": torch.full((2,), 3.5),
            }
            t, found = (
                0.4,
                pipe.transformer(rows, timestep=torch.tensor([0.4, 0.4]), **given, **others),
            )
            expected = FluxPipeline._unpack_latents(found.sample, 8 * SIDE, 8 * SIDE, 8)
    ours = field.velocity(x, torch.tensor([t, t]), **given)
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


def test_encoders_that_make_other_conditions_have_another_identity(tmp_path: Path) -> None:
    pipe = stock("sdxl", tmp_path)
    pipe.save_pretrained(tmp_path / "one")
    edit_json(
        copied(tmp_path / "one", tmp_path / "zeros") / "model_index.json",
        force_zeros_for_empty_prompt=False,
    )
    pipe.text_encoder_2.text_projection.weight.data.mul_(2)
    pipe.save_pretrained(tmp_path / "projection")
    folders = (tmp_path / "one", tmp_path / "zeros" / "one", tmp_path / "projection")
    assert len({texts_record_of(folder).fingerprint for folder in folders}) == 3


@pytest.mark.parametrize(
    ("prompt", "kinds"), [("a cat on a lawn " * 10, 1), ("cat on a dog " * 80, 2)]
)
def test_each_kind_of_encoder_warns_once_of_what_it_loses(
    expert: Path, name: str, prompt: str, kinds: int, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = {"sdxl": [77], "sd3": [77, 256], "flux": [77, 512]}[name][:kinds]
    with pytest.warns(UserWarning, match="is cut to") as warned:
        HDDMPipeline.from_pretrained(expert).encode([prompt])
    said = [str(one.message) for one in warned]
    assert [int(line.split("is cut to ")[1].split(":")[0]) for line in said] == wanted
    # Neither diffusers nor transformers repeat it.
    assert "truncated" not in (error := capfd.readouterr().err)
    assert "longer than" not in error


def test_a_pipeline_pads_prompts_to_the_tokens_of_its_family(expert: Path, name: str) -> None:
    encoders = read_texts(expert / "text_encoder")
    limit = 0 if name == "sdxl" else 32
    encoders.prompts = replace(encoders.prompts, t5_tokens=limit)
    tokens = encoders.embed(PROMPTS).conditions["encoder_hidden_states"]
    assert tokens.shape[1] == {"sdxl": 77, "sd3": 77 + 32, "flux": 32}[name]


def test_vectors_of_prompts_that_are_no_numbers_are_refused_as_tokens_are(tmp_path: Path) -> None:
    stock("sdxl", tmp_path).save_pretrained(tmp_path / "pipeline")
    encoders = read_texts(tmp_path / "pipeline")
    # Only vectors pass through the projection.
    encoders.encoders["text_encoder_2"].text_projection.weight[0] = torch.inf
    told = refusal(encoders.embed, PROMPTS)
    assert told == "the text encoder's vectors of prompts hold NaN or Inf; run it in float32"


LAYOUTS = {"sdxl": "diffusers-unet2d-condition", "sd3": "diffusers-sd3", "flux": "diffusers-flux"}


def test_an_expert_goes_back_to_a_pipeline_of_its_class_with_the_same_conditions(
    pipe: DiffusionPipeline, source: Path, name: str, tmp_path: Path
) -> None:
    folder, sibling = (
        copied(source, tmp_path),
        type(pipe).__name__.replace("Pipeline", "Img2ImgPipeline"),
    )
    edit_json(folder / "model_index.json", _class_name=sibling)
    if name == "sdxl":
        edit_json(folder / "model_index.json", force_zeros_for_empty_prompt=False)
    size = {"sample_size": SIDE} if name == "flux" else {}
    library.convert(folder, tmp_path / "expert", **size)
    write_back(tmp_path / "expert", tmp_path / "back", LAYOUTS[name])
    again = type(pipe).from_pretrained(tmp_path / "back")
    own = type(pipe).from_pretrained(folder)
    for ours, theirs in zip(_theirs(again, name), _theirs(own, name), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.integration
def test_a_pipeline_samples_by_prompt_in_two_commands_and_keeps_its_encoders(
    source: Path, name: str, hddm: Command, tmp_path: Path
) -> None:
    size = ("--sample-size", SIDE) if name == "flux" else ()
    assert hddm("convert", source, "--out", tmp_path / "expert", *size)[0] == 0
    shutil.copytree(tmp_path / "expert", tmp_path / "other")
    assert hddm("assemble", tmp_path / "expert", tmp_path / "other", "--out", tmp_path / "both",
                "--share", "other=0.5")[0] == 0  # fmt: skip
    sampling = ["--num-images", 2, "--prompt", "a cat", "--steps", 2, "--guidance-scale", 3]
    for folder in ("expert", "both"):
        printed(hddm, "sample", tmp_path / folder, *sampling, "--out", tmp_path / f"of-{folder}")
    made = [tmp_path / f"of-{folder}" / "00000.png" for folder in ("expert", "both")]
    assert have_equal_pixels(*made)
    pipe = HDDMPipeline.from_pretrained(tmp_path / "both")
    pipe.save_pretrained(tmp_path / "saved")
    again = HDDMPipeline.from_pretrained(tmp_path / "saved").encode(PROMPTS)
    assert all(
        torch.equal(again.given[key], value) for key, value in pipe.encode(PROMPTS).given.items()
    )


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("PixArtAlphaPipeline", None),
        ("PixArtAlphaPipeline", 77),
        ("PixArtSigmaPipeline", 512),
        # The classes differ in their number of tokens alone.
        pytest.param("PixArtAlphaPipeline", 512, marks=pytest.mark.slow),
        pytest.param("PixArtSigmaPipeline", None, marks=pytest.mark.slow),
        pytest.param("PixArtSigmaPipeline", 77, marks=pytest.mark.slow),
    ],
)
def test_pixart_reads_prompts_in_lower_case_and_cuts_them_as_its_pipeline(
    kind: str, limit: int | None, tmp_path: Path
) -> None:
    parts = _numbered([_t5(tmp_path / "t5", 12)]) | {"vae": write_vae(tmp_path / "vae")}
    if limit is not None:
        # The pipeline has its own number of tokens, whatever the tokenizer's is.
        parts["tokenizer"].model_max_length = limit
    pipe = getattr(diffusers, kind)(
        **parts, transformer=pixart(), scheduler=EulerDiscreteScheduler()
    )
    pipe.save_pretrained(tmp_path / "pipeline")
    library.convert(tmp_path / "pipeline", tmp_path / "expert")
    HDDMPipeline.from_pretrained(tmp_path / "expert").save_pretrained(tmp_path / "saved")
    tokens = {"PixArtAlphaPipeline": 120, "PixArtSigmaPipeline": 300}[kind]
    record = json.loads((tmp_path / "expert" / "expert.json").read_text())
    assert record["text_encoder"]["tokens"] == tokens
    prompts = ["A Cat ", "A cat on 2 DOGS " * 40]
    with pytest.warns(UserWarning, match="is cut to"):
        ours = HDDMPipeline.from_pretrained(tmp_path / "saved").encode(prompts).given
    assert all(map(torch.equal, ours.values(), pipe.encode_prompt(prompts, False)))
    write_back(tmp_path / "expert", tmp_path / "back", "diffusers-pixart")
    again = DiffusionPipeline.from_pretrained(tmp_path / "back")
    assert type(again).__name__ == kind
    own = DiffusionPipeline.from_pretrained(tmp_path / "pipeline")
    # Those of one branch: tokens and mask.
    found, wanted = again.encode_prompt(prompts, False)[:2], own.encode_prompt(prompts, False)[:2]
    assert all(map(torch.equal, found, wanted))


def _of_t5(tokens: int) -> TextEncoderRecord:
    return TextEncoderRecord(kind="T5EncoderModel", fingerprint="0" * 16, tokens=tokens, width=12)


@pytest.mark.parametrize(
    ("changes", "text_encoder", "kind"),
    [
        ({}, None, "PixArtAlphaPipeline"),
        ({}, _of_t5(120), "PixArtAlphaPipeline"),
        ({}, _of_t5(300), "PixArtSigmaPipeline"),
        # The pipeline of Σ passes no sizes, which the default of this side takes.
        ({"sample_size": 128}, None, "PixArtAlphaPipeline"),
        ({"sample_size": 128}, _of_t5(300), "PixArtAlphaPipeline"),
        ({"sample_size": 128, "use_additional_conditions": False}, None, "PixArtSigmaPipeline"),
        ({"sample_size": 256}, None, "PixArtSigmaPipeline"),
    ],
    ids=str,
)
def test_pixart_without_a_recorded_pipeline_goes_to_the_one_that_runs_it(
    changes: dict[str, Any], text_encoder: TextEncoderRecord | None, kind: str
) -> None:
    config = pixart(**changes | {"patch_size": 4}).config
    assert PIXART.pipeline(config, text_encoder).name == kind


MAP = "tokenizer_2/special_tokens_map.json"
"""Read beside a config that does not list the added tokens, as transformers saves it."""
HOSTILE = {
    "foreign class": ("model_index.json", {"text_encoder_2": ["mine", "Evil"]}, "must be a"),
    "foreign code": (
        "text_encoder_2/config.json",
        {"auto_map": {"AutoModel": "evil.Evil"}},
        "auto_map",
    ),
    "other class": ("text_encoder_2/config.json", {"architectures": ["Evil"]}, "is of no"),
    "remote file": (
        "tokenizer_2/tokenizer_config.json",
        {"vocab_file": "http://evil/vocab"},
        "unknown key",
    ),
    "hub": (
        MAP,
        {"gguf_file": "x", "name_or_path": "a/b", "local_files_only": False},
        "key 'gguf_file'",
    ),
    "outside": (
        MAP,
        {"vocab_file": "/evil/v.json", "merges_file": "/evil/m.txt"},
        "key 'vocab_file'",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_encoders_are_refused_in_one_line_and_nothing_is_fetched(
    case: str, expert: Path, tmp_path: Path, no_network: None
) -> None:
    file, changes, words = HOSTILE[case]
    folder = copied(expert, tmp_path)
    path = folder / "text_encoder" / file
    if not path.exists():
        path.write_text("{}")
    edit_json(path, **changes)
    write_manifest(folder / "text_encoder")
    seal(folder)
    assert words in refusal(HDDMPipeline.from_pretrained, folder)


def test_guiding_an_expert_that_takes_its_guidance_as_a_condition_is_said(
    expert: Path, name: str, hddm: Command, tmp_path: Path
) -> None:
    options = ("--prompt", "a cat", "--num-images", 1, "--steps", 2, "--batch-size", 1)
    told = "is guided already, by its condition guidance of 3.5"
    out = tmp_path / "guided"
    _, _, said = hddm("sample", expert, *options, "--guidance-scale", 4, "--out", out)
    assert (told in said) == (name == "flux"), said
    if name == "flux":
        file = tmp_path / "conditions.safetensors"
        save_file({"guidance": torch.tensor([2.0])}, file)
        options += ("--conditions", file, "--guidance-scale", 4)
    _, _, said = hddm("sample", expert, *options, "--out", tmp_path / "own")
    assert told not in said
