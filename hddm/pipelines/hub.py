"""Ensembles on a model hub that speaks huggingface_hub's protocol: the model card, and the upload.

The card is README.md, whose first lines are YAML for hubs.
"""

import contextlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from hddm.classes import join_classes
from hddm.evaluation.compare import escaped, table
from hddm.evaluation.results import Result, ResultGroup, read_result
from hddm.experts.ensemble_folders import ENSEMBLE_FILE, refuse_damaged_ensemble
from hddm.experts.ensemble_records import (
    PIPELINE_FILE,
    EnsembleRecord,
    components_in,
    foreign_pipeline,
    read_ensemble_record,
)
from hddm.experts.expert import experts_in
from hddm.experts.records import ExpertRecord
from hddm.pipelines.picture_texts import says_how_it_was_made
from hddm.utils.addresses import Address, address_of
from hddm.utils.errors import HddmError, UsageError, counted, one_line, shown
from hddm.utils.files import inside, restore
from hddm.utils.pages import templates
from hddm.utils.progress import Progress
from hddm.utils.records import MANIFEST, PAPERS, has_manifest, model_hash, sealed_files

CARD = "README.md"
MARK = "<!-- hddm push writes this card anew; without this line it is yours, and stays. -->"
# fmt: off
_HUB_LICENCES = {
    "apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "gpl-3.0", "agpl-3.0", "lgpl-3.0",
    "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0",
    "openrail", "openrail++", "creativeml-openrail-m", "bigscience-openrail-m", "unlicense",
}
# fmt: on
"""Licences that hubs know by name; any other is ``other``, with its own name beside it."""
_NON_COMMERCIAL = re.compile(
    r"(?<![a-z])(nc(?![a-z])|non.?commercial|research.only)", re.IGNORECASE
)

Licences = Mapping[str, str | None]
"""Licence by the name of a part, None where it is unknown."""
_PICTURES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class Upload:
    """Files of a repository by name, on disk or as text, and notes on them."""

    repo_id: str
    """The repository, or an address."""
    files: dict[str, Path | bytes]
    notes: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        found = {}
        for name, one in self.files.items():
            found[name] = len(one) if isinstance(one, bytes) else one.stat().st_size
        return found


def plan_upload(
    folder: Path,
    repo_id: str,
    licence: str | None = None,
    picture: Path | None = None,
    results: Path | None = None,
) -> Upload:
    """Return the files of an ensemble's repository, with its card.

    These are the files that its manifests list, and README, LICENSE and pictures of its top folder; a note
    names all others that are not hidden.

    Arguments are those of `model_card`, with ``picture`` a file. A README.md that hddm did not write stays.
    Raises `UsageError` for a name that is not OWNER/NAME, for another folder than an ensemble's, and for
    arguments of the card beside one's own; `HddmError` for an ensemble that is damaged or brings code, and as
    `model_card`.
    """
    is_address = address_of(repo_id) is not None
    if not is_address and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id, re.ASCII):
        raise UsageError(
            f"{one_line(repo_id, 60)}: write OWNER/NAME, of letters, digits, '-', '_' and '.', or an address"
        )
    restore(folder)
    if not (folder / ENSEMBLE_FILE).is_file():
        raise UsageError(
            f"{folder}: no ensemble folder ({ENSEMBLE_FILE}); make one with hddm assemble"
        )
    record = read_ensemble_record(folder)
    refuse_damaged_ensemble(folder, record, range(len(record.experts)))
    line = foreign_pipeline(folder)
    if line:
        raise HddmError(f"{folder}/{line}")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    sealed = sealed_files(folder) if has_manifest(folder) else {MANIFEST}
    gone = [name for name in sorted(sealed) if not inside(folder, name).is_file()]
    if gone:
        again = f"write a new {MANIFEST} with hddm assemble {folder} --strategy {record.strategy}"
        raise HddmError(f"{folder / gone[0]}: is missing; copy the whole folder again, or {again}")
    others = [name for name in sorted(names - sealed) if not re.search(r"(^|/)\.", name)]
    papers = {name for name in others if _is_paper(name)}
    files: dict[str, Path | bytes] = {}
    for name in sorted(sealed | papers):
        files[name] = inside(folder, name)
    own, sheet = folder / CARD, None
    is_own = own.is_file() and MARK not in own.read_text(encoding="utf-8", errors="replace")
    given = {"licence": licence, "picture": picture, "results": results}
    for name, one in given.items():
        if is_own and one is not None:
            raise UsageError(
                f"`{name}`: is for a card that hddm writes, and {own} is yours; drop one"
            )
    if picture is not None:
        sheet = f"picture{picture.suffix.lower()}"
        files[sheet] = picture
    text, notes = model_card(folder, repo_id, record, licence, sheet, results)
    left_out = shown([name for name in others if name not in papers])
    if left_out:
        notes.append(f"left out, since no manifest lists them: {', '.join(left_out)}")
    telling = []
    for name, file in files.items():
        if not isinstance(file, Path) or not name.lower().endswith(".png"):
            continue
        if says_how_it_was_made(file):
            telling.append(name)
    if telling:
        text = "say how they were made, prompts included; hddm sample --no-metadata makes others"
        notes.append(f"pictures {text}: {', '.join(shown(telling))}")
    if is_own:
        return Upload(repo_id, files, (f"{own} is yours, and is the card as it is", *notes))
    return Upload(repo_id, files | {CARD: text.encode()}, tuple(notes))


def upload_to_address(planned: Upload, address: Address) -> None:
    """Send files to an address, where nothing may be yet; raises as `hddm.utils.uploading.upload_files`."""
    from hddm.utils.uploading import refuse_existing, refuse_others, upload_files

    refuse_existing(address, ENSEMBLE_FILE)
    refuse_others(address)
    files: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, one in planned.files.items():
            if isinstance(one, Path):
                files[name] = one
            else:
                files[name] = Path(folder, name)
                files[name].write_bytes(one)
        upload_files(files, address, ENSEMBLE_FILE)


def _is_paper(name: str) -> bool:
    """True for README, LICENSE, pictures and the code of a pipeline."""
    path = Path(name)
    # Folders of other tools may hold private pictures and notes.
    if path.parent.as_posix() not in (".", "pictures"):
        return False
    is_picture = name.lower().endswith(_PICTURES)
    return is_picture or name == PIPELINE_FILE or path.stem.upper() in PAPERS


def upload(
    planned: Upload,
    private: bool | None = None,
    token: str | None = None,
    message: str | None = None,
) -> str:
    """Send files to a repository, which is created if it does not exist; return its address.

    ``token`` is by default huggingface_hub's: ``HF_TOKEN``, or that of ``hf auth login``. All files appear in
    one commit at the end. Raises `HddmError` without a token, and if the hub refuses or cannot be reached.
    """
    token = token or get_token()
    if not token:
        raise HddmError("no token for the hub: set HF_TOKEN, or log in with hf auth login")
    api, sizes = HfApi(token=token), planned.sizes
    additions = [CommitOperationAdd(name, one) for name, one in planned.files.items()]
    count, repo_id = counted(len(additions), "file"), planned.repo_id
    were_off = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with Progress(sum(sizes.values()), f"push {count}") as advance:
            address = api.create_repo(repo_id, private=private, exist_ok=True)
            for one in additions:
                api.preupload_lfs_files(repo_id, [one])
                advance(sizes[one.path_in_repo])
            api.create_commit(
                repo_id, additions, commit_message=message or "Upload an ensemble with hddm"
            )
            return str(address)
    # For connections it raises the errors of another library, which differ by its version.
    except Exception as error:
        answer = getattr(error, "response", None)
        if answer is None:
            answer = getattr(error.__cause__, "response", None)
        status = None if answer is None else answer.status_code
        why = {
            401: "the hub does not accept this token; log in again with hf auth login, or set HF_TOKEN",
            403: f"this token may not write to {repo_id}; use a token of its owner that may write",
            404: f"there is no {repo_id} that this token may see; check the owner's name",
        }.get(status or 0, one_line(error).replace(token, "…"))
        raise HddmError(f"{api.endpoint}: {why}; nothing was published") from error
    finally:
        if not were_off:
            enable_progress_bars()


def model_card(
    folder: Path,
    repo_id: str,
    record: EnsembleRecord,
    licence: str | None = None,
    picture: str | None = None,
    results: Path | None = None,
) -> tuple[str, list[str]]:
    """Return the card of the ensemble in ``folder``, to be called ``repo_id``, and the remarks at its top.

    ``licence`` is for experts that record none, ``picture`` a file beside the card, ``results`` a result of
    ``hddm evaluate``, or a table in Markdown. Raises `HddmError` for results of another model.
    """
    experts = experts_in(folder, record)
    records = [one.record for one in experts]
    licences = licences_of(folder, record, records, licence)
    components, has_text = components_in(folder), any(one.takes_text for one in records)
    front, front_name, said = licence_of(licences)
    data = ModelCardData(
        license=front,
        license_name=front_name,
        library_name="hddm",
        pipeline_tag="text-to-image" if has_text else "unconditional-image-generation",
        tags=["hddm", "diffusion", "ensemble", "mixture-of-experts"],
    )
    classes = join_classes(tuple(one.classes for one in experts)).names
    shapes: dict[str, None] = {}
    by_name: dict[str, ExpertRecord] = {}
    for member, one in zip(record.experts, records, strict=True):
        by_name[member.label] = one
        shapes["×".join(map(str, one.sample_shape)) + f" {one.space}"] = None
    environment = templates(is_html=False, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {
        "literal": _literal,
        "counted": counted,
        "basename": lambda path: Path(path).name,
    }
    template = environment.get_template("pipelines/card.md.j2")
    title = repo_id.split("/")[-1]
    text = template.render(
        front=data.to_yaml(),
        title=title,
        remarks=[line.split(":", 1) for line in said],
        records=records,
        by_name=by_name,
        licences=licences,
        components=components,
        takes_text=has_text,
        takes_classes=any(one.takes_classes for one in records),
        classes=classes,
        shapes=shapes,
        strategy=record.strategy,
        picture=picture,
        measured=results and _measured(results, folder, title),
        repo_id=repo_id,
        # Given a hub's name, diffusers loads no part of a library that it does not know.
        has_code=(folder / PIPELINE_FILE).exists(),
        mark=MARK,
    )
    return text, said


def licences_of(
    folder: Path, record: EnsembleRecord, records: Sequence[ExpertRecord], stated: str | None
) -> Licences:
    """Licences of the experts, and of other parts whose own card states one."""
    found = {}
    for member, one in zip(record.experts, records, strict=True):
        found[member.label] = _known(one.licence) or stated
    for name in components_in(folder):
        card = folder / name / CARD
        with contextlib.suppress(ValueError, OSError):
            if card.is_file():
                of = ModelCard.load(card, ignore_metadata_errors=True).data
                licence = _known(of.get("license_name") or of.license)
                if licence:
                    found[name] = licence
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
    said: list[str] = []
    unknown: list[str] = []
    stated: set[str] = set()
    for name, one in licences.items():
        if one is None:
            unknown.append(name)
        if not one:
            continue
        if _NON_COMMERCIAL.search(one):
            text = f"{name} is under {one}, so all of this is not for commercial use."
            said.append(f"Non-commercial: {text}")
        for each in one.lower().split(" and "):
            # A remark in brackets names the source of the licence.
            stated.add(re.sub(r" \(.*", "", each))
    is_free = not said
    if unknown:
        said.append(f"Licence unknown: ask the owner of {', '.join(unknown)}.")
    joint = " and ".join(sorted(stated))
    if not unknown and joint in _HUB_LICENCES:
        return joint, None, said
    if unknown and is_free:
        return "unknown", None, said
    joint_name = re.sub(r"[^a-z0-9.+]+", "-", joint).strip("-")
    return "other", joint_name, said


def _measured(results: Path, folder: Path, title: str) -> str:
    if results.suffix == ".md":
        return results.read_text(encoding="utf-8").strip()
    result = read_result(results)
    source = None if result.sampling is None else result.sampling.source_sha256
    if source not in (None, model_hash(folder)):
        raise HddmError(
            f"`results` {results}: measures another model; sample {folder}, and evaluate that"
        )
    marks = [f"Not comparable: {reason}." for reason in result.reasons]
    shown = table([ResultGroup(title, (Result(results, result, title),))])
    return "\n\n".join([shown, *map(_literal, marks)])


def _literal(text: str) -> str:
    """``text`` as one line without a meaning in Markdown, also within a table."""
    return escaped(re.sub(r"([\\`*_~$&\[\]])", r"\\\1", text))
