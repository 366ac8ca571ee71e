"""Runs beside what they make: gone on with, refused, out of disk, out of numbers, and never two at once."""

import fcntl
import json
import math
import resource
import shutil
from pathlib import Path

import pytest
import torch

from hddm.experts.records import EXPERT_FILE
from hddm.networks.folders import WEIGHTS
from hddm.training import expert as expert_training
from hddm.training.expert import train_expert
from hddm.training.loop import Inputs, OnStep
from hddm.training.settings import RunOptions
from hddm.utils.errors import HddmError
from tests.artefacts import Command, contents, copied, expert_settings
from tests.killed_runs import checkpoint

OPTIONS = ("--objective", "flow", "--size", "tiny", "--batch-size", 8, "--threads", 1)


@pytest.fixture
def started(hddm: Command, whole: Path, tmp_path: Path) -> Path:
    """A run of four steps that was finished, and whose expert was taken away."""
    code, _, error = hddm("train", "expert", whole, "--out", tmp_path / "out", "--steps", 4, *OPTIONS)
    assert code == 0, error
    shutil.rmtree(tmp_path / "out")
    return tmp_path / "out"


def test_a_run_that_is_there_is_neither_forgotten_nor_gone_on_with_unasked(
    started: Path, whole: Path, hddm: Command
) -> None:
    before = contents(started.with_name("out.run"))
    code, _, error = hddm("train", "expert", whole, "--out", started, "--steps", 4, *OPTIONS)
    assert code == 1
    assert "out.run: holds a run of" in error
    assert "--resume goes on with it, --overwrite starts anew" in error
    assert contents(started.with_name("out.run")) == before


def test_every_changed_setting_is_told_and_stops_a_resume(started: Path, whole: Path, hddm: Command) -> None:
    changed = ("--steps", 6, *OPTIONS, "--learning-rate", 0.5, "--resume")
    code, _, error = hddm("train", "expert", whole, "--out", started, *changed)
    assert code == 1
    assert "pass --allow-config-change" in error
    assert "settings.steps: was 4, is 6" in error
    assert "settings.learning_rate: was 0.0001, is 0.5" in error
    assert "batch_size" not in error
    assert not started.exists()
    code, _, error = hddm("train", "expert", whole, "--out", started, *changed, "--allow-config-change")
    assert code == 0, error
    assert (started / "expert.json").exists()


@pytest.mark.parametrize("recorded", [None, 100], ids=["today's default", "an older default"])
def test_a_run_goes_on_with_the_warm_up_that_it_recorded(
    recorded: int | None, whole: Path, tmp_path: Path
) -> None:
    """Nothing is asked for in either start; a run that recorded another default has another rate."""
    first = expert_settings("flow", steps=40, warmup=recorded, threads=1)
    asked = expert_settings("flow", steps=40, warmup=None, threads=1)
    losses = train_expert(whole, tmp_path / "plain", first)
    with pytest.raises(HddmError, match="enough"):
        train_expert(whole, tmp_path / "out", first, on_step=_end_at(23), run=RunOptions(checkpoint_every=20))
    assert train_expert(whole, tmp_path / "out", asked, run=RunOptions(resume=True)) == losses
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "plain" / WEIGHTS).read_bytes()
    kept = json.loads((tmp_path / "out.run" / "run.json").read_text())["settings"]["warmup"]
    stated = json.loads((tmp_path / "out" / EXPERT_FILE).read_text())["training"]["warmup"]
    assert (kept, stated) == ((4, 4) if recorded is None else (100, 100))


def _end_at(last: int) -> OnStep:
    def end(step: int, loss: float, seconds: float) -> None:
        if step == last:
            raise HddmError("enough")

    return end


def test_another_shard_is_a_changed_setting(started: Path, shards: Path, hddm: Command) -> None:
    code, _, error = hddm(
        "train", "expert", shards / "shard_0", "--out", started, "--steps", 4, *OPTIONS, "--resume"
    )
    assert code == 1
    assert "is of other data, another objective or network" in error
    assert "choose another --out" in error
    assert "--allow-config-change" not in error
    assert error.count("data.shard: was") == 1
    before = contents(started.with_name("out.run"))
    changed = ("--out", started, "--steps", 4, *OPTIONS[2:], "--objective", "ddpm")
    code, _, error = hddm(
        "train", "expert", shards / "shard_0", *changed, "--resume", "--allow-config-change"
    )
    assert code == 1
    assert "is of other data, another objective or network" in error
    assert error.count("settings.objective: was 'flow', is 'ddpm'") == 1
    assert error.count("data.shard: was") == 1
    assert contents(started.with_name("out.run")) == before


def test_two_processes_do_not_train_one_expert(started: Path, whole: Path, hddm: Command) -> None:
    with (started.with_name("out.run") / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 4711 on elsewhere\n")
        lock.flush()
        code, _, error = hddm("train", "expert", whole, "--out", started, "--steps", 4, *OPTIONS, "--resume")
    assert code == 1
    assert "another process is training it" in error
    assert "4711 on elsewhere" in error
    assert error.count("\n") == 1


def test_half_a_record_that_a_killed_process_left_is_removed(
    started: Path, whole: Path, hddm: Command
) -> None:
    half = started.with_name("out.run") / ".run.json.part-4711"
    half.write_text("{")
    code, _, error = hddm("train", "expert", whole, "--out", started, "--steps", 4, *OPTIONS, "--resume")
    assert (code, half.exists()) == (0, False), error


@pytest.mark.parametrize("option", ["--overwrite", "--resume"])
def test_a_folder_that_only_has_the_name_of_a_run_is_left_alone(
    option: str, whole: Path, tmp_path: Path, hddm: Command
) -> None:
    (tmp_path / "out.run" / "photos").mkdir(parents=True)
    (tmp_path / "out.run" / "photos" / "one.txt").write_text("mine")
    code, _, error = hddm("train", "expert", whole, "--out", tmp_path / "out", "--steps", 4, *OPTIONS, option)
    assert (code, "is in the way, and holds no run.json" in error) == (1, True)
    assert (tmp_path / "out.run" / "photos" / "one.txt").read_text() == "mine"


def test_a_full_disk_ends_a_run_and_leaves_the_checkpoint_before(whole: Path, tmp_path: Path) -> None:
    settings = expert_settings("flow", steps=9, threads=1)
    keep = RunOptions(checkpoint_every=3, resume=True)
    train_expert(whole, tmp_path / "plain", settings, run=keep)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step: int, loss: float, seconds: float) -> None:
        if step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))

    try:
        with pytest.raises(
            HddmError, match=r"step_00000006: the checkpoint could not be written .*step 3 is wh"
        ):
            train_expert(whole, tmp_path / "full", settings, on_step=fill, run=keep)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    folder = tmp_path / "full.run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step_00000003"]
    assert not (tmp_path / "full").exists()
    train_expert(whole, tmp_path / "full", settings, run=keep)
    assert checkpoint(tmp_path / "full.run") == checkpoint(tmp_path / "plain.run")


def test_a_run_that_stays_without_a_finite_loss_keeps_its_good_checkpoint(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = expert_training.losing
    calls = iter(range(1, 1000))

    def spoilt(*arguments: object) -> object:
        loss = real(*arguments)  # type: ignore[arg-type]

        def spoil(network: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
            return loss(network, inputs) * (math.nan if next(calls) > 7 else 1)

        return spoil

    monkeypatch.setattr(expert_training, "losing", spoilt)
    settings = expert_settings("flow", steps=40, threads=1, max_non_finite=3)
    with pytest.raises(HddmError, match=r"step 10: loss nan.*the last 3 steps were not finite"):
        train_expert(whole, tmp_path / "out", settings, run=RunOptions(checkpoint_every=4))
    folder = tmp_path / "out.run" / "checkpoints"
    assert "step_00000004" in [path.name for path in folder.iterdir()]
    assert not (tmp_path / "out").exists()


def test_a_corrupt_image_is_named_and_nothing_is_begun(whole: Path, tmp_path: Path, hddm: Command) -> None:
    shard = copied(whole, tmp_path)
    image = next((shard / "images").rglob("*.png"))
    image.unlink()
    image.write_bytes(b"no image")
    code, _, error = hddm("train", "expert", shard, "--out", tmp_path / "out", "--steps", 4, *OPTIONS)
    assert code == 1
    assert str(image) in error
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.run").exists()


@pytest.mark.parametrize("parts", [2, 4])
def test_a_batch_in_parts_learns_as_one_batch_does(parts: int, whole: Path, tmp_path: Path) -> None:
    def losses(accumulated: int) -> list[float]:
        settings = expert_settings(
            "ddpm", steps=8, batch_size=16, threads=1, gradient_accumulation_steps=accumulated
        )
        return train_expert(whole, tmp_path / str(accumulated), settings)

    assert losses(parts) == pytest.approx(losses(1), rel=1e-5)


def test_bfloat16_learns_alike_with_weights_and_averages_in_float32(whole: Path, tmp_path: Path) -> None:
    found = {}
    for precision in ("no", "bf16"):
        settings = expert_settings("flow", steps=12, batch_size=32, threads=1, mixed_precision=precision)
        out = tmp_path / precision
        found[precision] = train_expert(whole, out, settings, run=RunOptions())
    assert found["bf16"] == pytest.approx(found["no"], rel=2e-2)
    assert found["bf16"] != found["no"]
    from safetensors.torch import load_file

    (last,) = (tmp_path / "bf16.run" / "checkpoints").iterdir()
    for name in ("weights", "ema"):
        tensors = load_file(last / f"{name}.safetensors").values()
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
        # Not one of them is a bfloat16 number that was widened.
        assert any(not torch.equal(one, one.bfloat16().float()) for one in tensors)


def test_half_precision_without_a_gpu_is_refused(whole: Path, tmp_path: Path, hddm: Command) -> None:
    for options, message in (
        (("--mixed-precision", "fp16", "--device", "cpu"), "fp16 needs a GPU; on a CPU take bf16 or no"),
        (("--mixed-precision", "fp8"), "--mixed-precision fp8: choose one of no, bf16, fp16"),
        (("--gradient-accumulation-steps", 3), "--batch-size 8 does not divide into 3"),
    ):
        code, _, error = hddm(
            "train", "expert", whole, "--out", tmp_path / "out", "--steps", 2, *OPTIONS, *options
        )
        assert code in (1, 2)
        assert message in error
        assert error.count("\n") == 1
