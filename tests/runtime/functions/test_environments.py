"""Environments: episodes of several turns against a loop of single rows, what the trainer makes of them, and what goes
wrong."""

import time
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from environment_stages import ANSWERS, BOUND, GROUP, TURNS, drawn, lists, program, tool
from stage import PROMPTS, Stage, one_rank, same

from msrl_graph.backends.engine_protocols import GenerateRequest, Sampling, collect_responses
from msrl_graph.diagnostics import Fault
from msrl_graph.runtime.data.columns import ColumnData, ragged
from msrl_graph.runtime.data.row_files import check
from msrl_graph.runtime.data.tokens import Tokens
from msrl_graph.runtime.process.task_report import RunError


def naive(stage, path, bound=BOUND):
    """Row by row: tokens, mask and log-probabilities, by another loop than the runtime's."""
    space = {}
    exec(path.read_text(), space)
    tokens = Tokens(stage.plan.model("actor.generate").path)
    found = []
    from msrl_graph.noise import RandomStream

    keys = RandomStream(0, "token", "actor.generate", "train").keys(3, np.arange(8))
    rngs = RandomStream(0, "function", "actor.generate", "train")
    for row in range(len(PROMPTS) * GROUP):
        instance = space["Tool"]()
        prompt = PROMPTS[row // GROUP]
        rng = rngs.generator(3, row)
        said = instance.reset(answer=ANSWERS[row // GROUP], rng=rng)
        ids = tokens.encode([said or ""])[0].tolist()
        mask = [False] * len(ids)
        logps = [None] * len(ids)
        for turn in range(TURNS):
            sampling = Sampling(1, bound, 1.0, 1.0, 0, tokens.ends)
            begun = np.array([len(ids)])
            (new,), (logp,) = collect_responses(
                stage.generator.generate(
                    GenerateRequest([np.array([*prompt, *ids])], keys[row : row + 1], sampling, begun)
                )
            )
            ids, mask, logps = [*ids, *new.tolist()], mask + [True] * len(new), [*logps, *logp.tolist()]
            said, *values, over = instance.step(tokens.decode([new])[0])
            answer = tokens.encode([said])[0].tolist()
            if over or turn + 1 == TURNS or len(ids) + len(answer) >= bound:
                break
            ids = ids + answer
            mask = mask + [False] * len(answer)
            logps = logps + [None] * len(answer)
        found.append((ids, mask, logps, *values))
    return found


def test_a_response_is_truncated_where_its_own_last_text_was_cut(alone, tmp_path):
    """What the environment says has the stop string in it, and so do turns of the policy before the last: neither ends
    a response that the bound cuts."""
    stage = Stage(program(tool(tmp_path), ("temperature = 1.0", "temperature = 5.0"), more='stop = ["+"], ', bound=14))
    written = drawn(stage)
    tokens = Tokens(stage.plan.model("actor.generate").path)
    responses = lists(written["response"])
    masks = lists(written["mask"])
    own = [r[len(m) - m[::-1].index(False) if False in m else 0 :] for r, m in zip(responses, masks, strict=True)]
    texts_of = [tokens.decode([np.array(some)], special=True)[0] for some in (*own, *responses)]
    full = [len(r) == 14 and r[-1] not in tokens.ends for r in responses]
    cut = [f and "+" not in text for f, text in zip(full, texts_of[:8], strict=True)]
    assert any(c and "+" in text for c, text in zip(cut, texts_of[8:], strict=True)), "no case"
    assert stage.told.sums["response_truncated"] == (sum(cut), 8)


@pytest.mark.parametrize("bound", [BOUND, 11])
def test_episodes_are_those_of_single_rows(bound, alone, tmp_path):
    path = tool(tmp_path)
    stage = Stage(program(path, bound=bound))
    written = drawn(stage)
    expected = naive(stage, path, bound)
    assert lists(written["response"]) == [e[0] for e in expected]
    assert lists(written["mask"]) == [e[1] for e in expected]
    assert written["reward"].values.tolist() == [e[3] for e in expected]
    assert [written["said"].text(i) for i in range(8)] == [e[4] for e in expected]
    for row, (_, mask, logps, *_) in enumerate(expected):
        logp = written["response.logp"][row]
        assert np.isnan(logp[~np.array(mask)]).all()
        assert np.allclose(logp[np.array(mask)], [x for x in logps if x is not None], atol=1e-5)
        assert mask[-1]
        assert len(mask) <= bound
    masks = written["mask"].values
    assert 0 < masks.sum() < len(masks)
    sums = stage.told.sums
    assert sums["policy_tokens"][0] == masks.sum()
    assert sums["environment_tokens"][0] == (~masks).sum()
    assert sums["turns"][1] == 8
    assert 8 < sums["turns"][0] <= 24
    assert sums["reward"] == (sum(e[3] for e in expected), 8)


def test_neither_the_batch_nor_its_cut_changes_an_episode(alone, tmp_path):
    plan = program(tool(tmp_path))
    whole = drawn(Stage(plan))
    for rows, micro in (((2, 1), 0), ((0, 1, 2, 3), 1), ((3,), 3)):
        stage = Stage(plan)
        stage.generator.micro_batch = micro
        part = drawn(stage, rows)
        places = np.array([r * GROUP + i for r in sorted(rows) for i in range(GROUP)])
        for name in ("response", "mask", "reward", "said"):
            assert lists(part[name]) == lists(whole[name].take(places)) if name != "reward" else True, name
        assert np.array_equal(part["reward"].values, whole["reward"].values[places])


def test_stop_strings_end_a_turn(alone, tmp_path):
    stage = Stage(program(tool(tmp_path), more='stop = ["1", "3"],'))
    written = drawn(stage)
    ends, cut = {3 + 1, 3 + 3}, 0  # the tokens of the two digits
    for ids, mask in zip(lists(written["response"]), lists(written["mask"]), strict=True):
        for i, (token, own) in enumerate(zip(ids, mask, strict=True)):
            if own and token in ends:
                cut += 1
                assert i + 1 == len(ids) or not mask[i + 1]
    assert cut


def sampled(stage):
    """All that the update reads."""
    written = drawn(stage)
    columns = {"prompt": ragged([p for p in PROMPTS for _ in range(GROUP)], np.int32), **written}
    infer = stage.act("actor.infer", columns)
    advantage = np.where(np.arange(8) % 2, -1.0, 1.0).repeat(written["response"].lengths).astype(np.float32)
    own = {"ref_logp": infer["old_logp"], "advantage": ColumnData(advantage, written["response"].offsets)}
    return columns | infer | own


def test_the_trainer_finds_the_log_probabilities_of_the_policys_tokens(alone, tmp_path):
    stage = Stage(program(tool(tmp_path)))
    columns = sampled(stage)
    mask = columns["mask"].values
    assert np.allclose(columns["old_logp"].values[mask], columns["response.logp"].values[mask], atol=1e-4)
    assert np.isfinite(columns["old_logp"].values).all()
    total, tokens = stage.told.sums["logp_drift"]
    assert tokens == mask.sum()
    assert total / tokens < 1e-4
    assert not stage.told.remarks
    columns["response.logp"].values[np.flatnonzero(mask)[3]] = -np.inf  # the policy's, and no number
    stage.context.watch.stops = False
    off = Stage.act(stage, "actor.infer", columns)
    assert np.isnan(off["old_logp"].values).any()


def test_what_the_environment_wrote_teaches_nothing(alone, tmp_path):
    plan = program(tool(tmp_path))
    results = []
    for noise in (0.0, 7.0):
        stage = Stage(plan)
        columns = sampled(stage)
        for name in ("old_logp", "ref_logp", "advantage"):
            columns[name].values[~columns["mask"].values] += noise
        stage.act("actor.update", columns)
        assert stage.told.sums["updates"] == (1, 0)
        results.append(stage.whole())
    assert same(results[0], results[1])
    changed = Stage(plan)
    columns = sampled(changed)
    columns["advantage"].values[np.flatnonzero(columns["mask"].values)[0]] += 7.0
    changed.act("actor.update", columns)
    assert not same(changed.whole(), results[0])


def on_ranks(rank, folder, path, layout, files):
    """Each rank writes what it has."""
    two = (
        ("devices_per_node = 1", "devices_per_node = 2"),
        ("layout actor.update   { dp = 1 }", "layout actor.update { dp = 2 }"),
    )
    stage = Stage(
        program(path, *two, ("layout actor.generate { dp = 1 }", f"layout actor.generate {{ {layout} }}")), rank
    )
    first = stage.context.is_group_leader(stage.plan.graph.node("actor.generate"))
    rows = (0, 1, 2, 3) if "tp" in layout else ((0, 3), (1, 2))[rank]
    torch.save((rows, drawn(stage, rows), first), Path(files) / f"{layout[:2]}-{rank}")


@pytest.mark.parametrize("layout", ["tp = 2", "dp = 2"])
def test_ranks_write_what_one_does(layout, alone, tmp_path):
    path = tool(tmp_path)
    whole = drawn(Stage(program(path)))
    ranks.run(2, on_ranks, str(path), layout, str(tmp_path))
    for rank in range(2):
        rows, written, first = torch.load(tmp_path / f"{layout[:2]}-{rank}", weights_only=False)
        places = np.array([r * GROUP + i for r in sorted(rows) for i in range(GROUP)])
        assert first or "tp" in layout
        assert written.keys() == whole.keys() - (set() if first else {"reward", "said"})
        for name in written.keys() - {"response.logp"}:
            assert np.array_equal(written[name].values, whole[name].take(places).values), name
        assert np.allclose(
            written["response.logp"].values, whole["response.logp"].take(places).values, atol=1e-4, equal_nan=True
        )


def test_waits_overlap(alone, tmp_path):
    stage = Stage(program(tool(tmp_path, step="time.sleep(0.25)")))
    drawn(stage)
    assert 0.25 < stage.told.seconds["environment"] < 8 * 0.25


FIRST = "row 0, the beginning of iteration 3: "
ONE = "row 0, turn 1 of iteration 3: "
LAST = "row 0, the last turn of iteration 3: "
ANSWER = "where a tuple of 4 belongs: what it says, reward, said, whether the episode is over"
OVER = "where true or false belongs: whether the episode is over"


@pytest.mark.parametrize(
    ("reset", "step", "message"),
    [
        ("return 3", "pass", f"{FIRST}BadResult: it returned int 3, where text, messages or None belong"),
        ("self.no", "pass", f"{FIRST}AttributeError: 'Tool' object has no attribute 'no', at {{path}}:7"),
        (
            "return '1' * 24",
            "pass",
            f"{FIRST}BadResult: the environment's first message has 24 tokens, but a response has room for 24",
        ),
        (
            "pass",
            "1 / (self.turn - 2)",
            "row 0, turn 2 of iteration 3: ZeroDivisionError: division by zero, at {path}:12",
        ),
        (
            "pass",
            "if self.answer == '181': raise SystemExit('no')",
            "row 4, turn 1 of iteration 3: SystemExit: no, at {path}:12",
        ),
        ("pass", "return '', True", f"{ONE}BadResult: `step` returned tuple of 2, {ANSWER}"),
        ("pass", "return '', 0.0, '', 1", f"{ONE}BadResult: `step` returned int 1 at the end, {OVER}"),
        ("pass", "return '', None, '', True", f"{LAST}BadResult: it returned None for `reward`, where f32 belongs"),
        ("pass", "return '', float('nan'), '', True", f"{LAST}BadResult: it returned nan for `reward`"),
        (
            "pass",
            "if self.answer == '7': time.sleep(0.7)",
            "row 2, turn 1 of iteration 3: TimeoutError: it took longer than its `timeout` of 0.3 s",
        ),
    ],
)
def test_what_goes_wrong_is_told_with_row_and_turn(reset, step, message, alone, tmp_path):
    path = tool(tmp_path, reset, step)
    stage = Stage(program(path, more="timeout = 300 ms,"))
    begin = time.monotonic()
    with pytest.raises(RunError) as told:
        drawn(stage)
    assert message.format(path=path) in str(told.value)
    assert str(told.value).startswith("`actor.generate` (line ")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("reads", ["mask, ", ""])
def test_an_update_that_compares_leaves_out_what_was_not_drawn(reads, alone, tmp_path):
    """Where no infer comes before it, with the mask or without."""
    less = [
        ("  node actor.infer(prompt, response) -> old_logp\n", ""),
        ("    old_logp  : f32[response]\n", ""),
        ("actor.generate -> actor.infer, ", "actor.generate -> "),
        ("actor.infer, reference.infer,", "reference.infer,"),
        ("mask, old_logp, ref_logp", f"{reads}ref_logp"),
        ("mini_batch = 4", "mini_batch = 8"),
    ]
    stage = Stage(program(tool(tmp_path), *less))
    columns = {"prompt": ragged([p for p in PROMPTS for _ in range(GROUP)], np.int32), **drawn(stage)}
    ones = ColumnData(np.ones(len(columns["mask"].values), np.float32), columns["mask"].offsets)
    columns |= {"ref_logp": ones, "advantage": ones}
    stage.act("actor.update", columns)
    assert stage.told.sums["updates"] == (1, 0)
    assert stage.told.sums["logp_drift"][1] == columns["mask"].values.sum()
    assert not stage.told.remarks


def test_alone_a_policy_writes_all_of_a_response(alone):
    stage = Stage(
        one_rank(
            ("response  : i32[<= 5]", "response  : i32[<= 5]\n mask : bool[response]"),
            ("-> response {", "-> response, mask {"),
        )
    )
    written = stage.act("actor.generate", {"prompt": ragged(PROMPTS, np.int32)})
    assert written["mask"].values.all()
    assert np.array_equal(written["mask"].offsets, written["response"].offsets)


def test_episodes_are_not_taken_from_a_recording(tmp_path):
    with pytest.raises(Fault, match="does not contain what its environment does"):
        check(program(tool(tmp_path)), False, str(tmp_path), 0)
