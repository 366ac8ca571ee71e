"""UNets of diffusers without text: UNet2DModel."""

from hddm.condition_names import LABELS
from hddm.networks.families.family import ENOUGH, Config, Family, Pipeline, Taken, count
from hddm.networks.sample_sizes import SampleSizes
from hddm.utils.errors import HddmError


class Unet(Family):
    """A UNet, perhaps with classes; nothing in its config says whether the last one stands for none."""

    name = "UNet2DModel"
    layout = "diffusers-unet2d"
    depths = (
        ("layers_per_block",),
        ("transformer_layers_per_block", "reverse_transformer_layers_per_block"),
        ("down_block_types", "up_block_types"),
    )
    pipelines: tuple[Pipeline, ...] = (Pipeline("DDPMPipeline", network="unet"),)

    def patch(self, config: Config) -> int | None:
        return None

    def conditions(self, config: Config) -> Taken:
        if (kind := config.get("class_embed_type")) is not None:
            raise HddmError(f"class_embed_type {kind!r} is not supported; only num_class_embeds is")
        classes = count(config, "num_class_embeds")
        return Taken((LABELS,) if classes else (), classes)

    def sizes(self, config: Config) -> SampleSizes:
        # Each level but the last halves the size.
        return SampleSizes(multiple=2 ** (len(config["block_out_channels"]) - 1))

    def compared_size(self, config: Config, size: tuple[int, int]) -> tuple[int, int]:
        # Each level halves the size.
        enough = max(ENOUGH, 2 ** len(config["block_out_channels"]))
        return min(size[0], enough), min(size[1], enough)


UNET = Unet()
