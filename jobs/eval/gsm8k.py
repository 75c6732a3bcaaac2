"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168) by the conventions of lm-evaluation-harness 0.4.

Prompts, stop strings, answer extraction and comparison are those of its tasks `gsm8k` (version 3.0,
5 examples drawn from the training split) and `gsm8k_cot` (version 3.0, the 8 examples of Wei et al.
2022, arXiv:2201.11903). The regular expressions are theirs (MIT license). Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

INVALID = "[invalid]"  # the extracted answer if a completion has none
MAX_TOKENS = 256
_SEED = 1234  # of the examples: the harness' default


@dataclass(frozen=True)
class Filter:
    """An answer extraction: a regular expression, and which of its matches counts."""

    pattern: re.Pattern[str]
    index: int  # 0: the first match, -1: the last

    def extract(self, completion: str) -> str:
        """Return the answer in a completion, or INVALID. As the harness' RegexFilter."""
        found = self.pattern.findall(completion)
        if not found:
            return INVALID
        match = found[self.index]
        if isinstance(match, tuple):
            match = next((group for group in match if group), INVALID)
        return str(match).strip()


_FLEXIBLE = Filter(re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)"), -1)


@dataclass(frozen=True)
class Variant:
    """One of the harness' tasks on GSM8K."""

    question: str  # template
    stop: tuple[str, ...]
    num_examples: int
    filters: Mapping[str, Filter]  # by metric; the first is the primary one


DIRECT = Variant(
    question="Question: {question}\nAnswer:",
    stop=("Question:", "</s>", "<|im_end|>"),
    num_examples=5,
    filters={"strict": Filter(re.compile(r"#### (\-?[0-9\.\,]+)"), 0), "flexible": _FLEXIBLE},
)
CHAIN_OF_THOUGHT = Variant(
    question="Q: {question}\nA:",
    stop=("Q:", "</s>", "<|im_end|>"),
    num_examples=8,
    filters={
        "strict": Filter(re.compile(r"The answer is (\-?[0-9\.\,]+)."), 0),
        "flexible": _FLEXIBLE,
    },
)

_IGNORED = [re.compile(text) for text in (",", r"\$", r"(?s).*#### ", r"\.$")]


def is_correct(extracted: str, answer: str) -> bool:
    """Whether an extracted answer is that of the data set: the harness' `exact_match`."""
    return _plain(extracted) == _plain(answer.split("####")[-1].strip())


def _plain(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def prompts(
    variant: Variant,
    questions: Sequence[str],
    examples: Sequence[tuple[str, str]],
    num_examples: int,
) -> Iterator[str]:
    """Yield the prompt of each question: examples with their solutions, then the question.

    examples: pairs of question and solution. Those of DIRECT are drawn again for each question, by
    the generator of the harness, so that the prompts are the same; those of CHAIN_OF_THOUGHT are
    the first ones.
    """
    random = Random(_SEED)
    for question in questions:
        if variant is DIRECT:
            shown = random.sample(examples, num_examples) if num_examples else []
        else:
            shown = list(examples[:num_examples])
        texts = [f"{variant.question.replace('{question}', q)} {a}\n\n" for q, a in shown]
        yield "".join(texts) + variant.question.replace("{question}", question)


# Wei et al. 2022, table 20.
COT_EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        "There are 15 trees in the grove. Grove workers will plant trees in the grove "
        "today. After they are done, there will be 21 trees. How many trees did the grove"
        " workers plant today?",
        "There are 15 trees originally. Then there were 21 trees after some more were "
        "planted. So there must have been 21 - 15 = 6. The answer is 6.",
    ),
    (
        "If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are"
        " in the parking lot?",
        "There are originally 3 cars. 2 more cars arrive. 3 + 2 = 5. The answer is 5.",
    ),
    (
        "Leah had 32 chocolates and her sister had 42. If they ate 35, how many pieces do"
        " they have left in total?",
        "Originally, Leah had 32 chocolates. Her sister had 42. So in total they had 32 +"
        " 42 = 74. After eating 35, they had 74 - 35 = 39. The answer is 39.",
    ),
    (
        "Jason had 20 lollipops. He gave Denny some lollipops. Now Jason has 12 "
        "lollipops. How many lollipops did Jason give to Denny?",
        "Jason started with 20 lollipops. Then he had 12 after giving some to Denny. So "
        "he gave Denny 20 - 12 = 8. The answer is 8.",
    ),
    (
        "Shawn has five toys. For Christmas, he got two toys each from his mom and dad. "
        "How many toys does he have now?",
        "Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that"
        " is 4 more toys. 5 + 4 = 9. The answer is 9.",
    ),
    (
        "There were nine computers in the server room. Five more computers were installed"
        " each day, from monday to thursday. How many computers are now in the server "
        "room?",
        "There were originally 9 computers. For each of 4 days, 5 more computers were "
        "added. So 5 * 4 = 20 computers were added. 9 + 20 is 29. The answer is 29.",
    ),
    (
        "Michael had 58 golf balls. On tuesday, he lost 23 golf balls. On wednesday, he "
        "lost 2 more. How many golf balls did he have at the end of wednesday?",
        "Michael started with 58 golf balls. After losing 23 on tuesday, he had 58 - 23 ="
        " 35. After losing 2 more, he had 35 - 2 = 33 golf balls. The answer is 33.",
    ),
    (
        "Olivia has $23. She bought five bagels for $3 each. How much money does she have left?",
        "Olivia had 23 dollars. 5 bagels for 3 dollars each will be 5 x 3 = 15 dollars. "
        "So she has 23 - 15 dollars left. 23 - 15 is 8. The answer is 8.",
    ),
)
