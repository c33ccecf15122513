// The device code on the CPU: block by block, thread by thread.
#include "compiled_signatures.h"
#include "padam_cuda.h"

namespace padam {

namespace {

// The shares of all threads of a block, summed as the block does.
template <typename T, typename Share>
T sum_of_block(const Share& share) {
  T shares[kThreads];
  for (int thread = 0; thread < kThreads; ++thread) shares[thread] = share(thread);
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    for (int thread = 0; thread < kThreads; ++thread) fold(shares, thread, stride);
  }
  return shares[0];
}

}  // namespace

void step_on_host(const DeviceTable& table) {
  with_types(table.signature, [&](auto types) {
    for (std::int64_t chunk = 0; chunk < table.num_chunks; ++chunk) {
      for (int thread = 0; thread < kThreads; ++thread) {
        step_thread<decltype(types)>(table, chunk, thread);
      }
    }
  });
}

void sum_of_squares_on_host(const DeviceTable& table) {
  with_types(table.signature, [&](auto types) {
    using Types = decltype(types);
    for (std::int64_t block = 0; block < table.num_chunks; ++block) {
      const std::int64_t chunk = chunk_to_sum(table, block);
      table.partial_sums[chunk] = sum_of_block<typename Types::T>([&](int thread) {
        return sum_of_squares_thread<typename Types::template Stored<Slot::grad>,
                                     typename Types::T>(table, chunk, thread);
      });
    }
  });
}

void prepare_on_host(const DeviceTable& table, const PrepareInputs& inputs) {
  const std::int64_t num_blocks = num_prepare_blocks(table);
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const double total =
        sum_of_block<double>([&](int thread) { return sum_of_sums_thread(inputs, thread); });
    for (int thread = 0; thread < kThreads; ++thread) {
      prepare_thread(table, inputs, total, block, num_blocks, thread);
    }
  }
}

}  // namespace padam
