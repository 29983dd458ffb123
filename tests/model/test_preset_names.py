"""Models as people write them: each name is a preset with the published figures, or a message that helps.

The figures are those of published_counts.py, which the package does not compute.
"""

from __future__ import annotations

from pathlib import Path

import published_counts
import pytest

from msrl_graph.diagnostics import Fault
from msrl_graph.model.models import load
from msrl_graph.model.preset_names import ALIASES, find_preset, find_tokenizer_name
from msrl_graph.model.presets import PRESETS

NAMES = {
    "qwen2-7b": ("Qwen/Qwen2-7B-Instruct", "qwen2:7b"),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B-Instruct",),
    "qwen2.5-1.5b": ("Qwen2.5-Math-1.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B"),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", "QWEN2.5-7B", "qwen2.5_7b_instruct", "unsloth/Qwen2.5-7B-Instruct"),
    "qwen2.5-32b": ("Qwen/Qwen2.5-Coder-32B-Instruct", "Qwen/QwQ-32B"),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B-Instruct",),
    "qwen3-4b": ("Qwen/Qwen3-4B-Thinking-2507", "qwen3 4b"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "https://huggingface.co/Qwen/Qwen3-8B-Base", "qwen3:8b", "Qwen3_8B"),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
    "qwen3-235b-a22b": ("Qwen3-235B-A22B",),
    "qwen3-coder-480b-a35b": ("Qwen/Qwen3-Coder-480B-A35B-Instruct",),
    "deepseek-v3-671b": ("DeepSeek-V3", "deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3.1-Terminus"),
    "deepseek-r1-671b": (
        "deepseek-r1",
        "DeepSeek-R1-671B",
        "deepseek-ai/DeepSeek-R1-0528",
        "deepseek-ai/DeepSeek-R1-Zero",
    ),
    "moonlight-16b-a3b": ("moonlight-16b-a3b", "moonshotai/Moonlight-16B-A3B-Instruct"),
    "kimi-k2-1t": ("kimi-k2", "moonshotai/Kimi-K2-Instruct", "Kimi-K2-Base", "moonshotai/Kimi-K2-Instruct-0905"),
    "deepseek-r1-distill-qwen-1.5b": ("agentica-org/DeepScaleR-1.5B-Preview",),
    "deepseek-r1-distill-qwen-7b": ("DeepSeek-R1-Distill-Qwen-7B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    "deepseek-r1-distill-llama-8b": ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B",),
    "deepseek-r1-0528-qwen3-8b": ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",),
    "deepseek-llm-7b": ("deepseek-ai/deepseek-llm-7b-chat", "deepseek-ai/deepseek-math-7b-instruct"),
    "deepseek-coder-6.7b": ("deepseek-ai/deepseek-coder-6.7b-instruct",),
    "llama2-7b": ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
    "llama2-70b": ("meta-llama/Llama-2-70b-hf",),
    "llama3-8b": ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
    "llama3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B", "llama 3.1 8b"),
    "llama3.1-70b": ("nvidia/Llama-3.1-Nemotron-70B-Instruct-HF", "llama3.1:70b"),
    "llama3.1-405b": ("LLAMA-3.1-405B",),
    "llama3.2-1b": ("meta-llama/Llama-3.2-1B-Instruct",),
    "llama3.3-70b": ("Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct"),
    "tinyllama-1.1b": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama"),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct",),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B",),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B-Instruct-v0.3",),
    "ministral-8b": ("mistralai/Ministral-8B-Instruct-2410",),
    "mistral-nemo-12b": ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"),
    "mistral-small-22b": ("mistralai/Mistral-Small-Instruct-2409", "mistralai/Codestral-22B-v0.1"),
    "mistral-small-24b": (
        *("mistralai/Mistral-Small-24B-Instruct-2501", "mistralai/Mistral-Small-3.2-24B-Instruct-2506"),
        *("mistralai/Magistral-Small-2506", "mistralai/Devstral-Small-2507"),
    ),
    "mistral-large-123b": ("mistralai/Mistral-Large-Instruct-2411",),
    "mixtral-8x7b-v0.1": ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
    "mixtral-8x22b-v0.1": ("Mixtral-8x22B",),
    "mixtral-8x22b-v0.3": ("mistralai/Mixtral-8x22B-Instruct-v0.1",),
    "gpt-oss-20b": ("openai/gpt-oss-20b", "gpt-oss:20b", "unsloth/gpt-oss-20b-BF16"),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "minimax-m2-230b-a10b": ("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.5"),
    "glm4.5-355b-a32b": ("zai-org/GLM-4.5", "zai-org/GLM-4.5-Base", "zai-org/GLM-4.6", "zai-org/GLM-4.7"),
    "glm4.5-air-106b-a12b": ("GLM-4.5-Air", "zai-org/GLM-4.5-Air"),
    "glm4-9b-0414": ("zai-org/GLM-4-9B-0414",),
    "glm4-32b-0414": ("THUDM/GLM-Z1-32B-0414",),
    "glm4-9b-hf": ("THUDM/glm-4-9b-chat-hf",),
    "olmo2-7b": ("allenai/OLMo-2-1124-7B-Instruct",),
    "olmo2-32b": ("allenai/OLMo-2-0325-32B-DPO",),
    "olmo3-7b": ("allenai/Olmo-3-1025-7B", "allenai/Olmo-3-7B-Think-SFT"),
    "olmo3-32b": ("allenai/Olmo-3.1-32B-Instruct",),
    "smollm3-3b": ("HuggingFaceTB/SmolLM3-3B-Base",),
    "granite3.3-8b": ("ibm-granite/granite-3.3-8b-instruct",),
    "granite3.0-2b": ("ibm-granite/granite-3.1-2b-base",),
    "seed-oss-36b": ("ByteDance-Seed/Seed-OSS-36B-Instruct",),
    "gemma-2b": ("google/gemma-2b-it",),
    "gemma2-2b": ("google/gemma-2-2b-it",),
    "gemma2-27b": ("google/gemma-2-27b",),
    "gemma3-270m": ("google/gemma-3-270m",),
    "gemma3-27b": ("google/gemma-3-27b-it", "gemma-3-27b-it"),
    "phi4-14b": ("microsoft/phi-4", "phi-4", "phi4", "microsoft/Phi-4-reasoning"),
    "phi4-mini": ("microsoft/Phi-4-mini-instruct",),
    "phi3-mini-4k": ("microsoft/Phi-3-mini-4k-instruct",),
    "phi3.5-mini": ("microsoft/Phi-3.5-mini-instruct",),
}
CASES = [(name, preset) for preset, names in NAMES.items() for name in names]
FOLDER = "a plan needs only the model's `config.json`, in a folder"
# Names without a preset, and a part of the help.
OTHERS = {
    "zai-org/GLM-4.5V": "hf download zai-org/GLM-4.5V",  # it reads images
    "Qwen/Qwen3-VL-8B-Instruct": "hf download Qwen/Qwen3-VL-8B-Instruct",
    "meta-llama/Llama-4-Scout-17B-16E": FOLDER,
    "deepseek-ai/DeepSeek-V3.2-Exp": FOLDER,
    "THUDM/glm-4-9b-chat": FOLDER,  # of an architecture that is not in transformers
    "microsoft/phi-2": FOLDER,
    "my-org/my-model": "hf download my-org/my-model",
    "Qwen/Qwen2.5-7B-Instruct-AWQ": "to plan with its shape, write the preset `qwen2.5-7b`",  # its weights are others
    "Qwen/Qwen3-8B-FP8": "to plan with its shape, write the preset `qwen3-8b`",
    "allenai/Olmo-3-7B-RL-Zero-Math": "to plan with its shape, write the preset `olmo3-7b`",
    "Qwen/Qwen2.5-8B": FOLDER,
    "qwen3-30b": "did you mean `qwen3-30b-a3b`?",
    "mistral-7b": "did you mean `mistral-7b-v0.3`?",
    "gpt-oss": "did you mean `gpt-oss-20b`?",
    "qwen2.5-8b": "the presets, for plans, are `qwen2-` 0.5b 1.5b 7b 72b, `qwen2.5-` 0.5b",
    "mixtral": "`mixtral-8x7b-v0.1`",
    "gpt2": FOLDER,
    "./qwen3-8b": "a Hugging Face model folder holds a config.json",
}


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_a_name_is_a_preset_with_the_published_parameters(name: str, preset: str, tmp_path: Path) -> None:
    found = load(name, tmp_path)
    assert (found.name, found.path) == (name, "")
    assert (find_preset(name), found.parameters) == (preset, published_counts.PARAMETERS[preset][0])
    assert found.tensors == load(preset, tmp_path).tensors
    assert find_tokenizer_name(name) == find_tokenizer_name(preset) is not None


@pytest.mark.parametrize("name", OTHERS)
def test_another_name_has_a_message_that_says_how_to_state_the_model(name: str, tmp_path: Path) -> None:
    with pytest.raises(Fault) as caught:
        load(name, tmp_path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "unknown-model" and OTHERS[name] in diagnostic.help


def test_the_names_are_many_and_mean_presets() -> None:
    assert len(CASES) + len(OTHERS) >= 120 and {*ALIASES.values()} <= {*PRESETS}
    assert all(find_preset(name) == name for name in PRESETS) and not {*ALIASES} & {*PRESETS}
