"""Images, features, clusters and shards."""
