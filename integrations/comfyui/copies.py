"""Copies of models, for a mix of one checkpoint with two LoRAs, as a network has one set of weights."""

import copy
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import comfy.model_management

logger = logging.getLogger(__name__)

_copies = weakref.WeakKeyDictionary[Any, list[Any]]()
"""Patchers of copied models, by the patcher whose model was copied; they go with it."""


def has_same_weights(one: Any, other: Any) -> bool:
    """True if two patchers make the same of the model that both hold."""
    return bool(
        one.is_clone(other)
        and one.patches_uuid == other.patches_uuid
        and one.object_patches == other.object_patches
        and one.hook_patches.keys() == other.hook_patches.keys()
        and one.injections.keys() == other.injections.keys()
    )


def with_own_weights(patcher: Any, loaded: Sequence[Any], number: int) -> Any:
    """The same patcher on a copy of its model, for one checkpoint with two different LoRAs.

    The copy is kept with what made the patches, such as a LoRA loader, so that a mix of other weights takes
    and finds it loaded. It is none of those that are ``loaded`` in this mix.
    """
    origin = patcher
    while origin.parent is not None and origin.parent.patches_uuid == origin.patches_uuid:
        origin = origin.parent
    copies = _copies.setdefault(origin, [])
    free = [one for one in copies if not any(one.is_clone(other) for other in loaded)]
    if not free:
        logger.info(
            "hddm: model %d is a checkpoint that is in the mix already; its weights are copied",
            number,
        )
        free = [_copy_of(origin)]
        copies += free
    kept = free[0]
    patcher.model = kept.model
    # What was loaded for a mix that is gone belongs to this one then.
    patcher.parent = kept
    patcher.backup, patcher.hook_backup = kept.backup, kept.hook_backup
    patcher.object_patches_backup = kept.object_patches_backup
    return patcher


def _copy_of(origin: Any) -> Any:
    """A patcher like ``origin`` on a copy of its model."""
    # Loaded weights may hold the patches of the other one.
    comfy.model_management.unload_all_models()
    patcher = origin.clone()
    patcher.model = copy.deepcopy(origin.model)
    patcher.parent = None
    patcher.backup, patcher.object_patches_backup, patcher.hook_backup = {}, {}, {}
    return patcher
