"""Models by their names on a hub: which files are fetched, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hddm.experts.loading import load
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.hub import HubName, local, needed_files, origin_of
from hddm.velocity import VelocityField
from tests.artefacts import Command, refusal
from tests.hub import COMMIT, Hub, running_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as hub:
        template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield hub


def put(hub: Hub, repo: str, folder: Path, inside: str = "") -> None:
    files = hub.repos.setdefault(repo, {})
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            files[f"{inside}{path.relative_to(folder).as_posix()}"] = path.read_bytes()


def named(text: str) -> HubName:
    found = HubName.parse(text)
    assert found is not None
    return found


def test_a_name_has_an_owner_and_no_folder_of_its_own_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert HubName.parse("me/mine") == ("me/mine", "", None)
    assert HubName.parse("me/mine/unet@main") == ("me/mine", "unet", "main")
    assert HubName.parse("me/mine/a b/c.safetensors") == ("me/mine", "a b/c.safetensors", None)
    for text in ("mine", "./me/mine", "../me/mine", "/me/mine", "me/mine/../other", "me/.."):
        assert HubName.parse(text) is None
    (tmp_path / "me").mkdir()
    assert HubName.parse("me/mine") is None


UNET = ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"]
PIPELINE = [
    "model_index.json",
    "v1-5-pruned.safetensors",
    "v1-5-pruned.ckpt",
    "README.md",
    "safety_checker/model.safetensors",
    "feature_extractor/preprocessor_config.json",
    "scheduler/scheduler_config.json",
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "text_encoder/pytorch_model.bin",
    "text_encoder/flax_model.msgpack",
    "unet/config.json",
    *[f"unet/{one}" for one in UNET],
    "unet/diffusion_pytorch_model.non_ema.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.bf16-00001-of-00002.safetensors",
    "vae/diffusion_pytorch_model.bf16-00002-of-00002.safetensors",
    "vae/diffusion_pytorch_model.safetensors.index.bf16.json",
    "vae/diffusion_pytorch_model.fp16.safetensors",
]
PARTS = {
    "_class_name": "StableDiffusionPipeline",
    **dict.fromkeys(("safety_checker", "feature_extractor", "scheduler", "tokenizer"), ("a", "B")),
    **dict.fromkeys(("text_encoder", "unet", "vae"), ("a", "B")),
}


def test_of_a_pipeline_one_form_of_the_weights_of_its_parts_is_needed() -> None:
    assert needed_files(named("me/mine"), PIPELINE, PARTS) == [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "tokenizer/vocab.json",
        "tokenizer/merges.txt",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.bf16-00001-of-00002.safetensors",
        "vae/diffusion_pytorch_model.bf16-00002-of-00002.safetensors",
        "vae/diffusion_pytorch_model.safetensors.index.bf16.json",
    ]
    assert needed_files(named("me/mine/unet"), PIPELINE, {}) == [
        "unet/config.json",
        f"unet/{UNET[0]}",
    ]
    one = "unet/diffusion_pytorch_model.fp16.safetensors"
    assert needed_files(named(f"me/mine/{one}"), PIPELINE, {}) == [one]


def test_what_cannot_be_fetched_is_named() -> None:
    told = refusal(needed_files, named("me/mine/unets"), PIPELINE, {})
    assert told == "me/mine/unets: the repository has no such file or folder"
    told = refusal(needed_files, named("me/mine/v1-5-pruned.ckpt"), PIPELINE, {})
    assert "only .safetensors files are downloaded" in told
    told = refusal(needed_files, named("me/loras"), ["a.safetensors", "b.safetensors"], {})
    assert "has 2 files of weights; name one, as me/loras/a.safetensors" in told
    told = refusal(needed_files, named("me/old"), ["config.json", "pytorch_model.bin"], {})
    assert "holds pickles alone, which are not downloaded" in told
    assert "(pytorch_model.bin)" in told
    told = refusal(needed_files, named("me/notes"), ["README.md"], {})
    assert "holds no weights that hddm reads" in told


@pytest.mark.integration
def test_an_ensemble_and_an_expert_are_read_by_their_names(
    hub: Hub, ensemble: Path, flow_expert: Path, tmp_path: Path, hddm: Command
) -> None:
    put(hub, "me/mine", ensemble)
    put(hub, "me/parts", flow_expert, "expert/")
    hub.repos["me/mine"]["run.py"] = b"raise SystemExit"
    opened = HDDMPipeline.from_pretrained("me/mine")
    assert len(opened.ensemble.experts) == len(
        HDDMPipeline.from_pretrained(ensemble).ensemble.experts
    )
    assert not list((tmp_path / "cache").rglob("run.py"))
    assert isinstance(load("me/parts/expert"), VelocityField)
    options = ["--num-images", "1", "--steps", "1"]
    code, _, error = hddm("sample", "me/mine", "--out", tmp_path / "images", *options)
    assert code == 0, error
    # A second time nothing is asked for but the commit.
    assert origin_of(local("me/mine")) == f"me/mine@{COMMIT}"
    assert origin_of(ensemble) is None


@pytest.mark.integration
def test_a_conversion_records_the_commit(
    hub: Hub, flow_expert: Path, tmp_path: Path, hddm: Command
) -> None:
    put(hub, "me/parts", flow_expert, "expert/")
    code, _, error = hddm("convert", "me/parts/expert", "--out", tmp_path / "converted")
    assert code == 0, error
    record = json.loads((tmp_path / "converted" / "expert.json").read_text())
    assert record["source"]["options"]["downloaded_from"] == f"me/parts@{COMMIT}"


def test_without_a_network_the_message_says_how_to_fetch_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = refusal(local, "me/none")
    assert "me/none: no such file or folder, and no such public repository or revision" in told
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = refusal(local, "me/mine")
    assert "me/mine: no such file or folder, and the hub cannot be reached" in told
    assert "hf download me/mine" in told
