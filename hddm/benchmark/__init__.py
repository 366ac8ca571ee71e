"""The comparison of ensembles at equal compute: a file of steps, their jobs, samples, scores and the report.

May import every other package. Start with `file` and `run`.
"""
