"""Names of models as parts of paths, and the folders of a seed that hold several models."""

import re

ENSEMBLES, FINISHED, SAMPLES = "ensembles", "finished", "samples"


def slug(name: str) -> str:
    """A model's name as part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
