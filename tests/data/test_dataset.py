"""Data sets to samples per step: no prompt in two of them, every row accounted for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.schema import DataConfig
from tandem.data import dataset as dataset_module
from tandem.data.dataset import Dataset, load_data, load_text
from tandem.data.split import opening
from tandem.errors import ConfigError, DataError
from tandem.types import Message, Sample
from tests.jsonl import write_jsonl

DROP = DataConfig(on_bad_row="drop")


def pair(i: int, kind: str = "pair") -> dict[str, Any]:
    row = {"prompt": f"Question {i}?", "chosen": f"good {kind}", "rejected": f"bad {kind}"}
    if kind == "answer":
        return {"prompt": row["prompt"], "completion": row["chosen"]}
    if kind == "prompt":
        return {"prompt": row["prompt"]}
    if kind == "text":
        return {"text": row["prompt"]}
    if kind == "bad":
        return {"prompt": row["prompt"], "chosen": ""}
    return row


def lists(dataset: Dataset) -> dict[str, list[Sample]]:
    return {
        "texts": dataset.texts,
        "pairs": dataset.pairs,
        "prompts": dataset.prompts,
        "heldout": dataset.heldout,
    }


def openings(samples: list[Sample]) -> set[str]:
    return {opening(sample) for sample in samples}


rows_of_kinds = st.lists(
    st.tuples(
        st.integers(0, 25), st.sampled_from(["pair", "answer", "prompt", "text", "bad", "pair"])
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(rows_of_kinds, rows_of_kinds, rows_of_kinds, st.integers(0, 3), st.sampled_from(["", ":2"]))
def test_no_prompt_in_two_steps_and_every_row_accounted_for(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[tuple[int, str]],
    second: list[tuple[int, str]],
    extra: list[tuple[int, str]],
    seed: int,
    weight: str,
) -> None:
    folder = tmp_path_factory.mktemp("overlap")
    files = []
    for name, rows in (("a", first), ("b", second), ("c", extra)):
        files.append(write_jsonl(folder / f"{name}.jsonl", [pair(i, kind) for i, kind in rows]))
    config = replace(DROP, heldout=0.2)
    dataset = load_data(config, [files[0] + weight, files[1] + ":0.5"], [files[2]], seed=seed)
    sides = [openings(samples) for samples in lists(dataset).values()]
    assert sum(map(len, sides)) == len(set().union(*sides))
    for account, rows in zip(dataset.ledger.datasets.values(), (first, second, extra), strict=True):
        assert account.rows == len(rows)
        assert account.balances()
        assert account.num_dropped == sum(kind == "bad" for _, kind in rows)
    for step, samples in lists(dataset).items():
        distinct = {(s.source.path, s.source.line) for s in samples}
        used = sum(a.used[step] for a in dataset.ledger.datasets.values())
        copies = sum(a.extra_copies[step] for a in dataset.ledger.datasets.values())
        assert len(distinct) == used
        assert len(samples) == used + copies
        assert step != "heldout" or copies == 0
    assert all(s.chosen is not None or s.text is not None for s in dataset.texts)
    assert all(s.chosen is not None and s.rejected is not None for s in dataset.pairs)
    assert all(s.prompt for s in dataset.prompts)


def test_the_split_does_not_move_when_data_is_added_or_reordered(tmp_path: Path) -> None:
    rows = [pair(i) for i in range(200)]
    a = write_jsonl(tmp_path / "a.jsonl", rows)
    b = write_jsonl(tmp_path / "b.jsonl", [pair(i, "answer") for i in range(100, 400)])
    backwards = write_jsonl(tmp_path / "c.jsonl", rows[::-1])
    alone = load_data(DataConfig(), [a], seed=3)
    more = load_data(DataConfig(), [b, a], seed=3)
    turned = load_data(DataConfig(), [backwards], seed=3)
    for step, samples in lists(alone).items():
        assert openings(samples) <= openings(lists(more)[step])
        assert openings(samples) == openings(lists(turned)[step])
    assert [s.source.line for s in alone.prompts] == sorted(s.source.line for s in alone.prompts)
    again = load_data(DataConfig(), [a], seed=3)
    assert again == alone
    assert openings(load_data(DataConfig(), [a], seed=4).texts) != openings(alone.texts)


def test_sft_data_goes_to_sft_but_follows_prompts_of_other_steps(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [pair(i) for i in range(100)])
    extra = write_jsonl(tmp_path / "extra.jsonl", [pair(i, "answer") for i in range(50, 300)])
    config = DataConfig(heldout=0.1)
    alone = load_data(config, [data], seed=0)
    both = load_data(config, [data], [extra], seed=0)
    only = load_data(config, [], [extra], seed=0)
    account = both.ledger.datasets["extra"]
    assert both.pairs == alone.pairs
    assert both.prompts == alone.prompts
    elsewhere = {s.prompt for s in alone.pairs + alone.prompts}
    shared = [f"Question {i}?" for i in range(50, 100)]
    moved = sum((Message("user", text),) in elsewhere for text in shared)
    assert account.unused["prompt belongs to the share of pairs"] > 0
    assert account.unused.total() == moved
    heldout = openings(only.heldout)
    assert (
        account.used["heldout"] == len(heldout) == 250 - only.ledger.datasets["extra"].used["texts"]
    )
    assert account.used["texts"] == 250 - len(heldout) - moved
    assert not only.pairs
    assert not only.prompts


def test_what_a_step_cannot_use_is_counted(tmp_path: Path) -> None:
    kinds = ["answer", "prompt", "text"]
    rows = [pair(i, kinds[i % 3]) for i in range(300)]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    dataset = load_data(DataConfig(heldout=0), [data], seed=1)
    unused = dataset.ledger.datasets["a"].unused
    assert set(unused) == {
        "no answer to learn, in the share of texts",
        "no answer to learn, in the share of pairs",
        "no rejected answer, in the share of pairs",
        "plain text, in the share of pairs",
        "plain text, in the share of prompts",
    }
    assert not dataset.pairs
    assert len(dataset.ledger.datasets["a"].shapes) == 3


def test_an_answer_labelled_bad_is_not_learned(tmp_path: Path) -> None:
    rows = [pair(i, "answer") | {"label": i % 2 == 0} for i in range(100)]
    dataset = load_data(
        DataConfig(heldout=0), [], [write_jsonl(tmp_path / "a.jsonl", rows)], seed=1
    )
    assert len(dataset.texts) == 50
    assert dataset.ledger.datasets["a"].unused == {
        "answer labelled bad (column label), in the share of texts": 50
    }
    tagged = [pair(i, "answer") | {"kto_tag": False} for i in range(3)]
    config = DataConfig(heldout=0)
    text = load_text([write_jsonl(tmp_path / "b.jsonl", tagged)], config, seed=1)
    assert not text.train
    assert text.ledger.datasets["b"].unused == {
        "answer labelled bad (column kto_tag): not imitated": 3
    }


def test_messages_saved_as_text_are_read_alike_from_every_format(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    turns = [{"role": "user", "content": "a, 'b'"}, {"role": "assistant", "content": "c"}]
    cell = json.dumps(turns)
    lines = write_jsonl(tmp_path / "a.jsonl", [{"messages": cell}])
    quoted = cell.replace('"', '""')
    (tmp_path / "b.csv").write_text(f'messages\n"{quoted}"\n')
    table = arrow.table({"messages": [cell]})
    parquet.write_table(table, tmp_path / "c.parquet")
    for path in (lines, str(tmp_path / "b.csv"), str(tmp_path / "c.parquet")):
        (found,) = load_text([path], DataConfig(heldout=0), seed=1).train
        assert (found.prompt, found.chosen) == ((Message("user", "a, 'b'"),), "c")


def test_turns_that_are_not_learned_change_the_fingerprint(tmp_path: Path) -> None:
    config = DataConfig(heldout=0)
    prints = set()
    for name, weight in (("a", 0), ("b", 1)):
        turns = [{"role": r, "content": r} for r in ("user", "assistant") * 2]
        row = {"messages": [turns[0], {**turns[1], "weight": weight}, *turns[2:]]}
        text = load_text([write_jsonl(tmp_path / f"{name}.jsonl", [row])], config, seed=1)
        prints.add(text.ledger.datasets[name].fingerprint)
    assert len(prints) == 2


def test_weights_repeat_rows_and_leave_others_out(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [pair(i) for i in range(400)])
    once = load_data(DataConfig(), [data], seed=2)
    half = load_data(DataConfig(), [f"{data}:0.5"], seed=2)
    more = load_data(DataConfig(), [f"{data}:2.5"], seed=2)
    for share in ("texts", "pairs", "prompts"):
        counts = Counter(s.source.line for s in lists(more)[share])
        assert set(counts) == {s.source.line for s in lists(once)[share]}
        assert set(counts.values()) == {2, 3}
        assert {s.source.line for s in lists(half)[share]} < set(counts)
    assert half.heldout == once.heldout == more.heldout
    left = half.ledger.datasets["a"].unused["skipped by the weight 0.5"]
    assert 140 < left < 240
    assert half.ledger.datasets["a"].balances()


def test_a_bad_row_stops_with_its_place_or_is_counted(tmp_path: Path) -> None:
    rows = [pair(0), pair(1, "bad"), {"nothing": 1}, pair(2, "bad"), pair(3, "bad"), pair(4, "bad")]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as error:
        load_data(DataConfig(), [data], seed=0)
    assert str(error.value).startswith(f"{data}:2: field chosen must not be blank; found ''. ")
    assert "--on-bad-row drop" in str(error.value)
    dropped = load_data(DROP, [data], seed=0).ledger.datasets["a"].dropped
    assert dropped["chosen must not be blank"].count == 4
    assert dropped["chosen must not be blank"].first == [f"{data}:{n}" for n in (2, 4, 5)]
    assert sum(d.count for d in dropped.values()) == 5


def test_a_line_that_is_no_json_stops_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("prompt,chosen\n")
    with pytest.raises(DataError, match=r"a.jsonl:1: the row must be one whole JSON object; found"):
        load_data(DataConfig(), [str(tmp_path / "a.jsonl")], seed=0)


def test_the_system_prompt_comes_where_there_is_none(tmp_path: Path) -> None:
    own = {"messages": [{"role": "system", "content": "mine"}, {"role": "user", "content": "a"}]}
    rows = [pair(0), own, pair(2, "text")]
    config = DataConfig(system_prompt="Be brief.", heldout=0.999999)
    found = load_data(config, [write_jsonl(tmp_path / "a.jsonl", rows)], seed=0).heldout
    assert found[0].prompt[0] == Message("system", "Be brief.")
    assert found[1].prompt[0] == Message("system", "mine")
    assert found[2].prompt == ()


def test_the_system_prompt_does_not_move_the_split(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [pair(i) for i in range(50)])
    plain = load_data(DataConfig(), [data], seed=0)
    with_system = load_data(DataConfig(system_prompt="Be brief."), [data], seed=0)
    for step, samples in lists(plain).items():
        assert openings(samples) == openings(lists(with_system)[step])


def test_column_maps_general_and_own(tmp_path: Path) -> None:
    mapped = write_jsonl(tmp_path / "q.jsonl", [{"q": "x?", "a": "y", "level": 1}])
    plain = write_jsonl(tmp_path / "plain.jsonl", [pair(0)])
    own = write_jsonl(tmp_path / "own.jsonl", [{"q": "story", "a": "b", "ask": "z?"}])
    config = DataConfig(columns=("prompt=q", "completion=a"), heldout=0.999999)
    found = load_data(config, [mapped, plain, f"{own}::prompt=ask,completion=q"], seed=0).heldout
    assert [s.prompt[0].content for s in found] == ["x?", "Question 0?", "z?"]
    assert [s.chosen for s in found] == ["y", "good pair", "story"]
    assert found[0].columns == {"level": 1}
    assert found[2].columns == {"a": "b"}


def test_a_general_map_that_nothing_has_is_refused(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "plain.jsonl", [pair(0)])
    with pytest.raises(DataError, match=r"columns of the data sets; got qestion, which no"):
        load_data(DataConfig(columns=("prompt=qestion",)), [plain], seed=0)
    with pytest.raises(ConfigError, match=r"dataset.columns must map one of"):
        load_data(DataConfig(columns=("promt=q",)), [plain], seed=0)


def test_duplicates_are_kept_and_counted_over_data_sets(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [pair(0), pair(1), pair(0) | {"id": 7}])
    b = write_jsonl(tmp_path / "b.jsonl", [pair(1), pair(1, "answer")])
    dataset = load_data(DataConfig(heldout=0), [a, b], seed=0)
    assert dataset.ledger.datasets["a"].duplicates == 1
    assert dataset.ledger.datasets["b"].duplicates == 1
    assert dataset.ledger.datasets["a"].num_used == 3


def test_pairs_that_contradict_an_earlier_one_are_counted(tmp_path: Path) -> None:
    turned = {**pair(0), "chosen": pair(0)["rejected"], "rejected": pair(0)["chosen"]}
    a = write_jsonl(tmp_path / "a.jsonl", [pair(0), pair(1), pair(0)])
    b = write_jsonl(tmp_path / "b.jsonl", [turned, pair(2)])
    ledger = load_data(DataConfig(heldout=0), [a, b], seed=0).ledger
    assert ledger.datasets["a"].notes == {}
    assert ledger.datasets["b"].notes == {"the answers of an earlier pair the other way round": 1}
    assert ledger.datasets["b"].num_used == 2


def test_labels_that_contradict_an_earlier_one_are_counted(tmp_path: Path) -> None:
    def labelled(answer: str, label: bool) -> dict[str, object]:
        return {"prompt": "q", "completion": answer, "label": label}

    rows = [labelled("a", True), labelled("b", False), labelled("a", True), labelled("a", False)]
    rows += [labelled("b", True), labelled("c", True), {"prompt": "q", "completion": "b"}]
    ledger = load_data(
        DataConfig(heldout=0), [write_jsonl(tmp_path / "a.jsonl", rows)], seed=0
    ).ledger
    account, note = ledger.datasets["a"], "the answer of an earlier row, labelled the other way"
    assert account.notes[note] == 2
    assert account.noted_at[note] == [f"{tmp_path / 'a.jsonl'}:{line}" for line in (4, 5)]
    assert account.duplicates == 2


def test_data_sets_of_one_name_get_names_of_their_own(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "train.jsonl", [pair(0)])
    files = [str(tmp_path / folder / "train.jsonl") for folder in ("x", "y")]
    dataset = load_data(DataConfig(heldout=0), files, [files[0]], seed=0)
    assert list(dataset.ledger.datasets) == ["train", "train-2", "train-3"]
    everything = [s for samples in lists(dataset).values() for s in samples]
    assert {s.source.dataset for s in everything} <= set(dataset.ledger.datasets)


def test_no_data_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="data must name at least one data set; got none"):
        load_data(DataConfig(), [], seed=0)
    with pytest.raises(ConfigError, match="three shares"):
        load_data(DataConfig(split=(1, 1)), ["a"], seed=0)


def test_files_of_other_splits_are_noted(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    for name in ("train", "test-0", "test-1", "test-2", "validation"):
        write_jsonl(folder / f"{name}.jsonl", [pair(i, name) for i in range(3)])
    account = load_data(DataConfig(), [str(folder)], seed=1).ledger.datasets["hub"]
    assert account.rows == 3
    assert account.notes == {
        "files of other splits than train, not read (test-0.jsonl, test-1.jsonl, test-2.jsonl, "
        "...)": 4
    }


def test_blank_lines_are_counted_apart(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(pair(0)) + "\n\n")
    account = load_data(DataConfig(), [str(tmp_path / "a.jsonl")], seed=0).ledger.datasets["a"]
    assert (account.rows, account.blank_lines) == (1, 2)


def test_late_drops_by_length_keep_the_balance(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [pair(i) for i in range(60)])
    dataset = load_data(DataConfig(), [f"{data}:2"], seed=0)
    for sample in dataset.pairs:
        dataset.ledger.drop(sample.source, "pairs", "over max_tokens")
    account = dataset.ledger.datasets["a"]
    assert account.used["pairs"] == 0
    assert account.num_dropped == len({s.source.line for s in dataset.pairs})
    assert account.balances()


# Text for mixture training ------------------------------------------------------------------------


def test_text_is_held_out_as_everywhere_else(tmp_path: Path) -> None:
    kinds = ["text", "answer", "prompt"]
    rows = [pair(i, kinds[i % 3]) for i in range(300)]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    config = DataConfig(heldout=0.2)
    text = load_text([data], config, seed=0)
    account = text.ledger.datasets["a"]
    assert account.used["ptx"] == len(text.train)
    assert account.used["heldout"] == len(text.heldout)
    assert account.unused == {"no text and no answer: not for mixture training": 100}
    assert account.balances()
    dataset = load_data(config, [data], seed=0)
    assert openings(text.heldout) <= openings(dataset.heldout)
    assert not openings(text.train) & openings(dataset.heldout)


def test_text_weights_and_a_shared_ledger(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [pair(i, "text") for i in range(100)])
    dataset = load_data(DataConfig(), [data], seed=0)
    text = load_text([f"{data}:1.5"], DataConfig(), seed=0, ledger=dataset.ledger)
    half = load_text([f"{data}:0.5"], DataConfig(), seed=0)
    assert list(dataset.ledger.datasets) == ["a", "a-2"]
    account = dataset.ledger.datasets["a-2"]
    assert len(text.train) == account.used["ptx"] + account.extra_copies["ptx"]
    assert set(Counter(s.source.line for s in text.train).values()) == {1, 2}
    assert half.ledger.datasets["a"].unused["skipped by the weight 0.5"] > 20
    assert half.heldout == load_text([data], DataConfig(), seed=0).heldout


# The real files -----------------------------------------------------------------------------------

REAL = {
    # file: rows, rows that are bad, shape (counted apart from this code, from the files' own words)
    "bench/mc_boolq_obqa_arce.jsonl.gz": (1700, 0, "prompt"),
    "bench/squad2_dev.jsonl.gz::prompt=question": (5913, 0, "prompt"),
    "bench/truthfulqa_817.jsonl.gz::prompt=question": (400, 0, "prompt"),
    "instruct/alpaca_5000.jsonl.gz": (3748, 0, "alpaca"),
    "instruct/rasbt_1100.jsonl.gz": (1096, 0, "alpaca"),
    "instruct/selfinstruct_seed_175.jsonl.gz": (175, 0, "alpaca"),
    "instruct/user_oriented_252.jsonl.gz": (138, 0, "alpaca"),
    "prefs/hh_harmless_base.jsonl.gz": (1409, 6, "dialog preference"),
    "prefs/hh_helpful_base.jsonl.gz": (1372, 10, "dialog preference"),
    "prefs/kto_unpaired_demo.jsonl.gz": (300, 0, "messages"),
    "prefs/multiturn_dpo_demo.jsonl.gz": (300, 0, "preference"),
    "prefs/pandalm_human.jsonl.gz": (520, 36, "preference"),
    "prefs/politeness_rasbt.jsonl.gz": (1094, 0, "preference"),
    "text/tinystories.jsonl.gz": (1715, 0, "text"),
    "verifiable/easy_arith_word_problems.jsonl.gz::prompt=question,completion=cot": (
        1741,
        238,
        "completion",
    ),
    "verifiable/gsm8k_model_solutions.jsonl.gz::prompt=question": (512, 0, "prompt"),
    "verifiable/gsm8k_test.jsonl.gz": (512, 0, "question"),
    "verifiable/gsm8k_train_3000.jsonl.gz": (3000, 0, "question"),
}


@pytest.mark.parametrize("name", REAL)
def test_every_row_of_real_files_is_read_or_counted(name: str, shared: Path) -> None:
    rows, num_bad, shape = REAL[name]
    (account,) = load_data(DROP, [str(shared / name)], seed=1).ledger.datasets.values()
    assert (account.rows, account.num_dropped) == (rows, num_bad)
    assert set(account.shapes) == {shape}
    assert account.balances()


def test_real_transcripts_blended(shared: Path) -> None:
    """Every odd row of the HH files, found by a plain reading of the transcripts."""
    import gzip

    files = [shared / "prefs" / f"hh_{kind}_base.jsonl.gz" for kind in ("helpful", "harmless")]
    odd = []
    for file in files:
        with gzip.open(file, "rt") as lines:
            for number, line in enumerate(lines, 1):
                texts = json.loads(line)
                cut = {k: t.rindex("\n\nAssistant:") + 12 for k, t in texts.items()}
                heads = {k: texts[k][: cut[k]] for k in texts}
                tails = {k: texts[k][cut[k] :].strip() for k in texts}
                same = tails["chosen"] == tails["rejected"]
                if heads["chosen"] != heads["rejected"] or same or not all(tails.values()):
                    odd.append((str(file), number))
    dataset = load_data(DROP, [str(file) for file in files], seed=1)
    used = {(s.source.path, s.source.line) for rows in lists(dataset).values() for s in rows}
    everything = {
        (a.path, n) for a in dataset.ledger.datasets.values() for n in range(1, a.rows + 1)
    }
    assert everything - used == set(odd)
    sides = [openings(samples) for samples in lists(dataset).values()]
    assert sum(map(len, sides)) == len(set().union(*sides))


def test_answers_stay_for_reward_functions(shared: Path) -> None:
    name = "verifiable/easy_arith_word_problems.jsonl.gz"
    spec = f"{shared / name}::prompt=question,completion=cot"
    dataset = load_data(DROP, [spec], seed=1)
    assert all(set(s.columns) == {"id", "dataset", "answer"} for s in dataset.prompts)


def test_a_data_set_of_which_nothing_can_be_used_is_left_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_HOPELESS", 20)
    bad = [{"foo": "q"}] * 40
    with pytest.raises(DataError, match=r"got none in the first 20. .*b.jsonl:20: row must have"):
        load_data(DROP, [write_jsonl(tmp_path / "b.jsonl", bad)], seed=1)
    some = [*bad[:19], pair(1), *bad]
    ledger = load_data(DROP, [write_jsonl(tmp_path / "c.jsonl", some)], seed=1).ledger
    assert ledger.num_dropped == 59


def test_eval_data_is_held_out_whole_and_keeps_its_openings_out_of_training(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {i}.", "completion": str(i)} for i in range(40)]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    others = [{"prompt": f"say  {i}.", "completion": "other"} for i in range(35, 50)]
    own = write_jsonl(tmp_path / "own.jsonl", others)
    found = load_data(DataConfig(heldout=0.5), [data], [], [own], seed=0, stages=["sft"])
    assert [s.chosen for s in found.heldout] == ["other"] * 15
    assert sorted(int(s.chosen or "") for s in found.texts) == list(range(35))
    account = found.ledger.datasets["a"]
    assert account.unused["begins like a row of eval_data"] == 5
    assert found.ledger.datasets["own"].used["heldout"] == 15
    with pytest.raises(ConfigError, match="eval_data must be without weights"):
        load_data(DataConfig(), [data], [], [f"{own}:2"], seed=0)


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_speakers_within_a_prompt_are_noted_and_read_where_asked_for(
    system: str, tmp_path: Path
) -> None:
    answers = {"chosen": " 4", "rejected": " 5"}
    texts = [" Human: 2+2? Assistant:", "Human: hi Assistant: yo Human: 2+2? Assistant:", "2+2?"]
    rows = [{"prompt": text, **answers} for text in texts]
    data = write_jsonl(tmp_path / "a.jsonl", rows)

    def read(*, inline: bool) -> tuple[list[tuple[Message, ...]], dict[str, int]]:
        config = DataConfig(heldout=0, inline_speakers=inline, system_prompt=system)
        found = load_data(config, [data], seed=0, stages=("dpo",))
        kept = sorted(found.pairs, key=lambda sample: sample.source.line)
        return [sample.prompt for sample in kept], dict(found.ledger.datasets["a"].notes)

    def user(text: str) -> Message:
        return Message("user", text)

    start = (Message("system", system),) if system else ()
    plain, noted = read(inline=False)
    assert plain == [(*start, user(text)) for text in texts]
    assert [(text[:29], count) for text, count in noted.items()] == [
        ("prompts of the form Human: ..", 2)
    ]
    assert "--dataset.inline-speakers" in next(iter(noted))
    turns, noted = read(inline=True)
    once = (*start, user("2+2?"))
    assert turns == [once, (*start, user("hi"), Message("assistant", "yo"), user("2+2?")), once]
    assert list(noted) == [
        "prompts of the form Human: ... Assistant:, read as the turns that they show"
    ]
