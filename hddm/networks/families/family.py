"""What every kind of network answers: its config, its call, its conditions, its layers and its pipelines.

A family is one object per class of networks. Everything that differs between kinds of networks is a field or
a method here; code outside of this folder names no class of networks.
"""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModelMixin
from torch import Generator, Tensor

from hddm import condition_names
from hddm.condition_names import POOLED, TEXT, TEXT_MASK
from hddm.networks.encoders import CLIP, T5, TextEncoderClass
from hddm.networks.identity import TextEncoderRecord
from hddm.networks.sample_sizes import LARGEST_SIDE, SampleSizes
from hddm.utils.errors import HddmError, Unstated

IN_LATENTS = "(in latents: 128 for pictures of 1024 pixels)"
_TOKENS = 8
"""Text tokens of example conditions."""
ENOUGH = 16
"""Height and width at which one run exercises every weight of most networks."""
Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of a network, read from its config.

    ``sample_shape`` is (C, H, W). With ``variance_head``, the last C of 2 C output channels are a learned
    variance (arXiv:2102.09672), not part of the prediction. ``num_patches`` is None for a UNet.
    """

    sample_shape: tuple[int, int, int]
    variance_head: bool
    conditions: tuple[str, ...] = ()
    num_classes: int | None = None
    null_class: int | None = None
    num_patches: int | None = None


@dataclass(frozen=True)
class Taken:
    """Conditions that a network takes, with its number of classes and the class that stands for none.

    Raises `HddmError` for names that are no tuple of different texts, and for classes that do not fit them.
    """

    conditions: tuple[str, ...] = ()
    num_classes: int | None = None
    null_class: int | None = None

    def __post_init__(self) -> None:
        names, classes, null = self.conditions, self.num_classes, self.null_class
        # One name in parentheses without a comma is a text, whose letters would be the names.
        is_tuple = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
        if not is_tuple or len(set(names)) < len(names):
            raise HddmError(
                f"conditions() names {_cut(names)}, which must be a tuple of different texts"
            )
        has_labels = condition_names.LABELS in names
        if classes is not None and not isinstance(classes, int):
            raise HddmError(f"num_classes is {_cut(classes)}, and must be a whole number")
        if has_labels != bool(classes) or (classes or 0) < 0:
            takes = "takes" if has_labels else "does not take"
            raise HddmError(
                f"num_classes is {_cut(classes)} of a network that {takes} {condition_names.LABELS}; "
                "it is 1 or more with them, and None without"
            )
        if null is not None and not (isinstance(null, int) and 0 <= null <= (classes or 0)):
            raise HddmError(
                f"null_class is {_cut(null)} of {classes} classes; the class that stands for none is one "
                "of them, or has their number, or is None"
            )


@dataclass(frozen=True)
class Prompts:
    """How a pipeline encodes prompts by its own ``encode_prompt``, mostly by several text encoders."""

    encoders: tuple[TextEncoderClass, ...]
    """The text encoders, in order."""
    pooled: str = ""
    """Condition that holds one vector per prompt, beside the tokens in `TEXT`; empty without one."""
    t5_tokens: int = 0
    """Tokens that T5 pads prompts to; 0 without T5."""
    joins: bool = False
    """True if the tokens of CLIP come before those of T5; otherwise T5's are the only ones."""
    has_zeros_key: bool = False
    """True if the pipeline can replace the empty negative prompt by zeros, as its index says."""
    encodes_negatives: bool = True
    """True if ``encode_prompt`` returns tokens and vectors of prompts and negative prompts in turn."""
    writes_chats: bool = False
    """True if prompts are written as turns of a chat (`hddm.networks.chat_template`)."""

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions that prompts become: tokens, and one vector per prompt, or else a mask."""
        return (TEXT, self.pooled or TEXT_MASK)

    @property
    def other_readers(self) -> tuple[TextEncoderClass, ...]:
        """The text encoders that are no CLIP, whose prompts are read in one way alone."""
        return tuple(kind for kind in self.encoders if kind.label != CLIP.label)

    def written(self, tokenizer: Any, texts: list[str], is_negative: bool) -> list[str]:
        """The texts that a tokenizer gets of prompts, or of negative ones."""
        return texts

    def length(self, kind: TextEncoderClass) -> int | None:
        """Tokens that a text encoder of a ``kind`` reads; None for as many as its tokenizer says."""
        return self.t5_tokens if kind == T5 else None

    def shape(self, tokens: Sequence[int], widths: Sequence[int]) -> tuple[int, int]:
        """Number and width of a prompt's tokens in `TEXT`, of those of each text encoder in order."""
        if not self.t5_tokens:
            return tokens[0], sum(widths)
        return (tokens[0] if self.joins else 0) + self.t5_tokens, widths[-1]

    def encode(
        self, pipe: Any, texts: list[str], device: torch.device, is_negative: bool
    ) -> dict[str, Tensor]:
        """Conditions of prompts, or of negative ones, by ``encode_prompt`` of the pipeline, on ``device``.

        Without a vector of each prompt, they have a `TEXT_MASK`.
        """
        others = {f"prompt_{number + 1}": None for number in range(1, len(self.encoders))}
        own = dict[str, Any]()
        longest = max(self.length(kind) or 0 for kind in self.encoders)
        if longest:
            own["max_sequence_length"] = longest
        if self.encodes_negatives:
            own["do_classifier_free_guidance"] = False
        tokens, *rest = pipe.encode_prompt(texts, **others, device=device, **own)
        return {TEXT: tokens, self.pooled: rest[1 if self.encodes_negatives else 0]}


@dataclass(frozen=True)
class PaddedPrompts(Prompts):
    """Prompts as the tokens of one text encoder, padded to a fixed number."""

    tokens: int = 0

    def length(self, kind: TextEncoderClass) -> int | None:
        return self.tokens

    def shape(self, tokens: Sequence[int], widths: Sequence[int]) -> tuple[int, int]:
        return self.tokens, widths[0]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of diffusers around a network."""

    name: str
    """Its class."""
    network: str = "transformer"
    """Its keyword for the network, and the network's folder."""
    former_names: tuple[str, ...] = ()
    """What earlier versions of diffusers called it."""
    prompts: Prompts | None = None
    """None where one CLIP, one T5 or no text encoder makes the conditions."""
    has_text: bool = False
    """True if prompts are encoded at all."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the class, to make one without network, VAE and scheduler."""
    t5_tokens: int | None = None
    """Tokens of a prompt for one T5; None without."""
    keeps_case: bool = False
    """True if that T5 reads prompts as they are, and not in lower case without spaces around them."""
    seen_padding: int = 0
    """Tokens of padding after the text that the network's mask counts as text."""
    has_single_file: bool = True
    """False if no layout of single files holds its networks, though one is of the same class."""


@dataclass(frozen=True)
class ForeignLayer:
    """Layers that hold, one after the other, the rows of one layer in the code of a network's authors."""

    layers: tuple[str, ...]
    swaps_halves: bool = False
    """True if the first half of the rows is the second one here, as of shift and scale."""


@dataclass(frozen=True)
class SingleFile:
    """How the code of a network's authors stores it in one file.

    Args:
        layout: its name, as in ``--to-layout``.
        markers: names of tensors that every such file has, and no file of another layout.
        scale: of the latents that it takes (`hddm.networks.identity.Scaling`).
        shift: of these.
        sample_size: side of a sample, by default.
    """

    layout: str
    markers: tuple[str, ...]
    scale: float
    shift: float
    sample_size: int


class Family:
    """One kind of network.

    Fields and methods have the answers of a plain denoiser of diffusers; a family overrides what is
    different.
    """

    name: str
    """The class that a ``config.json`` names."""
    layout: str = ""
    """The name of its folders, as in ``--to-layout``; empty for hddm's own network alone, which no other tool
    writes."""
    former_norm: str = ""
    """``norm_type`` of diffusers' former all-in-one class, ``Transformer2DModel``, that meant this one."""
    single_file: SingleFile | None = None
    """How its authors store it; None where hddm reads its folders alone."""
    depths: tuple[tuple[str, ...], ...] = (("num_layers",),)
    """Keys of its config that multiply to a number of modules, the largest of each group."""
    computed: tuple[str, ...] = ()
    """Buffers that `buffer` computes, where no file holds them."""
    pipelines: tuple[Pipeline, ...] = ()
    """Pipelines around it; networks are written back into the first one, or into that of `pipeline`."""
    time_factor: float = 1.0
    """Steps of a scheduler per unit of the time that the network takes: 1000 where it takes t itself."""
    multiplied: tuple[str, ...] = (TEXT, POOLED)
    """Conditions that the network multiplies as they are, so that they need its dtype."""
    nested: tuple[str, ...] = ()
    """Conditions that diffusers takes in ``added_cond_kwargs``."""
    settings: tuple[str, ...] = ()
    """Conditions that say how a sample is made, and not what it shows: a negative branch has the same."""
    residuals: tuple[str, ...] = ()
    """Inputs by which a ControlNet adds to layers."""
    blocks: tuple[str, ...] = ()
    """Classes of modules that occur many times and share one compiled graph; without any, the network is
    compiled whole."""
    lora_layers: str = (
        r"(.+\.)?(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|ff(_context)?\.net\.(0\.proj|2))"
    )
    """Names of the linear layers of attention and MLPs, which adapters change; a regular expression."""
    lora_parameters: str = r"(?!)"
    """Names of parameters that are no layer's own weight and that adapters change too."""
    exact_layers: str = r"(?!)"
    """Names of linear layers that are never held in int8, as another module reads their weights; a regular
    expression."""
    prompts_first: bool = False
    """True if its pipelines put the branch of the prompts before that of the negative ones."""
    unread: tuple[str, ...] = ()
    """Tensors of a `single_file` that the network does not read."""
    text_key: str | None = None
    """Key of its config that holds the width of its text tokens."""
    states_size: bool = True
    """True if its config can hold the size of a sample."""
    keeps_empty_prompt: bool = False
    """True if an expert stores the tokens of the empty prompt, for guidance without a text encoder."""

    @property
    def network(self) -> type[ModelMixin]:
        """The class."""
        kind: type[ModelMixin] = getattr(diffusers, self.name)
        return kind

    def build(self, arguments: Config) -> ModelMixin:
        """The network with these arguments, without diffusers' warnings of its own classes to each other."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return self.network(**arguments)

    @property
    def library(self) -> str:
        """The package that has the class, as the index of a pipeline names it."""
        return self.network.__module__.partition(".")[0]

    def has_key(self, key: str) -> bool:
        """True if the constructor takes an argument of this name."""
        return key in inspect.signature(self.network.__init__).parameters

    def parts_in(self, folder: Path) -> dict[str, Any]:
        """Arguments of the network that are no part of its config, of other files of its ``folder``."""
        return {}

    def write_parts(self, network: ModelMixin, folder: Path) -> None:
        """Write the files that `parts_in` reads."""

    def interface(self, config: Config, size: tuple[int, int] | None = None) -> Interface:
        """Inputs and outputs of the network with ``config``, defaults of the class included.

        ``size`` is a sample's height and width where the config states none. Raises `HddmError` where neither
        states a size, for an output that has neither C nor 2 C channels, and for an unsupported condition.
        """
        channels = self.channels(config)
        patch = self.patch(config)
        stated = config.get("sample_size")
        height, width = self._sides(size if stated is None else stated)
        if patch and (height % patch or width % patch):
            text = f"a sample of {height}×{width} cannot be divided into them"
            raise HddmError(f"{self.name} has patches of side {patch}, and {text}")
        taken = self.conditions(config)
        sizes = self.sizes(config)
        if sizes is not None and max(height, width) > sizes.most:
            raise HddmError(
                f"{self.name} takes samples of at most {sizes.most} a side by its config, and one of "
                f"{height}×{width} is asked for"
            )
        return Interface(
            sample_shape=(channels, height, width),
            variance_head=self.has_variance_head(config),
            conditions=taken.conditions,
            num_classes=taken.num_classes,
            null_class=taken.null_class,
            num_patches=height * width // patch**2 if patch else None,
        )

    def refuse(self, config: Config) -> None:
        """Raise an `HddmError` for a config, as a file states it, that is of a network for another task.

        It is asked before the class, which may not know what such a config says.
        """

    def conditions(self, config: Config) -> Taken:
        """The conditions that the network takes; `HddmError` for an unsupported one."""
        return Taken()

    def patch(self, config: Config) -> int | None:
        """Side of a patch of a sample, None for a UNet."""
        return count(config, "patch_size")

    def channels(self, config: Config) -> int:
        """Channels of a sample; `HddmError` for a network that gives other ones than it takes."""
        taken, given = count(config, "in_channels"), config.get("out_channels")
        if taken is None or taken < 1:
            raise HddmError(
                f"the config of {self.name} has in_channels {taken}, and must have 1 or more; a family whose "
                "config says it otherwise has a method `channels` of its own"
            )
        if given not in (None, taken) and not self.has_variance_head(config):
            text = "that is not a plain denoiser (an inpainting or upscaling model?)"
            raise HddmError(f"{self.name} takes {taken} channels and gives {given}: {text}")
        return taken

    def has_variance_head(self, config: Config) -> bool:
        """True if the network also outputs a learned variance."""
        taken = count(config, "in_channels")
        return taken is not None and config.get("out_channels") == 2 * taken

    def text_width(self, config: Config) -> int | None:
        """Width of the text tokens that the network takes, None without text."""
        stated = config.get(self.text_key) if self.text_key else None
        # A UNet may state it for each of its levels.
        width = stated[0] if isinstance(stated, Sequence) else stated
        return width if isinstance(width, int) and width else None

    def call(self, model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Tensors) -> Tensor:
        """Full output of the network for states ``x`` (batch, C, H, W), a variance half included."""
        given: dict[str, Any] = {}
        nested: dict[str, Tensor] = {}
        for name, one in conditions.items():
            if name in self.nested:
                nested[name] = one
            else:
                given[name] = one
        if nested:
            given["added_cond_kwargs"] = nested
        result: Tensor = model(x, timestep=timestep, return_dict=False, **given)[0]
        return result

    def full_output(
        self,
        model: ModelMixin,
        has_variance_head: bool,
        x: Tensor,
        timestep: Tensor,
        conditions: Tensors,
    ) -> Tensor:
        """What `call` returns; raises `HddmError` for another shape than that of its states."""
        output = self.call(model, x, timestep, conditions)
        channels = 2 * x.shape[1] if has_variance_head else x.shape[1]
        wanted = (x.shape[0], channels, *x.shape[2:])
        if not isinstance(output, Tensor) or output.shape != wanted:
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            head = "with" if has_variance_head else "without"
            raise HddmError(
                f"call() gives {found} for states of {tuple(x.shape)}, and {head} a learned variance "
                f"(has_variance_head) it is {wanted}"
            )
        return output

    def read_call(self, state: Tensor, given: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The state (batch, C, H, W) and the other inputs of a pipeline's call of its network.

        ``state`` is the first argument, and ``given`` are the others by name. The result has ``timestep`` and
        conditions by the names of `conditions`; a network that names its arguments otherwise is renamed here.
        """
        return state, given

    def ignored(self, config: Config) -> tuple[str, ...]:
        """Names of what `read_call` finds and the network leaves unread, as its pipeline passes it to all."""
        return ()

    def as_output(self, state: Tensor, config: Config) -> Tensor:
        """A prediction (batch, C, H, W) as the network returns it to a pipeline."""
        if self.has_variance_head(config):
            return torch.cat([state, torch.zeros_like(state)], dim=1)
        return state

    def buffer(self, name: str, arguments: Config) -> Tensor:
        """The buffer ``name``, one of `computed`, of a network with these arguments."""
        none = dict.fromkeys(self.depths[0], 0) if self.depths else {}
        found: Tensor = self.build({**arguments, **none}).get_buffer(name)
        return found

    def complete(self, network: ModelMixin) -> None:
        """Compute what an empty network holds beside its weights and buffers, which is on the meta device."""

    def sizes(self, config: Config) -> SampleSizes | None:
        """Sizes of samples that the network takes; None if that is only the one that its config states."""
        return None

    def compared_size(self, config: Config, size: tuple[int, int]) -> tuple[int, int]:
        """A size of samples on which one run of the network exercises every weight; large ones take long."""
        height, width = size
        return min(height, ENOUGH), min(width, ENOUGH)

    def example(
        self, name: str, config: Config, num_classes: int | None, noise: Generator
    ) -> Tensor:
        """One row of the condition ``name``, of fixed or random numbers in the shape that it takes."""
        match name:
            case condition_names.LABELS:
                # The last one: a network of fewer classes fails on it.
                return torch.tensor([(num_classes or 1) - 1])
            case condition_names.TEXT:
                return torch.randn(1, _TOKENS, self.text_width(config) or 1, generator=noise)
            case condition_names.POOLED:
                return torch.randn(1, config["pooled_projection_dim"], generator=noise)
        raise HddmError(f"has no example() of the condition {name}, which conditions() names")

    def defaults(
        self, names: Sequence[str], sample_shape: tuple[int, int, int]
    ) -> dict[str, Tensor]:
        """Conditions, without batch, that no prompt provides: by the size, or the pipeline's default."""
        return {}

    def null_vectors(self, config: Config) -> dict[str, Tensor]:
        """Values of conditions, without batch, that belong to an empty prompt whose tokens are zeros."""
        return {}

    def pipeline(
        self, arguments: Config, text_encoder: TextEncoderRecord | None = None
    ) -> Pipeline:
        """The pipeline that a network with these arguments, trained with this text encoder, is written into.

        Raises `HddmError` where there is none.
        """
        if not self.pipelines:
            raise HddmError(
                f"{self.name} is written into no pipeline; "
                "its family names the class of one in its field pipelines"
            )
        return self.pipelines[0]

    def foreign_layers(self, config: Config) -> Mapping[str, ForeignLayer]:
        """Layers by their names in the code of the network's authors, which LoRA files of other tools use."""
        return {}

    def foreign_tensors(self, config: Config) -> Mapping[str, str]:
        """Tensors of no layer, by their names in the code of the network's authors."""
        return {}

    def file_arguments(self, weights: Tensors, origin: str) -> dict[str, Any]:
        """Arguments of the network in a `single_file`, by the shapes of tensors under its authors' names.

        ``origin`` is the file, for errors.
        """
        raise NotImplementedError

    def file_scheduler(self, arguments: Config) -> dict[str, Any]:
        """The training schedule and sampling shift that the authors' code fixes, as a config of diffusers."""
        raise NotImplementedError

    def licence(self, arguments: Config) -> str | None:
        """Licence of released weights that are known by these arguments, None if there are none."""
        return None

    def _sides(self, size: Any) -> tuple[int, int]:
        if size is None:
            text = f"has no sample_size: pass `sample_size`, the side of its input {IN_LATENTS}"
            raise Unstated(f"the config of {self.name}", text, "sample_size")
        sides = (size, size) if isinstance(size, int) else size
        is_pair = isinstance(sides, Sequence) and len(sides) == 2
        if not is_pair or not all(map(_is_side, sides)):
            text = f"it is a side, or a pair of sides, of 1 to {LARGEST_SIDE}; pass `sample_size`"
            raise HddmError(f"the config of {self.name} has sample_size {str(size)[:40]}: {text}")
        return sides[0], sides[1]


def _cut(value: object) -> str:
    return repr(value)[:40]


def _is_side(value: object) -> bool:
    return isinstance(value, int) and 1 <= value <= LARGEST_SIDE


def count(config: Config, key: str) -> int | None:
    """A whole number of a config; raises `HddmError` for anything else."""
    value = config.get(key)
    if not isinstance(value, int | None):
        raise HddmError(f"{key} is {str(value)[:40]}, and must be a whole number")
    return value
