"""Help for names that users know from other systems, such as `max_grad_norm`.

Invariant: each help text is a complete line. The help text for a wrong word depends on the word and on the kind of the
statement. The text is correct in every statement of this kind, wherever the word occurs in the statement.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from ..diagnostics import nearest
from ..ir.signatures import Signature
from ..ir.statements import STATEMENTS

_ZERO = "to shard weights use `zero = 3`"
_SEQUENCE = "to shard sequences use `cp`, with `cp_kind = ulysses` or `ring`"
_ALL = "it is computed from the axes: tp x cp x pp x dp"
_CALLED: dict[str, dict[str, tuple[str, ...]]] = {
    "layout": {
        "tp": ("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
        "pp": ("pipeline", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"),
        "dp": ("data_parallel", "data_parallel_size", "replicas"),
        "cp": ("context_parallel", "context_parallel_size"),
        "ep": ("expert_parallel", "expert_parallel_size", "expert_model_parallel_size"),
        "vpp": ("virtual_pipeline", "virtual_pipeline_model_parallel_size", "interleave"),
    },
    "cluster": {
        "devices_per_node": ("gpus", "num_gpus", "gpus_per_node", "n_gpus_per_node"),
        "memory": ("vram", "hbm"),
    },
    "generate": {
        "samples": ("n", "group", "num_return_sequences", "num_generations"),
        "max_tokens": ("max_new_tokens",),
        "turns": ("max_turns", "num_turns"),
    },
    "update": {"epochs": ("ppo_epochs", "num_epochs"), "clip_grad": ("max_grad_norm", "grad_clip")},
    "run": {
        "iterations": ("steps", "max_steps", "total_steps", "num_steps", "total_training_steps"),
        "save": ("save_freq", "save_steps", "checkpoint_every"),
        "keep": ("save_total_limit", "max_ckpt_to_keep", "max_actor_ckpt_to_keep"),
    },
    "evaluate": {"every": ("test_freq", "eval_steps"), "samples": ("n", "k")},
}
_LENGTH = (
    "the length of a run is `iterations`, and each iteration takes the next prompts of the data; "
    "`epochs` of `update` is how often an update uses its rows"
)
_LOSS = "it is part of the loss: `loss = clip(0.2) + 0.001 * kl(low_var)`"
_OTHER: dict[str, dict[str, str]] = {
    "layout": {
        **dict.fromkeys(("fsdp", "fsdp_size", "sharding", "shard"), _ZERO),
        **dict.fromkeys(("sp", "sequence_parallel", "ulysses", "ulysses_sequence_parallel_size"), _SEQUENCE),
        **dict.fromkeys(("world_size", "devices", "gpus"), _ALL),
    },
    "update": {
        **dict.fromkeys(
            ("lr", "learning_rate", "weight_decay", "warmup"),
            "it belongs to the optimizer: `optimizer = adamw(lr = 1e-6)`",
        ),
        **dict.fromkeys(("kl_coef", "kl_loss_coef", "beta", "clip_ratio", "eps", "clip_range", "entropy_coef"), _LOSS),
    },
}
_OTHER["run"] = dict.fromkeys(("epochs", "total_epochs", "num_epochs", "num_train_epochs"), _LENGTH)
_MEANT = {
    statement: {
        foreign: f"it is called `{name}` here"
        for name, words in _CALLED.get(statement, {}).items()
        for foreign in words
    }
    | _OTHER.get(statement, {})
    for statement in {*_CALLED, *_OTHER}
}
# Names that other systems use for the bounds of a loss term's ratio.
_BOUND = ("eps", "epsilon", "clip_ratio", "clip_range", "eps_clip", "cliprange")
_GROUPS = ("group", "groups", "sample", "samples", "prompts")
_IN_FILE = re.compile(r"([A-Za-z_][\w/]*)(?:\.py)?[.:]([A-Za-z_]\w*)(?:\(\))?")


def attribute(statement: str, key: str, known: Collection[str]) -> str:
    """Return help for an attribute that the statement does not have.

    The help is one of these:

    - this language's name for a word of another system
    - the statement that has the attribute
    - the nearest name in `known`
    """
    meant = _MEANT.get(statement, {}).get(key, "")
    owners = _owners(statement, key)
    if meant or not owners:
        return meant or nearest(key, known) or ("" if known else "it has none")
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    return (
        ("" if known else "it has none; ") + f"{owners} has it" + (f"; or did you mean `{close[0]}`?" if close else "")
    )


def _owners(statement: str, key: str) -> str:
    """Return a text that lists the other kinds of statement with an attribute `key`.

    Returns "" if there is no other kind of statement with this attribute, or if there are more than three.
    """
    owners = [
        f"a {name}" if name.endswith(" edge") else f"`{name}`"
        for name, options in STATEMENTS.items()
        if name != statement.partition(" …")[0] and key in options.kinds()
    ]
    return " or ".join(owners) if len(owners) <= 3 else ""


# Names that other systems use for loss terms and the forms of `kl`.
_TERMS = {
    **dict.fromkeys(("ppo", "ppo_clip", "ppo_loss", "policy_loss", "grpo"), "write `clip(0.2)`"),
    **dict.fromkeys(("dapo", "clip_higher"), "write `clip(0.2, 0.28)`, with a bound for each side"),
    **dict.fromkeys(
        ("reinforce", "policy_gradient", "pg", "pg_loss"),
        "write `clip(0.2)`, which is the plain policy gradient in the first step of a batch",
    ),
    "gspo": "write `clip(3e-4, 4e-4, ratio = sequence)`",
    **dict.fromkeys(("kl_loss", "kl_penalty", "low_var_kl"), "write `kl(low_var)`"),
    **dict.fromkeys(("value", "value_loss", "critic", "vf_loss"), "write `value_clip(0.5)`"),
    **dict.fromkeys(("nll", "cross_entropy", "lm"), "write `sft()`"),
    "entropy_loss": "write `entropy()`, which is added with a minus: `- 0.01 * entropy()`",
}
# Types in which models are published, but not trained.
_PUBLISHED = ("fp8", "f8", "float8", "mxfp4", "fp4", "f16", "fp16", "half", "float16", "int8", "int4")
_WORDS = {
    "float32": "f32",
    "fp32": "f32",
    "bfloat16": "bf16",
    "k3": "low_var",
    "low_var_kl": "low_var",
    "k2": "mse",
    "kl": "k1",
    **dict.fromkeys(("core_attn", "attn", "self_attn", "self_attention"), "attention"),
    **dict.fromkeys(("moe_act", "act", "mlp_act"), "activation"),
    **dict.fromkeys(("layernorm", "layer_norm", "rmsnorm", "norm"), "norms"),
    **dict.fromkeys(("experts", "moe_layer"), "moe"),
    **dict.fromkeys(("all", "whole", "uniform"), "full"),
}


def term(name: str) -> str:
    """Return help for an unknown loss term."""
    return _TERMS.get(name, "")


def word(text: str, words: Collection[str]) -> str:
    """Return help for a wrong word, where one of `words` is expected."""
    if text in _PUBLISHED and "bf16" in words:
        return f"nothing is trained in `{text}`; published weights are converted when they are read: write `bf16`"
    return f"it is called `{_WORDS[text]}` here" if _WORDS.get(text) in words else nearest(text, words)


def option(key: str, known: Collection[str]) -> str:
    """Return help for an argument `key` that is no parameter of the called function.

    `known` are the names of the function's parameters.
    """
    return "did you mean `low`?" if key in _BOUND and "low" in known else ""


def groups(word: str, above: str) -> str:
    """Return help for an attribute `per` whose value means groups: `per = group`.

    `word` is the value of `per`, and `above` is the column that the program should name instead.
    """
    return f"the rows of one `{above}` are `per = {above}`" if above and word in _GROUPS else ""


def called(text: str, functions: Mapping[str, object] | Collection[str]) -> str:
    """Return help for a name where a call or `"file.py:function"` is expected."""
    name = text.removesuffix("()")
    if name in functions:
        return f"write `{name}()`"
    if text.endswith(".py"):
        return f'write `"{text}:NAME"`, with a name that the file defines'
    match = _IN_FILE.fullmatch(text)
    return f'write `"{match[1]}.py:{match[2]}"`' if match else ""


# Names that other systems use for parameters of reward functions, by this language's column. TRL passes lists.
_PARAMETERS = {
    "response": ("solution_str", "completions", "completion", "response_str", "output", "generation"),
    "answer": ("ground_truth", "solution", "target", "label", "gold"),
    "prompt": ("prompts", "question", "query", "prompt_str"),
}
_LISTS = ("completions", "prompts")


def binding(call: str, signature: Signature, free: Collection[str], reads: Collection[str], per: bool) -> str:
    """Return help for a function whose parameters have names of another system.

    The help is a call in which these parameters are bound to columns. Returns "" if no parameter has a name of another
    system.

    - `free`: the parameters that no argument of the call is bound to.
    - `reads`: the columns and states that the node reads.
    - `per`: whether the function gets several rows per call.
    """
    binds: dict[str, str] = {}
    for column, words in _PARAMETERS.items():
        if column in reads and column not in signature.columns:
            binds |= dict.fromkeys(
                [parameter for parameter in free if parameter in words and parameter not in reads][:1], column
            )
    if not binds:
        return ""
    arguments = ", ".join(f"{parameter} = {column}" for parameter, column in binds.items())
    helps = [f"name the columns: `{call}({arguments})`"]
    missing = [
        parameter
        for parameter in free
        if parameter not in signature.optional and parameter not in binds and parameter not in reads
    ]
    helps += [f"let the node read a column `{parameter}` too, or give the parameter a default" for parameter in missing]
    helps += [
        f"let the node not read `{column}`, or add a parameter for it"
        for column in reads
        if column not in binds.values() and column not in signature.columns
    ]
    lists = [parameter for parameter in binds if parameter in _LISTS]
    if lists and not per:
        helps.append("with `per = prompt` it gets lists and returns a list")
    helps += [
        f"`{parameter}: {'list[str]' if parameter in lists or per else 'str'}` gets text, without it token ids"
        for parameter, column in binds.items()
        if column != "answer" and parameter not in signature.text
    ]
    return "\n".join(helps)
