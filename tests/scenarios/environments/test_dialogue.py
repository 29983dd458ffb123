"""Environments that speak in messages: what stands between two turns of the policy is what the chat template writes of
the whole conversation, or the row fails with the reason."""

import chat
import numpy as np
import pytest
from agent_stages import ANSWERS, PROGRAM, QUESTIONS
from environment_stages import drawn as drawn_by
from environment_stages import lists, program, tool
from hypothesis import given
from hypothesis import strategies as st
from piece_tokenizers import folder as folder_of_pieces
from sample import examples
from stage import Stage, share
from templates import OF_TURNS

from msrl_graph import compile
from msrl_graph.runtime.agents.template import ChatTemplate
from msrl_graph.runtime.data.columns import ragged, texts
from msrl_graph.runtime.data.tokens import Tokens
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.functions.environments import EnvironmentClass
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import RunError
from msrl_graph.runtime.rank.environment_turns import Dialogue

SHOP = """
class Shop:
    def reset(self, question, answer: str):
        self.turn = 0
        {reset}

    def step(self, text):
        self.turn += 1
        {step}
"""
ASKS = 'return [{"role": "user", "content": question}]'
SAYS = 'return {"role": "ROLE", "content": f"so {text[::-1]} {self.turn}"}, float(len(text)), text, self.turn == 3'
USER = SAYS.replace("ROLE", "user")


def plan(folder, model, reset=ASKS, step=USER, more="", reads=""):
    """A program whose environment says what these methods return."""
    (folder / "shop.py").write_text(SHOP.format(reset=reset, step=step))
    text = PROGRAM.format(path=folder / "shop.py", model=model, more=more, layout="dp = 1", devices=1)
    text = text.replace('agent = "', 'environment = "').replace(":solve", ":Shop")
    if reads:
        text = text.replace("answer    : text", "answer    : text\n prompt : i32[<= 40]")
        text = text.replace("source(4) -> ", "source(4) -> prompt, ").replace(
            "generate(question", "generate(prompt, question"
        )
        text = text.replace("infer(response)", "infer(prompt, response)").replace(
            "update(response", "update(prompt, response"
        )
    return compile(folder / "program.rlg", text=text)


def begun(made, prompts=None):
    """A dialogue of one row, and its episodes."""
    environment = EnvironmentClass(made.graph.node("actor.generate"), made)
    environment.start()
    context = [np.zeros(0, np.int32)] if prompts is None else prompts
    columns = {"question": texts(QUESTIONS[:1]), "answer": texts(ANSWERS[:1])}
    columns |= {"prompt": ragged(context, np.int32)} if prompts is not None else {}
    rows = np.arange(1)
    episodes = environment.begin(Batch(share(rows, 1, 1, {}), rows, columns), rows, Task("train", 3, 4, 2))
    return Dialogue(episodes, ChatTemplate(Tokens(made.deploy.models["policy"].path)), context)


def played(made, drawn, prompts=None):
    """All tokens of a row in which these texts are drawn, and its dialogue."""
    parts, dialogue = parts_of(made, drawn, True, prompts)
    return np.concatenate(parts), dialogue


def parts_of(made, drawn, ended, prompts=None):
    """What a row begins with, and by turn what is drawn, with an end token if it `ended`, and what is said to it."""
    dialogue = begun(made, prompts)
    speech = dialogue.speech
    (first,) = dialogue.begin()
    parts = [*(prompts or ()), first]
    for turn, text in enumerate(drawn, 1):
        tokens = np.append(speech.encode(text), speech.tokens.ends[0] if ended else []).astype(np.int32)
        (told,) = dialogue.step(np.arange(1), [tokens], turn, True)
        parts += [tokens, *([] if told is None else [told])]
    return parts, dialogue


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {name: chat.model(folder / name.replace(" ", "_"), text) for name, text in OF_TURNS.items()}


@pytest.fixture(scope="session")
def plans(models, tmp_path_factory):
    """Of each template, its environment speaking as a `user`."""
    made = {name: plan(tmp_path_factory.mktemp("shop"), model) for name, model in models.items()}
    return made.__getitem__


# What templates do not strip, and nothing that a template reads.
WORDS = st.text("one plus\n two<é", min_size=1, max_size=12).filter(lambda text: text == text.strip())


@pytest.mark.parametrize("name", ["qwen", "llama", "thinks", "empty thoughts"])
@given(drawn=st.lists(WORDS, min_size=1, max_size=2))
@examples(25)
def test_all_tokens_are_those_of_the_rendered_conversation(plans, name, drawn):
    tokens, dialogue = played(plans(name), drawn)
    (conversation,) = dialogue.conversations.values()
    assert [m["role"] for m in conversation] == ["user", *["assistant", "user"] * len(drawn)]
    rendered = dialogue.speech.tokens.render(conversation, True)
    assert np.array_equal(tokens, dialogue.speech.encode(rendered))


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", ["qwen", "llama", "thinks", "empty thoughts", "mistral", "plain"])
@given(drawn=st.lists(st.text("one plus\n two", min_size=1, max_size=8), min_size=1, max_size=2))
@examples(15)
def test_what_was_drawn_stays_and_the_template_writes_the_rest(plans, name, ended, drawn):
    """Whatever blanks the template strips from an answer or puts before it, and where an answer is cut."""
    parts, dialogue = parts_of(plans(name), drawn, ended)
    (conversation,) = dialogue.conversations.values()
    speech = dialogue.speech
    for told in parts[2::2]:
        closes = speech.decode(told, special=True).startswith("<|stop|>")
        assert closes == (not ended) or name == "plain"
    text = speech.decode(np.concatenate(parts), special=True)
    rendered = speech.tokens.render(conversation, True)
    assert "".join(text.split()) == "".join(rendered.split()) or name == "plain"


def test_a_conversation_follows_the_prompt_that_it_was_rendered_to(models, tmp_path):
    speech = ChatTemplate(Tokens(str(models["qwen"])))
    prompt = speech.encode_prompt([{"role": "user", "content": QUESTIONS[0]}])
    tokens, dialogue = played(plan(tmp_path, models["qwen"], reads="prompt"), ["three"], prompts=[prompt])
    assert np.array_equal(tokens[: len(prompt)], prompt)
    (conversation,) = dialogue.conversations.values()
    assert np.array_equal(tokens, speech.encode(speech.tokens.render(conversation, True)))


THOUGHTS = "If the template leaves out earlier thoughts once a `user` message follows, answer as `tool`; if it moves"


@pytest.mark.parametrize(
    ("name", "reset", "step", "drawn", "message"),
    [
        (
            "qwen",
            "return None",
            USER,
            "one",
            "`step` returned messages, but there is no conversation to add them to",
        ),
        ("qwen", ASKS, "return 'so', 0.0, text, False", "one", "`step` returned the text 'so' in a conversation"),
        ("qwen", ASKS, "return None, 0.0, text, False", "one", "`step` returned nothing in a conversation of messages"),
        ("qwen", ASKS, SAYS.replace("ROLE", "assistant"), "one", "`step` returned a message of the `assistant`, which"),
        (
            "qwen",
            ASKS,
            'return {"role": "user", "content": {1}}, 0.0, text, False',
            "one",
            "messages that are not JSON",
        ),
        (
            "qwen",
            'return {"role": "user", "content": "\\ud83d"}',
            USER,
            "one",
            "messages with half a character (U+D83D)",
        ),
        (
            "qwen",
            'return {"says": "user"}',
            USER,
            "one",
            "it returned dict of 1, where text, messages or None belong",
        ),
        (
            "qwen",
            "return None",
            USER,
            "",
            "`reset` returned no text and the row has no prompt, so nothing predicts a first",
        ),
        ("thinks", ASKS, USER, "<think>hm</think>one", THOUGHTS),
        ("empty thoughts", ASKS, USER, "<think>hm</think>one", THOUGHTS),
        ("counts", ASKS, USER, "one", THOUGHTS),
        ("mistral", ASKS.replace("[{", '[{"role": "system", "content": "be kind"}, {'), USER, "one", THOUGHTS),
        ("mistral", ASKS, SAYS.replace("ROLE", "tool"), "one", "does not render them: turns must alternate"),
    ],
)
def test_what_cannot_go_on_is_refused_with_row_and_turn(models, tmp_path, name, reset, step, drawn, message):
    # Of a row without a prompt `reset` says something, where it is not what is refused.
    reset = "return 'say'" if reset == "return None" and drawn else reset
    with pytest.raises(RunError) as told:
        played(plan(tmp_path, models[name], reset, step), [drawn] if drawn else [])
    assert message in str(told.value)
    assert "row 0, " in str(told.value) and "of iteration 3: " in str(told.value)


@pytest.mark.parametrize(
    ("name", "reset", "step", "drawn"),
    [
        ("thinks", ASKS, SAYS.replace("ROLE", "tool"), "<think>hm</think>one"),
        ("empty thoughts", ASKS, SAYS.replace("ROLE", "tool"), "<think>hm</think>one"),
        ("empty thoughts", ASKS, SAYS.replace("ROLE", "tool"), "one"),
        ("mistral", ASKS.replace("question", '"be kind\\n\\n" + question'), USER, "one"),
    ],
)
def test_what_the_refusals_name_helps(models, tmp_path, name, reset, step, drawn):
    _, dialogue = played(plan(tmp_path, models[name], reset, step), [drawn, drawn])
    assert [len(conversation) for conversation in dialogue.conversations.values()] == [5]


def test_a_generation_with_an_environment_of_messages(models, tmp_path, alone):
    """What is drawn is in the response after what it was drawn from, and the trainer finds its log-probabilities."""
    made = plan(tmp_path, models["qwen"], more='turns = 3, max_tokens = 260, stop = "e",')
    stage = Stage(made)
    tokens = Tokens(str(models["qwen"]))
    columns = {"question": texts(QUESTIONS), "answer": texts(ANSWERS)}
    written = stage.act("actor.generate", columns, np.arange(4))
    infer = stage.act("actor.infer", {**written, "response.logp": written["response.logp"]})
    mask = written["mask"].values
    assert np.allclose(infer["old_logp"].values[mask], written["response.logp"].values[mask], atol=1e-4)
    assert np.isnan(written["response.logp"].values[~mask]).all()
    several = 0
    for i, (ids, own) in enumerate(zip(lists(written["response"]), lists(written["mask"]), strict=True)):
        text = tokens.decode([np.array(ids)], special=True)[0]
        assert text.startswith(f"<|start|>user\n{QUESTIONS[i // 2]}<|stop|>\n<|start|>assistant\n")
        assert own[-1] and not own[0]
        several += text.count("<|stop|>\n<|start|>user\nso ")
    assert several > 0
    assert stage.told.sums["turns"][0] == several + 8


def test_what_an_environment_says_has_no_blank_before_it(alone, tmp_path):
    """By a tokenizer that puts one before each text."""
    model = folder_of_pieces(tmp_path, "llama")
    path = tool(tmp_path)
    stage = Stage(program(path, ('model policy  = "./model"', f'model policy  = "{model}"'), more='stop = ["1"],'))
    written = drawn_by(stage)
    tokens = Tokens(str(model))
    said = 0
    for ids, own in zip(lists(written["response"]), lists(written["mask"]), strict=True):
        whole = tokens.decode([np.array(ids)], special=True)[0]
        for end in [j for j in range(1, len(ids)) if own[j - 1] and not own[j]]:
            before = tokens.decode([np.array(ids[:end])], special=True)[0]
            assert whole.startswith(before) and whole[len(before)] == "=", whole
            said += 1
        number, plus, _ = whole.partition("+")
        assert own[0] or (plus and number.isdigit()), whole
    assert said
