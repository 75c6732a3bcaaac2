"""Continuous-batching scheduler (Orca, Yu et al., OSDI 2022) with chunked prefill.

Each step computes one token of every decoding sequence, and as many prompt tokens as fit into a
time budget, so that a long prompt does not delay the sequences that are decoding.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Iterator
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
from .prefill_budget import PrefillBudget
from .request import End, Request
from .sampling import sample_batch
from .sequence import Sequence, keys_of, now
from .token_logprobs import token_logprobs

log = logging.getLogger(__name__)

MAX_SEQUENCES = 64  # in a batch
_KV_SHARE = 0.4  # of the memory that is free when the engine is created
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
        self._waiting: deque[tuple[Request, float]] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []
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
        return not (self._submitted or self._waiting or self._prefilling or self._decoding)

    @property
    def is_decoding(self) -> bool:
        return bool(self._decoding)

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
                self._waiting.extend(self._submitted)
                self._submitted.clear()
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

    def _step(self) -> None:
        with COMPUTE_THREAD.changed:
            self._waiting.extend(self._submitted)
            self._submitted.clear()
        self._drop_canceled()
        self._admit()
        decoding = list(self._decoding)
        prefilling = self._schedule_prefill()
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
        num_prefilled = sum(len(part.ids) for _, part in prefilling)
        self._prefill.measure(num_prefilled, len(decoding), now() - begun)
        row = len(decoding)
        self._append_tokens(decoding, list(logits[:row]))
        for sequence, part in prefilling:
            of_part, row = logits[row : row + part.num_logits], row + part.num_logits
            with self._isolating_errors(sequence.request):
                if part.wants_all_logits:
                    self._score(sequence, part, of_part)
                if part.wants_logits:
                    self._start_decoding(sequence, of_part[-1])
                else:
                    self._prefilling.remove(sequence)
                    self._prefilling.append(sequence)  # round robin over prompts

    def _idle_step(self) -> None:
        try:
            self._idle_work_done = not self._runner.idle_step()
        except BaseException:  # for example out of memory: reported by `step`, not retried forever
            self._idle_work_done = True
            raise

    def _drop_canceled(self) -> None:
        for sequence in [*self._prefilling, *self._decoding]:
            if sequence.request.is_canceled():
                sequence.cancel()
                self._cache_prefix(sequence)
                self._finish(sequence)
        for item in [item for item in self._waiting if item[0].is_canceled()]:
            self._waiting.remove(item)
            item[0].pieces.put(End())

    def _admit(self) -> None:
        """Admit waiting requests in FIFO order while the memory budget has room."""
        while self._waiting:
            request, since = self._waiting[0]
            needed = self._runner.num_bytes(_capacity(request)) * request.num_completions
            left = self._budget_bytes - self._held_bytes() - needed
            is_first = not self._prefilling and not self._decoding
            num_sequences = len(self._decoding) + sum(
                s.request.num_completions for s in self._prefilling
            )
            if not is_first and (
                left < 0 or num_sequences + request.num_completions > MAX_SEQUENCES
            ):
                return
            self._prefix_cache.shrink_to(max(0, left))
            self._waiting.popleft()
            with self._isolating_errors(request):
                kv = self._runner.new(_capacity(request))
                sequence = Sequence(request, 0, kv, self._warm.tokenizer)
                request.stats.queued_s = now() - since
                self._prefilling.append(sequence)

    def _held_bytes(self) -> int:
        """Bytes reserved for running sequences, with those that a prompt will fork into."""
        sequences = [(s.request, s.request.num_completions) for s in self._prefilling]
        sequences += [(s.request, 1) for s in self._decoding]
        return sum(
            self._runner.num_bytes(_capacity(requested)) * count for requested, count in sequences
        )

    def _schedule_prefill(self) -> list[tuple[Sequence, Part]]:
        """Choose the prompt tokens of this step, in whole chunks, round robin over prompts."""
        seconds = self._prefill.seconds(
            len(self._prefilling),
            len(self._decoding),
            is_any_decoding=COMPUTE_THREAD.is_any_decoding(),
        )
        room = self._prefill.tokens(seconds)
        encode_until = now() + seconds
        planned = []
        for sequence in self._prefilling:
            if room <= 0:
                break
            with self._isolating_errors(sequence.request):
                if self._is_ready(sequence, encode_until):
                    part = self._prefill_part(sequence, room)
                    planned.append((sequence, part))
                    room -= len(part.ids)
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

    def _start_decoding(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Fork the prefilled prompt into all sequences of its request; sample first tokens."""
        request = sequence.request
        self._cache_prefix(sequence)
        assert sequence.begun_at is not None
        done = now()
        request.stats.prefill_s = done - sequence.begun_at
        sequences = [sequence]
        for index in range(1, request.num_completions):
            kv = self._runner.fork(sequence.kv, len(request.computed), _capacity(request))
            forked = Sequence(request, index, kv, self._warm.tokenizer)
            forked.images = sequence.images
            sequences.append(forked)
        self._decoding.extend(sequences)
        self._prefilling.remove(sequence)
        for one in sequences:
            one.begun_at = done
            if request.max_tokens:
                self._append_token(one, logits)
            else:
                one.end_scored()
                self._finish(one)

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
                if sequence in self._decoding:
                    self._accept_token(sequence, token, logits_of[sequence])

    def _append_token(self, sequence: Sequence, logits: torch.Tensor) -> None:
        if sequence not in self._decoding:
            return  # another sequence of its request has failed
        token = sequence.sampler.sample(sequence.adjusted(logits))
        self._accept_token(sequence, token, logits)

    def _accept_token(self, sequence: Sequence, token: int, logits: torch.Tensor) -> None:
        """Append a token that was sampled from logits (V,)."""
        logprob = None
        if (num_top := sequence.request.num_top) is not None:
            (logprob,) = token_logprobs(logits[None], [token], num_top)
        sequence.accept(token, self._eos_tokens, logprob)
        if sequence.finish_reason is not None:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Remove a sequence; the last one of a request ends the request."""
        request = sequence.request
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        else:
            self._decoding.remove(sequence)
            assert sequence.begun_at is not None
            request.stats.decode_s = now() - sequence.begun_at
        if not any(s.request is request for s in [*self._prefilling, *self._decoding]):
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
        self._prefilling = deque(s for s in self._prefilling if s.request is not request)
        self._decoding = [s for s in self._decoding if s.request is not request]
        request.pieces.put(End(error))

    def _fail_all(self, error: BaseException) -> None:
        """Fail all running and waiting requests, but not those submitted since this step began."""
        # The frames hold tensors, and memory may be short.
        traceback.clear_frames(error.__traceback__)
        running = {id(s.request): s.request for s in [*self._prefilling, *self._decoding]}
        for request in [*running.values(), *(item[0] for item in self._waiting)]:
            # One exception for each: raising it writes its traceback.
            own = RuntimeError(f"engine: {type(error).__name__}: {error}")
            own.__cause__ = error
            self._fail(request, own)
        self._waiting.clear()

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
        room = self._budget_bytes - self._held_bytes() - self._runner.num_bytes(length)
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
