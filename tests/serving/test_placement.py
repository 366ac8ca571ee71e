"""What the workers of a service ask Ray for, as a function of the cluster and of the user's options."""

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest

from hddm.serving.placement import (
    FRONT,
    FRONTS_PART,
    LEAST,
    Placement,
    gpus_each,
    refuse_lack,
)
from hddm.utils.errors import HddmError, UsageError
from tests.artefacts import refusal

NAMES = ("a", "b", "c")


def asked(placement: Placement, gpus: float, names: Sequence[str] = NAMES) -> list[float]:
    """GPUs of each worker, and those of the front last."""
    found = placement.of_all(names, gpus)
    listed = []
    for name in names:
        listed += [found[name]["num_gpus"]] * placement.copies(name)
    return [*listed, found[FRONT]["num_gpus"]]


@pytest.mark.parametrize(
    ("gpus", "replicas", "each", "front"),
    [
        (0, {}, 0, 0),
        (1, {}, 0.33, FRONTS_PART),
        # Two on one GPU of two, since a part lies on one alone: three of 2/3 would not fit.
        (2, {}, 0.495, FRONTS_PART),
        # So little less than one that the front fits.
        (3, {}, 0.99, FRONTS_PART),
        (4, {}, 1, FRONTS_PART),
        (2, {"": 2}, 0.33, FRONTS_PART),
        (2, {"b": 5}, 0.2475, FRONTS_PART),
        # Ray counts in steps of 0.0001.
        (1, {"": 7}, 0.0471, FRONTS_PART),
    ],
)
def test_gpus_are_shared_out_evenly(
    gpus: float, replicas: Mapping[str, int], each: float, front: float
) -> None:
    *workers, last = asked(Placement(replicas), gpus)
    assert workers == [each] * len(workers)
    assert last == front


@pytest.mark.parametrize(
    ("gpus", "resources", "found"),
    [
        # What the user says holds, and the front's GPU is left out if there is no room.
        (3, {"": {"num_gpus": 1}}, [1, 1, 1, 0]),
        (4, {"": {"num_gpus": 1}}, [1, 1, 1, FRONTS_PART]),
        (2, {"": {"num_gpus": 0}}, [0, 0, 0, FRONTS_PART]),
        (3, {FRONT: {"num_gpus": 0}}, [1, 1, 1, 0]),
        (2, {FRONT: {"num_gpus": 1}}, [0.3333, 0.3333, 0.3333, 1]),
        (2, {"a": {"num_gpus": 1}}, [1, 0.495, 0.495, FRONTS_PART]),
        (1, {"a": {"num_gpus": 0.5}}, [0.5, 0.245, 0.245, FRONTS_PART]),
        (0, {"": {"num_cpus": 2}}, [0, 0, 0, 0]),
        # A part lies in the rest of one GPU, whatever is left of all together.
        (2, {"a": {"num_gpus": 0.6}, "b": {"num_gpus": 0.6}}, [0.6, 0.6, 0.39, FRONTS_PART]),
        (2, {"a": {"num_gpus": 0.7}}, [0.7, 0.495, 0.495, FRONTS_PART]),
        (3, {"a": {"num_gpus": 0.5}}, [0.5, 0.99, 0.99, FRONTS_PART]),
        (3, {"a": {"num_gpus": 0.2}, "b": {"num_gpus": 2}}, [0.2, 2, 0.79, FRONTS_PART]),
    ],
)
def test_what_the_user_asks_for_is_taken_off_first(
    gpus: float, resources: Mapping[str, Mapping[str, float]], found: Sequence[float]
) -> None:
    assert asked(Placement({}, resources), gpus) == found


def test_shares_by_default_fit_every_cluster_in_every_order_and_are_what_ray_takes() -> None:
    """No GPU has more than ceil(W / G) workers, whichever Ray fills first, and the front has room."""
    for gpus in range(1, 9):
        for workers in range(1, 40):
            each = gpus_each(gpus, [], workers, FRONTS_PART)
            assert each == 1 or each < 1
            assert math.isclose(each / LEAST, round(each / LEAST))
            most = math.ceil(workers / gpus)
            assert (most + 1) * each > 1
            assert most * each + (FRONTS_PART if workers >= gpus else 0) <= 1 + 1e-9
            needed = [{"num_gpus": one} for one in (FRONTS_PART, *[each] * workers)]
            refuse_lack({"GPU": gpus}, needed)


def test_what_is_open_fits_beside_every_part_that_the_user_asks_for() -> None:
    """Wherever given parts leave a tenth of a GPU, others share it, and the front has room."""
    for gpus, others in itertools.product(range(1, 5), range(1, 5)):
        for tenths in itertools.combinations_with_replacement(range(10), 3):
            resources = {}
            for name, one in zip(NAMES, tenths, strict=True):
                resources[name] = {"num_gpus": one / 10}
            given = [{"num_gpus": one / 10} for one in tenths]
            try:
                refuse_lack({"GPU": gpus}, given)
            except HddmError:
                continue
            if sum(tenths) == 10 * gpus:
                continue
            found = Placement({"d": others}, resources).of_all([*NAMES, "d"], gpus)
            assert 0 < found["d"]["num_gpus"] <= 1
            needed = [found[name] for name in NAMES] + [found["d"]] * others
            refuse_lack({"GPU": gpus, "CPU": 99}, [*needed, found[FRONT]])
            assert found[FRONT]["num_gpus"] == FRONTS_PART


def test_what_a_cluster_cannot_give_is_refused_in_one_line() -> None:
    def lack(gpus: float, resources: Mapping[str, Mapping[str, float]]) -> str:
        found = Placement({}, resources).of_all(NAMES, gpus)
        return refusal(refuse_lack, {"GPU": gpus, "CPU": 9}, list(found.values()))

    assert "need 3 GPU, and the cluster has 2" in lack(2, {"": {"num_gpus": 1}})
    # Nothing is left for the others, which ask for one each.
    assert "need 3 GPU, and the cluster has 1" in lack(1, {"a": {"num_gpus": 1}})
    told = lack(2, {"": {"num_gpus": 0.6}})
    assert "need 0.6, 0.6, 0.6 GPU, and a part lies on one GPU alone" in told
    assert "need 4 big, and the cluster has 0" in lack(0, {"a": {"big": 4}})


@pytest.mark.parametrize("gpus", [1.5, 0.00001, 2.0001])
def test_parts_that_ray_does_not_give_are_refused(gpus: float) -> None:
    with pytest.raises(UsageError, match="must be a whole number, or a part of one GPU"):
        Placement({}, {"a": {"num_gpus": gpus}}).check(NAMES)


@pytest.mark.parametrize("gpus", [0, 0.0001, 0.5, 1, 4])
def test_parts_that_ray_gives_are_accepted(gpus: float) -> None:
    Placement({}, {"": {"num_gpus": gpus}, FRONT: {"num_gpus": gpus}}).check(NAMES)
