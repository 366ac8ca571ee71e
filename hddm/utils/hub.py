"""Models on a hub by name: their needed files are downloaded once, by huggingface_hub.

``OWNER/NAME[/PATH][@REVISION]`` names a repository, a folder in it or one file of it. A path of this machine
comes first, and where a folder OWNER is here, nothing is asked for: the name is a path with a mistake.
Weights are read from safetensors files alone; no code and no pickle is downloaded.
"""

import errno
import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from hddm.utils.addresses import Address, address_of, on_disk
from hddm.utils.errors import HddmError, counted, one_line, shown
from hddm.utils.files import read_json, refuse_full_disk
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE, ROUTER_FILE

log = logging.getLogger(__name__)
_PART = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?P<path>(/[^/@]+)*)(@(?P<revision>[^@]+))?", re.ASCII
)
_ADDRESS = re.compile(
    rf"hf://(?P<repo>{_PART}/{_PART})(@(?P<revision>[^/]+))?(?P<path>/.*)?", re.ASCII
)
"""As huggingface_hub's file system writes a name: the revision is that of the repository."""
_IN_NO_NAME = re.compile(r"--|\.\.|\.git$")
_LONGEST_NAME = 96
_CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
_WEIGHTS = ".safetensors"
_PAPERS = (".json", ".jinja", ".txt", ".model")
"""Endings of configs, vocabularies and merges."""
_PROGRAM = "program.pt2"
"""The network of an expert that is a program: data, which `hddm.load` opens with permission alone."""
_PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
_UNUSED = ("safety_checker", "feature_extractor", "image_encoder")
"""Folders of pipelines that no command reads."""
_VARIANT = re.compile(r"\.([A-Za-z]\w*)(-\d+-of-\d+)?\.safetensors(\.index\.json)?$")
_INDEX_VARIANT = re.compile(r"\.safetensors\.index\.(\w+)\.json$")
"""Of ``model.fp16.safetensors``, ``model.fp16-00001-of-00002.safetensors`` and the indices of such files."""
_INDEX = "model_index.json"
_CARD = "README.md"
"""It states the licence of a model in a folder."""
_COMPONENT = re.compile(r"vae|vqvae|(text_encoder|tokenizer)(_\d)?")
"""Folders of a pipeline that are not its network."""
_RAW = "non_ema"
"""Variant of weights that are not averaged, beside the averaged ones."""
_HALF = "fp16"
"""Variant of a VAE or text encoder that is read where there is no other."""
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a disk, not of a network."""
_OURS = (ENSEMBLE_FILE, EXPERT_FILE, ROUTER_FILE)


class HubName(NamedTuple):
    """A repository, the folder or file in it that is meant, and its revision."""

    repo: str
    path: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> "HubName | None":
        """The name that a text is; None for a path that exists here, or that can be no name."""
        found = _NAME.fullmatch(text)
        if found is None or Path(text).exists() or Path(text.split("/")[0]).exists():
            return None
        if any(part in (".", "..") for part in PurePosixPath(text).parts):
            return None
        if not found["path"] and found["repo"].lower().endswith((_WEIGHTS, *_PICKLES, ".json")):
            # A repository may be called so, but a mistyped path of a file is likelier by far.
            return None
        # Of the hub's rules for names; what breaks one is a path with a mistake.
        longest = max(map(len, found["repo"].split("/")))
        if _IN_NO_NAME.search(found["repo"]) or longest > _LONGEST_NAME:
            return None
        return cls(found["repo"], found["path"].strip("/"), found["revision"])

    @classmethod
    def at(cls, address: Address) -> "HubName | None":
        """The repository of a model at an ``hf://`` address; None for one of data, and other addresses."""
        found = _ADDRESS.fullmatch(str(address))
        if found is None or found["repo"].split("/")[0] in ("datasets", "spaces", "buckets"):
            return None
        return cls(found["repo"], (found["path"] or "").strip("/"), found["revision"])

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return str(PurePosixPath(self.repo, self.path)) + revision


class Wanted(NamedTuple):
    """Which of several forms of weights are meant: a variant such as ``fp16``, and a set (ema or raw)."""

    variant: str | None = None
    weights: str | None = None


_PLAIN = Wanted()


def local(source: str | Path, wanted: Wanted = _PLAIN) -> Path:
    """The path of a model: ``source`` itself, or where its repository or address was downloaded to.

    ``hf://OWNER/NAME`` is the repository OWNER/NAME.

    Raises:
        HddmError: for a repository or file that is not there, cannot be read or reached, or has several
            files of weights to choose from, and a cache that cannot be written.
    """
    address = address_of(source)
    name = HubName.parse(str(source)) if address is None else HubName.at(address)
    if name is None:
        return Path(source) if address is None else on_disk(address)
    return _downloaded(name, wanted)


def origin_of(path: Path) -> str | None:
    """``OWNER/NAME@COMMIT`` of a path in huggingface_hub's cache; None for any other."""
    parts = path.absolute().parts
    for k, part in enumerate(parts[:-2]):
        found = _CACHED.fullmatch(part)
        if found and parts[k + 1] == "snapshots":
            return f"{found['owner']}/{found['name']}@{parts[k + 2]}"
    return None


def _downloaded(name: HubName, forms: Wanted) -> Path:
    from huggingface_hub import HfApi, constants, errors, hf_hub_download, snapshot_download
    from huggingface_hub import try_to_load_from_cache as in_cache

    # What its HTTP client raises without a network; which client that is differs between versions.
    client_error: Any = errors.HfHubHTTPError.__bases__[0]
    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
        index = str(PurePosixPath(name.path, _INDEX))
        parts: Any = {}
        if index in sizes:
            parts = read_json(Path(hf_hub_download(name.repo, index, revision=info.sha)))
        wanted = needed_files(name, list(sizes), parts, forms)
        size = sum(sizes[one] for one in wanted) / 1e9
        amount = f", {size:.1f} GB" if size >= 0.1 else ""
        new = [one for one in wanted if in_cache(name.repo, one, revision=info.sha) is None]
        refuse_full_disk(Path(constants.HF_HUB_CACHE), sum(sizes[one] for one in new))
        log.info("%s: %s of the hub%s", name, counted(len(wanted), "file"), amount)
        patterns = [_escaped(one) for one in wanted]
        folder = snapshot_download(name.repo, revision=info.sha, allow_patterns=patterns)
    except errors.GatedRepoError as error:
        text = "accept its terms on its page, and log in with hf auth login"
        raise HddmError(
            f"{name}: is open to those alone who were granted access; {text}"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        text = "no such file or folder, and no such public repository or revision on the hub"
        raise HddmError(f"{name}: {text}; a private one needs hf auth login") from error
    except (
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        OSError,
        client_error,
    ) as error:
        if isinstance(error, OSError) and error.errno in _OF_DISKS:
            raise HddmError(
                f"{name}: cannot be kept in {constants.HF_HUB_CACHE} ({one_line(error, 80)}); make space or "
                "give permission there, or name another place in the environment variable HF_HOME"
            ) from error
        text = "no such file or folder, and the hub cannot be reached"
        fetched = f"hf download {name.repo} where there is a network"
        raise HddmError(
            f"{name}: {text} ({one_line(error, 80)}); fetch it by {fetched}, and name the folder"
        ) from error
    found = Path(folder) / name.path
    weights = [one for one in wanted if one.endswith(_WEIGHTS)]
    is_plain = not any(PurePosixPath(one).name in (*_OURS, _INDEX, "config.json") for one in wanted)
    # A LoRA, or a model in a single file.
    return Path(folder) / weights[0] if is_plain and len(weights) == 1 else found


def needed_files(
    name: HubName, files: Sequence[str], parts: dict[str, Any], wanted: Wanted = _PLAIN
) -> list[str]:
    """Files of a repository that hddm reads of ``name``; ``parts`` are a pipeline's, by its index.

    Of weights in several forms, those of the ``wanted`` variant are read, else those without a variant such
    as ``fp16``; where a set is wanted, both sets, which tell each other apart.

    Raises:
        HddmError: for a path that is not there, without safetensors, or with several files or variants to
            choose from.
    """
    if name.path in files:
        beside = str(PurePosixPath(name.path).with_name("adapter_config.json"))
        if not name.path.endswith(_WEIGHTS):
            raise HddmError(f"{name}: only {_WEIGHTS} files are downloaded; fetch it yourself")
        return [name.path, *({beside} & set(files))]
    inside = [one for one in files if PurePosixPath(one).is_relative_to(name.path)]
    if not inside:
        raise HddmError(f"{name}: the repository has no such file or folder")
    own = {str(PurePosixPath(one).relative_to(name.path)): one for one in inside}
    if any(one in own for one in _OURS):
        return [path for one, path in own.items() if one.endswith((*_PAPERS, _WEIGHTS, _PROGRAM))]
    if _INDEX in own:
        folders = [one for one in parts if not one.startswith("_") and one not in _UNUSED]
        chosen = [_INDEX, *({_CARD} & own.keys())]
        for folder in folders:
            inside = [one for one in own if one.startswith(f"{folder}/")]
            is_network = _COMPONENT.fullmatch(folder) is None
            chosen += _of_component(inside, name, wanted, is_network)
        return [own[one] for one in chosen]
    top = [one for one in own if "/" not in one]
    if "config.json" in top:
        chosen = [*({_CARD} & own.keys()), *_of_component(top, name, wanted)]
        return [own[one] for one in chosen]
    weights = [one for one in top if one.endswith(_WEIGHTS)]
    if len(weights) > 1:
        example = PurePosixPath(name.repo, own[weights[0]])
        raise HddmError(
            f"{name}: has {counted(len(weights), 'file')} of weights; name one, as {example}",
            shown(weights),
        )
    if not weights:
        raise HddmError(f"{name}: {_without_safetensors(top)}")
    return [own[one] for one in top if one.endswith((*_PAPERS, _WEIGHTS))]


def _of_component(
    files: Sequence[str], name: HubName, wanted: Wanted, is_network: bool | None = None
) -> list[str]:
    """Configs, and the weights that are read, of a folder; a tokenizer has no weights.

    ``is_network`` is None where it may be the network, a VAE or a text encoder.
    """
    papers = []
    by_variant: dict[str, list[str]] = {}
    for one in files:
        found = _VARIANT.search(one) or _INDEX_VARIANT.search(one)
        if one.endswith(_WEIGHTS) or ".safetensors.index." in one:
            by_variant.setdefault(found[1] if found else "", []).append(one)
        elif one.endswith(_PAPERS):
            papers.append(one)
    if not by_variant:
        if any(one.endswith(_PICKLES) for one in files):
            raise HddmError(
                f"{name}: {PurePosixPath(files[0]).parent}: {_without_safetensors(files)}"
            )
        return papers
    order = [wanted.variant or ""]
    if is_network is None and wanted.variant is None:
        order.append(_HALF)
    elif is_network is False:
        order += ["", _HALF]
    weights = next((by_variant[one] for one in order if one in by_variant), None)
    if weights is None:
        raise HddmError(f"{name}: {_other_variants(files, by_variant, wanted)}")
    if is_network is not False and wanted.weights is not None and wanted.variant is None:
        # Without the other set beside it, nothing says which one this is.
        weights = [*weights, *by_variant.get(_RAW, [])]
    return papers + weights


def _other_variants(files: Sequence[str], found: Collection[str], wanted: Wanted) -> str:
    """Why a folder with the variants ``found`` cannot be read."""
    place = PurePosixPath(files[0]).parent
    where = "it" if place == PurePosixPath(".") else f"{place}/"
    named = " and ".join(sorted(filter(None, found))) or "none with a name"
    if wanted.variant is not None:
        return (
            f"{where} has no weights of `variant` {wanted.variant} (found: {named}); pass another"
        )
    return f"{where} has weights of the variants {named} alone; pass `variant` with one of them"


def _without_safetensors(files: Sequence[str]) -> str:
    pickles = [one for one in files if one.endswith(_PICKLES)]
    if not pickles:
        return "holds no weights that hddm reads"
    text = "holds pickles alone, which are not downloaded; fetch them yourself, and pass --allow-pickle"
    return f"{text} ({', '.join(shown(pickles, 3))})"


def _escaped(file: str) -> str:
    """A file's name as a pattern that fits it alone."""
    return re.sub(r"([*?[])", r"[\1]", file)
