"""Conditionings of ComfyUI's samplers, as a mix hands them to its models."""

from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.comfyui.conditionings import WHOLE_BATCH, rows_of

BATCH, ROWS = 4, torch.tensor([1, 3])


class Held:
    """A value of a conditioning, as `comfy.conds` keeps it."""

    def __init__(self, cond: Any) -> None:
        self.cond = cond

    def _copy_with(self, cond: Any) -> "Held":
        return Held(cond)


def conditioning(**changes: Any) -> dict[str, Any]:
    text = torch.arange(BATCH).float().reshape(BATCH, 1, 1)
    return {"model_conds": {"c_crossattn": Held(text)}, **changes}


def text_of(conds: list[Any] | None) -> Tensor:
    assert conds is not None
    found: Tensor = conds[0][0]["model_conds"]["c_crossattn"].cond
    return found


@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_only_a_control_that_is_there_makes_a_model_run_the_whole_batch(name: str) -> None:
    assert text_of(rows_of([[conditioning()]], ROWS, BATCH)).flatten().tolist() == [1, 3]
    empty = conditioning(**{name: None})
    assert text_of(rows_of([[empty]], ROWS, BATCH)).flatten().tolist() == [1, 3]
    assert rows_of([[conditioning(**{name: object()})]], ROWS, BATCH) is None


def test_masks_of_each_picture_go_with_their_pictures() -> None:
    masks = torch.arange(BATCH).float().reshape(BATCH, 1, 1).expand(BATCH, 2, 2)
    found = rows_of([None, [conditioning(mask=masks)], [conditioning(mask=masks[:1])]], ROWS, BATCH)
    assert found is not None
    nothing, each, shared = found
    assert nothing is None
    assert torch.equal(each[0]["mask"], masks[[1, 3]])
    assert torch.equal(shared[0]["mask"], masks[:1])
    # Masks of another number can be of the whole batch alone.
    assert rows_of([[conditioning(mask=masks[:3])]], ROWS, BATCH) is None
