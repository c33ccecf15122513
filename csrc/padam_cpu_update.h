// The update of elements that lie in a row, as loops of plain C++ that the compiler vectorizes for
// the instruction set PADAM_SIMD_LEVEL.
#pragma once

#include <algorithm>
#include <type_traits>

#include "padam_cpu.h"
#include "padam_cpu_blocks.h"
#include "padam_math.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

// What a span is stepped on: parameters and gradients as they are stored, states in the dtype of
// the arithmetic.
template <typename T, typename Stored>
struct Operands {
  Stored* param;
  const Stored* grad;
  T* m;
  T* v;
  T* h;  // null where there is no maximum
  Maximum maximum;
  std::int64_t numel;

  // What lies behind some of its elements.
  Operands from(std::int64_t element) const {
    T* const maxima = h == nullptr ? nullptr : h + element;
    return {param + element, grad + element, m + element,    v + element,
            maxima,          maximum,        numel - element};
  }
};

// The update runs over blocks that stay in the L1 cache.
constexpr std::int64_t kBlock = 128;

// Whether a running maximum must be written; true of NaN.
template <typename T>
PADAM_INLINE bool rises(T v, T h) {
  return !(v <= h);
}

template <typename T>
void store_maxima(const T* __restrict v, T* __restrict h, std::int64_t numel) {
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) h[i] = larger_of(v[i], h[i]);
}

template <typename T>
int count_rises(const T* __restrict v, const T* __restrict h, std::int64_t numel) {
  int num_risen = 0;
#pragma omp simd reduction(+ : num_risen)
  for (std::int64_t i = 0; i < numel; ++i) num_risen += rises(v[i], h[i]) ? 1 : 0;
  return num_risen;
}

// Writes the running maxima of a block, of which some rise: line by line of memory, where one in
// the line does. After some training few do, and a large step takes as long as its memory does.
template <typename T>
void store_risen(const T* v, T* h, std::int64_t numel, int num_risen) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  if (num_risen * kLine >= numel) return store_maxima(v, h, numel);  // in most lines
  for (std::int64_t at = 0; at < numel; at += kLine) {
    const std::int64_t count = std::min(kLine, numel - at);
    if (count_rises(v + at, h + at, count) != 0) store_maxima(v + at, h + at, count);
  }
}

// Updates all but exact running maxima, of which it returns how many rise.
template <Root root, Decay decay, Maximum maximum, typename T>
int update_block(T* __restrict param, const T* __restrict grad, T* __restrict m, T* __restrict v,
                 T* __restrict h, std::int64_t numel, const Constants<T>& row_constants,
                 T grad_factor) {
  const Constants<T> constants = row_constants;  // a local copy: no store below can alias it
  int num_risen = 0;
#pragma omp simd reduction(+ : num_risen)
  for (std::int64_t i = 0; i < numel; ++i) {
    const T before = maximum != Maximum::none ? h[i] : T(0);
    T reached = before;
    const T d = update_moments(param[i], grad[i], m[i], v[i], reached, constants, grad_factor,
                               decay, maximum);
    if (maximum == Maximum::coded) h[i] = reached;
    if (maximum == Maximum::exact) num_risen += rises(v[i], before) ? 1 : 0;
    param[i] = update_param<root>(param[i], m[i], d, constants, decay);
  }
  return num_risen;
}

// From h to the parameter is a chain of dependent operations. Where it does not end in a square
// root or division, it is too long for the processor to overlap with that of the next elements. So
// the update of a block then runs in two or three parts.

struct Found {
  bool all_tame;  // every d, see kSmallestTame; true if the root is not the general one
  int num_risen;
};

template <Root root, Decay decay, Maximum maximum>
Found moments_block(const float* __restrict param, const float* __restrict grad,
                    float* __restrict m, float* __restrict v, float* __restrict h,
                    float* __restrict d, std::int64_t numel, const Constants<float>& row_constants,
                    float grad_factor) {
  const Constants<float> constants = row_constants;
  int num_wild = 0;
  int num_risen = 0;
#pragma omp simd reduction(+ : num_wild, num_risen)
  for (std::int64_t i = 0; i < numel; ++i) {
    const float before = maximum != Maximum::none ? h[i] : 0.0f;
    float reached = before;
    d[i] = update_moments(param[i], grad[i], m[i], v[i], reached, constants, grad_factor, decay,
                          maximum);
    if (maximum == Maximum::coded) h[i] = reached;
    if (maximum == Maximum::exact) num_risen += rises(v[i], before) ? 1 : 0;
    // Only the general root asks.
    if (root == Root::general) {
      num_wild += d[i] >= kSmallestTame && d[i] <= kLargestTame ? 0 : 1;
    }
  }
  return {num_wild == 0, num_risen};
}

// The later parts find what they need in the cache, and memory would stand still meanwhile. So they
// ask for that of the next block, a line at a time: more at once would hold the processor up.
template <typename T, typename Stored>
PADAM_INLINE void prefetch(const Operands<T, Stored>& next, std::int64_t element) {
  if (element >= next.numel) return;
  __builtin_prefetch(next.param + element);
  __builtin_prefetch(next.grad + element);
  __builtin_prefetch(next.m + element);
  __builtin_prefetch(next.v + element);
  if (next.maximum != Maximum::none) __builtin_prefetch(next.h + element);
}

// Calls update(i) for each element of a block, and asks for the next one.
template <typename T, typename Stored, typename Update>
PADAM_INLINE void for_each(std::int64_t numel, const Operands<T, Stored>& next_block,
                           Update update) {
  const Operands<T, Stored> next = next_block;
  constexpr std::int64_t kLine = 64 / sizeof(T);
  std::int64_t at = 0;
  for (; at + kLine <= numel; at += kLine) {
    prefetch(next, at);
#pragma omp simd
    for (std::int64_t i = 0; i < kLine; ++i) update(at + i);
  }
#pragma omp simd
  for (std::int64_t i = at; i < numel; ++i) update(i);
}

template <Root root, Decay decay, typename Stored>
void param_block(float* __restrict param, const float* __restrict m, const float* __restrict d,
                 std::int64_t numel, const Constants<float>& row_constants,
                 const Operands<float, Stored>& next) {
  const Constants<float> constants = row_constants;
  for_each(numel, next, [&](std::int64_t i) {
    param[i] = update_param<root>(param[i], m[i], d[i], constants, decay);
  });
}

// Replaces each d, all of them tame, by the `shifted` of its power.
template <typename Stored>
void power_block(float* __restrict d, float* __restrict y, std::int64_t numel,
                 const Constants<float>& row_constants, const Operands<float, Stored>& next) {
  const Constants<float> constants = row_constants;
  for_each(numel, next, [&](std::int64_t i) {
    const BinaryPower power = binary_power<true>(d[i], constants);
    y[i] = power.y;
    d[i] = power.shifted;
  });
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

template <Root root, Decay decay, Maximum maximum, typename Stored>
int update_block_in_parts(float* param, const float* grad, const Operands<float, Stored>& block,
                          std::int64_t numel, const Constants<float>& constants,
                          float grad_factor) {
  float d[kBlock];
  float y[kBlock];
  const Operands<float, Stored> next = block.from(kBlock);
  const Found found = moments_block<root, decay, maximum>(param, grad, block.m, block.v, block.h, d,
                                                          numel, constants, grad_factor);
  if (root == Root::general && found.all_tame) {
    power_block(d, y, numel, constants, next);
    param_block_by_powers<decay>(param, block.m, y, d, numel, constants);
  } else {
    param_block<root, decay>(param, block.m, d, numel, constants, next);
  }
  return found.num_risen;
}

// Steps a block, of which `param` and `grad` are in the dtype of the arithmetic.
template <Root root, Decay decay, Maximum maximum, typename T, typename Stored>
void update_in_place(T* param, const T* grad, const Operands<T, Stored>& block, std::int64_t numel,
                     const Constants<T>& constants, T grad_factor) {
  constexpr bool long_chain = root == Root::general || root == Root::eighth;
  int num_risen = 0;
  if constexpr (long_chain && std::is_same_v<T, float>) {
    num_risen = update_block_in_parts<root, decay, maximum>(param, grad, block, numel, constants,
                                                            grad_factor);
  } else {
    num_risen = update_block<root, decay, maximum>(param, grad, block.m, block.v, block.h, numel,
                                                   constants, grad_factor);
  }
  if (num_risen != 0) store_risen(block.v, block.h, numel, num_risen);
}

template <Root root, Decay decay, Maximum maximum, typename T, typename Stored>
void update_blocks(const Operands<T, Stored>& operands, const Constants<T>& constants,
                   T grad_factor) {
  for (std::int64_t at = 0; at < operands.numel; at += kBlock) {
    const Operands<T, Stored> block = operands.from(at);
    const std::int64_t numel = std::min(kBlock, block.numel);
    if constexpr (std::is_same_v<T, Stored>) {
      update_in_place<root, decay, maximum>(block.param, block.grad, block, numel, constants,
                                            grad_factor);
    } else {
      T param[kBlock];
      T grad[kBlock];
      load_block(block.param, param, numel);
      load_block(block.grad, grad, numel);
      update_in_place<root, decay, maximum>(param, grad, block, numel, constants, grad_factor);
      store_block(param, block.param, numel);
    }
  }
}

// From the options of a row to the loop compiled for them.
template <Root root, Decay decay, typename T, typename Stored>
void update_maximum(const Operands<T, Stored>& operands, const Constants<T>& constants,
                    T grad_factor) {
  switch (operands.maximum) {
    case Maximum::none:
      return update_blocks<root, decay, Maximum::none>(operands, constants, grad_factor);
    case Maximum::exact:
      return update_blocks<root, decay, Maximum::exact>(operands, constants, grad_factor);
    case Maximum::coded:
      if constexpr (std::is_same_v<T, float> && std::is_same_v<Stored, float>) {
        return update_blocks<root, decay, Maximum::coded>(operands, constants, grad_factor);
      }
  }
}

template <Root root, typename T, typename Stored>
void update_decay(const Row& row, const Operands<T, Stored>& operands,
                  const Constants<T>& constants, T grad_factor) {
  switch (row.decay) {
    case Decay::none:
      return update_maximum<root, Decay::none>(operands, constants, grad_factor);
    case Decay::coupled:
      return update_maximum<root, Decay::coupled>(operands, constants, grad_factor);
    case Decay::decoupled:
      return update_maximum<root, Decay::decoupled>(operands, constants, grad_factor);
  }
}

template <typename T, typename Stored>
void update(const Row& row, const Constants<T>& constants, T grad_factor,
            const Operands<T, Stored>& operands) {
  const auto with_root = [&](auto root) {
    update_decay<decltype(root)::value>(row, operands, constants, grad_factor);
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
    case Root::count:
      break;  // no root, the bindings refuse it
  }
}

}  // namespace
}  // namespace PADAM_SIMD_LEVEL
}  // namespace padam
