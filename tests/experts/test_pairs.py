"""Pairs of experts, for high and for low noise, in folders: trained, assembled, changed and sampled."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hddm
from hddm.experts.assembly import assemble, change
from hddm.experts.record_folders import read_router, save_router
from hddm.inspection.folders import inspected
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.routers import MomentsRouter
from hddm.training.expert import train_expert
from tests.artefacts import Command, contents, expert_settings, refusal, variant
from tests.ensemble_files import derived, load_ensemble, random_router
from tests.oracles import relative_error

X = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(1))
TIMES = torch.tensor([0.02, 0.3, 0.59, 0.6, 0.9, 1.0], dtype=torch.float64)
LATE = TIMES >= 0.6


@pytest.fixture(scope="module")
def pair(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of shard 0: a DDPM expert for high noise, and one of flow matching for low noise."""
    root = tmp_path_factory.mktemp("pair")
    for name, objective, part in (("high", "ddpm", (0.6, 1)), ("low", "flow", (0, 0.6))):
        train_expert(
            shards / "shard_0", root / name, expert_settings(objective, steps=4, noise_range=part)
        )
    return [root / "high", root / "low"]


@pytest.fixture
def mixed(pair: list[Path], flow_expert: Path, router: Path, tmp_path: Path) -> Path:
    """The pair, and between them the whole expert of shard 1."""
    assemble([pair[0], flow_expert, pair[1]], tmp_path / "mixed", router, strategy="full")
    return tmp_path / "mixed"


@pytest.fixture
def nameless(pair: list[Path], tmp_path: Path) -> list[Path]:
    """The pair as a converted one, without a record of its shard."""
    return [variant(folder, tmp_path / f"nameless_{folder.name}", shard=None) for folder in pair]


def _field(folder: Path) -> hddm.VelocityField:
    field = hddm.load(folder)
    assert isinstance(field, hddm.VelocityField)
    return field


def _posterior(ensemble: Path) -> Tensor:
    """Probabilities (6, 1, 1, shards) from the router's network alone."""
    network, record = read_router(ensemble / "router")
    return network(X, (TIMES * record.time_scale).float()).softmax(1)[:, None, None]


def _as_one(high: hddm.VelocityField, low: hddm.VelocityField) -> Tensor:
    """The velocity of whom t is for."""
    return torch.cat([low.velocity(X[~LATE], TIMES[~LATE]), high.velocity(X[LATE], TIMES[LATE])])


def test_experts_of_one_shard_are_a_domain_by_themselves(mixed: Path) -> None:
    facts = derived(mixed)
    assert (facts.domains, facts.outputs) == ((0, 1, 0), (0, 1, 0))
    # Both shards have 24 images.
    assert facts.prior == pytest.approx((0.25, 0.5, 0.25))
    model, p = load_ensemble(mixed), _posterior(mixed)
    high, other, low = model.experts
    expected = p[..., :1] * _as_one(high, low) + p[..., 1:] * other.velocity(X, TIMES)
    assert relative_error(model.velocity(X, TIMES), expected) < 1e-5
    described = inspected(mixed)
    assert (described["domains"], described["noise_ranges"]) == (
        (0, 1, 0),
        ["0.6:1", "0:1", "0:0.6"],
    )


@pytest.mark.integration
def test_a_pair_that_a_pipeline_saved_is_sampled_to_the_same_bytes(
    mixed: Path, tmp_path: Path
) -> None:
    HDDMPipeline.from_pretrained(mixed).save_pretrained(tmp_path / "again")
    assert derived(tmp_path / "again").domains == (0, 1, 0)
    given = {
        "num_images_per_prompt": 6,
        "num_inference_steps": 8,
        "output_type": "latent",
        "seed": 3,
    }
    for strategy in ("draw", "full"):
        expected = hddm.sample(load_ensemble(mixed), 6, 3, 8, strategy=strategy)
        for folder in (mixed, tmp_path / "again"):
            made = HDDMPipeline.from_pretrained(folder)(strategy=strategy, **given).images
            assert torch.equal(made, expected)


def test_the_command_line_samples_a_pair_whichever_of_it_is_named(
    mixed: Path, tmp_path: Path, hddm: Command
) -> None:
    made = []
    for expert in (0, 2):
        options = ("--steps", 5, "--num-images", 3, "--expert", expert)
        code, _, err = hddm("sample", mixed, "--out", tmp_path / f"by_{expert}", *options)
        assert (code, err) == (0, "")
        made.append(
            {k: one for k, one in contents(tmp_path / f"by_{expert}").items() if k.endswith(".png")}
        )
        use = json.loads((tmp_path / f"by_{expert}/sampling.json").read_text())["expert_use"]
        # Of the times 1, 0.8, 0.6, 0.4 and 0.2.
        assert use["shares"] == pytest.approx([0.6, 0.0, 0.4])
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(0.6, 1)], "0: for t in 0.6:1, so that t in 0:0.6 is missing"),
        ([(0.6, 1), (0, 0.7)], "/1: for t in 0.6:1 and 0:0.7, so that t in 0.6:0.7 is double"),
    ],
    ids=str,
)
def test_ranges_that_do_not_cover_t_once_are_refused(
    parts: list[tuple[float, float]], words: str, pair: list[Path], tmp_path: Path
) -> None:
    folders = [
        variant(pair[0], tmp_path / str(k), noise_range=part) for k, part in enumerate(parts)
    ]
    before = contents(tmp_path)
    message = refusal(assemble, folders, tmp_path / "out")
    assert words in message
    assert str(folders[0]) in message
    assert "experts of one domain cover [0, 1] once, and `domain` says which are one" in message
    assert contents(tmp_path) == before


def test_experts_without_a_shard_are_a_domain_where_that_is_said(
    nameless: list[Path], pair: list[Path], flow_expert: Path, tmp_path: Path, hddm: Command
) -> None:
    out = tmp_path / "out"
    code, _, err = hddm("assemble", *nameless, "--out", out)
    assert (code, err.count("\n")) == (1, 3)
    assert f"{nameless[0]}: for t in 0.6:1, so that t in 0:0.6 is missing" in err
    code, text, err = hddm("assemble", *nameless, "--out", out, "--domain", "nameless_high,1")
    # There is one domain, so nothing has to be known of its share.
    assert (code, err) == (0, "")
    shares = "shares: experts/0 (nameless_high) with experts/1 (nameless_low) 1"
    assert text.startswith(
        f"{out}: 2 experts, strategy draw\nthese experts make each image together, each"
    )
    assert text.endswith(f"\n{shares}\n")
    assert (derived(out).domains, derived(out).prior) == ((0, 0), (0.5, 0.5))
    model = load_ensemble(out)
    drawn = torch.tensor([0, 1, 0, 1, 0, 1])
    assert torch.equal(model.velocity(X, TIMES, expert=drawn), _as_one(*model.experts))
    assert "double" in refusal(
        assemble, [*nameless, flow_expert], tmp_path / "no", domain=[["0", "1", "2"]]
    )
    other = variant(
        pair[1],
        tmp_path / "other",
        shard=json.loads((flow_expert / "expert.json").read_text())["shard"],
    )
    message = refusal(assemble, [pair[0], other], tmp_path / "no", domain=[["0", "1"]])
    assert f"{pair[0]} and {other}: are of one domain, and of different shards" in message
    assert not (tmp_path / "no").exists()


def test_a_router_that_records_no_shards_counts_domains(
    nameless: list[Path], tmp_path: Path
) -> None:
    network, record = random_router(2, (1, 4, 4))
    (tmp_path / "router").mkdir()
    save_router(tmp_path / "router", network, record.model_copy(update={"shard_hashes": ()}))
    twins = [variant(one, tmp_path / f"twin_{one.name}") for one in nameless]
    four, domain = [nameless[0], twins[1], twins[0], nameless[1]], [["0", "3"], ["1", "2"]]
    assemble(four, tmp_path / "four", tmp_path / "router", strategy="full", domain=domain)
    assert derived(tmp_path / "four").outputs == (0, 1, 1, 0)
    model, p = load_ensemble(tmp_path / "four"), _posterior(tmp_path / "four")[:, 0, 0]
    expected = torch.stack([LATE * p[:, 0], ~LATE * p[:, 1], LATE * p[:, 1], ~LATE * p[:, 0]], 1)
    torch.testing.assert_close(model.weights(X, TIMES), expected)


def test_a_router_by_moments_and_shares_count_a_pair_once(
    pair: list[Path], flow_expert: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assemble([*pair, flow_expert], out, "moments", strategy="full", share={"low": 0.8})
    facts = derived(out)
    assert facts.prior == pytest.approx((0.4, 0.4, 0.2))
    moments = [
        one.moments for folder in (pair[0], flow_expert) if (one := _field(folder).calibration)
    ]
    p = MomentsRouter(moments, (0.8, 0.2))(X, TIMES)
    expected = torch.stack([LATE * p[:, 0], ~LATE * p[:, 0], p[:, 1]], 1)
    torch.testing.assert_close(load_ensemble(out).weights(X, TIMES), expected)
    message = refusal(
        assemble, [*pair, flow_expert], tmp_path / "no", share={"high": 0.7, "low": 0.7}
    )
    assert "the shares sum to 1.4" in message


@pytest.mark.integration
def test_a_change_keeps_pairs_whole(
    mixed: Path, pair: list[Path], shards: Path, tmp_path: Path
) -> None:
    before = contents(mixed)
    notes = change(mixed, remove=[2], out=tmp_path / "whole")
    assert notes[-2:] == ("removed experts/0 (high)", "removed experts/2 (low)")
    assert (derived(tmp_path / "whole").names, contents(mixed)) == (("flow",), before)
    assemble(pair, tmp_path / "alone")
    message = refusal(change, tmp_path / "alone", remove=["low"])
    assert "no expert is left" in message
    assert "one of them is of a domain with [2]" in refusal(hddm.load, mixed, experts=[0, 1])
    assert load_ensemble(mixed, experts=[2, 0]).domains == (0, 0)
    # Another expert for low noise takes the place of one.
    settings = expert_settings("flow", steps=2, seed=8, noise_range=(0, 0.6))
    train_expert(shards / "shard_0", tmp_path / "newer", settings)
    change(mixed, remove=["experts/2"], add=[tmp_path / "newer"])
    assert derived(mixed).domains == (0, 1, 0)
    change(mixed, remove=[2, 0])
    facts = derived(mixed)
    assert (facts.domains, facts.outputs, facts.prior) == ((0,), (1,), (1.0,))
    change(mixed, add=pair)
    facts = derived(mixed)
    assert (facts.domains, facts.outputs) == ((0, 1, 1), (1, 0, 0))


def test_domains_that_were_said_stay(
    nameless: list[Path], flow_expert: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assemble([flow_expert, *nameless], out, domain=[["nameless_low", "nameless_high"]])
    assert derived(out).domains == (0, 1, 1)
    change(out, remove=[0])
    assert derived(out).domains == (0, 0)
    change(out, add=[flow_expert])
    assert derived(out).domains == (0, 0, 2)
    message = refusal(change, out, remove=[1], add=[nameless[1]])
    assert "so that t in 0:0.6 is missing" in message
    change(out, remove=[1], add=[nameless[1]], domain=[["0", "nameless_low"]])
    assert derived(out).domains == (0, 1, 0)
