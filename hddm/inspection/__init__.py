"""Descriptions, in plain values, of anything that hddm writes or reads.

May import every package but `benchmark` and `serving`. `folders` begins. Records suffice for what hddm wrote,
and `models` describes experts, routers and ensembles without torch, but for the noise levels of a schedule of
betas; `checkpoints` describes what other tools wrote.
"""
