"""What is not paid for: packages that take seconds to import, where the work needs none of them."""

import subprocess
import sys

# Each takes seconds, most of them with torch below.
HEAVY = {"torch", "diffusers", "transformers", "accelerate", "peft", "sklearn", "scipy", "matplotlib"}


def _imported(code: str, *arguments: str) -> set[str]:
    """Names of all modules that are there when ``code`` has run."""
    code += "\nimport sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_hddm_or_reading_a_record_imports_nothing_heavy() -> None:
    light = ["hddm", "hddm.facts", "hddm.files", "hddm.data.encoding_records", "hddm.data.check"]
    assert not _imported(f"import {', '.join(light)}") & HEAVY


def test_loading_a_model_imports_no_network_of_diffusers() -> None:
    """The class that a folder names is imported when the folder is opened."""
    imported = _imported("import hddm; hddm.load")
    assert "hddm.networks" in imported
    networks = {f"diffusers.models.{name}" for name in ("transformers", "unets", "autoencoders")}
    assert not imported & (networks | {"diffusers.pipelines", "hddm.checkpoints"})


def test_a_function_stays_what_it_is_when_its_module_has_been_imported() -> None:
    code = "import hddm.loading, hddm.sampling, hddm; assert callable(hddm.load) and callable(hddm.sample)\n"
    _imported(code + "from hddm import *\nassert Ensemble and load and schedules.LinearSchedule")
