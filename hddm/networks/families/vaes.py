"""The type of a VAE. diffusers takes seconds to import its classes; annotations alone need them."""

from typing import TypeAlias

from diffusers import AutoencoderKL, AutoencoderTiny

Vae: TypeAlias = AutoencoderKL | AutoencoderTiny
