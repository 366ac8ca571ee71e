"""What the exact conversion is worth: fidelity, convergence and cost."""
