"""Students of few steps: mean velocities in closed form, what a training writes, and who samples it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hddm
from hddm.condition_names import TEXT
from hddm.data.shards import NO_CAPTION, Rows, TokenStore
from hddm.ensemble import Ensemble
from hddm.experts.assembly import assemble
from hddm.experts.expert_folders import save_expert
from hddm.noise import Seeded
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.predictions import Epsilon, FlowPrediction, PredictionType
from hddm.sampling import integrate, sample, time_grid
from hddm.schedules import LinearSchedule
from hddm.solvers import heun
from hddm.training.distill import _require_expert_by_class, distill, with_interval
from hddm.training.mean_flow import (
    CAPTION,
    FLOOR,
    POWER,
    STUDENT_STEPS,
    TRAJECTORIES_FILE,
    MeanFlow,
    solve,
)
from hddm.training.resume import run_folder_of
from hddm.training.settings import DistillRecipe, DistillSettings, RunOptions, resolve
from hddm.utils.errors import HddmError
from hddm.utils.records import WEIGHTS
from hddm.velocity import VelocityField
from tests.artefacts import Command, Died, edit_json, ending_at, refusal
from tests.conftest import Trio
from tests.ensemble_files import flow_expert

MEAN, VARIANCE = 0.7, 0.3
"""Of the Gaussian data whose flow is known."""
SHAPE = (1, 2, 2)


def _deviation(t: Tensor) -> Tensor:
    return ((1 - t) ** 2 * VARIANCE + t**2).sqrt()


def _flow(x: Tensor, t: Tensor, r: Tensor) -> Tensor:
    """x_r through x_t: states keep their distance from the mean, in deviations."""
    return (1 - r) * MEAN + _deviation(r) / _deviation(t) * (x - (1 - t) * MEAN)


def _wide(t: Tensor, x: Tensor) -> Tensor:
    return t.to(x).view(-1, 1, 1, 1)


def _velocity(x: Tensor, t: Tensor) -> Tensor:
    t = _wide(t, x)
    gain = (t - (1 - t) * VARIANCE) / _deviation(t) ** 2
    return gain * (x - (1 - t) * MEAN) - MEAN


def _mean_velocity(x: Tensor, t: Tensor, interval: Tensor) -> Tensor:
    t, over = _wide(t, x), _wide(interval, x)
    mean = (x - _flow(x, t, t - over)) / over.where(over > 0, 1)
    return torch.where(over > 0, mean, _velocity(x, t[:, 0, 0, 0]))


class Exact(nn.Module):
    """A network of the Gaussian's mean velocities, in what it predicts, ``off`` by a constant."""

    def __init__(self, kind: str = "flow_prediction", off: float = 0.0) -> None:
        super().__init__()
        self.kind, self.off = kind, nn.Parameter(torch.tensor(off, dtype=torch.float64))

    def forward(self, x: Tensor, timestep: Tensor, interval: Tensor) -> Tensor:
        t = timestep.double() / 1000
        u, wide = _mean_velocity(x, t, interval) + self.off, _wide(t, x)
        match self.kind:
            case "sample":
                return x - wide * u
            case "v_prediction":
                return (wide**2 + (1 - wide) ** 2) * u - (2 * wide - 1) * x
        return u


def _student(steps: int, kind: str = "flow_prediction") -> VelocityField:
    given = {"conditions": (), "sample_shape": SHAPE, "sampling_steps": steps}
    return VelocityField(Exact(kind), LinearSchedule(), kind, 1000, **given)  # type: ignore[arg-type]


def _teacher() -> Ensemble:
    network: Callable[..., Tensor] = lambda x, timestep: _velocity(x, timestep / 1000)  # noqa: E731
    return Ensemble(
        [VelocityField(network, LinearSchedule(), "flow_prediction", 1000, None, ())], None, "full"
    )


@pytest.mark.parametrize("kind", ["flow_prediction", "sample", "v_prediction"])
def test_the_loss_vanishes_at_the_mean_velocity_of_a_gaussians_flow_alone(kind: str) -> None:
    recipe = resolve(DistillRecipe, DistillSettings(steps=1, sampling_steps=2, trajectories=400))
    flow = MeanFlow(lambda device: _teacher(), PredictionType(kind).prediction, recipe, SHAPE, {})
    flow.prepare(torch.device("cpu"), None)
    # The flow itself, without the solver's error.
    x, one = flow._states[:, 0].double(), torch.tensor(1.0)
    flow._states = torch.stack([_flow(x, one, time) for time in flow._times], dim=1)
    noise = torch.Generator().manual_seed(1)
    inputs = flow.draw(torch.arange(400), noise, slice(None))
    assert flow.loss(Exact(kind), inputs).max() < 1e-9
    off = 0.01 / (0.01 + FLOOR) ** POWER
    assert flow.loss(Exact(kind, 0.1), inputs).mean().item() == pytest.approx(off, rel=0.02)


class _Prompted(nn.Module):
    """Velocities, or mean velocities, of a Gaussian whose mean is moved by a prompt's token (n, 1, 1)."""

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        interval: Tensor | None = None,
    ) -> Tensor:
        t, moved = timestep.double() / 1000, _wide(encoder_hidden_states.flatten(), x)
        at = x - (1 - _wide(t, x)) * moved
        return (_velocity(at, t) if interval is None else _mean_velocity(at, t, interval)) - moved


def test_a_student_learns_the_flow_of_each_prompt_and_of_none() -> None:
    teacher = VelocityField(_Prompted(), LinearSchedule(), "flow_prediction", 1000, None, (TEXT,))
    settings = DistillSettings(steps=1, sampling_steps=2, trajectories=60)
    texts = TokenStore(Rows((torch.tensor([-2.0, 3.0])[:, None, None],)), torch.zeros(1, 1))
    captions = torch.tensor([0, 1, NO_CAPTION]).repeat(20)
    recipe = resolve(DistillRecipe, settings)
    given = (FlowPrediction(), recipe, SHAPE, {CAPTION: captions}, texts)
    flow = MeanFlow(lambda device: Ensemble([teacher], None, "full"), *given)
    flow.prepare(torch.device("cpu"), None)
    means = flow._states[:, -1].unflatten(0, (20, 3)).mean((0, 2, 3, 4))
    torch.testing.assert_close(means, MEAN + torch.tensor([-2.0, 3.0, 0.0]), rtol=0, atol=0.3)
    inputs = flow.draw(torch.arange(60), torch.Generator().manual_seed(1), slice(None))
    # The solver's error alone is left.
    assert flow.loss(_Prompted(), inputs).max() < 0.02
    wrong = flow.loss(_Prompted(), inputs | {TEXT: inputs[TEXT].roll(1, 0)})
    assert wrong.mean() > 1


def test_trajectories_are_kept_for_the_same_seed_guidance_and_conditions(tmp_path: Path) -> None:
    file, labels = tmp_path / "kept.safetensors", {"class_labels": torch.zeros(4, dtype=torch.long)}
    teacher = _teacher()
    first = solve(teacher, 4, 0, SHAPE, {}, 1.0, file).states
    teacher.experts[0].network = lambda x, timestep: 0 * x
    assert torch.equal(solve(teacher, 4, 0, SHAPE, {}, 1.0, file).states, first)
    for num, seed in ((4, 1), (5, 0)):
        found = solve(teacher, num, seed, SHAPE, {}, 1.0, file).states
        assert torch.equal(found[:, 0], found[:, -1])
    for conditions, scale in ((labels, 1.0), ({}, 2.0)):
        with pytest.raises(HddmError):
            solve(teacher, 4, 0, SHAPE, conditions, scale, file)


def test_trajectories_are_the_flow_and_depend_on_their_number_alone() -> None:
    found = solve(_teacher(), 300, 7, SHAPE, {}, 1.0)
    x = found.states[:, 0]
    for place, t in enumerate(found.times.tolist()):
        exact = _flow(x.double(), torch.tensor(1.0), torch.tensor(t))
        torch.testing.assert_close(found.states[:, place].double(), exact, rtol=0, atol=1e-2)
    assert torch.equal(solve(_teacher(), 10, 7, SHAPE, {}, 1.0).states, found.states[:10])


@pytest.mark.parametrize("kind", ["flow_prediction", "sample", "v_prediction"])
@pytest.mark.parametrize("steps", STUDENT_STEPS)
def test_steps_of_any_length_are_exact(steps: int, kind: str) -> None:
    noise = Seeded(5).initial(range(8), SHAPE).double()
    exact = _flow(noise, torch.tensor(1.0), torch.tensor(0.0))
    for model in (_student(steps, kind), Ensemble([_student(steps, kind)] * 2, strategy="draw")):
        for asked in (None, 1, 3):
            found = sample(model, 8, 5, asked)
            torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


def test_what_students_cannot_do_is_refused() -> None:
    other = VelocityField(Exact(), LinearSchedule(), "flow_prediction", 1000)
    assert "`solver` heun: a student of few steps" in refusal(sample, _student(2), 1, solver="heun")
    for solver in ("adams-moulton", heun):
        with pytest.raises(HddmError, match=r"`solver` (heun|adams-moulton): a student"):
            integrate(_student(2), torch.zeros(1, *SHAPE), time_grid(2), solver=solver)
    told = "expert 0: is a student of few steps; it can be drawn, and only among students"
    assert told in refusal(Ensemble, [_student(2), other], strategy="draw")
    assert told in refusal(Ensemble, [_student(2), _student(2)], strategy="full")
    recipe = resolve(DistillRecipe, DistillSettings(steps=1, sampling_steps=1))
    flow = (MeanFlow, lambda device: _teacher(), Epsilon(), recipe, SHAPE, {})
    assert "cannot predict noise" in refusal(*flow)
    told = "needs hddm's own transformer, and it is a Linear"
    assert told in refusal(with_interval, nn.Linear(2, 2), "--init it")


def test_a_student_begins_as_its_expert_but_for_high_frequencies_of_time() -> None:
    expert = flow_expert(3).network
    student = with_interval(expert, "it")
    x, t = torch.randn(4, 3, 4, 4), torch.linspace(0, 1000, 4)
    assert torch.equal(student(x, t), student(x, t, interval=torch.zeros(4)))
    expert.time_embed.smooth = True
    assert torch.equal(expert(x, t), student(x, t, interval=torch.rand(4)))


def _settings(**changes: object) -> DistillSettings:
    short = {
        "steps": 8,
        "batch_size": 8,
        "learning_rate": 3e-3,
        "trajectories": 16,
        "teacher": "routed",
    }
    return DistillSettings.model_validate({**short, "sampling_steps": 1, "seed": 7, **changes})


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_student_and_with_no_other_teacher(
    ensemble: Path, shards: Path, ddpm_expert: Path, flow_expert: Path, router: Path, tmp_path: Path
) -> None:
    """What the teacher solved is kept beside the checkpoints."""
    given = (ensemble, shards)
    whole = distill(*given, tmp_path / "whole", _settings(), init=flow_expert)
    out = tmp_path / "student"
    options = RunOptions(checkpoint_every=2)
    with pytest.raises(Died):
        distill(*given, out, _settings(), on_step=ending_at(7), run=options, init=flow_expert)
    kept, resumed, steps = (
        run_folder_of(out) / TRAJECTORIES_FILE,
        RunOptions(resume=True),
        list[int](),
    )
    written = kept.stat().st_mtime_ns
    assemble([ddpm_expert, flow_expert], tmp_path / "other", router, strategy="top-1")
    with pytest.raises(HddmError, match="used other data, another"):
        distill(tmp_path / "other", shards, out, _settings(), run=resumed, init=flow_expert)
    go_on = {"run": resumed, "init": flow_expert}
    losses = distill(*given, out, _settings(), on_step=lambda n, *_: steps.append(n), **go_on)
    assert (steps, losses) == ([7, 8], whole)
    assert kept.stat().st_mtime_ns == written
    assert distill(*given, out, _settings(), **go_on) == []
    made, expected = (load_file(folder / WEIGHTS) for folder in (out, tmp_path / "whole"))
    assert all(torch.equal(made[name], value) for name, value in expected.items())


@pytest.mark.integration
def test_a_student_is_trained_sampled_and_verified_from_the_command_line(
    trio: Trio, tmp_path: Path, hddm: Command
) -> None:
    """Of experts with classes, whose guidance it has inside."""
    assemble(trio.experts, tmp_path / "trio", trio.router, strategy="full")
    out = tmp_path / "student"
    line = [
        "distill",
        tmp_path / "trio",
        "--data",
        trio.shards,
        "--out",
        out,
        "--teacher",
        "routed",
    ]
    line += ["--sampling-steps", 2, "--trajectories", 32, "--guidance-scale", 2]
    line += ["--batch-size", 8, "--steps", 4]
    code, _, error = hddm(*line)
    assert (code, "begins with an expert; pass --init" in error) == (2, True)
    code, _, error = hddm(*line, "--init", trio.experts[1])
    assert code == 0, error
    record = json.loads((out / "expert.json").read_text())
    assert (record["sampling_steps"], record["conditions"]) == (2, ["class_labels"])
    assert record["training"]["guidance_scale"] == 2

    images = tmp_path / "images"
    assert hddm("sample", out, "--class-labels", 0, "--num-images", 4, "--out", images)[0] == 0
    settings = json.loads((images / "sampling.json").read_text())
    assert (settings["steps"], settings["solver"]) == (2, "euler")
    code, _, error = hddm("sample", out, "--guidance-scale", 2, "--out", tmp_path / "no")
    assert (code, "of scale 2 inside" in error) == (2, True)
    pipeline = HDDMPipeline.from_pretrained(out)
    made = pipeline(class_labels=[0] * 4, seed=0, output_type="pt").images
    assert torch.equal(
        made, pipeline(class_labels=[0] * 4, seed=0, output_type="pt", num_inference_steps=2).images
    )
    assert hddm("verify", out)[0] == 0


def test_a_teacher_by_shard_is_for_classes_that_tell_it(
    ensemble: Path, shards: Path, flow_expert: Path, tmp_path: Path
) -> None:
    with pytest.raises(HddmError, match="do not tell the shard here"):
        distill(ensemble, shards, tmp_path / "no", _settings(teacher="shard"), init=flow_expert)
    assert not (tmp_path / "no").exists()
    asked = {"expert": torch.tensor([0, 1, 1, 0]), "class_labels": torch.tensor([2, 0, 1, 2])}
    _require_expert_by_class(asked)
    asked["class_labels"][3] = 0
    assert "do not tell" in refusal(_require_expert_by_class, asked)


def test_an_ensemble_of_students_is_drawn_from(tmp_path: Path) -> None:
    facts = {"sampling_steps": 2}
    parts = [tmp_path / name for name in "ab"]
    for seed, part in enumerate(parts):
        part.mkdir()
        save_expert(part, flow_expert(seed, facts, interval=True))
    # Students once recorded the length of a step as a condition.
    assert json.loads((parts[0] / "expert.json").read_text())["conditions"] == []
    edit_json(parts[0] / "expert.json", conditions=["interval"])
    assert torch.equal(sample(parts[0], 2, 1), sample(hddm.load(parts[0]), 2, 1))
    assemble(parts, tmp_path / "both")
    model = hddm.load(tmp_path / "both")
    assert isinstance(model, Ensemble)
    assert model.sampling_steps == 2
    assert torch.equal(sample(model, 6, 1), sample(model, 6, 1, 2, solver="euler"))
    assert not torch.equal(sample(model, 6, 1), sample(model, 6, 1, 3))


def test_other_verbs_refuse_students(
    ensemble: Path, flow_expert: Path, shards: Path, tmp_path: Path, hddm: Command
) -> None:
    student = tmp_path / "student"
    given = {"sampling_steps": 2, "trajectories": 4, "steps": 1}
    distill(ensemble, shards, student, _settings(**given), init=flow_expert)
    flow = ("--objective", "flow", "--steps", 1)
    for line in (
        ("assemble", student, flow_expert, "--out", tmp_path / "out"),
        ("merge", student, flow_expert, "--out", tmp_path / "out"),
        ("calibrate", student),
        ("verify", student, "--data", shards / "shard_0"),
        ("distill", student, "--data", shards, "--out", tmp_path / "out", "--steps", 1),
        (
            "train",
            "expert",
            shards / "shard_0",
            "--init",
            student,
            *flow,
            "--out",
            tmp_path / "out",
        ),
    ):
        code, _, error = hddm(*line)
        assert code in (1, 2)
        assert "is a student of few steps; " in error
    assert not (tmp_path / "out").exists()
