"""Pipelines to folders and back: bit for bit, from anywhere, in part, and without foreign code."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hddm
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.errors import HddmError
from hddm.utils.tensors import read_safetensors
from tests.artefacts import contents, copied, refusal
from tests.ensemble_files import (
    WEIGHTS,
    flow_expert,
    load_ensemble,
    load_pipeline,
    pipeline_in_memory,
    write_ensemble,
    write_text,
)

NUM = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four class-conditional experts of pixels."""
    experts = [flow_expert(seed, num_classes=3) for seed in range(NUM)]
    return write_ensemble(tmp_path_factory.mktemp("folders"), experts)


def _images(pipe: HDDMPipeline, **options: Any) -> Tensor:
    given = {
        "class_labels": [0, 1, 2, 0, 1, 2],
        "seed": 3,
        "num_inference_steps": 5,
        "output_type": "latent",
    }
    return pipe(**{**given, **options}).images


@pytest.mark.integration
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_pipeline_comes_back_bit_for_bit(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    pipe = load_pipeline(folder, torch_dtype=dtype)
    pipe.save_pretrained(tmp_path / "again")
    for k in range(NUM):
        stored = read_safetensors(tmp_path / "again" / "experts" / str(k) / WEIGHTS)
        truth = read_safetensors(folder / "experts" / str(k) / WEIGHTS)
        assert stored.keys() == truth.keys()
        assert all(torch.equal(value, truth[name].to(dtype)) for name, value in stored.items())
    again = load_pipeline(tmp_path / "again", torch_dtype=dtype)
    loaded, labels = (
        load_ensemble(tmp_path / "again", dtype=dtype),
        torch.tensor([0, 1, 2, 0, 1, 2]),
    )
    images = _images(again)
    assert torch.equal(hddm.sample(loaded, 6, 3, 5, class_labels=labels), images)
    # Weights that were cast and weights in a file begin at other addresses, and on some processors products
    # in float64 round by those.
    rounding = 1e-12 if dtype == torch.float64 else 0.0
    assert torch.allclose(images, _images(pipe), rtol=0, atol=rounding)
    if dtype == torch.float32:
        again.save_pretrained(tmp_path / "third")
        assert contents(tmp_path / "third") == contents(tmp_path / "again")


def test_text_encoder_vae_and_tokenizer_come_along(tmp_path: Path) -> None:
    pipe = load_pipeline(write_text(tmp_path / "made"))
    pipe.save_pretrained(tmp_path / "again")
    again = load_pipeline(tmp_path / "again")
    given = {
        "class_labels": None,
        "prompt": ["a cat", "a dog"],
        "guidance_scale": 3.0,
        "output_type": "pt",
    }
    assert torch.equal(_images(again, **given), _images(pipe, **given))
    for part in ("vae", "text_encoder", "tokenizer"):
        assert (tmp_path / "again" / part).is_dir()


@pytest.mark.parametrize(
    "name", ["my models/mixed ensemble (2)", "modèles/アンサンブル-ß", "relative", "link"]
)
def test_any_path_will_do(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "link":
        Path(name).symlink_to(folder)
    else:
        shutil.copytree(folder, name)
    pipe = HDDMPipeline.from_pretrained(name if name == "relative" else str(tmp_path / name))
    pipe.set_progress_bar_config(disable=True)
    assert torch.equal(_images(pipe), _images(load_pipeline(folder)))
    pipe.save_pretrained(f"{name} once more")
    assert torch.equal(_images(load_pipeline(tmp_path / f"{name} once more")), _images(pipe))


@pytest.mark.integration
@pytest.mark.parametrize("chosen", [[2], [0, 3], [3, 1, 0]], ids=str)
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_some_experts_are_the_ensemble_with_its_router_kept_to_them(
    folder: Path, tmp_path: Path, chosen: Sequence[int], offload: str
) -> None:
    own = copied(folder, tmp_path)
    some = load_pipeline(own, experts=chosen, offload=offload)
    for k in set(range(NUM)) - set(chosen):
        (own / "experts" / str(k) / WEIGHTS).unlink()
    whole = load_pipeline(folder)
    for place, k in enumerate(chosen):
        assert torch.equal(_images(some, expert=place), _images(whole, expert=k))
    ensemble, ask = whole.ensemble, whole.ensemble.router
    mask = torch.tensor([float(k in chosen) for k in range(NUM)])

    def kept_to_them(x: Tensor, t: Tensor) -> Tensor:
        kept = ask(x, t) * mask
        return kept / kept.sum(1, keepdim=True)

    ensemble.router = kept_to_them
    # One expert alone takes no strategy.
    strategies = ("full", "top-1") if len(chosen) > 1 else ()
    for strategy in strategies:
        expected = hddm.sample(
            ensemble, 6, 3, 5, strategy, class_labels=torch.tensor([0, 1, 2, 0, 1, 2])
        )
        torch.testing.assert_close(_images(some, strategy=strategy), expected, rtol=1e-5, atol=1e-5)
    some.save_pretrained(tmp_path / "some")
    again = load_pipeline(tmp_path / "some")
    how = {"strategy": "full"} if len(chosen) > 1 else {}
    assert torch.equal(_images(again, **how), _images(some, **how))


def test_experts_that_lie_on_no_disk_work_and_are_saved(tmp_path: Path) -> None:
    experts = [flow_expert(seed, num_classes=3) for seed in range(3)]
    before = [{name: v.clone() for name, v in one.network.state_dict().items()} for one in experts]
    pipe = pipeline_in_memory(experts, "nucleus-0.9", prior=[0.2, 0.3, 0.5], shift=3.0)
    made = _images(pipe)
    pipe.save_pretrained(tmp_path / "saved")
    again = load_pipeline(tmp_path / "saved")
    assert torch.equal(_images(again), made)
    assert again.ensemble.prior.tolist() == pytest.approx([0.2, 0.3, 0.5])
    assert again.ensemble.shift == 3.0
    for one, weights in zip(experts, before, strict=True):
        assert all(
            torch.equal(value, weights[name]) for name, value in one.network.state_dict().items()
        )


def test_a_router_that_was_made_in_python_cannot_be_saved(folder: Path, tmp_path: Path) -> None:
    pipe = HDDMPipeline.from_pretrained(folder, router=lambda x, t: torch.ones(len(x), NUM) / NUM)
    assert "put one of hddm train router in its place" in refusal(
        pipe.save_pretrained, tmp_path / "saved"
    )
    assert not (tmp_path / "saved").exists()


def test_a_folder_is_replaced_only_when_asked_and_never_one_s_own(
    folder: Path, tmp_path: Path
) -> None:
    own, other = copied(folder, tmp_path), tmp_path / "other"
    pipe = load_pipeline(own)
    made = _images(pipe, expert=1)
    # An expert that was not read yet would come from other files than those that were opened.
    assert "experts are read from it as they are needed" in refusal(
        pipe.save_pretrained, own, overwrite=True
    )
    pipe.save_pretrained(other)
    assert "exists: choose another folder" in refusal(pipe.save_pretrained, other)
    pipe.save_pretrained(other, overwrite=True)
    assert torch.equal(_images(load_pipeline(other), expert=1), made)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").touch()
    with pytest.raises(HddmError, match=r"has no ensemble\.json"):
        pipe.save_pretrained(tmp_path / "photos", overwrite=True)


def test_a_save_that_fails_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    own = copied(folder, tmp_path)
    pipe = load_pipeline(own)
    (own / "experts" / "2" / WEIGHTS).unlink()
    names = sorted(tmp_path.iterdir())
    assert re.search(f"experts/2/{WEIGHTS}", refusal(pipe.save_pretrained, tmp_path / "again"))
    assert sorted(tmp_path.iterdir()) == names


def test_what_is_no_ensemble_is_named(folder: Path) -> None:
    with pytest.raises(HddmError, match="some: no such folder"):
        HDDMPipeline.from_pretrained("some")
    assert r"router: neither an expert folder" in refusal(load_pipeline, folder / "router")
