"""Trainings under a real Slurm, interrupted in every way that it knows, beside uninterrupted ones."""
