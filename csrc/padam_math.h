// One element's Padam update (Chen et al., IJCAI 2020, Algorithm 1), for host and device.
//
// Every operation is spelled out, fused multiply-adds included, and the code is compiled with
// contraction off. So a result depends neither on where an element lies in a vector or a thread's
// share, nor on the vector width.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bits.h"
#include "launch_table.h"
#include "packed_states.h"

namespace padam {

// How d^(2p) is computed, named after p. Square roots are cheap; the rest takes exp2 and log2,
// which also handles a d that is zero or denormal. The order is that of constants.py's ROOTS.
enum class Root : int { none, half, quarter, eighth, sixteenth, general, count };

enum class Decay : int { none, coupled, decoupled };

// What running maximum there is: none without amsgrad; of v; or, in packed states, of v rounded up
// to the codes in which it is stored.
enum class Maximum : int { none, exact, coded };

// How v follows from v and g^2, in the order of constants.py's SECOND_MOMENT_FORMS.
enum class SecondMoment : int { weighted, largest, yogi };

// A row of the table, rounded to the type that is computed with.
template <typename T>
PADAM_INLINE Constants<T> rounded(const Constants<double>& constants) {
  constexpr int kFields = sizeof(Constants<double>) / sizeof(double);
  // As numbers, not by memcpy: a GPU would load the row byte by byte.
  const auto* all = reinterpret_cast<const double*>(&constants);
  T each[kFields];
  for (int i = 0; i < kFields; ++i) each[i] = static_cast<T>(all[i]);
  Constants<T> result;
  memcpy(&result, each, sizeof result);
  return result;
}

template <typename T>
PADAM_INLINE Root root_of(const Constants<T>& c) {
  return static_cast<Root>(static_cast<int>(c.root));
}

template <typename T>
PADAM_INLINE Decay decay_of(const Constants<T>& c) {
  if (c.coupled_decay != T(0)) return Decay::coupled;
  return c.decoupled_decay != T(0) ? Decay::decoupled : Decay::none;
}

// Plain calls into the C library's builtins: an inline function of the standard library that is
// not inlined could be shared between instruction sets.
PADAM_INLINE float square_root(float value) { return sqrtf(value); }
PADAM_INLINE double square_root(double value) { return sqrt(value); }

// Where d lies between these, d^(-2p) and all that leads to it stay far from the ends of float32.
constexpr float kSmallestTame = 0x1p-120f;
constexpr float kLargestTame = 0x1p120f;

// A power of d as 2^(n + y).
struct BinaryPower {
  float y;        // in [-1/2, 1/2]
  float shifted;  // 1.5 * 2^23 + n: the integer n in the lowest bits
};

// d^exponent for d >= 0. If `all_tame`, every d is tame, which saves the care that others need; the
// result for a tame d is the same either way, bit for bit.
//
// With d = f * 2^e the exponent's product with e is exact, and only the product with log2(f),
// less than 1 in magnitude, is rounded: forming log2(d) first would lose six bits near the ends.
template <bool all_tame>
PADAM_INLINE BinaryPower binary_power(float d, const Constants<float>& c) {
  const bool denormal = !all_tame && d < FLT_MIN;
  const std::int32_t bits = bits_of(denormal ? d * 0x1p24f : d);
  const std::int32_t e = (bits - 0x3f3504f3) >> 23;  // f lies in [sqrt(1/2), sqrt(2))
  const float z = float_of(bits - e * 0x00800000) - 1.0f;
  const float exponent_of_d = static_cast<float>(denormal ? e - 24 : e);

  // log2(f) / z by a minimax polynomial, log2(f) within 4.9e-8. Here and below pairs of terms are
  // summed side by side, since a step waits for results far longer than it is busy.
  const float z2 = z * z;
  const float log2_01 = multiply_add(-0.721357167f, z, 1.44269478f);
  const float log2_23 = multiply_add(-0.360087216f, z, 0.480939448f);
  const float log2_45 = multiply_add(-0.250069052f, z, 0.286707461f);
  const float log2_67 = multiply_add(-0.145744443f, z, 0.236890361f);
  const float log2_03 = multiply_add(log2_23, z2, log2_01);
  const float log2_47 = multiply_add(log2_67, z2, log2_45);
  const float log2_f_over_z = multiply_add(log2_47, z2 * z2, log2_03);

  // Adding 1.5 * 2^23 rounds to the nearest integer.
  const float exact = c.exponent_high * exponent_of_d;
  const float rest = multiply_add(c.exponent * z, log2_f_over_z, c.exponent_low * exponent_of_d);
  const float shifted = (exact + rest) + 0x1.8p23f;
  return {(exact - (shifted - 0x1.8p23f)) + rest, shifted};
}

// m times a power of d, within 4e-7 relative from the smallest denormal d to the largest. `d` is
// not looked at if `all_tame`.
template <bool all_tame>
PADAM_INLINE float times_binary_power(float m, BinaryPower of_d, float d) {
  // 2^y: minimax polynomial, 9.2e-8 relative, exact at 0.
  const float y = of_d.y;
  const float y2 = y * y;
  const float power_01 = multiply_add(0.693147004f, y, 1.0f);
  const float power_23 = multiply_add(0.0555073358f, y, 0.240222424f);
  const float power_45 = multiply_add(0.00132647273f, y, 0.00967151299f);
  float power = multiply_add(multiply_add(power_45, y2, power_23), y2, power_01);

  const std::int32_t n = bits_of(of_d.shifted) - 0x4b400000;
  if (all_tame) return m * float_of(bits_of(power) + n * 0x00800000);
  // 2^n may be out of range where the result is not: the excess factor is applied last.
  const std::int32_t near = n > 124 ? 124 : (n < -124 ? -124 : n);
  const float special = d == 0.0f ? HUGE_VALF : (d == HUGE_VALF ? 0.0f : d);
  power = (d > 0.0f && d < HUGE_VALF) ? float_of(bits_of(power) + near * 0x00800000) : special;
  return (m * power) * float_of((n - near + 127) * 0x00800000);
}

// m * d^exponent for d >= 0.
PADAM_INLINE float times_power(float m, float d, const Constants<float>& c) {
  return times_binary_power<false>(m, binary_power<false>(d, c), d);
}

PADAM_INLINE double times_power(double m, double d, const Constants<double>& c) {
  return m / pow(d, -c.exponent);  // the reciprocal of a denormal d may be beyond the range
}

// d^(-1/4) for normal d > 0, within 2.5e-7 relative, for the default p = 1/8. Square roots and
// divisions share one slow unit, and the direct way needs two roots and a division.
PADAM_INLINE float inverse_fourth_root(float d) {
  // A first guess within 3.2 %: -1/4 of the exponent, and linear in the significand.
  const float y = float_of(0x4f581000 - (bits_of(d) >> 2));
  // d y^4 = 1 - t, so d^(-1/4) = y (1 - t)^(-1/4): a minimax polynomial in t.
  const float square = y * y;
  const float t = multiply_add(-(d * square), square, 1.0f);
  float series = 0.0971523151f;
  series = multiply_add(series, t, 0.118730821f);
  series = multiply_add(series, t, 0.156238213f);
  series = multiply_add(series, t, 0.249994248f);
  const float root = multiply_add(y * t, series, y);
  return d == HUGE_VALF ? 0.0f : root;
}

PADAM_INLINE double inverse_fourth_root(double d) { return 1.0 / square_root(square_root(d)); }

// m / d^(2p).
template <Root root, typename T>
PADAM_INLINE T adapted_step(T m, T d, const Constants<T>& c) {
  if (root == Root::none) return m;
  if (root == Root::general) {
    const T step = times_power(m, d, c);
    // Where m and d are both zero the paper's formula is 0/0: the coordinate stays.
    return (m == T(0) && d == T(0)) ? T(0) : step;
  }
  if (root == Root::eighth) return m * inverse_fourth_root(d);
  T power = d;
  if (root == Root::quarter) power = square_root(d);
  if (root == Root::sixteenth) power = square_root(square_root(square_root(d)));
  return m / power;
}

PADAM_INLINE float times_one_minus_beta2(float g, const Constants<float>& c) {
  return rounded_once(c.one_minus_beta2_high, g, c.one_minus_beta2_low * g);
}

PADAM_INLINE double times_one_minus_beta2(double g, const Constants<double>& c) {
  return (c.one_minus_beta2_high + c.one_minus_beta2_low) * g;
}

PADAM_INLINE float coded_maximum(float v) { return upper_end(v); }
PADAM_INLINE double coded_maximum(double v) { return v; }  // there is no such state

// Of two that are never negative the larger; a NaN in either stays, as in torch.maximum.
template <typename T>
PADAM_INLINE T larger_of(T reached, T h) {
  const T larger = reached > h ? reached : h;
  return reached == reached ? larger : reached;
}

// v after the step. A maximum goes with the weighted form only; without one, all forms are worked
// out and one is selected, since loops over elements are vectorized.
template <typename T>
PADAM_INLINE T second_moment_after(T v, T g, const Constants<T>& c, Maximum maximum) {
  const T added = times_one_minus_beta2(g, c);
  const T weighted = rounded_once(added, g, c.beta2 * v);
  if (maximum != Maximum::none) return weighted;
  const T square = g * g;
  const T sign_times_added = square > v ? added : (square < v ? -added : T(0));
  const T yogi = rounded_once(sign_times_added, g, v);
  const T largest = larger_of(added * g, c.beta2 * v);
  if (c.second_moment == static_cast<T>(SecondMoment::weighted)) return weighted;
  return c.second_moment == static_cast<T>(SecondMoment::largest) ? largest : yogi;
}

// First half of the update of one element: moves the moments and returns d, the denominator
// before the power. `h` is not touched without a maximum.
template <typename T>
PADAM_INLINE T update_moments(T x, T g, T& m, T& v, T& h, const Constants<T>& c, T grad_factor,
                              Decay decay, Maximum maximum) {
  g = g * grad_factor;
  if (decay == Decay::coupled) g = rounded_once(c.coupled_decay, x, g);
  m = rounded_once(c.beta1, m, c.one_minus_beta1 * g);
  v = second_moment_after(v, g, c, maximum);
  T second_moment = v;
  if (maximum != Maximum::none) {
    h = larger_of(maximum == Maximum::coded ? coded_maximum(v) : v, h);
    second_moment = h;
  }
  return multiply_add(square_root(second_moment), c.inverse_correction, c.eps);
}

PADAM_INLINE bool is_infinite(float value) { return fabsf(value) == HUGE_VALF; }
PADAM_INLINE bool is_infinite(double value) { return fabs(value) == HUGE_VAL; }

// x minus its decoupled decay. An infinite x stays infinite, not infinity minus infinity.
template <typename T>
PADAM_INLINE T decayed(T x, const Constants<T>& c) {
  const T less = multiply_add(-c.decoupled_decay, x, x);
  return is_infinite(x) ? x : less;
}

// Moves a parameter by its adapted step.
template <typename T>
PADAM_INLINE T moved(T x, T step, const Constants<T>& c, Decay decay) {
  const T kept = decay == Decay::decoupled ? decayed(x, c) : x;
  return multiply_add(-c.step_size, step, kept);
}

// Second half of the update.
template <Root root, typename T>
PADAM_INLINE T update_param(T x, T m, T d, const Constants<T>& c, Decay decay) {
  return moved(x, adapted_step<root>(m, d, c), c, decay);
}

// The values of one element, in the dtype of the arithmetic.
template <typename T>
struct Element {
  T values[kValues];
};

template <typename T>
PADAM_INLINE T& at(Element<T>& element, Slot slot) {
  return element.values[static_cast<int>(slot)];
}
template <typename T>
PADAM_INLINE const T& at(const Element<T>& element, Slot slot) {
  return element.values[static_cast<int>(slot)];
}

// The whole update of an element. What is not there of a signature is not touched.
template <Root root, Maximum maximum, typename T>
PADAM_INLINE void update_element(Element<T>& element, const Constants<T>& c, T grad_factor,
                                 Decay decay) {
  T& x = at(element, Slot::param);
  T& m = at(element, Slot::exp_avg);
  const T d = update_moments(x, at(element, Slot::grad), m, at(element, Slot::exp_avg_sq),
                             at(element, Slot::max_exp_avg_sq), c, grad_factor, decay, maximum);
  x = update_param<root>(x, m, d, c, decay);
}

}  // namespace padam
