// What all code for elements begins with.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PADAM_INLINE static __host__ __device__ __forceinline__
#else
#define PADAM_INLINE static inline __attribute__((always_inline))
#endif
// Static, since the CPU code is compiled once per instruction set: the linker must not give one
// set's functions to another.

namespace padam {

PADAM_INLINE std::int32_t bits_of(float value) {
  std::int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

PADAM_INLINE std::uint32_t word_of(float value) {
  return static_cast<std::uint32_t>(bits_of(value));
}

PADAM_INLINE float float_of(std::int32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

PADAM_INLINE float float_of(std::uint32_t bits) {
  return float_of(static_cast<std::int32_t>(bits));
}

}  // namespace padam
