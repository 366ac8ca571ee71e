"""Expert folders as sources whose side files are spoilt are refused in one line."""

from pathlib import Path

import pytest

from hddm.experts.records import EXTRAS_FILE, NULL_FILE
from tests.artefacts import Command, seal
from tests.checkpoint_files import converted, dit, pipeline, refused


@pytest.mark.parametrize("name", [NULL_FILE, EXTRAS_FILE])
@pytest.mark.parametrize("content", [b"", b"not tensors at all", bytes(64)], ids=["empty", "text", "zeros"])
def test_a_spoilt_side_file_is_named_on_the_way_back(
    hddm: Command, tmp_path: Path, name: str, content: bytes
) -> None:
    expert = tmp_path / "expert"
    converted(hddm, pipeline(tmp_path / "source", dit()), expert)
    (expert / name).write_bytes(content)
    code, _, error = hddm("convert", expert, "--out", tmp_path / "out", "--to-layout", "diffusers-dit")
    assert (code, name in error) == (1, True)
    seal(expert)
    assert str(expert / name) in refused(hddm, expert, "--to-layout", "diffusers-dit")
