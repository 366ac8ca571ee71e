"""Files, records, tensors, errors, progress and processes: what every package uses. Nothing of diffusion.

Imports no other package of hddm. Start with `files` (everything is written complete or not at all), then
`records`.
"""
