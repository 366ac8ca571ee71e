"""The tests marked ``gpu``, in a process of pytest."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.acceptance.stages import ROOT, Kit
from benchmarks.figures import Result, at_least, at_most, told

ON_CPU = "tests/pipelines/test_on_devices.py"
"""The same tests with another device, which are quick on a CPU."""


def device_tests(kit: Kit) -> Result:
    """Run all tests marked ``gpu``; on a CPU those of `ON_CPU`, whose logic is the same."""
    report = kit.work / "tests.xml"
    chosen = ["-m", "gpu", "tests"] if kit.is_gpu else ["-m", "not gpu and not slow", ON_CPU]
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "cli")))}
    # A report of an earlier start must not speak for one that dies.
    report.unlink(missing_ok=True)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen], cwd=ROOT, env=environment, check=False
    )
    if ended.returncode not in (0, 1) or not report.exists():
        raise RuntimeError(f"pytest ended with {ended.returncode} and tells nothing of the tests")
    passed, failed, skipped = counted(report)
    figures = [
        at_most("tests that fail", len(failed), 0),
        at_least("tests that pass", passed, 1),
        told("tests that are skipped", str(skipped)),
    ]
    notes = [f"fails: {name}" for name in failed]
    return Result(figures, notes, not kit.is_gpu)


def counted(report: Path) -> tuple[int, list[str], int]:
    """Number of tests that pass, names of those that fail, number of those that are skipped."""
    passed, skipped = 0, 0
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped
