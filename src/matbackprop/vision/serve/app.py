"""Web page to view, edit, name and export regions of photographs.

No data are sent to other servers. Uploaded files are stored in one folder. :mod:`matbackprop.vision.serve.server`
limits their size and age, and the caller removes the folder.

Only events that analyze photographs use the Gradio queue. Its browser client shares one event stream between queued
events and sometimes misses the result of an event that starts while the stream closes, for example of the second of two
quick clicks on "Undo". Other events are plain requests, which modify the state of a visitor under a lock.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from matbackprop.errors import needs
from matbackprop.vision.data.pictures import read_picture
from matbackprop.vision.serve.analysis import VIEWS, Analysis, Pixels, fit_photograph, sample_photographs

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # must be set before importing Gradio
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
with needs("the page needs Gradio", "'matbackprop[serve]'"):
    import gradio as gr
    from fastapi import FastAPI

    from matbackprop.vision.serve.server import AGE, FULL, MAX_KEPT, remove_old

MAX_UPLOAD = "50mb"  #: Maximum file size.
MAX_VISITORS = 50  #: Maximum number of visitors in memory; the least recently active is evicted first.
MAX_OPEN = 4  #: Maximum number of analyses per visitor in memory, about 3 MB each; others are recomputed.
MAX_WAITING = 64  #: Maximum number of queued requests.
MAX_PHOTOGRAPHS = 24  #: Maximum number of photographs per visitor.

FORMATS = {"PNG images": "png", "SVG outlines": "svg", "COCO masks": "coco", "LabelMe polygons": "labelme",
           "NPZ levels": "npz", "UCM2 contours": "ucm2"}  # fmt: skip

Analyze = Callable[[Pixels, str], Analysis]
Classify = Callable[[Pixels, NDArray[np.bool_]], dict[str, float]]

_HERE = Path(__file__).parent
_TITLE = "**matbackprop**  Drop a photograph, move the slider, click on regions. Everything runs on this machine."
_STAGE = """
<div class="stage empty">
  <div class="picture" tabindex="0" role="application"
       aria-label="The image. Arrow keys move the cursor, Enter clicks.">
    <img alt=""><canvas aria-hidden="true"></canvas>
  </div>
  <p class="caption" role="status"></p>
</div>
"""
_PASTE = """() => document.addEventListener("paste", (event) => {
  const input = document.querySelector("#drop input[type=file]");
  if (!input || !event.clipboardData.files.length) return;
  input.files = event.clipboardData.files;
  input.dispatchEvent(new Event("change", { bubbles: true }));
})"""
_DOWNLOAD = """() => setTimeout(() => document.querySelector("#archive").click(), 200)"""


class Photograph(NamedTuple):
    """Photograph: file name, path of the reduced copy, and a note about converted values."""

    name: str
    path: Path
    note: str = ""


@dataclass
class Visit:
    """State of a visitor: photographs, selection and recent analyses. Events modify it under a lock."""

    photographs: list[Photograph]
    selected: int = 0
    analyses: dict[Path, Analysis] = field(default_factory=dict)

    @property
    def photograph(self) -> Photograph:
        """Selected photograph."""
        return self.photographs[self.selected]

    @property
    def analysis(self) -> Analysis | None:
        """Analysis of the selected photograph."""
        return self.analyses.get(self.photograph.path)

    def keep(self, photograph: Photograph, analysis: Analysis) -> None:
        """Store the analysis of a photograph and remove the oldest analyses."""
        self.analyses.pop(photograph.path, None)
        self.analyses[photograph.path] = analysis
        for path in list(self.analyses)[:-MAX_OPEN]:
            del self.analyses[path]


def build(analyze: Analyze, folder: Path, *, about: str = "", classify: Classify | None = None) -> gr.Blocks:
    """Build the page.

    Args:
        analyze: photograph (h, w, 3), file name → :class:`~matbackprop.vision.serve.analysis.Analysis`.
        folder: folder of uploads, samples and exports. The caller must remove it.
        about: description of the model.
        classify: photograph, mask → class name → probability; None to disable suggestions.
    """
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    with gr.Blocks(title="matbackprop", analytics_enabled=False) as page:
        gr.Markdown(_TITLE, elem_id="title")
        _photographs(page, _Events(analyze, folder, classify))
        gr.Markdown(about, elem_id="about", visible=bool(about))
        page.load(None, js=_PASTE)
    page.queue(max_size=MAX_WAITING)
    page.state_session_capacity = MAX_VISITORS
    return page


def application(page: gr.Blocks) -> FastAPI:
    """Return the page as an ASGI application."""
    fonts = ["Inter", "system-ui", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif"]
    mono = ["ui-monospace", "Menlo", "Consolas", "monospace"]
    theme = gr.themes.Base(primary_hue="blue", neutral_hue="gray", font=fonts, font_mono=mono, radius_size="md")
    return gr.mount_gradio_app(
        FastAPI(openapi_url=None),
        page,
        path="/",
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        max_file_size=MAX_UPLOAD,
        theme=theme,
        head=f"<style>{(_HERE / 'page.css').read_text(encoding='utf-8')}</style>",  # css= would prefix the rules
    )


class _Events:
    def __init__(self, analyze: Analyze, folder: Path, classify: Classify | None) -> None:
        self.analyze, self.folder, self.classify = analyze, folder, classify
        self.start = Visit([Photograph(path.name, path) for path in sample_photographs(folder / "samples")])
        self.lock = threading.Lock()

    def draw(self, visit: Visit, view: str) -> tuple[Any, ...]:
        photo = f"/gradio_api/file={visit.photograph.path}"
        return visit, gr.skip() if visit.analysis is None else visit.analysis.stage(photo, view)

    def show(self, visit: Visit, photographs: list[Photograph], selected: int, view: str) -> tuple[Any, ...]:
        """Select a photograph and analyze it if needed; return message, slider, visit and image."""
        photograph = photographs[selected]
        analysis = visit.analyses.get(photograph.path)
        if analysis is None:
            analysis = self.analyze(np.asarray(Image.open(photograph.path).convert("RGB")), photograph.name)
        with self.lock:
            visit.photographs, visit.selected = photographs, selected
            visit.keep(photograph, analysis)
            return photograph.note, round(analysis.height, 2), *self.draw(visit, view)

    def strip(self, photographs: list[Photograph]) -> Any:
        return gr.update(value=[(str(p.path), p.name) for p in photographs], selected_index=0)

    def open_page(self, visit: Visit, view: str) -> tuple[Any, ...]:
        return self.strip(visit.photographs), *self.show(visit, visit.photographs, 0, view)

    def read(self, files: list[Path]) -> tuple[list[Photograph], list[str]]:
        """Return the readable photographs, and error messages for the others."""
        photographs, problems = [], []
        for number, file in enumerate(files):
            if number == MAX_PHOTOGRAPHS or remove_old(self.folder) > MAX_KEPT:
                problems.append(f"⚠ {len(files) - number} of {len(files)} photographs were skipped.")
                break
            try:
                picture = read_picture(file)
                path = Path(tempfile.mkdtemp(dir=self.folder)) / f"{number}.png"
                Image.fromarray(fit_photograph(picture.pixels)).save(path, compress_level=1)
                photographs.append(Photograph(file.name, path, picture.note))
            except ValueError as error:  # data errors of the library are ValueErrors
                problems.append(f"⚠ {str(error).replace(str(file), file.name)}")
        return photographs, problems

    def add_photographs(self, visit: Visit, files: list[str] | None, view: str) -> tuple[Any, ...]:
        new, problems = self.read([Path(file) for file in files or []])
        if not new:
            return None, gr.skip(), " ".join(problems), *(gr.skip() for _ in range(3))
        photographs = [*new, *visit.photographs][:MAX_PHOTOGRAPHS]
        note, *drawn = self.show(visit, photographs, 0, view)
        return None, self.strip(photographs), " ".join(filter(None, [*problems, note])), *drawn

    def select(self, visit: Visit, view: str, event: gr.SelectData) -> tuple[Any, ...]:
        return self.show(visit, visit.photographs, min(int(event.index), len(visit.photographs) - 1), view)

    def change(self, visit: Visit, view: str, edit: Callable[[Analysis], Analysis]) -> tuple[Any, ...]:
        with self.lock:
            if visit.analysis is not None:
                visit.keep(visit.photograph, edit(visit.analysis))
            return self.draw(visit, view)

    def move_slider(self, visit: Visit, height: float, view: str) -> tuple[Any, ...]:
        return self.change(visit, view, lambda analysis: analysis.at(float(height)))

    def change_view(self, visit: Visit, view: str) -> tuple[Any, ...]:
        return self.change(visit, view, lambda analysis: analysis)

    def undo(self, visit: Visit, view: str) -> tuple[Any, ...]:
        return self.change(visit, view, Analysis.undone)

    def click(self, visit: Visit, action: str, name: str, view: str, event: gr.SelectData) -> tuple[Any, ...]:
        x, y = (int(place) for place in event.index)
        guesses: dict[str, float] = {}

        def edit(analysis: Analysis) -> Analysis:
            if action != "name":
                return analysis.edited(x, y, action)
            if self.classify:
                guesses.update(self.classify(analysis.segments.pixels, analysis.mask(x, y)))
            return analysis.named(x, y, name or max(guesses, key=guesses.__getitem__, default=""))

        return *self.change(visit, view, edit), guesses or None

    def choose_action(self, action: str) -> tuple[Any, Any]:
        return gr.update(visible=action == "name"), gr.update(visible=action == "name" and self.classify is not None)

    def export(self, visit: Visit, kind: Any) -> str | None:
        if visit.analysis is None:
            return None
        if remove_old(self.folder) > MAX_KEPT:
            raise gr.Error(FULL, print_exception=False)
        return str(visit.analysis.export(Path(tempfile.mkdtemp(dir=self.folder)), kind))


_PRIVATE: dict[str, Any] = {"api_visibility": "private"}
_QUICK: dict[str, Any] = {"queue": False, "show_progress": "hidden", **_PRIVATE}
_SLOW: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "analyze", **_PRIVATE}


def _photographs(page: gr.Blocks, events: _Events) -> None:
    state = gr.State(events.start, time_to_live=AGE * 6)
    with gr.Row():
        with gr.Column(scale=5, min_width=300):
            script = (_HERE / "stage.js").read_text(encoding="utf-8")
            stage = gr.HTML(html_template=_STAGE, js_on_load=script, elem_id="regions")
            label = "Contour strength below which borders are hidden"
            height = gr.Slider(0, 1, value=0.5, step=0.01, label=label, elem_id="height")
            view = gr.Radio(list(VIEWS), value=VIEWS[0], label="View", elem_id="view")
        with gr.Column(scale=3, min_width=300):
            drop = gr.File(file_count="multiple", label="Drop or paste photographs", height=140, elem_id="drop")
            strip = gr.Gallery(
                label="Photographs", columns=4, height=150, object_fit="cover", preview=False, allow_preview=False,
                interactive=False, buttons=[], elem_id="strip",
            )  # fmt: skip
            message = gr.Markdown(elem_id="message")
            shown = [state, stage]
            everything = [message, height, *shown]
            _tools(events, state, stage, view)
    page.load(events.open_page, [state, view], [strip, *everything], **_SLOW)
    drop.upload(events.add_photographs, [state, drop, view], [drop, strip, *everything], **_SLOW)
    strip.select(events.select, [state, view], everything, **_SLOW)
    height.input(events.move_slider, [state, height, view], shown, trigger_mode="always_last", **_QUICK)
    view.input(events.change_view, [state, view], shown, trigger_mode="always_last", **_QUICK)


def _tools(events: _Events, state: gr.State, stage: gr.HTML, view: gr.Radio) -> None:
    action = gr.Radio(["split", "merge", "name"], value="split", label="A click on a region")
    label = "Name" if events.classify is None else "Name (empty: suggested by the classifier)"
    name = gr.Textbox(label=label, visible=False, max_length=80, elem_id="name")
    back = gr.Button("Undo")
    with gr.Row(elem_id="export"):
        kind = gr.Dropdown(list(FORMATS.items()), value="png", label="Format", scale=2, min_width=160, elem_id="format")
        write = gr.Button("Export", variant="primary", scale=1, min_width=100)
    guesses = gr.Label(label="Classifier", num_top_classes=5, visible=False)
    archive = gr.DownloadButton(elem_id="archive")
    action.input(events.choose_action, action, [name, guesses], **_QUICK)
    back.click(events.undo, [state, view], [state, stage], trigger_mode="multiple", **_QUICK)
    inputs = [state, action, name, view]
    stage.select(events.click, inputs, [state, stage, guesses], trigger_mode="multiple", **_QUICK)
    write.click(events.export, [state, kind], archive, **_PRIVATE).then(None, js=_DOWNLOAD)
