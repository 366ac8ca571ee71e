"""Image sources, features, clusters, shards, and encoding to latents. Training opens `shards`."""
