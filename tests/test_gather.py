"""What is read of tensors before a step: all that decides which memory a kernel touches."""

from array import array

import pytest
import torch

from padam_ext import buckets
from padam_ext.gather import PythonGatherer, best_gatherer
from padam_ext.options import DEFAULTS
from padam_ext.slots import Storage
from padam_ext.state import fit_state

pytestmark = pytest.mark.sanitize


def test_a_gatherer_reads_what_the_other_reads():
    params = [torch.nn.Parameter(torch.randn(3, 4).t()), torch.nn.Parameter(torch.randn(()))]
    for param in params:
        param.grad = torch.randn(param.shape)
    without = torch.nn.Parameter(torch.ones(1))
    selection = [(0, params[:1]), (1, [without]), (300, params[1:])]
    python = PythonGatherer().gather(selection, {})
    best = best_gatherer().gather(selection, {})
    assert all(a is b for a, b in zip(python.params, best.params, strict=True))
    assert all(a is b for a, b in zip(python.grads, best.grads, strict=True))
    assert python.group_indices == best.group_indices == array("q", [0, 300]).tobytes()
    assert python.grad_addresses == best.grad_addresses


def test_readings_are_the_same_where_what_decides_is_the_same():
    params = [torch.nn.Parameter(torch.randn(2)) for _ in range(5)]
    best = best_gatherer()
    seen = {}
    for with_grads, split in [
        ("11111", 2), ("11111", 2), ("11110", 2), ("11110", 2), ("01110", 2), ("11111", 2),
        ("11111", 3), ("00000", 3), ("11111", 0), ("11011", 0), ("11011", 0),
    ]:  # fmt: skip
        for param, flag in zip(params, with_grads, strict=True):
            param.grad = torch.randn(2) if flag == "1" else None
        selection = [(0, params[:split]), (1, params[split:])]
        inputs, expected = best.gather(selection, {}), PythonGatherer().gather(selection, {})
        assert [id(p) for p in inputs.params] == [id(p) for p in expected.params]
        assert [id(g) for g in inputs.grads] == [id(g) for g in expected.grads]
        assert inputs.group_indices == expected.group_indices
        assert inputs.grad_addresses == expected.grad_addresses
        for key, reading in seen.items():
            assert reading.same(inputs.reading) == (key == (with_grads, split)), key
        seen[with_grads, split] = inputs.reading


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.t(),
        lambda m: m[:, :1].expand(3, 3),
        lambda m: m.view(torch.int32),
        lambda m: m.view(9)[:3],
        lambda m: m.clone(),
        lambda m: torch._neg_view(m),
        lambda m: None,
    ],
)
def test_a_reading_of_states_sees_what_is_at_the_same_address(change):
    param = torch.nn.Parameter(torch.randn(3, 3))
    moment = torch.randn(3, 3, dtype=torch.complex64).imag
    gatherer = best_gatherer()
    then = gatherer.read_states({param: {"exp_avg": moment}}, [param])
    assert then.same(gatherer.read_states({param: {"exp_avg": moment.detach()}}, [param]))
    now = gatherer.read_states({param: {"exp_avg": change(moment)}}, [param])
    assert not then.same(now)
    assert then.pieces() != now.pieces()


NATIVELY = type(best_gatherer()) is not PythonGatherer


class Subclass(torch.Tensor):
    pass


PLAIN = {
    "one dimension": lambda t: t,
    "two dimensions": lambda t: t.view(3, 4),
    "sizes of one": lambda t: t.view(1, 3, 1, 4, 1),
    "one element": lambda t: t[:1],
    "no dimensions": lambda t: t[0],
    "a part of a storage": lambda t: t[3:],
    "bfloat16": lambda t: t.bfloat16(),
    "float64": lambda t: t.double(),
}
NOT_PLAIN = {
    "empty": lambda t: t[:0],
    "transposed": lambda t: t.view(3, 4).t(),
    "with gaps": lambda t: t[::2],
    "expanded": lambda t: t[:1].expand(4),
    "complex": lambda t: torch.view_as_complex(t.view(6, 2)),
    "integers": lambda t: t.long(),
    "of a subclass": lambda t: t.as_subclass(Subclass),
}


def plain_of(param, grad):
    """What a reading says of two tensors, whatever torch lets be a gradient."""
    param.grad = grad
    [plain] = best_gatherer().gather([(0, [param])], {}).reading.plain()
    return plain


@pytest.mark.parametrize("kind", PLAIN | NOT_PLAIN)
def test_what_is_plain(kind):
    make = (PLAIN | NOT_PLAIN)[kind]
    param, grad = (make(torch.randn(12)) for _ in range(2))
    assert plain_of(param, grad) == (NATIVELY and kind in PLAIN)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 3).t(),
        lambda: torch.zeros(3, 4).as_subclass(Subclass),
        lambda: torch._efficientzerotensor((3, 4)),
        lambda: torch.zeros(3, 1).expand(3, 4),
    ],
)
def test_a_gradient_that_is_not_plain(make):
    param = torch.nn.Parameter(torch.zeros(3, 4))
    assert plain_of(param, torch.zeros(3, 4)) == NATIVELY
    assert plain_of(param, make()) == 0


@pytest.mark.parametrize(
    "other", [torch.zeros(4, 3), torch.zeros(12), torch.zeros(3, 4).double(), torch.zeros(3, 4, 1)]
)
def test_two_that_do_not_go_together_are_not_plain(other):
    param = torch.nn.Parameter(torch.zeros(3, 4))
    param.grad = torch.zeros(3, 4)
    param.data = other
    [plain] = best_gatherer().gather([(0, [param])], {}).reading.plain()
    assert plain == 0


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_parameter_has_the_record_that_any_would_have(kind):
    param = torch.nn.Parameter(PLAIN[kind](torch.randn(12)).clone())
    param.grad = torch.zeros_like(param)
    records = []
    state = {}
    for plain in (True, False):
        if plain:
            fit_state(state, param, DEFAULTS, 0, may_replace=True, plain=True)
        records.append(
            buckets.make_record(
                param, param.grad, state, Storage.of(DEFAULTS), owns_state=True, plain=plain
            )
        )
    assert records[0] == records[1]
    kept = dict(state)
    fit_state(state, param, DEFAULTS, 0, may_replace=True)
    assert all(state[key] is value for key, value in kept.items())


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3], [2], [0, 3, 1], []])
@pytest.mark.parametrize("asked", [[0, 1, 2, 3], [2, 0], [3], [1, 2], [3, 1, 0]])
def test_states_are_found_whatever_their_order(order, asked):
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(4)]
    moments = [torch.ones(1) for _ in range(4)]
    gatherer = best_gatherer()
    states = {params[i]: {"exp_avg": moments[i]} for i in order}
    pieces = gatherer.read_states(states, [params[i] for i in asked]).pieces()
    for index, piece in zip(asked, pieces, strict=True):
        alone = {params[index]: {"exp_avg": moments[index]}} if index in order else {}
        assert gatherer.read_states(alone, [params[index]]).pieces() == [piece]
        assert (piece is None) == (index not in order)


def test_a_tensor_that_cannot_be_read_is_collected_all_the_same():
    param = torch.nn.Parameter(torch.ones(2, 2))
    param.grad = torch.ones(2, 2).to_sparse()
    for one in (PythonGatherer(), best_gatherer()):
        inputs = one.gather([(0, [param])], {})
        assert inputs.params[0] is param
        assert inputs.reading.pieces() == [None]
        assert not inputs.reading.same(inputs.reading)
