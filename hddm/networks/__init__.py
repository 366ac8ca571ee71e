"""Networks: the expert's and the router's own transformers, other people's models, VAE and text encoder.

May import `utils` alone. Start with `transformers`; `wrappers` gives every network one call,
``network(x, timestep, **conditions)``, and `folders` reads networks from disk.
"""
