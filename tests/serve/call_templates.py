"""Chat templates with tools, each in the style of a family that is published."""

# ruff: noqa: E501

from tests.data.test_tool_rendering import INST, TAGGED

HERMES = """{{ bos_token or '' }}{% if tools %}<|im_start|>system
You are a function calling AI model.<tools>{% for t in tools %}{{ t.function | tojson }}
{% endfor %}</tools><|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>tool
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% set c = m.tool_calls[0].function %}<|im_start|>assistant

{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|im_end|>{% elif m.role in ['tool', 'ipython'] %}<|im_start|>ipython

{{ m.content | tojson if m.content is mapping else m.content }}<|im_end|>{% else %}<|im_start|>{{ m.role }}

{% if tools and loop.first %}Given the following functions, please respond with a JSON for a function call.
{% for t in tools %}{{ t | tojson(indent=4) }}

{% endfor %}{% endif %}{{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""
TEXT = HERMES.replace(
    "{{ c.function.arguments | tojson }}", "{{ c.function.arguments | tojson | tojson }}"
)
STYLES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": INST,
    "qwen": TAGGED,
    "arguments as text": TEXT,
}
