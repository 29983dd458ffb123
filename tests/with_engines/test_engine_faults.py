"""Engines that raise, hang, die, find no memory or do not take a model: the run says which node, rank and rows, or goes
on as if nothing had happened; nothing is left, and the next one starts."""

import json
import re
import shutil

import pytest
from injected import BROKEN, KILLED, STOPPED, faults, kill_as_they_share, left, limited
from mixture import dense
from place import EXAMPLE, ONE_RANK, SMALL, metrics, weights

from msrl_graph.runtime.metrics.recorder import TIMES

ENGINE = ("layout actor.generate { tp = 2 }", "layout actor.generate { tp = 2 }\n  engine actor.generate = vllm")
RUN = ("iterations = 320, seed = 0", "iterations = 4, seed = 0, save = 2")


def computed(folder):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics(folder)], weights(folder)


def shares_memory():
    """Whether vLLM's build for this CPU has its ranks share memory."""
    import torch
    import vllm._custom_ops  # noqa: F401

    return hasattr(torch.ops._C, "init_shm_manager")


@pytest.mark.timeout(900)
def test_whatever_happens_to_it_is_told_and_the_run_goes_on_as_it_would_have(place):
    place.write(ENGINE, RUN, ("run {", "dock { deadline = 15 s }\n  run {"), evaluated=False)
    place.patience = 400.0  # of three attempts
    code, out, err = place.run("p.rlg", *SMALL, "--out", "whole")
    assert code == 0 and not re.search("vllm|warning|INFO|Gloo", out + err, re.IGNORECASE), err
    # The ranks die as they make what they share, if they do, then one in a step, then it stands still, then an operator
    # fails. Some steps are probes' of what was delivered: one at each of the first two deliveries after a start.
    made = kill_as_they_share(place) if (shares := shares_memory()) else []
    wanted = faults(place, (1, 12, KILLED), (1, 9, STOPPED), (1, 9, BROKEN))
    code, _, err = place.run("p.rlg", *SMALL, "--out", "again", **wanted)
    assert code == 3 and bool(made) == shares and not left(place), err
    assert ("died, after the start; restarting from the beginning" in err) == shares
    anew = "restarting from the checkpoint after 2 iterations"
    assert f"rank 1 died in RUN actor.generate in train/2; {anew}" in err
    assert re.search(rf"^rank 1 has not moved for \d+ s \(stopped\); killed; {anew}", err, re.MULTILINE), err
    assert re.search(r"has waited \d+ s in train/3 for `response` from `actor.generate` \(32 of 32 rows missing", err)
    assert re.search(r"\n  rank 1 has been in RUN actor.generate in train/3 for \d+ s", err)
    told = (
        "`actor.generate` (line 23 of p.rlg), engine vllm, failed on rank 1 in train/3 on 8 rows (0, 1, 2, 3, 4, ...): "
    )
    failed = err[err.index("error[run-failed]: ") :]
    assert failed.startswith(f"error[run-failed]: {told}RuntimeError: mat1 and mat2 shapes cannot be multiplied"), err
    assert "Traceback" not in err and "Dumping" not in err and len(failed.splitlines()) < 6, err
    log = (place.folder / "again" / "logs" / "rank-1.log").read_text()
    assert "all of it is in logs/rank-1.log" in err and "Traceback" in log
    place.assert_clean()
    code, _, err = place.run("p.rlg", *SMALL, "--resume", "again")
    assert code == 0, err
    whole, first = computed(place.folder / "whole")
    again, second = computed(place.folder / "again")
    assert again == whole and all((first[t] == second[t]).all() for t in first)  # bit for bit
    place.assert_clean()
    assert not any(file.exists() for file in made)


def test_memory_that_is_not_there_is_told_with_what_needs_less(place):
    """Keys and values of 8 prompts at their bound take 656 MB, those of one 82 MB."""
    (place.folder / "model").unlink()
    shutil.copytree(EXAMPLE / "model", place.folder / "model")
    stated = json.loads((config := place.folder / "model" / "config.json").read_text())
    config.write_text(json.dumps(stated | {"max_position_embeddings": 20000}))
    engine = f"{ENGINE[1]} {{ micro_batch = 8 }}".replace("tp = 2", "dp = 1")
    text = place.write(*ONE_RANK[:2], (ENGINE[0], engine), RUN, ("i32[<= 5]", "i32[<= 10000]"), evaluated=False)
    less = faults(place, (0, 2, limited(400 << 20)))  # the first is a probe's, and the cache is there until a release
    code, _, err = place.run("p.rlg", *SMALL, "--out", "out", **less)
    assert code == 3 and not left(place), err
    # The cache is taken by the probe of what was delivered.
    assert "(line 23 of p.rlg), engine vllm, failed on rank 0 in train/1: no memory for 656 MB more" in err, err
    assert "KV cache 656 MB" in err and "use a smaller `memory` (now 0.9) or `micro_batch` (now 8)" in err
    place.assert_clean()
    (place.folder / "p.rlg").write_text(text.replace("micro_batch = 8", "micro_batch = 1"))
    code, _, err = place.run(
        "p.rlg", *SMALL, "--out", "out", "--overwrite", **faults(place, (0, 6, limited(400 << 20)))
    )
    assert code == 0 and not left(place) and len(metrics(place.folder / "out")) == 4, err
    place.assert_clean()


def biased(place, node, engine):
    """The example with a Qwen3 that has the bias of a sum over heads, as by transformers where its attention has
    biases, and with this engine of a node."""
    (place.folder / "model").unlink()
    dense(place.folder / "model", attention_bias=True)
    return place.write(
        ("{ dp = 2, zero = 3 }", "{ tp = 2 }"),
        ("layout actor.generate { tp = 2 }", f"layout actor.generate {{ tp = 2 }}\n  engine {node} = {engine}"),
        evaluated=False,
    )


def test_a_weight_that_an_engine_does_not_take_ends_the_run_before_its_first_step(place):
    """vLLM has this bias for other families."""
    node = "actor.generate"
    text = biased(place, node, "vllm")
    line = 1 + next(i for i, words in enumerate(text.split("\n")) if f"node {node}(" in words)
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "1", "--out", "out")
    told = re.search(r"error\[run-failed\]: .*", err, re.DOTALL)
    head = f"`{node}` (line {line} of p.rlg), engine vllm, failed on rank [01] while it was built: ValueError: vLLM"
    weight = " does not support the weight model.layers.0.self_attn.o_proj.bias: it has no "
    weight += "model.layers.0.self_attn.o_proj.bias; the files of the run so far are in out"
    fix = f"  if vllm does not support the model of actor, choose another engine: `engine {node} = hf`"
    wanted = re.escape(f"error[run-failed]: {head}{weight}\n{fix}\n").replace(re.escape("[01]"), "[01]")
    assert code == 3 and told and re.match(wanted, told[0]), err
    assert "Traceback" not in err and not (place.folder / "out" / "metrics.jsonl").exists()
    place.assert_clean()


def test_a_feature_that_an_engine_lacks_is_told_before_anything_starts(place):
    text = biased(place, "actor.update", "megatron")
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "1", "--out", "out")
    assert code == 1 and not (place.folder / "out").exists()
    assert "a bias of the attention's output with the engine `megatron` can be planned, but not run" in err
    assert "help: these can: `fsdp`" in err
    (place.folder / "p.rlg").write_text(text.replace("= megatron", "= fsdp"))
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "1", "--out", "out")
    assert code == 0, err
