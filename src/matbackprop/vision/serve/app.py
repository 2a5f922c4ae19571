"""The web page: view, edit, name and export regions of photographs, and explore gradients.

Nothing is sent to other servers. Files of visitors are in one folder, which :mod:`matbackprop.vision.serve.server`
bounds in size and age and the caller removes at the end.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from matbackprop.errors import needs
from matbackprop.vision.data.pictures import read_picture
from matbackprop.vision.serve.gradients import DTYPES, FUNCTIONS, SPECTRA, TIE, explored, gap_text, said
from matbackprop.vision.serve.views import VIEWS, Analysis, Pixels, fit_photograph, sample_photographs

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it reads this once
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
with needs("the page needs Gradio", "'matbackprop[serve]'"):
    import gradio as gr
    from fastapi import FastAPI

    from matbackprop.vision.serve.server import AGE, FULL, MAX_KEPT, remove_old

MAX_UPLOAD = "50mb"
"""Size of the largest file that is accepted."""
MAX_VISITORS = 50
"""Visitors whose analyses stay in memory; the least recently active is evicted first."""
MAX_OPEN = 4
"""Analyses of a visitor that stay in memory, some 3 MB each; others are recomputed."""
MAX_WAITING = 64
"""Queued requests; further ones are rejected."""
MAX_PHOTOGRAPHS = 24
"""Photographs of a visitor."""
READING = 30.0
"""Seconds for reading photographs that were dropped together; other visitors wait meanwhile."""

FORMATS = {"PNG pictures": "png", "SVG outlines": "svg", "COCO masks": "coco", "LabelMe polygons": "labelme",
           "NPZ levels": "npz", "UCM2 contours": "ucm2"}  # fmt: skip

Analyze = Callable[[Pixels, str], Analysis]
Classify = Callable[[Pixels, NDArray[np.bool_]], dict[str, float]]

_HERE = Path(__file__).parent
_TITLE = "**matbackprop**  Drop a photograph, move the slider, click on regions. Everything runs on this machine."
_STAGE = """
<div class="stage empty">
  <div class="picture" tabindex="0" role="application"
       aria-label="The picture. Arrow keys move the cursor, Enter clicks.">
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
_GRADIENTS = """
Backpropagation through an eigendecomposition divides by the gap of two eigenvalues. **With four dead
channels, which have equal eigenvalues, autograd through `eigh` is NaN from the first step and the other formulas are
72 % off, but matbackprop is exact.** Move the gap of one pair; the reference has 50 digits.
"""


@dataclass(frozen=True)
class Photograph:
    """A photograph of a visitor: its name, its reduced file, and a note about its values."""

    name: str
    path: Path
    note: str = ""


@dataclass(frozen=True)
class Visit:
    """A visitor's photographs, the chosen one, and the latest analyses."""

    photographs: tuple[Photograph, ...]
    chosen: int = 0
    analyses: dict[Path, Analysis] = field(default_factory=dict)

    @property
    def photograph(self) -> Photograph:
        """The chosen photograph."""
        return self.photographs[self.chosen]

    @property
    def analysis(self) -> Analysis | None:
        """The analysis of the chosen photograph."""
        return self.analyses.get(self.photograph.path)

    def after(self, analysis: Analysis) -> Visit:
        """The visit with a changed analysis."""
        kept = [item for item in self.analyses.items() if item[0] != self.photograph.path]
        return replace(self, analyses={**dict(kept[1 - MAX_OPEN :]), self.photograph.path: analysis})


def build(analyze: Analyze, folder: Path, *, about: str = "", classify: Classify | None = None) -> gr.Blocks:
    """Build the page.

    Args:
        analyze: photograph (h, w, 3), file name → :class:`~matbackprop.vision.serve.views.Analysis`.
        folder: folder of uploads, samples and exports; the caller removes it.
        about: a line about the model.
        classify: photograph, mask → class name → probability; None if names are only typed.

    Returns:
        The page; see :func:`application`.
    """
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    with gr.Blocks(title="matbackprop", analytics_enabled=False) as page:
        gr.Markdown(_TITLE, elem_id="title")
        with gr.Tabs():
            with gr.Tab("Photographs"):
                _segmenting(page, _Events(analyze, folder, classify))
                gr.Markdown(about, elem_id="about", visible=bool(about))
            with gr.Tab("Gradients") as tab:
                _exploring(tab)
        page.load(None, js=_PASTE)
    page.queue(max_size=MAX_WAITING)
    page.state_session_capacity = MAX_VISITORS
    return page


def application(page: gr.Blocks) -> FastAPI:
    """The page as an ASGI application."""
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
    """Event handlers of the first tab."""

    def __init__(self, analyze: Analyze, folder: Path, classify: Classify | None) -> None:
        self.analyze, self.folder, self.classify = analyze, folder, classify
        samples = sample_photographs(folder / "samples")
        self.start = Visit(tuple(Photograph(path.name, path) for path in samples))

    def draw(self, visit: Visit, view: str) -> tuple[Any, ...]:
        """Return the visit and the picture."""
        photo = f"/gradio_api/file={visit.photograph.path}"
        return visit, None if visit.analysis is None else visit.analysis.stage(photo, view)

    def show(self, visit: Visit, view: str, problems: str = "") -> tuple[Any, ...]:
        """Analyze the selected photograph if needed; return message, slider, visit and picture."""
        if visit.analysis is None:
            pixels = np.asarray(Image.open(visit.photograph.path).convert("RGB"))
            visit = visit.after(self.analyze(pixels, visit.photograph.name))
        assert visit.analysis is not None
        message = " ".join(filter(None, [problems, visit.photograph.note]))
        return message, round(visit.analysis.height, 2), *self.draw(visit, view)

    def strip(self, visit: Visit) -> Any:
        return gr.update(value=[(str(p.path), p.name) for p in visit.photographs], selected_index=visit.chosen)

    def open_page(self, view: str) -> tuple[Any, ...]:
        return self.strip(self.start), *self.show(self.start, view)

    def add_photographs(self, visit: Visit, files: list[str] | None, view: str) -> tuple[Any, ...]:
        """Add the pictures that can be read to the strip and name the others."""
        new, problems = [], []
        started = time.monotonic()
        for number, file in enumerate(map(Path, files or [])):
            slow = number == MAX_PHOTOGRAPHS or time.monotonic() - started > READING
            if slow or remove_old(self.folder) > MAX_KEPT:
                problems.append(f"⚠ {len(files or []) - number} of {len(files or [])} photographs were skipped.")
                break
            try:
                picture = read_picture(file)
                path = Path(tempfile.mkdtemp(dir=self.folder)) / f"{number}.png"
                Image.fromarray(fit_photograph(picture.pixels)).save(path, compress_level=1)
                new.append(Photograph(file.name, path, picture.note))
            except ValueError as error:  # the library's errors about data are ValueErrors
                problems.append(f"⚠ {str(error).replace(str(file), file.name)}")
        if not new:
            return None, gr.skip(), " ".join(problems), *(gr.skip() for _ in range(3))
        visit = replace(visit, photographs=(*new, *visit.photographs)[:MAX_PHOTOGRAPHS], chosen=0)
        return None, self.strip(visit), *self.show(visit, view, " ".join(problems))

    def choose(self, visit: Visit, view: str, event: gr.SelectData) -> tuple[Any, ...]:
        return self.show(replace(visit, chosen=min(int(event.index), len(visit.photographs) - 1)), view)

    def change(self, visit: Visit, view: str, edit: Callable[[Analysis], Analysis]) -> tuple[Any, ...]:
        return self.draw(visit if visit.analysis is None else visit.after(edit(visit.analysis)), view)

    def move_slider(self, visit: Visit, height: float, view: str) -> tuple[Any, ...]:
        return self.change(visit, view, lambda analysis: analysis.at(float(height)))

    def undo(self, visit: Visit, view: str) -> tuple[Any, ...]:
        return self.change(visit, view, Analysis.undone)

    def click(self, visit: Visit, action: str, name: str, view: str, event: gr.SelectData) -> tuple[Any, ...]:
        x, y = (int(place) for place in event.index)
        if action != "name" or visit.analysis is None:
            return *self.change(visit, view, lambda analysis: analysis.edited(x, y, action)), None
        guesses = self.classify(visit.analysis.photograph, visit.analysis.mask(x, y)) if self.classify else None
        given = name or (max(guesses, key=guesses.__getitem__) if guesses else "")
        return *self.change(visit, view, lambda analysis: analysis.named(x, y, given)), guesses

    def choose_action(self, action: str) -> tuple[Any, Any]:
        return gr.update(visible=action == "name"), gr.update(visible=action == "name" and self.classify is not None)

    def export(self, visit: Visit, kind: Any) -> str | None:
        if visit.analysis is None:
            return None
        if remove_old(self.folder) > MAX_KEPT:
            raise gr.Error(FULL, print_exception=False)
        return str(visit.analysis.export(Path(tempfile.mkdtemp(dir=self.folder)), kind))


def _segmenting(page: gr.Blocks, events: _Events) -> None:
    state = gr.State(events.start, time_to_live=AGE * 6)
    with gr.Row():
        with gr.Column(scale=5, min_width=300):
            script = (_HERE / "stage.js").read_text(encoding="utf-8")
            stage = gr.HTML(html_template=_STAGE, js_on_load=script, elem_id="regions")
            height = gr.Slider(
                0, 1, value=0.5, step=0.01, elem_id="height", label="Contour strength: borders weaker than this vanish"
            )
            view = gr.Radio(list(VIEWS), value=VIEWS[0], label="View", elem_id="view")
        with gr.Column(scale=3, min_width=300):
            drop = gr.File(file_count="multiple", label="Drop or paste photographs", height=140, elem_id="drop")
            strip = gr.Gallery(
                label="Photographs", columns=4, height=150, object_fit="cover", preview=False, allow_preview=False,
                interactive=False, buttons=[], elem_id="strip",
            )  # fmt: skip
            message = gr.Markdown(elem_id="message")
            action = gr.Radio(["split", "merge", "name"], value="split", label="A click on a region")
            typed = "Name" + ("" if events.classify is None else " (empty: the classifier's)")
            name = gr.Textbox(label=typed, visible=False, max_length=80, elem_id="name")
            guesses = gr.Label(label="Classifier", num_top_classes=5, visible=False)
            back = gr.Button("Undo")
            with gr.Row():
                kind = gr.Dropdown(
                    list(FORMATS.items()), value="png", label="Format", scale=2, min_width=160, elem_id="format"
                )
                write = gr.Button("Export", variant="primary", scale=1, min_width=100)
            archive = gr.DownloadButton(elem_id="archive")

    drawn = [state, stage]
    everything = [message, height, *drawn]
    private: dict[str, Any] = {"api_visibility": "private"}
    slow: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "analyze", **private}
    # One edit at a time: two that run at once would each start from the same state, and one would be lost.
    quick: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 1, "concurrency_id": "edit", **private}
    page.load(events.open_page, view, [strip, *everything], **slow)
    drop.upload(events.add_photographs, [state, drop, view], [drop, strip, *everything], **slow)
    strip.select(events.choose, [state, view], everything, **slow)
    height.input(events.move_slider, [state, height, view], drawn, trigger_mode="always_last", **quick)
    view.input(events.draw, [state, view], drawn, trigger_mode="always_last", **quick)
    back.click(events.undo, [state, view], drawn, trigger_mode="multiple", **quick)
    action.input(events.choose_action, action, [name, guesses], **quick)
    stage.select(events.click, [state, action, name, view], [*drawn, guesses], **quick)
    write.click(events.export, [state, kind], archive, **private).then(None, js=_DOWNLOAD)


def _exploring(tab: gr.Tab) -> None:
    def explore(spectrum: str, exponent: float, function: str, dtype: str) -> tuple[str, str]:
        choice = spectrum, int(exponent), function, dtype
        return said(*choice), explored(*choice)

    gr.Markdown(_GRADIENTS)
    with gr.Row():
        spectrum = gr.Radio(list(SPECTRA), value="four dead channels", label="The other six eigenvalues", scale=4)
        function = gr.Radio(list(FUNCTIONS), value=FUNCTIONS[0], label="g", scale=1, min_width=120)
        dtype = gr.Radio(list(DTYPES), value="float64", label="Precision", scale=1, min_width=160)
    gap = gr.Slider(
        TIE, 0, value=-8, step=1, elem_id="gap", label=f"Gap of the pair: exponent of ten; {TIE} is no gap",
        info=f"From {gap_text(0)} to {gap_text(TIE + 1)} of their size, then equal.",
    )  # fmt: skip
    sentence = gr.Markdown(elem_id="sentence")
    picture = gr.HTML(elem_id="explored")
    choices: list[Any] = [spectrum, gap, function, dtype]
    private: dict[str, Any] = {"api_visibility": "private"}
    tab.select(explore, choices, [sentence, picture], **private)
    for control in choices:
        control.input(
            explore, choices, [sentence, picture], trigger_mode="always_last", show_progress="hidden", **private
        )
