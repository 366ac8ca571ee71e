"""The quickstart, with trainings of two steps: a preset of hddm benchmark with a headline of its own."""

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from hddm.benchmark.file import read_benchmark
from hddm.benchmark.results import Results, SameImages
from hddm.benchmark.run import run_benchmark
from hddm.data.images import have_equal_pixels
from hddm.ensemble import Ensemble
from hddm.experts.loading import load
from hddm.noise import Seeded
from hddm.running import pick_experts
from hddm_cli.lines import LINES
from hddm_cli.quickstart import OTHERWISE, headline
from tests.benchmark_files import inline

pytestmark = pytest.mark.slow
# One image more than a distance on 64 features needs.
VALUES = {"old_steps": 2, "new_steps": 2, "twice": 2, "router_steps": 2, "images": 65, "few": 9}


class Made(NamedTuple):
    """A finished quickstart: its folder, what it printed, and its results."""

    out: Path
    printed: str
    results: Results


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("quickstart") / "out"
    file = read_benchmark("quickstart", {name: str(value) for name, value in VALUES.items()})
    with inline(), contextlib.redirect_stderr(io.StringIO()) as printed:
        results = run_benchmark(file, out, LINES, shows_commands=True, headline=headline)
    return Made(out, printed.getvalue(), results)


def test_every_command_is_printed_as_it_runs_after_a_sentence(made: Made) -> None:
    told = re.findall(r"^  (hddm .*)$", made.printed, re.M)
    assert sorted(told) == sorted(step.command for step in made.results.steps)
    assert (
        "\nConvert the old model to an expert: the same weights, bit for bit\n  hddm convert"
        in made.printed
    )
    assert "hddm assemble old flow ddpm --router router --share old=0.507 --out grown" in told


def test_the_old_model_is_in_the_ensemble_bit_for_bit(made: Made) -> None:
    (same,) = made.results.same
    assert (same.images, same.equal) == (9, 9)
    model = load(made.out / "grown")
    assert isinstance(model, Ensemble)
    # The seed of a sample draws its expert; the first is the old model.
    is_old = pick_experts(model.prior_of(65, {}), Seeded(0).draws(range(65))) == 0
    names = ("the-old-model", "old-new-experts-one-expert-per-image")
    old, grown = (sorted((made.out / "samples" / name).glob("*.png")) for name in names)
    equal = [have_equal_pixels(*pair) for pair in zip(old, grown, strict=True)]
    assert equal == is_old.tolist()


def test_the_headline_is_said_of_samples_that_it_is_true_of(made: Made) -> None:
    # Two steps make no digits.
    assert headline(made.results) == OTHERWISE
    shares = iter((0.98, 0.02, 0.55, 0.5))
    scored = []
    for one in made.results.scored:
        share = next(shares)
        domains = tuple(
            domain.model_copy(update={"share": part})
            for domain, part in zip(one.evaluation.domains, (share, 1 - share), strict=True)
        )
        evaluation = one.evaluation.model_copy(update={"domains": domains})
        scored.append(one.model_copy(update={"evaluation": evaluation}))
    good = made.results.model_copy(update={"scored": tuple(scored)})
    assert headline(good).startswith("A model of the digits 0–4 forgets them")
    changed = (SameImages(title="", images=9, equal=8),)
    assert headline(good.model_copy(update={"same": changed})) == OTHERWISE
