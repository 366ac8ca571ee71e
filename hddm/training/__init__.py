"""Training of experts, routers and students: settings, loop, exact resume, calibration.

`expert`, `continuation`, `distill` and `router` each prepare a `Task` and pass it to `loop.run_task`, which
fits the network step by step and calls back to write the folder.

train                                 `hddm.train`: from scratch or from another expert
settings                              what is requested; the recipe, with every default filled in
expert, continuation, distill, router      the four trainings
bounded_gain, adapters                how an existing expert is trained on
objectives, mean_flow                 what a network learns, and from which inputs
loop, device                          the steps
state, resume                         the run folder, checkpoints, and resuming them exactly
watching                              figures and pictures on the way
islands                               all experts at once
calibrate                             calibrations

May import `experts` and what is below. Start with `expert`, then `loop`, `state` and `resume`.
"""
