// The launches on NVIDIA's GPUs, and the same on the CPU for tests.
#pragma once

#include <cstdint>

#include "device_table.h"
#include "prepare.h"

namespace padam {

// Puts one launch that steps every tensor of the table on a stream of a device. The table and the
// tensors lie in that device's memory. The current device stays what it was.
// Throws std::runtime_error with CUDA's message, the device and the number of tensors.
void step_cuda(const DeviceTable& table, int device, std::uintptr_t stream);

// Likewise, one launch that sums the squares of each chunk's gradient into table.partial_sums.
void sum_of_squares_cuda(const DeviceTable& table, int device, std::uintptr_t stream);

// Likewise, one launch that completes what the step is to read, see prepare.h.
void prepare_cuda(const DeviceTable& table, const PrepareInputs& inputs, int device,
                  std::uintptr_t stream);

// Runs what every thread of these launches would do, one after the other, on memory of the host.
// Throws std::logic_error at an access that a GPU could not make.
void step_on_host(const DeviceTable& table);
void sum_of_squares_on_host(const DeviceTable& table);
void prepare_on_host(const DeviceTable& table, const PrepareInputs& inputs);

}  // namespace padam
