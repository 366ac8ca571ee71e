"""Networks: the expert's and the router's own transformers, other people's models, VAE and text encoder.

May import `utils` alone. Start with `transformers`; `wrappers` calls every network in one way,
``network(x, timestep, **conditions)``, and `folders` reads networks from disk.
"""
