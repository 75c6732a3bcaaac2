"""The knowledge graph of Python sources, for small sources with known triples."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmd.jobs.codegraph.python_graph import read_modules, sources_in
from warmd.jobs.codegraph.triples import (
    RELATIONS,
    Qualifiers,
    Triple,
)
from warmd.jobs.files.folders import HIDDEN, OTHERS, SKIPPED, Found, LeftOut

SHOP = '''
import os.path
import json as j
from ..base import Item, Missing as Gone
from . import rates

LIMIT: int = 3


@j.register
class Cart(Item, list[str]):
    size: "int | None" = 0

    def __init__(self, owner: str, *rest) -> None:
        self.owner, self.paid = owner, False
        self.clear()

    def clear(self):
        return self

    def total(self):
        """Sum up."""
        class Sum:
            pass

        try:
            rows = [rates.of(item).round() for item in self]
            os.path.join("a", *map(str, rows))
        except (KeyError, Gone) as error:
            raise ValueError("no rate") from error
        finally:
            Sum()
        return rows


async def checkout(cart: Cart):
    if not cart:
        raise Gone
    return Cart("x")
'''


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(file: str, text: str | bytes) -> Path:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
        return path

    return write


def build_triples(sources: Any, root: Path, **how: Any) -> list[Triple]:
    return [triple for module in read_modules(sources, root, **how) for triple in module.triples]


def edges(path: Path, root: Path, relation: str) -> list[tuple[str, str]]:
    """The heads and tails of one relation in one file, without the module in front."""
    triples = [triple for triple in build_triples([path], root) if triple.relation == relation]
    prefix = triples[0].qualifiers.module + "." if triples else ""
    return [(t.head.removeprefix(prefix), t.tail.removeprefix(prefix)) for t in triples]


@pytest.mark.parametrize(
    ("relation", "expected"),
    [
        (
            "contains",
            [
                ("app.shop", "app.shop.cart"),
                ("app.shop.cart", "Cart"),
                ("Cart.total", "Cart.total.Sum"),
            ],
        ),
        (
            "imports",
            [
                ("app.shop.cart", "os.path"),
                ("app.shop.cart", "json"),
                ("app.shop.cart", "app.base.Item"),
                ("app.shop.cart", "app.base.Missing"),
                ("app.shop.cart", "app.shop.rates"),
            ],
        ),
        (
            "declares",
            [
                ("app.shop.cart", "LIMIT"),
                ("Cart", "Cart.size"),
                ("Cart.__init__", "Cart.__init__.owner"),
                ("Cart.__init__", "Cart.__init__.rest"),
                ("Cart", "Cart.owner"),
                ("Cart", "Cart.paid"),
                ("checkout", "checkout.cart"),
            ],
        ),
        (
            "defines",
            [
                ("Cart", "Cart.__init__"),
                ("Cart", "Cart.clear"),
                ("Cart", "Cart.total"),
                ("app.shop.cart", "checkout"),
            ],
        ),
        ("inherits_from", [("Cart", "app.base.Item"), ("Cart", "list")]),
        (
            "annotated_with",
            [
                ("LIMIT", "int"),
                ("Cart", "json.register"),
                ("Cart.size", "int"),
                ("Cart.size", "None"),
                ("Cart.__init__.owner", "str"),
                ("checkout.cart", "Cart"),
            ],
        ),
        ("returns", [("Cart.__init__", "None"), ("Cart.clear", "Cart"), ("checkout", "Cart")]),
        ("calls", [("Cart.total", "app.shop.rates.of"), ("Cart.total", "os.path.join")]),
        ("invokes", [("Cart.__init__", "Cart.clear"), ("Cart.total", "round")]),
        (
            "instantiates",
            [
                ("Cart.total", "map"),
                ("Cart.total", "ValueError"),
                ("Cart.total", "Cart.total.Sum"),
                ("checkout", "Cart"),
            ],
        ),
        ("catches", [("Cart.total", "KeyError"), ("Cart.total", "app.base.Missing")]),
        ("raises", [("Cart.total", "ValueError"), ("checkout", "app.base.Missing")]),
    ],
)
def test_every_relation_follows_its_definition(relation, expected, write, tmp_path):
    path = write("app/shop/cart.py", SHOP)
    assert sorted(edges(path, tmp_path, relation)) == sorted(expected)


def test_the_relations_are_all_tested(request):
    marker = test_every_relation_follows_its_definition.pytestmark[0]
    assert {case[0] for case in marker.args[1]} == set(RELATIONS)


def test_a_return_statement_gives_the_type_of_a_literal(write, tmp_path):
    path = write(
        "m.py",
        """
        def f(x):
            return "text"
            return [x]
            return {}
            return x < 1
            return None
            return x
            return len(x)
            return x.strip()
        """,
    )
    shown = [tail for _, tail in edges(path, tmp_path, "returns")]
    assert shown == ["str", "list", "dict", "bool", "None", "len", "strip"]


def test_a_parameter_shadows_builtins_and_imports(write, tmp_path):
    path = write("m.py", "import os\ndef f(len, os):\n    len(1)\n    os.walk()\n")
    assert edges(path, tmp_path, "calls") == []
    assert edges(path, tmp_path, "invokes") == [("f", "walk")]


def test_a_function_does_not_see_the_names_of_its_class(write, tmp_path):
    path = write("m.py", "class A:\n    def len(self): ...\n    def f(self):\n        len(self)\n")
    assert edges(path, tmp_path, "calls") == [("A.f", "len")]


def test_a_package_is_named_by_its_folder_and_imports_relative_to_itself(write, tmp_path):
    path = write("a/b/__init__.py", "from . import c\nfrom .. import d\nfrom .e import *\n")
    (module,) = read_modules([path], tmp_path)
    assert module.name == "a.b"
    assert [t.tail for t in module.triples if t.relation == "imports"] == ["a.b.c", "a.d", "a.b.e"]


def test_a_triple_counts_once_per_file_and_has_its_place(write, tmp_path):
    path = write("a/m.py", "len(1)\nlen(2)\n")
    calls = [t for t in build_triples([path], tmp_path) if t.relation == "calls"]
    assert calls == [Triple("a.m", "calls", "len", Qualifiers("python", "a/m.py", "a.m"))]


def test_blocks_hold_decorators_and_lose_their_indentation(write, tmp_path):
    path = write("m.py", "class A:\n    @property\n    def f(self):\n        return 1\n\nx = 2\n")
    (module,) = read_modules([path], tmp_path)
    texts = {block.name: block.text for block in module.blocks}
    assert texts["m"] == path.read_text()
    assert texts["m.A.f"] == "@property\ndef f(self):\n    return 1"


def test_a_form_feed_in_the_source_does_not_shift_the_blocks(write, tmp_path):
    path = write("m.py", "x = 1\n\x0c\ndef f():\r\n    return 2\n")
    (module,) = read_modules([path], tmp_path)
    assert module.blocks[1].text == "def f():\n    return 2"


def test_files_that_do_not_parse_are_skipped_with_the_reason(write, tmp_path):
    sources = [
        write("bad.py", "def f(:\n"),
        write("latin.py", b"# \xff\n"),
        write("zero.py", b"x = 1\0\n"),
        write("deep.py", "(" * 500 + ")" * 500),
        write("\udcff.py", "x = 1\n"),
        tmp_path / "gone.py",
        write("good.py", "x = 1\n"),
    ]
    skipped: list[tuple[str, str]] = []
    triples = build_triples(
        sources, tmp_path, on_skip=lambda path, reason: skipped.append((path.name, reason))
    )
    assert [triple.tail for triple in triples] == ["good.x"]
    assert [name for name, _ in skipped] == [path.name for path in sources[:-1]]
    assert all(reason for _, reason in skipped)


def test_an_expression_nested_deeper_than_pythons_stack_is_read(write, tmp_path):
    path = write("m.py", "x = " + " + ".join(["f(1)"] * 900) + "\n" + "def f(a): return a\n")
    assert edges(path, tmp_path, "calls") == [("m", "f")]


def test_syntax_warnings_of_the_sources_are_not_shown(write, tmp_path):
    path = write("m.py", r"""x: "a is 1" = '\d'""")
    assert [triple.tail for triple in build_triples([path], tmp_path)] == ["m.x"]


def test_sources_come_in_order_without_tests_and_hidden_folders(write, tmp_path):
    for name in ("b.py", "a/z.py", "a/tests/t.py", ".git/h.py", "site-packages/p.py", "a.txt"):
        write(name, "")
    assert sources_in("data", tmp_path) == Found(
        [tmp_path / "a/z.py", tmp_path / "b.py"],
        {
            HIDDEN: LeftOut(1, [".git/"]),
            OTHERS: LeftOut(1, ["a.txt"]),
            SKIPPED: LeftOut(2, ["a/tests/", "site-packages/"]),
        },
    )


def test_the_order_does_not_change_from_one_reading_to_the_next(write, tmp_path):
    paths = [write(f"{name}.py", SHOP) for name in "ba"]
    assert list(build_triples(paths, tmp_path)) == list(build_triples(paths, tmp_path))
