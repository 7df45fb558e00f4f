"""A template rendered directly, against Hugging Face's own call."""

from __future__ import annotations

import copy
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from tandem.data.chat.template_call import TemplateCall
from tests.data.built_tokenizers import byte_level

DIALOG = [
    {"role": "system", "content": "be <kind> & 'brief'"},
    {"role": "user", "content": " two\nlines "},
    {"role": "assistant", "content": "é {{ x }} {% if %}"},
]
TEMPLATES = {
    "all its variables": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content | trim }}{{ eos_token }}{% endfor %}{{ tools }}{{ documents is none }}"
    "{{ add_generation_prompt }}",
    "its filters and globals": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{{ m | tojson }}{{ ns.n }}{% if loop.last %}{% break %}{% endif %}"
    "{% endfor %}{{ strftime_now('%Y') }}",
    "generation": "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% endfor %}",
    "optional keys": "{% for m in messages %}{{ m.reasoning_content is defined }}"
    "{{ m.tool_calls | default('none') }}{{ m.get('content') }}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_text_is_that_of_hugging_face(template: str) -> None:
    tokenizer = byte_level(template)
    call = TemplateCall(tokenizer, template)
    assert call._compiled is not None
    for length in (1, 2, 3):
        for prompt in (False, True):
            expected = tokenizer.apply_chat_template(
                DIALOG[:length], tokenize=False, add_generation_prompt=prompt
            )
            assert call(DIALOG[:length], prompt) == expected


def test_a_token_that_is_named_later_is_written() -> None:
    template = "{{ pad_token }}"
    tokenizer = byte_level(template)
    call = TemplateCall(tokenizer, template)
    tokenizer.pad_token = "hello"
    assert call(DIALOG, False) == "hello"


class Speaker(str, Enum):  # noqa: UP042, StrEnum writes its value
    USER = "user"


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


def test_texts_of_other_classes_are_plain_to_a_template(tmp_path: Path) -> None:
    """Methods of theirs must not be called: numpy's texts can write files."""
    path = tmp_path / "written"
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        f"{{% if m.content.tofile is defined %}}{{{{ m.content.tofile('{path}') }}}}{{% endif %}}"
        "{% endfor %}"
    )
    tokenizer = byte_level(template)
    call = TemplateCall(tokenizer, template)
    assert call._compiled is not None
    dialog: list[dict[str, str]] = [
        {"role": Speaker.USER, "content": np.str_("hello")},
        {"role": "assistant", "content": Loud("there")},
    ]
    plain = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    expected = tokenizer.apply_chat_template(plain, tokenize=False)
    assert call(dialog, False) == expected == "user: helloassistant: there"
    assert not path.exists()


def test_a_call_can_be_copied() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    call = TemplateCall(byte_level(template), template)
    for twin in (copy.deepcopy(call), pickle.loads(pickle.dumps(call))):
        assert twin._compiled is not None
        assert twin(DIALOG[:2], True) == call(DIALOG[:2], True)


def test_a_class_with_a_call_of_its_own_is_asked() -> None:
    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, conversation: Any, *args: Any, **options: Any) -> str:
            return f"own {len(conversation)}"

    plain = byte_level("x")
    own = Own(tokenizer_object=plain.backend_tokenizer, eos_token=plain.eos_token)
    assert TemplateCall(own, "x")(DIALOG, True) == "own 3"


@pytest.mark.parametrize("broken", ["missing", "other arguments", "other text"])
def test_another_interface_leaves_hugging_faces_call(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = byte_level(template)
    own = chat_template_utils._compile_jinja_template
    with monkeypatch.context() as patch:
        if broken == "missing":
            patch.delattr(chat_template_utils, "_compile_jinja_template")
        elif broken == "other arguments":
            patch.setattr(chat_template_utils, "_compile_jinja_template", lambda a, b: own(a))
        else:
            patch.setattr(TemplateCall, "_direct", lambda *arguments: "another text")
        call = TemplateCall(tokenizer, template)
    assert call._compiled is None
    assert call(DIALOG[1:2], False) == " two\nlines "
