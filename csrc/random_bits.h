// Random numbers for stochastic rounding; padam_ext/random_bits.py says what they depend on.
#pragma once

#include "bits.h"

namespace padam {

PADAM_INLINE std::uint32_t hash(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

// 32 bits for one tensor in its update number `step`, from 1.
PADAM_INLINE std::uint32_t step_key(double seed, std::int64_t salt, double step) {
  const auto number = static_cast<std::uint32_t>(static_cast<std::int64_t>(step));
  return hash(static_cast<std::uint32_t>(static_cast<std::int64_t>(seed)) ^
              static_cast<std::uint32_t>(salt) ^ number * 0x9E3779B9u);
}

// Where an element lies in memory, counted in elements from its tensor's first, makes a word of 32
// bits that its numbers are multiples of. Of these only the top bits are used.
PADAM_INLINE std::uint32_t random_word(std::uint32_t place, std::uint32_t key) {
  const std::uint32_t y = place * 0x9E3779B1u + key;
  return y ^ y >> 15;
}

PADAM_INLINE std::uint32_t random_for_m(std::uint32_t word) { return word * 0x846CA68Bu; }
PADAM_INLINE std::uint32_t random_for_v(std::uint32_t word) { return word * 0x7FEB352Du; }
PADAM_INLINE std::uint32_t random_for_x(std::uint32_t word) { return word * 0xC2B2AE35u; }

}  // namespace padam
