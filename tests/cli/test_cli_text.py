"""Text to image by the command line alone: two pipelines of Stable Diffusion's kind become one ensemble."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, CLIPTokenizer

import hddm as package
from hddm.experts.ensemble_records import KEPT
from hddm.serving.service import names_of
from hddm.utils.records import HASHES, MANIFEST
from hddm_cli.app import run_words
from tests.artefacts import Command, edit_json, refusal
from tests.checkpoint_files import SD_BETAS, converted, pipeline, text_unet
from tests.component_files import write_clip, write_vae

Latents = Callable[..., tuple[torch.Tensor, str]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two pipelines of one latent space and one text encoder, epsilon and v-prediction."""
    root, made = tmp_path_factory.mktemp("text"), []
    for seed, kind in enumerate(("epsilon", "v_prediction")):
        scheduler = DDIMScheduler(**SD_BETAS, prediction_type=kind)
        made.append(pipeline(root / kind, text_unet(seed), scheduler))
        write_vae(root / kind / "vae")
        write_clip(root / kind)
    return made


@pytest.fixture(scope="module")
def made(sources: list[Path]) -> Path:
    """A folder of both experts and of the ensemble of them."""
    made = sources[0].parent / "made"
    for source in sources:
        run_words(["convert", str(source), "--out", str(made / source.name)])
    parts = [f"--{name.replace('_', '-')}={sources[0] / name}" for name in KEPT]
    run_words(
        [
            "assemble",
            *(str(made / one.name) for one in sources),
            *parts,
            "--out",
            f"{made}/ensemble",
        ]
    )
    return made


@pytest.fixture
def ensemble(made: Path, tmp_path: Path) -> Path:
    """The ensemble, which a test may change, beside its experts."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True) / "ensemble"


@pytest.mark.integration
def test_a_converted_pipeline_makes_pictures(
    ensemble: Path, sources: list[Path], tmp_path: Path, hddm: Command
) -> None:
    options = ["--num-images", 2, "--steps", 2, "--prompt", "a cat", "--guidance-scale", 2, "--out"]
    expert = tmp_path / "epsilon"
    assert hddm("sample", expert, *options, tmp_path / "alone")[0] == 0
    assert hddm("sample", ensemble, *options, tmp_path / "explicit", "--expert", 0)[0] == 0
    assert _images(tmp_path / "alone").equal(_images(tmp_path / "explicit"))
    assert json.loads(hddm("inspect", expert, "--json")[1])["components"] == list(KEPT)
    assert hddm("verify", expert)[0] == 0
    # What is put together, or converted again, takes them along.
    assert hddm("assemble", expert, "--out", tmp_path / "one")[0] == 0
    assert not (tmp_path / "one" / "experts" / "0" / "vae").exists()
    converted(hddm, expert, tmp_path / "again")
    for name in KEPT:
        given = {path.name: path.read_bytes() for path in (ensemble / name).iterdir()}
        for folder in (tmp_path / "one", tmp_path / "again"):
            kept = (
                path for path in (folder / name).iterdir() if path.name not in (MANIFEST, HASHES)
            )
            assert {path.name: path.read_bytes() for path in kept} == given
    # The encoder's weights stay as they are, which alone its identity in the record covers.
    edit_json(expert / "vae" / "config.json", norm_num_groups=4)
    for verb in (
        ("sample", expert, "--out", tmp_path / "bad"),
        ("assemble", expert, "--out", tmp_path / "two"),
    ):
        assert "config.json: has changed" in hddm(*verb)[2]
    assert hddm("verify", expert)[0] == 1


@pytest.fixture
def latents(ensemble: Path, tmp_path: Path, hddm: Command) -> Latents:
    """The latents that the ensemble draws with these options, and what is said on standard error."""

    def drawn(*options: object) -> tuple[torch.Tensor, str]:
        out = (
            "--out",
            tmp_path / "latents",
            "--overwrite",
            "--output-type",
            "latent",
            # The first may go to the mean of the data alone.
            "--steps",
            4,
        )
        code, _, error = hddm("sample", ensemble, *out, *options)
        assert code == 0, error
        return load_file(tmp_path / "latents" / "latents.safetensors")["latents"], error

    return drawn


def _images(folder: Path) -> torch.Tensor:
    images = [np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def _encoded(source: Path, *texts: str) -> torch.Tensor:
    """Tokens of texts as transformers itself makes them."""
    tokenizer = CLIPTokenizer.from_pretrained(source / "tokenizer")
    tokens = tokenizer(list(texts), padding="max_length", max_length=77, return_tensors="pt")
    with torch.no_grad():
        return CLIPTextModel.from_pretrained(source / "text_encoder")(tokens.input_ids)[0]


@pytest.mark.integration
def test_prompts_become_images_as_by_hand(
    ensemble: Path, sources: list[Path], tmp_path: Path, hddm: Command
) -> None:
    options = ["--num-images", 3, "--steps", 3, "--guidance-scale", 2.5, "--expert", 1, "--seed", 5]
    prompts = ["--prompt", "a cat", "--prompt", "a dog", "--negative-prompt", "blurry"]
    code, _, error = hddm("sample", ensemble, "--out", tmp_path / "out", *options, *prompts)
    assert code == 0, error
    vae = AutoencoderKL.from_pretrained(sources[0] / "vae")
    given, blurry = _encoded(sources[0], "a cat", "a dog", "a cat"), _encoded(sources[0], "blurry")
    negative = {"encoder_hidden_states": blurry.expand(3, -1, -1)}
    guided = {"guidance_scale": 2.5, "negative": negative, "encoder_hidden_states": given}
    latents = package.sample(package.load(tmp_path / "v_prediction"), 3, 5, 3, **guided)
    with torch.no_grad():
        expected = vae.decode(latents / vae.config.scaling_factor).sample.clamp(-1, 1)
    bytes_ = ((expected + 1) * 127.5).round()
    assert (_images(tmp_path / "out").float() - bytes_).abs().max() <= 1
    record = json.loads((tmp_path / "out" / "sampling.json").read_text())
    assert record["prompts"] == ["a cat", "a dog"]
    assert (record["solver"], record["shift"], record["vae"]["scale"]) == (
        "adams-moulton",
        1.0,
        0.18215,
    )
    assert record["expert_use"]["shares"] == [0.0, 1.0]


@pytest.mark.integration
def test_embeddings_in_files_stand_for_prompts(
    latents: Latents, sources: list[Path], tmp_path: Path
) -> None:
    cat, empty = _encoded(sources[0], "a cat", "").split(1)
    content = {"encoder_hidden_states": cat, "negative_encoder_hidden_states": empty}
    save_file(
        {name: value.contiguous() for name, value in content.items()}, tmp_path / "cat.safetensors"
    )
    options = ["--num-images", 2, "--guidance-scale", 3]
    text, _ = latents(*options, "--prompt", "a cat")
    file, _ = latents(*options, "--conditions", tmp_path / "cat.safetensors")
    assert text.shape == (2, 4, 8, 8)
    torch.testing.assert_close(text, file, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x", "--expert", "2"], "--expert 2: choose from 0 to 1"),
        (["--prompt", "x", "--offload", "disk", "--max-memory", "1KB"], "text encoder alone take"),
        (["--conditions", "gone.safetensors"], "gone.safetensors: no such file"),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_says_so_and_writes_nothing(
    options: list[str], message: str, made: Path, tmp_path: Path, hddm: Command
) -> None:
    code, _, error = hddm(
        "sample", made / "ensemble", "--out", tmp_path / "out", "--steps", "1", *options
    )
    assert code in (1, 2)
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.integration
def test_a_missing_vae_is_named_and_can_be_added(
    ensemble: Path, tmp_path: Path, hddm: Command
) -> None:
    options = ["--num-images", 1, "--steps", 1, "--out", tmp_path / "out"]
    expert, bare = tmp_path / "epsilon", tmp_path / "bare"
    for name in KEPT:
        shutil.rmtree(expert / name)
    assert hddm("assemble", expert, "--out", bare)[0] == 0
    error = hddm("sample", bare, *options)[2]
    adding = f"hddm assemble {bare} --vae FOLDER --text-encoder FOLDER --tokenizer FOLDER"
    assert f"has no VAE; add vae, text_encoder and tokenizer ({adding}), or use" in error
    prompted = hddm("sample", bare, *options, "--prompt", "a cat")[2]
    assert f"add vae, text_encoder and tokenizer ({adding})" in prompted
    served = refusal(names_of, bare)
    assert "lacks vae, text_encoder and tokenizer to make images of expert epsilon; add" in served
    assert f"add what is missing ({adding})" in served
    assert hddm("assemble", bare, "--vae", ensemble / "vae")[0] == 0
    error = hddm("sample", bare, *options, "--prompt", "a cat")[2]
    assert "--prompt: needs text_encoder and tokenizer" in error
    assert hddm("sample", bare, *options)[0] == 0


@pytest.mark.integration
def test_the_shift_of_a_flow_source_is_the_grid_s(ensemble: Path, latents: Latents) -> None:
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_config(ensemble / "scheduler")
    edit_json(ensemble / "ensemble.json", shift=3.0)
    own, three, even = (
        latents("--num-images", 1, *shift) for shift in ((), ("--shift", 3), ("--shift", 1))
    )
    assert ["the model's own is 3" in said for _, said in (own, three, even)] == [
        False,
        False,
        True,
    ]
    assert torch.equal(own[0], three[0])
    assert not torch.allclose(own[0], even[0], atol=1e-3)
