"""Experts and ensembles on disk: records, loading, LoRA, assembly, verification, and the Paris release.

May import the method in the root and the packages below it. Start with `records` and `expert`, then `loading`
and `assembly`.
"""
