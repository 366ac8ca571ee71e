"""Outputs of hddm that a change of its structure must leave as they are, bit by bit; see `__main__`."""
