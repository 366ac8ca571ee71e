"""The type of a VAE. diffusers takes seconds to import its classes; annotations alone need them.

It is not in `hddm.networks.families`, whose files are all imported to know the families.
"""

from typing import TypeAlias

from diffusers import AutoencoderKL, AutoencoderTiny

Vae: TypeAlias = AutoencoderKL | AutoencoderTiny
