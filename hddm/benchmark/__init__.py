"""Trains models, compares them at equal compute, and writes tables and a report."""
