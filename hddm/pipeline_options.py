"""Keywords of diffusers' loaders that a pipeline of hddm has no use for."""

from collections.abc import Collection, Mapping
from typing import Any

from hddm.errors import HddmError

LOADING: Mapping[str, Collection[object]] = {
    "local_files_only": (True, False, None),
    "use_safetensors": (True, None),
    "low_cpu_mem_usage": (True, False, None),
    "trust_remote_code": (False, None),
    "variant": (None,),
    "device_map": (None,),
    "safety_checker": (None,),
}
"""Values that ask for what is done anyway."""
SAVING: Mapping[str, Collection[object]] = {"safe_serialization": (True, None), "variant": (None,)}


def refuse_options(call: str, options: Mapping[str, Any], harmless: Mapping[str, Collection[object]]) -> None:
    """Refuse keywords that would change something which hddm does in one way only.

    Raises:
        HddmError: with the first of them.
    """
    for name, value in options.items():
        if not any(value is one for one in harmless.get(name, ())):
            known = "; nothing but a local folder of safetensors is read or written, and no code of it runs"
            raise HddmError(f"{call}({name}={value!r}) is not supported{known}")
