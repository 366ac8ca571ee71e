"""Names of layers in LoRA files of other tools, looked up among the layers of a network.

A tool calls a layer by its name in the tool's own code, behind a prefix of its own:

    lora_unet_PATH                       kohya; PATH has _ for its dots
    unet.PATH, transformer.PATH          diffusers
    base_model.model.PATH                peft
    diffusion_model.PATH                 tools with the networks of their authors

PATH is the layer's name in diffusers' class, or in the code of the network's authors: latent diffusion's for
Stable Diffusion 1, 2 and XL, and for other families what `Family.foreign_layers` says. Layers of a file are
read without all of these prefixes (`plain_name`), so the same prefix may stand there twice.

Files of cloneofsimo's tool have no names, but numbers: see `counted_layers`.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from diffusers import ModelMixin
from torch import nn

from hddm.checkpoints import ldm
from hddm.networks.families import family_of
from hddm.networks.families.family import ForeignLayer
from hddm.utils.errors import HddmError

_PREFIX = re.compile(
    r"(lora_unet|lora_transformer|lycoris|base_model\.model|model\.diffusion_model|model_diffusion_model|"
    r"diffusion_model|unet|transformer(?!_blocks)|model)[._]"
)
# Diffusers' attention processors of 2023 had the factors, and called all layers after themselves.
_PROCESSOR = re.compile(r"[._]processor(?=[._])")
_TO_OUT = re.compile(r"to_out$")

ATTENTION = frozenset(("CrossAttention", "Attention"))
FEED_FORWARD = "GEGLU"
COUNTED_MODULES = ATTENTION | {FEED_FORWARD}
"""Modules whose linear layers cloneofsimo's tool changes, by the names of their classes at that time."""
_IN_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_BLOCK = re.compile(r"(down_blocks|up_blocks|mid_block)\..*transformer_blocks\.\d+")
_PLACES = ("down_blocks", "up_blocks", "mid_block")
_IN_CLIP = ("k_proj", "v_proj", "q_proj", "out_proj")
_CLIP_BLOCK = re.compile(r"(.*layers\.)(\d+)\.self_attn\.q_proj")


class LayerNames:
    """The layers of a network, by every name that a file may have for them."""

    def __init__(self, network: ModelMixin) -> None:
        self._known: dict[str, ForeignLayer] = {}
        own = []
        for name, module in network.named_modules():
            if name and isinstance(getattr(module, "weight", None), nn.Parameter):
                own.append(name)
                self._add(name, ForeignLayer((name,)))
        family = family_of(network)
        foreign: Mapping[str, ForeignLayer] = {}
        if family is ldm.LDM.family:
            foreign = _of_latent_diffusion(own, network.config)
        elif family is not None:
            foreign = family.foreign_layers(network.config)
        for name, layer in foreign.items():
            if all(one in own for one in layer.layers):
                self._add(name, layer)

    def _add(self, name: str, layer: ForeignLayer) -> None:
        # The names of the class come first.
        self._known.setdefault(name.replace(".", "_"), layer)

    def find(self, name: str) -> ForeignLayer | None:
        """The layers of the network that a file calls ``name``; None if it calls none so."""
        for candidate in candidates(name):
            found = self._known.get(candidate.replace(".", "_"))
            if found is not None:
                return found
        return None


def candidates(name: str) -> Iterable[str]:
    """The names of a layer that a file may mean by ``name``, from the longest: without its prefixes."""
    name = _PROCESSOR.sub("", name, 1)
    name = _TO_OUT.sub("to_out.0", name)
    yield name
    while match := _PREFIX.match(name):
        name = name[match.end() :]
        yield name


def plain_name(name: str) -> str:
    """``name`` without any prefix of a tool."""
    *_, shortest = candidates(name)
    return shortest


def _of_latent_diffusion(
    layers: Collection[str], config: Mapping[str, Any]
) -> dict[str, ForeignLayer]:
    """Layers by their names in the code of latent diffusion."""
    found = {}
    for layer in layers:
        # Not every block of the class is one of latent diffusion, nor is Kolors' projection of its text.
        with contextlib.suppress(HddmError):
            (pair,) = ldm.key_table([f"{layer}.weight"], config, "LoRA").pairs
            foreign = pair.foreign[0].removeprefix(ldm.UNET).removesuffix(".weight")
            found[foreign] = ForeignLayer((layer,))
    return found


def counted_layers(network: ModelMixin, modules: Collection[str]) -> list[str]:
    """Layers of Stable Diffusion's UNet in the order in which cloneofsimo's tool counts them.

    The tool (github.com/cloneofsimo/lora, ``extract_lora_ups_down``) walks ``unet.modules()`` of diffusers
    0.6 to 0.13 and takes the linear layers inside of each module of the classes ``modules``. At that time the
    UNet held its middle block after its up blocks, and a transformer block held ``attn1``, ``ff`` and
    ``attn2`` in this order; in today's classes ``ff`` comes last.
    """
    blocks = [name for name, _ in network.named_modules() if _BLOCK.fullmatch(name)]
    # Sorting keeps the order within a place, in which blocks are numbered.
    blocks.sort(key=lambda name: _PLACES.index(name.partition(".")[0]))
    order = []
    for block in blocks:
        inner = [f"{block}.attn1.{one}" for one in _IN_ATTENTION]
        if FEED_FORWARD in modules:
            inner.append(f"{block}.ff.net.0.proj")
        inner += [f"{block}.attn2.{one}" for one in _IN_ATTENTION]
        order += inner
    return order


def counted_text_layers(layers: Iterable[str]) -> list[str]:
    """Layers of CLIP's attention in the order in which cloneofsimo's tool counts them.

    It is the order in which transformers' ``CLIPAttention`` holds them: keys, values, queries, output.
    """
    blocks = [match for match in map(_CLIP_BLOCK.fullmatch, layers) if match]
    blocks.sort(key=lambda match: int(match[2]))
    order = []
    for match in blocks:
        order += [f"{match[1]}{match[2]}.self_attn.{one}" for one in _IN_CLIP]
    return order
