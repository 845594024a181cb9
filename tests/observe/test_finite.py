"""What is written where a number is none."""

import json
import math

import pytest

from forge.observe.finite import finite

FACTS = {"loss": math.nan, "phases": {"copy": math.inf}, "pairs": [(1.0, -math.inf)], "steps": 3, "name": "inf",
         "right": True, "missing": None}


@pytest.mark.parametrize(("otherwise", "nan", "inf", "minus"), [([], None, None, None), ([str], "nan", "inf", "-inf")])
def test_no_word_of_json_is_missing_however_deep(otherwise, nan, inf, minus):
    made = finite(FACTS, *otherwise)
    assert made == {"loss": nan, "phases": {"copy": inf}, "pairs": [[1.0, minus]], "steps": 3, "name": "inf",
                    "right": True, "missing": None}
    assert json.loads(json.dumps(made, allow_nan=False)) == made
