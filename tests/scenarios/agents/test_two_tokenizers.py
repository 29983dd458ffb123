"""Text that goes from one policy to another with its own tokenizer: both are trained, each on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import chat
import numpy as np
import pytest
import torch
from place import EXAMPLE, metrics
from safetensors.torch import save_file
from stage import Stage

from msrl_graph import Fault, algorithms, compile
from msrl_graph.ir.plan import Plan
from msrl_graph.runtime.data.columns import ColumnData, texts
from msrl_graph.runtime.data.tokens import Tokens

ALGORITHM = """
algorithm talk {
  columns {
    prompt     : text[<= 16]
    answer     : text
    difficulty : f32
    heat       : f32
    response   : i32[<= 5]
    said       : text
    reply      : i32[<= 6]
    likeliest  : i32[<= 6]
    old        : f32[reply]
    right      : f32
    turn       : f32
    length     : f32
    own        : f32[response]
    others     : f32[reply]
  }
  worker actor  : policy
  worker critic : policy { model = critic }
  worker host   : function
  source(4) -> prompt, answer, difficulty, heat { weights = "talk.py:easy" }
  node actor.generate(prompt, heat) -> response { samples = 2, temperature = heat }
  node host.said(response) -> said { call = text() }
  node critic.generate(prompt, said) -> reply { samples = 2 }
  node greedy: critic.generate(prompt, said) -> likeliest { temperature = 0 }
  node critic.infer(prompt, said, reply) -> old
  node host.right(response, answer) -> right { call = exact_match() }
  node host.length(reply, said) -> length { call = "talk.py:length" }
  node host.turn(likeliest, said, difficulty) -> turn { call = "talk.py:turn" }
  node host.own(response, right) -> own { call = group_norm(reward = right), per = prompt }
  node host.others(reply, length) -> others { call = group_norm(response = reply, reward = length), per = response }
  node actor.update(prompt, response, own) { loss = clip(0.2, advantage = own), optimizer = adamw(lr = 1e-3) }
  node critic.update(prompt, said, reply, old, others) {
    loss      = clip(0.2, old_logp = old, advantage = others)
    optimizer = adamw(lr = 1e-3)
  }
  source -> actor.generate -> host.said -> critic.generate, greedy
  actor.generate -> host.right -> host.own -> actor.update
  critic.generate -> critic.infer, host.length
  greedy -> host.turn
  host.length -> host.others
  critic.infer, host.others -> critic.update
  actor.update => actor.generate
  critic.update => critic.generate, greedy
}
cluster laptop { device = "cpu", devices_per_node = RANKS }
deploy talk on laptop {
  model policy = "./model"
  model critic = "./critic"
  data source  = "talk.jsonl"
  run { iterations = 2 }
}
"""
FUNCTIONS = """
def easy(difficulty, iteration):
    return (difficulty < 2) * (1.0 + iteration)


def length(reply, said, tokenizer):
    # The tokenizer is that of the tokens which the node reads, the critic's.
    assert tokenizer.vocab_size > 256 and isinstance(said, str)
    return float(len(tokenizer.decode(reply, skip_special_tokens=True)))


def turn(likeliest, said, difficulty, iteration):
    assert difficulty < 2, "a row of weight 0 was drawn"
    return float(iteration)
"""
SAID = ["63", "1", "", "+=9"]


def program(folder: Path, text: str = ALGORITHM, ranks: int = 1) -> Plan:
    """With models whose tokenizers differ: digits, and bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "critic").exists():
        chat.model(folder / "critic")
        (folder / "critic" / "model.safetensors").unlink()
        torch.manual_seed(0)
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "critic"))
        save_file(
            {k: v.clone() for k, v in net.state_dict().items()},
            folder / "critic" / "model.safetensors",
            metadata={"format": "pt"},
        )
        (folder / "talk.py").write_text(FUNCTIONS)
        rows = [json.loads(line) for line in (EXAMPLE / "train.jsonl").read_text().splitlines()[:8]]
        made = [{**row, "difficulty": i // 4 * 5, "heat": 0.5 + i % 2} for i, row in enumerate(rows)]
        (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    if not (folder / "model").exists():
        (folder / "model").symlink_to(EXAMPLE / "model")
    (folder / "p.rlg").write_text(text.replace("RANKS", str(ranks)))
    return compile(str(folder / "p.rlg"))


def test_a_reader_predicts_after_the_text_in_its_own_tokens(tmp_path: Path, alone: None) -> None:
    """What the critic computes of its reply is what transformers computes after the same text, encoded by the critic's
    tokenizer alone."""
    from transformers import AutoModelForCausalLM

    stage = Stage(program(tmp_path))
    tokens = Tokens(str(tmp_path / "critic"))
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "critic")
    prompts = ["50+13=", "2+2=", "7+1=", "9+9="]
    given = {"prompt": texts(prompts), "said": texts(SAID)}
    drawn = stage.act("critic.generate", given)
    rows = {c: column.take(np.repeat(np.arange(4), 2)) for c, column in given.items()} | drawn
    old = stage.act("critic.infer", rows)["old"]
    assert np.allclose(old.values, drawn["reply.logp"].values, atol=1e-4)
    for i in range(8):
        before = [t for text in (prompts[i // 2], SAID[i // 2]) for t in tokens.encode([text])[0]]
        reply = drawn["reply"][i]
        with torch.no_grad():
            logits = net(torch.tensor([[*before, *reply]])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        assert np.allclose(logits[range(len(reply)), reply], old[i], atol=1e-4)
    # Nothing of the text is in the loss: it has a term for each token of the reply.
    others = ColumnData(np.ones(len(old.values), np.float32), old.offsets)
    stage.act("critic.update", rows | {"old": old, "others": others})
    assert stage.told.sums["loss/clip"][1] == len(drawn["reply"].values)


def test_a_text_that_is_learnt_ends_with_the_end_token_of_its_reader(tmp_path: Path, alone: None) -> None:
    text = ALGORITHM.replace("critic.update(prompt, said, reply, old, others)", "critic.update(prompt, said)")
    text = text.replace("loss      = clip(0.2, old_logp = old, advantage = others)", "loss      = sft()")
    for gone in ("  node critic.infer(prompt, said, reply) -> old\n", "    old        : f32[reply]\n"):
        text = text.replace(gone, "")
    text = text.replace("critic.generate -> critic.infer, host.length", "critic.generate -> host.length")
    text = text.replace("  critic.infer, host.others -> critic.update", "  host.others -> critic.update")
    stage = Stage(program(tmp_path, text))
    tokens = Tokens(str(tmp_path / "critic"))
    stage.act("critic.update", {"prompt": texts(["50+13="] * 4), "said": texts(SAID)})
    ids = tokens.encode(SAID)
    assert tokens.ends == (2, 0) and stage.told.sums["loss/sft"][1] == sum(len(i) + 1 for i in ids if len(i))
    assert [list(r) for r in tokens.append_end_tokens([*ids, np.array([7, 0])])] == [
        [*i, 2] if len(i) else [] for i in ids
    ] + [[7, 0]]


def test_tokens_of_another_tokenizer_are_told_with_what_mends_it(tmp_path: Path) -> None:
    """The help, applied: a column of text that `text()` writes; for the source's, `text` in its declaration."""
    wrong = ALGORITHM.replace("critic.generate(prompt, said) -> reply", "critic.generate(prompt, response) -> reply")
    program(tmp_path)
    with pytest.raises(Fault) as fault:
        program(tmp_path, wrong)
    (told,) = fault.value.diagnostics
    assert told.code == "other-tokenizer" and told.help.endswith(
        "; or read a column `said : text` instead, which `node host.said(response) -> said { call = text() }` writes"
    )
    with pytest.raises(Fault) as fault:
        program(tmp_path, ALGORITHM.replace("text[<= 16]", "i32[<= 16]"))
    assert {d.help.split("; ")[1] for d in fault.value.diagnostics} == {
        "or declare `prompt : text`, which each model reads with its own tokenizer"
    }
    program(tmp_path)


def test_what_goes_to_another_model(tmp_path: Path) -> None:
    text, own, add = (algorithms.load("function", name) for name in ("text", "own_text", "add_message"))
    tokens = Tokens(str(chat.model(tmp_path / "chat")))
    ids = np.append(tokens.encode(["one plus two"])[0], 2)
    assert text(tokens.decode([ids])[0]) == "one plus two"
    mask = np.ones(len(ids), bool)
    mask[1:-1] = False
    assert own(ids, mask, tokens.chat()) == tokens.decode([ids[:1]])[0]
    talk = add("what is one", "<|stop|>", role="assistant")
    assert json.loads(talk) == [
        {"role": "user", "content": "what is one"},
        {"role": "assistant", "content": "<|stop|>"},
    ]
    more = add(talk, "and two", role="user")
    assert [m["role"] for m in json.loads(more)] == ["user", "assistant", "user"]
    assert tokens.decode([tokens.read(texts([more]))[0]], special=True)[0].endswith(
        "<|start|>user\nand two<|stop|>\n<|start|>assistant\n"
    )


@pytest.mark.core
@pytest.mark.slow
def test_two_policies_are_trained_with_text_between_them(place) -> None:  # type: ignore[no-untyped-def]
    program(place.folder, ranks=2)
    code, _, err = place.run("p.rlg", "--out", "talk")
    assert code == 0, err
    place.assert_clean()
    lines = [line for line in metrics(place.folder / "talk") if "iteration" in line]
    assert [line["turn"] for line in lines] == [0, 1]
    for line in lines:
        assert line["actor.update/updates"] == line["critic.update/updates"] == 1 and line["logp_drift"] < 1e-4
        assert 0 < line["length"] < 40
    for worker in ("actor", "critic"):
        assert (place.folder / "talk" / "weights" / worker / "model.safetensors").exists()
    begun = Tokens(str(place.folder / "critic"))
    assert (
        Tokens(str(place.folder / "talk" / "weights" / "critic")).encode(["one plus"])[0].tolist()
        == begun.encode(["one plus"])[0].tolist()
    )
