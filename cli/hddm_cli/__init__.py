"""The `hddm` command: a file a verb; each parses, calls one library function and prints."""
