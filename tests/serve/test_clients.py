"""Clients that people use, each as it is published, against a server on a real socket.

    pip install -e '.[clients]'

Those that are not installed are skipped. The cases after them are those that the test suites of
vLLM and llama.cpp hold against their own servers, with the client that these use, OpenAI's.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.models.load import load_tokenizer
from tests.serve.serving import Running
from tests.tiny import CALL, save_calling_model

TURNS: list[Any] = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": "ppo", "messages": TURNS, "seed": 3, "max_tokens": 6}


@pytest.fixture(scope="module")
def server(served_run: Path) -> Iterator[Running]:
    running = Running(served_run, slots=8, max_queue=24, max_context=256)
    yield running
    running.close()


@pytest.fixture(scope="module")
def address(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture(scope="module")
def openai(address: str) -> Iterator[Any]:
    """OpenAI's client, which retries nothing here."""
    module = pytest.importorskip("openai")
    with module.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        client.module = module
        yield client


def test_openais_client(openai: Any) -> None:
    assert [model.id for model in openai.models.list()][:2] == ["base", "sft"]
    assert openai.models.retrieve("ppo").owned_by == "tandem"
    whole = openai.chat.completions.create(**ASKED, extra_body={"tandem": {"reward": True}})
    text = whole.choices[0].message.content
    assert isinstance(whole.choices[0].tandem["reward"], float)
    stream = openai.chat.completions.create(
        **ASKED, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    raw = openai.completions.create(model="sft", prompt="One", max_tokens=3, logprobs=1, seed=1)
    assert len(raw.choices[0].logprobs.tokens) == raw.usage.completion_tokens
    parts = openai.completions.create(model="sft", prompt="One", max_tokens=3, seed=1, stream=True)
    assert "".join(part.choices[0].text for part in parts) == raw.choices[0].text


def test_openais_errors_are_its_exceptions(openai: Any, server: Running) -> None:
    module = openai.module
    for change, kind, param in (
        ({"temperature": -1}, module.BadRequestError, "temperature"),
        ({"tools": [{"type": "function"}]}, module.BadRequestError, "tools"),
        ({"response_format": {"type": "json_schema"}}, module.BadRequestError, "response_format"),
        ({"messages": [{"role": "user", "content": "word " * 999}]}, module.BadRequestError,
         "messages"),
        ({"model": "gpt-9"}, module.NotFoundError, "model"),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            openai.chat.completions.create(**{**ASKED, **change})
        assert caught.value.param == param
        assert caught.value.code
        assert caught.value.type
    with pytest.raises(module.NotFoundError):
        openai.embeddings.create(model="ppo", input="x")
    with server.service.room(32), pytest.raises(module.RateLimitError) as refused:
        openai.chat.completions.create(**ASKED)
    assert int(refused.value.response.headers["retry-after"]) >= 1


def test_openais_asynchronous_client(openai: Any, address: str) -> None:
    text = openai.chat.completions.create(**ASKED).choices[0].message.content

    async def streamed(client: Any) -> str:
        stream = await client.chat.completions.create(**ASKED, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def whole(client: Any) -> str:
        answer = await client.chat.completions.create(**ASKED)
        return str(answer.choices[0].message.content)

    async def all_at_once() -> list[str]:
        async with openai.module.AsyncOpenAI(base_url=address, api_key="none") as client:
            both = [whole(client), streamed(client)] * 4
            return list(await asyncio.gather(*both))

    assert asyncio.run(all_at_once()) == [text] * 8


def test_the_llm_command_gets_the_same_answers(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openai: Any
) -> None:
    """Simon Willison's command line, which reads its models from a file."""
    pytest.importorskip("llm")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: tandem\n  model_name: ppo\n  api_base: {address}\n"
        f"- model_id: tandem-text\n  model_name: sft\n  api_base: {address}\n  completion: true\n"
    )
    from click.testing import CliRunner
    from llm.cli import cli

    def said(*words: str) -> str:
        result = CliRunner().invoke(cli, list(words), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output.removesuffix("\n")

    expected = openai.chat.completions.create(**ASKED).choices[0].message.content
    sampling = ["-o", "seed", "3", "-o", "max_tokens", "6"]
    assert "tandem" in said("models")
    for way in ([], ["--no-stream"]):
        assert said("-m", "tandem", *sampling, *way, "Hi") == expected
    turns = [*TURNS, {"role": "assistant", "content": expected}, {"role": "user", "content": "And"}]
    followed = openai.chat.completions.create(**{**ASKED, "messages": turns})
    again = said("-c", *sampling, "And")
    assert again == followed.choices[0].message.content
    assert said("-m", "tandem-text", "-o", "max_tokens", "4", "-o", "seed", "1", "One")
    usage = json.loads(said("logs", "--json", "-n", "1", "-m", "tandem"))[0]
    assert usage["input_tokens"] == followed.usage.prompt_tokens


@pytest.mark.slow
def test_langchain_gets_the_same_answers(address: str, openai: Any) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI, OpenAI

    expected = openai.chat.completions.create(**ASKED).choices[0].message.content
    common: dict[str, Any] = {"base_url": address, "api_key": "none", "max_tokens": 6, "seed": 3}
    chat = ChatOpenAI(model="ppo", **common)
    answer = chat.invoke([HumanMessage("Hi")])
    assert answer.content == expected
    assert answer.usage_metadata["total_tokens"] > 0
    assert "".join(part.content for part in chat.stream("Hi")) == expected
    assert [each.content for each in chat.batch(["Hi", "Hi"])] == [expected] * 2
    assert asyncio.run(chat.ainvoke("Hi")).content == expected
    assert chat.bind(logprobs=True).invoke("Hi").response_metadata["logprobs"]["content"]
    raw = openai.completions.create(model="sft", prompt="One", max_tokens=6, seed=3)
    assert OpenAI(model="sft", temperature=1, **common).invoke("One") == raw.choices[0].text


_TASK = """task: two_and_two
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
---
task: going_on
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["zzz"]
  max_gen_toks: 5
metric_list:
  - metric: exact_match
"""


@pytest.mark.slow
def test_lm_evals_log_likelihoods_are_hugging_faces(
    address: str, served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task file of its own, over the network of this machine only."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [
        {"question": f"What is {n} and {n}?", "choices": [str(2 * n), "a bird", " ünlike"],
         "answer": 0}
        for n in range(5)
    ]  # fmt: skip
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    for text in _TASK.format(data=data).split("---\n"):
        name = text.splitlines()[0].removeprefix("task: ")
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    folder = str(served_run / "sft")
    found = simple_evaluate(
        model="local-completions",
        model_args={"model": "sft", "base_url": f"{address}/completions", "tokenizer": folder,
                    "tokenizer_backend": "huggingface", "max_length": 256, "num_concurrent": 2},
        batch_size=3,
        tasks=["two_and_two", "going_on"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    assert found is not None
    samples = found["samples"]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    compared = 0
    for sample in samples["two_and_two"]:
        for argument, response in zip(sample["arguments"], sample["resps"], strict=True):
            context, choice = argument[:2] if isinstance(argument, tuple) else argument.values()
            ids = tokenizer(context + choice, add_special_tokens=False)["input_ids"]
            before = len(tokenizer(context, add_special_tokens=False)["input_ids"])
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].float()
            table = logits.log_softmax(-1)[before - 1 : -1]
            exact = table.gather(1, torch.tensor(ids[before:])[:, None]).sum().item()
            greedy = table.argmax(-1).tolist() == ids[before:]
            loglikelihood, is_greedy = response[0]
            assert float(loglikelihood) == pytest.approx(exact, abs=1e-4)
            assert is_greedy in (greedy, str(greedy))
            compared += 1
    assert compared == 15
    assert all(sample["resps"][0][0] for sample in samples["going_on"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_the_server_answers_as_its_description_says(
    address: str, server: Running, mode: str
) -> None:
    """Requests made from the served document, right and wrong; each answer must be as it says."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    # A right body may still name a token that the model does not have, or more than its context.
    excluded = [CHECKS.get_one("positive_data_acceptance")]
    root = address.removesuffix("/v1")
    schema = schemathesis.openapi.from_url(f"{root}/openapi.json")
    count = int(os.environ.get("TANDEM_SCHEMA_EXAMPLES", "20"))
    codes: dict[str, set[int]] = {}

    def examine(operation: Any) -> None:
        made = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=made)
        def one(case: Any) -> None:
            if mode == "POSITIVE" and isinstance(case.body, dict) and "messages" in case.body:
                case.body = {
                    **case.body,
                    "messages": [*TURNS, {"role": "assistant", "content": "a"}],
                }
            if mode == "POSITIVE" and isinstance(case.body, dict) and "max_tokens" in case.body:
                case.body |= {"max_tokens": 2, "max_completion_tokens": None, "min_tokens": 0}
            answer = case.call(base_url=root, timeout=120)
            codes.setdefault(operation.label, set()).add(answer.status_code)
            case.validate_response(answer, excluded_checks=excluded)

        one()

    for operation in schema.get_all_operations():
        try:
            examine(operation.ok())
        except Unsatisfiable:  # nothing about it can be wrong
            assert mode == "NEGATIVE"
    assert len(codes) >= (8 if mode == "NEGATIVE" else 12)
    assert server.is_free()


def test_openais_client_calls_tools(tmp_path: Path) -> None:
    """As its own loop over tools does: ask, call, send the result, and the same as a stream."""
    module = pytest.importorskip("openai")
    folder = save_calling_model(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.convert_tokens_to_ids([CALL, tokenizer.eos_token])
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    turns: list[Any] = [{"role": "user", "content": "2 + 3?"}]
    how: dict[str, Any] = {"model": "model", "tools": [tool], "max_tokens": 12, "seed": 3, "n": 32}
    how["logit_bias"] = {str(ids[0]): 14, str(ids[1]): 16}
    running = Running(Path(folder))
    try:
        url = f"http://127.0.0.1:{running.port}/v1"
        with module.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            how["model"] = client.models.list().data[0].id
            whole = client.chat.completions.create(messages=turns, **how).choices
            called = [choice for choice in whole if choice.finish_reason == "tool_calls"]
            assert called
            (call, *_) = called[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == (
                "add",
                {"a": 2, "b": 3},
            )
            result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
            turns += [called[0].message, result]
            assert client.chat.completions.create(messages=turns, **how).choices
            with client.chat.completions.stream(messages=turns[:1], **how) as stream:
                found = stream.get_final_completion().choices
            for one, other in zip(found, whole, strict=True):
                calls = [c.function.arguments for c in one.message.tool_calls or []]
                assert calls == [c.function.arguments for c in other.message.tool_calls or []]
                assert one.finish_reason == other.finish_reason
    finally:
        running.close()
