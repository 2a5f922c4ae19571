"""Run folder with all files of a training run.

======================  =======================================================================
``config.json``         the resolved configuration
``versions.json``       versions, git revision, platform, command and seed, one entry per start
``log.txt``             the log
``metrics.jsonl``       one JSON object per line: step, epoch, time and named numbers
``tensorboard/``        the same numbers as TensorBoard curves
``checkpoints/``        ``last.ckpt`` and ``best.ckpt``
``figures/``            figures
``predictions/``        predictions on the validation data
``model/``              the trained model
``summary.json``        the final numbers
``report.html``         the report
======================  =======================================================================
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from matbackprop.errors import ConfigurationError
from matbackprop.vision.configuration import differences, to_json
from matbackprop.vision.files import atomic_write, plain_numbers, read_bytes, read_json, shorten, show
from matbackprop.vision.versions import versions

#: Fields of the engine that must not change when a run is resumed.
_FIXED = {"seed", "precision", "matmul_precision", "deterministic", "gradient_clip", "accumulate", "validate_every",
          "monitor"}  # fmt: skip

_FIX = "Remove it, or restore a copy."
_Number = Annotated[float, Field(gt=-1e300, lt=1e300)]  # can be drawn
_LINE = TypeAdapter(dict[str, int | _Number | None])
_FILES = ("config.json", "versions.json", "log.txt", "metrics.jsonl", "summary.json", "report.html")
_FOLDERS = ("checkpoints", "figures", "predictions", "tensorboard", "model")


class RunFolder:
    """Folder with the files of one run.

    Example:
        >>> import tempfile
        >>> run = RunFolder(Path(tempfile.mkdtemp()) / "run").create({"seed": 0})
        >>> run.append_metrics({"step": 1, "epoch": 0, "train/loss": 0.5})
        >>> run.read_metrics()[0]["train/loss"]
        0.5
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.json"
        self.versions_path = self.path / "versions.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.summary_path = self.path / "summary.json"
        self.log_path = self.path / "log.txt"
        self.report_path = self.path / "report.html"
        self.checkpoints = self.path / "checkpoints"
        self.figures = self.path / "figures"
        self.predictions = self.path / "predictions"
        self.tensorboard = self.path / "tensorboard"

    def check(self, config: Any, *, resume: bool = False, overwrite: bool = False) -> None:
        """Raise ConfigurationError unless a run with this configuration may use the folder.

        A resumed run must not differ in fields that affect its results.
        """
        if not any((self.path / name).exists() for name in _FILES):
            return
        if overwrite:
            if not self.versions_path.exists():
                raise ConfigurationError(f"{self.path} is not a run folder. Choose another folder with --run.")
        elif not resume:
            raise ConfigurationError(
                f"{self.path} already contains a run. Continue it with --resume, replace it with --overwrite, or "
                "choose another folder with --run."
            )
        elif self.config_path.exists():
            self._check_same(to_json(config))

    def _check_same(self, data: Any) -> None:
        prefix = "engine." if "engine" in data else ""
        fixed = {prefix + name for name in _FIXED}
        changed = "; ".join(
            f"{key}: {shorten(repr(old))} then, {shorten(repr(new))} now"
            for key, (old, new) in sorted(differences(self.read_config(), data).items())
            if key in fixed or (prefix and not key.startswith(prefix))
        )
        if changed:
            raise ConfigurationError(
                f"The run in {self.path} has another configuration ({changed}). Use the same options, or choose "
                "another folder with --run."
            )

    def create(self, config: Any, *, resume: bool = False, overwrite: bool = False) -> RunFolder:
        """Create the folder, or continue or replace its run; see :meth:`check`. Other files are kept."""
        self.check(config, resume=resume, overwrite=overwrite)
        if overwrite and self.versions_path.exists():
            for name in _FOLDERS:
                if (self.path / name).exists():
                    shutil.rmtree(self.path / name)
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
        for folder in (self.path, self.checkpoints, self.figures, self.predictions):
            folder.mkdir(parents=True, exist_ok=True)
        for pattern in (*(f".{name}.*.tmp" for name in _FILES), "checkpoints/.*.ckpt.*.tmp"):
            for path in self.path.glob(pattern):  # left by a killed process
                path.unlink(missing_ok=True)
        data = to_json(config)
        entry = versions() | {"seed": data.get("engine", data).get("seed")}
        atomic_write(self.versions_path, json.dumps([*self.read_versions(), entry], indent=2) + "\n")
        atomic_write(self.config_path, json.dumps(data, indent=2) + "\n")
        return self

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder or raise ConfigurationError. The lock is released if the process is killed."""
        from filelock import FileLock, Timeout

        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(str(self.path / ".lock"), timeout=0):
                yield
        except Timeout:
            raise ConfigurationError(
                f"Another process is training in {self.path}. Wait for it, or choose another folder with --run."
            ) from None

    def figure_path(self, name: str) -> Path:
        """Return the path of a figure. The default suffix is ``.png``."""
        return self.figures / (name if Path(name).suffix else f"{name}.png")

    def read_config(self) -> dict[str, Any]:
        """Return the configuration in its JSON form."""
        if not self.config_path.exists():
            raise ConfigurationError(f"{self.path} is not a run folder: it has no config.json. Pass a run folder.")
        return read_json(self.config_path, error=ConfigurationError)

    def read_versions(self) -> list[dict[str, Any]]:
        """Return one entry per start of the run."""
        if not self.versions_path.exists():
            return []
        starts = read_json(self.versions_path, list, error=ConfigurationError)
        for start in starts:
            if not isinstance(start, dict) or not isinstance(start.get("git"), (str, type(None))):
                raise ConfigurationError(f"{self.versions_path} is damaged: an entry is {show(start)}. {_FIX}")
        return starts

    def read_summary(self) -> dict[str, Any]:
        """Return the final metrics; empty if the run has not ended."""
        return read_json(self.summary_path, error=ConfigurationError) if self.summary_path.exists() else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all lines of metrics, except an incomplete last line."""
        if not self.metrics_path.exists():
            return []
        metrics: list[dict[str, Any]] = []
        for number, line in enumerate(read_bytes(self.metrics_path, 1 << 30, ConfigurationError).split(b"\n")[:-1], 1):
            try:
                row = _LINE.validate_json(line, strict=True)
                step = row.get("step")
                if not isinstance(step, int) or step < 0:
                    raise ValueError("step is not a natural number")
            except ValueError as error:
                reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                raise ConfigurationError(f"{self.metrics_path}, line {number} is damaged: {reason}. {_FIX}") from error
            metrics.append(row)
        return metrics

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append a line of metrics with a time stamp. NaN and Inf are written as null."""
        line = {"step": 0, "epoch": 0, "time": round(time.time(), 3), **metrics}
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(plain_numbers(line)) + "\n")

    def keep_metrics_until(self, step: int) -> None:
        """Remove the lines of metrics after ``step``."""
        lines = [json.dumps(line) + "\n" for line in self.read_metrics() if line["step"] <= step]
        atomic_write(self.metrics_path, "".join(lines))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the final metrics."""
        atomic_write(self.summary_path, json.dumps(plain_numbers(summary), indent=2) + "\n")
