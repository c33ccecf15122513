// The CPU kernel for one span of one tensor. CMake compiles this file once per instruction set,
// each time with its own flags and PADAM_SIMD_LEVEL. The loops are plain C++ that the compiler
// vectorizes for that set.
#include <algorithm>
#include <type_traits>

#include "half_types.h"
#include "padam_cpu.h"
#include "padam_math.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

template <typename T>
struct Moments {
  T* exp_avg;
  T* exp_avg_sq;
  T* max_exp_avg_sq;
};

template <Root root, Decay decay, bool amsgrad, typename T>
void update_loop(T* __restrict param, const T* __restrict grad, const Moments<T>& moments,
                 std::int64_t numel, const Constants<T>& row_constants) {
  const Constants<T> constants = row_constants;  // a local copy: no store below can alias it
  T* __restrict m = moments.exp_avg;
  T* __restrict v = moments.exp_avg_sq;
  T* __restrict h = moments.max_exp_avg_sq;
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) {
    T unused = T(0);
    const T d = update_moments(param[i], grad[i], m[i], v[i], amsgrad ? h[i] : unused, constants,
                               decay, amsgrad);
    param[i] = update_param<root>(param[i], m[i], d, constants, decay);
  }
}

// What leads from h to the parameter is a chain of dependent operations too long for the processor
// to overlap with the next elements', where no square root or division ends it. So the parts of the
// update, two or three, take turns over blocks that stay in the L1 cache.
constexpr std::int64_t kBlock = 128;

// Tells whether every d is tame.
template <Root root, Decay decay, bool amsgrad>
bool moments_block(const float* __restrict param, const float* __restrict grad, float* __restrict m,
                   float* __restrict v, float* __restrict h, float* __restrict d,
                   std::int64_t numel, const Constants<float>& row_constants) {
  const Constants<float> constants = row_constants;
  int num_wild = 0;
#pragma omp simd reduction(+ : num_wild)
  for (std::int64_t i = 0; i < numel; ++i) {
    float unused = 0.0f;
    d[i] = update_moments(param[i], grad[i], m[i], v[i], amsgrad ? h[i] : unused, constants, decay,
                          amsgrad);
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

template <Root root, Decay decay, bool amsgrad>
void blockwise_loop(float* params, const float* grads, const Moments<float>& moments,
                    std::int64_t numel, const Constants<float>& constants) {
  float d[kBlock];
  float y[kBlock];
  for (std::int64_t at = 0; at < numel; at += kBlock) {
    const std::int64_t count = std::min(kBlock, numel - at);
    float* param = params + at;
    float* m = moments.exp_avg + at;
    float* h = amsgrad ? moments.max_exp_avg_sq + at : nullptr;
    const bool all_tame = moments_block<root, decay, amsgrad>(
        param, grads + at, m, moments.exp_avg_sq + at, h, d, count, constants);
    if (root == Root::general && all_tame) {
      power_block(d, y, count, constants);
      param_block_by_powers<decay>(param, m, y, d, count, constants);
    } else {
      param_block<root, decay>(param, m, d, count, constants);
    }
  }
}

// From the row's options to the loop compiled for them.
template <Root root, Decay decay, bool amsgrad, typename T, typename... Arguments>
void update_root(Arguments... arguments) {
  constexpr bool long_chain = root == Root::general || root == Root::eighth;
  if constexpr (long_chain && std::is_same_v<T, float>) {
    blockwise_loop<root, decay, amsgrad>(arguments...);
  } else {
    update_loop<root, decay, amsgrad, T>(arguments...);
  }
}

template <Root root, Decay decay, typename T, typename... Arguments>
void update_amsgrad(const Row& row, Arguments... arguments) {
  row.amsgrad ? update_root<root, decay, true, T>(arguments...)
              : update_root<root, decay, false, T>(arguments...);
}

template <Root root, typename T, typename... Arguments>
void update_decay(const Row& row, Arguments... arguments) {
  switch (row.decay) {
    case Decay::none:
      return update_amsgrad<root, Decay::none, T>(row, arguments...);
    case Decay::coupled:
      return update_amsgrad<root, Decay::coupled, T>(row, arguments...);
    case Decay::decoupled:
      return update_amsgrad<root, Decay::decoupled, T>(row, arguments...);
  }
}

template <typename T>
void update(const Row& row, const Constants<T>& constants, T* param, const T* grad,
            const Moments<T>& moments, std::int64_t numel) {
  const auto with_root = [&](auto root) {
    update_decay<decltype(root)::value, T>(row, param, grad, moments, numel, constants);
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

template <typename T>
T* element(const LaunchTable& table, Slot slot, std::int64_t tensor, std::int64_t index) {
  const auto address = static_cast<std::uintptr_t>(table.address(slot, tensor));
  return address == 0 ? nullptr : reinterpret_cast<T*>(address) + index;
}

template <typename T>
Moments<T> moments_of(const LaunchTable& table, std::int64_t tensor, std::int64_t index) {
  return {element<T>(table, Slot::exp_avg, tensor, index),
          element<T>(table, Slot::exp_avg_sq, tensor, index),
          element<T>(table, Slot::max_exp_avg_sq, tensor, index)};
}

// Parameters and gradients of half types pass through float32 buffers that stay in the L1 cache,
// so the update is compiled for float32 and float64 only.
constexpr std::int64_t kBuffer = 512;

template <typename Half>
void widen_block(const Half* __restrict from, float* __restrict to, std::int64_t numel) {
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) to[i] = widen(from[i]);
}

template <typename Half>
void narrow_block(const float* __restrict from, Half* __restrict to, std::int64_t numel) {
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) to[i] = narrow(from[i], Half{});
}

template <typename Half>
const float* float_block(const Half* from, float* buffer, std::int64_t numel) {
  widen_block(from, buffer, numel);
  return buffer;
}

inline const float* float_block(const float* from, float*, std::int64_t) { return from; }

template <typename Param, typename Grad>
void step_half(const LaunchTable& table, const Row& row, std::int64_t tensor, std::int64_t begin,
               std::int64_t end) {
  float param_buffer[kBuffer];
  float grad_buffer[kBuffer];
  for (std::int64_t at = begin; at < end; at += kBuffer) {
    const std::int64_t numel = std::min(kBuffer, end - at);
    Param* param = element<Param>(table, Slot::param, tensor, at);
    widen_block(param, param_buffer, numel);
    const float* grad =
        float_block(element<Grad>(table, Slot::grad, tensor, at), grad_buffer, numel);
    update(row, row.single, param_buffer, grad, moments_of<float>(table, tensor, at), numel);
    narrow_block(param_buffer, param, numel);
  }
}

template <typename T>
void step_full(const LaunchTable& table, const Row& row, const Constants<T>& constants,
               std::int64_t tensor, std::int64_t begin, std::int64_t end) {
  update(row, constants, element<T>(table, Slot::param, tensor, begin),
         element<T>(table, Slot::grad, tensor, begin), moments_of<T>(table, tensor, begin),
         end - begin);
}

// Four places of the gradient are read in turns: one after the other alone does not keep the memory
// busy. In double precision, so that squares neither overflow nor get lost beside a large sum.
constexpr std::int64_t kPlaces = 4;
constexpr std::int64_t kLanes = 8;

template <typename T>
double sum_of_squares_loop(const T* __restrict values, std::int64_t numel) {
  double sums[kPlaces][kLanes] = {};
  const auto add = [](double& sum, T value) {
    sum = multiply_add(static_cast<double>(value), static_cast<double>(value), sum);
  };
  const std::int64_t distance = numel / (kPlaces * kLanes) * kLanes;
  for (std::int64_t i = 0; i < distance; i += kLanes) {
    for (std::int64_t place = 0; place < kPlaces; ++place) {
#pragma omp simd
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        add(sums[place][lane], values[place * distance + i + lane]);
      }
    }
  }
  for (std::int64_t i = kPlaces * distance; i < numel; ++i) add(sums[0][0], values[i]);
  double sum = 0.0;
  for (const auto& lanes : sums) {
    for (const double part : lanes) sum += part;
  }
  return sum;
}

template <typename Half>
double sum_of_squares_half(const Half* grad, std::int64_t numel) {
  float buffer[kBuffer];
  double sum = 0.0;
  for (std::int64_t at = 0; at < numel; at += kBuffer) {
    const std::int64_t count = std::min(kBuffer, numel - at);
    sum += sum_of_squares_loop(float_block(grad + at, buffer, count), count);
  }
  return sum;
}

}  // namespace

double sum_of_squares_span(const LaunchTable& table, std::int64_t tensor, std::int64_t begin,
                           std::int64_t end) {
  switch (table.grad_dtype) {
    case DType::float32:
      return sum_of_squares_loop(element<float>(table, Slot::grad, tensor, begin), end - begin);
    case DType::float64:
      return sum_of_squares_loop(element<double>(table, Slot::grad, tensor, begin), end - begin);
    case DType::bfloat16:
      return sum_of_squares_half(element<bfloat16>(table, Slot::grad, tensor, begin), end - begin);
    case DType::float16:
      return sum_of_squares_half(element<float16>(table, Slot::grad, tensor, begin), end - begin);
  }
  return 0.0;
}

void step_span(const LaunchTable& table, const Row& row, std::int64_t tensor, std::int64_t begin,
               std::int64_t end) {
  const bool full_grad = table.grad_dtype == DType::float32;
  switch (table.param_dtype) {
    case DType::float32:
      return step_full(table, row, row.single, tensor, begin, end);
    case DType::float64:
      return step_full(table, row, row.full, tensor, begin, end);
    case DType::bfloat16:
      return full_grad ? step_half<bfloat16, float>(table, row, tensor, begin, end)
                       : step_half<bfloat16, bfloat16>(table, row, tensor, begin, end);
    case DType::float16:
      return full_grad ? step_half<float16, float>(table, row, tensor, begin, end)
                       : step_half<float16, float16>(table, row, tensor, begin, end);
  }
}

}  // namespace PADAM_SIMD_LEVEL
}  // namespace padam
