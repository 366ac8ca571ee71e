"""Published networks of MNIST by two authors: alone, and mixed in one ensemble."""
