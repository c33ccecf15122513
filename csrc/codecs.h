// How elements are stored: `load` gives what the update computes with, `store` rounds it to nearest
// even. Half types are float32 in arithmetic; float32 and float64 are stored as they are. A
// bfloat16 may also be rounded stochastically, or be the upper half of a float32 whose lower half
// is in another slot. packed_states.h has the codecs of words that hold several values.
//
// By integer arithmetic that compilers vectorize; denormals, infinities and NaN are kept.
#pragma once

#include <cstdint>

#include "bits.h"
#include "launch_table.h"

namespace padam {

// Whether there is a codec between what a slot stores and the arithmetic.
constexpr bool has_codec(Slot slot, DType stored, DType compute) {
  const bool single = compute == DType::float32;
  if (slot == Slot::param_low) return single && stored == DType::int16;
  if (slot == Slot::packed_mvh || slot == Slot::packed_mv) return single && stored == DType::int32;
  if (stored == DType::stochastic_bfloat16) return single && slot == Slot::param;
  const bool half = stored == DType::bfloat16 || stored == DType::float16;
  return stored == compute || (half && single);
}

struct bfloat16 {
  std::uint16_t bits;
};

struct float16 {
  std::uint16_t bits;
};

// A bfloat16 parameter that is rounded stochastically.
struct stochastic_bfloat16 {
  std::uint16_t bits;
};

PADAM_INLINE bool is_nan(std::uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

PADAM_INLINE float load(bfloat16 value) {
  return float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(value.bits) << 16));
}

PADAM_INLINE void store(float value, bfloat16& to) {
  const std::uint32_t bits = word_of(value);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const std::uint32_t quiet_nan = bits | 0x00400000u;
  to.bits = static_cast<std::uint16_t>((value == value ? rounded : quiet_nan) >> 16);
}

PADAM_INLINE float load(stochastic_bfloat16 value) { return load(bfloat16{value.bits}); }

// Up with the probability of what is cut off. NaN needs a word of its own, since adding to it could
// make a number of it.
PADAM_INLINE void store(float value, std::uint32_t random, stochastic_bfloat16& to) {
  const std::uint32_t bits = word_of(value);
  const std::uint32_t sum = is_nan(bits) ? 0x7fc00000u : bits + (random >> 16);
  to.bits = static_cast<std::uint16_t>(sum >> 16);
}

// A float32 as a bfloat16, rounded to nearest with ties away from zero, and its lower half, so that
// the two together keep every bit: half a unit of the upper is what the lower, signed, can take
// back.
PADAM_INLINE void store(float value, bfloat16& high, std::uint16_t& low) {
  const std::uint32_t bits = is_nan(word_of(value)) ? 0x7fc00000u : word_of(value);
  high.bits = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
  low = static_cast<std::uint16_t>(bits & 0xffffu);
}

// A zero that somebody wrote into the parameter takes no negative rest, and an infinity no positive
// one: either would make it NaN.
PADAM_INLINE float load(float high, std::uint16_t low) {
  const std::uint32_t bits = word_of(high);
  const std::uint32_t borrow = (low & 0x8000u) << 1;
  const std::uint32_t sum = bits + low - borrow;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const bool is_negative = borrow != 0;
  const bool is_alone =
      (magnitude == 0 && is_negative) || (magnitude == 0x7f800000u && !is_negative);
  return float_of(is_alone ? bits : sum);
}

PADAM_INLINE float load(float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);
  const std::uint32_t special = (magnitude << 13) | 0x7f800000u;
  // A denormal is its integer times 2^-24; the signed conversion is the one SSE2 has.
  const float denormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
  const std::uint32_t small = static_cast<std::uint32_t>(bits_of(denormal));
  const std::uint32_t bits =
      magnitude >= 0x7c00u ? special : (magnitude < 0x0400u ? small : normal);
  return float_of(static_cast<std::int32_t>(bits | sign));
}

PADAM_INLINE void store(float value, float16& to) {
  const std::uint32_t all = static_cast<std::uint32_t>(bits_of(value));
  const std::uint32_t sign = (all >> 16) & 0x8000u;
  const std::int32_t magnitude = static_cast<std::int32_t>(all & 0x7fffffffu);
  // Round the 13 bits that go; a carry runs into the exponent, at the top into infinity.
  const std::int32_t normal = (magnitude - (112 << 23) + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
  // Below 2^-14 adding 1/2 moves the denormal's bits to the bottom of the significand, rounded.
  const std::int32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const std::int32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  const std::int32_t bits = magnitude >= (143 << 23)  // 2^16
                                ? special
                                : (magnitude < (113 << 23) ? denormal : normal);
  to.bits = static_cast<std::uint16_t>(static_cast<std::uint32_t>(bits) | sign);
}

PADAM_INLINE float load(float value) { return value; }
PADAM_INLINE double load(double value) { return value; }
PADAM_INLINE void store(float value, float& to) { to = value; }
PADAM_INLINE void store(double value, double& to) { to = value; }

}  // namespace padam
