"""How good a set of images is: distances, diversity, memorising, and what of it is beyond noise.

May import `data`, `networks` and `utils`. Start with `evaluate`, which measures a folder of images.
"""
