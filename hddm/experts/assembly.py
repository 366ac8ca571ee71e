"""Assembly of experts, a router and components into one ensemble folder, after checking that they fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hddm.ensemble import Strategy
from hddm.experts.compatibility import (
    Findings,
    Named,
    class_prior_of,
    common_shift,
    compare_experts,
    compare_text_encoder,
    compare_vae,
    match_router,
    prior_of,
)
from hddm.experts.ensemble_folders import (
    COMPONENTS,
    ENSEMBLE_FILE,
    ROUTER,
    ClassName,
    EnsembleRecord,
    bases_of,
    kept_components,
    put_component,
    write_ensemble_records,
)
from hddm.experts.lora import bases_in
from hddm.experts.records import (
    EXPERT_FILE,
    FILES,
    FORMAT,
    ROUTER_FILE,
    ExpertRecord,
    foreign_files,
    open_expert,
    open_router,
    read_router,
    weights_in,
)
from hddm.networks.folders import sha256_once
from hddm.networks.text_encoder import prompt_length, read_tokenizer, text_encoder_facts
from hddm.networks.vae import read_config, vae_facts
from hddm.networks.wrappers import text_width
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, link_or_copy, new_folder
from hddm.utils.records import MANIFEST, has_manifest, read_record, refuse_damaged
from hddm.utils.tensors import read_safetensors, refuse_non_finite

DEFAULT_STRATEGY = "draw"
# Defaults of diffusers and transformers, for configs that leave them out.
_LATENT_CHANNELS = 4
_POSITIONS = 77


@dataclass(frozen=True)
class EnsembleFolders:
    """Folders that make up an ensemble.

    ``outputs`` has the router's output for each expert, None where still open; empty where all are.
    ``components`` are by name (`hddm.experts.ensemble_folders.COMPONENTS`); ``bases``, the weights that
    adapters change, by SHA-256.
    """

    experts: Sequence[Path]
    router: Path | None = None
    components: Mapping[str, Path] = field(default_factory=dict)
    outputs: Sequence[int | None] = ()
    bases: Mapping[str, Path] = field(default_factory=dict)


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

    The prior is the shard sizes, or equal where one is unknown; p(k | class) is counted where all experts
    count images by class; the shift is the experts' common one. Each expert gets the router's output for its
    shard, so experts may come in any order and cover only some of the router's. Files are hard-linked where
    possible, from the top level of expert and router folders only, since nothing else is read. Weights that
    adapters change are hashed and stored once: in ``bases/``, or in the expert that owns them.

    ``router`` is needed for all strategies but ``draw``. ``vae`` decodes latents, and ``text_encoder`` with
    ``tokenizer`` reads text; by default they are those that the experts keep. ``strategy`` is the one that
    the folder recommends. ``bases`` are folders of weights that adapters change, where they have moved since
    training. Returns notes on what was taken on trust or could not be known.

    Raises `HddmError`, before writing, that lists all differences between the parts, and for weights and
    calibrations that are not those of their record.
    """
    for folder in experts:
        if (folder / ENSEMBLE_FILE).exists():
            raise HddmError(f"{folder}: is an ensemble; name its experts, or change it by --add and --remove")
    folders = EnsembleFolders(
        experts,
        router,
        chosen_components(vae, text_encoder, tokenizer, experts),
        bases=bases_of(experts, bases_in(bases)),
    )
    refuse_inside(out, (*experts, router, *folders.components.values(), *folders.bases.values()))
    record, notes = check(folders, strategy)
    notes += check_files(experts, router, folders.bases)
    with new_folder(out, ENSEMBLE_FILE, overwrite) as draft:
        fill(draft, folders, record)
    return notes


def chosen_components(
    vae: Path | None,
    text_encoder: Path | None,
    tokenizer: Path | None,
    experts: Sequence[Path],
    own: Mapping[str, Path] | None = None,
) -> dict[str, Path]:
    """Components by name: those given, else ``own``, else those that the first of ``experts`` keeps.

    Text encoder and tokenizer come from one place.
    """
    given = {"vae": vae, "text_encoder": text_encoder, "tokenizer": tokenizer}
    found = {**(own or {}), **{name: folder for name, folder in given.items() if folder is not None}}
    for kept in map(kept_components, experts):
        has_text = not {"text_encoder", "tokenizer"}.isdisjoint(found)
        found = {name: one for name, one in kept.items() if name == "vae" or not has_text} | found
    return found


def check(
    folders: EnsembleFolders, strategy: str, prior: Sequence[float] | None = None, shift: float | None = None
) -> tuple[EnsembleRecord, tuple[str, ...]]:
    """Return the record of an ensemble of ``folders``, and notes; only records and small tensors are read.

    ``prior`` is for experts of unknown shards (default: equal); ``shift`` defaults to the experts' own.
    Raises `HddmError` that lists all differences between parts, for a strategy that they cannot follow, and
    for unreadable records.
    """
    if not folders.experts:
        raise HddmError("an ensemble needs at least one expert")
    Strategy.parse(strategy).check(len(folders.experts))
    if folders.router is None and strategy != DEFAULT_STRATEGY:
        raise HddmError(f"strategy {strategy!r} needs --router; only 'draw' does without")
    experts, found = read_records(folders.experts), Findings()
    for folder in folders.experts:
        _files_of(folder)
    compare_experts(experts, found)
    _compare_components(folders, experts, found)
    outputs: tuple[int, ...] = ()
    if folders.router is not None:
        _files_of(folders.router)
        router, router_record = open_router(folders.router)
        total = router.network.config.num_experts
        outputs = match_router(experts, router_record, total, found, str(folders.router), folders.outputs)
        if outputs == tuple(range(total)):
            outputs = ()
    found.refuse()
    shares = prior_of(experts, found, prior)
    record = EnsembleRecord(
        experts=tuple(f"experts/{k}" for k in range(len(experts))),
        router=None if folders.router is None else ROUTER,
        router_outputs=outputs,
        prior=shares,
        class_prior=class_prior_of(experts, shares, found),
        strategy=strategy,
        shift=common_shift(experts, found) if shift is None else shift,
    )
    return record, tuple(found.notes)


def _compare_components(folders: EnsembleFolders, experts: Sequence[Named], found: Findings) -> None:
    vae, text_encoder, tokenizer = (folders.components.get(name) for name in COMPONENTS)
    if vae is not None:
        channels = read_config(vae).get("latent_channels", _LATENT_CHANNELS)
        compare_vae(experts, vae_facts(vae), channels, str(vae), found)
    if text_encoder is not None and tokenizer is not None:
        positions = read_config(text_encoder).get("max_position_embeddings", _POSITIONS)
        length = prompt_length(read_tokenizer(tokenizer).model_max_length, positions)
        encoder = text_encoder_facts(text_encoder, length)
        widths = [None if one.text_encoder else text_width(read_config(Path(name))) for name, one in experts]
        compare_text_encoder(experts, widths, encoder, str(text_encoder), found)
    elif (text_encoder, tokenizer) != (None, None):
        raise HddmError("--text-encoder and --tokenizer go together; pass both, or none")


def check_files(experts: Sequence[Path], router: Path | None, bases: Mapping[str, Path]) -> tuple[str, ...]:
    """Check all files of experts and router against the manifest or the record, and build their networks.

    Returns notes on folders of older versions, which cannot be checked in full. Raises `HddmError` with a
    line for each folder whose files differ, whose network cannot be built, or whose weights hold NaN or Inf.
    """
    found = Findings()
    for folder, (name, record) in zip(experts, read_records(experts), strict=True):
        with found.errors_of(name):
            for line in foreign_files(folder, record, sha256_once):
                found.differ(name, line)
            if name not in found.differences:
                open_expert(folder, bases, unheld=FILES)
                if (weights := weights_in(folder)) is not None:
                    refuse_non_finite(weights, read_safetensors(weights))
    if router is not None:
        with found.errors_of(str(router)):
            refuse_damaged(router, ROUTER_FILE, sha256=sha256_once)
            read_router(router)
    found.refuse("files are not those that were written with them, and nothing was written:")
    for older in (one for one in (*experts, router) if one is not None and not has_manifest(one)):
        found.note(f"{older} is of an older version, without a {MANIFEST}; not every change would be seen")
    return tuple(found.notes)


def read_records(folders: Sequence[Path]) -> list[Named]:
    """Records of expert folders, with the folders' names."""
    return [(str(folder), read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT)) for folder in folders]


def fill(draft: Path, folders: EnsembleFolders, record: EnsembleRecord) -> None:
    """Put ``folders`` and their record into an empty folder, by hard links where possible."""
    for folder, name in zip(folders.experts, record.experts, strict=True):
        _link(_files_of(folder), draft / name)
    if folders.router is not None and record.router is not None:
        _link(_files_of(folders.router), draft / record.router)
    kinds: dict[str, ClassName] = {}
    for name, folder in folders.components.items():
        kinds[name] = put_component(draft, name, folder)
    write_ensemble_records(draft, record, kinds, folders.bases)


def refuse_inside(out: Path, folders: Iterable[Path | None]) -> None:
    """Refuse to write into or below one of ``folders``, which are yet to be read."""
    for folder in folders:
        if folder is not None and out.resolve().is_relative_to(folder.resolve()):
            raise HddmError(f"{out}: lies in {folder}, which is to become part of it; write it elsewhere")


def _link(files: Sequence[Path], target: Path) -> None:
    target.mkdir(parents=True)
    for path in files:
        link_or_copy(path, target / path.name)


def _files_of(folder: Path) -> list[Path]:
    """Regular, visible files at the top of a folder; a link must stay inside."""
    paths = sorted(folder.iterdir())
    seen = (path for path in paths if not path.is_dir() and not path.name.startswith("."))
    return [path for path in seen if inside(folder, path.name).is_file()]
