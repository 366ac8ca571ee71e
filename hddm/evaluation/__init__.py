"""Measures of a set of images: distances, diversity, memorisation, and which differences are significant.

May import `data`, `networks` and `utils`. Start with `evaluate`, which measures a folder of images.
"""
