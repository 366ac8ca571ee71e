"""The diffusers pipeline of an ensemble, and samples as a folder of images.

May import `experts` and what is below. Start with `pipeline` (`hddm.HDDMPipeline`), then `samples`.
"""
