"""Any source by its content: an expert folder, a diffusers folder, or a single file."""

from pathlib import Path

from hddm.checkpoints.diffusers_models import DIFFUSERS_LAYOUTS
from hddm.checkpoints.expert_folders import LAYOUT as HDDM
from hddm.checkpoints.expert_folders import open_expert
from hddm.checkpoints.folder_weights import STEM
from hddm.checkpoints.folders import PIPELINE, open_model, open_pipeline
from hddm.checkpoints.layouts import UnstatedHeads
from hddm.checkpoints.single_files import FILE_LAYOUTS, LDM, open_file
from hddm.checkpoints.sources import Reading, Source
from hddm.errors import HddmError, UsageError
from hddm.experts import EXPERT_FILE
from hddm.validation import choose

LAYOUTS = (*FILE_LAYOUTS, LDM, *DIFFUSERS_LAYOUTS, HDDM)
_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def open_source(path: Path, reading: Reading) -> Source:
    """What lies at ``path``, recognised by its content.

    A folder without any config may hold one file of weights; a file that lies beside the ``config.json`` of
    its diffusers model is that model with exactly that file.

    Raises:
        HddmError: for content of no known layout, or another than asked for.
    """
    if reading.layout is not None and reading.layout not in LAYOUTS:
        raise UsageError(f"--layout {reading.layout}: {choose(reading.layout, list(LAYOUTS))}")
    if not path.exists():
        raise HddmError(f"{path}: no such file or folder")
    if not path.is_dir():
        if path.name.startswith(STEM) and (path.parent / "config.json").exists():
            return open_model(path.parent, reading, file=path.name)
        return open_file(path, reading)
    if (path / EXPERT_FILE).exists():
        return open_expert(path, reading)
    if (path / PIPELINE).exists():
        return open_pipeline(path, reading)
    if (path / "config.json").exists():
        return open_model(path, reading)
    files = sorted(one for one in path.iterdir() if one.suffix in _ENDINGS)
    sources, refusals = [], []
    for file in files:
        try:
            sources.append(open_file(file, reading))
        except UnstatedHeads:
            raise
        except HddmError as error:
            refusals.append(error)
    if len(sources) == 1:
        return sources[0]
    if len(files) == 1:
        raise refusals[0]
    if (path / "snapshots").is_dir():
        raise HddmError(f"{path}: a hub cache; give the folder of one revision in its snapshots/")
    found = ", ".join(file.name for file in files) or "none"
    reasons = "".join(f"; {error}" for error in refusals)
    raise HddmError(
        f"{path}: holds none of {EXPERT_FILE}, {PIPELINE} and config.json, and not one checkpoint file "
        f"(found: {found}){reasons}"
    )
