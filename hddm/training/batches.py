"""What an expert's step is made of: images of its shard, noise, times and conditions."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hddm.data.shards import Shard
from hddm.errors import HddmError
from hddm.objectives import Objective
from hddm.training.loop import Inputs
from hddm.training.settings import ExpertSettings

_DRAWN = ("x_0", "eps", "time", "t")


def drawing(
    shard: Shard,
    objective: Objective,
    settings: ExpertSettings,
    given: Mapping[str, Tensor],
    nulls: Mapping[str, Tensor],
) -> Callable[[Tensor, torch.Generator], Inputs]:
    """How the inputs of a step are drawn (`hddm.training.loop.Task`).

    With probability ``settings.condition_dropout`` a sample has null values for all its conditions at once,
    which is what guidance asks the network with.

    Args:
        shard: what is trained on.
        objective: of which times are drawn.
        settings: see `ExpertSettings`.
        given: conditions (N, …) of all samples, by keyword; tokens of texts come from the shard itself.
        nulls: what stands for no condition, without batch dimension.
    """

    def draw(rows: Tensor, noise: torch.Generator) -> Inputs:
        flip = torch.rand(len(rows), generator=noise) < 0.5 if settings.random_flip else None
        x_0 = shard.take(rows, noise, flip)
        time = objective.sample_times(len(rows), noise)
        eps = torch.randn(x_0.shape, generator=noise)
        conditions = {name: value[rows] for name, value in given.items()}
        if settings.text_conditional and shard.texts is not None:
            conditions["encoder_hidden_states"] = shard.texts.take(rows)
        dropped = torch.rand(len(rows), generator=noise) < settings.condition_dropout
        for name in set(conditions) & set(nulls):
            value = conditions[name]
            where = dropped.reshape(-1, *[1] * (value.ndim - 1))
            conditions[name] = torch.where(where, nulls[name].to(value.dtype), value)
        return {"x_0": x_0, "eps": eps, "time": time, "t": objective.common_time(time), **conditions}

    return draw


def losing(
    objective: Objective, predict: Callable[..., Callable[..., Tensor]]
) -> Callable[[nn.Module, Inputs], Tensor]:
    """The loss of what `drawing` draws; ``predict(network)`` is a function of (y, timestep, **conditions)."""

    def loss(network: nn.Module, inputs: Inputs) -> Tensor:
        conditions = {name: value for name, value in inputs.items() if name not in _DRAWN}
        return objective.errors(predict(network), inputs["x_0"], inputs["eps"], inputs["time"], conditions)

    return loss


def check_conditions(shard: Shard, settings: ExpertSettings) -> None:
    """Refuse settings that the samples of ``shard`` do not allow.

    Raises:
        HddmError: with the option to drop.
    """
    if settings.class_conditional and shard.labels is None:
        raise HddmError(f"{shard.folder}: its images carry no labels; drop --class-conditional")
    if settings.text_conditional and shard.texts is None:
        raise HddmError(
            f"{shard.folder}: holds no text embeddings; hddm encode --text-encoder makes them, or drop "
            "--text-conditional"
        )
    if shard.held_out_of is not None:
        raise HddmError(f"{shard.folder}: was kept from training, to judge an expert by; train on its shard")
    if settings.random_flip:
        # Latents have mirror images only where they were encoded too, and say so.
        shard.take(torch.zeros(1, dtype=torch.long), flip=torch.ones(1, dtype=torch.bool))
