"""Lumina 2 as an expert: prompts, calls, pictures and mixtures against diffusers' own pipeline."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline
from PIL import Image
from torch import Tensor, nn
from transformers import GemmaTokenizer

import hddm as library
from hddm.checkpoints.write_back import write_back
from hddm.experts.assembly import assemble
from hddm.networks.families.lumina2 import LUMINA2
from hddm.networks.prompts import PipelineText, read_texts
from hddm.networks.text_encoder import read_text_encoder
from hddm.networks.tokenizer import read_tokenizer
from hddm.noise import Seeded
from hddm.pipelines.pipeline import HDDMPipeline
from tests.artefacts import Command, copied, edit_json, printed, refusal
from tests.checkpoint_files import record_of
from tests.component_files import saved_in_parts, write_gemma2, write_vae
from tests.flow_models import lumina2
from tests.pipelines.checks import (
    HALF_TYPES,
    check_half_type,
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
TEXT, MASK = "encoder_hidden_states", "encoder_attention_mask"
SIZE = {"height": 8 * SIDE, "width": 8 * SIDE}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Lumina2Pipeline:
    folder = tmp_path_factory.mktemp("lumina2")
    made = Lumina2Pipeline(
        lumina2(),
        FlowMatchEulerDiscreteScheduler(shift=6.0),
        write_vae(folder / "vae", factor=8, scaling_factor=0.3611, shift_factor=0.1159),
        write_gemma2(folder, 24),
        GemmaTokenizer.from_pretrained(folder / "tokenizer"),
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def source(pipe: Lumina2Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: a network in several files, and an older config of the tokenizer and text encoder."""
    root = tmp_path_factory.mktemp("source")
    folder, parts = saved_in_parts(pipe, root / "pipeline"), root / "parts"
    write_gemma2(parts, 24)
    for name in ("text_encoder", "tokenizer"):
        shutil.rmtree(folder / name)
        shutil.copytree(parts / name, folder / name)
    edit_json(folder / "text_encoder/config.json", rope_parameters=None, rope_theta=1e4)
    return folder


@pytest.fixture(scope="module")
def expert(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert") / "expert"
    library.convert(source, folder)
    return folder


def _theirs(pipe: Lumina2Pipeline, prompts: list[str], against: str) -> list[dict[str, Tensor]]:
    """The conditions of prompts, and those of the negative one."""
    tokens, mask, negative, negative_mask = pipe.encode_prompt(prompts, negative_prompt=against)
    return [{TEXT: tokens, MASK: mask}, {TEXT: negative, MASK: negative_mask}]


@pytest.mark.parametrize("against", ["", AGAINST])
def test_prompts_become_the_pipelines_own_conditions(
    pipe: Lumina2Pipeline, expert: Path, against: str
) -> None:
    """Bit for bit; the sentence before prompts is not before negative ones."""
    prompts = [*PROMPTS, "", "a\n猫", "cat on a dog " * 80]
    with pytest.warns(UserWarning, match="Gemma 2: a prompt of .* is cut to 256") as warned:
        encoded = HDDMPipeline.from_pretrained(expert).encode(
            prompts, negative_prompt=against or None, guided=True
        )
    both = (encoded.given, encoded.negative)
    for ours, theirs in zip(both, _theirs(pipe, prompts, against), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name].expand_as(value), value), name
    # What is lost is shown in part.
    assert len(str(warned[0].message)) < 250
    lengths = encoded.given[MASK].sum(1).tolist()
    assert lengths[-1] == 256
    assert len(set(lengths)) == len(lengths)
    assert encoded.negative[MASK].sum() < min(lengths)


@pytest.mark.parametrize("size", [(SIDE, SIDE), (SIDE, 14), (16, 32)], ids=str)
def test_one_call_at_each_of_the_pipelines_times_is_one_of_its_network(
    size: tuple[int, int], pipe: Lumina2Pipeline, expert: Path
) -> None:
    """The network gets the time from noise on, and gives what leads to the data."""
    calls: list[tuple[dict[str, Any], Tensor]] = []

    def keep(module: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
        calls.append((named, output[0]))

    hook = pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    try:
        pipe(
            PROMPTS,
            height=8 * size[0],
            width=8 * size[1],
            num_inference_steps=STEPS,
            negative_prompt=[AGAINST] * 2,
            output_type="latent",
        )
    finally:
        hook.remove()
    field = library.load(expert).at_size(size)
    both = _theirs(pipe, PROMPTS, AGAINST)
    assert len(calls) == 2 * STEPS
    for number, (named, output) in enumerate(calls):
        conditions = {name: one.expand(2, *one.shape[1:]) for name, one in both[number % 2].items()}
        assert torch.equal(named[TEXT], conditions[TEXT])
        found = field.velocity(named["hidden_states"], 1 - named["timestep"], **conditions)
        assert (found + output).abs().max() < 1e-5 * output.abs().max()


def test_the_time_the_text_and_its_length_each_change_the_output(expert: Path) -> None:
    """So that the comparison above would see what is lost."""
    pipe, x = HDDMPipeline.from_pretrained(expert), torch.randn(2, 4, SIDE, SIDE)
    given, t = pipe.encode(PROMPTS).given, torch.full((2,), 0.4)
    field = library.load(expert)
    own = field.velocity(x, t, **given)
    shorter = given[MASK].clone()
    shorter[:, 4:] = 0
    for other in (given | {TEXT: given[TEXT] + 1}, given | {MASK: shorter}, {TEXT: given[TEXT]}):
        assert (field.velocity(x, t, **other) - own).abs().max() > 1e-4 * own.abs().max()
    assert (field.velocity(x, t + 0.01, **given) - own).abs().max() > 1e-4 * own.abs().max()
    padded = given | {TEXT: given[TEXT] + (1 - given[MASK][..., None])}
    assert torch.equal(field.velocity(x, t, **padded), own)


def _pictures(pipe: Any, **more: Any) -> Tensor:
    made = pipe(
        PROMPTS,
        negative_prompt=[AGAINST] * 2,
        **SIZE,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        **{"guidance_scale": 3.0} | more,
    )
    return torch.as_tensor(made.images)


@pytest.mark.parametrize(
    "guidance",
    [{}, {"guidance_scale": 1.0}, {"cfg_normalization": False, "cfg_trunc_ratio": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["full", "draw"])
def test_a_drop_in_makes_the_pipelines_own_pictures_of_prompts(
    strategy: str, guidance: dict[str, Any], source: Path, expert: Path
) -> None:
    pipe = Lumina2Pipeline.from_pretrained(source)
    pipe.set_progress_bar_config(disable=True)
    theirs = _pictures(pipe, **guidance)
    model = library.Ensemble([library.load(expert)], strategy=strategy)
    pipe.transformer = library.drop_in(model, pipe)
    torch.testing.assert_close(_pictures(pipe, **guidance), theirs, rtol=0, atol=2e-5)


@pytest.mark.integration
def test_euler_samples_are_the_pipelines_pictures(
    pipe: Lumina2Pipeline, expert: Path, hddm: Command, tmp_path: Path
) -> None:
    """By the same noise and times, with the norm of each row that the pipeline gives back."""
    printed(hddm, "sample", expert, "--out", tmp_path / "out", "--num-images", 2, "--steps", STEPS,
            "--solver", "euler", "--guidance-scale", 3, "--guidance-norm", "rows",
            "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--negative-prompt", AGAINST)  # fmt: skip
    made = pipe(
        PROMPTS,
        negative_prompt=[AGAINST] * 2,
        **SIZE,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        latents=Seeded(0).initial(range(2), (4, SIDE, SIDE)),
    )
    for number, theirs in enumerate(made.images):
        ours = np.asarray(Image.open(tmp_path / "out" / f"0000{number}.png"), int)
        assert np.abs(ours - np.asarray(theirs, int)).max() <= 1
        assert ours.std() > 1


@pytest.mark.integration
def test_samples_of_another_size_are_pictures_and_odd_ones_are_refused(
    expert: Path, hddm: Command, tmp_path: Path
) -> None:
    prompt = ("--prompt", PROMPTS[1], "--num-images", 1, "--steps", 2)
    printed(
        hddm, "sample", expert, "--out", tmp_path / "wide", "--height", 48, "--width", 96, *prompt
    )
    picture = Image.open(tmp_path / "wide" / "00000.png")
    assert picture.size == (96, 48)
    for size, said in (((56, 64), "multiples of 16"), ((64, 1040), "at most 1024")):
        code, _, error = hddm("sample", expert, "--out", tmp_path / "no", "--height", size[0],
                              "--width", size[1], *prompt)  # fmt: skip
        assert code
        assert said in error


def test_an_expert_goes_back_to_a_pipeline_of_the_same_pictures(
    pipe: Lumina2Pipeline, expert: Path, tmp_path: Path
) -> None:
    write_back(expert, tmp_path / "back", "diffusers-lumina2")
    again = Lumina2Pipeline.from_pretrained(tmp_path / "back")
    again.set_progress_bar_config(disable=True)
    assert again.scheduler.config.shift == 6.0
    for name, weight in pipe.transformer.state_dict().items():
        assert torch.equal(again.transformer.state_dict()[name], weight), name
    torch.testing.assert_close(_pictures(again), _pictures(pipe), rtol=0, atol=1e-5)
    library.convert(tmp_path / "back", tmp_path / "again")
    for key in ("text_encoder", "vae", "conditions", "sample_shape", "shift"):
        assert record_of(tmp_path / "again")[key] == record_of(expert)[key]
    record = record_of(expert)
    text = record["text_encoder"]
    assert (text["kind"], text["tokens"], text["width"]) == ("Lumina2Pipeline", 256, 24)
    assert record["conditions"] == [TEXT, MASK]
    assert (record["prediction_type"], record["shift"]) == ("flow_prediction", 6.0)


def test_a_saved_pipeline_reads_prompts_as_before(expert: Path, tmp_path: Path) -> None:
    pipe = HDDMPipeline.from_pretrained(expert)
    pipe.save_pretrained(tmp_path / "saved")
    again = HDDMPipeline.from_pretrained(tmp_path / "saved").encode(PROMPTS)
    for name, one in pipe.encode(PROMPTS).given.items():
        assert torch.equal(again.given[name], one)


def test_a_network_alone_gets_the_text_encoder_of_a_pipeline(
    expert: Path, source: Path, tmp_path: Path
) -> None:
    """As an expert of a single file does, which holds no vocabulary."""
    network, scheduler = copied(source / "transformer", tmp_path), source / "scheduler"
    library.convert(
        network,
        tmp_path / "alone",
        schedule=scheduler / "scheduler_config.json",
    )
    told = refusal(HDDMPipeline.from_pretrained(tmp_path / "alone").encode, PROMPTS)
    assert "--text-encoder FOLDER" in told
    assert "--tokenizer" not in told
    parts = {"vae": source / "vae", "text_encoder": source}
    assemble([tmp_path / "alone"], tmp_path / "whole", **parts, trust_components=True)
    wanted = HDDMPipeline.from_pretrained(expert).encode(PROMPTS, guided=True)
    found = HDDMPipeline.from_pretrained(tmp_path / "whole").encode(PROMPTS, guided=True)
    for ours, theirs in ((found.given, wanted.given), (found.negative, wanted.negative)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], one) for name, one in theirs.items())


def test_prompts_are_read_in_one_way_alone(expert: Path) -> None:
    told = refusal(HDDMPipeline.from_pretrained(expert).encode, PROMPTS, long_prompt=True)
    assert "is for networks of CLIP alone, and this one reads prompts by Gemma 2" in told


PREFIXES = {
    "diffusion_model.": ("lora_A", "lora_B"),
    "transformer.": ("lora_A", "lora_B"),
    "lora_unet_": ("lora_down", "lora_up"),
}


def _of_its_authors(name: str) -> str:
    """What their code calls a layer, except for queries, keys and values."""
    renamed = name.replace(".attn.to_out.0", ".attention.out")
    return renamed.replace(".linear_", ".w")


@pytest.mark.parametrize("prefix", quick_first([*PREFIXES]))
def test_a_lora_of_common_names_changes_the_layers_that_it_names(
    prefix: str, pipe: Lumina2Pipeline, expert: Path, tmp_path: Path
) -> None:
    noise, content, changes = torch.Generator().manual_seed(7), {}, {}
    for name, layer in pipe.transformer.named_modules():
        if isinstance(layer, nn.Linear) and (".attn" in name or "feed_forward" in name):
            a = 0.3 * torch.randn(2, layer.in_features, generator=noise)
            b = 0.3 * torch.randn(layer.out_features, 2, generator=noise)
            shown = _of_its_authors(name) if prefix == "diffusion_model." else name
            stem = prefix + (shown.replace(".", "_") if prefix.endswith("_") else shown)
            for part, one in zip(PREFIXES[prefix], (a, b), strict=True):
                content[f"{stem}.{part}.weight"] = one
            changes[f"{name}.weight"] = b @ a
    assert len(changes) == 5 * 7
    network = lumina2()
    check_lora(content, changes, network, expert, PROMPTS, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_int8_makes_nearly_the_same(expert: Path) -> None:
    check_int8(expert, PROMPTS)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_weights_of_half_types_are_converted_and_run_to_their_rounding(
    source: Path, expert: Path, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A variant of it, as published ones are."""
    check_half_type(lumina2(), dtype, source, expert, PROMPTS, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled_before")
def test_blocks_share_compiled_graphs(expert: Path) -> None:
    network = lumina2(num_layers=6, num_refiner_layers=2)
    given = HDDMPipeline.from_pretrained(expert).encode(PROMPTS).given
    # Blocks of patches, without a mask; of the text, which the time does not modulate; and of both.
    assert graphs_of(network, torch.tensor([0.2, 0.8]), given) == 3


@pytest.mark.slow
def test_flux_and_lumina_2_are_drawn_and_mixed_in_their_one_latent_space(
    pipe: Lumina2Pipeline, expert: Path, tmp_path: Path, hddm: Command
) -> None:
    """Only Lumina 2 has a mask."""
    peer = stock("flux", tmp_path / "parts")
    even = check_mixture(peer, pipe.vae, expert, PROMPTS, tmp_path, hddm)
    assert {f"{MASK}_2", f"{TEXT}_2", "pooled_projections"} <= even.encode(PROMPTS).given.keys()


def test_gemma_2_alone_reads_no_prompts(source: Path, tmp_path: Path) -> None:
    """Only a pipeline that says how its states are used has it."""
    told = refusal(read_text_encoder, source / "text_encoder")
    assert "holds ['Gemma2Model'], not a CLIPTextModel or a T5EncoderModel" in told
    other = copied(source, tmp_path)
    edit_json(other / "model_index.json", _class_name="StableDiffusionPipeline")
    assert "Gemma2Model" in PipelineText(other).missing


HOSTILE = {
    "num_attention_heads": (3, "hidden_size is 32, and is divided by num_attention_heads, 3"),
    "num_kv_heads": (3, "num_kv_heads is 3, and divides num_attention_heads, 2"),
    "axes_dim_rope": ([4, 6, 8], "axes_dim_rope is [4, 6, 8], and is three even numbers that sum"),
    "axes_lens": ([300, 10**9, 64], "axes_lens is [300, 1000000000, 64], and is three numbers"),
}
WIDE = 2**17
"""Width of a head whose tables of places would take gigabytes, beside a network of a megabyte."""


@pytest.mark.parametrize("key", HOSTILE)
def test_a_config_of_a_network_that_cannot_run_is_refused_in_one_line(key: str) -> None:
    value, said = HOSTILE[key]
    config = dict(lumina2().config) | {key: value}
    told = refusal(LUMINA2.conditions, config)
    assert said in told
    assert told.endswith("; correct the config")
    assert "\n" not in told


def test_places_that_a_text_does_not_fit_into_are_refused() -> None:
    told = refusal(LUMINA2.conditions, dict(lumina2().config) | {"axes_lens": [256, 64, 64]})
    assert "the first of at least 257" in told


ENCODER, WORDS = "text_encoder/config.json", "tokenizer/tokenizer_config.json"
LINEAR = {"rope_type": "linear", "factor": 1e9, "rope_theta": 1e4}


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        (ENCODER, {"hidden_activation": "evil"}, "no text encoder can be built"),
        (ENCODER, {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        (ENCODER, {"vocab_size": 10**9}, "does not fit its config.json"),
        (ENCODER, {"head_dim": 10**9}, "does not fit its config.json"),
        (ENCODER, {"layer_types": ["evil"] * 3}, "no text encoder can be built"),
        (ENCODER, {"auto_map": {"AutoModel": "evil--evil"}}, "names code of its own"),
        (ENCODER, {"rope_parameters": LINEAR}, "hddm reads plain ones"),
        (ENCODER, {"attention_bias": True}, "attention_bias is True"),
        (WORDS, {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}, "names code of its own"),
        (WORDS, {"tokenizer_class": "Evil"}, "holds an Evil"),
        (WORDS, {"vocab_file": "https://example.com/vocab.json"}, "unknown key 'vocab_file'"),
        ("model_index.json", {"text_encoder": ["mine", "Evil"]}, "must be a Gemma2Model"),
        ("transformer/config.json", {"num_layers": 10**6}, "its depth is 1000000"),
        ("transformer/config.json", {"axes_lens": [300, 10**12, 64]}, "axes_lens is [300,"),
        (
            "transformer/config.json",
            {
                "hidden_size": WIDE,
                "num_attention_heads": 1,
                "num_kv_heads": 1,
                "axes_dim_rope": [WIDE - 4, 2, 2],
                "axes_lens": [2**16] * 3,
            },
            "numbers, of 4,194,304 at most",
        ),
        ("transformer/config.json", {"axes_lens": [300, 1, 1]}, "at most 2 a side"),
        ("transformer/config.json", {"_class_name": "Evil"}, "holds an Evil"),
    ],
    ids=str,
)
def test_hostile_files_are_refused_in_one_line(
    file: str, changes: dict[str, Any], said: str, source: Path, tmp_path: Path
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


def test_an_index_that_does_not_fit_the_network_is_told_as_such(
    source: Path, hddm: Command, tmp_path: Path
) -> None:
    other = copied(source, tmp_path)
    edit_json(other / "model_index.json", _class_name="FluxPipeline")
    told = refusal(library.convert, other, tmp_path / "out")
    assert "is of a FluxPipeline, and the network beside it is a Lumina2Transformer2DModel" in told
    assert "which belongs into a Lumina2Pipeline; correct _class_name" in told
    named = ["diffusers", "LuminaNextDiT2DModel"]
    edit_json(other / "model_index.json", _class_name="Lumina2Pipeline", transformer=named)
    said = printed(hddm, "convert", other, "--out", tmp_path / "out")
    assert "calls it LuminaNextDiT2DModel, and" in said


def test_a_vocabulary_as_large_as_that_of_gemma_2_is_read(source: Path, tmp_path: Path) -> None:
    other = copied(source, tmp_path)
    file = other / "tokenizer" / "tokenizer.json"
    # Space between words of JSON, as a file of 256,000 words and their merges has the bytes.
    file.write_text(file.read_text().replace("{", "{" + " " * 35_000_000, 1))
    assert PipelineText(other).missing == ""
    assert read_tokenizer(other / "tokenizer").eos_token == "<eos>"
    file.write_text("{" + " " * 2**27 + "}")
    assert "has more than 134217728 bytes" in PipelineText(other).missing


def test_former_and_general_names_of_classes_are_known(
    source: Path, expert: Path, tmp_path: Path
) -> None:
    """diffusers called the pipeline otherwise, and transformers 5 gives some tokenizers no class."""
    other = copied(source, tmp_path)
    edit_json(other / WORDS, tokenizer_class="TokenizersBackend")
    edit_json(
        other / "model_index.json",
        _class_name="Lumina2Text2ImgPipeline",
        tokenizer=["transformers", "TokenizersBackend"],
    )
    library.convert(other, tmp_path / "expert")
    again = HDDMPipeline.from_pretrained(tmp_path / "expert").encode(PROMPTS)
    for name, one in HDDMPipeline.from_pretrained(expert).encode(PROMPTS).given.items():
        assert torch.equal(again.given[name], one)


def test_a_prompt_may_bring_the_sentence_before_it(pipe: Lumina2Pipeline, expert: Path) -> None:
    """As users of models with other sentences write it; each is as the pipeline's `system_prompt`."""
    own = "You draw maps."
    texts = [f"{own} <Prompt Start> a cat", "a dog", f"{own} <Prompt Start> a dog"]
    found = HDDMPipeline.from_pretrained(expert).encode(texts).given
    theirs, mask, *_ = pipe.encode_prompt(["a cat", "a dog"], False, system_prompt=own)
    plain, other, *_ = pipe.encode_prompt(["a dog"], False)
    assert torch.equal(found[TEXT], torch.stack([theirs[0], plain[0], theirs[1]]))
    assert torch.equal(found[MASK], torch.stack([mask[0], other[0], mask[1]]))


def test_a_text_is_encoded_once(expert: Path) -> None:
    """Gemma 2 has billions of weights: one call for both prompts, and one for both negative ones."""
    made = HDDMPipeline.from_pretrained(expert)
    calls = []
    made.text_encoder.encoders["text_encoder"].register_forward_hook(
        lambda module, inputs, output: calls.append(len(output[0]))
    )
    made.encode(PROMPTS, negative_prompt=AGAINST, guided=True)
    assert calls == [2, 2]


def test_a_tokenizer_without_its_one_file_is_refused(source: Path, tmp_path: Path) -> None:
    other = copied(source, tmp_path)
    (other / "tokenizer" / "tokenizer.json").unlink()
    told = refusal(read_tokenizer, other / "tokenizer")
    assert told.endswith("tokenizer: no tokenizer.json; fetch what is missing")
