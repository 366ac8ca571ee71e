"""Keywords of the functions that a user calls: the fields of their settings, checked before anything runs."""

from pathlib import Path

import pytest

import hddm
from hddm.training.settings import ExpertSettings, RunOptions
from tests.artefacts import refusal

FUNCTIONS = ("assemble", "convert", "evaluate", "partition", "sample_to_folder", "train")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unknown_keyword_is_named_before_what_is_missing(name: str) -> None:
    message = refusal(getattr(hddm, name), steep=3)
    assert message.startswith(f"{name} takes no argument 'steep'")


def test_an_unknown_keyword_comes_with_the_nearest_known_one() -> None:
    assert refusal(hddm.train, "shard", "out", nsteps=3).endswith("; did you mean 'steps'?")
    assert refusal(hddm.partition, "photos", "out", shards=2).endswith(
        "; did you mean 'num_shards'?"
    )
    assert refusal(hddm.train, "shard", "out", setings=None).endswith("; did you mean 'settings'?")
    # One of the function's own, beside its settings.
    assert refusal(hddm.train, "shard", "out", over_write=True).endswith(
        "; did you mean 'overwrite'?"
    )


def test_a_field_beside_the_settings_that_hold_it_is_refused() -> None:
    settings = ExpertSettings(objective="flow", steps=3)
    message = refusal(hddm.train, Path("shard"), Path("out"), settings, steps=4)
    assert message == "`steps`: is one of `settings`, which was passed whole; use one of the two"
    # The other record's fields are keywords all the same.
    assert "shard: no such folder" in refusal(
        hddm.train, "shard", "out", settings=settings, resume=False
    )
    options = RunOptions()
    assert "shard: no such folder" in refusal(
        hddm.train, "shard", "out", run=options, objective="flow", steps=3
    )
