"""Conditionings of ComfyUI's samplers: what a mix changes in them for each of its models.

A conditioning is a list of dictionaries, as samplers have it. Nothing of ComfyUI is imported here.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hddm.utils.errors import HddmError

from .levels import Levels

Conds = dict[str, list[dict[str, Any]]]
WHOLE_BATCH = ("control", "gligen", "hooks")
"""Parts of a conditioning that are of the whole batch."""


def has_hooks(listed: Sequence[Any]) -> bool:
    """True if a conditioning, as nodes hand it over or as samplers do, has hooks."""
    for one in listed:
        facts = one if isinstance(one, Mapping) else one[1]
        if facts.get("hooks") is not None:
            return True
    return False


def with_own_controls(cond: dict[str, Any], known: dict[int, Any]) -> dict[str, Any]:
    """The conditioning with ControlNets of its own, which keep the noise levels of one model."""
    own = cond.copy()
    if own.get("control") is not None:
        own["control"] = _own_control(own["control"], known)
    return own


def _own_control(control: Any, known: dict[int, Any]) -> Any:
    if id(control) not in known:
        twin = control.copy()
        if control.previous_controlnet is not None:
            twin.set_previous_controlnet(_own_control(control.previous_controlnet, known))
        known[id(control)] = twin
    return known[id(control)]


def check_width(patcher: Any, conds: Conds, number: int) -> None:
    """Refuse texts of another encoder, where a model says how wide its texts are."""
    config = getattr(patcher.model.model_config, "unet_config", {})
    width = config.get("context_dim")
    for listed in conds.values():
        for cond in listed:
            text = cond.get("cross_attn")
            if isinstance(width, int) and text is not None and text.shape[-1] != width:
                raise HddmError(
                    f"model {number} takes texts of width {width}, and gets one of {text.shape[-1]}; encode "
                    "the prompts with its own text encoder and connect them to this model's positive and "
                    "negative"
                )


@contextlib.contextmanager
def percents_of(first: Any, levels: Levels, sampling: Any, own: Levels) -> Iterator[None]:
    """Let percents mean noise levels of the ``first`` model, which the sampler counts by.

    ConditioningSetTimestepRange, ControlNets and hooks ask ``sampling`` for the sigma of a percent.
    """
    if sampling is first:
        yield
        return
    by_itself = sampling.percent_to_sigma

    def percent_to_sigma(percent: float) -> float:
        if percent <= 0 or percent >= 1:
            return float(by_itself(percent))
        t = levels.times(torch.tensor(float(first.percent_to_sigma(percent))))
        return float(own.sigmas(t))

    sampling.percent_to_sigma = percent_to_sigma
    try:
        yield
    finally:
        del sampling.percent_to_sigma


def rows_of(conds: Sequence[Any], rows: Tensor, batch: int) -> list[Any] | None:
    """``conds`` for the pictures ``rows`` of a batch; None where they are of the whole batch alone."""
    found: list[Any] = []
    for listed in conds:
        if listed is None:
            found.append(None)
            continue
        some = []
        for cond in listed:
            if any(cond.get(name) is not None for name in WHOLE_BATCH):
                return None
            own = cond.copy()
            mask = own.get("mask")
            if mask is not None and len(mask) not in (1, batch):
                return None
            if mask is not None and len(mask) == batch:
                own["mask"] = mask[rows.to(mask.device)]
            own["model_conds"] = {}
            for name, value in cond["model_conds"].items():
                part = _value_rows(value, rows, batch)
                if part is None:
                    return None
                own["model_conds"][name] = part
            some.append(own)
        found.append(some)
    return found


def _value_rows(value: Any, rows: Tensor, batch: int) -> Any:
    held = value.cond
    if not isinstance(held, Tensor):
        # Lists are of the whole batch; constants are for every picture.
        return None if isinstance(held, list) else value
    if held.ndim == 0 or len(held) == 1:
        return value
    if len(held) != batch:
        return None
    return value._copy_with(held[rows.to(held.device)])
