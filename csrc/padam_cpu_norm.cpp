// The sum of squares of one span of one gradient, compiled once per instruction set as
// padam_cpu_kernel.cpp is.
#include <algorithm>

#include "padam_cpu_blocks.h"
#include "padam_math.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

// The gradient is read at four places in turn, since one place alone does not keep the memory busy.
// In double precision, so that squares neither overflow nor get lost beside a large sum.
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
    sum += sum_of_squares_loop(load_block(grad + at, buffer, count), count);
  }
  return sum;
}

}  // namespace

double sum_of_squares_span(const LaunchTable& table, std::int64_t tensor, std::int64_t begin,
                           std::int64_t end) {
  const std::int64_t numel = end - begin;
  switch (table.signature.of(Slot::grad)) {
    case DType::float64:
      return sum_of_squares_loop(element<double>(table, Slot::grad, tensor, begin), numel);
    case DType::bfloat16:
      return sum_of_squares_half(element<bfloat16>(table, Slot::grad, tensor, begin), numel);
    case DType::float16:
      return sum_of_squares_half(element<float16>(table, Slot::grad, tensor, begin), numel);
    default:
      return sum_of_squares_loop(element<float>(table, Slot::grad, tensor, begin), numel);
  }
}

}  // namespace PADAM_SIMD_LEVEL
}  // namespace padam
