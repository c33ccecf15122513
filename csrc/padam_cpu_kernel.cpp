// The CPU kernel for one span of one tensor. CMake compiles this file once per instruction set,
// each time with its own flags and PADAM_SIMD_LEVEL. The loops are plain C++ that the compiler
// vectorizes for that set.
#include <algorithm>
#include <type_traits>

#include "codecs.h"
#include "padam_cpu.h"
#include "padam_math.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

// What a span is stepped on, in the dtype of the arithmetic.
template <typename T>
struct Operands {
  T* slots[kSlots];  // null where absent

  T* operator[](Slot slot) const { return slots[static_cast<int>(slot)]; }
};

template <Root root, Decay decay, bool amsgrad, typename T>
void update_loop(const Operands<T>& operands, std::int64_t numel, const Constants<T>& row_constants,
                 T grad_factor) {
  const Constants<T> constants = row_constants;  // a local copy: no store below can alias it
  T* __restrict param = operands[Slot::param];
  const T* __restrict grad = operands[Slot::grad];
  T* __restrict m = operands[Slot::exp_avg];
  T* __restrict v = operands[Slot::exp_avg_sq];
  T* __restrict h = operands[Slot::max_exp_avg_sq];
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) {
    T unused = T(0);
    const T d = update_moments(param[i], grad[i], m[i], v[i], amsgrad ? h[i] : unused, constants,
                               grad_factor, decay, amsgrad);
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
                   std::int64_t numel, const Constants<float>& row_constants, float grad_factor) {
  const Constants<float> constants = row_constants;
  int num_wild = 0;
#pragma omp simd reduction(+ : num_wild)
  for (std::int64_t i = 0; i < numel; ++i) {
    float unused = 0.0f;
    d[i] = update_moments(param[i], grad[i], m[i], v[i], amsgrad ? h[i] : unused, constants,
                          grad_factor, decay, amsgrad);
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
void blockwise_loop(const Operands<float>& operands, std::int64_t numel,
                    const Constants<float>& constants, float grad_factor) {
  float d[kBlock];
  float y[kBlock];
  for (std::int64_t at = 0; at < numel; at += kBlock) {
    const std::int64_t count = std::min(kBlock, numel - at);
    float* param = operands[Slot::param] + at;
    float* m = operands[Slot::exp_avg] + at;
    float* v = operands[Slot::exp_avg_sq] + at;
    float* h = amsgrad ? operands[Slot::max_exp_avg_sq] + at : nullptr;
    const bool all_tame = moments_block<root, decay, amsgrad>(
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
template <Root root, Decay decay, bool amsgrad, typename T, typename... Arguments>
void update_root(const Operands<T>& operands, Arguments... arguments) {
  constexpr bool long_chain = root == Root::general || root == Root::eighth;
  if constexpr (long_chain && std::is_same_v<T, float>) {
    blockwise_loop<root, decay, amsgrad>(operands, arguments...);
  } else {
    update_loop<root, decay, amsgrad, T>(operands, arguments...);
  }
}

template <Root root, Decay decay, typename T, typename... Arguments>
void update_amsgrad(const Operands<T>& operands, Arguments... arguments) {
  operands[Slot::max_exp_avg_sq] != nullptr
      ? update_root<root, decay, true>(operands, arguments...)
      : update_root<root, decay, false>(operands, arguments...);
}

template <Root root, typename T, typename... Arguments>
void update_decay(const Row& row, const Operands<T>& operands, Arguments... arguments) {
  switch (row.decay) {
    case Decay::none:
      return update_amsgrad<root, Decay::none>(operands, arguments...);
    case Decay::coupled:
      return update_amsgrad<root, Decay::coupled>(operands, arguments...);
    case Decay::decoupled:
      return update_amsgrad<root, Decay::decoupled>(operands, arguments...);
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

template <typename T>
T* element(const LaunchTable& table, Slot slot, std::int64_t tensor, std::int64_t index) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(table.address(slot, tensor))) + index;
}

// What is stored otherwise than it is computed with passes through float32 buffers that stay in the
// L1 cache. So the update is compiled for float32 and float64 only, whatever slots are stored as.
constexpr std::int64_t kBuffer = 512;

template <typename Stored>
float* load_block(const Stored* __restrict from, float* __restrict to, std::int64_t numel) {
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) to[i] = load(from[i]);
  return to;
}

template <typename Stored>
void store_block(const float* __restrict from, Stored* __restrict to, std::int64_t numel) {
#pragma omp simd
  for (std::int64_t i = 0; i < numel; ++i) store(from[i], to[i]);
}

// Some elements of one slot as the update takes them: in place, or else in the buffer; null where
// the slot is absent.
float* loaded(const LaunchTable& table, Slot slot, std::int64_t tensor, std::int64_t at,
              std::int64_t numel, float* buffer) {
  switch (table.signature.of(slot)) {
    case DType::float32:
      return element<float>(table, slot, tensor, at);
    case DType::bfloat16:
      return load_block(element<bfloat16>(table, slot, tensor, at), buffer, numel);
    case DType::float16:
      return load_block(element<float16>(table, slot, tensor, at), buffer, numel);
    default:
      return nullptr;
  }
}

// Writes back what `loaded` put into the buffer.
void store_back(const LaunchTable& table, Slot slot, std::int64_t tensor, std::int64_t at,
                std::int64_t numel, const float* buffer) {
  switch (table.signature.of(slot)) {
    case DType::bfloat16:
      return store_block(buffer, element<bfloat16>(table, slot, tensor, at), numel);
    case DType::float16:
      return store_block(buffer, element<float16>(table, slot, tensor, at), numel);
    default:
      return;
  }
}

void step_in_blocks(const LaunchTable& table, const Row& row, std::int64_t tensor,
                    std::int64_t begin, std::int64_t end) {
  float buffers[kSlots][kBuffer];
  for (std::int64_t at = begin; at < end; at += kBuffer) {
    const std::int64_t numel = std::min(kBuffer, end - at);
    Operands<float> operands;
    for (int slot = 0; slot < kSlots; ++slot) {
      operands.slots[slot] =
          loaded(table, static_cast<Slot>(slot), tensor, at, numel, buffers[slot]);
    }
    update(row, row.single, static_cast<float>(table.grad_factor), operands, numel);
    for (int slot = 0; slot < kSlots; ++slot) {
      if (static_cast<Slot>(slot) == Slot::grad) continue;
      store_back(table, static_cast<Slot>(slot), tensor, at, numel, buffers[slot]);
    }
  }
}

// Every slot is stored as it is computed with.
template <typename T>
void step_in_place(const LaunchTable& table, const Row& row, const Constants<T>& constants,
                   std::int64_t tensor, std::int64_t begin, std::int64_t end) {
  Operands<T> operands;
  for (int slot = 0; slot < kSlots; ++slot) {
    const bool is_there = table.signature.slots[slot] != DType::absent;
    operands.slots[slot] =
        is_there ? element<T>(table, static_cast<Slot>(slot), tensor, begin) : nullptr;
  }
  update(row, constants, static_cast<T>(table.grad_factor), operands, end - begin);
}

bool is_in_place(const Signature& signature) {
  return std::all_of(signature.slots, signature.slots + kSlots, [&](DType dtype) {
    return dtype == signature.compute || dtype == DType::absent;
  });
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

void step_span(const LaunchTable& table, const Row& row, std::int64_t tensor, std::int64_t begin,
               std::int64_t end) {
  if (table.signature.compute == DType::float64) {
    step_in_place(table, row, row.full, tensor, begin, end);
  } else if (is_in_place(table.signature)) {
    step_in_place(table, row, row.single, tensor, begin, end);
  } else {
    step_in_blocks(table, row, tensor, begin, end);
  }
}

}  // namespace PADAM_SIMD_LEVEL
}  // namespace padam
