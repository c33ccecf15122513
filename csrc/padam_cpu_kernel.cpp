// The CPU kernel for one span of one tensor. CMake compiles this file once per instruction set,
// each time with its own flags and PADAM_SIMD_LEVEL.
#include <algorithm>

#include "padam_cpu_blocks.h"
#include "padam_cpu_update.h"
#include "padam_cpu_words.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

Maximum maximum_of(const Signature& signature) {
  if (signature.has(Slot::packed_mvh)) return Maximum::coded;
  return signature.has(Slot::max_exp_avg_sq) ? Maximum::exact : Maximum::none;
}

void step_in_blocks(const LaunchTable& table, const Row& row, std::int64_t tensor,
                    std::int64_t begin, std::int64_t end) {
  const Signature& signature = table.signature;
  const bool is_packed = !signature.has(Slot::exp_avg);
  const bool is_split = signature.has(Slot::param_low);
  const bool is_random = signature.of(Slot::param) == DType::stochastic_bfloat16;
  const std::uint32_t key = step_key(row.full.seed, table.salts[tensor], row.full.step);
  float buffers[kValues][kBuffer];
  for (std::int64_t at = begin; at < end; at += kBuffer) {
    const int numel = static_cast<int>(std::min(kBuffer, end - at));
    Operands<float> operands;
    operands.maximum = maximum_of(signature);
    for (int slot = 0; slot < kValues; ++slot) {
      operands.values[slot] =
          loaded(table, static_cast<Slot>(slot), tensor, at, numel, buffers[slot]);
    }
    float* param = operands[Slot::param];
    if (is_packed) unpack_moments(table, tensor, at, numel, buffers, operands.values);
    if (is_split) {
      join_block(param, element<std::uint16_t>(table, Slot::param_low, tensor, at), numel);
    }
    update(row, row.single, static_cast<float>(table.grad_factor), operands, numel);
    if (is_packed) pack_moments(table, tensor, at, numel, buffers, key);
    if (is_split || is_random) store_param(table, tensor, at, numel, param, key);
    for (int slot = 0; slot < kValues; ++slot) {
      const auto which = static_cast<Slot>(slot);
      if (which == Slot::grad || (which == Slot::param && (is_split || is_random))) continue;
      store_back(table, which, tensor, at, numel, buffers[slot]);
    }
  }
}

// Every slot is stored as it is computed with.
template <typename T>
void step_in_place(const LaunchTable& table, const Row& row, const Constants<T>& constants,
                   std::int64_t tensor, std::int64_t begin, std::int64_t end) {
  Operands<T> operands;
  operands.maximum = maximum_of(table.signature);
  for (int slot = 0; slot < kValues; ++slot) {
    const bool is_present = table.signature.has(static_cast<Slot>(slot));
    operands.values[slot] =
        is_present ? element<T>(table, static_cast<Slot>(slot), tensor, begin) : nullptr;
  }
  update(row, constants, static_cast<T>(table.grad_factor), operands, end - begin);
}

bool is_in_place(const Signature& signature) {
  return std::all_of(signature.slots, signature.slots + kSlots, [&](DType dtype) {
    return dtype == signature.compute || dtype == DType::absent;
  });
}

}  // namespace

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
