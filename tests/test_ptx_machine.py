"""The machine that runs PTX: its arithmetic, and that it finds what is wrong with a kernel."""

import re
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from padam_ext import FusedPadam
from ptx import launches, numbers
from ptx.machine import Machine, PtxError
from ptx.memory import GlobalMemory, Region
from ptx.program import Module

pytestmark = pytest.mark.ptx

HEADER = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0) {
  .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
  .reg .f32 %f<9>; .reg .f64 %fd<9>;
  .shared .align 16 .b8 shared[1024];
  ld.param.u64 %rd0, [kernel_param_0];
  mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
  mad.lo.s32 %r2, %r1, 64, %r0;
  mul.wide.u32 %rd1, %r2, 4; add.s64 %rd1, %rd0, %rd1;
"""
ONE = "mov.u32 %r3, 1;"
STORE = "st.global.b32 [%rd1], %r3; ret; }"


def run(body, programs=1, lean=0, size=None, out=None):
    """Runs a kernel of 64 threads, each of which has a word at %rd1; all words."""
    out = np.zeros(64 * programs, np.uint32) if out is None else out
    region = Region("out", out.ctypes.data, out.nbytes if size is None else size, True)
    memory = GlobalMemory([region])
    module = Module(HEADER + body)
    machine = Machine(module.program("kernel"), 64, lean)
    machine.run(programs, struct.pack("<Q", out.ctypes.data), memory)
    memory.write_back()
    return out


def computed(instruction, *inputs, wide=False):
    """What one instruction makes of float32 or float64 numbers, with d, a, b, c as names."""
    values = np.array(inputs, np.float64 if wide else np.float32)
    prefix = "%fd" if wide else "%f"
    lines = [
        f"mov.{'f64' if wide else 'f32'} {prefix}{i + 1}, "
        + (f"0d{bits:016x};" if wide else f"0f{bits:08x};")
        for i, bits in enumerate(values.view(np.uint64 if wide else np.uint32).tolist())
    ]
    names = dict(zip("abc", [f"{prefix}{i + 1}" for i in range(3)], strict=True))
    text = re.sub(r"\b[abc]\b", lambda match: names[match[0]], instruction)
    return int(run(" ".join(lines) + text.replace(" d,", " %r3,") + STORE)[0])


def test_threads_take_their_own_ways_and_meet_again():
    body = """
    mov.u32 %r3, 0; mov.u32 %r4, %r0;
    loop: setp.eq.u32 %p1, %r4, 0; @%p1 bra done;
    add.u32 %r3, %r3, %r4; sub.u32 %r4, %r4, 1; bra.uni loop;
    done: setp.lt.u32 %p2, %r0, 10; @!%p2 add.u32 %r3, %r3, 1000;
    """
    n = np.arange(64)
    assert np.array_equal(run(body + STORE), n * (n + 1) // 2 + np.where(n < 10, 0, 1000))


def test_a_function_that_is_called_twice():
    function = """
    .func (.param .b32 result) twice(.param .b32 twice_param_0) {
      .reg .b32 %r<3>; .reg .pred %p<2>;
      ld.param.u32 %r1, [twice_param_0]; setp.gt.u32 %p1, %r1, 100; @%p1 bra END;
      add.u32 %r1, %r1, %r1; END: st.param.b32 [result+0], %r1; ret; }
    """
    call = """{ .param .b32 in; st.param.b32 [in+0], %r3; .param .b32 out;
      call.uni (out), twice, (in); ld.param.b32 %r3, [out+0]; }"""
    body = f"mov.u32 %r3, %r0; {call} {call} {STORE}"
    n = np.arange(64)
    assert np.array_equal(run(body + function), np.where(2 * n > 100, 2 * n, 4 * n))


SUM = """
  mov.u32 %r3, %r0;
  shfl.sync.bfly.b32 %r4, %r3, 16, 31, -1; add.u32 %r3, %r3, %r4;
  shfl.sync.bfly.b32 %r4, %r3, 8, 31, -1; add.u32 %r3, %r3, %r4;
  shfl.sync.bfly.b32 %r4, %r3, 4, 31, -1; add.u32 %r3, %r3, %r4;
  shfl.sync.bfly.b32 %r4, %r3, 2, 31, -1; add.u32 %r3, %r3, %r4;
  shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1; add.u32 %r3, %r3, %r4;
  shr.u32 %r5, %r0, 5; shl.b32 %r5, %r5, 2;
  and.b32 %r6, %r0, 31; setp.eq.u32 %p1, %r6, 0;
  mov.u32 %r7, shared; add.u32 %r5, %r5, %r7;
  @%p1 st.shared.b32 [%r5], %r3;
  bar.sync 0;
  ld.shared.v2.b32 {%r3, %r4}, [shared]; add.u32 %r3, %r3, %r4;
"""


def test_shuffles_shared_memory_and_barriers():
    assert (run(SUM + STORE, programs=3) == sum(range(64))).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (SUM.replace("bar.sync 0;", "") + STORE, "with no barrier between them"),
        (SUM.replace("@%p1 st", "setp.eq.u32 %p1, %r0, 0; @%p1 st") + STORE, "nobody wrote"),
        (SUM.replace("bar.sync", "setp.eq.u32 %p2, %r0, 3; @%p2 bra L; bar.sync") + "L:" + STORE,
         "wait at a barrier"),
        ("setp.eq.u32 %p1, %r0, 3; @%p1 bra L;" + SUM + "L:" + STORE, "does not take part"),
        (ONE + "add.s64 %rd1, %rd1, 252;" + STORE, "touches 4 bytes outside .*63 of 64 threads"),
        (ONE + "sub.s64 %rd1, %rd1, 4;" + STORE, "outside of all tensors, at before all regions"),
        (ONE + "add.s64 %rd1, %rd1, 2;" + STORE, "is not aligned to its 4 bytes"),
        (ONE + "st.global.v2.b32 [%rd1], {%r3, %r3}; ret; }", "aligned to its 8 bytes"),
        ("add.s64 %rd1, %rd0, 0; mov.u32 %r3, %r0;" + STORE, "another thread writes"),
        (ONE + "st.global.b32 [%rd1], %r3; xor.b32 %r4, %r0, 63; mul.wide.u32 %rd3, %r4, 4;"
         "add.s64 %rd3, %rd0, %rd3; ld.global.b32 %r5, [%rd3]; ret; }",
         "reads what another thread writes"),
        ("mov.u32 %r7, shared; st.shared.b32 [%r7], %r0;" + ONE + STORE,
         "another thread writes something else"),
        (SUM + "st.shared.b32 [shared], %r3;" + STORE, "that another thread reads"),
        ("mov.u32 %r3, %r0; shfl.sync.bfly.b32 %r4, %r3, 33, 31, -1;" + STORE, "leaves the warp"),
        ("setp.lt.u32 %p1, %r0, 16; @!%p1 bra L; mov.u32 %r3, %r0;"
         "shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1; L:" + ONE + STORE, "does not take part"),
        ("ld.param.u64 %rd2, [kernel_param_0+8];" + ONE + STORE, "beyond the 8 bytes"),
        (ONE + "mov.b16 %rs1, 1; neg.bf16 %rs2, %rs1;" + STORE, "unknown opcode: 'neg.bf16"),
        ("mov.u32 %r3, %r8;" + STORE, "register %r8 is read before it is written"),
        ("mov.u32 %r3, 0; vote.sync.any.pred %p1, %p2, -1;" + STORE, "unknown opcode: 'vote.sync"),
        ("mov.u32 %r3, 0; ld.volatile.b32 %r3, [%rd1];" + STORE, "unknown opcode: 'ld.volatile"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_kernel_is_found(body, message):
    with pytest.raises(PtxError, match=message):
        run(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.u32 %r3, %r0; mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1;" + STORE,
         "writes to what another thread writes"),
        ("ld.global.b32 %r3, [%rd0]; setp.eq.u32 %p1, %r1, 1; @%p1 st.global.b32 [%rd0], %r3;"
         "ret; }", "writes to what another thread reads"),
        (ONE + "st.global.b32 [%rd1], %r3; ld.global.b32 %r3, [%rd0]; ret; }",
         "reads what another thread writes"),
    ],
)  # fmt: skip
def test_races_between_programs_are_found(body, message):
    with pytest.raises(PtxError, match=message):
        run(body, programs=2)


def test_what_nobody_wrote_in_a_register_is_no_zero():
    found = run("setp.lt.u32 %p1, %r0, 10; @%p1 mov.u32 %r3, 5;" + STORE)
    assert (found[:10] == 5).all()
    assert (found[10:] == 0x5BADBADB).all()


def test_only_outputs_are_written_and_only_what_is_written_is_read():
    words = np.zeros(64, np.uint32)
    place = (words.ctypes.data, words.nbytes)
    params = struct.pack("<Q", words.ctypes.data)
    store = Machine(Module(HEADER + ONE + STORE).program("kernel"), 64)
    with pytest.raises(PtxError, match="writes to what is no output, at 0 bytes into grads"):
        store.run(1, params, GlobalMemory([Region("grads", *place)]))
    load = Machine(Module(HEADER + "ld.global.b32 %r3, [%rd1]; ret; }").program("kernel"), 64)
    with pytest.raises(PtxError, match="reads what nobody wrote"):
        load.run(1, params, GlobalMemory([Region("sums", *place, True, False)]))


def exact_sum_rounded(a, b, c, dtype):
    """a * b + c by rational numbers; Python rounds a fraction to float64 correctly."""
    total = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if dtype == np.float64:
        return float(total)
    near = np.float32(float(total))  # may be rounded twice: look at its neighbours, too
    candidates = [
        np.nextafter(near, np.float32(-np.inf)),
        near,
        np.nextafter(near, np.float32(np.inf)),
    ]
    return min(
        candidates,
        key=lambda x: (abs(Fraction(float(x)) - total), int(np.float32(x).view(np.uint32)) & 1),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_multiply_add_rounds_once(dtype):
    rng = np.random.default_rng(0)
    bits = 24 if dtype == np.float32 else 53
    a, b = (
        (1 + rng.integers(0, 2 ** (bits - 1), 3000) * 2.0 ** (1 - bits)).astype(dtype) for _ in "ab"
    )
    scale = 2.0 ** rng.integers(-2 * bits, bits, 3000)
    c = (-(a * b) * rng.choice([0, 1, 1, 1 + 2.0 ** (1 - bits)], 3000)).astype(dtype)
    c = np.where(rng.random(3000) < 0.5, c, scale * rng.choice([-1, 1], 3000)).astype(dtype)
    actual = numbers.fused_multiply_add(a, b, c)
    expected = [exact_sum_rounded(*one, dtype) for one in zip(a, b, c, strict=True)]
    assert np.array_equal(actual, np.array(expected, dtype))


@pytest.mark.parametrize(
    ("instruction", "inputs", "expected"),
    [
        # Rounded first, the product would lose the last bit of the sum.
        ("fma.rn.f32 d, a, b, c;", (1 + 2**-23, 1 + 2**-22, -1.0), 0x34C00001),
        ("add.rn.f32 d, a, b;", (np.inf, -np.inf), 0x7FFFFFFF),
        ("max.f32 d, a, b;", (np.nan, 1.0), 0x3F800000),
        ("max.NaN.f32 d, a, b;", (np.nan, 1.0), 0x7FFFFFFF),
        ("max.f32 d, a, b;", (-0.0, 0.0), 0),
        ("min.f32 d, a, b;", (0.0, -0.0), 0x80000000),
        ("neg.f32 d, a;", (0.0,), 0x80000000),
        ("cvt.rn.bf16x2.f32 d, a, b;", (1.00390625, 1.01171875), 0x3F803F82),  # ties to even
        ("cvt.rzi.s32.f32 d, a;", (-3.9,), 0xFFFFFFFD),
        ("cvt.rzi.s32.f32 d, a;", (3e9,), 0x7FFFFFFF),
        ("cvt.rzi.s32.f32 d, a;", (np.nan,), 0),
        (
            "cvt.rzi.s64.f32 %rd2, a; shr.u64 %rd2, %rd2, 32; cvt.u32.u64 d, %rd2;",
            (np.nan,),
            0x80000000,
        ),
        ("cvt.rmi.f32.f32 d, a;", (-1e-40,), 0xBF800000),
        ("cvt.rmi.ftz.f32.f32 d, a;", (-1e-40,), 0x80000000),
        ("abs.ftz.f32 d, a;", (-1e-40,), 0),
        ("ex2.approx.ftz.f32 d, a;", (-130.0,), 0),
        ("ex2.approx.f32 d, a;", (-130.0,), 0x00080000),
        ("ex2.approx.ftz.f32 d, a;", (3.0,), 0x41000000),
    ],
)
def test_arithmetic(instruction, inputs, expected):
    assert computed(instruction, *inputs) == expected


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("prmt.b32 %r3, 0x33221100, 0x77665544, 0x5140;", 0x55114400),
        ("prmt.b32 %r3, 0x80, 0, 0xba98;", 0x000000FF),
        ("bfe.u32 %r3, 0xabcd, 4, 8;", 0xBC),
        ("shl.b32 %r3, 1, 32;", 0),
        ("shr.s32 %r3, -8, 40;", 0xFFFFFFFF),
        ("shr.u32 %r3, -8, 28;", 15),
        ("mov.b32 %r3, {3, 5};", 0x50003),
        ("mov.b16 %rs1, 7; mov.b32 %r3, {%rs1, %rs8};", 0xBADB0007),  # nobody writes %rs8
        ("setp.lt.s32 %p1, -1, 1; selp.u32 %r3, 7, 9, %p1;", 7),
        ("setp.lt.u32 %p1, -1, 1; selp.u32 %r3, 7, 9, %p1;", 9),
        ("setp.ne.f32 %p1, 0f7FC00000, 0f0; selp.u32 %r3, 7, 9, %p1;", 9),
        ("setp.neu.f32 %p1, 0f7FC00000, 0f0; selp.u32 %r3, 7, 9, %p1;", 7),
        ("mov.b16 %rs1, 0x8000; cvt.s32.s16 %r3, %rs1;", 0xFFFF8000),
        ("mov.b16 %rs1, 0x8000; cvt.u32.u16 %r3, %rs1;", 0x8000),
    ],
)
def test_arithmetic_of_integers(instruction, expected):
    assert run(instruction + STORE)[0] == expected


@pytest.mark.parametrize("lean", [-1, 0, 1])
def test_approximations_go_to_the_end_that_is_asked_for(lean):
    x = np.linspace(-100, 100, 1001).astype(np.float32)
    error = numbers.power_of_two(x, lean).astype(np.float64) / np.exp2(x.astype(np.float64)) - 1
    assert np.allclose(error, lean * 2.0**-22, atol=2.0**-24, rtol=0)
    y = np.linspace(1, 7, 1001)
    error = numbers.reciprocal(y, lean) * y - 1
    assert (np.abs(error) <= 2.0**-18).all()
    assert lean == 0 or (np.sign(error) == lean).mean() > 0.7


class TestFaultsPlantedInOurKernel:
    """The PTX of the step as Triton compiled it, with one thing about it changed."""

    @pytest.fixture
    def step(self, monkeypatch):
        """Makes a step of two chunks and a tail, once the text has been changed."""
        original = Module.__init__

        def make(pattern, replacement, count=0):
            def changed(self, text, *arguments):
                found = re.subn(pattern, replacement, text, count=count)
                assert found[1] > 0, pattern
                original(self, found[0], *arguments)

            launches.triton_machine.cache_clear()
            monkeypatch.setattr(Module, "__init__", changed)
            launches.run_triton(monkeypatch, "sm_90")
            param = torch.nn.Parameter(torch.randn(1024 * 2 + 37))
            param.grad = torch.randn_like(param)
            FusedPadam([param], backend="triton").step()

        yield make
        launches.triton_machine.cache_clear()

    def test_as_it_is(self, step):
        step("multi_tensor_padam", "multi_tensor_padam")

    @pytest.mark.parametrize(
        ("pattern", "replacement", "message"),
        [
            (r"(st\.global\.v4\.b32 \[ %rd\d+ \+ )0", r"\g<1>8192", "outside of all tensors"),
            (r"(ld\.global\.v4\.b32 \{[^}]*\}, \[ %rd\d+ \+ )0", r"\g<1>4",
             "is not aligned to its 16 bytes"),
            (r"mov\.u32\s+(%r\d+), %ctaid\.x;", r"mov.u32 \1, 1;", "another thread"),
            (r"@%p\d+ (ld\.global)", r"\1", "outside of all tensors"),
            (r"@(%p\d+) (ld\.global)", r"@!\1 \2", "outside of all tensors"),
            # The first store after the last block's gradients, which are read one by one.
            (r"(?s)(\[ (%rd\d+) \+ 4 \];.*?st\.global\.v4\.b32 \[ )%rd\d+", r"\1\2",
             "writes to what is no output, at .* into grad 0"),
        ],
        ids=["a store beyond the tensor", "a misaligned vector", "two programs on one chunk",
             "a tail without its predicate", "a predicate that is negated",
             "a write to the gradient"],
    )  # fmt: skip
    def test_a_fault(self, step, pattern, replacement, message):
        with pytest.raises(PtxError, match=message):
            step(pattern, replacement)
