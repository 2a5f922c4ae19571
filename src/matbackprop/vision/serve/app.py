"""The page: the regions of photographs, to be moved through, divided, united, named and downloaded; and gradients.

Gradio's usage statistics are off, its fonts are the browser's own, and the server listens on this machine only. What a
visitor leaves behind is bounded: uploads by :data:`MAX_UPLOAD`, analyses in memory by :data:`MAX_VISITORS` and
:data:`MAX_OPEN`, files on disk by their age, and all of them lie in one folder that the caller removes at the end.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from matbackprop.errors import ConfigurationError, needs
from matbackprop.vision.data.pictures import read_picture
from matbackprop.vision.inference.export import FORMATS
from matbackprop.vision.serve.gradients import DTYPES, FUNCTIONS, SPECTRA, TIE, explored, gap_text, said
from matbackprop.vision.serve.guard import AGE, FULL, Guard, make_room
from matbackprop.vision.serve.views import MAX_REGIONS, Analysis, Pixels, counted, fit_photograph, sample_photographs

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it reads this once
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "100"  # nobody sees what it notes about past events and computes of them
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(10**9)
with needs("the page needs Gradio", "'matbackprop[serve]'"):
    import gradio as gr
    from starlette.middleware import Middleware

log = logging.getLogger("matbackprop")

MAX_UPLOAD = "50mb"
"""Size of the largest file that is taken."""
MAX_VISITORS = 50
"""How many visitors' photographs stay in memory; who has been away longest is forgotten first."""
MAX_OPEN = 4
"""How many analysed photographs of a visitor stay in memory, some 3 MB each; the others are analysed again."""
MAX_WAITING = 64
"""How many requests wait their turn; more are refused at once."""
LOOPBACK = "127.0.0.1"
MAX_PHOTOGRAPHS = 24
"""How many photographs a visitor's strip shows, and how many are read at a time."""
READING = 30.0
"""Seconds after which no further photograph of those that were dropped together is read; others wait meanwhile."""
VIEWS = ("borders", "mean colours")
_EVERY = 600  # seconds: how often files are looked through

Analyse = Callable[[Pixels, str, str], Analysis]
Classify = Callable[[Pixels, NDArray[np.bool_]], dict[str, float]]

_HERE = Path(__file__).parent
_BUTTONS: Any = ["download", "fullscreen"]  # without "share", which would send the picture away
_TITLE = """
# matbackprop
Drop photographs, move the slider from few regions to many, and click on a region to change it. Everything is computed
on this machine.
"""
_STAGE = """
<div class="stage empty">
  <div class="picture" tabindex="0" role="application"
       aria-label="The picture. Arrow keys move from place to place, Enter does what a click does.">
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
_DENDROGRAM = "<p>Every fork unites two regions; the dashed line cuts the tree where the slider stands.</p>"
_GRADIENTS = """
Backpropagation through a decomposition divides by the difference of two eigenvalues. Move two of them together and see
what is left of the gradient of $g(A)$, $A$ an 8×8 matrix, by each method. The truth is computed in 50 digits; all
methods compute in the precision that you choose. Then a short training starts from features with these eigenvalues. A
gradient with some error usually still leads downhill; a NaN ends the training.
"""


@dataclass(frozen=True)
class Photograph:
    """A photograph in a visitor's strip: its own name, and where it lies, reduced, as the page shows it."""

    name: str
    path: Path
    note: str = ""


@dataclass(frozen=True)
class Visit:
    """What a visitor has: photographs, which of them is chosen, and the latest analyses by photograph and method."""

    photographs: tuple[Photograph, ...]
    chosen: int = 0
    method: str = ""
    analyses: dict[tuple[Path, str], Analysis] = field(default_factory=dict)

    @property
    def photograph(self) -> Photograph:
        """The one that is shown."""
        return self.photographs[self.chosen]

    @property
    def analysis(self) -> Analysis | None:
        """What is shown of it."""
        return self.analyses.get((self.photograph.path, self.method))

    def after(self, analysis: Analysis) -> Visit:
        """The visit with a change of what is shown."""
        key = (self.photograph.path, self.method)
        kept = {k: a for k, a in self.analyses.items() if k != key}
        return replace(self, analyses={**dict(list(kept.items())[1 - MAX_OPEN :]), key: analysis})


def _theme() -> gr.themes.Base:
    fonts = ["Inter", "system-ui", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif"]
    mono = ["ui-monospace", "Menlo", "Consolas", "monospace"]
    return gr.themes.Base(primary_hue="blue", neutral_hue="gray", font=fonts, font_mono=mono, radius_size="md")


def build(
    analyse: Analyse, methods: Sequence[str], folder: Path, *, about: str = "", classify: Classify | None = None
) -> gr.Blocks:
    """Build the page.

    Args:
        analyse: photograph (h, w, 3), method, file name → :class:`~matbackprop.vision.serve.views.Analysis`.
        methods: names of methods that ``analyse`` knows, the default first.
        folder: where uploads, samples and results are kept; the caller removes it.
        about: a line about the model in use.
        classify: photograph, mask → class name → probability; without it names are typed.

    Returns:
        The page, to be started by :func:`launch`.
    """
    os.environ["GRADIO_TEMP_DIR"] = str(folder)  # the only way to tell Gradio
    start = Visit(tuple(Photograph(path.name, path) for path in sample_photographs(folder)), method=methods[0])
    with gr.Blocks(title="matbackprop", analytics_enabled=False, delete_cache=(_EVERY, AGE)) as page:
        gr.Markdown(_TITLE, elem_id="title")
        with gr.Tabs():
            with gr.Tab("Photographs"):
                _segmenting(page, start, analyse, methods, folder, classify)
                if about:
                    gr.Markdown(about, elem_id="about")
            with gr.Tab("Gradients") as tab:
                _exploring(tab)
        page.load(None, js=_PASTE)
    return page


def _segmenting(
    page: gr.Blocks, start: Visit, analyse: Analyse, methods: Sequence[str], folder: Path, classify: Classify | None
) -> None:
    """The first tab."""
    hidden = gr.update(value=None, visible=False)

    def views(visit: Visit, view: str) -> tuple[Any, ...]:
        analysis = visit.analysis
        if analysis is None:
            return visit, None, "", hidden
        photo = f"/gradio_api/file={visit.photograph.path}"
        return visit, analysis.stage(photo, view), _DENDROGRAM + analysis.dendrogram(), hidden

    def strip(visit: Visit) -> Any:
        return gr.update(value=[(str(p.path), p.name) for p in visit.photographs], selected_index=visit.chosen)

    def show(visit: Visit, view: str, said: str = "") -> tuple[Any, ...]:
        """Analyse the chosen photograph, where that was not done, and show all of it."""
        analysis = visit.analysis
        if analysis is None:
            pixels = np.asarray(Image.open(visit.photograph.path).convert("RGB"))
            analysis = analyse(pixels, visit.method, visit.photograph.name)
            visit = visit.after(analysis)
        k = gr.update(value=min(max(analysis.shown.count(), 2), MAX_REGIONS))
        words = " ".join(filter(None, [said, _comment(analysis, visit.photograph.note)]))
        more = analysis.levels(), analysis.eigenvectors(), analysis.spectrum()
        return words, k, *views(visit, view), *more

    def open_page(view: str) -> tuple[Any, ...]:
        return strip(start), *show(start, view)

    def add_photographs(visit: Visit, files: list[str] | None, view: str) -> tuple[Any, ...]:
        """Take what was dropped: pictures that can be read join the strip, the others are named in one sentence."""
        new, problems = [], []
        started = time.monotonic()
        for number, file in enumerate(map(Path, files or [])):
            if number == MAX_PHOTOGRAPHS or time.monotonic() - started > READING or not make_room(folder):
                problems.append(f"⚠ {len(files or []) - number} of {len(files or [])} photographs were left out.")
                break
            try:
                picture = read_picture(file)
                path = Path(tempfile.mkdtemp(dir=folder)) / f"{file.stem}.png"
                Image.fromarray(fit_photograph(picture.pixels)).save(path, compress_level=1)
                new.append(Photograph(file.name, path, picture.note))
            except ValueError as error:  # all of the library's own errors about data are ValueErrors
                problems.append(f"⚠ {str(error).replace(str(file), file.name)}")
        said = " ".join(problems)
        if not new:
            return None, gr.skip(), said, *(gr.skip() for _ in range(8))
        photographs = (*new, *visit.photographs)[:MAX_PHOTOGRAPHS]
        visit = replace(visit, photographs=photographs, chosen=0)
        return None, strip(visit), *show(visit, view, said)

    def choose(visit: Visit, view: str, event: gr.SelectData) -> tuple[Any, ...]:
        return show(replace(visit, chosen=min(int(event.index), len(visit.photographs) - 1)), view)

    def choose_method(visit: Visit, method: str, view: str) -> tuple[Any, ...]:
        return show(replace(visit, method=method), view)

    def changed(change: Callable[[Analysis], Analysis], visit: Visit, view: str) -> tuple[Any, ...]:
        return views(visit if visit.analysis is None else visit.after(change(visit.analysis)), view)

    def move_slider(visit: Visit, k: float, view: str) -> tuple[Any, ...]:
        return changed(lambda analysis: analysis.level(int(k)), visit, view)

    def undo(visit: Visit, view: str) -> tuple[Any, ...]:
        return changed(Analysis.undone, visit, view)

    def click(visit: Visit, action: str, name: str, view: str, event: gr.SelectData) -> tuple[Any, ...]:
        x, y = (int(place) for place in event.index)
        analysis, guesses = visit.analysis, None
        if action != "name" or analysis is None:
            return *changed(lambda analysis: analysis.edited(x, y, action), visit, view), guesses
        if classify is not None:
            guesses = classify(analysis.photograph, analysis.mask(x, y))
        given = name or (max(guesses, key=guesses.__getitem__) if guesses else "")
        return *changed(lambda analysis: analysis.named(x, y, given), visit, view), guesses

    def choose_action(action: str) -> tuple[Any, Any]:
        return gr.update(visible=action == "name"), gr.update(visible=action == "name" and classify is not None)

    def export(visit: Visit, formats: list[Any]) -> Any:
        if visit.analysis is None or not formats:
            return hidden
        if not make_room(folder):
            raise gr.Error(FULL, print_exception=False)
        archive = visit.analysis.export(Path(tempfile.mkdtemp(dir=folder)), formats)
        return gr.update(value=str(archive), visible=True)

    gallery: dict[str, Any] = {"columns": 2, "height": "auto", "object_fit": "contain", "buttons": _BUTTONS}
    state = gr.State(start, time_to_live=AGE)
    with gr.Row(equal_height=True):
        drop = gr.File(
            file_count="multiple",
            label="Drop photographs here, or paste them",
            height=150,
            scale=1,
            min_width=300,
            elem_id="drop",
        )
        samples = gr.Gallery(
            label="Photographs: choose one",
            columns=8,
            rows=1,
            height=150,
            object_fit="cover",
            preview=False,
            allow_preview=False,
            interactive=False,
            buttons=[],
            scale=3,
            min_width=300,
            elem_id="strip",
        )
    message = gr.Markdown(elem_id="message")
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            stage = gr.HTML(
                html_template=_STAGE, js_on_load=(_HERE / "stage.js").read_text(encoding="utf-8"), elem_id="regions"
            )
            k = gr.Slider(2, MAX_REGIONS, value=8, step=1, label="Number of regions", elem_id="number")
            with gr.Row():
                action = gr.Radio(["split", "merge", "name"], value="split", label="A click on a region", scale=3)
                view = gr.Radio(list(VIEWS), value=VIEWS[0], label="Show", scale=3)
                back = gr.Button("Undo", scale=1, min_width=100)
            name = gr.Textbox(
                label="Name that a click gives" + ("" if classify is None else " (empty: what the classifier says)"),
                visible=False,
                max_length=80,
                elem_id="name",
            )
            guesses = gr.Label(label="What the classifier says", num_top_classes=5, visible=False)
            with gr.Row():
                formats = gr.CheckboxGroup(list(FORMATS), value=["png", "npz"], label="Files", scale=3)
                write = gr.Button("Export", scale=1, min_width=100, variant="primary")
            archive = gr.File(label="Download", interactive=False, visible=False, elem_id="archive")
        with gr.Column(scale=3, min_width=320):
            method = gr.Radio(list(methods), value=methods[0], label="Method", visible=len(methods) > 1)
            with gr.Tabs():
                with gr.Tab("Tree"):
                    tree = gr.HTML(elem_classes="dendrogram")
                with gr.Tab("Eigenvectors"):
                    vectors = gr.Gallery(label="The coordinates that cells are grouped by", format="png", **gallery)
                    eigenvalues = gr.HTML(elem_classes="dendrogram")
                with gr.Tab("Levels"):
                    levels = gr.Gallery(label="From coarse to fine", format="png", **gallery)

    shown = [state, stage, tree, archive]
    everything = [message, k, *shown, levels, vectors, eigenvalues]
    private: dict[str, Any] = {"api_visibility": "private"}
    slow: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "analyse", **private}
    quick: dict[str, Any] = {"show_progress": "hidden", **private}
    page.load(open_page, view, [samples, *everything], **slow)
    drop.upload(add_photographs, [state, drop, view], [drop, samples, *everything], **slow)
    samples.select(choose, [state, view], everything, **slow)
    method.input(choose_method, [state, method, view], everything, **slow)
    # However the slider is moved; of many moves the last one counts.
    k.input(move_slider, [state, k, view], shown, trigger_mode="always_last", **quick)
    view.input(views, [state, view], shown, **quick)
    back.click(undo, [state, view], shown, **quick)
    action.input(choose_action, action, [name, guesses], **quick)
    stage.select(click, [state, action, name, view], [*shown, guesses], **quick)
    write.click(export, [state, formats], archive, **private)


def _exploring(tab: gr.Tab) -> None:
    """The second tab."""

    def explore(spectrum: str, exponent: float, function: str, dtype: str) -> tuple[str, str]:
        choice = spectrum, int(exponent), function, dtype
        return said(*choice), explored(*choice)

    gr.Markdown(_GRADIENTS, latex_delimiters=[{"left": "$", "right": "$", "display": False}])
    with gr.Row():
        spectrum = gr.Radio(
            list(SPECTRA), value=next(iter(SPECTRA)), label="The other six eigenvalues", scale=4, min_width=300
        )
        function = gr.Radio(list(FUNCTIONS), value=FUNCTIONS[0], label="g", scale=1, min_width=120)
        dtype = gr.Radio(list(DTYPES), value="float64", label="Precision", scale=1, min_width=160)
    gap = gr.Slider(
        TIE,
        0,
        value=-8,
        step=1,
        label=f"Gap of the pair: exponent of ten; {TIE} stands for none",
        info=f"From {gap_text(0)} to {gap_text(TIE + 1)} of their size, then no gap at all.",
        elem_id="gap",
    )
    sentence = gr.Markdown(elem_id="sentence")
    picture = gr.HTML(elem_id="explored")
    choices: list[Any] = [spectrum, gap, function, dtype]
    private: dict[str, Any] = {"api_visibility": "private"}
    tab.select(explore, choices, [sentence, picture], **private)
    quick: dict[str, Any] = {"trigger_mode": "always_last", "show_progress": "hidden", **private}
    for control in choices:
        control.input(explore, choices, [sentence, picture], **quick)


def _comment(analysis: Analysis, note: str) -> str:
    segments = analysis.segments
    words = [f"**{segments.name}**. Suggested: {counted(segments.k)}"]
    if segments.k == 1:
        words.append("nothing in the picture differs")
    if segments.confidence is not None:
        words.append(f"within a factor of two of people's number on {segments.confidence:.0%} of photographs like this")
    return "; ".join([*words, *([note] if note else [])]) + "."


def launch(page: gr.Blocks, folder: Path, *, host: str = LOOPBACK, port: int = 7860, browser: bool = False) -> str:
    """Start the page and return its address.

    Args:
        page: what :func:`build` made.
        folder: the one that it was built with.
        host: the address to listen on; others than this machine's own are warned of.
        port: the port; 0 takes a free one.
        browser: open a browser window.

    Raises:
        ConfigurationError: the port is taken, or the address is none of this machine's.
    """
    if host not in (LOOPBACK, "localhost", "::1"):
        log.warning(
            "The page listens on %s: everybody who reaches this machine can use it. It has no accounts and no "
            "encryption; offer it only to a network that you trust.",
            host,
        )
    page.queue(max_size=MAX_WAITING)
    try:
        _, address, _ = page.launch(
            server_name=host,
            app_kwargs={"middleware": [Middleware(Guard, folder=folder, forget=_forget_in(page))]},  # type: ignore[arg-type]
            server_port=port or _free_port(),
            inbrowser=browser,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            show_error=False,  # an unexpected one could tell of the machine
            ssr_mode=False,
            enable_monitoring=False,
            theme=_theme(),
            head=f"<style>{(_HERE / 'page.css').read_text(encoding='utf-8')}</style>",  # css= would prefix the rules
            footer_links=[],
            max_file_size=MAX_UPLOAD,
            state_session_capacity=MAX_VISITORS,
        )
    except OSError as error:  # Gradio's answer to a port that is taken
        place = f"{host}, port {port}"
        raise ConfigurationError(f"the page cannot listen on {place}: choose another with --port, or 0.") from error
    return address


def _forget_in(page: gr.Blocks) -> Callable[[str], None]:
    """What forgets a session that waits for nothing: Gradio keeps its empty queues, some thousand bytes, for ever."""

    def forget(session: str) -> None:
        queue = page._queue
        if not queue.pending_event_ids_session.get(session):
            queue.pending_event_ids_session.pop(session, None)
            queue.pending_messages_per_session.pop(session, None)

    return forget


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
