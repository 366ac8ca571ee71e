"""Inspecting: what an artefact is, for scripts and for readers."""

import json
from pathlib import Path

import pytest

from hddm.components.vae import vae_facts
from hddm_cli.plain import plain_lines
from tests.artefacts import Command, copied
from tests.component_files import write_vae


@pytest.mark.parametrize("kind", ["expert", "router", "ensemble", "shard", "partition"])
def test_inspect_tells_what_a_folder_is(
    kind: str, ddpm_expert: Path, router: Path, ensemble: Path, whole: Path, shards: Path, hddm: Command
) -> None:
    folders = {"expert": ddpm_expert, "router": router, "ensemble": ensemble, "shard": whole}
    folder = (folders | {"partition": shards})[kind]
    code, out, _ = hddm("inspect", folder, "--json")
    facts = json.loads(out)
    assert (code, facts["kind"]) == (0, kind)
    lines = hddm("inspect", folder)[1].splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == list(facts)
    assert not [line for line in lines if any(sign in line for sign in ("(", "[", "{", '"', "None", "True"))]


def test_inspect_tells_readers_what_an_expert_works_on(class_expert: Path, hddm: Command) -> None:
    lines = hddm("inspect", class_expert)[1].splitlines()
    for line in (
        "sample_shape: 1 × 4 × 4",
        "noise_range: 0 … 1",
        "schedule: name=linear",
        "classes: columns, rows",
        "calibrated: yes",
        "licence: none",
        "  class_images: 24, 24",
        "  steps: 300",
    ):
        assert line in lines


def test_an_encoded_partition_is_called_so_with_its_vae_and_scale(
    shards: Path, tmp_path: Path, hddm: Command
) -> None:
    write_vae(tmp_path / "vae")
    for name, options in (("latents", ("--vae", tmp_path / "vae", "--resolution", 8)), ("pixels", ())):
        assert hddm("encode", shards, "--out", tmp_path / name, *options)[0] == 0
        facts = json.loads(hddm("inspect", tmp_path / name, "--json")[1])
        assert (facts["kind"], facts["encoding"]["space"]) == ("encoded partition", name)
        assert facts["sizes"] == json.loads(hddm("inspect", shards, "--json")[1])["sizes"]
    vae = vae_facts(tmp_path / "vae")
    said = hddm("inspect", tmp_path / "latents")[1]
    assert f"\nvae: kind=AutoencoderKL, fingerprint={vae.fingerprint}, scale={vae.scale:g}, shift=0\n" in said
    assert "\n  shape: 4 × 4 × 4\n" in said
    assert "\nvae: none\n" in hddm("inspect", tmp_path / "pixels")[1]


def test_a_shard_of_very_many_images_is_inspected(whole: Path, tmp_path: Path, hddm: Command) -> None:
    """Its manifest is larger than other records may be."""
    shard = copied(whole, tmp_path)
    with (shard / "manifest.json").open("a") as file:
        file.write(" " * 2**24)
    code, out, err = hddm("inspect", shard)
    assert code == 0, err
    assert "\nimages: 48\n" in out
    assert hddm("data", "check", shard)[0] == 0


def test_values_become_lines_that_a_reader_knows() -> None:
    facts = {
        "shape": [3, 32, 32],
        "noise_range": (0.0, 0.99368),
        "known": True,
        "text": None,
        "prefix": "",
        "none_of_it": [],
        "parameters": 1234567,
        "seed": 1234567,
        "few": {"depth": 2, "norm_eps": 1e-05},
        "many": {f"key_{k}": {"place": "x" * 30} for k in range(3)},
        "rows": [[0.25, 0.75], [1.0, 0.0]],
        "skipped": [{"file": "a.png", "reason": "is no image"}],
        "hashes": ["a" * 64, "b" * 64],
        "numbers": list(range(1000)),
    }
    assert list(plain_lines(facts)) == [
        "shape: 3 × 32 × 32",
        "noise_range: 0 … 0.99368",
        "known: yes",
        "text: none",
        "prefix: none",
        "none_of_it: none",
        "parameters: 1,234,567",
        "seed: 1234567",
        "few: depth=2, norm_eps=1e-05",
        "many:",
        *(f"  key_{k}: place={'x' * 30}" for k in range(3)),
        "rows:",
        "  0.25, 0.75",
        "  1, 0",
        "skipped:",
        "  file=a.png, reason=is no image",
        "hashes:",
        f"  {'a' * 64}",
        f"  {'b' * 64}",
        f"numbers: {', '.join(map(str, range(20)))}, … (1000 in all; --json tells them)",
    ]
