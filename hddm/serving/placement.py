"""Where the workers of a service run: how many there are of each expert, and what each asks Ray for."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hddm.settings import ServeSettings
from hddm.utils.errors import HddmError, UsageError, choose

FRONT = "front"
GPUS = ("auto", "cuda")
"""Devices for which workers ask Ray for GPUs."""
LEAST = 1e-4
"""The smallest part of a GPU that Ray gives; others are multiples."""
FRONTS_PART = 0.01
"""Part of a GPU that the front asks for, to run on one; its memory is not bounded by it."""
ROUNDING = 1e-6


@dataclass(frozen=True)
class Placement:
    """Number of workers per expert, and resources per worker; keys are names, "" stands for all experts."""

    replicas: Mapping[str, int] = field(default_factory=dict)
    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By their names in Ray: ``num_cpus``, ``num_gpus``, ``memory``, or the user's own."""

    def check(self, names: Sequence[str]) -> None:
        """Raise a `UsageError` for an expert that is not among ``names``.

        Also for numbers of GPUs that Ray does not give: it gives whole ones, or a part of one.
        """
        known = {"`num_replicas`": list(names), "`resources`": [*names, FRONT]}
        for option, given in zip(known, (self.replicas, self.resources), strict=True):
            for name in given:
                if name and name not in known[option]:
                    raise UsageError(f"{option} {name}: {choose(name, known[option])}")
        for name, resources in self.resources.items():
            gpus = resources.get("num_gpus", 0.0)
            is_part = LEAST <= gpus < 1
            if not is_part and gpus != int(gpus):
                of = f"{name}:" if name else ""
                raise UsageError(
                    f"`resources` {of}num_gpus={gpus:g}: must be a whole number, or a part of one GPU from "
                    f"{LEAST:g} on, such as 0.5"
                )

    def copies(self, name: str) -> int:
        """Number of an expert's workers."""
        return self.replicas.get(name, self.replicas.get("", 1))

    def processes(self, names: Sequence[str]) -> list[str]:
        """The name of each process: once for each worker of these experts, and last the front."""
        found = []
        for name in names:
            found += [name] * self.copies(name)
        return [*found, FRONT]

    def asked(self, name: str) -> dict[str, float]:
        """What the user wants for each worker of an expert, or for the front."""
        shared = {} if name == FRONT else self.resources.get("", {})
        return {**shared, **self.resources.get(name, {})}

    def of_all(self, names: Sequence[str], gpus: float) -> dict[str, dict[str, float]]:
        """Resources of each worker of these experts, and of the front, by name.

        Where the user does not say otherwise, the ``gpus`` of the cluster are shared out evenly
        (`gpus_each`), and the front takes a part of one if there is room.
        """
        given, workers = list[float](), 0
        for name in names:
            asked = self.asked(name).get("num_gpus")
            if asked is None:
                workers += self.copies(name)
            else:
                given += [asked] * self.copies(name)
        fronts = self.asked(FRONT).get("num_gpus")
        given.append(fronts or 0.0)
        each = 0.0
        if gpus:
            beside = FRONTS_PART if fronts is None else 0.0
            each = gpus_each(gpus, given, workers, beside)
        found = {}
        parts = [FRONTS_PART]
        for name in names:
            found[name] = {"num_cpus": 1.0, "num_gpus": each, **self.asked(name)}
            parts += [found[name]["num_gpus"]] * self.copies(name)
        part = FRONTS_PART if _rests(gpus, parts) is not None else 0.0
        found[FRONT] = {"num_cpus": 1.0, "num_gpus": part, **self.asked(FRONT)}
        return found


def settings_for(settings: ServeSettings, resources: Mapping[str, float]) -> ServeSettings:
    """Settings of a process with these ``resources``: it runs on a CPU where it got no GPU.

    Ray shows such a process all GPUs of its machine, which others have been given.
    """
    has_gpu = resources.get("num_gpus", 0.0) > 0
    if has_gpu or settings.device not in GPUS:
        return settings
    return settings.model_copy(update={"device": "cpu"})


def gpus_each(gpus: float, given: Sequence[float], workers: int, beside: float = 0.0) -> float:
    """GPUs that each of ``workers`` asks for: one, or a part of one where they are too few.

    A part lies on one GPU, in what parts that are ``given`` leave of it. Each is as large as it can be so
    that all find room, and beside them on every GPU a part ``beside``. With G free GPUs, ceil(W / G) workers
    share one, and it has no room for one more, which would leave another GPU idle. If there is nothing to
    share out, each asks for one, which `refuse_lack` refuses.
    """
    free = _rests(gpus, given) or []
    whole = sum(rest >= 1 - ROUNDING for rest in free)
    if not workers or whole > workers or (whole == workers and not beside):
        return 1.0
    candidates = set[int]()
    for rest in free:
        steps = math.floor((rest - beside) / LEAST + ROUNDING)
        # More than the workers, where given parts come to lie between them.
        for number in range(1, workers + len(given) + 1):
            candidates.add(steps // number)
    for steps in sorted(candidates, reverse=True):
        part = round(steps * LEAST, 4)
        if part > 0 and _rests(gpus, [*given, *[part] * workers, beside]) is not None:
            return part
    return 1.0


def refuse_lack(there: Mapping[str, float], needed: Sequence[Mapping[str, float]]) -> None:
    """Raise an `HddmError` if a cluster lacks a resource that all workers together need."""
    total = Counter[str]()
    for resources in needed:
        total.update(resources)
    for key, value in total.items():
        name = {"num_cpus": "CPU", "num_gpus": "GPU"}.get(key, key)
        if value > there.get(name, 0) + ROUNDING:
            lack = f"the workers need {value:g} {name}, and the cluster has {there.get(name, 0):g}"
            raise HddmError(f"`resources`: {lack}; request less, or add machines")
    parts = [resources.get("num_gpus", 0.0) for resources in needed]
    if _rests(there.get("GPU", 0), parts) is None:
        listed = ", ".join(f"{one:g}" for one in parts if one)
        raise HddmError(
            f"`resources`: the workers need {listed} GPU, and a part lies on one GPU alone, so these do not "
            f"fit on {there.get('GPU', 0):g}; request less, or add machines"
        )


def _rests(gpus: float, parts: Sequence[float]) -> list[float] | None:
    """What is left of each GPU beside these ``parts`` of GPUs, or whole ones; None if they find no room."""
    placed = placed_on(gpus, parts)
    if placed is None:
        return None
    free = [1.0] * int(gpus)
    for part, places in zip(parts, placed, strict=True):
        for k in places:
            free[k] -= min(part, 1.0)
    return free


def placed_on(gpus: float, parts: Sequence[float]) -> list[list[int]] | None:
    """The GPUs of workers that ask for these ``parts``, or whole ones; None if they find no room.

    The largest come first, and each part lies on the fullest GPU that has room for it, as Ray has it.
    """
    free = [1.0] * int(gpus)
    found: list[list[int]] = [[] for _ in parts]
    for place in sorted(range(len(parts)), key=lambda one: parts[one], reverse=True):
        part = parts[place]
        share, count = (part, 1) if part < 1 else (1.0, int(part))
        rooms = [k for k, left in enumerate(free) if left + ROUNDING >= share]
        if not part:
            continue
        if len(rooms) < count:
            return None
        rooms.sort(key=lambda k: free[k])
        for k in rooms[:count]:
            free[k] -= share
        found[place] = rooms[:count]
    return found
