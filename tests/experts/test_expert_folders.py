"""Expert and router folders: loaded as they were saved, bit for bit, or refused by name."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hddm
from hddm.calibration import Calibration, Moments
from hddm.calibration_records import FILE_NAME
from hddm.data.images import to_unit_range
from hddm.experts.assembly import assemble
from hddm.experts.ensemble_records import Member
from hddm.experts.expert import Expert, read_experts
from hddm.experts.expert_folders import (
    field_of,
    null_conditions,
    open_expert,
    save_expert,
    unread_as,
)
from hddm.experts.record_folders import read_router, save_router
from hddm.experts.records import WEAK_FILE, read_expert_record
from hddm.experts.verify import verify_expert
from hddm.guidance import Guidance
from hddm.networks.offload import Offload
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.schedules import CosineSchedule, LinearSchedule, Schedule, from_diffusers
from hddm.utils.records import WEIGHTS
from hddm.velocity import VelocityField
from tests.artefacts import copied, edit_json, load_images, refusal
from tests.ensemble_files import flow_expert as new_expert
from tests.ensemble_files import load_ensemble, random_router, saved

SHAPE = (1, 4, 4)
TIMES = torch.tensor([0.0, 0.03, 0.5, 0.97, 1.0])
X = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(3))
SCHEDULES: dict[str, Schedule] = {
    "linear": LinearSchedule(),
    "cosine": CosineSchedule(),
    "discrete": from_diffusers({"beta_schedule": "scaled_linear"}),
}


def test_the_record_of_an_expert_is_read_without_its_network(tmp_path: Path) -> None:
    made = new_expert(1, num_classes=3)
    save_expert(tmp_path, made)
    (tmp_path / "config.json").unlink()
    (read,) = read_experts([tmp_path], [Member(folder="", classes=("x", "y", "z"))])
    assert (read.record, read.opened, read.name) == (made.record, None, str(tmp_path))
    assert (made.classes, read.classes) == (made.record.classes, ("x", "y", "z"))
    assert "config.json" in refusal(open_expert, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("calibrated", [False, True], ids=["raw", "calibrated"])
@pytest.mark.parametrize(
    ("schedule", "prediction_type"),
    [("linear", "flow_prediction"), ("cosine", "epsilon"), ("discrete", "v_prediction")],
)
def test_a_loaded_expert_has_the_velocity_that_was_saved(
    schedule: str, prediction_type: str, calibrated: bool, images: Path, tmp_path: Path
) -> None:
    facts = {
        "prediction_type": prediction_type,
        "schedule": SCHEDULES[schedule].config,
        "time_scale": 321.0,
        "classes": ("a", "b", "c"),
    }
    expert = new_expert(1, facts, in_channels=1, num_classes=3)
    if calibrated:
        moments, times = (
            Moments.of(to_unit_range(load_images(images).pixels)),
            torch.linspace(0, 1, 7),
        )
        expert = replace(
            expert, calibration=Calibration(moments, times, torch.rand(7, len(moments.variances)))
        )
    before = VelocityField(
        expert.network,
        SCHEDULES[schedule],
        prediction_type,
        321.0,
        expert.calibration,
        conditions=("class_labels",),
        null_conditions=null_conditions(3),
    )
    save_expert(tmp_path, expert)
    after = hddm.load(tmp_path)
    assert isinstance(after, VelocityField)
    labels = torch.tensor([0, 1, 2, 3, 0])
    for scale in (1.0, 2.5):
        v = before.velocity(X, TIMES, scale, class_labels=labels)
        assert torch.equal(after.velocity(X, TIMES, scale, class_labels=labels), v)
        assert v.isfinite().all()
    assert torch.equal(after.velocity(X, TIMES), before.velocity(X, TIMES))
    assert (after.classes, after.sample_shape) == (("a", "b", "c"), SHAPE)
    assert open_expert(tmp_path).read().record == expert.record


def test_a_loaded_router_has_the_logits_that_were_saved(tmp_path: Path) -> None:
    network, facts = random_router(2, SHAPE)
    save_router(tmp_path, network, facts)
    again, facts_again = read_router(tmp_path)
    assert torch.equal(again(X, 1000 * TIMES), network(X, 1000 * TIMES))
    assert facts_again == facts


def test_an_expert_loads_in_the_dtype_that_is_asked_for(flow_expert: Path) -> None:
    single, double = hddm.load(flow_expert), hddm.load(flow_expert, dtype=torch.float64)
    with torch.no_grad():
        v = double.velocity(X.double(), TIMES.double())
        assert v.dtype == torch.float64
        torch.testing.assert_close(single.velocity(X, TIMES).double(), v, rtol=1e-4, atol=1e-5)
        assert not torch.equal(single.velocity(X, TIMES).double(), v)
    assert hddm.load(flow_expert, dtype="float16").dtype == torch.float16
    assert "choose one of auto, float32" in refusal(hddm.load, flow_expert, dtype="fp16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_one_line(flow_expert: Path, ensemble: Path) -> None:
    for folder in (flow_expert, ensemble):
        message = refusal(hddm.load, folder, device="cuda")
        assert message.startswith("`device` cuda: is not available here")


def test_a_folder_is_sampled_as_what_it_holds(flow_expert: Path, ensemble: Path) -> None:
    for folder in (flow_expert, str(ensemble)):
        assert torch.equal(
            hddm.sample(folder, 2, steps=1), hddm.sample(hddm.load(folder), 2, steps=1)
        )
    assert "there is no such folder" in refusal(hddm.sample, "nowhere", 2)


def test_what_loading_and_sampling_return_is_shown_in_a_short_line(
    flow_expert: Path, ensemble: Path
) -> None:
    field, mixed = hddm.load(flow_expert), hddm.load(ensemble)
    assert repr(field) == "<VelocityField of a network that predicts sample, samples (1, 4, 4)>"
    assert repr(mixed) == "<Ensemble of 2 experts, nucleus-0.9, a router, samples (1, 4, 4)>"
    assert repr(SCHEDULES["discrete"]) == "<DiscreteSchedule of 1000 scaled_linear betas>"
    made = HDDMPipeline.from_pretrained(ensemble)(num_inference_steps=1, output_type="latent")
    assert re.fullmatch(r"<ExpertUse, shares \[[0-9., ]+\]>", repr(made.expert_use))


def test_a_file_in_place_of_a_model_is_called_one(flow_expert: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.safetensors"
    checkpoint.write_bytes(b"")
    readers = (hddm.load, hddm.HDDMPipeline.from_pretrained, read_expert_record)
    for read in readers:
        message = refusal(read, checkpoint)
        assert "it is a file, and a model is a folder" in message
        assert message.endswith(
            f"hddm convert {checkpoint} --out EXPERT makes an expert of a checkpoint"
        )
        assert refusal(read, flow_expert / WEIGHTS).endswith(
            f"a model is a folder; name {flow_expert}"
        )


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "expert.json",
            {"objektive": "flow"},
            "unknown key 'objektive'; did you mean 'objective'?",
        ),
        ("expert.json", {"format": "3.0"}, "format 3.0 is newer than 2.0; upgrade"),
        ("expert.json", {"prediction_type": "noise"}, "key 'prediction_type' (is 'noise')"),
        ("expert.json", {"sample_shape": [3, 4, 4]}, "expert.json says sample_shape (3, 4, 4)"),
        ("expert.json", {"schedule": {"name": "line"}}, "'line'"),
        ("config.json", {"width": 3}, "has no key 'width'"),
        (
            "config.json",
            {"_class_name": "SanaTransformer2DModel"},
            "holds a SanaTransformer2DModel",
        ),
        ("config.json", None, "config.json: no such file"),
        (WEIGHTS, None, f"{WEIGHTS}: no such file"),
        ("expert.json", None, "neither an expert folder (expert.json) nor"),
        ("router/router.json", {"format": "2.0"}, "format 2.0 is newer"),
        ("router/config.json", {"num_expert": 2}, "did you mean 'num_experts'?"),
    ],
)
def test_a_folder_that_is_not_understood_is_refused(
    file: str,
    change: dict[str, object] | None,
    message: str,
    flow_expert: Path,
    router: Path,
    tmp_path: Path,
) -> None:
    path = copied(router if file.startswith("router/") else flow_expert, tmp_path) / Path(file).name
    if change is None:
        path.unlink()
    else:
        edit_json(path, **change)
    read = read_router if file.startswith("router/") else hddm.load
    assert message in refusal(read, path.parent)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        *(({"shard": {"images": images}}, "shard.images") for images in (0, "7", 2**60)),
        ({"time_scale": float("inf")}, "time_scale"),
        ({"null_class": 3}, "null_class 3"),
        ({"classes": ["a", "b", "c"], "shard": {"class_images": []}}, "classes 3"),
    ],
    ids=str,
)
def test_a_record_of_another_kind_or_beyond_its_bounds_is_refused(
    changes: dict[str, Any], key: str, class_expert: Path, tmp_path: Path
) -> None:
    folder = copied(class_expert, tmp_path)
    record = json.loads((folder / "expert.json").read_text())
    if "shard" in changes:
        changes = changes | {"shard": record["shard"] | changes["shard"]}
    edit_json(folder / "expert.json", **changes)
    (problem,) = verify_expert(folder).problems
    assert key in problem
    assert str(folder) in problem


def test_a_calibration_that_cannot_be_used_is_named(flow_expert: Path, tmp_path: Path) -> None:
    folder = copied(flow_expert, tmp_path)
    content = (folder / FILE_NAME).read_bytes()
    (folder / FILE_NAME).write_bytes(content[: len(content) // 2])
    assert str(folder / FILE_NAME) in refusal(hddm.load, folder)


def _with_weak(seed: int) -> Expert:
    expert = new_expert(seed, in_channels=1)
    weak = new_expert(seed + 10, in_channels=1).network
    return replace(expert, weak=unread_as(expert.network, weak.state_dict()))


@torch.no_grad()
def test_a_weaker_self_is_kept_in_bfloat16_and_guides(tmp_path: Path) -> None:
    expert = _with_weak(0)
    save_expert(tmp_path, expert)
    assert all(value.dtype == torch.bfloat16 for value in load_file(tmp_path / WEAK_FILE).values())
    rounded = {name: value.float() for name, value in load_file(tmp_path / WEAK_FILE).items()}
    weak = new_expert(0, in_channels=1)
    weak.network.load_state_dict(rounded)
    loaded = hddm.load(tmp_path)
    strong_v, weak_v = (
        field_of(one).velocity(X, TIMES) for one in (replace(expert, weak=None), weak)
    )
    found = loaded.velocity(X, TIMES, Guidance(3.0, by="weak"))
    torch.testing.assert_close(found, weak_v + 3 * (strong_v - weak_v))
    (tmp_path / WEAK_FILE).write_bytes((tmp_path / WEAK_FILE).read_bytes()[:-1] + b"\0")
    assert re.search(WEAK_FILE, refusal(hddm.load, tmp_path))


@torch.no_grad()
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_an_ensemble_keeps_the_weaker_self_of_each_expert(offload: Offload, tmp_path: Path) -> None:
    names = ("0", "1")
    for index, name in enumerate(names):
        saved(tmp_path / name, _with_weak(index))
    experts = [hddm.load(tmp_path / name) for name in names]
    assemble([tmp_path / name for name in names], tmp_path / "both", strategy="draw")
    pipeline = HDDMPipeline.from_pretrained(tmp_path / "both", offload=offload)
    pipeline.save_pretrained(tmp_path / "again")
    for folder in ("both", "again"):
        ensemble = load_ensemble(tmp_path / folder, offload=offload)
        for index, expert in enumerate(experts):
            given = {"guidance_scale": Guidance(2.0, by="weak")}
            chosen = torch.full((len(X),), index)
            found = ensemble.velocity(X, TIMES, expert=chosen, **given)
            torch.testing.assert_close(found, expert.velocity(X, TIMES, **given))
