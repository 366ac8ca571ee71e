"""What a LoRA file does to one weight W (out, in) or (out, in, h, w): LoRA, and its relatives.

    LoRA     W + s B A             A = down (r, in, h, w), B = up (out, r);  s = alpha/r
    LoCon    the same, with A = sum_q mid[:, q] down[q]                      mid (r, r, h, w)
    LoHa     W + s (B_1 A_1) * (B_2 A_2)                                     * number by number
    LoKr     W + s kron(C, D)      each whole, or a product of two factors; in LyCORIS s = 1 if both are whole
    .diff    W + diff
    DoRA     m V / |V|             V is any of these; |V| per output, or per input, as m (``dora_scale``)

LoHa and LoKr of convolutions may have a core of their own (``hada_t1``, ``lokr_t2``), which takes the place
of mid. The first two have factors that an adapter can keep; the others are merged. Sources: arXiv:2106.09685,
arXiv:2309.14859 (LoCon, LoHa, LoKr) and arXiv:2402.09353 (DoRA).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.utils.tensors import promoted

DOWN, UP, MID, ALPHA = "down", "up", "mid", "alpha"
DORA_SCALE, MAGNITUDE = "dora_scale", "lora_magnitude_vector"
DIFF, BIAS = "diff", "diff_b"
_HADAMARD = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
_HADAMARD_CORES = ("hada_t1", "hada_t2")
_KRONECKER = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
_NAMES = {
    **dict.fromkeys((DOWN, UP), "LoRA"),
    MID: "LoCon",
    **dict.fromkeys((*_HADAMARD, *_HADAMARD_CORES), "LoHa"),
    **dict.fromkeys(_KRONECKER, "LoKr"),
    **dict.fromkeys((DIFF, BIAS), "plain difference"),
    **dict.fromkeys((DORA_SCALE, MAGNITUDE), "DoRA"),
}

FACTOR = re.compile(r"(.+?)[._]lora(?:_linear_layer)?[._](down|up|mid|A|B)(?:\.([\w-]+))?\.weight")
"""Name of a factor: the layer's, the factor's, and perhaps that of an adapter, such as ``default``."""
_LETTERS = {"A": DOWN, "B": UP}
_ALPHA_NAME = re.compile(r"(.+?)(?:[._]lora)?\.alpha")
_OTHER_PART = re.compile(
    rf"(.+)\.({'|'.join((*_HADAMARD, *_HADAMARD_CORES, *_KRONECKER, DIFF, BIAS))})"
)
_NORM = re.compile(r"(.+)\.(w|b)_norm")
_MAGNITUDE_NAME = re.compile(r"(.+)\.(dora_scale|lora_magnitude_vector)(\.[\w-]+)*")
UNREAD = {
    "OFT": re.compile(r".+\.(oft_\w+|oft_R\..+|rescale)"),
    "GLoRA": re.compile(r".+\.(a1|a2|b1|b2|bm)\.weight"),
    "IA³": re.compile(r".+\.(on_input|ia3_l(\..+)?)"),
    "T-LoRA": re.compile(r".+\.(q_layer\.weight|p_layer\.weight|lambda_layer)"),
    "biases of factors": re.compile(r".+[._]lora_(down|up|A|B)(\.\w+)?\.bias"),
    "embeddings": re.compile(r".+\.lora_embedding_[AB](\..+)?"),
    "a replaced weight": re.compile(r".+\.(set_weight|reshape_weight)"),
    "XLabs' processors": re.compile(r".+\.processor\.(qkv|proj)_lora\d?\.(down|up)\.weight"),
    "modules saved whole": re.compile(r".+\.modules_to_save\..+"),
}
"""Names of kinds of changes that are not read."""


def part_of(name: str) -> tuple[str, str] | None:
    """The layer that a tensor of this name belongs to, as the file calls it, and its part of a change."""
    if match := FACTOR.fullmatch(name):
        return match[1], _LETTERS.get(match[2], match[2])
    if match := _ALPHA_NAME.fullmatch(name):
        return match[1], ALPHA
    if match := _OTHER_PART.fullmatch(name):
        return match[1], match[2]
    if match := _NORM.fullmatch(name):
        return match[1], DIFF if match[2] == "w" else BIAS
    if match := _MAGNITUDE_NAME.fullmatch(name):
        return match[1], match[2]
    return None


def unread_kind(name: str) -> str | None:
    """The kind of change, of those that are not read, that has tensors of this name."""
    for kind, pattern in UNREAD.items():
        if pattern.fullmatch(name):
            return kind
    return None


def is_change(name: str) -> bool:
    """True for the name of a tensor that only files of changes have."""
    part = part_of(name)
    return unread_kind(name) is not None if part is None else part[1] != ALPHA


def kind_of(parts: Mapping[str, object]) -> str:
    """The kind of change that is made of these parts: the rarest of them tells."""
    order = list(dict.fromkeys(_NAMES.values()))
    found = [_NAMES[part] for part in parts if part in _NAMES]
    return max(found, key=order.index, default="alpha alone")


@dataclass(frozen=True)
class Change:
    """What a file holds for one layer: ``parts`` by name, without alpha, and the ``scale`` s of its product.

    Its methods raise `ValueError` for parts that make no change of such a weight. Tensors on the meta device
    are enough to find that out.
    """

    parts: Mapping[str, Tensor]
    scale: float = 1.0

    @property
    def has_factors(self) -> bool:
        """True where an adapter can keep it: of two factors, or three."""
        return self.parts.keys() in ({DOWN, UP}, {DOWN, UP, MID})

    @property
    def rank(self) -> int | None:
        """Width of its factors; None where it has none, or no scale."""
        for part, dimension in ((DOWN, 0), ("hada_w1_b", 0), ("lokr_w1_b", 0), ("lokr_w2_b", 0)):
            if part in self.parts and self.parts[part].ndim:
                return self.parts[part].shape[dimension]
        return None

    @property
    def is_kronecker(self) -> bool:
        """True for a Kronecker product, also of two whole sides, which has no rank."""
        return not self.parts.keys().isdisjoint(_KRONECKER)

    def factors(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """A and B, in the shapes of `hddm.experts.lora.factor_shapes`, for a weight of ``shape``."""
        down, up = self._part(DOWN), self._part(UP)
        _need(down.ndim > 1 and up.ndim > 1, "other factors")
        if MID in self.parts:
            mid = _wide(self.parts[MID])
            down = torch.einsum("pq...,qi->pi...", mid, _wide(down).flatten(1))
        # A 1×1 convolution and a linear layer are stored like one another.
        out, width, *window = shape
        _need(down.shape[1] == width and up.shape[0] == out, "other factors")
        a = down.reshape(len(down), width, *window)
        return a, up.reshape(out, len(down), *[1] * len(window))

    def merged(self, weight: Tensor) -> Tensor:
        """The changed weight, in float32 at least."""
        weight = _wide(weight)
        if self.parts.keys() == {BIAS}:
            return weight
        changed = weight + self._difference(weight.shape)
        if DORA_SCALE in self.parts:
            return _rescaled(changed, _wide(self.parts[DORA_SCALE]))
        if MAGNITUDE in self.parts:
            # peft has one by output, which has this dimension first or, of a convolution, second.
            by_output = _wide(self.parts[MAGNITUDE]).flatten()
            return _rescaled(changed, by_output.reshape(-1, *[1] * (changed.ndim - 1)))
        return changed

    def merged_bias(self, bias: Tensor) -> Tensor:
        """The changed bias, in float32 at least."""
        _need(self.parts[BIAS].shape == bias.shape, "another bias")
        return _wide(bias) + _wide(self.parts[BIAS])

    def _difference(self, shape: torch.Size) -> Tensor:
        names = self.parts.keys() - {DORA_SCALE, MAGNITUDE, BIAS}
        if names & set(_HADAMARD):
            difference = self.scale * self._hadamard()
        elif names & set(_KRONECKER):
            difference = self.scale * self._kronecker()
        elif DIFF in names:
            difference = _wide(self.parts[DIFF])
        else:
            a, b = self.factors(shape)
            difference = self.scale * (_wide(b).flatten(1) @ _wide(a).flatten(1))
        known = {DIFF} if DIFF in names else names - {DIFF}
        _need(known == names and difference.numel() == shape.numel(), "another weight")
        _need(difference.shape[0] == shape[0], "another weight")
        return difference.reshape(shape)

    def _hadamard(self) -> Tensor:
        products = []
        for number in (1, 2):
            left = self._part(f"hada_w{number}_a")
            right = self._part(f"hada_w{number}_b")
            if f"hada_t{number}" in self.parts:
                core = _wide(self.parts[f"hada_t{number}"])
                product = torch.einsum("ij...,jr,ip->pr...", core, _wide(right), _wide(left))
            else:
                product = _wide(left) @ _wide(right)
            products.append(product)
        return products[0] * products[1]

    def _kronecker(self) -> Tensor:
        first, second = self._half(1), self._half(2)
        first = first.reshape(*first.shape, *[1] * (second.ndim - first.ndim))
        return torch.kron(first, second.contiguous())

    def _half(self, number: int) -> Tensor:
        """One side of the Kronecker product."""
        name = f"lokr_w{number}"
        if name in self.parts:
            return _wide(self.parts[name])
        left, right = _wide(self._part(f"{name}_a")), _wide(self._part(f"{name}_b"))
        if number == 2 and "lokr_t2" in self.parts:
            core = _wide(self.parts["lokr_t2"])
            return torch.einsum("ij...,ip,jr->pr...", core, left, right)
        return (left @ right.flatten(1)).reshape(len(left), *right.shape[1:])

    def _part(self, name: str) -> Tensor:
        if name not in self.parts:
            raise ValueError(f"no {name}")
        return self.parts[name]


def _rescaled(weight: Tensor, magnitude: Tensor) -> Tensor:
    """``weight`` with the norms ``magnitude``, of its outputs or of its inputs."""
    ones = [1] * (weight.ndim - 2)
    if tuple(magnitude.shape) == (len(weight), 1, *ones):
        norms = weight.flatten(1).norm(dim=1)
    elif tuple(magnitude.shape) == (1, weight.shape[1], *ones):
        norms = weight.transpose(0, 1).flatten(1).norm(dim=1)
    else:
        raise ValueError("a magnitude of another layer")
    factors: Tensor = magnitude / norms.reshape(magnitude.shape)
    return weight * factors


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(promoted(tensor.dtype, torch.float32))


def _need(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(what)
