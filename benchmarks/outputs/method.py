"""Schedules, velocities, strategies, solvers and guidance, on experts and ensembles in memory."""

import itertools
from typing import Any

import diffusers
import torch
from torch import Tensor

import hddm
from benchmarks.outputs.digests import Outputs
from benchmarks.outputs.workshop import TIMES, Workshop, noise, states
from hddm.guidance import Guidance
from hddm.predictions import PredictionType
from tests.cases import BETAS
from tests.checkpoint_files import SD_BETAS, dit, text_unet
from tests.oracles import BoundedNetwork
from tests.transformer_files import dit_network

CONTINUOUS = {"linear": hddm.schedules.LinearSchedule, "cosine": hddm.schedules.CosineSchedule}
FAMILY = (
    "DDPM DDIM PNDM LMSDiscrete EulerDiscrete EulerAncestralDiscrete HeunDiscrete DPMSolverMultistep "
    "DPMSolverSinglestep KDPM2Discrete KDPM2AncestralDiscrete DEISMultistep UniPCMultistep SASolver LCM TCD "
    "FlowMatchEulerDiscrete FlowMatchHeunDiscrete FlowMatchLCM"
)
"""Schedulers of diffusers that have a schedule here."""

STRATEGIES = ("draw", "commit-0.5", "full", "top-1", "top-2", "threshold-0.2", "nucleus-0.9")
SOLVERS = ("euler", "heun", "adams-moulton")
GUIDANCE = {
    "none": 1.0,
    "condition": 3.0,
    "weak": Guidance(2.0, by="weak"),
    "interval": Guidance(3.0, interval=(0.2, 0.7)),
    "rescale": Guidance(3.0, rescale=0.7),
    "channels": Guidance(3.0, channels=3),
    "all, weak": Guidance(2.0, by="weak", channels=2, interval=(0.1, 0.8), rescale=0.5),
}
LABELS = torch.tensor([0, 3, 4, 1])
SHAPE = (4, 8, 8)


def _schedules() -> dict[str, Any]:
    """Every kind of schedule, by name."""
    found: dict[str, Any] = {name: kind() for name, kind in CONTINUOUS.items()}
    for (name, betas), is_rescaled in itertools.product(BETAS.items(), (False, True)):
        config = {"_class_name": "DDPMScheduler", **betas, "rescale_betas_zero_snr": is_rescaled}
        found[name + "-ztsnr" * is_rescaled] = hddm.schedules.from_diffusers(config)
    return found


def schedules(workshop: Workshop) -> Outputs:
    """Alpha, sigma and log-SNR over native time, and native time over log-SNR."""
    found = _schedules()
    for name in FAMILY.split():
        scheduler = getattr(diffusers, f"{name}Scheduler")
        config = {"_class_name": scheduler.__name__} | ({} if name.startswith("Flow") else SD_BETAS)
        found[scheduler.__name__] = hddm.schedules.from_diffusers(config)
    infinity = torch.tensor([-torch.inf, torch.inf], dtype=torch.float64)
    log_snr = torch.cat([torch.linspace(-25, 25, 101, dtype=torch.float64), infinity])
    for name, schedule in found.items():
        # The ends of native time are where the log-SNR is infinite.
        last, first = schedule.time(infinity).tolist()
        native = torch.linspace(first, last, 61, dtype=torch.float64)
        yield (
            name,
            {
                "alpha": schedule.alpha(native),
                "sigma": schedule.sigma(native),
                "log_snr": schedule.log_snr(native),
                "time": schedule.time(log_snr),
            },
        )


def velocity(workshop: Workshop) -> Outputs:
    """The exact conversion: every schedule and prediction type, then networks of every precision."""
    x, t = states((2, 2, 2))
    for (name, schedule), kind in itertools.product(_schedules().items(), PredictionType):
        if kind.prediction.is_velocity and name not in CONTINUOUS:
            continue
        field = hddm.VelocityField(BoundedNetwork(), schedule, kind, time_scale=10.0)
        yield f"{name}/{kind}", field.velocity(x, t)
        yield f"{name}/{kind}/float64", field.velocity(x.double(), t.double())
    x, t = states(SHAPE)
    labels = torch.arange(len(TIMES)) % 5
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        for k, field in enumerate(_experts(dtype)):
            yield f"expert {k} in {dtype}", field.velocity(x, t, class_labels=labels)
    for (name, guidance), (k, field) in itertools.product(GUIDANCE.items(), enumerate(_experts())):
        yield f"expert {k} guided by {name}", field.velocity(x, t, guidance, class_labels=labels)
    text = _text_expert()
    given, against = noise(len(TIMES), 7, 16, seed=2), noise(len(TIMES), 5, 16, seed=3)
    for name, negative in (("no text", None), ("text", given.flip(0)), ("a shorter text", against)):
        negative = None if negative is None else {"encoder_hidden_states": negative}
        guided = text.velocity(x, t, 4.0, negative, encoder_hidden_states=given)
        yield f"text, guided away from {name}", guided


def _expert(k: int, seed: int, dtype: torch.dtype, **options: Any) -> hddm.VelocityField:
    """One of three kinds of expert of five classes, with random weights."""
    if k == 2:
        network: torch.nn.Module = dit_network(seed, out_channels=4)
        schedule, kind, time_scale = hddm.schedules.LinearSchedule(), "flow_prediction", 1000.0
    else:
        network, time_scale = dit(seed, out_channels=4), 1.0
        scheduler = diffusers.DDIMScheduler(
            **(SD_BETAS if k else {}), rescale_betas_zero_snr=k == 1
        )
        schedule, kind = hddm.schedules.from_diffusers(scheduler), ("epsilon", "v_prediction")[k]
    return hddm.VelocityField(
        network.to(dtype),
        schedule,
        kind,
        time_scale,
        conditions=("class_labels",),
        null_conditions={"class_labels": torch.tensor(5)},
        sample_shape=SHAPE,
        classes=("cat", "dog", "bird", "fish", "7"),
        **options,
    )


def _experts(dtype: torch.dtype = torch.float32) -> list[hddm.VelocityField]:
    """Noise, v and flow prediction on three schedules, each with a weak model."""
    return [_expert(k, k, dtype, weak=_expert(k, 10 + k, dtype)) for k in range(3)]


def _text_expert() -> hddm.VelocityField:
    schedule = hddm.schedules.from_diffusers(diffusers.DDIMScheduler(**SD_BETAS))
    names, null = ("encoder_hidden_states",), torch.zeros(7, 16)
    return hddm.VelocityField(
        text_unet(), schedule, "epsilon", conditions=names, null_conditions={names[0]: null}
    )


def _router(x: Tensor, t: Tensor) -> Tensor:
    """Any probabilities that depend on state and time."""
    directions = noise(SHAPE[0] * SHAPE[1] * SHAPE[2], 3).to(x)
    return (x.flatten(1) @ directions / 8 * (1.5 - t.to(x)[:, None])).softmax(1)


def _ensemble() -> hddm.Ensemble:
    return hddm.Ensemble(_experts(), _router, "nucleus-0.9", [0.5, 0.2, 0.3])


def mixing(workshop: Workshop) -> Outputs:
    """`Ensemble.velocity` of every strategy and kind of guidance, at many noise levels at once."""
    x, t = states(SHAPE)
    labels, drawn = torch.arange(len(TIMES)) % 5, torch.arange(len(TIMES)) % 3
    ensemble = _ensemble()
    for strategy, (name, guidance) in itertools.product(STRATEGIES, GUIDANCE.items()):
        ensemble.strategy = strategy
        given: dict[str, Any] = {"class_labels": labels}
        if strategy.startswith(("draw", "commit")):
            given["expert"] = drawn
        yield f"{strategy}/{name}", ensemble.velocity(x, t, guidance, **given)
        if name != "none" and "weak" not in name:
            against = ensemble.velocity(x, t, guidance, {"class_labels": labels.flip(0)}, **given)
            yield f"{strategy}/{name}/from another class", against
    yield "router", ensemble.router(x, t)
    yield "float64", ensemble.velocity(x.double(), t.double(), class_labels=labels)


CALLS: dict[str, dict[str, Any]] = {
    "defaults": {"steps": None},
    "another seed": {"seed": 7},
    "images 2 and 3 alone": {"num": 2, "start": 2, "class_labels": LABELS[2:]},
    "batches of two": {"batch_size": 2},
    "one step": {"steps": 1},
    "shift": {"shift": 3.0},
    "expert 1": {"expert": 1, "strategy": None},
    "router every second call": {"router_every": 2, "strategy": "full"},
    "prior by sample": {"prior": torch.eye(3)[[2, 1, 0, 2]], "strategy": "draw"},
    "classes by name": {"class_labels": ["cat", "7", "dog", "dog"]},
    "no class": {"class_labels": None},
    "another class to move away from": {
        "negative": {"class_labels": LABELS.flip(0)},
        "guidance_scale": 2.0,
    },
}


def sampling(workshop: Workshop) -> Outputs:
    """`hddm.sample` of every strategy, solver and kind of guidance, then of every other argument."""
    ensemble = _ensemble()

    def sampled(model: hddm.Ensemble | hddm.VelocityField = ensemble, **changes: Any) -> Tensor:
        given: dict[str, Any] = {"num": 4, "seed": 3, "steps": 4, "class_labels": LABELS} | changes
        if given["class_labels"] is None:
            del given["class_labels"]
        return hddm.sample(model, **given)

    for strategy, solver, (name, guidance) in itertools.product(
        STRATEGIES, SOLVERS, GUIDANCE.items()
    ):
        samples = sampled(strategy=strategy, solver=solver, guidance_scale=guidance)
        yield f"{strategy}/{solver}/{name}", samples
    for name, changes in CALLS.items():
        if "strategy" in changes:
            yield name, sampled(**changes)
            continue
        for strategy in ("draw", "commit-0.5", "full"):
            yield f"{name}/{strategy}", sampled(strategy=strategy, **changes)
    for (k, field), solver in itertools.product(enumerate(_experts()), SOLVERS):
        yield f"expert {k} by itself/{solver}", sampled(field, solver=solver)
    for dtype in (torch.float64, torch.bfloat16):
        model = hddm.Ensemble(_experts(dtype), _router, "full")
        yield f"networks in {dtype}", sampled(model)
