"""Published files of weights that features need: found on disk, checked, and never fetched."""

import os
from dataclasses import dataclass
from pathlib import Path

from hddm.errors import HddmError
from hddm.files import sha256_of


@dataclass(frozen=True)
class WeightsFile:
    """One file: its ``name`` in a folder, where it is had, and its SHA-256.

    It is looked for in the folder that the environment variable ``variable`` names, then in ``folder`` of the
    user's home.
    """

    name: str
    url: str
    sha256: str
    variable: str
    folder: str

    def find(self) -> Path | None:
        """Where it lies, None where it does not; its content is not looked at."""
        return next((path for path in self._places() if path.is_file()), None)

    def require(self, option: str) -> Path:
        """Where it lies, its content checked.

        Args:
            option: what asked for it, for the message.

        Raises:
            HddmError: where it is missing, with all that is needed to put it there, or has another hash.
        """
        path = self.find()
        facts = f"fetch {self.url} (SHA-256 {self.sha256}) and put it into {self._places()[0].parent}"
        if path is None:
            raise HddmError(f"{option}: {self.name} is not on disk; {facts}")
        found = sha256_of(path)
        if found != self.sha256:
            raise HddmError(f"{option}: {path} is another file (SHA-256 {found}); {facts}")
        return path

    def _places(self) -> list[Path]:
        chosen = os.environ.get(self.variable)
        folders = [*([Path(chosen)] if chosen else []), Path.home() / self.folder]
        return [folder / self.name for folder in folders]


INCEPTION = WeightsFile(
    "inception-2015-12-05.pt",
    "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
    "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4",
    "HDDM_INCEPTION",
    ".cache/clean-fid",
)
"""The network of clean-fid, StyleGAN2-ADA and most published FIDs, as TorchScript."""

CLIP = WeightsFile(
    "model.safetensors",
    "https://huggingface.co/openai/clip-vit-base-patch32/resolve/refs%2Fpr%2F15/model.safetensors",
    "99d28a652e6ec46629ab7047a0ac82c69b1fe11e0ce672c43af65d3a9a3fc05d",
    "HDDM_CLIP",
    ".cache/hddm/clip-vit-base-patch32",
)
"""OpenAI's CLIP ViT-B/32 as safetensors."""
