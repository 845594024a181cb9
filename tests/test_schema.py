"""Plain values become typed dataclasses, and every mistake is named."""

from dataclasses import dataclass
from typing import Literal

import pytest

from forge.schema import structure


@dataclass(frozen=True)
class Inner:
    match: str
    weight: float | None


@dataclass(frozen=True)
class Outer:
    count: int
    rate: float
    kind: Literal["a", "bee"]
    inner: Inner | None
    groups: list[Inner]
    names: dict[str, str]
    flag: bool
    which: bool | Literal["some"]


GOOD = {"count": 3, "rate": 1, "kind": "a", "inner": {"match": "x", "weight": None}, "groups": [], "names": {},
        "flag": True, "which": "some"}


def test_values_take_the_types_of_their_fields():
    mistakes: list[str] = []
    made = structure(Outer, {**GOOD, "count": 1e6, "groups": [{"match": "y", "weight": 2}]}, "part", mistakes)
    assert not mistakes
    assert made == Outer(1_000_000, 1.0, "a", Inner("x", None), [Inner("y", 2.0)], {}, True, "some")
    assert isinstance(made.count, int) and isinstance(made.rate, float)


@pytest.mark.parametrize(("change", "said"), [
    ({"count": "many"}, "part.count='many': a whole number is wanted."),
    ({"rate": float("nan")}, "part.rate=nan: a number that is finite is wanted."),
    ({"rate": float("inf")}, "part.rate=inf: a number that is finite is wanted."),
    ({"count": 1.5}, "part.count=1.5: a whole number is wanted."),
    ({"count": True}, "part.count=true: a whole number is wanted."),
    ({"count": None}, "part.count=null: a whole number is wanted."),
    ({"flag": 1}, "part.flag=1: true or false is wanted."),
    ({"which": "sme"}, "part.which='sme': true or false, or some is wanted."),
    ({"kind": "be"}, "part.kind='be': one of a, bee is wanted. Did you mean 'bee'?"),
    ({"inner": {"match": "x", "wieght": 1, "weight": 1}}, "part.inner.wieght is not a setting. Did you mean 'weight'?"),
    ({"groups": [{"match": 1.5, "weight": "heavy"}]}, "part.groups[0].weight='heavy': a number is wanted."),
    ({"cuont": 1}, "part.cuont is not a setting. Did you mean 'count'?"),
])
def test_a_mistake_is_named_with_its_path_and_value(change, said):
    mistakes: list[str] = []
    assert structure(Outer, {**GOOD, **change}, "part", mistakes) is None
    assert any(sentence.startswith(said) for sentence in mistakes), mistakes


def test_a_missing_setting_is_named():
    mistakes: list[str] = []
    structure(Outer, {key: value for key, value in GOOD.items() if key != "rate"}, "part", mistakes)
    assert mistakes == ["part.rate is not set, and has no default: state it in the YAML of this option, "
                        "or type it (a run that was frozen before this setting existed wants that)."]


def test_all_mistakes_are_found_in_one_pass():
    mistakes: list[str] = []
    structure(Outer, {**GOOD, "count": "x", "rate": "y", "odd": 1}, "part", mistakes)
    assert len(mistakes) == 3
