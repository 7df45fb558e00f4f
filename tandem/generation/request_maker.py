"""Prompts to requests, and ended requests to answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tandem.config.answer_form import FormError, forget_forms, form_of
from tandem.config.schema import SamplingConfig
from tandem.data.render import Renderer
from tandem.errors import GenerationError
from tandem.generation.collected import rollout_of, text_of
from tandem.generation.constrained import Constraint, constrainer_of
from tandem.generation.conversing import ConversationRow, Conversed, Conversing
from tandem.generation.detokenizer import AnswerText
from tandem.generation.following import Followed, Following
from tandem.generation.keeping import StateKeeper
from tandem.generation.limits import check_prompts, vocabulary_size
from tandem.generation.request import Request
from tandem.generation.sampler import Draw, Sampler, sequence_key
from tandem.generation.stops import Stops
from tandem.types import PromptRow, Rollout


def sampler_of(model: PreTrainedModel, sampling: SamplingConfig, stops: Stops) -> Sampler:
    """What draws a model's answers, of tokens that have a text.

    Raises:
        ConfigError, GenerationError: as `Sampler`.
    """
    vocabulary = vocabulary_size(model)
    return Sampler(sampling, stops.stop_token_ids, model.device, vocabulary, stops.num_ids)


def watched_text(stops: Stops, sampling: SamplingConfig) -> AnswerText | None:
    """What looks out for stop strings in one answer; None where there are none."""
    if not sampling.stop_strings:
        return None
    return AnswerText(stops.decode, sampling.stop_strings, sampling.min_new_tokens)


def constraint_of(
    stops: Stops, sampling: SamplingConfig, prompt: Sequence[int], tools: str = ""
) -> Constraint | None:
    """Of the form that answers to a prompt must have; None where they need have none.

    Args:
        tools: that the prompt lists, as JSON text: then answers may be calls instead.
    Raises:
        GenerationError: the form cannot be followed, or `stops` does not know the conversation
            format.
    """
    try:
        form = form_of(sampling)
        if form is None:
            return None
        if stops.renderer is None:
            raise GenerationError(
                "answers with a form need the conversation format that they are in; got stops "
                "without one. Make them by Stops.of(renderer)."
            )
        constrainer = constrainer_of(stops.renderer)
        return constrainer.answer(constrainer.or_calls(form, tools), prompt)
    except FormError as error:
        raise GenerationError(f"{error}.") from None


def form_problems(sampling: SamplingConfig, renderer: Renderer) -> list[str]:
    """Why answers in this conversation format cannot have the form that is asked of them; files
    of schemas are read again."""
    forget_forms()
    try:
        constraint_of(Stops.of(renderer), sampling, ())
    except GenerationError as error:
        return [str(error).rstrip(".")]
    return []


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Prompts to requests, and ended requests to answers."""

    model: PreTrainedModel
    sampler: Sampler
    sampling: SamplingConfig
    stops: Stops
    seed: int
    step: int
    numbers: Sequence[int]

    def requests(self, row: PromptRow, place: int) -> list[Request]:
        """One per sample of the prompt at that place; the numbers of prompts that follow count
        on."""
        samples, limit = self.sampling.samples_per_prompt, self.sampling.max_new_tokens
        beyond = place - len(self.numbers)
        if beyond >= 0:
            check_prompts(self.model, [row], limit)
        number = self.numbers[place] if beyond < 0 else max(self.numbers) + 1 + beyond
        constraint = constraint_of(self.stops, self.sampling, row.token_ids, row.tools)
        return [
            self._request(place * samples + i, row, (number, i), constraint) for i in range(samples)
        ]

    def later(self, row: ConversationRow, place: int, number: int) -> Request:
        """That of a conversation's next answer; `place` counts conversations, `number` requests."""
        check_prompts(self.model, [row], self.sampling.max_new_tokens)
        prompt, sample = divmod(place, self.sampling.samples_per_prompt)
        names = self.numbers[prompt], sample, row.num_answers - 1
        constraint = constraint_of(self.stops, self.sampling, row.token_ids, row.tools)
        return self._request(number, row, names, constraint)

    def _request(
        self, number: int, row: PromptRow, names: tuple[int, ...], constraint: Constraint | None
    ) -> Request:
        """`names`: what keys its randomness beside seed and step."""
        return Request(
            number,
            tuple(row.token_ids),
            sequence_key(self.seed, self.step, *names),
            self.sampler,
            self.sampling.max_new_tokens,
            watched_text(self.stops, self.sampling),
            None if constraint is None else constraint.copy(),
        )

    def joining(
        self,
        prompts: Sequence[PromptRow],
        groups: Sequence[list[Request]],
        following: Following | None,
        conversing: Conversing | None,
    ) -> Followed | Conversed | None:
        """What joins these requests while they run."""
        if following is not None:
            return Followed(following, prompts, groups, self.requests, self.answers)
        if conversing is not None:
            return Conversed(conversing, prompts, groups, self.later, self.text)
        return None

    def rollout(
        self,
        prompts: Sequence[PromptRow],
        groups: Sequence[list[Request]],
        draws: Draw,
        joining: Followed | Conversed | None = None,
        keeper: StateKeeper | None = None,
    ) -> Rollout:
        """The answers to prompts, and to those that joined; draws are by the requests' numbers."""
        samples = self.sampling.samples_per_prompt
        if isinstance(joining, Conversed):
            rows, chains = joining.rows, joining.chains
            draws = draws.at([request.number for chain in chains for request in chain])
            return rollout_of(rows, chains, draws, self.stops, samples)
        if joining is not None:
            prompts, groups = joining.prompts, joining.groups
        owners = [row for row in prompts for _ in range(samples)]
        chains = [[request] for group in groups for request in group]
        return rollout_of(owners, chains, draws, self.stops, samples, keeper)

    def text(self, request: Request, token_ids: list[int]) -> str:
        """An ended answer's text."""
        return text_of(request, token_ids, self.stops)

    def answers(
        self, row: PromptRow, requests: list[Request], token_ids: list[list[int]]
    ) -> Rollout:
        """A prompt's answers of which the tokens alone are known."""
        limit, device = self.sampling.max_new_tokens, self.model.device
        tokens = torch.tensor([ids + [0] * (limit - len(ids)) for ids in token_ids], device=device)
        nothing = torch.zeros(tokens.shape, device=device)
        draws = Draw(tokens, nothing, nothing, nothing)
        return self.rollout([row], [requests], draws)
