"""Measures of a set of images: distances, diversity, memorising, and which differences are beyond noise.

May import `data`, `networks` and `utils`. Start with `evaluate`, which measures a folder of images.
"""
