"""Training of experts, routers and students: settings, loop, exact resume, calibration, verification.

May import `experts` and what is below. Start with `expert`, then `loop`, `state` and `resume`.
"""
