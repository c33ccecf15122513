// The CPU kernel for one span of one tensor. CMake compiles this file once per instruction set,
// each time with its own flags and PADAM_SIMD_LEVEL.
#include <algorithm>

#include "padam_cpu_blocks.h"
#include "padam_cpu_update.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

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
    const bool is_present = table.signature.slots[slot] != DType::absent;
    operands.slots[slot] =
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
