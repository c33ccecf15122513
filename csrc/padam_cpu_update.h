// The update of elements that lie in a row, as loops of plain C++ that the compiler vectorizes for
// the instruction set PADAM_SIMD_LEVEL.
#pragma once

#include <algorithm>
#include <type_traits>

#include "padam_cpu.h"
#include "padam_math.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

// What a span is stepped on, in the dtype of the arithmetic.
template <typename T>
struct Operands {
  T* values[kValues];  // null where absent
  Maximum maximum;

  T* operator[](Slot slot) const { return values[static_cast<int>(slot)]; }
};

template <Root root, Decay decay, Maximum maximum, typename T>
void update_loop(const Operands<T>& operands, std::int64_t numel, const Constants<T>& row_constants,
                 T grad_factor) {
  const Constants<T> constants = row_constants;  // a local copy: no store below can alias it
  T* __restrict param = operands[Slot::param];
  const T* __restrict grad = operands[Slot::grad];
  T* __restrict m = operands[Slot::exp_avg];
  T* __restrict v = operands[Slot::exp_avg_sq];
  T* __restrict h = operands[Slot::max_exp_avg_sq];
  constexpr bool has_maximum = maximum != Maximum::none;
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) {
    T unused = T(0);
    const T d = update_moments(param[i], grad[i], m[i], v[i], has_maximum ? h[i] : unused,
                               constants, grad_factor, decay, maximum);
    param[i] = update_param<root>(param[i], m[i], d, constants, decay);
  }
}

// From h to the parameter is a chain of dependent operations. Where it does not end in a square
// root or division, it is too long for the processor to overlap with that of the next elements. So
// the update runs in two or three parts, each over a block that stays in the L1 cache.
constexpr std::int64_t kBlock = 128;

// Returns whether every d is tame (see kSmallestTame), or true if the root is not the general one.
template <Root root, Decay decay, Maximum maximum>
bool moments_block(const float* __restrict param, const float* __restrict grad, float* __restrict m,
                   float* __restrict v, float* __restrict h, float* __restrict d,
                   std::int64_t numel, const Constants<float>& row_constants, float grad_factor) {
  const Constants<float> constants = row_constants;
  constexpr bool has_maximum = maximum != Maximum::none;
  int num_wild = 0;
#pragma omp simd reduction(+ : num_wild)
  for (std::int64_t i = 0; i < numel; ++i) {
    float unused = 0.0f;
    d[i] = update_moments(param[i], grad[i], m[i], v[i], has_maximum ? h[i] : unused, constants,
                          grad_factor, decay, maximum);
    // Only the general root asks.
    if (root == Root::general) {
      num_wild += d[i] >= kSmallestTame && d[i] <= kLargestTame ? 0 : 1;
    }
  }
  return num_wild == 0;
}

template <Root root, Decay decay>
void param_block(float* __restrict param, const float* __restrict m, const float* __restrict d,
                 std::int64_t numel, const Constants<float>& row_constants) {
  const Constants<float> constants = row_constants;
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) {
    param[i] = update_param<root>(param[i], m[i], d[i], constants, decay);
  }
}

// Replaces each d, all of them tame, by the `shifted` of its power.
inline void power_block(float* __restrict d, float* __restrict y, std::int64_t numel,
                        const Constants<float>& row_constants) {
  const Constants<float> constants = row_constants;
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) {
    const BinaryPower power = binary_power<true>(d[i], constants);
    y[i] = power.y;
    d[i] = power.shifted;
  }
}

template <Decay decay>
void param_block_by_powers(float* __restrict param, const float* __restrict m,
                           const float* __restrict y, const float* __restrict shifted,
                           std::int64_t numel, const Constants<float>& row_constants) {
  const Constants<float> constants = row_constants;
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) {
    const float step = times_binary_power<true>(m[i], {y[i], shifted[i]}, 0.0f);
    param[i] = moved(param[i], step, constants, decay);
  }
}

template <Root root, Decay decay, Maximum maximum>
void blockwise_loop(const Operands<float>& operands, std::int64_t numel,
                    const Constants<float>& constants, float grad_factor) {
  float d[kBlock];
  float y[kBlock];
  for (std::int64_t at = 0; at < numel; at += kBlock) {
    const std::int64_t count = std::min(kBlock, numel - at);
    float* param = operands[Slot::param] + at;
    float* m = operands[Slot::exp_avg] + at;
    float* v = operands[Slot::exp_avg_sq] + at;
    float* h = maximum != Maximum::none ? operands[Slot::max_exp_avg_sq] + at : nullptr;
    const bool all_tame = moments_block<root, decay, maximum>(
        param, operands[Slot::grad] + at, m, v, h, d, count, constants, grad_factor);
    if (root == Root::general && all_tame) {
      power_block(d, y, count, constants);
      param_block_by_powers<decay>(param, m, y, d, count, constants);
    } else {
      param_block<root, decay>(param, m, d, count, constants);
    }
  }
}

// From the options of a row to the loop compiled for them.
template <Root root, Decay decay, Maximum maximum, typename T, typename... Arguments>
void update_root(const Operands<T>& operands, Arguments... arguments) {
  constexpr bool long_chain = root == Root::general || root == Root::eighth;
  if constexpr (long_chain && std::is_same_v<T, float>) {
    blockwise_loop<root, decay, maximum>(operands, arguments...);
  } else {
    update_loop<root, decay, maximum, T>(operands, arguments...);
  }
}

template <Root root, Decay decay, typename T, typename... Arguments>
void update_maximum(const Operands<T>& operands, Arguments... arguments) {
  switch (operands.maximum) {
    case Maximum::none:
      return update_root<root, decay, Maximum::none>(operands, arguments...);
    case Maximum::exact:
      return update_root<root, decay, Maximum::exact>(operands, arguments...);
    case Maximum::coded:
      if constexpr (std::is_same_v<T, float>) {
        return update_root<root, decay, Maximum::coded>(operands, arguments...);
      }
  }
}

template <Root root, typename T, typename... Arguments>
void update_decay(const Row& row, const Operands<T>& operands, Arguments... arguments) {
  switch (row.decay) {
    case Decay::none:
      return update_maximum<root, Decay::none>(operands, arguments...);
    case Decay::coupled:
      return update_maximum<root, Decay::coupled>(operands, arguments...);
    case Decay::decoupled:
      return update_maximum<root, Decay::decoupled>(operands, arguments...);
  }
}

template <typename T>
void update(const Row& row, const Constants<T>& constants, T grad_factor,
            const Operands<T>& operands, std::int64_t numel) {
  const auto with_root = [&](auto root) {
    update_decay<decltype(root)::value>(row, operands, numel, constants, grad_factor);
  };
  switch (row.root) {
    case Root::none:
      return with_root(std::integral_constant<Root, Root::none>());
    case Root::half:
      return with_root(std::integral_constant<Root, Root::half>());
    case Root::quarter:
      return with_root(std::integral_constant<Root, Root::quarter>());
    case Root::eighth:
      return with_root(std::integral_constant<Root, Root::eighth>());
    case Root::sixteenth:
      return with_root(std::integral_constant<Root, Root::sixteenth>());
    case Root::general:
      return with_root(std::integral_constant<Root, Root::general>());
  }
}

}  // namespace
}  // namespace PADAM_SIMD_LEVEL
}  // namespace padam
