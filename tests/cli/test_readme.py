"""The README and the guides keep their word: commands are accepted, Python runs, files are read."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.families import GUIDE, with_table
from hddm.benchmark.file import read_benchmark
from hddm.training.settings import ExpertSettings, settings_of
from hddm_cli import options
from hddm_cli.app import run_words, tree
from tests.artefacts import Command
from tests.checkpoint_files import pipeline, text_unet
from tests.component_files import write_clip, write_vae
from tests.ensemble_files import load_ensemble
from tests.ldm_files import tiny_pipeline, whole_file
from tests.lora_files import kohya

ROOT = Path(__file__).parents[2]
DOCS = (one for one in (ROOT / "docs").rglob("*.md") if not {"_build", "notes"} & {*one.parts})
PAGES = [ROOT / "README.md", *sorted(DOCS)]
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Code(NamedTuple):
    """A block of a page; the blocks of its story are run one after the other."""

    page: str
    language: str
    text: str
    is_story: bool

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0]}"


def _code(page: Path) -> list[Code]:
    found = re.findall(
        r"^(<!-- story -->\n)?```([^\n]*)\n(.*?)^```$", page.read_text(), re.M | re.S
    )
    blocks = [Code(page.name, language, text, bool(story)) for story, language, text in found]
    return [one for one in blocks if not one.language.startswith("{")]


def _words(code: Code) -> list[list[str]]:
    lines = (
        shlex.split(line, comments=True) for line in code.text.replace("\\\n", "").splitlines()
    )
    return [words for words in lines if words]


BLOCKS = [code for page in PAGES for code in _code(page)]
LINES = [words for code in BLOCKS if code.language == "bash" for words in _words(code)]
# Words of hddm; what accelerate launches are such too.
HDDM = sorted({tuple(w[3:] if w[:3] == ["accelerate", "launch", "-m"] else w) for w in LINES})
HDDM = [words for words in HDDM if words[0] in ("hddm", "hddm_cli")]
PYTHON = [code for code in BLOCKS if code.language == "python"]
STORIES = [
    "README.md",
    "convert.md",
    "fine-tune.md",
    "noise-levels.md",
    "python.md",
    "quickstart.md",
    "train.md",
]


def test_contributing_names_files_and_objects_that_exist() -> None:
    for row in re.findall(r"^\| .*", (ROOT / "CONTRIBUTING.md").read_text(), re.M):
        names = re.findall(r"`([^`\s]+)`", row)
        files = [ROOT / name for name in names if "/" in name]
        assert [file for file in files if not file.exists()] == []
        code = " ".join(file.read_text() for file in files if file.suffix == ".py")
        parts = {
            part for name in names if re.fullmatch(r"[\w.]+", name) for part in name.split(".")
        }
        assert [part for part in parts if not re.search(rf"\b{part}\b", code)] == [], row


def test_contributing_says_what_to_change_in_few_words() -> None:
    """A cell that needs more words is a decision without an object."""
    for row in re.findall(r"^\| .*", (ROOT / "CONTRIBUTING.md").read_text(), re.M):
        cells = [cell.strip() for cell in row.strip("| ").split("|")]
        assert [cell for cell in cells if len(cell) > 300] == []


def test_the_tables_of_files_name_tests_that_exist() -> None:
    found = set[str]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.M))
    for page in ("convert.md", "lora.md"):
        named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/guides" / page).read_text()))
        assert len(named) > 10
        assert named <= found


def test_its_first_screen_shows_the_two_commands_that_set_up_a_fresh_machine() -> None:
    first = next(code for code in BLOCKS if code.page == "README.md")
    assert [words[:2] for words in _words(first)] == [["make", "quickstart"], ["make", "test"]]
    text = (ROOT / "README.md").read_text()
    assert text.partition(first.text)[0].count("\n") < 20
    assert "pip install '.[train]'" in text


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on PATH")
@pytest.mark.parametrize(
    ("target", "runs"),
    [("quickstart", "/hddm quickstart"), ("test", "-m pytest"), ("check", "-m pytest")],
)
def test_each_target_of_make_installs_first_what_it_runs(
    target: str, runs: str, tmp_path: Path
) -> None:
    made = ["make", "--dry-run", target, f"VENV={tmp_path / 'new'}"]
    lines = subprocess.run(
        made, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    order = [
        next(k for k, line in enumerate(lines) if part in line)
        for part in ("-m venv", "pip install")
    ]
    assert order == sorted(order)
    # What `make check` runs in the end is `make test`.
    assert order[-1] < max(k for k, line in enumerate(lines) if runs in line)


def test_the_table_of_pipelines_is_what_the_families_say() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    assert guide == with_table(guide), "run python -m benchmarks.families"


def test_continuous_integration_runs_what_a_developer_runs() -> None:
    commands = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    assert commands[-1] == "make check"
    check = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    assert "$(MAKE) test " in check.splitlines()[-1]


@pytest.mark.parametrize("line", HDDM, ids=shlex.join)
def test_its_commands_are_accepted(line: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    # Files that a line reads are the reader's own.
    monkeypatch.setattr(Path, "exists", lambda *_, **__: True)
    monkeypatch.setattr(options, "check_absent", lambda *_: None)
    command, words = tree(), list(line[1:])
    while known := getattr(command, "commands", None):
        command = known[words.pop(0)]
    command.make_context("hddm", words)


@pytest.mark.parametrize("code", PYTHON, ids=str)
def test_its_python_runs_as_it_stands(
    code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile(code.text, code.page, "exec")
    needed = ("hddm.load(", ".from_pretrained(", "http://127.0.0.1", "runs/quickstart")
    if not any(word in code.text for word in needed):
        monkeypatch.chdir(tmp_path)
        exec(compiled, {"__name__": "__main__"})


@pytest.mark.parametrize("code", [one for one in BLOCKS if one.language == "yaml"], ids=str)
def test_its_files_of_settings_are_read(code: Code, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(code.text)
    if code.text.startswith("# run file"):
        settings_of(ExpertSettings, file, {"objective": "flow", "steps": 1})
    else:
        read_benchmark(str(file))


@pytest.mark.slow
@pytest.mark.parametrize("page", STORIES)
def test_its_stories_can_be_followed(
    page: str, hddm: Command, ensemble: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _prepare(tmp_path, ensemble)
    _follow(page, hddm)


@pytest.mark.slow
def test_two_files_of_stable_diffusion_are_mixed_as_the_guide_says(
    hddm: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _prepare_files(tmp_path)
    _follow("mix-stable-diffusion.md", hddm)
    for name in ("alone", "nights", "drawn", "soup-cars"):
        assert list((tmp_path / name).glob("*.png")), name
    assert (tmp_path / "mixed.png").is_file()


@pytest.mark.slow
def test_styles_are_mixed_as_the_guide_says(
    hddm: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _prepare_files(tmp_path)
    network = text_unet()
    for seed, name in enumerate(("watercolour", "pixel-art")):
        noise, content = torch.Generator().manual_seed(seed), kohya(network)
        for key, value in content.items():
            if value.ndim:
                content[key] = 0.1 * torch.randn(value.shape, generator=noise)
        save_file(content, tmp_path / f"{name}.safetensors")
    _follow("mix-styles.md", hddm)
    for folder, pictures in (("drawn", 8), ("watercolours", 16), ("roses", 4)):
        assert len(list((tmp_path / folder).glob("*.png"))) == pictures, folder
    experts = load_ensemble(tmp_path / "styles").experts
    assert len({id(one.network.holder) for one in experts}) == 1


def _follow(page: str, hddm: Command) -> None:
    """Run the blocks of a page's story in the working folder."""
    for code in (one for one in BLOCKS if one.page == page and one.is_story):
        if code.language == "python":
            shorter = re.sub(r'("steps":|steps=) ?\d+', r"\1 2", code.text)
            exec(compile(shorter, page, "exec"), {"__name__": "__main__"})
            continue
        for words in _words(code):
            # Short trainings, and of few images a larger share to judge by.
            shorter = re.sub(r"(--steps) \d+", r"\1 2", shlex.join(words[1:]))
            shorter = shorter.replace("--held-out 0.02", "--held-out 0.1")
            ended, _, said = hddm(*shlex.split(shorter))
            # Two steps do not make an expert that passes.
            assert ended == 0 or (ended == 1 and words[1] == "verify"), f"{shorter}: {said}"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_the_network_for_nothing(
    tmp_path: Path,
) -> None:
    pytest.importorskip("furo")
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--quiet",
        ROOT / "docs",
        tmp_path,
    ]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "cli", os.environ.get("PYTHONPATH", ""))))
    subprocess.run(build, check=True, env=os.environ | {"PYTHONPATH": paths})
    pages = [
        page.read_text() for page in tmp_path.rglob("*.html") if "_downloads" not in page.parts
    ]
    assert len(pages) > len(PAGES)
    fetched = [
        one for page in pages for one in re.findall(r"<(?:link|script|img)[^>]*//[^>]*>", page)
    ]
    assert not fetched


def _prepare(folder: Path, ensemble: Path) -> None:
    """Everything that a story begins with, under the names that it has there."""
    quickstart = folder / "runs/quickstart"
    quickstart.mkdir(parents=True)
    with contextlib.chdir(quickstart):
        for line in (
            "data digits --out digits",
            "partition digits/train --only 0,1,2,3,4 --shards 1 --out shards",
            "data old-model shards/shard_0 --out old-pipeline --steps 1",
        ):
            run_words(line.split())
    shutil.copytree(ensemble, quickstart / "grown")
    digits = quickstart / "digits/train"
    (folder / "photos").symlink_to(digits)
    for digit, name in enumerate(CLASSES):
        shutil.copytree(digits / str(digit), folder / "cifar/train" / name)
    _prepare_files(folder)


def _prepare_files(folder: Path) -> None:
    """Pipelines and single files of Stable Diffusion, in tiny; pictures of the files have 64 pixels."""
    checkpoint = pipeline(folder / "stable-diffusion-v1-5", text_unet())
    write_vae(checkpoint / "vae")
    write_clip(checkpoint)
    shutil.copytree(checkpoint, folder / "my-fine-tune")
    markers = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    files: dict[str, tuple[str, dict[str, torch.Tensor]]] = {
        "v1-5-pruned": ("1", {}),
        "illustrious-xl": ("XL", {}),
        "noobai-xl-vpred": ("XL", markers),
    }
    for seed, (name, (kind, further)) in enumerate(files.items()):
        made = tiny_pipeline(folder / "made" / name, kind, seed)
        content = {key: one.contiguous() for key, one in whole_file(made, kind).items()}
        header = {"modelspec.resolution": "64x64"}
        save_file(content | further, folder / f"{name}.safetensors", header)
    shutil.copytree(folder / "made/illustrious-xl/parts/tokenizer", folder / "sdxl/tokenizer")
