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
    Values values;
    for (int i = 0; i < kValues; ++i) {
      const auto slot = static_cast<Slot>(i);
      values[slot] = loaded(table, slot, tensor, at, numel, buffers[i]);
    }
    if (is_packed) unpack_moments(table, tensor, at, numel, buffers, values);
    if (is_split) {
      join_block(values[Slot::param], element<std::uint16_t>(table, Slot::param_low, tensor, at),
                 numel);
    }
    const Operands<float, float> operands{values[Slot::param],
                                          values[Slot::grad],
                                          values[Slot::exp_avg],
                                          values[Slot::exp_avg_sq],
                                          values[Slot::max_exp_avg_sq],
                                          maximum_of(signature),
                                          numel};
    update(row, row.single, static_cast<float>(table.grad_factor), operands);
    if (is_packed) pack_moments(table, tensor, at, numel, buffers, key);
    if (is_split || is_random) store_param(table, tensor, at, numel, values[Slot::param], key);
    for (int slot = 0; slot < kValues; ++slot) {
      const auto which = static_cast<Slot>(slot);
      if (which == Slot::grad || (which == Slot::param && (is_split || is_random))) continue;
      store_back(table, which, tensor, at, numel, buffers[slot]);
    }
  }
}

// Where the update reads and writes every slot as it is stored.
template <typename T, typename Stored>
void step_in_place(const LaunchTable& table, const Row& row, const Constants<T>& constants,
                   std::int64_t tensor, std::int64_t begin, std::int64_t end) {
  const bool has_maximum = table.signature.has(Slot::max_exp_avg_sq);
  const Operands<T, Stored> operands{
      element<Stored>(table, Slot::param, tensor, begin),
      element<Stored>(table, Slot::grad, tensor, begin),
      element<T>(table, Slot::exp_avg, tensor, begin),
      element<T>(table, Slot::exp_avg_sq, tensor, begin),
      has_maximum ? element<T>(table, Slot::max_exp_avg_sq, tensor, begin) : nullptr,
      maximum_of(table.signature),
      end - begin};
  update(row, constants, static_cast<T>(table.grad_factor), operands);
}

// Whether parameters and gradients are stored in one dtype and states in that of the arithmetic.
bool is_in_place(const Signature& signature, DType stored) {
  for (int i = 0; i < kSlots; ++i) {
    const auto slot = static_cast<Slot>(i);
    const DType dtype = signature.of(slot);
    const bool is_state = slot != Slot::param && slot != Slot::grad;
    if (dtype != DType::absent && dtype != (is_state ? signature.compute : stored)) return false;
  }
  return true;
}

}  // namespace

void step_span(const LaunchTable& table, const Row& row, std::int64_t tensor, std::int64_t begin,
               std::int64_t end) {
  if (table.signature.compute == DType::float64) {
    step_in_place<double, double>(table, row, row.full, tensor, begin, end);
  } else if (is_in_place(table.signature, DType::float32)) {
    step_in_place<float, float>(table, row, row.single, tensor, begin, end);
  } else if (is_in_place(table.signature, DType::bfloat16)) {
    step_in_place<float, bfloat16>(table, row, row.single, tensor, begin, end);
  } else {
    step_in_blocks(table, row, tensor, begin, end);
  }
}

}  // namespace PADAM_SIMD_LEVEL
}  // namespace padam
