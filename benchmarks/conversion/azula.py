"""Error of the conversion to a velocity over t, ours and azula's, for networks whose answer is known.

The data is a mixture of Gaussians, so the ideal network and the true velocity are known in closed form, and
what remains is the error of each conversion. azula (https://github.com/probabilists/azula, MIT) takes a
schedule of the caller's choice and estimates x_0, which becomes the velocity (x - x_0)/t. For Flux the
schedule is the common path. For Stable Diffusion it is the same path at variance 1, since azula's v
prediction is right for such schedules only: its skip coefficient is alpha/sqrt(alpha² + sigma²), for a state
that was not divided by that root.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conversion.mixtures import DiagonalMixture
from benchmarks.harness import Start
from hddm.networks.families.flux import pack, unpack
from hddm.schedules import LinearSchedule, Schedule, from_diffusers
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField

SD = {"_class_name": "DDIMScheduler", "beta_start": 0.00085, "beta_end": 0.012}
SD |= {"beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
MODELS = {"SD epsilon": "epsilon", "SD v": "v_prediction", "Flux": "flow_prediction"}
SHAPE, STATES, MODES, LAST = (4, 4, 4), 256, 6, 999
FRACTIONS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.93)
BEYOND = (0.0, 0.01, 0.02, 0.95, 0.98, 0.999, 1.0)
"""Times of which some or all lie outside Stable Diffusion's range."""
Velocity = Callable[[Tensor, Tensor], Tensor]


def preserving(t: Tensor) -> tuple[Tensor, Tensor]:
    """(alpha, sigma) of the common path at variance 1."""
    norm = ((1 - t) ** 2 + t**2).sqrt()
    return (1 - t) / norm, t / norm


class Ideal(nn.Module):
    """The ideal network for a mixture, called as diffusers' networks are; it computes in float64.

    Past the last index of a discrete schedule, which no network has seen, it answers as at the last one.
    """

    def __init__(
        self, mixture: DiagonalMixture, schedule: Schedule, predicts: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.mixture, self.schedule, self.predicts = mixture, schedule, predicts
        self.placement = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, state: Tensor, timestep: Tensor) -> Tensor:
        """The prediction for states (n, …) of the network's path at native times (n,)."""
        native = timestep.double().clamp(
            max=self.schedule.end - (self.predicts != "flow_prediction")
        )
        a, s = self.schedule.alpha_sigma(native)
        x_0, eps = self.mixture.x_0_and_eps(state.double().flatten(1), a, s)
        match self.predicts:
            case "epsilon":
                found = eps
            case "v_prediction":
                found = a[:, None] * eps - s[:, None] * x_0
            case _:
                found = eps - x_0
        return found.view(state.shape).to(state)


class _Diffusers(nn.Module):
    """An `Ideal` by the keywords that azula calls diffusers' UNet and Flux with."""

    def __init__(self, ideal: Ideal) -> None:
        super().__init__()
        self.ideal = ideal

    def forward(self, timestep: Tensor, **given: Any) -> SimpleNamespace:
        """The output of a UNet, or of Flux, whose states are rows of packed latents."""
        if "sample" in given:
            return SimpleNamespace(sample=self.ideal(given["sample"], timestep))
        output = self.ideal(unpack(given["hidden_states"], SHAPE[1]), timestep)
        return SimpleNamespace(sample=pack(output))


def fields(predicts: str, network: Ideal) -> dict[str, Velocity]:
    """Velocity of ``network`` by hddm and by azula."""
    try:
        from azula.noise import RectifiedSchedule
        from azula.plugins.flux import FluxDenoiser
        from azula.plugins.sd import StableDenoiser
    except ImportError as error:
        raise HddmError("this needs azula: pip install azula") from error
    dtype, path = network.placement.dtype, RectifiedSchedule(alpha_min=0.0, sigma_min=0.0)
    own = VelocityField(network, network.schedule, predicts)
    if predicts == "flow_prediction":
        flux = FluxDenoiser(_Diffusers(network), path)
        text = {"prompt_clip": torch.zeros(1, 1), "prompt_t5": torch.zeros(1, 1, 1)}

        def estimate(x: Tensor, t: Tensor) -> Tensor:
            side = SHAPE[1] // 2
            rows = pack(x).view(len(x), side, side, -1)
            return unpack(flux(rows, t, **text).mean.flatten(1, 2), SHAPE[1])
    else:
        # azula keeps its table of sigmas in the default dtype.
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            _, sigmas = network.schedule.alpha_sigma(torch.arange(LAST + 1, dtype=torch.float64))
            kind = "velocity" if predicts == "v_prediction" else predicts
            stable = StableDenoiser(_Diffusers(network), sigmas, preserving, kind)
        finally:
            torch.set_default_dtype(before)

        def estimate(x: Tensor, t: Tensor) -> Tensor:
            norm = ((1 - t) ** 2 + t**2).sqrt().view(-1, 1, 1, 1)
            return stable(x / norm, t, prompt_embeds=torch.zeros(1, 1, 1)).mean

    def theirs(x: Tensor, t: Tensor) -> Tensor:
        times = t.to(x)
        return (x - estimate(x, times)) / times.view(-1, *[1] * (x.ndim - 1))

    return {"ours": lambda x, t: own.velocity(x, t), "azula": theirs}


@torch.no_grad()
def errors(seeds: int) -> list[dict[str, Any]]:
    """One row per model, dtype and time: relative root mean square error of each velocity, over seeds."""
    found = []
    for model, predicts in MODELS.items():
        schedule = LinearSchedule() if predicts == "flow_prediction" else from_diffusers(SD)
        low, high = schedule.range
        times = {
            t: "inside" if low <= t <= high else "beyond"
            for t in (*BEYOND[:3], *FRACTIONS, *BEYOND[3:])
        }
        if predicts != "flow_prediction":
            times |= {schedule.common_time(float(n)): f"index {n}" for n in (100, 500, 900)}
        for dtype in (torch.float64, torch.float32):
            for t, place in times.items():
                sums = dict.fromkeys(("ours", "azula"), 0.0)
                for seed in range(seeds):
                    mixture = DiagonalMixture.random(seed, MODES, 64)
                    x, at = mixture.states(STATES, t, seed)
                    x_0, eps = mixture.x_0_and_eps(x, 1 - at, at)
                    network = Ideal(mixture, schedule, predicts, dtype)
                    state = x.view(-1, *SHAPE).to(dtype)
                    for name, velocity in fields(predicts, network).items():
                        v = velocity(state, at).double().flatten(1)
                        sums[name] += float((v - (eps - x_0)).norm() / (eps - x_0).norm()) / seeds
                found.append(
                    {"model": model, "dtype": str(dtype)[6:], "t": t, "place": place, **sums}
                )
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The errors, one row per model and time."""
    yield "# Error of the velocity over t: hddm and azula"
    yield ""
    yield (
        "Relative root mean square error against the closed form of a mixture of Gaussians. The schedule of "
        'Stable Diffusion covers t from 0.0284 to 0.9361; its network was trained at the times "index n".'
    )
    yield ""
    yield "| model | t | ours, float64 | azula, float64 | ours, float32 | azula, float32 |"
    yield "|---|---|---:|---:|---:|---:|"
    half = {(one["model"], one["t"]): one for one in rows if one["dtype"] == "float32"}
    for one in (row for row in rows if row["dtype"] == "float64"):
        place = "" if one["place"] == "inside" else f", {one['place']}"
        cells = [
            one["ours"],
            one["azula"],
            *(half[one["model"], one["t"]][key] for key in ("ours", "azula")),
        ]
        yield f"| {one['model']} | {one['t']:.4g}{place} | {' | '.join(map(_number, cells))} |"


def _number(value: float) -> str:
    return f"{value:.1e}" if value < 1e6 else "not finite"


def measure_azula(start: Start) -> Path:
    """Measure, and write the result."""
    rows = errors(start.seeds)
    return start.write("azula", list(table(rows)), {"rows": rows})
