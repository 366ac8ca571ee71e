"""Options of sampling that do not go together, or with a kind of expert, without a model of any."""

from collections.abc import Mapping

from hddm.settings import NativeName
from hddm.utils.errors import HddmError
from hddm.utils.records import WHOLE, NoiseRange


def check_expert(expert: int | None, strategy: str | None, num_experts: int) -> None:
    """Raise an `HddmError` for an ``expert`` that is not there, and for one beside a strategy."""
    if expert is None:
        return
    if strategy is not None:
        raise HddmError(f"expert {expert} and strategy {strategy!r}: choose one of the two")
    if not 0 <= expert < num_experts:
        raise HddmError(f"`expert` {expert}: choose from 0 to {num_experts - 1}")


def refuse_beside_native(name: NativeName, others: Mapping[str, object]) -> None:
    """Raise an `HddmError` for options that are set and that a native sampler has of its own."""
    for option, value in others.items():
        if value is not None:
            raise HddmError(f"`native` {name}: has its own steps and solver; drop `{option}`")


def refuse_native_mix(name: NativeName, strategy: str) -> None:
    """Raise an `HddmError` for a strategy of several domains that native samplers do not have."""
    if strategy != "draw":
        raise HddmError(
            f"`native` {name}: each expert runs by itself; `strategy` draw does so, {strategy} mixes"
        )


def refuse_kind(
    name: NativeName, is_flow: bool, sampling_steps: int | None, noise_range: NoiseRange
) -> None:
    """Raise an `HddmError` for experts of a kind that has no native sampler of this ``name``."""
    if name == "flow-euler" and not is_flow:
        raise HddmError(
            "`native` flow-euler: is for flow experts, and an expert here is of DDPM; choose ddim, "
            "dpmsolver++ or unipc"
        )
    if sampling_steps is not None:
        raise HddmError(f"`native` {name}: a student of few steps has no other sampler; drop it")
    if noise_range != WHOLE:
        raise HddmError(f"`native` {name}: an expert covers a part of the noise only; drop it")
