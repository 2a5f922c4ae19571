"""Models are uploaded to the hub with a model card."""

import json
from pathlib import Path
from unittest import mock

import pytest

from matbackprop.errors import WeightsError
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.models.weights import model_card

huggingface_hub = pytest.importorskip("huggingface_hub")


def test_a_model_is_uploaded_with_its_card(monkeypatch):
    api = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: api)
    files = {}

    def upload(repo_id, folder_path):
        files.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
        return mock.Mock(commit_url=f"https://hub/{repo_id}/commit/1")

    api.upload_folder.side_effect = upload
    model = DeepNCuts(variant="alexnet-relu5", hidden=8)
    address = model.push_to_hub("owner/segmenter", private=True, license="cc-by-4.0", trained_on="shapes")
    assert address == "https://hub/owner/segmenter/commit/1"
    api.create_repo.assert_called_once_with("owner/segmenter", private=True, exist_ok=True)
    assert set(files) == {"config.json", "model.safetensors", "README.md"}
    assert json.loads(files["config.json"])["class"] == "DeepNCuts"
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: matbackprop\n") and "license: cc-by-4.0" in card
    for line in (
        'matbackprop.segment("photo.jpg", model="owner/name")',
        '| trained_on | `"shapes"` |',
        "| hidden | `8` |",
    ):
        assert line in card
    api.create_repo.side_effect = OSError("no network")
    with pytest.raises(WeightsError, match=r"owner/segmenter cannot be uploaded .* no network"):
        model.push_to_hub("owner/segmenter")


def test_a_card_without_notes_has_no_empty_table():
    card = model_card({"library": "matbackprop", "class": "RegionClassifier", "arguments": {"classes": 3}})
    assert 'matbackprop.classify("photo.jpg", model="owner/name")' in card
    assert "## Notes" not in card and "license" not in card
