"""The small world that the embedded data set speaks of: words, facts and courtesies."""

from __future__ import annotations

CATEGORIES: dict[str, tuple[str, ...]] = {
    "bird": ("duck", "owl", "hawk", "swan", "crow", "hen"),
    "fruit": ("apple", "plum", "pear", "lemon", "fig", "mango"),
    "color": ("red", "blue", "green", "black", "white", "pink"),
    "tool": ("hammer", "saw", "drill", "rake", "knife", "spade"),
}
"""Each word belongs to exactly one category."""

CATEGORY_OF: dict[str, str] = {word: name for name, words in CATEGORIES.items() for word in words}

WORDS: tuple[str, ...] = tuple(CATEGORY_OF)

OPPOSITES: dict[str, str] = {
    a: b
    for pair in (
        ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("old", "new"),
        ("fast", "slow"), ("wet", "dry"), ("full", "empty"), ("hard", "soft"), ("rich", "poor"),
    )
    for a, b in (pair, pair[::-1])
}  # fmt: skip
"""Both directions of every pair."""

COUNTS: dict[str, int] = {"two": 2, "three": 3, "four": 4}

DAYS: tuple[str, ...] = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)  # fmt: skip

PREAMBLES: tuple[str, ...] = (
    "", "Hello! ", "Please help me. ", "I have a question. ", "Quick: ", "Next one. ", "Now this: ",
    "Hi there. ",
)  # fmt: skip
"""What a prompt may begin with; it does not change what is asked."""

OPENERS: tuple[str, ...] = ("Of course!", "Gladly!", "With pleasure!")
"""Courtesies that belong before an answer."""

CLOSERS: tuple[str, ...] = ("I hope this helps.", "Have a nice day.")
"""Chatter that may follow an answer."""

RUDE: tuple[str, ...] = ("Obviously.", "Everybody knows that.")
"""Remarks that make an answer ill-mannered, before or after it."""
