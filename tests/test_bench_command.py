"""`python -m padam_ext bench`: what it takes, verifies and prints."""

import sys

import pytest
import torch

from padam_ext import bench
from padam_ext.__main__ import main
from padam_ext.optimizer import FusedPadam


@pytest.fixture
def output_of(monkeypatch, capsys):
    """What the command prints, when it measures for a moment only."""
    monkeypatch.setattr(bench, "_TURNS", 2)
    monkeypatch.setattr(bench, "_SECONDS_PER_PART", 0.0)

    def output_of(*arguments):
        monkeypatch.setattr(sys, "argv", ["padam_ext", "bench", *arguments])
        main()
        return capsys.readouterr().out.splitlines()

    return output_of


@pytest.mark.parametrize("dtype", bench.DTYPES)
def test_one_row_for_each(output_of, dtype):
    lines = output_of("--shapes", "2*3x4, 5,1", "--dtype", dtype)
    what, backend, head, ours, theirs, *advice = lines
    assert what.startswith(f"4 tensors, 30 elements of torch.{dtype}; cpu, ")
    assert backend.startswith("FusedPadam's backend: cpu, ")
    assert head.split() == ["ms", "a", "step", "least", "middle", "half", "GB/s", "times"]
    assert ours.startswith("FusedPadam, p=0.125 ")
    assert ours.endswith(" 1.00")
    assert theirs.startswith("torch AMSGrad, fused ")
    assert "run it twice" in advice[-1]


def test_an_exponent_may_be_a_fraction(output_of):
    what, *_, ours, _, _, _ = output_of("--shapes", "7", "--partial", "1/8")
    assert what.startswith("1 tensor, 7 elements")
    assert ours.startswith("FusedPadam, p=0.125 ")


def test_bytes():
    param = torch.nn.Parameter(torch.ones(10))
    param.grad = torch.ones(10)
    for optimizer in (FusedPadam([param]), bench.amsgrad([param])):
        optimizer.step()
        assert bench.bytes_of_a_step(optimizer) == 36 * 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "3y4"], "a shape must be as 4096x4096, 1024 or 12*1024x1024, got '3y4'"),
        (["--shapes", "3,"], "got ''"),
        (["--shapes", "0*3"], "got '0*3'"),
        (["--shapes", "9" * 20], "no number may be 2**31 or more"),
        (["--partial", "0.7"], "argument --partial: p must be in [0, 0.5], got 0.7"),
        (["--partial", "1/0"], "argument --partial: p must be in [0, 0.5], got '1/0'"),
        (["--partial", "x"], "Invalid literal for Fraction: 'x'"),
        (["--device", "meta"], "cannot be measured on meta: "),
        (["--device", "abacus"], "cannot be measured on abacus: "),
    ],
)
def test_what_cannot_be_measured(output_of, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        output_of(*arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_wrong_step_is_not_measured(output_of, monkeypatch, capsys):
    """The first step, held against torch's, must be right."""
    right = FusedPadam.step

    def wrong(self):
        for group in self.param_groups:
            group["lr"] *= 1.1
        right(self)

    monkeypatch.setattr(FusedPadam, "step", wrong)
    with pytest.raises(SystemExit):
        output_of("--shapes", "100")
    assert "not close" in capsys.readouterr().err
