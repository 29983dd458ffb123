"""Conversations as tokens: what is trained on was drawn, from exactly what stands before it, whatever template the
model has and whatever a program does with its messages."""

import json
from dataclasses import dataclass, field

import chat
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sample import examples
from templates import OF_TURNS, TEMPLATES, TOOL

from msrl_graph.runtime.agents.api_types import ChatReply, parse_request, prepare_messages
from msrl_graph.runtime.agents.conversations import ContextOverflow, Conversations
from msrl_graph.runtime.agents.template import ChatTemplate
from msrl_graph.runtime.agents.tool_calls import FORMATS
from msrl_graph.runtime.data.tokens import Tokens

NONE = np.zeros(0, np.int32)
USER = {"role": "user", "content": "what is one plus two"}


@pytest.fixture(scope="session")
def speeches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    return {n: ChatTemplate(Tokens(str(chat.model(folder / n.replace(" ", "_"), t)))) for n, t in OF_TURNS.items()}


@dataclass
class Program:
    """Asks as a program does, over the shapes of requests and answers; what is drawn is what the test says."""

    speech: ChatTemplate
    conversations: Conversations
    tools: list = field(default_factory=list)
    draws: list = field(default_factory=list)  # (all tokens before, tokens)

    def ask(self, messages, text, ended=True, got=True):
        """The message that the policy answers with, having drawn a text a character a token."""
        asked = parse_request({"model": "m", "messages": messages, "tools": self.tools}, True, "m")
        answer = self.conversations.chat(asked.messages, None, asked.more)
        tokens = np.concatenate([self.speech.encode(c) for c in text]) if text else NONE
        tokens = np.append(tokens, self.speech.tokens.ends[0])[: answer.most] if ended else tokens[: answer.most]
        answer.tokens = tokens.astype(np.int32)
        answer.logps = -np.arange(1.0, len(tokens) + 1, dtype=np.float32)
        self.draws.append((answer.prefix, answer.tokens))
        said, calls = self.speech.parse_answer(answer.tokens, asked.tools)
        made = ChatReply(said, tuple(calls), "stop", answer.tokens, (), answer.logps, answer.prefix, 0, answer.number)
        if got:
            self.conversations.record_chat_answer(
                answer, asked.messages, prepare_messages([made.message()])[0], asked.more
            )
        return answer, made.message()

    def check(self):
        """That every token of the policy's in the response was drawn from what stands before it there, and every other
        one was not drawn; the response."""
        last = self.conversations.last
        spoken = self.conversations.make_response(last)
        whole = np.concatenate([last.prefix[: last.base], spoken.tokens])
        left = spoken.mask.copy()
        for prefix, tokens in sorted(self.draws, key=lambda d: -len(d[1])):  # one may be the beginning of another
            here = slice(len(prefix) - last.base, len(prefix) - last.base + len(tokens))
            if np.array_equal(whole[: len(prefix) + len(tokens)], [*prefix, *tokens]) and left[here].all():
                left[here] = False
                assert np.array_equal(spoken.logps[here], -np.arange(1.0, len(tokens) + 1))
        assert not left.any()
        assert np.array_equal(np.isnan(spoken.logps), ~spoken.mask)
        assert spoken.mask[-1]
        return spoken


def program(speech, bound=4000, context=NONE, turns=None, tools=()):
    return Program(speech, Conversations(7, context, bound, turns, speech), [*tools])


WORDS = st.text("one plus\n two<", min_size=0, max_size=12)
CALL = st.builds(
    lambda blanks, key: (
        f'<tool_call>{blanks}{{"name": "add",{blanks}"arguments": {{"{key}":1, "b" : "é"}}}}</tool_call>'
    ),
    st.sampled_from(["", " ", "\n"]),
    st.sampled_from("ab"),
)
TEXT = st.one_of(
    WORDS, CALL, st.builds("<think>{}</think>{}".format, WORDS, WORDS), st.builds("{}{}".format, WORDS, CALL)
)
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["on", "on", "on", "again", "back", "fresh", "cut", "strip", "lost"]), TEXT, st.booleans()
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(acts=ACTS, with_tools=st.booleans(), context=st.booleans())
@example(acts=[("on", "", False), ("back", "", True)], with_tools=False, context=False)
@examples(40)
def test_whatever_a_program_does_what_is_trained_on_was_drawn_from_what_stands_before_it(
    speeches, name, acts, with_tools, context
):
    speech = speeches[name]
    tools = [TOOL] if with_tools and name != "plain" else []
    begin = speech.encode_prompt([USER], **({"tools": tools} if tools else {}))
    made = program(speech, context=begin if context else NONE, tools=tools)
    messages = [USER]
    tried = []
    for act, text, ended in [("on", "one", True), *acts]:
        if act == "back" and tried:
            messages = tried[len(tried) // 2]
        elif act == "fresh":
            messages = [{"role": "system", "content": "another"}, USER]
        elif act == "cut":
            messages = messages[-3:] if messages[-3:][0]["role"] == "user" else messages
        elif act == "lost":
            made.ask(messages, text or "x", ended, got=False)
        tried.append(messages)
        _, message = made.ask(messages, text or "x", ended)
        if act == "again":
            _, message = made.ask(messages, "two", ended)
        if act == "strip":
            message = {**message, "content": (message["content"] or "").strip(), "refusal": None}
        calls = message.get("tool_calls", [])
        answers = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in calls]
        messages = [*messages, message, *(answers or [USER])]
    spoken = made.check()
    assert 0 < spoken.mask.sum() <= sum(len(t) for _, t in made.draws)


@pytest.mark.parametrize("name", ["qwen", "llama", "plain"])
@given(texts=st.lists(st.tuples(TEXT, st.booleans()), min_size=1, max_size=5))
@examples(40)
def test_by_a_template_that_preserves_prefixes_a_conversation_is_one_response(speeches, name, texts):
    """With all that was drawn in it, however the template would write it."""
    tools = [] if name == "plain" else [TOOL]
    made = program(speeches[name], tools=tools)
    messages = [USER]
    for text, ended in texts:
        _, message = made.ask(messages, f"{text}.", ended)
        calls = message.get("tool_calls", [])
        answers = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in calls]
        messages = [*messages, message, *(answers or [USER])]
    spoken = made.check()
    assert np.array_equal(spoken.tokens[spoken.mask], np.concatenate([t for _, t in made.draws]))
    assert made.conversations.strayed == 0
    assert made.conversations.count_left_out(spoken) == (0, 0)


def test_what_stands_between_two_answers_is_what_the_template_writes(speeches):
    speech = speeches["qwen"]
    made = program(speech, tools=[TOOL])
    drawn = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    _, message = made.ask([USER], drawn)
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    answer, _ = made.ask([USER, message, result], "three")
    told = answer.prefix[len(answer.previous.all_tokens) :]
    assert speech.decode(told, special=True) == (
        "\n<|start|>user\n<tool_response>\n3\n</tool_response><|stop|>\n<|start|>assistant\n"
    )
    assert speech.decode(made.check().tokens, special=True).count(drawn) == 1  # as it was drawn, blanks and all


def test_an_answer_that_is_cut_is_closed_by_the_template(speeches):
    made = program(speeches["qwen"])
    _, message = made.ask([USER], "one pl", ended=False)
    answer, _ = made.ask([USER, message, USER], "two")
    assert speeches["qwen"].decode(answer.prefix, special=True).count("one pl<|stop|>\n<|start|>user") == 1
    assert made.check().mask.sum() == 6 + 4


@pytest.mark.parametrize("name", ["thinks", "counts"])
def test_where_the_template_writes_the_beginning_otherwise_the_conversation_begins_anew(speeches, name):
    made = program(speeches[name])
    _, message = made.ask([USER], "<think>hm</think>one")
    answer, _ = made.ask([USER, message, USER], "two")
    assert answer.previous is None
    assert made.conversations.strayed == 1
    spoken = made.check()
    assert speeches[name].decode(spoken.tokens[spoken.mask]) == "two"
    assert made.conversations.count_left_out(spoken) == (1, len("<think>hm</think>one") + 1)


def test_thoughts_stay_where_no_user_asks_again(speeches):
    made = program(speeches["thinks"], tools=[TOOL])
    _, message = made.ask([USER], '<think>hm</think><tool_call>{"name": "add", "arguments": {}}</tool_call>')
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    answer, _ = made.ask([USER, message, result], "three")
    assert answer.previous is not None and made.conversations.strayed == 0


@pytest.mark.parametrize("role", ["user", "tool"])
def test_empty_thoughts_that_a_template_adds_to_a_last_answer_begin_no_conversation(speeches, role):
    """As Qwen3 does: in the whole conversation the answer stands as it was drawn."""
    speech = speeches["empty thoughts"]
    made = program(speech)
    messages = [USER]
    for _ in range(3):
        answer, message = made.ask(messages, "one")
        messages = [*messages, message, {"role": role, "content": "more"}]
    assert made.conversations.strayed == 0 and len([*answer.path()]) == 3
    asked, _ = made.ask(messages, "two")
    assert speech.decode(asked.prefix, special=True) == speech.tokens.render(messages, True)


def test_a_message_that_a_program_has_changed_was_not_drawn(speeches):
    made = program(speeches["qwen"])
    _, message = made.ask([USER], "one")
    answer, _ = made.ask([USER, {**message, "content": "two"}, USER], "three")
    assert answer.previous is None and made.conversations.strayed == 1
    spoken = made.check()
    assert speeches["qwen"].decode(spoken.tokens[spoken.mask]) == "three"


def test_the_noise_of_a_conversation_is_the_rows_and_that_of_all_else_its_own(speeches):
    made = program(speeches["qwen"])
    first, message = made.ask([USER], "one")
    second, _ = made.ask([USER, message, USER], "two")
    again, _ = made.ask([USER], "three")
    thrice, _ = made.ask([USER], "three")
    branch, _ = made.ask([USER, message, USER], "two")
    other, _ = made.ask([{"role": "user", "content": "else"}], "two")
    assert first.key == second.key == 7
    keys = [again.key, thrice.key, branch.key, other.key]
    assert len({7, *keys}) == 5 and all(2**61 <= k < 2**63 for k in keys)
    same = program(speeches["qwen"])
    same.ask([USER], "one")
    assert same.ask([USER], "other words")[0].key == again.key
    assert program(speeches["qwen"]).ask([USER], "one")[0].key == 7


def test_who_asks_again_for_an_answer_that_never_came_gets_that(speeches):
    made = program(speeches["qwen"])
    answer, _ = made.ask([USER], "one", got=False)
    made.conversations.record_dropped_request(answer)
    assert made.ask([USER], "one")[0] is answer
    assert made.ask([USER], "one")[0] is not answer


def test_the_response_ends_with_the_last_answer_of_those_that_begin_with_the_prompt(speeches):
    speech = speeches["qwen"]
    made = program(speech, context=speech.encode_prompt([USER]))
    first, _ = made.ask([USER], "one")
    made.ask([{"role": "user", "content": "judge it"}], "good")
    assert made.conversations.last is first
    assert speech.decode(made.check().tokens, special=True) == "one<|stop|>"
    assert made.conversations.count_left_out(made.conversations.make_response(first)) == (1, 5)
    alone = program(speech, context=speech.encode("one"))
    alone.ask([USER], "one")
    assert alone.conversations.last is None


def test_a_response_holds_what_its_bound_says_and_an_episode_its_turns(speeches):
    speech = speeches["qwen"]
    begin = len(speech.encode_prompt([USER]))
    made = program(speech, bound=begin + 3)
    answer, message = made.ask([USER], "one two three")
    assert len(answer.tokens) == answer.most == 3
    with pytest.raises(ContextOverflow, match=f"of the {begin + 3} tokens of the response, which leaves no room"):
        made.ask([USER, message, USER], "more")
    twice = program(speech, turns=1)
    twice.ask([USER], "one")
    with pytest.raises(ContextOverflow, match="row 7 already has 1 answers"):
        twice.ask([USER], "one")
    assert len(program(speech, bound=begin + 3, context=speech.encode_prompt([USER])).ask([USER], "one")[0].tokens) == 4


def test_completions_go_on_by_text_and_by_tokens(speeches):
    speech = speeches["plain"]
    made = program(speech).conversations

    def drawn(prompt, text):
        answer = made.completion(prompt, None)
        answer.tokens = np.concatenate([speech.encode(c) for c in text]).astype(np.int32)
        answer.logps = np.zeros(len(answer.tokens), np.float32)
        made.record_completion(answer, prompt, speech.decode(answer.tokens))
        return answer

    first = drawn("one plus", " two is")
    second = drawn("one plus two is three", " and")
    assert second.previous is first
    assert np.array_equal(second.prefix[: len(first.all_tokens)], first.all_tokens)
    third = drawn(np.append(second.all_tokens, speech.encode(" four")).astype(np.int32), "one")
    assert third.previous is second
    mask = made.make_response(third).mask
    assert mask.sum() == len(" two is") + len(" and") + len("one")
    assert drawn("one minus", "x").previous is None


@pytest.mark.parametrize(
    ("name", "text", "said", "calls"),
    [
        ("hermes", 'so\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "so", [("f", {"a": 1})]),
        (
            "hermes",
            '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {"b": "}"}}</tool_call>',
            "",
            [("f", {}), ("g", {"b": "}"})],
        ),
        ("hermes", "<tool_call>f(1)</tool_call>", None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', None, []),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', None, []),
        ("hermes", "<tool_call>{" + '"a":{' * 40 + "}</tool_call>", None, []),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
        ("llama3", 'so {"name": "f", "parameters": {}}', None, []),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
            "",
            [("f", {"a": [1]}), ("g", {})],
        ),
        ("mistral", "[TOOL_CALLS] [", None, []),
    ],
)
def test_calls_of_tools_are_found_in_each_format(name, text, said, calls):
    assert FORMATS[name](text) == (text if said is None else said, calls)


def test_a_template_says_which_format_it_teaches_and_whether_it_takes_tools(speeches):
    assert speeches["qwen"].calls is FORMATS["hermes"] and speeches["llama"].calls is FORMATS["llama3"]
    assert speeches["plain"].calls is None
    assert [name for name in TEMPLATES if not speeches[name].takes_tools] == ["plain"]


def test_arguments_go_out_as_json_and_come_back_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": 1})}}
    found = prepare_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert found[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1} and found[0]["content"] == ""
