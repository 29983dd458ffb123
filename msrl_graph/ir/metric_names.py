"""Names of the built-in metrics.

Invariant: every run reports these metrics, as keys of a line of metrics.jsonl. So a column that a program reports must
not have the name of a built-in metric.
"""

from __future__ import annotations

METRICS = frozenset(
    {
        *(
            "iteration",
            "seconds",
            "rows",
            "loss",
            "grad_norm",
            "updates",
            "response_length",
            "prompt_tokens",
            "response_tokens",
        ),
        *(
            "tokens_per_second",
            "throughput_eq5",
            "prompts",
            "phases",
            "dock_bytes",
            "dock_messages",
            "imbalance",
            "reshard_bytes",
            "evaluation",
            "after_iterations",
            "changed",
        ),
        *("refills", "prompts_drawn", "prompts_kept", "turns", "policy_tokens", "environment_tokens", "failed"),
        *("left_out_answers", "left_out_tokens", "strayed", "conversations"),
        *(
            "response_length_max",
            "distinct_prompt_tokens",
            "distinct_tokens",
            "distinct_rows",
            "skipped",
            "carried_over",
            "overdue",
            "logp_drift",
            "logp_drift_max",
        ),
        *("lr", "entropy", "response_truncated", "staleness", "staleness_max"),
    }
)
