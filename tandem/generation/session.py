"""Continuous batching: rows leave when their answers end, waiting ones come in, none is padded.

One step lets in what fits, gives every live row a token, and sees which answers have ended. Where
`chunk_tokens` says so, prompts run a part at a time between such steps, so that a long one does not
hold the live rows up. Where nobody looks at a token before the end, `run` takes many steps in one
call of a runner that can. On a GPU what was drawn is looked at one step late, so that the device
never waits for the host; the one token too many of an answer that had ended is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.generation import constrained
from tandem.generation.batch_state import Part, Rows
from tandem.generation.blocks import BlockPool
from tandem.generation.drawn import Drawn, Observed
from tandem.generation.keeping import StateKeeper
from tandem.generation.make_runner import make_runner
from tandem.generation.native_runner import NativeRunner
from tandem.generation.prefill import Prefill
from tandem.generation.prefixes import PrefixPool
from tandem.generation.reading import Reading
from tandem.generation.record import Record
from tandem.generation.request import Group, Request
from tandem.generation.runner import new_memory
from tandem.generation.scheduler import Entry, PrefixCounts, Scheduler, state_slots
from tandem.generation.snapshots import Snapshots
from tandem.generation.speculative import Speculator, accepted, runs_ahead
from tandem.models.twin import keeps_states
from tandem.ops import gpu
from tandem.ops.sizes import BLOCK_TOKENS, PREFILL_TOKENS


class Session:
    """Answers being drawn over one KV memory, from the first request to `close`."""

    def __init__(
        self,
        model: PreTrainedModel,
        stop_token_ids: Sequence[int],
        *,
        slots: int,
        num_blocks: int,
        table_width: int,
        refill: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        chunk_tokens: int | None = None,
        share_prefixes: bool = True,
        keep_answers: bool = False,
        spare_slots: int = 0,
        record: Record | None = None,
        late: bool | None = None,
        draft_rows: int = 0,
    ) -> None:
        """Memory is allocated now.

        Args:
            slots: most rows side by side.
            num_blocks: blocks of KV memory.
            table_width: most blocks that one answer can need.
            refill: free rows that are worth letting others in; None takes an eighth of the slots.
            prefill_tokens: most tokens of prompts in one forward; a longer prompt runs in parts.
            chunk_tokens: most tokens of prompts that run in a step, shared fairly (`prefill`);
                None: all that come in.
            share_prefixes: prompts that begin alike share the memory of their beginning.
            keep_answers: later prompts may begin with an answer too, as a conversation's do.
            spare_slots: for snapshots, where layers keep states; with none, nothing is shared there
                but by samples of a prompt.
            record: keeps what is drawn, and its owner looks at the numbers; without one, an
                answer whose distribution is NaN ends as failed.
            late: look at tokens one step late; None does so on a GPU.
            draft_rows: most rows of a step in which tokens that rows are likely to draw next run
                beside them (`speculative`), where a model does so on a CPU; 0: none do.
        """
        has_states = keeps_states(model)
        num_slots = state_slots(slots, spare_slots) if has_states else 0
        memory = new_memory(model, num_blocks, num_slots)
        self._make_runner = partial(make_runner, model, memory, table_width * BLOCK_TOKENS)
        self.runner = self._make_runner()
        self.rows = Rows(slots, table_width, model.device, keeps_states=has_states)
        self._memory = memory
        self._keeper: StateKeeper | None = None
        shares = share_prefixes and (not has_states or spare_slots > 0)
        states = BlockPool(num_slots) if has_states else None
        snapshots = Snapshots(states, spare_slots) if states is not None and shares else None
        self._keep_answers, self._shares_answers = keep_answers, keep_answers and shares
        self._leaves_trails = keep_answers and snapshots is not None
        self._scheduler = Scheduler(
            PrefixPool(num_blocks, snapshots),
            slots,
            refill=max(1, slots // 8) if refill is None else refill,
            shares_prefixes=shares,
            states=states,
            leaves_ends=keep_answers,
        )
        self._prompts = Prefill(memory, model, prefill_tokens, chunk_tokens, snapshots)
        self._entries: list[Entry] = []  # requests whose prompts were let in
        self._ending: list[Group] = []  # prompts of which no more samples are to come in
        self._stop_token_ids = frozenset(stop_token_ids)
        self._record = record
        self._late = model.device.type == "cuda" if late is None else late
        self._reading = Reading(
            stop_token_ids, late=self._late, keep_answers=keep_answers, marks_failed=record is None
        )
        self._observing = False
        self._constraining = False
        speculates = draft_rows > 0 and not (has_states or self._late) and runs_ahead(model)
        self._speculator = Speculator(draft_rows) if speculates else None

    @property
    def busy(self) -> bool:
        """Whether any answer waits or runs, or any token has not been looked at."""
        return bool(
            self.rows.requests
            or self._scheduler.num_waiting
            or self._entries
            or self._reading.is_behind
        )

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Tokens of prompts so far, and how many of them were found in memory."""
        return self._scheduler.counts

    def forget_weights(self) -> None:
        """The weights have changed: what memory holds of prompts is found no longer, and runners
        that keep weights in a form of their own read them again."""
        self._scheduler.pool.forget_all()
        self.runner.close()
        self.runner = self._make_runner()

    def keep(self, keeper: StateKeeper, states: list[Tensor]) -> None:
        """Keep the states of every token from now on, where the native runner runs them."""
        assert isinstance(self.runner, NativeRunner)
        self.runner.keep(states)
        self._keeper = keeper
        self._speculator = None  # a row of states is of a token that was kept

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no answer holds."""
        return self._scheduler.pool.num_free

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue samples of one prompt, which is run once for all of them.

        Raises:
            GenerationError: one alone needs more memory than there is.
        """
        self._scheduler.submit(requests)
        reading = self._reading
        reading.watching = reading.watching or any(r.text is not None for r in requests)
        self._observing = self._observing or any(r.top >= 0 for r in requests)
        self._constraining = self._constraining or any(r.constraint is not None for r in requests)

    def cancel(self, request: Request) -> None:
        """Forget a request, whether it waits or runs; its blocks are free at once."""
        if request.ended:
            return
        request.ended = True
        if request.row >= 0:
            self._let_go([request])
            return
        group = next((entry.group for entry in self._entries if entry.request is request), None)
        if group is None and (group := self._scheduler.withdraw(request)) is not None:
            self._ending.append(group)
        if group is not None:
            self._drop_unwanted(group)
            self._end_prompts()

    @torch.no_grad()
    def step(self) -> list[Drawn]:
        """Let in what fits, give every live row a token, see what has ended."""
        drawn: list[Drawn] = []
        come_in = len(self.rows) + len(self._entries) + len(self._ending)
        entering = self._scheduler.admit(come_in, self._prompts.groups)
        if entering is not None:
            self._prompts.add(entering.prompts)
            self._entries += entering.entries
        if self._entries:
            self._prompts.run(self.runner, self._keeper)
            if self._let_in():
                drawn += self._look()
            self._end_prompts()
        if self.rows.requests:
            drawn += self._decode()
        return drawn + self._look()

    def run(self) -> None:
        """Draw all answers to their ends; nobody looks at a token before that."""
        while self.busy:
            self.step()
            if not self._scheduler.may_admit(len(self.rows)):
                self._advance()

    def close(self) -> None:
        """Free the memory; the session is over."""
        self.runner.close()
        self._memory.free()

    def _decode(self) -> list[Drawn]:
        """One more token of every live row, and more where drafts are worth it; what was read."""
        speculator, live = self._speculator, self.rows.live
        drafts = None if speculator is None else speculator.drafts(live.requests)
        bits: list[constrained.Bits] = []
        if drafts is not None:
            drafts, bits = constrained.followed(live.requests, drafts)
        part = live if drafts is None else self.rows.ahead(drafts)
        began = time.perf_counter()
        logits = self.runner.decode(part.token_ids, part.positions, part.tables, part.states)
        self._reading.step += 1
        if self._keeper is not None:
            self._keeper.decoded(live.token_ids, live.places)
        if self._leaves_trails:
            self._leave_trails(live.requests)
        if drafts is None:
            self._draw(logits, live)
        drawn = [] if drafts is None else self._draw_ahead(logits, part, drafts, bits)
        if speculator is not None:
            speculator.ran(len(part.requests), time.perf_counter() - began)
        return drawn

    def _let_in(self) -> bool:
        """Rows for the requests whose prompts have been run; whether there were any."""
        ready = [entry for entry in self._entries if entry.group.logits is not None]
        if ready:
            self._entries = [entry for entry in self._entries if entry.group.logits is None]
        for entry in ready:
            if entry.request.ended:  # cancelled meanwhile
                self._scheduler.leave(entry.request)
        ready = [entry for entry in ready if not entry.request.ended]
        if not ready:
            return False
        slots = [entry.copied_state for entry in ready if entry.copied_state is not None]
        if slots:
            pairs = gpu.sent(slots, self.rows.device)
            self._memory.copy_states(pairs[:, 0], pairs[:, 1])
        copies = [entry.copy for entry in ready if entry.copy is not None]
        if copies:
            pairs = gpu.sent(copies, self.rows.device)
            self._memory.copy_blocks(pairs[:, 0], pairs[:, 1])
        requests = [entry.request for entry in ready]
        places = [0 if self._record is None else self._record.place(r) for r in requests]
        part = self.rows.enter(requests, places)
        rows_of_logits = [entry.group.logits for entry in ready]
        logits = torch.stack([row for row in rows_of_logits if row is not None])
        for entry in ready:
            group = entry.group
            if group.logits is not None:
                group.logits = group.logits.clone() if group.waiting else None
        self._reading.begin(requests)
        if self._keeper is not None:
            self._keeper.entered(ready)
        self._draw(logits, part)
        return True

    def _drop_unwanted(self, group: Group) -> None:
        """Run a prompt no further of which all samples were cancelled; one that others need is run
        to its end, and its blocks are free then."""
        samples = [entry.request for entry in self._entries if entry.group is group]
        is_wanted = group.waiting or not all(sample.ended for sample in samples)
        if is_wanted or group not in self._prompts.groups:
            return
        if self._scheduler.drop(group, samples, is_ending=group in self._ending):
            self._entries = [entry for entry in self._entries if entry.group is not group]
            self._prompts.drop(group)

    def _end_prompts(self) -> None:
        """Free what prompts have that nobody waits for any more, once they have been run and their
        samples have begun."""
        if not self._ending:
            return
        held = {id(group) for group in self._prompts.groups}
        held |= {id(entry.group) for entry in self._entries}
        for group in [group for group in self._ending if id(group) not in held]:
            self._scheduler.end(group)
            self._ending.remove(group)

    def _leave_trails(self, requests: Sequence[Request]) -> None:
        """Copy the states of rows that have come to the end of a block, for who begins with it."""
        snapshots = self._scheduler.pool.snapshots
        assert snapshots is not None
        pairs = []
        for request in requests:
            tokens = len(request.prompt) + self._reading.step - request.begun
            if tokens % BLOCK_TOKENS == 0:
                if request.trail < 0:
                    request.trail = snapshots.begin_trail()
                if request.trail >= 0:
                    request.trail_tokens = tokens
                    pairs.append((request.state, request.trail))
        if pairs:
            slots = gpu.sent(pairs, self.rows.device)
            self._memory.copy_states(slots[:, 0], slots[:, 1])

    def _draw(self, logits: Tensor, part: Part) -> None:
        """Draw for these rows; those that have reached their limit leave before the next step."""
        allowed = self._allowed(logits, part)
        draw = self.runner.draw(logits, part) if allowed is None else None
        draw = draw or self.rows.draw(logits, part, allowed)
        if allowed is not None:
            constrained.take_drawn(part.requests, draw.tokens)
        observed = Observed.of(logits, draw.tokens, part.requests) if self._observing else None
        places = self.rows.advance(draw.tokens, part)
        if self._record is not None:
            self._record.keep(places, draw)
        self._reading.add(part.requests, draw.tokens, draw.sampled_logprobs, observed)

    def _draw_ahead(
        self, logits: Tensor, ahead: Part, drafts: list[list[int]], bits: list[constrained.Bits]
    ) -> list[Drawn]:
        """Draw behind every token of `ahead`, and keep of each row what is drawn as it was guessed,
        and one more; what was read of it."""
        allowed = constrained.allowed_by(bits, ahead.requests, logits.shape[1], logits.device)
        draw = self.rows.draw(logits, ahead, allowed)
        live = self.rows.live.requests
        rows = accepted(draw.tokens.tolist(), drafts)
        drawn: list[Drawn] = []
        for turn in range(max(map(len, rows))):
            kept = [
                own[turn]
                for request, own in zip(live, rows, strict=True)
                if turn < len(own) and not request.ended
            ]
            if not kept:
                break
            now, requests = draw.at(kept), [ahead.requests[row] for row in kept]
            if turn:
                self._reading.draw_again(requests)
            if allowed is not None:
                constrained.take_drawn(requests, now.tokens)
            if self._record is not None:
                self._record.keep(ahead.places[kept], now)
            observed = Observed.of(logits[kept], now.tokens, requests) if self._observing else None
            self._reading.add(requests, now.tokens, now.sampled_logprobs, observed)
            drawn += self._read()
        self.rows.jump(draw.tokens[[own[-1] for own in rows]], [len(own) for own in rows])
        return drawn

    def _allowed(self, logits: Tensor, part: Part) -> Tensor | None:
        if not self._constraining:
            return None
        return constrained.allowed_tokens(part.requests, logits.shape[1], logits.device)

    @torch.no_grad()
    def _advance(self) -> None:
        """Several steps in one call, where nobody has to look at what each draws."""
        looked_at = self._late or self._reading.watching or self._observing or self._keep_answers
        if looked_at or self._constraining or self._record is None:
            return
        if self._entries or not self.rows.requests:
            return
        until = self._scheduler.rows_that_let_in
        made = self.runner.advance(self.rows, self._stop_token_ids, until)
        if made is None:
            return
        if self._keeper is not None:
            self._keeper.decoded(made.ran, made.places)
        self._record.keep(made.places, made.draw)
        before = self.rows.requests
        self.rows.keep(made.live)
        for row, step, finished in made.ended:
            self._reading.end(before[row], self._reading.step + step, finished=finished)
        self._reading.pass_over(made.steps)
        for request in self._reading.leaving:
            self._scheduler.leave(request)
        self._reading.leaving = []

    def _look(self) -> list[Drawn]:
        """Read the tokens that are due, and let the rows of answers that ended go."""
        drawn = self._read()
        if leaving := self._reading.left():
            self._let_go(leaving)
        return drawn

    def _read(self) -> list[Drawn]:
        drawn = self._reading.due(len(self.rows.requests))
        if self._speculator is not None:
            for part in drawn:
                self._speculator.read(part.requests, part.token_ids)
        return drawn

    def _let_go(self, requests: list[Request]) -> None:
        self.rows.leave(requests)
        if self._speculator is not None:
            for request in requests:
                self._speculator.forget(request)
        for request in requests:
            # The last token has been drawn, but not been run.
            keeps = self._shares_answers and not request.failed
            answer = request.drawn[:-1] if keeps else None
            self._scheduler.leave(request, answer)
