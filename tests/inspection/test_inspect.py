"""Inspecting: what an artefact is, for scripts and for readers."""

import json
import shutil
from pathlib import Path

import pytest

from hddm.networks.vae import vae_record_of
from hddm.training.expert import train_expert
from hddm.training.settings import RunOptions
from tests.artefacts import Command, copied, expert_settings
from tests.checkpoint_files import pipeline, text_unet
from tests.component_files import write_vae


@pytest.mark.parametrize("kind", ["expert", "router", "ensemble", "shard", "partition"])
def test_inspect_tells_what_a_folder_is(
    kind: str,
    ddpm_expert: Path,
    router: Path,
    ensemble: Path,
    whole: Path,
    shards: Path,
    hddm: Command,
) -> None:
    folders = {"expert": ddpm_expert, "router": router, "ensemble": ensemble, "shard": whole}
    folder = (folders | {"partition": shards})[kind]
    code, out, _ = hddm("inspect", folder, "--json")
    facts = json.loads(out)
    assert (code, facts["kind"]) == (0, kind)
    lines = hddm("inspect", folder)[1].splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == list(facts)
    assert not [
        line for line in lines if any(sign in line for sign in ("(", "[", "{", '"', "None", "True"))
    ]


FIRST = {
    "pipeline": "kind summary layout network parameters sample_shape space conditions licence unstated",
    "expert": "kind summary parameters dtypes sample_shape space conditions classes licence components",
    "ensemble": "kind experts names objectives prior strategy router classes parameters manifest",
}


@pytest.mark.parametrize("kind", FIRST)
def test_the_ten_lines_that_matter_come_first(
    kind: str, ddpm_expert: Path, ensemble: Path, tmp_path: Path, hddm: Command
) -> None:
    folder = ddpm_expert if kind == "expert" else ensemble
    if kind == "pipeline":
        folder = pipeline(tmp_path / "sd", text_unet())
        write_vae(folder / "vae")
    lines = hddm("inspect", folder)[1].splitlines()[:10]
    assert [line.split(":")[0] for line in lines] == FIRST[kind].split()
    if kind == "pipeline":
        assert lines[1] == "summary: its network predicts epsilon, on 1000 steps of linear betas"


def test_an_encoded_partition_is_called_so_with_its_vae_and_scale(
    shards: Path, tmp_path: Path, hddm: Command
) -> None:
    write_vae(tmp_path / "vae")
    for name, options in (
        ("latents", ("--vae", tmp_path / "vae", "--resolution", 8)),
        ("pixels", ()),
    ):
        assert hddm("encode", shards, "--out", tmp_path / name, *options)[0] == 0
        facts = json.loads(hddm("inspect", tmp_path / name, "--json")[1])
        assert (facts["kind"], facts["encoding"]["space"]) == ("encoded partition", name)
        assert facts["sizes"] == json.loads(hddm("inspect", shards, "--json")[1])["sizes"]
    vae = vae_record_of(tmp_path / "vae")
    said = hddm("inspect", tmp_path / "latents")[1]
    assert (
        f"\nvae: kind=AutoencoderKL, fingerprint={vae.fingerprint}, scale={vae.scale:g}, shift=0\n"
        in said
    )
    assert "\n  shape: 4 × 4 × 4\n" in said
    assert "\nvae: none\n" in hddm("inspect", tmp_path / "pixels")[1]


def test_a_shard_of_very_many_images_is_inspected(
    whole: Path, tmp_path: Path, hddm: Command
) -> None:
    """Its manifest is larger than other records may be."""
    shard = copied(whole, tmp_path)
    with (shard / "manifest.json").open("a") as file:
        file.write(" " * 2**24)
    code, out, err = hddm("inspect", shard)
    assert code == 0, err
    assert "\nimages: 48\n" in out
    assert hddm("data", "check", shard)[0] == 0


LAST = "checkpoints/step_00000008"


@pytest.fixture(scope="module")
def killed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of experts, the first finished, the second not, and changed on its way."""
    folder = tmp_path_factory.mktemp("killed") / "experts"
    run = RunOptions(checkpoint_every=2)
    train_expert(shards / "shard_0", folder / "expert_0", expert_settings("ddpm"), run=run)
    train_expert(shards / "shard_1", folder / "expert_1", expert_settings("flow"), run=run)
    shutil.rmtree(folder / "expert_1")
    left = folder / "expert_1.run"
    shutil.rmtree(left / "checkpoints" / "step_00000010")
    record = json.loads((left / "run.json").read_text())
    change = {"step": 4, "key": "learning_rate", "was": 1.0, "is": 0.001}
    (left / "run.json").write_text(json.dumps({**record, "changes": [change]}))
    return folder


@pytest.mark.integration
def test_a_killed_run_tells_its_step_its_settings_its_last_checkpoint_and_its_changes(
    killed: Path, hddm: Command
) -> None:
    facts = json.loads(hddm("inspect", killed / "expert_1.run", "--json")[1])
    told = [facts[key] for key in ("kind", "of", "finished", "step", "steps")]
    assert told == ["run", "expert", False, 8, 10]
    assert facts["last_checkpoint"] == LAST
    assert (facts["settings"]["objective"], facts["keeping"]["checkpoint_every"]) == ("flow", 2)
    said = hddm("inspect", killed / "expert_1.run")[1]
    assert said.endswith("changes:\n  step=4, key=learning_rate, was=1, is=0.001\n")
    finished = json.loads(hddm("inspect", killed / "expert_0.run", "--json")[1])
    assert (finished["finished"], finished["step"]) == (True, 10)


@pytest.mark.parametrize(
    ("record", "kind", "verb"),
    [
        ("results.json", "benchmark", "hddm compare"),
        ("0/expert.json", "experts", "hddm assemble, hddm verify"),
        ("cat/1.png", "images", "hddm data check, hddm partition"),
    ],
)
def test_what_another_verb_reads_is_named_with_it(
    record: str, kind: str, verb: str, tmp_path: Path, hddm: Command
) -> None:
    path = tmp_path / "folder" / record
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert hddm("inspect", tmp_path / "folder")[:2] == (0, f"kind: {kind}\nread_by: {verb}\n")
    # A model may have any of them beside it.
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert hddm("inspect", tmp_path / "folder")[0] == 1
