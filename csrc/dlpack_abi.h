// The part of DLPack's C exchange interface (version 1) that reads a tensor: torch.Tensor carries
// a capsule with these functions, so that a tensor's address, dtype, sizes and strides can be had
// without torch's headers, in some 20 ns. Declared after DLPack's specification,
// https://dmlc.github.io/dlpack/latest/c_api.html.
#pragma once

#include <cstdint>

namespace padam {

struct DLPackVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

struct DLDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};

struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct DLPackExchangeAPI {
  DLPackVersion version;
  DLPackExchangeAPI* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  // Fills a DLTensor that borrows from the Python object. On failure returns -1 with a Python
  // exception set.
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
  void* current_work_stream;
};

}  // namespace padam
