// The CPU kernel for one span of one tensor. CMake compiles this file once per instruction set,
// each time with its own flags and PADAM_SIMD_LEVEL. The loops are plain C++ that the compiler
// vectorizes for that set.
#include <algorithm>

#include "padam_cpu.h"
#include "padam_math.h"
// half_types.h builds on padam_math.h
#include "half_types.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

template <typename T>
struct Moments {
  T* exp_avg;
  T* exp_avg_sq;
  T* max_exp_avg_sq;
};

template <Root root, bool amsgrad, typename T>
void update_loop(T* __restrict param, const T* __restrict grad, const Moments<T>& moments,
                 std::int64_t numel, const Constants<T>& row_constants) {
  const Constants<T> constants = row_constants;  // a local copy: no store below can alias it
  T* __restrict m = moments.exp_avg;
  T* __restrict v = moments.exp_avg_sq;
  T* __restrict h = moments.max_exp_avg_sq;
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) {
    T unused = T(0);
    padam_update<root, amsgrad>(param[i], grad[i], m[i], v[i], amsgrad ? h[i] : unused, constants);
  }
}

template <Root root, typename T>
void update_amsgrad(bool amsgrad, T* param, const T* grad, const Moments<T>& moments,
                    std::int64_t numel, const Constants<T>& constants) {
  if (amsgrad) {
    update_loop<root, true>(param, grad, moments, numel, constants);
  } else {
    update_loop<root, false>(param, grad, moments, numel, constants);
  }
}

template <typename T>
void update(const Row& row, const Constants<T>& constants, T* param, const T* grad,
            const Moments<T>& moments, std::int64_t numel) {
  const bool amsgrad = row.amsgrad;
  switch (row.root) {
    case Root::none:
      return update_amsgrad<Root::none>(amsgrad, param, grad, moments, numel, constants);
    case Root::half:
      return update_amsgrad<Root::half>(amsgrad, param, grad, moments, numel, constants);
    case Root::quarter:
      return update_amsgrad<Root::quarter>(amsgrad, param, grad, moments, numel, constants);
    case Root::eighth:
      return update_amsgrad<Root::eighth>(amsgrad, param, grad, moments, numel, constants);
    case Root::sixteenth:
      return update_amsgrad<Root::sixteenth>(amsgrad, param, grad, moments, numel, constants);
    case Root::general:
      return update_amsgrad<Root::general>(amsgrad, param, grad, moments, numel, constants);
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
constexpr std::int64_t kBlock = 512;

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
  float param_buffer[kBlock];
  float grad_buffer[kBlock];
  for (std::int64_t at = begin; at < end; at += kBlock) {
    const std::int64_t numel = std::min(kBlock, end - at);
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

}  // namespace

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
