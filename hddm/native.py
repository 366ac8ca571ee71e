"""Samples of one expert by a sampler of its own kind: diffusers' schedulers on the expert's own schedule.

These are controls for the common velocity space. A DDPM expert runs as its authors would run it: its network
is called at its own timesteps, its prediction is read as the schedule reads it, and nothing is converted. A
flow expert runs on evenly spaced times.

    ddim          deterministic DDIM (arXiv:2010.02502); Euler's method for flow experts
    dpmsolver++   DPM-Solver++ of second order, multistep (arXiv:2211.01095)
    unipc         UniPC of second order (arXiv:2302.04867)
    flow-euler    Euler's method, for flow experts alone

Each calls the network once per step. A schedule of continuous time is read at about 1,000 of its times.
Pixels are kept in [-1, 1] as diffusers' pipelines of pixels do: clipped by DDIM, thresholded by the others;
not where the expert's own data have another scale.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from hddm.conditions import Inputs
from hddm.guidance import Guidance
from hddm.predictions import PredictionType
from hddm.sampling_choices import refuse_kind
from hddm.schedules import DiscreteSchedule, LinearSchedule
from hddm.settings import NativeName
from hddm.solvers import OnStep, unchanged
from hddm.utils.errors import HddmError
from hddm.utils.tensors import sent
from hddm.velocity import VelocityField

TIMES = 1000
"""Times at which a continuous schedule is read."""
_READ = (PredictionType.EPSILON, PredictionType.SAMPLE, PredictionType.V_PREDICTION)
"""Predictions that diffusers' schedulers of DDPM read."""
_MULTISTEP = {"dpmsolver++": DPMSolverMultistepScheduler, "unipc": UniPCMultistepScheduler}


def refuse_guidance(guidance: Guidance, name: NativeName) -> None:
    """Raise an `HddmError` for guidance that a native sampler does not have."""
    is_resized = guidance.rescale or guidance.norm
    if guidance.by_weak or is_resized or guidance.interval != (0.0, 1.0):
        raise HddmError(
            f"`native` {name}: has plain guidance by condition alone, not by the weak model, rescaled, with "
            "a norm, or in an interval"
        )


def refuse_native(field: VelocityField, name: NativeName, steps: int) -> None:
    """Raise an `HddmError` for an expert that has no native sampler of this ``name`` and of these steps."""
    is_flow = isinstance(field.schedule, LinearSchedule)
    refuse_kind(name, is_flow, field.sampling_steps, field.noise_range)
    if is_flow:
        return
    if field.prediction_type not in _READ:
        raise HddmError(
            f"`native` {name}: an expert of DDPM predicts {field.prediction_type.value} here, which "
            "diffusers' schedulers do not read; drop it"
        )
    if not isinstance(field.schedule, DiscreteSchedule):
        return
    total = len(field.schedule.betas)
    if steps > total:
        raise HddmError(f"`native` {name}: takes at most {total} steps, not {steps}")
    if name == "ddim" and total % steps:
        # Its steps are of one length, and those of other numbers do not meet the times that are called.
        known = [number for number in range(1, total + 1) if total % number == 0]
        near = sorted(known, key=lambda number: abs(number - steps))[:2]
        shown = " or ".join(map(str, sorted(near)))
        raise HddmError(f"`native` ddim: steps must divide {total}, not {steps}; choose {shown}")
    if field.schedule.betas[-1] == 1 and (name != "ddim" or field.prediction.is_of_noise):
        raise HddmError(
            f"`native` {name}: this schedule ends without any signal, which the sampler cannot begin with; "
            "use hddm's own"
        )


def native_samples(
    field: VelocityField,
    noise: Tensor,
    steps: int,
    name: NativeName,
    inputs: Inputs,
    is_pixels: bool,
    on_step: OnStep = unchanged,
) -> Tensor:
    """Samples x_0 (n, C, H, W) of an expert, in common units, from ``noise`` of variance 1.

    `refuse_native` and `refuse_guidance` say what has none; a plan of samples checks it.

    Args:
        field: the expert; its calibration is not used.
        noise: on the expert's device.
        steps: calls of the network per sample, without guidance.
        name: of the sampler.
        inputs: conditions and guidance by condition.
        is_pixels: whether samples are pixels, which stay in [-1, 1].
        on_step: called after each step with its number and the states on the expert's own path, which the
            states that it returns replace.
    """
    guidance = inputs.guidance
    is_bounded = is_pixels and field.path_units.is_common
    scheduler, times = _scheduler(field, name, steps, is_bounded)
    scheduler.set_timesteps(steps, device=noise.device)
    x = noise
    acts = guidance.acts(torch.ones(len(x)))
    for number, timestep in enumerate(scheduler.timesteps):
        native = times(scheduler, number).expand(len(x))
        output = field.output_of(x, native, inputs.conditions)
        if acts.any():
            output = guidance.combine(output, field.output_of(x, native, inputs.negative), acts)
        if isinstance(field.schedule, LinearSchedule):
            output = _velocity(field, output, x, native)
        x = on_step(number, scheduler.step(output, timestep, x).prev_sample)
    samples: Tensor = field.path_units.common(x)
    return samples


def _scheduler(
    field: VelocityField, name: NativeName, steps: int, is_bounded: bool
) -> tuple[Any, Callable[[Any, int], Tensor]]:
    """Diffusers' scheduler, and the expert's own time of its step with a number, in float64."""
    if isinstance(field.schedule, LinearSchedule):

        def flow_time(scheduler: Any, number: int) -> Tensor:
            sigma: Tensor = scheduler.sigmas[number]
            return sigma.cpu().double()

        if name in _MULTISTEP:
            made = _MULTISTEP[name](
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
            )
        else:
            made = FlowMatchEulerDiscreteScheduler()
        return made, flow_time
    betas, own = _betas_and_times(field, steps)
    options: dict[str, Any] = {
        "num_train_timesteps": len(betas),
        "trained_betas": betas.tolist(),
        "prediction_type": field.prediction_type.value,
        "timestep_spacing": "trailing",
    }

    def ddpm_time(scheduler: Any, number: int) -> Tensor:
        return own[int(scheduler.timesteps[number])]

    if name == "ddim":
        return DDIMScheduler(**options, clip_sample=is_bounded, set_alpha_to_one=True), ddpm_time
    return _MULTISTEP[name](**options, thresholding=is_bounded), ddpm_time


def _betas_and_times(field: VelocityField, steps: int) -> tuple[Tensor, Tensor]:
    """Betas of the expert's schedule, and its own times of them."""
    schedule = field.schedule
    if isinstance(schedule, DiscreteSchedule):
        return schedule.betas.double(), torch.arange(len(schedule.betas), dtype=torch.float64)
    # As many as the steps divide. In the middle of parts: at the end itself there may be no signal.
    number = steps * max(round(TIMES / steps), 1)
    parts = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    times = schedule.start + (schedule.end - schedule.start) * parts
    alpha, sigma = schedule.alpha_sigma(times)
    kept = alpha**2 / (alpha**2 + sigma**2)
    before = torch.cat([kept.new_ones(1), kept[:-1]])
    return 1 - kept / before, times


def _velocity(field: VelocityField, output: Tensor, x: Tensor, native: Tensor) -> Tensor:
    """Eps - x_0 in the expert's own units, from what its network gives on the flow path."""
    if field.prediction.is_velocity:
        return output
    t = sent(native, x.device, x.dtype).view(-1, *[1] * (x.ndim - 1))
    if field.prediction_type == PredictionType.SAMPLE:
        # x = (1 - t) x_0 + t eps
        return (x - output) / t
    if field.prediction_type == PredictionType.EPSILON:
        # At t = 1 no signal is left, and the mean of the data is taken for 0.
        x_0 = (x - t * output) / (1 - t).clamp_min(1e-3)
        return output - x_0
    raise HddmError(
        f"`native`: a flow expert of {field.prediction_type.value} has no native sampler"
    )
