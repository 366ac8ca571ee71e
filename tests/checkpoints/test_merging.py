"""Experts merged by averaging: the weights, by hand; what the new expert says of itself; what is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hddm as library
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.checkpoints.convert import write
from hddm.checkpoints.merging import merge_experts
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.records import EXTRAS_FILE, WEAK_FILE
from hddm.settings import Conversion
from hddm.training.expert import train_expert
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import sha256_of
from tests.artefacts import Command, contents, edit_json, expert_settings, refusal, seal
from tests.checkpoint_files import pipeline, record_of, text_unet
from tests.ensemble_files import WEIGHTS, flow_expert
from tests.lora_files import states, write_adapter, write_base

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a flow expert of a name, a seed, and a dtype or facts or another network."""

    def made(name: str, seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        return write_base(tmp_path / name, flow_expert(seed, **changes), dtype)

    return made


def _velocity(folder: Path) -> torch.Tensor:
    field = library.load(folder)
    assert isinstance(field, library.VelocityField)
    return field.velocity(*states())


@pytest.mark.parametrize(
    ("weights", "said"),
    [([0.2, 0.3, 0.5], "0.2,0.3,0.5"), ([1 / 3] * 3, None)],
    ids=["given", "equal"],
)
def test_weights_are_averaged_in_float64_and_rounded_once(
    weights: list[float], said: str | None, make: Make, tmp_path: Path, hddm: Command
) -> None:
    parts = [make(f"part{seed}", seed) for seed in range(3)]
    options = () if said is None else ("--weights", said)
    code, out, error = hddm("merge", *parts, "--out", tmp_path / "out", *options)
    assert (code, error) == (0, "")
    assert f"{tmp_path / 'out'}: merged of 3 experts" in out
    content, found = (
        [load_file(part / WEIGHTS) for part in parts],
        load_file(tmp_path / "out" / WEIGHTS),
    )
    assert found.keys() == content[0].keys()
    for name, tensor in found.items():
        stacked = torch.stack([one[name].double() for one in content])
        expected = torch.tensordot(torch.tensor(weights, dtype=torch.float64), stacked, 1)
        step = torch.nextafter(tensor.abs(), torch.tensor(torch.inf)) - tensor.abs()
        assert ((tensor - expected).abs() <= 0.5000001 * step.double()).all()
    assert not torch.equal(_velocity(tmp_path / "out"), _velocity(parts[0]))


def test_what_a_layout_has_besides_weights_stays_where_all_experts_have_it_alike(
    make: Make, tmp_path: Path
) -> None:
    parts, table = [make("one", 1), make("two", 2)], torch.arange(6.0).view(2, 3)
    for k, part in enumerate(parts):
        save_file({"pos_embed": table, "other": table + k}, part / EXTRAS_FILE)
        seal(part)
    merge_experts(parts, tmp_path / "out")
    assert load_file(tmp_path / "out" / EXTRAS_FILE).keys() == {"pos_embed"}
    assert torch.equal(load_file(tmp_path / "out" / EXTRAS_FILE)["pos_embed"], table)
    assert library.load(tmp_path / "out")


@pytest.mark.parametrize("weights", [None, (0.3, 0.7), (0.25, 0.7499999)], ids=str)
def test_an_expert_merged_with_itself_stays_itself(
    weights: tuple[float, ...] | None, make: Make, tmp_path: Path
) -> None:
    one = make("one", 1)
    copies = [one, Path(shutil.copytree(one, tmp_path / "copy"))]
    merge_experts(copies, tmp_path / "two", weights)
    assert torch.equal(_velocity(tmp_path / "two"), _velocity(one))
    copies.append(Path(shutil.copytree(one, tmp_path / "third")))
    merge_experts(copies, tmp_path / "three")
    assert torch.equal(_velocity(tmp_path / "three"), _velocity(one))


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        ((torch.bfloat16, torch.bfloat16), torch.bfloat16),
        ((torch.float16, torch.float32), torch.float32),
    ],
    ids=str,
)
def test_the_dtype_is_that_of_the_parts(
    dtypes: tuple[torch.dtype, ...], wanted: torch.dtype, make: Make, tmp_path: Path
) -> None:
    parts = [make(f"part{k}", k, dtype) for k, dtype in enumerate(dtypes)]
    merge_experts(parts, tmp_path / "out")
    one, two, found = (load_file(folder / WEIGHTS) for folder in (*parts, tmp_path / "out"))
    for name, tensor in found.items():
        assert tensor.dtype == wanted
        assert torch.equal(tensor, ((one[name].double() + two[name].double()) / 2).to(wanted))


def test_adapters_of_one_base_become_its_weights_plus_their_mean_change(
    make: Make, tmp_path: Path
) -> None:
    base = make("base", 0)
    adapters = [write_adapter(base, tmp_path / f"adapter{seed}", seed=seed) for seed in (1, 2)]
    merge_experts([*adapters, base], tmp_path / "out", (0.5, 0.25, 0.25))
    assert record_of(tmp_path / "out")["adapter"] is None
    dense = [library.load(folder).network.state_dict() for folder in (*adapters, base)]
    found, changed = load_file(tmp_path / "out" / WEIGHTS), 0
    for name, weight in found.items():
        one, two, plain = (weights[name].double() for weights in dense)
        expected = plain + 0.5 * (one - plain) + 0.25 * (two - plain)
        torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6)
        changed += not torch.equal(weight, plain.float())
    assert changed == 4
    shutil.rmtree(base)
    _velocity(tmp_path / "out")


def test_the_record_says_of_what_it_is_made(make: Make, tmp_path: Path) -> None:
    facts = [
        {"licence": "mit", "shift": 2.0},
        {"licence": "cc-by-4.0", "shift": 2.0},
        {"shift": 2.0},
    ]
    parts = [make(f"part{k}", k, facts=one) for k, one in enumerate(facts)]
    # As a training leaves it, whose average has no place for it.
    shutil.copyfile(parts[1] / WEIGHTS, parts[1] / WEAK_FILE)
    seal(parts[1])
    notes = merge_experts(parts, tmp_path / "out", (0.5, 0.25, 0.25))
    assert any(f"the weak models are left out, of {parts[1]}, so" in note for note in notes)
    record = record_of(tmp_path / "out")
    assert record["licence"] == "cc-by-4.0 AND mit"
    assert (record["shift"], record["shard"], record["training"]) == (2.0, None, {})
    files = {f"{k}/{WEIGHTS}": sha256_of(one / WEIGHTS) for k, one in enumerate(parts)}
    assert record["source"]["files"] == files
    told = {"experts": ["part0", "part1", "part2"], "weights": [0.5, 0.25, 0.25]}
    assert record["source"]["options"] == told
    assert not (tmp_path / "out" / WEAK_FILE).exists()


@pytest.mark.integration
def test_all_verbs_take_a_soup_of_one_shard(
    shards: Path, ddpm_expert: Path, flow_expert: Path, tmp_path: Path, hddm: Command
) -> None:
    shard, out = shards / "shard_0", tmp_path / "out"
    train_expert(shard, tmp_path / "other", expert_settings("ddpm", prediction="epsilon", seed=8))
    assert hddm("merge", ddpm_expert, tmp_path / "other", "--out", out)[0] == 0
    assert record_of(out)["shard"] == record_of(ddpm_expert)["shard"]
    assert not (out / CALIBRATION).exists()
    assert hddm("calibrate", out, "--data", shard)[0] == 0
    assert hddm("verify", out)[0] == 0
    assert (
        hddm("sample", out, "--out", tmp_path / "images", "--num-images", 1, "--steps", 2)[0] == 0
    )
    assert hddm("assemble", out, flow_expert, "--out", tmp_path / "ensemble")[0] == 0
    train = ("--objective", "ddpm", "--steps", 1, "--device", "cpu")
    assert hddm("train", "expert", shard, "--init", out, "--out", tmp_path / "on", *train)[0] == 0
    assert hddm("convert", out, "--out", tmp_path / "again")[0] == 0


def test_all_differences_are_listed_at_once(make: Make, tmp_path: Path, hddm: Command) -> None:
    one, two = (
        make("one", 0),
        make("two", 1, depth=2, facts={"time_scale": 1.0, "latent_scale": 2.0}),
    )
    trained, far = make("trained", 2), make("far", 3, in_channels=4, num_classes=3)
    edit_json(trained / "expert.json", training_calibration=True)
    before = contents(tmp_path)
    code, out, error = hddm("merge", one, two, trained, far, "--out", tmp_path / "out")
    assert (code, out) == (1, "")
    told = dict(line.strip().split(": ", 1) for line in error.splitlines())
    assert told["hddm"] == "these experts cannot be merged, and nothing was written:"
    assert set(told) == {"hddm", str(two), str(trained), str(far)}
    for text in (
        "latent_scale 2.0, not 1.0",
        "depth of its network 2, not 1",
        "time_scale 1.0, not 1000.0",
    ):
        assert text in told[str(two)]
    assert "was trained together with its calibration" in told[str(trained)]
    for text in ("sample_shape (4, 4, 4), not (3, 4, 4)", "num_classes of its network 3, not None"):
        assert text in told[str(far)]
    assert contents(tmp_path) == before


@pytest.mark.integration
def test_another_network_or_prediction_is_told(
    make: Make, ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    write(
        plan_conversion(pipeline(tmp_path / "source", text_unet()), Conversion()), tmp_path / "unet"
    )
    out, networks = tmp_path / "out", [make("one", 0), tmp_path / "unet"]
    assert "network UNet2DConditionModel, not ExpertTransformer" in refusal(
        merge_experts, networks, out
    )
    told = refusal(merge_experts, [ddpm_expert, flow_expert], out)
    assert "prediction_type sample, not epsilon" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weights", [(0.5,), (0.5, 0.4), (1.5, -0.5)], ids=str)
def test_weights_must_be_one_an_expert_and_sum_to_1(
    weights: tuple[float, ...], make: Make, tmp_path: Path
) -> None:
    with pytest.raises(
        UsageError, match=r"`weights` \S+: give 2 numbers of 0 or more that sum to 1"
    ):
        merge_experts([make("one", 0), make("two", 1)], tmp_path / "out", weights)


def test_weights_that_are_not_finite_leave_nothing(make: Make, tmp_path: Path) -> None:
    one, two = make("one", 0), make("two", 1)
    content = load_file(two / WEIGHTS)
    next(iter(content.values())).view(-1)[0] = torch.inf
    save_file(content, two / WEIGHTS, {"format": "pt"})
    seal(two)
    with pytest.raises(HddmError, match="holds NaN or Inf"):
        merge_experts([one, two], tmp_path / "out")
    assert not (tmp_path / "out").exists()
