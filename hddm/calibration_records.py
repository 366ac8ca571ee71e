"""What a calibration records of its fit, without its tensors; the calibration is in `hddm.calibration`."""

from pathlib import Path

from hddm.utils.documents import parse_object
from hddm.utils.weights_headers import stated_tensors

FILE_NAME = "calibration.safetensors"
RECORD_KEY = "calibrated_on"


def calibration_record(folder: Path) -> dict[str, str] | None:
    """The data that the calibration in an expert folder was fitted to; None where it is not recorded.

    ``data`` is ``shard <hash>`` or ``native samples``, with ``images`` and ``seed``, and ``steps`` of the
    sampler.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    record = parse_object(stated_tensors(path)[1].get(RECORD_KEY, "{}"), f"{path}: {RECORD_KEY}")
    return {key: str(value) for key, value in record.items()} or None
