"""Text encoders as objects of families: one reading per class, and one pipeline per network."""

from dataclasses import replace
from typing import Any

import pytest

from hddm.networks import families as of_families
from hddm.networks.encoders import T5, TokenizerClass
from hddm.networks.families.family import Pipeline, Prompts
from hddm.networks.families.stable_diffusion import STABLE_DIFFUSION
from hddm.networks.identity import TextEncoderRecord
from tests.artefacts import refusal


@pytest.mark.parametrize(
    "change", [{"unused": ()}, {"tokenizer": TokenizerClass("CLIPTokenizer", ())}], ids=str
)
def test_a_class_that_two_families_read_in_different_ways_is_refused(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of them a folder gets would hang on their order."""
    of_package = Pipeline(
        "MinePipeline", prompts=Prompts((replace(T5, name="Mine", label="mine"),))
    )
    other = Pipeline("OtherPipeline", prompts=Prompts((replace(T5, name="Mine", **change),)))
    found = {"MinePipeline": of_package, "OtherPipeline": other}
    monkeypatch.setattr(of_families, "pipelines", lambda: found)
    told = refusal(of_families.text_encoders.__wrapped__)
    assert told.startswith("two families read the text encoder Mine in different ways")


def test_the_pipeline_of_a_network_follows_from_it_and_not_from_the_text_encoder_at_hand() -> None:
    """One that was made for another pipeline would be accepted by its own name otherwise."""
    kolors = {"addition_embed_type": "text_time", "encoder_hid_dim": 24}
    for kind in ("StableDiffusionXLPipeline", "KolorsPipeline", "ZImagePipeline"):
        record = TextEncoderRecord(kind=kind, fingerprint="0" * 16, tokens=77, width=24)
        assert STABLE_DIFFUSION.pipeline(kolors, record).name == "KolorsPipeline"
