"""What msrl-doctor tells of machines of which one thing is wrong, with its next step; none of them is a real one."""

import pytest
from machines import (
    APPS,
    CANN,
    DRIVER,
    GIB,
    INFO,
    LOG,
    NNAL,
    QUERY,
    TOPOLOGY,
    TRY_GPU,
    TRY_NPU,
    a2,
    a2_dies,
    a3,
    a3_dies,
    cpu,
    gpu,
    h100,
    installed,
    meminfo,
    npu_smi,
    topology,
)

from msrl_graph.runtime.doctor.examine import judge
from msrl_graph.runtime.doctor.report import table

MIB = 1 << 20
# Whether programs run on a kind of device is a matter of the version, not of the machine.
LEFT = ("engines",)


def wrong(*hosts):
    """What is not as it should be."""
    return [f for f in judge(hosts) if f.state != "ok" and f.check not in LEFT]


def told(*hosts):
    """The same in lines, each with the next step."""
    return [f"{f.state} {f.check}: {f.told} > {f.next}" for f in wrong(*hosts)]


def shown(states, golden, file):
    """Compares what is shown of each state, as a person sees it, with a golden text."""
    text = ""
    for state, hosts in states.items():
        found = wrong(*hosts)
        assert found, state
        rows, _, _ = table(found, [h.title for h in hosts], 100).partition("\n\n")
        text += f"# {state}\n{rows}\n\n"
    golden(file, text)


@pytest.mark.parametrize("machine", [a2, a3, h100, cpu])
def test_a_healthy_machine_is_told_nothing_wrong(machine):
    found = machine().host()
    assert told(found) == []
    checks = {f.check for f in judge([found])}
    assert ("cann" in checks) == ("links" in checks and "nnal" in checks) == (machine in (a2, a3))
    assert ("driver" in checks) == (machine is not cpu)


def test_a_process_may_see_some_of_the_devices():
    found = judge([a2(environment={"ASCEND_RT_VISIBLE_DEVICES": "4,5,6,7"}, said={TRY_NPU: "4\n"}).host()])
    assert [(f.state, f.told) for f in found if f.check in ("mask", "import")] == [
        ("ok", "torch sees 4 NPU"),
        ("ok", "ASCEND_RT_VISIBLE_DEVICES shows 4 of 8"),
    ]
    for mask in ("GPU-00000001", "1,0", "0, 1"):
        assert told(h100(environment={"CUDA_VISIBLE_DEVICES": mask}, said={TRY_GPU: "2\n"}).host()) == []


BARE = dict.fromkeys([f"/dev/davinci{i}" for i in range(8)])
WITHOUT = dict.fromkeys(installed(CANN, "9.1.0"))
UNSET = dict.fromkeys(["ASCEND_HOME_PATH", "LD_LIBRARY_PATH"])
LATEST = "/usr/local/Ascend/ascend-toolkit/latest"
ATB = f"{NNAL}/latest/version.info"
STUB = f"{CANN}/opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b/ops_oam"
PORT = "hccn_tool -i 3 -link -g"
ASCEND = {
    "no driver": {"files": BARE | {DRIVER: None}},
    "a container without devices": {"files": BARE, "contained": True},
    "no npu-smi": {"said": {INFO: None}, "contained": True},
    "npu-smi hangs": {"said": {INFO: ("hung", "")}},
    "a user without rights": {
        "said": {
            INFO: (255, "DrvMngGetConsoleLogLevel failed. (ret=4)\ndcmi module initialize failed. ret is -8005\n")
        },
        "root": False,
    },
    "no CANN": {"files": WITHOUT, "environment": UNSET},
    "CANN is not sourced": {
        "files": WITHOUT | installed("/usr/local/Ascend/cann", "9.1.0"),
        "environment": UNSET | {"ATB_HOME_PATH": None},
    },
    "an older CANN is not sourced": {
        "files": WITHOUT
        | {
            f"{LATEST}/version.cfg": "toolkit_running_version=[7.7.T20.0.B210:8.5.0]\n",
            ATB: "Ascend-cann-atb : 8.5.0\n",
        },
        "environment": UNSET,
        "packages": {"vllm-ascend": None, "vllm": None},
    },
    "ASCEND_HOME_PATH of a CANN that is gone": {"files": WITHOUT | installed("/usr/local/Ascend/cann", "9.1.0")},
    "half of CANN's environment": {"environment": {"LD_LIBRARY_PATH": "/opt/lib"}},
    "libraries of another CANN": {
        "files": installed(LATEST, "8.5.0"),
        "environment": {"LD_LIBRARY_PATH": f"{LATEST}/lib64"},
    },
    "only the stub of the operators": {"files": {f"{CANN}/aarch64-linux/ascend_ops_install.info": None, STUB: ""}},
    "operators of another CANN": {"files": installed(CANN, "9.1.0", "9.0.0")},
    "no NNAL": {"files": {ATB: None}},
    "NNAL of another CANN": {"files": {ATB: "Ascend-cann-atb : 9.0.0\n"}},
    "a driver that is too old": {"files": {DRIVER: "Version=24.1.rc2\n"}},
    "torch without its plug-in": {"packages": {"torch-npu": None}},
    "a plug-in of another torch": {"packages": {"torch-npu": "2.9.0.post2", "vllm": None, "vllm-ascend": None}},
    "a plug-in that vllm-ascend does not take": {"packages": {"torch-npu": "2.9.0.post2"}},
    "the torch of CPUs beside vllm-ascend": {"packages": {"torch": "2.13.0+cpu"}},
    "torch for CUDA": {"packages": {"torch": "2.10.0+cu128"}},
    "vllm-ascend of another vllm": {"packages": {"vllm": "0.28.0+empty"}},
    "vllm alone": {"packages": {"vllm-ascend": None}},
    "vllm-ascend alone": {"packages": {"vllm": None}},
    "MindSpeed of another Megatron": {"packages": {"mindspeed": "0.12.1"}},
    "Megatron without MindSpeed": {"packages": {"mindspeed": None}},
    "a Python that vllm-ascend does not take": {"python": "3.13.1"},
    "an import that fails": {
        "said": {
            TRY_NPU: (
                1,
                "Traceback (most recent call last):\nImportError: libhccl.so: cannot open shared object file\n",
            )
        }
    },
    "an import that hangs": {"said": {TRY_NPU: ("hung", "")}},
    "a device that torch does not see": {"said": {TRY_NPU: "[W] slow\n7\n"}},
    "memory that others hold": {
        "said": {
            INFO: npu_smi(
                a2_dies(n0=("OK", 60232), n1=("OK", 60233)),
                held=[(0, 0, 2759218, "VLLMWorker_DP", 56293), (1, 0, 2759615, "", 56415)],
            )
        }
    },
    "memory that another container holds": {"said": {INFO: npu_smi(a2_dies(n3=("OK", 60232)))}},
    "a die that is ill": {"said": {INFO: npu_smi(a2_dies(n5=("Alarm", 3300), n6=("Warning", 3300)))}},
    "a die that is lost": {"said": {INFO: npu_smi(a2_dies()[:7])}},
    "a link that is down, of one host": {"said": {PORT: "link status: DOWN\n"}},
    "a mask with a space": {"environment": {"ASCEND_RT_VISIBLE_DEVICES": "0,1, 2,3"}, "said": {TRY_NPU: "2\n"}},
    "a mask of ids that are not there": {"environment": {"ASCEND_RT_VISIBLE_DEVICES": "1,3,8"}},
    "a mask with an id twice": {"environment": {"ASCEND_RT_VISIBLE_DEVICES": "0,1,1,2"}},
    "a mask that does not rise": {"environment": {"ASCEND_RT_VISIBLE_DEVICES": "3,2,1"}},
    "an empty mask": {"environment": {"ASCEND_RT_VISIBLE_DEVICES": ""}, "said": {TRY_NPU: "0\n"}},
    "a small /dev/shm in a container": {"rooms": {"/dev/shm": (64 * MIB, 64 * MIB)}, "contained": True},
    "no /dev/shm": {"rooms": {}},
    "few files that may be open": {"descriptors": (1024, 1048576)},
    "few files that may ever be open": {"descriptors": (1024, 4096)},
}


def test_what_is_wrong_with_an_ascend_machine(golden):
    shown({state: [a2(**changed).host()] for state, changed in ASCEND.items()}, golden, "doctor.ascend.txt")


def test_an_npu_without_its_kernels_by_their_old_name():
    files = WITHOUT | installed(LATEST, "8.1.RC1", "") | {ATB: None}
    environment = {"ASCEND_HOME_PATH": LATEST, "LD_LIBRARY_PATH": f"{LATEST}/lib64"}
    none = dict.fromkeys(["vllm", "vllm-ascend"])
    assert told(a2(files=files, environment=environment, packages=none).host()) == [
        "wrong kernels: CANN 8.1.RC1 has no NPU operators installed > bash "
        "Ascend-cann-kernels-*_8.1.RC1_linux-$(uname -m).run --install"
    ]
    files[f"{LATEST}/opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b/add"] = ""
    assert told(a2(files=files, environment=environment, packages=none).host()) == []


def test_a_driver_in_another_folder_is_known_by_its_command():
    found = judge([a2(files={DRIVER: None}, said={INFO: npu_smi(a2_dies(), "26.0.rc1")}).host()])
    assert [f.told for f in found if f.check == "driver"] == ["26.0.rc1, 8 NPU (910B3)"]


def test_the_second_die_of_a_package_is_told_by_its_own_name():
    dies = a3_dies()
    dies[3] = (*dies[3][:5], 31877, 65536)
    said = {INFO: npu_smi(dies, "26.0.rc1", held=[(1, 1, 632268, "python3.1", 28000)])}
    assert told(a3(said=said).host()) == [
        "warning device-memory: NPU 1 chip 1: up to 33.4 GB in use, by python3.1 (632268) > wait until they end, or "
        "end them: kill 632268"
    ]


def test_the_plug_in_of_npus_on_a_machine_that_has_none():
    assert told(cpu(packages={"torch-npu": "2.10.0.post4"}).host()) == [
        "wrong plugin: torch-npu 2.10.0.post4 is installed, but there is neither an NPU nor CANN: torch loads "
        "it and fails > pip uninstall torch-npu"
    ]


GPUS = dict.fromkeys([f"/dev/nvidia{i}" for i in range(8)])


def gpus(**changed):
    """Of the third GPU something is other."""
    return {QUERY: "".join(gpu(i, **(changed if i == 2 else {})) for i in range(8))}


CUDA = {
    "no driver": {"files": GPUS},
    "a container without devices": {"files": GPUS, "contained": True},
    "no nvidia-smi": {"said": {QUERY: None}, "contained": True},
    "a driver that was renewed": {
        "said": {
            QUERY: (18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n")
        }
    },
    "a driver that is not loaded": {
        "said": {QUERY: (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")}
    },
    "nvidia-smi hangs": {"said": {QUERY: ("hung", "")}},
    "a driver that is too old": {
        "said": {QUERY: "".join(gpu(i, driver="550.54.15") for i in range(8)), TRY_GPU: (1, "RuntimeError: too old\n")}
    },
    "torch for CPUs": {
        "packages": {"torch": "2.13.0+cpu"},
        "files": {"torch/version.py": "cuda: Optional[str] = None\n"},
        "said": {TRY_GPU: (1, "AssertionError: Torch not compiled with CUDA enabled\n")},
    },
    "a fabric that is not up": {"said": {TRY_GPU: (1, "RuntimeError: Error 802: system not yet initialized\n")}},
    "CUDA that does not begin": {"said": {TRY_GPU: (1, "RuntimeError: No CUDA GPUs are available\n")}},
    "CUDA that hangs": {"said": {TRY_GPU: ("hung", "")}},
    "a driver that is unloaded": {"said": gpus(persistence="Disabled")},
    "memory that is broken": {"said": gpus(errors="3")},
    "faults in the kernel's log": {
        "said": {
            LOG: "[12.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
            "[13.0] NVRM: Xid (PCI:0000:3b:00): 13, pid=2, Graphics Exception\n"
        }
    },
    "a device that is lost": {"said": {QUERY: "".join(map(gpu, range(7)))}},
    "a link that is down": {"said": {TOPOLOGY: topology(8, lambda a, b: "SYS" if {a, b} == {2, 5} else "NV18")}},
    "memory that others hold": {"said": gpus(used=70000) | {APPS: "GPU-00000002, 4242, /usr/bin/python3, 69000\n"}},
    "memory that another container holds": {"said": gpus(used=70000)},
    "a mask of ids that are not there": {"environment": {"CUDA_VISIBLE_DEVICES": "0,1,8"}, "said": {TRY_GPU: "2\n"}},
    "a mask with an id twice": {"environment": {"CUDA_VISIBLE_DEVICES": "0,0"}},
    "an empty mask": {"environment": {"CUDA_VISIBLE_DEVICES": ""}, "said": {TRY_GPU: "0\n"}},
    "packages that a run needs": {"packages": {"ray": None, "pyarrow": None}},
    "a Python that is too old": {"python": "3.10.4"},
    "a host whose memory is full": {"files": {"/proc/meminfo": meminfo(1 * GIB, 32 * GIB)}},
    "a container whose memory is full": {
        "files": {"/sys/fs/cgroup/memory.max": f"{8 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{8 * GIB - 4096}\n"}
    },
}


def test_what_is_wrong_with_a_machine_of_nvidias_devices(golden):
    shown({state: [h100(**changed).host()] for state, changed in CUDA.items()}, golden, "doctor.cuda.txt")


def test_pcie_and_bridges_are_no_broken_links():
    for how, words in (
        (lambda a, b: "PHB", "PCIe"),
        (lambda a, b: "NV4" if a // 2 == b // 2 else "SYS", "NVLink between some"),
    ):
        found = judge([h100(said={TOPOLOGY: topology(8, how)}).host()])
        assert [(f.state, f.told) for f in found if f.check == "links"] == [("ok", words)]


def cluster(*machines, counts=None, apart=()):
    """Hosts of one Ray cluster, at which Ray counts so many devices."""
    counts = counts or [{"CPU": 192, "NPU": 8}] * len(machines)
    apart = (*apart, *[0.0] * len(machines))
    return [
        m.host(address=f"10.0.0.{i + 1}", resources=counts[i], apart=apart[i], others=len(machines) - 1)
        for i, m in enumerate(machines)
    ]


def test_hosts_that_are_alike_are_told_of_once():
    hosts = cluster(*(a2() for _ in range(3)))
    assert told(*hosts) == []
    found = judge(hosts)
    assert len({f.check for f in found}) == len(found) and {f.hosts for f in found} == {tuple(h.title for h in hosts)}
    said = {f.check: f.told for f in found}
    assert (said["ray"], said["versions"], said["clock"]) == (
        "3 hosts, 576 CPU, 24 NPU",
        "the same on all hosts",
        "the same on all hosts",
    )


PACKAGES = {"transformers": "2.61.0", "numpy": None}
HOSTS = {
    "mixed versions": ([a2(), a2(packages=PACKAGES, python="3.12.1"), a2()], {}),
    "a checkout that is other": ([a2(), a2(), a2(packages={"msrl-graph": "0.1.0 ffffffff", "ray": "2.60.1"})], {}),
    "another driver": ([a2(), a2(), a2(files={DRIVER: "Version=25.3.rc1\n"})], {}),
    "a clock that is behind": ([a2(), a2()], {"apart": (0.0, -40.0)}),
    "a link that is down": ([a2(), a2(said={PORT: "link status: DOWN\n"})], {}),
    "a link that is not asked": ([a2(), a2(said={PORT: (1, "")})], {}),
    "Ray that counts no NPU": ([a2(), a2()], {"counts": [{"NPU": 8}, {"CPU": 192}]}),
    "a mask that Ray has": (
        [a2(environment={"ASCEND_RT_VISIBLE_DEVICES": "4,5,6,9"}), a2()],
        {"counts": [{"NPU": 3}, {"NPU": 8}]},
    ),
    "Ray that counts too few GPUs": ([h100(), h100()], {"counts": [{"GPU": 8}, {"GPU": 4}]}),
}


def test_what_is_wrong_between_hosts(golden):
    shown({state: cluster(*machines, **of) for state, (machines, of) in HOSTS.items()}, golden, "doctor.hosts.txt")


def test_a_port_of_an_a3_that_is_down_is_a_warning():
    """Its dies meet over the bus of the super node too."""
    (line,) = told(*cluster(a3(said={PORT: "link status: DOWN\n"}), a3(), counts=[{"NPU": 16}] * 2))
    assert line.startswith("warning links: port 3 of 16: link is DOWN")


def test_a_folder_that_hosts_do_not_share():
    for marks, words in ((("7 7", "7 7"), "is shared"), (("7 7", "8 7"), "is not shared: models and data")):
        found = judge(cluster(*(cpu(marks=m) for m in marks), counts=[{"CPU": 8}] * 2))
        assert [words in f.told for f in found if f.check == "folder"] == [True]
