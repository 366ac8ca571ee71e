"""Words of errors."""

import pytest

from hddm.utils.errors import an


@pytest.mark.parametrize(
    "words",
    [
        "an AutoencoderKL",
        "a VQModel",
        "a UNet2DModel",
        "an SD3Transformer2DModel",
        "a T5EncoderModel",
        "a CLIPTextModel",
        "a DiTTransformer2DModel",
        "an EulerDiscreteScheduler",
        "an int",
    ],
)
def test_a_name_of_a_class_has_the_article_with_which_it_is_read_aloud(words: str) -> None:
    assert an(words.split()[1]) == words
