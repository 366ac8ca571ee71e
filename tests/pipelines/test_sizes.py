"""Pictures of another size than that of the experts' training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image

import hddm as library
from hddm.ensemble import Ensemble
from hddm.experts.assembly import assemble
from hddm.networks.families import families
from hddm.networks.sample_sizes import SampleSizes
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.reliability import ReliabilityRouter
from hddm.schedules import LinearSchedule
from hddm.utils.errors import HddmError
from hddm.velocity import PredictionType, VelocityField
from tests.artefacts import Command, refusal
from tests.checkpoint_files import conditions_of, converted, dit, pixart, plain_unet, randomised
from tests.conftest import Trio
from tests.flow_models import chroma, flux, sd3, text
from tests.ldm_files import tiny_pipeline


@pytest.mark.parametrize(
    ("sizes", "wanted", "nearest"),
    [
        (SampleSizes(), (5, 7), [(5, 7)]),
        (SampleSizes(4), (8, 12), [(8, 12)]),
        (SampleSizes(4), (9, 12), [(8, 12), (12, 12)]),
        (SampleSizes(4), (1, 1), [(4, 4)]),
        (SampleSizes(2, most=16), (20, 10), [(16, 10)]),
        (SampleSizes(2, is_square=True), (6, 8), [(6, 6)]),
        (SampleSizes(2, is_square=True), (7, 7), [(6, 6), (8, 8)]),
        (SampleSizes(2, is_square=True), (8, 8), [(8, 8)]),
    ],
)
def test_the_nearest_sizes_are_those_that_work(
    sizes: SampleSizes, wanted: tuple[int, int], nearest: list[tuple[int, int]]
) -> None:
    assert list(sizes.nearest(wanted)) == nearest
    for one in nearest:
        assert sizes.nearest(one) == (one,)


NETWORKS: dict[str, Any] = {
    "UNet2DModel": plain_unet,
    "DiTTransformer2DModel": dit,
    "PixArtTransformer2DModel": pixart,
    "SD3Transformer2DModel": sd3,
    "FluxTransformer2DModel": flux,
    "ChromaTransformer2DModel": chroma,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_takes_the_sizes_that_its_family_says(name: str) -> None:
    """Run at the sizes around its own, of which each is taken by the network or refused by the family."""
    network, family = NETWORKS[name](), families()[name]
    sizes = family.sizes(network.config)
    assert sizes is not None
    own = network.config.get("sample_size", 8)
    noise = torch.Generator().manual_seed(0)
    is_flow = "joint_attention_dim" in network.config
    given = text(network, 1) if is_flow else conditions_of(network)
    taken = 0
    for height, width in [(own, own + 2), (own + 2, own + 2), (own + 4, own), (own + 8, own + 8)]:
        if sizes.nearest((height, width)) != ((height, width),):
            continue
        x = torch.randn(1, family.channels(network.config), height, width, generator=noise)
        with torch.no_grad():
            out = family.call(network.eval(), x, torch.tensor([500.0]), given)
        assert out.shape[2:] == x.shape[2:]
        taken += 1
    assert taken


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> tuple[StableDiffusionXLPipeline, Path]:
    folder = tmp_path_factory.mktemp("xl")
    stock = tiny_pipeline(folder, "XL")
    library.convert(folder / "pipeline", folder / "expert")
    return stock, folder / "expert"


def test_sizes_reach_the_conditions_of_xl_and_its_pictures(
    xl: tuple[StableDiffusionXLPipeline, Path],
) -> None:
    """One step of Euler's method from t = 1 is one call of the network with the size's own time_ids."""
    stock, expert = xl
    pipe = HDDMPipeline.from_pretrained(expert)
    height, width = 48, 80
    sized = pipe.at_size(height, width)
    field = sized.ensemble.experts[0]
    assert field.sample_shape == (4, height // 8, width // 8)
    expected = [height, width, 0, 0, height, width]
    assert field.null_conditions["time_ids"].tolist() == expected
    given = pipe.encode("cat").given
    x = torch.randn(1, 4, height // 8, width // 8, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0.5])
    own = field.velocity(x, t, **given)
    ids = torch.tensor([expected], dtype=torch.float32)
    by_hand = pipe.ensemble.experts[0].velocity(x, t, **given, time_ids=ids)
    torch.testing.assert_close(own, by_hand)
    (picture,) = pipe("cat", height=height, width=width, num_inference_steps=2, seed=0).images
    assert picture.size == (width, height)
    # The pipeline itself keeps its size.
    assert pipe("cat", num_inference_steps=1, seed=0).images[0].size == pipe.image_size[::-1]
    for wrong, said in (
        (
            {"height": 50, "width": 80},
            "`height` 50: the VAE makes multiples of 8 pixels; the nearest are 48 and 56",
        ),
        ({"height": 48}, "`width`: is missing; a size is both"),
        ({"height": 40000, "width": 40000}, "the nearest are 32768×32768"),
    ):
        assert said in refusal(pipe, "cat", **wrong)
    assert stock.unet.config.sample_size == 8


@pytest.mark.integration
def test_the_command_makes_pictures_of_a_size_and_records_it(
    xl: tuple[StableDiffusionXLPipeline, Path], hddm: Command, tmp_path: Path
) -> None:
    options = ("--prompt", "cat", "--num-images", 2, "--steps", 2, "--height", 48, "--width", 80)
    out = tmp_path / "out"
    code, _, error = hddm("sample", xl[1], "--out", out, *options, "--grid")
    assert code == 0, error
    assert Image.open(out / "00001.png").size == (80, 48)
    assert "Size: 80x48" in Image.open(out / "00001.png").text["parameters"]
    record = json.loads((out / "sampling.json").read_text())
    assert (record["height"], record["width"]) == (48, 80)
    # A picture to begin with is brought to the size.
    Image.new("RGB", (200, 100), "red").save(tmp_path / "red.png")
    begin = ("--init-image", tmp_path / "red.png", "--strength", 0.5)
    code, _, error = hddm("sample", xl[1], "--out", tmp_path / "edited", *options, *begin)
    assert code == 0, error
    assert Image.open(tmp_path / "edited/00000.png").size == (80, 48)


def test_experts_of_one_size_alone_say_so(trio: Trio) -> None:
    model = library.load(trio.experts[0])
    error = refusal(library.sample, model, 1, shape=(1, 12, 12), steps=1)
    assert "expert 0: its network takes 4×4 alone, not 12×12" in error
    # Their own size is no change.
    assert library.sample(model, 1, shape=(1, 4, 4), steps=1).shape == (1, 1, 4, 4)


@pytest.mark.slow
def test_a_router_and_calibrations_are_of_one_size(tmp_path: Path, hddm: Command) -> None:
    experts = []
    for seed in (0, 1):
        network = randomised(plain_unet(seed), seed)
        network.save_pretrained(tmp_path / f"net{seed}")
        scheduler = {"_class_name": "DDPMScheduler", "prediction_type": "epsilon"}
        (tmp_path / f"net{seed}/scheduler_config.json").write_text(json.dumps(scheduler))
        converted(hddm, tmp_path / f"net{seed}", tmp_path / f"expert{seed}")
        sizes = ("--num-images", 16, "--steps", 2)
        code, _, error = hddm("calibrate", tmp_path / f"expert{seed}", *sizes)
        assert code == 0, error
        experts.append(tmp_path / f"expert{seed}")
    assemble(experts, tmp_path / "both", router="moments", strategy="full")
    pair = library.load(tmp_path / "both")
    channels, side, _ = pair.sample_shape
    shape = (channels, side * 2, side * 4)
    with pytest.warns(
        UserWarning, match="calibration is of one size alone: those of expert 0, 1 are"
    ):
        found = library.sample(pair, 2, shape=shape, strategy="draw", steps=2)
    assert found.shape == (2, *shape)
    with (
        pytest.warns(UserWarning, match="calibration"),
        pytest.raises(
            HddmError, match="needs a router and this one sees samples of its own size alone"
        ),
    ):
        library.sample(pair, 2, shape=shape, steps=2)


def _field_of_any_size(seed: int) -> VelocityField:
    network = randomised(plain_unet(seed), seed)
    return VelocityField(
        network,
        schedule=LinearSchedule(),
        prediction_type=PredictionType.FLOW_PREDICTION,
        time_scale=1000,
        sample_shape=(3, 8, 8),
    )


def test_weights_by_noise_level_hold_at_other_sizes_unless_a_router_is_below_them() -> None:
    fields = [_field_of_any_size(seed) for seed in range(2)]
    times, weights = [0.0, 1.0], [[1.0, 0.0], [0.25, 0.75]]
    shape = (3, 12, 8)
    alone = Ensemble(fields, ReliabilityRouter(times, weights), "full")
    found = library.sample(alone, 2, shape=shape, steps=2)
    x, t = torch.randn(2, *shape), torch.tensor([0.3, 0.9])
    mixed = alone.at_sizes([shape[1:]] * 2, [1] * 2).velocity(x, t)
    factors = ReliabilityRouter(times, weights).factors(t).float()[:, :, None, None, None]
    each = torch.stack([one.at_size(shape[1:]).velocity(x, t) for one in fields], 1)
    torch.testing.assert_close(mixed, (factors * each).sum(1))
    assert found.shape == (2, *shape)
    routed = ReliabilityRouter(times, weights, lambda x, t: torch.full((len(x), 2), 0.5))
    with pytest.raises(HddmError, match="sees samples of its own size alone"):
        library.sample(Ensemble(fields, routed, "full"), 2, shape=shape, steps=2)
