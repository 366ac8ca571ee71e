"""Model card of an ensemble: README.md, whose first lines are YAML for model hubs."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from hddm.conditions import join_classes
from hddm.evaluation.compare import escaped, table
from hddm.evaluation.results import Result, ResultGroup, read_result
from hddm.experts.assembly import PIPELINE_FILE
from hddm.experts.compatibility import read_entries, takes_classes, takes_text
from hddm.experts.ensemble_folders import EnsembleRecord, components_in
from hddm.experts.records import ExpertRecord
from hddm.utils.errors import HddmError, counted, one_line
from hddm.utils.pages import templates
from hddm.utils.records import content_hash

CARD = "README.md"
MARK = "<!-- hddm push writes this card anew; without this line it is yours, and stays. -->"
_HUB_LICENCES = {
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "gpl-3.0", "agpl-3.0", "lgpl-3.0"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0"),
    *("openrail", "openrail++", "creativeml-openrail-m", "bigscience-openrail-m", "unlicense"),
}
"""Licences that hubs know by name; any other is ``other``, with its own name beside it."""
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
    """Return the card of the ensemble in ``folder``, to be called ``repo_id``, and the remarks at its top.

    ``licence`` is for experts that record none, ``picture`` a file beside the card, ``results`` a result of
    ``hddm evaluate``, or a table in Markdown. Raises `HddmError` for results of another model.
    """
    entries = read_entries([folder / one.folder for one in facts.experts], facts.experts)
    records = [one.record for one in entries]
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
    classes = join_classes(tuple(one.classes for one in entries)).names
    shapes = dict.fromkeys("×".join(map(str, one.sample_shape)) + f" {one.space}" for one in records)
    environment = templates(is_html=False, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"literal": _literal, "counted": counted, "basename": lambda path: Path(path).name}
    template = environment.get_template("pipelines/card.md.j2")
    title = repo_id.split("/")[-1]
    text = template.render(
        front=data.to_yaml(),
        title=title,
        remarks=[line.split(":", 1) for line in said],
        records=records,
        by_name=dict(zip((one.label for one in facts.experts), records, strict=True)),
        licences=licences,
        components=components,
        takes_text=has_text,
        takes_classes=any(map(takes_classes, records)),
        classes=classes,
        shapes=shapes,
        strategy=facts.strategy,
        picture=picture,
        measured=results and _measured(results, folder, title),
        repo_id=repo_id,
        # Given a hub's name, diffusers loads no part of a library that it does not know.
        has_code=(folder / PIPELINE_FILE).exists(),
        mark=MARK,
    )
    return text, said


def licences_of(
    folder: Path, facts: EnsembleRecord, records: Sequence[ExpertRecord], stated: str | None
) -> Licences:
    """Licences of the experts, and of other parts whose own card states one."""
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
    """A licence; None if none is recorded."""
    known = one_line(licence) if isinstance(licence, str) and licence.strip() else "unknown"
    known = "".join(filter(str.isprintable, known))
    return None if known.lower() in ("other", "unknown") else known


def licence_of(licences: Licences) -> tuple[str, str | None, list[str]]:
    """Licence of the whole as hubs know it, its name if it is ``other``, and the remarks at the card's top.

    It is the parts' licence if they share one. One non-commercial part makes the whole non-commercial, and an
    unknown licence makes it unknown.
    """
    said = [
        f"Non-commercial: {name} is under {one}, so all of this is not for commercial use."
        for name, one in licences.items()
        if one is not None and _NON_COMMERCIAL.search(one)
    ]
    is_free, unknown = not said, [name for name, one in licences.items() if one is None]
    if unknown:
        said.append(f"Licence unknown: ask the owner of {', '.join(unknown)}.")
    # A remark in brackets tells the source of the licence.
    stated = {each for one in licences.values() if one for each in one.lower().split(" and ")}
    joint = " and ".join(sorted({re.sub(r" \(.*", "", one) for one in stated}))
    if not unknown and joint in _HUB_LICENCES:
        return joint, None, said
    if unknown and is_free:
        return "unknown", None, said
    name = re.sub(r"[^a-z0-9.+]+", "-", joint).strip("-")
    return "other", name, said


def _measured(results: Path, folder: Path, title: str) -> str:
    if results.suffix == ".md":
        return results.read_text(encoding="utf-8").strip()
    result = read_result(results)
    source = None if result.sampling is None else result.sampling.source_sha256
    if source not in (None, content_hash(folder)):
        raise HddmError(f"`results` {results}: measures another model; sample {folder}, and evaluate that")
    marks = [f"Not comparable: {reason}." for reason in result.reasons]
    shown = table([ResultGroup(title, (Result(results, result, title),))])
    return "\n\n".join([shown, *map(_literal, marks)])


def _literal(text: str) -> str:
    """``text`` as one line without a meaning in Markdown, also within a table."""
    return escaped(re.sub(r"([\\`*_~$&\[\]])", r"\\\1", text))
