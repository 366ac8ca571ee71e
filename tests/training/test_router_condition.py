"""Routers that see the class or the caption: training, folders, and the experts that they find."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hddm.condition_names import LABELS, TEXT
from hddm.conditions import Conditions
from hddm.data.encoding import encode_shards
from hddm.data.shards import open_shard
from hddm.experts.assembly import assemble, change
from hddm.experts.record_folders import read_router
from hddm.experts.records import NULL_FILE, ROUTER_FILE
from hddm.experts.topics import describe_topic
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.running import posterior_of
from hddm.sampling import batches, plan, sample
from hddm.settings import EncodingSettings
from hddm.training.expert import train_expert
from hddm.training.router import router_training, train_router
from hddm.training.router_conditions import conditions_of
from hddm.training.settings import RunOptions
from tests.artefacts import (
    Command,
    copied,
    edit_json,
    expert_settings,
    printed,
    refusal,
    router_settings,
    seal,
)
from tests.component_files import texts_in, write_clip
from tests.ensemble_files import load_ensemble
from tests.shard_files import noise, write_partition_record, write_shard

NUM = 24
CAPTIONS = (("cat", "a cat"), ("dog", "my dog"))


def _partition(root: Path, seed: int = 0, captions: bool = True, held_out: int = 0) -> Path:
    """Two shards of noise, which captions tell apart, and classes in three of four images."""
    hashes = []
    for k in range(2):
        labels = [k if n % 4 else 1 - k for n in range(NUM)]
        texts = [CAPTIONS[k][n % 2] for n in range(NUM)]
        own: dict[str, Any] = {"shard": k, "num_shards": 2}
        shown = texts if captions else None
        images = noise(NUM, seed=seed + k, colour=False)
        hashes.append(write_shard(root / f"shard_{k}", images, labels, shown, **own))
        if held_out:
            place, fresh = (
                root / "held_out" / f"shard_{k}",
                noise(held_out, seed=50 + k, colour=False),
            )
            kept = None if shown is None else shown[:held_out]
            write_shard(place, fresh, labels[:held_out], kept, **own, held_out_of=hashes[k])
    return write_partition_record(root, [NUM, NUM], hashes)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A partition of images, ``pixels``, and the same with tokens, ``tokens``, beside the encoder."""
    root = tmp_path_factory.mktemp("home")
    _partition(root / "pixels", held_out=8)
    write_clip(root, tokens=8)
    encode_shards(root / "pixels", root / "tokens", EncodingSettings(**texts_in(root)))
    return root


_LONG = {"steps": 150, "learning_rate": None, "optimizer": None, "batch_size": 32}


@pytest.fixture(scope="module")
def by_text(home: Path) -> Path:
    """A router that sees captions."""
    train_router(home / "tokens", home / "by_text", router_settings(condition="text", **_LONG))
    return home / "by_text"


@pytest.fixture(scope="module")
def by_class(home: Path) -> Path:
    """A router that sees classes, with temperatures."""
    settings = router_settings(condition="class", calibrate=True, **_LONG)
    train_router(home / "pixels", home / "by_class", settings)
    return home / "by_class"


@pytest.fixture(scope="module")
def readers(home: Path) -> list[Path]:
    """Experts of both shards that read text."""
    folders = []
    for k in range(2):
        settings = expert_settings("flow", steps=2, text_conditional=True, seed=k)
        folders.append(home / "experts" / f"text-{k}")
        train_expert(home / "tokens" / f"shard_{k}", folders[k], settings)
    return folders


@pytest.fixture(scope="module")
def takers(home: Path) -> list[Path]:
    """Experts of both shards that take classes."""
    folders = []
    for k in range(2):
        settings = expert_settings("flow", steps=2, class_conditional=True, seed=k)
        folders.append(home / "experts" / f"class-{k}")
        train_expert(home / "pixels" / f"shard_{k}", folders[k], settings)
    return folders


@pytest.mark.slow
def test_what_a_router_sees_is_recorded_and_reads_back(
    home: Path, by_text: Path, by_class: Path, tmp_path: Path
) -> None:
    network, record = read_router(by_text)
    shard = open_shard(home / "tokens" / "shard_0")
    assert (record.condition, record.classes) == ("text", ())
    assert record.text_encoder == shard.text_encoder
    assert shard.texts is not None
    assert torch.equal(network.null_text, shard.texts.null)
    network, record = read_router(by_class)
    assert (record.condition, record.classes, record.text_encoder) == (
        "class",
        ("cat", "dog"),
        None,
    )
    assert network.config.num_classes == 2
    assert record.temperatures != (1.0,)
    assert not (by_class / NULL_FILE).exists()
    # Without a condition nothing of it is written, as by earlier versions.
    train_router(home / "pixels", tmp_path / "plain", router_settings())
    written = json.loads((tmp_path / "plain" / ROUTER_FILE).read_text())
    assert not {"classes", "text_encoder"} & written.keys()
    assert "condition" not in written
    assert "by_noise" not in written["training"]["accuracy"]
    assert read_router(tmp_path / "plain")[1].condition is None


@pytest.mark.integration
def test_what_the_condition_is_worth_is_measured_by_noise_level(
    by_text: Path, by_class: Path
) -> None:
    """Pictures are noise: a caption says the shard, a class does in three of four cases, no picture does."""
    for folder, exact in ((by_text, 1.0), (by_class, 0.75)):
        found = json.loads((folder / ROUTER_FILE).read_text())["training"]["accuracy"]
        assert (found["of"], found["images"]) == ("held-out images", 16)
        # Of 16 images, whose classes decide three of four; processors differ by one image.
        assert found["at_noise"]["accuracy"] == pytest.approx(exact, abs=1 / 16)
        assert found["without_condition"]["cross_entropy"] > found["at_noise"]["cross_entropy"]
        assert [row["t"] for row in found["by_noise"]][::9] == [[0.0, 0.1], [0.9, 1.0]]
        high = found["by_noise"][-1]
        assert high["with"]["accuracy"] == pytest.approx(exact, abs=1 / 16)
        assert high["without"]["accuracy"] < 0.7
    assert found["at_noise"]["by_counts"] == pytest.approx(
        {"accuracy": 0.75, "cross_entropy": 0.5623}, abs=1e-3
    )


@pytest.mark.slow
def test_prompts_find_their_expert_without_descriptions(
    home: Path, by_text: Path, readers: list[Path], tmp_path: Path, hddm: Command
) -> None:
    whole = tmp_path / "whole"
    assemble(readers, whole, by_text, **texts_in(home))
    words = ["--prompt", "a cat", "--prompt", "my dog", "--num-images", 16, "--steps", 2]
    for strategy in ("draw", "commit-0.5"):
        out = tmp_path / strategy
        printed(hddm, "sample", whole, "--out", out, *words, "--strategy", strategy)
        made_by = json.loads((out / "sampling.json").read_text())["expert_use"]["made_by"]
        assert made_by["00000"].split() == ["0", "1"] * 8
    # Descriptions that say the opposite do not count, and shares of the caller do.
    for k, text in enumerate(("my dog", "a cat")):
        describe_topic(whole / "experts" / str(k), text=text)
    pipe = HDDMPipeline.from_pretrained(whole)
    given = pipe.encode(["a cat", "my dog"])
    assert given.prior is None
    found = posterior_of(pipe.ensemble, torch.randn(2, 1, 8, 8), 1.0, given)
    assert found.argmax(1).tolist() == [0, 1]
    by_hand = Conditions(given.given, {}, torch.tensor([[0.0, 1.0]] * 2))
    assert posterior_of(pipe.ensemble, torch.randn(2, 1, 8, 8), 1.0, by_hand)[:, 1].tolist() == [
        1,
        1,
    ]
    pipe.save_pretrained(tmp_path / "saved")
    again = HDDMPipeline.from_pretrained(tmp_path / "saved")
    x, t = torch.randn(2, 1, 8, 8), torch.full((2,), 0.3)
    before = pipe.ensemble.under("full").weights(x, t, conditions=given.given)
    assert torch.equal(before, again.ensemble.under("full").weights(x, t, conditions=given.given))


@pytest.mark.integration
def test_experts_that_come_and_go_keep_the_router_or_lose_it(
    home: Path, by_text: Path, readers: list[Path], tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    assemble(readers, whole, by_text, strategy="full", **texts_in(home))
    both = load_ensemble(whole)
    x, t = torch.randn(2, 1, 8, 8), torch.full((2,), 0.3)
    prompts = HDDMPipeline.from_pretrained(whole).encode(["a cat", "my dog"]).given
    expected = both.weights(x, t, conditions=prompts)
    swapped = load_ensemble(whole, experts=[1, 0])
    torch.testing.assert_close(swapped.weights(x, t, conditions=prompts), expected.flip(1))
    half = tmp_path / "half"
    assemble(readers, half, by_text, strategy="full", share={"text-0": 0.25}, **texts_in(home))
    odds = expected * torch.tensor([0.25, 0.75])
    found = load_ensemble(half).weights(x, t, conditions=prompts)
    torch.testing.assert_close(found, odds / odds.sum(1, keepdim=True))
    # An expert of a shard that it does not know.
    other = _partition(tmp_path / "other", seed=9)
    encode_shards(other, tmp_path / "more", EncodingSettings(**texts_in(home)))
    settings = expert_settings("flow", steps=2, text_conditional=True)
    train_expert(tmp_path / "more" / "shard_0", tmp_path / "third", settings)
    notes = change(whole, add=[tmp_path / "third"])
    assert any("the experts' moments route" in note for note in notes)
    assert load_ensemble(whole).router_condition is None


@pytest.mark.integration
def test_a_class_is_drawn_by_what_the_router_makes_of_it(
    home: Path, by_class: Path, takers: list[Path], tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    assemble(takers, whole, by_class)
    model = load_ensemble(whole)
    labels = torch.arange(2).repeat(200)
    found = torch.zeros(400, 2)
    for batch in batches(plan(model, steps=2), range(400), Conditions({LABELS: labels}), 100):
        assert batch.expert is not None
        found[batch.rows] = torch.nn.functional.one_hot(batch.expert, 2).float()
    told = posterior_of(model, torch.randn(2, 1, 8, 8), 1.0, Conditions({LABELS: labels[:2]}))
    for label in (0, 1):
        assert found[labels == label, label].mean() == pytest.approx(
            float(told[label, label]), abs=0.1
        )
    # Prompts that name a class are such labels where no expert reads text.
    pipe = HDDMPipeline.from_pretrained(whole)
    given = pipe.encode(["one dog", "a cat"])
    assert (given.prior, given.given[LABELS].tolist()) == (None, [1, 0])
    images = sample(model, 2, steps=2, class_labels=["dog", "cat"])
    assert images.isfinite().all()


@pytest.mark.integration
def test_classes_of_several_partitions_are_joined_by_name(home: Path) -> None:
    first = open_shard(home / "pixels" / "shard_0")
    joined = conditions_of([first, replace(first, classes=("dog", "ship"))], "class")
    assert joined.classes == ("cat", "dog", "ship")
    assert first.labels is not None
    own = joined.take(torch.arange(2 * NUM))[LABELS]
    assert torch.equal(own, torch.cat([first.labels, first.labels + 1]))
    assert int(joined.null) == 3


@pytest.mark.integration
def test_a_tenth_of_the_images_is_trained_without_condition(home: Path) -> None:
    training = router_training(home / "tokens", home / "no", router_settings(condition="text"))
    chosen = torch.arange(40).repeat(50)
    inputs = training.task.draw(chosen, torch.Generator().manual_seed(0), slice(None))
    network: Any = training.task.network
    is_null = (inputs[TEXT] == network.null_text).flatten(1).all(1)
    assert is_null.double().mean().item() == pytest.approx(0.1, abs=0.02)


@pytest.mark.integration
def test_data_without_the_condition_are_refused_in_one_line(home: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    hashes = [
        write_shard(plain / f"shard_{k}", noise(NUM, seed=k), shard=k, num_shards=2) for k in (0, 1)
    ]
    write_partition_record(plain, [NUM, NUM], hashes)
    for data, condition, told in (
        (plain, "class", "shard_0: its images carry no labels; drop `condition` class"),
        (home / "pixels", "text", "shard_0: holds no text embeddings; hddm encode makes them"),
    ):
        settings = router_settings(condition=condition)
        assert told in refusal(train_router, data, tmp_path / "no", settings)
    other = _partition(tmp_path / "other", seed=9)
    write_clip(tmp_path, tokens=8, seed=1)
    encode_shards(other, tmp_path / "more", EncodingSettings(**texts_in(tmp_path)))
    told = "its captions were encoded by another text encoder than those of"
    data = [home / "tokens", tmp_path / "more"]
    assert told in refusal(train_router, data, tmp_path / "no", router_settings(condition="text"))
    assert not (tmp_path / "no").exists()


@pytest.mark.integration
def test_a_run_keeps_its_condition(home: Path, tmp_path: Path) -> None:
    run = RunOptions(checkpoint_every=5)
    train_router(home / "pixels", tmp_path / "r", router_settings(condition="class"), run=run)
    shutil.rmtree(tmp_path / "r")
    other = RunOptions(resume=True, allow_config_change=True)
    told = refusal(train_router, home / "pixels", tmp_path / "r", router_settings(), run=other)
    assert "condition" in told


@pytest.mark.integration
def test_routers_and_experts_that_do_not_fit_are_refused_in_one_line(
    home: Path,
    by_text: Path,
    by_class: Path,
    readers: list[Path],
    takers: list[Path],
    tmp_path: Path,
) -> None:
    # The same shards, whose captions were encoded by another text encoder.
    _, record = read_router(by_text)
    assert record.text_encoder is not None
    foreign = copied(by_text, tmp_path / "foreign")
    other = record.text_encoder.model_copy(update={"fingerprint": "0" * 16}).model_dump(mode="json")
    edit_json(foreign / ROUTER_FILE, text_encoder=other)
    seal(foreign)
    told = refusal(assemble, readers, tmp_path / "no", foreign, **texts_in(home))
    assert "sees prompts by a text encoder (0000000000000000) that no expert reads by" in told
    names = {str(one): ["tree", "sun"] for one in takers}
    told = refusal(assemble, takers, tmp_path / "no", by_class, classes=names)
    assert "sees the classes cat, dog, …, of which no expert has any" in told
    names = {str(one): {"cat": "tree"} for one in takers}
    notes = assemble(takers, tmp_path / "one", by_class, classes=names)
    assert any(
        "does not see tree; these classes are routed by p(k | class)" in one for one in notes
    )
    for changes, words in (
        (
            {"classes": ["a", "b", "c"]},
            "router.json says num_classes 3 and text_dim None, and config",
        ),
        ({"condition": "text"}, "a router has classes if its condition is class"),
    ):
        broken = copied(by_class, tmp_path / words[:9] / "router")
        edit_json(broken / ROUTER_FILE, **changes)
        seal(broken)
        assert words in refusal(assemble, takers, tmp_path / "no", broken)
    lost = copied(by_text, tmp_path / "lost")
    (lost / NULL_FILE).unlink()
    seal(lost)
    assert "holds no tokens of the empty prompt" in refusal(read_router, lost)


@pytest.mark.integration
def test_the_command_says_what_the_condition_is_worth(
    home: Path, tmp_path: Path, hddm: Command
) -> None:
    words = ["--condition", "class", "--steps", 5, "--batch-size", 16]
    text = printed(hddm, "train", "router", home / "pixels", "--out", tmp_path / "r", *words)
    assert "without its condition" in text
    assert "and p(k | class) by counts 75.0%" in text
    code, _, err = hddm(
        "train", "router", home / "pixels", "--out", tmp_path / "s", "--condition", "x"
    )
    assert code == 2
    assert "--condition" in err
