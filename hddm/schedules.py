"""Noise schedules: (alpha, sigma) as functions of native time, and the continuous inverse of the log-SNR.

    x_t = alpha_t x_0 + sigma_t eps;  x_0 is data, eps is unit noise;  log_snr = 2 log(alpha/sigma)

Time runs from data to noise. Every schedule has its own *native time*: t in [0, 1] for the continuous ones,
the timestep index 0 … T-1, fractions allowed, for a DDPM schedule, and ln(sigma)/4 for EDM's. The *common
path* that all experts are compared on is `LinearSchedule`: alpha = 1 - t, sigma = t.

The interface comes first, then the continuous schedules, the DDPM schedules, and the readers of diffusers'
scheduler configs (`from_diffusers`) and of our own records (`from_config`).

Diffusers is imported where its schedulers are read, since `hddm.conversion` works without it.
"""

import inspect
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.predictions import PredictionType, from_edm
from hddm.schedule_records import (
    EDM_FAMILY,
    EDM_KEYS,
    FAMILIES,
    FLOW_MATCH_FAMILY,
    MOST_STEPS,
    SCHEDULE_KEYS,
    edm_problem,
)
from hddm.utils.errors import HddmError, did_you_mean, one_line
from hddm.utils.files import read_json
from hddm.utils.tensors import to_float64

logger = logging.getLogger(__name__)

_FROM_OLD_VERSIONS = {"tensor_format", "predict_epsilon"}


class Schedule(ABC):
    """A noise schedule. Values are computed in float64 and returned in the dtype of the argument."""

    start: float = 0.0
    """Native time of the least noise."""
    end: float
    """Native time of the most noise."""
    data_scale: float = 1.0
    """A path of z = ``data_scale`` * x_0 has its own scale of data (`EDMSchedule`)."""

    def alpha(self, time: Tensor) -> Tensor:
        """Signal scale at native ``time``, any shape; float32 for integer times.

        Raises:
            HddmError: for a time outside [``start``, ``end``].
        """
        return self._evaluate(time, lambda exact: self.alpha_sigma(exact)[0])

    def sigma(self, time: Tensor) -> Tensor:
        """Noise scale at native ``time``; as `alpha`."""
        return self._evaluate(time, lambda exact: self.alpha_sigma(exact)[1])

    def log_snr(self, time: Tensor) -> Tensor:
        """2 log(alpha/sigma) at native ``time``: +inf where sigma = 0, -inf where alpha = 0."""
        return self._evaluate(time, self._log_snr)

    def time(self, log_snr: Tensor) -> Tensor:
        """Native time of a log-SNR, continuous for every schedule.

        Beyond the schedule's own log-SNRs, ±inf included, it is the end point on that side.
        """
        return self._evaluate(log_snr, self._time, is_time=False)

    def match(self, t: Tensor, data_scale: float | None = None) -> Tensor:
        """Native time, in float64, with the noise of the common path at ``t`` in [0, 1].

        It is u with sigma(u)/(alpha(u) d) = t/(1 - t), where d is ``data_scale``, by default the path's own.
        """
        exact = to_float64(t)
        log_snr = 2 * (torch.log1p(-exact) - exact.log())
        return self._time(log_snr - 2 * math.log(data_scale or self.data_scale))

    @property
    def range(self) -> tuple[float, float]:
        """(t_min, t_max) on the common path: the noise levels that the schedule covers."""
        return self.range_of(self.data_scale)

    def range_of(self, data_scale: float) -> tuple[float, float]:
        """`range` for data of another scale."""
        return self.common_time(self.start, data_scale), self.common_time(self.end, data_scale)

    def common_time(self, time: float, data_scale: float | None = None) -> float:
        """Time t on the common path with the noise of native ``time``, as in `match`."""
        log_snr = self._log_snr(torch.tensor(time, dtype=torch.float64))
        return torch.sigmoid(-log_snr / 2 - math.log(data_scale or self.data_scale)).item()

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Plain values from which `from_config` builds the schedule again."""

    @abstractmethod
    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha, sigma) of float64 native times, without a check of their range."""

    def derivatives(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """(d alpha/d time, d sigma/d time) of float64 native times; continuous schedules only."""
        raise HddmError(
            f"{type(self).__name__} is defined at discrete steps and has no time derivative: "
            "flow_prediction needs LinearSchedule or CosineSchedule"
        )

    def _log_snr(self, time: Tensor) -> Tensor:
        alpha, sigma = self.alpha_sigma(time)
        return 2 * (alpha.log() - sigma.log())

    @abstractmethod
    def _time(self, log_snr: Tensor) -> Tensor: ...

    def _evaluate(
        self, argument: Tensor, function: Callable[[Tensor], Tensor], is_time: bool = True
    ) -> Tensor:
        argument = torch.as_tensor(argument)
        dtype = argument.dtype if argument.is_floating_point() else torch.float32
        exact = to_float64(argument)
        if is_time and not ((exact >= self.start) & (exact <= self.end)).all():
            raise HddmError(
                f"native times of {type(self).__name__} lie in [{self.start:g}, {self.end:g}], "
                f"not in [{exact.min().item():g}, {exact.max().item():g}]"
            )
        return function(exact).to(argument.device, dtype)


@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """The common path, of flow matching and rectified flow: alpha = 1 - t, sigma = t, t in [0, 1]."""

    end = 1.0

    @property
    def config(self) -> dict[str, Any]:
        return {"name": "linear"}

    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - time, time

    def derivatives(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones_like(time), torch.ones_like(time)

    def match(self, t: Tensor, data_scale: float | None = None) -> Tensor:
        exact = to_float64(t)
        if data_scale in (None, 1):
            return exact
        return data_scale * exact / (1 - exact + data_scale * exact)

    def _time(self, log_snr: Tensor) -> Tensor:
        return torch.sigmoid(-log_snr / 2)


@dataclass(frozen=True)
class CosineSchedule(Schedule):
    """Continuous cosine: alpha = cos(pi t/2), sigma = sin(pi t/2), t in [0, 1].

    Not `squaredcos_cap_v2` (Nichol & Dhariwal), which is discrete, offset and clipped.
    """

    end = 1.0

    @property
    def config(self) -> dict[str, Any]:
        return {"name": "cosine"}

    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        # The sine of the complement is exactly 0 at t = 1, where cos(pi/2) is 6e-17.
        return torch.sin(math.pi / 2 * (1 - time)), torch.sin(math.pi / 2 * time)

    def derivatives(self, time: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = self.alpha_sigma(time)
        return -math.pi / 2 * sigma, math.pi / 2 * alpha

    def _time(self, log_snr: Tensor) -> Tensor:
        return 2 / math.pi * torch.atan(torch.exp(-log_snr / 2))


@dataclass(frozen=True)
class EDMSchedule(Schedule):
    r"""EDM's path (arXiv:2206.00364) as a variance-preserving one: native time ln(sigma)/4.

    EDM noises x = x_0 + sigma eps, and its network F sees c_in x. With z = x_0/sigma_data this is

        c_in x = a z + s eps,   a = sigma_data/n,   s = sigma/n,   n = sqrt(sigma² + sigma_data²)

    and F = s z - a eps is the negative of v. So a network of EDM is one of v prediction on data of the scale
    1/sigma_data, which is the path's own, with its sign turned.

    Args:
        sigma_min: the least noise, relative to x_0.
        sigma_max: the most noise.
        sigma_data: EDM's deviation of the data.

    Raises:
        HddmError: for numbers that are not positive and finite, or a sigma_max below sigma_min.
    """

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    sigma_data: float = 0.5

    def __post_init__(self) -> None:
        problem = edm_problem({name: getattr(self, name) for name in EDM_KEYS})
        if problem is not None:
            raise HddmError(problem)
        object.__setattr__(self, "start", math.log(self.sigma_min) / 4)
        object.__setattr__(self, "end", math.log(self.sigma_max) / 4)
        object.__setattr__(self, "data_scale", 1 / self.sigma_data)

    @property
    def config(self) -> dict[str, Any]:
        return {"name": "edm", **{name: getattr(self, name) for name in EDM_KEYS}}

    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        sigma = torch.exp(4 * time)
        norm = (sigma.square() + self.sigma_data**2).sqrt()
        return self.sigma_data / norm, sigma / norm

    def derivatives(self, time: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = self.alpha_sigma(time)
        return -4 * alpha * sigma.square(), 4 * sigma * alpha.square()

    def _log_snr(self, time: Tensor) -> Tensor:
        return 2 * math.log(self.sigma_data) - 8 * time

    def _time(self, log_snr: Tensor) -> Tensor:
        time = (math.log(self.sigma_data) - log_snr / 2) / 4
        return time.clamp(self.start, self.end)


@dataclass(frozen=True, eq=False, repr=False)
class DiscreteSchedule(Schedule):
    """A variance-preserving DDPM schedule, read at fractional timestep indices too.

    alpha² + sigma² = 1, and alpha² at index i is the product of (1 - beta) over 0 … i. Between
    indices the log-SNR is linear in the index, as in k-diffusion. Where the last index has zero SNR,
    alpha/sigma is linear in the last interval instead, so that alpha reaches 0 there and nowhere before.

    Args:
        betas: (T,), each in (0, 1), the last one possibly 1 (zero terminal SNR).
        source: the config that it was built from, for the record; `from_diffusers` fills it.

    Raises:
        HddmError: for fewer than 2 betas or one outside its range.
    """

    betas: Tensor
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        betas = to_float64(torch.as_tensor(self.betas)).cpu()
        inside = (betas > 0) & (betas < 1)
        if betas.ndim != 1 or len(betas) < 2 or not inside[:-1].all() or not 0 < betas[-1] <= 1:
            raise HddmError(
                "betas must be at least 2 numbers in (0, 1), of which only the last may be 1"
            )
        log_alpha_squared = torch.log1p(-betas).cumsum(0)
        # log(1 - alpha²) without cancellation where alpha² is close to 1
        table = log_alpha_squared - torch.log(-torch.expm1(log_alpha_squared))
        object.__setattr__(self, "end", float(len(betas) - 1))
        object.__setattr__(self, "_tables", {torch.device("cpu"): table})

    def __repr__(self) -> str:
        kind = self.source.get("beta_schedule", "own")
        return f"<DiscreteSchedule of {len(self.betas)} {kind} betas>"

    @property
    def config(self) -> dict[str, Any]:
        if self.source:
            return dict(self.source)
        return {"name": "discrete", "betas": self.betas.tolist()}

    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        log_snr = self._log_snr(time)
        return torch.sigmoid(log_snr).sqrt(), torch.sigmoid(-log_snr).sqrt()

    def _table(self, device: torch.device) -> Tensor:
        tables: dict[torch.device, Tensor] = self._tables  # type: ignore[attr-defined]
        if device not in tables:
            tables[device] = tables[torch.device("cpu")].to(device)
        return tables[device]

    def _log_snr(self, time: Tensor) -> Tensor:
        table = self._table(time.device)
        index = time.floor().long().clamp(0, len(table) - 2)
        fraction = time - index
        high, low = table[index], table[index + 1]
        linear = torch.where(fraction == 0, high, high + fraction * (low - high))
        return torch.where(low.isneginf(), high + 2 * torch.log1p(-fraction), linear)

    def _time(self, log_snr: Tensor) -> Tensor:
        table = self._table(log_snr.device)
        inside = log_snr.clamp(table[-1], table[0])
        index = torch.searchsorted(-table, -inside).clamp(1, len(table) - 1)
        high, low = table[index - 1], table[index]
        linear = (high - inside) / (high - low)
        to_zero = -torch.expm1((inside - high) / 2)
        return index - 1 + torch.where(low.isneginf(), to_zero, linear)


def from_diffusers(source: object) -> Schedule:
    """The training schedule that a diffusers scheduler stands for.

    A key that the config lacks has the documented default of its scheduler class, which is logged. The family
    of a config without ``_class_name``, such as a scheduler object's ``.config``, is known by its keys:
    ``beta_…`` makes it a `DDPMScheduler`'s, a key that only flow-match classes have makes it a flow-match
    scheduler's, one that only EDM's have (``sigma_data``) EDM's. A flow-match scheduler, or one with
    ``use_flow_sigmas``, stands for `LinearSchedule`: its shift belongs to the sampling grid. What EDM's words
    for a prediction mean says `read_prediction`.

    Args:
        source: a scheduler object, its config, or the path of a ``scheduler_config.json``, of the
            folder that holds it, or of a pipeline folder.

    Raises:
        HddmError: for a class outside the DDPM, flow-match and EDM families, an unknown key, a value without
            a schedule, continuous timesteps, or a config whose family is unknown.
    """
    config, origin = _read(source)
    name = config.get("_class_name") or _family(config, origin)
    if not any(name in family for family in FAMILIES):
        raise HddmError(
            f"{origin}: {name!r} is neither of the DDPM, the flow-match nor the EDM family (such as "
            f"DDIMScheduler, FlowMatchEulerDiscreteScheduler and EDMEulerScheduler)"
        )
    _refuse_unknown_keys(config, origin)
    if name in EDM_FAMILY:
        return _edm_schedule(config, name, origin)
    if name in FLOW_MATCH_FAMILY or config.get("use_flow_sigmas"):
        return LinearSchedule()
    if config.get("timestep_type") == "continuous":
        raise HddmError(f"{origin}: timestep_type 'continuous' (EDM's time) is not a DDPM schedule")
    parameters, given = _parameters(name), dict[str, Any]()
    for key in SCHEDULE_KEYS:
        if key in config:
            # A live config may hold an array, which a record cannot.
            given[key] = config[key].tolist() if hasattr(config[key], "tolist") else config[key]
        elif key in parameters:
            given[key] = parameters[key].default
            logger.info("%s: %s is missing; %s's default is %s", origin, key, name, given[key])
    steps = given["num_train_timesteps"]
    if not isinstance(steps, int) or not 2 <= steps <= MOST_STEPS:
        raise HddmError(
            f"{origin}: num_train_timesteps is {steps!r}, and must be 2 to {MOST_STEPS}"
        )
    import diffusers

    try:
        betas = diffusers.DDPMScheduler(**given).betas
    except Exception as error:  # a constructor may raise anything for foreign values
        values, reason = one_line(given, 300), one_line(error, 300)
        raise HddmError(f"{origin}: no schedule can be built from {values}: {reason}") from error
    return DiscreteSchedule(betas, {"_class_name": name, **given})


def _edm_schedule(config: Mapping[str, Any], name: str, origin: str) -> EDMSchedule:
    """The schedule of an EDM scheduler's config; defaults are those of its class ``name``."""
    parameters, given = _parameters(name), dict[str, Any]()
    for key in EDM_KEYS:
        given[key] = config.get(key, parameters[key].default)
        if key not in config:
            logger.info("%s: %s is missing; %s's default is %s", origin, key, name, given[key])
    try:
        return EDMSchedule(**given)
    except HddmError as error:
        raise HddmError(f"{origin}: {error}") from error


def read_prediction(schedule: Schedule, stated: str) -> tuple[PredictionType, bool]:
    """What a network predicts that diffusers calls ``stated``, and whether it gives the negative of that.

    EDM's schedulers have words of their own (`hddm.predictions.from_edm`); all others mean what they say.

    Raises:
        HddmError: for an unknown prediction type, or one that EDM does not have.
    """
    if isinstance(schedule, EDMSchedule):
        return from_edm(stated)
    return PredictionType.parse(stated), False


def declared_prediction_type(source: object) -> str | None:
    """The ``prediction_type`` that a scheduler config states, in its words; None where it states none.

    A flow-match scheduler means ``flow_prediction``, as does ``use_flow_sigmas``. Older versions of diffusers
    wrote ``predict_epsilon``.

    Raises:
        HddmError: for two keys that contradict each other.
    """
    config, origin = _read(source)
    stated: dict[str, str] = {}
    if config.get("prediction_type") is not None:
        stated["prediction_type"] = str(config["prediction_type"])
    if config.get("predict_epsilon") is not None:
        is_noise = config["predict_epsilon"]
        kind = PredictionType.EPSILON if is_noise else PredictionType.SAMPLE
        stated["predict_epsilon"] = kind.value
    if config.get("_class_name") in FLOW_MATCH_FAMILY or config.get("use_flow_sigmas"):
        stated["a flow-match scheduler"] = PredictionType.FLOW_PREDICTION.value
    if len(set(stated.values())) > 1:
        said = ", ".join(f"{key}: {value}" for key, value in stated.items())
        raise HddmError(f"{origin}: contradicts itself ({said}); correct the config")
    return next(iter(stated.values()), None)


def flow_steps(config: Mapping[str, Any], origin: str) -> int:
    """Number of timesteps in all of t, by a flow-match scheduler's config; ``origin`` names it in errors.

    Raises:
        HddmError: for a number that is not sound, or times that run the other way.
    """
    steps = config.get("num_train_timesteps", 1000)
    if not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise HddmError(
            f"{origin}: num_train_timesteps is {str(steps)[:40]}, and must be 1 to {MOST_STEPS}"
        )
    if config.get("invert_sigmas"):
        raise HddmError(f"{origin}: invert_sigmas turns time around, which is not supported")
    return steps


def default_prediction_type(source: object) -> str:
    """The default prediction type of a scheduler config's class, for a config that states none.

    Raises:
        HddmError: where the config names no class.
    """
    config, origin = _read(source)
    parameters = _parameters(config.get("_class_name") or _family(config, origin))
    return str(parameters["prediction_type"].default)


def from_config(config: Mapping[str, Any]) -> Schedule:
    """The schedule with this `Schedule.config`, as ``expert.json`` holds it.

    Raises:
        HddmError: for a name or key that no schedule has.
    """
    if "_class_name" in config:
        return from_diffusers(config)
    match dict(config):
        case {"name": "linear", **rest} if not rest:
            return LinearSchedule()
        case {"name": "cosine", **rest} if not rest:
            return CosineSchedule()
        case {"name": "edm", **rest} if set(rest) == set(EDM_KEYS):
            return EDMSchedule(**rest)
        case {"name": "discrete", "betas": betas, **rest} if not rest:
            try:
                return DiscreteSchedule(torch.tensor(betas, dtype=torch.float64))
            except (TypeError, RuntimeError, ValueError, OverflowError) as error:
                raise HddmError(f"schedule: betas {str(betas)[:40]} are not numbers") from error
    raise HddmError(
        f"schedule {dict(config)} is unknown: it is {{'name': 'linear'}}, {{'name': 'cosine'}}, "
        "{'name': 'edm', 'sigma_min': …, 'sigma_max': …, 'sigma_data': …}, "
        "{'name': 'discrete', 'betas': […]} or a diffusers scheduler config with _class_name"
    )


def _family(config: Mapping[str, Any], origin: str) -> str:
    """The scheduler class of a config that does not name it."""
    if any(key.startswith("beta_") or key == "trained_betas" for key in config):
        return "DDPMScheduler"
    if _keys_of_alone(EDM_FAMILY) & set(config):
        return "EDMEulerScheduler"
    if _keys_of_alone(FLOW_MATCH_FAMILY) & set(config):
        return "FlowMatchEulerDiscreteScheduler"
    _refuse_unknown_keys(config, origin)
    raise HddmError(f"{origin}: has neither _class_name nor betas; name the scheduler class")


def _keys_of_alone(family: Sequence[str]) -> set[str]:
    """Keys that the classes of one family have, and those of no other."""
    own: set[str] = set().union(*map(_parameters, family))
    others = [name for other in FAMILIES if other is not family for name in other]
    return own.difference(*map(_parameters, others))


def _read(source: object) -> tuple[dict[str, Any], str]:
    import diffusers

    if isinstance(source, diffusers.SchedulerMixin):
        return {**source.config, "_class_name": type(source).__name__}, type(source).__name__
    if isinstance(source, Mapping):
        return dict(source), "scheduler config"
    path = Path(source)  # type: ignore[arg-type]
    for candidate in (
        path,
        path / "scheduler_config.json",
        path / "scheduler" / "scheduler_config.json",
    ):
        if candidate.is_file():
            return read_json(candidate), str(candidate)
    raise HddmError(f"{path}: no scheduler config here; give a scheduler_config.json or its folder")


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    import diffusers

    return dict(inspect.signature(getattr(diffusers, name).__init__).parameters)


def _refuse_unknown_keys(config: Mapping[str, Any], origin: str) -> None:
    # A config may carry keys of another scheduler class: from_config keeps what it does not use.
    known = set(_FROM_OLD_VERSIONS).union(*map(_parameters, itertools.chain(*FAMILIES)))
    for key in config:
        if not key.startswith("_") and key not in known:
            raise HddmError(
                f"{origin}: no diffusers scheduler has a key {key!r}{did_you_mean(key, known)}"
            )
