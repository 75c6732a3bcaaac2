"""The work of an infer job: tokenize, submit to the engine of the model, emit text and progress."""

from __future__ import annotations

import queue
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..compute.levels import compute_summary
from ..compute.threads import without_helpers
from ..context import Context, WarmModel
from ..data import left_out
from ..data.reader import Reading
from ..engine import answer as engine_answers, forms
from ..engine.cancellation import cancel_on_exit
from ..engine.engine import Engine
from ..engine.engines import engine_of, warn_of_model
from ..engine.grammar import Grammar
from ..engine.request import End, Piece, Request, Sampling, TokenLogprob
from ..engine.thinking import Thinking
from ..errors import JobFailed
from ..files.chats import TOOL_CALLS, TOOLS
from ..models import gui_actions
from ..models.chat_templates import ChatTemplate
from ..models.generation_settings import end_tokens
from ..models.replies import Delta, Reply, thinking_tags
from ..models.response_templates import Described, described, loaded
from . import batch_file, forced_calls
from .forced_calls import CallForm
from .options import MESSAGE, NO_CALLS, REQUIRED, InferSpec, parameters_of
from .token_texts import TokenTexts
from .tokenization import Prompt, encode, room

_EVENT_S = 0.05  # between two events with text
_ROWS_AT_ONCE = 32


@dataclass
class Answer(engine_answers.Answer):
    """The completions of one prompt as they grow."""

    tokenize_s: float
    spec: InferSpec
    token_texts: TokenTexts
    logprobs: list[list[dict[str, Any]]] = field(init=False)  # if requested
    echoed: str | None = None  # the prompt, where it opens the completions
    replies: list[Reply] | None = None  # the completions as messages; None: they are texts
    reasoning_tokens: list[int] = field(init=False)  # number per completion
    ids: list[list[int]] = field(init=False)  # token ids per completion, if requested
    is_prompt_told: bool = False  # whether an event has the prompt's token ids

    def __post_init__(self) -> None:
        super().__post_init__()
        self.logprobs = [[] for _ in self.texts]
        self.reasoning_tokens = [0] * len(self.texts)
        self.ids = [[] for _ in self.texts]

    def add(self, piece: Piece) -> tuple[Delta, list[dict[str, Any]]]:
        """Append a piece; return what to emit: an echoed prompt comes before the first piece."""
        index = piece.index
        entries = self.token_texts.entries(piece.logprobs, piece.kept_bytes)
        if self.echoed is not None and self.tokens[index] == 0 and not self.texts[index]:
            piece = replace(piece, text=self.echoed + piece.text)
            entries = self._of_prompt() + entries
        super().add(piece)
        self.logprobs[index] += entries
        if self.spec.token_ids:
            self.ids[index] += piece.ids
        if self.replies is None:
            return Delta(piece.text), entries
        reply = self.replies[index]
        delta = reply.add(piece.text)
        if piece.finish_reason is not None:
            is_whole = self.request.grammar is not None and piece.finish_reason == "stop"
            delta.add(reply.finish(piece.end_token, is_whole=is_whole))
        if reply.told.reasoning and not (reply.told.content or reply.told.calls):
            self.reasoning_tokens[index] = self.tokens[index]
        return delta, entries

    def _of_prompt(self) -> list[dict[str, Any]]:
        if self.spec.logprobs is None:
            return []
        entry = partial(self.token_texts.entry, is_prompt=True)
        first = entry(TokenLogprob(self.request.ids[0], 0.0), is_first=True)
        return [first, *map(entry, self.request.scores)]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                **self._written(index),
                **self._read(text),
                **({} if self.spec.logprobs is None else {"logprobs": self.logprobs[index]}),
                **({"token_ids": self.ids[index]} if self.spec.token_ids else {}),
            }
            for index, text in enumerate(self.texts)
        ]

    def _written(self, index: int) -> dict[str, Any]:
        """Return text and finish reason of a completion, and the rest of its message."""
        reason = self.reasons[index]
        if self.replies is None:
            return {"text": self.texts[index], "finish_reason": reason}
        told = self.replies[index].told
        found: dict[str, Any] = {"text": told.content, "finish_reason": reason}
        if told.reasoning:
            found["reasoning"] = told.reasoning
        if told.calls:
            found |= {"calls": told.calls}
            found["finish_reason"] = "tool_calls" if reason == "stop" else reason
        return found

    def _read(self, text: str) -> dict[str, Any]:
        """Return the actions in the text, if requested."""
        if self.spec.actions == "none":
            return {}
        seen = self.request.images
        screen = seen[-1].size if seen else None
        if self.spec.screen:
            screen = gui_actions.parse_screen(self.spec.screen)
        return {"actions": gui_actions.read(text, screen)}

    @property
    def usage(self) -> dict[str, int]:
        prompt, completion = len(self.request.ids), sum(self.tokens)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "cached_tokens": self.request.stats.cached_tokens,
        }
        if self.replies is not None:
            usage["reasoning_tokens"] = sum(self.reasoning_tokens)
        return usage

    @property
    def timings(self) -> dict[str, float]:
        stats = self.request.stats
        # The first token of each choice is part of the prefill.
        written = max(sum(self.tokens) - self.request.num_completions, 0)
        speed = written / stats.decode_s if stats.decode_s else 0.0
        return {
            "queued_s": round(stats.queued_s, 6),
            "tokenize_s": round(self.tokenize_s, 6),
            "vision_s": round(stats.vision_s, 6),
            "prefill_s": round(stats.prefill_s, 6),
            "decode_s": round(stats.decode_s, 6),
            "tokens_per_s": round(speed, 3),
        }


def _drafts(answers: Iterable[Answer]) -> dict[str, int]:
    """Return how many tokens were drafted and accepted; nothing if none was drafted."""
    stats = [answer.request.stats for answer in answers]
    drafted = sum(one.drafted_tokens for one in stats)
    accepted = sum(one.accepted_tokens for one in stats)
    return {"drafted_tokens": drafted, "accepted_tokens": accepted} if drafted else {}


def answer_all(
    spec: InferSpec, ctx: Context, warm: WarmModel, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Answer prompts in one batch and stream their texts as events. Raises Stopped and JobFailed.

    Completions are numbered consecutively over all prompts.
    """
    seed = _seed(spec)
    engine = _engine(spec, warm)
    with cancel_on_exit(ctx) as is_canceled:
        grammar = forms.grammar_of(engine, json_schema=spec.json_schema, regex=spec.regex)
        answers = [
            _prepare(
                spec,
                warm,
                prompt,
                engine,
                (seed + number) % 2**63,
                grammar,
                ctx.job_id,
                is_canceled,
            )
            for number, prompt in enumerate(prompts)
        ]
        images = [image.num_tokens for image in answers[0].request.images]
        about: dict[str, Any] = {"image_tokens": images} if images else {}
        about |= compute_summary(ctx.device)
        ctx.emit("begin", prompt_tokens=sum(len(a.request.ids) for a in answers), **about)
        pieces = _merged(answers)
        for answer in answers:
            engine.submit(answer.request)
        _emit_text(ctx, answers, pieces)
        warn_of_model(ctx, engine, warm)
        for answer in answers:
            answer.check_complete()
    return {
        "choices": [
            {**choice, "index": number * spec.n + choice["index"]}
            for number, answer in enumerate(answers)
            for choice in answer.choices
        ],
        **_prompt_ids(answers),
        "usage": _summed([answer.usage for answer in answers]),
        "timings": _timings(answers),
        "seed": seed,
        "model": spec.model,
        **({"prompt_format": found} if (found := spec.prompt_format) else {}),
        "precision": engine.precision,
    }


def _prompt_ids(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the token ids of each prompt, if requested."""
    if not answers[0].spec.token_ids:
        return {}
    return {"prompt_token_ids": [list(answer.request.ids) for answer in answers]}


def _summed(usages: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(usage[name] for usage in usages) for name in usages[0]}


def _timings(answers: Sequence[Answer]) -> dict[str, float]:
    """The timings of the slowest prompt, the total speed, and the drafts of all."""
    found = [answer.timings for answer in answers]
    slowest = {name: max(one[name] for one in found) for name in found[0]}
    speed = round(sum(one["tokens_per_s"] for one in found), 3)
    return {**slowest, "tokens_per_s": speed, **_drafts(answers)}


Merged = queue.SimpleQueue[tuple[int, Piece | End]]


class _Port(queue.SimpleQueue[Piece | End]):
    """Passes the pieces of one request on, with its number."""

    def __init__(self, number: int, target: Merged) -> None:
        self._number = number
        self._target = target

    def put(self, item: Piece | End, block: bool = True, timeout: float | None = None) -> None:
        self._target.put((self._number, item))


def _merged(answers: Sequence[Answer]) -> Merged:
    """Return one queue for the pieces of all requests, which are not submitted yet."""
    target: Merged = queue.SimpleQueue()
    for number, answer in enumerate(answers):
        answer.request.pieces = _Port(number, target)
    return target


def _engine(spec: InferSpec, warm: WarmModel) -> Engine:
    return engine_of(warm, spec.precision or warm.precision)


def _seed(spec: InferSpec) -> int:
    return secrets.randbits(63) if spec.seed is None else spec.seed


@without_helpers()
def _prepare(
    spec: InferSpec,
    warm: WarmModel,
    prompt: Prompt,
    engine: Engine,
    seed: int,
    grammar: Grammar | None,
    job_id: str,
    is_canceled: Callable[[], bool],
) -> Answer:
    begun = time.perf_counter()
    ids, seen = encode(spec, warm, prompt)
    form, tools = _message_format(spec, warm, prompt)
    if tools:
        grammar = _grammar_of_calls(spec, tools, warm, engine) or grammar
    elif grammar is not None:
        form = None  # all of it is content, also where the prompt opens a thinking block
    request = Request(
        ids=ids,
        images=seen,
        sampling=Sampling(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            frequency_penalty=spec.frequency_penalty,
            presence_penalty=spec.presence_penalty,
            min_p=spec.min_p,
            bias=spec.bias,
            seed=seed,
        ),
        num_completions=spec.n,
        max_tokens=room(spec, warm, len(ids)),
        num_top=spec.logprobs,
        scored_from=1 if spec.echo and spec.logprobs is not None else None,
        stop=spec.stop,
        keeps_special=form is not None,
        owner=job_id,
        adapter=warm.adapter,
        grammar=grammar,
        thinking=_thinking(spec, warm),
        is_canceled=is_canceled,
    )
    answer = Answer(
        request,
        time.perf_counter() - begun,
        spec,
        TokenTexts(warm.tokenizer, end_tokens(warm.model, warm.tokenizer)),
    )
    if form is not None:
        answer.replies = [
            Reply(
                form.template,
                warm.tokenizer,
                ids,
                tools,
                seed=f"{job_id}/{index}",
                is_single=not spec.parallel_tool_calls,
                is_limited=not form.is_of_trl,
            )
            for index in range(spec.n)
        ]
    if spec.echo:
        answer.echoed = prompt if isinstance(prompt, str) else answer.token_texts.joined(ids)
    return answer


def _message_format(
    spec: InferSpec, warm: WarmModel, prompt: Prompt
) -> tuple[Described | None, list[dict[str, Any]] | None]:
    """Return how the model writes messages (None: as texts), and the tools that it may call.

    Raises JobFailed for a template that transformers refuses, and for tools where nobody has
    described how the model calls them.
    """
    if spec.reply != MESSAGE or isinstance(prompt, tuple):
        return None, None
    tools = None if spec.tool_choice == NO_CALLS else spec.chat(prompt).inputs.tools
    form = _described(warm)
    if tools and (form is None or TOOL_CALLS not in form.template["fields"]):
        raise JobFailed(
            f"tools: must go with a model whose calls can be read, got {warm.name}: its tokenizer "
            "has no response_template with tool_calls, TRL does not know its chat template, and "
            "it was loaded without one: `warmd load NAME=PATH --response-template FILE`"
        )
    return form, tools


def _described(warm: WarmModel) -> Described | None:
    """Return how a model writes messages. Raises JobFailed for a template that is none."""
    form = described(warm.tokenizer, warm.response_template)
    if form is not None:
        try:
            loaded(form.template)
        except Exception as error:  # of any type: it is a file of the model
            reason = " ".join(str(error).split())[:300]
            raise JobFailed(
                f"messages: the response_template of {warm.name} must be one that transformers "
                f"takes, got one that it refuses: {reason}"
            ) from error
    return form


def _thinking(spec: InferSpec, warm: WarmModel) -> Thinking | None:
    """Return the thinking-token budget, if requested. Raises JobFailed for an unsuitable model."""
    if spec.thinking_token_budget is None:
        return None
    form = _described(warm)
    tags = None if form is None else thinking_tags(form.template)
    added = warm.tokenizer.get_added_vocab()
    if tags is None or not added.keys() >= set(tags):
        raise JobFailed(
            "thinking_token_budget: must go with a model whose thinking is between two special "
            f"tokens such as <think> and </think>, got {warm.name}"
        )
    begin, end = tags
    return Thinking(added[begin], added[end], spec.thinking_token_budget)


def _grammar_of_calls(
    spec: InferSpec, tools: Sequence[dict[str, Any]], warm: WarmModel, engine: Engine
) -> Grammar | None:
    """Return the grammar of completions that may call tools; None: any text.

    Calls of tools that are neither forced nor strict have any arguments. Raises JobFailed, and
    SpecError for a schema.
    """
    forced = spec.forced_tools
    functions = [tool.get("function", tool) for tool in forced or tools]
    if forced:
        advice = "tool_choice: must be auto or none"
    elif spec.json_schema:
        advice = "json_schema: must go without tools, or with tool_choice none"
    elif any(one.get("strict") for one in functions):
        advice = "tools: strict must be false with tool_choice auto"
    else:
        return None
    named = [
        {
            "name": one["name"],
            "parameters": parameters_of(one) if forced or one.get("strict") else {"type": "object"},
        }
        for one in functions
    ]
    tokenizer, ends = warm.tokenizer, sorted(end_tokens(warm.model, warm.tokenizer))
    added = tokenizer.get_added_vocab()
    try:
        form = CallForm.of(ChatTemplate.of(tokenizer), tokenizer.convert_ids_to_tokens(ends))
        if (known := _described(warm)) is not None:
            form = form.trimmed(added, partial(_is_call, known, tokenizer))
        if forced:
            is_single = spec.tool_choice != REQUIRED or not spec.parallel_tool_calls
            grammar = forced_calls.forced(form, named, added, is_single=is_single)
        elif spec.json_schema:
            grammar = forced_calls.or_json(form, named, added, spec.json_schema)
        else:
            grammar = forced_calls.among_text(form, named, added, ends)
    except forced_calls.NoGrammar as error:
        raise JobFailed(f"{advice}: {error}") from None
    return engine.grammar(grammar, TOOLS)


def _is_call(form: Described, tokenizer: Any, text: str) -> bool:
    is_limited = not form.is_of_trl
    reply = Reply(form.template, tokenizer, (), [], seed="", is_limited=is_limited)
    reply.add(text)
    reply.finish(None, is_whole=True)
    return len(reply.told.calls) == 1 and not reply.told.content


def _emit_text(ctx: Context, answers: Sequence[Answer], pieces: Merged) -> None:
    """Stream the texts, in at most 20 events per second each. Raises the error of the engine."""
    pending: dict[int, _Unsent] = defaultdict(_Unsent)
    due = time.perf_counter()
    running = len(answers)
    while running:
        wait_s = None if not pending else max(0.0, due - time.perf_counter())
        try:
            number, piece = pieces.get(timeout=wait_s)
        except queue.Empty:
            number, piece = 0, None
        if isinstance(piece, Piece):
            delta, entries = answers[number].add(piece)
            index = number * answers[number].request.num_completions + piece.index
            pending[index].add(delta, piece.ids, entries)
        elif isinstance(piece, End):
            running -= 1
            if piece.error is not None:
                raise piece.error
        if pending and (not running or time.perf_counter() >= due):
            for index, unsent in sorted(pending.items()):
                unsent.emit(ctx, index, answers[index // answers[0].request.num_completions])
            pending.clear()
            due = time.perf_counter() + _EVENT_S


@dataclass
class _Unsent:
    """The text generated since the latest event of a completion."""

    delta: Delta = field(default_factory=Delta)
    ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def add(self, delta: Delta, ids: Iterable[int], logprobs: list[dict[str, Any]]) -> None:
        self.delta.add(delta)
        self.ids += ids
        self.logprobs += logprobs

    def emit(self, ctx: Context, index: int, answer: Answer) -> None:
        """`answer`: the answer that the completion is part of."""
        delta = self.delta
        if not delta and not self.ids:
            return
        given: dict[str, Any] = {
            "logprobs": self.logprobs,
            "reasoning": delta.reasoning,
            "calls": delta.calls,
        }
        if answer.spec.token_ids:
            given["token_ids"] = self.ids
            if not answer.is_prompt_told:
                given["prompt_token_ids"] = list(answer.request.ids)
                answer.is_prompt_told = True
        about = {name: value for name, value in given.items() if value}
        ctx.emit("text", index=index, text=delta.content, tokens=len(self.ids), **about)


# Files of prompts.


def answer_file(spec: InferSpec, ctx: Context, warm: WarmModel) -> dict[str, Any]:
    """Answer every record of the input that has no answer yet. Raises Stopped and JobFailed.

    A record that cannot be answered gets an error object in its line.
    """
    seed = spec.seed if spec.seed is not None else _stored_seed(ctx)
    source, folder = Path(spec.input), Path(spec.output).parent
    reading = Reading()
    total = sum(1 for _ in batch_file.read(source, reading, chat_template=spec.chat_template))
    engine = _engine(spec, warm)
    usage: dict[str, int] = {}
    drafts: Counter[str] = Counter()
    begun = time.perf_counter()
    with (
        batch_file.Answers(Path(spec.output), ctx.job_id) as answers,
        cancel_on_exit(ctx) as is_canceled,
    ):
        ctx.emit(
            "begin",
            rows=total,
            done=answers.done,
            left_out=left_out.of_job("input", spec.input, readings=[reading]),
            **compute_summary(ctx.device),
        )
        ctx.emit("progress", done=answers.done, total=total)
        emitted_at = time.perf_counter()
        found = _in_order(spec, warm, engine, source, answers.done, seed, ctx.job_id, is_canceled)
        for answer in found:
            if isinstance(answer, JobFailed):
                ctx.patiently(partial(answers.append_error, str(answer)), folder)
            else:
                if not usage:
                    warn_of_model(ctx, engine, warm)
                line = {"choices": answer.choices, **_prompt_ids([answer]), "usage": answer.usage}
                ctx.patiently(partial(answers.append, line), folder)
                drafts.update(_drafts([answer]))
                for name, value in answer.usage.items():
                    usage[name] = usage.get(name, 0) + value
            if answers.done == total or time.perf_counter() - emitted_at >= 1:
                emitted_at = time.perf_counter()
                ctx.emit("progress", done=answers.done, total=total)
    seconds = time.perf_counter() - begun
    tokens = usage.get("completion_tokens", 0)
    return {
        "rows": total,
        "failed": answers.failed,  # records with an error instead of an answer
        "output": spec.output,
        "usage": usage,  # of the records answered by this execution
        "timings": {
            "total_s": round(seconds, 6),
            "tokens_per_s": round(tokens / seconds, 3),
            **drafts,
        },
        "seed": seed,
        "model": spec.model,
    }


def _stored_seed(ctx: Context) -> int:
    """Return a random seed, stored for later executions of the job."""
    path = ctx.run_dir / "seed"
    if not path.exists():
        path.write_text(str(secrets.randbits(63)))
    return int(path.read_text())


def _in_order(
    spec: InferSpec,
    warm: WarmModel,
    engine: Engine,
    source: Path,
    done: int,
    seed: int,
    job_id: str,
    is_canceled: Callable[[], bool],
) -> Iterator[Answer | JobFailed]:
    """Yield the answers to the records after the first `done`, with many in flight.

    A record that cannot be answered gives a JobFailed instead.
    """
    in_flight: deque[Answer | JobFailed] = deque()
    grammar = forms.grammar_of(engine, json_schema=spec.json_schema, regex=spec.regex)
    prompts = batch_file.read(source, chat_template=spec.chat_template, template=spec.template)
    for number, prompt in enumerate(prompts):
        if number < done:
            continue
        row_seed = (seed + number) % 2**63
        try:
            answer = _prepare(spec, warm, prompt, engine, row_seed, grammar, job_id, is_canceled)
            engine.submit(answer.request)
            in_flight.append(answer)
        except JobFailed as error:
            in_flight.append(error)
        if len(in_flight) >= _ROWS_AT_ONCE:
            yield _wait_for(in_flight.popleft())
    while in_flight:
        yield _wait_for(in_flight.popleft())


def _wait_for(answer: Answer | JobFailed) -> Answer | JobFailed:
    """Wait for an answer. Raises Stopped, and other errors of the engine."""
    if isinstance(answer, JobFailed):
        return answer
    try:
        answer.wait()
    except JobFailed as error:
        return error
    return answer
