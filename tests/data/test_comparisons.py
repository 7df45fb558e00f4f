"""Rows of public data sets that compare several answers: pairs and rankings, and never a guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.config.schema import DataConfig
from tandem.data.dataset import load_data
from tandem.data.length import fit_ranked
from tandem.data.rows import RowProblem
from tandem.data.shapes.shaping import Shaped, to_sample
from tandem.types import Message, RankedRow, Sample, Source, TokenRow
from tests.jsonl import write_jsonl

HERE = Source("set", "set.jsonl", 3)
USER = Message("user", "2+2?")
PROMPT = (USER,)
Row = dict[str, Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(row: Row, **columns: str) -> Shaped:
    return to_sample(row, HERE, columns)


def parts(sample: Sample) -> tuple[Any, ...]:
    return sample.prompt, sample.chosen, sample.rejected


def problem(row: Row, **columns: str) -> str:
    with pytest.raises(RowProblem) as raised:
        read(row, **columns)
    return str(raised.value)


def rated(text: str, model: str, score: Any) -> Row:
    """One answer of UltraFeedback."""
    return {
        "annotations": {"helpfulness": {"Rating": "4", "Rationale": "Yes."}},
        "custom_system_prompt": "Be helpful.",
        "model": model,
        "principle": "helpfulness",
        "response": text,
        "critique": "Fine.",
        "overall_score": score,
        "fine-grained_score": 4.5,
    }


ULTRAFEEDBACK = {
    "source": "evol_instruct",
    "instruction": "2+2?",
    "models": ["alpaca-7b", "gpt-4", "llama-2-7b-chat", "wizardlm-7b"],
    "completions": [
        rated("5", "alpaca-7b", 2.0),
        rated("4", "gpt-4", "9.5"),
        rated("6", "llama-2-7b-chat", 2),
        rated("7", "wizardlm-7b", 1.5),
    ],
    "correct_answers": ["None"],
    "incorrect_answers": ["None"],
}
NECTAR = {
    "prompt": "\n\nHuman: 2+2?\n\nAssistant: ",
    "answers": [
        {"answer": "5", "model": "llama-2-7b-chat", "rank": 2.0},
        {"answer": "4", "model": "gpt-4", "rank": 1.0},
        {"answer": "6", "model": "mistral-7b-instruct-v0.1", "rank": 3.0},
    ],
    "turns": 1,
    "num_responses": 3,
    "source": ["sharegpt"],
    "good_natured": True,
}
WEBGPT = {
    "question": {"dataset": "eli5", "id": "7", "full_text": "2+2?"},
    "quotes_0": {"title": ["Sums"], "extract": ["..."]},
    "answer_0": "4",
    "tokens_0": {"prefix": [1], "completion": [2]},
    "score_0": 0.5,
    "answer_1": "5",
    "score_1": -0.5,
}
SHP = {
    "post_id": "a",
    "domain": "askmath_train",
    "history": "2+2?",
    "human_ref_A": "5",
    "human_ref_B": "4",
    "labels": 0,
    "score_A": 40,
    "score_B": 90,
    "score_ratio": 2.25,
}
PKU = {
    "prompt": "2+2?",
    "response_0": "5",
    "response_1": "4",
    "is_response_0_safe": True,
    "is_response_1_safe": True,
    "better_response_id": 1,
    "safer_response_id": 0,
}
HELPSTEER2 = {
    "split": "train",
    "prompt": "2+2?",
    "response_1": "4",
    "response_2": "5",
    "preference_strength": -2,
    "preference_statement": "Response 1 is better.",
}
HELPSTEER3 = {
    "domain": "general",
    "language": "english",
    "context": [user("Hi"), bot("Yes?"), user("2+2?")],
    "response1": "5",
    "response2": "4",
    "overall_preference": 3,
    "individual_preference": [{"score": 3, "reasoning": "Right."}],
}
ARENA = {
    "question_id": "58210e39b3fd4441a2bd4a518bb44c2d",
    "model_a": "chatglm-6b",
    "model_b": "koala-13b",
    "winner": "model_b",
    "conversation_a": [user("2+2?"), bot("5")],
    "conversation_b": [user("2+2?"), bot("4")],
    "turn": 1,
}
KAGGLE = {
    "id": 30192,
    "model_a": "gpt-4-1106-preview",
    "model_b": "gpt-4-0613",
    "prompt": '["2+2?"]',
    "response_a": '["4"]',
    "response_b": '["5"]',
    "winner_model_a": 1,
    "winner_model_b": 0,
    "winner_tie": 0,
}
TLDR = {
    "info": {
        "id": "t3_1", "post": "2+2?", "title": "Sums", "subreddit": "math",
        "site": None, "article": None,
    },
    "summaries": [
        {"text": " 5", "policy": "sup4_ppo", "note": "x"},
        {"text": " 4", "policy": "ref", "note": None},
    ],
    "choice": 1,
    "worker": "w",
}  # fmt: skip
REWARDBENCH2 = {
    "id": "7",
    "prompt": "2+2?",
    "chosen": ["4", "four"],
    "rejected": ["5", "6"],
    "num_correct": 2,
    "subset": "Ties",
}
PANDALM = {"instruction": "2+2?", "input": "", "response1": "4", "response2": "5", "winner": 1}

BOTH = "answer_a={},answer_b={}"


@pytest.mark.parametrize(
    ("row", "shape", "asked"),
    [
        (
            WEBGPT,
            f"prompt=question,{BOTH} by score_0 and score_1".format("answer_0", "answer_1"),
            {"question"},
        ),
        (
            {**WEBGPT, "question": json.dumps(WEBGPT["question"]), "score_1": "-0.5"},
            f"prompt=question,{BOTH} by score_0 and score_1".format("answer_0", "answer_1"),
            {"question"},
        ),
        (
            SHP,
            f"prompt=history,{BOTH} by labels".format("human_ref_A", "human_ref_B"),
            {"history"},
        ),
        (
            PKU,
            f"{BOTH},preferred=better_response_id".format("response_0", "response_1"),
            {"prompt"},
        ),
        (
            HELPSTEER2,
            f"{BOTH},preferred=preference_strength".format("response_1", "response_2"),
            {"prompt"},
        ),
        (
            {**HELPSTEER3, "context": [user("2+2?")]},
            f"prompt=context,{BOTH},preferred=overall_preference".format("response1", "response2"),
            {"context"},
        ),
        (
            ARENA,
            f"{BOTH},preferred=winner".format("conversation_a", "conversation_b"),
            set(),
        ),
        (
            {
                **ARENA,
                "conversation_a": json.dumps(ARENA["conversation_a"]),
                "conversation_b": json.dumps(ARENA["conversation_b"]),
            },
            f"{BOTH},preferred=winner".format("conversation_a", "conversation_b"),
            set(),
        ),
        (
            KAGGLE,
            f"{BOTH} by winner_model_a, winner_model_b and winner_tie".format(
                "response_a", "response_b"
            ),
            {"prompt"},
        ),
        (
            {**KAGGLE, "prompt": "2+2?", "response_a": "4", "response_b": "5"},
            f"{BOTH} by winner_model_a, winner_model_b and winner_tie".format(
                "response_a", "response_b"
            ),
            {"prompt"},
        ),
        (
            PANDALM,
            f"prompt=instruction,{BOTH},preferred=winner".format("response1", "response2"),
            {"instruction", "input"},
        ),
        (
            {
                "instruction": "2+2?",
                "input": "",
                "output_1": "5",
                "output_2": "4",
                "preference": 2,
                "raw_preference": 1,
            },
            f"prompt=instruction,{BOTH},preferred=preference".format("output_1", "output_2"),
            {"instruction", "input"},
        ),
        (
            {**PKU, "preference": 0},
            f"{BOTH},preferred=better_response_id".format("response_0", "response_1"),
            {"prompt"},
        ),
        ({"prompt": "2+2?", "answer_a": "4", "answer_b": "5", "preferred": "a"}, "", {"prompt"}),
        (
            {
                "prompt": [user("2+2?")],
                "answer_a": [bot("5")],
                "answer_b": bot("4"),
                "preferred": "answer_b",
                "margin": -3,
            },
            "",
            {"prompt"},
        ),
    ],
)
def test_two_answers_and_which_is_better(row: Row, shape: str, asked: set[str]) -> None:
    found = read(row)
    assert parts(found.sample) == (PROMPT, "4", "5")
    assert found.shape == ("two answers" + f" with {shape}" * bool(shape))
    assert found.sample.columns == {k: v for k, v in row.items() if k not in asked}
    assert (found.notes, found.sample.ranking, found.sample.margin) == ((), (), 0.0)


def test_a_pairs_prompt_has_all_of_its_turns() -> None:
    assert [t.content for t in read(HELPSTEER3).sample.prompt] == ["Hi", "Yes?", "2+2?"]
    panda = read({**PANDALM, "input": "Think.", "system_prompt": "Be brief."})
    assert [t.content for t in panda.sample.prompt] == ["Be brief.", "2+2?\n\nThink."]
    assert panda.sample.columns.keys() == {"response1", "response2", "winner"}
    two = {"conversation_a": [user("Hi"), bot("Yes?"), user("2+2?"), bot("4")], "winner": "model_a"}
    two["conversation_b"] = [*two["conversation_a"][:-1], bot("5")]
    assert [t.content for t in read(two).sample.prompt] == ["Hi", "Yes?", "2+2?"]
    transcripts = {
        f"answer_{end}": f"\n\nHuman: 2+2?\n\nAssistant: {text}"
        for end, text in (("a", "4"), ("b", "5"))
    }
    assert parts(read({**transcripts, "preferred": "A"}).sample) == (PROMPT, "4", "5")


def test_summaries_are_of_a_post_or_an_article() -> None:
    found = read(TLDR)
    assert found.sample.prompt[0].content == (
        "SUBREDDIT: r/math\n\nTITLE: Sums\n\nPOST: 2+2?\n\nTL;DR:"
    )
    assert (found.sample.chosen, found.sample.rejected) == (" 4", " 5")
    assert found.shape == "two answers with prompt=info,answers=summaries by choice"
    assert found.sample.columns == {k: v for k, v in TLDR.items() if k != "info"}
    news = {**TLDR, "info": {"id": "c", "post": None, "title": "Sums", "article": "Once."}}
    assert read(news).sample.prompt[0].content == "Article:\n\nOnce.\n\nTL;DR:"
    told = problem({**TLDR, "choice": 2}, preferred="choice")
    assert "choice must be the place of the better one of summaries, 0 or 1; found the num" in told
    assert read(TLDR, preferred="choice").sample == found.sample
    asked = read({**TLDR, "prompt": "2+2?"})
    assert (parts(asked.sample), asked.sample.columns) == ((PROMPT, " 4", " 5"), TLDR)
    assert asked.shape == "two answers with answers=summaries by choice"
    for info, told in (
        ({"id": "t3_1"}, "info must have a post or an article; found an object"),
        ({"post": " "}, "info must have a post or an article; found an object"),
        ({"post": ["x"]}, "info.post must be text; found a list of 1"),
        ({"post": "x", "title": 5}, "info.title must be text; found the number 5"),
        ({"article": 5}, "info.article must be text; found the number 5"),
        ("x", "info must be an object with a post or an article; found 'x'"),
    ):
        assert told in problem({**TLDR, "info": info})
    bare = {"post": "2+2?", "title": " ", "article": 5}  # what is not read may be anything
    assert read({**TLDR, "info": bare}).sample.prompt[0].content == "POST: 2+2?\n\nTL;DR:"
    assert "summaries must be a list of two objects with text; found '4'" in (
        problem({**TLDR, "summaries": "4"})
    )
    assert "summaries must be a list of two objects with text; found a list of 1" in (
        problem({**TLDR, "summaries": TLDR["summaries"][:1]})
    )


@pytest.mark.parametrize(
    ("texts", "note"),
    [
        ((None, " 4"), "summaries[0] is blank"),
        ((" 5", " "), "summaries[1] is blank"),
        (("", None), "summaries[0] and summaries[1] are blank"),
        (("4", " 4"), "summaries[0] and summaries[1] are the same answer"),
        ((4, "5"), "summaries[0] and summaries[1] cannot both be read as answers"),
        (("4", ["5"]), "summaries[0] and summaries[1] cannot both be read as answers"),
        (("4", {"a": 5}), "summaries[0] and summaries[1] cannot both be read as answers"),
    ],
)
@pytest.mark.parametrize("asked", [{}, {"prompt": "2+2?"}])
def test_summaries_are_told_apart(texts: tuple[Any, Any], note: str, asked: Row) -> None:
    row = {**TLDR, **asked, "summaries": [{"text": text} for text in texts]}
    found = read(row)
    assert found.notes == (f"{note}, not compared: a prompt alone",)
    assert parts(found.sample)[1:] == (None, None)
    assert found.sample.prompt == (PROMPT if asked else read(TLDR).sample.prompt)
    as_texts = read({**row, "summaries": list(texts)})
    assert as_texts.notes == found.notes


def test_a_bool_is_not_the_place_of_the_better_summary() -> None:
    for value in (True, False):
        told = read({**TLDR, "choice": value}).notes
        assert told == ("choice is neither 0 nor 1, not compared: a prompt alone",)


@pytest.mark.parametrize(
    ("row", "shape", "ranking", "asked"),
    [
        (
            ULTRAFEEDBACK,
            (
                "scored answers with prompt=instruction,answers=completions.response,"
                "scores=completions.overall_score"
            ),
            ((1, "4"), (2, "5"), (2, "6"), (3, "7")),
            "instruction",
        ),
        (
            NECTAR,
            "ranked answers with answers=answers.answer,ranks=answers.rank",
            ((1, "4"), (2, "5"), (3, "6")),
            "prompt",
        ),
        (
            {
                "question": "2+2?",
                "answers": [
                    {"answer_id": 1, "text": "5", "pm_score": 0, "selected": False},
                    {"answer_id": 2, "text": "4", "pm_score": 3, "selected": True},
                ],
            },
            "scored answers with prompt=question,answers=answers.text,scores=answers.pm_score",
            ((1, "4"), (2, "5")),
            "question",
        ),
        (
            {"input": "2+2?", "generations": ["5", "4"], "ratings": [1.0, 5.0], "model": "x"},
            "scored answers with prompt=input,answers=generations,scores=ratings",
            ((1, "4"), (2, "5")),
            "input",
        ),
        (
            {"instruction": "2+2?", "generations": ["5", "4", "6"], "rating": ["1", "5", "5"]},
            "scored answers with prompt=instruction,answers=generations,scores=rating",
            ((1, "4"), (1, "6"), (2, "5")),
            "instruction",
        ),
        (
            {"prompt": "2+2?", "answers": ["5", "4"], "scores": [-1, 0.5]},
            "scored answers",
            ((1, "4"), (2, "5")),
            "prompt",
        ),
        (
            {
                "prompt": "2+2?",
                "answers": [{"said": "5", "by": 1}, {"said": "4", "by": 2}],
                "scores": [0, True],
            },
            "scored answers with answers=answers.said",
            ((1, "4"), (2, "5")),
            "prompt",
        ),
        (
            {"prompt": "2+2?", "answers": [{"text": "5", "n": 1}, {"text": "4"}], "ranks": [2, 1]},
            "ranked answers with answers=answers.text",
            ((1, "4"), (2, "5")),
            "prompt",
        ),
        (
            REWARDBENCH2,
            "lists of chosen and rejected answers",
            ((1, "4"), (1, "four"), (2, "5"), (2, "6")),
            "prompt",
        ),
        (
            {"question": "2+2?", "chosen": "4", "rejected": ["5", "6"]},
            "lists of chosen and rejected answers with prompt=question",
            ((1, "4"), (2, "5"), (2, "6")),
            "question",
        ),
    ],
)
def test_lists_of_answers_become_rankings(
    row: Row, shape: str, ranking: tuple[tuple[int, str], ...], asked: str
) -> None:
    found = read(row)
    assert found.sample.ranking == ranking
    assert parts(found.sample) == (PROMPT, ranking[0][1], ranking[-1][1])
    assert (found.shape, found.notes) == (shape, ())
    assert found.sample.columns == {k: v for k, v in row.items() if k != asked}
    assert found.sample.grade is None


def test_answers_that_cannot_be_ranked_are_left_out_and_noted() -> None:
    row = {"prompt": "2+2?", "answers": ["4", "5", "6", " ", "4 ", "7"]}
    scores = [4, "N/A", 3, 9, 1, None]
    found = read({**row, "scores": scores})
    assert found.sample.ranking == ((1, "6"), (2, "4"))  # its mean is 2.5
    assert found.notes == (
        "with an answer whose score is no number, left out of the ranking",
        "with a blank answer, left out of the ranking",
        "with the same answer twice, ranked once by the mean of its scores",
    )
    lists = read({**REWARDBENCH2, "chosen": [None, "4"]})
    assert lists.sample.ranking == ((1, "4"), (2, "5"), (2, "6"))
    assert lists.notes == ("with a blank answer, left out of the ranking",)
    absent = {**ULTRAFEEDBACK, "completions": [{"response": "5", "overall_score": 1.0},
                                               {"response": "4", "overall_score": 2.0},
                                               {"response": "6"}, None]}  # fmt: skip
    assert read(absent).sample.ranking == ((1, "4"), (2, "5"))


@pytest.mark.parametrize(
    "scores", [[1, 1, 1], ["N/A", 1, None], [float("nan"), 1, "inf"], [2, 2, 2]]
)
def test_a_list_without_two_different_scores_is_a_prompt_alone(scores: list[Any]) -> None:
    kept = {"answers": ["4", "5", "6"], "scores": scores, "id": 1}
    found = read({"prompt": "2+2?", **kept})
    assert found.sample == Sample(HERE, PROMPT, columns=kept)
    assert found.shape == "prompt"
    assert found.notes[-1] == (
        "no two answers in answers differ in scores, so none are compared: a prompt alone"
    )
    assert found.unread == ()
    one = {**ULTRAFEEDBACK, "completions": ULTRAFEEDBACK["completions"][:1]}
    assert read(one).sample.ranking == ()
    assert read(one).shape == "prompt with prompt=instruction"


@pytest.mark.parametrize(
    ("row", "note"),
    [
        ({**WEBGPT, "score_1": 0.5}, "a tie by score_0 and score_1, not compared"),
        ({**WEBGPT, "score_1": None}, "score_0 and score_1 are not both numbers, not compared"),
        ({**HELPSTEER2, "preference_strength": 0}, "a tie by preference_strength, not compared"),
        (
            {**HELPSTEER3, "overall_preference": 0, "context": [user("2+2?")]},
            "a tie by overall_preference, not compared",
        ),
        ({**ARENA, "winner": "tie (bothbad)"}, "a tie by winner, not compared"),
        ({**ARENA, "winner": "both_bad"}, "a tie by winner, not compared"),
        (
            {**KAGGLE, "winner_model_a": 0, "winner_tie": 1},
            "a tie by winner_model_a, winner_model_b and winner_tie, not compared",
        ),
        ({**PANDALM, "winner": " Tie "}, "a tie by winner, not compared"),
        (
            {**PKU, "better_response_id": None},
            "two answers and no value in better_response_id, not compared",
        ),
        (
            {**PKU, "response_1": " 5"},
            "response_0 and response_1 are the same answer, not compared",
        ),
        (
            {
                **ARENA,
                "conversation_a": [user("2+2?"), bot("5"), user("Sure?"), bot("Yes.")],
                "conversation_b": [user("2+2?"), bot("4"), user("Sure?"), bot("Yes!")],
            },
            "conversation_a and conversation_b differ before their last answers, not compared",
        ),
    ],
)
def test_what_is_not_compared_is_a_prompt_alone_and_noted(row: Row, note: str) -> None:
    found = read(row)
    assert parts(found.sample) == (PROMPT, None, None)
    assert found.notes == (f"{note}: a prompt alone",)
    assert found.shape.partition(" with ")[0] == "prompt"
    assert found.unread == ()
    gone = ("prompt", "question", "context", "instruction", "input")
    assert found.sample.columns == {k: v for k, v in row.items() if k not in gone}


@pytest.mark.parametrize(
    ("row", "note"),
    [
        *(
            (
                {**PANDALM, "winner": value},
                "winner names neither answer and no tie (a, b, a column's name, tie)",
            )
            for value in ("gpt-4", "no preference", "N/A", "Response 1", "[[A]]", True, [1])
        ),
        *(
            (
                {**PANDALM, "winner": value},
                (
                    "numbers in winner could mean either answer (write a, b or tie, or map "
                    "another column to preferred)"
                ),
            )
            for value in (0, 3, "-1")
        ),
        (
            {**ARENA, "winner": "koala-13b"},
            "winner names neither answer and no tie (a, b, a column's name, tie)",
        ),
        ({**HELPSTEER2, "preference_strength": "strong"}, "preference_strength is no number"),
        *(({**SHP, "labels": value}, "labels is neither 1 nor 0") for value in (2, True, False)),
        (
            {**KAGGLE, "winner_model_b": 1},
            (
                "winner_model_a, winner_model_b and winner_tie are not 1 in one place and 0 "
                "elsewhere"
            ),
        ),
        *(
            (
                {**KAGGLE, "response_b": value},
                "response_b has not one text for each turn of prompt",
            )
            for value in ('["5", "6"]', "[null]", '[" "]', "5", None, "")
        ),
        (
            {"prompt": "2+2?", "info": {"post": "x"}, "summaries": ["4", "5"], "choice": "B"},
            "choice is neither 0 nor 1",
        ),
        *(
            ({**PKU, "response_0": value}, "response_0 is blank")
            for value in (None, "", " ", [], [bot("")])
        ),
        (
            {**PKU, "response_0": None, "response_1": " "},
            "response_0 and response_1 are blank",
        ),
        (
            {**PKU, "response_0": [bot("5"), user("Why?")]},
            "response_0 and response_1 cannot both be read as answers",
        ),
        (
            {**PKU, "response_0": [bot("5")], "response_1": [{"role": "judge", "content": "4"}]},
            "response_0 and response_1 cannot both be read as answers",
        ),
        *(
            (
                {**PKU, "response_0": value},
                "response_0 and response_1 cannot both be read as answers",
            )
            for value in (4, 4.5, True, float("nan"), {}, {"a": 1}, [1], [["x"]], ["5"])
        ),
        (
            {
                **PKU,
                "response_0": [user("2+2?"), {"role": "judge", "content": "4"}],
                "response_1": [user("2+2?"), bot("4")],
            },
            "response_0 and response_1 cannot both be read as answers",
        ),
        (
            {
                **PKU,
                "response_0": [bot("Let me see."), user("Well?"), bot("4")],
                "response_1": [bot("5")],
            },
            "response_0 and response_1 differ before their last answers",
        ),
        (
            {"prompt": "2+2?", "responses": ["4", "5"], "scores": [1]},
            "scores has not one number for each of responses",
        ),
        (
            {"prompt": "2+2?", "generations": ["4", "5"], "ratings": [1, 2, 3]},
            "ratings has not one number for each of generations",
        ),
        *(
            (
                {"prompt": "2+2?", "responses": value, "scores": [1, 2]},
                "responses holds messages, and only texts can be ranked",
            )
            for value in ([bot("4"), bot("5")], [[bot("4")], [bot("5")]])
        ),
    ],
)
def test_what_is_found_by_name_and_cannot_be_read_is_a_prompt_alone_and_noted(
    row: Row, note: str
) -> None:
    found = read(row)
    assert parts(found.sample) == (PROMPT, None, None)
    assert found.notes == (f"{note}, not compared: a prompt alone",)
    assert found.shape.partition(" with ")[0] == "prompt"
    gone = ("prompt", "instruction", "input", "history")
    assert found.sample.columns == {k: v for k, v in row.items() if k not in gone}


@pytest.mark.parametrize(
    ("row", "columns", "told"),
    [
        (PANDALM | {"winner": "gpt-4"}, {"preferred": "winner"}, "winner must name the better"),
        (
            HELPSTEER2 | {"preference_strength": "strong"},
            {"preferred": "preference_strength"},
            (
                "preference_strength must be a number, below 0 where response_1 is better, above 0 "
                "where response_2 is; found 'strong'"
            ),
        ),
        (
            SHP | {"labels": 2},
            {"preferred": "labels"},
            "labels must be 1 (human_ref_A is better) or 0 (human_ref_B is); found the number 2",
        ),
        (SHP | {"labels": True}, {"preferred": "labels"}, "(human_ref_B is); found true"),
        (TLDR | {"choice": True}, {"preferred": "choice"}, "one of summaries, 0 or 1; found true"),
        *(
            (
                {"prompt": "2+2?", "x": "4", "y": value, "v": "a"},
                {"answer_a": "x", "answer_b": "y", "preferred": "v"},
                "y must not be blank; found ",
            )
            for value in (None, " ", [])
        ),
        (
            {"prompt": "2+2?", "x": [bot("4")], "y": [bot("5"), user("Why?")], "v": "a"},
            {"answer_a": "x", "answer_b": "y", "preferred": "v"},
            "y must end with an assistant turn; found user last",
        ),
        (
            {"prompt": "2+2?", "responses": ["4", "5"], "marks": [1]},
            {"scores": "marks"},
            "marks must be a list of 2 numbers, one for each of responses; found a list of 1",
        ),
        (
            {"prompt": "2+2?", "x": "4", "y": 5, "v": "a"},
            {"answer_a": "x", "answer_b": "y", "preferred": "v"},
            "y must be text or messages; found the number 5",
        ),
        (
            {"prompt": "2+2?", "x": [4], "y": [5], "v": "a"},
            {"answer_a": "x", "answer_b": "y", "preferred": "v"},
            "x must be text or messages; found a list of 1",
        ),
        (
            {"prompt": "2+2?", "x": {"said": "4"}, "y": "5", "v": "a"},
            {"answer_a": "x", "answer_b": "y", "preferred": "v"},
            "x must have role and content (or from and value) in every turn; found columns said",
        ),
        (
            {"q": None, "outs": ["4", "5"], "marks": [1, 2]},
            {"prompt": "q", "answers": "outs", "scores": "marks"},
            "q must have a value, mapped to the role prompt; found null",
        ),
        (
            {"q": "2+2?", "outs": ["4", "5"], "places": None},
            {"prompt": "q", "answers": "outs", "ranks": "places"},
            "places must have a value, mapped to the role ranks; found null",
        ),
        (
            {"prompt": "2+2?", "llama2": "4", "claude1": "5", "vote": 1},
            {"answer_a": "llama2", "answer_b": "claude1", "preferred": "vote"},
            "Other numbers could mean either answer: write a, b or tie in their place.",
        ),
    ],
)
def test_what_is_mapped_and_cannot_be_read_is_a_bad_row(
    row: Row, columns: dict[str, str], told: str
) -> None:
    assert told in problem(row, **columns)


CALLS = [
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": b}}}]}
    for b in (2, 3)
]  # fmt: skip


def test_answers_are_the_same_if_they_call_the_same_too() -> None:
    row = {"prompt": "2+2?", "response_a": [CALLS[0]], "response_b": [CALLS[1]], "winner": "a"}
    found = read(row)
    assert found.notes == ()
    assert [answer.tool_calls.count('"b": 2') for answer in parts(found.sample)[1:]] == [1, 0]
    same = read({**row, "response_b": [CALLS[0]]})
    assert "are the same answer, not compared" in same.notes[0]


def test_dialogs_of_which_one_has_a_system_turn_are_a_prompt() -> None:
    system = {"role": "system", "content": "Be brief."}
    row = {**ARENA, "conversation_b": [system, user("2+2?"), bot("4")]}
    found = read(row)
    assert parts(found.sample) == (PROMPT, None, None)
    assert "differ before their last answers, not compared" in found.notes[0]
    both = read({**row, "conversation_a": [system, user("2+2?"), bot("5")]})
    assert [turn.role for turn in both.sample.prompt] == ["system", "user"]
    asked = read({**ARENA, "winner": "tie", "question": "3+3?", "conversation_b": [user("1?")]})
    assert asked.sample.prompt == (Message("user", "3+3?"),)
    own = read({**ARENA, "prompt": [user("2+2?")]})
    assert parts(own.sample) == (PROMPT, "4", "5")


def test_several_turns_of_an_arena_that_cannot_be_read_leave_the_first() -> None:
    row = {**KAGGLE, "prompt": '["2+2?", "3+3?"]', "response_a": '["4", "6"]'}
    found = read({**row, "response_b": '["4"]'})
    assert (found.sample.prompt, found.sample.chosen) == (PROMPT, None)
    found = read({**row, "response_b": '["4", "7"]'})
    assert ([t.content for t in found.sample.prompt], found.sample.chosen) == (
        ["2+2?", "4", "3+3?"],
        "6",
    )


@pytest.mark.parametrize(
    ("own", "chosen"), [({"completion": "GOLD"}, "GOLD"), ({"ranking": ["GOLD", "x"]}, "GOLD")]
)
@pytest.mark.parametrize("asked", ["prompt", "question"])
@pytest.mark.parametrize(
    "several",
    [
        {"responses": [{"response": "4", "score": 1}, {"response": "5", "score": 2}]},
        {"answer_0": "4", "answer_1": "5", "score_0": 1, "score_1": 2},
        {"response_a": "GOLD", "response_b": "x", "winner": "b"},
    ],
)
def test_an_answer_of_the_rows_own_is_the_one_to_learn(
    own: Row, chosen: str, asked: str, several: Row
) -> None:
    found = read({asked: "2+2?", **own, **several})
    assert (found.sample.prompt, found.sample.chosen, found.notes) == (PROMPT, chosen, ())
    assert found.shape.partition(" with ")[0] == next(iter(own))
    assert set(several) <= set(found.sample.columns)


def test_a_map_of_the_verdict_or_the_scores_counts_beside_an_answer_of_the_rows_own() -> None:
    row = {"question": "2+2?", "completion": "GOLD", "response_1": "4", "response_2": "5", "v": 2}
    assert parts(read(row, preferred="v").sample) == (PROMPT, "5", "4")
    row = {"question": "2+2?", "ranking": ["a", "b"], "responses": ["4", "5"], "votes": [1, 2]}
    assert read(row, scores="votes").sample.ranking == ((1, "5"), (2, "4"))


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "p", "chosen": "good", "rejected": "bad"},
        {"prompt": "p", "chosen": "good", "rejected": "bad", "grade": "g"},
        {"prompt": "p", "chosen": "good", "rejected": "bad", "margin": "g", "label": "t"},
    ],
)
def test_mapped_lists_of_chosen_and_rejected(columns: dict[str, str]) -> None:
    row = {"p": "2+2?", "good": ["4", "4 "], "bad": ["5"], "g": 7, "t": 1}
    found = read(row, **columns)
    assert found.sample.ranking == ((1, "4"), (2, "5"))
    assert found.sample.columns == {k: v for k, v in row.items() if k != "p"}
    extra = [f"with a {role} beside several answers, not read" for role in columns][3:]
    assert sorted(found.notes) == sorted(["with the same answer twice, ranked once", *extra])
    same = {"prompt": "2+2?", "good": ["4"], "rejected": "5"}
    assert read(same, chosen="good").sample.ranking == ((1, "4"), (2, "5"))
    assert read(REWARDBENCH2, grade="num_correct").sample.grade is None


FUNCTION = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("role", "value", "notes"),
    [
        ("tools", [{"type": "function", "function": FUNCTION}], []),
        ("system", "Be brief.", []),
        *(
            (role, value, [f"with a {role} beside several answers, not read"])
            for role, value in (("label", True), ("margin", 1), ("grade", 3), ("label", "fine"))
        ),
    ],
)
def test_a_map_of_what_describes_no_answers_leaves_the_comparison(
    role: str, value: Any, notes: list[str]
) -> None:
    for row in (PANDALM, ULTRAFEEDBACK, {**PKU, "better_response_id": 0}):
        found = read({**row, "x": value}, **{role: "x"})
        unmapped = read(row)
        assert parts(found.sample)[1:] == parts(unmapped.sample)[1:]
        assert found.sample.ranking == unmapped.sample.ranking
        assert (found.shape, list(found.notes)) == (unmapped.shape, notes)
        assert (bool(found.sample.tools), found.sample.margin) == (role == "tools", 0)
        assert found.sample.prompt[-1].content == "2+2?"
        assert (found.sample.prompt[0].role == "system") == (role == "system")
        assert ("x" in found.sample.columns) == (role != "system")
    single = {"prompt": "2+2?", "response": "4", "response_1": "5", "response_2": "6", "winner": 1}
    if role in ("tools", "system"):  # the single answer is not mapped, and none of two is it
        found = read({**single, "x": value}, **{role: "x"})
        assert (found.shape, found.sample.chosen) == ("prompt", None)


@pytest.mark.parametrize(
    ("row", "columns", "told"),
    [
        (
            {"q": "2+2?", "response_1": "4", "response_2": "5", "vote": 1},
            {"prompt": "q", "preferred": "vote"},
            (
                "the row must have answer_a and answer_b mapped too; found a map of prompt and "
                "preferred. Write ::prompt=q,answer_a=response_1,answer_b=response_2,"
                "preferred=vote after"
            ),
        ),
        (
            {"q": "2+2?", "response_1": "4", "response_2": "5", "vote": 1, "sys": "x"},
            {"preferred": "vote", "system": "sys"},
            (
                "have prompt and answer_a and answer_b mapped too; found a map of preferred and "
                "system. Write ::prompt=COLUMN,answer_a=response_1,answer_b=response_2,"
                "preferred=vote,system=sys after"
            ),
        ),
        (
            {"question": "2+2?", "cands": ["4", "5"], "rw": [1, 2]},
            {"answers": "cands", "scores": "rw"},
            (
                "have prompt mapped too; found a map of answers and scores. Write "
                "::prompt=question,answers=cands,scores=rw after"
            ),
        ),
        (
            {"q": "2+2?", "responses": ["4", "5"], "rw": [1, 2]},
            {"prompt": "q", "scores": "rw"},
            "Write ::prompt=q,answers=responses,scores=rw after",
        ),
        (
            {"q": "2+2?", "outs": ["4", "5"], "rw": [1, 2]},
            {"prompt": "q", "answers": "outs"},
            (
                "have scores mapped too; found a map of prompt and answers. Write ::prompt=q,"
                "answers=outs,scores=COLUMN after"
            ),
        ),
        (
            {"prompt": "2+2?", "x": "4", "y": "5"},
            {"answer_a": "x", "answer_b": "y"},
            (
                "have preferred mapped too; found a map of answer_a and answer_b. Write "
                "::answer_a=x,answer_b=y,preferred=COLUMN after"
            ),
        ),
    ],
)
def test_a_map_of_too_few_roles_is_told_as_the_map_to_write(
    row: Row, columns: dict[str, str], told: str
) -> None:
    assert told in problem(row, **columns)
    other = problem({**row, "x": "4"}, **columns, completion="x")
    assert "have the columns of a known shape" in other


def test_more_maps_read_as_the_names_do() -> None:
    assert read(SHP, preferred="labels").sample == read(SHP).sample
    steps = {"prompt": "2+2?", "completions": ["4", "5"], "ratings": [2, 1]}
    assert read(steps, scores="ratings").sample.ranking == ((1, "4"), (2, "5"))
    mapped = read(steps, prompt="prompt", answers="completions", scores="ratings")
    assert mapped.sample.ranking == ((1, "4"), (2, "5"))
    both = {"q": "2+2?", "response_1": "4", "response_2": "5", "vote": 1, "sys": "Hm."}
    found = read({**both, "prompt": "2+2?"}, preferred="vote", system="sys")
    assert (found.sample.chosen, found.sample.prompt[0].role) == ("4", "system")


@pytest.mark.parametrize(
    ("answers", "numbers", "ranking", "notes"),
    [
        ('["5", "4"]', {"scores": "[1, 2]"}, ((1, "4"), (2, "5")), 0),
        ('["5", "4"]', {"ranks": "[2, 1]"}, ((1, "4"), (2, "5")), 0),
        ('[{"text": "5", "score": 1}, {"text": "4", "score": 3}]', {}, ((1, "4"), (2, "5")), 0),
        (["5", "4"], {"ranks": [2.0, 1.5]}, ((1, "4"), (2, "5")), 0),
        (["5", "4", " "], {"ranks": [2, 1, 3]}, ((1, "4"), (2, "5")), 1),
        (["5", None, "4"], {"ranks": [2, 3, 1]}, ((1, "4"), (2, "5")), 1),
        ([{"text": "5"}, {"text": 6}, {"text": "4"}], {"scores": [2, 3, 4]},
         ((1, "4"), (2, "5")), 1),
    ],
)  # fmt: skip
def test_lists_in_json_text_and_ranks_with_blanks(
    answers: Any, numbers: Row, ranking: tuple[tuple[int, str], ...], notes: int
) -> None:
    row = {"prompt": "2+2?", "answers": answers, **numbers}
    found = read(row)
    assert (found.sample.ranking, len(found.notes)) == (ranking, notes)
    assert found.sample.columns == {k: v for k, v in row.items() if k != "prompt"}


@pytest.mark.parametrize(
    ("names", "value", "better"),
    [
        (("response_0", "response_1"), 0, 0),
        (("response_0", "response_1"), "1", 1),
        (("response_0", "response_1"), 1.0, 1),
        (("response_0", "response_1"), "A", 0),
        (("response_1", "response_0"), 0, 1),
        (("response_1", "response_2"), 2, 1),
        (("response_1", "response_2"), "model_b", 1),
        (("ours", "theirs"), "theirs", 1),
        (("ours", "theirs"), " b", 1),
        (("data", "web"), "a", 0),
        (("web", "data"), "a", 0),
        (("text_b", "text_a"), "a", 1),
        (("text_b", "text_a"), "model_b", 0),
        (("text_b", "text_a"), "Text_A", 1),
    ],
)
def test_words_and_numbers_of_a_mapped_verdict(
    names: tuple[str, str], value: Any, better: int
) -> None:
    row = {"q": "2+2?", names[0]: "first", names[1]: "second", "v": value, "x": 1}
    found = read(row, prompt="q", answer_a=names[0], answer_b=names[1], preferred="v")
    assert found.sample.chosen == ("first", "second")[better]
    assert found.sample.columns == {k: row[k] for k in (*names, "v", "x")}
    assert found.shape == f"two answers with answer_a={names[0]},answer_b={names[1]},preferred=v"


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (("response_1", "response_2"), 0),
        (("response_0", "response_1"), 2),
        (("response_0", "response_1"), -1),
        (("response_0", "response_1"), 1.0000001),
        (("answer_a", "answer_b"), 0),
        (("answer_a", "answer_b"), "1"),
        (("v10", "v11"), 1),
        (("llama2", "llama3"), 2),
        (("answer_a", "answer_b"), "gpt-4"),
        (("answer_a", "answer_b"), True),
        (("answer_a", "answer_b"), [1]),
    ],
)
def test_a_verdict_that_could_mean_either_answer_is_a_bad_row(
    names: tuple[str, str], value: Any
) -> None:
    row = {"prompt": "2+2?", names[0]: "first", names[1]: "second", "best": value}
    told = problem(row, answer_a=names[0], answer_b=names[1], preferred="best")
    assert told.startswith("best must name the better answer: ")
    assert f"a ({names[0]}), b ({names[1]}), its column's name, or tie; found " in told
    is_number = str(value).lstrip("-").replace(".", "").isdigit() and value is not True
    assert ("Other numbers could mean either answer: write a, b or tie" in told) == is_number


def test_a_map_of_the_verdict_alone_leaves_the_rest_to_the_names() -> None:
    found = read(PKU, preferred="safer_response_id")
    assert parts(found.sample) == (PROMPT, "5", "4")
    assert found.sample.columns["better_response_id"] == 1
    panda = {**PANDALM, "input": "Think.", "annotator1": 2}
    del panda["winner"]
    assert parts(read(panda).sample)[1] is None
    found = read(panda, preferred="annotator1")
    assert (found.sample.prompt[0].content, found.sample.chosen) == ("2+2?\n\nThink.", "5")
    assert "annotator1 must name the better answer: 1 (response1), 2 (response2), a (" in (
        problem({**panda, "annotator1": 0}, preferred="annotator1")
    )
    assert read(HELPSTEER2, preferred="preference_strength").sample.chosen == "4"
    for answers in ({"response1": 4}, {"response1": 4, "response2": 5}):
        unread = read({**panda, "annotator1": 2, **answers}, preferred="annotator1")
        assert "response1 and response2 cannot both be read as answers" in unread.notes[0]
    row = {"question": "2+2?", "responses": ["4", "5"], "upvotes": [7, 3], "flags": [0, 0]}
    assert read(row).unread == ("responses", "upvotes", "flags")
    assert read(row, scores="upvotes").sample.ranking == ((1, "4"), (2, "5"))


def test_a_map_of_answers_and_scores() -> None:
    row = {"q": "2+2?", "outs": [{"said": "5"}, {"said": "4"}], "marks": [1, 2], "prompt": "else"}
    found = read(row, prompt="q", answers="outs", scores="marks")
    assert parts(found.sample) == (PROMPT, "4", "5")
    assert found.sample.columns == {k: v for k, v in row.items() if k != "q"}
    assert found.shape == "scored answers with answers=outs.said,scores=marks"
    mapped = {"prompt": "q", "answers": "outs", "scores": "marks"}
    for change, told in (
        (
            {"outs": "4"},
            "outs must be a list of texts, or of objects with one text each; found '4'",
        ),
        ({"outs": [4, 5]}, "outs must be a list of texts, or of objects"),
        (
            {"marks": [1]},
            "marks must be a list of 2 numbers, one for each of outs; found a list of",
        ),
        ({"marks": 1}, "marks must be a list of 2 numbers, one for each of outs; found the number"),
        ({"outs": [{"text": 5}, {"text": "4"}]}, "outs.text must be text; found the number 5"),
        ({"q": " "}, "q must not be blank"),
    ):
        assert told in problem({**row, **change}, **mapped)
    scored = [{"text": "4", "score": 1, "rating": 2}, {"text": "5", "score": 2, "rating": 1}]
    assert "outs must have its scores in one column; found outs.score, outs.rating may" in (
        problem({**row, "outs": scored}, prompt="q", answers="outs")
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "response_a": "4", "response_b": "5"},  # nothing says which is better
        {"prompt": "2+2?", "response_1": "4", "response_2": "5", "response_3": "6", "winner": 1},
        {"prompt": "2+2?", "response_1": "4", "response_2": None, "response_3": "", "winner": 1},
        {"prompt": "2+2?", "response_1": "", "response_2": None, "winner": None},
        {"prompt": "2+2?", "completions": ["1 + 1", "2 + 2", "4"], "ratings": [1, 1, -1]},
        {"prompt": "2+2?", "answers": ["4", "5"], "scores": [{"right": 1}, {"right": 0}]},
        {"prompt": "2+2?", "answers": ["4", "5"], "scores": [[1, 2], [3, 4]]},
        {"prompt": "2+2?", "completions": [{"response": "4", "rating": {"a": 1}}]},
        {"prompt": "2+2?", "info": {"post": "x"}, "summaries": ["a", "b", "c"], "choice": "B"},
        {"prompt": "2+2?", "info": {"post": "x"}, "summaries": ["a", "b"], "choice_text": "B"},
        {"prompt": "2+2?", "answer_a": "4", "answer_b": "5", "answer_c": "6", "preferred": "a"},
        {"prompt": "2+2?", "conversation_a": "4", "conversation_b": "5", "winner": "model_a"},
        {"prompt": "2+2?", "response_a": "4", "response_b": "5", "preference_strength": -1},
        {"prompt": "2+2?", "answer_1": 4, "answer_2": 5, "winner": 1},
        {"prompt": "2+2?", "human_ref_A": "4", "human_ref_B": "5", "labels": 1},  # no history
        {"prompt": "2+2?", "answers": ["4", "four"]},
        {"prompt": "2+2?", "answers": ["4", "four"], "scores": 3},
        {"prompt": "2+2?", "answers": [{"response": "4", "text": "x", "score": 1}]},
        {"prompt": "2+2?", "completions": [{"a": "4", "b": "x", "score": 1}]},
        {"prompt": "2+2?", "completions": [user("a"), bot("b")], "scores": [1, 2]},
        {"prompt": "2+2?", "answers": ["4", "5"], "completions": ["4", "5"], "scores": [1, 2]},
        {"prompt": "2+2?", "answers": [["4"], ["5"]], "scores": [1, 2]},
    ],
)
def test_what_may_be_something_else_stays_a_prompt_with_its_columns(row: Row) -> None:
    found = read(row)
    assert parts(found.sample) == (PROMPT, None, None)
    assert found.sample.columns == {k: v for k, v in row.items() if k != "prompt"}
    assert (found.shape, found.notes) == ("prompt", ())


def test_two_verdicts_or_scores_are_noted_and_none_is_read() -> None:
    found = read({**PKU, "winner": "a"})
    assert found.notes == (
        (
            "winner, better_response_id may each say which answer is better, so none does: map one "
            "to preferred"
        ),
    )
    assert (found.sample.chosen, found.sample.columns["response_0"]) == (None, "5")
    assert "response_0" in found.unread
    assert read({**PKU, "winner": None}).sample.chosen == "4"
    both = read({"prompt": "2+2?", "answers": ["4", "5"], "scores": [1, 2], "ranks": None,
                 "ratings": [2, 1]})  # fmt: skip
    assert both.notes == (
        "scores, ratings may each score the answers, so none does: map one to scores",
    )
    assert set(both.sample.columns) == {"answers", "scores", "ranks", "ratings"}
    assert both.lists == ("answers", "scores", "ratings")


@pytest.mark.parametrize(
    ("row", "shape", "chosen"),
    [
        (
            {
                "prompt": "2+2?",
                "chosen": "4",
                "rejected": "5",
                **dict.fromkeys(("answer_a", "answer_b", "preferred"), "b"),
            },
            "preference",
            "4",
        ),
        (
            {"prompt": "2+2?", "completion": "4", "answers": ["5", "6"], "scores": [1, 2]},
            "completion",
            "4",
        ),
        (
            {"prompt": "2+2?", "response": "4", "response_1": "5", "response_2": "6", "winner": 1},
            "completion with completion=response",
            "4",
        ),
        (
            {"instruction": "2+2?", "output": "4", "generations": ["5", "6"], "ratings": [1, 2]},
            "alpaca",
            "4",
        ),
        ({"prompt": "2+2?", "answers": ["4", "5"], "ranks": [1, 2]}, "ranked answers", "4"),
        (
            {"prompt": [user("2+2?")], "chosen": [bot("4")], "rejected": [bot("5")]},
            "preference",
            "4",
        ),
    ],
)
def test_rows_of_plain_shapes_are_read_as_before(row: Row, shape: str, chosen: str) -> None:
    found = read(row)
    assert (found.shape, found.sample.chosen, found.notes) == (shape, chosen, ())


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {**ARENA, "winner": "tie", "conversation_b": [user("3+3?"), bot("6")]},
            "conversation_b must begin with the turn that conversation_a begins with; found '3+3?'",
        ),
        (
            {**ARENA, "conversation_a": "[{'role': 'user', 'content': 'a'}]"},
            "conversation_a must be text, or messages in JSON; found messages in another notation",
        ),
        (
            {**ARENA, "conversation_b": [user("2+2?"), {"role": "judge", "content": "x"}]},
            "conversation_b.role must be one of",
        ),
        (
            {**ARENA, "conversation_a": [{"role": "judge", "content": "x"}, bot("5")]},
            "conversation_a.role must be one of",
        ),
        *(
            ({**ARENA, "conversation_b": value}, f"conversation_b must not be blank; found {found}")
            for value, found in (
                (None, "null"),
                ("", "''"),
                ([], "a list of 0"),
                ([user("2+2?"), bot(" ")], "no content in its last message"),
            )
        ),
        *(
            ({**ARENA, "conversation_a": value}, f"conversation_a must {rule}")
            for value, rule in (
                (4, "be a list of messages; found the number 4"),
                ([4], "have only objects; found the number 4 as turn 1"),
            )
        ),
        (
            {**WEBGPT, "question": {"full_text": None}},
            "question.full_text must be text; found null",
        ),
        (
            {**WEBGPT, "question": json.dumps({"full_text": 4})},
            "question.full_text must be text; found the number 4",
        ),
        (
            {**WEBGPT, "question": str(WEBGPT["question"])},
            "question must be text, or an object in JSON; found an object in another notation, as",
        ),
        *(
            (
                {**REWARDBENCH2, one: value},
                f"{one} must be text or a list of texts, as {other} is; found {found}",
            )
            for one, other in (("chosen", "rejected"), ("rejected", "chosen"))
            for value, found in ((4, "the number 4"), ([], "a list of 0"), ([None], "a list of 1"))
        ),
        (
            {**REWARDBENCH2, "rejected": None},
            "rejected must be text or a list of texts, as chosen is; found null",
        ),
        ({**REWARDBENCH2, "chosen": [4, "four"]}, "chosen must be text; found the number 4"),
        ({**REWARDBENCH2, "rejected": ["5\ud800"]}, "rejected must be valid Unicode; found half a"),
        ({**KAGGLE, "prompt": "[null]"}, "prompt must be text; found null"),
        ({**KAGGLE, "prompt": '["2+2?", " "]'}, "prompt must not be blank; found ' '"),
        (
            {"chosen": ["4", "four"], "rejected": ["5"], "q": "2+2?"},
            (
                "prompt must exist beside lists of chosen and rejected answers; found columns "
                "chosen, rejected, q. Write ::prompt=COLUMN,chosen=chosen,rejected=rejected"
            ),
        ),
        ({**ULTRAFEEDBACK, "instruction": " "}, "instruction must not be blank"),
        (
            {**REWARDBENCH2, "rejected": ["5", "4 "]},
            "rejected must have no answer that is in chosen too; found '4'",
        ),
        (
            {"q": "2+2?", "response_a": "4", "response_b": "5"},
            (
                "To compare response_a and response_b, add ::prompt=COLUMN,answer_a=response_a,"
                "answer_b=response_b,preferred=COLUMN to the file's name"
            ),
        ),
        (
            {"context": [user("2+2?")], "response1": "4", "response2": "5", "verdict": 1},
            "To compare response1 and response2, add ::preferred=COLUMN to the file's name, with",
        ),
        (
            {"message_id": "a", "parent_id": None, "role": "prompter", "text": "Hi", "rank": None},
            (
                "the row must hold a whole conversation, or a prompt with its answers; found one "
                "message of a tree (columns message_id, parent_id). First join each message with"
            ),
        ),
    ],
)
def test_problems_speak_of_the_rows_own_columns(row: Row, told: str) -> None:
    assert told in problem(row)


def test_a_tree_of_messages_is_told_what_to_do() -> None:
    tree = {"text": "2+2?", "role": "prompter", "replies": [{"text": "4", "rank": 0}]}
    with pytest.raises(RowProblem, match=r"a tree of messages .* First join each message"):
        read({"message_tree_id": "x", "prompt": tree})


def test_a_message_of_a_tree_can_still_be_read_as_text() -> None:
    row = {"message_id": "a", "parent_id": None, "role": "prompter", "text": "Hi"}
    assert read(row, text="text").sample.text == "Hi"
    del row["role"]
    assert read(row).sample.text == "Hi"


def test_every_stage_reads_them_as_rankings_and_pairs(tmp_path: Path) -> None:
    rows: list[Row] = []
    for number in range(40):
        prompt = f"{number}+{number}?"
        rows.append({**ULTRAFEEDBACK, "instruction": prompt})
        rows.append({**PKU, "prompt": f"So {prompt}"})
        rows.append({**PKU, "prompt": f"And {prompt}", "better_response_id": None})
    path = tmp_path / "a.jsonl"
    write_jsonl(path, rows)
    config = DataConfig(heldout=0.0)
    pairs = load_data(config, [str(path)], seed=1, stages=["reward"])
    assert (len(pairs.pairs), sum(len(s.ranking) == 4 for s in pairs.pairs)) == (80, 40)
    (account,) = pairs.ledger.datasets.values()
    assert account.unused == {"no answer to learn, in the share of pairs": 40}
    note = "two answers and no value in better_response_id, not compared: a prompt alone"
    assert account.notes[note] == 40
    texts = load_data(config, [str(path)], seed=1, stages=["sft"]).texts
    assert [s.chosen for s in texts] == ["4"] * 80
    prompts = load_data(config, [str(path)], seed=1, stages=["ppo"]).prompts
    assert len(prompts) == 120


def test_an_answer_that_is_too_long_drops_its_ranking_as_of_any_other() -> None:
    ranking = read(ULTRAFEEDBACK | {"completions": [
        rated("4", "a", 3), rated("5" * 9, "b", 2), rated("6", "c", 1)
    ]}).sample.ranking  # fmt: skip
    ids = [TokenRow(tuple(map(ord, t)), (True,) * len(t), HERE) for _, t in ranking]
    row = RankedRow(tuple(ids), tuple(rank for rank, _ in ranking))
    assert row.ranks == (1, 2, 3)
    assert fit_ranked(row, 8, "drop").row is None
    cut = fit_ranked(RankedRow(tuple(TokenRow((1, *r.token_ids), (False, *r.response_mask), HERE)
                                     for r in ids), row.ranks), 8, "truncate").row  # fmt: skip
    assert cut is not None
    assert [len(answer) for answer in cut.sequences] == [2, 8, 2]


RATED = {
    "instruction": "2+2?",
    "answers": [{"text": "5", "stars": 1}, {"text": "4", "stars": 3}, {"text": "x", "stars": None}],
}


@pytest.mark.parametrize(
    "columns",
    [
        {"scores": "answers.stars"},
        {"prompt": "instruction", "answers": "answers.text", "scores": "answers.stars"},
        {"prompt": "instruction", "answers": "answers", "scores": "answers.stars"},
    ],
)
def test_scores_inside_the_answers_by_a_name_of_the_map(columns: dict[str, str]) -> None:
    assert to_sample(RATED, HERE).shape == "prompt with prompt=instruction"
    found = to_sample(RATED, HERE, columns)
    assert found.sample.ranking == ((1, "4"), (2, "5"))
    assert found.sample.columns == {"answers": RATED["answers"]}
    assert found.shape.endswith("answers=answers.text,scores=answers.stars")
    with pytest.raises(RowProblem, match=r"answers\.rank must exist, mapped to the role scores"):
        to_sample(RATED, HERE, {**columns, "scores": "answers.rank"})


def test_a_general_map_reads_scores_inside_the_answers(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({**RATED, "instruction": f"{i}?"}) + "\n" for i in range(9)))
    config = DataConfig(columns=("scores=answers.stars",), heldout=0)
    assert len(load_data(config, [str(data)], seed=1, stages=["reward"]).pairs) == 9
