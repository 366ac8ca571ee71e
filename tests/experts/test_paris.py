"""The Paris release: loaded, against outputs of its own networks and ours; damaged downloads are refused."""

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hddm
from hddm.checkpoints.plan import open_checkpoint
from hddm.experts.assembly import change
from hddm.experts.ensemble_records import SCHEDULER_FILE
from hddm.experts.paris import (
    expert_arguments,
    is_paris,
    paris_experts,
    paris_router,
    router_arguments,
)
from hddm.networks.folders import misfits
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.settings import Conversion
from hddm.utils.errors import HddmError
from tests.artefacts import copied, into_hub_cache, refusal
from tests.checkpoint_files import shared_checkpoint
from tests.component_files import write_clip, write_vae
from tests.ensemble_files import load_ensemble
from tests.hostile import grown_by
from tests.paris_files import (
    EXPERT,
    EXPERT_FILE,
    ROUTER,
    ROUTER_FILE,
    TEXT,
    edit,
    router,
    write_paris,
)

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
T = torch.tensor([0.3, 0.8])
PROMPT = torch.randn(2, 5, TEXT, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference release as it is downloaded: without the files that only our copy has."""
    ours = shutil.ignore_patterns("about.json", "reference.safetensors")
    folder = tmp_path_factory.mktemp("shared") / "paris"
    return Path(shutil.copytree(shared_checkpoint("paris"), folder, ignore=ours))


@pytest.fixture(scope="module")
def reference() -> dict[str, Tensor]:
    return load_file(shared_checkpoint("paris") / "reference.safetensors")


def _error(found: Tensor, true: Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


def test_the_router_has_the_releases_logits(shared: Path, reference: dict[str, Tensor]) -> None:
    found = router(shared)
    with torch.no_grad():
        logits = found.network(reference["x_t"], 1000 * reference["t"])
        probabilities = found(reference["x_t"], reference["t"])
    # Relative: angles of t = 970 hold 6e-5 in float32, and an exponential of another CPU rounds otherwise.
    assert _error(logits, reference["router_logits"]) < 2e-5
    torch.testing.assert_close(
        probabilities, reference["router_logits"].softmax(1), rtol=0, atol=2e-5
    )


def test_a_loaded_release_gives_the_releases_velocity(
    shared: Path, reference: dict[str, Tensor]
) -> None:
    model, states = load_ensemble(shared), (reference["x_t"], reference["t"])
    text = {"encoder_hidden_states": reference["encoder_hidden_states"]}
    against = {"encoder_hidden_states": reference["negative_encoder_hidden_states"]}
    for strategy, name in (("top-1", "top1"), ("top-2", "top2"), ("full", "full")):
        model.strategy = strategy
        assert _error(model.velocity(*states, **text), reference[name]) < 1e-4
    model.strategy = "top-2"
    assert _error(model.velocity(*states, 7.5, against, **text), reference["top2_cfg7_5"]) < 1e-4
    for k, expert in enumerate(model.experts):
        assert _error(expert.velocity(*states, **text), reference["expert_velocity"][:, k]) < 1e-4


def test_networks_of_a_release_come_back_as_they_were_saved(tmp_path: Path) -> None:
    experts, classifier = write_paris(tmp_path)
    assert is_paris(tmp_path)
    model = load_ensemble(tmp_path)
    assert (len(model.experts), model.strategy, model.sample_shape) == (3, "top-2", (4, 8, 8))
    for field, network in zip(model.experts, experts, strict=True):
        given = network(X, 1000 * T, encoder_hidden_states=PROMPT)
        assert torch.equal(field.velocity(X, T, encoder_hidden_states=PROMPT), given)
    probabilities = classifier(X, 1000 * T).softmax(1)
    assert torch.equal(model.router(X, T), probabilities)
    assert "`experts` [5, -1]: choose from 0 to 2" in refusal(
        hddm.load, tmp_path, experts=[2, 5, -1]
    )
    some = hddm.load(tmp_path, experts=[2, 0])
    kept = probabilities[:, [2, 0]]
    torch.testing.assert_close(some.router(X, T), kept / kept.sum(1, keepdim=True))
    assert hddm.sample(model, 2, steps=2, encoder_hidden_states=PROMPT).isfinite().all()


def test_sizes_come_from_shapes_and_the_record_is_that_of_the_release(release: Path) -> None:
    experts = paris_experts(release)
    network, router_record = paris_router(release, experts)
    for config, sizes in (
        (experts[2].network.config, {"in_channels": 4, "patch_size": 2, **EXPERT}),
        (network.network.config, {"num_experts": 3, "in_channels": 4, "patch_size": 2, **ROUTER}),
    ):
        assert {key: config[key] for key in sizes} == sizes
    record = experts[2].record
    assert (record.schedule, record.time_scale, record.shift) == ({"name": "linear"}, 1000.0, 1.0)
    assert (record.sample_shape, record.latent_scale) == ((4, 8, 8), 0.18215)
    assert (router_record.time_scale, router_record.shard_hashes) == (1000.0, ())


def test_the_published_sizes_are_found_from_their_shapes() -> None:
    with torch.device("meta"):
        published = ExpertTransformer(text_dim=768), RouterTransformer()
    for network, arguments, millions in zip(
        published, (expert_arguments, router_arguments), (605.97, 129.14), strict=True
    ):
        found = arguments(network.state_dict(), Path("a"))
        with torch.device("meta"):
            again = type(network)(**found)
        assert not misfits(network.state_dict(), again.state_dict())
        assert {key: network.config[key] for key in found} == found
        assert sum(p.numel() for p in again.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_what_lies_beside_the_experts_is_in_their_record(release: Path) -> None:
    path = release / "scheduler" / "scheduler_config.json"
    path.write_text(path.read_text().replace('"shift": 1.0', '"shift": 3.0'))
    write_vae(release / "vae")
    write_clip(release, width=TEXT)
    record = paris_experts(release)[0].record
    assert record.shift == 3.0
    assert record.vae
    assert record.text_encoder
    assert (record.vae.kind, record.vae.scale) == ("AutoencoderKL", 0.18215)
    assert (record.text_encoder.tokens, record.text_encoder.width) == (77, TEXT)
    shutil.rmtree(release / "scheduler")
    record = paris_experts(release)[0].record
    assert (record.shift, record.schedule_source) == (1.0, "arXiv:2510.03434")


def test_a_download_in_the_hub_cache_is_read_through_its_links(
    release: Path, tmp_path: Path
) -> None:
    snapshot = into_hub_cache(release, tmp_path / "models--org--paris")
    assert is_paris(snapshot)
    model = load_ensemble(snapshot)
    assert len(model.experts) == 3
    assert model.velocity(X, T, encoder_hidden_states=PROMPT).isfinite().all()


@torch.no_grad()
def test_a_release_that_was_saved_can_be_changed(release: Path, tmp_path: Path) -> None:
    """Its router records no shards: outputs are counted from its config and told by the order."""
    whole, saved = load_ensemble(release), tmp_path / "saved"
    hddm.HDDMPipeline.from_pretrained(release).save_pretrained(saved)
    change(saved, strategy="full")
    change(saved, remove=["0"])
    kept, given = load_ensemble(saved), {"encoder_hidden_states": PROMPT}
    weights = whole.router(X, T)[:, 1:] / whole.router(X, T)[:, 1:].sum(1, keepdim=True)
    torch.testing.assert_close(kept.router(X, T), weights)
    each = torch.stack([expert.velocity(X, T, **given) for expert in whole.experts[1:]], 1)
    torch.testing.assert_close(
        kept.velocity(X, T, **given), (weights[..., None, None, None] * each).sum(1)
    )
    with pytest.raises(
        HddmError, match="of a router that records no shards can only be matched by order"
    ):
        change(saved, add=[copied(saved / "experts" / "0", tmp_path)], out=tmp_path / "more")


Change = Callable[[Path], object]


def _refused(release: Path, *said: str) -> None:
    line = refusal(lambda: paris_router(release, paris_experts(release)))
    for part in said:
        assert part in line, line


def _expert(index: int, change: Callable[[dict[str, Tensor]], object]) -> Change:
    return lambda folder: edit(folder / f"expert_{index}" / EXPERT_FILE, change)


def _pickled(part: str, name: str) -> Change:
    def change(folder: Path) -> None:
        for file in (folder / part).iterdir():
            file.unlink()
        torch.save({}, folder / part / name)

    return change


CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no router": (
        lambda folder: shutil.rmtree(folder / "router"),
        ("holds no safetensors", "whole release"),
    ),
    "pickles alone": (
        _pickled("expert_0", "model.pt"),
        ("holds no safetensors", "pickles are not read"),
    ),
    "a pickle under another name": (
        lambda folder: torch.save({}, folder / "expert_0" / EXPERT_FILE),
        ("it is a pickle", "safetensors version"),
    ),
    "a gap in the numbers": (
        lambda folder: (folder / "expert_1").rename(folder / "expert_12"),
        ("has expert_12 and lacks expert_1, expert_3", "expert_11; fetch the whole release"),
    ),
    "no tensor that tells a size": (
        _expert(0, lambda t: t.pop("pos_embed")),
        ("expert_0", "missing pos_embed"),
    ),
    "a depth without tensors": (
        _expert(0, lambda t: t.update({"layers.99999.x": torch.zeros(1)})),
        ("left over layers.99999.x", "missing layers.10.attn"),
    ),
    "heads that do not divide": (
        lambda folder: save_file(
            ExpertTransformer(**EXPERT | {"hidden_size": 160}).state_dict(),
            folder / "expert_0" / EXPERT_FILE,
        ),
        ("width of 160", "heads of 72"),
    ),
    "a router of more experts": (
        lambda folder: save_file(
            RouterTransformer(8, **ROUTER).state_dict(), folder / "router" / ROUTER_FILE
        ),
        ("distinguishes 8 experts", "holds 3"),
    ),
    "a broken link": (
        lambda folder: (folder / "vae").symlink_to("absent"),
        ("vae", "no such file"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_download_that_does_not_fit_together_is_refused(name: str, release: Path) -> None:
    change, said = CASES[name]
    change(release)
    _refused(release, *said)


LINKS = (
    "expert_1",
    f"expert_1/{EXPERT_FILE}",
    f"router/{ROUTER_FILE}",
    "scheduler",
    SCHEDULER_FILE,
)


@pytest.mark.parametrize("name", [*LINKS, "vae", "text_encoder", "tokenizer"])
def test_links_that_lead_out_are_refused(name: str, release: Path, tmp_path: Path) -> None:
    if name in LINKS:
        (release / name).rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").mkdir()
    (release / name).symlink_to(tmp_path / "elsewhere")
    assert re.search(
        f"{name}.* is a link to .*elsewhere, outside the folder", refusal(hddm.load, release)
    )


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


def test_a_release_is_not_converted(release: Path) -> None:
    told = f"is the Paris release, which needs no conversion: hddm sample {release}"
    assert told in refusal(open_checkpoint, release, Conversion())
