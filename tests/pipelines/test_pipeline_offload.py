"""Parts of a pipeline that visit the device: they come for as long as they are used, and go again."""

import pytest
import torch
from torch import nn

from hddm.experts.expert_set import ExpertSet
from hddm.pipelines.parts import Offloading
from tests.ensemble_files import flow_expert, random_router


class Traveller(nn.Module):
    """A part that keeps the places that it was sent to, and stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def to(self, device: torch.device | str) -> "Traveller":  # type: ignore[override]
        self.places.append(str(device))
        return self


class Parts(Offloading):
    """What of a pipeline comes and goes."""

    def __init__(self) -> None:
        self.experts = ExpertSet([flow_expert(seed) for seed in range(2)])
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
    with pytest.raises(ZeroDivisionError), parts.present(parts.vae):
        raise ZeroDivisionError
    assert parts.vae.places[-2:] == ["meta", "cpu"]
