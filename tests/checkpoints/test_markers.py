"""What markers, buffers and headers of single files of Stable Diffusion say, and what contradicts itself."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, EDMEulerScheduler
from safetensors.torch import save_file
from torch import Tensor

import hddm as library
from hddm.networks.vae import read_vae, scaling_of
from hddm.schedule_records import MOST_STEPS
from tests.artefacts import Command
from tests.checkpoint_files import converted, record_of, refused, text_unet
from tests.ldm_files import SIZES, XL, ldm_unet, tiny_pipeline, whole_file

NETWORKS = SIZES | {"XL": XL | {"attention_head_dim": 1}}
SIDE = ("--sample-size", 8)
MEAN, DEVIATION = torch.tensor([-1.0, 2.0, 0.5, 3.0]), torch.tensor([8.0, 5.0, 6.0, 5.5])
STATISTICS = {
    "edm_mean": MEAN.reshape(1, 4, 1, 1),
    "edm_std": DEVIATION.reshape(1, 4, 1, 1),
}
ENDS = {"edm_vpred.sigma_max": torch.tensor(120.0), "edm_vpred.sigma_min": torch.tensor(0.002)}


def _file(folder: Path, kind: str, header: dict[str, str] | None = None, **more: Tensor) -> Path:
    """A file of a tiny network alone, with ``more`` tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(ldm_unet(text_unet(**NETWORKS[kind])) | more, folder / "sd.safetensors", header)
    return folder / "sd.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Path]:
    """The content of a whole file of XL, and the folder of its tokenizer."""
    folder = tmp_path_factory.mktemp("whole")
    pipe = tiny_pipeline(folder, "XL")
    content = {name: one.contiguous() for name, one in whole_file(pipe, "XL").items()}
    return content, folder / "parts/tokenizer"


@pytest.mark.parametrize("is_in_file", [True, False])
def test_playground_has_statistics_from_its_file_or_as_published(
    is_in_file: bool, whole: tuple[dict[str, Tensor], Path], tmp_path: Path, hddm: Command
) -> None:
    content, words = whole
    (tmp_path / "in").mkdir()
    source = tmp_path / "in" / "sd.safetensors"
    save_file(content | (STATISTICS if is_in_file else {}), source)
    options = ("--tokenizer", words, "--no-verify", *SIDE)
    if not is_in_file:
        options = ("--preset", "playground-2.5", *options)
    converted(hddm, source, tmp_path / "out", *options)
    # vae/config.json of playgroundai/playground-v2.5-1024px-aesthetic.
    mean, deviation = [-1.6574, 1.886, -1.383, 2.5155], [8.4927, 5.9022, 6.5498, 5.2299]
    if is_in_file:
        mean, deviation = MEAN.tolist(), DEVIATION.tolist()
    record = record_of(tmp_path / "out")["vae"]
    assert (record["scale"], record["mean"], record["deviation"]) == (0.5, mean, deviation)
    scaling = scaling_of(read_vae(tmp_path / "out" / "vae").config)
    assert scaling.mean == pytest.approx(mean)


def _with(name: str, value: object) -> dict[str, Tensor]:
    return {name: torch.tensor(value)}


NUMBERS = "must be 4 numbers from"
CONTRADICTIONS: dict[str, tuple[str, dict[str, Tensor], tuple[str, ...], str]] = {
    "mean alone": ("XL", {"edm_mean": STATISTICS["edm_mean"]}, (), "holds edm_mean without edm_std"),
    "deviation alone": (
        *("XL", {"edm_std": STATISTICS["edm_std"]}, ("--preset", "sdxl")),
        "holds edm_std without edm_mean",
    ),
    "least sigma alone": (
        *("XL", _with("edm_vpred.sigma_min", 0.01), ("--preset", "sdxl")),
        "holds edm_vpred.sigma_min without edm_vpred.sigma_max",
    ),
    "two of EDM": ("XL", ENDS | STATISTICS, (), "holds edm_mean and edm_vpred.sigma_max, which are"),
    "v and EDM": ("XL", ENDS | {"v_pred": torch.zeros(0)}, (), "holds v_pred and edm_vpred.sigma_max"),
    "statistics in 1": ("1", STATISTICS, ("--preset", "sd1"), "which is of Stable Diffusion XL, and"),
    "sigmas in 2": ("2", ENDS, ("--preset", "sd2"), "which is of Stable Diffusion XL, and its"),
    "two sigmas": ("XL", ENDS | _with("edm_vpred.sigma_max", [1.0, 2.0]), (), "sigma_max is (2,), and"),
    "NaN sigma": ("XL", ENDS | _with("edm_vpred.sigma_max", torch.nan), (), "sigma_max is [nan], and"),
    "zero sigma": ("XL", ENDS | _with("edm_vpred.sigma_min", 0.0), (), "sigma_min is [0.0], and must"),
    "three channels": ("XL", STATISTICS | _with("edm_mean", [1.0, 1.0, 1.0]), (), NUMBERS),
    "NaN deviation": ("XL", STATISTICS | _with("edm_std", [torch.nan] * 4), (), NUMBERS),
    "negative deviation": ("XL", STATISTICS | _with("edm_std", [-1.0] * 4), (), NUMBERS),
    "NaN scale": ("1", _with("scale_factor", torch.nan), (), "scale_factor is [nan], and must be a"),
    "Inf scale": ("1", _with("scale_factor", torch.inf), (), "scale_factor is [inf], and must be a"),
    "zero scale": ("1", _with("scale_factor", 0.0), (), "scale_factor is [0.0], and must be a number"),
    "two scales": ("1", _with("scale_factor", [0.5, 0.5]), (), "scale_factor is (2,), and must be a"),
    "NaN betas": ("1", {"betas": torch.full((10,), torch.nan)}, (), "the betas in the file: schedule: be"),
    "too many betas": (
        *("1", {"betas": torch.full((MOST_STEPS + 1,), 1e-6)}, ()),
        f"betas has {MOST_STEPS + 1} numbers, and a schedule has at most",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_markers_and_buffers_that_contradict_themselves_are_named(
    case: str, tmp_path: Path, hddm: Command
) -> None:
    kind, tensors, options, said = CONTRADICTIONS[case]
    source = _file(tmp_path, kind, **tensors)
    more = ("--num-heads", 8, "--prediction-type", "epsilon") if kind == "1" and not options else ()
    error = refused(hddm, source, *options, *more, *SIDE)
    assert said in error
    assert str(source) in error


def test_broken_statistics_refuse_the_whole_file_and_do_not_drop_its_vae(
    whole: tuple[dict[str, Tensor], Path], tmp_path: Path, hddm: Command
) -> None:
    content, words = whole
    source = tmp_path / "sd.safetensors"
    for broken in (torch.full((1, 4, 1, 1), torch.nan), torch.ones(1, 3, 1, 1)):
        save_file(content | STATISTICS | {"edm_std": broken}, source)
        assert NUMBERS in refused(hddm, source, "--tokenizer", words, *SIDE)


def _schedule(folder: Path, **changes: Any) -> Path:
    config = {
        "num_train_timesteps": 1000,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
    }
    DDIMScheduler(**(config | changes)).save_pretrained(folder)
    return folder / "scheduler_config.json"


V_OF_2 = {
    "ss_base_model_version": "sd_v2_v",
    "ss_v2": "True",
    "ss_v_parameterization": "True",
    "modelspec.prediction_type": "v",
}
EPSILON_OF_XL = {"ss_base_model_version": "sdxl_base_v1-0", "ss_v_parameterization": "False"}
BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2


@pytest.mark.parametrize("has_betas", [True, False])
@pytest.mark.parametrize("has_schedule", [True, False])
@pytest.mark.parametrize(
    ("kind", "header"),
    [
        ("2", V_OF_2),
        # Another preset and prediction, by the same code.
        pytest.param("XL", EPSILON_OF_XL, marks=pytest.mark.slow),
    ],
)
def test_a_header_of_no_signal_rescales_the_preset_that_it_means(
    kind: str,
    header: dict[str, str],
    has_schedule: bool,
    has_betas: bool,
    tmp_path: Path,
    hddm: Command,
) -> None:
    buffers = {"betas": BETAS} if has_betas else {}
    source = _file(tmp_path / "in", kind, header | {"ss_zero_terminal_snr": "True"}, **buffers)
    v = "v_prediction" if kind == "2" else "epsilon"
    options: tuple[object, ...] = SIDE
    if has_schedule:
        options = (
            *("--schedule", _schedule(tmp_path, rescale_betas_zero_snr=True, prediction_type=v)),
            *options,
        )
    converted(hddm, source, tmp_path / "out", *options)
    assert record_of(tmp_path / "out")["prediction_type"] == v
    assert library.load(tmp_path / "out").schedule.alpha(torch.tensor([999])) == 0


def test_a_stated_schedule_wins_over_a_preset_that_nobody_typed(
    tmp_path: Path, hddm: Command
) -> None:
    own = _schedule(tmp_path, beta_end=0.02)
    for name, header, markers in (
        ("header", EPSILON_OF_XL, {}),
        ("marker", {}, {"v_pred": torch.zeros(0)}),
    ):
        source = _file(tmp_path / name, "XL", header, **markers)
        kind = "epsilon" if name == "header" else "v_prediction"
        stated = ("--schedule", own, "--prediction-type", kind, *SIDE)
        if name == "marker":
            own = _schedule(tmp_path, beta_end=0.02, prediction_type="v_prediction")
        text = converted(hddm, source, tmp_path / "out" / name, *stated, "--no-verify")
        assert f"note: {own} instead of the schedule of preset sdxl" in text
        last = library.load(tmp_path / "out" / name).schedule.alpha(torch.tensor([999.0]))
        betas = torch.linspace(0.00085**0.5, 0.02**0.5, 1000, dtype=torch.float64) ** 2
        torch.testing.assert_close(
            last.double(), (1 - betas).prod().sqrt()[None], rtol=1e-3, atol=0
        )
        # A preset that is typed stands.
        error = refused(hddm, source, "--preset", f"sdxl{'-v' * (name == 'marker')}", *stated)
        assert "contradicts preset sdxl" in error
        assert "drop one of them" in error


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_ends_of_edm_are_compared_up_to_rounding(
    dtype: torch.dtype, tmp_path: Path, hddm: Command
) -> None:
    source = _file(tmp_path / "in", "XL", **{name: one.to(dtype) for name, one in ENDS.items()})
    config = {"sigma_min": 0.002, "sigma_max": 120.0, "sigma_data": 1.0}
    scheduler = EDMEulerScheduler(**config, prediction_type="v_prediction")
    scheduler.save_pretrained(tmp_path / "same")
    file = tmp_path / "same" / "scheduler_config.json"
    converted(hddm, source, tmp_path / "out", "--schedule", file, "--no-verify", *SIDE)
    changed = json.loads(file.read_text()) | {"sigma_max": 80.0}
    file.write_text(json.dumps(changed))
    error = refused(hddm, source, "--schedule", file, *SIDE)
    assert re.search(
        r"contradicts preset cosxl .*; drop --schedule, or remove its edm_vpred", error
    )


REFINERS: dict[str, tuple[dict[str, str], dict[str, object]]] = {
    "its header": ({"modelspec.architecture": "stable-diffusion-xl-v1-refiner"}, {}),
    "the width of its vector": ({}, {"projection_class_embeddings_input_dim": 2560}),
    "the width of its text": ({}, {"cross_attention_dim": 1280}),
}


@pytest.mark.parametrize("case", REFINERS)
def test_a_refiner_is_refused_by(case: str, tmp_path: Path, hddm: Command) -> None:
    header, sizes = REFINERS[case]
    source = tmp_path / "sd.safetensors"
    save_file(ldm_unet(text_unet(**(NETWORKS["XL"] | sizes))), source, header)
    error = refused(hddm, source, "--preset", "sdxl", *SIDE)
    assert "is a refiner, which changes a given picture; convert its base model" in error


def test_a_refiner_is_refused_by_its_text_encoder(tmp_path: Path, hddm: Command) -> None:
    source = _file(tmp_path, "XL", **{"conditioner.embedders.0.model.ln_final.bias": torch.ones(2)})
    assert "is a refiner" in refused(hddm, source, "--preset", "sdxl", *SIDE)
