"""Parts of a pipeline that visit the device: they come for as long as they are used, and go again."""

import pytest
import torch
from torch import nn

from hddm.experts.loading import ExpertSet
from hddm.pipelines.folders import Offloading, Visit
from tests.ensemble_files import flow_expert, random_router


class Traveller(nn.Module):
    """A part that keeps the places that it was sent to, and stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def to(self, device: torch.device | str) -> "Traveller":  # type: ignore[override]
        self.places.append(str(device))
        return self


def test_a_part_is_on_the_device_inside_the_block_and_on_the_cpu_after() -> None:
    part = Traveller()
    with Visit(part, torch.device("cuda", 1)) as there:
        assert there is part
        assert part.places == ["cuda:1"]
    assert part.places == ["cuda:1", "cpu"]


def test_a_part_leaves_the_device_after_an_error_too() -> None:
    part = Traveller()
    with pytest.raises(ZeroDivisionError), Visit(part, torch.device("cuda")):
        raise ZeroDivisionError
    assert part.places == ["cuda", "cpu"]


def test_a_part_that_has_no_device_to_visit_is_never_moved() -> None:
    part = Traveller()
    with Visit(part, None) as there:
        assert there is part
    assert part.places == []


class Parts(Offloading):
    """What of a pipeline comes and goes."""

    def __init__(self) -> None:
        self.experts = ExpertSet([flow_expert(seed).unread() for seed in range(2)])
        self.router, _ = random_router(2)
        self.vae, self.text_encoder = Traveller(), Traveller()


@pytest.mark.parametrize("method", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloaded_parts_wait_on_the_cpu_until_they_are_used_and_experts_do_not(method: str) -> None:
    parts = Parts()
    with parts.present(parts.vae):
        pass
    assert parts.vae.places == []
    getattr(parts, method)(device="meta")
    assert (parts.vae.places, parts.text_encoder.places) == (["cpu"], ["cpu"])
    with parts.present(parts.vae):
        assert parts.vae.places == ["cpu", "meta"]
    assert (parts.vae.places, parts.text_encoder.places) == (["cpu", "meta", "cpu"], ["cpu"])
    assert parts.experts.device.type == "meta"
    assert {weight.device.type for weight in parts.router.parameters()} == {"meta"}
