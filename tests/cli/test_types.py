"""Types of the public functions, as a user's mypy sees them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.stubs import STUB, stub

RIGHT = """
from pathlib import Path
import hddm

hddm.partition("photos", "parts", 4, held_out=0.1, classes=[("cat", "dog")])
hddm.train("parts/shard_0", Path("expert"), objective="flow", steps=100, noise_range=(0.5, 1.0))
hddm.convert("checkpoint", "expert", weights="ema", noise_range="0.5:1", dry_run=True)
hddm.assemble(["a", Path("b")], "whole", strategy="draw", share={"a": 0.3})
score: str = repr(hddm.evaluate("samples", "photos", brief=True))
hddm.sample_to_folder("whole", "samples", prompts=["a cat"], guidance_interval=(0.1, 0.8), max_memory="6GB")
"""
WRONG = """
import hddm

hddm.partition("photos", "parts", "4")  # arg-type
hddm.train("parts/shard_0", "expert", objective="flows", steps=100)  # arg-type
hddm.train("parts/shard_0", "expert", objective="flow", nsteps=100)  # call-arg
hddm.convert("checkpoint", "expert", weight="ema")  # call-arg
hddm.assemble("a", "whole", diffusers_pipeline="yes")  # arg-type
hddm.evaluate("samples", "photos", held_out=3)  # arg-type
hddm.sample_to_folder("whole", "samples", solver="dpm")  # arg-type
"""


def test_the_stub_is_what_the_records_say() -> None:
    assert STUB.read_text(encoding="utf-8") == stub(), "run python -m benchmarks.stubs"


def _checked(text: str, folder: Path) -> list[tuple[int, str]]:
    """Lines and codes of mypy's errors in a program."""
    file = folder / "program.py"
    file.write_text(text, encoding="utf-8")
    # The stub alone is read, and not torch, which takes minutes.
    options = ["--follow-imports=skip", "--config-file=", "--cache-dir=/dev/null"]
    command = [sys.executable, "-m", "mypy", *options, str(file), str(STUB)]
    made = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    found = re.findall(
        rf"^{re.escape(file.name)}:(\d+): error: .*\[([a-z-]+)\]$", made.stdout, re.MULTILINE
    )
    assert made.returncode in (0, 1), made.stderr
    return [(int(line), code) for line, code in found]


@pytest.mark.integration
def test_a_wrong_keyword_or_value_is_an_error_of_mypy_and_a_right_one_is_not(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mypy", reason="a tool of developers")
    assert _checked(RIGHT, tmp_path) == []
    lines = enumerate(WRONG.splitlines(), start=1)
    assert _checked(WRONG, tmp_path) == [
        (k, line.split("# ")[1]) for k, line in lines if "# " in line
    ]
