// How elements are stored: `load` gives what the update computes with, `store` rounds it to nearest
// even. Half types are float32 in arithmetic; float32 and float64 are stored as they are.
//
// By integer arithmetic that compilers vectorize; denormals, infinities and NaN are kept.
#pragma once

#include <cstdint>

#include "launch_table.h"
#include "padam_math.h"

namespace padam {

// Whether there is a codec between two dtypes.
constexpr bool has_codec(DType stored, DType compute) {
  const bool half = stored == DType::bfloat16 || stored == DType::float16;
  return stored == compute || (half && compute == DType::float32);
}

struct bfloat16 {
  std::uint16_t bits;
};

struct float16 {
  std::uint16_t bits;
};

PADAM_INLINE float load(bfloat16 value) {
  return float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(value.bits) << 16));
}

PADAM_INLINE void store(float value, bfloat16& to) {
  const std::uint32_t bits = static_cast<std::uint32_t>(bits_of(value));
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to.bits = static_cast<std::uint16_t>(is_nan ? quiet_nan : rounded);
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
