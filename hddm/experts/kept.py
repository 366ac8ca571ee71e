"""Components that experts and ensembles keep beside networks: VAEs, text encoders and tokenizers.

Each has a folder with its weights, configs and licence, and in an expert a manifest of its own.
"""

from collections.abc import Callable
from pathlib import Path

from hddm.experts.ensemble_records import ClassName, kept_components, named, unnumbered
from hddm.networks.components import STEM as VAE_STEM
from hddm.networks.components import read_config, read_weights
from hddm.networks.encoders import TokenizerClass
from hddm.networks.prompts import (
    index_content,
    parts_in,
    refuse_other_parts,
    several_in,
    zeros_in,
)
from hddm.networks.text_encoder import STEM as TEXT_STEM
from hddm.networks.text_encoder import class_stated, text_encoder_class, text_encoder_config
from hddm.networks.tokenizer import tokenizer_class
from hddm.utils.copies import link_or_copy
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, read_json, write_json
from hddm.utils.records import (
    MANIFEST,
    MODEL_INDEX,
    damage,
    has_manifest,
    refuse_damaged,
    write_manifest,
)

_STEMS = {"vae": VAE_STEM, "text_encoder": TEXT_STEM}
_TEXT_FILES = (".json", ".jinja", ".txt", ".md")


def put_prompts(draft: Path, folder: Path, pipeline: str, variant: str | None = None) -> None:
    """Put the text encoders and tokenizers of ``folder``, of a pipeline, into ``draft``."""
    for part, kind in parts_in(pipeline).items():
        words = kind if isinstance(kind, TokenizerClass) else None
        put_component(draft, part, folder / part, variant, words)


def put_component(
    draft: Path,
    name: str,
    folder: Path,
    variant: str | None = None,
    words: TokenizerClass | None = None,
) -> ClassName:
    """Put a component into ``draft / name``, by hard links where possible; its library and class.

    Its weights (`hddm.networks.components.find_weights`), configs and licence: no pickle, no second copy of
    the weights. ``words`` is the class of a tokenizer that a pipeline needs. Raises `HddmError` for missing
    weights, a link that leaves ``folder``, and files that are not those of its manifest, where it has one.
    """
    if has_manifest(folder):
        _refuse_damaged_component(name, folder)
    target, kind = draft / name, unnumbered(name)
    pipeline = several_in(folder) if kind == "text_encoder" else None
    if pipeline is not None:
        refuse_other_parts(folder, pipeline)
        put_prompts(target, folder, pipeline, variant)
        write_json(target / MODEL_INDEX, index_content(pipeline, zeros_in(folder)))
        return "hddm", "PromptEncoders"
    target.mkdir(parents=True)
    if kind in _STEMS:
        weights, _ = read_weights(folder, _STEMS[kind], variant)
        stored = f"{_STEMS[kind]}.safetensors"
        if weights.suffix == ".json":
            stored += ".index.json"
            for shard in sorted(set(read_json(weights)["weight_map"].values())):
                link_or_copy(inside(folder, shard), target / shard)
        link_or_copy(weights, target / stored)
    if kind == "tokenizer" and words is None:
        words = tokenizer_class(folder)
    for path in sorted(folder.iterdir()):
        is_text = path.suffix in _TEXT_FILES or path.name.startswith("LICENSE")
        is_text |= words is not None and path.name in words.files
        # An index may be of other weights.
        is_other = path.name == MANIFEST or ".index." in path.name
        if is_text and not is_other and inside(folder, path.name).is_file():
            link_or_copy(path, target / path.name)
    if words is not None:
        return named(words)
    if kind == "text_encoder":
        # An expert has no index of the pipeline.
        config = text_encoder_config(folder)
        if config != read_config(folder):
            (target / "config.json").unlink()
            write_json(target / "config.json", config)
        encoder = text_encoder_class(config)
        if encoder is None:
            raise HddmError(f"{folder}: {class_stated(config)}, which hddm does not read")
        return named(encoder)
    return "diffusers", str(read_config(folder)["_class_name"])


Hashing = Callable[[Path], str]


def keep_component(expert: Path, name: str, folder: Path, variant: str | None = None) -> None:
    """Put a component into a folder of an expert, with a manifest of its own.

    An ensemble takes the expert's files, which its manifest lists, and the component apart.
    """
    put_component(expert, name, folder, variant)
    write_manifest(expert / name)


def whole_components(expert: Path, sha256: Hashing | None = None) -> dict[str, Path]:
    """`kept_components`, whose files must be those of their manifests (`damage`); else an `HddmError`."""
    found = kept_components(expert)
    for name, folder in found.items():
        _refuse_damaged_component(name, folder, sha256)
    return found


def _refuse_damaged_component(name: str, folder: Path, sha256: Hashing | None = None) -> None:
    """Refuse a component whose files are not those that were written with its manifest."""
    own = "config.json" if several_in(folder) is None else MODEL_INDEX
    record = "tokenizer_config.json" if name.startswith("tokenizer") else own
    refuse_damaged(folder, damage(folder, record, sha256=sha256))
