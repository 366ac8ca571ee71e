"""The Paris release as it was published, against outputs of the release's own networks and against ours."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hddm.ensemble import Ensemble
from hddm.experts.paris import expert_arguments, is_paris, paris_experts, paris_router, router_arguments
from hddm.networks.folders import differences
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from tests.checkpoint_files import shared_checkpoint
from tests.component_files import write_clip, write_vae
from tests.paris_files import EXPERT, EXPERT_FILE, ROUTER, TEXT, edit, fields, read, router, write_paris

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
T = torch.tensor([0.3, 0.8])
PROMPT = torch.randn(2, 5, TEXT, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def release(tmp_path: Path) -> Path:
    write_paris(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared() -> Path:
    return shared_checkpoint("paris")


@pytest.fixture(scope="module")
def reference(shared: Path) -> dict[str, Tensor]:
    return load_file(shared / "reference.safetensors")


@pytest.fixture(scope="module")
def mixed(shared: Path) -> Ensemble:
    return Ensemble(fields(shared), router(shared))


def _error(found: Tensor, true: Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


def test_the_routers_logits_and_probabilities_are_the_releases(
    shared: Path, reference: dict[str, Tensor]
) -> None:
    found = router(shared)
    with torch.no_grad():
        logits = found.network(reference["x_t"], 1000 * reference["t"])
        probabilities = found(reference["x_t"], reference["t"])
    # Relative: angles of t = 970 hold 6e-5 in float32, and an exponential of another CPU rounds otherwise.
    assert _error(logits, reference["router_logits"]) < 2e-5
    torch.testing.assert_close(probabilities, reference["router_logits"].softmax(1), rtol=0, atol=2e-5)


@pytest.mark.parametrize("index", range(3))
def test_every_experts_velocity_is_the_releases(
    index: int, mixed: Ensemble, reference: dict[str, Tensor]
) -> None:
    text = reference["encoder_hidden_states"]
    found = mixed.experts[index].velocity(reference["x_t"], reference["t"], encoder_hidden_states=text)
    assert _error(found, reference["expert_velocity"][:, index]) < 1e-4


@pytest.mark.parametrize(
    ("strategy", "name", "scale"),
    [("top-1", "top1", 1.0), ("top-2", "top2", 1.0), ("full", "full", 1.0), ("top-2", "top2_cfg7_5", 7.5)],
)
def test_the_mixed_velocity_is_the_releases(
    strategy: str, name: str, scale: float, mixed: Ensemble, reference: dict[str, Tensor]
) -> None:
    mixed.strategy = strategy
    against = {"encoder_hidden_states": reference["negative_encoder_hidden_states"]}
    found = mixed.velocity(
        reference["x_t"],
        reference["t"],
        guidance_scale=scale,
        negative=against if scale != 1.0 else None,
        encoder_hidden_states=reference["encoder_hidden_states"],
    )
    assert _error(found, reference[name]) < 1e-4


def test_networks_of_a_release_come_back_as_they_were_saved(tmp_path: Path) -> None:
    experts, classifier = write_paris(tmp_path)
    assert is_paris(tmp_path)
    found = fields(tmp_path)
    assert len(found) == len(experts)
    for field, network in zip(found, experts, strict=True):
        given = network(X, 1000 * T, encoder_hidden_states=PROMPT)
        assert torch.equal(field.velocity(X, T, encoder_hidden_states=PROMPT), given)
    assert torch.equal(router(tmp_path)(X, T), classifier(X, 1000 * T).softmax(1))


def test_sizes_come_from_shapes_and_not_from_config_files(release: Path) -> None:
    part, _ = paris_experts(release)[0]
    assert part.arguments == {"in_channels": 4, "patch_size": 2, **EXPERT}
    assert paris_router(release)[0].arguments == {
        "num_experts": 3,
        "in_channels": 4,
        "patch_size": 2,
        **ROUTER,
    }


def test_the_facts_are_those_of_the_release(release: Path) -> None:
    _, facts = paris_experts(release)[2]
    assert facts.model_dump(include={"objective", "prediction_type", "schedule", "time_scale", "shift"}) == {
        "objective": "flow",
        "prediction_type": "flow_prediction",
        "schedule": {"name": "linear"},
        "time_scale": 1000.0,
        "shift": 1.0,
    }
    assert (facts.space, facts.sample_shape, facts.latent_scale) == ("latents", (4, 8, 8), 0.18215)
    assert (facts.conditions, facts.licence) == (("encoder_hidden_states",), "MIT")
    assert (facts.vae, facts.text_encoder) == (None, None)
    assert paris_router(release)[1] == 1000.0


def test_the_published_sizes_are_found_from_their_shapes() -> None:
    with torch.device("meta"):
        expert = ExpertTransformer(text_dim=768)
        classifier = RouterTransformer()
    for network, found, millions in (
        (expert, expert_arguments(expert.state_dict(), Path("a")), 605.97),
        (classifier, router_arguments(classifier.state_dict(), Path("a")), 129.14),
    ):
        with torch.device("meta"):
            again = type(network)(**found)
        assert not differences(network.state_dict(), again.state_dict())
        assert {key: network.config[key] for key in found} == found
        assert sum(p.numel() for p in again.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_the_shift_is_the_schedulers(release: Path) -> None:
    path = release / "scheduler" / "scheduler_config.json"
    path.write_text(path.read_text().replace('"shift": 1.0', '"shift": 3.0'))
    assert paris_experts(release)[0][1].shift == 3.0


def test_without_a_scheduler_the_grid_is_even_and_the_paper_the_source(release: Path) -> None:
    shutil.rmtree(release / "scheduler")
    _, facts = paris_experts(release)[0]
    assert (facts.shift, facts.schedule_source) == (1.0, "arXiv:2510.03434")


def test_vae_and_text_encoder_beside_the_experts_are_in_the_facts(release: Path) -> None:
    write_vae(release / "vae")
    write_clip(release, width=TEXT)
    _, facts = paris_experts(release)[0]
    assert facts.vae is not None
    assert (facts.vae.kind, facts.vae.scale) == ("AutoencoderKL", 0.18215)
    assert facts.text_encoder is not None
    assert (facts.text_encoder.tokens, facts.text_encoder.width) == (77, TEXT)


def test_half_precision_weights_are_read(release: Path) -> None:
    path = release / "expert_1" / EXPERT_FILE
    edit(path, lambda tensors: tensors.update({name: value.half() for name, value in tensors.items()}))
    part, _ = paris_experts(release)[1]
    assert read(ExpertTransformer, part).dtype == torch.float32


def test_another_name_of_the_one_file_is_found(release: Path) -> None:
    for part in ("expert_0", "router"):
        (file,) = (release / part).glob("*.safetensors")
        file.rename(file.with_name("model.safetensors"))
    assert is_paris(release)
    assert paris_experts(release)[0][0].weights == release / "expert_0" / "model.safetensors"
    assert paris_router(release)[0].weights == release / "router" / "model.safetensors"


def test_a_download_in_the_hub_cache_is_read_through_its_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--paris"
    snapshot = repository / "snapshots" / "abc"
    write_paris(snapshot)
    blobs = repository / "blobs"
    blobs.mkdir()
    for index, file in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        file.rename(blobs / str(index))
        file.symlink_to(Path("../../../blobs") / str(index))
    assert is_paris(snapshot)
    assert len(fields(snapshot)) == 3
    assert paris_router(snapshot)[0].weights == snapshot / "router" / "pytorch_model.safetensors"
