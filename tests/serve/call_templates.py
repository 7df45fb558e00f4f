"""Chat templates with tools, each in the style of a family that is published."""

# ruff: noqa: E501

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
MISTRAL = """{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}[AVAILABLE_TOOLS] [{% for t in tools %}{{ t | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}][/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
QWEN = r"""{% if tools %}<|im_start|>system
# Tools
<tools>{% for t in tools %}
{{ t | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'user' or m.role == 'system' or (m.role == 'assistant' and not m.tool_calls) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant{% if m.content %}{{ '\n' + m.content }}{% endif %}{% for c in m.tool_calls %}{% if c.function %}{% set c = c.function %}{% endif %}{{ '\n<tool_call>\n' }}{"name": "{{ c.name }}", "arguments": {% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT = HERMES.replace(
    "{{ c.function.arguments | tojson }}", "{{ c.function.arguments | tojson | tojson }}"
)
STYLES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "arguments as text": TEXT,
}
