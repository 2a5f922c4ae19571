"""The page: a photograph on the left, its regions, levels, eigenvectors and names on the right.

Gradio's usage statistics are off, its fonts are the browser's own, and the server listens on this machine only. What a
visitor leaves behind is bounded: uploads by :data:`MAX_UPLOAD`, analyses in memory by :data:`MAX_VISITORS`, files on
disk by their age, and all of them lie in one folder that the caller removes at the end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matbackprop.data.pictures import read_picture
from matbackprop.errors import MissingExtraError
from matbackprop.serve.views import MAX_REGIONS, Analysis, Picture, counted, fit_photograph, sample_photographs

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it reads this once
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
try:
    import gradio as gr
except ImportError:
    raise MissingExtraError("the page needs Gradio: pip install 'matbackprop[serve]'.") from None

__all__ = ["build", "launch"]

MAX_UPLOAD = "50mb"
"""Size of the largest file that is taken."""
MAX_VISITORS = 50
"""How many visitors' photographs stay in memory, some 3 MB each; who has been away longest is forgotten first."""
_EVERY, _AGE = 600, 3600  # seconds: how often files are looked through, and how old they become

Analyse = Callable[[Picture, str], Analysis]
Classify = Callable[[Picture, NDArray[np.bool_]], dict[str, float]]

_BUTTONS: Any = ["download", "fullscreen"]  # without "share", which would send the picture away
_CSS = """
.gradio-container { max-width: 1240px !important; margin: 0 auto; }
#title h1 { font-size: 1.6rem; margin: 0.4rem 0 0; letter-spacing: -0.01em; }
#title p { color: var(--body-text-color-subdued); margin: 0.1rem 0 0.6rem; }
footer { display: none !important; }
.thumbnail-item.thumbnail-lg { aspect-ratio: 3 / 2 !important; }
"""
_TITLE = """
# matbackprop
Drop a photograph and move the slider from few regions to many. Everything is computed on this machine.
"""


def _theme() -> gr.themes.Base:
    fonts = ["Inter", "system-ui", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif"]
    mono = ["ui-monospace", "Menlo", "Consolas", "monospace"]
    return gr.themes.Base(primary_hue="blue", neutral_hue="gray", font=fonts, font_mono=mono, radius_size="md")


def build(
    analyse: Analyse, methods: Sequence[str], folder: Path, *, about: str = "", classify: Classify | None = None
) -> gr.Blocks:
    """Build the page.

    Args:
        analyse: photograph (h, w, 3), method → :class:`~matbackprop.serve.views.Analysis`.
        methods: names of methods that ``analyse`` knows, the default first.
        folder: where uploads, samples and results are kept; the caller removes it.
        about: a line about the model in use.
        classify: photograph, mask → class name → probability; without it the page has no classification.

    Returns:
        The page, to be started by :func:`launch`.
    """
    os.environ["GRADIO_TEMP_DIR"] = str(folder)  # the only way to tell Gradio
    samples = sample_photographs(folder)

    def regions(analysis: Analysis | None, k: float) -> tuple[Any, Any, Any, Any]:
        if analysis is None:
            return None, None, None, None
        count = counted(analysis.labels(int(k)))
        path = analysis.save_labels(int(k), Path(tempfile.mkdtemp(dir=folder)) / f"{count.replace(' ', '_')}.png")
        return analysis.outlined(int(k)), analysis.painted(int(k)), count, str(path)

    def analyse_photograph(upload: dict[str, Any] | None, method: str) -> tuple[Any, ...]:
        nothing: tuple[Any, ...] = (None, gr.skip(), *regions(None, 1), [], [], None)
        if upload is None:
            return "", *nothing
        path = Path(upload["path"])
        try:
            picture = read_picture(path)
            analysis = analyse(fit_photograph(picture.pixels), method)
        except ValueError as error:  # all of the library's own errors about data are ValueErrors
            return f"⚠ {str(error).replace(str(path), path.name)}", *nothing
        k = min(max(analysis.segments.k, 2), MAX_REGIONS)
        shown = regions(analysis, k)
        views = analysis.levels(), analysis.eigenvectors(), analysis.spectrum()
        return _comment(analysis, picture.note), analysis, gr.update(value=k), *shown, *views

    def name_region(analysis: Analysis | None, k: float, event: gr.SelectData) -> tuple[Any, Any]:
        if analysis is None or classify is None:
            return None, None
        x, y = event.index
        mask = analysis.mask(int(k), int(x), int(y))
        shown = analysis.photograph.copy()
        shown[~mask] = shown[~mask] // 4 + 160
        return shown, classify(analysis.photograph, mask)

    gallery: dict[str, Any] = {
        "columns": 2,
        "height": "auto",
        "object_fit": "contain",
        "buttons": _BUTTONS,
        "format": "png",
    }
    with gr.Blocks(title="matbackprop", analytics_enabled=False, delete_cache=(_EVERY, _AGE)) as page:
        gr.Markdown(_TITLE, elem_id="title")
        state = gr.State(None, time_to_live=_AGE)
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                photograph = gr.Image(str(samples[0]), label="Photograph", sources=["upload", "clipboard"], height=320)
                message = gr.Markdown(elem_id="message")
                gr.Examples([[str(path)] for path in samples], [photograph], label="Samples")
                k = gr.Slider(2, MAX_REGIONS, value=8, step=1, label="Regions")
                method = gr.Radio(list(methods), value=methods[0], label="Method", visible=len(methods) > 1)
                if about:
                    gr.Markdown(about)
            with gr.Column(scale=3, min_width=480), gr.Tabs():
                with gr.Tab("Regions"):
                    outlined = gr.Image(label="Borders", interactive=False, format="png", buttons=_BUTTONS)
                    painted = gr.Image(label="Mean colours", interactive=False, format="png", buttons=_BUTTONS)
                    with gr.Row():
                        count = gr.Textbox(label="Found", interactive=False, scale=1)
                        labels = gr.File(label="Label map, 16-bit PNG", interactive=False, scale=2, height=90)
                with gr.Tab("Levels"):
                    levels = gr.Gallery(
                        label="From coarse to fine", columns=2, object_fit="contain", height=640, buttons=_BUTTONS
                    )
                with gr.Tab("Eigenvectors"):
                    vectors = gr.Gallery(label="The coordinates that cells are grouped by", **gallery)
                    eigenvalues = gr.Image(label="Spectrum", interactive=False, format="png", buttons=_BUTTONS)
                if classify is not None:
                    with gr.Tab("What is it?"):
                        gr.Markdown("Click on a region of the picture to name it.")
                        target = gr.Image(label="Click here", interactive=False, format="png", buttons=_BUTTONS)
                        chosen = gr.Image(label="Chosen region", interactive=False, format="png", buttons=_BUTTONS)
                        names = gr.Label(label="Names", num_top_classes=5)

        shown = [outlined, painted, count, labels]
        everything = [message, state, k, *shown, levels, vectors, eigenvalues]
        private: dict[str, Any] = {"api_visibility": "private"}
        for trigger in (page.load, photograph.change, method.change):
            # Without Gradio's own decoding, which would take 16 bits for 8 and show its complaints in every box.
            trigger(
                analyse_photograph, [photograph, method], everything, preprocess=False, concurrency_limit=1, **private
            )
        # However the slider is moved; of many moves the last one counts.
        k.input(regions, [state, k], shown, trigger_mode="always_last", show_progress="hidden", **private)
        if classify is not None:
            outlined.change(lambda picture: picture, outlined, target, **private)
            target.select(name_region, [state, k], [chosen, names], **private)
    return page


def _comment(analysis: Analysis, note: str) -> str:
    segments = analysis.segments
    words = [f"Suggested: {segments.k} region{'' if segments.k == 1 else 's'}"]
    if segments.k == 1:
        words.append("nothing in the picture differs")
    if segments.confidence is not None:
        words.append(f"within a factor of two of people's number on {segments.confidence:.0%} of photographs like this")
    return "; ".join([*words, *([note] if note else [])]) + "."


def launch(page: gr.Blocks, *, port: int = 7860, browser: bool = False, wait: bool = True) -> str:
    """Start the page on 127.0.0.1 and return its address.

    Args:
        page: what :func:`build` made.
        port: the port; 0 takes a free one.
        browser: open a browser window.
        wait: return only when the server is stopped (Ctrl-C).
    """
    _, address, _ = page.launch(
        server_name="127.0.0.1",
        server_port=port or _free_port(),
        inbrowser=browser,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        show_error=True,
        ssr_mode=False,
        enable_monitoring=False,
        theme=_theme(),
        css=_CSS,
        footer_links=[],
        max_file_size=MAX_UPLOAD,
        state_session_capacity=MAX_VISITORS,
    )
    if wait:
        print(f"The page is at {address} (stop with Ctrl-C).", flush=True)
        page.block_thread()
    return address


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
