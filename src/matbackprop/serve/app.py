"""The page: the regions of a photograph, to be moved through, divided, united, named and downloaded.

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
from matbackprop.errors import ConfigurationError, MissingExtraError
from matbackprop.inference.export import FORMATS
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
NAME = "name"
_EVERY, _AGE = 600, 3600  # seconds: how often files are looked through, and how old they become

Analyse = Callable[[Picture, str, str], Analysis]
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
Drop a photograph, move the slider from few regions to many, and click on a region to change it. Everything is computed
on this machine.
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
        analyse: photograph (h, w, 3), method, file name → :class:`~matbackprop.serve.views.Analysis`.
        methods: names of methods that ``analyse`` knows, the default first.
        folder: where uploads, samples and results are kept; the caller removes it.
        about: a line about the model in use.
        classify: photograph, mask → class name → probability; without it the page names no regions.

    Returns:
        The page, to be started by :func:`launch`.
    """
    os.environ["GRADIO_TEMP_DIR"] = str(folder)  # the only way to tell Gradio
    samples = sample_photographs(folder)
    hidden = gr.update(value=None, visible=False)

    def views(analysis: Analysis | None) -> tuple[Any, ...]:
        if analysis is None:
            return None, None, None, "", hidden
        return analysis, analysis.outlined(), analysis.painted(), counted(analysis.shown.count()), hidden

    def analyse_photograph(upload: dict[str, Any] | None, method: str) -> tuple[Any, ...]:
        nothing: tuple[Any, ...] = (gr.skip(), *views(None), [], [], None)
        if upload is None:
            return "", *nothing
        path = Path(upload["path"])
        try:
            picture = read_picture(path)
            analysis = analyse(fit_photograph(picture.pixels), method, upload.get("orig_name") or path.name)
        except ValueError as error:  # all of the library's own errors about data are ValueErrors
            return f"⚠ {str(error).replace(str(path), path.name)}", *nothing
        k = gr.update(value=min(max(analysis.segments.k, 2), MAX_REGIONS))
        more = analysis.levels(), analysis.eigenvectors(), analysis.spectrum()
        return _comment(analysis, picture.note), k, *views(analysis), *more

    def move_slider(analysis: Analysis | None, k: float) -> tuple[Any, ...]:
        return views(None if analysis is None else analysis.level(int(k)))

    def undo(analysis: Analysis | None) -> tuple[Any, ...]:
        return views(None if analysis is None else analysis.undone())

    def click(analysis: Analysis | None, action: str, event: gr.SelectData) -> tuple[Any, ...]:
        if analysis is None:
            return *views(None), None, None
        x, y = (int(place) for place in event.index)
        if action != NAME:
            return *views(analysis.edited(x, y, action)), None, None
        mask = analysis.mask(x, y)
        chosen = analysis.photograph.copy()
        chosen[~mask] = chosen[~mask] // 4 + 160
        return *views(analysis), chosen, None if classify is None else classify(analysis.photograph, mask)

    def export(analysis: Analysis | None, formats: list[Any]) -> Any:
        if analysis is None or not formats:
            return hidden
        return gr.update(value=str(analysis.export(Path(tempfile.mkdtemp(dir=folder)), formats)), visible=True)

    images: dict[str, Any] = {"interactive": False, "format": "png", "buttons": _BUTTONS}
    gallery: dict[str, Any] = {"columns": 2, "height": "auto", "object_fit": "contain", "buttons": _BUTTONS}
    with gr.Blocks(title="matbackprop", analytics_enabled=False, delete_cache=(_EVERY, _AGE)) as page:
        gr.Markdown(_TITLE, elem_id="title")
        state = gr.State(None, time_to_live=_AGE)
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                outlined = gr.Image(label="Regions", elem_id="regions", **images)
                with gr.Row():
                    k = gr.Slider(2, MAX_REGIONS, value=8, step=1, label="Number of regions", scale=3)
                    count = gr.Textbox(label="Shown", interactive=False, scale=1, min_width=110)
                with gr.Row():
                    actions = ["split", "merge", *([] if classify is None else [NAME])]
                    action = gr.Radio(actions, value="split", label="A click on a region", scale=3)
                    back = gr.Button("Undo", scale=1, min_width=110)
                with gr.Row():
                    formats = gr.CheckboxGroup(list(FORMATS), value=["png", "npz"], label="Files", scale=3)
                    write = gr.Button("Write", scale=1, min_width=110)
                archive = gr.File(label="Download", interactive=False, visible=False, elem_id="archive")
            with gr.Column(scale=2, min_width=320):
                photograph = gr.Image(str(samples[0]), label="Photograph", sources=["upload", "clipboard"], height=260)
                message = gr.Markdown(elem_id="message")
                gr.Examples([[str(path)] for path in samples], [photograph], label="Samples")
                method = gr.Radio(list(methods), value=methods[0], label="Method", visible=len(methods) > 1)
                with gr.Tabs():
                    with gr.Tab("Mean colours"):
                        painted = gr.Image(show_label=False, **images)
                    with gr.Tab("Levels"):
                        levels = gr.Gallery(label="From coarse to fine", format="png", **gallery)
                    with gr.Tab("Eigenvectors"):
                        vectors = gr.Gallery(label="The coordinates that cells are grouped by", format="png", **gallery)
                        eigenvalues = gr.Image(label="Spectrum", **images)
                    with gr.Tab("Name", visible=classify is not None):
                        chosen = gr.Image(label="Chosen region", **images)
                        names = gr.Label(label="Names", num_top_classes=5)
        if about:
            gr.Markdown(about)

        shown = [state, outlined, painted, count, archive]
        private: dict[str, Any] = {"api_visibility": "private"}
        quick: dict[str, Any] = {"show_progress": "hidden", **private}
        for trigger in (page.load, photograph.change, method.change):
            # Without Gradio's own decoding, which would take 16 bits for 8 and show its complaints in every box.
            trigger(
                analyse_photograph,
                [photograph, method],
                [message, k, *shown, levels, vectors, eigenvalues],
                preprocess=False,
                concurrency_limit=1,
                **private,
            )
        # However the slider is moved; of many moves the last one counts.
        k.input(move_slider, [state, k], shown, trigger_mode="always_last", **quick)
        back.click(undo, state, shown, **quick)
        outlined.select(click, [state, action], [*shown, chosen, names], **quick)
        write.click(export, [state, formats], archive, **private)
    return page


def _comment(analysis: Analysis, note: str) -> str:
    segments = analysis.segments
    words = [f"Suggested: {counted(segments.k)}"]
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

    Raises:
        ConfigurationError: the port is taken.
    """
    try:
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
    except OSError as error:  # Gradio's answer to a port that is taken
        raise ConfigurationError(f"the page cannot listen on port {port}: choose another with --port, or 0.") from error
    if wait:
        print(f"The page is at {address} (stop with Ctrl-C).", flush=True)
        page.block_thread()
    return address


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
