"""Models by their names on a hub: which files are fetched, and what is refused."""

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from diffusers import DDIMScheduler

from hddm.experts.loading import load
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.hub import HubName, Wanted, local, needed_files, origin_of
from hddm.velocity import VelocityField
from tests.artefacts import Command, refusal
from tests.checkpoint_files import SD_BETAS, pipeline, text_unet
from tests.component_files import write_clip, write_vae
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
    # A mistyped path is not looked for on the hub.
    for text in ("models/flux.safetensors", "downloads/sd15.ckpt", "benchmarks/mine.json"):
        assert HubName.parse(text) is None
    for text in (
        *(
            "runs/my--expert",
            "runs/mine.git",
            "runs/mine-",
            "runs/-mine",
            "runs/a..b",
            "runs/mine.",
        ),
        *("runs-/mine", f"runs/{'x' * 97}", f"{'x' * 97}/mine", "runs/my--expert/unet@main"),
    ):
        assert HubName.parse(text) is None
        assert local(text) == Path(text)
    assert HubName.parse(f"{'x' * 96}/{'y' * 96}") is not None
    assert HubName.parse("a/b") == ("a/b", "", None)
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
    papers = [
        "model_index.json",
        "README.md",
        "scheduler/scheduler_config.json",
        "tokenizer/vocab.json",
        "tokenizer/merges.txt",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "unet/config.json",
    ]
    half = ["vae/config.json", "vae/diffusion_pytorch_model.fp16.safetensors"]
    plain, raw = f"unet/{UNET[0]}", "unet/diffusion_pytorch_model.non_ema.safetensors"
    for wanted, network, vae in (
        # Readers of a VAE take the half precision copy where there is no plain one.
        (Wanted(), [plain], half),
        (Wanted("fp16"), [f"unet/{UNET[1]}"], half),
        (Wanted("non_ema"), [raw], half),
        (Wanted(weights="raw"), [plain, raw], half),
        (Wanted(weights="ema"), [plain, raw], half),
    ):
        assert needed_files(named("me/mine"), PIPELINE, PARTS, wanted) == papers + network + vae
    networks = [one for one in PIPELINE if one != f"unet/{UNET[0]}"]
    bf16 = [one.replace("fp16", "bf16") for one in networks if one.startswith("unet/")]
    found = needed_files(named("me/mine"), networks + bf16, PARTS, Wanted("bf16"))
    assert [one for one in found if "bf16" in one] == [
        "unet/diffusion_pytorch_model.bf16.safetensors",
        "vae/diffusion_pytorch_model.bf16-00001-of-00002.safetensors",
        "vae/diffusion_pytorch_model.bf16-00002-of-00002.safetensors",
        "vae/diffusion_pytorch_model.safetensors.index.bf16.json",
    ]
    assert needed_files(named("me/mine/unet"), PIPELINE, {}) == ["unet/config.json", plain]
    both = ["unet/config.json", plain, raw]
    assert needed_files(named("me/mine/unet"), PIPELINE, {}, Wanted(weights="raw")) == both
    one = f"unet/{UNET[1]}"
    assert needed_files(named(f"me/mine/{one}"), PIPELINE, {}) == [one]
    model = ["README.md", "config.json", "diffusion_pytorch_model.safetensors"]
    assert needed_files(named("me/mine"), [*model, "run.py", "a.bin"], {}) == model
    assert needed_files(named("me/mine/vae"), PIPELINE, {}) == half


def test_a_choice_among_variants_is_asked_for_before_anything_is_downloaded() -> None:
    stem = "diffusion_pytorch_model"
    index, config = "model_index.json", "unet/config.json"
    for held, wanted, said in (
        (("bf16",), Wanted(), "unet/ has weights of the variants bf16 alone; pass `variant` with"),
        (("fp16",), Wanted(), "unet/ has weights of the variants fp16 alone; pass `variant` with"),
        (("bf16", "fp16"), Wanted(), "of the variants bf16 and fp16 alone"),
        (("fp16", "non_ema"), Wanted(), "of the variants fp16 and non_ema alone"),
        (("fp16",), Wanted("bf16"), "has no weights of `variant` bf16 (found: fp16); pass another"),
        (("",), Wanted("fp16"), "no weights of `variant` fp16 (found: none with a name); pass"),
    ):
        names = [f"unet/{stem}{'.' * bool(one)}{one}.safetensors" for one in held]
        parts = {"_class_name": "Mine", "unet": ["diffusers", "UNet2DConditionModel"]}
        told = refusal(needed_files, named("me/mine"), [index, config, *names], parts, wanted)
        assert told.startswith("me/mine: unet/ has")
        assert said in told
    # A VAE or text encoder of another variant alone would be found by no reader.
    for folder, file in (("vae", stem), ("text_encoder", "model")):
        files = [index, f"{folder}/config.json", f"{folder}/{file}.bf16.safetensors"]
        parts = {"_class_name": "Mine", folder: ["a", "B"]}
        told = refusal(needed_files, named("me/mine"), files, parts)
        assert f"{folder}/ has weights of the variants bf16 alone" in told
        assert files[2] in needed_files(named("me/mine"), files, parts, Wanted("bf16"))


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


def test_a_cache_that_cannot_be_written_is_no_missing_network(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["me/mine"] = {"config.json": b"{}", "model.safetensors": b"0" * 100}
    for problem in (errno.ENOSPC, errno.EACCES, errno.EROFS):

        def broken(*_: object, problem: int = problem, **__: object) -> None:
            raise OSError(problem, "no")

        monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
        told = refusal(local, "me/mine")
        assert f"me/mine: cannot be kept in {tmp_path / 'cache'}" in told
        assert "in the environment variable HF_HOME" in told
        assert "reached" not in told


def test_what_does_not_fit_on_the_disk_is_not_begun_and_what_is_there_does_not_count(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["me/mine"] = {"config.json": b"{}", "model.safetensors": b"0" * 1000}
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    told = "cache: needs 1.02 kB, and 1.00 kB are free on its disk"
    assert told in refusal(local, "me/mine")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    usage = usage._replace(free=1100)
    folder = local("me/mine")
    usage = usage._replace(free=10)
    assert local("me/mine") == folder


@pytest.mark.slow
def test_a_variant_a_set_and_the_licence_of_a_card_are_those_of_the_same_folder(
    hub: Hub, tmp_path: Path, hddm: Command
) -> None:
    scheduler = DDIMScheduler(**SD_BETAS, prediction_type="epsilon")
    folder = tmp_path / "pipe"
    pipeline(folder, text_unet(), scheduler)
    write_vae(folder / "vae")
    write_clip(folder)
    text_unet().half().save_pretrained(folder / "unet", variant="fp16")
    text_unet(seed=1).save_pretrained(folder / "unet", variant="non_ema")
    (folder / "README.md").write_text("---\nlicense: openrail\n---\n")
    put(hub, "me/mine", folder)
    for number, options in enumerate(
        (
            ("--variant", "fp16"),
            ("--weights", "raw"),
            ("--weights", "ema"),
            ("--variant", "non_ema"),
        )
    ):
        records = []
        for source, out in (("me/mine", f"hub {number}"), (folder, f"folder {number}")):
            code, _, error = hddm("convert", source, "--out", tmp_path / out, *options)
            assert code == 0, error
            records.append(json.loads((tmp_path / out / "expert.json").read_text()))
        assert records[0]["weights"] == records[1]["weights"]
        assert records[0]["licence"] == records[1]["licence"] == "openrail"
        assert records[0]["source"]["files"] == records[1]["source"]["files"]
    code, _, error = hddm("convert", "me/mine", "--out", tmp_path / "no", "--variant", "bf16")
    assert code == 1
    assert "me/mine: unet/ has no weights of --variant bf16 (found: fp16 and non_ema)" in error
    code, said, error = hddm("inspect", "me/mine", "--variant", "fp16")
    assert code == 0, error
    assert "float16" in said
    code, _, error = hddm("convert", "runs/my--expert", "--out", tmp_path / "no")
    assert (code, error) == (2, "hddm: runs/my--expert: no such file or folder\n")
