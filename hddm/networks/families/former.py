"""Former names of classes: diffusers had one class, Transformer2DModel, for DiT and PixArt."""

from collections.abc import Mapping
from typing import Any

from hddm.networks.families import families
from hddm.utils.errors import HddmError

_FORMER = "Transformer2DModel"
# Its further keys, with the only values that change nothing.
_INERT: Mapping[str, tuple[Any, ...]] = {
    "num_vector_embeds": (None,),
    "use_linear_projection": (False,),
    "only_cross_attention": (False,),
    "double_self_attention": (False,),
    "attention_type": ("default",),
    "cross_attention_dim": (None,),
    "caption_channels": (None,),
    "interpolation_scale": (None, 1, 1.0),
    "use_additional_conditions": (None, False),
}


def renamed(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """``config`` under the present name of its class, without keys that the class no longer has.

    Such keys must hold a value without effect; raises `HddmError` for any other.
    """
    if config.get("_class_name") != _FORMER:
        return dict(config)
    norm = str(config.get("norm_type"))
    family = next(
        (one for one in families().values() if one.former_norm and one.former_norm == norm), None
    )
    if family is None:
        return dict(config)
    found: dict[str, Any] = {"_class_name": family.name}
    for key, value in config.items():
        if key == "_class_name":
            continue
        if family.has_key(key) or key not in _INERT:
            found[key] = value
        elif value not in _INERT[key]:
            raise HddmError(f"{origin}: {key} is {value!r}, which {family.name} does not support")
    return found
