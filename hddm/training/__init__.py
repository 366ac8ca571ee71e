"""Training one expert on one shard, and the router on all."""
