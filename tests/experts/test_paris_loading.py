"""`hddm.load` on the Paris release as it was published."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import hddm
from hddm.experts.assembly import assemble
from hddm.experts.assembly_changes import change
from hddm.utils.errors import HddmError
from tests.checkpoint_files import shared_checkpoint
from tests.paris_files import EXPERT_FILE, TEXT, edit, fields, router, write_paris

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
T = torch.tensor([0.3, 0.8])
PROMPT = torch.randn(2, 5, TEXT, generator=torch.Generator().manual_seed(1))


def _ensemble(folder: Path) -> hddm.Ensemble:
    model = hddm.load(folder)
    assert isinstance(model, hddm.Ensemble)
    return model


def _copy_without_ours(folder: Path, target: Path) -> Path:
    """A release as it is downloaded: without the files that only the reference copy has."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("about.json", "reference.safetensors"))
    return target


@pytest.mark.parametrize(
    ("strategy", "name", "scale"),
    [("top-1", "top1", 1.0), ("top-2", "top2", 1.0), ("full", "full", 1.0), ("top-2", "top2_cfg7_5", 7.5)],
)
def test_a_loaded_release_gives_the_releases_velocity(
    strategy: str, name: str, scale: float, tmp_path: Path
) -> None:
    shared = shared_checkpoint("paris")
    reference = load_file(shared / "reference.safetensors")
    model = _ensemble(_copy_without_ours(shared, tmp_path / "paris"))
    assert len(model.experts) == 3
    model.strategy = strategy
    found = model.velocity(
        reference["x_t"],
        reference["t"],
        guidance_scale=scale,
        negative={"encoder_hidden_states": reference["negative_encoder_hidden_states"]}
        if scale != 1
        else None,
        encoder_hidden_states=reference["encoder_hidden_states"],
    )
    error = (found - reference[name]).norm() / reference[name].norm()
    assert error.item() < 1e-4


def test_a_release_is_loaded_as_an_ensemble_of_its_experts_and_router(tmp_path: Path) -> None:
    write_paris(tmp_path)
    model = _ensemble(tmp_path)
    assert (len(model.experts), model.strategy) == (3, "top-2")
    assert model.sample_shape == (4, 8, 8)
    assert model.router is not None
    assert torch.equal(model.router(X, T), router(tmp_path)(X, T))
    for field, alone in zip(model.experts, fields(tmp_path), strict=True):
        given: list[Tensor] = [one.velocity(X, T, encoder_hidden_states=PROMPT) for one in (field, alone)]
        assert torch.equal(*given)


def test_some_experts_of_a_release_share_what_the_router_gives_them(tmp_path: Path) -> None:
    write_paris(tmp_path)
    model = hddm.load(tmp_path, experts=[2, 0])
    assert isinstance(model, hddm.Ensemble)
    assert model.router is not None
    kept = router(tmp_path)(X, T)[:, [2, 0]]
    torch.testing.assert_close(model.router(X, T), kept / kept.sum(1, keepdim=True))


def test_a_release_is_sampled_from(tmp_path: Path) -> None:
    write_paris(tmp_path)
    samples = hddm.sample(hddm.load(tmp_path), 2, steps=2, encoder_hidden_states=PROMPT)
    assert samples.shape == (2, 4, 8, 8)
    assert samples.isfinite().all()


def test_weights_that_are_no_numbers_are_refused_when_they_are_read(tmp_path: Path) -> None:
    write_paris(tmp_path)
    edit(tmp_path / "expert_1" / EXPERT_FILE, lambda tensors: tensors["pos_embed"].fill_(float("nan")))
    model = _ensemble(tmp_path)
    with pytest.raises(HddmError, match=r"expert_1.*'pos_embed' holds NaN"):
        model.experts[1].velocity(X, T, encoder_hidden_states=PROMPT)


def test_a_release_that_is_not_whole_is_refused_with_its_remedy(tmp_path: Path) -> None:
    write_paris(tmp_path)
    (tmp_path / "expert_1").rename(tmp_path / "expert_3")
    with pytest.raises(HddmError, match=r"lacks expert_1; fetch the whole release"):
        hddm.load(tmp_path)


@pytest.mark.parametrize("name", ["vae", "text_encoder", "tokenizer"])
def test_a_component_that_is_a_link_out_of_the_release_is_refused(name: str, tmp_path: Path) -> None:
    write_paris(tmp_path / "paris")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "paris" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HddmError, match=f"{name}: is a link to .*elsewhere, outside the folder; refused"):
        hddm.load(tmp_path / "paris")


@torch.no_grad()
def test_a_release_that_was_saved_can_be_changed(tmp_path: Path) -> None:
    """Its router records no shards: outputs are counted from its config and told by the order."""
    write_paris(tmp_path / "paris")
    whole, saved = _ensemble(tmp_path / "paris"), tmp_path / "saved"
    hddm.HDDMPipeline.from_pretrained(tmp_path / "paris").save_pretrained(saved)
    assert change(saved, strategy="full") == (
        "no expert records its VAE; that all share one is taken on trust",
        "no expert records its text encoder; that all share one is taken on trust",
        *_without_shards(saved, 3),
    )
    change(saved, remove=["0"])
    kept, given = _ensemble(saved), {"encoder_hidden_states": PROMPT}
    assert whole.router is not None
    assert kept.router is not None
    weights = whole.router(X, T)[:, 1:] / whole.router(X, T)[:, 1:].sum(1, keepdim=True)
    torch.testing.assert_close(kept.router(X, T), weights)
    each = torch.stack([expert.velocity(X, T, **given) for expert in whole.experts[1:]], 1)
    torch.testing.assert_close(kept.velocity(X, T, **given), (weights[..., None, None, None] * each).sum(1))
    with pytest.raises(HddmError, match="of a router that records no shards can only be matched by order"):
        change(saved, add=[saved / "experts" / "0"], out=tmp_path / "more")
    experts, router_of = [saved / "experts" / k for k in "01"], saved / "router"
    with pytest.raises(HddmError, match="tells 3 shards apart, and there are 2 experts"):
        assemble(experts, tmp_path / "other", router_of)


def _without_shards(folder: Path, num: int) -> list[str]:
    names = ", ".join(str(folder / "experts" / str(k)) for k in range(num))
    return [f"{names}: no shard is recorded, so the prior keeps its proportions"]
