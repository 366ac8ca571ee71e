"""hddm convert."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from hddm.settings import Conversion, Described, InputPath, ModelPath
from hddm.utils.errors import UsageError
from hddm.utils.files import refuse_pickle
from hddm.utils.hub import Wanted, local
from hddm.utils.progress import Progress
from hddm_cli.options import NamedArgument, Out, Overwrite, opens_experts
from hddm_cli.usage import say


class ConvertOptions(Described):
    """What else is written or checked."""

    base: ModelPath | None = None
    """Expert that a LoRA file changes; the output is its adapter."""
    text_encoder_lora: Literal["apply", "drop"] | None = None
    """Whether a LoRA's changes to text encoders are merged into the expert's own, or left out."""
    to_layout: str | None = None
    """Layout to write an expert back in, such as facebook-dit."""
    data: InputPath | None = None
    """Shard of images like the model's own, to check the stated conventions on."""
    no_verify: bool = False
    """Skip the comparison with the source."""
    dry_run: bool = False
    """Check and print the plan, but write nothing."""


@opens_experts
def convert(
    source: Annotated[
        Path, NamedArgument(help="Checkpoint file, model folder, pipeline folder or expert folder.")
    ],
    out: Out,
    settings: Conversion,
    options: ConvertOptions,
    overwrite: Overwrite = False,
) -> None:
    """Turn a pretrained checkpoint into an expert.

    The network stays the same and is read as a velocity field.
    """
    base, to_layout, dry_run = options.base, options.to_layout, options.dry_run
    if to_layout is not None or base is not None:
        why = (
            "--to-layout writes an expert as it is" if to_layout else "--base converts a LoRA file"
        )
        taken = {"dry_run", "to_layout"}
        if to_layout is None:
            taken = {"dry_run", "base", "text_encoder_lora", "licence", "allow_pickle"}
        useless = sorted((settings.model_fields_set | options.model_fields_set) - taken)
        if useless:
            raise UsageError(f"--{useless[0].replace('_', '-')}: {why}; drop one of the two")
        with Progress(None, "convert" if to_layout is None else "write back"):
            if to_layout is not None:
                from hddm.checkpoints.write_back import write_back

                lines: Iterable[str] = write_back(local(source), out, to_layout, dry_run, overwrite)
            else:
                from hddm.checkpoints.lora import convert_lora

                assert base is not None
                lines = convert_lora(
                    source,
                    base,
                    out,
                    settings.licence,
                    dry_run,
                    overwrite,
                    settings.allow_pickle,
                    options.text_encoder_lora,
                )
        for line in lines:
            say(line)
        return
    if options.text_encoder_lora is not None:
        raise UsageError("--text-encoder-lora: belongs to a LoRA file; pass --base, or drop it")
    source = local(source, Wanted(settings.variant, settings.weights))
    # Of a folder that holds both kinds, safetensors are read.
    pickles = (
        [] if any(source.rglob("*.safetensors")) else source.rglob("diffusion_pytorch_model*.bin")
    )
    for file in [source] if source.is_file() and source.suffix != ".json" else pickles:
        refuse_pickle(file, settings.allow_pickle)
    from hddm.checkpoints.convert import convert as turn

    checks = {"data": options.data, "verify": not options.no_verify, "dry_run": dry_run}
    turn(source, out, settings=settings, overwrite=overwrite, report=say, **checks)
