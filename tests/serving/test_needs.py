"""What --dry-run says of a service."""

from pathlib import Path

import pytest

from hddm.experts.loading import load
from hddm.serving.needs import needs_of_service
from hddm.serving.service import Placement
from hddm.settings import ServeSettings
from hddm.utils.errors import HddmError
from tests.artefacts import Command

pytestmark = pytest.mark.integration


def test_a_worker_holds_one_expert_and_the_front_the_router(ensemble: Path) -> None:
    placement = Placement({"": 2, "flow": 3})
    needs, lines = needs_of_service(ensemble, ServeSettings(), placement)
    assert [one.what for one in needs] == [
        "a worker of ddpm (2 workers)",
        "a worker of flow (3 workers)",
        "front",
    ]
    whole = load(ensemble)
    for one, field in zip(needs, whole.experts, strict=False):
        networks = [field.network] if field.weak is None else [field.network, field.weak.network]
        parameters = [p for network in networks for p in network.parameters()]
        assert one.memory[0].size == sum(p.numel() * p.element_size() for p in parameters)
        assert all(part.seconds for part in one.work)
    router = sum(p.numel() * p.element_size() for p in whole.router.network.parameters())
    assert next(one.size for one in needs[-1].memory if one.name == "router") == router
    memory = [one.on_device for one in needs]
    assert 2 * memory[0] + 3 * memory[1] + memory[2] > 5e8
    assert lines[0].startswith("all processes together: about ")


def test_workers_elsewhere_are_not_measured_and_their_weights_are_known(ensemble: Path) -> None:
    needs, lines = needs_of_service(ensemble, ServeSettings(), Placement(), "ray://cluster:10001")
    assert lines == []
    for one in needs[:-1]:
        assert one.memory[0].size
        assert one.memory[-1].size is None
        said = "\n".join(one.lines())
        assert "not measured     the workers run on other machines" in said
        assert "whether it fits: not measured" in said
        assert " 0 s" not in said


def test_unknown_names_are_refused_as_by_the_service(ensemble: Path) -> None:
    with pytest.raises(HddmError, match="`num_replicas` flaw"):
        needs_of_service(ensemble, ServeSettings(), Placement({"flaw": 2}))


def test_a_dry_run_starts_nothing(hddm: Command, ensemble: Path) -> None:
    code, said, told = hddm("serve", ensemble, "--batch-size", 2, "--dry-run")
    assert code == 0, told
    assert "a call of" in said
    assert "dry run: nothing is written" in said
