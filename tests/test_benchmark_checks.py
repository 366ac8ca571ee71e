"""What a model cannot be sampled for is refused before anything is trained."""

from pathlib import Path
from typing import Any

import pytest

from hddm.assembly import assemble
from hddm.benchmark.checks import check_rows
from hddm.benchmark.schema import BenchmarkSettings
from hddm.errors import HddmError
from hddm.training.continuation import continue_expert
from tests.artefacts import expert_settings
from tests.benchmark_files import Finished, run_inline, settings

OWN = "own DDIM sampler"


def _asking(model: dict[str, Any], **point: object) -> BenchmarkSettings:
    named = {"name": "mine", **model}
    tables = [{"name": "models", "base": point}]
    return settings(models=[named], compare={}, tables=tables)


def _finished(path: Path, **point: object) -> BenchmarkSettings:
    return _asking({"kind": "finished", "path": str(path)}, **point)


@pytest.mark.parametrize(
    "model",
    [
        {"objectives": "flow"},
        {"objectives": "1:1"},
        {"objectives": "by-error"},
        {"objectives": "flow", "converted": 0.5},
        {"blended": 0.5},
        {"kind": "single", "objectives": "ddpm"},
        {"objectives": "ddpm", "training": {"class_conditional": True}},
    ],
)
def test_the_own_sampler_is_for_experts_that_predict_noise(model: dict[str, Any]) -> None:
    with pytest.raises(HddmError, match=r"^table 'models': conversion 'own DDIM sampler' .* model 'mine'"):
        check_rows(_asking(model, conversion=OWN))
    check_rows(_asking(model))


def test_the_own_sampler_takes_ddpm_ensembles(ddpm_expert: Path, tmp_path: Path) -> None:
    check_rows(_asking({"objectives": "ddpm"}, conversion=OWN))
    assemble([ddpm_expert], tmp_path / "ensemble", None, "draw")
    check_rows(_finished(tmp_path / "ensemble", conversion=OWN))


def test_a_finished_model_has_its_own_sampler_where_all_of_it_predicts_noise_still(
    ensemble: Path, ddpm_expert: Path, shards: Path, tmp_path: Path
) -> None:
    continue_expert(ddpm_expert, shards / "shard_1", tmp_path / "expert", expert_settings("flow"))
    assemble([tmp_path / "expert"], tmp_path / "converted", None, "draw")
    for path in (ensemble, ddpm_expert, tmp_path / "converted"):
        with pytest.raises(HddmError, match="name such models in the table"):
            check_rows(_finished(path, conversion=OWN))


def test_a_benchmark_that_asks_for_too_much_leaves_no_trace(miniature: Finished, tmp_path: Path) -> None:
    with pytest.raises(HddmError, match="name such models in the table"):
        run_inline(_asking({}, conversion=OWN), tmp_path / "out", miniature.data)
    assert not (tmp_path / "out").exists()
