// The launch table in a device's memory, as device_table.py lays it out, and what one thread of a
// launch does with it. Host and device alike: on_host.cpp runs the same code on the CPU, thread by
// thread, which is how it is tested without a GPU.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <utility>

#include "codecs.h"
#include "compiled_signatures.h"
#include "launch_table.h"
#include "padam_math.h"
#include "random_bits.h"
#include "stored_element.h"

namespace padam {

// What the prepare launch completes one row from, in words of 8 bytes. lr and weight_decay are the
// value itself if the host knows it, with address 0; otherwise the value is at the address.
struct RowSource {
  double lr;
  std::int64_t lr_address;
  std::int64_t lr_dtype;  // float32 or float64, as are all scalars that lie in tensors
  double weight_decay;
  std::int64_t weight_decay_address;
  std::int64_t weight_decay_dtype;
  std::int64_t bias_correction;  // a BiasCorrection
  double coupled_factor;         // of weight_decay: 1, -1 to maximize, 0 where it is decoupled
  double decoupled_factor;       // of lr * weight_decay: 1 or 0
  double maximum_scale;          // of inverse_correction
  double step;                   // number of this update; negative: the tensor's own counter
};
static_assert(sizeof(RowSource) == 11 * 8, "rows.py packs eleven words");

// What holds for the whole step.
struct Control {
  double grad_factor;
  double skip;  // 0 or 1: nothing changes
};

// The host's settings for the norm of all gradients.
struct Limits {
  double max_grad_norm;   // infinite for none
  double skip_nonfinite;  // 0 or 1: whether a step is skipped where the norm is not finite
};

// All pointers are the device's. One chunk is a run of blocks of one tensor; one thread block of
// the launch steps one chunk.
struct DeviceTable {
  const std::int64_t* addresses;           // [kSlots][num_tensors]
  const std::int64_t* numels;              // [num_tensors]
  const std::int64_t* salts;               // [num_tensors], of random numbers
  const std::int64_t* rows;                // [num_tensors]
  Constants<double>* constants;            // [row]
  const Control* control;                  // what the step reads
  const Limits* limits;                    // what the prepare launch reads
  Control* prepared_control;               // what it writes
  const RowSource* row_sources;            // [num_late_rows]
  const std::int64_t* counters;            // [num_tensors], addresses of float32
  const std::int64_t* chunk_tensors;       // [num_chunks]
  const std::int64_t* chunk_first_blocks;  // [num_chunks], in its tensor
  std::int64_t num_tensors;
  std::int64_t num_chunks;
  std::int64_t blocks_per_chunk;
  double* partial_sums;        // [num_chunks]; null where no norm is asked for
  std::int64_t num_late_rows;  // that the prepare launch has to complete
  bool counts_on_device;       // whether it has to count
  Signature signature;
};

constexpr int kThreads = 256;

// Elements that a thread steps at a time: 16 bytes of each moment.
template <typename T>
constexpr int kWidth = 16 / sizeof(T);

// Elements in a block.
template <typename T>
constexpr std::int64_t kBlock = kThreads * kWidth<T>;

// Several elements that are read or written at once.
template <typename T, int width>
struct alignas(width * sizeof(T)) Pack {
  T items[width];
};

// Where the elements of one tensor lie.
struct Operands {
  std::int64_t addresses[kSlots];  // by slot, 0 for what is absent
  unsigned in_packs;               // bit of each slot: whether a pack is one access to memory
};

template <typename T>
PADAM_INLINE T* pointer(std::int64_t address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

// Tells a GPU's compiler that an address, which came out of a table, is one of global memory. On
// the host, where most addresses work, refuses those at which a GPU would fail.
template <typename Pack>
PADAM_INLINE Pack* checked(Pack* pack) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pack));
#else
  if (reinterpret_cast<std::uintptr_t>(pack) % alignof(Pack) != 0) {
    throw std::logic_error("a pack at an address that is not aligned");
  }
#endif
  return pack;
}

template <int width, typename T>
PADAM_INLINE Pack<T, width> load_pack(const T* from) {
  return *checked(reinterpret_cast<const Pack<T, width>*>(from));
}

template <int width, typename T>
PADAM_INLINE void store_pack(T* to, const Pack<T, width>& values) {
  *checked(reinterpret_cast<Pack<T, width>*>(to)) = values;
}

template <int width>
PADAM_INLINE bool takes_packs(const Operands& tensor, Slot slot) {
  return width == 1 || (tensor.in_packs >> static_cast<int>(slot) & 1) != 0;
}

// Reads what one slot stores for elements [at, at + width), if it is there.
template <typename Types, Slot slot, int width>
PADAM_INLINE void load_slot(const Operands& tensor, std::int64_t at,
                            Stored<Types> (&stored)[width]) {
  if constexpr (Types::template has<slot>) {
    using Item = typename Types::template Stored<slot>;
    const auto* from = pointer<const Item>(tensor.addresses[static_cast<int>(slot)]) + at;
    if (takes_packs<width>(tensor, slot)) {
      const auto pack = load_pack<width>(from);
      PADAM_UNROLL()
      for (int i = 0; i < width; ++i) part<slot>(stored[i]) = pack.items[i];
    } else {
      PADAM_UNROLL()
      for (int i = 0; i < width; ++i) part<slot>(stored[i]) = load_pack<1>(from + i).items[0];
    }
  }
}

// Writes it, unless it is the gradient, or the running maximum and none of the elements has
// another.
template <typename Types, Slot slot, int width>
PADAM_INLINE void store_slot(const Operands& tensor, std::int64_t at,
                             const Stored<Types> (&stored)[width], bool maximum_changed) {
  if constexpr (Types::template has<slot> && slot != Slot::grad) {
    if (slot == Slot::max_exp_avg_sq && !maximum_changed) return;
    using Item = typename Types::template Stored<slot>;
    auto* to = pointer<Item>(tensor.addresses[static_cast<int>(slot)]) + at;
    Pack<Item, width> pack;
    PADAM_UNROLL()
    for (int i = 0; i < width; ++i) pack.items[i] = part<slot>(stored[i]);
    if (takes_packs<width>(tensor, slot)) {
      store_pack<width>(to, pack);
    } else {
      PADAM_UNROLL()
      for (int i = 0; i < width; ++i) store_pack<1>(to + i, Pack<Item, 1>{pack.items[i]});
    }
  }
}

// Steps elements [at, at + width) of a tensor.
template <Root root, int width, typename Types, typename T, int... slots>
PADAM_INLINE void step_elements(const Operands& tensor, std::int64_t at, const Constants<T>& c,
                                T grad_factor, Decay decay, std::uint32_t key,
                                std::integer_sequence<int, slots...>) {
  Stored<Types> stored[width];
  (load_slot<Types, static_cast<Slot>(slots)>(tensor, at, stored), ...);
  // After some training few maxima rise, and memory is what limits a large step.
  bool maximum_changed = false;
  PADAM_UNROLL()
  for (int i = 0; i < width; ++i) {
    Element<T> element;
    decode<Types>(stored[i], element);
    const auto before = stored[i].max_exp_avg_sq;
    update_element<root, Types::maximum>(element, c, grad_factor, decay);
    encode<Types>(element, static_cast<std::uint32_t>(at + i), key, stored[i]);
    if constexpr (Types::template has<Slot::max_exp_avg_sq>) {
      maximum_changed |= load(before) != load(stored[i].max_exp_avg_sq);  // true of NaN
    }
  }
  (store_slot<Types, static_cast<Slot>(slots)>(tensor, at, stored, maximum_changed), ...);
}

// The end of the packs in elements [begin, end), which begin at a block. What is left goes element
// by element.
template <typename T>
PADAM_INLINE std::int64_t end_of_packs(std::int64_t begin, std::int64_t end) {
  return begin + (end - begin) / kWidth<T> * kWidth<T>;
}

// Steps a thread's share of elements [begin, end), which begin at a block.
template <Root root, typename Types, typename T>
PADAM_INLINE void step_share(const Operands& tensor, std::int64_t begin, std::int64_t end,
                             int thread, const Constants<T>& c, T grad_factor, std::uint32_t key) {
  const Decay decay = decay_of(c);
  const std::int64_t in_packs = end_of_packs<T>(begin, end);
  for (std::int64_t at = begin + thread * kWidth<T>; at < in_packs; at += kBlock<T>) {
    step_elements<root, kWidth<T>, Types>(tensor, at, c, grad_factor, decay, key, EachSlot());
  }
  // Unrolled it would take more registers, and gain nothing: loads wait for the stores before them.
  PADAM_UNROLL(1)
  for (std::int64_t at = in_packs + thread; at < end; at += kThreads) {
    step_elements<root, 1, Types>(tensor, at, c, grad_factor, decay, key, EachSlot());
  }
}

// Where one chunk lies: elements [begin, end) of a tensor.
struct Chunk {
  std::int64_t tensor;
  std::int64_t begin;
  std::int64_t end;
};

template <typename T>
PADAM_INLINE Chunk chunk_of(const DeviceTable& table, std::int64_t chunk) {
  const std::int64_t tensor = table.chunk_tensors[chunk];
  const std::int64_t numel = table.numels[tensor];
  const std::int64_t begin = table.chunk_first_blocks[chunk] * kBlock<T>;
  const std::int64_t limit = begin + table.blocks_per_chunk * kBlock<T>;
  return {tensor, begin, limit < numel ? limit : numel};
}

PADAM_INLINE std::int64_t address_of(const DeviceTable& table, Slot slot, std::int64_t tensor) {
  return table.addresses[static_cast<std::int64_t>(slot) * table.num_tensors + tensor];
}

// Whether a thread's elements in a pack are one access to memory, where the slot is there.
template <typename T, typename Stored>
PADAM_INLINE bool is_aligned(std::int64_t address) {
  return address % (kWidth<T> * static_cast<int>(sizeof(Stored))) == 0;
}

// One misaligned tensor costs the others nothing.
template <typename Types, int... slots>
PADAM_INLINE Operands operands_of(const DeviceTable& table, std::int64_t tensor,
                                  std::integer_sequence<int, slots...>) {
  using T = typename Types::T;
  Operands operands{{(Types::template has<static_cast<Slot>(slots)>
                          ? address_of(table, static_cast<Slot>(slots), tensor)
                          : 0)...},
                    0};
  ((operands.in_packs |=
    static_cast<unsigned>(is_aligned<T, typename Types::template Stored<static_cast<Slot>(slots)>>(
        operands.addresses[slots]))
    << slots),
   ...);
  return operands;
}

// What one thread of one block does.
template <typename Types>
PADAM_INLINE void step_thread(const DeviceTable& table, std::int64_t chunk, int thread) {
  using T = typename Types::T;
  const auto [tensor, begin, end] = chunk_of<T>(table, chunk);
  const Operands operands = operands_of<Types>(table, tensor, EachSlot());

  if (static_cast<T>(table.control->skip) != T(0)) return;
  const T grad_factor = static_cast<T>(table.control->grad_factor);
  const Constants<double>& row = table.constants[table.rows[tensor]];
  const Constants<T> c = rounded<T>(row);
  const std::uint32_t key = Types::draws ? step_key(row.seed, table.salts[tensor], row.step) : 0;
  switch (root_of(c)) {
    case Root::none:
      return step_share<Root::none, Types>(operands, begin, end, thread, c, grad_factor, key);
    case Root::half:
      return step_share<Root::half, Types>(operands, begin, end, thread, c, grad_factor, key);
    case Root::quarter:
      return step_share<Root::quarter, Types>(operands, begin, end, thread, c, grad_factor, key);
    case Root::eighth:
      return step_share<Root::eighth, Types>(operands, begin, end, thread, c, grad_factor, key);
    case Root::sixteenth:
      return step_share<Root::sixteenth, Types>(operands, begin, end, thread, c, grad_factor, key);
    default:
      return step_share<Root::general, Types>(operands, begin, end, thread, c, grad_factor, key);
  }
}

// The chunk whose squares a block sums. The last one comes first: the step begins with those whose
// gradients are still in the L2 cache.
PADAM_INLINE std::int64_t chunk_to_sum(const DeviceTable& table, std::int64_t block) {
  return table.num_chunks - 1 - block;
}

// A thread's share of the squares of one chunk's gradient, summed.
template <typename Grad, typename T>
PADAM_INLINE T sum_of_squares_thread(const DeviceTable& table, std::int64_t chunk, int thread) {
  const auto [tensor, begin, end] = chunk_of<T>(table, chunk);
  const std::int64_t address = address_of(table, Slot::grad, tensor);
  const auto* grad = pointer<const Grad>(address);
  const std::int64_t in_packs = is_aligned<T, Grad>(address) ? end_of_packs<T>(begin, end) : begin;
  T sums[kWidth<T>] = {};
  for (std::int64_t at = begin + thread * kWidth<T>; at < in_packs; at += kBlock<T>) {
    const Pack<Grad, kWidth<T>> pack = load_pack<kWidth<T>>(grad + at);
    PADAM_UNROLL()
    for (int i = 0; i < kWidth<T>; ++i) {
      const T g = load(pack.items[i]);
      sums[i] = multiply_add(g, g, sums[i]);
    }
  }
  for (std::int64_t at = in_packs + thread; at < end; at += kThreads) {
    const T g = load(load_pack<1>(grad + at).items[0]);
    sums[0] = multiply_add(g, g, sums[0]);
  }
  T sum = sums[0];
  PADAM_UNROLL()
  for (int i = 1; i < kWidth<T>; ++i) sum += sums[i];
  return sum;
}

// One step of the sum over the threads of a block. Every thread calls it with strides
// kThreads / 2, ..., 1, all finishing one stride before the next; shares[0] is then the sum of all.
template <typename T>
PADAM_INLINE void fold(T* shares, int thread, int stride) {
  if (thread < stride) shares[thread] += shares[thread + stride];
}

// Elements in a block of the launch for a table.
inline std::int64_t block_of(DType compute) {
  return compute == DType::float64 ? kBlock<double> : kBlock<float>;
}

}  // namespace padam
