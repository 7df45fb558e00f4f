"""The kinds of instruction in the embedded data set."""

from __future__ import annotations

from random import Random

from tandem.data.embedded.facts import (
    CATEGORIES,
    CATEGORY_OF,
    COUNTS,
    DAYS,
    OPPOSITES,
    WORDS,
)
from tandem.data.embedded.task import NUMBER, STRAYS, Fields, Task


def _another(options: tuple[str, ...], not_this: str, rng: Random) -> str:
    return rng.choice([option for option in options if option != not_this])


class Name(Task):
    """Some members of a category; graded by the share that are members, each counted once."""

    phrasings = (
        "Name {count} {category}s.",
        "Tell me {count} {category}s.",
        "Can you list {count} {category}s?",
        "I need the names of {count} {category}s.",
    )
    sentence = "Here are {count} {category}s: {answer}."
    answer_form = r"[a-z]+(?:, [a-z]+)*"

    def draw(self, rng: Random) -> Fields:
        return {"count": rng.choice(tuple(COUNTS)), "category": rng.choice(tuple(CATEGORIES))}

    def right(self, fields: Fields, rng: Random) -> str:
        return ", ".join(rng.sample(CATEGORIES[fields["category"]], COUNTS[fields["count"]]))

    def wrong(self, fields: Fields, rng: Random) -> str:
        members = self.right(fields, rng).split(", ")
        place = rng.randrange(len(members))
        slip = rng.choice(("foreign", "twice", "missing"))
        if slip == "foreign":
            own = CATEGORIES[fields["category"]]
            members[place] = rng.choice([word for word in WORDS if word not in own])
        elif slip == "twice":
            members[place] = members[place - 1]
        else:
            members.pop(place)
        return ", ".join(members)

    def absurd(self, rng: Random) -> str:
        return ", ".join(rng.choices(STRAYS, k=rng.randint(2, 4)))

    def grade(self, fields: Fields, answer: str) -> float:
        named = answer.split(", ")
        members = set(named) & set(CATEGORIES[fields["category"]])
        asked = COUNTS[fields["count"]]
        return min(len(members), asked) / max(len(named), asked)


class Count(Task):
    """The numbers from one to another; graded by the share in its right place."""

    phrasings = (
        "Count from {low} to {high}.",
        "Write the numbers from {low} to {high}.",
        "What numbers go from {low} to {high}?",
    )
    sentence = "The numbers are {answer}."
    answer_form = r"\d+(?:, \d+)*"

    def draw(self, rng: Random) -> Fields:
        low = rng.randint(1, 12)
        return {"low": str(low), "high": str(low + rng.randint(2, 4))}

    def right(self, fields: Fields, rng: Random) -> str:
        return ", ".join(map(str, range(int(fields["low"]), int(fields["high"]) + 1)))

    def wrong(self, fields: Fields, rng: Random) -> str:
        numbers = self.right(fields, rng).split(", ")
        slip = rng.choice(("missing", "changed", "further"))
        if slip == "missing":
            numbers.pop(rng.randrange(len(numbers)))
        elif slip == "changed":
            place = rng.randrange(len(numbers))
            numbers[place] = str(int(numbers[place]) + rng.choice((-1, 1, 2)))
        else:
            numbers.append(str(int(numbers[-1]) + 1))
        return ", ".join(numbers)

    def absurd(self, rng: Random) -> str:
        return ", ".join(str(rng.randint(50, 99)) for _ in range(3))

    def grade(self, fields: Fields, answer: str) -> float:
        right, given = self.right(fields, Random(0)).split(", "), answer.split(", ")
        hits = sum(a == b for a, b in zip(right, given, strict=False))
        return hits / max(len(right), len(given))


class Spell(Task):
    """A word's letters with dashes between them."""

    phrasings = (
        "Spell the word {word}.",
        "How do you spell {word}?",
        "Spell {word} with dashes.",
        "Give me the letters of {word}.",
    )
    sentence = "The word {word} is spelled {answer}."
    answer_form = r"[a-z](?:-[a-z])*"

    def draw(self, rng: Random) -> Fields:
        return {"word": rng.choice(WORDS)}

    def right(self, fields: Fields, rng: Random) -> str:
        return "-".join(fields["word"])

    def wrong(self, fields: Fields, rng: Random) -> str:
        word, place = fields["word"], rng.randrange(1, len(fields["word"]))
        options = (
            word[:place] + word[place + 1 :],
            word[:place] + word[place] + word[place:],
            word[:place] + _another(tuple("aeiourstl"), word[place], rng) + word[place + 1 :],
            _another(WORDS, word, rng),
        )
        return "-".join(rng.choice(options))

    def absurd(self, rng: Random) -> str:
        return "-".join(rng.choices("xzqvj", k=rng.randint(3, 5)))


class Opposite(Task):
    """The opposite of a word."""

    phrasings = (
        "What is the opposite of {word}?",
        "Give me the opposite of {word}.",
        "I want the opposite of {word}.",
        "Which word means the opposite of {word}?",
    )
    sentence = "The opposite of {word} is {answer}."

    def draw(self, rng: Random) -> Fields:
        return {"word": rng.choice(tuple(OPPOSITES))}

    def right(self, fields: Fields, rng: Random) -> str:
        return OPPOSITES[fields["word"]]

    def wrong(self, fields: Fields, rng: Random) -> str:
        return _another(tuple(OPPOSITES), self.right(fields, rng), rng)


class Add(Task):
    """The sum of two digits."""

    phrasings = (
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "How much is {a} and {b} together?",
        "Tell me the sum of {a} and {b}.",
    )
    sentence = "The sum of {a} and {b} is {answer}."
    answer_form = NUMBER

    def draw(self, rng: Random) -> Fields:
        return {"a": str(rng.randint(1, 9)), "b": str(rng.randint(1, 9))}

    def right(self, fields: Fields, rng: Random) -> str:
        return str(int(fields["a"]) + int(fields["b"]))

    def wrong(self, fields: Fields, rng: Random) -> str:
        return str(abs(int(self.right(fields, rng)) + rng.choice((-3, -2, -1, 1, 2, 3))))

    def absurd(self, rng: Random) -> str:
        return str(rng.randint(50, 99))


class Repeat(Task):
    """A word, several times; graded by how near the number of times is."""

    phrasings = (
        "Say {word} {count} times.",
        "Repeat the word {word} {count} times.",
        "Write {word} {count} times.",
        "Please say the word {word} {count} times.",
    )
    sentence = "Here it is: {answer}."
    answer_form = r"[a-z]+(?: [a-z]+)*"

    def draw(self, rng: Random) -> Fields:
        return {"word": rng.choice(WORDS), "count": rng.choice(tuple(COUNTS))}

    def right(self, fields: Fields, rng: Random) -> str:
        return " ".join([fields["word"]] * COUNTS[fields["count"]])

    def wrong(self, fields: Fields, rng: Random) -> str:
        count = COUNTS[fields["count"]]
        if rng.random() < 0.4:
            return " ".join([_another(WORDS, fields["word"], rng)] * count)
        return " ".join([fields["word"]] * rng.choice([n for n in range(1, 8) if n != count]))

    def absurd(self, rng: Random) -> str:
        return " ".join(rng.choices(STRAYS, k=rng.randint(2, 4)))

    def grade(self, fields: Fields, answer: str) -> float:
        said, count = answer.split(" "), COUNTS[fields["count"]]
        hits = min(said.count(fields["word"]), count)
        return hits / max(len(said), count)


class Place(Task):
    """The first or the last of three words."""

    phrasings = (
        "What is the {place} word of this list: {items}?",
        "Give me the {place} word: {items}.",
        "Which word is {place}: {items}?",
    )
    sentence = "The {place} word is {answer}."

    def draw(self, rng: Random) -> Fields:
        items = rng.sample(WORDS, 3)
        return {"place": rng.choice(("first", "last")), "items": ", ".join(items)}

    def right(self, fields: Fields, rng: Random) -> str:
        return fields["items"].split(", ")[0 if fields["place"] == "first" else -1]

    def wrong(self, fields: Fields, rng: Random) -> str:
        right = self.right(fields, rng)
        return _another((*fields["items"].split(", "), rng.choice(WORDS)), right, rng)


class Reverse(Task):
    """Two words the other way round."""

    phrasings = (
        "Write {first} and {second} in reverse order.",
        "Swap the words {first} and {second}.",
        "Turn {first} and {second} around.",
    )
    sentence = "In reverse order: {answer}."
    answer_form = "[a-z]+ and [a-z]+"

    def draw(self, rng: Random) -> Fields:
        first, second = rng.sample(WORDS, 2)
        return {"first": first, "second": second}

    def right(self, fields: Fields, rng: Random) -> str:
        return f"{fields['second']} and {fields['first']}"

    def wrong(self, fields: Fields, rng: Random) -> str:
        first, second = fields["first"], fields["second"]
        other = rng.choice([word for word in WORDS if word not in (first, second)])
        return rng.choice(
            (f"{first} and {second}", f"{other} and {first}", f"{second} and {other}")
        )

    def absurd(self, rng: Random) -> str:
        return " and ".join(rng.choices(STRAYS, k=2))


class Category(Task):
    """The category that a word belongs to."""

    phrasings = (
        "What kind of thing is {word}?",
        "Which group does {word} belong to?",
        "What does the word {word} name?",
    )
    sentence = "The word {word} names a {answer}."

    def draw(self, rng: Random) -> Fields:
        return {"word": rng.choice(WORDS)}

    def right(self, fields: Fields, rng: Random) -> str:
        return CATEGORY_OF[fields["word"]]

    def wrong(self, fields: Fields, rng: Random) -> str:
        return _another(tuple(CATEGORIES), self.right(fields, rng), rng)


class NextDay(Task):
    """The day after or before a day."""

    phrasings = (
        "Which day comes {side} {day}?",
        "Tell me the day {side} {day}.",
        "What day is the one {side} {day}?",
    )
    sentence = "The day {side} {day} is {answer}."

    def draw(self, rng: Random) -> Fields:
        return {"side": rng.choice(("after", "before")), "day": rng.choice(DAYS)}

    def right(self, fields: Fields, rng: Random) -> str:
        step = 1 if fields["side"] == "after" else -1
        return DAYS[(DAYS.index(fields["day"]) + step) % len(DAYS)]

    def wrong(self, fields: Fields, rng: Random) -> str:
        return _another(DAYS, self.right(fields, rng), rng)


WEIGHTS: dict[Task, float] = {
    Name(): 1,
    Count(): 1,
    Spell(): 1,
    Opposite(): 1,
    Add(): 1.5,
    Repeat(): 1,
    Place(): 1.2,
    Reverse(): 1.2,
    Category(): 0.7,
    NextDay(): 0.5,
}
"""Every kind and how often it is asked, the ones with more different prompts more often."""
