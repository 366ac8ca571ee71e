"""DiTs of diffusers that change their architecture: what their class fills in, and what cannot be changed."""

import json
from pathlib import Path

import pytest
from diffusers import DiTTransformer2DModel

from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import Conversion, plan
from tests.artefacts import Command, edit_json
from tests.checkpoint_files import dit, pipeline, refused

CONFIG = "transformer/config.json"
DEFAULTS = {"num_attention_heads": 16, "in_channels": 4, "patch_size": 2, "num_embeds_ada_norm": 1000}


def _source(folder: Path, **changes: object) -> Path:
    """A pipeline whose blocks share their embedders, as in released DiTs."""
    network = dit(**{"attention_head_dim": 2, "sample_size": 32, **changes})
    assert isinstance(network, DiTTransformer2DModel)
    first = network.transformer_blocks[0].norm1.emb.state_dict()
    for block in network.transformer_blocks:
        block.norm1.emb.load_state_dict(first)
    return pipeline(folder, network)


@pytest.mark.parametrize("conversion", [Conversion(text_dim=12), Conversion(architecture="adaln-single")])
def test_what_a_config_leaves_to_its_class_is_the_classs(conversion: Conversion, tmp_path: Path) -> None:
    """Written networks are compared with their sources."""
    source = _source(tmp_path / "source", **DEFAULTS)
    path = source / CONFIG
    stated = json.loads(path.read_text())
    left_out = [*DEFAULTS, "sample_size", "norm_eps", "attention_bias", "activation_fn", "norm_type"]
    path.write_text(json.dumps({key: value for key, value in stated.items() if key not in left_out}))
    write(plan(source, conversion), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    names = ("num_heads", "in_channels", "patch_size", "num_classes", "sample_size", "depth")
    assert [config[name] for name in names] == [16, 4, 2, 1000, 32, 2]


@pytest.mark.parametrize("option", [("--architecture", "adaln-single"), ("--text-dim", 12)])
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
def test_another_activation_is_not_read_as_dits(
    activation: str, option: tuple[object, ...], hddm: Command, tmp_path: Path
) -> None:
    source = _source(tmp_path / "source", activation_fn=activation)
    said = refused(hddm, source, *option)
    assert f"activation_fn is '{activation}'" in said
    assert "'gelu-approximate' only" in said


def test_no_activation_can_be_slipped_in(hddm: Command, tmp_path: Path) -> None:
    source = _source(tmp_path / "source")
    edit_json(source / CONFIG, activation_fn="gelu")
    assert "activation_fn is 'gelu'" in refused(hddm, source, "--architecture", "adaln-single")


def test_embedders_that_differ_by_block_are_named_as_the_limit(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "source", dit())
    said = refused(hddm, source, "--architecture", "adaln-single")
    assert "embedders that differ by block" in said
    assert "transformer_blocks.1.norm1.emb" in said
