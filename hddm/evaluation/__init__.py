"""Image metrics: distances, diversity, memorisation and significance; `evaluate` measures a folder."""
