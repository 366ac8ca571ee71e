"""The `hddm` command: one file per subcommand, which parses, calls one library function and prints."""
