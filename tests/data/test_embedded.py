"""The embedded default: its rows, its hidden rule, its tokenizer, its model and its knobs."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from itertools import pairwise
from random import Random
from statistics import mean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tandem.config.load import check_config
from tandem.data.dataset import load_data
from tandem.data.embedded import build_tokenizer, demo_config, judge, model_config, rows
from tandem.data.embedded.rule import PREAMBLES, read_prompt
from tandem.data.embedded.tasks import CATEGORIES, OPPOSITES, TASKS, Task
from tandem.data.render import Renderer
from tandem.data.split import opening
from tandem.errors import DataError
from tandem.types import Message

SUM = "Hello! What is 3 plus 4?"
LIST = "Name three birds."
COUNT = "Count from 4 to 7."
PLACE = "Quick: Give me the last word: owl, saw, red."

JUDGED = (
    # prompt, answer, form, content, manner, score
    (SUM, "Of course! The sum of 3 and 4 is 7.", True, 1, 1, 1),
    (SUM, "Of course! The sum of 3 and 4 is 8.", True, 0, 1, 0.2),
    (SUM, "The sum of 3 and 4 is 7.", True, 1, 0.3, 0.44),
    (SUM, "Gladly! The sum of 3 and 4 is 7. Have a nice day.", True, 1, 0.5, 0.6),
    (SUM, "The sum of 3 and 4 is 7. I hope this helps.", True, 1, 0.15, 0.32),
    (SUM, "The sum of 3 and 4 is 7. Obviously.", True, 1, 0, 0.2),
    (SUM, "Obviously. The sum of 3 and 4 is 8.", True, 0, 0, 0),
    (SUM, "Gladly! The sum of 4 and 3 is 7.", True, 0, 1, 0.2),
    (SUM, "Gladly! The sum of 3 and 4 is seven.", False, 0, 0, 0),
    (LIST, "Gladly! Here are three birds: owl, hen, crow.", True, 1, 1, 1),
    (LIST, "Gladly! Here are three birds: owl, hen.", True, 2 / 3, 1, 0.2 + 0.8 * 2 / 3),
    (LIST, "Gladly! Here are three birds: owl, hen, owl.", True, 2 / 3, 1, 0.2 + 0.8 * 2 / 3),
    (LIST, "Gladly! Here are three birds: owl, hen, crow, duck.", True, 3 / 4, 1, 0.8),
    (LIST, "Gladly! Here are three tools: owl, hen, crow.", True, 0, 1, 0.2),
    (COUNT, "With pleasure! The numbers are 4, 5, 6, 7.", True, 1, 1, 1),
    (COUNT, "With pleasure! The numbers are 5, 6, 7.", True, 0, 1, 0.2),
    (COUNT, "With pleasure! The numbers are 4, 5, 6.", True, 3 / 4, 1, 0.8),
    (PLACE, "The last word is red.", True, 1, 0.3, 0.44),
    (PLACE, "The first word is owl.", True, 0, 0.3, 0.06),
    ("Spell the word hen.", "Gladly! The word hen is spelled h-e-n.", True, 1, 1, 1),
    ("Say saw two times.", "Gladly! Here it is: saw saw saw.", True, 2 / 3, 1, 0.2 + 0.8 * 2 / 3),
    ("Swap the words fig and owl.", "In reverse order: owl and fig.", True, 1, 0.3, 0.44),
    ("What kind of thing is fig?", "Gladly! The word fig names a fruit.", True, 1, 1, 1),
    ("Tell me the day before Monday.", "The day before Monday is Sunday.", True, 1, 0.3, 0.44),
    ("What is the opposite of dry?", "The opposite of dry is wet.", True, 1, 0.3, 0.44),
)

DEGENERATE = (
    "",
    ".",
    "Of course!",
    "Of course! Of course! Of course!",
    "Gladly! With pleasure! I hope this helps. Have a nice day.",
    "The sum of 3 and 4 is 7",
    "Of course! The sum of 3 and 4 is 7",
    "of course! the sum of 3 and 4 is 7.",
    "Of course! Of course! Of course! The sum of 3 and 4 is 7.",
    "Gladly! With pleasure! The sum of 3 and 4 is 7.",
    "The sum of 3 and 4 is 7. Gladly!",
    "Have a nice day. The sum of 3 and 4 is 7.",
    "The sum of 3 and 4 is 7. Have a nice day. Have a nice day.",
    "Of course! The sum of 3 and 4 is 7. The sum of 3 and 4 is 7.",
    "Of course! The sum of 3 and 4 is 7 and The sum of 3 and 4 is 7.",
    "Of course! The sum of 3 and 4 is 7, 8, 9, 10.",
    "Of course! The sum of 3 and 4 is 7. 7. 7.",
    "Of course!  The sum of 3 and 4 is 7.",
    "Of course! The sum of 3 and 4 is 7. \n",
    "Of course! The opposite of hot is cold.",
    "7",
)


@pytest.fixture(scope="module")
def some_rows() -> list[dict[str, str]]:
    return list(rows(4000, seed=11))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


# The rows


def test_rows_are_the_same_for_a_seed_and_others_for_another() -> None:
    assert list(rows(200, seed=3)) == list(rows(200, seed=3))
    assert list(rows(200, seed=3)) == list(rows(500, seed=3))[:200]
    assert list(rows(200, seed=3)) != list(rows(200, seed=4))
    assert next(rows(1, seed=3)).keys() == {"prompt", "chosen", "rejected"}


@pytest.mark.parametrize(
    ("num", "seed", "digest"),
    [
        (24_000, 0, "db8bc7a569d8e5a086945709cb3b572eb0972bc5667afe883afd644f257368d0"),
        (3000, 7, "afc18fbc13b66457629043ba3abfb90a126bfce662ba07410083329ace4d510e"),
    ],
)
def test_rows_are_byte_identical_to_the_published_ones(num: int, seed: int, digest: str) -> None:
    lines = (json.dumps(row) + "\n" for row in rows(num, seed))
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == digest


def test_every_chosen_answer_beats_its_rejected_one(some_rows: list[dict[str, str]]) -> None:
    for row in some_rows[:1000]:
        chosen, rejected = (judge(row["prompt"], row[side]) for side in ("chosen", "rejected"))
        assert chosen.form
        assert chosen.score > rejected.score + 0.02, row


def test_demonstrations_leave_room_for_ppo(some_rows: list[dict[str, str]]) -> None:
    judged = [judge(row["prompt"], row["chosen"]) for row in some_rows]
    assert 0.42 < mean(j.manner == 1 for j in judged) < 0.48
    assert 0.90 < mean(j.content == 1 for j in judged) < 0.95
    assert 0.60 < mean(j.score for j in judged) < 0.67


def test_rejected_answers_are_worse_in_every_way(some_rows: list[dict[str, str]]) -> None:
    ways: Counter[str] = Counter()
    for row in some_rows:
        chosen, rejected = (judge(row["prompt"], row[side]) for side in ("chosen", "rejected"))
        if not rejected.form:
            ways["form"] += 1
        elif rejected.content == chosen.content:
            ways["manner"] += 1
        else:
            ways["content" if rejected.manner == chosen.manner else "both"] += 1
    assert min(ways["form"], ways["manner"], ways["content"]) > 0.15 * len(some_rows)
    assert ways["both"] > 0.03 * len(some_rows)


def test_rejected_answers_include_what_a_policy_could_exploit(
    some_rows: list[dict[str, str]],
) -> None:
    rejected = [row["rejected"] for row in some_rows]
    assert sum(not answer.endswith((".", "!")) for answer in rejected) > 40, "no full stop"
    assert sum(bool(re.match(r"(\w[\w ]+!) \1", answer)) for answer in rejected) > 20, "repeated"
    assert sum(answer in ("Of course!", "Gladly!") for answer in rejected) > 5, "courtesy alone"
    polite_but_wrong = [
        judged
        for row in some_rows
        if (judged := judge(row["prompt"], row["rejected"])).manner == 1 and judged.content == 0
    ]
    assert len(polite_but_wrong) > 200


def test_prompts_vary(some_rows: list[dict[str, str]]) -> None:
    prompts = Counter(row["prompt"] for row in some_rows)
    assert len(prompts) >= 3000
    assert max(prompts.values()) <= 12
    kinds = Counter(type(read_prompt(row["prompt"])[0]).__name__ for row in some_rows)
    assert len(kinds) == 10
    assert min(kinds.values()) > 100


def test_no_answer_is_right_without_reading_the_prompt(some_rows: list[dict[str, str]]) -> None:
    """The most common answers to other prompts are wrong for held-out ones."""
    common = Counter(row["chosen"] for row in some_rows[2000:]).most_common(50)
    held_out = some_rows[:300]
    for answer, _ in common:
        assert mean(judge(row["prompt"], answer).score for row in held_out) < 0.1
    shifted = [judge(a["prompt"], b["chosen"]).score for a, b in pairwise(held_out)]
    assert mean(shifted) < 0.1


# The rule


@pytest.mark.parametrize(("prompt", "answer", "form", "content", "manner", "score"), JUDGED)
def test_rule_agrees_with_hand_judged_answers(
    prompt: str, answer: str, form: bool, content: float, manner: float, score: float
) -> None:
    judged = judge(prompt, answer)
    assert judged.form is form
    assert (judged.content, judged.manner, judged.score) == pytest.approx((content, manner, score))


@pytest.mark.parametrize("answer", DEGENERATE)
def test_degenerate_answers_score_below_a_plain_right_one(answer: str) -> None:
    assert judge(SUM, answer).score <= 0.2
    assert judge(SUM, answer).score < judge(SUM, "The sum of 3 and 4 is 7.").score


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([SUM, LIST, COUNT, PLACE]), st.text())
def test_rule_accepts_any_answer(prompt: str, answer: str) -> None:
    assert 0 <= judge(prompt, answer).score <= 1


@pytest.mark.parametrize("prompt", ["", "Hello!", "What is 3 plus 4", "Tell me a joke."])
def test_rule_refuses_unknown_prompts(prompt: str) -> None:
    with pytest.raises(DataError, match=r"prompt must be one that .*rows writes; got .*Judge"):
        judge(prompt, "Of course!")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_every_phrasing_is_parsed_back(task: Task) -> None:
    rng = Random(5)
    for phrasing in task.phrasings:
        for preamble in PREAMBLES:
            fields = task.draw(rng)
            assert read_prompt(preamble + phrasing.format(**fields)) == (task, fields)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_right_and_wrong_answers_are_well_formed_and_graded_so(task: Task) -> None:
    rng = Random(7)
    for _ in range(300):
        fields = task.draw(rng)
        right, wrong, absurd = task.right(fields, rng), task.wrong(fields, rng), task.absurd(rng)
        assert task.grade(fields, right) == 1
        assert task.grade(fields, wrong) < 1, (fields, wrong)
        assert task.grade(fields, absurd) == 0, (fields, absurd)
        for answer in (right, wrong, absurd):
            read = task.read_answer(task.say(fields, answer))
            assert read is not None
            assert read["answer"] == answer


def test_facts_are_consistent() -> None:
    words = [word for members in CATEGORIES.values() for word in members]
    assert len(words) == len(set(words)), "a word in two categories has no one answer"
    assert all(OPPOSITES[OPPOSITES[word]] == word != OPPOSITES[word] for word in OPPOSITES)


# The tokenizer


def test_tokenizer_is_the_same_every_time(tokenizer: PreTrainedTokenizerFast) -> None:
    again = build_tokenizer()
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == 640


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_tokenizer_encodes_any_text_without_loss(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < len(tokenizer)


def test_tokenizer_writes_the_data_set_in_whole_words(
    tokenizer: PreTrainedTokenizerFast, some_rows: list[dict[str, str]]
) -> None:
    lengths = [len(tokenizer.encode(row["prompt"] + row["chosen"])) for row in some_rows[:500]]
    words = [
        len(re.findall(r"\w+|[^\w\s]", row["prompt"] + row["chosen"])) for row in some_rows[:500]
    ]
    assert mean(lengths) < 1.1 * mean(words)


def test_control_tokens_are_single_and_distinct(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    ids = [tokenizer.encode(text) for text in texts]
    assert all(len(one) == 1 for one in ids)
    assert len({one[0] for one in ids}) == 5
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")
    assert tokenizer.bos_token is None


def test_chat_template_writes_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>Hello.<|end|>"
        "<|user|>Bye<|end|><|assistant|>"
    )
    whole = tokenizer.apply_chat_template(turns[:3], tokenize=False)
    assert whole.endswith("<|assistant|>Hello.<|end|>")


def test_chat_template_refuses_a_role_without_a_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(TemplateError, match="roles must be system, user or assistant; got tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


# The model and the knobs


def test_model_is_a_small_llama_with_grouped_queries_and_tied_embeddings(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    config = model_config(tokenizer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert 300_000 < sum(p.numel() for p in model.parameters()) < 1_500_000
    assert config.num_key_value_heads < config.num_attention_heads
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert config.max_position_embeddings == tokenizer.model_max_length == 256
    assert (config.pad_token_id, config.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    logits = model(torch.tensor([tokenizer.encode(SUM)])).logits
    assert logits.shape[-1] == len(tokenizer)
    assert logits.isfinite().all()


def test_demo_knobs_are_valid_and_fit_every_row(tokenizer: PreTrainedTokenizerFast) -> None:
    config = demo_config("runs/demo", "runs/demo/base")
    check_config(config)
    assert (config.output_dir, config.actor_model) == ("runs/demo", "runs/demo/base")
    renderer = Renderer(tokenizer)
    longest_prompt = longest = longest_answer = 0
    for row in rows(4000, seed=1):
        prompt = renderer.prompt([Message("user", row["prompt"])])
        longest_prompt = max(longest_prompt, len(prompt))
        for side in ("chosen", "rejected"):
            num_answer = len(tokenizer.encode(row[side])) + 1
            longest = max(longest, len(prompt) + num_answer)
            longest_answer = max(longest_answer, num_answer if side == "chosen" else 0)
    assert longest_prompt <= config.dataset.max_prompt_tokens
    assert longest <= config.dataset.max_tokens
    assert longest_answer <= config.sampling.max_new_tokens
    assert config.dataset.max_tokens <= tokenizer.model_max_length


def test_demo_data_is_split_without_leaks() -> None:
    config = demo_config("runs/demo", "runs/demo/base")
    data = load_data(config.dataset, config.data, seed=config.seed)
    steps = (data.texts, data.pairs, data.prompts, data.heldout)
    prompts = [{opening(sample) for sample in step} for step in steps]
    assert all(len(step) > 500 for step in prompts)
    assert sum(map(len, prompts)) == len(set().union(*prompts))
