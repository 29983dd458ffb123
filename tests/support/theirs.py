"""What no annotation says: what some names of theirs are or return where our code uses them, each of the types named.

Invariant: types that are held here are those that a run has; modules and functions have a colon behind them.
"""

MODELS = (
    "vllm.model_executor.models.llama.LlamaForCausalLM",
    "vllm.model_executor.models.qwen2.Qwen2ForCausalLM",
    "vllm.model_executor.models.qwen3.Qwen3ForCausalLM",
    "vllm.model_executor.models.qwen3_moe.Qwen3MoeForCausalLM",
    "vllm.model_executor.models.deepseek_v2.DeepseekV3ForCausalLM",
)
THEIRS = {
    # torch has a module for each kind of device.
    "torch.get_device_module": ("torch.cuda:", "torch.npu:"),
    # vLLM is started with this executor and, by kind of device, with these workers.
    "vllm.v1.engine.core.EngineCore.model_executor": (
        "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher",
    ),
    "vllm.v1.worker.worker_base.WorkerWrapperBase.worker": (
        "vllm.v1.worker.cpu_worker.CPUWorker",
        "vllm.v1.worker.gpu_worker.Worker",
        "vllm_ascend.worker.worker.NPUWorker",
    ),
    "vllm_ascend.worker.worker.NPUWorker.model_runner": ("vllm_ascend.worker.model_runner_v1.NPUModelRunner",),
    "torch_npu.npu.utils.current_stream": ("torch_npu.npu.streams.Stream",),
    # Chosen as it is built, or made by what states no type.
    "vllm.v1.engine.core.EngineCore.step_fn": ("vllm.v1.engine.core.EngineCore.step:",),
    **{
        f"{runner}.{name}": types
        for runner in (
            "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
            "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
            "vllm_ascend.worker.model_runner_v1.NPUModelRunner",
        )
        for name, types in (
            ("model", MODELS),
            ("inputs_embeds", ("vllm.v1.utils.CpuGpuBuffer",)),
            ("model_config", ("vllm.config.model.ModelConfig",)),
        )
    },
}
