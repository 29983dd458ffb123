"""MLflow.

Invariant: without MLFLOW_TRACKING_URI, all files are in the run's folder, in an SQLite database that `mlflow ui`
opens. Nothing is sent.

MLflow forgets no point. So a resumed run only adds points that MLflow does not have, or that have another value. If a
step then has two values, as of `seconds`, the last one is right.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from . import Line, TrackedRun, Tracker, points

_STATUS = {"done": "FINISHED", "interrupted": "KILLED"}
_LONGEST = 6000  # characters of a parameter's value
_MOST_PARAMS = 100  # parameters in one request
_MOST_POINTS = 1000  # points in one request
# MLflow allows only some characters in names.
_WORDS = {"@": "_at_", "=": "_is_"}
_REFUSED = re.compile(r"[^\w\-. /:]", re.ASCII)


class MLflow(Tracker):
    packages = ("mlflow-skinny", "sqlalchemy", "alembic")

    def begin(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder = Path(run.folder)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        self._client: Any = MlflowClient(uri, registry_uri=uri)
        self._names: dict[str, str] = {}  # by key of MLflow, the name of the number
        self._known: dict[str, dict[int, float]] = {}  # by key and step, the values that MLflow has
        stored = folder / "run_id"  # MLflow chooses the identifier
        known_params: set[str] = set()
        if stored.is_file():
            self._id = stored.read_text(encoding="utf-8")
            data = self._client.get_run(self._id).data
            known_params = set(data.params)
            for key in data.metrics:
                history = sorted(self._client.get_metric_history(self._id, key), key=lambda point: point.timestamp)
                self._known[key] = {point.step: point.value for point in history}
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(self._experiment(run, folder), run_name=run.name).info.run_id
            stored.write_text(self._id, encoding="utf-8")
        # A parameter of MLflow cannot change.
        params = [
            Param(key, str(value)[:_LONGEST])
            for name, value in run.config.items()
            if (key := self._key(name)) not in known_params
        ]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])
        self._waiting: list[Any] = []
        for line in run.lines:
            self.add(line)
        self.flush()

    def _experiment(self, run: TrackedRun, folder: Path) -> str:
        """Return the identifier of the experiment; create it if needed."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        if (known := self._client.get_experiment_by_name(name)) is not None:
            return str(known.experiment_id)
        local = None if os.environ.get("MLFLOW_TRACKING_URI") else (folder / "artifacts").as_uri()
        return str(self._client.create_experiment(name, artifact_location=local))

    def add(self, line: Line) -> None:
        from mlflow.entities import Metric

        step, numbers = points(line)
        now = int(1000 * time.time())
        for name, number in numbers.items():
            known = self._known.setdefault(self._key(name), {})
            if known.get(step) != float(number):
                known[step] = float(number)
                self._waiting.append(Metric(self._key(name), known[step], now, step))

    def flush(self) -> None:
        """Send the points that wait.

        If the tracker is behind, these are the points of many lines.
        """
        for start in range(0, len(self._waiting), _MOST_POINTS):
            self._client.log_batch(self._id, metrics=self._waiting[start : start + _MOST_POINTS])
        self._waiting.clear()

    def _key(self, name: str) -> str:
        """Return the key for a name, which may have characters that MLflow refuses."""
        for character, word in _WORDS.items():
            name = name.replace(character, word)
        key = _REFUSED.sub("_", name)
        while self._names.setdefault(key, name) != name:
            key += "_"
        return key

    def add_artefact(self, path: Path) -> None:
        self._client.log_artifact(self._id, path)

    def close(self, outcome: str) -> None:
        self._client.set_terminated(self._id, _STATUS.get(outcome, "FAILED"))
