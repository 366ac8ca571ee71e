"""A page on this machine to play with an ensemble (``hddm play``), built with Gradio.

It is served to this machine only and contacts no other: analytics are off, fonts are the system's, and a
Content-Security-Policy lets the browser fetch from the page's own origin only. Its HTML is in page.html.j2.
"""

import contextlib
import functools
import io
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from hddm.sampling import plan
from hddm.serving.painting import Opened, Painted, Panel, paint
from hddm.settings import Computing, SampleSettings
from hddm.solvers import SOLVERS
from hddm.utils.errors import HddmError, counted, optional
from hddm.utils.pages import data_address, templates
from hddm.utils.processes import environment
from hddm.utils.records import OPTIONS, parse_record

HOST, PORTS = "127.0.0.1", 20
"""Address of the page, and how many ports are tried."""
# Gradio's scripts are inline, and it compiles templates in the browser.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "frame-ancestors 'none'; form-action 'self'; base-uri 'self'"
)
WHOLE, EVERY, LESS, GROWN = "The images", "Every expert", "Leave one out", "Before and after"
START, MASK = "start.png", "mask.png"
_STRATEGIES = (
    "draw: one per image, drawn once. full: all. top-2: the two most probable at each step. "
    "commit-0.92: all while the noise is above 0.92, then one per image."
)
_ENLARGED = 512
"""Pixels of a starting picture's longer side, about, to paint on."""
# Distinct for the colour-blind too (Okabe and Ito), and darker when repeated; letters say the same.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#8c8c8c")
_TO_RESULT = """() => { const result = document.getElementById('result');
if (result.getBoundingClientRect().top > innerHeight / 2) result.scrollIntoView({behavior: 'smooth'}); }"""


def _address(picture: bytes | Image.Image) -> str:
    """A picture, or its PNG file, as an address within the page."""
    if isinstance(picture, Image.Image):
        file = io.BytesIO()
        picture.save(file, "png")
        picture = file.getvalue()
    return data_address(picture)


_TEMPLATES = templates(is_html=True)
_TEMPLATES.filters |= {"address": _address, "counted": counted}
_PARTS: Any = _TEMPLATES.get_template("serving/page.html.j2").module
"""Parts of the page as functions to HTML."""


def strip(image: Painted, panel: Panel, legend: Sequence[str]) -> str:
    """Who painted an image, as HTML: weights from noise to image, each expert's letter and share in percent.

    Letter and colour of an expert follow from its place in ``legend``. A share is the mean over the steps.
    """
    marks = [_mark(legend.index(name)) for name in panel.names]
    bars, at = [], 0
    for row, same in groupby([weights.tolist() for weights in image.weights]):
        width, top = len(list(same)), 0.0
        for (colour, _), share in zip(marks, row, strict=True):
            if share:
                bars.append((at, top, width, share, colour))
            top += share
        at += width
    largest = [marks[int(weights.argmax())] for weights in image.weights]
    letters, at = [], 0
    for (_, letter), run in groupby(largest):
        width = len(list(run))
        # There is room for a letter.
        if width >= panel.steps / 12:
            letters.append((100 * (at + width / 2) / panel.steps, letter))
        at += width
    shares = sorted(zip(image.shares, marks, panel.names, strict=bool(image.shares)), reverse=True)
    return str(_PARTS.strip(panel.steps, bars, letters, shares))


def _mark(place: int) -> tuple[str, str]:
    """Colour and letter of an expert by its place in the legend."""
    again, k = divmod(place, len(_COLOURS))
    letter = chr(ord("A") + place) if place < 26 else str(place + 1)
    return f"color-mix(in srgb, #000 {40 * again % 90}%, {_COLOURS[k]})", letter


def results(
    panels: Sequence[Panel], state: str = "", files: Mapping[str, Image.Image] | None = None
) -> str:
    """All images with their strips as HTML, in rows from the same noise, and the command lines.

    ``state`` is a line above; ``files`` are pictures by the names under which the commands read them.
    """
    known: dict[str, None] = {}
    for panel in panels:
        known |= dict.fromkeys(panel.names)
    legend = list(known)
    rows: list[Any] = []
    commands: list[str] = []
    for panel in panels:
        if not panel.error:
            rows.append([(image, panel, strip(image, panel, legend)) for image in panel.images])
            commands += panel.commands
    if len(panels) > 1:
        # A row for each image, with a column for each panel.
        rows = list(zip(*rows, strict=True))
    return str(_PARTS.results(panels, rows, commands, state, files or {}))


class Play:
    """The page, its models, and its current run; raises `HddmError` as `Opened`, and without Gradio."""

    def __init__(self, sources: Sequence[Path], computing: Computing = Computing()) -> None:  # noqa: B008 - frozen
        self.gradio = optional("gradio", "hddm play", "play")
        self._shared = computing.model_dump()
        settings = parse_record(dict(self._shared), SampleSettings, OPTIONS)
        self.models = [Opened(source, settings) for source in sources]
        self._model = self.models[-1]
        self._stopped = threading.Event()

    def run(self, names: Sequence[str], *values: Any) -> Iterator[tuple[str, Any]]:
        """Yield the results as HTML whenever there is more to see, and whether a run can be stopped.

        ``values`` are the inputs' values, by ``names``.
        """
        idle = self.gradio.update(interactive=False)
        busy = self.gradio.update(interactive=True)
        inputs: dict[str, Any] = dict(zip(names, values, strict=True)) | self._shared
        self._stopped = stopped = threading.Event()
        picture, mask = self._pictures(inputs.pop("canvas"))
        files = {}
        if picture is not None:
            files[START] = picture
        if mask is not None:
            files[MASK] = mask
        inputs["init_image"] = Path(START) if picture else None
        inputs["mask"] = Path(MASK) if mask else None
        # Painted areas are all new, which is the default with a mask.
        if mask or not picture or inputs["strength"] == 0.8:
            inputs["strength"] = None
        show, left_out = inputs.pop("show"), inputs.pop("left_out")
        expert = self._model.leads.get(inputs.pop("expert"))
        try:
            panels = self._panels(show, left_out, self._settings(inputs), expert)
        except HddmError as error:
            yield str(_PARTS.error(" ".join([error.message, *error.details]))), idle
            return
        began = time.monotonic()
        yield results(panels, "Painting …", files), busy
        for _ in paint(panels, {"image": picture, "mask_image": mask}, stopped):
            yield results(panels, "Painting …", files), busy
        images: list[Painted] = []
        for panel in panels:
            if not panel.error:
                images += panel.images
        done = sum(image.is_done for image in images)
        state = f"{counted(done, 'image')} in {time.monotonic() - began:.1f} s" if images else ""
        yield results(panels, state if done == len(images) else f"Stopped: {state}", files), idle

    def _settings(self, inputs: dict[str, Any]) -> SampleSettings:
        ensemble = self._model.pipeline.ensemble
        # Commas separate names.
        names = {}
        for k, name in enumerate(ensemble.classes):
            names[name] = str(k) if "," in name else name
        chosen = [names[name] for name in inputs["class_labels"] or ()]
        inputs["class_labels"] = ",".join(chosen) or None
        prompt = (inputs["prompts"] or "").strip()
        inputs["prompts"] = (prompt,) if prompt else ()
        if inputs["strategy"] in ("", ensemble.strategy):
            inputs["strategy"] = None
        # What the page shows at first is nobody's choice.
        if inputs["solver"] == plan(ensemble).solver_name:
            inputs["solver"] = None
        return parse_record(inputs, SampleSettings, OPTIONS)

    def _panels(
        self, show: str, left_out: str, settings: SampleSettings, expert: int | None
    ) -> list[Panel]:
        model = self._model
        if show == GROWN:
            titles = [one.source.resolve().name for one in self.models]
            if titles[0] == titles[1]:
                titles = ["before", "after"]
            panels = []
            for one, title in zip(self.models, titles, strict=True):
                panels.append(one.panel(title, settings))
            return panels
        whole = model.panel("all together", settings)
        if show == EVERY:
            panels = [whole]
            for name, k in model.leads.items():
                panels.append(model.panel(f"{name} alone", settings, k))
            return panels
        if show == LESS:
            without = model.leads[left_out]
            return [whole, model.panel(f"without {left_out}", settings, without=without)]
        return [model.panel(model.source.resolve().name, settings, expert)]

    def _pictures(
        self, canvas: dict[str, Any] | None
    ) -> tuple[Image.Image | None, Image.Image | None]:
        """The starting picture in the images' size, and a mask of what was painted over, at least 1/16."""
        if not canvas or canvas["background"] is None:
            return None, None
        size = self._model.pipeline.image_size[::-1]
        picture = ImageOps.fit(canvas["background"].convert("RGB"), size, Image.Resampling.LANCZOS)
        is_painted = [255 * (value >= 16) for value in range(256)]
        for layer in canvas["layers"]:
            strokes = ImageOps.fit(layer.getchannel("A"), size, Image.Resampling.BOX)
            mask = strokes.point(is_painted)
            if mask.getbbox():
                return picture, mask
        return picture, None

    def _enlarged(self, canvas: dict[str, Any] | None) -> dict[str, Any] | None:
        """A picture as the model gets it, enlarged so that one can paint on it."""
        picture, _ = self._pictures(canvas)
        if picture is None:
            return canvas
        large = ImageOps.scale(
            picture, max(1, _ENLARGED // max(picture.size)), Image.Resampling.NEAREST
        )
        return {"background": large, "layers": [], "composite": None}

    def stop(self) -> None:
        """End the current run after its step."""
        self._stopped.set()

    def blocks(self) -> Any:
        """The page in Gradio's parts; inputs have the names of settings."""
        gr, inputs = self.gradio, dict[str, Any]()
        model, several, wide = self._model, len(self._model.leads) > 1, {"min_width": 300}
        ensemble, experts = model.pipeline.ensemble, [*model.leads]
        shows = [WHOLE]
        if several:
            shows += [EVERY, LESS]
        if self.models[1:]:
            shows.append(GROWN)
        own, names, reads = plan(ensemble), list(ensemble.classes), model.pipeline.takes_prompts
        strategies = dict.fromkeys(
            [ensemble.strategy, "draw", "full", "top-1", "top-2", "nucleus-0.9"]
        )
        with gr.Blocks(title="hddm play", analytics_enabled=False) as page:
            gr.HTML(str(_PARTS.about(self.models)), js_on_load=None)
            with gr.Row():
                with gr.Column(scale=2, **wide):
                    first = shows[-1] if self.models[1:] else WHOLE
                    inputs["show"] = gr.Radio(
                        shows, value=first, label="What to see", visible=len(shows) > 1
                    )
                    inputs["left_out"] = gr.Dropdown(experts, label="Leave out", visible=False)
                    inputs["class_labels"] = gr.Dropdown(
                        names, value=[] if reads else names[:1], multiselect=True, label="Class",
                        visible=bool(names), info="Several take turns.",
                    )  # fmt: skip
                    inputs["prompts"] = gr.Textbox(label="Prompt", lines=2, visible=reads)
                    inputs["strategy"] = gr.Dropdown(
                        list(strategies), label="Which experts paint", info=_STRATEGIES, visible=several,
                        allow_custom_value=True,
                    )  # fmt: skip
                    inputs["num_images"] = gr.Slider(1, 16, 4, step=1, label="How many images")
                    inputs["seed"] = gr.Number(
                        0, label="Seed, the number of the noise", precision=0
                    )
                    with gr.Row():
                        other = gr.Button("New seed", min_width=90)
                        stop = gr.Button("Stop", min_width=90, interactive=False)
                    make = gr.Button("Make images", variant="primary")
                    with gr.Accordion("Begin with a picture", open=False):
                        gr.HTML("Drop one, and paint over what is to change.", js_on_load=None)
                        inputs["canvas"] = gr.ImageEditor(
                            type="pil", format="png", label="Picture", sources=("upload", "clipboard"),
                            layers=False, transforms=(), buttons=[], height=360,
                            brush=gr.Brush(default_size=48, colors=["#ff2d78"], color_mode="fixed"),
                        )  # fmt: skip
                        new = "How much is new, if nothing is painted over"
                        inputs["strength"] = gr.Slider(0, 1, 0.8, step=0.05, label=new)
                    with gr.Accordion("Advanced", open=False):
                        inputs["steps"] = gr.Slider(1, 100, own.steps, step=1, label="Steps")
                        inputs["solver"] = gr.Dropdown(
                            list(SOLVERS), value=own.solver_name, label="Solver"
                        )
                        alone = ["all", *experts]
                        inputs["expert"] = gr.Dropdown(
                            alone, label="One expert alone", visible=several
                        )
                        with gr.Row():
                            for side in ("width", "height"):
                                inputs[side] = gr.Number(
                                    None, label=f"{side.capitalize()} in pixels", precision=0,
                                    placeholder="the model's own",
                                )  # fmt: skip
                        guides = bool(names) or reads
                        inputs["guidance_scale"] = gr.Slider(
                            1, 15, 1, label="Guidance scale", visible=guides
                        )
                with gr.Column(scale=5, **wide):
                    start = '<div class="hddm"><p>Images appear here while they form.</p></div>'
                    result = gr.HTML(start, elem_id="result", js_on_load=None)
            quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
            show, canvas = inputs["show"], inputs["canvas"]
            show.change(
                lambda one: gr.update(visible=one == LESS), show, inputs["left_out"], **quiet
            )
            other.click(lambda: random.randrange(10_000), None, inputs["seed"], **quiet)
            canvas.upload(self._enlarged, canvas, canvas, **quiet)
            run = functools.partial(self.run, [*inputs])
            make.click(run, [*inputs.values()], [result, stop], concurrency_limit=1, **quiet)
            make.click(None, js=_TO_RESULT)
            stop.click(self.stop, queue=False, **quiet)
        return page


class _Guard:
    """Middleware that refuses requests of other pages."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse

        app, headers = self._app, Headers(raw=scope.get("headers", []))
        own = f"http://{headers.get('host')}"
        if headers.get("origin", own) != own:
            app = PlainTextResponse("this page accepts requests of its own only", 403)
        await app(scope, receive, send)


@contextlib.contextmanager
def serve(play: Play, port: int) -> Iterator[tuple[str, threading.Thread]]:
    """Serve the page within the block, on the first free port from ``port`` on; yields address and thread.

    Raises `HddmError` if `PORTS` ports are taken.
    """
    import fastapi
    import uvicorn
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    dim = {
        "body_text_color_subdued": "*neutral_600",
        "body_text_color_subdued_dark": "*neutral_300",
    }
    listener, folder = _listening(port), tempfile.TemporaryDirectory(prefix="hddm-play-")
    # Pictures that were dropped on the page are deleted with the folder.
    quiet = environment({"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": folder.name})
    with listener, folder, quiet:
        gr, page = play.gradio, play.blocks()
        look = {
            "theme": gr.themes.Default(**fonts).set(**dim),
            "css": Path(__file__).with_name("page.css").read_text(),
            "ssr_mode": False,
            "max_file_size": "64mb",
        }
        app = fastapi.FastAPI(openapi_url=None)
        app = gr.mount_gradio_app(app, page, "", server_name=HOST, footer_links=[], **look)
        app.add_middleware(_Guard)
        # A foreign page whose name was made to point here still comes under that name.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
        policy = [("content-security-policy", _POLICY)]
        config = uvicorn.Config(app, log_level="error", headers=policy, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True, name="serves")
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.02)
            yield f"http://{HOST}:{listener.getsockname()[1]}", thread
        finally:
            play.stop()
            server.should_exit = True
            thread.join(5)


def _listening(port: int) -> socket.socket:
    for one in range(port, min(port + PORTS, 1 << 16)):
        with contextlib.suppress(OSError):
            return socket.create_server((HOST, one))
    raise HddmError(f"`port` {port}: it and the next {PORTS - 1} are taken; choose another")
