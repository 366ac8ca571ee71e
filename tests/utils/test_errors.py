"""Words of errors."""

import pytest

from hddm.settings import Limits
from hddm.utils.errors import an, size_text, sizes_apart


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


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1_200_000_001, 1_200_000_000, ("1.200000001 GB", "1.200000000 GB")),
        (1_201_000_000, 1_199_000_000, ("1.201 GB", "1.199 GB")),
        (999_999_999, 1_000_000_000, ("999.999999 MB", "1.0000000 GB")),
        (5, 4, ("0.01 kB", "0.00 kB")),
        (40_000_000_000, 300_000, ("40.00 GB", "300 kB")),
        (7_000_000, 7_000_000, ("7.0 MB", "7.0 MB")),
    ],
)
def test_two_sizes_that_differ_look_different(
    one: int, other: int, expected: tuple[str, str]
) -> None:
    assert sizes_apart(one, other) == expected
    assert sizes_apart(other, one) == expected[::-1]


def test_a_size_is_in_the_unit_of_what_is_written() -> None:
    assert [size_text(one) for one in (999_499, 999_500, 999_949_999, 999_950_000)] == [
        "999 kB",
        "1.0 MB",
        "999.9 MB",
        "1.00 GB",
    ]


@pytest.mark.parametrize("amount", [5, 5.0, "5", " 999999 ", "1.5", 999_999])
def test_a_small_number_without_a_unit_is_no_amount_of_memory(amount: object) -> None:
    with pytest.raises(ValueError, match="an amount without a unit"):
        Limits.model_validate({"max_upload": amount})


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("5KB", 5000),
        ("5B", 5),
        ("5 mb", 5_000_000),
        ("5k", 5000),
        (10**6, 10**6),
        ("1000000", 10**6),
    ],
)
def test_an_amount_of_memory_has_a_unit_or_is_large(amount: object, expected: int) -> None:
    read = Limits.model_validate({"max_upload": amount})
    assert read.max_upload == expected
    # An amount that was read already is one.
    assert Limits.model_validate(dict(read)) == read
