"""What `import hddm` does not pay for."""

import subprocess
import sys


def test_importing_hddm_imports_no_network_of_diffusers() -> None:
    """They take seconds; the class that a folder names is imported when the folder is opened."""
    code = "import sys, hddm; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(run.stdout.split())
    assert "hddm.networks" in imported
    networks = {f"diffusers.models.{name}" for name in ("transformers", "unets", "autoencoders")}
    assert not imported & (networks | {"diffusers.pipelines", "hddm.checkpoints"})
