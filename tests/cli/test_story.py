"""The story of the quickstart, told with trainings of two steps, and killed once on its way."""

import contextlib
import io
import json
import multiprocessing
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file
from typer.main import get_command

from hddm.ensemble import Ensemble
from hddm.experts.loading import load
from hddm.noise import Seeded
from hddm.running import pick_experts
from hddm.utils.errors import HddmError
from hddm_cli import options, story
from hddm_cli.app import commands
from hddm_cli.quickstart import STORY_FILE
from hddm_cli.story import (
    CHECKED,
    JOINED,
    LAST_OLD,
    OTHERWISE,
    SENTENCE,
    STRIP,
    check_unchanged,
    conclude,
    story_of,
    tell,
)
from tests.artefacts import copied, killing
from tests.benchmark_files import Inline
from tests.browser import CHROMIUM, Browser
from tests.killed_runs import CONTEXT, in_a_process

# One image more than a distance on 64 features asks for.
LENGTHS = {"old": 2, "new": 2, "router": 2, "images": 65}
COMMANDS = [step.command for chapter in story_of(1, LENGTHS) for step in chapter.steps]


class Told(NamedTuple):
    """A finished story: its folder, what its two starts printed, and what the last one returned."""

    out: Path
    killed: str
    printed: str
    said: str


def _tell_until_killed(out: Path, printed: Path) -> None:
    """Tell the story in this process, which is killed when its router is put in place."""
    sys.addaudithook(killing("os.rename", "router"))
    with printed.open("w", buffering=1) as file, contextlib.redirect_stderr(file):
        story.Workers = Inline  # type: ignore[misc, assignment]
        tell(out, lengths=LENGTHS)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("story")
    out, printed = folder / "out", folder / "killed.txt"
    process = in_a_process(_tell_until_killed, out, printed)
    process.join()
    assert process.exitcode == -signal.SIGKILL, printed.read_text()
    with contextlib.redirect_stderr(io.StringIO()) as again, pytest.MonkeyPatch.context() as patch:
        # Workers that are forked after the imports, which cost as much as all else.
        patch.setattr(multiprocessing, "get_context", lambda method: CONTEXT)
        said = tell(out, lengths=LENGTHS)
    return Told(out, printed.read_text(), again.getvalue(), said)


def _started(printed: str) -> list[str]:
    """Command lines in the order in which they started."""
    lines = re.findall(r"^  ((?:hddm|#) .*)$", printed, re.M)
    return [line.removesuffix(" --resume") for line in lines]


def test_killed_it_goes_on_where_it_was_and_each_step_is_done_once(told: Told) -> None:
    first, then = _started(told.killed), _started(told.printed)
    assert first == COMMANDS[: len(first)]
    assert COMMANDS[-len(then) :] == then
    # The router, which was killed.
    assert first[-1] == then[0]
    assert len(first) + len(then) == len(COMMANDS) + 1
    assert f"{len(then)} steps to run, about" in told.printed
    assert [line for line in told.printed.splitlines() if line.startswith("- ")][-1] == "- Compare"
    assert "--resume" not in told.killed
    assert told.printed.count(" --resume") == sum(" train " in one or " sample " in one for one in then)
    record = json.loads((told.out / STORY_FILE).read_text())
    assert sorted(record["seconds"]) == sorted(COMMANDS)
    assert not list(told.out.rglob(".*.part-*"))


def test_told_again_it_says_so_and_other_folders_are_left_alone(
    told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (told.out / STORY_FILE).stat().st_mtime_ns
    assert tell(told.out, lengths=LENGTHS) == ""
    assert f"{told.out}: was finished on 20" in capsys.readouterr().err
    assert (told.out / STORY_FILE).stat().st_mtime_ns == before
    with pytest.raises(HddmError, match=f"{told.out}: holds the quickstart of another version"):
        tell(told.out)
    (tmp_path / "mine").write_text("precious")
    for overwrite, reason in ((False, "holds other files"), (True, "has no story.json")):
        with pytest.raises(HddmError, match=reason):
            tell(tmp_path, overwrite, lengths=LENGTHS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_it_begins_anew_when_asked_to(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = copied(told.out, tmp_path / "out")
    monkeypatch.setattr(story, "_run", lambda *given: None)
    monkeypatch.setattr(story, "conclude", lambda *given: "told")
    assert tell(out, overwrite=True, lengths=LENGTHS) == "told"
    assert [path.name for path in out.iterdir()] == [STORY_FILE]


def test_a_step_of_unknown_time_and_a_comparison_that_went_leave_a_whole_story(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a review: a kill between a step's end and its record made every later start fail."""
    out = copied(told.out, tmp_path / "out")
    record = json.loads((out / STORY_FILE).read_text())
    del record["seconds"][COMMANDS[3]]
    (out / STORY_FILE).write_text(json.dumps(record))
    (out / "comparison.md").unlink()
    monkeypatch.setattr(story, "Workers", Inline)
    assert tell(out, lengths=LENGTHS).startswith(OTHERWISE)
    assert (out / "comparison.md").read_text() == (told.out / "comparison.md").read_text()
    page = (out / "report.html").read_text()
    assert all(command.replace(">", "&gt;") in page for command in COMMANDS)


def test_the_old_model_is_in_the_ensemble_bit_for_bit(told: Told, tmp_path: Path) -> None:
    equal = check_unchanged(told.out)
    model = load(told.out / "grown")
    assert isinstance(model, Ensemble)
    # The seed of a sample draws its expert; the first is the old model.
    number = LENGTHS["images"]
    is_old = pick_experts(model.prior_of(number, {}), Seeded(0).draws(range(number))) == 0
    old, grown = (sorted((told.out / "samples" / name).glob("*.png")) for name in ("old", "grown"))
    same = [one.read_bytes() == other.read_bytes() for one, other in zip(old, grown, strict=True)]
    assert equal == sum(same)
    assert same == is_old.tolist()

    out = copied(told.out, tmp_path / "out")
    within = sorted((out / "samples/old-in-grown").glob("*.png"))
    assert len(within) == CHECKED
    shutil.copyfile(within[1], within[0])
    with pytest.raises(HddmError, match=r"old-in-grown/00000.png: the old model makes another image"):
        check_unchanged(out)
    weights = out / "grown/experts/0/diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values())).view(-1)[0] += 1e-3
    weights.unlink()
    save_file(tensors, weights)
    with pytest.raises(HddmError, match="grown: the weights of its first expert differ"):
        check_unchanged(out)


def test_the_report_shows_three_strips_of_samples_and_asks_no_host(told: Told, tmp_path: Path) -> None:
    page = (told.out / "report.html").read_text()
    # Two steps make no digits.
    assert f"<h1>{OTHERWISE}</h1>" in page
    assert told.said.startswith(OTHERWISE)
    strips = re.findall(r'<section class="strip">(.*?)</section>', page, re.DOTALL)
    assert len(strips) == 3
    assert all(strip.count('<img class="') == STRIP for strip in strips)
    assert set(re.findall(r'(?:src|href)="([a-z]+:)', page)) == {"data:"}
    assert "<script" not in page
    assert "url(" not in page
    assert all(command.replace(">", "&gt;") in page for command in COMMANDS)
    if CHROMIUM is not None:
        with Browser(tmp_path) as browser:
            for width in (390, 1280):
                browser.open(told.out / "report.html", width)
                assert browser.evaluate("document.documentElement.scrollWidth") == width
                decoded = "Promise.all([...document.images].map(one => one.decode())).then(all => all.length)"
                assert browser.evaluate(decoded) == 3 * STRIP
            assert browser.complaints == []
            assert {*browser.requests} == {(told.out / "report.html").resolve().as_uri()}


def test_its_sentence_is_said_of_samples_that_it_is_true_of(told: Told, tmp_path: Path) -> None:
    out = copied(told.out, tmp_path / "out")
    digits = {
        name: [path for digit in kinds for path in sorted((out / f"digits/{name}/{digit}").glob("*.png"))]
        for name, kinds in (("old", range(LAST_OLD + 1)), ("new", range(LAST_OLD + 1, 10)))
    }
    mixed = [one for pair in zip(digits["old"][::9], digits["new"][::9], strict=False) for one in pair]
    real = {"old": digits["old"][::9], "fine-tuned": digits["new"][::9], "grown": mixed, "routed": mixed}
    for name, paths in (real | {"old-in-grown": digits["old"][::9]}).items():
        for path in (out / "samples" / name).glob("*.png"):
            path.unlink()
        for k, path in enumerate(paths):
            shutil.copyfile(path, out / "samples" / name / f"{k:05d}.png")
    record = json.loads((out / STORY_FILE).read_text())
    said = conclude(out, story_of(1, LENGTHS), record)
    assert said.startswith(f"{SENTENCE}\n\n|")
    page = (out / "report.html").read_text()
    assert f"<h1>{SENTENCE.replace('–', JOINED)}</h1>" in page
    # The classifier is right of these in 97 of 100 cases, and more.
    alts = [re.findall(r'alt="(\d)"', strip) for strip in page.split('class="strip"')[1:]]
    assert [sum(int(digit) <= LAST_OLD for digit in alt) for alt in alts] == pytest.approx([20, 0, 10], abs=1)
    shares = dict(re.findall(r'<th scope="row">([^<]*)</th><td>(\d+) % / \d+ %</td>', page))
    found = dict(re.findall(r'<th scope="row">([^<]*)</th><td>[^<]*</td><td>(\d+ of 10)</td>', page))
    made = ["10 of 10", "5 of 10", "5 of 10", "10 of 10", "10 of 10"]
    assert [*found.values()] == made
    assert int(shares["the old model"]) > 95
    assert int(shares["fine-tuned on 5–9"]) < 5
    assert int(shares["old + new experts, one expert per image"]) == pytest.approx(50, abs=3)


def test_its_commands_are_those_of_the_command_line_and_seeds_share_no_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [step for chapter in story_of(3, LENGTHS) for step in chapter.steps]
    assert len({step.made for step in steps}) == len(steps)
    # Files that a line reads are made by those before it.
    monkeypatch.setattr(Path, "exists", lambda *_, **__: True)
    monkeypatch.setattr(options, "check_absent", lambda *_: None)
    lines = [step.command.split(" > ")[0].split() for step in steps if step.command.startswith("hddm ")]
    assert {" ".join(words[1 : 3 if words[1] == "train" else 2]) for words in lines} == {
        *("partition", "convert", "calibrate", "train expert", "train router", "assemble", "sample"),
        *("evaluate", "compare"),
    }
    for line in lines:
        command, words = get_command(commands), line[1:]
        while known := getattr(command, "commands", None):
            command = known[words.pop(0)]
        command.make_context("hddm", words)
