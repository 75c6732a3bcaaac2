"""The relations between the options of every kind: refused where broken, and shown in the help."""

from typing import Any

import pytest

from warmd.cli.shared.spec_options import spec_option
from warmd.jobs import KINDS, spec_class
from warmd.jobs.errors import SpecError
from warmd.jobs.spec import Spec

RELATIONS = [
    pytest.param(kind, relation, name, id=f"{kind}-{name}-{relation.note}")
    for kind in KINDS
    for relation in spec_class(kind).every_relation()
    for name in relation.options
]


def values_of(info):
    """Return values that an option takes."""
    if info.choices:
        return [*info.choices, info.default]
    text = ["eval_loss", "own", "train", "mlm_acc"]
    numbers = [value for value in (info.minimum, info.maximum, 1) if value is not None]
    candidates: dict[type, list[Any]] = {
        str: text,
        bool: [True, False],
        int: numbers,
        float: numbers,
    }
    found = [info.type(value) for value in candidates[info.type]]
    return [info.default, *([(value,) for value in found] if info.many else found)]


def value(info, holds):
    return next(value for value in values_of(info) if holds(value))


def with_others(kind, relation, name, *, are_met):
    """Return a spec with an option as `relation` is about it, whose others meet it or do not."""
    known = spec_class(kind).options()
    when = relation.when.holds if relation.when else lambda value: value != known[name].default
    others = {
        other: value(known[other], lambda value, one=one: one.holds(value) == are_met)
        for other, one in relation.others.items()
    }
    return spec_class(kind)(**{name: value(known[name], when), **others})


def broken(relation, spec):
    defaults = {name: info.default for name, info in spec.options().items()}
    return list(relation.broken_by({name: getattr(spec, name) for name in defaults}, defaults))


@pytest.mark.parametrize(("kind", "relation", "name"), RELATIONS)
def test_an_option_is_refused_with_or_without_those_that_it_is_related_to(kind, relation, name):
    wrong = with_others(kind, relation, name, are_met=not relation.together)
    assert name in broken(relation, wrong)
    assert name not in broken(
        relation, with_others(kind, relation, name, are_met=relation.together)
    )
    with pytest.raises(SpecError) as refused:
        Spec.check(wrong)
    refusals = {(other, one.rule) for one in wrong.every_relation() for other in broken(one, wrong)}
    field, _, problem = str(refused.value).partition(": ")
    assert (field, problem.rpartition(", got ")[0]) in refusals
    assert "\n" not in problem


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_of_a_kind_break_no_relation(kind):
    spec = spec_class(kind)()
    assert [one for one in spec.every_relation() if broken(one, spec)] == []


@pytest.mark.parametrize(("kind", "relation", "name"), RELATIONS)
def test_the_help_of_an_option_shows_its_relations(kind, relation, name):
    option = spec_option(spec_class(kind).options()[name])
    assert relation.note in (option.help or "")


def test_a_refusal_is_one_line_whatever_the_values_are():
    values: dict[str, Any] = {"prompt": "a\nb" * 100, "system": "c\n\x1b[2Jd"}
    spec = spec_class("infer")(**values)
    with pytest.raises(SpecError) as refused:
        Spec.check(spec)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400
