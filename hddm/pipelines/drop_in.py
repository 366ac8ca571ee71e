"""An ensemble or an expert in place of the network of a diffusers pipeline.

The pipeline calls its network with a state y = a x_0 + s eps on its scheduler's path, at a timestep. The
stand-in takes both to the common path, computes the experts' velocity v there, and returns what the
scheduler expects:

    t = s/(a + s),  x = y/(a + s),  x_0 = x - t v,  eps = x + (1 - t) v

and of these, what `hddm.predictions` says; for flow matching it is v. On EDM's path, whose data are
x_0/sigma_data, a/sigma_data takes the place of a in t and x.

So everything that works around a network goes on working: guidance, image-to-image, inpainting, ControlNet,
callbacks, and each of diffusers' schedulers, also one that is exchanged later.
"""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from hddm.choice import Choice, pick_experts
from hddm.condition_names import LABELS, TEXT
from hddm.conditions import Conditions, Inputs, check_names
from hddm.conversion import derivatives_at
from hddm.ensemble import Ensemble
from hddm.experts.loading import load
from hddm.guidance import Guidance
from hddm.networks.families import family_of, pipeline_networks
from hddm.networks.programs.permission import programs_allowed
from hddm.networks.wrappers import family_behind, text_width
from hddm.pipelines.generations import TURNS, EncodedPrompts, Generation, signs_of
from hddm.predictions import Level, Prediction, PredictionType
from hddm.running import posterior_of
from hddm.sampling import blind_draw
from hddm.schedules import (
    LinearSchedule,
    Schedule,
    declared_prediction_type,
    flow_steps,
    from_diffusers,
    read_prediction,
)
from hddm.utils.errors import HddmError
from hddm.utils.tensors import append_dims, sent, to_float64
from hddm.velocity import ROUNDING, VelocityField


def drop_in(
    model: VelocityField | Ensemble | str | Path,
    pipe: DiffusionPipeline,
    *,
    allow_program: bool = False,
) -> "DropIn":
    """A module that stands in for ``pipe.unet`` or ``pipe.transformer``.

        pipe.unet = hddm.drop_in(hddm.load("ensemble"), pipe)

    With one expert that was made of the pipeline's own weights, images equal those of the pipeline up to
    rounding. Under ``draw`` the signs of the state at the first call of a generation decide which expert
    makes an image. Without a picture to start from, these are the signs of the initial noise, so that the
    same generator draws the same expert with any scheduler and number of steps. A batch of two or three equal
    parts is taken for the branches of guidance: images of equal noise without guidance have the expert that
    the class of the first, or the prompt of the last of them draws.

    An expert that cannot take the prompt or class is not used. Where experts are described (``hddm
    describe``) with the text encoder that they read prompts by, the descriptions decide as in ``hddm
    sample``, for prompts that the pipeline encodes itself; a warning tells where they cannot.

    A generation begins with new timesteps of the scheduler, which each call of a pipeline makes; where the
    noise returns to its level of the first call; and at that level with another state. So a loop of your own
    over one tensor of timesteps may make one image after the other. Two generations that take turns need a
    stand-in each. Where branches of guidance come one after the other, the first one decides.

    Args:
        model: an expert, or an ensemble with any strategy, or the folder of one, which is loaded with the
            dtype and onto the device of the pipeline's network. Its samples are what that network denoises:
            pixels or latents of the same number of channels.
        pipe: a diffusers pipeline with a network of a family (`hddm.networks.families`). Its scheduler
            is read at each call, so make one for each pipeline, also where pipelines share their parts.
        allow_program: as in `hddm.load`, for a folder.

    Raises:
        HddmError: for a pipeline without such a network, or experts of other channels, another width of
            text, several text encoders or several kinds. When called: for a scheduler outside the DDPM,
            flow-match and EDM families or of a learned variance, a time outside the range of every expert,
            an input that no expert takes, a class that an expert does not know, or what a ControlNet adds
            inside a network of another class. For a method that changes layers, as those of PAG and FreeU.
    """
    with programs_allowed(allow_program):
        return DropIn(model, pipe)


class _LayersError(HddmError, AttributeError):
    """Raised for an attribute that a stand-in lacks, so that ``hasattr`` of diffusers is False."""


@dataclass(frozen=True)
class _Call:
    """The pipeline's call of its network: state (batch, C, H, W), timestep, conditions and residuals."""

    state: Tensor
    timestep: Tensor
    conditions: dict[str, Tensor]
    residuals: dict[str, tuple[Tensor, ...] | Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Path:
    """A scheduler's config, its path, what it takes from a network, and its timesteps per native time."""

    config: object
    schedule: Schedule
    prediction: Prediction
    is_negated: bool
    per_unit: float


class DropIn(nn.Module):
    """See `drop_in`. ``config`` is that of the network that it replaces, and so is ``dtype`` until `to`."""

    model: Ensemble
    placement: Tensor
    _replaced: nn.Module

    def __init__(
        self, model: VelocityField | Ensemble | str | Path, pipe: DiffusionPipeline
    ) -> None:
        super().__init__()
        networks = pipeline_networks()
        name = next((one for one in networks if getattr(pipe, one, None) is not None), None)
        if name is None:
            raise HddmError(
                f"{type(pipe).__name__} has no {' and no '.join(networks)} to stand in for"
            )
        network = getattr(pipe, name)
        # torch.compile, or another stand-in, holds the network itself.
        inner = getattr(network, "_orig_mod", network)
        replaced = getattr(inner, "_replaced", inner)
        family = family_of(replaced)
        if family is None:
            kind = type(replaced).__name__
            raise HddmError(
                f"{type(pipe).__name__}'s {name} is of class {kind}, which is no expert's"
            )
        self._family = family
        if isinstance(model, str | Path):
            model = load(model, network.dtype, network.device)
        ensemble = model if isinstance(model, Ensemble) else Ensemble([model], strategy="full")
        if not ensemble.are_alike():
            raise HddmError(f"a pipeline has one latent space, and {ensemble.describe_kinds()}")
        channels = family.channels(replaced.config)
        if ensemble.sample_shape is not None and ensemble.sample_shape[0] != channels:
            raise HddmError(
                f"the experts' samples have {ensemble.sample_shape[0]} channels, and {type(pipe).__name__}'s "
                f"{name} takes {channels}"
            )
        if any(ensemble.texts):
            raise HddmError(
                "a pipeline has one text encoder, and these experts were trained with several"
            )
        wanted = family.text_width(replaced.config)
        widths = [text_width(one.network) for one in ensemble.experts]
        for width in widths:
            if width and width != wanted:
                raise HddmError(
                    f"an expert takes text of width {width}, and {type(pipe).__name__} gives its {name} "
                    f"width {wanted}: they were trained with different text encoders"
                )
        modules = [one.network for one in ensemble.experts if isinstance(one.network, nn.Module)]
        self.networks = nn.ModuleList(modules)
        self.model, self.pipe = ensemble, pipe
        # Empty, with the dtype of the replaced network: casting the module casts this.
        self.register_buffer("placement", torch.empty(0, dtype=network.dtype), persistent=False)
        # No submodule: the pipeline moves the experts alone. No weights, so that theirs can be freed.
        with torch.device("meta"):
            vars(self)["_replaced"] = type(replaced).from_config(replaced.config)
        self._generation: Generation | None = None
        self._prompts = EncodedPrompts(pipe) if _is_described(ensemble) else None
        self._path: _Path | None = None

    @property
    def config(self) -> Any:
        """The config of the network that this one replaces."""
        return self._replaced.config

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the replaced network, or the one that this network was cast to since."""
        return self.placement.dtype

    @property
    def device(self) -> torch.device:
        """Where the experts are."""
        return self.model.device

    @property
    def _signature(self) -> inspect.Signature:
        """How the network that is replaced is called."""
        return inspect.signature(type(self._replaced).forward)

    @property
    def _kind(self) -> str:
        return type(self._replaced).__name__

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_replaced":
                raise
            # Pipelines read sizes off their network's layers.
            value = getattr(self._replaced, name)
        is_method = callable(value) and not isinstance(value, nn.Module) and name != "cache_context"
        if is_method or name == "attn_processors":
            raise _LayersError(f"{name} needs layers of {self._kind} that the experts do not have")
        return value

    def forward(self, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        """Called as the replaced network is; the output has the state's shape and dtype."""
        call = self._read(*args, **kwargs)
        path = self._scheduler()
        schedule, prediction, scale = path.schedule, path.prediction, path.schedule.data_scale
        native = to_float64(call.timestep).cpu().expand(len(call.state)) / path.per_unit
        alpha, sigma = schedule.alpha_sigma(native)
        times = sigma / (alpha * scale + sigma)
        self._refuse_beyond(times)

        def wide(values: Tensor) -> Tensor:
            return append_dims(sent(values, call.state.device, y.dtype), y.ndim)

        y = call.state.to(torch.promote_types(call.state.dtype, torch.float32))
        x = y / wide(alpha * scale + sigma)
        v = self._velocity(x, times, call)
        x_0, eps = x - wide(times) * v, x + wide(1 - times) * v
        at = Level(wide(alpha), wide(sigma), derivatives_at(schedule, native, wide))
        # Schedulers of diffusers have velocities of the common path alone.
        output = v if prediction.is_velocity else prediction.output(scale * x_0, eps, at)
        if path.is_negated:
            output = -output
        output = self._family.as_output(output, self.config).to(call.state.dtype)
        if "return_dict" not in self._signature.parameters:
            return output
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    def _read(self, *args: Any, **kwargs: Any) -> _Call:
        """The call, by the signature of the network that is replaced; refuses inputs that would be lost."""
        bound = self._signature.bind(None, *args, **kwargs)
        # The first argument is the network itself, the second one the state.
        _, state, *_ = bound.arguments.values()
        passed = dict([*bound.arguments.items()][2:])
        passed |= passed.pop("added_cond_kwargs", None) or {}
        given: dict[str, Any] = {}
        for name, one in passed.items():
            is_empty = one is None or one is False or one == {}
            if not is_empty:
                given[name] = one
        state, given = self._family.read_call(state, given)
        for name in self._family.ignored(self.config):
            given.pop(name, None)
        if "timestep" not in given:
            raise HddmError(
                f"read_call() of the family of {self._kind} gives no timestep, only "
                f"{', '.join(given) or 'nothing'}; the pipeline passed {', '.join(passed)}"
            )
        timestep = torch.as_tensor(given.pop("timestep"))
        residuals: dict[str, Any] = {}
        for name in self._family.residuals:
            if name in given:
                residuals[name] = given.pop(name)
        odd = [name for name, one in given.items() if not isinstance(one, Tensor)]
        if odd:
            raise HddmError(f"{', '.join(odd)}: the experts have no such input; leave it out")
        return _Call(state, timestep, given, residuals)

    def _scheduler(self) -> _Path:
        """The path of the scheduler that the pipeline has now."""
        scheduler, config = self.pipe.scheduler, self.pipe.scheduler.config
        if self._path is None or self._path.config is not config:
            name, variance = type(scheduler).__name__, config.get("variance_type")
            if variance in ("learned", "learned_range"):
                raise HddmError(
                    f"{name}: variance_type is {variance}, and experts predict no variance"
                )
            schedule = from_diffusers(scheduler)
            predicts = declared_prediction_type(scheduler) or PredictionType.EPSILON
            is_flow = isinstance(schedule, LinearSchedule)
            per_unit = flow_steps(config, name) / self._family.time_factor if is_flow else 1.0
            kind, is_negated = read_prediction(schedule, predicts)
            self._path = _Path(config, schedule, kind.prediction, is_negated, per_unit)
        return self._path

    def _refuse_beyond(self, times: Tensor) -> None:
        experts = self.model.experts
        if any(one.calibration is not None for one in experts):
            return
        low = min(one.range[0] for one in experts)
        high = max(one.range[1] for one in experts)
        beyond = (times < low - ROUNDING) | (times > high + ROUNDING)
        if beyond.any():
            raise HddmError(
                f"t = {float(times[beyond][0]):.4g} of the pipeline's scheduler lies outside the range of all"
                f" experts, {low:.4g} to {high:.4g}; to extend it: hddm calibrate"
            )

    def _velocity(self, x: Tensor, times: Tensor, call: _Call) -> Tensor:
        model, conditions = self.model, call.conditions
        check_names(conditions, model.conditions)
        for one in model.experts:
            if call.residuals and family_behind(one.network) is not self._family:
                raise HddmError(
                    f"a ControlNet adds to layers of {self._kind}, and an expert's network is of another "
                    "class"
                )
        choice = Choice(self._weights(x, times, conditions))
        model.check_able(choice.weights, conditions)
        inputs = model.inputs_by_expert(x, choice, Guidance(1.0), {}, conditions)
        model.check_inputs(inputs)
        if call.residuals:
            parts = choice.parts(x.device)
            for k, own in inputs.items():
                rows, _ = parts[k]
                with_residuals = {**own.conditions, **_rows(call.residuals, rows)}
                inputs[k] = Inputs(own.guidance, with_residuals, {})
        return model.mix(x, times, choice, inputs)

    def _weights(self, x: Tensor, times: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Weights (batch, K): of the strategy, or 1 for the expert that an image has drawn."""
        model, run = self.model, self._generation_of(x, times, conditions)
        commits, prior = model.commits_at, run.prior
        is_drawn = model.strategy == "draw" or (
            commits is not None and bool((times <= commits).any())
        )
        if not is_drawn:
            shares = None if prior is None else run.of_branches(prior, len(x))
            own = self._of_images(conditions, run.images)
            if model.is_seen(own, prior) is not None:
                # Guidance moves away from the other branch; the image's own says whose it is.
                conditions = {name: run.of_branches(one, len(x)) for name, one in own.items()}
            return model.weights(x, times, conditions=conditions, prior=shares)
        if run.expert is None:
            time = 1.0 if commits is None else float(times[0])
            asked = Conditions(self._of_images(conditions, run.images), prior=prior)
            posterior = posterior_of(model, x[: run.images], time, asked)
            run.expert = pick_experts(posterior, run.places)
        return model.weights(x, times, run.of_branches(run.expert, len(x)))

    def _generation_of(
        self, x: Tensor, times: Tensor, conditions: Mapping[str, Tensor]
    ) -> Generation:
        """The generation that a call belongs to, which it may begin."""
        model, run = self.model, self._generation
        now, timesteps = float(times.max()), self.pipe.scheduler.timesteps
        if run is None or run.timesteps is not timesteps or now > run.start + ROUNDING:
            return self._begin(Generation(timesteps, now, signs_of(x)), conditions)
        if now < run.start - ROUNDING:
            keeps = (
                model.strategy == "draw" or model.commits_at is not None or run.prior is not None
            )
            if keeps and run.others and not run.has_left and run.is_of_another(signs_of(x)):
                raise HddmError(
                    "two generations take turns, and each of them keeps its experts; take one hddm.drop_in "
                    "for each, or one batch of both"
                )
            run.has_left = True
            return run
        signs = signs_of(x)
        if run.has_left:
            return self._begin(Generation(timesteps, now, signs), conditions)
        # Branches of guidance may come one after the other, with one state.
        if run.signs.shape == signs.shape and run.signs.equal(signs):
            return run
        others = (*run.others, run.signs)[-TURNS:]
        return self._begin(Generation(timesteps, now, signs, others=others), conditions)

    def _begin(self, run: Generation, conditions: Mapping[str, Tensor]) -> Generation:
        """Begin a generation: what its prompts say of the experts is asked once."""
        model = self.model
        own = self._of_images(conditions, run.images)
        is_seen = model.is_seen(own) is not None
        router = model.prompt_router if TEXT in conditions and not is_seen else None
        if self._prompts is not None and router is not None:
            pooled = self._prompts.pooled(own)
            width = next(one.topic.means.shape[1] for one in model.parts if one.topic is not None)
            run.prior = None if pooled is None or pooled.shape[1] != width else router(pooled)
        asked = Conditions(own, prior=run.prior)
        shares = model.prior_of(run.images, asked.given, asked.prior)
        blind = blind_draw(model, asked, shares)
        if blind is not None and model.strategy == "draw":
            warnings.warn(blind, stacklevel=2)
        self._generation = run
        return run

    def _of_images(self, conditions: Mapping[str, Tensor], images: int) -> dict[str, Tensor]:
        """Conditions of the images, without those of the branch that guidance moves away from.

        Pipelines put the branch without a class last, and most of them that of the negative prompts first.
        """
        found = {}
        for name, one in conditions.items():
            is_first = name == LABELS or self._family.prompts_first
            found[name] = one[:images] if is_first else one[-images:]
        return found


def _is_described(ensemble: Ensemble) -> bool:
    """True where experts are described with the text encoder that they read prompts by."""
    topics, readers = set(), set()
    for part in ensemble.parts:
        if part.topic is not None and part.topic.record is not None:
            topics.add(part.topic.record.text_encoder.fingerprint)
        if TEXT in (part.field.conditions or ()):
            readers.add(getattr(part.text_encoder, "fingerprint", None))
    return bool(topics) and topics == readers


def _rows(
    residuals: Mapping[str, tuple[Tensor, ...] | Tensor], rows: Tensor | None
) -> dict[str, Any]:
    """The residuals of these rows of the batch; None stands for all rows."""
    if rows is None:
        return dict(residuals)
    found: dict[str, Any] = {}
    for name, one in residuals.items():
        if isinstance(one, Tensor):
            found[name] = one[rows]
        else:
            found[name] = tuple(level[rows] for level in one)
    return found
