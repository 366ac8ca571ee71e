"""Downloads of Paris that are incomplete, mixed up or mean harm: one line each, and no weights are read."""

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import hddm
from hddm.checkpoints.plan import open_source
from hddm.experts.model_index import SCHEDULER_FILE
from hddm.experts.paris import is_paris, paris_experts, paris_router
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.utils.errors import HddmError
from hddm.utils.settings import Conversion
from tests.artefacts import edit_json, refusal
from tests.component_files import write_clip, write_vae
from tests.hostile import grown_by
from tests.paris_files import EXPERT, EXPERT_FILE, ROUTER, ROUTER_FILE, TEXT, edit

Change = Callable[[Path], object]


def _refused(release: Path, *said: str) -> None:
    with pytest.raises(HddmError) as caught:
        paris_router(release, paris_experts(release))
    line = str(caught.value)
    assert "\n" not in line
    for part in said:
        assert part in line, line


def _expert(index: int, change: Callable[[dict[str, Tensor]], object]) -> Change:
    return lambda folder: edit(folder / f"expert_{index}" / EXPERT_FILE, change)


def _new_expert(index: int, **changes: int) -> Change:
    network = ExpertTransformer(**EXPERT | changes)
    return lambda folder: save_file(network.state_dict(), folder / f"expert_{index}" / EXPERT_FILE)


def _new_router(num_experts: int = 3, **changes: int) -> Change:
    network = RouterTransformer(num_experts, **ROUTER | changes)
    return lambda folder: save_file(network.state_dict(), folder / "router" / ROUTER_FILE)


def _pickled(part: str, name: str) -> Change:
    def change(folder: Path) -> None:
        for file in (folder / part).iterdir():
            file.unlink()
        torch.save({}, folder / part / name)

    return change


def _two_files(folder: Path) -> None:
    (folder / "expert_0" / EXPERT_FILE).rename(folder / "expert_0" / "a.safetensors")
    (folder / "expert_0" / "b.safetensors").touch()


CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no router": (lambda folder: shutil.rmtree(folder / "router"), ("no router/", "whole release")),
    "pickles alone": (_pickled("expert_0", "model.pt"), ("model.pt", "read_pickle")),
    "a pickle under another name": (
        lambda folder: torch.save({}, folder / "expert_0" / EXPERT_FILE),
        ("it is a pickle", "safetensors version"),
    ),
    "no weights": (
        lambda folder: (folder / "expert_2" / EXPERT_FILE).unlink(),
        ("expert_2: holds no diffusion_pytorch_model.safetensors",),
    ),
    "a gap in the numbers": (
        lambda folder: (folder / "expert_1").rename(folder / "expert_12"),
        ("has expert_12 and lacks expert_1, expert_3", "expert_11; fetch the whole release"),
    ),
    "the first expert is missing": (
        lambda folder: shutil.rmtree(folder / "expert_0"),
        ("has expert_2 and lacks expert_0; fetch the whole release",),
    ),
    "two files": (_two_files, ("a.safetensors, b.safetensors", "leave one")),
    "no tensor that tells a size": (
        _expert(0, lambda t: t.pop("pos_embed")),
        ("expert_0", "lacks pos_embed"),
    ),
    "positions of other dimensions": (
        _expert(0, lambda t: t.update(pos_embed=t["pos_embed"][0].clone())),
        ("pos_embed is (16, 144), and has 3 dimensions",),
    ),
    "positions that make no square": (
        _expert(0, lambda t: t.update(pos_embed=t["pos_embed"][:, :15].clone())),
        ("15 positions of 2 × 2", "no square"),
    ),
    "patches that are no squares": (
        _expert(0, lambda t: t.update({"patch_embed.weight": t["patch_embed.weight"][..., :1].clone()})),
        ("2 × 1 patches", "no square"),
    ),
    "an empty tensor": (
        _expert(0, lambda t: t.update(pos_embed=torch.zeros(1, 0, 144))),
        ("pos_embed is (1, 0, 144)",),
    ),
    "a depth without tensors": (
        _expert(0, lambda t: t.update({"layers.99999.x": torch.zeros(1)})),
        ("its depth is 100000",),
    ),
    "heads that do not divide": (_new_expert(0, hidden_size=160), ("width of 160", "heads of 72")),
    "experts of other sizes": (
        _new_expert(2, hidden_size=72, num_heads=1),
        ("expert_2", "hidden_size 72 beside 144 and num_heads 1 beside 2", "one release"),
    ),
    "a router of more experts": (_new_router(8), ("distinguishes 8 experts", "holds 3")),
    "a router of other samples": (_new_router(sample_size=16), ("router", "sample_size 16 beside 8")),
    "other timesteps": (
        lambda folder: edit_json(folder / SCHEDULER_FILE, num_train_timesteps=100),
        ("num_train_timesteps is 100", "1000"),
    ),
    "no scheduler config": (
        lambda folder: (folder / SCHEDULER_FILE).unlink(),
        ("scheduler_config.json: no such file",),
    ),
    "a broken link": (lambda folder: (folder / "vae").symlink_to("absent"), ("vae", "no such folder")),
    "another VAE": (
        lambda folder: write_vae(folder / "vae", scaling_factor=0.13),
        ("scales latents by 0.13", "0.18215"),
    ),
    "another text encoder": (
        lambda folder: write_clip(folder, width=2 * TEXT),
        (f"{2 * TEXT} wide", f"take {TEXT}"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_download_that_does_not_fit_together_is_refused(name: str, release: Path) -> None:
    change, said = CASES[name]
    change(release)
    _refused(release, *said)


LINKS = ("expert_1", f"expert_1/{EXPERT_FILE}", f"router/{ROUTER_FILE}", "scheduler", SCHEDULER_FILE)


@pytest.mark.parametrize("name", [*LINKS, "vae", "text_encoder", "tokenizer"])
def test_links_that_lead_out_are_refused(name: str, release: Path, tmp_path: Path) -> None:
    if name in LINKS:
        (release / name).rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").mkdir()
    (release / name).symlink_to(tmp_path / "elsewhere")
    assert re.search(f"{name}.* is a link to .*elsewhere, outside the folder", refusal(hddm.load, release))


def test_a_linked_folder_elsewhere_is_not_even_listed(release: Path, tmp_path: Path) -> None:
    _pickled("expert_1", "secret.pt")(release)
    (release / "expert_1").rename(tmp_path / "elsewhere")
    (release / "expert_1").symlink_to(tmp_path / "elsewhere")
    _refused(release, "outside the folder")


def test_a_header_that_claims_gigabytes_takes_no_memory(release: Path) -> None:
    path = release / "expert_0" / EXPERT_FILE
    path.write_bytes(struct.pack("<Q", 2**40) + b"{" + path.read_bytes()[9:])
    assert is_paris(release)
    assert grown_by(lambda: _refused(release, EXPERT_FILE, "fetch it again")) < 50 * 2**20


def test_other_folders_are_not_taken_for_paris(release: Path, tmp_path: Path) -> None:
    assert is_paris(release)
    assert not is_paris(tmp_path)
    assert not is_paris(tmp_path / "absent")
    (release / "expert_0" / "expert.json").write_text("{}")
    assert not is_paris(release)
    (release / "expert_0" / "expert.json").unlink()
    save_file({"a": torch.zeros(1)}, release / "expert_0" / EXPERT_FILE)
    assert not is_paris(release)


def test_pickles_in_the_layout_of_paris_count_so_that_the_remedy_is_said(release: Path) -> None:
    _pickled("expert_0", "model.pt")(release)
    assert is_paris(release)
    (release / "router").rename(release / "classifier")
    assert not is_paris(release)


def test_a_release_is_not_converted(release: Path) -> None:
    with pytest.raises(
        HddmError, match=f"is the Paris release, which needs no conversion: hddm sample {release}"
    ):
        open_source(release, Conversion())
