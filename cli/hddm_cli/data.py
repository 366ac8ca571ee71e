"""hddm data; also verbs that only benchmark files use, such as ``data old-model``."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import SourceSettings
from hddm.utils.errors import HddmError
from hddm_cli.options import AsJson, InputArgument, Out, Seed, add
from hddm_cli.usage import say

group = typer.Typer(
    help="Check images before training, or write example images.", no_args_is_help=True
)


def check(
    path: Annotated[
        Path, InputArgument(help="Images (a folder, .tar or .parquet), a shard or a partition.")
    ],
    settings: SourceSettings,
    as_json: AsJson = False,
) -> None:
    """List corrupt, oversized and duplicate images.

    Exits with 1 if more than --max-bad images are corrupt or oversized.
    """
    from hddm.data.check import check_data
    from hddm.utils.errors import counted

    report = check_data(path, settings.caption_column, settings.label_column)
    bad = len(report.bad)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        say("\n".join(report.lines()))
    if bad > settings.max_bad:
        raise HddmError(
            f"{path}: {counted(bad, 'bad image')}, more than --max-bad {settings.max_bad}; repair or remove "
            f"{'it' if bad == 1 else 'them'}"
        )


def digits(out: Out) -> None:
    """Write scikit-learn's digits as class folders of PNG files.

    OUT/train holds 1,438 images of 8×8 pixels, OUT/held_out the other 359.
    """
    from hddm.data.images import HELD_OUT, TRAINING, write_digits
    from hddm.utils.files import new_folder

    with new_folder(out, "digits.json") as draft:
        write_digits(draft)
    typer.echo(f"{out / TRAINING}, {out / HELD_OUT}: images of 8×8 pixels by class")


def old_model(
    images: Annotated[Path, InputArgument(help="Shard folder of images of 8×8 pixels.")],
    out: Out,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 1500,
    seed: Seed = 0,
) -> None:
    """Train the old model of the quickstart by diffusers alone."""
    import diffusers
    import numpy as np
    import torch
    from diffusers import DDPMScheduler
    from PIL import Image
    from torch.nn import functional as F

    from hddm.networks.families.unet import UNET
    from hddm.utils.files import new_folder
    from hddm.utils.progress import Progress

    arrays = [np.asarray(Image.open(path)) for path in sorted(images.rglob("*.png"))]
    known = torch.from_numpy(np.stack(arrays))[:, None].float() / 127.5 - 1
    torch.manual_seed(seed)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    width = {"block_out_channels": (32, 32), "layers_per_block": 1, "norm_num_groups": 8}
    network = UNET.network(sample_size=8, in_channels=1, out_channels=1, **blocks, **width)
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    with Progress(steps, "train") as progress:
        for _ in range(steps):
            clean = known[torch.randint(len(known), (32,))]
            noise, t = torch.randn_like(clean), torch.randint(1000, (len(clean),))
            loss = F.mse_loss(network(scheduler.add_noise(clean, noise, t), t).sample, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
            progress(1)
    with new_folder(out, "model_index.json") as draft:
        pipeline = getattr(diffusers, UNET.pipelines[0].name)
        pipeline(network, scheduler).save_pretrained(draft)
    typer.echo(f"{out}: a DDPM pipeline of diffusers")


def captions(
    images: Annotated[Path, InputArgument(help="Class folders of `hddm data digits`.")], out: Out
) -> None:
    """Write digits with captions in three wordings, and a text encoder with random weights."""
    import json
    import shutil
    import string

    from hddm.utils.files import new_folder

    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    with new_folder(out, "metadata.jsonl") as draft:
        lines = []
        for number, path in enumerate(sorted(images.rglob("*.png"))):
            shutil.copy(path, draft / f"{number:04d}.png")
            name = names[int(path.parent.name)]
            text = (name, f"the digit {name}", f"a picture of {name}")[number % 3]
            lines.append(json.dumps({"file_name": f"{number:04d}.png", "text": text}) + "\n")
        (draft / "metadata.jsonl").write_text("".join(lines))
        write_random_clip(draft, string.ascii_lowercase, 24)
    typer.echo(f"{out}: {len(lines)} images with captions, text_encoder and tokenizer")


def write_random_clip(folder: Path, symbols: str, tokens: int) -> None:
    """Write ``tokenizer`` and ``text_encoder``: CLIP with random weights that reads these symbols one by one.

    A text has up to so many ``tokens``.
    """
    import torch
    import transformers

    from hddm.networks.encoders import CLIP, CLIP_TOKENIZER

    words = ["<|startoftext|>", "<|endoftext|>", *symbols]
    words += [f"{symbol}</w>" for symbol in symbols]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = getattr(transformers, CLIP_TOKENIZER.name)(
        vocab=vocabulary, merges=[], model_max_length=tokens
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    kind = getattr(transformers, CLIP.name)
    config = kind.config_class(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokens,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    encoder = kind(config)
    for parameter in encoder.parameters():
        if parameter.ndim != 1:
            parameter.data = 0.3 * torch.randn(parameter.shape)
    encoder.save_pretrained(folder / "text_encoder")


add(group, check)
add(group, digits)
add(group, old_model, hidden=True)
add(group, captions, hidden=True)
