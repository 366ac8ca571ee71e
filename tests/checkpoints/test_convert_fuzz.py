"""Sources that are changed at random become experts or are refused; nothing else ever happens."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import Conversion, plan
from hddm.utils.errors import HddmError
from tests.checkpoint_files import dit, pipeline, pixart, plain_unet, text_unet

ODD: list[Any] = [None, True, False, 0, -1, 1, 2, 3, 7, 10**9, 10**18, -(10**12), 10**400, 0.5, 1e30]
ODD += [math.nan, math.inf, "", "a", "../a", "/etc/passwd", "linear", "v_prediction", "flow_prediction"]
ODD += [[], [1], [[1], [2]], [None], [2, 2], [10**9] * 2, ["os", "system"], ["diffusers", "UNet2DModel"]]
ODD += [{}, {"a": 1}, {"a": "b"}, {"_class_name": "DDPMScheduler"}]
# A copy each, since a second change may reach into the value of the first.
VALUES = st.sampled_from(ODD).map(copy.deepcopy)
NEW = ["auto_map", "name", "betas", "trained_betas", "_class_name", "num_layers", "class_embed_type", "self"]
LENIENT = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("sources")
    return [
        pipeline(root / "dit", dit(), max_shard_size="10KB"),
        pipeline(root / "pixart", pixart()),
        pipeline(root / "unet", plain_unet()),
        pipeline(root / "text", text_unet()),
    ]


def _try(source: Path, tmp_path: Path, writes: bool) -> None:
    out, said = tmp_path / "out", ""
    try:
        planned = plan(source, Conversion(allow_pickle=True))
        if writes:
            write(planned, out)
    except HddmError as error:
        said = str(error)
    assert "\n" not in said
    assert not (said and out.exists())
    shutil.rmtree(out, ignore_errors=True)


def _fresh(source: Path, tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "source", ignore_errors=True)
    return Path(shutil.copytree(source, tmp_path / "source"))


def _places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, inner in items:
        found += [(*above, key), *_places(inner, (*above, key))]
    return found


@settings(LENIENT, max_examples=70)
@given(data=st.data())
def test_json_that_is_changed_at_random(sources: list[Path], tmp_path: Path, data: st.DataObject) -> None:
    source = _fresh(data.draw(st.sampled_from(sources)), tmp_path)
    file = data.draw(st.sampled_from(sorted(source.rglob("*.json"))))
    content = json.loads(file.read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(_places(content) or [()]))
        if not place:
            break
        holder: Any = content
        for key in place[:-1]:
            holder = holder[key]
        action = data.draw(st.sampled_from(["replace", "replace", "replace", "delete", "add"]))
        if action == "replace":
            holder[place[-1]] = data.draw(VALUES)
        elif action == "delete":
            del holder[place[-1]]
        elif isinstance(holder, dict):
            holder[data.draw(st.sampled_from(NEW))] = data.draw(VALUES)
    if data.draw(st.integers(0, 30)) == 0:
        content = data.draw(VALUES)
    file.write_text(json.dumps(content))
    _try(source, tmp_path, data.draw(st.booleans()))


@settings(LENIENT, max_examples=60)
@given(data=st.data())
def test_bytes_that_are_changed_at_random(sources: list[Path], tmp_path: Path, data: st.DataObject) -> None:
    source = _fresh(data.draw(st.sampled_from(sources[:2])), tmp_path)
    file = data.draw(st.sampled_from(sorted(p for p in source.rglob("*") if p.is_file())))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # The header is where the bytes mean most.
        place = data.draw(
            st.integers(0, min(len(content), data.draw(st.sampled_from([16, 2000, 10**9]))) - 1)
        )
        content[place] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content), len(content) // 2]))])
    _try(source, tmp_path, data.draw(st.booleans()))
