"""Files, records, weights, errors, progress and processes, shared by all rooms; nothing of diffusion."""
