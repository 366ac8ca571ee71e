"""Memory and time of the list of a shard's images."""
