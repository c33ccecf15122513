// The launch table in a device's memory, as device_table.py lays it out, and what one thread of a
// launch does with it. Host and device alike: on_host.cpp runs the same code on the CPU, thread by
// thread, which is how it is tested without a GPU.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "half_types.h"
#include "launch_table.h"
#include "padam_math.h"

namespace padam {

// One chunk is a run of blocks of one tensor; one thread block of the launch steps one chunk.
struct DeviceTable {
  const std::int64_t* addresses;           // [Slot::count][num_tensors]
  const std::int64_t* numels;              // [num_tensors]
  const std::int64_t* rows;                // [num_tensors]
  const void* constants;                   // Constants<T> [row], T the type of the moments
  const std::int64_t* chunk_tensors;       // [num_chunks]
  const std::int64_t* chunk_first_blocks;  // [num_chunks], in its tensor
  std::int64_t num_tensors;
  std::int64_t num_chunks;
  std::int64_t blocks_per_chunk;
  void* partial_sums;  // T [num_chunks]; null where no norm is asked for
  DType param_dtype;
  DType grad_dtype;
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

// Where the elements of one tensor lie. `h` is null without amsgrad.
template <typename Param, typename Grad, typename T>
struct Operands {
  Param* x;
  const Grad* g;
  T* m;
  T* v;
  T* h;
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
PADAM_INLINE Pack<T, width> load(const T* from) {
  return *checked(reinterpret_cast<const Pack<T, width>*>(from));
}

template <int width, typename T>
PADAM_INLINE void store(T* to, const Pack<T, width>& values) {
  *checked(reinterpret_cast<Pack<T, width>*>(to)) = values;
}

// Steps elements [at, at + width) of a tensor; an address of that many elements must be aligned.
template <Root root, int width, typename Param, typename Grad, typename T>
PADAM_INLINE void step_elements(const Operands<Param, Grad, T>& tensor, std::int64_t at,
                                const Constants<T>& c, Decay decay, bool amsgrad) {
  Pack<Param, width> x = load<width>(tensor.x + at);
  const Pack<Grad, width> g = load<width>(tensor.g + at);
  Pack<T, width> m = load<width>(tensor.m + at);
  Pack<T, width> v = load<width>(tensor.v + at);
  Pack<T, width> h{};
  if (amsgrad) h = load<width>(tensor.h + at);
#pragma unroll
  for (int i = 0; i < width; ++i) {
    const T wide_x = widen(x.items[i]);
    const T d = update_moments(wide_x, static_cast<T>(widen(g.items[i])), m.items[i], v.items[i],
                               h.items[i], c, decay, amsgrad);
    x.items[i] = narrow(update_param<root>(wide_x, m.items[i], d, c, decay), Param{});
  }
  store<width>(tensor.x + at, x);
  store<width>(tensor.m + at, m);
  store<width>(tensor.v + at, v);
  if (amsgrad) store<width>(tensor.h + at, h);
}

// Steps a thread's share of elements [begin, end), which begin at a block: whole blocks of aligned
// tensors in packs; what is left element by element, neighbours by neighbouring threads.
template <Root root, typename Param, typename Grad, typename T>
PADAM_INLINE void step_share(const Operands<Param, Grad, T>& tensor, std::int64_t begin,
                             std::int64_t end, int thread, bool aligned, const Constants<T>& c) {
  const Decay decay = decay_of(c);
  const bool amsgrad = c.amsgrad != T(0);
  const std::int64_t in_blocks = (end - begin) / kBlock<T> * kBlock<T>;
  const std::int64_t whole = aligned ? begin + in_blocks : begin;
  for (std::int64_t at = begin + thread * kWidth<T>; at < whole; at += kBlock<T>) {
    step_elements<root, kWidth<T>>(tensor, at, c, decay, amsgrad);
  }
  for (std::int64_t at = whole + thread; at < end; at += kThreads) {
    step_elements<root, 1>(tensor, at, c, decay, amsgrad);
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

// What one thread of one block does.
template <typename Param, typename Grad, typename T>
PADAM_INLINE void step_thread(const DeviceTable& table, std::int64_t chunk, int thread) {
  const auto [tensor, begin, end] = chunk_of<T>(table, chunk);
  const std::int64_t x = address_of(table, Slot::param, tensor);
  const std::int64_t g = address_of(table, Slot::grad, tensor);
  const std::int64_t m = address_of(table, Slot::exp_avg, tensor);
  const std::int64_t v = address_of(table, Slot::exp_avg_sq, tensor);
  const std::int64_t h = address_of(table, Slot::max_exp_avg_sq, tensor);
  const bool aligned = (x | g | m | v | h) % 16 == 0;
  const Operands<Param, Grad, T> operands{pointer<Param>(x), pointer<const Grad>(g), pointer<T>(m),
                                          pointer<T>(v), pointer<T>(h)};

  const Constants<T> c = static_cast<const Constants<T>*>(table.constants)[table.rows[tensor]];
  if (c.skip != T(0)) return;
  switch (root_of(c)) {
    case Root::none:
      return step_share<Root::none>(operands, begin, end, thread, aligned, c);
    case Root::half:
      return step_share<Root::half>(operands, begin, end, thread, aligned, c);
    case Root::quarter:
      return step_share<Root::quarter>(operands, begin, end, thread, aligned, c);
    case Root::eighth:
      return step_share<Root::eighth>(operands, begin, end, thread, aligned, c);
    case Root::sixteenth:
      return step_share<Root::sixteenth>(operands, begin, end, thread, aligned, c);
    default:
      return step_share<Root::general>(operands, begin, end, thread, aligned, c);
  }
}

// A thread's share of the squares of one chunk's gradient, summed.
template <typename Grad, typename T>
PADAM_INLINE T sum_of_squares_thread(const DeviceTable& table, std::int64_t chunk, int thread) {
  const auto [tensor, begin, end] = chunk_of<T>(table, chunk);
  const std::int64_t address = address_of(table, Slot::grad, tensor);
  const auto* grad = pointer<const Grad>(address);
  const std::int64_t in_blocks = (end - begin) / kBlock<T> * kBlock<T>;
  const std::int64_t whole = address % 16 == 0 ? begin + in_blocks : begin;
  T sums[kWidth<T>] = {};
  for (std::int64_t at = begin + thread * kWidth<T>; at < whole; at += kBlock<T>) {
    const Pack<Grad, kWidth<T>> pack = load<kWidth<T>>(grad + at);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      const T g = static_cast<T>(widen(pack.items[i]));
      sums[i] = multiply_add(g, g, sums[i]);
    }
  }
  for (std::int64_t at = whole + thread; at < end; at += kThreads) {
    const T g = static_cast<T>(widen(load<1>(grad + at).items[0]));
    sums[0] = multiply_add(g, g, sums[0]);
  }
  T sum = sums[0];
#pragma unroll
  for (int i = 1; i < kWidth<T>; ++i) sum += sums[i];
  return sum;
}

// One step of the sum over the threads of a block: with strides kThreads / 2, ..., 1, every thread
// taking part in each before any does in the next, shares[0] ends as the sum of all.
template <typename T>
PADAM_INLINE void fold(T* shares, int thread, int stride) {
  if (thread < stride) shares[thread] += shares[thread + stride];
}

// Elements in a block of the launch for a table.
inline std::int64_t block_of(DType param_dtype) {
  return param_dtype == DType::float64 ? kBlock<double> : kBlock<float>;
}

// Calls launch.template run<Param, Grad, T>() with the types of a table.
template <typename Launch>
void with_types(const DeviceTable& table, Launch launch) {
  const bool full_grad = table.grad_dtype == DType::float32;
  switch (table.param_dtype) {
    case DType::float32:
      return launch.template run<float, float, float>();
    case DType::float64:
      return launch.template run<double, double, double>();
    case DType::bfloat16:
      return full_grad ? launch.template run<bfloat16, float, float>()
                       : launch.template run<bfloat16, bfloat16, float>();
    case DType::float16:
      return full_grad ? launch.template run<float16, float, float>()
                       : launch.template run<float16, float16, float>();
  }
}

}  // namespace padam
