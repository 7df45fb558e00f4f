"""Fields of requests that would change the answer and are not supported: refused by name.

An answer that silently differs from what was asked for is worse than none. So is one to a request
whose field is mistyped: a name that nobody knows is ignored, unless it is like one that is read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.serve import fields
from tandem.serve.api_errors import ApiError

TEMPLATE = ("chat_template", "documents")
"""Fields that change how turns are rendered."""
CHAT = ("functions", "audio", "web_search_options", "verbosity", "echo",
        "reasoning", "thinking", *TEMPLATE)  # fmt: skip
FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
         "guided_grammar", "json_schema", "regex", "ebnf", "grammar")  # fmt: skip
"""Fields by which a form is asked of answers."""
BOTH = ("format", "guided_whitespace_pattern", "guided_decoding_backend", "use_beam_search",
        "prompt_embeds", "mirostat", "xtc_probability", "dry_multiplier", "bad_words",
        "allowed_token_ids", "stop_sequences", "stop_regex",
        "include_stop_str_in_output", "no_stop_trim", "truncate_prompt_tokens", "samplers",
        "logits_processors", "custom_logit_processor", "skip_special_tokens", "prompt_logprobs",
        "n_probs", "top_n_tokens", "return_token_ids", "return_tokens_as_token_ids",
        "max_new_tokens", "min_new_tokens", "max_output_tokens", "num_predict", "thinking_budget",
        "thinking_token_budget", "lora_path", "adapter_id", "no_repeat_ngram_size",
        "extra_body")  # fmt: skip
NEUTRAL: dict[str, tuple[float | bool, ...]] = {
    "add_special_tokens": (True,), "n_predict": (-1,),
    "repeat_penalty": (1,), "length_penalty": (1,), "typical_p": (1,), "tfs_z": (1,), "top_a": (0,),
    "top_n_sigma": (-1,), "dynatemp_range": (0,), "do_sample": (True,), "enable_thinking": (),
    "num_beams": (1,),
}  # fmt: skip
"""Fields of other servers that are not supported, and the values with which they change nothing."""
NEUTRAL_CHAT = {**NEUTRAL, "best_of": (1,)}
_SAMPLING = ("model", "n", "stop", "stop_token_ids", "seed", "max_tokens", "stream",
             "stream_options", "temperature",
             "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "min_tokens",
             "repetition_penalty", "logit_bias", "ignore_eos", "logprobs", "tandem",
             *FORMS)  # fmt: skip
OF_CHAT = (*_SAMPLING, "messages", "tools", "tool_choice", "top_logprobs", "parallel_tool_calls",
           "max_completion_tokens", "prediction", "reasoning_effort", "modalities", "function_call",
           "continue_final_message", "add_generation_prompt", "chat_template_kwargs")  # fmt: skip
OF_COMPLETION = (*_SAMPLING, "prompt", "echo", "best_of", "suffix")
OF_SCORE = ("model", "messages", "tools", "tandem")
OF_TOKENIZE = ("model", "messages", "tools", "prompt", "content", "add_special_tokens",
               "continue_final_message", "add_generation_prompt",
               "chat_template_kwargs")  # fmt: skip
"""Fields that are read."""
NEUTRAL_TOKENIZE: dict[str, tuple[float | bool, ...]] = {
    "add_special": (True,), "parse_special": (False,),
    "with_pieces": (False,), "return_token_strs": (False,),
}  # fmt: skip
"""As `NEUTRAL`, of /tokenize."""
_ALIKE = 0.88


def refuse(
    body: Mapping[str, Any],
    names: Sequence[str],
    read: Sequence[str],
    neutral: Mapping[str, tuple[float | bool, ...]] = NEUTRAL,
) -> None:
    """Refuse what is not supported, and what seems to be a field with a slip in its name.

    Args:
        names: refused unless empty. read: the fields that the request has.
        neutral: refused unless one of the values.
    Raises:
        ApiError: there is such a field.
    """
    for name in names:
        if body.get(name):
            raise unsupported(name, body[name])
    for name, values in neutral.items():
        if body.get(name) is not None and body[name] not in values:
            raise unsupported(name, body[name])
    known = {*names, *neutral, *read}
    for name, value in body.items():
        if name not in known and value is not None and (near := _like(name, read)):
            raise ApiError(
                f"{fields.shown(name)} is no field of this request. Did you mean {near}?",
                name if name.isprintable() else None,
                code="unknown_parameter",
            )


def _like(name: str, read: Sequence[str]) -> str:
    """The field that a name may stand for; "" if it is like none."""
    if len(name) > 2 * max(map(len, read)):  # a comparison takes time
        return ""
    spelled = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return next(iter(difflib.get_close_matches(spelled, read, n=1, cutoff=_ALIKE)), "")


def refuse_other_answers(body: Mapping[str, Any]) -> None:
    """Refuse what asks for an answer that is not text.

    Raises:
        ApiError: something does.
    """
    if body.get("function_call") not in (None, "none", "auto"):
        raise unsupported("function_call", body["function_call"])
    modalities = body.get("modalities")
    if modalities not in (None, [], ["text"]):
        raise unsupported("modalities", modalities)
    if body.get("reasoning_effort") not in (None, "none"):
        raise unsupported("reasoning_effort", body["reasoning_effort"])


def unsupported(name: str, value: Any) -> ApiError:
    """The error of a field that is not supported."""
    return ApiError(
        f"{name} is not supported by this server; got {fields.shown(value)}. Remove it.",
        name,
        code="unsupported_parameter",
    )
