"""The endpoint as the openai package asks it: chats, tools, streams, log-probabilities, and what it refuses."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import chat
import numpy as np
import openai
import pytest
from templates import PLAIN, QWEN, TOOL

from msrl_graph.runtime.agents.api_types import RequestRefused, parse_request
from msrl_graph.runtime.agents.conversations import Conversations
from msrl_graph.runtime.agents.server import Endpoint, OpenRow
from msrl_graph.runtime.agents.template import ChatTemplate
from msrl_graph.runtime.data.tokens import Tokens

USER = {"role": "user", "content": "what is one plus two"}
CALL = 'so\n<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
NONE = np.zeros(0, np.int32)
SCHEMA = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "object"}}}
RULES_OUT = "it would rule out tokens while they are drawn, but training uses the policy's own, unconstrained draws"


class Served:
    """An endpoint in a thread, whose policy says in turn what it is told to; `wait` seconds later."""

    def __init__(self, folder, bound=2000, turns=None):
        self.speech = ChatTemplate(Tokens(str(folder)))
        self.texts = []
        self.wait = 0.0
        self.stops = []
        self.bound = bound
        self.turns = turns
        self.endpoint = Endpoint("policy", self.speech, ("#",), self.draw)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.clients = []
        self.thread.start()
        self.run(self.endpoint.start())

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    async def draw(self, row, answer, stop):
        self.stops.append(stop)
        text = self.texts.pop(0)
        await asyncio.sleep(self.wait)
        tokens = self.speech.encode(text)[: answer.most]
        return tokens, -np.arange(1.0, len(tokens) + 1, dtype=np.float32) / 8

    def row(self):
        row = OpenRow(0, Conversations(3, NONE, self.bound, self.turns, self.speech))
        self.endpoint.rows[row.api_key] = row
        return row

    def client(self, row, **more):
        more = {"max_retries": 0, **more}
        self.clients.append(openai.OpenAI(base_url=self.endpoint.base_url, api_key=row.api_key, **more))
        return self.clients[-1]

    def close(self):
        for client in self.clients:
            client.close()
        self.run(self.endpoint.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    texts = {"qwen": QWEN, "plain": PLAIN, "none": ""}
    return {name: chat.model(place / name, text) for name, text in texts.items()}


@pytest.fixture
def serve(folders):
    made = []

    def served(name, **more):
        made.append(Served(folders[name], **more))
        return made[-1]

    yield served
    for served in made:
        served.close()


@pytest.fixture
def served(serve):
    return serve("qwen")


def ask(client, messages=(USER,), **more):
    return client.chat.completions.create(model="policy", messages=[*messages], **more)


def test_a_chat_with_a_tool_is_one_conversation_of_drawn_tokens(served):
    row = served.row()
    client = served.client(row)
    served.texts = [f"{CALL}<|stop|>", "three<|stop|>"]
    first = ask(client, tools=[TOOL])
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.role) == ("tool_calls", "so", "assistant")
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, len(call.id)) == ("add", '{"a": 1}', 9)
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    second = ask(client, [USER, choice.message, result], tools=[TOOL])
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "three")
    assert second.usage.prompt_tokens > first.usage.total_tokens
    last = row.conversations.last
    spoken = row.conversations.make_response(last)
    drawn = [*served.speech.encode(f"{CALL}<|stop|>"), *served.speech.encode("three<|stop|>")]
    assert spoken.tokens[spoken.mask].tolist() == drawn
    assert row.conversations.strayed == 0


def test_log_probabilities_and_tokens_are_those_that_were_drawn(served):
    served.texts = ["one two<|stop|>"] * 2
    client = served.client(served.row())
    answer = ask(client, logprobs=True, extra_body={"return_token_ids": True})
    ids = served.speech.encode("one two<|stop|>")
    content = answer.choices[0].logprobs.content
    assert [t.logprob for t in content] == [-(i + 1) / 8 for i in range(len(ids))]
    assert "".join(t.token for t in content) == "one two<|stop|>"
    assert answer.choices[0].token_ids == ids.tolist()
    assert len(answer.choices[0].prompt_token_ids) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == len(ids)
    assert ask(client).choices[0].logprobs is None


def test_a_stream_brings_the_same_answer(served):
    served.texts = [CALL, "three"]
    client = served.client(served.row())
    chunks = [*ask(client, tools=[TOOL], stream=True, stream_options={"include_usage": True})]
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == "so"
    assert [(c.index, c.function.name, c.function.arguments) for d in deltas for c in d.tool_calls or []] == [
        (0, "add", '{"a": 1}')
    ]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(served.speech.encode(CALL))
    with client.chat.completions.stream(model="policy", messages=[USER]) as stream:
        assert stream.get_final_completion().choices[0].message.content == "three"


def test_completions_go_on_from_their_own_text(serve):
    served = serve("none")
    row = served.row()
    client = served.client(row)
    served.texts = [" two", " four"]
    first = client.completions.create(model="policy", prompt="one plus", logprobs=0)
    assert first.choices[0].text == " two" and first.choices[0].logprobs.token_logprobs[0] == -1 / 8
    stream = client.completions.create(model="policy", prompt="one plus two three", stream=True)
    assert "".join(c.choices[0].text for c in stream) == " four"
    spoken = row.conversations.make_response(row.conversations.last)
    assert spoken.mask.sum() == len(served.speech.encode(" two")) + len(served.speech.encode(" four"))
    with pytest.raises(openai.BadRequestError, match="has no chat template to render them"):
        ask(client)


def test_stop_strings_of_a_request_are_left_out_of_what_the_program_sees(served):
    row = served.row()
    client = served.client(row)
    served.texts = ["one;", "one#", "one"]
    assert ask(client, stop=";").choices[0].message.content == "one"
    assert (
        ask(client, stop=["#", ";"]).choices[0].message.content == "one#"
    )  # the run's own stays, as in an environment
    ask(client)
    assert served.stops == [(";",), ("#", ";"), ()]
    assert served.speech.decode(row.conversations.answers[0].tokens) == "one;"


def test_an_answer_is_as_long_as_may_be(served):
    served.texts = ["one two three"] * 3
    client = served.client(served.row())
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(client, **{name: 2})
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2
    assert ask(client, max_tokens=2000).choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("more", "error", "code", "says"),
    [
        ({"n": 2}, openai.BadRequestError, "unsupported", "`n` = 2 is not supported: one answer is drawn"),
        ({"top_logprobs": 2, "logprobs": True}, openai.BadRequestError, "unsupported", "`top_logprobs` = 2"),
        ({"tool_choice": "required"}, openai.BadRequestError, "unsupported", '`tool_choice` = "required"'),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "unsupported", RULES_OUT),
        ({"response_format": SCHEMA}, openai.BadRequestError, "unsupported", RULES_OUT),
        (
            {"extra_body": {"guided_json": {"type": "object"}}},
            openai.BadRequestError,
            "unsupported",
            "`guided_json` = ",
        ),
        ({"extra_body": {"structured_outputs": {"json": {}}}}, openai.BadRequestError, "unsupported", RULES_OUT),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "unsupported", "`presence_penalty` = 0.5"),
        ({"max_tokens": 0}, openai.BadRequestError, "invalid_type", "`max_tokens`: Expected `int` >= 1"),
        ({"stop": [""]}, openai.BadRequestError, "invalid_type", "`stop[0]`: Expected `str` of length >= 1"),
        (
            {"tools": [{"type": "web"}]},
            openai.BadRequestError,
            "invalid_type",
            "`tools[0]`: Object missing required field `function`",
        ),
        (
            {"messages": [{"role": "user"}]},
            openai.BadRequestError,
            "invalid_type",
            "`messages[0]`: Object has neither `content` nor",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            openai.BadRequestError,
            "invalid_type",
            "`messages[0].content[0]`: Object missing required field `text`",
        ),
        ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found", "there is no model 'gpt-5' here, only 'policy'"),
        (
            {"extra_body": {"chat_template_kwargs": {"tokenize": True}}},
            openai.BadRequestError,
            "invalid_type",
            "the endpoint itself sets the template's variable `tokenize`",
        ),
    ],
)
def test_what_is_not_there_is_refused_by_name(served, more, error, code, says):
    client = served.client(served.row())
    with pytest.raises(error) as told:
        client.chat.completions.create(**{"model": "policy", "messages": [USER], **more})
    assert told.value.code == code and says in told.value.message
    assert told.value.param


WRONG = {
    "messages": [None, [], "x", [3], [{"content": "x"}], [{"role": "user", "content": [3]}], [{**USER, "role": 3}]],
    "tools": [{}, [3], [{"function": {}}]],
    "max_tokens": [-1, 1.5, "3", True],
    "max_completion_tokens": [0],
    "stop": ["", 3, [3]],
    "stream": ["yes", 1],
    "stream_options": [3],
    "logprobs": ["x"],
    "return_token_ids": [1],
    "chat_template_kwargs": [3, {"tools": []}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_of_another_type_is_refused_with_the_name_of_its_parameter(name, value):
    with pytest.raises(RequestRefused) as told:
        parse_request({"model": "policy", "messages": [USER], name: value}, True, "policy")
    error = told.value.body()["error"]
    assert (error["param"], error["code"], error["type"]) == (name, "invalid_type", "invalid_request_error")
    assert error["message"].startswith(f"`{name}")


@pytest.mark.parametrize("value", [None, 3, [], [-1], [1.5], [2**31], ["a", "b"], [[1], [2]], [[]], [1, "a"]])
def test_a_prompt_is_one_text_or_a_list_of_tokens(value):
    with pytest.raises(RequestRefused) as told:
        parse_request({"model": "policy", "prompt": value}, False, "policy")
    assert (told.value.param, told.value.code) == ("prompt", "invalid_type")
    for prompt in ("a", ["a"]):
        assert parse_request({"model": "policy", "prompt": prompt}, False, "policy").prompt == "a"
    for prompt in ([1, 2], [[1, 2]]):
        assert parse_request({"model": "policy", "prompt": prompt}, False, "policy").prompt.tolist() == [1, 2]


HALF = rb"half \ud83d"  # as JSON has it
CHAT = "chat/completions"
COMPLETION = "completions"


def post(served, row, path, body, charset="utf-8"):
    """The status and the body of what a program is answered that writes its request itself."""
    head = {"Authorization": f"Bearer {row.api_key}", "Content-Type": f"application/json; charset={charset}"}
    request = urllib.request.Request(f"{served.endpoint.base_url}/{path}", body, head)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or "{}")


@pytest.mark.parametrize(
    ("path", "body", "code", "says"),
    [
        (CHAT, b'"messages": [{"role": "user", "content": "%s"}]', "invalid_text", "half a character (U+D83D)"),
        (CHAT, b'"messages": [{"role": "user", "content": "x", "%s": 1}]', "invalid_text", "half a character (U+D83D)"),
        (CHAT, b'"messages": [{"role": "user", "content": "x"}], "stop": "%s"', "invalid_text", "half a character"),
        (COMPLETION, b'"prompt": "%s"', "invalid_text", "half a character (U+D83D)"),
        (COMPLETION, b'"prompt": "\xed\xa0\xbd"', "invalid_json", "the body is not JSON: 'utf-8' codec"),
        (COMPLETION, b'"prompt": ' + b"[" * 200_000, "invalid_json", "the body is not JSON: "),
        (COMPLETION, b'"prompt": [3, 1000000]', "invalid_token", "token 1000000 is not in the vocabulary"),
    ],
)  # fmt: skip
def test_what_no_tokenizer_takes_is_refused_and_no_client_asks_again(served, path, body, code, says):
    """A client asks again after a 500."""
    status, answer = post(served, served.row(), path, b'{"model": "policy", %s}' % body.replace(b"%s", HALF))
    assert (status, answer["error"]["code"]) == (400, code), answer
    assert says in answer["error"]["message"]


def test_a_whole_character_in_two_halves_is_one(served):
    served.texts = ["one"]
    body = rb'{"model": "policy", "messages": [{"role": "user", "content": "\ud83d\ude00"}]}'
    assert post(served, served.row(), CHAT, body, "none-such")[0] == 200


def test_half_a_character_that_the_policy_writes_in_a_call_is_no_call(served):
    served.texts = [CALL.replace("1", '"\\ud83d"'), "two"]
    client = served.client(served.row())
    message = ask(client, tools=[TOOL]).choices[0].message
    assert message.tool_calls is None and message.content.endswith("</tool_call>")
    # Nor do such arguments of a call that a program makes up itself end its conversation.
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "\\ud83d"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert ask(client, [USER, said, USER], tools=[TOOL]).choices[0].message.content == "two"


def test_how_tokens_are_drawn_is_the_runs_and_what_a_request_says_of_it_is_noted(served):
    served.texts = ["one"]
    ask(served.client(served.row()), temperature=0.2, seed=3, user="me", extra_body={"top_k": 4})
    assert list(served.endpoint.left_out) == ["seed", "temperature", "top_k"]


def test_a_template_without_tools_says_so(serve):
    served = serve("plain")
    with pytest.raises(openai.BadRequestError, match="the chat template of this model does not support tools"):
        ask(served.client(served.row()), tools=[TOOL])
    served.texts = ["one"]
    assert ask(served.client(served.row()), tools=[TOOL], tool_choice="none").choices[0].message.content == "one"


def test_a_full_response_and_a_last_turn_are_told_as_openai_tells_them(serve):
    served = serve("qwen", bound=60, turns=3)
    client = served.client(row := served.row())
    served.texts = ["x" * 200, "x", "y"]
    first = ask(client)
    assert first.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as told:
        ask(client, [USER, first.choices[0].message, USER])
    assert told.value.code == "context_length_exceeded"
    ask(client)
    ask(client)
    with pytest.raises(openai.BadRequestError, match="row 3 already has 3 answers, the limit that `turns` sets"):
        ask(client)
    assert len(row.conversations.answers) == 3


def test_a_key_is_of_one_row_and_ends_with_it(served):
    one = served.row()
    other = served.row()
    served.texts = ["one", "two"]
    ask(served.client(one))
    assert len(one.conversations.answers) == 1 and not other.conversations.answers
    assert [m.id for m in served.client(one).models.list()] == ["policy"]
    del served.endpoint.rows[one.api_key]
    for call in (lambda c: ask(c), lambda c: c.models.list()):
        with pytest.raises(openai.AuthenticationError, match="no row in progress has this `api_key`"):
            call(served.client(one))
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is not served here"):
        served.client(other).embeddings.create(model="policy", input="x")


def test_a_client_that_tries_again_gets_the_answer_that_it_did_not_wait_for(served):
    served.texts = ["one", "two"]
    served.wait = 0.6
    row = served.row()
    answer = ask(served.client(row, timeout=0.4, max_retries=1))
    assert answer.choices[0].message.content == "one"
    assert len(row.conversations.answers) == 1 and served.texts == ["two"]


def test_two_requests_at_once_are_two_draws(served):
    served.texts = ["one", "two"]
    served.wait = 0.3
    row = served.row()
    client = served.client(row)
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        found = {a.choices[0].message.content for a in pool.map(lambda _: ask(client), range(2))}
    assert found == {"one", "two"} and time.monotonic() - begin < 2
    assert len({a.key for a in row.conversations.answers}) == 2


def test_what_the_refusal_of_a_schema_names_gives_json(served):
    """By the messages, and as a function in `tools`; text as the format asks for nothing."""
    row = served.row()
    client = served.client(row)
    served.texts = ['{"a": 1}<|stop|>', f"{CALL}<|stop|>", "three<|stop|>"]
    said = ask(client, [{"role": "user", "content": 'the sum as {"a": NUMBER}'}]).choices[0].message
    assert json.loads(said.content) == {"a": 1}
    (call,) = ask(client, tools=[TOOL]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1}
    assert ask(client, response_format={"type": "text"}).choices[0].message.content == "three"
