"""Experts and ensembles on disk: their records, loading, LoRA, assembly, and the Paris release.

May import the modules at hddm's top level and all packages below. Start with `records`, then `loading` and
`assembly`.
"""
