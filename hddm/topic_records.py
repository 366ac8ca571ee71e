"""The header of ``topic.safetensors``: what an expert's captions are about, without its statistics."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from hddm.networks.identity import TextEncoderRecord
from hddm.utils.records import Record, parse_record
from hddm.utils.weights_headers import stated_tensors

TOPIC = "topic.safetensors"
HEADER = "described"


class TopicRecord(Record):
    """Header of ``topic.safetensors``."""

    count: Annotated[int, Field(ge=1)]
    """Captions that the statistics are of."""
    source: str
    """The file or shard of the captions, or texts that stand for them."""
    variance: Annotated[float, Field(ge=0)]
    """Mean squared distance of the captions' embeddings from the means of their clusters."""
    text_encoder: TextEncoderRecord


def read_topic_record(folder: Path) -> TopicRecord | None:
    """The header of an expert folder's topic, None where there is none; `HddmError` for a broken one."""
    path = folder / TOPIC
    if not path.exists():
        return None
    header = stated_tensors(path)[1].get(HEADER, "{}")
    return parse_record(header.encode(), TopicRecord, f"{path}: {HEADER}")
