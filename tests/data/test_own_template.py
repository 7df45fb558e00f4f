"""A chat template of the user's own: where it is found, what is refused, what it makes of rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tandem.config.dataset import DataConfig
from tandem.data.chat.own_template import (
    BUILT_IN,
    KEPT,
    OwnTemplate,
    digest_of,
    is_gone,
    kept_with,
    put_template,
    read_template,
)
from tandem.data.render import Renderer
from tandem.errors import ConfigError, DataError, ModelError
from tandem.types import Message, Source
from tests.data.built_tokenizers import CHATML, PLAIN, byte_level, sentencepiece
from tests.data.test_tool_rendering import DIALOG, GIVEN, TOOLS, built, hf

HERE = Source("rows", "rows.jsonl", 1)
ASKED = (Message("user", "hello there"),)


def rendering(
    tokenizer: PreTrainedTokenizerBase, own: OwnTemplate | None
) -> tuple[PreTrainedTokenizerBase, Renderer]:
    put_template(tokenizer, own)
    return tokenizer, Renderer(tokenizer, own=own)


def written(path: Path, source: str = CHATML) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return str(path)


def test_a_template_is_found_in_a_file_and_in_what_folders_of_models_have(tmp_path: Path) -> None:
    assert read_template("") is None
    assert read_template(written(tmp_path / "mine.jinja")) == OwnTemplate(
        f"chat template {tmp_path / 'mine.jinja'}", CHATML
    )
    marked = tmp_path / "marked.jinja"
    marked.write_text(CHATML, "utf-8-sig")
    assert read_template(str(marked)).source == CHATML  # type: ignore[union-attr]
    named = [{"name": "tool_use", "template": PLAIN}, {"name": "default", "template": CHATML}]
    settings = json.dumps({"chat_template": named, "eos_token": "x"})
    folder = tmp_path / "model"
    written(folder / "tokenizer_config.json", settings)
    for name in (str(folder), str(folder / "tokenizer_config.json")):
        found = read_template(name)
        assert found is not None
        assert found.source == CHATML
    written(folder / "chat_template.json", json.dumps({"chat_template": PLAIN}))
    assert read_template(str(folder)).source == PLAIN  # type: ignore[union-attr]
    written(folder / "chat_template.jinja", PLAIN + " ")
    assert read_template(str(folder)).source == PLAIN + " "  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("gone.jinja", None, "'FOLDER/gone.jinja', which does not exist. Check the path."),
        ("chatml.jinjA", None, "Did you mean FOLDER/chatml.jinja?"),
        ("t.jinja", "{% for m in messages %}\n{{ m.content }", "in line 2."),
        ("t.jinja", "{{ bos_token }}", "a Jinja template of `messages`; got one that does not"),
        ("t.jinja", " \n", "got an empty one."),
        ("t.jinja", "{{ messages }}{% include %}", "in line 1."),
        ("t.bin", b"\xff\xfe{{ messages }}", "must be a text file in UTF-8; got 'utf-8' codec"),
        ("t.json", "{}", "must be a JSON object with a text chat_template; got none."),
        ("t.json", '{"chat_template": [1, {"name": [2]}]}', "a text chat_template; got none."),
        ("t.json", "[" * 100_000, "a text chat_template; got none."),
        ("folder/x", "", "must be a folder with a template in chat_template.jinja, chat_"),
    ],
)
def test_what_is_no_template_is_one_line(
    name: str, content: str | bytes | None, part: str, tmp_path: Path
) -> None:
    written(tmp_path / "chatml.jinja")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = str(path.parent if name.startswith("folder") else path)
    with pytest.raises(ConfigError) as error:
        read_template(given)
    assert part.replace("FOLDER", str(tmp_path)) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").symlink_to("gone.jinja")
    with pytest.raises(ConfigError, match="a link to a file that is not there"):
        read_template(str(tmp_path / "t.jinja"))


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("llama3", "Save that template as a file, and give it."),
        ("defualt", "Did you mean default?"),
        ("ChatML", "Did you mean chatml?"),
        ("{{ messages[0].content }}", "Write the template to a file, and give that."),
        ("x" * 5000, "Save that template as a file"),
        ("a\0b/c", "Check the path."),
    ],
)
def test_a_word_that_is_no_file_is_told_what_to_do(value: str, advice: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_template(value)
    assert str(error.value).endswith(advice) or advice in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(), byte_level(None), byte_level(CHATML, adds_bos=True), sentencepiece()],
)
def test_none_is_the_prompt_and_the_answer_and_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer, renderer = rendering(tokenizer, read_template("none"))
    before = tokenizer.decode(tokenizer.encode("a")[:1]) if tokenizer.bos_token else ""
    asked = tokenizer.encode(f"{before}hello there", add_special_tokens=False)
    assert renderer.prompt(list(ASKED)).token_ids == tuple(asked)
    row = renderer.conversation(list(ASKED), " yes", HERE)
    answer = row.token_ids[len(asked) :]
    assert answer[-1] == tokenizer.eos_token_id
    assert row.response_mask == (False,) * len(asked) + (True,) * len(answer)
    assert tokenizer.decode(row.token_ids, skip_special_tokens=True).strip() == "hello there yes"
    assert renderer.decode(answer).strip() == "yes"
    assert not renderer.takes_more_turns
    # What is saved with a model says the same without the knob.
    again = byte_level()
    again.chat_template = renderer.chat_template
    assert not Renderer(again).takes_more_turns


@pytest.mark.parametrize(
    "turns",
    [
        (*ASKED, Message("assistant", "yes"), *ASKED),
        (Message("system", "be kind"), *ASKED),
        (*ASKED, *ASKED),
    ],
)
def test_none_refuses_turns_that_only_roles_could_tell_apart(turns: tuple[Message, ...]) -> None:
    _, renderer = rendering(byte_level(), read_template("none"))
    with pytest.raises(DataError, match="suit the chat template none; got 'one prompt and one"):
        renderer.prompt(list(turns), source=HERE)


def test_default_replaces_a_template_that_cannot_be_used() -> None:
    broken = byte_level("{{ 1 / 0 }}{{ messages }}")
    with pytest.raises(ModelError, match=r"ZeroDivisionError.*or a run --chat-template FILE"):
        Renderer(broken)
    tokenizer, renderer = rendering(broken, read_template("default"))
    plain = Renderer(byte_level(None))
    assert renderer.prompt("hello").token_ids == plain.prompt("hello").token_ids
    assert renderer.renders_like(plain)
    assert renderer.takes_more_turns
    assert tokenizer.chat_template == renderer.chat_template  # its marks are its own


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (
            CHATML.replace("<|im_end|>", "<|endofturn|>"),
            r"end an answer with a control token, which training learns; got '<\|endofturn\|>\\n'",
        ),
        (CHATML.replace("{{ m.content }}", ""), "write an assistant's words as they are"),
        (
            CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'user' }}"),
            "write the user's words as they are; got '<|im_start|>user",
        ),
        ("{% for m in messages %}{{ m.contents }}{% endfor %}", "render a user's|words as they"),
        ("{{ messages[0].content + 1 }}", "got 'TypeError: .* Correct that file."),
        (f"{CHATML}{{% if not add_generation_prompt %}}.{{% endif %}}", None),
    ],
)
def test_a_template_that_loses_words_or_the_end_is_refused_by_its_file(
    source: str, part: str | None, tmp_path: Path
) -> None:
    own = read_template(written(tmp_path / "mine.jinja", source))
    if part is None:
        rendering(byte_level(), own)
        return
    with pytest.raises(ModelError, match=part.replace("<|im", r"<\|im")) as error:
        rendering(byte_level(), own)
    assert str(error.value).startswith(f"chat template {tmp_path / 'mine.jinja'} must")
    assert "\n" not in str(error.value)


def test_a_template_without_an_end_ends_in_eos(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{% if not messages %}"
    source += "{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer, renderer = rendering(
        byte_level(), read_template(written(tmp_path / "t.jinja", source))
    )
    assert renderer.conversation(list(ASKED), "yes", HERE).token_ids[-1] == tokenizer.eos_token_id


def test_a_finished_reward_model_keeps_its_own_template() -> None:
    own = read_template("none")
    trained, bare = byte_level(), byte_level(None)
    for tokenizer in (trained, bare):
        put_template(tokenizer, own, unless_its_own=True)
    assert trained.chat_template == CHATML
    assert bare.chat_template == BUILT_IN["none"].replace("PREFIX", '""')
    several = byte_level()
    several.chat_template = {"default": CHATML, "tool_use": PLAIN}
    put_template(several, own)
    assert several.chat_template == bare.chat_template


def test_a_runs_copy_is_read_in_place_of_the_file(tmp_path: Path) -> None:
    given = DataConfig(chat_template="mine.jinja")
    assert kept_with(given, tmp_path) == given
    written(tmp_path / KEPT)
    assert kept_with(given, tmp_path).chat_template == str(tmp_path / KEPT)
    for value in ("tokenizer", *BUILT_IN):
        assert kept_with(DataConfig(chat_template=value), tmp_path).chat_template == value
    assert DataConfig(chat_template="").chat_template == "tokenizer"
    assert DataConfig().own_template == ""


@pytest.mark.parametrize("name", ["default", "chatml"])
def test_built_in_templates_write_tools_and_calls_that_are_read_back(name: str) -> None:
    own = read_template(name)
    tokenizer = built(PLAIN)
    assert put_template(tokenizer, own) is own
    renderer = Renderer(tokenizer, None, own)
    assert renderer.call_reader is not None
    dialog = [{"role": "system", "content": "Be kind."}, *DIALOG]
    shown = tokenizer.decode(renderer.prompt(dialog[:4], tools=TOOLS).token_ids)
    for part in ("Be kind.", '"weather_of"', f'"arguments": {GIVEN}}}</tool_call>', '"rain"'):
        assert shown.count(part) == 1 + (part == '"weather_of"')  # the schema, and the call
    for end in (1, 2, 4, 6):
        for tools in (None, TOOLS):
            ids = renderer.prompt(dialog[:end], tools=tools or "").token_ids if end > 1 else ()
            if ids:
                assert list(ids) == hf(tokenizer, dialog[:end], tools, True)


def test_chatml_is_that_of_others_where_there_are_no_tools() -> None:
    own = read_template("chatml")
    tokenizer, other = byte_level(), byte_level(CHATML)
    put_template(tokenizer, own)
    renderer, theirs = Renderer(tokenizer, None, own), Renderer(other)
    turns = [Message("system", "Be kind."), *ASKED, Message("assistant", "yes"), *ASKED]
    for prompt in (list(ASKED), turns):
        assert renderer.prompt(prompt).token_ids == theirs.prompt(prompt).token_ids
        row = renderer.conversation(prompt, "no", HERE)
        assert row == theirs.conversation(prompt, "no", HERE)
    with pytest.raises(
        ModelError, match=r"which lacks <\|im_start\|>. Use dataset.chat_template d"
    ):
        put_template(sentencepiece(), own)
    half = sentencepiece()
    half.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    with pytest.raises(ModelError, match=r"which lacks <\|im_end\|>"):
        put_template(half, own)


THINKS = (
    "{% if level | default(2) > 3 %}({{ mood or 'calm' }}){% endif %}"
    + CHATML.removesuffix("{% endif %}")
    + "{% if think is defined and think is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""One with variables that are left to its caller, as Qwen3's enable_thinking."""
PROMPT = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("begins", ["", "\n", "{%- if true %}{% endif %}"])
@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ("think=false", {"think": False}),
        ("think=true", {"think": True}),
        ("level=5", {"level": 5}),
        ('level=3.5&mood=a "b" c', {"level": 3.5, "mood": 'a "b" c'}),
        ("level=5&mood=né 😀", {"level": 5, "mood": "né 😀"}),
        ("level=5&mood=inf", {"level": 5, "mood": "inf"}),
        ("level=4&mood=none&think=False", {"level": 4, "mood": None, "think": False}),
    ],
)
def test_variables_are_set_as_by_apply_chat_template(
    variables: str, given: dict[str, Any], begins: str, tmp_path: Path
) -> None:
    asked = [{"role": "user", "content": "hello there"}]
    expected = byte_level(begins + THINKS).apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True, **given
    )
    file = written(tmp_path / "mine.jinja", begins + THINKS)
    for value, tokenizer in (
        (f"tokenizer?{variables}", byte_level(begins + THINKS)),
        (f"{file}?{variables}", byte_level(PLAIN)),
    ):
        own = put_template(tokenizer, read_template(value))
        renderer = Renderer(tokenizer, own=own)
        prompt = renderer.prompt(ASKED)
        assert renderer.continuation(prompt.token_ids) == expected
        assert PROMPT in str(expected)
        # A model keeps them, for whoever renders with its tokenizer.
        tokenizer.chat_template = renderer.chat_template
        told = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert told == expected
        again = put_template(tokenizer, read_template(f"tokenizer?{variables}"))
        assert Renderer(tokenizer, own=again).prompt(ASKED).token_ids == prompt.token_ids


def test_variables_that_a_model_keeps_can_be_set_anew() -> None:
    tokenizer = byte_level(THINKS)
    put_template(tokenizer, read_template("tokenizer?think=false&level=5"))
    own = put_template(tokenizer, read_template("tokenizer?think=true"))
    assert own is not None
    assert dict(own.variables) == {"think": "true", "level": "5"}
    assert (
        Renderer(tokenizer, own=own).continuation(
            Renderer(tokenizer, own=own).prompt(ASKED).token_ids
        )
        == f"(calm){PROMPT}"
    )


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("tokenizer?thnk=false", "got thnk, it reads level, mood, think. Did you mean think?"),
        ("tokenizer?zzz=1", "got zzz, it reads level, mood, think. Remove it."),
        ("tokenizer?messages=1", "variables that a template leaves to its caller; got 'messages'"),
        ("tokenizer?a b=1", "variables that a template leaves to its caller; got 'a b'"),
        ("tokenizer?think", "must have variables as ?name=value&name=value"),
        ("tokenizer?think=1&think=2", "Give each option once"),
        ("chatml?think=1", "chat template chatml must read the variables that are set; got think"),
        ("tokenzer?think=1", "got 'tokenzer', which does not exist. Did you mean tokenizer?"),
    ],
)  # fmt: skip
def test_variables_that_cannot_be_set(value: str, part: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=re.escape(part)):
        put_template(byte_level(THINKS), read_template(value))


def test_a_run_finds_its_copy_with_the_variables(tmp_path: Path) -> None:
    (tmp_path / KEPT).write_text(THINKS)
    for value, kept in (
        ("gone.jinja?think=false", f"{tmp_path / KEPT}?think=false"),
        ("tokenizer?think=false", "tokenizer?think=false"),
    ):
        assert kept_with(DataConfig(chat_template=value), tmp_path).chat_template == kept
    assert is_gone("gone.jinja?think=false")
    assert not is_gone("tokenizer?think=false")
    assert not is_gone(f"{tmp_path / KEPT}?think=false")
    plain, own = (read_template(f"{tmp_path / KEPT}{more}") for more in ("", "?think=false"))
    assert digest_of(plain) != digest_of(own)


def test_a_file_with_a_question_mark_in_its_name(tmp_path: Path) -> None:
    value = written(tmp_path / "what?a=b.jinja", THINKS)
    assert read_template(value) == OwnTemplate(f"chat template {value}", THINKS)
