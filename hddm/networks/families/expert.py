"""hddm's own transformer (`hddm.networks.transformers.ExpertTransformer`)."""

from diffusers import ModelMixin
from torch import Tensor

from hddm.condition_names import LABELS, TEXT
from hddm.networks.families.family import Config, Family, Taken, Tensors, count
from hddm.networks.transformers import ExpertTransformer


class OwnTransformer(Family):
    """A transformer whose call is the one that all experts share."""

    name = ExpertTransformer.__name__
    depths = (("depth",),)
    blocks = ("ExpertBlock",)
    lora_layers = r"layers\.\d+\.((cross_)?attn\.out_proj|mlp\.[02])"
    lora_parameters = r"layers\.\d+\.(cross_)?attn\.in_proj_weight"
    text_key = "text_dim"

    @property
    def network(self) -> type[ModelMixin]:
        kind: type[ModelMixin] = ExpertTransformer
        return kind

    def conditions(self, config: Config) -> Taken:
        classes = count(config, "num_classes")
        labels = (LABELS,) if classes else ()
        text = (TEXT,) if config.get("text_dim") else ()
        return Taken((*labels, *text), classes, classes)

    def call(self, model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Tensors) -> Tensor:
        output: Tensor = model(x, timestep, **conditions)
        return output

    def compared_size(self, config: Config, size: tuple[int, int]) -> tuple[int, int]:
        # Its positions are of one size.
        return size


EXPERT = OwnTransformer()
