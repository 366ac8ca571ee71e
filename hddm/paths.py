"""Names from files and records, which must stay inside their folder."""

from pathlib import Path, PurePosixPath

from hddm.errors import HddmError


def inside(folder: Path, name: str) -> Path:
    """``folder/name`` with links followed, which must end in ``folder`` or in its hub-cache repository.

    A hub cache keeps ``models--org--name/snapshots/<revision>/file`` as a link to ``../../blobs/<hash>``;
    so links from below a revision may lead anywhere inside ``models--org--name``.

    Raises:
        HddmError: for an absolute name, ``..``, backslashes, NUL, and links that leave or turn in circles.
    """
    parts = PurePosixPath(name).parts
    odd = not parts or ".." in parts or any(letter in name for letter in "\\\0\n\r")
    # A colon after one letter is a drive on Windows.
    if odd or PurePosixPath(name).is_absolute() or name[1:2] == ":":
        raise HddmError(f"{folder}: the name {name!r} does not stay inside the folder; refused")
    try:
        root = folder.resolve()
        target = (root / name).resolve()
    # Circles are RuntimeError before Python 3.13.
    except (OSError, RuntimeError) as error:
        raise HddmError(f"{folder / name}: cannot be followed ({' '.join(str(error).split())})") from error
    if not target.is_relative_to(_enclosing(root)):
        raise HddmError(f"{folder / name}: is a link to {target}, outside the folder; refused, copy it there")
    return target


def _enclosing(folder: Path) -> Path:
    for revision in (folder, *folder.parents):
        repository = revision.parent.parent
        if revision.parent.name == "snapshots" and repository.name.startswith("models--"):
            return repository
    return folder
