"""The chat templates that come with Tandem: that of tokenizers that have none, ChatML, and one that
frames nothing."""

_TOOLS = """\
    {{- 'Functions that you may call, as JSON schemas:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'To call one, write <tool_call>{"name": "...", "arguments": {...}}</tool_call>' }}"""
_ANSWER = """\
        {% generation %}{{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {{- call.function.arguments | tojson + '}</tool_call>' }}
        {%- endfor %}"""


def _filled(template: str) -> str:
    return template.replace("TOOLS", _TOOLS).replace("ANSWER", _ANSWER)


DEFAULT_TEMPLATE = _filled("""\
{{- PREFIX }}
{%- if tools %}
TOOLS
    {{- '\\n\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not loop.first %}{{- '\\n\\n' }}{%- endif %}
    {%- if message.role in ['system', 'developer'] %}{{- message.content }}
    {%- elif message.role == 'assistant' %}{{- 'Assistant: ' -}}
ANSWER
        {{- eos_token }}{% endgeneration %}
    {%- else %}
        {{- {'user': 'Human: ', 'tool': 'Tool: '}[message.role] + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\\n\\nAssistant:' }}{%- endif %}
""")
"""Conversations as "Human: hi\\n\\nAssistant: yo" + EOS, turns apart by a blank line, a system text
first and the schemas of tools before it. PREFIX becomes what the tokenizer puts before a text (its
BOS). `generation` marks what the assistant writes for trainers that ask Hugging Face for a mask of
it."""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = _filled("""\
{{- PREFIX }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
TOOLS
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' -}}
        {%- if message.role == 'assistant' %}
ANSWER
        {{- '<|im_end|>' }}{% endgeneration %}
        {%- else %}{{- message.content + '<|im_end|>' }}
        {%- endif %}
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""")
"""ChatML, for tokenizers that have its control tokens, without a system text of its own. Tools are
in the system turn, their results in turns of role tool."""

PLAIN_TEMPLATE = """\
{{- PREFIX }}
{%- for message in messages %}
    {%- if loop.first and message.role == 'user' %}{{- message.content }}
    {%- elif loop.index == 2 and message.role == 'assistant' %}
        {%- generation %}{{- message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('one prompt and one answer, without roles, are all that it takes') }}
    {%- endif %}
{%- endfor %}
"""
"""A prompt and its answer + EOS with nothing between them, as TRL joins rows that are not
conversations. Without roles nobody could tell further turns apart, so they are refused."""
