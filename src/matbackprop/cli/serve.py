"""``matbackprop serve``: a page in the browser where photographs can be segmented and regions named."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matbackprop.errors import ConfigurationError


@dataclass
class Config:
    """Open a page on this machine (127.0.0.1): segment photographs, edit and export regions, explore gradients."""

    model: str = "box"
    (
        "Segmenter. box: the small network that comes with the package. box/accurate: the larger one, better and "
        "slower. none: merge superpixels by colour and contrast alone. Or the folder of a trained model, a run folder "
        "of 'matbackprop train ncuts', or owner/name on the hub."
    )
    classifier: str = "box"
    (
        "Classifier. box: the small network for COCO's 80 classes that comes with the package. none: names are "
        "typed. Or the folder of a trained model, a run folder of 'matbackprop train o2p', or owner/name on the "
        "hub."
    )
    host: str = "127.0.0.1"
    """Address to listen on. The default is this machine alone; 0.0.0.0 is every network that it is on."""
    port: int = 7860
    """Port of the page; 0 takes a free one."""
    browser: bool = False
    """Open the page in a browser window."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""


def main(config: Config) -> dict[str, Any]:
    """Load the models, start the page, and say where it is; then stay until Ctrl-C."""
    if not 0 <= config.port <= 65535:
        raise ConfigurationError(f"--port {config.port}: ports have numbers from 0 to 65535.")
    try:
        socket.getaddrinfo(config.host, config.port)
    except (OSError, UnicodeError):
        raise ConfigurationError(f"--host {config.host}: there is no such address; name one of this machine.") from None
    folder = tempfile.TemporaryDirectory(prefix="matbackprop-serve-")
    os.environ["GRADIO_TEMP_DIR"] = folder.name  # before Gradio is imported, which makes a folder elsewhere otherwise

    from matbackprop.vision.inference import load_classifier, load_segmenter, name_regions
    from matbackprop.vision.serve.analysis import Segmenter
    from matbackprop.vision.serve.app import build, launch

    model = None if config.model == "none" else load_segmenter(config.model, config.device)
    segmenter, name = Segmenter(model), None
    if config.classifier != "none":
        classifier = load_classifier(config.classifier, config.device)
        name = lambda photograph, mask: name_regions(classifier, photograph, masks=[mask])[0]  # noqa: E731
    page = build(segmenter, segmenter.methods, Path(folder.name), about=segmenter.about, classify=name)
    address = launch(page, Path(folder.name), host=config.host, port=config.port, browser=config.browser)

    def stay() -> None:
        with folder:
            page.block_thread()

    return {"summary": f"The page is at {address} (stop with Ctrl-C).", "address": address, "then": stay}
