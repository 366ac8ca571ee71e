"""What a machine with a GPU and a network can prove, in stages and in one report."""
