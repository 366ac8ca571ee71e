"""Files, records, tensors, errors, progress and processes: what every room uses, and nothing of diffusion.

Imports no other room. Start with `files` (everything is written complete or not at all), then `records`.
"""
