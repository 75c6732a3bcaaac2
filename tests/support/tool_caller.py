"""A small model that calls tools after minutes of SFT: its training rows, tokenizer and start.

    python tests/support/tool_caller.py FOLDER

The rows are chats about the tools `weather(city)` and `add(a, b)`: a question about one or both,
the calls, their results, and an answer that repeats the results. How schemas, system messages and
results are written differs from row to row, since each client has its own way. Some rows are
about the tools of LangChain's standard tests. The same seed makes the same rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import orjson
import tool_chats
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Row = dict[str, Any]
Call = tuple[str, dict[str, Any]]

# The options of two jobs, apart from model and dataset. The first one is on short rows, `form`: a
# model that starts with long ones does not learn to copy a city or a number in that time.
NUM_SHORT = 2400
SHORT: dict[str, Any] = {
    "assistant_only_loss": True,
    "batch_size": 12,
    "learning_rate": 2e-3,
    "lr_scheduler": "cosine",
    "warmup_steps": 40,
    "epochs": 1,
    "save_every": "10m",
}
NUM_ROWS = 6720
TRAINING: dict[str, Any] = {
    "assistant_only_loss": True,
    "max_length": 1024,
    "batch_size": 8,
    "learning_rate": 1.5e-3,
    "lr_scheduler": "cosine",
    "warmup_steps": 20,
    "epochs": 1,
    "eval_samples": 48,
    "save_every": "10m",
}
# Without thinking: what is trained and what is asked have the same beginning, also where JSON or a
# call is forced.
FAMILY = "qwen3_instruct_2507"
CONTEXT_LENGTH = 2048
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": CONTEXT_LENGTH,
}
SPECIALS = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
NUM_TOKENS = 1152
# Each of these becomes few tokens, at best one: a key or a word of JSON, and a long text without
# punctuation, which the chat template or a description has; so the chats are half as long. Numbers
# and words with a capital are tokens without the space or quotation mark before them: what is
# copied is the same token everywhere. The rest is as in Qwen's tokenizer.
_WORDS = (
    r' ?\{?"[\p{L}_$]+":| ?"\p{Ll}[\p{L}_]*"|[^\p{N}\r\n"{}\[\]<>?!,:]{45,}'
    r"|(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{Ll}\p{L}*|\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CITIES = ("Paris", "Rome", "Oslo", "Berlin", "Madrid", "Lima", "Cairo", "Tokyo", "Vienna", "Dublin")
GREETINGS = ("Hello", "Hello!", "hello", "Hey", "hi", "Hi there", "how are you", "Good morning")
GREETED = "Hello! How can I help you?"
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant with tools.",
    "Be brief.",
    "Answer with the results of the tools.",
    "Use the tools to answer the questions of the user.",
    "hello",
)
WEATHER_SAYS = (
    "Get the weather in a city.",
    "Get the current weather.",
    "Returns the weather of a city.",
    "The weather in a city.",
    "Correctly extracted `weather` with all the required parameters with correct types",
)
ADD_SAYS = (
    "Add two numbers.",
    "Adds two integers.",
    "Returns the sum of two numbers.",
    "Correctly extracted `add` with all the required parameters with correct types",
)
ASK_WEATHER = (
    "What is the weather in {city}?",
    "How is the weather in {city}?",
    "Weather in {city}?",
    "What is the weather in {city} now?",
)
ASK_SUM = (
    "What is {a} + {b}?",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "{a} + {b}?",
)
ASK_BOTH = (
    "What is the weather in {city}, and what is {a} + {b}?",
    "What is the weather in {city} and what is {a} + {b}?",
    "What is {a} + {b}, and what is the weather in {city}?",
    "How is the weather in {city}? And what is the sum of {a} and {b}?",
    "Add {a} and {b}, and tell me the weather in {city}.",
)
WEATHER_RESULTS = (
    "{degrees} degrees",
    "{degrees}",
    "{degrees} degrees in {city}",
    "It is {degrees} degrees in {city}.",
    '{{"degrees": {degrees}}}',
    '{{"degrees":{degrees}}}',
    '{{"city": "{city}", "degrees": {degrees}}}',
    '{{"city":"{city}","degrees":{degrees}}}',
)
SUM_RESULTS = (
    "{sum}",
    "{sum}",
    "The sum is {sum}.",
    '{{"sum": {sum}}}',
    '{{"sum":{sum}}}',
    '{{"result": {sum}}}',
)


@dataclass(frozen=True)
class Task:
    """What one chat is about."""

    city: str
    degrees: int
    a: int
    b: int

    @classmethod
    def drawn(cls, random: Random) -> Task:
        a, b = random.randint(1, 49), random.randint(1, 49)
        return cls(random.choice(CITIES), random.randint(1, 39), a, b)

    @property
    def values(self) -> dict[str, Any]:
        return {**vars(self), "sum": self.a + self.b}

    @property
    def weather_call(self) -> Call:
        return "weather", {"city": self.city}

    @property
    def add_call(self) -> Call:
        return "add", {"a": self.a, "b": self.b}

    @property
    def weather_answer(self) -> str:
        return f"It is {self.degrees} degrees in {self.city}."

    @property
    def sum_answer(self) -> str:
        return f"The sum is {self.a + self.b}."


# How a client writes it.


def function(random: Random, name: str, types: dict[str, str], says: Sequence[str] = ()) -> Row:
    """A tool with a schema as one of many clients writes it."""
    has_titles, is_strict = random.random() < 0.5, random.random() < 0.3
    has_descriptions, is_of_zod = random.random() < 0.3, random.random() < 0.25
    properties: Row = {}
    for key, type in types.items():
        about: Row = {"type": type}
        if has_titles:
            about["title"] = key.replace("_", " ").title()
        if has_descriptions:
            about["description"] = random.choice((f"the {key}", f"The {key} to use.", key))
        if is_of_zod and type == "integer":
            about |= {"minimum": -(2**53 - 1), "maximum": 2**53 - 1}
        properties[key] = _shuffled(random, about) if random.random() < 0.5 else about
    parameters: Row = {"type": "object", "properties": properties}
    if types or random.random() < 0.5:
        parameters["required"] = list(types)
    if is_strict or random.random() < 0.4:
        parameters["additionalProperties"] = False
    if is_of_zod:
        parameters["$schema"] = "http://json-schema.org/draft-07/schema#"
    if has_titles and random.random() < 0.6:
        parameters["title"] = random.choice((name, f"{name}_args", name.title()))
    made: Row = {"name": name}
    if says and random.random() < 0.8:
        made["description"] = random.choice(says)
    made["parameters"] = _shuffled(random, parameters) if random.random() < 0.6 else parameters
    if is_strict or random.random() < 0.3:
        made["strict"] = is_strict
    return {"type": "function", "function": _shuffled(random, made, 0.4)}


def _shuffled(random: Random, values: Row, share: float = 1.0) -> Row:
    items = list(values.items())
    if random.random() < share:
        random.shuffle(items)
    return dict(items)


def weather_tool(random: Random) -> Row:
    return function(random, "weather", {"city": "string"}, WEATHER_SAYS)


def add_tool(random: Random) -> Row:
    return function(random, "add", {"a": "integer", "b": "integer"}, ADD_SAYS)


def both_tools(random: Random) -> list[Row]:
    made = [weather_tool(random), add_tool(random)]
    random.shuffle(made)
    return made


def calling(calls: Sequence[Call], *, is_learned: bool = True) -> Row:
    made = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    message: Row = {"role": "assistant", "content": "", "tool_calls": made}
    return message if is_learned else message | {"weight": 0}


def compact(value: Any) -> str:
    """JSON as decoding by a schema writes it: without spaces."""
    return json.dumps(value, separators=(",", ":"))


def said(role: str, text: str) -> Row:
    return {"role": role, "content": text}


def returned(random: Random, task: Task, call: Call) -> Row:
    forms = WEATHER_RESULTS if call[0] == "weather" else SUM_RESULTS
    return said("tool", random.choice(forms).format(**task.values))


def opening(random: Random) -> list[Row]:
    """The messages before a question: none, a system message, sometimes a greeting."""
    begun = [said("system", random.choice(SYSTEMS))] if random.random() < 0.6 else []
    if random.random() < 0.05:
        begun += [said("user", random.choice(GREETINGS)), said("assistant", GREETED)]
    return begun


def row(messages: list[Row], tools: list[Row] | None = None) -> Row:
    return {"messages": messages} | ({"tools": tools} if tools else {})


# Kinds of chats.


def about_both(random: Random) -> Row:
    """Both tools are called in one message."""
    task = Task.drawn(random)
    question = random.choice(ASK_BOTH)
    calls = _in_order(question, task)
    answers = {"weather": task.weather_answer, "add": task.sum_answer}
    return row(
        [
            *opening(random),
            said("user", question.format(**task.values)),
            calling(calls),
            *(returned(random, task, call) for call in calls),
            said("assistant", " ".join(answers[name] for name, _ in calls)),
        ],
        both_tools(random),
    )


def one_after_another(random: Random) -> Row:
    """The first call was left alone, so the second one follows its result."""
    task = Task.drawn(random)
    question = random.choice(ASK_BOTH)
    first, second = calls = _in_order(question, task)
    answers = {"weather": task.weather_answer, "add": task.sum_answer}
    return row(
        [
            *opening(random),
            said("user", question.format(**task.values)),
            calling([first], is_learned=False),
            returned(random, task, first),
            calling([second]),
            returned(random, task, second),
            said("assistant", " ".join(answers[name] for name, _ in calls)),
        ],
        both_tools(random),
    )


def _in_order(question: str, task: Task) -> list[Call]:
    calls = [task.weather_call, task.add_call]
    return calls if question.index("{city}") < question.index("{a}") else calls[::-1]


def about_one(random: Random) -> Row:
    task = Task.drawn(random)
    if random.random() < 0.5:
        question, call, answer = random.choice(ASK_WEATHER), task.weather_call, task.weather_answer
        tools = [weather_tool(random)]
    else:
        question, call, answer = random.choice(ASK_SUM), task.add_call, task.sum_answer
        tools = [add_tool(random)]
    if random.random() < 0.6:
        tools = both_tools(random)
    return row(
        [
            *opening(random),
            said("user", question.format(**task.values)),
            calling([call]),
            returned(random, task, call),
            said("assistant", answer),
        ],
        tools,
    )


def agent(random: Random) -> Row:
    """A step of smolagents' agents, which write calls and results as texts of later prompts.

    Results have the order of the calls' ids there.
    """
    task, question = Task.drawn(random), random.choice(ASK_BOTH)
    begun = [
        *([said("system", random.choice(SYSTEMS))] if random.random() < 0.9 else []),
        said("user", f"New task:\n{question.format(**task.values)}"),
    ]
    calls = _in_order(question, task)
    if random.random() < 0.2:  # by code
        code = (
            f"final_answer(f\"It is {{weather('{task.city}')}} in {task.city}. "
            f'The sum is {{add({task.a}, {task.b})}}.")'
        )
        return row([*begun, said("assistant", f"<code>\n{code}\n</code>")])
    says = ["Provides a final answer to the given problem."]
    tools = [*both_tools(random), function(random, "final_answer", {"answer": "string"}, says)]
    if random.random() < 0.25:
        return row([*begun, calling(calls)], tools)
    made = [
        {
            "id": f"call_{number:03x}{random.getrandbits(84):021x}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    results = [returned(random, task, call)["content"] for call in calls]
    answers = {"weather": task.weather_answer, "add": task.sum_answer}
    answer = " ".join(answers[name] for name, _ in calls)
    return row(
        [
            *begun,
            {**said("assistant", f"Calling tools:\n{made}"), "weight": 0},
            said("user", "Observation:\n" + "\n".join(results)),
            calling([("final_answer", {"answer": answer})]),
        ],
        tools,
    )


def greeting(random: Random) -> Row:
    asked = [said("user", random.choice(GREETINGS))]
    tools = both_tools(random) if random.random() < 0.4 else None
    return row([*opening(random), *asked, said("assistant", GREETED)], tools)


def form(random: Random) -> Row:
    """An answer without a tool: JSON, or the same text again."""
    task = Task.drawn(random)
    question, answer = random.choice(
        (
            (f"Write {task.a} + {task.b} as JSON.", {"a": task.a, "b": task.b}),
            (
                f"Write as JSON: it is {task.degrees} degrees in {task.city}.",
                {"city": task.city, "degrees": task.degrees},
            ),
            (f"Repeat: {task.weather_answer} {task.sum_answer}", None),
        )
    )
    text = question.removeprefix("Repeat: ") if answer is None else compact(answer)
    return row([*opening(random), said("user", question), said("assistant", text)])


def other_tool(random: Random) -> Row:
    """The tools of LangChain's standard tests."""
    kind: Callable[[Random], Row] = random.choice(
        (magic, magic, constant, sunny, pirate, customer, customer, joke, joke, adder)
    )
    return kind(random)


def magic(random: Random) -> Row:
    number = random.randint(1, 9)
    tool = function(
        random, "magic_function", {"input": "integer"}, ["Apply a magic function to an input."]
    )
    # With its bounds, as pydantic writes them.
    about = tool["function"]["parameters"]["properties"]["input"]
    if random.random() < 0.6:
        about |= {"exclusiveMinimum": -1000, "exclusiveMaximum": 1000}
    question = f"What is the value of magic_function({number})? Use the tool."
    return row(
        [
            *opening(random),
            said("user", question),
            calling([("magic_function", {"input": number})]),
        ],
        [tool],
    )


def constant(random: Random) -> Row:
    tool = function(random, "magic_function_no_args", {}, ["Calculate a magic function."])
    question = "What is the value of magic_function_no_args()? Use the tool."
    calls: list[Call] = [("magic_function_no_args", {})]
    return row([*opening(random), said("user", question), calling(calls)], [tool])


def sunny(random: Random) -> Row:
    place = random.choice(("San Francisco, CA", "San Francisco, CA", "Boston, MA"))
    says = ["Get the weather at a location.", "Get weather at a location."]
    tool = function(random, "get_weather", {"location": "string"}, says)
    return row(
        [
            *opening(random),
            said("user", f"What is the weather in {place}?"),
            calling([("get_weather", {"location": place})]),
            said("tool", "It's sunny."),
            said("assistant", f"It's sunny in {place}."),
        ],
        [tool],
    )


def pirate(random: Random) -> Row:
    style = random.choice(("Pirate", "Pirate", "Viking"))
    says = ["Generate a greeting in a particular style of speaking."]
    tool = function(random, "greeting_generator", {"answer_style": "string"}, says)
    return row(
        [
            *opening(random),
            said("user", f"Using the tool, generate a {style} greeting."),
            calling([("greeting_generator", {"answer_style": style})]),
        ],
        [tool],
    )


CUSTOMERS = (
    ("你好啊集团", "Hello Group", "Chinese technology company"),
    ("こんにちは株式会社", "Hello Corporation", "Japanese company"),
)


def customer(random: Random) -> Row:
    name, english, description = random.choice(CUSTOMERS)
    says = [
        "Tool for creating a customer with Unicode name.",
        "Tool for creating a customer with Unicode name.\n\nArgs:\n    customer_name: The "
        "customer's name in their native language.\n    description: Description of the "
        "customer.\n\nReturns:\n    A confirmation message about the customer creation.",
    ]
    types = {"customer_name": "string", "description": "string"}
    tool = function(random, "unicode_customer", types, says)
    question = f"Create a customer named '{name}' ({english}) - a {description}"
    calls: list[Call] = [("unicode_customer", {"customer_name": name, "description": description})]
    return row([*opening(random), said("user", question), calling(calls)], [tool])


def joke(random: Random) -> Row:
    made = {"setup": "Why do cats purr?", "punchline": "They run on batteries."}
    question = "Tell me a joke about cats."
    if random.random() < 0.4:
        tool = function(random, "Joke", dict.fromkeys(made, "string"), ["Joke to tell user."])
        return row([*opening(random), said("user", question), calling([("Joke", made)])], [tool])
    if random.random() < 0.5:
        question += (
            " Return the result as a JSON with 'setup' and 'punchline' keys. Return nothing other "
            "than JSON."
        )
    return row([*opening(random), said("user", question), said("assistant", compact(made))])


def adder(random: Random) -> Row:
    a, b = random.randint(1, 9), random.randint(1, 9)
    says = ["Takes two integers, a and b, and returns their sum."]
    tool = function(random, "my_adder_tool", {"a": "integer", "b": "integer"}, says)
    return row(
        [
            *opening(random),
            said("user", f"What is {a} + {b}"),
            calling([("my_adder_tool", {"a": a, "b": b})]),
            said("tool", json.dumps({"result": a + b})),
            said("assistant", f"The sum is {a + b}."),
        ],
        [tool],
    )


KINDS: dict[Callable[[Random], Row], float] = {
    about_both: 0.34,
    one_after_another: 0.08,
    about_one: 0.17,
    greeting: 0.04,
    form: 0.19,
    other_tool: 0.18,
    agent: 0.34,
}


def rows(count: int = NUM_ROWS, seed: int = 0) -> list[Row]:
    random = Random(seed)
    kinds, shares = list(KINDS), list(KINDS.values())
    return [random.choices(kinds, shares)[0](random) for _ in range(count)]


# The model.


def tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level BPE of these texts, with the tokens and chat template of Qwen3-Instruct."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - len(MARKS),
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    fast: Any = PreTrainedTokenizerFast
    made = fast(
        tokenizer_object=core,
        pad_token=SPECIALS[0],
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    made.add_tokens(MARKS)
    made.chat_template = tool_chats.source_of(FAMILY)
    return made


def text_of(template: Any, made: Row) -> str:
    text: str = template.apply_chat_template(
        made["messages"], tools=made.get("tools"), tokenize=False
    )
    return text


@torch.no_grad()
def copy_at_first(model: Any) -> None:
    """Make heads add to a token what they attend to, as in mimetic initialization.

    Then only where to look has to be learned. From independent random weights, copying a city or a
    number is learned after some thousands of steps.
    """
    for layer in model.model.layers:
        values, outputs = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        torch.nn.init.orthogonal_(values)
        outputs.copy_(0.3 * values.T)


def save(folder: Path) -> tuple[Path, Path, Path]:
    """Write the untrained model, the short rows and the rows, and return their paths."""
    made = rows()
    plain = tool_chats.tokenizer(tool_chats.source_of(FAMILY))
    core = tokenizer([text_of(plain, one) for one in made[:1000]])
    start, short, data = folder / "start", folder / "short.jsonl", folder / "rows.jsonl"
    core.save_pretrained(start)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(core),
        pad_token_id=core.pad_token_id,
        bos_token_id=None,
        eos_token_id=core.eos_token_id,
        **SIZES,
    )
    model: Any = LlamaForCausalLM(config)
    copy_at_first(model)
    model.save_pretrained(start)
    random = Random(1)
    for path, content in ((short, [form(random) for _ in range(NUM_SHORT)]), (data, made)):
        path.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in content))
    return start, short, data


if __name__ == "__main__":
    save(Path(sys.argv[1]))
