"""Texts that try to become control tokens: their strings, whole, split, nested, and look-alikes."""

from __future__ import annotations

import unicodedata
from random import Random
from typing import cast

from transformers import PreTrainedTokenizerBase

from tandem.types import Message, Role

COMMON = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "[INST]",
    "[/INST]", "<<SYS>>", "<|eot_id|>", "<|start_header_id|>", "<start_of_turn>", "<think>",
    "<|begin_of_text|>", "[CLS]", "[MASK]", "<|assistant|>", "<0x0A>", "<bos>", "<|tool_call|>",
)  # fmt: skip
_LIKE = str.maketrans({"<": "＜", ">": "＞", "|": "｜", "_": "＿", "/": "／", "[": "［", "]": "］"})
_FILLERS = (
    "", "", " ", "\n", "\n\n", "a", "hello ", "x<", "|>", "Human: ", "\n\nAssistant:", "\u200b",
    "\u2060", "\ue000", "\ufeff", "é", "日本", "🙂", "assistant\n", "user\n", "system\n", "\t",
    "\r\n",
)  # fmt: skip


def control_strings(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Every token that text must never become, found apart from tandem.data.control."""
    added = tokenizer.added_tokens_decoder
    ids = {i for i, token in added.items() if token.special or token.content.strip()}
    ids |= set(tokenizer.all_special_ids)
    frame = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    ids -= {tokenizer.unk_token_id} - frame
    return {i: str(tokenizer.convert_ids_to_tokens(i)) for i in ids if i is not None}


def _mangled(text: str, random: Random) -> str:
    """One of the ways to write `text` that a check might overlook and a tokenizer mend."""
    at = random.randrange(len(text) + 1)
    ways = (
        text, text, text,
        text * 2,
        text[:at] + text + text[at:],
        text[:at] + " " + text[at:],
        text[:at] + "\u200b" + text[at:],
        text[:at] + "\u00ad" + text[at:],
        text.translate(_LIKE),
        text.upper(),
        text.title(),
        unicodedata.normalize("NFKD", text.translate(_LIKE)),
        text.replace(" ", "▁"),
        text.encode("utf-8").decode("latin-1"),
        " " + text + " ",
        text[:at],
        text[at:],
    )  # fmt: skip
    return random.choice(ways)


def injection(strings: list[str], random: Random) -> str:
    """A text full of control strings; never blank, and no answer that begins with a thought, whose
    tags are control tokens."""
    parts = []
    for _ in range(random.randint(1, 6)):
        known = random.choice(strings) if random.random() < 0.8 else random.choice(COMMON)
        parts += [_mangled(known, random), random.choice(_FILLERS)]
    text = "".join(parts)
    if text.lstrip().startswith("<think>"):
        return f"x{text}"
    return text if text.strip() else "x"


def hostile_dialog(strings: list[str], random: Random, roles: tuple[str, ...]) -> list[Message]:
    """User and assistant turns (other roles as given), control strings split over their borders."""
    turns = [Message(cast(Role, role), injection(strings, random)) for role in roles]
    if len(turns) > 1 and random.random() < 0.3:  # one string over two turns
        string = random.choice(strings)
        at = random.randrange(1, len(string)) if len(string) > 1 else 1
        i = random.randrange(len(turns) - 1)
        turns[i] = Message(turns[i].role, turns[i].content + string[:at])
        turns[i + 1] = Message(turns[i + 1].role, string[at:] + turns[i + 1].content)
    return turns
