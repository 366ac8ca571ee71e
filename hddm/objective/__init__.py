"""Proper scores of models on held-out data: errors by noise level, and likelihood."""
