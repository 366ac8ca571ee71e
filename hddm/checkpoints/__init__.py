"""Pretrained checkpoints of other projects: recognised, read, converted, checked, written back."""
