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

// The squares of every chunk's gradient, summed, always in the same order.
template <typename Grad, typename T>
__global__ __launch_bounds__(kThreads) void multi_tensor_sum_of_squares(const DeviceTable table) {
  __shared__ T shares[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  shares[thread] = sum_of_squares_thread<Grad, T>(table, blockIdx.x, thread);
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    __syncthreads();
    fold(shares, thread, stride);
  }
  if (thread == 0) static_cast<T*>(table.partial_sums)[blockIdx.x] = shares[0];
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

class Launch {
 public:
  Launch(const DeviceTable& table, const Checked& checked, std::uintptr_t stream)
      : table_(table), checked_(checked), stream_(reinterpret_cast<cudaStream_t>(stream)) {}

 protected:
  using Kernel = void (*)(DeviceTable);

  void launch(Kernel kernel, const char* doing) const {
    DeviceTable argument = table_;
    void* arguments[] = {&argument};
    const dim3 blocks(static_cast<unsigned>(table_.num_chunks));
    checked_(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, dim3(kThreads),
                              arguments, 0, stream_),
             doing);
  }

 private:
  const DeviceTable& table_;
  const Checked& checked_;
  cudaStream_t stream_;
};

struct LaunchStep : Launch {
  using Launch::Launch;

  template <typename Param, typename Grad, typename T>
  void run() const {
    launch(&multi_tensor_padam<Param, Grad, T>, "to launch the step");
  }
};

struct LaunchSum : Launch {
  using Launch::Launch;

  template <typename Param, typename Grad, typename T>
  void run() const {
    launch(&multi_tensor_sum_of_squares<Grad, T>, "to launch the norm");
  }
};

template <typename What>
void launch_on(const DeviceTable& table, int device, std::uintptr_t stream) {
  if (table.num_chunks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("a step of " + std::to_string(table.num_chunks) +
                             " chunks is more than one launch can take");
  }
  const Checked checked(table, device);
  const DeviceGuard guard(device, checked);
  with_types(table, What(table, checked, stream));
}

}  // namespace

void step_cuda(const DeviceTable& table, int device, std::uintptr_t stream) {
  launch_on<LaunchStep>(table, device, stream);
}

void sum_of_squares_cuda(const DeviceTable& table, int device, std::uintptr_t stream) {
  launch_on<LaunchSum>(table, device, stream);
}

}  // namespace padam
