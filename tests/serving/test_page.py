"""The page of ``hddm play``: what it shows is what the pipeline does, and it works in a real browser."""

import base64
import contextlib
import io
import re
import shlex
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from hddm.serving.page import HOST, MASK, START, Play, results, serve, strip
from hddm.serving.painting import Opened, Panel, paint, preview
from hddm.settings import SampleSettings
from hddm.utils.errors import HddmError
from tests.artefacts import Command, printed
from tests.browser import CHROMIUM, Browser
from tests.ensemble_files import flow_expert, write_ensemble

PHONE = 390
MANY = {"num_images": 3, "steps": 4, "seed": 2, "solver": "euler"}
# Of the drawing library behind the editor of pictures: calls that it holds for outdated, and drawing without
# a graphics card, as headless browsers do.
KNOWN = re.compile(r"Index-\w+\.js|CanvasTextSystem|software WebGL|GL Driver Message")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``my ensemble`` of two experts by class, and in ``parts`` these alone."""
    root = tmp_path_factory.mktemp("play")
    experts = [flow_expert(seed, num_classes=3) for seed in range(2)]
    write_ensemble(root, experts, "nucleus-0.9").rename(root / "my ensemble")
    return root


@pytest.fixture(scope="module")
def ensemble(models: Path) -> Path:
    return models / "my ensemble"


def _painted(panel: Panel, *edit: Image.Image | None) -> Panel:
    pictures = dict(zip(("image", "mask_image"), edit or (None, None), strict=True))
    for _ in paint([panel], pictures, threading.Event()):
        pass
    return panel


def test_a_preview_is_x_0_where_the_path_is_straight() -> None:
    x_0, eps = torch.randn(
        2, 3, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    for t, then in ((1.0, 0.96), (0.5, 0.1), (0.2, 0.0)):
        states = ((1 - one) * x_0 + one * eps for one in (t, then))
        assert torch.allclose(preview(*states, t, then), x_0, rtol=0, atol=1e-12)


def test_the_strip_tells_the_weights_that_the_pipeline_tallied(ensemble: Path) -> None:
    settings = SampleSettings(**MANY, strategy="full", class_labels="dog")
    model = Opened(ensemble, settings)
    panel = _painted(model.panel("all", settings))
    assert panel.error == ""
    asked = {"class_labels": ["dog"] * 3, "num_inference_steps": 4, "solver": "euler", "seed": 2}
    shares = model.pipeline(**asked, strategy="full").expert_use.shares
    assert torch.allclose(
        torch.tensor([one.shares for one in panel.images]).double().mean(0), shares
    )
    for image in panel.images:
        told = dict(re.findall(r"</b> (expert \d) (\d+) %", strip(image, panel, panel.names)))
        assert told == {f"expert {k}": f"{100 * share:.0f}" for k, share in enumerate(image.shares)}


PICTURE = Image.radial_gradient("L").convert("RGB").resize((4, 4))
HOLE = Image.new("L", (4, 4))
HOLE.paste(255, (0, 0, 2, 4))


@pytest.mark.parametrize(
    ("changes", "expert", "without", "edit"),
    [
        ({}, None, None, ()),
        ({"class_labels": "dog,cat", "guidance_scale": 2.0, "strategy": "top-1"}, None, None, ()),
        ({"dtype": "float64", "solver": "adams-moulton"}, 1, None, ()),
        ({"strategy": "draw"}, None, 0, ()),
        ({"init_image": Path(START), "strength": 0.5}, None, None, (PICTURE, None)),
        ({"init_image": Path(START), "mask": Path(MASK)}, None, None, (PICTURE, HOLE)),
    ],
    ids=["default", "class", "expert", "without", "picture", "mask"],
)
def test_the_commands_make_the_same_pixels(
    changes: dict[str, Any],
    expert: int | None,
    without: int | None,
    edit: tuple[Any, ...],
    ensemble: Path,
    tmp_path: Path,
    hddm: Command,
) -> None:
    settings = SampleSettings.model_validate(MANY | {"class_labels": "cat"} | changes)
    for name, picture in zip((START, MASK), edit, strict=False):
        if picture is not None:
            picture.save(tmp_path / name)
    panel = Opened(ensemble, settings).panel("it's all", settings, expert, without)
    _same_as_its_command(panel, tmp_path, hddm, *edit)
    with Image.open(io.BytesIO(panel.images[2].png)) as image:
        assert (image.text["number"], image.text["command"]) == ("2", "\n".join(panel.commands))
        assert SampleSettings.model_validate_json(image.text["settings"]) == panel.settings


def _same_as_its_command(panel: Panel, folder: Path, hddm: Command, *edit: Any) -> None:
    """Hold images against those of the panel's command lines, run in ``folder``."""
    assert _painted(panel, *edit).error == ""
    with contextlib.chdir(folder):
        for line in panel.commands:
            printed(hddm, *shlex.split(line)[1:])
    made = [path.read_bytes() for path in sorted(folder.glob("samples-*/*.png"))]
    assert _pixels([image.png for image in panel.images]) == _pixels(made)


def test_a_strategy_is_for_the_panels_with_several_experts(ensemble: Path) -> None:
    settings = SampleSettings(**MANY, strategy="full", class_labels="cat")
    whole, alone = Opened(ensemble, settings), Opened(ensemble / "experts" / "0", settings)
    panels = [
        whole.panel("less", settings, without=0),
        whole.panel("one", settings, 1),
        alone.panel("a", settings),
    ]
    for panel in panels:
        assert _painted(panel).error == ""
        assert "--strategy" not in panel.commands[-1]
    assert "--strategy full" in whole.panel("all", settings).commands[0]


def test_a_stopped_run_ends_with_what_there_is(ensemble: Path) -> None:
    settings, stopped = (
        SampleSettings(**MANY | {"steps": 500}, class_labels="cat"),
        threading.Event(),
    )
    panel = Opened(ensemble, settings).panel("all", settings)
    for _ in paint([panel], {}, stopped):
        stopped.set()
    assert panel.error == ""
    assert 0 < len(panel.images[0].weights) < 500
    assert not any(image.is_done for image in panel.images)
    assert "forming" in results([panel])


def test_what_one_panel_refuses_is_told_and_the_others_go_on(ensemble: Path) -> None:
    settings = SampleSettings(**MANY, class_labels="cat")
    model = Opened(ensemble, settings)
    wrong = model.panel("<wrong>", settings.model_copy(update={"strategy": "top-9"}))
    right = model.panel("right", settings)
    for _ in paint([wrong, right], {}, threading.Event()):
        pass
    shown = results([wrong, right])
    assert 'role="alert">&lt;wrong&gt;: `strategy` top-9 needs 9 experts and there are 2<' in shown
    assert shown.count('class="done') == 3


def test_a_solver_that_nobody_chose_stands_in_the_way_of_no_mask(ensemble: Path) -> None:
    pytest.importorskip("gradio")
    play = Play([ensemble])
    shown = {"class_labels": ["cat"], "prompts": "", "strategy": "", "num_images": 1, "steps": 2}
    chosen = {
        solver: play._settings(
            shown | {"solver": solver, "init_image": Path(START), "mask": Path(MASK)}
        )
        for solver in ("adams-moulton", "heun")
    }
    assert [one.solver for one in chosen.values()] == [None, "heun"]
    panel = _painted(
        Opened(ensemble, chosen["heun"]).panel("all", chosen["adams-moulton"]), PICTURE, HOLE
    )
    assert panel.error == ""
    assert "--solver" not in panel.commands[0]


@pytest.mark.integration
def test_what_is_painted_over_is_cropped_as_its_picture(ensemble: Path) -> None:
    pytest.importorskip("gradio")
    wide, strokes = Image.new("RGB", (80, 40)), Image.new("RGBA", (80, 40))
    strokes.paste((255, 0, 0, 255), (20, 0, 40, 40))
    _, mask = Play([ensemble])._pictures(
        {"background": wide, "layers": [strokes], "composite": None}
    )
    assert mask is not None
    assert mask.tobytes() == bytes([255, 255, 0, 0] * 4)


def test_it_is_served_to_this_machine_alone(ensemble: Path) -> None:
    pytest.importorskip("gradio")
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with serve(Play([ensemble]), port) as (address, _):
            assert address.startswith(f"http://{HOST}:")
            assert int(address.rpartition(":")[2]) > port
            with urllib.request.urlopen(address) as page:
                policy = page.headers["content-security-policy"]
            assert re.findall(r"\w+://|\*", policy) == []
            assert policy.startswith("default-src 'self';")
            stranger = urllib.request.Request(address, headers={"Host": "rebound.example"})
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(stranger)
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.2", int(address.rpartition(":")[2])))
    with (
        pytest.raises(HddmError, match="`port` 70000: it and the next 19 are taken"),
        serve(Play([ensemble]), 70000),
    ):
        pass


@pytest.mark.integration
def test_it_takes_pictures_from_its_own_page_and_of_bounded_size(ensemble: Path) -> None:
    pytest.importorskip("gradio")
    file = {"files": ("a.png", b"picture")}
    with serve(Play([ensemble]), 7900) as (address, _), httpx.Client(base_url=address) as client:
        upload = "/gradio_api/upload"
        assert client.post(upload, files=file).status_code == 200
        for origin, status in ((address, 200), ("http://localhost:1", 403), ("null", 403)):
            answer = client.post(upload, files=file, headers={"Origin": origin})
            assert answer.status_code == status
        large = {"files": ("a.png", bytes((64 << 20) + 1))}
        assert client.post(upload, files=large).status_code == 413


def _pixels(files: Sequence[bytes]) -> list[bytes]:
    found = []
    for file in files:
        with Image.open(io.BytesIO(file)) as image:
            found.append(image.tobytes())
    return found


@pytest.mark.integration
def test_a_visitor_makes_images(
    models: Path, ensemble: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hddm: Command
) -> None:
    """Of two sources beside each other, on a phone that asks no other host and shows nothing too wide."""
    pytest.importorskip("gradio")
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH: apt-get install chromium, or a Chrome")
    asked: set[str] = set()
    places = {"socket.connect": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}
    sys.addaudithook(
        lambda event, told: (event in places and asked.add(str(told[places[event]]))) or None
    )
    play = Play([models / "parts" / "0", ensemble])
    with serve(play, 7860) as (address, _), Browser(tmp_path / "browser") as browser:

        def once(expression: str) -> Any:
            """The value of an expression in the page, once it is true."""
            end = time.monotonic() + 120
            while not (found := browser.evaluate(expression)):
                assert time.monotonic() < end, expression
                time.sleep(0.02)
            return found

        browser.open(address, PHONE)
        button = "[...document.querySelectorAll('button')].find(one => /Make images/.test(one.innerText))"
        once(f"!!document.querySelector('#result') && !!{button}")
        browser.evaluate(f"{button}.click()")
        once("/images in [\\d.]+ s/.test(document.querySelector('#result').innerText)")
        told = browser.evaluate("document.querySelector('#result').innerText")
        links = browser.evaluate(
            "[...document.querySelectorAll('#result a[download]')].map(one => one.href)"
        )
        wide = browser.evaluate(
            "[...document.querySelectorAll('#result *')].filter(one => one.getBoundingClientRect().right > "
            f"{PHONE} + 1).map(one => one.outerHTML.slice(0, 80))"
        )
        strange = [
            one for one in browser.requests if not one.startswith((address, f"blob:{address}"))
        ]
        complaints = [one for one in browser.complaints if not KNOWN.search(one)]
    assert (wide, strange, complaints) == ([], [], [])
    assert asked <= {HOST, "localhost"}
    monkeypatch.chdir(tmp_path)
    for line in re.findall("^hddm (.*)$", told, re.MULTILINE):
        printed(hddm, *shlex.split(line))
    made = [path.read_bytes() for path in sorted(tmp_path.glob("samples-*/*.png"))]
    shown = [base64.b64decode(link.partition(",")[2]) for link in links]
    assert sorted(_pixels(shown)) == sorted(_pixels(made))
