"""DiT (arXiv:2212.09748) as diffusers' DiTTransformer2DModel."""

from hddm.condition_names import LABELS
from hddm.networks.families.family import Config, Family, Pipeline, Taken, count
from hddm.networks.sample_sizes import SampleSizes

_IMAGENET_CLASSES = 1000
IMAGENET_LICENCE = (
    "CC-BY-NC-4.0 (assumed: it has the 1,000 classes of the released ImageNet DiT weights, which are "
    "non-commercial; `licence` states another)"
)


def licence_of_dit(num_classes: int | None) -> str | None:
    """The licence of the released weights, which are known by their number of classes."""
    return IMAGENET_LICENCE if num_classes == _IMAGENET_CLASSES else None


class Dit(Family):
    """A transformer with classes, of which the last stands for none."""

    name = "DiTTransformer2DModel"
    layout = "diffusers-dit"
    former_norm = "ada_norm_zero"
    blocks = ("BasicTransformerBlock",)
    computed = ("pos_embed.pos_embed",)
    pipelines = (Pipeline("DiTPipeline"),)

    def conditions(self, config: Config) -> Taken:
        classes = count(config, "num_embeds_ada_norm")
        return Taken((LABELS,), classes, classes)

    def sizes(self, config: Config) -> SampleSizes:
        # Positions are computed for any size, and rows are taken for a square's.
        return SampleSizes(multiple=count(config, "patch_size") or 1, is_square=True)

    def licence(self, arguments: Config) -> str | None:
        return licence_of_dit(arguments.get("num_embeds_ada_norm"))


DIT = Dit()
