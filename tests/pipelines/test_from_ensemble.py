"""Pipelines of ensembles in memory: the same samples, and a folder where one can hold them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hddm
from hddm.ensemble import Part
from hddm.experts.assembly import assemble
from hddm.networks.folders import WEIGHTS
from hddm.networks.transformers import ExpertTransformer
from hddm.networks.wrappers import NetworkWrapper
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.routers import Router
from hddm.schedules import CosineSchedule, LinearSchedule, Schedule, from_diffusers
from hddm.training.fitting import calibrate
from hddm.utils.files import read_json
from hddm.velocity import Guidance
from tests.artefacts import refusal
from tests.cases import in_parts
from tests.checkpoint_files import plain_unet, randomised
from tests.conftest import Trio
from tests.ensemble_files import (
    FLOW,
    flow_expert,
    load_ensemble,
    load_pipeline,
    random_router,
    write_ensemble,
    write_text,
)

STEPS = 4
LABELS = torch.tensor([0, 1, 2, 0, 1])
SHAPE = (3, 4, 4)
SCHEDULE = {"_class_name": "DDPMScheduler", "beta_schedule": "linear", "num_train_timesteps": 100}


class Own(nn.Module):
    """A network that hddm has never seen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mix = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        mixed: Tensor = self.mix(x) * torch.cos(timestep)[:, None, None, None]
        return mixed


def _plain(x: Tensor, timestep: Tensor) -> Tensor:
    return x.tanh() - timestep[:, None, None, None] * x


def _left(x_t: Tensor, t: Tensor) -> Tensor:
    left = x_t.mean((1, 2, 3)).sigmoid()
    return torch.stack([left, 1 - left], 1)


def _pipeline(model: Any, **parts: Any) -> HDDMPipeline:
    pipe = HDDMPipeline.from_ensemble(model, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _made(pipe: HDDMPipeline, labels: Tensor | None = None, **options: Any) -> Tensor:
    given = {"seed": 3, "num_inference_steps": STEPS, "output_type": "latent", **options}
    conditions = {} if labels is None else {"class_labels": labels}
    return pipe(batch_size=5, conditions=conditions, **given).images


def _sampled(model: Any, labels: Tensor | None = None, **options: Any) -> Tensor:
    conditions = {} if labels is None else {"class_labels": labels}
    return hddm.sample(model, 5, 3, STEPS, **conditions, **options)


def _by_hand(prior: list[float] | None = None) -> hddm.Ensemble:
    """Two experts of unlike networks, schedules and predictions, all of which a folder holds."""
    unet = randomised(plain_unet(0, in_channels=3, out_channels=3, sample_size=4), 1)
    flow = randomised(ExpertTransformer(**FLOW | {"num_classes": 3}), 2)
    ddpm = hddm.VelocityField(
        NetworkWrapper(unet, round_time=True), from_diffusers(SCHEDULE), "epsilon", conditions=(), shift=2.0
    )
    images = torch.randn(16, *SHAPE, generator=torch.Generator().manual_seed(0))
    cosine = hddm.VelocityField(
        flow,
        CosineSchedule(),
        "v_prediction",
        time_scale=500.0,
        null_conditions={"class_labels": torch.tensor(3)},
        classes=("a", "b", "c"),
        shift=2.0,
    )
    cosine.calibration = calibrate(cosine.velocity, images)
    router, _ = random_router(2)
    routed = Router(router, temperatures=(1.0, 2.0), outputs=(1, 0))
    return hddm.Ensemble([ddpm, cosine], routed, "nucleus-0.8", prior, shift=3.0)


@pytest.mark.parametrize("strategy", ["top-1", "full", "draw"])
def test_own_networks_and_functions_make_the_samples_of_sample(strategy: str) -> None:
    fields = [
        hddm.VelocityField(Own(0), CosineSchedule(), "epsilon", sample_shape=SHAPE),
        hddm.VelocityField(_plain, LinearSchedule(), "flow_prediction"),
    ]
    ensemble = hddm.Ensemble(fields, _left, strategy, [0.3, 0.7], shift=2.0)
    pipe = _pipeline(ensemble)
    assert torch.equal(_made(pipe), _sampled(ensemble))
    images = pipe(seed=0, num_inference_steps=2, output_type="np").images
    assert images.shape == (1, 4, 4, 3)
    assert torch.equal(_made(HDDMPipeline(**pipe.components)), _sampled(ensemble))
    # What is set on the pipeline stays there.
    pipe.ensemble.strategy = "full"
    assert ensemble.strategy == strategy


def test_a_single_field_makes_the_samples_of_sample() -> None:
    field = hddm.VelocityField(Own(0), CosineSchedule(), "epsilon", sample_shape=SHAPE, shift=2.0)
    assert torch.equal(_made(_pipeline(field)), _sampled(field))


def test_networks_are_shared_and_move_along() -> None:
    own, router = Own(0), Router(Own(1), outputs=(0,))
    pipe = _pipeline(
        hddm.Ensemble([hddm.VelocityField(own, LinearSchedule(), "sample", sample_shape=SHAPE)], router)
    )
    pipe.to(torch.float64)
    assert own.mix.weight.dtype == pipe.dtype == torch.float64
    assert router.network.mix.weight.dtype == torch.float64
    for offload in (pipe.enable_model_cpu_offload, pipe.enable_sequential_cpu_offload):
        assert "an expert was built in memory" in refusal(offload, device="cpu")


def test_a_prior_that_was_set_later_is_saved(tmp_path: Path) -> None:
    ensemble = _by_hand([0.1, 0.9])
    ensemble.prior = torch.tensor([0.3, 0.7], dtype=torch.float64)
    _pipeline(ensemble).save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(load_ensemble(tmp_path / "saved").prior, ensemble.prior)


def test_an_ensemble_by_hand_is_saved_and_comes_back(tmp_path: Path) -> None:
    """Weights bit for bit; on some CPUs samples are rounded by where in memory these lie."""
    ensemble = _by_hand([0.1, 0.9])
    pipe = _pipeline(ensemble)
    expected = _sampled(ensemble, LABELS)
    assert torch.equal(_made(pipe, LABELS), expected)
    pipe.save_pretrained(tmp_path / "saved")
    for model in (load_ensemble(tmp_path / "saved"), load_pipeline(tmp_path / "saved").ensemble):
        torch.testing.assert_close(_sampled(model, LABELS), expected, rtol=1e-4, atol=1e-4)
        guided = {"guidance_scale": 3.0, "strategy": "full"}
        found, wanted = (_sampled(one, LABELS, **guided) for one in (model, ensemble))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(model.prior, ensemble.prior)
        assert (model.shift, model.strategy) == (3.0, "nucleus-0.8")
    for k, field in enumerate(ensemble.experts):
        saved = load_file(tmp_path / "saved" / "experts" / str(k) / WEIGHTS)
        held = getattr(field.network, "model", field.network).state_dict()
        assert all(torch.equal(saved[name], held[name]) for name in saved)
    record = read_json(tmp_path / "saved" / "experts" / "0" / "expert.json")
    assert record["schedule_source"] == "set in Python"
    assert (record["round_time"], record["objective"], record["weights"]) == (True, "ddpm", "unstated")
    assert [one["output"] for one in read_json(tmp_path / "saved" / "ensemble.json")["experts"]] == [1, 0]


def test_a_loaded_ensemble_keeps_its_records(trio: Trio, tmp_path: Path) -> None:
    assemble(trio.experts, tmp_path / "ensemble", trio.router, "nucleus-0.9")
    ensemble, labels = load_ensemble(tmp_path / "ensemble"), LABELS % 2
    pipe = _pipeline(ensemble)
    pipe.save_pretrained(tmp_path / "saved")
    saved = load_ensemble(tmp_path / "saved")
    for options in ({}, {"strategy": "draw"}, {"guidance_scale": 2.0}):
        assert torch.equal(_made(pipe, labels, **options), _sampled(ensemble, labels, **options))
        assert torch.equal(_sampled(saved, labels, **options), _sampled(ensemble, labels, **options))
    for part in ("experts/0/expert.json", "experts/2/expert.json", "router/router.json", "ensemble.json"):
        assert read_json(tmp_path / "saved" / part) == read_json(tmp_path / "ensemble" / part)


def test_an_expert_that_was_loaded_alone_keeps_its_weaker_self(class_expert: Path, tmp_path: Path) -> None:
    one, labels = hddm.load(class_expert), LABELS % 2
    pipe = _pipeline(one)
    pipe.save_pretrained(tmp_path / "saved")
    guided = {"guidance_scale": Guidance(2.0, by="weak")}
    expected = _sampled(one, labels, **guided)
    assert torch.equal(_made(pipe, labels, **guided), expected)
    assert torch.equal(_sampled(load_ensemble(tmp_path / "saved"), labels, **guided), expected)
    names = ("weak.safetensors", "expert.json")
    assert all(
        (tmp_path / "saved" / "experts" / "0" / name).read_bytes() == (class_expert / name).read_bytes()
        for name in names
    )


def test_a_weaker_self_in_memory_keeps_its_precision(tmp_path: Path) -> None:
    networks = [randomised(ExpertTransformer(**FLOW), seed) for seed in (0, 1)]
    field, field.weak = (hddm.VelocityField(one, LinearSchedule(), "sample") for one in networks)
    guided = {"guidance_scale": Guidance(2.0, by="weak")}
    expected = _sampled(field, **guided)
    _pipeline(field).save_pretrained(tmp_path / "saved")
    assert torch.equal(_sampled(load_ensemble(tmp_path / "saved"), **guided), expected)


def test_what_was_changed_on_a_loaded_field_is_what_is_saved(tmp_path: Path) -> None:
    facts = {"licence": "MIT", "shift": 2.0}
    folder = write_ensemble(tmp_path / "made", [flow_expert(k, facts, num_classes=3) for k in range(2)])
    ensemble = load_ensemble(folder)
    for field in ensemble.experts:
        field.time_scale, field.schedule = 900.0, CosineSchedule()
        field.null_conditions = {}
    pipe = _pipeline(ensemble)
    made = _made(pipe, LABELS)
    ensemble.experts[0].time_scale = 1.0
    assert torch.equal(_made(pipe, LABELS), made)
    pipe.save_pretrained(tmp_path / "saved")
    assert torch.equal(_sampled(load_ensemble(tmp_path / "saved"), LABELS), made)
    record = read_json(tmp_path / "saved" / "experts" / "1" / "expert.json")
    assert (record["licence"], record["time_scale"], record["null_class"]) == ("MIT", 900.0, None)
    assert (record["schedule"], record["schedule_source"]) == ({"name": "cosine"}, "set in Python")


def test_networks_that_were_exchanged_are_those_that_are_saved(tmp_path: Path) -> None:
    facts = {"licence": "MIT"}
    folder = write_ensemble(tmp_path / "made", [flow_expert(k, facts, num_classes=3) for k in range(3)])
    ensemble = load_ensemble(folder)
    first, second, third = ensemble.experts
    first.network, second.network = second.network, first.network
    third.network = flow_expert(7, num_classes=3).network
    made = _sampled(ensemble, LABELS, strategy="full")
    _pipeline(ensemble).save_pretrained(tmp_path / "saved")
    assert torch.equal(_sampled(load_ensemble(tmp_path / "saved"), LABELS, strategy="full"), made)
    # Nobody knows whose licence holds now.
    records = [read_json(tmp_path / "saved" / "experts" / str(k) / "expert.json") for k in range(3)]
    assert [record["licence"] for record in records] == [None] * 3


def test_latents_are_decoded_by_the_vae_and_prompts_encoded(tmp_path: Path) -> None:
    whole = load_pipeline(write_text(tmp_path))
    parts = {name: getattr(whole, name) for name in ("vae", "text_encoder", "tokenizer")}
    pipe = _pipeline(whole.ensemble, **parts)
    given = {"prompt": ["a cat", "a dog"], "seed": 0, "num_inference_steps": 2, "guidance_scale": 3.0}
    assert torch.equal(pipe(**given, output_type="pt").images, whole(**given, output_type="pt").images)
    pipe.save_pretrained(tmp_path / "saved")
    again = load_pipeline(tmp_path / "saved")
    assert torch.equal(again(**given, output_type="pt").images, whole(**given, output_type="pt").images)


class OwnSchedule(CosineSchedule):
    """Takes another's record for its own."""


def _field(network: Any = None, schedule: Schedule | None = None, **options: Any) -> hddm.VelocityField:
    network = network or ExpertTransformer(**FLOW)
    return hddm.VelocityField(
        network, schedule or LinearSchedule(), "v_prediction", **{"sample_shape": SHAPE, **options}
    )


def _broken() -> nn.Module:
    network = ExpertTransformer(**FLOW)
    next(network.parameters()).data[..., 0] = float("nan")
    return network


def _injected() -> nn.Module:
    network = ExpertTransformer(**FLOW)
    network.extra = nn.Linear(2, 2)
    return network


UNSTORABLE: dict[str, tuple[Callable[[], hddm.VelocityField], str]] = {
    "class": (
        lambda: _field(Own(0)),
        "its network is a Own, and a folder holds one of ExpertTransformer, DiT",
    ),
    "function": (lambda: _field(_plain), "its network is _plain, and a folder holds one of"),
    "changed": (lambda: _field(_injected()), "its network was changed.*left over extra.bias"),
    "nan": (lambda: _field(_broken()), "holds NaN or Inf; get the weights again"),
    "schedule": (
        lambda: _field(schedule=OwnSchedule()),
        r"schedule=\('OwnSchedule', .*, and a folder would hold \('CosineSchedule'",
    ),
    "conditions": (
        lambda: _field(conditions=("caption",)),
        r"conditions=\['caption'\], and a folder would hold \(\)",
    ),
    "shape": (
        lambda: _field(sample_shape=(3, 8, 8)),
        r"samples=\(3, 8, 8\), and a folder would hold \(3, 4, 4\)",
    ),
    "nulls": (
        lambda: _field(null_conditions={"caption": torch.zeros(1)}),
        r"null_conditions=\{'caption': \[0.0\]\}, and a folder would hold \{\}",
    ),
    "weak": (
        lambda: _field(weak=_field(time_scale=2.0)),
        "the weak model's time_scale=2.0, and a folder would hold 1.0",
    ),
    "weak class": (lambda: _field(weak=_field(Own(0))), "its network is a Own"),
}


@pytest.mark.parametrize(("make", "words"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_what_a_folder_cannot_hold_is_refused_by_the_experts_number(
    make: Callable[[], hddm.VelocityField], words: str, tmp_path: Path
) -> None:
    field = make()
    shape = field.sample_shape
    first = _field(ExpertTransformer(**FLOW | {"sample_size": shape[1]}), sample_shape=shape)
    pipe = _pipeline(hddm.Ensemble([first, field], strategy="draw"))
    message = refusal(pipe.save_pretrained, tmp_path / "saved")
    assert message.startswith("expert 1: ")
    assert re.search(words, message)
    assert list(tmp_path.iterdir()) == []


def test_a_router_of_ones_own_cannot_be_saved(tmp_path: Path) -> None:
    pipe = _pipeline(hddm.Ensemble([_field(), _field()], _left))
    words = refusal(pipe.save_pretrained, tmp_path / "saved")
    assert words == "the router is _left, and a folder holds a RouterTransformer"
    assert list(tmp_path.iterdir()) == []


def test_experts_of_unlike_classes_are_saved_and_asked_by_name(tmp_path: Path) -> None:
    experts = [
        _field(ExpertTransformer(**FLOW | {"num_classes": 2}), classes=names) for names in ("ab", "ca")
    ]
    ensemble = hddm.Ensemble(in_parts(experts, None, [[1, 3], [1, 0], [0, 1]]), strategy="draw")
    _pipeline(ensemble).save_pretrained(tmp_path / "saved")
    loaded = load_ensemble(tmp_path / "saved")
    assert loaded.classes == ("a", "b", "c")
    given = {"class_labels": torch.tensor([0, 1, 2])}
    assert torch.equal(loaded.prior_of(3, given), ensemble.prior_of(3, given))


def test_samples_of_unknown_shape_and_other_objects_are_refused() -> None:
    nowhere = hddm.VelocityField(_plain, LinearSchedule(), "flow_prediction")
    assert "pass sample_shape=(C, H, W) to VelocityField" in refusal(HDDMPipeline.from_ensemble, nowhere)
    flat = hddm.VelocityField(_plain, LinearSchedule(), "flow_prediction", sample_shape=(2,))
    assert "the experts state (2,)" in refusal(HDDMPipeline.from_ensemble, flat)
    fields = [hddm.VelocityField(_plain, LinearSchedule(), "flow_prediction", sample_shape=(1, 2, 2))] * 2
    two = hddm.Ensemble([Part(one, vae=vae) for one, vae in zip(fields, "ab", strict=True)], strategy="draw")
    assert "kinds (expert 0 VAE 1, expert 1 VAE 2)" in refusal(HDDMPipeline.from_ensemble, two)
    assert "not of a Own" in refusal(HDDMPipeline.from_ensemble, Own(0))
