"""The nodes for ComfyUI, as far as they can be checked without it; the rest is in `benchmarks.comfyui`."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hddm.utils.errors import HddmError
from integrations.build_pack import build
from integrations.comfyui.levels import Levels, denoised_of
from integrations.comfyui.mixing import BEGIN, ModelToMix, check, maps_beside, strategy_of
from integrations.comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from integrations.comfyui.weights import WeightCurve, check_sum
from tests.oracles import GaussianMixture, relative_error

WHOLE = strategy_of("mix", 0.5)


class WholePicture:
    """The noise of models that predict noise or v: a latent, and sigma times noise beside it."""

    sigma_min, sigma_max = torch.tensor(0.03), torch.tensor(14.6)

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent: Tensor) -> Tensor:
        return latent + sigma * noise


class StraightPath:
    """The noise of flow matching."""

    sigma_min, sigma_max = torch.tensor(0.001), torch.tensor(1.0)

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent: Tensor) -> Tensor:
        return (1 - sigma) * latent + sigma * noise


class HalfNoise:
    """Noise that is of neither kind."""

    sigma_min, sigma_max = torch.tensor(0.1), torch.tensor(1.0)

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent: Tensor) -> Tensor:
        return latent + sigma / 2 * noise


def patcher(sampling: Any = None, **changes: Any) -> Any:
    """What the checks of a mix read of a model of ComfyUI's."""
    latent_format = type("SD15", (), {"scale_factor": 0.18215, "latent_channels": 4})()
    facts = {
        "model": SimpleNamespace(latent_format=latent_format),
        "model_options": {},
        "wrappers": {},
        "get_model_object": lambda name: sampling or WholePicture(),
    }
    return SimpleNamespace(**{**facts, **changes})


def to_mix(weight: str = "1", **changes: Any) -> ModelToMix:
    settings = {"model": patcher(), "weight": WeightCurve.parse(weight, "weight_1")}
    return ModelToMix(**{**settings, **changes})


@pytest.mark.parametrize("sampling", [WholePicture(), StraightPath()])
def test_an_exact_denoised_picture_becomes_the_exact_velocity(sampling: Any) -> None:
    mixture = GaussianMixture.random(seed=0, modes=4, dim=6)
    levels = Levels(sampling, "model 1")
    t = torch.tensor([0.05, 0.4, 0.7, 0.93], dtype=torch.float64)
    x = mixture.states(t, seed=1)
    x_0, _ = mixture.x_0_and_eps(x, 1 - t, t)
    matched = levels.matched(x, t)
    # The model's own state has the signal and the noise that ComfyUI gives to it at that sigma.
    one, zero = torch.ones(4, 1).double(), torch.zeros(4, 1).double()
    signal = sampling.noise_scaling(matched.sigma[:, None], zero, one)
    noise = sampling.noise_scaling(matched.sigma[:, None], one, zero)
    assert torch.allclose(noise / signal, (t / (1 - t))[:, None])
    assert torch.allclose(matched.x, (signal + noise) * x)
    velocity = matched.velocity(x_0)
    assert relative_error(velocity, mixture.velocity(x, t)) < 1e-12
    assert torch.allclose(denoised_of(x, t, velocity), x_0)


def test_states_and_levels_come_back_from_the_common_path() -> None:
    for sampling in (WholePicture(), StraightPath()):
        levels = Levels(sampling, "model 1")
        sigma = torch.linspace(0.05, 0.95, 5)
        t = levels.times(sigma)
        assert torch.equal(levels.sigmas(t).float(), sigma)
        x = torch.randn(5, 4, 2, 2)
        back = levels.matched(levels.common(x, t), t)
        assert torch.allclose(back.x, x, rtol=1e-5)


def test_a_model_is_asked_at_the_end_of_its_levels_above_it() -> None:
    levels = Levels(WholePicture(), "model 1")
    matched = levels.matched(torch.randn(1, 4, 2, 2), torch.ones(1).double())
    assert matched.sigma.item() == pytest.approx(14.6, rel=1e-4)
    assert matched.velocity(torch.zeros(1, 4, 2, 2)).isfinite().all()


def test_other_noise_is_refused() -> None:
    with pytest.raises(HddmError, match=r"model 2: at sigma 0\.3162 .* it cannot be mixed"):
        Levels(HalfNoise(), "model 2")


def test_a_curve_is_straight_between_its_levels_and_constant_beyond() -> None:
    curve = WeightCurve.parse("0.8: 2, 0.4: 0", "weight_1")
    assert curve.at(
        torch.tensor([1.0, 0.8, 0.6, 0.5, 0.4, 0.0]).double()
    ).tolist() == pytest.approx([2, 2, 1, 0.5, 0, 0], abs=1e-6)
    assert WeightCurve.parse("0.5", "weight_1").at(torch.tensor([0.3])).tolist() == [0.5]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no number"),
        ("one", "is no number"),
        ("-1", "is no number"),
        ("nan", "is no number"),
        ("1: 1, 0.5", "is no pair"),
        ("14.6: 1", r"from 0 to 1; .* sigma/\(1 \+ sigma\), here 0\.94"),
        ("0.5: 1, 0.5: 0", "level 0.5 is there twice"),
    ],
)
def test_other_curves_are_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(HddmError, match=reason) as error:
        WeightCurve.parse(text, "weight_1")
    assert "\n" not in str(error.value)
    assert "weight_1" in str(error.value)


def test_weights_that_are_all_0_somewhere_are_refused() -> None:
    high, low = WeightCurve.parse("0.7: 1, 0.6: 0", "a"), WeightCurve.parse("0.5: 0, 0.4: 1", "b")
    with pytest.raises(HddmError, match=r"all models are 0 at noise level 0\.5"):
        check_sum([high, low])
    check_sum([high, WeightCurve.parse("0.7: 0, 0.6: 1", "b")])
    with pytest.raises(HddmError, match="all models are 0; give one of them a weight above 0"):
        check_sum([WeightCurve.parse("0", "a"), WeightCurve.parse("0.5: 0", "b")])


def _half(of: str = "left") -> Tensor:
    mask = torch.zeros(1, 8, 8)
    mask[..., :4] = 1
    return mask if of == "left" else 1 - mask


@pytest.mark.parametrize(
    ("weights", "masks", "reason"),
    [
        (("1", "0.5: 1, 0.3: 0"), (_half(), None), "at noise level 0, no model .* 50% of the"),
        (("0.7: 1, 0.4: 0", "0.7: 0, 0.4: 1"), (_half(), None), "noise level 0, .* 50% of the"),
        (("1", "1"), (_half(), _half()), "noise level 0, no model has a weight in 50%"),
        (("1", "1"), (torch.zeros(1, 8, 8), torch.zeros(4, 4)), "in 100% of the picture"),
        # In a batch of six each of two masks meets each of three.
        (
            ("1", "1"),
            (
                torch.stack([_half()[0], 0 * _half()[0]]),
                torch.ones(3, 8, 8) * torch.tensor([1, 1, 0]).reshape(3, 1, 1),
            ),
            "no model has a weight in",
        ),
    ],
)
def test_a_part_of_the_picture_without_a_model_is_refused_before_anything_runs(
    weights: tuple[str, str], masks: tuple[Tensor | None, Tensor | None], reason: str
) -> None:
    models = [to_mix(one, mask=mask) for one, mask in zip(weights, masks, strict=True)]
    with pytest.raises(HddmError, match=f"masks: .*{reason}"):
        check(models, strategy_of("mix", 0.5))


@pytest.mark.parametrize("masks", [(_half(), None), (_half(), _half("right")), (None, _half())])
def test_masks_that_leave_nothing_out_are_taken(masks: tuple[Tensor | None, ...]) -> None:
    models = [to_mix("1", mask=masks[0]), to_mix("0.5: 2, 0.3: 0.1", mask=masks[1])]
    check(models, strategy_of("mix", 0.5))


@pytest.mark.parametrize("frames", [(), (3,)])
def test_a_mask_counts_for_all_channels_and_frames(frames: tuple[int, ...]) -> None:
    models = [to_mix(mask=_half()), to_mix()]
    noise = torch.randn(2, 4, *frames, 8, 8)
    maps = maps_beside(models, noise)
    assert maps is not None
    first, second = maps.expand(2, *noise.shape)
    assert first[..., :4].eq(1).all()
    assert first[..., 4:].eq(0).all()
    assert torch.equal(second, 1 - first)
    assert maps_beside([to_mix(), to_mix()], noise) is None


@pytest.mark.parametrize(
    ("mask", "shape", "reason"),
    [
        (_half(), (1, 64, 256), "have 3 axes, so they are no pictures"),
        (_half().repeat(5, 1, 1), (1, 4, 5, 8, 8), "has 5 masks, and latents are a video"),
    ],
)
def test_masks_without_a_place_in_the_latents_are_refused_in_one_line(
    mask: Tensor, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(HddmError, match=f"masks: .*{reason}") as error:
        maps_beside([to_mix(mask=mask), to_mix()], torch.randn(shape))
    assert "\n" not in str(error.value)
    assert maps_beside([to_mix(), to_mix()], torch.randn(shape)) is None


def test_an_ensemble_may_be_another_model_than_the_first() -> None:
    check([to_mix(), to_mix(model=patcher(wrappers={"sampler_sample": {BEGIN: [print]}}))], WHOLE)


@pytest.mark.parametrize(
    ("second", "way", "reason"),
    [
        ({"weight": "1: 1, 0: 0.5"}, "draw", "one number each"),
        ({"mask": torch.ones(1, 8, 8)}, "draw", "masks need the way 'mix'"),
        ({"mask": torch.ones(1, 8, 8)}, "commit", "masks need the way 'mix'"),
        ({"negative": []}, "mix", "needs a positive"),
        ({"positive": []}, "mix", "connect its negative as well"),
        ({"model": patcher(HalfNoise())}, "mix", "it cannot be mixed"),
        (
            {"model": patcher(model_options={"sampler_cfg_function": print})},
            "mix",
            "behind Mix Models",
        ),
        (
            {"model": patcher(wrappers={"outer_sample": {"other": [print]}})},
            "mix",
            "behind Mix Models",
        ),
        ({"model": patcher(wrappers={"outer_sample": {"hddm": [print]}})}, "mix", "is a mix"),
        (
            {"model": patcher(model_options={"context_handler": print})},
            "mix",
            "has context windows, which a mix of models does not support",
        ),
    ],
)
def test_models_that_do_not_go_together_are_refused_in_one_line(
    second: dict[str, Any], way: str, reason: str
) -> None:
    with pytest.raises(HddmError, match=reason) as error:
        check([to_mix(), to_mix(**second)], strategy_of(way, 0.5))
    assert "\n" not in str(error.value)


def test_other_latents_are_refused_with_both_names() -> None:
    sdxl = type("SDXL", (), {"scale_factor": 0.13025, "latent_channels": 4})()
    other = patcher(model=SimpleNamespace(latent_format=sdxl))
    with pytest.raises(
        HddmError, match=r"SD15 \(4 .*0\.18215\), and model 2 SDXL \(4 .*0\.13025\)"
    ):
        check([to_mix(), to_mix(model=other)], strategy_of("mix", 0.5))


def test_a_model_of_cfg_1_needs_no_negative() -> None:
    check([to_mix(), to_mix(positive=[], cfg=1.0)], strategy_of("mix", 0.5))


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_a_node_takes_exactly_the_inputs_that_it_declares(name: str) -> None:
    node = NODE_CLASS_MAPPINGS[name]
    declared = node.INPUT_TYPES()
    function = inspect.signature(getattr(node, node.FUNCTION))
    taken = {key: one.default for key, one in function.parameters.items() if key != "self"}
    assert set(taken) == {*declared["required"], *declared.get("optional", {})}
    for key, default in taken.items():
        assert (default is inspect.Parameter.empty) == (key in declared["required"])
    for inputs in declared.values():
        assert all("tooltip" in options for _, options in inputs.values())
    assert name in NODE_DISPLAY_NAME_MAPPINGS
    assert node.CATEGORY == "hddm"


@pytest.mark.integration
def test_the_copied_folder_brings_its_own_hddm_and_does_not_import_diffusers(tmp_path: Any) -> None:
    build(tmp_path / "hddm-nodes")
    script = """
import importlib.util, sys
from pathlib import Path
sys.path[:] = [one for one in sys.path if not (Path(one or ".") / "hddm" / "velocity.py").is_file()]
pack = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location(
    "pack", pack / "__init__.py", submodule_search_locations=[str(pack)]
)
module = importlib.util.module_from_spec(spec)
sys.modules["pack"] = module
spec.loader.exec_module(module)
import hddm
assert Path(hddm.__file__).is_relative_to(pack), hddm.__file__
assert "diffusers" not in sys.modules
assert "transformers" not in sys.modules
print(sorted(module.NODE_CLASS_MAPPINGS))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "hddm-nodes")]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "HDDMMixModels" in found.stdout


def test_a_pack_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    out = tmp_path / "custom_nodes" / "hddm-nodes"
    build(out)
    (out / "vendor" / "hddm" / "former.py").touch()
    build(out)
    assert not (out / "vendor" / "hddm" / "former.py").exists()
    assert (out / "vendor" / "hddm" / "conversion.py").exists()
    assert [one.name for one in out.parent.iterdir()] == ["hddm-nodes"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").touch()
    with pytest.raises(SystemExit, match="is no older pack; name a new folder"):
        build(other)
    assert (other / "mine.txt").exists()
