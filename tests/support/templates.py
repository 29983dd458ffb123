"""Chat templates of the known families, written small, and a policy that answers at random in their words."""

from __future__ import annotations

# As Qwen2.5: tools in the system message, calls as JSON between tags, results of tools in a user's turn.
QWEN = """\
{%- if tools %}{{ "<|start|>system\\n" + (messages[0].content if messages[0].role == "system" else "be kind") }}
{{- "\\n<tools>" }}{% for tool in tools %}{{ "\\n" + (tool | tojson) }}{% endfor %}{{ "\\n</tools>\\n" }}
{{- 'call by <tool_call>\\n{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call><|stop|>\\n' }}
{%- elif messages[0].role == "system" %}{{ "<|start|>system\\n" + messages[0].content + "<|stop|>\\n" }}{% endif -%}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
{{- "<|start|>" + message.role + "\\n" + message.content + "<|stop|>\\n" }}
{%- elif message.role == "assistant" %}{{ "<|start|>assistant" }}
{%- if message.content %}{{ "\\n" + message.content }}{% endif %}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ "<|stop|>\\n" }}
{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<|start|>user" }}{% endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|stop|>\\n" }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant\\n" }}{% endif -%}
"""

# As Llama 3: heads of their own for each turn, one call as bare JSON, content stripped.
LLAMA = """\
{{- "<|end|>" }}
{%- if tools %}{{ "<|start|>system<|end|>\\n\\nanswer by {\\"name\\": NAME, \\"parameters\\": PARAMETERS}" }}
{%- for tool in tools %}{{ "\\n" + (tool | tojson) }}{% endfor %}{{ "<|stop|>" }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{{- '<|start|>assistant<|end|>\\n\\n{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- (message.tool_calls[0].function.arguments | tojson) + "}<|stop|>" }}
{%- else %}
{%- set role = "ipython" if message.role == "tool" else message.role %}
{{- "<|start|>" + role + "<|end|>\\n\\n" + (message.content | trim) + "<|stop|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant<|end|>\\n\\n" }}{% endif -%}
"""

# As Qwen3: what was thought before the last question of a user is left out.
THINKS = """\
{%- if tools %}{{ "<|start|>system\\n<tool_call> " + (tools | tojson) + "<|stop|>\\n" }}{% endif %}
{%- set at = namespace(last=0) %}
{%- for message in messages %}{% if message.role == "user" %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == "assistant" and "</think>" in content and loop.index0 < at.last %}
{%- set content = content.split("</think>")[-1].lstrip("\\n") %}{% endif %}
{{- "<|start|>" + message.role + "\\n" + content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}
{{- "<|stop|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant\\n" }}{% endif -%}
"""

# No template of a family: it says at the beginning how many messages there are, so that no prefix stays.
COUNTS = """\
{%- if tools %}{{ "<tool_call> " + (tools | tojson) }}{% endif %}
{{- "<|start|>" + (messages | length | string) + "\\n" }}
{%- for message in messages %}{{ message.role + ": " + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{{- "<|stop|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "assistant: " }}{% endif -%}
"""

# Nothing ends a turn of the assistant's but the line.
PLAIN = """\
{%- for message in messages %}{{ message.role + ": " + message.content + "\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "assistant: " }}{% endif -%}
"""

TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "thinks": THINKS, "counts": COUNTS, "plain": PLAIN}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a sum", "parameters": {"type": "object", "properties": {}}},
}

# As Mistral: turns alternate, the system message stands in the last turn of a user, nothing asks for an answer.
MISTRAL = """\
{%- set system = messages[0].content + "\\n\\n" if messages[0].role == "system" else "" %}
{%- set turns = messages[1:] if system else messages %}
{{- "<|end|>" }}
{%- for message in turns %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("turns must alternate") }}{% endif %}
{%- if message.role == "user" %}
{{- "<|start|>" + (system if loop.last else "") + message.content + "<|start|>" }}
{%- else %}{{ " " + message.content + "<|stop|>" }}{% endif %}
{%- endfor -%}
"""

# As Qwen3 besides: to a last answer without thoughts it adds empty ones, and results of tools are no question.
EMPTY_THOUGHTS = """\
{%- set at = namespace(last=0) %}
{%- for message in messages %}{% if message.role == "user" %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set parts = message.content.split("</think>") %}
{%- if message.role == "assistant" %}{{ "<|start|>assistant\\n" }}
{%- if loop.index0 > at.last and (loop.last or parts | length > 1) %}
{{- (parts[0] if parts | length > 1 else "<think>") + "</think>" }}{% endif %}
{{- parts[-1] + "<|stop|>\\n" }}
{%- else %}{{ "<|start|>" + message.role + "\\n" + message.content + "<|stop|>\\n" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant\\n" }}{% endif -%}
"""

OF_TURNS = {**TEMPLATES, "mistral": MISTRAL, "empty thoughts": EMPTY_THOUGHTS}
