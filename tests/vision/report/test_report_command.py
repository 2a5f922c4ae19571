"""``matbackprop report``: pages of runs, and their final numbers side by side."""

import pytest

from matbackprop.cli.report import Config, comparison, main
from matbackprop.errors import DataError
from matbackprop.vision.training.run_folder import RunFolder


@pytest.fixture
def runs(tmp_path):
    folders = []
    for seed, error in ((0, 0.25), (1, 0.5)):
        run = RunFolder(tmp_path / f"o2p-seed{seed}").create({"seed": seed})
        run.append_metrics({"step": 1, "val/error": error})
        run.write_summary({"val/error": error, "best_metric": "val/error", **({"extra": 1.0} if seed else {})})
        folders.append(run)
    return folders


def test_every_run_gets_its_page_and_several_are_compared(runs, capsys):
    main(Config(runs=tuple(run.path for run in runs)))
    said = capsys.readouterr().out
    assert all(run.report_path.is_file() for run in runs)
    assert "val/error" in said and "0.25" in said and "0.5" in said and "extra" not in said


def test_one_run_is_not_compared(runs, capsys):
    assert [list(row) for row in comparison(runs).rows] == [["o2p-seed0", 0.25], ["o2p-seed1", 0.5]]
    document = main(Config(runs=(runs[0].path,)))
    assert document["summary"] == str(runs[0].report_path) and document["comparison"] is None
    assert not capsys.readouterr().out


def test_a_run_is_needed():
    with pytest.raises(DataError, match="No run folder was given"):
        main(Config(runs=()))
