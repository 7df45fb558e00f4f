"""Conversations with an environment: how long they can become, and what they need."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.schema import RLConfig, RunConfig, rl_section

CONVERSATION_KNOBS = ("environment", "tools", "max_turns", "max_conversation_tokens")
"""An RL section's knobs of what answers hear."""


def conversation_tokens(config: RunConfig) -> int:
    """Most tokens of a conversation: `max_conversation_tokens`, or those of the longest prompt, of
    all answers, and as many of what they hear."""
    rl = rl_section(config)
    if rl.max_conversation_tokens:
        return rl.max_conversation_tokens
    answers = rl.max_turns * config.sampling.max_new_tokens
    return config.dataset.max_prompt_tokens + 2 * answers - config.sampling.max_new_tokens


def sampled_tokens(config: RunConfig) -> int:
    """Most tokens that the policy samples for one row of a rollout."""
    rl, answer = rl_section(config), config.sampling.max_new_tokens
    return min(answer * rl.max_turns, conversation_tokens(config)) if rl.converses else answer


def answer_tokens(config: RunConfig, prompt: int, positions: int | None = None) -> int:
    """Most tokens that a rollout adds to a prompt: of its answer, or of its conversation.

    Args:
        prompt: its tokens. positions: of the model, if they are known and limited.
    """
    answer = config.sampling.max_new_tokens
    if not rl_section(config).converses:
        return answer
    longest = conversation_tokens(config)
    return max(answer, (longest if positions is None else min(longest, positions)) - prompt)


def conversation_problems(config: RunConfig, section: str) -> Iterator[str]:
    """Rules of the knobs of an RL section's environment and tools."""
    rl: RLConfig = getattr(config, section)
    if not rl.converses:
        return
    knob = f"{section}.{'tools' if rl.tools else 'environment'}"
    if not config.hybrid_engine:
        yield (
            f"hybrid_engine must be on with {knob}, whose conversations go on in its memory; got "
            "off. Remove one of them"
        )
    if config.parallel.inference_tp_size > 1:
        yield (
            f"parallel.inference_tp_size must be 1 with {knob}, whose replies reach each rank at "
            f"its own time; got {config.parallel.inference_tp_size}. Remove one of them"
        )
    if config.dataset.chat_template == "none":
        yield (
            f"dataset.chat_template must have roles with {knob}, or nothing tells an answer from "
            "what it hears; got none. Remove one of them"
        )
    shortest = config.dataset.max_prompt_tokens + config.sampling.max_new_tokens
    if 0 < rl.max_conversation_tokens < shortest:
        yield (
            f"{section}.max_conversation_tokens must be 0 or at least dataset.max_prompt_tokens + "
            f"sampling.max_new_tokens ({shortest}); got {rl.max_conversation_tokens}. Raise it, or "
            "lower one of those"
        )
