"""Memory: what a tracker sees against sums done by hand, and what the planner predicts against what a run holds."""

import gc
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import engines
import held
import numpy as np
import pytest
import ranks
import torch
import walk
import walk_adapters
import walk_families
import walk_frozen
import walk_hybrid
import walk_mamba
import walk_windows
from held import EXPERTS, assert_close, small
from held import peaks as peaks_of
from hypothesis import given as drawn
from hypothesis import strategies as st
from sample import examples
from torch import distributed as dist

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import devices
from msrl_graph.backends.engine_protocols import ForwardRequest, StepRequest
from msrl_graph.backends.memory import trainer
from msrl_graph.ir.workload import Workload
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.process import memory
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.runtime.weights.digest import Digest
from msrl_graph.sharding.layout import Layout, full_box

N = 4 * 300 * 200  # bytes of a tensor below


@pytest.fixture(autouse=True)
def collected():
    """What tests before left in cycles counts at no moment."""
    gc.collect()


@pytest.fixture
def weight():
    return torch.randn(200, 200, requires_grad=True)


def over(peak, before):
    return peak.peak["device"] - before


def test_what_backward_needs_is_held_until_it_is_used(weight):
    x = torch.randn(300, 200)
    before = memory.live_bytes()["device"]
    with memory.Peak() as peak:
        # Two results are kept for backward, the product is not; in backward each adds its gradient before it is let go.
        loss = torch.mm(x, weight).sigmoid().sigmoid().sum()
        loss.backward()
    assert over(peak, before) == pytest.approx(3 * N, abs=100)
    assert memory.live_bytes()["device"] - before == 4 * 200 * 200 + 4  # the gradient, and the loss


@pytest.mark.slow
def test_what_only_a_thread_of_gloos_still_holds_is_not_counted():
    ranks.run(2, _gathered_and_gone)


def _gathered_and_gone(rank, folder):
    part = torch.ones(1000)
    before = memory.live_bytes()["device"]
    held = []

    def gathered():
        whole = torch.empty(2000)
        dist.all_gather_into_tensor(whole, part, async_op=True).wait()
        return whole

    def peaks(gathered):
        found = []
        for _ in range(50):  # gloo's own thread may be late on a busy machine
            with memory.Peak() as peak:
                gathered()
                torch.empty(2500)
            found.append(over(peak, before))
        return found

    found = peaks(gathered)
    assert {*found} <= {4 * 2500, 4 * 4500} and found.count(4 * 2500) > 25
    sleep = memory.time.sleep
    with pytest.MonkeyPatch.context() as patch:
        # The tensor is released during the wait, as by a late thread of gloo.
        patch.setattr(memory.time, "sleep", lambda seconds: (held.clear(), sleep(seconds)))
        assert peaks(lambda: held.append(gathered())).count(4 * 2500) > 25


def test_storages_count_once_and_by_their_present_size():
    x = torch.zeros(300, 200)
    before = memory.live_bytes()["device"]
    with memory.Peak() as peak:
        views = [x[i:] for i in range(5)]
        y = torch.zeros(300, 200)
        y.untyped_storage().resize_(0)
        z = torch.zeros(300, 200)
        y.untyped_storage().resize_(N)
        y.zero_()
        del z
        other = torch.zeros(300, 200)
    assert over(peak, before) == 2 * N
    assert memory.live_bytes()["device"] - before == 2 * N
    del views, other


def test_host_buffers_count_apart():
    x = torch.zeros(300, 200)
    before = memory.live_bytes()
    with memory.Peak() as peak:
        buffer = devices.device_of(x).host_buffer(x).copy_(x)
    assert over(peak, before["device"]) == 0
    assert peak.peak["host"] - before["host"] == N
    assert memory.live_bytes()["host"] - before["host"] == N
    del buffer
    assert memory.live_bytes() == before


def test_operations_made_of_others_are_looked_into():
    """In inference mode they reach the tracker whole; without a mask to add nothing but the result would be left of
    this one."""
    q = torch.randn(1, 1, 300, 200)
    mask = torch.ones(300, 300, dtype=torch.bool)
    with torch.inference_mode():
        before = memory.live_bytes()["device"]
        with memory.Peak() as peak:
            torch.nn.functional.linear(
                torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask), q[0, 0]
            ).sum()
        assert over(peak, before) >= N + 4 * 300 * 300
    assert {"device", "host"} == set(peak.peak)


def test_what_entropies_and_given_ids_take(tmp_path):
    """Logits are nearly all that this model holds."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=4000, **sizes)).save_pretrained(tmp_path / "model")
    model = models.load("./model", tmp_path, "f32")
    engine = engines.trainer(model, optimizer=adamw(lr=0.0))
    draw = np.random.default_rng(0)
    prompt, response = (ragged(list(draw.integers(0, 4000, (40, n))), np.int32) for n in (4, 10))
    ids = torch.from_numpy(draw.integers(0, 4000, (400, 3)))
    work = Workload(model, Layout(), "f32", 40, 40, 4, 10, trained=True)
    for entropy, given in ((False, False), (True, False), (False, True), (True, True)):
        gc.collect()  # other tests' engines are cycles
        with memory.Peak() as peak:
            before = memory.live_bytes()["device"]
            micro = pack([prompt], [response], np.arange(40))
            if given:
                micro["given"] = ids
            asked = ForwardRequest(entropy=entropy)
            engines.train(engine, micro, lambda made: sum(x.sum() for x in made if x is not None), asked)
        moments = trainer.peaks("update", replace(work, entropy=entropy))
        # The entropy of an update needs two temporary tensors in any case.
        wanted = max(moments[moment]["logits"] for moment in ("the end of forward", "backward in the head"))
        assert over(peak, before) == pytest.approx(wanted, rel=0.1), (entropy, given)
        engine.step(StepRequest(0.0, 1.0))


class Checked(memory.Peak):
    """Holds the account to the sum over all storages that it knows, at each operation."""

    def __init__(self):
        super().__init__()
        self.looks = 0

    def _look(self, moment):
        super()._look(moment)
        self._account.settle()
        assert self._account.now() == memory._sum(self._account.storages()), moment
        self.looks += 1


@contextmanager
def no_collection():
    """Keep the garbage collector from releasing tensors of earlier tests between two measurements."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


NUMBERS = np.zeros(4096, np.float32)  # one memory, which several storages have parts of
STEPS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 7), st.integers(0, 5)), max_size=40)


@examples(60)
@drawn(STEPS)
def test_the_account_is_the_sum_over_all_storages_at_each_operation(steps):
    kept = [torch.zeros(10 * i + 1) for i in range(4)]
    with no_collection(), Checked() as peak:
        for act, which, size in steps:
            tensor = kept[which % len(kept)]
            storage = tensor.untyped_storage()
            match act:
                case 0:
                    kept.append(torch.ones(100 * size))
                case 1 if storage.nbytes() >= tensor.nbytes:
                    kept.append(tensor[:size])
                case 2:
                    del kept[which % len(kept)]
                    kept = kept or [torch.zeros(3)]
                case 3 if storage.resizable():
                    storage.resize_(400 * size)  # from Python, which is no operation
                case 4 if storage.nbytes() and storage.resizable():
                    devices.release(tensor)
                case 5 if storage.resizable():
                    devices.allocate(tensor)
                case 6:
                    kept.append(torch.from_numpy(NUMBERS[: 100 * size + 1]))
                case 7:
                    kept.append(devices.device_of(tensor).host_buffer(torch.zeros(50 * size + 1)))
                case 8 if storage.nbytes():
                    devices.sleep([tensor])
                case 9:
                    devices.wake([tensor])
                case 10:
                    torch.add(torch.ones(10 * size), 1.0, out=torch.empty(0))
                case 11:
                    torch._foreach_add_([torch.ones(size), torch.ones(3)], 1.0)
                case 12:
                    kept.append(torch.empty(0).set_(torch.ones(7 * size + 1).untyped_storage()))
            torch.empty(size)
        del kept
        torch.empty(1)
    assert peak.looks > len(steps)
    assert sum(bytes for bytes, _, _ in peak.largest) >= peak.peak["device"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_of_which_a_part_is_measured_takes_what_all_of_it_takes(dtype, monkeypatch):
    shapes = [(37, 50), (3, 8, 90), (700,), (4,)]
    tensors = [torch.randn(shape) for shape in shapes]

    def looked():
        with Checked() as peak:
            digest = Digest(shapes, dtype, "cpu", 100)
            found = [
                digest.digests([tensor], digest.position_weights(full_box(tensor.shape))).item() for tensor in tensors
            ]
        return peak.peak["device"] - peak.before["device"], found, peak.looks

    looked()
    part = looked()
    monkeypatch.setattr("msrl_graph.runtime.weights.digest.unmeasured", nullcontext)
    all_of_it = looked()
    assert part[:2] == all_of_it[:2]
    assert part[2] < all_of_it[2] / 2


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, zero=3)], ids=str)
def test_so_it_is_where_an_engine_trains(layout, tmp_path, monkeypatch):
    """FSDP resizes storages, and gradients are freed in the backward pass."""
    ranks.run(layout.devices, _trained_and_checked, small(tmp_path), layout)


def _trained_and_checked(rank, folder, model, layout):
    mesh = engines.mesh(layout) if layout.devices > 1 else None
    engine = engines.built("fsdp", model, layout, rank, mesh, adamw(lr=1e-3))
    draw = np.random.default_rng(0)
    prompt, response = (ragged([*draw.integers(0, 512, (4, n))], np.int32) for n in (4, 6))
    micro = pack([prompt], [response], np.arange(4))
    for _ in range(2):
        with Checked() as peak:
            engine.train([micro], lambda made, _: made.logp.sum(), ForwardRequest())
            engine.step(StepRequest(1e-3, 1.0))
        assert peak.looks > 500


def test_an_operation_looks_at_its_own_storages_and_at_no_others():
    """With ten thousand tensors alive it takes what it takes with few: each was looked at, once for each operation."""

    def seconds():
        x = torch.ones(4)
        with memory.Peak():
            began = time.perf_counter()
            for _ in range(300):
                x = x + 1
            return time.perf_counter() - began

    few = min(seconds() for _ in range(3))
    others = [torch.ones(1) for _ in range(10_000)]
    many = min(seconds() for _ in range(3))
    assert many < 5 * few, (few, many)
    del others


TINY = (64, 3, 4, 2, 192, 512)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        walk.case(
            "tied",
            "qwen2",
            TINY,
            "dp = 1",
            engine=", recompute = full",
            tied=True,
            dtype="bf16",
            tokens=(12, 10),
            changes=walk.by("muon(lr = 1e-4)"),
        ),
        walk.case(
            "divided, away",
            "llama",
            TINY,
            "dp = 2, zero = 3",
            "tp = 2",
            4,
            engine=", offload = all",
            reference="offload = all",
            ranks=2,
            tokens=(12, 10),
        ),
        # Rows with short prompts are nearly all scored, and share little: they fill micro-batches of 256 tokens.
        walk.case(
            "by tokens",
            "llama",
            TINY,
            "dp = 1",
            micro=256,
            limit="micro_batch_tokens",
            rows=(4, 2, 8),
            tokens=(2, 62),
        ),
        pytest.param(
            walk.case(
                "matrices that ranks share",
                "llama",
                walk.FLAT,
                "dp = 2, zero = 1",
                "dp = 2",
                2,
                1,
                ranks=2,
                changes=walk.by("muon(lr = 2e-4)"),
                **walk.SHORT,
            ),
            marks=pytest.mark.long,
            id="matrices that ranks share",
        ),
    ],
    ids=lambda case: case.name,
)
def test_the_plan_says_what_a_run_holds(case, tmp_path):
    plan = case.write(tmp_path)
    found = walk.measured(plan)
    for key, (wanted, items) in walk.predicted(plan).items():
        assert wanted == pytest.approx(found[key][0], rel=0.05), (key, items)


@pytest.mark.slow
@pytest.mark.parametrize("case", walk_frozen.LIGHT, ids=lambda case: case.name)
def test_so_it_does_if_some_weights_are_frozen(case, tmp_path):
    test_the_plan_says_what_a_run_holds(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", walk_adapters.LIGHT, ids=lambda case: case.name)
def test_so_it_does_if_an_adapter_is_trained(case, tmp_path):
    test_the_plan_says_what_a_run_holds(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", walk_adapters.SHARED, ids=lambda case: case.name)
def test_ranks_of_a_host_have_one_copy_of_equal_frozen_weights(case, tmp_path):
    """As in the plan, which counts the weights once for each half."""
    plan = case.write(tmp_path)
    found = [report.get("host generate", (0,))[0] for report in walk.measure_ranks(plan)]
    (items,) = (entry.items for entry in plan.memory if (entry.place, entry.phase) == ("host", "generate"))
    wanted = sum(size for item, size in items.items() if item not in ("rows", "ranks"))
    assert sum(found) == pytest.approx(wanted, rel=0.05)
    weights = sum(tensor.elements for tensor in plan.model("actor.generate").weights if tensor.frozen)
    assert items["frozen actor.generate weights"] == 4 * weights


@pytest.mark.slow
@pytest.mark.parametrize("case", walk_windows.CASES, ids=lambda case: case.name)
def test_so_it_does_of_layers_of_several_kinds(case, tmp_path):
    test_the_plan_says_what_a_run_holds(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", walk_families.CASES, ids=lambda case: case.name)
def test_so_it_does_of_families_that_store_more(case, tmp_path):
    test_the_plan_says_what_a_run_holds(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", walk_hybrid.CASES + walk_mamba.CASES, ids=lambda case: case.name)
def test_so_it_does_of_recurrent_layers(case, tmp_path):
    test_the_plan_says_what_a_run_holds(case, tmp_path)


@pytest.mark.slow
def test_so_it_does_of_long_rows_that_go_round_a_ring(tmp_path):
    plan = walk.case("ring", "llama", (64, 2, 4, 2, 64, 32), "cp = 2", "tp = 2", ranks=2, tokens=(60, 40)).write(
        tmp_path
    )
    found = walk.measured(plan)
    for key, (wanted, items) in walk.predicted(plan).items():
        if key[1] in ("infer", "update"):
            assert wanted == pytest.approx(found[key][0], rel=0.05), (key, items)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, ep=2)], ids=str)
def test_what_experts_take(layout, tmp_path):
    assert_close(peaks_of("fsdp", small(tmp_path, **EXPERTS), layout))


PARTS = [2, ("activation", "norms"), ("attention", "mlp", "moe")]


@pytest.mark.slow
@pytest.mark.parametrize("choice", PARTS, ids=str)
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [(Layout(), {}), (Layout(tp=2, ep=2), EXPERTS), (Layout(dp=2, zero=3, ep=2), EXPERTS | {"dtype": "bfloat16"})],
    ids=str,
)
def test_so_it_is_where_parts_are_recomputed(layout, sizes, choice, tmp_path):
    """In a model of few layers, what a part recomputes counts, too."""
    model = small(tmp_path, num_hidden_layers=3, vocab_size=64, **sizes)
    assert_close({"update": peaks_of("fsdp", model, layout, recompute=choice)["update"]})


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "sizes",
    [{"hidden_size": 256}, {"hidden_size": 128, "num_attention_heads": 16, "intermediate_size": 64}, EXPERTS],
    ids=["hidden states", "attention", "experts"],
)
def test_what_gathered_tokens_take(sizes, recompute, tmp_path):
    """With tp 4, the hidden states of all tokens are the largest tensors of a layer."""
    model = small(tmp_path, **{"vocab_size": 32, "num_key_value_heads": 4, **sizes})
    assert_close(peaks_of("fsdp", model, Layout(tp=4), recompute=recompute))


WIDE = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 256}
TALL = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 8192}


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (Layout(tp=2), TALL),
        (Layout(dp=2, zero=2), WIDE),
        (Layout(dp=2, zero=3), WIDE | {"dtype": "bfloat16"}),
        (Layout(dp=2, zero=3), TALL | {"dtype": "bfloat16"}),
        (Layout(dp=2, zero=3), TALL | {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_so_it_is_where_weights_outweigh_what_is_computed_with_them(layout, sizes, tmp_path, monkeypatch):
    """Gradients in bf16 are summed in float32, those of divided weights scattered out of a flat buffer."""
    for name, value in {"ROWS": 4, "EACH": 2, "PROMPT": 4, "RESPONSE": 4}.items():
        monkeypatch.setattr(held, name, value)
    assert_close(peaks_of("fsdp", small(tmp_path, **sizes), layout))
