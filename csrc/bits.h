// What all code for elements begins with: the bits of numbers, and fused multiply-adds.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PADAM_INLINE static __host__ __device__ __forceinline__
#define PADAM_PRAGMA(text) _Pragma(#text)
#define PADAM_UNROLL(...) PADAM_PRAGMA(unroll __VA_ARGS__)
#else
#define PADAM_INLINE static inline __attribute__((always_inline))
#define PADAM_UNROLL(...)
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

// a * b + c: multiply_add fuses if the processor can; rounded_once rounds to float only once.
// Without an FMA instruction it computes in double, where the product of two floats is exact. For
// float64, to which no bound of two units applies, it then rounds twice.
#if defined(__FMA__) || defined(__CUDA_ARCH__) || defined(__aarch64__)
PADAM_INLINE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
PADAM_INLINE double multiply_add(double a, double b, double c) { return fma(a, b, c); }
PADAM_INLINE float rounded_once(float a, float b, float c) { return multiply_add(a, b, c); }
#else
PADAM_INLINE float multiply_add(float a, float b, float c) { return a * b + c; }
PADAM_INLINE double multiply_add(double a, double b, double c) { return a * b + c; }
PADAM_INLINE float rounded_once(float a, float b, float c) {
  return static_cast<float>(static_cast<double>(a) * b + c);
}
#endif
PADAM_INLINE double rounded_once(double a, double b, double c) { return multiply_add(a, b, c); }

}  // namespace padam
