"""Models on a hub by name: their needed files are downloaded once, by huggingface_hub.

``OWNER/NAME[/PATH][@REVISION]`` names a repository, a folder in it or one file of it. A path of this machine
comes first, and where a folder OWNER is here, nothing is asked for: the name is a path with a mistake.
Weights are read from safetensors files alone; no code and no pickle is downloaded.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from hddm.utils.errors import HddmError, counted, one_line, shown
from hddm.utils.files import read_json
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE, ROUTER_FILE

log = logging.getLogger(__name__)
_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?P<path>(/[^/@]+)*)(@(?P<revision>[^@]+))?", re.ASCII
)
_CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
_WEIGHTS = ".safetensors"
_PAPERS = (".json", ".txt", ".model")
"""Endings of configs, vocabularies and merges."""
_PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
_UNUSED = ("safety_checker", "feature_extractor", "image_encoder")
"""Folders of pipelines that no command reads."""
_VARIANT = re.compile(r"\.([A-Za-z]\w*)(-\d+-of-\d+)?\.safetensors(\.index\.json)?$")
_INDEX_VARIANT = re.compile(r"\.safetensors\.index\.(\w+)\.json$")
"""Of ``model.fp16.safetensors``, ``model.fp16-00001-of-00002.safetensors`` and the indices of such files."""
_INDEX = "model_index.json"
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
        return cls(found["repo"], found["path"].strip("/"), found["revision"])

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return str(PurePosixPath(self.repo, self.path)) + revision


def local(source: str | Path) -> Path:
    """The path of a model: ``source`` itself, or where its repository was downloaded to.

    Raises:
        HddmError: for a repository or file that is not there, cannot be read or reached, or has several
            files of weights to choose from.
    """
    name = HubName.parse(str(source))
    if name is None:
        return Path(source)
    return _downloaded(name)


def origin_of(path: Path) -> str | None:
    """``OWNER/NAME@COMMIT`` of a path in huggingface_hub's cache; None for any other."""
    parts = path.absolute().parts
    for k, part in enumerate(parts[:-2]):
        found = _CACHED.fullmatch(part)
        if found and parts[k + 1] == "snapshots":
            return f"{found['owner']}/{found['name']}@{parts[k + 2]}"
    return None


def _downloaded(name: HubName) -> Path:
    from huggingface_hub import HfApi, errors, hf_hub_download, snapshot_download

    # What its HTTP client raises without a network; which client that is differs between versions.
    client_error: Any = errors.HfHubHTTPError.__bases__[0]
    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
        index = str(PurePosixPath(name.path, _INDEX))
        parts: Any = {}
        if index in sizes:
            parts = read_json(Path(hf_hub_download(name.repo, index, revision=info.sha)))
        wanted = needed_files(name, list(sizes), parts)
        size = sum(sizes[one] for one in wanted) / 1e9
        amount = f", {size:.1f} GB" if size >= 0.1 else ""
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


def needed_files(name: HubName, files: Sequence[str], parts: dict[str, Any]) -> list[str]:
    """Files of a repository that hddm reads of ``name``; ``parts`` are a pipeline's, by its index.

    Of weights in several forms, those without a variant such as ``fp16`` are read, or the only variant.

    Raises:
        HddmError: for a path that is not there, without safetensors, or with several files to choose from.
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
        return [path for one, path in own.items() if one.endswith((*_PAPERS, _WEIGHTS))]
    if _INDEX in own:
        folders = [one for one in parts if not one.startswith("_") and one not in _UNUSED]
        chosen = [_INDEX]
        for folder in folders:
            chosen += _of_component([one for one in own if one.startswith(f"{folder}/")], name)
        return [own[one] for one in chosen]
    top = [one for one in own if "/" not in one]
    if "config.json" in top:
        return [own[one] for one in _of_component(top, name)]
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


def _of_component(files: Sequence[str], name: HubName) -> list[str]:
    """Configs, and the weights of one variant, of a folder; a tokenizer has no weights."""
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
    return papers + by_variant[min(by_variant)]


def _without_safetensors(files: Sequence[str]) -> str:
    pickles = [one for one in files if one.endswith(_PICKLES)]
    if not pickles:
        return "holds no weights that hddm reads"
    text = "holds pickles alone, which are not downloaded; fetch them yourself, and pass --allow-pickle"
    return f"{text} ({', '.join(shown(pickles, 3))})"


def _escaped(file: str) -> str:
    """A file's name as a pattern that fits it alone."""
    return re.sub(r"([*?[])", r"[\1]", file)
