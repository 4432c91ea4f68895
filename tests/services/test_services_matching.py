import json
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actionopd_jax.services.matching import canonical, differing_paths, normalise_text

EQUAL = [
    ({}, {}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": {"x": [1, {"p": 1, "q": 2}]}}, {"a": {"x": [1.0, {"q": 2.0, "p": 1}]}}),
    (3.0, 3),
    (-0.0, 0),
    (-0.0, 0.0),
    (2.0**53, 2**53),
    (1e300, int(1e300)),
    (1e22, 10**22),
    (0.1, 0.1),
    (100, 1e2),
    ("é", "é"),
    ([], []),
    (None, None),
    (True, True),
]

DIFFERENT = [
    ({"a": None}, {}, ("/a: missing",)),
    ({"a": 1}, {"a": True}, ("/a: type",)),
    ({"a": 0}, {"a": False}, ("/a: type",)),
    ({"a": 1.0}, {"a": True}, ("/a: type",)),
    ({"a": 1}, {"a": "1"}, ("/a: type",)),
    ({"a": None}, {"a": "null"}, ("/a: type",)),
    ({"a": {}}, {"a": []}, ("/a: type",)),
    ({"a": [1, 2]}, {"a": [2, 1]}, ("/a/0: value", "/a/1: value")),
    ({"a": [1, 1]}, {"a": [1]}, ("/a/1: missing",)),
    ({"a": [[]]}, {"a": []}, ("/a/0: missing",)),
    ({"a": ""}, {}, ("/a: missing",)),
    ({"a": "x"}, {"a": "X"}, ("/a: value",)),
    ({"a": "x"}, {"a": "x "}, ("/a: value",)),
    ({"a": "\u00e9"}, {"a": "e\u0301"}, ("/a: value",)),  # composed against decomposed: strings compare exactly
    ({"a": 2**53 + 1}, {"a": 2.0**53}, ("/a: value",)),
    ({"a": 10**23}, {"a": 1e23}, ("/a: value",)),  # 1e23 is not the integer 10**23
    ({"a": 0.1 + 0.2}, {"a": 0.3}, ("/a: value",)),
    ({"a/b": 1, "~": 2}, {"a/b": 2, "~": 1}, ("/a~1b: value", "/~0: value")),
    ({"b": 1, "a": {"d": 1, "c": 1}}, {"b": 2, "a": {"d": 2, "c": 1}}, ("/a/d: value", "/b: value")),
    ({"a": {"d": 1, "c": 1}}, {"a": {"d": 1, "e": 1}}, ("/a/c: missing", "/a/e: missing")),
    (1, "1", (": type",)),
    ({"a,b": 1}, {"a": 1, "b": 1}, ("/a: missing", "/a,b: missing", "/b: missing")),
    (["a", "b"], ["a,b"], ("/0: value", "/1: missing")),
    (['a","b'], ["a", "b"], ("/0: value", "/1: missing")),
    ("\U0001f600", "\ud83d\ude00", (": value",)),  # two lone surrogates are not the character
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_canonical_equal_values_give_equal_text_and_no_paths(left, right):
    assert canonical(left) == canonical(right)
    assert differing_paths(left, right) == ()


@pytest.mark.parametrize(("left", "right", "paths"), DIFFERENT)
def test_canonical_different_values_give_different_text_and_named_paths(left, right, paths):
    assert canonical(left) != canonical(right)
    assert differing_paths(left, right) == paths
    assert differing_paths(right, left) == paths


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_canonical_number_that_is_not_finite_raises(number):
    with pytest.raises(ValueError, match="not a JSON number"):
        canonical({"a": [number]})


def test_canonical_value_outside_json_raises():
    with pytest.raises(TypeError, match="set is not a JSON value"):
        canonical({"a": {1}})
    with pytest.raises(TypeError, match="set is not a JSON value"):
        differing_paths({1}, {1})


def test_canonical_deep_nesting_and_huge_integers_are_walked():
    def nested(leaf, depth=20_000):
        for _ in range(depth):
            leaf = [leaf]
        return leaf

    assert canonical(nested(1)) == canonical(nested(1.0))
    assert canonical(nested(1)) != canonical(nested(1, depth=19_999))
    shallow, deep = nested(1, depth=2_000), nested(2, depth=2_000)
    assert differing_paths(shallow, deep) == ("/0" * 2_000 + ": value",)
    assert canonical(10**5_000) != canonical(10**5_000 + 1)


# -- against an oracle ---------------------------------------------------------------------------

scalars = (
    st.sampled_from([None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, -1.0, 0.5, 2**53, 2**53 + 1, 2.0**53, 10**23, 1e23])
    | st.sampled_from(["", "0", "1", "0x1", "null", "true"])
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab"\\,:{}[]/~é', max_size=3)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/~,", max_size=2), inner, max_size=3),
    max_leaves=8,
)


def respelled(value, rng: random.Random):
    """The same value in other words, now and then with a change in it."""
    if rng.random() < 0.05:
        return rng.choice([None, 1, True, "1", [], {}])
    if isinstance(value, dict):
        items = [(key, respelled(inner, rng)) for key, inner in value.items()]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        return [respelled(inner, rng) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


pairs = st.tuples(values, values) | st.tuples(values, st.randoms(use_true_random=False)).map(
    lambda drawn: (drawn[0], respelled(*drawn))
)


def same(a, b) -> bool:
    numbers = [isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b)]
    if any(numbers):
        return all(numbers) and Fraction(a) == Fraction(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    return a == b


@given(pairs)
def test_canonical_any_pair_agrees_with_the_oracle(pair):
    left, right = pair
    assert (canonical(left) == canonical(right)) == same(left, right)


@given(pairs)
def test_differing_paths_any_pair_is_empty_exactly_when_canonically_equal(pair):
    left, right = pair
    assert (differing_paths(left, right) == ()) == (canonical(left) == canonical(right))


@given(pairs)
def test_differing_paths_any_pair_is_symmetric_without_repeats(pair):
    left, right = pair
    paths = differing_paths(left, right)
    assert paths == differing_paths(right, left)
    assert len(set(paths)) == len(paths)


@given(values)
def test_canonical_any_value_equals_itself_after_a_json_round_trip(value):
    again = json.loads(json.dumps(value))
    assert canonical(value) == canonical(again)
    assert differing_paths(value, again) == ()


@given(values, st.randoms(use_true_random=False))
def test_canonical_shuffled_keys_give_the_same_text(value, rng):
    def shuffled(item):
        if isinstance(item, dict):
            items = [(key, shuffled(inner)) for key, inner in item.items()]
            rng.shuffle(items)
            return dict(items)
        return [shuffled(inner) for inner in item] if isinstance(item, list) else item

    assert canonical(value) == canonical(shuffled(value))


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Done.", "  Done.\n"),
        ("a  b\t\nc", "a b c"),
        ("a\u00a0b", "a b"),  # no-break space
        ("a\u2028b", "a b"),  # line separator
        ("ｆｕｌｌ", "full"),
        ("\u00e9", "e\u0301"),
        ("ﬁne", "fine"),
        ("", " \n"),
    ],
)
def test_normalise_text_same_words_are_equal(left, right):
    assert normalise_text(left) == normalise_text(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [("Yes", "yes"), ("a b", "ab"), ("42", "42."), ("e", "é"), ("don't", "don’t"), ("I can", "I can't")],
)
def test_normalise_text_other_words_stay_different(left, right):
    assert normalise_text(left) != normalise_text(right)


@given(st.text())
def test_normalise_text_twice_changes_nothing_more(text):
    once = normalise_text(text)
    assert normalise_text(once) == once
    assert once == once.strip()
