"""Continuous-batching scheduler (Orca, Yu et al., OSDI 2022) with chunked prefill.

Each step computes one token of every sequence in the batch, and as many prompt tokens as fit into a
time budget, so that a long prompt does not delay the sequences that are decoding. The jobs share
the batch and the budget by tokens (`shares.py`): a sequence whose job has no place for it in this
step keeps its memory and waits, and completions of one prompt begin as their job gets places.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..compute.device import exit_if_context_lost, free_bytes
from ..compute.levels import NATIVE
from ..compute.threads import compute_with
from ..context import WarmModel
from ..errors import JobFailed
from ..models.vocabulary import Vocabulary
from .compute_thread import COMPUTE_THREAD
from .decoder import Decoder
from .fallback import FallbackRunner
from .grammar import Grammar, Grammars
from .image_encoding import PromptImages, VisionEncoder
from .image_tokens import check_takes_images
from .kv_cache import PrefixCache
from .parts import Part
from .prefill_budget import AHEAD_S, PrefillBudget
from .request import End, Request
from .sampling import sample_batch
from .sequence import Sequence, keys_of, now
from .shares import Prefilled, Share, Shares, divided
from .token_logprobs import token_logprobs

log = logging.getLogger(__name__)

MAX_SEQUENCES = 64  # in a batch
_KV_SHARE = 0.4  # of the memory that is free when the engine is created
_SPARE = 1 / 8  # of the KV memory: left free for jobs that run nothing yet
_SCORED_TOKENS = 256  # of a prompt per step, if the logits of all its tokens are needed
_NEVER_PACK = 2**62  # bytes that packing must leave free: more than any machine has
_FEATURES_SHARE = 0.1  # of `budget_bytes`, in addition to it: the cache of image features


class Engine:
    """Schedules the requests of one model. `submit` may be called from any thread."""

    def __init__(
        self,
        warm: WarmModel,
        *,
        precision: str = NATIVE,
        budget_bytes: int | None = None,
        prefill: PrefillBudget | None = None,
    ) -> None:
        """`budget_bytes`: KV caches of running sequences and the prefix cache together.

        `prefill`: how many prompt tokens a step takes (default: by the measured speed).
        """
        self._warm = warm
        self._precision = precision
        self._is_on_gpu = warm.model.device.type != "cpu"
        self._samples_batches = self._is_on_gpu  # one by one, each token would wait for the device
        self._chooses_budget = budget_bytes is None
        self._budget_bytes = budget_bytes or int(free_bytes(warm.model.device) * _KV_SHARE)
        self._vocabulary = Vocabulary.of(warm.name, warm.model, warm.tokenizer)
        self.threads = torch.get_num_threads()
        self._eos_tokens = end_tokens(warm)
        self._grammars = Grammars(warm, self._vocabulary.size, self._eos_tokens)
        self._runner: Any = None
        self._idle_work_done = False
        self._vision: VisionEncoder | None = None  # None: a text model
        self._is_preparing = False  # the runner and the vision encoder
        self._preparer: threading.Thread | None = None  # the latest thread that prepares them
        self._prefix_cache = PrefixCache()
        self._submitted: deque[tuple[Request, float]] = deque()
        self._is_closed = False
        self._shares = Shares()
        # The jobs that lack memory in this step, with the bytes that each needs.
        self._blocked: list[tuple[Share, int]] = []
        self._prefill = prefill or PrefillBudget()
        COMPUTE_THREAD.add(self)

    def submit(self, request: Request) -> None:
        """Queue a request; results arrive in `request.pieces`, up to an End. Raises JobFailed."""
        self._vocabulary.check("prompt", request.ids)  # the lookup would fail for the whole batch
        if request.images:
            check_takes_images(self._warm)
        with COMPUTE_THREAD.changed:
            if self._is_closed:
                raise JobFailed("engine: it is closed")
            if self._runner is None and not self._is_preparing:
                thread = threading.Thread(target=self._prepare, name="engine-prepare", daemon=True)
                thread.start()
                self._preparer, self._is_preparing = thread, True
            self._submitted.append((request, now()))
            COMPUTE_THREAD.changed.notify_all()

    def grammar(self, schema: str) -> Grammar:
        """Compile a JSON Schema for `Request.grammar`. Raises SpecError and JobFailed."""
        return self._grammars.make(schema)

    def grammar_of_calls(self, grammar: str) -> Grammar:
        """Begin with a compiled grammar, for `Request.grammar`. Raises JobFailed."""
        return self._grammars.of(grammar)

    @property
    def precision(self) -> str:
        """The served precision: "int8", "bf16" or "native". Known from the first token on."""
        precision: str = self._runner.precision
        return precision

    @property
    def uncached(self) -> str | None:
        """Why each token is computed from its whole sequence (None: it is not).

        Known from the first token on.
        """
        why: str | None = self._runner.uncached
        return why

    @property
    def cached_bytes(self) -> int:
        """Memory of the caches of prefixes and image features, which an idle engine keeps."""
        vision = self._vision
        return self._prefix_cache.num_bytes + (0 if vision is None else vision.cached_bytes)

    @property
    def weights_bytes(self) -> int:
        """The most memory that packed copies of the weights can take."""
        return sum(weight.nbytes for weight in self._warm.model.parameters())

    def close(self) -> None:
        """Accept no more requests, and return when all submitted ones are finished."""
        with COMPUTE_THREAD.changed:
            self._is_closed = True
        COMPUTE_THREAD.remove(self)
        if self._preparer is not None:
            # The process must not exit while one of its threads ends: see ComputeThread.remove.
            self._preparer.join()

    @property
    def is_ready(self) -> bool:
        return self._runner is not None and not self.is_idle

    @property
    def is_idle(self) -> bool:
        return not (self._submitted or self._shares)

    @property
    def is_decoding(self) -> bool:
        return any(share.decoding for share in self._shares)

    @property
    def has_idle_work(self) -> bool:
        return self._runner is not None and not self._idle_work_done

    def _prepare(self) -> None:
        """Create the runner and the vision encoder, concurrently with other engines' steps."""
        compute_with(self.threads)
        try:
            runner, vision = self._make_runner()
        except BaseException as error:  # e.g. out of memory: reported; the next request retries
            exit_if_context_lost(error)
            log.exception("engine of %s", self._warm.name)
            with COMPUTE_THREAD.changed:
                self._is_preparing = False
                self._take_submitted()
                self._fail_all(error)
                COMPUTE_THREAD.changed.notify_all()
            return
        with COMPUTE_THREAD.changed:
            self._runner, self._vision, self._is_preparing = runner, vision, False
            COMPUTE_THREAD.changed.notify_all()

    @torch.inference_mode()
    def _make_runner(self) -> tuple[Any, VisionEncoder | None]:
        """Return the runner, and the vision encoder of a model that has one."""
        model = self._warm.model
        # Packing must leave enough memory free for the KV caches.
        spare = self._budget_bytes if self._warm.may_pack else _NEVER_PACK
        runner: Any = (
            Decoder(model, precision=self._precision, spare_bytes=spare)
            if Decoder.supports(model)
            else FallbackRunner(model)
        )
        if self._is_on_gpu and self._chooses_budget:
            # The fused and cast layers, and the KV buffer of the graphs, have been allocated now.
            self._budget_bytes = int(free_bytes(model.device) * _KV_SHARE)
        if not VisionEncoder.is_in(model):
            return runner, None
        features_bytes = int(self._budget_bytes * _FEATURES_SHARE)
        return runner, VisionEncoder(model, features_bytes, precision=runner.precision)

    # --- Scheduler step -----------------------------------------------------------------------

    def step(self) -> None:
        try:
            self._step()
        except BaseException as error:  # out of memory, a Rust panic: reported
            exit_if_context_lost(error)
            log.exception("engine of %s", self._warm.name)
            self._fail_all(error)
        self._shares.drop_idle()

    def _step(self) -> None:
        with COMPUTE_THREAD.changed:
            self._take_submitted()
        self._drop_canceled()
        self._shares.drop_idle()
        shares = self._shares.in_turn()
        wanted = [share.wanted_places(MAX_SEQUENCES) for share in shares]
        for share, places in zip(shares, divided(MAX_SEQUENCES, wanted), strict=True):
            share.places = places
        self._admit(shares)
        decoding = [one for share in shares for one in share.decoding[: share.places]]
        prefilling = self._schedule_prefill(shares, len(decoding))
        if not decoding and not prefilling:
            self._idle_step()
            return
        parts = [
            Part(
                s.kv,
                (s.next_token,),
                True,
                offset=_position_offset(s),
                adapter=s.request.adapter,
            )
            for s in decoding
        ]
        parts += [part for _, part in prefilling]
        begun = now()
        logits = self._runner.forward(parts)
        if prefilling and logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # CUDA is asynchronous: wait before timing
        seconds = now() - begun
        row = len(decoding)
        self._append_tokens(decoding, list(logits[:row]))
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

    def _take_submitted(self) -> None:
        for request, since in self._submitted:
            self._shares.add(request, since)
        self._submitted.clear()

    def _idle_step(self) -> None:
        try:
            self._idle_work_done = not self._runner.idle_step()
        except BaseException:  # for example out of memory: reported by `step`, not retried forever
            self._idle_work_done = True
            raise

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
            needed = self._runner.num_bytes(_capacity(request))
            if share.prefilling:  # else the first one would lack memory for its completions
                needed *= request.num_completions
                needed += sum(
                    self._runner.num_bytes(_capacity(one.request))
                    * (one.request.num_completions - 1)
                    for one in share.prefilling
                )
            if not self._has_room(share, needed):
                return
            share.waiting.popleft()
            left -= request.num_completions
            with self._isolating_errors(request):
                kv = self._runner.new(_capacity(request))
                sequence = Sequence(request, 0, kv, self._warm.tokenizer)
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
        if has_room:
            self._prefix_cache.shrink_to(max(0, left))
        else:
            self._blocked.append((share, needed))
        return has_room

    def _may_pass(self, blocked: Share, lacking: int, needed: int) -> bool:
        """Whether a job that lacks memory will have enough though another one gets `needed`."""
        later = self._held_bytes(self._shares.after(blocked))
        return later + needed <= self._budget_bytes - lacking

    def _held_bytes(self, shares: Iterable[Share]) -> int:
        """Bytes reserved for sequences, and for prompts with completions that have not begun."""
        return sum(
            self._runner.num_bytes(_capacity(one.request))
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
            is_any_decoding=COMPUTE_THREAD.is_any_decoding(),
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
        adapter = sequence.request.adapter
        is_scored = is_scored and end > sequence.request.computed_from
        if sequence.images is None:
            return Part(
                sequence.kv,
                ids[begin:end],
                end == len(ids),
                wants_all_logits=is_scored,
                adapter=adapter,
            )
        return Part(
            sequence.kv,
            ids[begin:end],
            end == len(ids),
            wants_all_logits=is_scored,
            positions=sequence.images.positions[:, begin:end],
            adapter=adapter,
            features=sequence.images.features(begin, end),
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
            needed = self._runner.num_bytes(_capacity(prompt.request))
            if not is_last and not self._has_room(share, needed):
                return
            with self._isolating_errors(prompt.request):
                self._begin_completion(share, prompt)

    def _begin_completion(self, share: Share, prompt: Prefilled) -> None:
        """Begin the next completion of a prompt, and sample its first token."""
        request, index, kv = prompt.request, prompt.num_begun, prompt.kv
        if prompt.num_left > 1:
            kv = self._runner.fork(kv, len(request.computed), _capacity(request))
        else:
            share.prefilled.remove(prompt)
        prompt.num_begun += 1
        sequence = prompt.first
        if index:
            sequence = Sequence(request, index, kv, self._warm.tokenizer)
            sequence.images = prompt.first.images
        sequence.kv = kv
        sequence.begun_at = prompt.done_at
        share.decoding.append(sequence)
        if request.max_tokens:
            self._append_token(sequence, prompt.logits)
        else:
            sequence.end_scored()
            self._finish(sequence)

    def _append_tokens(self, sequences: list[Sequence], rows: list[torch.Tensor]) -> None:
        """Sample the next token of each sequence from its logits (V,)."""
        if not self._samples_batches:
            for sequence, logits in zip(sequences, rows, strict=True):
                with self._isolating_errors(sequence.request):
                    self._append_token(sequence, logits)
            return
        ready = []
        for sequence, logits in zip(sequences, rows, strict=True):
            with self._isolating_errors(sequence.request):
                ready.append((sequence, sequence.adjusted(logits)))
        logits_of = dict(zip(sequences, rows, strict=True))
        samplers = [sequence.sampler for sequence, _ in ready]
        tokens = sample_batch(samplers, [logits for _, logits in ready])
        for (sequence, _), token in zip(ready, tokens, strict=True):
            with self._isolating_errors(sequence.request):
                if isinstance(token, JobFailed):
                    raise token
                if self._is_decoding(sequence):
                    self._accept_token(sequence, token, logits_of[sequence])

    def _append_token(self, sequence: Sequence, logits: torch.Tensor) -> None:
        if not self._is_decoding(sequence):
            return  # another sequence of its request has failed
        token = sequence.sampler.sample(sequence.adjusted(logits))
        self._accept_token(sequence, token, logits)

    def _accept_token(self, sequence: Sequence, token: int, logits: torch.Tensor) -> None:
        """Append a token that was sampled from logits (V,)."""
        self._shares.of(sequence.request).num_tokens += 1
        logprob = None
        if (num_top := sequence.request.num_top) is not None:
            (logprob,) = token_logprobs(logits[None], [token], num_top)
        sequence.accept(token, self._eos_tokens, logprob)
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

    @contextmanager
    def _isolating_errors(self, request: Request) -> Iterator[None]:
        """Let an error in this block fail one request only."""
        try:
            yield
        except BaseException as error:  # out of memory, a Rust panic in its grammar
            exit_if_context_lost(error)
            if not isinstance(error, JobFailed):
                log.exception("engine of %s", self._warm.name)
            # A traceback would keep this frame alive, with the sequences of all requests.
            self._fail(request, error.with_traceback(None))

    def _fail(self, request: Request, error: BaseException) -> None:
        self._shares.of(request).remove(request)
        request.pieces.put(End(error))

    def _fail_all(self, error: BaseException) -> None:
        """Fail all running and waiting requests, but not those submitted since this step began."""
        # The frames hold tensors, and memory may be short.
        traceback.clear_frames(error.__traceback__)
        for share in self._shares:
            for request in share.requests():
                # One exception for each: raising it writes its traceback.
                own = RuntimeError(f"engine: {type(error).__name__}: {error}")
                own.__cause__ = error
                self._fail(request, own)
            share.waiting.clear()
        self._shares.drop_idle()

    # --- Prefix cache -------------------------------------------------------------------------

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Start from the longest cached prefix of this prompt."""
        if self._runner.chunk is None:
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
        if chunk is None or sequence.index:
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


def _position_offset(sequence: Sequence) -> int:
    return 0 if sequence.images is None else sequence.images.offset


def _capacity(request: Request) -> int:
    return len(request.ids) + request.max_tokens


def end_tokens(warm: WarmModel) -> frozenset[int]:
    """The tokens that end a completion: those of the generation config and of the tokenizer."""
    configured = warm.model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset(e for e in [*ends, warm.tokenizer.eos_token_id] if e is not None)
