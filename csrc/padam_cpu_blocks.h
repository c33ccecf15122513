// Loads a tensor's elements for the loops of PADAM_SIMD_LEVEL, and stores them back.
#pragma once

#include "codecs.h"
#include "launch_table.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

template <typename T>
T* element(const LaunchTable& table, Slot slot, std::int64_t tensor, std::int64_t index) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(table.address(slot, tensor))) + index;
}

// Slots that the update does not read as they are stored pass through float32 buffers that stay in
// the L1 cache. Longer ones would keep memory waiting while a block is in there.
constexpr std::int64_t kBuffer = 256;

// Where the values of a block are; null where absent.
struct Values {
  float* by_slot[kValues];

  float*& operator[](Slot slot) { return by_slot[static_cast<int>(slot)]; }
};

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
inline float* loaded(const LaunchTable& table, Slot slot, std::int64_t tensor, std::int64_t at,
                     std::int64_t numel, float* buffer) {
  switch (table.signature.of(slot)) {
    case DType::float32:
      return element<float>(table, slot, tensor, at);
    case DType::bfloat16:
    case DType::stochastic_bfloat16:
      return load_block(element<bfloat16>(table, slot, tensor, at), buffer, numel);
    case DType::float16:
      return load_block(element<float16>(table, slot, tensor, at), buffer, numel);
    default:
      return nullptr;
  }
}

// Writes back what `loaded` put into the buffer.
inline void store_back(const LaunchTable& table, Slot slot, std::int64_t tensor, std::int64_t at,
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

}  // namespace
}  // namespace PADAM_SIMD_LEVEL
}  // namespace padam
