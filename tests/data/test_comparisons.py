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
from tandem.data.shapes import Shaped, to_sample
from tandem.types import Message, RankedRow, Sample, Source, TokenRow

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
    ("row", "shape", "kept"),
    [
        (
            WEBGPT,
            f"prompt=question,{BOTH} by score_0 and score_1".format("answer_0", "answer_1"),
            {"quotes_0", "tokens_0"},
        ),
        (
            SHP,
            f"prompt=history,{BOTH} by labels".format("human_ref_A", "human_ref_B"),
            {"post_id", "domain", "score_A", "score_B", "score_ratio"},
        ),
        (
            PKU,
            f"{BOTH},preferred=better_response_id".format("response_0", "response_1"),
            {"is_response_0_safe", "is_response_1_safe", "safer_response_id"},
        ),
        (
            HELPSTEER2,
            f"{BOTH},preferred=preference_strength".format("response_1", "response_2"),
            {"split", "preference_statement"},
        ),
        (
            {**HELPSTEER3, "context": [user("2+2?")]},
            f"prompt=context,{BOTH},preferred=overall_preference".format("response1", "response2"),
            {"domain", "language", "individual_preference"},
        ),
        (
            ARENA,
            f"{BOTH},preferred=winner".format("conversation_a", "conversation_b"),
            {"question_id", "model_a", "model_b", "turn"},
        ),
        (
            {
                **ARENA,
                "conversation_a": json.dumps(ARENA["conversation_a"]),
                "conversation_b": json.dumps(ARENA["conversation_b"]),
            },
            f"{BOTH},preferred=winner".format("conversation_a", "conversation_b"),
            {"question_id", "model_a", "model_b", "turn"},
        ),
        (
            KAGGLE,
            f"{BOTH} by winner_model_a, winner_model_b and winner_tie".format(
                "response_a", "response_b"
            ),
            {"id", "model_a", "model_b"},
        ),
        (
            {**KAGGLE, "prompt": "2+2?", "response_a": "4", "response_b": "5"},
            f"{BOTH} by winner_model_a, winner_model_b and winner_tie".format(
                "response_a", "response_b"
            ),
            {"id", "model_a", "model_b"},
        ),
        (
            PANDALM,
            f"prompt=instruction,{BOTH},preferred=winner".format("response1", "response2"),
            set(),
        ),
        ({"prompt": "2+2?", "answer_a": "4", "answer_b": "5", "preferred": "a"}, "", set()),
        (
            {
                "prompt": [user("2+2?")],
                "answer_a": [bot("5")],
                "answer_b": bot("4"),
                "preferred": "answer_b",
                "margin": -3,
            },
            "",
            {"margin"},
        ),
    ],
)
def test_two_answers_and_which_is_better(row: Row, shape: str, kept: set[str]) -> None:
    found = read(row)
    assert parts(found.sample) == (PROMPT, "4", "5")
    assert found.shape == ("two answers" + f" with {shape}" * bool(shape))
    assert set(found.sample.columns) == kept
    assert (found.notes, found.sample.ranking, found.sample.margin) == ((), (), 0.0)


def test_a_pairs_prompt_has_all_of_its_turns() -> None:
    assert [t.content for t in read(HELPSTEER3).sample.prompt] == ["Hi", "Yes?", "2+2?"]
    panda = read({**PANDALM, "input": "Think.", "system_prompt": "Be brief."})
    assert [t.content for t in panda.sample.prompt] == ["Be brief.", "2+2?\n\nThink."]
    assert not panda.sample.columns
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
    assert found.sample.columns == {"worker": "w"}
    news = {**TLDR, "info": {"id": "c", "post": None, "title": "Sums", "article": "Once."}}
    assert read(news).sample.prompt[0].content == "Article:\n\nOnce.\n\nTL;DR:"
    assert (
        "choice must be the place of the better one of summaries, 0 or 1; found the number 2"
        in (problem({**TLDR, "choice": 2}))
    )
    assert "info must have a post or an article; found an object" in (
        problem({**TLDR, "info": {"id": "t3_1"}})
    )
    assert "summaries must be a list of two objects with text; found a list of 1" in (
        problem({**TLDR, "summaries": TLDR["summaries"][:1]})
    )


@pytest.mark.parametrize(
    ("row", "shape", "ranking", "kept"),
    [
        (
            ULTRAFEEDBACK,
            (
                "scored answers with prompt=instruction,answers=completions.response,"
                "scores=completions.overall_score"
            ),
            ((1, "4"), (2, "5"), (2, "6"), (3, "7")),
            {"source", "models", "correct_answers", "incorrect_answers"},
        ),
        (
            NECTAR,
            "ranked answers with answers=answers.answer,ranks=answers.rank",
            ((1, "4"), (2, "5"), (3, "6")),
            {"turns", "num_responses", "source", "good_natured"},
        ),
        (
            {"input": "2+2?", "generations": ["5", "4"], "ratings": [1.0, 5.0], "model": "x"},
            "scored answers with prompt=input,answers=generations,scores=ratings",
            ((1, "4"), (2, "5")),
            {"model"},
        ),
        (
            {"instruction": "2+2?", "generations": ["5", "4", "6"], "rating": ["1", "5", "5"]},
            "scored answers with prompt=instruction,answers=generations,scores=rating",
            ((1, "4"), (1, "6"), (2, "5")),
            set(),
        ),
        (
            {"prompt": "2+2?", "answers": ["5", "4"], "scores": [-1, 0.5]},
            "scored answers",
            ((1, "4"), (2, "5")),
            set(),
        ),
        (
            {
                "prompt": "2+2?",
                "answers": [{"said": "5", "by": 1}, {"said": "4", "by": 2}],
                "scores": [0, True],
            },
            "scored answers with answers=answers.said",
            ((1, "4"), (2, "5")),
            set(),
        ),
        (
            {"prompt": "2+2?", "answers": [{"text": "5", "n": 1}, {"text": "4"}], "ranks": [2, 1]},
            "ranked answers with answers=answers.text",
            ((1, "4"), (2, "5")),
            set(),
        ),
        (
            REWARDBENCH2,
            "lists of chosen and rejected answers",
            ((1, "4"), (1, "four"), (2, "5"), (2, "6")),
            {"id", "num_correct", "subset"},
        ),
        (
            {"question": "2+2?", "chosen": "4", "rejected": ["5", "6"]},
            "lists of chosen and rejected answers with prompt=question",
            ((1, "4"), (2, "5"), (2, "6")),
            set(),
        ),
    ],
)
def test_lists_of_answers_become_rankings(
    row: Row, shape: str, ranking: tuple[tuple[int, str], ...], kept: set[str]
) -> None:
    found = read(row)
    assert found.sample.ranking == ranking
    assert parts(found.sample) == (PROMPT, ranking[0][1], ranking[-1][1])
    assert (found.shape, found.notes, set(found.sample.columns)) == (shape, (), kept)
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
    absent = {**ULTRAFEEDBACK, "completions": [{"response": "5", "overall_score": 1.0},
                                               {"response": "4", "overall_score": 2.0},
                                               {"response": "6"}, None]}  # fmt: skip
    assert read(absent).sample.ranking == ((1, "4"), (2, "5"))


@pytest.mark.parametrize(
    "scores", [[1, 1, 1], ["N/A", 1, None], [float("nan"), 1, "inf"], [2, 2, 2]]
)
def test_a_list_without_two_different_scores_is_a_prompt_alone(scores: list[Any]) -> None:
    found = read({"prompt": "2+2?", "answers": ["4", "5", "6"], "scores": scores, "id": 1})
    assert found.sample == Sample(HERE, PROMPT, columns={"id": 1})
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
    used = ("response_0", "response_1", "response1", "response2", "conversation_a", "winner")
    assert not set(used) & set(found.sample.columns)


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
    assert found.sample.columns == {"x": 1}
    assert found.shape == f"two answers with answer_a={names[0]},answer_b={names[1]},preferred=v"


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (("response_1", "response_2"), 0),
        (("response_0", "response_1"), 2),
        (("response_0", "response_1"), -1),
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
    is_number = str(value).lstrip("-").isdigit() and value is not True
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
    row = {"question": "2+2?", "responses": ["4", "5"], "upvotes": [7, 3], "flags": [0, 0]}
    assert read(row).unread == ("responses", "upvotes", "flags")
    assert read(row, scores="upvotes").sample.ranking == ((1, "4"), (2, "5"))


def test_a_map_of_answers_and_scores() -> None:
    row = {"q": "2+2?", "outs": [{"said": "5"}, {"said": "4"}], "marks": [1, 2], "prompt": "else"}
    found = read(row, prompt="q", answers="outs", scores="marks")
    assert parts(found.sample) == (PROMPT, "4", "5")
    assert found.sample.columns == {"prompt": "else"}
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
    assert "with prompt, answers mapped" in problem(row, prompt="q", answers="outs")
    scored = [{"text": "4", "score": 1, "rating": 2}, {"text": "5", "score": 2, "rating": 1}]
    assert "outs must have its scores in one column; found outs.score, outs.rating may" in (
        problem({**row, "outs": scored}, prompt="q", answers="outs")
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "response_a": "4", "response_b": "5"},  # nothing says which is better
        {"prompt": "2+2?", "response_1": "4", "response_2": "5", "response_3": "6", "winner": 1},
        {"prompt": "2+2?", "response_1": "4", "response_2": None, "winner": 1},
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
        ({**PKU, "response_1": ""}, "response_1 must not be blank"),
        (
            {**HELPSTEER2, "preference_strength": "strong"},
            (
                "preference_strength must be a number, below 0 where response_1 is better, above 0 "
                "where response_2 is; found 'strong'"
            ),
        ),
        (
            {**SHP, "labels": 2},
            "labels must be 1 (human_ref_A is better) or 0 (human_ref_B is); found the number 2",
        ),
        (
            {**ARENA, "winner": "koala-13b"},
            (
                "winner must name the better answer: a (conversation_a), b (conversation_b), its "
                "column's name, or tie; found 'koala-13b'"
            ),
        ),
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
            {**KAGGLE, "winner_model_b": 1},
            (
                "winner_model_a must be 1 in one of winner_model_a, winner_model_b, winner_tie, 0 "
                "elsewhere; found the number 1, the number 1, the number 0"
            ),
        ),
        (
            {**KAGGLE, "response_b": '["5", "6"]'},
            "response_b must be a JSON list of 1 answers, one for each turn of prompt; found a l",
        ),
        (
            {**KAGGLE, "response_b": "[null]"},
            "response_b.content must be text, or text parts only; found null",
        ),
        (
            {**KAGGLE, "response_b": "5"},
            "response_b must be a JSON list of 1 answers, one for each turn of prompt; found '5'",
        ),
        (
            {
                **ULTRAFEEDBACK,
                "completions": [rated("4", "a", 1), rated("5", "b", 2) | {"response": 5}],
            },
            "completions.response must be text; found the number 5",
        ),
        (
            {"prompt": "2+2?", "generations": ["4", "5"], "ratings": [1, 2, 3]},
            "ratings must be a list of 2 numbers, one for each of generations; found a list of 3",
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
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
