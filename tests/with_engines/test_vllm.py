"""vLLM in the ranks' own processes: it draws what the light engine draws, whatever the layout and the batch, and gives
its memory back."""

import json
from dataclasses import replace
from pathlib import Path

import engines
import numpy as np
import psutil
import published
import pytest
import ranks
import torch
from injected import shared
from mixture import latent, mixture, qwen2
from place import THRICE, TRAINED, assert_alike

from msrl_graph.backends import hf_modules
from msrl_graph.backends.engine_protocols import GenerateRequest, Sampling, collect_responses
from msrl_graph.backends.vllm.spec import count_paged_bytes
from msrl_graph.compiler.pipeline import translate
from msrl_graph.compiler.sources import read_source
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.ir.run_options import RunOptions
from msrl_graph.ir.workload import Workload
from msrl_graph.model import models
from msrl_graph.runtime.driver import supervisor
from msrl_graph.sharding.layout import Layout

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "arithmetic"
PROMPTS = [np.array([6, 10, 13, 7, 11, 15]), np.array([3, 13, 4, 15]), np.array([12, 13, 12, 12, 15])]
WIDTH = 64  # of experts: of fewer than 32 rows a rank, gate and up together 64, vLLM 0.23 on a CPU makes no tiles
PLAIN = Sampling(4, 20, 1.0, 1.0, 0, ends=(1,))


def model(dtype=None):
    return models.load("./model", EXAMPLE, dtype, NOWHERE)


def vllm(layout=engines.ALONE, rank=0, rows=2, samples=4, of=None, **more):
    of = of or model()
    sizes = {"rows": rows, "prompts": rows, "prompt": 26, "response": 20, "samples": samples}
    work = Workload(of, layout, of.dtype, **sizes, on_host=True, **more)
    return engines.built("vllm", of, layout, rank, engines.mesh(layout), work=work)


def filled(engine, of=None):
    hf_modules.fill(of or model(), engine.allocate())
    engine.filled()
    return engine


@pytest.fixture(scope="module")
def both(alone):
    return filled(vllm()), filled(engines.generator(model()))


def compare(one, other, prompts, rows, sampling, begun=0, most=3e-5):
    found, wanted = (
        collect_responses(e.generate(GenerateRequest(prompts, rows, sampling, begun))) for e in (one, other)
    )
    assert [t.tolist() for t in found[0]] == [t.tolist() for t in wanted[0]]
    assert all(t.dtype == np.int32 for t in found[0]) and all(p.dtype == np.float32 for p in found[1])
    assert np.allclose(np.concatenate(found[1]), np.concatenate(wanted[1]), atol=most)
    return found[0]


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        Sampling(1, 20, 0.0, 1.0, 0, (1,)),
        Sampling(4, 7, 0.7, 0.8, 5, (1, 4)),
        Sampling(4, 20, 2.0, 1.0, 0, (1,), min_p=0.1),
        Sampling(4, 1, 2.0, 1.0, 0),
        Sampling(4, 20, 1.0, 1.0, 0, (1,), ("3", "=1")),
        Sampling(4, 5, np.linspace(0, 2, 12, dtype=np.float32), 1.0, 0),
    ],
    ids=["plain", "greedy", "filtered", "min p", "one token", "stop strings", "a temperature each"],
)
def test_it_draws_what_the_light_engine_draws(both, sampling):
    drawn = compare(*both, PROMPTS, np.arange(3 * sampling.samples), sampling)
    assert len({t.tobytes() for t in drawn}) > 2 or sampling.samples == 1


def test_with_min_p_no_token_is_drawn_that_is_less_likely_than_this_share_of_the_likeliest(both):
    first = replace(PLAIN, max_tokens=1, temperature=3.0)
    engine, _ = both

    def draw(rows, **changes):
        said = replace(first, **changes)
        _, logps = collect_responses(
            engine.generate(GenerateRequest([PROMPTS[0]] * (rows // 4), np.arange(rows), said))
        )
        return np.concatenate(logps)

    least = draw(4, top_k=1).max() + np.log(0.3)
    assert draw(200).min() < least - 0.1
    assert draw(200, min_p=0.3).min() >= least - 1e-4


def test_rows_are_drawn_by_their_numbers_wherever_they_are(both):
    """More prompts than run at once, some alike, in another order."""
    prompts = [PROMPTS[i % 3] for i in range(9)]
    draw = np.random.default_rng(0)
    whole = compare(*both, prompts, np.arange(100, 136), PLAIN)
    order = draw.permutation(9)
    rows = (100 + order[:, None] * 4 + np.arange(4)).reshape(-1)
    again, _ = collect_responses(both[0].generate(GenerateRequest([prompts[i] for i in order], rows, PLAIN)))
    assert all(np.array_equal(again[k], whole[row - 100]) for k, row in enumerate(rows))


LONG = replace(PLAIN, max_tokens=100, ends=(), temperature=2.0)


def small_cache(of, sequences, layout=engines.ALONE, rank=0, **more):
    """vLLM for 8 responses of up to 100 tokens, with a cache for so many of them."""
    sizes = {"rows": 2, "prompts": 2, "prompt": 26, "response": 100, "samples": 4, "sequences": 8}
    work = Workload(of, layout, of.dtype, **sizes, on_host=True, **more)
    size = round(count_paged_bytes(work, sequences, 126)) if sequences else 0
    work = replace(work, cache_bytes=size)
    return filled(engines.built("vllm", of, layout, rank, engines.mesh(layout), work=work), of)


def _preempted(rank, _, layout, of, routes):
    """A cache for all, and caches for fewer, down to one, twice each."""
    roomy = small_cache(of, 0, layout, rank, records_routes=routes)
    request = GenerateRequest(PROMPTS[:2], np.arange(8), LONG, routes=routes)
    wanted = sorted(roomy.generate(request), key=lambda response: response.place)
    assert {len(response.tokens) for response in wanted} == {100} and not roomy.preempted
    for sequences in (1, 1.5, 4):
        engine = small_cache(of, sequences, layout, rank, records_routes=routes)
        for _ in range(2):
            before = engine.preempted
            found = sorted(engine.generate(request), key=lambda response: response.place)
            for one, other in zip(found, wanted, strict=True):
                assert one.tokens.tolist() == other.tokens.tolist()
                assert np.allclose(one.logps, other.logps, atol=3e-5)
                assert not routes or (np.sort(one.routes, -1) == np.sort(other.routes, -1)).all()
            assert engine.preempted > before
            engine.release()
            filled(engine, of)
        engine.release()


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_small_cache_preempts_and_draws_the_same(layout, tmp_path):
    of = models.load(qwen2(tmp_path, max_position_embeddings=512), Path("/"), "f32", NOWHERE)
    ranks.run(layout.devices, _preempted, layout, of, False)


def test_so_it_does_with_routes(tmp_path):
    of = models.load(mixture(tmp_path, WIDTH, max_position_embeddings=512), Path("/"), None, NOWHERE)
    ranks.run(1, _preempted, Layout(), of, True)


def test_a_response_goes_on_where_it_was_left(both):
    whole, _ = collect_responses(both[0].generate(GenerateRequest(PROMPTS, np.arange(12), PLAIN)))
    begun = np.array([len(t) // 2 for t in whole])
    after = [np.concatenate([PROMPTS[i // 4], whole[i][: begun[i]]]).astype(np.int32) for i in range(12)]
    rest = compare(*both, after, np.arange(12), PLAIN, begun)
    assert all(np.array_equal(rest[i], whole[i][begun[i] :]) for i in range(12))


def test_a_stop_string_across_a_stretch_or_a_cut_ends_a_response(both):
    """At the token at which it ends where all is drawn at once."""
    strings = tuple(f"{a}{b}" for a in "1357" for b in range(10))
    rows = np.arange(12)
    said = replace(PLAIN, temperature=3.0, stop=strings)
    whole = compare(*both, PROMPTS, rows, said)
    assert len({len(t) for t in whole}) > 2
    parts = [[] for _ in rows]
    for part in both[0].generate(GenerateRequest(PROMPTS, rows, said, stretch=2)):
        parts[part.place] += part.tokens.tolist()
    assert parts == [t.tolist() for t in whole]
    some = [i for i in rows if len(whole[i]) > 1]
    begun = np.array([len(whole[i]) - 1 for i in some])  # before the token that ends it
    after = [np.concatenate([PROMPTS[i // 4], whole[i][:-1]]).astype(np.int32) for i in some]
    rest = compare(*both, after, rows[some], replace(said, joined=begun), begun)
    assert [t.tolist() for t in rest] == [whole[i][-1:].tolist() for i in some]


def test_after_new_weights_nothing_of_the_old_ones_is_left(both):
    """A cache of the prompts would be of the old weights."""
    before = compare(*both, PROMPTS, np.arange(12), PLAIN)
    for engine in both:
        for shard in engine.allocate():
            if "norm" in shard.name:
                shard.tensor.mul_(1.3)
        engine.filled()
    after = compare(*both, PROMPTS, np.arange(12), PLAIN)
    assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    for engine in both:
        engine.release()
        filled(engine)
    again = compare(*both, PROMPTS, np.arange(12), PLAIN)
    assert all(np.array_equal(a, b) for a, b in zip(before, again, strict=True))


def test_an_error_leaves_no_request_behind(both):
    with pytest.raises(
        ValueError, match="a prompt of 200 tokens and 20 more exceed the 46 that the engine was built for"
    ):
        collect_responses(both[0].generate(GenerateRequest([PROMPTS[0], np.zeros(200, np.int32)], np.arange(8), PLAIN)))
    with pytest.raises(IndexError):  # in the middle of a step
        collect_responses(
            both[0].generate(
                GenerateRequest(PROMPTS, np.arange(12), replace(PLAIN, temperature=np.ones(3, np.float32)))
            )
        )
    compare(*both, PROMPTS, np.arange(12), PLAIN)


def test_it_gives_its_memory_back(alone, tmp_path):
    wide = wider(tmp_path)
    engine = vllm(of=wide, rows=64, samples=8)
    held = engines.resident_without_free()
    filled(engine, wide)
    collect_responses(engine.generate(GenerateRequest([PROMPTS[0]] * 2, np.arange(8), PLAIN)))
    most = psutil.Process().memory_info().rss
    engine.release()
    left = psutil.Process().memory_info().rss
    size = wide.parameters * 4
    assert most - held > 0.9 * size
    assert left - held < 0.2 * size


def test_a_weight_that_it_does_not_take_is_named(alone):
    """A bias that the config says nothing of."""
    of = model()
    one = next(t for t in of.weights if t.name.endswith("0.mlp.up_proj.weight"))
    more = replace(one, name=one.name.replace("up_proj", "side_proj"))
    with pytest.raises(ValueError, match=r"does not support the weight model\.layers\.0\.mlp\.side_proj\.weight"):
        vllm(of=replace(of, tensors=(*of.weights, more)))
    with pytest.raises(ValueError, match=r"a weight that the model lacks: model\.norm\.weight"):
        vllm(of=replace(of, tensors=tuple(t for t in of.weights if t.name != "model.norm.weight")))


def wider(folder):
    """The example's model with 60 million parameters, weights at random."""
    from safetensors.torch import save_file

    config = json.loads((EXAMPLE / "model" / "config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 2000}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text((EXAMPLE / "model" / "tokenizer.json").read_text())
    of = models.load(str(folder), Path("/"), "f32", NOWHERE)
    save_file({t.name: torch.randn(t.shape) * 0.02 for t in of.weights}, str(folder / "model.safetensors"))
    return of


def _divided(rank, _, layout, of):
    one = filled(vllm(layout, rank, of=of), of)
    other = filled(engines.generator(of), of)
    prompts = [PROMPTS[i % 3] for i in range(6)]
    compare(one, other, prompts, np.arange(24), PLAIN)
    one.release()
    compare(filled(one, of), other, prompts, np.arange(24), PLAIN)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(tp=2, dp=2), Layout(dp=2)], ids=str)
def test_layouts_draw_alike(layout):
    """Vocabularies of 16 are padded to 64: with tp 2 the second rank has nothing but padding."""
    ranks.run(layout.devices, _divided, layout, model())


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, etp=2), Layout(pp=2)], ids=str)
def test_a_mixture_draws_alike(layout, tmp_path):
    """Each expert divided, and the layers; Qwen3's norms of heads."""
    ranks.run(layout.devices, _divided, layout, models.load(mixture(tmp_path, WIDTH), Path("/"), None, NOWHERE))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, etp=2), Layout(pp=2)], ids=str)
def test_latent_attention_draws_alike(layout, tmp_path):
    """With groups of experts, shared ones, and an epsilon that norms of latents do not have."""
    made = latent(tmp_path, rms_norm_eps=1e-4, moe_intermediate_size=WIDTH)
    ranks.run(layout.devices, _divided, layout, models.load(made, Path("/"), None, NOWHERE))


def _routed_on_rank(rank, _, layout, of):
    """Routes of rows that share requests, blocks of the cache, and prompts that begin alike."""
    one = filled(vllm(layout, rank, of=of, records_routes=True), of)
    other = filled(engines.generator(of), of)
    prompts = [PROMPTS[0], PROMPTS[0][:5], PROMPTS[0], np.concatenate([PROMPTS[0]] * 4), PROMPTS[1]]
    for _ in range(2):
        request = GenerateRequest(prompts, np.arange(20), PLAIN, routes=True)
        found, wanted = (sorted(e.generate(request), key=lambda r: r.place) for e in (one, other))
        for drawn, right in zip(found, wanted, strict=True):
            assert drawn.tokens.tolist() == right.tokens.tolist()
            assert len(drawn.routes) == len(prompts[drawn.place // 4]) + len(drawn.tokens) - 1
            assert (np.sort(drawn.routes, -1) == np.sort(right.routes, -1)).all()
        assert all(response.routes is None for response in one.generate(replace(request, routes=False)))


@pytest.mark.parametrize("made", [mixture, latent])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, etp=2), Layout(pp=2)], ids=str)
def test_it_returns_the_routes_of_the_light_engine(layout, made, tmp_path):
    changes = {"moe_intermediate_size": WIDTH} if made is latent else {"width": WIDTH}
    of = models.load(made(tmp_path, **changes), Path("/"), None, NOWHERE)
    ranks.run(layout.devices, _routed_on_rank, layout, of)


def test_latent_attention_turns_plain_positions_alike(tmp_path):
    """Without YaRN, whose positions another part of vLLM turns."""
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    made = latent(tmp_path, rope_parameters=plain, rms_norm_eps=1e-4, moe_intermediate_size=WIDTH)
    ranks.run(1, _divided, Layout(), models.load(made, Path("/"), None, NOWHERE))


def _beside(rank, _, places):
    """Engines of other models and layouts on the same ranks, in turn."""
    made = [(filled(vllm(layout, rank, of=of), of), filled(engines.generator(of), of)) for layout, of in places]
    for _ in range(2):
        for one, other in made:
            compare(one, other, PROMPTS, np.arange(12), PLAIN)


def test_engines_stand_beside_each_other_in_a_process(tmp_path):
    mixed = models.load(mixture(tmp_path, WIDTH), Path("/"), None, NOWHERE)
    ranks.run(2, _beside, [(Layout(tp=2), model()), (Layout(pp=2), model()), (Layout(tp=2, etp=2), mixed)])


def test_positions_that_it_would_turn_otherwise_are_refused(alone, tmp_path):
    of = models.load(latent(tmp_path, rope_interleave=False), Path("/"), None, NOWHERE)
    with pytest.raises(ValueError, match="latent attention with rotary positions in pairs"):
        vllm(of=of)


@pytest.mark.parametrize("name", ["megatron_vllm", "fsdp_vllm", "two_environments"])
def test_an_example_could_be_run(name, tmp_path):
    result = translate(read_source(str(EXAMPLE / f"{name}.rlg")))
    made = supervisor.prepare(result.plan, RunOptions(tmp_path / "out"))
    assert made.rows and not result.warnings and not made.warnings


@pytest.mark.parametrize("axis", ["tp", "dp", "pp"])
def test_a_program_trains_alike(axis, reference, place):
    layout = f"layout actor.generate {{ {axis} = 2 }}"
    before = shared()
    place.write(("layout actor.generate { tp = 2 }", f"{layout}\n  engine actor.generate = vllm"), *TRAINED)
    code, _, err = place.run("p.rlg", *THRICE, "--out", "out", "--measure-memory")
    assert code == 0, err
    assert_alike(place.folder / "out", reference)
    place.assert_clean()
    assert shared() <= before


def test_a_folder_in_fp8_is_generated_from_in_the_type_of_the_run(tmp_path, alone):
    """Its config.json would have vLLM compute in fp8, which no trained weights are in."""
    mixture(tmp_path, WIDTH)
    published.fp8(tmp_path, (16, 16))
    of = models.load(str(tmp_path), Path(), "f32", NOWHERE)
    compare(filled(vllm(of=of), of), filled(engines.generator(of), of), PROMPTS[:2], np.arange(2), PLAIN)
