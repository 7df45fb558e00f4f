r"""A game to learn over several turns: guess a number, and hear "Higher." or "Lower.".

    python examples/guess.py games.jsonl numbers.jsonl
    tandem sft --actor-model MODEL --data games.jsonl --output-dir runs/sft
    tandem grpo --actor-model runs/sft/sft --data numbers.jsonl --output-dir runs/guess \
        --grpo.environment examples/guess.py:environment \
        --reward-function examples/guess.py:reward --grpo.max-turns 4

games.jsonl has games of somebody who knows the rules and guesses badly, to begin with, and
numbers.jsonl the numbers to guess. docs/environments.md says what came of it.
"""

import argparse
import json
import random
import re

QUESTION = "Guess my number, from 1 to 15."


def asked(turn):
    """The number that a turn asks for, as in "Is it 8?"; None for anything else."""
    found = re.fullmatch(r"Is it (\d+)\?", turn["content"])
    return int(found[1]) if found else None


def environment(messages, number, **columns):
    """What a guess hears; None where the game is over."""
    guess = asked(messages[-1])
    if guess is None or guess == number:
        return None
    return "Higher." if guess < number else "Lower."


def reward(completions, new_messages, number, **columns):
    """1 for the number, less for each guess before it."""
    return [
        1.0 - 0.05 * (len(turns) - 1) if asked(turns[-1]) == n else 0.0
        for turns, n in zip(new_messages, number, strict=True)
    ]


def bad_game(number, draw):
    """A game in which half of the guesses do not heed what was heard."""
    turns, low, high = [{"role": "user", "content": QUESTION}], 1, 15
    for _ in range(4):
        guess = draw.randint(1, 15) if draw.random() < 0.5 else draw.randint(low, high)
        turns.append({"role": "assistant", "content": f"Is it {guess}?"})
        said = environment(turns, number)
        if said is None:
            return turns
        turns.append({"role": "user", "content": said})
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
    return turns[:-1]


def main(games, numbers):
    """Write both files."""
    draw = random.Random(1)
    with open(games, "w", encoding="utf-8") as file:
        for _ in range(3000):
            game = {"messages": bad_game(draw.randint(1, 15), draw)}
            file.write(json.dumps(game) + "\n")
    with open(numbers, "w", encoding="utf-8") as file:
        for row in range(600):
            file.write(json.dumps({"prompt": QUESTION, "number": row % 15 + 1, "row": row}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("games", help="file to write, to begin with")
    parser.add_argument("numbers", help="file to write, to learn from")
    main(**vars(parser.parse_args()))
