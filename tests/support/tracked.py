"""What trackers hold of a run, read as their own programs read it: values by step and name, each in a list, so that a
point that is there twice shows."""

import json
import os
import re
import struct
import subprocess
import sys
from collections import defaultdict

import numpy as np

from msrl_graph.runtime.metrics.metrics_file import parse_line
from msrl_graph.trackers import points

os.environ["DO_NOT_TRACK"] = os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # nothing is sent of the tests' reading
READ_TRACKIO = """
import json, sys
from trackio import Api
from trackio.sqlite_storage import SQLiteStorage
project, = SQLiteStorage.get_projects()
run, = Api().runs(project)
logs = SQLiteStorage.get_logs(project, run.name, run_id=run.id)
print(json.dumps({"logs": logs, "config": run.config}))
"""


def expected(out, rename=lambda name: name):
    """What metrics.jsonl has."""
    found = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        step, numbers = points(parse_line(line))
        found |= {(step, rename(name)): [value] for name, value in numbers.items()}
    return found


def read_wandb(out):
    """The only folder of an offline run, by wandb's own messages; the frames around them are SwanLab's to read."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (out / "trackers" / "wandb").glob("wandb/offline-run-*/*.wandb")
    found = defaultdict(list)
    with WBDataStoreReader() as reader:
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                step = items.pop("_step")
                for name, value in items.items():
                    if not name.startswith("_"):
                        found[step, name].append(value)
    return dict(found)


def read_swanlab(out):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (path,) = (out / "trackers" / "swanlab").glob("run-*/*.swanlab")
    found = defaultdict(list)
    reader = DataStoreReader()
    reader.open(path)
    while (data := reader.scan()) is not None:
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "scalar":
            found[record.scalar.step, record.scalar.key].append(record.scalar.value.number)
    reader.close()
    return dict(found)


def read_mlflow(out):
    from mlflow import MlflowClient

    uri = f"sqlite:///{out / 'trackers' / 'mlflow' / 'mlflow.db'}"
    client = MlflowClient(uri, registry_uri=uri)
    run = client.get_run((out / "trackers" / "mlflow" / "run_id").read_text())
    found = defaultdict(list)
    for key in run.data.metrics:
        for point in sorted(client.get_metric_history(run.info.run_id, key), key=lambda point: point.timestamp):
            found[point.step, key].append(point.value)
    return dict(found)


def rename_for_mlflow(name):
    return re.sub(r"[^\w\-. /:]", "_", name.replace("@", "_at_").replace("=", "_is_"))


def read_trackio(out):
    environment = {**os.environ, "TRACKIO_DIR": str(out / "trackers" / "trackio")}
    done = subprocess.run([sys.executable, "-c", READ_TRACKIO], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = defaultdict(list)
    for row in json.loads(done.stdout.splitlines()[-1])["logs"]:
        step = row.pop("step")
        row.pop("timestamp")
        for name, value in row.items():
            found[step, name].append(value)
    return dict(found)


def read_tensorboard(out):
    """Of the events, which have numbers of 32 bits."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (out / "tensorboard").iterdir()
    content = path.read_bytes()
    found = defaultdict(list)
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = Event()
        event.ParseFromString(content[12 : 12 + length])
        content = content[16 + length :]
        for value in event.summary.value:
            found[event.step, value.tag].append(value.simple_value)
    return dict(found)


def assert_holds(tracker, out):
    """A tracker holds what metrics.jsonl has, each point once; of MLflow, which forgets nothing, the last of a step.

    Returns how many points it holds.
    """
    assert tracker in READERS, (
        f"nothing compares what the tracker `{tracker}` holds with metrics.jsonl: add to tests/support/tracked.py a "
        f"function `read_{tracker}(out)`, which returns {{(step, name): [values]}}, and its line in READERS"
    )
    found = READERS[tracker](out)
    if tracker == "mlflow":
        assert {key: values[-1:] for key, values in found.items()} == expected(out, rename_for_mlflow)
    elif tracker == "tensorboard":
        assert found == {key: [float(np.float32(value))] for key, (value,) in expected(out).items()}
    else:
        assert found == expected(out)
    return sum(map(len, found.values()))


READERS = {
    "mlflow": read_mlflow,
    "swanlab": read_swanlab,
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "wandb": read_wandb,
}
