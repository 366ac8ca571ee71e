"""Finished models, which a benchmark compares as they are: their records, and what it can compare."""

from pathlib import Path

from hddm.checkpoints.describe import describe
from hddm.experts.ensembles import read_ensemble_facts
from hddm.experts.records import EXPERT_FILE, FORMAT, ExpertRecord
from hddm.utils.errors import HddmError
from hddm.utils.records import read_record


def expert_records(folder: Path) -> list[ExpertRecord]:
    """The records of an expert folder, or of all experts of an ensemble folder.

    Raises:
        HddmError: for a record that cannot be read.
    """
    is_expert = (folder / EXPERT_FILE).is_file()
    experts = [folder] if is_expert else [folder / name for name in read_ensemble_facts(folder).experts]
    return [read_record(expert / EXPERT_FILE, ExpertRecord, FORMAT) for expert in experts]


def read_finished(folder: Path) -> list[ExpertRecord]:
    """The records of the experts of a finished model.

    Raises:
        HddmError: for a folder that holds no model of hddm's, or one that makes no pixels.
    """
    facts = describe(folder)
    if facts["kind"] not in ("expert", "ensemble"):
        raise HddmError(f"{folder}: is a {facts['kind']}; a finished model is an expert or an ensemble")
    if "layout" in facts:
        raise HddmError(f"{folder}: is no model folder of hddm; a checkpoint becomes one by hddm convert")
    records = expert_records(folder)
    if any(record.space == "latents" for record in records):
        raise HddmError(
            f"{folder}: makes latents; sample it with hddm sample, and compare the images with hddm evaluate"
        )
    return records
