"""Models are pushed to and loaded from a hub, here a local server."""

import json
import os
import subprocess
import sys

import pytest

from helpers.hub import running_hub
from matbackprop.vision.models.weights import model_card

pytest.importorskip("huggingface_hub")

PROGRAM = """
import sys, torch
from matbackprop.errors import WeightsError
from matbackprop.vision.inference import load_segmenter
from matbackprop.vision.models.deep_ncuts import DeepNCuts

torch.manual_seed(0)
model = DeepNCuts.variant("alexnet-relu5", hidden=8)
print(model.push_to_hub("owner/segmenter", license="cc-by-4.0", trained_on="shapes"))
again = load_segmenter("owner/segmenter", "cpu")
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
for call in (lambda: load_segmenter("owner/nobody"), lambda: load_segmenter("owner/notes")):
    try:
        call()
        sys.exit("no error")
    except WeightsError as error:
        print(str(error).splitlines()[0])
"""


@pytest.mark.slow
def test_a_model_is_pushed_with_its_card_and_loaded(tmp_path):
    with running_hub() as hub:
        hub.repos["owner/notes"] = {"notes.txt": b"no model"}
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_test"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        address, missing, empty = done.stdout.splitlines()
        assert address.startswith(f"{hub.address}/owner/segmenter/commit/")
        assert "owner/nobody" in missing and "contains no saved model" in empty
        files = hub.repos["owner/segmenter"]
    assert set(files) == {"config.json", "model.safetensors", "README.md"}
    assert json.loads(files["config.json"])["class"] == "DeepNCuts"
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: matbackprop\n") and "license: cc-by-4.0" in card
    assert (
        'matbackprop.segment("photo.jpg", model="owner/name")' in card
        and '| trained_on | `"shapes"` |' in card
        and "| hidden | `8` |" in card
    )


def test_a_card_without_notes_has_no_empty_table():
    card = model_card({"library": "matbackprop", "class": "RegionClassifier", "arguments": {"classes": 3}})
    assert (
        'matbackprop.classify("photo.jpg", model="owner/name")' in card
        and "## Notes" not in card
        and "license" not in card
    )
