"""How good a set of images is: distances, diversity, memorising."""
