"""A page on this machine to play with an ensemble (``hddm play``), built with Gradio.

It is served to this machine alone and asks no other: analytics are off, fonts are the system's, and a
Content-Security-Policy lets the browser fetch from the page's own origin only.
"""

import base64
import contextlib
import functools
import html
import io
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from hddm.networks.wrappers import TEXT_CONDITIONS
from hddm.pipelines.samples import SampleSettings
from hddm.sampling import plan
from hddm.serving.painting import Opened, Painted, Panel, paint
from hddm.solvers import SOLVERS
from hddm.utils.errors import HddmError, counted, optional
from hddm.utils.processes import environment, switched
from hddm.utils.records import OPTIONS, parse_record

HOST, PORTS = "127.0.0.1", 20
"""Where the page is, and how many ports are tried."""
# Gradio's scripts are inline, and it compiles templates in the browser.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "frame-ancestors 'none'; form-action 'self'; base-uri 'self'"
)
WHOLE, EVERY, LESS, GROWN = "The images", "Every expert", "Leave one out", "Before and after"
START, MASK = "start.png", "mask.png"
_STRATEGIES = (
    "draw: one for each image, by lot. full: all. top-2: the two likeliest at each step. "
    "commit-0.92: all while the noise is above 0.92, then one for each image."
)
_PIXELS, _BYTES = 50_000_000, 64 << 20
"""Pixels of a picture, and bytes of what a browser sends, at most."""
_ENLARGED = 512
"""Pixels of a starting picture's longer side, about, to paint on."""
# Told apart by the colour-blind too (Okabe and Ito), and darker when they come again; letters say the same.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#8c8c8c")
_COPY = """<button onclick="navigator.clipboard.writeText(this.previousElementSibling.innerText)
.then(() => this.innerText = 'Copied')">Copy</button>"""
_TO_RESULT = """() => { const result = document.getElementById('result');
if (result.getBoundingClientRect().top > innerHeight / 2) result.scrollIntoView({behavior: 'smooth'}); }"""


def strip(image: Painted, panel: Panel, legend: Sequence[str]) -> str:
    """Who painted an image, as HTML: weights from noise to image, each expert's letter and share in percent.

    The place of a name in ``legend`` gives its letter and colour. A share is the mean over the steps.
    """
    marks, bars, at = [_mark(legend.index(name)) for name in panel.names], "", 0
    for row, same in groupby(weights.tolist() for weights in image.weights):
        width, top = len(list(same)), 0.0
        for (colour, _), share in zip(marks, row, strict=True):
            box = f'x="{at}" y="{top:.4f}" width="{width}" height="{share:.4f}"'
            bars += f'<rect {box} fill="{colour}"/>' if share else ""
            top += share
        at += width
    letters, at = "", 0
    for (_, letter), run in groupby(marks[int(weights.argmax())] for weights in image.weights):
        width = len(list(run))
        # There is room for a letter.
        if width >= panel.steps / 12:
            letters += f'<b style="left:{100 * (at + width / 2) / panel.steps:.1f}%">{letter}</b>'
        at += width
    shares = zip(image.shares, marks, panel.names, strict=bool(image.shares))
    lines = "".join(
        f'<div><i style="background:{colour}"></i><b>{letter}</b> '
        f"{html.escape(name)} {100 * share:.0f} %</div>"
        for share, (colour, letter), name in sorted(shares, reverse=True)
        if share >= 0.005
    )
    return (
        '<div class="strip" role="img" aria-label="experts at work, from noise to image">'
        f'<svg viewBox="0 0 {panel.steps} 1" preserveAspectRatio="none" shape-rendering="crispEdges">'
        f"{bars}</svg>{letters}</div>"
        f'<div class="ends"><span>noise</span><span>image</span></div>{lines}'
    )


def _mark(place: int) -> tuple[str, str]:
    """Colour and letter of an expert by its place in the legend."""
    again, k = divmod(place, len(_COLOURS))
    letter = chr(ord("A") + place) if place < 26 else str(place + 1)
    return f"color-mix(in srgb, #000 {40 * again % 90}%, {_COLOURS[k]})", letter


def _card(image: Painted, panel: Panel, legend: Sequence[str], title: str) -> str:
    shown, caption = '<div class="blank"></div>', html.escape(title)
    if image.pixels is not None:
        picture, kind = _address(panel.png(image)), "done" if image.is_done else "forming"
        kind += " small" if max(image.pixels.shape) <= 128 else ""
        shown = f'<img class="{kind}" alt="image {image.number}, {caption}" src="{picture}">'
        if image.is_done:
            name = f"{panel.title}-seed-{panel.settings.seed}-{image.number}.png".replace(" ", "-")
            caption += f'<br><a download="{html.escape(name)}" href="{picture}">Save as PNG</a>'
    return f"<figure>{shown}<figcaption>{caption}</figcaption>{strip(image, panel, legend)}</figure>"


def _address(picture: bytes | Image.Image) -> str:
    """A picture, or its PNG file, as an address within the page."""
    if isinstance(picture, Image.Image):
        file = io.BytesIO()
        picture.save(file, "png")
        picture = file.getvalue()
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def results(panels: Sequence[Panel], state: str = "", files: Mapping[str, Image.Image] | None = None) -> str:
    """All images with their strips as HTML, in rows from the same noise, and the command lines.

    ``state`` is a line above; ``files`` are pictures by the name under which the commands read them.
    """
    legend = list(dict.fromkeys(name for panel in panels for name in panel.names))
    parts = [f'<p role="status">{html.escape(state)}</p>'] if state else []
    many, shown = len(panels) > 1, [panel for panel in panels if not panel.error]
    parts += [_error(f"{one.title}: {one.error}" if many else one.error) for one in panels if one.error]
    rows = [[(image, one) for image in one.images] for one in shown]
    for row in zip(*rows, strict=True) if many else rows:
        cards = [
            _card(image, one, legend, one.title if many else f"image {image.number}") for image, one in row
        ]
        parts.append(f"<h3>Image {row[0][0].number}, all from the same noise</h3>" if many else "")
        parts.append(f'<div class="cards">{"".join(cards)}</div>')
    if shown:
        lines = html.escape("\n".join(line for panel in shown for line in panel.commands))
        named = [
            f'<a download="{name}" href="{_address(file)}">{name}</a>' for name, file in (files or {}).items()
        ]
        save = f"<p>They read {' and '.join(named)}: save them to where you type this.</p>" if named else ""
        told = "<p>A saved PNG has settings and command in it.</p>"
        parts.append(f"<h3>The same images on the command line</h3><pre>{lines}</pre>{_COPY}{save}{told}")
    return f'<div class="hddm">{"".join(parts)}</div>'


def _error(text: str) -> str:
    return f'<p class="error" role="alert">{html.escape(text)}</p>'


def about(models: Sequence[Opened]) -> str:
    """What the page is for, and what was opened, as HTML."""
    parts = [
        "<h1>Play with an ensemble</h1><p>Diffusion models turn noise into images. Here several that were "
        "trained apart, the <b>experts</b>, paint together. Make images; the strip under each tells who "
        "painted when.</p>"
    ]
    for model in models:
        records, ensemble = model.pipeline.experts.facts, model.pipeline.ensemble
        experts = ", ".join(
            f"<b>{html.escape(name)}</b> ({'DDPM' if one.objective == 'ddpm' else one.objective})"
            for name, one in zip(model.names, records, strict=True)
        )
        height, width = model.pipeline.image_size
        asked = (
            f"by class, {len(ensemble.classes)} of them" if ensemble.classes else "without prompt or class"
        )
        parts.append(
            f"<p><code>{html.escape(str(model.source))}</code>: {counted(len(records), 'expert')}, {experts}"
            f"; images of {width}×{height} pixels, {'by prompt' if _reads(model) else asked}.</p>"
        )
    return f'<div class="hddm">{"".join(parts)}</div>'


def _reads(model: Opened) -> bool:
    """True for a model that takes a prompt."""
    pipeline = model.pipeline
    takes = any(TEXT_CONDITIONS[0] in one.conditions for one in pipeline.experts.facts)
    return takes and all(map(pipeline.can_read, pipeline.readers))


def _defaults(model: Opened) -> tuple[int, str]:
    """Steps and solver of a model."""
    how = plan(model.pipeline.ensemble)
    return how.steps, how.solver_name


class Play:
    """The page, the models that it plays with, and the run that is under way.

    Raises `HddmError` as `Opened`, and without Gradio.
    """

    def __init__(self, sources: Sequence[Path], device: str = "auto", dtype: str = "float32") -> None:
        self.gradio = optional("gradio", "hddm play", "play")
        self._shared = {"device": device, "dtype": dtype}
        settings = parse_record(dict(self._shared), SampleSettings, OPTIONS)
        self.models = [Opened(source, settings) for source in sources]
        self._model = self.models[-1]
        self._own = _defaults(self._model)
        self._stopped = threading.Event()

    def run(self, names: Sequence[str], *values: Any) -> Iterator[tuple[str, Any]]:
        """Yield the results as HTML whenever there is more to see, and whether there is something to stop.

        ``values`` are those of the inputs.
        """
        idle, busy = (self.gradio.update(interactive=one) for one in (False, True))
        asked: dict[str, Any] = dict(zip(names, values, strict=True)) | self._shared
        self._stopped = stopped = threading.Event()
        picture, mask = self._pictures(asked.pop("canvas"))
        files = {name: one for name, one in ((START, picture), (MASK, mask)) if one is not None}
        asked |= {"init_image": Path(START) if picture else None, "mask": Path(MASK) if mask else None}
        # What is painted over is all new, the default with a mask.
        asked["strength"] = None if mask or not picture or asked["strength"] == 0.8 else asked["strength"]
        show, left_out, expert = (asked.pop(name) for name in ("show", "left_out", "expert"))
        try:
            panels = self._panels(show, left_out, self._settings(asked), self._model.leads.get(expert))
        except HddmError as error:
            yield f'<div class="hddm">{_error(" ".join([error.message, *error.details]))}</div>', idle
            return
        began = time.monotonic()
        yield results(panels, "Painting …", files), busy
        for _ in paint(panels, {"image": picture, "mask_image": mask}, stopped):
            yield results(panels, "Painting …", files), busy
        images = [image for panel in panels if not panel.error for image in panel.images]
        done = sum(image.is_done for image in images)
        state = f"{counted(done, 'image')} in {time.monotonic() - began:.1f} s" if images else ""
        yield results(panels, state if done == len(images) else f"Stopped: {state}", files), idle

    def _decoded(self, decode: Callable[[Any], Any], picture: Any) -> Any:
        """A picture as Gradio decodes it, where it is not too large."""
        try:
            return decode(picture)
        except Image.DecompressionBombError:
            raise self.gradio.Error(f"the picture has over {_PIXELS:,} pixels; make it smaller") from None

    def _settings(self, asked: dict[str, Any]) -> SampleSettings:
        ensemble = self._model.pipeline.ensemble
        # A comma would part a name.
        names = {one: str(k) if "," in one else one for k, one in enumerate(ensemble.classes)}
        asked["class_labels"] = ",".join(names[one] for one in asked["class_labels"] or ()) or None
        asked["prompts"] = (prompt,) if (prompt := (asked["prompts"] or "").strip()) else ()
        asked["strategy"] = None if asked["strategy"] in ("", ensemble.strategy) else asked["strategy"]
        if all(_defaults(one) == self._own for one in self.models):
            for name, own in zip(("steps", "solver"), self._own, strict=True):
                asked[name] = None if asked[name] == own else asked[name]
        return parse_record(asked, SampleSettings, OPTIONS)

    def _panels(self, show: str, left_out: str, settings: SampleSettings, expert: int | None) -> list[Panel]:
        model = self._model
        if show == GROWN:
            titles = [one.source.resolve().name for one in self.models]
            titles = ["before", "after"] if titles[0] == titles[1] else titles
            return [one.panel(title, settings) for one, title in zip(self.models, titles, strict=True)]
        whole = model.panel("all together", settings)
        if show == EVERY:
            return [whole, *(model.panel(f"{name} alone", settings, k) for name, k in model.leads.items())]
        if show == LESS:
            return [whole, model.panel(f"without {left_out}", settings, without=model.leads[left_out])]
        return [model.panel(model.source.resolve().name, settings, expert)]

    def _pictures(self, canvas: dict[str, Any] | None) -> tuple[Image.Image | None, Image.Image | None]:
        """The starting picture in the images' size, and white where a sixteenth or more was painted over."""
        if not canvas or canvas["background"] is None:
            return None, None
        size = self._model.pipeline.image_size[::-1]
        picture = ImageOps.fit(canvas["background"].convert("RGB"), size, Image.Resampling.LANCZOS)
        alphas = [one.getchannel("A") for one in canvas["layers"]]
        strokes = [ImageOps.fit(one, size, Image.Resampling.BOX) for one in alphas]
        masks = [one.point([255 * (value >= 16) for value in range(256)]) for one in strokes]
        return picture, next((one for one in masks if one.getbbox()), None)

    def _enlarged(self, canvas: dict[str, Any] | None) -> dict[str, Any] | None:
        """A picture as the model gets it, large enough to be painted on."""
        picture, _ = self._pictures(canvas)
        if picture is None:
            return canvas
        large = ImageOps.scale(picture, max(1, _ENLARGED // max(picture.size)), Image.Resampling.NEAREST)
        return {"background": large, "layers": [], "composite": None}

    def stop(self) -> None:
        """End the run that is under way after its step."""
        self._stopped.set()

    def blocks(self) -> Any:
        """The page in Gradio's parts; the inputs are called as the settings are."""
        gr, asked = self.gradio, dict[str, Any]()
        model, several, wide = self._model, len(self._model.leads) > 1, {"min_width": 300}
        ensemble, experts = model.pipeline.ensemble, [*model.leads]
        shows = [WHOLE, *([EVERY, LESS] if several else []), *([GROWN] if self.models[1:] else [])]
        strategies = dict.fromkeys([ensemble.strategy, "draw", "full", "top-1", "top-2", "nucleus-0.9"])
        with gr.Blocks(title="hddm play", analytics_enabled=False) as page:
            gr.HTML(about(self.models), js_on_load=None)
            with gr.Row():
                with gr.Column(scale=2, **wide):
                    first = shows[-1] if self.models[1:] else WHOLE
                    asked["show"] = gr.Radio(shows, value=first, label="What to see", visible=len(shows) > 1)
                    asked["left_out"] = gr.Dropdown(experts, label="Leave out", visible=False)
                    names = list(ensemble.classes)
                    asked["class_labels"] = gr.Dropdown(
                        names, value=names[:1], multiselect=True, label="Class", visible=bool(names),
                        info="Several take turns.",
                    )  # fmt: skip
                    asked["prompts"] = gr.Textbox(
                        label="Prompt", lines=2, placeholder="What is to be seen", visible=_reads(model)
                    )
                    asked["strategy"] = gr.Dropdown(
                        list(strategies), label="Which experts paint", info=_STRATEGIES, visible=several,
                        allow_custom_value=True,
                    )  # fmt: skip
                    asked["num_images"] = gr.Slider(1, 16, 4, step=1, label="How many images")
                    asked["seed"] = gr.Number(0, label="Seed, the number of the noise", precision=0)
                    with gr.Row():
                        other = gr.Button("New seed", min_width=90)
                        stop = gr.Button("Stop", min_width=90, interactive=False)
                    make = gr.Button("Make images", variant="primary")
                    with gr.Accordion("Begin with a picture", open=False):
                        gr.HTML("Drop one, and paint over what is to be made anew.", js_on_load=None)
                        asked["canvas"] = gr.ImageEditor(
                            type="pil", format="png", label="Picture", sources=("upload", "clipboard"),
                            layers=False, transforms=(), buttons=[], height=360,
                            brush=gr.Brush(default_size=48, colors=["#ff2d78"], color_mode="fixed"),
                        )  # fmt: skip
                        new = "How much is new, where nothing is painted over"
                        asked["strength"] = gr.Slider(0, 1, 0.8, step=0.05, label=new)
                    with gr.Accordion("Advanced", open=False):
                        asked["steps"] = gr.Slider(1, 100, self._own[0], step=1, label="Steps")
                        asked["solver"] = gr.Dropdown(list(SOLVERS), value=self._own[1], label="Solver")
                        asked["expert"] = gr.Dropdown(
                            ["all", *experts], label="One expert alone", visible=several
                        )
                        told = {"label": "Guidance scale", "visible": bool(names) or _reads(model)}
                        asked["guidance_scale"] = gr.Slider(1, 15, 1, **told)
                with gr.Column(scale=5, **wide):
                    start = '<div class="hddm"><p>Images appear here while they form.</p></div>'
                    result = gr.HTML(start, elem_id="result", js_on_load=None)
            quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
            show, canvas = asked["show"], asked["canvas"]
            canvas.preprocess = functools.partial(self._decoded, canvas.preprocess)
            show.change(lambda one: gr.update(visible=one == LESS), show, asked["left_out"], **quiet)
            other.click(lambda: random.randrange(10_000), None, asked["seed"], **quiet)
            canvas.upload(self._enlarged, canvas, canvas, **quiet)
            run = functools.partial(self.run, [*asked])
            make.click(run, [*asked.values()], [result, stop], concurrency_limit=1, **quiet)
            make.click(None, js=_TO_RESULT)
            stop.click(self.stop, queue=False, **quiet)
        return page


class _Guard:
    """Middleware that refuses requests of other pages, and large ones."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse

        app, headers = self._app, Headers(raw=scope.get("headers", []))
        own = f"http://{headers.get('host')}"
        if headers.get("origin", own) != own:
            app = PlainTextResponse("this page takes requests of its own alone", 403)
        elif "transfer-encoding" in headers or int(headers.get("content-length", 0)) > _BYTES:
            app = PlainTextResponse(f"this page takes at most {_BYTES >> 20} MB at a time", 413)
        await app(scope, receive, send)


@contextlib.contextmanager
def serve(play: Play, port: int) -> Iterator[tuple[str, threading.Thread]]:
    """Serve the page within the block, on the first free port from ``port`` on; its address and its thread.

    Raises `HddmError` if all of `PORTS` are taken.
    """
    import fastapi
    import uvicorn
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    dim = {"body_text_color_subdued": "*neutral_600", "body_text_color_subdued_dark": "*neutral_300"}
    listener, folder = _listening(port), tempfile.TemporaryDirectory(prefix="hddm-play-")
    # Pictures that were dropped on the page go with the folder.
    quiet = environment({"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": folder.name})
    # Pillow refuses twice as many, before it decodes.
    bounded = switched(Image, "MAX_IMAGE_PIXELS", _PIXELS // 2)
    with listener, folder, quiet, bounded:
        gr, page = play.gradio, play.blocks()
        look = {
            "theme": gr.themes.Default(**fonts).set(**dim),
            "css": Path(__file__).with_name("page.css").read_text(),
            "ssr_mode": False,
        }
        app = fastapi.FastAPI(openapi_url=None)
        app = gr.mount_gradio_app(app, page, "", server_name=HOST, footer_links=[], **look)
        app.add_middleware(_Guard)
        # A page from elsewhere whose name points here would have to come under that name.
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
    raise HddmError(f"--port {port}: it and the next {PORTS - 1} are taken; choose another")
