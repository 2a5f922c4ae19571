"""``matbackprop serve``: serve a local web page for segmentation."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matbackprop.errors import needs

log = logging.getLogger("matbackprop")


@dataclass
class Config:
    """Serve a local web page to segment photographs, edit and export regions."""

    #: Segmenter. box: the contour network in the package. box/small: a faster, less accurate one. none: the gradient of
    #: the photograph. Or the folder of a trained model, a run folder, or owner/name on the Hugging Face hub.
    model: str = "box"
    #: Classifier. box: the small network for COCO's 80 classes in the package. none: enter names manually. Or the
    #: folder of a trained model, a run folder of 'matbackprop train o2p', or owner/name on the hub.
    classifier: str = "box"
    #: Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for all network interfaces.
    host: str = "127.0.0.1"
    port: int = 7860  #: Port of the page; 0 selects a free one.
    browser: bool = False  #: Open the page in a browser window.
    device: Literal["auto", "cpu", "cuda"] = "auto"  #: Device to use; auto selects CUDA if available.


def main(config: Config) -> dict[str, Any]:
    """Print the address, load the models and serve the page until Ctrl-C."""
    with needs("the page needs Gradio", "'matbackprop[serve]'"):
        from matbackprop.vision.serve.server import LOOPBACK, Server, listen
    sock = listen(config.host, config.port)
    address = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{sock.getsockname()[1]}"
    print(f"Loading Gradio and the networks; the page will be at {address}", file=sys.stderr, flush=True)
    local = config.host in LOOPBACK
    if not local:
        log.warning(
            "The page listens on %s: everyone who reaches this machine can use it. It has no accounts and no "
            "encryption; use it only on a trusted network.",
            config.host,
        )
    folder = tempfile.TemporaryDirectory(prefix="matbackprop-serve-")
    os.environ["GRADIO_TEMP_DIR"] = folder.name  # must be set before importing Gradio

    from matbackprop.vision.inference import load_classifier, load_segmenter, name_regions
    from matbackprop.vision.serve.analysis import analyze
    from matbackprop.vision.serve.app import application, build

    model = None if config.model == "none" else load_segmenter(config.model, config.device)
    names = {
        "none": "gradient of the photograph",
        "box": "the contour network in the package",
        "box/small": "the small contour network in the package",
    }
    about = f"Segmenter: {names.get(config.model, config.model)}."
    classify = None
    if config.classifier != "none":
        classifier = load_classifier(config.classifier, config.device)
        classify = lambda photograph, mask: name_regions(classifier, photograph, masks=[mask])[0]  # noqa: E731
    page = build(lambda pixels, name: analyze(pixels, model, name), Path(folder.name), about=about, classify=classify)
    server = Server(application(page), sock, Path(folder.name), LOOPBACK if local else ())
    server.start()
    if config.browser:
        webbrowser.open(address)

    def stay() -> None:
        with folder:
            server.wait()

    return {"summary": f"The page is at {address} (stop with Ctrl-C).", "address": address, "then": stay}
