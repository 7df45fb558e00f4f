"""The prompts of requests as token ids, and the room that they leave for answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.data.chat.changed_json import texts_of
from tandem.data.render import IN_MEMORY, Renderer
from tandem.data.thinking import thoughts_behind, thoughts_within
from tandem.data.thoughts import NO_THOUGHTS, ThoughtForm
from tandem.errors import DataError, ModelError
from tandem.generation.constrained import Constraint
from tandem.serve.api_errors import ApiError
from tandem.serve.bodies import Prompt, Wanted
from tandem.serve.forms import NO_WISH, Wish, constraint_of
from tandem.serve.loading import Loaded
from tandem.serve.service import Service
from tandem.types import Message


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt as ids. messages, tools: of a conversation; a text is one user's turn. text: what an
    echo repeats. thoughts: how answers to it have them. begun: what the assistant has said of its
    answer behind the messages, in the last `begun_tokens` ids. constraint: the form that answers
    must have. renderer: by which it was made, where that is not the model's. predicted: ids of what
    answers are likely to say."""

    token_ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: str = ""
    thoughts: ThoughtForm = NO_THOUGHTS
    begun: str = ""
    begun_tokens: int = 0
    constraint: Constraint | None = None
    renderer: Renderer | None = None
    predicted: tuple[int, ...] = ()


async def prepare_chat(
    service: Service,
    loaded: Loaded,
    messages: Sequence[Message],
    tools: str = "",
    *,
    continues: bool = False,
    wish: Wish = NO_WISH,
    variables: tuple[tuple[str, str], ...] = (),
    prediction: str = "",
    most: int | None = None,
    answers: int = 1,
) -> Prepared:
    """A conversation as ids, up to where the assistant begins.

    Args:
        tools: that may be called, a list as JSON text.
        continues: the last turn is the beginning of the answer; the ids end with it.
        wish: the form that answers must have.
        variables: of the chat template, that are set.
        prediction: what answers are likely to say.
        most: tokens; a prompt that surely has more is refused before it is tokenized.
        answers: of the request, for which there is room.
    Raises:
        ApiError: the template or the tokenizer refuses it, or shows no tools, or the form cannot
            be followed.
    """

    def rendered() -> Prepared:
        """In a thread: templates may take long."""
        try:
            renderer = loaded.rendering(variables)
        except ModelError as error:
            raise ApiError(str(error), "chat_template_kwargs") from None
        try:
            refuse_long(renderer, messages, tools, most)
            if most is not None and (fewest := _surely_more(renderer, prediction, most)):
                raise _too_long(fewest, most, "prediction")
            if continues:
                return _begun(renderer, messages, prediction)
            row = renderer.prompt(messages, tools=tools)
            predicted = _predicted(renderer, messages, prediction, row.token_ids, tools)
        except DataError as error:
            raise ApiError(str(error), "messages") from None
        if tools and renderer.hides_tools(messages):
            raise no_tools()
        if tools:  # how calls are read is found out once, which takes a moment
            renderer.spoken("", tools, ())
        ids = tuple(row.token_ids)
        thoughts = thoughts_behind(renderer, ids)
        return Prepared(
            ids, tuple(messages), tools=tools, thoughts=thoughts, renderer=renderer,
            predicted=predicted,
        )  # fmt: skip

    prepared = await service.in_text_thread(rendered, is_bounded=most is not None)
    if wish == NO_WISH:
        return prepared

    def formed(seconds: float | None) -> Constraint | None:
        """In another thread: large schemas take seconds."""
        ids = prepared.token_ids
        end = len(ids) - prepared.begun_tokens
        renderer = loaded.rendering(variables)
        return constraint_of(
            renderer, wish, ids[:end], tools=tools, begun=ids[end:], seconds=seconds
        )

    return replace(prepared, constraint=await service.in_form_thread(formed, answers))


def _predicted(
    renderer: Renderer,
    messages: Sequence[Message],
    text: str,
    prompt: Sequence[int],
    tools: str = "",
) -> tuple[int, ...]:
    """A predicted answer's ids, behind those of the prompt; none where the template refuses it."""
    if not text:
        return ()
    try:
        whole = renderer.conversation(messages, text, IN_MEMORY, True, tools=tools)
    except (DataError, ModelError):
        return ()  # it would save time, no more
    return tuple(whole.token_ids[len(prompt) :])


def _begun(renderer: Renderer, messages: Sequence[Message], prediction: str) -> Prepared:
    """A conversation as ids, up to the end of the last turn's text."""
    *asked, last = messages
    row = renderer.conversation(asked, last.content, IN_MEMORY, True, goes_on=True)
    ids, begun = tuple(row.token_ids), last.content
    predicted = _predicted(renderer, asked, prediction and begun + prediction, ids)
    thoughts = thoughts_within(renderer, begun) if begun else thoughts_behind(renderer, ids)
    return Prepared(
        ids, tuple(asked), "", "", thoughts, begun, sum(row.response_mask), renderer=renderer,
        predicted=predicted,
    )  # fmt: skip


def refuse_long(
    renderer: Renderer, messages: Sequence[Message], tools: str, most: int | None
) -> None:
    """Refuse a conversation that surely has more than `most` tokens, before it is tokenized.

    Raises:
        ApiError: it has.
        DataError: the template refuses it.
    """
    said = "".join([tools, *(text for turn in messages for text in texts_of(turn))])
    if most is None or not _surely_more(renderer, said, most):
        return  # without another rendering
    if (fewest := renderer.fewest_tokens(messages, tools)) > most:  # a template may leave some out
        raise _too_long(fewest, most, "messages")


def _surely_more(renderer: Renderer, text: str, most: int) -> int:
    """Tokens that a text has at least, where these are more than `most`; else 0. A text of as few
    characters is not looked at: what bounds its tokens is made of the whole vocabulary."""
    fewest = renderer.pieces.fewest(text) if len(text) > most else 0
    return fewest if fewest > most else 0


def _too_long(fewest: int, most: int, name: str) -> ApiError:
    return ApiError(
        f"this model's maximum context length is {most} tokens; got at least {fewest} tokens of "
        f"{name}. Shorten them.",
        name,
        code="context_length_exceeded",
    )


def no_tools() -> ApiError:
    """What is said where a model would not see the tools."""
    return ApiError(
        "tools must be shown by the model's chat template; this one leaves them out. Remove "
        "tools, or serve a model with a template that writes them.",
        "tools",
        code="unsupported_parameter",
    )


async def prepare_text(
    service: Service,
    loaded: Loaded,
    prompt: Prompt,
    wish: Wish = NO_WISH,
    *,
    most: int | None = None,
    answers: int = 1,
) -> Prepared:
    """A text or ids, as they are.

    Args:
        wish: the form that what follows must have.
        most, answers: as for `prepare_chat`.
    Raises:
        ApiError: the tokenizer refuses the text, the model does not have a token, or the form
            cannot be followed.
    """

    def rendered() -> Prepared:
        """In a thread: a long text takes a while."""
        fewest = len(prompt)
        if most is not None and fewest > most and isinstance(prompt, str):
            fewest = loaded.renderer.pieces.fewest(prompt)
        if most is not None and fewest > most:
            raise _too_long(fewest, most, "prompt")
        if isinstance(prompt, str):
            try:
                ids = loaded.encode(prompt)
            except DataError as error:
                raise ApiError(str(error), "prompt") from None
            return Prepared(ids, (Message("user", prompt),), prompt)
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < loaded.vocabulary:
                raise ApiError(
                    f"prompt must hold token ids from 0 to {loaded.vocabulary - 1}; got {token}.",
                    "prompt",
                )
        return Prepared(prompt, (), loaded.decode(prompt))

    prepared = await service.in_text_thread(rendered, is_bounded=most is not None)
    if wish == NO_WISH:
        return prepared

    def formed(seconds: float | None) -> Constraint | None:
        """In another thread: large schemas take seconds."""
        ids = prepared.token_ids
        return constraint_of(loaded.renderer, wish, ids, is_chat=False, seconds=seconds)

    return replace(prepared, constraint=await service.in_form_thread(formed, answers))


def check_limits(
    service: Service, loaded: Loaded, prompts: Sequence[Prepared], wanted: Wanted, name: str
) -> list[int]:
    """Most tokens of the answer to each prompt.

    Args:
        name: the field that holds the prompts.
    Raises:
        ApiError: a prompt is empty, or does not leave the room that is asked for; a bias or a stop
            names a token that the model does not have.
    """
    context, budgets = service.engine.context_of(loaded), []
    default = 16 if name == "prompt" else service.settings.max_new_tokens
    for prompt in prompts:
        length = len(prompt.token_ids)
        if not length:
            raise ApiError(f"{name} must have at least one token; got none.", name)
        budget = wanted.max_tokens
        if budget is None and length >= context:
            raise ApiError(
                f"this model's maximum context length is {context} tokens; got {length} tokens of "
                f"{name}, which leave none for an answer. Shorten it.",
                name,
                code="context_length_exceeded",
            )
        if budget is None:
            budget = min(default, context - length)
        if length + budget > context:
            raise ApiError(
                f"this model's maximum context length is {context} tokens; got {length} tokens of "
                f"{name} and {budget} of max_tokens, {length + budget} together. Shorten one.",
                name,
                code="context_length_exceeded",
            )
        if wanted.min_tokens > budget:
            raise ApiError(
                f"min_tokens must be at most max_tokens; got {wanted.min_tokens} and {budget}.",
                "min_tokens",
            )
        budgets.append(budget)
    named = {"logit_bias": wanted.sampling.logit_biases(), "stop_token_ids": wanted.stop_ids}
    for field, ids in named.items():
        if (largest := max(ids, default=0)) >= loaded.vocabulary:
            raise ApiError(
                f"{field} must name tokens below the model's {loaded.vocabulary}; got {largest}.",
                field,
            )
    return budgets
