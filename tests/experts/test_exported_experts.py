"""Experts whose networks are programs: opened by permission alone, and then used as any other."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import hddm
from hddm.experts.expert_folders import open_expert
from hddm.experts.verify import verify_expert
from hddm.networks.programs.archive import PROGRAM
from hddm.networks.programs.permission import programs_allowed
from hddm.training.calibrate import recalibrate
from hddm.utils.errors import HddmError
from hddm.utils.hub import HubName, needed_files
from hddm_cli.app import commands
from tests.artefacts import SIDE, copied, refusal, seal

ALLOWED = "--allow-program"
FLOW = ("--objective", "flow", "--steps", 1)
SCHEDULE = {"_class_name": "DDPMScheduler", "beta_schedule": "squaredcos_cap_v2"}


class Private(nn.Module):
    """A small denoiser of a class that only its author has."""

    def __init__(self, num_classes: int = 0) -> None:
        super().__init__()
        self.labels = nn.Embedding(num_classes + 1, 8) if num_classes else None
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.of_time = nn.Linear(2, 8)

    def forward(self, x: Tensor, timestep: Tensor, class_labels: Tensor | None = None) -> Tensor:
        t = timestep / 1000
        embedded = self.of_time(torch.stack([t.sin(), t.cos()], -1))
        if self.labels is not None and class_labels is not None:
            embedded = embedded + self.labels(class_labels)
        hidden = self.first(x) + rearrange(embedded, "b c -> b c 1 1")
        output: Tensor = self.last(nn.functional.silu(hidden))
        return output


def _export(network: nn.Module, folder: Path, **options: Any) -> Path:
    return hddm.export(
        network,
        folder,
        prediction_type="epsilon",
        sample_shape=(1, SIDE, SIDE),
        **{"schedule": SCHEDULE} | options,
    )


@pytest.fixture(scope="module")
def private() -> Private:
    torch.manual_seed(0)
    return Private()


@pytest.fixture(scope="module")
def program(private: Private, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _export(private, tmp_path_factory.mktemp("exported") / "expert")


@pytest.fixture(scope="module")
def of_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    label = torch.tensor(0)
    return _export(
        Private(2),
        tmp_path_factory.mktemp("classes") / "expert",
        conditions={"class_labels": label},
        null_conditions={"class_labels": torch.tensor(2)},
        licence="MIT",
    )


def _run(*line: object) -> None:
    found = CliRunner().invoke(commands, list(map(str, line)))
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output


def _refused(*line: object) -> str:
    found = CliRunner().invoke(commands, list(map(str, line)))
    assert found.exit_code != 0
    said = found.exception if isinstance(found.exception, HddmError) else found.output
    return str(said).replace("`allow_program=True`", ALLOWED)


def test_a_program_has_the_velocity_of_its_network(private: Private, program: Path) -> None:
    schedule = hddm.schedules.from_diffusers(SCHEDULE)
    field, expected = (
        hddm.load(program, allow_program=True),
        hddm.VelocityField(private, schedule, "epsilon"),
    )
    for batch in (1, 4):
        x, t = torch.randn(batch, 1, SIDE, SIDE), torch.rand(batch)
        with torch.no_grad():
            found = field.velocity(x, t)
            torch.testing.assert_close(found, expected.velocity(x, t), rtol=1e-5, atol=1e-5)


def test_without_permission_nothing_of_a_program_is_read(program: Path, tmp_path: Path) -> None:
    folder = copied(program, tmp_path / "expert")
    (folder / PROGRAM).unlink()
    (folder / PROGRAM).write_bytes(b"nothing that could be read")
    for call in (hddm.load, open_expert, hddm.HDDMPipeline.from_pretrained):
        message = refusal(call, folder)
        assert f"{folder / PROGRAM}: the network is a program" in message
        assert "`allow_program=True`" in message
    assert "is no program that hddm runs" in refusal(hddm.load, folder, allow_program=True)


@pytest.mark.parametrize(
    "line",
    [
        ("sample", "{expert}", "--out", "{out}", "--num-images", 1),
        ("verify", "{expert}"),
        ("calibrate", "{expert}"),
        ("assemble", "{expert}", "--out", "{out}"),
        ("merge", "{expert}", "{expert}", "--out", "{out}"),
        ("evaluate", "{expert}", "--held-out", "{shard}"),
        ("train", "expert", "{shard}", "--out", "{out}", *FLOW, "--init", "{expert}"),
    ],
    ids=lambda line: line[0],
)
def test_every_verb_that_opens_experts_asks_for_permission(
    program: Path, shards: Path, tmp_path: Path, line: tuple[object, ...]
) -> None:
    places = {"expert": program, "out": tmp_path / "out", "shard": shards / "shard_0"}
    said = _refused(*[str(one).format(**places) for one in line])
    assert "the network is a program" in said
    assert not (tmp_path / "out").exists()


def test_permission_ends_with_the_call_that_gave_it(program: Path) -> None:
    hddm.load(program, allow_program=True)
    assert "is a program" in refusal(hddm.load, program)
    with programs_allowed(True):
        hddm.load(program)
        with programs_allowed(False):
            hddm.load(program)
    assert "is a program" in refusal(hddm.load, program)


def test_a_program_is_mixed_with_other_experts(
    program: Path, ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "ensemble"
    shares = [f"{one}={share}" for one, share in ((program, 0.5), (ddpm_expert, 0.25))]
    line = [program, ddpm_expert, flow_expert, "--out", whole, ALLOWED]
    for share in (*shares, f"{flow_expert}=0.25"):
        line += ["--share", share]
    _run("assemble", *line)
    assert (whole / "experts" / "0" / PROGRAM).is_file()
    assert "is a program" in refusal(hddm.load, whole)
    ensemble = hddm.load(whole, allow_program=True)
    assert isinstance(ensemble, hddm.Ensemble)
    assert hddm.sample(ensemble, 4, steps=2).isfinite().all()
    _run("sample", whole, "--out", tmp_path / "images", "--num-images", 2, "--steps", 2, ALLOWED)
    assert (tmp_path / "images" / "00001.png").is_file()


def test_a_program_is_fine_tuned_and_stays_the_same_program(
    program: Path, shards: Path, tmp_path: Path
) -> None:
    shard, out = shards / "shard_0", tmp_path / "tuned"
    hddm.train(
        shard,
        out,
        objective="flow",
        steps=3,
        batch_size=8,
        init=program,
        learning_rate=1e-2,
        threads=1,
        allow_program=True,
    )
    assert (out / PROGRAM).read_bytes() == (program / PROGRAM).read_bytes()
    name = "diffusion_pytorch_model.safetensors"
    before, after = load_file(program / name), load_file(out / name)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[key], after[key]) for key in before)
    assert hddm.sample(hddm.load(out, allow_program=True), 2, steps=2).isfinite().all()


def test_a_program_is_calibrated_and_verified(program: Path, shards: Path, tmp_path: Path) -> None:
    folder, shard = copied(program, tmp_path / "expert"), shards / "shard_0"
    with programs_allowed(True):
        recalibrate(folder, shard)
        found = verify_expert(folder, shard)
    assert hddm.load(folder, allow_program=True).calibration is not None
    assert PROGRAM in found.files
    assert found.denoising is not None
    (folder / PROGRAM).unlink()
    shutil.copyfile(program / "config.json", folder / PROGRAM)
    with programs_allowed(True):
        assert not verify_expert(folder).accepted


def test_a_program_that_another_one_replaced_is_refused(
    program: Path, of_classes: Path, tmp_path: Path
) -> None:
    folder = copied(program, tmp_path / "expert")
    (folder / PROGRAM).unlink()
    shutil.copyfile(of_classes / PROGRAM, folder / PROGRAM)
    assert "another program" in refusal(hddm.load, folder, allow_program=True)
    seal(folder)
    assert "another program" in refusal(hddm.load, folder, allow_program=True)


def test_classes_are_known_by_their_embedding(of_classes: Path) -> None:
    field = hddm.load(of_classes, allow_program=True)
    assert field.classes == ("0", "1")
    images = hddm.sample(field, 2, steps=2, guidance_scale=2.0, class_labels=torch.tensor([0, 1]))
    assert images.isfinite().all()
    message = refusal(
        field.velocity, images, 0.5 * torch.ones(2), class_labels=torch.tensor([0, 7])
    )
    assert "7" in message


def test_merged_programs_are_the_same_program(program: Path, tmp_path: Path) -> None:
    _run("merge", program, program, "--out", tmp_path / "merged", ALLOWED)
    x, t = torch.randn(2, 1, SIDE, SIDE), torch.tensor([0.3, 0.6])
    with torch.no_grad():
        expected = hddm.load(program, allow_program=True).velocity(x, t)
        found = hddm.load(tmp_path / "merged", allow_program=True).velocity(x, t)
    torch.testing.assert_close(found, expected)


def test_a_program_is_downloaded_with_its_expert() -> None:
    files = ["expert.json", "config.json", PROGRAM, "model.bin", "other.pt2"]
    name = HubName.parse("me/expert")
    assert name is not None
    assert needed_files(name, files, {}) == ["expert.json", "config.json", PROGRAM]


def test_what_is_no_network_is_refused(tmp_path: Path, private: Private) -> None:
    assert "must be a torch.nn.Module" in refusal(_export, lambda x, t: x, tmp_path / "a")
    flow = {"schedule": hddm.schedules.from_diffusers(SCHEDULE)}
    assert "sample_shape" in refusal(
        hddm.export, private, tmp_path / "a", prediction_type="epsilon", sample_shape=(8, 8), **flow
    )
    labels = {"null_conditions": {"class_labels": torch.tensor(0)}}
    assert "none of `conditions`" in refusal(_export, private, tmp_path / "a", **labels)
    assert list(tmp_path.iterdir()) == []
