"""The closed list of operators that a program may use, and the types of their arguments.

All of them compute tensors of tensors, without any other effect: none draws random numbers, reads or writes
a file, changes its input, looks at memory outside of it, or has a number of outputs that depends on values.
The types are those of torch's own schemas.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hddm.utils.errors import one_line

_ELEMENTWISE = (
    "abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or "
    "bitwise_xor ceil clamp clamp_max clamp_min clone copysign cos cosh div eq erf erfc exp exp2 expm1 floor "
    "floor_divide fmod frac ge gt hypot isfinite isinf isnan le lerp log log10 log1p log2 logaddexp "
    "logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum mul nan_to_num ne neg pow "
    "reciprocal remainder round rsqrt rsub sigmoid sign sin sinc sinh sqrt square sub tan tanh to _to_copy "
    "true_divide trunc type_as where xlogy complex polar real imag view_as_complex view_as_real"
)
_ACTIVATIONS = (
    "celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid log_softmax "
    "_log_softmax mish prelu relu relu6 selu silu softmax _softmax softplus softshrink threshold dropout"
)
_REDUCTIONS = (
    "all amax amin any argmax argmin argsort cosine_similarity cumprod cumsum linalg_vector_norm logsumexp "
    "max mean min norm prod sort std std_mean sum topk var var_mean"
)
_SHAPES = (
    "alias broadcast_tensors broadcast_to cat channel_shuffle chunk concat constant_pad_nd contiguous detach "
    "diag_embed diagonal expand expand_as flatten flip gather index index_select lift_fresh_copy meshgrid "
    "movedim narrow pad permute pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d repeat "
    "repeat_interleave replication_pad1d replication_pad2d reshape roll rot90 select select_scatter slice "
    "slice_scatter split split_with_sizes squeeze stack swapaxes t tensor_split tile transpose tril triu "
    "unbind unflatten unfold unsqueeze view view_as _unsafe_view im2col col2im"
)
_CONSTANTS = (
    "arange eye full full_like linspace new_full new_ones new_zeros ones ones_like scalar_tensor zeros "
    "zeros_like"
)
_PRODUCTS = (
    "addmm baddbmm bilinear bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "convolution dot einsum embedding linear matmul mm mv outer scaled_dot_product_attention tensordot "
    "_fft_c2c _fft_c2r _fft_r2c fft_fft fft_fft2 fft_fftn fft_fftshift fft_ifft fft_ifft2 fft_ifftn "
    "fft_ifftshift fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn"
)
_LAYERS = (
    "_adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d "
    "batch_norm _native_batch_norm_legit_no_training grid_sampler group_norm instance_norm layer_norm "
    "max_pool1d max_pool2d native_group_norm native_layer_norm rms_norm upsample_bicubic2d "
    "upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d "
    "_upsample_nearest_exact2d _weight_norm"
)
_SIZES = "sym_size sym_numel"
NAMES = frozenset(
    " ".join(
        (
            _ELEMENTWISE,
            _ACTIVATIONS,
            _REDUCTIONS,
            _SHAPES,
            _CONSTANTS,
            _PRODUCTS,
            _LAYERS,
            _SIZES,
        )
    ).split()
)
"""Operators of the namespace aten, whatever the overload."""
CHECKS = frozenset(
    {
        "torch.ops.aten._assert_scalar.default",
        "torch.ops.aten._assert_tensor_metadata.default",
        "torch.ops.aten.sym_constrain_range.default",
        "torch.ops.aten.sym_constrain_range_for_size.default",
    }
)
"""Operators without a result, which torch adds to check what it assumed; hddm leaves them out."""
_ON_SIZES: Mapping[str, Callable[..., Any]] = {
    f"_operator.{one.__name__}": one
    for one in (
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.mod,
        operator.neg,
        operator.eq,
        operator.ne,
        operator.le,
        operator.lt,
        operator.ge,
        operator.gt,
    )
}
"""Arithmetic of sizes."""
_DATA_DEPENDENT = frozenset({("repeat_interleave", "Tensor"), ("repeat_interleave", "self_Tensor")})
_EVALUATING = {"train": False, "training": False, "dropout_p": 0, "use_input_stats": True}
"""Arguments by which an operator would draw random numbers or change its inputs, and their only values."""
_AS_RESHAPE = frozenset({("view", "default"), ("_unsafe_view", "default")})
"""Operators that fail by the order of elements in memory, which is another on each kind of device."""
_PREFIX = "torch.ops.aten."


@dataclass(frozen=True)
class Operator:
    """An operator: the function, and the type of each argument in torch's words."""

    function: Callable[..., Any]
    types: Mapping[str, str]
    required: tuple[str, ...]

    @property
    def is_of_sizes(self) -> bool:
        """True for arithmetic of sizes, which has no schema."""
        return not self.types


def operator_of(target: str) -> Operator | None:
    """The operator that a node's ``target`` names; None for any other."""
    if target in _ON_SIZES:
        return Operator(_ON_SIZES[target], {}, ())
    name, _, overload = target.removeprefix(_PREFIX).partition(".")
    is_listed = target.startswith(_PREFIX) and name in NAMES
    if not is_listed or (name, overload) in _DATA_DEPENDENT:
        return None
    return _of_aten(name, overload)


@functools.cache
def _of_aten(name: str, overload: str) -> Operator | None:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or overload not in packet.overloads():
        return None
    function = getattr(packet, overload)
    schema = function._schema
    if schema.is_mutable:
        return None
    types, required = {}, []
    for argument in schema.arguments:
        types[argument.name] = str(argument.type)
        if not argument.has_default_value():
            required.append(argument.name)
    if (name, overload) in _AS_RESHAPE:
        function = _reshaped
    return Operator(function, types, tuple(required))


def _reshaped(self: Tensor, size: Sequence[int]) -> Tensor:
    return self.reshape(size)


def misuse(found: Operator, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the names and fixed values of an operator's arguments; None if nothing is."""
    if found.is_of_sizes:
        return None
    for name in arguments:
        if name not in found.types:
            return f"has no argument {one_line(name, 40)!r}"
    for name in found.required:
        if name not in arguments:
            return f"lacks its argument {name!r}"
    for name, value in _EVALUATING.items():
        if arguments.get(name, value) != value:
            return f"has {name} {one_line(arguments[name], 40)}, and a program evaluates alone"
    if "use_input_stats" in arguments and arguments.get("running_mean") is not None:
        return "changes its running_mean"
    return None
