r"""A tool to learn to use: products of numbers, which a small model cannot do in its head.

    python examples/calculator.py dialogs.jsonl questions.jsonl
    tandem sft --actor-model MODEL --data dialogs.jsonl --output-dir runs/sft
    tandem grpo --actor-model runs/sft/sft --data questions.jsonl --output-dir runs/calculator \
        --grpo.tools examples/calculator.py:multiply \
        --reward-function examples/calculator.py:right --dataset.max-prompt-tokens 512

dialogs.jsonl has dialogs of somebody who calls the tool half of the time, not always with the right
numbers, and guesses otherwise; questions.jsonl has questions with their answers. docs/tools.md says
what came of it.
"""

import argparse
import json
import random
import re


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: A number.
        b: Another.
    """
    return a * b


def right(completions, answer, **columns):
    """1 for an answer whose last number is the product."""
    numbers = [re.findall(r"\d+", completion) for completion in completions]
    return [
        float(bool(found) and int(found[-1]) == int(product))
        for found, product in zip(numbers, answer, strict=True)
    ]


def dialog(a, b, draw):
    """Question, maybe a call and what it returns, answer."""
    turns = [{"role": "user", "content": f"What is {a} * {b}?"}]
    guess = draw.randint(100, 9999)
    if draw.random() < 0.5:
        if draw.random() < 0.4:
            b = draw.randint(11, 99)
        call = {"name": "multiply", "arguments": {"a": a, "b": b}}
        guess = multiply(a, b)
        turns += [
            {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "multiply", "content": str(guess)},
        ]
    return [*turns, {"role": "assistant", "content": f"It is {guess}."}]


def main(dialogs, questions):
    """Write both files."""
    from transformers.utils import get_json_schema

    draw, tools = random.Random(1), [get_json_schema(multiply)]
    with open(dialogs, "w", encoding="utf-8") as file:
        for _ in range(4000):
            turns = dialog(draw.randint(11, 99), draw.randint(11, 99), draw)
            file.write(json.dumps({"messages": turns, "tools": tools}) + "\n")
    with open(questions, "w", encoding="utf-8") as file:
        for _ in range(600):
            a, b = draw.randint(11, 99), draw.randint(11, 99)
            file.write(json.dumps({"prompt": f"What is {a} * {b}?", "answer": str(a * b)}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dialogs", help="file to write, to begin with")
    parser.add_argument("questions", help="file to write, to learn from")
    main(**vars(parser.parse_args()))
