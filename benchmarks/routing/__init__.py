"""What routing is worth: two benchmarks by YAML, and routers that see the condition."""
