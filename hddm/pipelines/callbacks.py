"""Callbacks at the end of a step, as in diffusers.

A callback sees the conditional rows of ``prompt_embeds`` only; diffusers puts the negative ones before them.
Its official callbacks work on both: they keep the last row and turn guidance off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from torch import Tensor

from hddm.conditions import Conditions
from hddm.solvers import OnStep
from hddm.utils.errors import HddmError
from hddm.velocity import Guidance

Callback = Callable[[Any, int, float, dict[str, Tensor]], Mapping[str, Tensor] | None]

_LATENTS, _NEGATIVE = "latents", "negative_"
_KEYWORDS = {
    "prompt_embeds": "encoder_hidden_states",
    "pooled_prompt_embeds": "pooled_projections",
    "add_text_embeds": "text_embeds",
    "add_time_ids": "time_ids",
}
"""Network keywords by their names in diffusers' pipelines."""


class Callbacks:
    """The state of a call that callbacks read and set."""

    _callback_tensor_inputs: ClassVar = [_LATENTS, "prompt_embeds", "negative_prompt_embeds"]
    _asked = Guidance(1.0)
    _guidance_scale = 1.0
    _num_timesteps = 0
    _interrupt = False

    @property
    def interrupt(self) -> bool:
        """True after a callback has set ``_interrupt`` to stop the run."""
        return self._interrupt

    @property
    def num_timesteps(self) -> int:
        """Steps of the current or last call."""
        return self._num_timesteps

    @property
    def guidance_scale(self) -> float:
        """Guidance scale of the current or last call; callbacks set ``_guidance_scale``."""
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        """True where the next call of the velocity is guided by condition."""
        return self._guidance().by_condition

    def _guidance(self) -> Guidance:
        """Guidance of the next call of the velocity: as requested, or with the scale that a callback set.

        As in diffusers, a callback's scale of 1 or less means no guidance.
        """
        scale = float(self._guidance_scale)
        if scale == self._asked.scale:
            return self._asked
        return replace(self._asked, scale=scale if scale > 1 else 1.0)

    def _begin(self, guidance: Guidance, num_steps: int) -> None:
        """Start a call."""
        self._asked, self._guidance_scale = guidance, guidance.scale
        self._num_timesteps, self._interrupt = num_steps, False

    def _on_step(
        self,
        advance: Callable[[], object],
        callback: Callback | None,
        names: Sequence[str],
        times: Tensor,
        asked: Conditions,
    ) -> OnStep:
        """The ``on_step`` of a solver that calls ``advance`` and then ``callback``, and applies its answer.

        The callback gets the tensors ``names``, or those that an official callback of diffusers declares.
        Raises `HddmError` for a tensor that this call does not have, or that comes back in another shape.
        """
        if isinstance(callback, PipelineCallback | MultiPipelineCallbacks):
            names = callback.tensor_inputs
        for name in names:
            _place(name, asked, (_LATENTS,))

        def step(index: int, x: Tensor) -> Tensor:
            advance()
            if callback is None:
                return x
            state, tensors = {_LATENTS: x}, {}
            for name in names:
                held, keyword = _place(name, asked, state)
                tensors[name] = held[keyword]
            outcome = callback(self, index, 1000 * float(times[index]), tensors) or {}
            if self._asked.scale == 1.0 and self._guidance().scale != 1.0:
                raise HddmError("a callback set _guidance_scale in a call that began without; begin above 1")
            for name, value in outcome.items():
                held, keyword = _place(name, asked, state)
                held[keyword] = _fitting(name, value, held[keyword])
            return state[_LATENTS]

        return step


def _place(name: str, asked: Conditions, state: Any) -> tuple[Any, str]:
    """What holds a callback's tensor, ``state`` or one branch of the conditions, and its keyword there."""
    if name in state:
        return state, name
    branch = asked.negative if name.startswith(_NEGATIVE) else asked.given
    own = name.removeprefix(_NEGATIVE)
    keyword = _KEYWORDS.get(own, own)
    if keyword not in branch:
        known = [_LATENTS, *asked.given, *(_NEGATIVE + one for one in asked.negative)]
        raise HddmError(f"callbacks see {', '.join(map(repr, known))} in this call, not {name!r}")
    return branch, keyword


def _fitting(name: str, value: Tensor, before: Tensor) -> Tensor:
    """A tensor that a callback returned, in the shape of the one ``before``."""
    if value.shape == before.shape:
        return value.to(before)
    # Official callbacks of diffusers return the last row; with one prompt, all images share it.
    is_row = len(before) > 0 and value.shape == before[:1].shape
    if is_row and name != _LATENTS and bool((before == before[-1:]).all()):
        return value.to(before).expand_as(before)
    shapes = f"{tuple(value.shape)}, and this call has {tuple(before.shape)}"
    raise HddmError(
        f"a callback returned {name} of shape {shapes}; with several prompts, make a call for each"
    )
