"""One element's Padam update (Chen et al., IJCAI 2020, Algorithm 1), for blocks of elements.

As in csrc/padam_math.h every operation is spelled out, fused multiply-adds included, and kernels
are compiled without contraction: a result does not depend on where in a block an element lies.
Arithmetic is in the dtype of the operands, float32 or float64.
"""

import triton
import triton.language as tl

from padam_ext.kernels.packed_states import upper_end

# How d^(2p) is computed: values of ROOT, named after p, in the order of constants.py's ROOTS.
# Square roots are cheap, a polynomial for the default p is cheaper; the rest takes exp2 and log2,
# which also handles a zero or denormal d.
HALF: tl.constexpr = tl.constexpr(1)
QUARTER: tl.constexpr = tl.constexpr(2)
EIGHTH: tl.constexpr = tl.constexpr(3)
SIXTEENTH: tl.constexpr = tl.constexpr(4)
# How v follows from v and g^2, in the order of constants.py's SECOND_MOMENT_FORMS.
LARGEST: tl.constexpr = tl.constexpr(1)
YOGI: tl.constexpr = tl.constexpr(2)


@triton.jit
def padam_update(x, g, m, v, h, grad_factor, constants, ROOT: tl.constexpr, CODED: tl.constexpr):
    """Makes one step.

    Args:
        x: parameter.
        g: gradient.
        m: first moment.
        v: second moment.
        h: running maximum of v; None without amsgrad.
        grad_factor: what gradients are multiplied by.
        constants: a tuple of scalars, a row of the launch table but for its root.
        ROOT: how d^(2p) is taken.
        CODED: whether the running maximum is that of a packed state: of v rounded up to its codes.

    Returns:
        The new x, m, v and h; v once more without amsgrad.
    """
    (
        step_size,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2_high,
        one_minus_beta2_low,
        eps,
        coupled_decay,
        decoupled_decay,
        inverse_correction,
        exponent,
        exponent_high,
        exponent_low,
        form,
    ) = constants
    g = g * grad_factor
    # Selections, since 0 * x is not 0 for every x.
    g = tl.where(coupled_decay != 0, tl.fma(coupled_decay, x, g), g)
    m = tl.fma(beta1, m, one_minus_beta1 * g)
    added = tl.fma(one_minus_beta2_high, g, one_minus_beta2_low * g)
    kept_v = beta2 * v
    if CODED or h is not None:  # these go with a mean only
        v = tl.fma(added, g, kept_v)
    else:
        square = g * g
        signed = tl.where(square > v, added, tl.where(square < v, -added, 0.0))
        largest = tl.maximum(added * g, kept_v, propagate_nan=tl.PropagateNan.ALL)
        summed = tl.fma(tl.where(form == YOGI, signed, added), g, kept_v)
        v = tl.where(form == LARGEST, largest, summed)
    if h is None:
        h = v
    else:
        if CODED:
            reached = upper_end(v)
        else:
            reached = v
        h = tl.maximum(h, reached, propagate_nan=tl.PropagateNan.ALL)
    d = tl.fma(square_root(h), inverse_correction, eps)

    if ROOT == HALF:
        step = divide(m, d)
    elif ROOT == QUARTER:
        step = divide(m, square_root(d))
    elif ROOT == EIGHTH:
        step = over_fourth_root(m, d)
    elif ROOT == SIXTEENTH:
        step = divide(m, square_root(square_root(square_root(d))))
    else:
        step = times_power(m, d, exponent, exponent_high, exponent_low)
    # An infinite x stays infinite, since infinity minus infinity would be NaN.
    decayed = tl.where(tl.abs(x) < float("inf"), tl.fma(-decoupled_decay, x, x), x)
    x = tl.where(decoupled_decay != 0, decayed, x)
    return tl.fma(-step_size, step, x), m, v, h


@triton.jit
def square_root(value):
    """Correctly rounded; tl.sqrt is so for float64 only."""
    if value.dtype == tl.float64:
        root = tl.sqrt(value)
    else:
        root = tl.sqrt_rn(value)
    return root


@triton.jit
def divide(one, other):
    """Correctly rounded; the operator is so for float64 only."""
    if one.dtype == tl.float64:
        quotient = one / other
    else:
        quotient = tl.div_rn(one, other)
    return quotient


@triton.jit
def over_fourth_root(m, d):
    """M / d^(1/4) for normal d > 0; in float32 within 3.1e-7, relative.

    Correctly rounded roots and a division would take three times as many instructions.
    """
    if d.dtype == tl.float64:
        result = divide(m, square_root(square_root(d)))
    else:
        # A first guess within 3.2 %: -1/4 of the exponent, and linear in the significand.
        y = (0x4F581000 - (d.to(tl.int32, bitcast=True) >> 2)).to(tl.float32, bitcast=True)
        # d y^4 = 1 - t, so d^(-1/4) = y (1 - t)^(-1/4): a minimax polynomial in t.
        square = y * y
        t = tl.fma(-(d * square), square, 1.0)
        series = tl.fma(t, 0.0971523151, 0.118730821)
        series = tl.fma(series, t, 0.156238213)
        series = tl.fma(series, t, 0.249994248)
        result = m * tl.where(d == float("inf"), 0.0, tl.fma(y * t, series, y))
    return result


@triton.jit
def times_power(m, d, exponent, exponent_high, exponent_low):
    """M * d^exponent for d >= 0 and -1 <= exponent <= 0; 0 where m and d are both 0.

    With d = f * 2^e and f in [sqrt(1/2), sqrt(2)) the product of `exponent_high` and e is exact,
    and only the product with log2(f), less than 1 in magnitude, is rounded: forming log2(d) first
    would lose six bits of float32 near the ends.
    """
    if d.dtype == tl.float64:
        BITS: tl.constexpr = tl.int64
        FRACTION: tl.constexpr = 52
        BIAS: tl.constexpr = 1023
        ROOT_OF_A_HALF: tl.constexpr = 0x3FE6A09E667F3BCD
        SMALLEST_NORMAL: tl.constexpr = 2.0**-1022
    else:
        BITS: tl.constexpr = tl.int32
        FRACTION: tl.constexpr = 23
        BIAS: tl.constexpr = 127
        ROOT_OF_A_HALF: tl.constexpr = 0x3F3504F3
        SMALLEST_NORMAL: tl.constexpr = 2.0**-126
    SHIFT: tl.constexpr = FRACTION + 1  # makes every denormal normal

    denormal = d < SMALLEST_NORMAL
    bits = tl.where(denormal, d * 2.0**SHIFT, d).to(BITS, bitcast=True)
    e = (bits - ROOT_OF_A_HALF) >> FRACTION
    f = (bits - (e << FRACTION)).to(d.dtype, bitcast=True)
    e = tl.where(denormal, e - SHIFT, e).to(d.dtype)

    exact = exponent_high * e
    rest = tl.fma(exponent, log2_near_one(f), exponent_low * e)
    whole = tl.floor(exact + rest + 0.5)
    power = tl.exp2((exact - whole) + rest)
    # 2^n may be out of range where the result is not: the excess factor is applied last.
    n = whole.to(BITS)
    near = tl.minimum(tl.maximum(n, 3 - BIAS), BIAS - 3)
    power *= ((near + BIAS) << FRACTION).to(d.dtype, bitcast=True)
    beyond = ((n - near + BIAS) << FRACTION).to(d.dtype, bitcast=True)

    # Zero, infinity and NaN. Where m and d are both zero the paper's formula is 0/0: the
    # coordinate stays.
    special = tl.where(d == float("inf"), 0.0, d)
    special = tl.where(d == 0, tl.where(m == 0, 0.0, float("inf")), special)
    special = tl.where(exponent == 0, 1.0, special)
    usual = (d > 0) & (d < float("inf"))
    return (m * tl.where(usual, power, special)) * beyond


@triton.jit
def log2_near_one(f):
    """log2 of f in [sqrt(1/2), sqrt(2)); in float32 within 5e-8, absolute.

    A float32 library function would begin by taking the exponent off once more.
    """
    if f.dtype == tl.float64:
        result = tl.log2(f)
    else:
        z = f - 1.0
        series = tl.fma(z, -0.145744443, 0.236890361)  # minimax polynomial of log2(f) / z
        series = tl.fma(series, z, -0.250069052)
        series = tl.fma(series, z, 0.286707461)
        series = tl.fma(series, z, -0.360087216)
        series = tl.fma(series, z, 0.480939448)
        series = tl.fma(series, z, -0.721357167)
        series = tl.fma(series, z, 1.44269478)
        result = series * z
    return result
