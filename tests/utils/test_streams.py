"""Streams of random numbers: no two uses, indices, parts or seeds have numbers in common."""

import ast
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import hddm
from hddm.noise import Seeded
from hddm.utils.errors import HddmError
from hddm.utils.streams import DRAW, FRESH, NOISE, NUMBERS, Use, generator, seed_of, stream

ENDS = (0, 1, 2, 3, 7, 2**16, NUMBERS - 2, NUMBERS - 1)
"""Numbers at both ends of their range, and those that are uses as well."""
SAMPLING = {"initial": NOISE, "draws": DRAW, "fresh": FRESH}


def test_every_seed_index_use_and_part_has_a_stream_of_its_own() -> None:
    keys = set(itertools.product(ENDS, ENDS, (NOISE, DRAW, FRESH, *Use), ENDS))
    # numpy makes any key a pool of 128 bits, from which all numbers follow.
    pools = {tuple(stream(seed, use, index, part).pool.tolist()) for seed, index, use, part in keys}
    assert len(pools) == len(keys)
    assert len({seed_of(seed, use, index, part) for seed, index, use, part in keys}) == len(keys)


def test_uses_begin_above_those_of_samples_and_their_numbers_stay() -> None:
    # 21, 25, 29 and 39 belonged to uses that are gone, and stay unused.
    known = [*range(3, 21), *range(22, 25), *range(26, 29), *range(30, 39)]
    assert sorted(Use) == [*known, *range(40, 40 + len(Use) - len(known))]
    # Trained folders, encoded shards and partitions repeat only while these stay: new uses go to the end.
    assert (Use.EXPERT_ORDER, Use.WEIGHTS, Use.CLUSTERS) == (3, 9, 22)


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("seed", [0, 5, NUMBERS - 1])
def test_samples_have_the_streams_that_they_always_had(name: str, seed: int) -> None:
    """(seed, i), (seed, i, 1) and (seed, i, 2), each hashed to a seed of torch's generator."""
    for i in (0, 3, NUMBERS - 1):
        key = (seed, i) if name == "initial" else (seed, i, SAMPLING[name])
        state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1)
        own = torch.Generator().manual_seed(int(state))
        match name:
            case "initial":
                found, expected = (
                    Seeded(seed).initial([i], (2, 3))[0],
                    torch.randn(2, 3, generator=own),
                )
            case "draws":
                found = Seeded(seed).draws([i])[0]
                expected = torch.rand((), generator=own, dtype=torch.float64)
            case _:
                found, expected = (
                    Seeded(seed).fresh([i], (2, 3))()[0],
                    torch.randn(2, 3, generator=own),
                )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("wrong", [-1, NUMBERS])
def test_numbers_outside_the_table_are_refused_in_one_line(wrong: int) -> None:
    for name in ("seed", "index", "part"):
        with pytest.raises(
            HddmError, match=f"{name} {wrong}: must be a whole number from 0 to 4294967295"
        ):
            generator(**{"seed": 0, "use": Use.WEIGHTS, name: wrong})
    with pytest.raises(HddmError):
        Seeded(wrong)


def test_nothing_in_the_library_draws_beside_the_table() -> None:
    """Generators are made from a stream; torch's own is seeded by one, or by numbers drawn from one."""
    found = []
    for path in Path(hddm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, arguments = node.func.attr, [ast.unparse(one) for one in node.args]
            if name in ("default_rng", "manual_seed", "SeedSequence", "RandomState") and not (
                arguments and arguments[0].startswith(("stream(", "seed_of("))
            ):
                found.append(f"{path.name}: {ast.unparse(node)}")
    assert sorted(found) == [
        "images.py: np.random.default_rng(seed)",
        "loop.py: torch.manual_seed(seed)",
        "streams.py: np.random.SeedSequence((seed, index, int(use), part))",
    ]
