"""Pickles of the largest size that is scanned cost little, whatever they hold; real ones load."""

import collections
from pathlib import Path

import pytest
import torch

from hddm.utils.errors import HddmError
from hddm.utils.pickles import LARGEST_PICKLE, MOST_OPCODES, read_pickle
from tests.hostile import ZIP_OR_LEGACY, grown_by, save, zipped

# What every opcode may repeat, just below the largest number of opcodes, and just below the largest size.
FEW = MOST_OPCODES - 100
CALL = b"ccollections\nOrderedDict\nq\x00)q\x01"
FLOODS = {
    "dictionaries": b"}" * FEW,
    "dictionaries in lists": b"](" + (b"](" + b"}" * 990 + b"e") * (FEW // 993) + b"e",
    "lists": b"]" * FEW,
    "lists in lists": b"](" + (b"](" + b"]" * 990 + b"e") * (FEW // 993) + b"e",
    "lists in memory": b"]" + b"".join(b"]r" + i.to_bytes(4, "little") + b"a" for i in range(FEW // 3)),
    "tuples": b")" + b"\x85" * FEW,
    "marks": b"(" * FEW,
    "floats": b"](" + b"G@\x09\x21\xfbTD-\x18" * 99_000 + b"e",
    "strings": b"".join(b"X\x03\x00\x00\x00" + i.to_bytes(3, "big") for i in range(2**20 - 10, 2**20)) * 9,
    "calls": CALL + b"]" + b"h\x00h\x01Ra" * (FEW // 4),
    "names": b"".join(b"cm%d\na\n" % i for i in range(700_000)),
    "too many opcodes": b"]" + b"Na" * (LARGEST_PICKLE // 2 - 3),
}
QUICK = {"dictionaries in lists", "names", "too many opcodes"}
PROBLEMS = {
    "names": "would import 'm0.a'",
    "too many opcodes": "more than 600000 opcodes",
    "marks": "nested deeper",
    "lists": "more than 100000 values",
    "calls": "objects",
}


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in FLOODS]
)
def test_a_pickle_of_the_largest_size_costs_little(name: str, tmp_path: Path) -> None:
    path = zipped(tmp_path, b"\x80\x02" + FLOODS[name] + b".")

    def read() -> None:
        with pytest.raises(HddmError, match=PROBLEMS.get(name)) as refused:
            read_pickle(path, allow_pickle=True)
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 1500

    assert grown_by(read) < 200 * 2**20


@pytest.mark.integration
@ZIP_OR_LEGACY
def test_weights_average_and_state_of_an_optimiser_of_1200_tensors_are_read(
    in_zip: bool, tmp_path: Path
) -> None:
    names = [f"module.transformer_blocks.{n // 20}.attention.{n % 20}.weight" for n in range(1200)]
    ema, raw = (
        collections.OrderedDict((name, torch.full((4,), float(n))) for n, name in enumerate(names))
        for _ in range(2)
    )
    state = {n: {"step": 5, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)} for n in range(1200)}
    groups = [{"params": list(range(1200)), "lr": 1e-4}]
    saved = {"ema": ema, "raw": raw, "opt": {"state": state, "param_groups": groups}}
    read = read_pickle(save(saved, tmp_path, in_zip), allow_pickle=True)
    assert list(read["ema"]) == names
    assert read["raw"][names[1199]].tolist() == [1199.0] * 4
    assert len(read["opt"]["state"]) == 1200
