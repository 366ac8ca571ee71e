"""Files for clusters that people copy: what the guide shows, and what hddm accepts and answers."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.slurm.cluster import DAEMONS
from hddm.training.settings import ExpertSettings, settings_of
from hddm.utils.processes import SIGNALS
from hddm_cli import options
from hddm_cli.app import tree

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "clusters.md").read_text()
FILES = sorted(path for path in (ROOT / "integrations" / "clusters").iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".sbatch"]
SAVED = [128 + signal.SIGUSR1, 128 + signal.SIGTERM]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_guide_shows_each_file_as_it_is(path: Path) -> None:
    shown = re.findall(rf"`{re.escape(path.name)}`[^`]*?```\w+\n(.*?)```$", GUIDE, re.M | re.S)
    assert path.read_text() in shown


def _commands(path: Path) -> list[list[str]]:
    """Commands of hddm in a file, with values in place of a shell's variables and patterns."""
    text = re.sub(r"\$\{?\w+\}?|\+\(\[0-9\]\)", "0", path.read_text())
    # A line of YAML, or of Python, goes on below.
    text = re.sub(r"\n +--", " --", text)
    return [
        shlex.split(line)[1:] for line in re.findall(r"(?<=\b)hddm (?:train|assemble) .*", text)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_their_commands_are_accepted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda *_, **__: True)
    monkeypatch.setattr(options, "check_absent", lambda *_: None)
    monkeypatch.setattr(
        "hddm.training.settings.read_yaml", lambda _: {"objective": "flow", "steps": 1}
    )
    found = _commands(path)
    if path.suffix == ".py":
        (listed,) = re.findall(r'\["hddm", (.*?)\]', path.read_text())
        found = [[word.strip(' "') for word in listed.split(",")]]
    assert found
    for words in found:
        command = tree()
        while known := getattr(command, "commands", None):
            command = known[words.pop(0)]
        command.make_context("hddm", words)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_shell_reads_the_scripts(path: Path) -> None:
    subprocess.run(["bash", "-O", "extglob", "-n", path], check=True)


def test_the_codes_that_they_know_are_those_of_a_training_that_was_saved() -> None:
    assert {signal.SIGUSR1, signal.SIGTERM} < set(SIGNALS)
    named = {path.name: path.read_text() for path in FILES}
    assert re.findall(r"== (\d+)", named["experts.sbatch"]) == list(map(str, SAVED))
    assert yaml.safe_load(named["skypilot.yaml"])["resources"]["job_recovery"] == {
        "recover_on_exit_codes": SAVED
    }
    rules = yaml.safe_load(named["kubernetes.yaml"])["spec"]["podFailurePolicy"]["rules"]
    codes = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    assert codes == [SAVED, [2]]
    assert f"SAVED = {tuple(map(int, SAVED))}" in named["ray_experts.py"]


def test_the_run_file_of_the_guide_is_all_that_the_commands_leave_out(tmp_path: Path) -> None:
    text = next(block for block in re.findall(r"```yaml\n(.*?)```", GUIDE, re.S))
    (tmp_path / "run.yaml").write_text(text)
    settings = settings_of(ExpertSettings, tmp_path / "run.yaml", {})
    assert settings.objective == "flow"


@pytest.mark.slow
@pytest.mark.skipif(
    any(shutil.which(name) is None for name in DAEMONS),
    reason="needs the packages slurmctld, slurmd, slurm-client and munge",
)
def test_trainings_under_a_real_slurm_end_with_the_same_weights(tmp_path: Path) -> None:
    """Pre-empted, requeued, out of time, cancelled and killed, by ``python -m benchmarks.slurm``."""
    words = ["--quick", "--work", tmp_path / "work", "--results", tmp_path / "results"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.slurm", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (table,) = (tmp_path / "results").glob("*-slurm.md")
    assert table.read_text().count("equal, bit for bit") == 5
