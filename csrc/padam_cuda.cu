// The CUDA kernel and its launch. The code of a thread is in device_table.h.
#include <cuda_runtime.h>

#include <limits>
#include <stdexcept>

#include "padam_cuda.h"

namespace padam {

namespace {

// Thread blocks that must fit on one multiprocessor: leaves so many registers that none is spilled.
template <typename T>
constexpr int kResident = sizeof(T) == 8 ? 2 : 3;

template <typename Param, typename Grad, typename T>
__global__ __launch_bounds__(kThreads,
                             kResident<T>) void multi_tensor_padam(const DeviceTable table) {
  step_thread<Param, Grad, T>(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

std::string described(cudaError_t error) {
  const std::string text = std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error);
  const bool no_code =
      error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion;
  return text + (no_code ? "); there is code for " PADAM_CUDA_ARCHS
                           ", PADAM_EXT_CUDA_ARCHS chooses another when padam_ext is installed"
                         : ")");
}

// Checks what CUDA answers on behalf of one launch.
class Checked {
 public:
  Checked(const DeviceTable& table, int device) : table_(table), device_(device) {}

  void operator()(cudaError_t error, const char* doing) const {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // the next caller shall not be told of it again
    throw std::runtime_error(
        std::string("CUDA failed ") + doing + " for " + std::to_string(table_.num_tensors) +
        " tensors on cuda:" + std::to_string(device_) + ": " + described(error));
  }

 private:
  const DeviceTable& table_;
  int device_;
};

// Makes a device the current one and, at its end, the one that was.
class DeviceGuard {
 public:
  DeviceGuard(int device, const Checked& checked) : device_(device) {
    checked(cudaGetDevice(&before_), "to tell the current device");
    if (before_ != device) checked(cudaSetDevice(device), "to switch to the device");
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_;
  int before_ = 0;
};

struct Launch {
  const DeviceTable& table;
  const Checked& checked;
  cudaStream_t stream;

  template <typename Param, typename Grad, typename T>
  void run() const {
    DeviceTable argument = table;
    void* arguments[] = {&argument};
    const dim3 blocks(static_cast<unsigned>(table.num_chunks));
    const auto* kernel = reinterpret_cast<const void*>(&multi_tensor_padam<Param, Grad, T>);
    checked(cudaLaunchKernel(kernel, blocks, dim3(kThreads), arguments, 0, stream),
            "to launch the step");
  }
};

}  // namespace

void step_cuda(const DeviceTable& table, int device, std::uintptr_t stream) {
  if (table.num_chunks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("a step of " + std::to_string(table.num_chunks) +
                             " chunks is more than one launch can take");
  }
  const Checked checked(table, device);
  const DeviceGuard guard(device, checked);
  with_types(table, Launch{table, checked, reinterpret_cast<cudaStream_t>(stream)});
}

}  // namespace padam
