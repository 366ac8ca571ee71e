"""Ensembles on a model hub that speaks huggingface_hub's protocol."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from hddm.experts.assembly import PIPELINE_FILE, foreign_pipeline
from hddm.experts.ensemble_folders import ENSEMBLE_FILE, read_ensemble_facts, refuse_damaged_ensemble
from hddm.pipelines.card import CARD, MARK, model_card
from hddm.utils.errors import HddmError, UsageError, counted, one_line, shown
from hddm.utils.files import inside, restore
from hddm.utils.progress import Progress
from hddm.utils.records import MANIFEST, PAPERS, has_manifest, sealed_files

_PICTURES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class Upload:
    """Files of a repository by name, on disk or as text, and notes on them."""

    repo_id: str
    files: dict[str, Path | bytes]
    notes: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        files = self.files.items()
        return {name: len(one) if isinstance(one, bytes) else one.stat().st_size for name, one in files}


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
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id, re.ASCII):
        raise UsageError(f"{one_line(repo_id, 60)}: write OWNER/NAME, of letters, digits, '-', '_' and '.'")
    restore(folder)
    if not (folder / ENSEMBLE_FILE).is_file():
        raise UsageError(f"{folder}: no ensemble folder ({ENSEMBLE_FILE}); make one with hddm assemble")
    facts = read_ensemble_facts(folder)
    refuse_damaged_ensemble(folder, facts, range(len(facts.experts)))
    if line := foreign_pipeline(folder):
        raise HddmError(f"{folder}/{line}")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    sealed = sealed_files(folder) if has_manifest(folder) else {MANIFEST}
    if gone := sorted(name for name in sealed if not inside(folder, name).is_file()):
        again = f"write a new {MANIFEST} with hddm assemble {folder} --strategy {facts.strategy}"
        raise HddmError(f"{folder / gone[0]}: is missing; copy the whole folder again, or {again}")
    others = [name for name in sorted(names - sealed) if not re.search(r"(^|/)\.", name)]
    papers = {name for name in others if name == PIPELINE_FILE or Path(name).stem.upper() in PAPERS}
    papers |= {name for name in others if name.lower().endswith(_PICTURES)}
    # Folders of other tools may hold private pictures and notes.
    papers = {name for name in papers if Path(name).parent.as_posix() in (".", "pictures")}
    files: dict[str, Path | bytes] = {name: inside(folder, name) for name in sorted(sealed | papers)}
    own, sheet = folder / CARD, None
    is_own = own.is_file() and MARK not in own.read_text(encoding="utf-8", errors="replace")
    given = {"licence": licence, "picture": picture, "results": results}
    if is_own and (asked := [name for name, one in given.items() if one is not None]):
        raise UsageError(f"`{asked[0]}`: is for a card that hddm writes, and {own} is yours; drop one")
    if picture is not None:
        if (suffix := picture.suffix.lower()) not in _PICTURES:
            raise UsageError(f"`picture` {picture}: take a file that ends in {', '.join(_PICTURES)}")
        sheet = f"picture{suffix}"
        files[sheet] = picture
    text, notes = model_card(folder, repo_id, facts, licence, sheet, results)
    if left_out := shown([name for name in others if name not in papers]):
        notes.append(f"left out, since no manifest lists them: {', '.join(left_out)}")
    if is_own:
        return Upload(repo_id, files, (f"{own} is yours, and is the card as it is", *notes))
    return Upload(repo_id, files | {CARD: text.encode()}, tuple(notes))


def upload(
    planned: Upload, private: bool | None = None, token: str | None = None, message: str | None = None
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
            api.create_commit(repo_id, additions, commit_message=message or "Upload an ensemble with hddm")
            return str(address)
    # For connections it raises the errors of another library, which differ by its version.
    except Exception as error:
        answers = (getattr(one, "response", None) for one in (error, error.__cause__))
        status = next((one.status_code for one in answers if one is not None), None)
        why = {
            401: "the hub does not accept this token; log in again with hf auth login, or set HF_TOKEN",
            403: f"this token may not write to {repo_id}; use a token of its owner that may write",
            404: f"there is no {repo_id} that this token may see; check the owner's name",
        }.get(status or 0, one_line(error).replace(token, "…"))
        raise HddmError(f"{api.endpoint}: {why}; nothing was published") from error
    finally:
        if not were_off:
            enable_progress_bars()
