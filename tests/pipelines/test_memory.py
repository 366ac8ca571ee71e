"""What does not fit the memory is made in parts, and samples stay those of their numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from torch import Tensor

from hddm.networks import vae as vaes
from hddm.networks.transformers import ExpertTransformer
from hddm.networks.vae import decode
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.errors import HddmError
from hddm.utils.memory import Fitting
from tests.artefacts import Command


def _full(rows: int, most: int) -> None:
    """What a device with room for ``most`` rows raises."""
    if rows > most:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


def _limit(monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str, most: int) -> list[int]:
    """Let a method of a network fail for more than ``most`` rows; returns the rows of calls that ran."""
    ran: list[int] = []
    before = getattr(kind, name)

    def limited(self: Any, x: Tensor, *given: Any, **named: Any) -> Any:
        _full(len(x), most)
        ran.append(len(x))
        return before(self, x, *given, **named)

    monkeypatch.setattr(kind, name, limited)
    return ran


@pytest.mark.integration
def test_a_run_goes_on_with_half_the_batch_and_records_it(
    ensemble: Path, hddm: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--num-images", 7, "--steps", 2, "--batch-size", 7, "--output-type", "latent")
    code, _, error = hddm("sample", ensemble, "--out", tmp_path / "whole", *options)
    assert code == 0, error
    ran = _limit(monkeypatch, ExpertTransformer, "forward", 3)
    code, _, error = hddm("sample", ensemble, "--out", tmp_path / "parts", *options)
    assert code == 0, error
    assert max(ran) == 3
    assert error.count("7 images at once do not fit the memory; going on with 3") == 1
    whole, parts = (
        load_file(tmp_path / name / "latents.safetensors") for name in ("whole", "parts")
    )
    torch.testing.assert_close(parts["latents"], whole["latents"], rtol=1e-4, atol=1e-5)
    records = []
    for name in ("whole", "parts"):
        records.append(json.loads((tmp_path / name / "sampling.json").read_text()))
    assert [one["batch_ran"] for one in records] == [7, 3]
    # An attempt that failed counts for nothing.
    assert records[0]["expert_use"] == records[1]["expert_use"]
    assert records[0]["batch_size"] == records[1]["batch_size"] == 7


@pytest.mark.slow
def test_a_pipeline_makes_its_images_in_parts(
    ensemble: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = HDDMPipeline.from_pretrained(ensemble)
    call = {"batch_size": 5, "num_inference_steps": 2, "seed": 0, "output_type": "latent"}
    whole = pipe(**call).images
    _limit(monkeypatch, ExpertTransformer, "forward", 2)
    torch.testing.assert_close(pipe(**call).images, whole, rtol=1e-4, atol=1e-5)
    _limit(monkeypatch, ExpertTransformer, "forward", 0)
    with pytest.raises(HddmError, match="one of the images does not fit the memory") as caught:
        pipe(**call)
    assert "CUDA out of memory" in caught.value.message
    assert "more" not in caught.value.message.partition("(")[2].partition(")")[0]


def _vae(**changes: Any) -> AutoencoderKL:
    torch.manual_seed(0)
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    sizes = {"block_out_channels": (8, 8), "norm_num_groups": 4, "sample_size": 16}
    return AutoencoderKL(**blocks, **sizes, **changes).eval()


def test_a_vae_decodes_as_many_images_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = _vae()
    latents = torch.randn(6, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = decode(vae, latents)
    ran = _limit(monkeypatch, AutoencoderKL, "decode", 4)
    torch.testing.assert_close(decode(vae, latents), whole, rtol=1e-4, atol=1e-5)
    # Pictures of 16×16, of which two may be decoded together.
    monkeypatch.setattr(vaes, "AT_ONCE", 2 * 16 * 16)
    ran.clear()
    torch.testing.assert_close(decode(vae, latents), whole, rtol=1e-4, atol=1e-5)
    assert ran == [2, 2, 2]
    _limit(monkeypatch, AutoencoderKL, "decode", 0)
    with pytest.raises(HddmError, match="one of the images to decode does not fit the memory"):
        decode(vae, latents)


def test_large_images_are_decoded_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = _vae()
    latents = torch.randn(1, 4, 24, 24, generator=torch.Generator().manual_seed(0))
    whole = decode(vae, latents)
    monkeypatch.setattr(vaes, "AT_ONCE", 32 * 32)
    tiled = decode(vae, latents)
    vae.enable_tiling()
    with torch.no_grad():
        expected = vae.decode(latents / vae.config.scaling_factor)[0].clamp(-1, 1)
    torch.testing.assert_close(tiled, expected)
    assert not torch.allclose(tiled, whole)
    # It is left as it was.
    vae.disable_tiling()
    decode(vae, latents)
    assert not vae.use_tiling


def test_other_errors_are_raised_as_they_are() -> None:
    def broken(first: int, end: int) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        Fitting("images").run(3, broken)


def test_later_batches_begin_with_what_fitted() -> None:
    fitting, ran = Fitting("images"), []

    def make(first: int, end: int) -> tuple[int, int]:
        _full(end - first, 3)
        ran.append(end - first)
        return first, end

    assert fitting.run(8, make) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert fitting.run(3, make) == [(0, 2), (2, 3)]
    assert fitting.most == 2
