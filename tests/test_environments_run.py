"""A program whose policy plays in a shop, from text to trained weights."""

import json
import shutil

import numpy as np
import pytest
from place import EXAMPLE, ROOT, metrics, rows_of

pytestmark = pytest.mark.slow

PROGRAM = """
import "{agent}"
cluster laptop {{ device = "cpu", nodes = 1, devices_per_node = 2 }}
deploy agent on laptop {{
  set prompts = 4
  set group = 4
  set turns = 3
  set prompt_len = 8
  set response_len = 100
  model policy = "./longer"
  data source = "tasks.jsonl"
  data held = "tasks.jsonl"
  layout actor.update {{ dp = 2 }}
  layout actor.generate {{ {layout} }}
  evaluate held {{ report = reward, samples = 1, temperature = 0 }}
  run {{ iterations = 2, seed = 0 }}
}}
"""


def tokens(rows):
    return [np.array(row) for row in rows.column("response").to_pylist()]


def test_a_policy_in_a_shop(place):
    """On two ranks that share their rows, and on two that share the model: the same episodes, and what was said in them
    is masked."""
    sums = [(a, b) for a in (12, 37, 58) for b in (9, 23)]
    rows = [{"prompt": f"{a}+{b}=", "task": {"thing": str((a + b) % 10)}} for a, b in sums]
    (place.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    longer = shutil.copytree(EXAMPLE / "model", place.folder / "longer")
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    found = []
    for layout in ("tp = 2", "dp = 2"):
        (place.folder / "p.rlg").write_text(
            PROGRAM.format(agent=ROOT / "tests" / "programs" / "agent.rlg", layout=layout)
        )
        code, _, err = place.run("p.rlg", "--out", layout[:2], "--record")
        assert code == 0, err
        place.assert_clean()
        lines = [x for x in metrics(place.folder / layout[:2]) if "iteration" in x]
        found.append(rows_of(place.folder / layout[:2], 0))
        for line in lines:
            assert 1 <= line["turns"] <= 3 and 0 <= line["reward"] <= 1 and line["updates"] == 1
            assert line["policy_tokens"] + line["environment_tokens"] == line["response_tokens"]
            assert line["logp_drift"] < 1e-4 and "environment" in line["phases"]
    one, other = found
    assert [t.tolist() for t in tokens(one)] == [t.tolist() for t in tokens(other)]
    for ids, mask, logp, reward in zip(
        *(one.column(c).to_pylist() for c in ("response", "mask", "response_logp", "reward")), strict=True
    ):
        assert np.isnan(np.array(logp)).tolist() == [not m for m in mask]
        assert set(np.array(ids)[~np.array(mask)]) == {2}  # the words of the shop are unknown to the model
        assert mask[0] is False and mask[-1] is True
        assert reward in (0.0, 1.0)
    assert set(one.column("reward").to_pylist()) == {0.0, 1.0}
