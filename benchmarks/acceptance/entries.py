"""The published models that the kit compares: one table, with what their authors say of each.

Conventions are written down here from model cards and papers, so that a conversion is compared with them
and not with what a file happens to say.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEPS = 1000
"""Timesteps of every DDPM schedule here."""
OPEN, TOKEN = "open", "needs a token"
UNCHECKED = "see its page; it was not checked for this table"
"""Licence of a LoRA whose page we have not read."""


@dataclass(frozen=True)
class Convention:
    """What a network was trained on.

    Args:
        prediction: of the network, by diffusers' names.
        betas: spacing, first and last of a DDPM schedule; None for x_t = (1 - t) x_0 + t eps.
        is_zero_snr: betas are rescaled to no signal at their end (arXiv:2305.08891).
        time_scale: what t is multiplied by for the network, of flow matching.
    """

    prediction: str
    betas: tuple[str, float, float] | None = None
    is_zero_snr: bool = False
    time_scale: float = 1000.0

    @cached_property
    def signal(self) -> NDArray[np.float64]:
        """Share of signal alpha at each timestep."""
        assert self.betas is not None
        spacing, first, last = self.betas
        if spacing == "scaled_linear":
            betas = np.linspace(math.sqrt(first), math.sqrt(last), STEPS) ** 2
        else:
            betas = np.linspace(first, last, STEPS)
        alpha = np.sqrt(np.cumprod(1 - betas))
        if self.is_zero_snr:
            alpha = (alpha - alpha[-1]) * alpha[0] / (alpha[0] - alpha[-1])
        return alpha

    def level(self, share: float) -> tuple[float, float, float]:
        """Alpha, sigma and the network's time at a ``share`` of the schedule, from data to noise."""
        if self.betas is None:
            return 1 - share, share, share * self.time_scale
        step = round(share * (STEPS - 1))
        alpha = float(self.signal[step])
        return alpha, math.sqrt(1 - alpha**2), float(step)


SD_BETAS = ("scaled_linear", 0.00085, 0.012)
DDPM_BETAS = ("linear", 0.0001, 0.02)


@dataclass(frozen=True)
class Lora:
    """A published LoRA file, or a folder of peft, for a model of the table.

    ``reader`` is who reads it for the comparison: a pipeline of diffusers, or peft. ``megabytes`` may be a
    guess; the report tells what was downloaded.
    """

    repo: str
    revision: str
    file: str
    megabytes: int
    licence: str
    reader: str = "diffusers"
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """A published model.

    Args:
        name: in the report, and of the stage ``checkpoint-NAME``.
        title: for people.
        repo: on the hub, at the commit or branch ``revision``; ``file`` is a single file in it.
        layout: how it is stored.
        gigabytes: that hddm downloads.
        licence: as its authors call it.
        access: open, or for those alone who accepted its terms.
        convention: of its network.
        side: of a picture, in pixels.
        conversion: options of `hddm.convert`.
        dtype: that the comparison runs in on a GPU.
        most: relative difference of a network call, at most, in this dtype.
        most_of_picture: mean difference of two pictures, at most, in steps of 255.
        call: arguments of the pipeline of diffusers.
        configs: repository whose configs and vocabulary a single file needs.
        lora: a LoRA of this model.
        memory: gigabytes of a GPU that the comparison needs; 0 where any that runs it will do.
    """

    name: str
    title: str
    repo: str
    revision: str
    layout: str
    gigabytes: float
    licence: str
    convention: Convention
    side: int
    access: str = OPEN
    file: str = ""
    conversion: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    most: float = 1e-4
    most_of_picture: float = 0.5
    call: Mapping[str, Any] = field(default_factory=dict)
    configs: str = ""
    lora: Lora | None = None
    memory: float = 0.0

    @property
    def source(self) -> str:
        """The name that `hddm.convert` takes."""
        path = f"/{self.file}" if self.file else ""
        return f"{self.repo}{path}@{self.revision}"


PROMPT = "a photograph of a red bicycle in front of a white wall"
_GUIDED = {"prompt": PROMPT, "guidance_scale": 5.0, "num_inference_steps": 12}
SDXL_REPO = "stabilityai/stable-diffusion-xl-base-1.0"
SDXL_COMMIT = "462165984030d82259a11f4367a4eed129e94a7b"
DIT_REPO = "facebook/DiT-XL-2-256"
HALF = {"dtype": "bfloat16", "most": 5e-3, "most_of_picture": 4.0}
"""Of models that are published in half precision or are too large for float32.

Both ways run the same network in bfloat16, whose inputs may differ by one rounding (2⁻⁹ of a number).
"""

ENTRIES = (
    Entry(
        "dit",
        "DiT-XL/2, 256 pixels",
        DIT_REPO,
        "eab87f77abd5aef071a632f08807fbaab0b704d0",
        "pipeline folder of pickles (.bin)",
        3.0,
        "CC BY-NC 4.0: not for commercial use",
        Convention("epsilon", DDPM_BETAS),
        256,
        conversion={"allow_pickle": True},
        call={"class_labels": [207], "guidance_scale": 4.0, "num_inference_steps": 12},
    ),
    Entry(
        "sd15",
        "Stable Diffusion 1.5",
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "451f4fe16113bff5a5d2269ed5ad43b0592e9a14",
        "pipeline folder; a mirror of the removed runwayml/stable-diffusion-v1-5, open without a login",
        4.3,
        "CreativeML Open RAIL-M",
        Convention("epsilon", SD_BETAS),
        512,
        call=_GUIDED,
        lora=Lora(
            "latent-consistency/lcm-lora-sdv1-5",
            "cf2fced511dbe7e26c8d1d397e728fbab875db4b",
            "pytorch_lora_weights.safetensors",
            135,
            "Open RAIL++",
        ),
    ),
    Entry(
        "sdxl",
        "Stable Diffusion XL 1.0",
        SDXL_REPO,
        SDXL_COMMIT,
        "pipeline folder",
        13.9,
        "CreativeML Open RAIL++-M",
        Convention("epsilon", SD_BETAS),
        1024,
        call=_GUIDED,
        lora=Lora(
            "latent-consistency/lcm-lora-sdxl",
            "a18548dd4956b174ec5b0d78d340c8dae0a129cd",
            "pytorch_lora_weights.safetensors",
            394,
            "Open RAIL++",
        ),
    ),
    Entry(
        "sdxl-v",
        "NoobAI-XL v-prediction 1.0",
        "Laxhar/noobai-XL-Vpred-1.0",
        "66aa55e3469c27c29a89813cd35dd95fb7485fa1",
        "single file with VAE and text encoders",
        7.1,
        "Fair AI Public License 1.0-SD",
        Convention("v_prediction", SD_BETAS, is_zero_snr=True),
        1024,
        file="NoobAI-XL-Vpred-v1.0.safetensors",
        conversion={"preset": "sdxl-v"},
        call=_GUIDED,
        configs=f"{SDXL_REPO}@{SDXL_COMMIT}",
    ),
    Entry(
        "pixart-sigma",
        "PixArt-Sigma XL/2, 1024 pixels",
        "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        "e102b3591cc82e97071b8b4cb90d834d0c487207",
        "pipeline folder, T5 in two files",
        21.8,
        "CreativeML Open RAIL++-M",
        Convention("epsilon", DDPM_BETAS),
        1024,
        call=_GUIDED,
        lora=Lora(
            "jasperai/flash-pixart",
            "main",
            "",
            211,
            UNCHECKED,
            reader="peft",
            note="Trained on PixArt-α, whose layers are those of PixArt-Σ: a comparison of arithmetic, "
            "whose pictures mean nothing.",
        ),
    ),
    Entry(
        "sd35",
        "Stable Diffusion 3.5 medium",
        "stabilityai/stable-diffusion-3.5-medium",
        "b940f670f0eda2d07fbb75229e779da1ad11eb80",
        "pipeline folder of three text encoders",
        16.3,
        "Stability AI Community License",
        Convention("flow_prediction"),
        1024,
        access=TOKEN,
        call=_GUIDED,
        lora=Lora(
            "jieliu/SD3.5M-FlowGRPO-PickScore",
            "10c56697459bbdbe54d5e375912f49a0bcfae773",
            "",
            75,
            UNCHECKED,
            reader="peft",
        ),
        **HALF,
    ),
    Entry(
        "flux",
        "FLUX.1 schnell",
        "black-forest-labs/FLUX.1-schnell",
        "741f7c3ce8b383c54771c7003378a50191e9efe9",
        "pipeline folder in bfloat16",
        33.7,
        "Apache-2.0",
        Convention("flow_prediction", time_scale=1.0),
        1024,
        access=TOKEN,
        conversion={"sample_size": 128},
        memory=60.0,
        call={"prompt": PROMPT, "guidance_scale": 0.0, "num_inference_steps": 4},
        lora=Lora(
            "alvdansen/frosting_lane_flux",
            "main",
            "flux_dev_frostinglane_araminta_k.safetensors",
            90,
            UNCHECKED,
            note="Trained on FLUX.1 dev, whose blocks are those of schnell: a comparison of arithmetic.",
        ),
        **HALF,
    ),
)
DINO = ("facebook/dinov2-base", "f9e44c814b77203eaa57a6bdbbd535f21ede1415", 0.35, "Apache-2.0")
"""Repository, commit, gigabytes and licence of the features that images are partitioned by."""


def entry_named(name: str) -> Entry:
    """A row of the table."""
    return next(one for one in ENTRIES if one.name == name)


def gigabytes() -> float:
    """Everything that the kit downloads."""
    total = DINO[2]
    for one in ENTRIES:
        total += one.gigabytes
        if one.lora is not None:
            total += one.lora.megabytes / 1000
    return total
