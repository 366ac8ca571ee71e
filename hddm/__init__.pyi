"""Types of the package for type checkers and editors, by ``python -m benchmarks.stubs``."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

from hddm import schedules as schedules
from hddm.ensemble import Ensemble as Ensemble
from hddm.evaluation.results import Evaluation as Evaluation
from hddm.experts.export import export as export
from hddm.experts.loading import load as load
from hddm.pipelines.drop_in import drop_in as drop_in
from hddm.pipelines.pipeline import HDDMPipeline as HDDMPipeline
from hddm.sampling import sample as sample
from hddm.utils.errors import HddmError as HddmError
from hddm.velocity import VelocityField as VelocityField

PathText = str | PathLike[str]

def assemble(
    experts: Sequence[PathText],
    out: PathText,
    router: str | PathText | None = None,
    *,
    overwrite: bool = False,
    strategy: str | None = None,
    vae: PathText | None = None,
    text_encoder: PathText | None = None,
    tokenizer: PathText | None = None,
    trust_components: bool = False,
    base: Sequence[PathText] = (),
    share: Mapping[str, float] | None = None,
    domain: Sequence[Sequence[str]] = (),
    classes: PathText | Mapping[str, Sequence[str] | Mapping[int | str, str]] | None = None,
    diffusers_pipeline: bool = False,
    allow_program: bool = False,
) -> tuple[str, ...]:
    """Put experts, a router and components into one folder, after checking that they fit."""

def convert(
    source: PathText,
    out: PathText,
    *,
    data: PathText | None = None,
    verify: bool = True,
    dry_run: bool = False,
    overwrite: bool = False,
    report: Callable[[str], object] = ...,
    allow_pickle: bool = False,
    num_heads: int | None = None,
    sample_size: int | None = None,
    weights: Literal["ema", "raw"] | None = None,
    variant: str | None = None,
    preset: Literal["sd1", "sd2", "sd2-v", "sdxl", "sdxl-v", "sdxl-flow", "playground-2.5", "cosxl"] | None = None,
    tokenizer: PathText | None = None,
    schedule: PathText | None = None,
    prediction_type: Literal["epsilon", "sample", "v_prediction", "flow_prediction"] | None = None,
    noise_range: tuple[float, float] | str | None = None,
    data_range: tuple[float, float] | str | None = None,
    text_dim: int | None = None,
    licence: str | None = None,
    device: str = "auto",
) -> Path:
    """Turn a pretrained checkpoint into an expert folder, which is written whole or not at all."""

def evaluate(
    images: PathText,
    reference: PathText,
    *,
    out: PathText | None = None,
    overwrite: bool = False,
    held_out: PathText | None = None,
    validation: PathText | None = None,
    features: str = "auto",
    save_classifier: PathText | None = None,
    domain: Mapping[str, Sequence[str]] | None = None,
    mirrored: bool = False,
    brief: bool = False,
    allow_few: bool = False,
    max_bad: int = 0,
) -> Evaluation:
    """Scores of ``images`` against training images, and against held-out or validation ones."""

def partition(
    images: PathText | Sequence[PathText],
    out: PathText,
    num_shards: int,
    *,
    overwrite: bool = False,
    replace_cache: bool = False,
    max_bad: int = 0,
    caption_column: str | None = None,
    label_column: str | None = None,
    classes: Sequence[Sequence[str]] = (),
    only: str | None = None,
    seed: int = 0,
    features: str = "pixels",
    cache: PathText | None = None,
    held_out: float = 0.0,
) -> list[Path]:
    """Divide images into shards of similar content by balanced hierarchical k-means on their features."""

def sample_to_folder(
    source: PathText,
    out: PathText,
    overwrite: bool = False,
    grid: bool = False,
    resume: bool = False,
    *,
    steps: int | None = None,
    strategy: str | None = None,
    solver: Literal["euler", "heun", "adams-moulton"] | None = None,
    shift: float | None = None,
    router_every: int = 1,
    guidance_scale: float = 1.0,
    guide_by: Literal["condition", "weak"] = "condition",
    cfg_channels: int | None = None,
    guidance_interval: tuple[float, float] = (0.0, 1.0),
    guidance_rescale: float = 0.0,
    guidance_norm: Literal["rows"] | None = None,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto",
    compile: bool = False,
    quantize: Literal["int8"] | None = None,
    num_images: int = 16,
    seed: int = 0,
    start: int = 0,
    prompts: Sequence[str] = (),
    negative_prompt: str | None = None,
    long_prompt: bool = False,
    clip_skip: int = 0,
    class_labels: str | None = None,
    conditions: PathText | None = None,
    native: Literal["ddim", "dpmsolver++", "unipc", "flow-euler"] | None = None,
    height: int | None = None,
    width: int | None = None,
    init_image: PathText | None = None,
    strength: float | None = None,
    mask: PathText | None = None,
    resampling_steps: int | None = None,
    edit_from: str | None = None,
    expert: int | None = None,
    batch_size: int = 64,
    offload: Literal["none", "ram", "disk"] = "none",
    max_memory: int | str | None = None,
    output_type: Literal["png", "latent"] = "png",
    metadata: bool = True,
    allow_program: bool = False,
) -> str | None:
    """Sample an expert, an ensemble or the Paris release into a folder."""

def train(
    shard: PathText,
    out: PathText,
    *,
    init: PathText | None = None,
    schedule: PathText | None = None,
    overwrite: bool = False,
    report: Callable[[str], object] = ...,
    steps: int,
    batch_size: int = 128,
    size: str = "small",
    optimizer: Literal["adamw", "muon"] | None = None,
    learning_rate: float | None = None,
    muon_learning_rate: float | None = None,
    warmup: int | None = None,
    weight_decay: float = 0.01,
    max_grad_norm: float = 1.0,
    ema_decay: float = 0.999,
    seed: int = 0,
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto",
    gradient_accumulation_steps: int = 1,
    gradient_checkpointing: bool = False,
    compile: bool = False,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    threads: int | None = None,
    max_non_finite: int = 10,
    prediction: Literal["epsilon", "sample", "v_prediction", "flow_prediction"] | None = None,
    rotary: bool | None = None,
    time_sampling: Literal["uniform", "logit-normal"] | None = None,
    condition_dropout: float = 0.1,
    random_flip: bool = False,
    shard_weights: bool = False,
    objective: Literal["ddpm", "flow"],
    weighting: Literal["prediction", "velocity"] | None = None,
    noise_range: tuple[float, float] | str | None = None,
    snr_gamma: float | None = None,
    class_conditional: bool = False,
    text_conditional: bool = False,
    weak_at: float | None = None,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    checkpoint_every: int = 500,
    keep: int = 2,
    log_every: int = 10,
    sample_every: int = 0,
    tracker: str | None = None,
    resume: bool = False,
    allow_config_change: bool = False,
    held_out: PathText | None = None,
    validate_every: int = 500,
    run_name: str | None = None,
    allow_program: bool = False,
) -> Path:
    """Train one expert on one shard, from scratch or from another expert."""
