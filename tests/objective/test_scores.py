"""``hddm evaluate MODEL --held-out`` and ``hddm compare`` of what it writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hddm.objective.compare import ScoresGroup, compared
from hddm.objective.errors import TIMES
from hddm.objective.records import (
    BitsScore,
    HeldOutData,
    HeldOutScores,
    LevelScore,
    Mean,
    StrategyScores,
)
from hddm.objective.scores import HeldOutImages, score_held_out
from hddm.utils.errors import HddmError
from tests.artefacts import Command, refusal
from tests.ensemble_files import flow_expert, saved, write_ensemble


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held_out")
    generator = torch.Generator().manual_seed(1)
    for k in range(12):
        pixels = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{k:02}.png")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ensemble(tmp_path_factory.mktemp("model"), [flow_expert(0), flow_expert(1)])


@pytest.mark.slow
def test_scores_are_repeatable_and_paired_over_models(images: Path, tmp_path: Path) -> None:
    experts = [saved(tmp_path / str(k), flow_expert(k)) for k in range(2)]
    options: dict[str, Any] = {"held_out": images, "likelihood_images": 4, "seed": 3}
    one, again, other = (score_held_out(k, **options) for k in (*experts[:1], *experts))
    assert one == again
    assert one.measured == other.measured
    assert [level.t for level in one.strategies[0].levels] == list(TIMES)
    assert len(one.strategies[0].levels[0].by_image) == 12
    bits = one.strategies[0].bits
    assert bits is not None
    assert (len(bits.by_image), bits.estimate_error) == (4, None)
    fewer = score_held_out(experts[0], **options, batch_size=5)
    for level, same in zip(one.strategies[0].levels, fewer.strategies[0].levels, strict=True):
        assert level.by_image == pytest.approx(same.by_image, rel=1e-5)


@pytest.mark.slow
def test_strategies_have_the_scores_that_they_define(whole: Path, images: Path) -> None:
    found = score_held_out(whole, images, strategies=("full", "draw", "top-1"), likelihood_images=2)
    by_name = {one.strategy: one for one in found.strategies}
    assert [len(by_name[name].levels) for name in ("full", "draw", "top-1")] == [11, 0, 11]
    assert all(one.bits is not None for one in found.strategies)
    message = refusal(score_held_out, whole, images, strategies=("commit-0.5",))
    assert "score full and draw" in message


def test_draw_without_a_likelihood_has_nothing_to_score(whole: Path, images: Path) -> None:
    message = refusal(score_held_out, whole, images, strategies=("draw",), likelihood_images=0)
    assert "nothing is left to score" in message


def test_samples_of_another_shape_are_refused(whole: Path, tmp_path: Path) -> None:
    for k in range(4):
        Image.new("RGB", (6, 6), (k, 0, 0)).save(tmp_path / f"{k}.png")
    assert "its samples are (3, 6, 6), the model's (3, 4, 4)" in refusal(
        score_held_out, whole, tmp_path
    )


@pytest.mark.integration
def test_the_command_scores_a_model_and_compare_judges_it(
    whole: Path, images: Path, tmp_path: Path, hddm: Command
) -> None:
    few = ("--likelihood-images", 2, "--num-images", 8)
    names = {}
    for strategy in ("full", "top-1"):
        names[strategy] = tmp_path / f"{strategy}.json"
        options = ("--held-out", images, "--strategy", strategy, "--out", names[strategy])
        code, output, _ = hddm("evaluate", whole, *options, *few)
        assert (code, output.count("error at t =")) == (0, len(TIMES))
    code, output, _ = hddm("compare", *names.values())
    assert code == 0
    assert output.count("within noise") + output.count("better") + output.count("worse") >= 12
    again = tmp_path / "again.json"
    options = ("--held-out", images, "--seed", 1, "--out", again)
    assert hddm("evaluate", whole, *options, *few)[0] == 0
    code, _, error = hddm("compare", names["full"], again)
    assert (code, error.count("\n")) == (1, 1)
    assert "other images or noise" in error


@pytest.mark.integration
def test_options_that_have_no_effect_are_refused(whole: Path, images: Path, hddm: Command) -> None:
    for words, message in (
        ((whole, "--held-out", images, "--reference", images), "--reference"),
        ((whole, "--held-out", images, "--mirrored"), "--mirrored: measures a folder of images"),
        ((whole,), "--held-out: is required for a model"),
        ((images, "--reference", images, "--strategy", "full"), "--strategy: scores an expert"),
        ((images,), "--reference: is required"),
    ):
        code, _, error = hddm("evaluate", *words)
        assert (code, error.count("\n")) == (2, 1)
        assert message in error


def _scores(errors: list[float], data: str = "a") -> HeldOutScores:
    level = LevelScore(t=0.5, by_image=tuple(errors))
    bits = BitsScore(by_image=(4.0, 5.0), smallest_noise=0.02, steps=20)
    return HeldOutScores(
        model="m",
        model_sha256="0",
        data=HeldOutData(path="p", hash=data, rows=(0, 1, 2, 3)),
        seed=0,
        noise_draws=1,
        strategies=(StrategyScores(strategy="", levels=(level,), bits=bits),),
    )


def test_gaps_are_paired_by_image() -> None:
    base = _scores([1.0, 5.0, 9.0, 3.0])
    # Below it for every image by nearly as much, though images differ by far more.
    ours = _scores([0.9, 4.89, 8.9, 2.91])
    lines = compared([ScoresGroup("base", {"": base}), ScoresGroup("ours", {"": ours})])
    row = next(line for line in lines if "t = 0.5" in line)
    assert "better" in row
    assert "within noise" in next(line for line in lines if "bits" in line)


def test_seeds_are_paired_and_few_of_them_give_no_verdict() -> None:
    def group(name: str, shift: float, seeds: int) -> ScoresGroup:
        results = {}
        for seed in range(seeds):
            errors = [1.0 + seed + shift + 0.001 * seed * shift] * 4
            results[str(seed)] = _scores(errors)
        return ScoresGroup(name, results)

    lines = compared([group("base", 0.0, 4), group("ours", -0.1, 4)])
    assert "better" in next(line for line in lines if "t = 0.5" in line)
    lines = compared([group("base", 0.0, 2), group("ours", -0.1, 2)])
    assert "no verdict" in next(line for line in lines if "t = 0.5" in line)


def test_results_of_other_images_are_not_compared() -> None:
    groups = [
        ScoresGroup("a", {"": _scores([1.0] * 4)}),
        ScoresGroup("b", {"": _scores([1.0] * 4, "b")}),
    ]
    with pytest.raises(HddmError, match="other images or noise"):
        compared(groups)


def test_a_mean_has_the_interval_of_students_of_statistics() -> None:
    found = Mean.of([1.0, 2.0, 3.0, 4.0])
    assert found.value == 2.5
    assert found.half_width == pytest.approx(1.96 * (5 / 3) ** 0.5 / 2)


def test_a_folder_of_images_is_read_as_held_out_data(images: Path) -> None:
    found = HeldOutImages.read(images)
    assert found.samples.shape == (12, 3, 4, 4)
    assert found.are_pixels
    assert json.dumps(found.hash)
