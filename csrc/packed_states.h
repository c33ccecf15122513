// All moments of an element in one word of 32 bits: m in units of a power of two near the root of
// the running maximum h (of v without amsgrad), v in parts of the power of two above h.
//
// With amsgrad                            Without
//   31     sign of m                        31     sign of m
//   30-19  h, a float32 cut to 12 bits,     30-12  v, a float32 cut to 19 bits
//          rounded up
//   18-9   v, fixed point
//   8-0    m: 2 + |m| / unit, a float of    11-0   m: likewise, 4 exponent and 8 fraction bits
//          4 exponent and 5 fraction bits
//
// m and v are rounded stochastically: to the nearest, small changes would be lost for good. Every
// floating point operation is exact or rounds once, denormals included, so that all backends make
// the same bits.
#pragma once

#include "bits.h"

namespace padam {

constexpr std::uint32_t kSign = 0x80000000;
constexpr std::uint32_t kExponent = 0x7F800000;
constexpr std::uint32_t kMaximum = 0x7FF80000;       // the bits of h
constexpr std::uint32_t kSecondMoment = 0x7FFFF000;  // of v, without amsgrad
constexpr std::uint32_t kInverse = 0x7F000000;  // minus the bits of a power of two: its inverse's

// The bits of m's unit, given those of h, or of v without amsgrad.
PADAM_INLINE std::uint32_t unit_of(std::uint32_t bits) {
  return ((bits >> 1) & kExponent) + (52u << 23);
}

// A fraction whose bits stand below those of 2.0.
PADAM_INLINE float fraction_of(std::uint32_t bits) { return float_of(bits | 0x40000000u) - 2.0f; }

PADAM_INLINE std::uint32_t smaller(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }

// 2 + value * inverse, and no more than `most`, also of NaN: a float whose top bits are a code. The
// product is exact, or lost beside 2: fused or not, the result is the same.
PADAM_INLINE std::uint32_t in_code(float value, float inverse, float most) {
  const float scaled = multiply_add(value, inverse, 2.0f);
#if defined(__CUDA_ARCH__)
  return word_of(fminf(scaled, most));  // one instruction, which a selection would not become
#else
  return word_of(scaled < most ? scaled : most);
#endif
}

// The smallest code of h that is not below v; NaN of every NaN.
PADAM_INLINE float upper_end(float v) {
  return float_of((smaller(word_of(v), kMaximum) + 0x0007FFFFu) & kMaximum);
}

PADAM_INLINE void unpack_mvh(std::uint32_t word, float& m, float& v, float& h) {
  const std::uint32_t h_bits = word & kMaximum;
  const float magnitude = fraction_of((word << 18) & 0x07FC0000u) * float_of(unit_of(h_bits));
  m = float_of(word_of(magnitude) | (word & kSign));
  v = fraction_of((word << 4) & 0x007FE000u) * float_of(h_bits & kExponent);
  h = float_of(h_bits);
}

// `h` has passed `upper_end`, though a NaN may have gained bits. v is never above it, so rounding v
// up needs no limit.
PADAM_INLINE std::uint32_t pack_mvh(float m, float v, float h, std::uint32_t for_m,
                                    std::uint32_t for_v) {
  const std::uint32_t h_bits = word_of(h) & kMaximum;
  const float in_parts = multiply_add(v, float_of(kInverse - (h_bits & kExponent)), 2.0f);
  const std::uint32_t v_code = ((word_of(in_parts) + (for_v >> 19)) >> 4) & 0x0007FE00u;
  const std::uint32_t in_units = in_code(fabsf(m), float_of(kInverse - unit_of(h_bits)), 129024.0f);
  const std::uint32_t m_code = ((in_units + (for_m >> 14)) >> 18) & 0x1FFu;
  return (word_of(m) & kSign) | h_bits | v_code | m_code;
}

PADAM_INLINE void unpack_mv(std::uint32_t word, float& m, float& v) {
  const std::uint32_t v_bits = word & kSecondMoment;
  const float magnitude = fraction_of((word << 15) & 0x07FF8000u) * float_of(unit_of(v_bits));
  m = float_of(word_of(magnitude) | (word & kSign));
  v = float_of(v_bits);
}

PADAM_INLINE std::uint32_t pack_mv(float m, float v, std::uint32_t for_m, std::uint32_t for_v) {
  const std::int32_t at_most = static_cast<std::int32_t>(kSecondMoment);
  const std::int32_t bits = bits_of(v) < at_most ? bits_of(v) : at_most;
  const std::uint32_t v_bits = (static_cast<std::uint32_t>(bits) + (for_v >> 20)) & kSecondMoment;
  const std::uint32_t in_units = in_code(fabsf(m), float_of(kInverse - unit_of(v_bits)), 130816.0f);
  const std::uint32_t m_code = ((in_units + (for_m >> 17)) >> 15) & 0xFFFu;
  return (word_of(m) & kSign) | v_bits | m_code;
}

}  // namespace padam
