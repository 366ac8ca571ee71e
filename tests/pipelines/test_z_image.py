"""Z-Image as an expert: prompts, calls, pictures and mixtures against diffusers' own pipeline."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
from PIL import Image
from torch import Tensor, nn
from transformers import Qwen2Tokenizer

import hddm as library
from hddm.checkpoints.write_back import write_back
from hddm.experts.assembly import assemble
from hddm.networks.families.z_image import Z_IMAGE
from hddm.networks.prompts import PipelineText, read_texts
from hddm.networks.text_encoder import read_text_encoder
from hddm.networks.tokenizer import read_tokenizer
from hddm.noise import Seeded
from hddm.pipelines.pipeline import HDDMPipeline
from tests.artefacts import Command, copied, edit_json, printed, refusal
from tests.checkpoint_files import record_of
from tests.component_files import saved_in_parts, write_qwen3, write_vae
from tests.flow_models import z_image
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
def pipe(tmp_path_factory: pytest.TempPathFactory) -> ZImagePipeline:
    folder = tmp_path_factory.mktemp("z-image")
    made = ZImagePipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        write_vae(folder / "vae", factor=8, scaling_factor=0.3611, shift_factor=0.1159),
        write_qwen3(folder, 24),
        Qwen2Tokenizer.from_pretrained(folder / "tokenizer"),
        z_image(),
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def source(pipe: ZImagePipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: a text encoder in several files, inside of a larger model, and an older tokenizer."""
    root = tmp_path_factory.mktemp("source")
    folder, parts = saved_in_parts(pipe, root / "pipeline"), root / "parts"
    write_qwen3(parts, 24)
    for name in ("text_encoder", "tokenizer"):
        shutil.rmtree(folder / name)
        shutil.copytree(parts / name, folder / name)
    edit_json(folder / "text_encoder/config.json", rope_parameters=None, rope_theta=1e5)
    return folder


@pytest.fixture(scope="module")
def expert(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert") / "expert"
    library.convert(source, folder, sample_size=SIDE)
    return folder


def _theirs(pipe: ZImagePipeline, prompts: list[str]) -> list[Tensor]:
    """The tokens of each prompt."""
    return list(pipe.encode_prompt(list(prompts), do_classifier_free_guidance=False)[0])


def _as_conditions(texts: list[Tensor]) -> dict[str, Tensor]:
    """The same by hddm's keywords, padded to 512 by hand."""
    tokens = torch.zeros(len(texts), 512, texts[0].shape[1])
    mask = torch.zeros(len(texts), 512).long()
    for number, one in enumerate(texts):
        tokens[number, : len(one)] = one
        mask[number, : len(one)] = 1
    return {TEXT: tokens, MASK: mask}


@pytest.mark.parametrize("against", ["", AGAINST])
def test_prompts_become_the_pipelines_own_conditions(
    pipe: ZImagePipeline, expert: Path, against: str
) -> None:
    """Of each prompt its own tokens, bit for bit, and those of the turn around it."""
    prompts = [*PROMPTS, "", "a <think>\n猫</think>", "cat on a dog " * 80]
    with pytest.warns(UserWarning, match="Qwen3: a prompt of .* is cut to 512"):
        encoded = HDDMPipeline.from_pretrained(expert).encode(
            prompts, negative_prompt=against or None, guided=True
        )
    for ours, texts in ((encoded.given, prompts), (encoded.negative, [against] * len(prompts))):
        theirs = _as_conditions(_theirs(pipe, texts))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name].expand_as(value), value), name
    lengths = encoded.given[MASK].sum(1).tolist()
    assert lengths[-1] == 512
    assert len(set(lengths)) == len(lengths)


@pytest.mark.parametrize("size", [(SIDE, SIDE), (SIDE, 14), (12, 6), (16, 32)], ids=str)
def test_one_call_at_each_of_the_pipelines_times_is_one_of_its_network(
    size: tuple[int, int], pipe: ZImagePipeline, expert: Path
) -> None:
    """The network gets the time from noise on, and gives what leads to the data.

    In float64, as rounding of times to float32 changes this network's output by 1e-4.
    """
    calls: list[tuple[tuple[Any, ...], list[Tensor]]] = []

    def keep(module: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
        calls.append((inputs, output[0]))

    pipe = ZImagePipeline(**pipe.components | {"transformer": z_image().double()})
    pipe.set_progress_bar_config(disable=True)
    hook = pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    height, width = 8 * size[0], 8 * size[1]
    try:
        pipe(
            list(PROMPTS), height, width, STEPS, negative_prompt=[AGAINST] * 2, output_type="latent"
        )
    finally:
        hook.remove()
    field = library.load(expert, dtype=torch.float64).at_size(size)
    both = _as_conditions(_theirs(pipe, [*PROMPTS, AGAINST, AGAINST]))
    assert len(calls) == STEPS
    for (states, times, texts), output in calls:
        assert len(texts) == 4
        x = torch.stack(states).squeeze(2)
        expected = -torch.stack(output).squeeze(2)
        found = field.velocity(x, 1 - times.double(), **both)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


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
    # The pipeline writes turns of a chat into the list that it gets.
    made = pipe(
        list(PROMPTS),
        negative_prompt=[AGAINST] * 2,
        **SIZE,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        **{"guidance_scale": 2.0} | more,
    )
    return torch.as_tensor(made.images)


@pytest.mark.parametrize(
    "guidance",
    [{}, {"guidance_scale": 0.0}, {"cfg_normalization": True, "cfg_truncation": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["full", "draw"])
def test_a_drop_in_makes_the_pipelines_own_pictures_of_prompts(
    strategy: str, guidance: dict[str, Any], source: Path, expert: Path
) -> None:
    pipe = ZImagePipeline.from_pretrained(source)
    pipe.set_progress_bar_config(disable=True)
    theirs = _pictures(pipe, **guidance)
    model = library.Ensemble([library.load(expert)], strategy=strategy)
    pipe.transformer = library.drop_in(model, pipe)
    torch.testing.assert_close(_pictures(pipe, **guidance), theirs, rtol=0, atol=2e-5)


def test_what_a_router_sees_is_the_prompt_and_not_the_negative_one(
    pipe: ZImagePipeline, expert: Path
) -> None:
    """This pipeline puts the branch of the prompts first, unlike others."""
    own = ZImagePipeline(**pipe.components)
    model = library.Ensemble([library.load(expert)] * 2, strategy="draw")
    stand_in = library.drop_in(model, own)
    rows = {TEXT: torch.arange(4.0).view(4, 1, 1)}
    assert stand_in._of_images(rows, 2)[TEXT].flatten().tolist() == [0, 1]


@pytest.mark.integration
def test_euler_samples_are_the_pipelines_pictures(
    pipe: ZImagePipeline, expert: Path, hddm: Command, tmp_path: Path
) -> None:
    """By the same noise and times; the pipeline counts its scale from 0 on, and ends guidance early."""
    printed(hddm, "sample", expert, "--out", tmp_path / "out", "--num-images", 2, "--steps", STEPS,
            "--solver", "euler", "--guidance-scale", 3, "--guidance-interval", 0.5, 1,
            "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--negative-prompt", AGAINST)  # fmt: skip
    # The pipeline writes turns of a chat into the list that it gets.
    made = pipe(
        list(PROMPTS),
        negative_prompt=[AGAINST] * 2,
        **SIZE,
        num_inference_steps=STEPS,
        guidance_scale=2.0,
        cfg_truncation=0.5,
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
    pipe: ZImagePipeline, expert: Path, tmp_path: Path
) -> None:
    write_back(expert, tmp_path / "back", "diffusers-z-image")
    again = ZImagePipeline.from_pretrained(tmp_path / "back")
    again.set_progress_bar_config(disable=True)
    assert again.scheduler.config.shift == 3.0
    for name, weight in pipe.transformer.state_dict().items():
        assert torch.equal(again.transformer.state_dict()[name], weight), name
    torch.testing.assert_close(_pictures(again), _pictures(pipe), rtol=0, atol=1e-5)
    library.convert(tmp_path / "back", tmp_path / "again", sample_size=SIDE)
    for key in ("text_encoder", "vae", "conditions", "sample_shape", "shift"):
        assert record_of(tmp_path / "again")[key] == record_of(expert)[key]
    record = record_of(expert)
    text = record["text_encoder"]
    assert (text["kind"], text["tokens"], text["width"]) == ("ZImagePipeline", 512, 24)
    assert record["conditions"] == [TEXT, MASK]
    assert (record["prediction_type"], record["shift"]) == ("flow_prediction", 3.0)


def test_a_saved_pipeline_reads_prompts_as_before(expert: Path, tmp_path: Path) -> None:
    pipe = HDDMPipeline.from_pretrained(expert)
    pipe.save_pretrained(tmp_path / "saved")
    again = HDDMPipeline.from_pretrained(tmp_path / "saved").encode(PROMPTS)
    for name, one in pipe.encode(PROMPTS).given.items():
        assert torch.equal(again.given[name], one)


def test_a_pipeline_that_diffusers_saves_reads_prompts_alike(
    pipe: ZImagePipeline, expert: Path, tmp_path: Path
) -> None:
    """It has tokenizer.json, and its chat template in a file of its own."""
    pipe.save_pretrained(tmp_path / "own")
    assert (tmp_path / "own" / "tokenizer" / "chat_template.jinja").is_file()
    assert PipelineText(tmp_path / "own").record == PipelineText(expert / "text_encoder").record
    library.convert(tmp_path / "own", tmp_path / "expert", sample_size=SIDE)
    again = HDDMPipeline.from_pretrained(tmp_path / "expert").encode(PROMPTS)
    for name, one in HDDMPipeline.from_pretrained(expert).encode(PROMPTS).given.items():
        assert torch.equal(again.given[name], one)
    write_back(tmp_path / "expert", tmp_path / "back", "diffusers-z-image")
    assert ZImagePipeline.from_pretrained(tmp_path / "back").tokenizer.chat_template


def test_a_network_alone_gets_the_text_encoder_of_a_pipeline(
    expert: Path, source: Path, tmp_path: Path
) -> None:
    """As an expert of a single file does, which holds no vocabulary."""
    network, scheduler = copied(source / "transformer", tmp_path), source / "scheduler"
    library.convert(
        network,
        tmp_path / "alone",
        sample_size=SIDE,
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
    assert "is for networks of CLIP alone, and this one reads prompts by Qwen3" in told


PREFIXES = {
    "diffusion_model.": ("lora_A", "lora_B"),
    "transformer.": ("lora_A", "lora_B"),
    "lora_unet_": ("lora_down", "lora_up"),
}


@pytest.mark.parametrize("prefix", quick_first([*PREFIXES]))
def test_a_lora_of_common_names_changes_the_layers_that_it_names(
    prefix: str, pipe: ZImagePipeline, expert: Path, tmp_path: Path
) -> None:
    noise, content, changes = torch.Generator().manual_seed(7), {}, {}
    for name, layer in pipe.transformer.named_modules():
        if isinstance(layer, nn.Linear) and (".attention" in name or "feed_forward" in name):
            a = 0.3 * torch.randn(2, layer.in_features, generator=noise)
            b = 0.3 * torch.randn(layer.out_features, 2, generator=noise)
            shown = name.replace("to_out.0", "out") if prefix == "diffusion_model." else name
            stem = prefix + (shown.replace(".", "_") if prefix.endswith("_") else shown)
            for part, one in zip(PREFIXES[prefix], (a, b), strict=True):
                content[f"{stem}.{part}.weight"] = one
            changes[f"{name}.weight"] = b @ a
    assert len(changes) == 5 * 7
    network = z_image()
    check_lora(content, changes, network, expert, PROMPTS, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_int8_makes_nearly_the_same(expert: Path) -> None:
    check_int8(expert, PROMPTS)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_weights_of_half_types_are_converted_and_run_to_their_rounding(
    source: Path, expert: Path, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A variant of it, as published ones are."""
    check_half_type(z_image(), dtype, source, expert, PROMPTS, tmp_path, sample_size=SIDE)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled_before")
def test_blocks_share_compiled_graphs(expert: Path) -> None:
    network = z_image(n_layers=6, n_refiner_layers=2)
    given = HDDMPipeline.from_pretrained(expert).encode(PROMPTS).given
    # Blocks of patches, without a mask; of the text, which the time does not modulate; and of both.
    assert graphs_of(network, torch.tensor([0.2, 0.8]), given) == 3


@pytest.mark.slow
def test_flux_and_z_image_are_drawn_and_mixed_in_their_one_latent_space(
    pipe: ZImagePipeline, expert: Path, tmp_path: Path, hddm: Command
) -> None:
    """Only Z-Image has a mask."""
    peer = stock("flux", tmp_path / "parts")
    even = check_mixture(peer, pipe.vae, expert, PROMPTS, tmp_path, hddm)
    assert {f"{MASK}_2", f"{TEXT}_2", "pooled_projections"} <= even.encode(PROMPTS).given.keys()


def test_qwen3_alone_reads_no_prompts(source: Path, tmp_path: Path) -> None:
    """Only a pipeline that says how its states are used has it."""
    told = refusal(read_text_encoder, source / "text_encoder")
    assert "holds ['Qwen3ForCausalLM'], not a CLIPTextModel or a T5EncoderModel" in told
    other = copied(source, tmp_path)
    edit_json(other / "model_index.json", _class_name="StableDiffusionPipeline")
    assert "Qwen3ForCausalLM" in PipelineText(other).missing


HOSTILE = {
    "all_patch_size": ([4], "all_patch_size is [4], and is read as [2] alone"),
    "all_f_patch_size": ([2], "all_f_patch_size is [2], and is read as [1] alone"),
    "siglip_feat_dim": (8, "networks that see pictures are not supported"),
    "t_scale": (1.0, "t_scale is 1.0, and must be 1000"),
    "rope_theta": (0, "rope_theta is 0, and must be a number above 0"),
    "n_heads": (3, "dim is 32, and is divided by n_heads, 3"),
    "axes_dims": ([4, 6, 8], "axes_dims is [4, 6, 8], and is three even numbers that sum to"),
    "axes_lens": ([1024, 10**9, 64], "axes_lens is [1024, 1000000000, 64], and is three numbers"),
}


@pytest.mark.parametrize("key", HOSTILE)
def test_a_config_of_a_network_that_cannot_run_is_refused_in_one_line(key: str) -> None:
    value, said = HOSTILE[key]
    config = dict(z_image().config) | {key: value}
    told = refusal(Z_IMAGE.conditions, config)
    assert said in told
    assert told.endswith("; correct the config")
    assert "\n" not in told


def test_places_that_a_text_does_not_fit_into_are_refused() -> None:
    told = refusal(Z_IMAGE.conditions, dict(z_image().config) | {"axes_lens": [256, 64, 64]})
    assert "the first of at least 514" in told


ENCODER, WORDS = "text_encoder/config.json", "tokenizer/tokenizer_config.json"
LINEAR = {"rope_type": "linear", "factor": 1e9, "rope_theta": 1e5}


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        (ENCODER, {"hidden_act": "evil"}, "no text encoder can be built"),
        (ENCODER, {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        (ENCODER, {"vocab_size": 10**9}, "does not fit its config.json"),
        (ENCODER, {"head_dim": 10**9}, "does not fit its config.json"),
        (ENCODER, {"auto_map": {"AutoModel": "evil--evil"}}, "names code of its own"),
        (ENCODER, {"rope_parameters": LINEAR}, "hddm reads plain ones"),
        (ENCODER, {"rope_theta": "evil"}, "hddm reads plain ones"),
        (ENCODER, {"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}"),
        (ENCODER, {"use_sliding_window": True}, "use_sliding_window is True"),
        (WORDS, {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}, "names code of its own"),
        (WORDS, {"tokenizer_class": "Evil"}, "holds an Evil"),
        (WORDS, {"vocab_file": "https://example.com/vocab.json"}, "unknown key 'vocab_file'"),
        (WORDS, {"chat_template": None}, "has no chat template"),
        (WORDS, {"chat_template": "{{ messages[0].content }}"}, "writes 'a cat' as 'a cat'"),
        ("model_index.json", {"text_encoder": ["mine", "Evil"]}, "must be a Qwen3Model"),
        ("transformer/config.json", {"n_layers": 10**6}, "its depth is 1000000"),
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


@pytest.mark.usefixtures("no_network")
def test_a_foreign_chat_template_leaves_an_expert_without_prompts_and_says_why(
    source: Path, tmp_path: Path
) -> None:
    other = copied(source, tmp_path)
    (other / "tokenizer" / "chat_template.jinja").write_text("{% include '/etc/passwd' %}")
    library.convert(other, tmp_path / "expert", sample_size=SIDE)
    unread = record_of(tmp_path / "expert")["unread_text_encoder"]
    assert "chat template is no known one: it has Include" in unread["reason"]
    told = refusal(read_tokenizer, other / "tokenizer", writes_chats=True)
    assert "chat_template.jinja: its chat template is no known one" in told
