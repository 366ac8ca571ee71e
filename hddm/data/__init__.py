"""Images on their way to training: sources, features, clusters, shards, and shards encoded to latents.

May import `utils` and `networks`. Start with `partition`, then `shards`, which training opens.
"""
