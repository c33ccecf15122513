"""What is the same for all elements of a launch."""

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import PARTIALS
from padam_ext.constants import ROOTS, RowOptions, make_constants

OPTIONS = RowOptions(0.1, 0.9, 0.999, 1e-8, 0.0, 0.125, "none", False, False)


@given(st.floats(0.0, 1.0, exclude_max=True))
def test_one_minus_beta2_is_the_sum_of_two_positive_pieces(beta2):
    constants = make_constants(OPTIONS._replace(beta2=beta2), 1.0)
    high, low = constants.one_minus_beta2_high, constants.one_minus_beta2_low
    assert high + low == 1.0 - beta2
    assert 0 < low < high or high == 0 < low
    assert high == array("f", [high])[0]


@given(st.floats(0.0, 0.5))
def test_the_exponent_is_the_sum_of_two_pieces(partial):
    constants = make_constants(OPTIONS._replace(partial=partial), 1.0)
    assert constants.exponent_high + constants.exponent_low == -2.0 * partial
    assert math.ldexp(constants.exponent_high, 16).is_integer()


@pytest.mark.parametrize("partial", PARTIALS)
def test_square_roots_are_for_their_exponents_and_for_an_eps_that_float32_can_hold(partial):
    roots = {0.0: "none", 1 / 2: "half", 1 / 4: "quarter", 1 / 8: "eighth", 1 / 16: "sixteenth"}
    constants = make_constants(OPTIONS._replace(partial=partial), 1.0)
    assert ROOTS[int(constants.root)] == roots.get(partial, "general")
    tiny = make_constants(OPTIONS._replace(partial=partial, eps=1e-39), 1.0)
    assert ROOTS[int(tiny.root)] == ("none" if partial == 0 else "general")
