"""Configs that ask for code or declare what is not there are refused in one line, with nothing written."""

from pathlib import Path
from typing import Any

import pytest

from tests.artefacts import Command, copied, edit_json
from tests.checkpoint_files import dit, pipeline, refused, text_unet

CONFIG, UNET, SCHEDULER = "transformer/config.json", "unet/config.json", "scheduler/scheduler_config.json"
PIPELINE = "model_index.json"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A class-conditional transformer, and a UNet that takes text."""
    root = tmp_path_factory.mktemp("sources")
    return pipeline(root / "dit", dit()), pipeline(root / "text", text_unet())


# A value for every key that a config must not have, or not hold in that form.
CHANGES: list[tuple[str, dict[str, Any], str]] = [
    (CONFIG, {"auto_map": {"AutoModel": "evil.Model"}}, "'auto_map'"),
    (CONFIG, {"_attn_implementation_internal": "evil/kernel"}, "'_attn_implementation_internal'"),
    (CONFIG, {"num_layer": 2}, "did you mean 'num_layers'"),
    (CONFIG, {"_class_name": "subprocess.Popen"}, "holds a subprocess.Popen"),
    (CONFIG, {"_class_name": ["a"]}, "holds a"),
    (CONFIG, {"num_layers": 10**9}, "depth is 1000000000"),
    (CONFIG, {"num_layers": -1}, ""),
    (CONFIG, {"num_layers": "2"}, ""),
    (CONFIG, {"sample_size": 10**9}, ""),
    (CONFIG, {"sample_size": -8}, ""),
    (CONFIG, {"attention_head_dim": 10**9}, ""),
    (CONFIG, {"num_embeds_ada_norm": 10**12}, ""),
    (CONFIG, {"patch_size": 10**6}, ""),
    (CONFIG, {"in_channels": 9}, ""),
    (CONFIG, {"out_channels": 3}, ""),
    (UNET, {"cross_attention_dim": 10**9}, ""),
    (UNET, {"sample_size": [8, 10**9]}, ""),
    (UNET, {"block_out_channels": [10**9, 64]}, ""),
    (UNET, {"block_out_channels": [32] * 10**4}, ""),
    (UNET, {"layers_per_block": 10**9}, ""),
    (UNET, {"transformer_layers_per_block": [[10**9], 1]}, ""),
    (UNET, {"attention_head_dim": 0}, ""),
    (UNET, {"class_embed_type": "projection"}, ""),
    (UNET, {"encoder_hid_dim_type": "image_proj"}, ""),
    (PIPELINE, {"custom_pipeline": "evil"}, "'custom_pipeline'"),
    (PIPELINE, {"transformer": ["evil.module", "DiTTransformer2DModel"]}, "not a class of diffusers"),
    (PIPELINE, {"scheduler": ["os", "system"]}, "not a class of diffusers"),
    (PIPELINE, {"vae": ["evil", "AutoencoderKL"]}, "not a class of diffusers"),
    (PIPELINE, {"transformer": None}, "needs one of"),
    (PIPELINE, {"transformer": ["diffusers", ["a"]]}, ""),
    (PIPELINE, {"unet": ["diffusers", "UNet2DModel"]}, "needs one of"),
    (SCHEDULER, {"num_train_timesteps": 10**12}, "num_train_timesteps"),
    (SCHEDULER, {"beta_schedul": "linear"}, "did you mean 'beta_schedule'"),
    (SCHEDULER, {"beta_schedule": "evil"}, "evil"),
    (SCHEDULER, {"beta_start": "a"}, "no schedule"),
    (SCHEDULER, {"beta_end": 7.0}, "betas"),
    (SCHEDULER, {"_class_name": "evil.Scheduler"}, "evil.Scheduler"),
    (SCHEDULER, {"prediction_type": "noise"}, "'noise'"),
    (SCHEDULER, {"prediction_type": ["epsilon"]}, "prediction type"),
    (SCHEDULER, {"prediction_type": "v_prediction", "predict_epsilon": True}, "contradicts itself"),
    (SCHEDULER, {"prediction_type": "sample", "use_flow_sigmas": True}, "contradicts itself"),
]


@pytest.mark.parametrize(("file", "changes", "said"), CHANGES, ids=lambda value: str(value)[:40])
def test_configs_that_lie_or_ask_for_code(
    hddm: Command, tmp_path: Path, sources: tuple[Path, Path], file: str, changes: dict[str, Any], said: str
) -> None:
    transformer, unet = sources
    source = copied(unet if file == UNET else transformer, tmp_path)
    edit_json(source / file, **changes)
    error = refused(hddm, source)
    assert said in error
    assert source.name in error


def test_a_unet_for_inpainting_is_no_plain_denoiser(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "inpainting", text_unet(in_channels=9, out_channels=4))
    assert "takes 9 channels and gives 4" in refused(hddm, source)
