"""What the exact conversion is worth: fidelity, convergence, cost, and the paper's ablation."""
