"""Model card of an ensemble: README.md, whose first lines are YAML that model hubs read."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from hddm.classes import join_classes
from hddm.evaluation.compare import escaped, markdown_table, table
from hddm.evaluation.results import Result, ResultGroup, read_result
from hddm.experts.assembly import PIPELINE_FILE
from hddm.experts.compatibility import takes_classes, takes_text
from hddm.experts.ensemble_folders import EnsembleRecord, components_in
from hddm.experts.parts import class_lists, read_records
from hddm.experts.records import ExpertRecord
from hddm.utils.errors import HddmError, counted, one_line
from hddm.utils.records import WHOLE, content_hash

CARD = "README.md"
MARK = "<!-- hddm push writes this card anew; without this line it is yours, and stays. -->"
_HUB_LICENCES = {
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "gpl-3.0", "agpl-3.0", "lgpl-3.0"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0"),
    *("openrail", "openrail++", "creativeml-openrail-m", "bigscience-openrail-m", "unlicense"),
}
"""Licences that a hub knows by a name; any other is ``other``, with its name beside."""
_NON_COMMERCIAL = re.compile(r"(?<![a-z])(nc(?![a-z])|non.?commercial|research.only)", re.IGNORECASE)

Licences = Mapping[str, str | None]
"""Licence by the name of a part, None where it is unknown."""


def model_card(
    folder: Path,
    repo_id: str,
    facts: EnsembleRecord,
    licence: str | None = None,
    picture: str | None = None,
    results: Path | None = None,
) -> tuple[str, list[str]]:
    """Return the card of the ensemble in ``folder``, to be called ``repo_id``, and what it warns of.

    ``licence`` is of experts that record none, ``picture`` a file beside the card, ``results`` those of
    ``hddm evaluate``, or a table in Markdown. Raises `HddmError` for results of another model.
    """
    records = [record for _, record in read_records([folder / one.folder for one in facts.experts])]
    licences = licences_of(folder, facts, records, licence)
    components, has_text = components_in(folder), any(map(takes_text, records))
    front, front_name, said = licence_of(licences)
    data = ModelCardData(
        license=front,
        license_name=front_name,
        library_name="hddm",
        pipeline_tag="text-to-image" if has_text else "unconditional-image-generation",
        tags=["hddm", "diffusion", "ensemble", "mixture-of-experts"],
    )
    of = dict(zip((one.label for one in facts.experts), map(_row, records), strict=True))
    classes = join_classes(tuple(class_lists(facts.experts, [("", record) for record in records]))).names
    rows = [
        [*map(_literal, (name, *of.get(name, [""] * 3), one or f"unknown: ask the owner of {name}"))]
        for name, one in licences.items()
    ]
    title = repo_id.split("/")[-1]
    of_classes = f"of {counted(len(classes), 'class', 'classes')} " if classes else ""
    shapes = dict.fromkeys("×".join(map(str, one.sample_shape)) + f" {one.space}" for one in records)
    blocks = [
        f"---\n{data.to_yaml()}\n---",
        f"# {_literal(title)}",
        *("**{}**:{}".format(*escaped(_literal(line)).split(":", 1)) for line in said),
        f"{counted(len(records), 'diffusion expert')} that learned apart, sampled as one model by hddm. It "
        f"makes images {'from prompts ' if has_text else of_classes}in {', '.join(shapes)}; at sampling the "
        f"experts are chosen by the strategy {escaped(_literal(facts.strategy))}.",
        *([f"![Samples]({picture})"] if picture else []),
        "## Parts\n\n"
        + "\n".join(markdown_table(["part", "objective", "data", "source", "licence"], rows, "left")),
        *([f"## Measured\n\n{_measured(results, folder, title)}"] if results else []),
        f"## Use\n\n```bash\npip install .  # in a checkout of hddm\n```\n\n```python\n"
        f"{usage(repo_id, records, components)}\n```",
    ]
    if (folder / PIPELINE_FILE).exists():
        # From a hub's name diffusers loads no part of a library that it does not know.
        blocks.append(
            f'Or in diffusers: `folder = snapshot_download("{repo_id}")`, '
            "`DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)`."
        )
    return "\n\n".join([*blocks, MARK]) + "\n", said


def licences_of(
    folder: Path, facts: EnsembleRecord, records: Sequence[ExpertRecord], stated: str | None
) -> Licences:
    """Licences of the experts, and of the other parts that hold one in a card of their own."""
    pairs = zip(facts.experts, records, strict=True)
    found = {member.label: _known(one.licence) or stated for member, one in pairs}
    for name in components_in(folder):
        card = folder / name / CARD
        with contextlib.suppress(ValueError, OSError):
            of = ModelCard.load(card, ignore_metadata_errors=True).data if card.is_file() else None
            if of is not None and (one := _known(of.get("license_name") or of.license)):
                found[name] = one
    return found


def _known(licence: object) -> str | None:
    """A licence, None where what is recorded names none."""
    known = one_line(licence) if isinstance(licence, str) and licence.strip() else "unknown"
    known = "".join(filter(str.isprintable, known))
    return None if known.lower() in ("other", "unknown") else known


def licence_of(licences: Licences) -> tuple[str, str | None, list[str]]:
    """Licence of the whole as hubs know it, its name where it is ``other``, and what a card says first.

    It is that of the parts, where all have the same. A part that is not for commercial use makes the whole
    so; an unknown licence makes it unknown.
    """
    said = [
        f"Non-commercial: {name} is under {one}, so all of this is not for commercial use."
        for name, one in licences.items()
        if one is not None and _NON_COMMERCIAL.search(one)
    ]
    is_free, unknown = not said, [name for name, one in licences.items() if one is None]
    if unknown:
        said.append(f"Licence unknown: ask the owner of {', '.join(unknown)}.")
    # A remark in brackets says where a licence is known from.
    stated = {each for one in licences.values() if one for each in one.lower().split(" and ")}
    joint = " and ".join(sorted({re.sub(r" \(.*", "", one) for one in stated}))
    if not unknown and joint in _HUB_LICENCES:
        return joint, None, said
    if unknown and is_free:
        return "unknown", None, said
    name = re.sub(r"[^a-z0-9.+]+", "-", joint).strip("-")
    return "other", name, said


def usage(repo_id: str, records: Sequence[ExpertRecord], components: Sequence[str]) -> str:
    """Lines of Python that make an image of the ensemble on a hub."""
    lines = [
        "import hddm",
        "from huggingface_hub import snapshot_download\n",
        f'pipe = hddm.HDDMPipeline.from_pretrained(snapshot_download("{repo_id}"))',
    ]
    given = "class_labels=[0], " if any(map(takes_classes, records)) else ""
    if any(map(takes_text, records)):
        given = '"a red car", ' if "text_encoder" in components else "prompt_embeds=…, "
    is_decoded = records[0].space == "pixels" or "vae" in components
    end = 'seed=0).images[0].save("image.png")' if is_decoded else 'seed=0, output_type="latent").images'
    return "\n".join([*lines, f"pipe({given}{end}"])


def _row(record: ExpertRecord) -> list[str]:
    """Objective, data and source of an expert."""
    shard, source = record.shard, record.source
    part = "" if record.noise_range == WHOLE else ", t in {:g}:{:g}".format(*record.noise_range)
    objective = f"{record.objective}{part}"
    data = "not recorded"
    if shard is not None:
        data = f"{counted(shard.images, 'image')}, shard {shard.index} of {shard.num_shards}"
    if source is None:
        return [objective, data, "trained by hddm"]
    first = source.first
    return [objective, data, f"{first.layout}: {', '.join(Path(name).name for name in first.files)}"]


def _measured(results: Path, folder: Path, title: str) -> str:
    if results.suffix == ".md":
        return results.read_text(encoding="utf-8").strip()
    result = read_result(results)
    source = None if result.sampling is None else result.sampling.source_sha256
    if source not in (None, content_hash(folder)):
        raise HddmError(f"--results {results}: measures another model; sample {folder}, and evaluate that")
    marks = [f"Not comparable: {reason}." for reason in result.reasons]
    return "\n\n".join(
        [table([ResultGroup(title, (Result(results, result, title),))]), *map(escaped, map(_literal, marks))]
    )


def _literal(text: str) -> str:
    """``text`` without a meaning in Markdown, but for what `escaped` treats."""
    return re.sub(r"([\\`*_~$&\[\]])", r"\\\1", text)
