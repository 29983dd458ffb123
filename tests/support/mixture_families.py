"""Small models of families with experts, with random weights, as transformers writes them."""

from functools import partial

from mixture import WINDOW, saved

# vLLM supports no narrower experts on a CPU.
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}


def mixtral(folder, **changes):
    """A Mixtral of two layers with four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return saved(folder, MixtralConfig, MixtralForCausalLM, **({"num_hidden_layers": 2} | ROUTED | changes))


WRITTEN = {
    "mixtral": mixtral,
    "mixtral with windows": partial(mixtral, sliding_window=WINDOW),
}
