"""Routes of tokens, between columns of rows and sequences of tokens."""

import numpy as np

from msrl_graph.backends.routes import UNKNOWN
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.runtime.rank.token_routes import TokenRoutes

LENGTHS = ((3, 6, 1, 3, 6, 1, 3, 6, 1), (4, 1, 0, 3, 4, 2, 4, 4, 1))  # of prompts and of responses


def test_columns_of_routes_become_those_of_the_ids_and_back():
    """Shifted by one, for a sequence's first token has no route."""
    prompts, responses = (ragged([np.ones(n, np.int32) for n in numbers], np.int32) for numbers in LENGTHS)
    packed = pack([prompts], [responses], np.arange(9))
    routes = TokenRoutes({"prompt": prompts.lengths}, {"response": responses.lengths})
    of_ids = np.arange(len(packed["ids"]) * 6, dtype=np.int16).reshape(-1, 3, 2)
    columns = routes.unpack([(np.arange(9), of_ids)])
    assert {name: column.lengths.tolist() for name, column in columns.items()} == {
        "prompt": prompts.lengths.tolist(),
        "response": responses.lengths.tolist(),
    }
    assert (columns["prompt"][0][0] == UNKNOWN).all() and (columns["prompt"][0][1:] == of_ids[:2]).all()
    assert (columns["response"][0] == of_ids[2:6]).all()
    known = TokenRoutes(routes.contexts, routes.scored, columns)
    again = known.pack(np.arange(9), len(of_ids)).numpy()
    last = packed["offsets"].numpy()[[3, 9]] - 1  # rows without response: the last token predicts nothing
    assert (again[last[:1]] == UNKNOWN).all()
    computed = (again != UNKNOWN).all((1, 2))
    assert (again[computed] == of_ids[computed]).all() and computed.sum() == len(of_ids) - 1
    order = np.array([4, 2, 7])
    sizes = packed["offsets"].numpy()
    part = np.concatenate([again[sizes[row] : sizes[row + 1]] for row in order])
    assert (known.pack(order, len(part)).numpy() == part).all()
    only = TokenRoutes(routes.contexts, routes.scored, {"response": columns["response"]})
    assert (only.pack(np.arange(9), len(of_ids)).numpy()[2:6] == of_ids[2:6]).all()
    assert (only.pack(np.arange(9), len(of_ids)).numpy()[:2] == UNKNOWN).all()
    assert only.pack(np.zeros(0, int), 1).shape == (1, 3, 2)
