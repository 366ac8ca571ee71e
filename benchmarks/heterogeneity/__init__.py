"""Mixtures whose objectives are chosen by error, shard by shard or noise level by noise level."""
