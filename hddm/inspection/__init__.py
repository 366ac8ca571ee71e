"""Descriptions, in plain values, of anything that hddm writes or reads.

May import every package but `benchmark` and `serving`. `folders` describes what records suffice for, and
passes the rest on to `models`: experts, routers, ensembles and checkpoints of other tools.
"""
