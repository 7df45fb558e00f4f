"""Rendering a chat template as Hugging Face does, without what it does around the template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Template
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from tandem.data.chat.template_limits import deadline

Dialog = list[dict[str, Any]]
Tools = list[dict[Any, Any] | Callable[..., Any]] | None
"""JSON schemas; no function is ever given."""

_APPLY = PreTrainedTokenizerBase.apply_chat_template


class TemplateCall:
    """A tokenizer's `apply_chat_template` of texts by one template.

    Copying the turns and looking for images, tools and documents takes it as long as rendering. So
    the compiled template is rendered directly, with the same variables, where that gives the same
    text for a trial conversation. How it is compiled is no part of the documented interface: where
    it is missing or differs, Hugging Face's own call is used.

    Args:
        source: the jinja template; it has already rendered a conversation within limits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._globals: dict[str, Any] = {}
        self._compiled = self._tried()

    def __call__(self, dialog: Dialog, prompt: bool, tools: Tools = None) -> str:
        """The turns' text; with `prompt` up to where the assistant begins."""
        if self._compiled is None:
            return self._applied(dialog, prompt, tools)
        return self._direct(self._compiled, dialog, prompt, tools)

    def __reduce__(self) -> tuple[type[TemplateCall], tuple[PreTrainedTokenizerBase, str]]:
        """Copies compile again: a compiled template cannot be copied."""
        return TemplateCall, (self._tokenizer, self._source)

    def _applied(self, dialog: Dialog, prompt: bool, tools: Tools = None) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                dialog,
                tools=tools,
                chat_template=self._source,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        )

    def _direct(self, compiled: Template, dialog: Dialog, prompt: bool, tools: Tools = None) -> str:
        # A str of another class (an enum's, numpy's) has methods that the sandbox lets through.
        plain = [
            {name: str.__str__(said) if isinstance(said, str) else said for name, said in t.items()}
            for t in dialog
        ]
        variables = {
            **self._globals,
            "messages": plain,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
            **self._tokenizer.special_tokens_map,
        }
        # `render` would copy the globals each time, which takes longer than most templates.
        context = compiled.new_context(variables, shared=True)
        return "".join(compiled.root_render_func(context))

    def _tried(self) -> Template | None:
        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        if compile_template is None or type(self._tokenizer).apply_chat_template is not _APPLY:
            return None
        user, answer = ({"role": r, "content": "hello"} for r in ("user", "assistant"))
        try:
            with deadline():
                compiled: Template = compile_template(self._source)
                self._globals = dict(compiled.globals)
                for dialog, prompt in (([user], True), ([user, answer], False)):
                    if self._direct(compiled, dialog, prompt) != self._applied(dialog, prompt):
                        return None
        except Exception:  # the template refuses such turns, or is compiled in another way
            return None
        return compiled
