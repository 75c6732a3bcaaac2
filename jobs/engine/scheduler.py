"""The engine: batches what jobs ask of a model, token by token.

Every turn computes one row for each sequence that writes and as many rows of prompts as fit into
a moment, so that a long prompt does not keep the others waiting.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..compute.device import free_bytes
from ..compute.levels import NATIVE
from ..compute.linears import served_precision
from ..compute.threads import compute_with
from ..context import WarmModel
from ..errors import JobFailed
from ..models.architectures import check_can_generate
from .compute_thread import TURNS
from .decoder import Decoder
from .fallback import AsIs
from .grammar import Grammar, Grammars
from .image_encoding import Eyes, Sight
from .image_tokens import check_takes_images
from .kv_cache import Prefixes
from .parts import Part
from .request import End, Generation
from .sequence import Choice, keys_of, now

log = logging.getLogger(__name__)

MAX_SEQUENCES = 64  # that are computed at once
_ALONE_S = 0.5  # of prompts per turn, while nobody writes
_BESIDE_S = 0.2  # the same, at least, while somebody writes, by this model or another one
_MEMORY_SHARE = 0.4  # of the memory that is free when the engine starts: for keys and values
_NO_ROOM = 2**62  # bytes: no machine has so many to spare
_FEATURES_SHARE = 0.1  # of the same, in addition: for the features of pictures


class Engine:
    """Serves the generations of one model; `submit` may be called from any thread."""

    def __init__(
        self, warm: WarmModel, *, precision: str = NATIVE, budget_bytes: int | None = None
    ) -> None:
        """`budget_bytes`: for keys and values of what runs and of kept prefixes."""
        self._warm = warm
        self._precision = precision
        self._budget_bytes = budget_bytes or int(free_bytes(warm.model.device) * _MEMORY_SHARE)
        self._vocabulary: int = warm.model.get_input_embeddings().num_embeddings
        self.threads = torch.get_num_threads()
        self._ends = _ends(warm)
        self._grammars = Grammars(warm, self._vocabulary, self._ends)
        self._runner: Any = None
        self._is_settled = False  # whether the runner is as fast as it can be
        self._vision: Eyes | None = None  # of a model that takes pictures
        self._is_preparing = False  # both, which takes a moment
        self._preparer: threading.Thread | None = None  # that does it or did it last
        self._prefixes = Prefixes()
        self._arrivals: deque[tuple[Generation, float]] = deque()
        self._is_closed = False
        self._waiting: deque[tuple[Generation, float]] = deque()
        self._reading: deque[Choice] = deque()  # whose prompt is being computed
        self._writing: list[Choice] = []
        self._rows_per_s = 0.0  # of prompts, as measured
        TURNS.join(self)

    def submit(self, generation: Generation) -> None:
        """Have it computed; its `pieces` tell how it goes, up to an End. Raises JobFailed."""
        highest = max(generation.ids)
        if highest >= self._vocabulary:  # it would fail the whole batch
            raise JobFailed(
                f"prompt: token {highest} is not among the {self._vocabulary} of {self._warm.name}"
            )
        if generation.pictures:
            check_takes_images(self._warm)
        with TURNS.changed:
            if self._is_closed:
                raise JobFailed("engine: it is closed")
            if self._runner is None and not self._is_preparing:
                thread = threading.Thread(target=self._prepare, name="engine's begin", daemon=True)
                thread.start()
                self._preparer, self._is_preparing = thread, True
            self._arrivals.append((generation, now()))
            TURNS.changed.notify_all()

    def grammar(self, schema: str) -> Grammar:
        """Return what a generation's completions keep to. Raises SpecError and JobFailed."""
        return self._grammars.make(schema)

    @property
    def precision(self) -> str:
        """What the model is served in: "int8", "bf16" or "native". Known once an answer was begun."""
        precision: str = self._runner.precision
        return precision

    def close(self) -> None:
        """Take nothing more, and return when what was asked for is done."""
        with TURNS.changed:
            self._is_closed = True
        TURNS.leave(self)
        if self._preparer is not None:
            self._preparer.join()  # as Turns.leave does: it has nothing left to do but to end

    @property
    def is_ready(self) -> bool:
        return self._runner is not None and not self.is_idle

    @property
    def is_idle(self) -> bool:
        return not (self._arrivals or self._waiting or self._reading or self._writing)

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    @property
    def is_unsettled(self) -> bool:
        return self._runner is not None and not self._is_settled

    def _prepare(self) -> None:
        """Bring the model into the form that is computed with, while other engines go on."""
        compute_with(self.threads)
        try:
            runner, vision = self._make()
        except BaseException as error:  # no memory, say: it is told, and the next one tries again
            log.exception("engine of %s", self._warm.name)
            with TURNS.changed:
                self._is_preparing = False
                self._waiting.extend(self._arrivals)
                self._arrivals.clear()
                self._fail_all(error)
                TURNS.changed.notify_all()
            return
        with TURNS.changed:
            self._runner, self._vision, self._is_preparing = runner, vision, False
            TURNS.changed.notify_all()

    @torch.inference_mode()
    def _make(self) -> tuple[Any, Eyes | None]:
        """Return the runner, and the eyes of a model that has some."""
        model = self._warm.model
        # What packing leaves free is for keys and values.
        spare = self._budget_bytes if self._warm.may_pack else _NO_ROOM
        runner: Any = (
            Decoder(model, precision=self._precision, spare_bytes=spare)
            if Decoder.takes(model)
            else AsIs(model)
        )
        if not Eyes.are_in(model):
            return runner, None
        features_bytes = int(self._budget_bytes * _FEATURES_SHARE)
        return runner, Eyes(model, features_bytes, precision=runner.precision)

    # --- a turn -------------------------------------------------------------------------------

    def turn(self) -> None:
        try:
            self._turn()
        except BaseException as error:  # no memory, a panic in Rust: it is told, others go on
            log.exception("engine of %s", self._warm.name)
            self._fail_all(error)

    def _turn(self) -> None:
        with TURNS.changed:
            self._waiting.extend(self._arrivals)
            self._arrivals.clear()
        self._drop_cancelled()
        self._admit()
        writing = list(self._writing)
        reading = self._plan()
        if not writing and not reading:
            self._settle()
            return
        parts = [Part(c.kv, (c.next_token,), True, offset=_offset(c)) for c in writing]
        parts += [part for _, part in reading]
        begun = now()
        logits = self._runner.forward(parts)
        if reading and logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # it computes on by itself; what is timed is over
        self._measure(reading, now() - begun, beside=len(writing))
        rows = iter(logits)
        for choice in writing:
            with self._failing_alone(choice.generation):
                self._take(choice, next(rows))
        for choice, part in reading:
            if part.wants_logits:
                with self._failing_alone(choice.generation):
                    self._begin_writing(choice, next(rows))
            else:
                self._reading.remove(choice)
                self._reading.append(choice)  # its turn comes after those of the others

    def _settle(self) -> None:
        try:
            self._is_settled = not self._runner.settle()
        except BaseException:  # no memory, say: it is told, and not tried for ever
            self._is_settled = True
            raise

    def _drop_cancelled(self) -> None:
        for choice in [*self._reading, *self._writing]:
            if choice.generation.is_cancelled():
                choice.cancel()
                self._remember(choice)
                self._leave(choice)
        for item in [item for item in self._waiting if item[0].is_cancelled()]:
            self._waiting.remove(item)
            item[0].pieces.put(End())

    def _admit(self) -> None:
        """Let in, in their order, those for whom there is room."""
        while self._waiting:
            generation, since = self._waiting[0]
            needed = self._runner.num_bytes(_capacity(generation)) * generation.num_choices
            left = self._budget_bytes - self._held_bytes() - needed
            is_first = not self._reading and not self._writing
            places = len(self._writing) + sum(c.generation.num_choices for c in self._reading)
            if not is_first and (left < 0 or places + generation.num_choices > MAX_SEQUENCES):
                return
            self._prefixes.shrink_to(max(0, left))
            self._waiting.popleft()
            with self._failing_alone(generation):
                kv = self._runner.new(_capacity(generation))
                choice = Choice(generation, 0, kv, self._warm.tokenizer)
                generation.measures.queued_s = now() - since
                self._reading.append(choice)

    def _held_bytes(self) -> int:
        """What is set aside for those who run, the choices that a prompt is to have among them."""
        choices = [(c.generation, c.generation.num_choices) for c in self._reading]
        choices += [(c.generation, 1) for c in self._writing]
        return sum(self._runner.num_bytes(_capacity(asked)) * count for asked, count in choices)

    def _plan(self) -> list[tuple[Choice, Part]]:
        """Choose what to compute of prompts this turn, in whole chunks; they take turns."""
        seconds = self._moment()
        room = max(1, int(self._rows_per_s * seconds))
        looking_until = now() + seconds
        planned = []
        for choice in self._reading:
            if room <= 0:
                break
            with self._failing_alone(choice.generation):
                if self._is_ready(choice, looking_until):
                    part = self._part(choice, room)
                    planned.append((choice, part))
                    room -= len(part.ids)
        return planned

    def _moment(self) -> float:
        """Return how many seconds this turn may spend on prompts.

        Larger passes read prompts faster, but those who write wait meanwhile. So the time grows
        with the share of prompts among all that this engine computes for.
        """
        if not TURNS.is_anyone_writing():
            return _ALONE_S
        reading, writing = len(self._reading), max(1, len(self._writing))
        return max(_BESIDE_S, _ALONE_S * reading / (reading + writing))

    def _part(self, choice: Choice, room: int) -> Part:
        ids, begin = choice.generation.ids, choice.kv.length
        chunk = self._runner.chunk
        if chunk is None:
            end = len(ids)
        else:
            end = max(begin + room, begin + 1)
            end = min(-(-end // chunk) * chunk, len(ids))
        if choice.sight is None:
            return Part(choice.kv, ids[begin:end], end == len(ids))
        return Part(
            choice.kv,
            ids[begin:end],
            end == len(ids),
            places=choice.sight.places[:, begin:end],
            seen=choice.sight.rows(begin, end),
        )

    def _is_ready(self, choice: Choice, looking_until: float) -> bool:
        """Prepare a choice whose prompt is next; False while it looks at its pictures."""
        if choice.begun_at is None:
            choice.begun_at = now()
            self._reuse(choice)
            if choice.generation.pictures:
                assert self._vision is not None
                choice.sight = Sight(self._vision, choice.generation, choice.kv.length)
        if choice.sight is None or choice.sight.is_whole:
            return True
        begun = now()
        choice.sight.look(until=looking_until)
        choice.begun_at = now()
        choice.generation.measures.vision_s += choice.begun_at - begun
        return choice.sight.is_whole

    def _measure(
        self, reading: Sequence[tuple[Choice, Part]], seconds: float, *, beside: int
    ) -> None:
        rows = sum(len(part.ids) for _, part in reading)
        if rows:
            speed = (rows + beside) / seconds
            self._rows_per_s = speed if not self._rows_per_s else (self._rows_per_s + speed) / 2

    def _begin_writing(self, choice: Choice, logits: torch.Tensor) -> None:
        """All choices of a generation go on from its prompt, which is computed."""
        generation = choice.generation
        self._remember(choice)
        assert choice.begun_at is not None
        done = now()
        generation.measures.prefill_s = done - choice.begun_at
        choices = [choice]
        for index in range(1, generation.num_choices):
            kv = self._runner.fork(choice.kv, len(generation.ids), _capacity(generation))
            sibling = Choice(generation, index, kv, self._warm.tokenizer)
            sibling.sight = choice.sight
            choices.append(sibling)
        self._writing.extend(choices)
        self._reading.remove(choice)
        for sibling in choices:
            sibling.begun_at = done
            self._take(sibling, logits)

    def _take(self, choice: Choice, logits: torch.Tensor) -> None:
        if choice not in self._writing:
            return  # it ended with a sibling that failed
        choice.take(logits, self._ends)
        if choice.finish_reason is not None:
            self._leave(choice)

    def _leave(self, choice: Choice) -> None:
        """Take a choice out; the last one of its generation ends that."""
        generation = choice.generation
        if choice in self._reading:
            self._reading.remove(choice)
        else:
            self._writing.remove(choice)
            assert choice.begun_at is not None
            generation.measures.decode_s = now() - choice.begun_at
        if not any(c.generation is generation for c in [*self._reading, *self._writing]):
            generation.pieces.put(End())

    @contextmanager
    def _failing_alone(self, generation: Generation) -> Iterator[None]:
        """Have an error of what is done for one generation end that, while others go on."""
        try:
            yield
        except BaseException as error:  # no memory, a panic of its grammar in Rust: it is told
            if not isinstance(error, JobFailed):
                log.exception("engine of %s", self._warm.name)
            # A traceback would hold this turn, with the sequences of all.
            self._fail(generation, error.with_traceback(None))

    def _fail(self, generation: Generation, error: BaseException) -> None:
        self._reading = deque(c for c in self._reading if c.generation is not generation)
        self._writing = [c for c in self._writing if c.generation is not generation]
        generation.pieces.put(End(error))

    def _fail_all(self, error: BaseException) -> None:
        """Tell an error to all but those that have just arrived."""
        # Else it would hold what was computed with: memory, of which perhaps there is too little.
        traceback.clear_frames(error.__traceback__)
        running = {id(c.generation): c.generation for c in [*self._reading, *self._writing]}
        for generation in [*running.values(), *(item[0] for item in self._waiting)]:
            # One for each of them: who raises an error writes into it.
            own = RuntimeError(f"engine: {type(error).__name__}: {error}")
            own.__cause__ = error
            self._fail(generation, own)
        self._waiting.clear()

    # --- prefixes -----------------------------------------------------------------------------

    def _reuse(self, choice: Choice) -> None:
        """Begin with what an earlier prompt has in common with this one."""
        if self._runner.chunk is None:
            return
        # The last token is always computed: its logits are needed.
        found = self._prefixes.find(keys_of(choice.generation)[:-1])
        if found is not None:
            kv, length = found
            choice.kv.fill_from(kv, length)
            choice.generation.measures.cached_tokens = length

    def _remember(self, choice: Choice) -> None:
        """Keep the whole chunks of a prompt, as far as it was computed and there is room."""
        chunk = self._runner.chunk
        if chunk is None or choice.index:
            return
        length = min(choice.kv.length, len(choice.generation.ids)) // chunk * chunk
        keys = keys_of(choice.generation)[:length]
        if not length or self._prefixes.has(keys):
            return
        room = self._budget_bytes - self._held_bytes() - self._runner.num_bytes(length)
        if room >= 0:
            self._prefixes.make_way(keys, room)
            self._prefixes.keep(keys, self._runner.fork(choice.kv, length, length))


def _offset(choice: Choice) -> int:
    return 0 if choice.sight is None else choice.sight.offset


def _capacity(generation: Generation) -> int:
    return len(generation.ids) + generation.max_tokens


def _ends(warm: WarmModel) -> frozenset[int]:
    """The tokens that end a completion."""
    configured = warm.model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset(e for e in [*ends, warm.tokenizer.eos_token_id] if e is not None)


_engines: dict[tuple[int, str], Engine] = {}  # by model and the precision that it is served in
_making = threading.Lock()


def engine_of(warm: WarmModel, precision: str = NATIVE) -> Engine:
    """Return this process's engine of a model, the same for every job that is served alike.

    Raises JobFailed for a model that generates no text.
    """
    model = warm.model
    check_can_generate(model)
    with _making:
        served = NATIVE  # by AsIs
        if Decoder.takes(model):
            # Not what is asked for: two engines would have a copy of the weights and a budget each.
            served = served_precision(precision, model.get_input_embeddings().weight)
        key = (id(model), served)
        if key not in _engines:
            _engines[key] = Engine(warm, precision=served)
        return _engines[key]
