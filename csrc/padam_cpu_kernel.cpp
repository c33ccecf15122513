// The CPU kernel for one span of one tensor. CMake compiles this file once per instruction set,
// each time with its own flags and PADAM_SIMD_LEVEL.
#include "padam_cpu_blocks.h"
#include "padam_cpu_update.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

void step_in_blocks(const LaunchTable& table, const Row& row, std::int64_t tensor,
                    std::int64_t begin, std::int64_t end) {
  constexpr Slot kWritten[] = {Slot::param, Slot::exp_avg, Slot::exp_avg_sq, Slot::max_exp_avg_sq};
  float buffers[kSlots][kBuffer];
  for (std::int64_t at = begin; at < end; at += kBuffer) {
    const std::int64_t numel = std::min(kBuffer, end - at);
    const auto operand = [&](Slot slot) {
      return loaded(table, slot, tensor, at, numel, buffers[static_cast<int>(slot)]);
    };
    update(row, row.single, static_cast<float>(table.grad_factor),
           Operands<float>{operand(Slot::param), operand(Slot::grad), operand(Slot::exp_avg),
                           operand(Slot::exp_avg_sq), operand(Slot::max_exp_avg_sq)},
           numel);
    for (const Slot slot : kWritten) {
      store_back(table, slot, tensor, at, numel, buffers[static_cast<int>(slot)]);
    }
  }
}

// Every slot is stored as it is computed with.
template <typename T>
void step_in_place(const LaunchTable& table, const Row& row, const Constants<T>& constants,
                   std::int64_t tensor, std::int64_t begin, std::int64_t end) {
  const bool amsgrad = table.signature.of(Slot::max_exp_avg_sq) != DType::absent;
  const Operands<T> operands = {
      element<T>(table, Slot::param, tensor, begin),
      element<T>(table, Slot::grad, tensor, begin),
      element<T>(table, Slot::exp_avg, tensor, begin),
      element<T>(table, Slot::exp_avg_sq, tensor, begin),
      amsgrad ? element<T>(table, Slot::max_exp_avg_sq, tensor, begin) : nullptr,
  };
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
