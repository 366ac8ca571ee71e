"""The comparison of ensembles at equal compute: settings, jobs, samples, scores and the report.

May import every other room. Start with `settings` and `run`.
"""
