"""Faults of vLLM in the ranks of a run: what happens to the process, or to the model, at a step of its generation."""

import json
import os
import signal
import threading
import time
from pathlib import Path

# Python runs it as each process begins; it acts where vLLM's half of the runtime is loaded.
_CODE = """
import importlib.abc
import importlib.util
import json
import sys
from pathlib import Path

FAULTS = Path(__file__).with_name("faults.json")


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "msrl_graph.backends.vllm.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            step, count = module.VllmEngine._step, 0

            def stepped(engine, *arguments):
                nonlocal count
                count += 1
                meet(engine, count)
                return step(engine, *arguments)

            module.VllmEngine._step = stepped

        spec.loader.exec_module = loaded
        return spec


def meet(engine, count):
    from torch import distributed as dist

    faults = json.loads(FAULTS.read_text())
    if faults and faults[0][:2] == [dist.get_rank(), count]:
        (left := FAULTS.with_name("left.json")).write_text(json.dumps(faults[1:]))
        left.rename(FAULTS)  # other ranks read it
        exec(faults[0][2], {"engine": engine})


sys.meta_path.insert(0, Finder())
"""
KILLED, STOPPED = (f"import os, signal; os.kill(os.getpid(), signal.{name})" for name in ("SIGKILL", "SIGSTOP"))
# An operator of its first layer then fails.
BROKEN = """
model = engine.core.model_executor.driver_worker.worker.model_runner.model
weight = model.model.layers[0].self_attn.qkv_proj.weight
weight.data = weight.data[:, :17]
"""


def limited(size):
    """So many bytes are all that the process may take from its next generation on."""
    return f"""
import psutil, resource
generate = engine.generate

def limited(*arguments):
    engine.generate = generate
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + {size},) * 2)
    return generate(*arguments)

engine.generate = limited
"""


def faults(place, *wanted):
    """The variables of a run in which these faults happen, one after the other: each a rank, the number of a step since
    its process began, and what happens there."""
    folder = place.folder / "injected"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_CODE)
    (folder / "faults.json").write_text(json.dumps(wanted))
    return {"PYTHONPATH": str(folder)}


def left(place):
    """The faults that have not happened."""
    return json.loads((place.folder / "injected" / "faults.json").read_text())


def shared():
    """What vLLM's ranks share memory by."""
    return set(Path("/dev/shm").glob("*cpushm*"))


def kill_as_they_share(place):
    """Kills the ranks of a place as soon as they have made memory that they share, once: what they had made."""

    def watch():
        while not seen:
            time.sleep(0.001)
            runs = tuple(folder.name for folder in place.temporary.iterdir())
            seen.extend(file for file in shared() if runs and file.name.startswith(runs))
        for pid in place.processes():
            if b"ray::RankHost" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)

    seen: list[Path] = []
    threading.Thread(target=watch, daemon=True).start()
    return seen
