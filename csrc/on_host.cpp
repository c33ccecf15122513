// The device code on the CPU: block by block, thread by thread.
#include "padam_cuda.h"

namespace padam {

namespace {

struct EveryThread {
  const DeviceTable& table;

  template <typename Param, typename Grad, typename T>
  void run() const {
    for (std::int64_t chunk = 0; chunk < table.num_chunks; ++chunk) {
      for (int thread = 0; thread < kThreads; ++thread) {
        step_thread<Param, Grad, T>(table, chunk, thread);
      }
    }
  }
};

struct EverySum {
  const DeviceTable& table;

  template <typename Param, typename Grad, typename T>
  void run() const {
    for (std::int64_t chunk = 0; chunk < table.num_chunks; ++chunk) {
      T shares[kThreads];
      for (int thread = 0; thread < kThreads; ++thread) {
        shares[thread] = sum_of_squares_thread<Grad, T>(table, chunk, thread);
      }
      for (int stride = kThreads / 2; stride > 0; stride /= 2) {
        for (int thread = 0; thread < kThreads; ++thread) fold(shares, thread, stride);
      }
      static_cast<T*>(table.partial_sums)[chunk] = shares[0];
    }
  }
};

}  // namespace

void step_on_host(const DeviceTable& table) { with_types(table, EveryThread{table}); }

void sum_of_squares_on_host(const DeviceTable& table) { with_types(table, EverySum{table}); }

}  // namespace padam
