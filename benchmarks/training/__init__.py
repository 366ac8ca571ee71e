"""How many images a second a training step takes in, beside a plain loop around diffusers' DiT."""
