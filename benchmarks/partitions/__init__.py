"""Memory and time of a partition of many images."""
