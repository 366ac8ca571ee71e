"""Chroma as an expert: prompts, calls, pictures and mixtures against diffusers' own pipeline."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor
from transformers import T5Tokenizer

import hddm as library
from hddm.checkpoints.write_back import write_back
from hddm.experts.assembly import assemble
from hddm.networks.families.chroma import CHROMA
from hddm.networks.families.flux import unpack
from hddm.networks.prompts import PipelineText
from hddm.noise import Seeded
from hddm.pipelines.pipeline import HDDMPipeline
from tests.artefacts import Command, copied, edit_json, printed, refusal
from tests.checkpoint_files import randomised, record_of, refused
from tests.component_files import saved_in_parts, write_t5, write_vae
from tests.flow_models import WITH_SIDE, chroma, flow_pipeline, text
from tests.pipelines.checks import check_int8, check_mixture, graphs_of
from tests.pipelines.test_prompts_of_pipelines import stock

PROMPTS = ["A Cat ", "two dogs on a lawn"]
AGAINST = "a dog"
SIDE, STEPS = 8, 3
WIDE = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
WIDE |= {"in_channels": 16, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6)}
SMALL = {"approximator_num_channels": 16, "approximator_hidden_dim": 24, "approximator_layers": 2}
SIZE = {"height": 8 * SIDE, "width": 8 * SIDE}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> ChromaPipeline:
    folder = tmp_path_factory.mktemp("chroma")
    made = ChromaPipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        write_vae(folder / "vae", factor=8, scaling_factor=0.36, shift_factor=0.12),
        write_t5(folder, 32),
        T5Tokenizer.from_pretrained(folder / "tokenizer"),
        randomised(ChromaTransformer2DModel(**WIDE, **SMALL)),
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def source(pipe: ChromaPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_in_parts(pipe, tmp_path_factory.mktemp("source") / "pipeline")


@pytest.fixture(scope="module")
def expert(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert") / "expert"
    library.convert(source, folder, sample_size=SIDE)
    return folder


def _theirs(pipe: ChromaPipeline, prompts: list[str], against: str) -> list[dict[str, Tensor]]:
    """Conditions of prompts, and of the negative prompt, by hddm's keywords."""
    found = pipe.encode_prompt(prompts, against)
    pairs = [(found[0], found[2]), (found[3], found[5])]
    return [{"encoder_hidden_states": a, "encoder_attention_mask": b} for a, b in pairs]


@pytest.mark.parametrize("against", ["", AGAINST])
def test_prompts_become_the_pipelines_own_conditions(
    pipe: ChromaPipeline, expert: Path, against: str
) -> None:
    """Case is kept; one token of padding counts, and none where a text fills all 512 tokens."""
    prompts = [*PROMPTS, "", "cat on a dog " * 80]
    with pytest.warns(UserWarning, match="is cut to 512"):
        encoded = HDDMPipeline.from_pretrained(expert).encode(
            prompts, negative_prompt=against or None, guided=True
        )
    theirs = _theirs(pipe, prompts, against)
    for ours, expected in zip((encoded.given, encoded.negative), theirs, strict=True):
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(ours[name].to(value.dtype).expand_as(value), value), name
    counted = encoded.given["encoder_attention_mask"].sum(1)
    tokens = [len(pipe.tokenizer(one).input_ids) for one in prompts]
    assert counted.tolist() == [min(one + 1, 512) for one in tokens]


def test_one_call_at_each_of_the_pipelines_times_is_one_of_its_network(
    pipe: ChromaPipeline, expert: Path
) -> None:
    calls: list[tuple[dict[str, Any], Tensor]] = []

    def keep(module: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
        calls.append((dict(named), output[0]))

    hook = pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    try:
        pipe(PROMPTS, [AGAINST] * 2, **SIZE, num_inference_steps=STEPS, output_type="latent")
    finally:
        hook.remove()
    field = library.load(expert)
    branches = _theirs(pipe, PROMPTS, AGAINST)
    assert len(calls) == 2 * STEPS
    for number, (inputs, output) in enumerate(calls):
        x, expected = (unpack(one, SIDE) for one in (inputs["hidden_states"], output))
        found = field.velocity(x, inputs["timestep"], **branches[number % 2])
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_padding_the_time_and_the_text_each_change_the_output(expert: Path) -> None:
    """So that the comparison above would see a mask that is lost."""
    pipe, x = HDDMPipeline.from_pretrained(expert), torch.randn(2, 4, SIDE, SIDE)
    given, t = pipe.encode(PROMPTS).given, torch.full((2,), 0.4)
    field = library.load(expert)
    own, mask = field.velocity(x, t, **given), given["encoder_attention_mask"]
    for other in (
        given | {"encoder_attention_mask": torch.ones_like(mask)},
        given | {"encoder_attention_mask": mask.bool()},
        given | {"encoder_hidden_states": given["encoder_hidden_states"] + 1},
    ):
        assert (field.velocity(x, t, **other) - own).abs().max() > 1e-4 * own.abs().max()
    assert (field.velocity(x, t + 0.01, **given) - own).abs().max() > 1e-4 * own.abs().max()


def _pictures(pipe: ChromaPipeline, seed: int = 0) -> Tensor:
    made = pipe(
        PROMPTS,
        [AGAINST] * 2,
        **SIZE,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    )
    return torch.as_tensor(made.images)


@pytest.mark.parametrize("strategy", ["full", "draw"])
def test_a_drop_in_makes_the_pipelines_own_pictures_of_prompts(
    strategy: str, source: Path, expert: Path
) -> None:
    pipe = ChromaPipeline.from_pretrained(source)
    pipe.set_progress_bar_config(disable=True)
    theirs = _pictures(pipe)
    model = library.Ensemble([library.load(expert)], strategy=strategy)
    pipe.transformer = library.drop_in(model, pipe)
    torch.testing.assert_close(_pictures(pipe), theirs, rtol=0, atol=2e-5)


@pytest.mark.integration
def test_euler_samples_are_the_pipelines_pictures(
    pipe: ChromaPipeline, expert: Path, hddm: Command, tmp_path: Path
) -> None:
    """By the same noise, on the same grid of times: that of a shift of 3."""
    printed(hddm, "sample", expert, "--out", tmp_path / "out", "--num-images", 2, "--steps", STEPS,
            "--solver", "euler", "--guidance-scale", 3, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1],
            "--negative-prompt", AGAINST)  # fmt: skip
    noise = Seeded(0).initial(range(2), (4, SIDE, SIDE))
    made = pipe(
        PROMPTS,
        [AGAINST] * 2,
        **SIZE,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        latents=pipe._pack_latents(noise, 2, 4, SIDE, SIDE),
    )
    for number, theirs in enumerate(made.images):
        ours = np.asarray(Image.open(tmp_path / "out" / f"0000{number}.png"), int)
        assert np.abs(ours - np.asarray(theirs, int)).max() <= 1
        assert ours.std() > 1


def test_an_expert_goes_back_to_a_pipeline_of_the_same_pictures(
    pipe: ChromaPipeline, expert: Path, tmp_path: Path
) -> None:
    write_back(expert, tmp_path / "back", "diffusers-chroma")
    again = ChromaPipeline.from_pretrained(tmp_path / "back")
    again.set_progress_bar_config(disable=True)
    assert again.scheduler.config.shift == 3.0
    for name, weight in pipe.transformer.state_dict().items():
        assert torch.equal(again.transformer.state_dict()[name], weight), name
    torch.testing.assert_close(_pictures(again), _pictures(pipe), rtol=0, atol=1e-5)
    library.convert(tmp_path / "back", tmp_path / "again", sample_size=SIDE)
    for key in ("text_encoder", "vae", "conditions", "sample_shape", "shift"):
        assert record_of(tmp_path / "again")[key] == record_of(expert)[key]
    record = record_of(expert)["text_encoder"]
    assert (record["kind"], record["tokens"]) == ("ChromaPipeline", 512)


def _alone(source: Path, folder: Path) -> Path:
    """An expert of the network alone."""
    network, schedule = copied(source / "transformer", folder), source / "scheduler"
    settings = schedule / "scheduler_config.json"
    library.convert(network, folder / "alone", sample_size=SIDE, schedule=settings)
    return folder / "alone"


def test_a_network_alone_gets_the_text_encoder_of_a_pipeline(
    expert: Path, source: Path, tmp_path: Path
) -> None:
    """As an expert of a single file does, which holds no vocabulary."""
    alone = _alone(source, tmp_path)
    parts = {name: source / name for name in ("vae", "text_encoder", "tokenizer")}
    assemble([alone], tmp_path / "whole", **parts, trust_components=True)
    wanted = HDDMPipeline.from_pretrained(expert).encode(PROMPTS, guided=True)
    found = HDDMPipeline.from_pretrained(tmp_path / "whole").encode(PROMPTS, guided=True)
    for ours, theirs in ((found.given, wanted.given), (found.negative, wanted.negative)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], one) for name, one in theirs.items())


def test_a_t5_that_another_pipeline_reads_is_refused_and_one_of_no_pipeline_is_noted(
    source: Path, hddm: Command, tmp_path: Path
) -> None:
    """All of them have the same weights; what differs are length, case and what of the padding counts."""
    alone, other = _alone(source, tmp_path), copied(source, tmp_path)
    edit_json(other / "model_index.json", _class_name="PixArtAlphaPipeline")
    parts = {name: other / name for name in ("vae", "text_encoder", "tokenizer")}
    options = {**parts, "trust_components": True}
    error = refusal(assemble, [alone], tmp_path / "no", **options)
    assert "read as PixArtAlphaPipeline reads it, and" in error
    assert "takes prompts of ChromaPipeline; name the text encoder in a folder of" in error
    (other / "model_index.json").unlink()
    words = [f"--{name.replace('_', '-')}={place}" for name, place in parts.items()]
    told = ("assemble", alone, "--out", tmp_path / "noted", *words, "--trust-components")
    assert "prompts are read as its tokenizer says" in printed(hddm, *told)


@pytest.mark.parametrize("kind", ["ChromaImg2ImgPipeline", "ChromaInpaintPipeline"])
def test_a_pipeline_for_another_task_has_the_same_prompts(
    kind: str, source: Path, tmp_path: Path
) -> None:
    other = copied(source, tmp_path)
    edit_json(other / "model_index.json", _class_name=kind)
    assert PipelineText(other).record == PipelineText(source).record


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_int8_makes_nearly_the_same(expert: Path) -> None:
    check_int8(expert, PROMPTS, least=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled_before")
def test_all_blocks_of_a_class_share_a_compiled_graph() -> None:
    network = chroma(num_layers=3, num_single_layers=3)
    assert graphs_of(network, torch.tensor([0.2, 0.8]), text(network)) == 2


@pytest.mark.integration
def test_flux_and_chroma_are_drawn_and_mixed_in_their_one_latent_space(
    pipe: ChromaPipeline, expert: Path, tmp_path: Path, hddm: Command
) -> None:
    """Only Chroma has a mask."""
    peer = stock("flux", tmp_path / "parts")
    even = check_mixture(peer, pipe.vae, expert, PROMPTS, tmp_path, hddm)
    assert {"encoder_attention_mask_2", "pooled_projections"} <= even.encode(PROMPTS).given.keys()


def test_a_small_network_that_no_embedding_fits_is_refused(hddm: Command, tmp_path: Path) -> None:
    network = chroma(approximator_num_channels=18)
    told = refused(hddm, flow_pipeline(tmp_path / "source", network), *WITH_SIDE)
    assert "approximator_num_channels is 18, and must be a multiple of 4" in told
    packed = dict(chroma().config) | {"patch_size": 2}
    assert "its rows are packed" in refusal(CHROMA.conditions, packed)


@pytest.mark.slow
def test_opening_one_warns_of_nothing_that_its_user_can_change(expert: Path) -> None:
    code = f"import hddm; hddm.load({str(expert)!r})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "FluxPosEmbed" not in found.stderr


@pytest.mark.slow
def test_a_program_keeps_its_filters_of_warnings() -> None:
    """Whatever diffusers adds by itself comes first."""
    code = """
import warnings
import diffusers
from diffusers import ChromaTransformer2DModel
before = list(warnings.filters)
import hddm
from hddm.networks.families import families
kind = families()["ChromaTransformer2DModel"].network
kind(num_layers=0, num_single_layers=0, attention_head_dim=16, axes_dims_rope=(4, 6, 6))
assert warnings.filters == before, set(warnings.filters) - set(before)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
