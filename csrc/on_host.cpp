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

}  // namespace

void step_on_host(const DeviceTable& table) { with_types(table, EveryThread{table}); }

}  // namespace padam
