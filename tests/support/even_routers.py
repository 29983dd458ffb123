"""Routers that send as many tokens to each half of the experts: plans count even shares."""


def even_out(name, values):
    """Make the two halves of a router's weights equal, in place: a token's two experts are one of each half."""
    if name.endswith(("mlp.gate.weight", "mlp.router.weight", "mlp.router.bias", "e_score_correction_bias")):
        first, second = values.chunk(2)
        second.copy_(first)
    return values
