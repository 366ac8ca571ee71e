"""Sources that lie, ask for code or mean harm are refused in one line, with nothing written."""

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from safetensors.torch import load_file, save_file

from tests.artefacts import Command, copied, edit_json
from tests.checkpoint_files import dit, pipeline, refused, text_unet
from tests.hostile import Calls
from tests.soak import attack_reading
from tests.transformer_files import dit_file, dit_network

WEIGHTS = "diffusion_pytorch_model"
MODEL = f"transformer/{WEIGHTS}.safetensors"
CONFIG, SCHEDULER, PIPELINE = (
    "transformer/config.json",
    "scheduler/scheduler_config.json",
    "model_index.json",
)
BIAS = "proj_out_1.bias"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline(tmp_path_factory.mktemp("dit") / "source", dit())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A UNet that takes text."""
    return pipeline(tmp_path_factory.mktemp("text") / "source", text_unet())


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_code_in_a_pickle_is_never_run(hddm: Command, tmp_path: Path, name: str) -> None:
    sentinel = tmp_path / "ran"
    content = {"ema": dit_file(dit_network()), "args": Calls(builtins.open, (str(sentinel), "w"))}
    torch.save(content, tmp_path / name)
    assert "pickle" in refused(hddm, tmp_path / name)
    error = refused(hddm, tmp_path / name, "--allow-pickle", "--num-heads", 4)
    assert "open" in error or "rename it" in error
    assert not sentinel.exists()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _with(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: save_file(load_file(path) | {name: tensor}, path)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_cut, "cannot be read"),
        (lambda path: path.unlink(), "no diffusion_pytorch_model"),
        (_with(BIAS, torch.full((32,), float("nan"))), "holds NaN or Inf"),
        (_with(BIAS, torch.zeros(3)), "bias is (3,), not (32,)"),
        (_with(BIAS, torch.zeros(32).cfloat()), "bias is of torch.complex64"),
        (_with("a\nb\x1b", torch.zeros(1)), "left over a\\nb\\x1b"),
    ],
)
def test_weights_that_are_damaged(
    hddm: Command, tmp_path: Path, whole: Path, spoil: Callable[[Path], object], said: str
) -> None:
    source = copied(whole, tmp_path)
    spoil(source / MODEL)
    assert said in refused(hddm, source)


def test_every_tensor_missing_and_left_over_is_named(
    hddm: Command, tmp_path: Path, whole: Path
) -> None:
    source = copied(whole, tmp_path)
    gone = [f"transformer_blocks.{n}.attn1.to_{letter}.weight" for n in (0, 1) for letter in "qkv"]
    more = {f"extra.{n}": torch.zeros(n + 1, 2) for n in range(5)}
    weights = load_file(source / MODEL)
    save_file(
        {name: one for name, one in weights.items() if name not in gone} | more, source / MODEL
    )
    error = refused(hddm, source)
    assert all(f"missing {name}" in error for name in gone)
    assert all(f"left over {name} {tuple(tensor.shape)}" in error for name, tensor in more.items())


@pytest.mark.parametrize(
    "name", [MODEL, CONFIG, SCHEDULER, PIPELINE, "transformer", "scheduler", "vae"]
)
def test_links_that_lead_out_of_the_folder(
    hddm: Command, tmp_path: Path, whole: Path, name: str
) -> None:
    source = copied(whole, tmp_path)
    (source / "vae").mkdir()
    (source / "vae" / "config.json").write_text("{}")
    (source / name).rename(tmp_path / "elsewhere")
    (source / name).symlink_to("../../elsewhere" if "/" in name else "../elsewhere")
    assert "outside the folder" in refused(hddm, source)


def test_two_words_on_what_is_predicted(hddm: Command, tmp_path: Path, whole: Path) -> None:
    source = copied(whole, tmp_path)
    error = refused(hddm, source, "--prediction-type", "v_prediction")
    assert "--prediction-type says v_prediction, which contradicts" in error
    assert "says epsilon; drop the option" in error
    for scheduler, kind in (
        (DDIMScheduler(prediction_type="sample"), "epsilon"),
        (DDIMScheduler(prediction_type="sample"), "flow_prediction"),
    ):
        scheduler.save_pretrained(tmp_path / "other")
        file = tmp_path / "other" / "scheduler_config.json"
        error = refused(hddm, source, "--schedule", file, "--prediction-type", kind)
        assert "contradicts" in error


def test_a_header_that_contradicts_the_scheduler_beside_it(
    hddm: Command, tmp_path: Path, whole: Path
) -> None:
    source = copied(whole, tmp_path)
    save_file(load_file(source / MODEL), source / MODEL, {"modelspec.prediction_type": "v"})
    error = refused(hddm, source)
    assert (
        "scheduler_config.json says epsilon, which contradicts modelspec.prediction_type in the"
        in error
    )
    assert "which says v_prediction; correct the header, or what contradicts it" in error
    error = refused(hddm, source, "--prediction-type", "epsilon")
    assert "contradicts modelspec.prediction_type" in error


def test_no_word_on_the_schedule(hddm: Command, tmp_path: Path, whole: Path) -> None:
    source = copied(whole, tmp_path)
    (source / SCHEDULER).unlink()
    assert "--schedule" in refused(hddm, source)
    (source / SCHEDULER).write_text("[" * 100_000)
    assert "nested too deeply" in refused(hddm, source)


def test_content_of_no_known_layout(hddm: Command, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(2), "b.c": torch.zeros(2)}, file)
    assert "of no known layout (a, b.c" in refused(hddm, file)
    (tmp_path / "folder").mkdir()
    assert "found: none" in refused(hddm, tmp_path / "folder")
    (tmp_path / "models--x--y" / "snapshots" / "0").mkdir(parents=True)
    assert "one revision in its snapshots/" in refused(hddm, tmp_path / "models--x--y")


@pytest.mark.slow
def test_pipelines_that_are_spoiled_at_random_are_converted_or_refused_in_one_line(
    tmp_path: Path,
) -> None:
    found = attack_reading(
        tmp_path, tmp_path / "kept", 0, lambda number: number < 130, only="checkpoint"
    )
    assert not found.surprises, found
    assert 40 < found.refused.total() < found.tried.total() == 130


UNET = "unet/config.json"
# Keys and values that ask for code, or for what no tensor backs.
CHANGES: list[tuple[str, dict[str, Any], str]] = [
    (CONFIG, {"auto_map": {"AutoModel": "evil.Model"}}, "'auto_map'"),
    (CONFIG, {"_class_name": "subprocess.Popen"}, "holds a subprocess.Popen"),
    (CONFIG, {"num_layers": 10**9}, "depth is 1000000000"),
    (CONFIG, {"num_layers": -1}, ""),
    (CONFIG, {"sample_size": 10**9}, ""),
    (CONFIG, {"num_embeds_ada_norm": 10**12}, ""),
    (CONFIG, {"out_channels": 3}, ""),
    (UNET, {"cross_attention_dim": 10**9}, ""),
    (UNET, {"block_out_channels": [32] * 10**4}, ""),
    (UNET, {"transformer_layers_per_block": [[10**9], 1]}, ""),
    (UNET, {"attention_head_dim": 0}, ""),
    (UNET, {"encoder_hid_dim_type": "image_proj"}, ""),
    (
        PIPELINE,
        {"transformer": ["evil.module", "DiTTransformer2DModel"]},
        "not a class of diffusers",
    ),
    (PIPELINE, {"vae": ["evil", "AutoencoderKL"]}, "not a class of diffusers"),
    (PIPELINE, {"unet": ["diffusers", "UNet2DModel"]}, "needs one of"),
    (PIPELINE, {"transformer": None, "unet": ["diffusers", "UNet2DModel"]}, "no unet/ beside it"),
    (
        PIPELINE,
        {"vae": ["diffusers", "AutoencoderKL"]},
        "no vae/ beside it (found scheduler, transformer)",
    ),
    (
        PIPELINE,
        {"_class_name": "CogVideoXPipeline"},
        "CogVideoXPipeline makes videos; hddm makes pictures",
    ),
    (
        PIPELINE,
        {"_class_name": "FluxKontextPipeline"},
        "FluxKontextPipeline changes a given picture; hddm",
    ),
    (SCHEDULER, {"num_train_timesteps": 10**12}, "num_train_timesteps"),
    (SCHEDULER, {"beta_schedul": "linear"}, "did you mean 'beta_schedule'"),
    (SCHEDULER, {"_class_name": "evil.Scheduler"}, "evil.Scheduler"),
    (SCHEDULER, {"prediction_type": "noise"}, "'noise'"),
    (SCHEDULER, {"prediction_type": "v_prediction", "predict_epsilon": True}, "contradicts itself"),
]


@pytest.mark.parametrize(("file", "changes", "said"), CHANGES, ids=lambda value: str(value)[:40])
def test_configs_that_lie_or_ask_for_code(
    hddm: Command,
    tmp_path: Path,
    whole: Path,
    text: Path,
    file: str,
    changes: dict[str, Any],
    said: str,
) -> None:
    source = copied(text if file == UNET else whole, tmp_path)
    edit_json(source / file, **changes)
    error = refused(hddm, source)
    assert said in error
    assert source.name in error


def test_a_unet_for_inpainting_is_no_plain_denoiser(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "inpainting", text_unet(in_channels=9, out_channels=4))
    assert "takes 9 channels and gives 4" in refused(hddm, source)
