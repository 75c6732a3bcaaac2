"""The engine of a model: its requests come from any thread, its steps from the compute thread."""

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
from ..models.generation_settings import end_tokens
from ..models.vocabulary import Vocabulary
from .compute_thread import COMPUTE_THREAD
from .decoder import Decoder
from .fallback import FallbackRunner
from .grammar import Grammar, Grammars
from .image_encoding import VisionEncoder
from .image_tokens import check_takes_images
from .kv_cache import PrefixCache
from .prefill_budget import PrefillBudget
from .request import End, Request
from .sampling import sample_batch
from .scheduler import Scheduler
from .sequence import TextSequence, now
from .speculation import Speculation

log = logging.getLogger(__name__)

_KV_SHARE = 0.4  # of the memory that is free when the engine is created
_NEVER_PACK = 2**62  # bytes that packing must leave free: more than any machine has
_FEATURES_SHARE = 0.1  # of `budget_bytes`, in addition to it: the cache of image features


class Engine(Scheduler):
    """Schedules the requests of one model. `submit` may be called from any thread."""

    _prefix_cache: PrefixCache

    def __init__(
        self,
        warm: WarmModel,
        *,
        precision: str = NATIVE,
        budget_bytes: int | None = None,
        prefill: PrefillBudget | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`budget_bytes`: KV caches of running sequences and the prefix cache together.

        `prefill`: how many prompt tokens a step takes (default: by the measured speed).
        `speculation`: which tokens are drafted (default: those that the measured speed favors).
        """
        super().__init__(
            budget_bytes=budget_bytes or int(free_bytes(warm.model.device) * _KV_SHARE),
            prefill=prefill or PrefillBudget(),
            ends=end_tokens(warm.model, warm.tokenizer),
            prefix_cache=PrefixCache(),
            speculation=speculation or Speculation(),
        )
        self._warm = warm
        self._precision = precision
        self._is_on_gpu = warm.model.device.type != "cpu"
        self._samples_batches = self._is_on_gpu  # one by one, each token would wait for the device
        self._chooses_budget = budget_bytes is None
        self._vocabulary = Vocabulary.of(warm.name, warm.model, warm.tokenizer)
        self.threads = torch.get_num_threads()
        self._grammars = Grammars(warm, self._vocabulary.size, self._ends)
        self._idle_work_done = False
        self._is_preparing = False  # the runner and the vision encoder
        self._preparer: threading.Thread | None = None  # the latest thread that prepares them
        self._submitted: deque[tuple[Request, float]] = deque()
        self._is_closed = False
        COMPUTE_THREAD.add(self)

    def submit(self, request: Request) -> None:
        """Queue a request; results arrive in `request.pieces`, up to an End. Raises JobFailed."""
        self._vocabulary.check("prompt", request.ids)  # the lookup would fail for the whole batch
        self._vocabulary.check("logit_bias", [token for token, _ in request.sampling.bias])
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

    def grammar(self, grammar: str, field: str, *, noun: str = "schema") -> Grammar:
        """Compile a grammar of llguidance for `Request.grammar`; see `forms.grammar_of`.

        `field`, `noun`: as for `grammar_checks.check`. Raises JobFailed.
        """
        return self._grammars.make(grammar, field, noun)

    @property
    def precision(self) -> str:
        """The served precision: "int4", "int8", "bf16" or "native".

        Known from the first token on; before it, the requested one.
        """
        found: str = self._precision if self._runner is None else self._runner.precision
        return found

    @property
    def uncached(self) -> str | None:
        """Why each token is computed from its whole sequence (None: it is not).

        Known from the first token on; None before it.
        """
        found: str | None = None if self._runner is None else self._runner.uncached
        return found

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
            Decoder(model, precision=self._precision, spare_bytes=spare, releases_sources=True)
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

    def step(self) -> None:
        try:
            with COMPUTE_THREAD.changed:
                self._take_submitted()
            if not self._compute_step():
                self._idle_step()
        except BaseException as error:  # out of memory, a Rust panic: reported
            exit_if_context_lost(error)
            log.exception("engine of %s", self._warm.name)
            self._fail_all(error)
        self._shares.drop_idle()

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

    # --- What the scheduler calls -------------------------------------------------------------

    def _sequence(self, request: Request, index: int, kv: Any) -> TextSequence:
        sequence = TextSequence(request, index, kv, self._warm.tokenizer)
        if self._runner.verifies_drafts:
            sequence.lookup = self._speculation.lookup(request.ids)
        return sequence

    def _is_any_decoding(self) -> bool:
        return COMPUTE_THREAD.is_any_decoding()

    def _append_tokens(self, sequences: list[Any], logits: torch.Tensor) -> None:
        rows = list(logits)
        if not self._samples_batches:
            for sequence, row in zip(sequences, rows, strict=True):
                with self._isolating_errors(sequence.request):
                    self._append_token(sequence, row)
            return
        ready = []
        for sequence, row in zip(sequences, rows, strict=True):
            with self._isolating_errors(sequence.request):
                ready.append((sequence, sequence.adjusted(row)))
        logits_of = dict(zip(sequences, rows, strict=True))
        samplers = [sequence.sampler for sequence, _ in ready]
        tokens = sample_batch(samplers, [row for _, row in ready])
        for (sequence, _), token in zip(ready, tokens, strict=True):
            with self._isolating_errors(sequence.request):
                if isinstance(token, JobFailed):
                    raise token
                if self._is_decoding(sequence):
                    self._accept_token(sequence, token, logits_of[sequence])

    def _append_token(self, sequence: Any, logits: torch.Tensor) -> None:
        if not self._is_decoding(sequence):
            return  # another sequence of its request has failed
        token = sequence.sampler.sample(sequence.adjusted(logits))
        self._accept_token(sequence, token, logits)

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
