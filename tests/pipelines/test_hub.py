"""An ensemble goes to a hub as it lies on disk, with a card, and comes back the same."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from hddm.experts.assembly import change
from hddm.pipelines.hub import MARK, licence_of
from hddm.utils.records import write_manifest
from tests.artefacts import Command, copied, edit_json
from tests.ensemble_files import (
    edit_members,
    flow_expert,
    load_pipeline,
    pipeline_in_memory,
    write_ensemble,
    write_text,
)
from tests.hub import READS_ONLY, TOKEN, Hub, running_hub

NAME = "me/some-ensemble"
GIVEN = {"class_labels": [0, 1], "seed": 3, "num_inference_steps": 3, "output_type": "latent"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        # The other protocol for large files, of a service of its own.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts of pixels and classes, in half precision, of one licence, and code for diffusers."""
    experts = [flow_expert(seed, {"licence": "Apache-2.0"}, num_classes=3) for seed in range(2)]
    made = write_ensemble(tmp_path_factory.mktemp("pushed"), experts, dtype=torch.float16)
    change(made, diffusers_pipeline=True)
    return made


def _files(folder: Path) -> dict[str, bytes]:
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {
        one.as_posix(): (folder / one).read_bytes() for one in names if not one.name.startswith(".")
    }


@pytest.mark.slow
def test_a_pushed_folder_comes_back_as_it_was(
    folder: Path, hub: Hub, tmp_path: Path, hddm: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "samples.png"
    load_pipeline(folder)(seed=0, num_inference_steps=1).images[0].save(picture)
    code, out, err = hddm("push", folder, NAME, "--private", "--picture", picture)
    assert (code, out, TOKEN in err) == (0, f"{hub.endpoint}/{NAME}\n", False)
    assert (hub.visibility[NAME], hub.messages) == ("private", ["Upload an ensemble with hddm"])
    sent = dict(hub.repos[NAME])
    card = ModelCard(sent.pop("README.md").decode())
    assert sent.pop("picture.png") == picture.read_bytes()
    assert sent == _files(folder)
    assert "![Samples](picture.png)" in card.text
    assert "It makes images of 3 classes in 3×4×4 pixels; at sampling the experts are" in card.text
    again = load_pipeline(hub.write(NAME, tmp_path / "again"))
    assert torch.equal(again(**GIVEN).images, load_pipeline(folder)(**GIVEN).images)
    # The lines of the card, and diffusers by itself, in a process that knows the hub's address alone.
    (lines,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    folder_line, alone = re.findall(r"`(folder = .*?|DiffusionPipeline.*?)`", card.text)
    lines += (
        f"\nfrom diffusers import DiffusionPipeline\nimport torch\n{folder_line}\nother = {alone}"
    )
    lines += f"\nassert torch.equal(pipe(**{GIVEN}).images, other(**{GIVEN}).images)"
    home = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    script = [sys.executable, "-c", lines]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.run(
        script, cwd=tmp_path, env=os.environ | home | paths, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "image.png").is_file()
    # Once more, with one expert less, into the repository that is there.
    smaller = copied(folder, tmp_path / "smaller")
    change(smaller, remove=[1])
    assert hddm("push", smaller, NAME)[0] == 0
    assert hub.repos[NAME]["ensemble.json"] == (smaller / "ensemble.json").read_bytes()


@pytest.mark.integration
def test_a_pipeline_sends_what_it_is_now(folder: Path, hub: Hub, tmp_path: Path) -> None:
    pipe = load_pipeline(folder)
    with torch.no_grad():
        pipe.experts.experts[0].network.pos_embed += 1
    pipe.ensemble.strategy = "full"
    pipe.push_to_hub("me/changed", commit_message="From Python", token=TOKEN)
    assert hub.messages == ["From Python"]
    memory = pipeline_in_memory([flow_expert(7, num_classes=3)])
    with pytest.warns(UserWarning, match="Licence unknown.*: ask the owner of experts/0"):
        memory.push_to_hub("me/memory")
    assert "license: unknown" in hub.repos["me/memory"]["README.md"].decode()
    memory.push_to_hub("me/memory", licence="MIT")
    assert "license: mit" in hub.repos["me/memory"]["README.md"].decode()
    for name, ours in (("me/changed", pipe), ("me/memory", memory)):
        again = load_pipeline(hub.write(name, tmp_path / name))
        assert torch.equal(again(**GIVEN).images, ours(**GIVEN).images)
        assert again.ensemble.strategy == ours.ensemble.strategy


def test_what_a_hub_refuses_is_one_line_without_the_token(
    folder: Path, hub: Hub, tmp_path: Path, hddm: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token, said in (
        (
            "hf_wrong",
            f"{hub.endpoint}: the hub does not accept this token; log in again with hf auth login",
        ),
        (
            READS_ONLY,
            f"{hub.endpoint}: this token may not write to {NAME}; use a token of its owner",
        ),
        (None, "no token for the hub: set HF_TOKEN, or log in with hf auth login"),
    ):
        monkeypatch.setenv("HF_TOKEN", token or "")
        code, out, err = hddm("push", folder, NAME)
        assert (code, out, err.count("\n"), f"{token}" in err) == (1, "", 1, False), err
        assert err.startswith(f"hddm: {said}")
    assert hub.repos == {}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("some-ensemble", "a/b/c", "me/", "me/näme", "https://hub/me"):
        assert hddm("push", folder, name)[0] == 2
    assert "no ensemble folder" in hddm("push", folder / "experts/0", NAME)[2]
    spoilt = copied(folder, tmp_path)
    (spoilt / "pipeline.py").write_text("import os")
    assert "pipeline.py: is not hddm's" in hddm("push", spoilt, NAME)[2]
    (spoilt / "pipeline.py").unlink()
    edit_json(spoilt / "manifest.json", files={"ensemble.json": "0" * 64})
    assert "differs from its" in hddm("push", spoilt, NAME)[2]
    assert hub.repos == {}
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    code, _, err = hddm("push", folder, NAME)
    assert (code, err.count("\n"), "http://127.0.0.1:9: " in err) == (1, 1, True)


@pytest.mark.integration
def test_a_card_of_ones_own_stays_and_one_of_hddm_is_made_anew(
    folder: Path, hub: Hub, tmp_path: Path, hddm: Command
) -> None:
    own = copied(folder, tmp_path)
    (own / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    code, out, err = hddm("push", own, NAME)
    assert (code, err) == (0, "")
    assert f"note: {own / 'README.md'} is yours, and is the card as it is" in out
    assert hub.repos[NAME]["README.md"] == (own / "README.md").read_bytes()
    assert (
        "--licence: is for a card that hddm writes"
        in hddm("push", own, NAME, "--licence", "MIT")[2]
    )
    (own / "README.md").write_text(f"an old one\n{MARK}\n")
    assert hddm("push", own, NAME)[0] == 0
    assert "an old one" not in hub.repos[NAME]["README.md"].decode()


@pytest.mark.integration
def test_only_what_belongs_to_an_ensemble_is_sent_and_the_rest_is_named(
    folder: Path, hub: Hub, tmp_path: Path, hddm: Command
) -> None:
    made = copied(folder, tmp_path)
    keys = ("NOTICE_private.txt", "experts/0/wandb/README.md", "experts/0/wandb/me.png")
    keys += ("experts/0/wandb/token.json", "experts/1/manifest.json.bak", "id_rsa", "secrets.txt")
    for name in (*keys, "LICENSE", "pictures/sheet.PNG", ".env"):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(name.encode())
    code, out, _ = hddm("push", made, NAME, "--dry-run")
    assert (code, f"note: left out, since no manifest lists them: {', '.join(keys)}\n" in out) == (
        0,
        True,
    )
    assert hddm("push", made, NAME)[0] == 0
    sent = dict(hub.repos[NAME])
    assert {sent.pop(name) for name in ("LICENSE", "pictures/sheet.PNG")} == {
        b"LICENSE",
        b"pictures/sheet.PNG",
    }
    assert sent.keys() - {"README.md"} == _files(folder).keys()
    (made / "experts/1/config.json").unlink()
    assert "experts/1/config.json: is missing; copy" in hddm("push", made, "me/other")[2]
    edit_json(made / "experts/1/manifest.json", files={"../../../keys": "0" * 64})
    write_manifest(made)
    assert "points outside the folder" in hddm("push", made, "me/other")[2]
    assert hub.repos.keys() == {NAME}


@pytest.mark.parametrize(
    ("licences", "front", "name", "first"),
    [
        (["MIT", "mit"], "mit", None, None),
        (["Apache-2.0", "MIT"], "other", "apache-2.0-and-mit", None),
        (["CreativeML Open RAIL-M"], "other", "creativeml-open-rail-m", None),
        (
            ["MIT", "CC-BY-NC-4.0 (assumed: released so)"],
            "other",
            "cc-by-nc-4.0-and-mit",
            "b is under CC-BY",
        ),
        (["cc-by-nc-4.0", "cc-by-nc-4.0"], "cc-by-nc-4.0", None, "a is under cc-by-nc-4.0"),
        (
            ["MIT AND FLUX.1 [dev] Non-Commercial"],
            "other",
            "flux.1-dev-non-commercial-and-mit",
            "a is under",
        ),
        (["Inc-open"], "other", "inc-open", None),
        (["MIT", None], "unknown", None, "ask the owner of b"),
        ([None, "cc-by-nc-4.0"], "other", "cc-by-nc-4.0", "b is under"),
    ],
)
def test_the_licences_of_the_parts_decide_that_of_the_card(
    licences: list[str | None], front: str, name: str | None, first: str | None
) -> None:
    found = licence_of(dict(zip("abc", licences, strict=False)))
    assert found[:2] == (front, name)
    assert (first is None) == (not found[2])
    assert first is None or first in found[2][0]
    if None in licences:
        assert "ask the owner of" in found[2][-1]


def test_a_card_is_read_by_hubs_and_says_first_what_is_not_commercial(
    tmp_path: Path, hddm: Command
) -> None:
    folder = write_text(tmp_path / "made")
    edit_json(folder / "experts/0/expert.json", licence="CC-BY-NC-4.0 (assumed)")
    edit_json(folder / "experts/1/expert.json", licence="odd | <b>licence</b>")
    (folder / "vae" / "README.md").write_text("---\nlicense: mit\n---\n")
    code, out, err = hddm("push", folder, NAME, "--dry-run")
    assert (code, err) == (0, "")
    text = out[out.index("---\n") :]
    card = ModelCard(text)
    assert yaml.safe_load(text.split("---")[1]) == {
        "library_name": "hddm",
        "license": "other",
        "license_name": "cc-by-nc-4.0-and-mit-and-odd-b-licence-b",
        "pipeline_tag": "text-to-image",
        "tags": ["hddm", "diffusion", "ensemble", "mixture-of-experts"],
    }
    title, first, *_ = [line for line in card.text.splitlines() if line]
    assert title == "# some-ensemble"
    assert first.startswith(
        "**Non-commercial**: experts/0 is under CC-BY-NC-4.0 (assumed), so all of this"
    )
    assert re.search(r"^\| experts/1 +\| flow .*odd \\\| &lt;b>licence", text, re.MULTILINE)
    assert re.search(r"^\| vae +\|.*\| mit +\|$", text, re.MULTILINE)
    assert (
        f"{(folder / 'vae/diffusion_pytorch_model.safetensors').stat().st_size:,}  vae/diff" in out
    )
    (lines,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert 'pipe("a red car", seed=0)' in lines
    assert len([line for line in lines.splitlines() if line]) <= 5


def test_a_licence_from_elsewhere_stays_within_its_line(
    folder: Path, tmp_path: Path, hddm: Command
) -> None:
    made = copied(folder, tmp_path)
    edit_json(made / "experts/0/expert.json", licence="CC-BY-NC\n\n# Free for all\x07")
    edit_members(made, name=["[mine](http://bad) *x* `y`", "b_c"])
    code, out, err = hddm("push", made, NAME, "--dry-run")
    assert (code, err) == (0, "")
    assert re.findall(r"^.*Free for all", out, re.MULTILINE)[0].startswith(
        "note: Non-commercial: experts/0"
    )
    assert "\x07" not in out
    assert r"experts/0 (\[mine\](http://bad) \*x\* \`y\`)" in out[out.index("# some-ensemble") :]
    assert "](http" not in out[out.index("# some-ensemble") :].replace(r"\](http", "")


@pytest.mark.integration
def test_measured_numbers_are_those_of_this_model(
    folder: Path, ensemble: Path, images: Path, tmp_path: Path, hddm: Command
) -> None:
    samples, results, tables = (tmp_path / name for name in ("samples", "result.json", "tables.md"))
    assert hddm("sample", ensemble, "--out", samples, "--num-images", 8, "--steps", 1)[0] == 0
    line = [
        "evaluate",
        samples,
        "--reference",
        images,
        "--out",
        results,
        "--features",
        "classifier",
    ]
    assert hddm(*line, "--allow-few")[0] == 0
    _, out, _ = hddm("push", ensemble, NAME, "--dry-run", "--results", results)
    assert re.search(r"## Measured\n\n\|.*\n.*\n\| Fréchet distance to training images .*\d", out)
    assert "Not comparable: too few images" in out
    assert (
        "measures another model" in hddm("push", folder, NAME, "--dry-run", "--results", results)[2]
    )
    tables.write_text("| a | b |\n")
    _, out, _ = hddm("push", folder, NAME, "--dry-run", "--results", tables)
    assert "## Measured\n\n| a | b |\n" in out
