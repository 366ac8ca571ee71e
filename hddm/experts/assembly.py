"""Assembly: experts, a router and components become one ensemble folder, after checking that they fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hddm.ensemble import Strategy
from hddm.experts.compatibility import (
    Findings,
    Named,
    Surroundings,
    class_prior_of,
    common_shift,
    compare_experts,
    compare_surroundings,
    match_router,
    prior_of,
)
from hddm.experts.ensembles import (
    CLASSES,
    COMPONENTS,
    ENSEMBLE_FILE,
    ROUTER,
    ClassName,
    EnsembleRecord,
    bases_of,
    link_bases,
    places,
    write_ensemble_records,
)
from hddm.experts.lora import bases_in
from hddm.experts.records import (
    EXPERT_FILE,
    FORMAT,
    ROUTER_FILE,
    ExpertRecord,
    RouterRecord,
    foreign_files,
    open_expert,
    read_router,
    weights_in,
)
from hddm.networks.folders import sha256_once
from hddm.networks.text_encoder import STEM as TEXT_STEM
from hddm.networks.text_encoder import prompt_length, read_tokenizer, text_encoder_facts
from hddm.networks.vae import STEM as VAE_STEM
from hddm.networks.vae import read_config, read_weights, vae_facts
from hddm.networks.wrappers import text_width
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, link_or_copy, new_folder
from hddm.utils.records import MANIFEST, has_manifest, read_record, refuse_damaged
from hddm.utils.tensors import read_safetensors, refuse_non_finite

DEFAULT_STRATEGY = "draw"
_TEXT_FILES = (".json", ".txt", ".md")
# Defaults of diffusers and transformers, for configs that leave them out.
_LATENT_CHANNELS = 4
_POSITIONS = 77


@dataclass(frozen=True)
class EnsembleFolders:
    """Folders that an ensemble is made of.

    ``outputs`` are those of the router that are settled for an expert, None for one without; empty for none.
    """

    experts: Sequence[Path]
    router: Path | None = None
    components: Mapping[str, Path] = field(default_factory=dict)
    """By name, of `hddm.experts.ensembles.COMPONENTS`."""
    outputs: Sequence[int | None] = ()
    bases: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the weights that adapters among ``experts`` change, by SHA-256."""


def assemble(
    experts: Sequence[Path],
    out: Path,
    router: Path | None = None,
    strategy: str = DEFAULT_STRATEGY,
    overwrite: bool = False,
    vae: Path | None = None,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
    bases: Sequence[Path] = (),
) -> tuple[str, ...]:
    """Put experts, a router and components into one folder, after checking that they fit.

    The prior is the shard sizes, or equal where an expert's is unknown; p(k | class) is counted where every
    expert counts its images by class; the shift is the experts' common one. An expert gets the output of the
    router for its shard, so experts may come in any order, and be some of the router's only. Files are
    hard-linked where the file system allows; of the folders of experts and router those at the top alone,
    since nothing else is read. Weights that adapters change are hashed and put in once: in ``bases/``, or in
    the expert that has them for its own.

    Args:
        experts: expert folders.
        out: the ensemble folder to write.
        router: a router folder; only strategy ``draw`` does without.
        strategy: that the folder recommends.
        overwrite: whether an existing ``out`` is replaced.
        vae: a VAE folder, for experts of latents.
        text_encoder: a CLIP text encoder folder, for experts that take text; with its ``tokenizer``.
        tokenizer: its tokenizer folder.
        bases: folders of weights that adapters change, where they are not where they were at training.

    Returns:
        Notes: what was taken on trust, or could not be known.

    Raises:
        HddmError: before anything is written, with every difference between the parts, and for weights and
            calibrations that are not those of their record.
    """
    for folder in experts:
        if (folder / ENSEMBLE_FILE).exists():
            raise HddmError(f"{folder}: is an ensemble; name its experts, or change it by --add and --remove")
    given = {"vae": vae, "text_encoder": text_encoder, "tokenizer": tokenizer}
    parts = EnsembleFolders(
        experts,
        router,
        {name: folder for name, folder in given.items() if folder is not None},
        bases=bases_of(experts, bases_in(bases)),
    )
    read = [*experts, *([router] if router else []), *parts.components.values(), *parts.bases.values()]
    refuse_inside(out, read)
    facts, notes = check(parts, strategy)
    notes += check_files(experts, router, parts.bases)
    with new_folder(out, ENSEMBLE_FILE, overwrite) as draft:
        fill(draft, parts, facts)
    return notes


def check(
    parts: EnsembleFolders, strategy: str, prior: Sequence[float] | None = None, shift: float | None = None
) -> tuple[EnsembleRecord, tuple[str, ...]]:
    """The record of an ensemble of ``parts``, and notes; reads records and small tensors only.

    Args:
        parts: what it is to consist of.
        strategy: that it recommends.
        prior: of experts whose shards are unknown; equal by default.
        shift: of the time grid; the experts' common one by default.

    Raises:
        HddmError: with every difference between the parts, for a strategy that they cannot follow, and for
            records that cannot be read.
    """
    folders = parts.experts
    if not folders:
        raise HddmError("an ensemble needs at least one expert")
    Strategy.parse(strategy).check(len(folders))
    if parts.router is None and strategy != DEFAULT_STRATEGY:
        raise HddmError(f"strategy {strategy!r} needs --router; only 'draw' does without")
    experts = read_records(folders)
    found = Findings()
    for folder in folders:
        _files_of(folder)
    outputs: tuple[int, ...] = ()
    compare_experts(experts, found)
    given = _surroundings(parts.components)
    compare_surroundings(experts, given, found)
    _compare_widths(folders, experts, given, found)
    if parts.router is not None:
        router = read_record(parts.router / ROUTER_FILE, RouterRecord, FORMAT)
        _files_of(parts.router)
        total = _outputs_of(parts.router)
        outputs = match_router(experts, router, found, str(parts.router), parts.outputs, total)
        if outputs == tuple(range(total)):
            outputs = ()
    found.refuse()
    shares = prior_of(experts, found, prior)
    names = tuple(f"experts/{k}" for k in range(len(experts)))
    facts = EnsembleRecord(
        experts=names,
        router=None if parts.router is None else ROUTER,
        router_outputs=outputs,
        prior=shares,
        class_prior=class_prior_of(experts, shares, found),
        strategy=strategy,
        shift=common_shift(experts, found) if shift is None else shift,
        bases=places(parts.bases, dict(zip(names, folders, strict=True))),
    )
    return facts, tuple(found.notes)


def check_files(
    experts: Sequence[Path], router: Path | None = None, bases: Mapping[str, Path] | None = None
) -> tuple[str, ...]:
    """Build the networks of experts and router, and hold every file against the manifest or the record.

    Args:
        experts: their folders.
        router: its folder.
        bases: folders of the weights that adapters among ``experts`` change, by SHA-256.

    Returns:
        Notes on folders of older versions, whose files cannot be held against all that they were.

    Raises:
        HddmError: with a line for every folder whose files are others, whose network cannot be built, or
            whose weights hold NaN or Inf.
    """
    found = Findings()
    for folder, (name, facts) in zip(experts, read_records(experts), strict=True):
        try:
            for foreign in foreign_files(folder, facts, sha256_once):
                found.differ(name, foreign)
            if name not in found.differences:
                open_expert(folder, bases)
                if (weights := weights_in(folder)) is not None:
                    refuse_non_finite(weights, read_safetensors(weights))
        except HddmError as error:
            found.differ(name, "; ".join([error.message, *error.details]))
    if router is not None:
        try:
            refuse_damaged(router, ROUTER_FILE, sha256=sha256_once)
            read_router(router)
        except HddmError as error:
            found.differ(str(router), "; ".join([error.message, *error.details]))
    found.refuse("files are not those that were written with them, and nothing was written:")
    older = [str(folder) for folder in (*experts, *([router] if router else [])) if not has_manifest(folder)]
    for name in older:
        found.note(f"{name} is of an older version, without a {MANIFEST}; not every change would be seen")
    return tuple(found.notes)


def read_records(folders: Sequence[Path]) -> list[Named]:
    """The records of expert folders, by the folders' names."""
    return [(str(folder), read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT)) for folder in folders]


def fill(draft: Path, parts: EnsembleFolders, facts: EnsembleRecord) -> None:
    """Put ``parts`` and their record into an empty folder."""
    for folder, name in zip(parts.experts, facts.experts, strict=True):
        link_folder(folder, draft / name)
    link_bases(draft, facts.bases, parts.bases)
    if parts.router is not None and facts.router is not None:
        link_folder(parts.router, draft / facts.router)
    kinds: dict[str, ClassName] = {}
    for name, folder in parts.components.items():
        kinds[name] = CLASSES[name][0]
        if name == "vae":
            kinds[name] = ("diffusers", str(read_config(folder)["_class_name"]))
        _link_component(folder, draft / name)
    write_ensemble_records(draft, facts, kinds)


def link_folder(source: Path, target: Path) -> None:
    """Make ``target`` a folder of the files at the top of ``source``, hard links where that is possible.

    Raises:
        HddmError: for a link that leads out of ``source``.
    """
    files = _files_of(source)
    target.mkdir(parents=True)
    for path in files:
        link_or_copy(path, target / path.name)


def refuse_inside(out: Path, parts: Sequence[Path]) -> None:
    """Refuse to write into a folder that is to be read.

    Raises:
        HddmError: where ``out`` is one of ``parts``, or lies in it.
    """
    for part in parts:
        if out.resolve().is_relative_to(part.resolve()):
            raise HddmError(f"{out}: lies in {part}, which is to become part of it; write it elsewhere")


def _files_of(folder: Path) -> list[Path]:
    """The regular files at the top of a folder, hidden ones left out; a link must stay inside."""
    paths = sorted(folder.iterdir())
    seen = (path for path in paths if not path.is_dir() and not path.name.startswith("."))
    return [path for path in seen if inside(folder, path.name).is_file()]


def _outputs_of(router: Path) -> int:
    """Number of a router's outputs; its record may not say which shards they are of."""
    total = read_config(router).get("num_experts")
    if not isinstance(total, int) or isinstance(total, bool) or total < 1:
        raise HddmError(f"{router / 'config.json'}: num_experts is {str(total)[:40]}, and must be from 1")
    return total


def _surroundings(components: Mapping[str, Path]) -> Surroundings:
    vae, text_encoder, tokenizer = (components.get(name) for name in COMPONENTS)
    if (text_encoder is None) != (tokenizer is None):
        raise HddmError(
            "--text-encoder and --tokenizer go together: prompts become tokens, tokens conditions"
        )
    given = Surroundings()
    if vae is not None:
        channels = read_config(vae).get("latent_channels", _LATENT_CHANNELS)
        given = replace(given, vae=vae_facts(vae), vae_channels=channels, vae_name=str(vae))
    if text_encoder is not None and tokenizer is not None:
        positions = read_config(text_encoder).get("max_position_embeddings", _POSITIONS)
        facts = text_encoder_facts(
            text_encoder, prompt_length(read_tokenizer(tokenizer).model_max_length, positions)
        )
        given = replace(given, text_encoder=facts, text_encoder_name=str(text_encoder))
    return given


def _compare_widths(
    folders: Sequence[Path], experts: Sequence[Named], given: Surroundings, found: Findings
) -> None:
    """Hold a text encoder against the configs of networks whose record says nothing about theirs."""
    for folder, (name, facts) in zip(folders, experts, strict=True):
        if given.text_encoder is None or facts.text_encoder is not None:
            continue
        width = text_width(read_config(folder))
        if "encoder_hidden_states" in facts.conditions and width not in (None, given.text_encoder.width):
            text = f"tokens {given.text_encoder.width} wide, and {name} takes {width}"
            found.differ(given.text_encoder_name, text)


def _link_component(source: Path, target: Path) -> None:
    """Link the weights, configs and licence of a component: no pickles, and no second copy of the weights."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and (path.suffix in _TEXT_FILES or path.name.startswith("LICENSE")):
            link_or_copy(path, target / path.name)
    if target.name != "tokenizer":
        weights, _ = read_weights(source, {"vae": VAE_STEM, "text_encoder": TEXT_STEM}[target.name])
        link_or_copy(weights, target / weights.name)
