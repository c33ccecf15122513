// Codecs of slots that hold more or less than one value, as loops over a block of one tensor.
#pragma once

#include "packed_states.h"
#include "padam_cpu_blocks.h"
#include "random_bits.h"

namespace padam {
namespace PADAM_SIMD_LEVEL {
namespace {

// The values of a block by slot, each of them null or in the buffer of its own.
using Buffers = float (*)[kBuffer];

float* buffer_of(Buffers buffers, Slot slot) { return buffers[static_cast<int>(slot)]; }

void unpack_mvh_block(const std::uint32_t* __restrict words, float* __restrict m,
                      float* __restrict v, float* __restrict h, int numel) {
#pragma omp simd
  for (int i = 0; i < numel; ++i) unpack_mvh(words[i], m[i], v[i], h[i]);
}

void unpack_mv_block(const std::uint32_t* __restrict words, float* __restrict m,
                     float* __restrict v, int numel) {
#pragma omp simd
  for (int i = 0; i < numel; ++i) unpack_mv(words[i], m[i], v[i]);
}

// `place` is the first element's, see random_bits.h.
void pack_mvh_block(const float* __restrict m, const float* __restrict v, const float* __restrict h,
                    std::uint32_t* __restrict words, int numel, std::uint32_t place,
                    std::uint32_t key) {
#pragma omp simd
  for (int i = 0; i < numel; ++i) {
    const std::uint32_t random = random_word(place + static_cast<std::uint32_t>(i), key);
    words[i] = pack_mvh(m[i], v[i], h[i], random_for_m(random), random_for_v(random));
  }
}

void pack_mv_block(const float* __restrict m, const float* __restrict v,
                   std::uint32_t* __restrict words, int numel, std::uint32_t place,
                   std::uint32_t key) {
#pragma omp simd
  for (int i = 0; i < numel; ++i) {
    const std::uint32_t random = random_word(place + static_cast<std::uint32_t>(i), key);
    words[i] = pack_mv(m[i], v[i], random_for_m(random), random_for_v(random));
  }
}

void join_block(float* __restrict param, const std::uint16_t* __restrict low, int numel) {
#pragma omp simd
  for (int i = 0; i < numel; ++i) param[i] = load(param[i], low[i]);
}

void split_block(const float* __restrict param, bfloat16* __restrict high,
                 std::uint16_t* __restrict low, int numel) {
#pragma omp simd
  for (int i = 0; i < numel; ++i) store(param[i], high[i], low[i]);
}

void round_block(const float* __restrict param, stochastic_bfloat16* __restrict to, int numel,
                 std::uint32_t place, std::uint32_t key) {
#pragma omp simd
  for (int i = 0; i < numel; ++i) {
    const std::uint32_t random = random_word(place + static_cast<std::uint32_t>(i), key);
    store(param[i], random_for_x(random), to[i]);
  }
}

// Where the values of a packed slot go: all into buffers.
void unpack_moments(const LaunchTable& table, std::int64_t tensor, std::int64_t at, int numel,
                    Buffers buffers, Values& values) {
  float* m = buffer_of(buffers, Slot::exp_avg);
  float* v = buffer_of(buffers, Slot::exp_avg_sq);
  float* h = buffer_of(buffers, Slot::max_exp_avg_sq);
  if (table.signature.has(Slot::packed_mvh)) {
    unpack_mvh_block(element<std::uint32_t>(table, Slot::packed_mvh, tensor, at), m, v, h, numel);
    values[Slot::max_exp_avg_sq] = h;
  } else {
    unpack_mv_block(element<std::uint32_t>(table, Slot::packed_mv, tensor, at), m, v, numel);
  }
  values[Slot::exp_avg] = m;
  values[Slot::exp_avg_sq] = v;
}

void pack_moments(const LaunchTable& table, std::int64_t tensor, std::int64_t at, int numel,
                  Buffers buffers, std::uint32_t key) {
  const float* m = buffer_of(buffers, Slot::exp_avg);
  const float* v = buffer_of(buffers, Slot::exp_avg_sq);
  const auto place = static_cast<std::uint32_t>(at);
  if (table.signature.has(Slot::packed_mvh)) {
    pack_mvh_block(m, v, buffer_of(buffers, Slot::max_exp_avg_sq),
                   element<std::uint32_t>(table, Slot::packed_mvh, tensor, at), numel, place, key);
  } else {
    pack_mv_block(m, v, element<std::uint32_t>(table, Slot::packed_mv, tensor, at), numel, place,
                  key);
  }
}

// Stores a parameter that is neither float32 nor rounded to nearest.
void store_param(const LaunchTable& table, std::int64_t tensor, std::int64_t at, int numel,
                 const float* param, std::uint32_t key) {
  if (table.signature.has(Slot::param_low)) {
    split_block(param, element<bfloat16>(table, Slot::param, tensor, at),
                element<std::uint16_t>(table, Slot::param_low, tensor, at), numel);
  } else {
    round_block(param, element<stochastic_bfloat16>(table, Slot::param, tensor, at), numel,
                static_cast<std::uint32_t>(at), key);
  }
}

}  // namespace
}  // namespace PADAM_SIMD_LEVEL
}  // namespace padam
