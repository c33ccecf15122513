// The CUDA kernels and their launches. The code of a thread is in device_table.h and prepare.h.
#include <cuda_runtime.h>

#include <limits>
#include <stdexcept>

#include "compiled_signatures.h"
#include "padam_cuda.h"

namespace padam {

namespace {

// Thread blocks that must fit on one multiprocessor; few enough that no registers are spilled.
template <typename T>
constexpr int kResident = sizeof(T) == 8 ? 2 : 3;

template <typename Types>
__global__ __launch_bounds__(kThreads, kResident<typename Types::T>) void multi_tensor_padam(
    const DeviceTable table) {
  step_thread<Types>(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

// Adds up the shares of all threads of a block, always in the same order, in shares[0].
template <typename T>
__device__ void sum_block(T* shares, T share, int thread) {
  shares[thread] = share;
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    __syncthreads();
    fold(shares, thread, stride);
  }
}

template <typename Grad, typename T>
__global__ __launch_bounds__(kThreads) void multi_tensor_sum_of_squares(const DeviceTable table) {
  __shared__ T shares[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t chunk = chunk_to_sum(table, blockIdx.x);
  sum_block(shares, sum_of_squares_thread<Grad, T>(table, chunk, thread), thread);
  if (thread == 0) table.partial_sums[chunk] = shares[0];
}

__global__ __launch_bounds__(kThreads) void prepare_step(const DeviceTable table,
                                                         const PrepareInputs inputs) {
  __shared__ double shares[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  sum_block(shares, sum_of_sums_thread(inputs, thread), thread);
  __syncthreads();
  prepare_thread(table, inputs, shares[0], blockIdx.x, gridDim.x, thread);
}

std::string described(cudaError_t error) {
  const std::string text = std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error);
  const bool no_code =
      error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion;
  return text + (no_code ? "); padam_ext has code for " PADAM_CUDA_ARCHS
                           "; to add others, reinstall it with PADAM_EXT_CUDA_ARCHS"
                         : ")");
}

// Checks what CUDA answers on behalf of one launch.
class Checked {
 public:
  Checked(const DeviceTable& table, int device) : table_(table), device_(device) {}

  void operator()(cudaError_t error, const char* doing) const {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears it, so that the next caller does not see it
    throw std::runtime_error(
        std::string("CUDA failed ") + doing + " for " + std::to_string(table_.num_tensors) +
        " tensors on cuda:" + std::to_string(device_) + ": " + described(error));
  }

 private:
  const DeviceTable& table_;
  int device_;
};

// Makes a device the current one; the destructor restores the previous one.
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

// Where launches for one table go.
class Stream {
 public:
  Stream(const DeviceTable& table, int device, std::uintptr_t stream)
      : checked_(table, device),
        guard_(device, checked_),
        stream_(reinterpret_cast<cudaStream_t>(stream)) {}

  template <typename... Arguments>
  void launch(void (*kernel)(Arguments...), std::int64_t blocks, const char* doing,
              Arguments... arguments) const {
    if (blocks > std::numeric_limits<int>::max()) {
      throw std::runtime_error("a step of " + std::to_string(blocks) +
                               " chunks is more than one launch can take");
    }
    void* addresses[] = {&arguments...};
    checked_(
        cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                         dim3(kThreads), addresses, 0, stream_),
        doing);
  }

 private:
  Checked checked_;
  DeviceGuard guard_;
  cudaStream_t stream_;
};

struct LaunchStep {
  const DeviceTable& table;
  const Stream& stream;

  template <typename Types>
  void operator()(Types) const {
    stream.launch(&multi_tensor_padam<Types>, table.num_chunks, "to launch the step", table);
  }
};

struct LaunchSum {
  const DeviceTable& table;
  const Stream& stream;

  template <typename Types>
  void operator()(Types) const {
    stream.launch(&multi_tensor_sum_of_squares<typename Types::template Stored<Slot::grad>,
                                               typename Types::T>,
                  table.num_chunks, "to launch the norm", table);
  }
};

}  // namespace

void step_cuda(const DeviceTable& table, int device, std::uintptr_t stream) {
  with_types(table.signature, LaunchStep{table, Stream(table, device, stream)});
}

void sum_of_squares_cuda(const DeviceTable& table, int device, std::uintptr_t stream) {
  with_types(table.signature, LaunchSum{table, Stream(table, device, stream)});
}

void prepare_cuda(const DeviceTable& table, const PrepareInputs& inputs, int device,
                  std::uintptr_t stream) {
  Stream(table, device, stream)
      .launch(&prepare_step, num_prepare_blocks(table), "to launch the preparation", table, inputs);
}

}  // namespace padam
