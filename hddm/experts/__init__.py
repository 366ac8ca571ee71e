"""Experts and ensembles on disk: their records, loading, LoRA, assembly, and the Paris release.

May import the method in the root and all rooms below it. Start with `records`, then `loading` (`hddm.load`)
and `assembly`.
"""
