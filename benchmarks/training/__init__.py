"""How many images per second a training step takes in, beside a plain loop around diffusers' DiT."""
