"""Ensemble folders: the files that hold experts and a router together, written and read.

model_index.json         components and their classes, for diffusers
ensemble.json            format, what was decided on each expert (`Member`), router, strategy, shift
experts/<i>/             an expert folder each
bases/<hash>/            weights that adapters among them change, where no expert has them for its own
router/                  a router folder
scheduler/               the shift once more, for diffusers
vae/ text_encoder/ tokenizer/     for experts of latents and text; second ones are vae_2/, …; a
                         text_encoder/ may hold several with their tokenizers (`hddm.networks.prompts`)
manifest.json            the hashes of all these (`hddm.utils.records`)

The records are defined and read in `hddm.experts.ensemble_records`.
"""

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import diffusers

from hddm.experts.adapter_records import BASES, base_of, check_base
from hddm.experts.ensemble_records import (
    CLASSES,
    ENSEMBLE_FORMAT,
    KEPT,
    NEEDED,
    PIPELINE_CLASS,
    ROUTER,
    SCHEDULER_CLASS,
    SCHEDULER_FILE,
    ClassName,
    EnsembleRecord,
)
from hddm.experts.record_folders import write_records
from hddm.experts.records import EXPERT_FILE, ExpertRecord, read_expert_record
from hddm.utils.addresses import refuse_fetched
from hddm.utils.copies import link_or_copy
from hddm.utils.errors import HddmError, an
from hddm.utils.files import (
    alone,
    inside,
    is_draft,
    new_folder,
    sha256_once,
    write_json,
)
from hddm.utils.records import ENSEMBLE_FILE as ENSEMBLE_FILE
from hddm.utils.records import (
    HASHES,
    MANIFEST,
    MODEL_INDEX,
    WEIGHTS,
    damage,
    ensemble_around,
    refuse_damaged,
    rewrite_entry,
    write_manifest,
)

# What else a scheduler of this class can do to its grid.
_OTHER_GRIDS = (
    "use_dynamic_shifting",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "shift_terminal",
    "invert_sigmas",
    "stochastic_sampling",
)


def bases_of(experts: Sequence[Path], given: Mapping[str, Path]) -> dict[str, Path]:
    """Find the folders of the weights that adapters among ``experts`` change, by SHA-256.

    They are in ``given``, else where `base_of` finds them. Raises `HddmError` for a base that is missing or
    differs from the one at training.
    """
    found = {}
    for folder in experts:
        adapter = read_expert_record(folder).adapter
        if adapter is not None and adapter.base_sha256 not in found:
            base = given.get(adapter.base_sha256) or base_of(folder, adapter)
            check_base(folder, adapter, base / WEIGHTS)
            found[adapter.base_sha256] = base
    return found


def write_model_index(folder: Path, classes: Mapping[str, ClassName]) -> None:
    """Write ``model_index.json``; experts and scheduler are always named."""
    content: dict[str, object] = {
        "_class_name": PIPELINE_CLASS,
        "_diffusers_version": diffusers.__version__,
    }
    for name in CLASSES:
        if name in NEEDED:
            content[name] = CLASSES[name][0]
        elif name in classes:
            content[name] = classes[name]
        elif name in (ROUTER, *KEPT):
            content[name] = (None, None)
    write_json(folder / MODEL_INDEX, content)


def write_scheduler(folder: Path, shift: float) -> None:
    """Write ``scheduler/scheduler_config.json``."""
    path = folder / SCHEDULER_FILE
    path.parent.mkdir()
    records = {"_class_name": SCHEDULER_CLASS, "_diffusers_version": diffusers.__version__}
    write_json(path, {**records, "num_train_timesteps": 1000, "shift": shift})


def shift_of(scheduler: "diffusers.FlowMatchEulerDiscreteScheduler") -> float:
    """Shift of a scheduler's time grid; `HddmError` where it does more than shift."""
    kind = type(scheduler).__name__
    bent = [f"{key}={scheduler.config[key]}" for key in _OTHER_GRIDS if scheduler.config.get(key)]
    if bent:
        kind += f" with {', '.join(bent)}"
    if bent or kind != SCHEDULER_CLASS:
        problem = f"the scheduler is {an(kind)}, and hddm's time grid has the shift alone"
        raise HddmError(f"{problem}: take a {SCHEDULER_CLASS} for the shift, and choose by solver=")
    return float(scheduler.shift)


def refuse_damaged_ensemble(folder: Path, record: EnsembleRecord, experts: Collection[int]) -> None:
    """Refuse an ensemble whose files have changed since they were written (`refuse_damaged`).

    Only ``experts``, by index, are checked; the folders of the others are not opened.
    """
    left_out = tuple(f"{one.folder}/" for k, one in enumerate(record.experts) if k not in experts)
    refuse_damaged(
        folder, damage(folder, ENSEMBLE_FILE, chosen=lambda name: not name.startswith(left_out))
    )


def write_ensemble_records(
    draft: Path,
    record: EnsembleRecord,
    components: Mapping[str, ClassName],
    bases: Mapping[str, Path],
) -> None:
    """Write ``ensemble.json``, ``model_index.json``, ``scheduler/``, ``bases/`` and, last, the manifest.

    ``draft`` already has all else; ``components`` are vae, text_encoder and tokenizer; ``bases`` are
    the folders of weights that adapters change, by SHA-256, of which weights, config and licence are linked.
    """
    own = []
    for one in record.experts:
        path = draft / one.folder / WEIGHTS
        if path.is_file():
            own.append(path)
    for sha256, base in bases.items():
        size = (base / WEIGHTS).stat().st_size
        # One with the weights of an expert is there already. Only what is as long can be the same.
        if any(one.stat().st_size == size and sha256_once(one) == sha256 for one in own):
            continue
        place = draft / BASES / sha256[:16]
        place.mkdir(parents=True)
        for path in base.iterdir():
            if path.name in (WEIGHTS, "config.json") or path.name.startswith("LICENSE"):
                link_or_copy(inside(base, path.name), place / path.name)
    _write_record(draft, record)
    router = {} if record.learned is None else {"router": CLASSES["router"][0]}
    write_model_index(draft, {**components, **router})
    write_scheduler(draft, record.shift)
    write_manifest(draft, sha256_once)


def _write_record(draft: Path, record: EnsembleRecord) -> None:
    experts = [member.model_dump(mode="json", exclude_defaults=True) for member in record.experts]
    today = {"format": ENSEMBLE_FORMAT, "experts": experts}
    write_json(draft / ENSEMBLE_FILE, record.model_dump(mode="json") | today)


REPLACE_SECONDS = 60.0
"""Seconds to wait for another process that replaces the same ensemble."""


def replace_file(
    folder: Path, record: ExpertRecord, name: str, save: Callable[[Path], None]
) -> None:
    """Replace the file ``name`` of an expert folder, with the folder or the ensemble around it as a whole.

    ``save`` writes it into a folder. Raises `HddmError` if another process writes there, and as
    `hddm.utils.files.new_folder`.
    """
    refuse_fetched(folder)
    # A link stays, and what it leads to is replaced.
    target = folder.resolve()
    whole = ensemble_around(target) or target
    kind = EXPERT_FILE if whole == target else ENSEMBLE_FILE
    # Another expert of the same ensemble may be calibrated at the same time.
    with (
        alone(whole, REPLACE_SECONDS),
        new_folder(whole, kind, overwrite=True, is_locked=True) as draft,
    ):
        _link_all(whole, draft)
        own = draft / target.relative_to(whole)
        for one in (name, EXPERT_FILE, MANIFEST):
            # Written anew, and not into a hard link.
            (own / one).unlink(missing_ok=True)
        save(own)
        write_records(own, record, {})
        rewrite_entry(own)


def replace_ensemble_record(folder: Path, record: EnsembleRecord) -> None:
    """Replace ``ensemble.json`` of a folder, with the folder as a whole; raises as `replace_file`."""
    refuse_fetched(folder)
    whole = folder.resolve()
    with (
        alone(whole, REPLACE_SECONDS),
        new_folder(whole, ENSEMBLE_FILE, overwrite=True, is_locked=True) as draft,
    ):
        _link_all(whole, draft)
        for one in (ENSEMBLE_FILE, MANIFEST):
            (draft / one).unlink(missing_ok=True)
        _write_record(draft, record)
        write_manifest(draft, sha256_once)


def _link_all(folder: Path, draft: Path) -> None:
    """Fill ``draft`` with all that is in ``folder``, but for what hddm keeps hidden there."""
    shutil.copymode(folder, draft)
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.name == HASHES or any(map(is_draft, name.parts)):
            continue
        if path.is_symlink():
            (draft / name).symlink_to(os.readlink(path), target_is_directory=path.is_dir())
        elif path.is_dir():
            (draft / name).mkdir()
        else:
            link_or_copy(path, draft / name)
