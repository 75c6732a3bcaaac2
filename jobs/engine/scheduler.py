"""Continuous-batching scheduler (Orca, Yu et al., OSDI 2022) with chunked prefill.

Each step computes one token of every sequence in the batch, and as many prompt tokens as fit into a
time budget, so that a long prompt does not delay the sequences that are decoding. The jobs share
the batch and the budget by tokens (`shares.py`): a sequence whose job has no place for it in this
step keeps its memory and waits, and completions of one prompt begin as their job gets places.

A step without prompt tokens may verify drafts (`speculation.py`): a sequence then gets several
tokens in one step, each drawn from the logits of a step of its own, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .image_encoding import PromptImages, VisionEncoder
from .kv_cache import PrefixCache
from .parts import Part
from .prefill_budget import AHEAD_S, PrefillBudget
from .request import End, Request
from .sequence import Sequence, keys_of, now
from .shares import Prefilled, Share, Shares, divided
from .speculation import NoDrafts, Speculation
from .token_logprobs import token_logprobs

MAX_SEQUENCES = 64  # in a batch
_SPARE = 1 / 8  # of the KV memory: left free for jobs that run nothing yet
_SCORED_TOKENS = 256  # of a prompt per step, if the logits of all its tokens are needed


class Scheduler(ABC):
    """Schedules sequences of one runner, of requests that are in its shares.

    `Engine` serves texts with it, `rollouts` samples the completions of a training. They make the
    sequences, draw their tokens and decide what an error ends.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        prefill: PrefillBudget,
        ends: frozenset[int],
        most_sequences: int = MAX_SEQUENCES,
        prefix_cache: PrefixCache | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`budget_bytes`: KV caches of running sequences and the prefix cache together.

        `prefill`: how many prompt tokens a step takes. `ends`: the tokens that end a completion.
        `most_sequences`: in a batch. `prefix_cache`: None to compute each prompt from its start.
        `speculation`: None to draft nothing.
        """
        self._runner: Any = None
        self._vision: VisionEncoder | None = None  # None: a text model
        self._budget_bytes = budget_bytes
        self._prefill = prefill
        self._ends = ends
        self._most_sequences = most_sequences
        self._prefix_cache = prefix_cache
        self._speculation = speculation or NoDrafts()
        self._shares = Shares()
        # The jobs that lack memory in this step, with the bytes that each needs.
        self._blocked: list[tuple[Share, int]] = []

    @abstractmethod
    def _sequence(self, request: Request, index: int, kv: Any) -> Sequence:
        """Begin a completion of a request."""

    @abstractmethod
    def _append_token(self, sequence: Any, logits: torch.Tensor) -> None:
        """Draw the first token of a sequence from logits (V,), and accept it."""

    @abstractmethod
    def _append_tokens(self, sequences: list[Any], logits: torch.Tensor) -> None:
        """Draw the next token of each sequence from logits (sequences, V), and accept it."""

    @abstractmethod
    def _isolating_errors(self, request: Request) -> AbstractContextManager[None]:
        """Decide what an error ends that a request has caused."""

    def _capacity(self, request: Request) -> int:
        """Return the positions that a completion of a request may take."""
        return len(request.ids) + request.max_tokens

    def _kv(self, request: Request) -> Any:
        """Return the KV cache that the prompt of a request is computed into."""
        return self._runner.new(self._capacity(request))

    def _is_any_decoding(self) -> bool:
        """Return whether a sequence of this process waits for the step."""
        return self.is_decoding

    @property
    def is_decoding(self) -> bool:
        return any(share.decoding for share in self._shares)

    def _compute_step(self) -> bool:
        """Compute a step of what is in the shares; return whether there was anything to compute."""
        self._drop_canceled()
        self._shares.drop_idle()
        shares = self._shares.in_turn()
        wanted = [share.wanted_places(self._most_sequences) for share in shares]
        for share, places in zip(shares, divided(self._most_sequences, wanted), strict=True):
            share.places = places
        self._admit(shares)
        decoding = [one for share in shares for one in share.decoding[: share.places]]
        prefilling = self._schedule_prefill(shares, len(decoding))
        if not decoding and not prefilling:
            return False
        begun = now()
        drafts = [[]] * len(decoding) if prefilling else self._drafts(decoding)
        parts = [_decoding_part(*pair) for pair in zip(decoding, drafts, strict=True)]
        row = sum(part.num_logits for part in parts)
        parts += [part for _, part in prefilling]
        logits = self._runner.forward(parts)
        if prefilling and logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # CUDA is asynchronous: wait before timing
        seconds = now() - begun
        if not prefilling:
            self._speculation.measure(row, seconds)
        if any(drafts):
            self._verify(decoding, drafts, logits)
        else:
            self._append_tokens(decoding, logits[:row])
        for sequence, part in prefilling:
            of_part, row = logits[row : row + part.num_logits], row + part.num_logits
            share = self._shares.of(sequence.request)
            share.num_tokens += len(part.ids)
            with self._isolating_errors(sequence.request):
                if part.wants_all_logits:
                    begun = now()
                    self._score(sequence, part, of_part)
                    seconds += now() - begun
                if part.wants_logits:
                    self._end_prefill(share, sequence, of_part[-1])
                else:
                    share.prefilling.remove(sequence)
                    share.prefilling.append(sequence)  # round robin over prompts
        num_prefilled = sum(len(part.ids) for _, part in prefilling)
        self._prefill.measure(num_prefilled, len(decoding), seconds)
        return True

    def _drafts(self, decoding: list[Sequence]) -> list[list[int]]:
        """Return the tokens to verify in this step, for each sequence."""
        lookups = [one.lookup for one in decoding if one.lookup is not None]
        if len(lookups) < len(decoding):
            return [[]] * len(decoding)
        # The last token of a completion is drawn, but not computed.
        room = [self._capacity(one.request) - one.kv.length - 2 for one in decoding]
        counts = self._speculation.counts(lookups, room)
        return [lookup.drafts(count) for lookup, count in zip(lookups, counts, strict=True)]

    def _verify(
        self, decoding: list[Sequence], drafts: list[list[int]], logits: torch.Tensor
    ) -> None:
        """Draw the tokens of a step with drafts from logits (rows, V), and accept them."""
        row = 0
        for sequence, drafted in zip(decoding, drafts, strict=True):
            of_sequence = logits[row : row + 1 + len(drafted)]
            row += len(of_sequence)
            with self._isolating_errors(sequence.request):
                self._verify_one(sequence, drafted, of_sequence)

    def _verify_one(self, sequence: Sequence, drafts: list[int], logits: torch.Tensor) -> None:
        """Draw tokens until one differs from its draft: the rows after it follow another token.

        logits: (1 + drafts, V). What the KV cache holds beyond its length is overwritten later.
        """
        stats = sequence.request.stats
        stats.drafted_tokens += len(drafts)
        sequence.kv.length -= len(drafts)
        self._append_token(sequence, logits[0])
        for draft, of_token in zip(drafts, logits[1:], strict=True):
            if sequence.next_token != draft or not self._is_decoding(sequence):
                return
            stats.accepted_tokens += 1
            sequence.kv.length += 1
            self._append_token(sequence, of_token)

    def _drop_canceled(self) -> None:
        for share in self._shares:
            for prompt in [one for one in share.prefilled if one.request.is_canceled()]:
                share.prefilled.remove(prompt)
                if not share.has(prompt.request):
                    prompt.request.pieces.put(End())
            for sequence in [*share.prefilling, *share.decoding]:
                if sequence.request.is_canceled():
                    sequence.cancel()
                    self._cache_prefix(sequence)
                    self._finish(sequence)
            # Requests of one job are canceled together: those behind the first one, at its turn.
            while share.waiting and share.waiting[0][0].is_canceled():
                share.waiting.popleft()[0].pieces.put(End())

    def _admit(self, shares: list[Share]) -> None:
        """Begin what the jobs have places for, while the memory budget has room."""
        self._blocked = []
        for share in shares:
            self._begin_completions(share)
            if not share.prefilled:
                self._begin_prompts(share)

    def _begin_prompts(self, share: Share) -> None:
        left = share.places - len(share.decoding)
        left -= sum(s.request.num_completions for s in share.prefilling)
        while share.waiting and left > 0:
            request, since = share.waiting[0]
            needed = self._runner.num_bytes(self._capacity(request))
            if share.prefilling:  # else the first one would lack memory for its completions
                needed *= request.num_completions
                needed += sum(
                    self._runner.num_bytes(self._capacity(one.request))
                    * (one.request.num_completions - 1)
                    for one in share.prefilling
                )
            if not self._has_room(share, needed):
                return
            share.waiting.popleft()
            left -= request.num_completions
            with self._isolating_errors(request):
                sequence = self._sequence(request, 0, self._kv(request))
                request.stats.queued_s = now() - since
                share.prefilling.append(sequence)

    def _has_room(self, share: Share, needed: int) -> bool:
        """Whether a job gets that many bytes now; evicts cached prefixes to make room.

        A job that runs something leaves a part of the budget, and gets nothing while another one
        lacks memory. One that runs nothing yet may pass jobs that lack memory, if they will have
        enough when those that came before them have ended.
        """
        left = self._budget_bytes - self._held_bytes(self._shares) - needed
        if not any(one.decoding or one.prefilling for one in self._shares):
            has_room = True  # alone, even beyond the budget
        elif share.is_running:
            has_room = left >= self._budget_bytes * _SPARE and not self._blocked
        else:
            has_room = left >= 0 and all(self._may_pass(*one, needed) for one in self._blocked)
        if has_room and self._prefix_cache is not None:
            self._prefix_cache.shrink_to(max(0, left))
        elif not has_room:
            self._blocked.append((share, needed))
        return has_room

    def _may_pass(self, blocked: Share, lacking: int, needed: int) -> bool:
        """Whether a job that lacks memory will have enough though another one gets `needed`."""
        later = self._held_bytes(self._shares.after(blocked))
        return later + needed <= self._budget_bytes - lacking

    def _held_bytes(self, shares: Iterable[Share]) -> int:
        """Bytes reserved for sequences, and for prompts with completions that have not begun."""
        return sum(
            self._runner.num_bytes(self._capacity(one.request))
            for share in shares
            for one in share.holders
        )

    def _schedule_prefill(
        self, shares: list[Share], num_decoding: int
    ) -> list[tuple[Sequence, Part]]:
        """Choose the prompt tokens of this step, in whole chunks, round robin over prompts."""
        prompts = [
            list(share.prefilling)[: max(0, share.places - len(share.decoding))] for share in shares
        ]
        seconds = self._prefill.seconds(
            sum(map(len, prompts)),
            num_decoding,
            is_any_decoding=self._is_any_decoding(),
        )
        encode_until = now() + seconds
        room = self._prefill.tokens(seconds)
        # Jobs that have had fewer tokens wait for the prompts of those that are ahead of them.
        fewest = min(share.num_tokens for share in shares) if shares else 0
        is_ahead = [share.num_tokens > fewest for share in shares]
        room_ahead = self._prefill.tokens(min(seconds, AHEAD_S))
        wanted = [
            min(
                sum(len(s.request.computed) - s.kv.length for s in of_share),
                room_ahead if ahead else room,
            )
            for of_share, ahead in zip(prompts, is_ahead, strict=True)
        ]
        planned = []
        for of_share, ahead, granted in zip(prompts, is_ahead, divided(room, wanted), strict=True):
            for sequence in of_share:
                granted = min(granted, room, room_ahead if ahead else room)
                if granted <= 0:
                    break
                with self._isolating_errors(sequence.request):
                    if self._is_ready(sequence, encode_until):
                        part = self._prefill_part(sequence, granted)
                        planned.append((sequence, part))
                        granted -= len(part.ids)
                        room -= len(part.ids)
                        room_ahead -= len(part.ids) if ahead else 0
        return planned

    def _prefill_part(self, sequence: Sequence, room: int) -> Part:
        ids, begin = sequence.request.computed, sequence.kv.length
        chunk = self._runner.chunk
        is_scored = sequence.request.scored_from is not None
        if chunk is None:
            end = len(ids)
        else:
            end = begin + max(min(room, _SCORED_TOKENS) if is_scored else room, 1)
            end = min(-(-end // chunk) * chunk, len(ids))
        images = sequence.images
        return Part(
            sequence.kv,
            ids[begin:end],
            end == len(ids),
            wants_all_logits=is_scored and end > sequence.request.computed_from,
            positions=None if images is None else images.positions[:, begin:end],
            adapter=sequence.request.adapter,
            features=() if images is None else images.features(begin, end),
        )

    def _score(self, sequence: Sequence, part: Part, logits: torch.Tensor) -> None:
        """Keep the log-probabilities of the prompt tokens that a part's logits (T, V) predict."""
        request = sequence.request
        assert request.scored_from is not None
        begin = sequence.kv.length - len(part.ids)
        first = max(begin + 1, request.scored_from)
        tokens = request.ids[first : sequence.kv.length + 1]
        rows = logits[first - 1 - begin :][: len(tokens)]
        request.scores += token_logprobs(rows, tokens, request.num_top or 0)

    def _is_ready(self, sequence: Sequence, encode_until: float) -> bool:
        """Prepare the next prompt; return False while its images are still being encoded."""
        if sequence.begun_at is None:
            sequence.begun_at = now()
            self._reuse_prefix(sequence)
            if sequence.request.images:
                assert self._vision is not None
                sequence.images = PromptImages(self._vision, sequence.request, sequence.kv.length)
        if sequence.images is None or sequence.images.is_complete:
            return True
        begun = now()
        sequence.images.encode(until=encode_until)
        sequence.begun_at = now()
        sequence.request.stats.vision_s += sequence.begun_at - begun
        return sequence.images.is_complete

    def _end_prefill(self, share: Share, sequence: Sequence, logits: torch.Tensor) -> None:
        """Begin the completions of a prefilled prompt that there are places for. logits: (V,)."""
        request = sequence.request
        self._cache_prefix(sequence)
        assert sequence.begun_at is not None
        done = now()
        request.stats.prefill_s = done - sequence.begun_at
        share.prefilling.remove(sequence)
        if request.num_completions > 1:
            logits = logits.clone()  # the others of the step need not stay in memory
        share.prefilled.append(Prefilled(sequence, sequence.kv, logits, done))
        self._begin_completions(share)

    def _begin_completions(self, share: Share) -> None:
        """Begin completions of prefilled prompts while the job has places and memory for them."""
        while share.prefilled and len(share.decoding) < share.places:
            prompt = share.prefilled[0]
            is_last = prompt.num_left == 1
            needed = self._runner.num_bytes(self._capacity(prompt.request))
            if not is_last and not self._has_room(share, needed):
                return
            with self._isolating_errors(prompt.request):
                self._begin_completion(share, prompt)

    def _begin_completion(self, share: Share, prompt: Prefilled) -> None:
        """Begin the next completion of a prompt, and sample its first token."""
        request, index, kv = prompt.request, prompt.num_begun, prompt.kv
        if prompt.num_left > 1:
            kv = self._runner.fork(kv, len(request.computed), self._capacity(request))
        else:
            share.prefilled.remove(prompt)
        prompt.num_begun += 1
        sequence = prompt.first
        if index:
            sequence = self._sequence(request, index, kv)
            sequence.images = prompt.first.images
        sequence.kv = kv
        sequence.begun_at = prompt.done_at
        share.decoding.append(sequence)
        if request.max_tokens:
            self._append_token(sequence, prompt.logits)
        else:
            sequence.end_scored()
            self._finish(sequence)

    def _accept_token(self, sequence: Sequence, token: int, logits: torch.Tensor) -> None:
        """Append a token that was sampled from logits (V,)."""
        self._shares.of(sequence.request).num_tokens += 1
        logprob = None
        if (num_top := sequence.request.num_top) is not None:
            (logprob,) = token_logprobs(logits[None], [token], num_top)
        if sequence.lookup is not None:
            sequence.lookup.add(token)
        sequence.accept(token, self._ends, logprob)
        if sequence.finish_reason is not None:
            self._finish(sequence)

    def _is_decoding(self, sequence: Sequence) -> bool:
        return sequence in self._shares.of(sequence.request).decoding

    def _finish(self, sequence: Sequence) -> None:
        """Remove a sequence; the last one of a request ends the request."""
        request = sequence.request
        share = self._shares.of(request)
        if sequence in share.prefilling:
            share.prefilling.remove(sequence)
        else:
            share.decoding.remove(sequence)
            assert sequence.begun_at is not None
            request.stats.decode_s = now() - sequence.begun_at
        if not share.has(request):
            request.pieces.put(End())

    # --- Prefix cache -------------------------------------------------------------------------

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Start from the longest cached prefix of this prompt."""
        if self._runner.chunk is None or self._prefix_cache is None:
            return
        # The last prompt token is always computed: its logits give the first new token.
        request = sequence.request
        found = self._prefix_cache.find(keys_of(request)[: request.computed_from])
        if found is not None:
            kv, length = found
            sequence.kv.copy_prefix(kv, length)
            sequence.request.stats.cached_tokens = length

    def _cache_prefix(self, sequence: Sequence) -> None:
        """Cache the whole chunks of a prompt that were computed, if the budget has room."""
        chunk = self._runner.chunk
        if chunk is None or self._prefix_cache is None or sequence.index:
            return
        length = min(sequence.kv.length, len(sequence.request.ids)) // chunk * chunk
        keys = keys_of(sequence.request)[:length]
        if not length or self._prefix_cache.has(keys):
            return
        room = self._budget_bytes - self._held_bytes(self._shares)
        room -= self._runner.num_bytes(length)
        if room >= 0:
            self._prefix_cache.make_room(keys, room)
            self._prefix_cache.add(keys, self._runner.fork(sequence.kv, length, length))


def _decoding_part(sequence: Sequence, drafts: list[int]) -> Part:
    """Return the part of a decoding sequence: its next token, and drafts to verify."""
    return Part(
        sequence.kv,
        (sequence.next_token, *drafts),
        True,
        wants_all_logits=bool(drafts),
        verifies=bool(drafts),
        offset=sequence.offset,
        adapter=sequence.request.adapter,
    )
