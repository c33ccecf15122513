// The Python module padam_ext._native: checks the arrays, lets go of the GIL, calls the kernel.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "gather.h"
#include "launch_table.h"
#include "padam_cpu.h"
#include "padam_cuda.h"

namespace py = pybind11;

namespace {

constexpr py::ssize_t kSlots = static_cast<py::ssize_t>(padam::Slot::count);

// A contiguous one-dimensional buffer of 8-byte items, as array.array makes them.
template <typename T>
const T* items(const py::buffer_info& info, const char* name, py::ssize_t expected) {
  if (info.itemsize != 8 || info.ndim != 1 || info.size != expected || info.strides[0] != 8) {
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(expected) +
                                " contiguous 8-byte items, got " + std::to_string(info.size) +
                                " of " + std::to_string(info.itemsize) + " bytes");
  }
  return static_cast<const T*>(info.ptr);
}

template <typename T>
T at_address(std::uintptr_t address) {
  return reinterpret_cast<T>(address);
}

padam::DType dtype_of(int code, const char* name) {
  if (code < 0 || code > static_cast<int>(padam::DType::float16)) {
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(code) +
                                " is not a dtype");
  }
  return static_cast<padam::DType>(code);
}

void check_dtypes(padam::DType param, padam::DType grad) {
  const bool half_param = param == padam::DType::bfloat16 || param == padam::DType::float16;
  if (grad != param && !(half_param && grad == padam::DType::float32)) {
    throw std::invalid_argument("a gradient of dtype " + std::to_string(static_cast<int>(grad)) +
                                " beside a parameter of dtype " +
                                std::to_string(static_cast<int>(param)) + " is not supported");
  }
}

padam::DeviceTable device_table(std::uintptr_t addresses, std::uintptr_t numels,
                                std::uintptr_t rows, std::uintptr_t constants,
                                std::uintptr_t chunk_tensors, std::uintptr_t chunk_first_blocks,
                                std::int64_t num_tensors, std::int64_t num_chunks,
                                std::int64_t blocks_per_chunk, std::uintptr_t partial_sums,
                                int param_dtype, int grad_dtype) {
  padam::DeviceTable table;
  table.addresses = at_address<const std::int64_t*>(addresses);
  table.numels = at_address<const std::int64_t*>(numels);
  table.rows = at_address<const std::int64_t*>(rows);
  table.constants = at_address<const void*>(constants);
  table.chunk_tensors = at_address<const std::int64_t*>(chunk_tensors);
  table.chunk_first_blocks = at_address<const std::int64_t*>(chunk_first_blocks);
  table.num_tensors = num_tensors;
  table.num_chunks = num_chunks;
  table.blocks_per_chunk = blocks_per_chunk;
  table.partial_sums = at_address<void*>(partial_sums);
  table.param_dtype = dtype_of(param_dtype, "param_dtype");
  table.grad_dtype = dtype_of(grad_dtype, "grad_dtype");
  check_dtypes(table.param_dtype, table.grad_dtype);
  return table;
}

void step_cpu(const py::buffer& addresses, const py::buffer& numels, const py::buffer& rows,
              const py::buffer& constants, int param_dtype, int grad_dtype, int num_threads,
              const std::string& simd_level) {
  const py::buffer_info numels_info = numels.request();
  const py::buffer_info addresses_info = addresses.request();
  const py::buffer_info rows_info = rows.request();
  const py::buffer_info constants_info = constants.request();
  constexpr py::ssize_t kFields = sizeof(padam::Constants<double>) / sizeof(double);

  padam::LaunchTable table;
  table.num_tensors = numels_info.size;
  table.numels = items<std::int64_t>(numels_info, "numels", table.num_tensors);
  table.addresses = items<std::int64_t>(addresses_info, "addresses", kSlots * table.num_tensors);
  table.rows = items<std::int64_t>(rows_info, "rows", table.num_tensors);
  table.num_rows = constants_info.size / kFields;
  table.constants = reinterpret_cast<const padam::Constants<double>*>(
      items<double>(constants_info, "constants", table.num_rows * kFields));
  table.param_dtype = dtype_of(param_dtype, "param_dtype");
  table.grad_dtype = dtype_of(grad_dtype, "grad_dtype");
  check_dtypes(table.param_dtype, table.grad_dtype);
  for (std::int64_t tensor = 0; tensor < table.num_tensors; ++tensor) {
    const std::int64_t row = table.rows[tensor];
    if (row < 0 || row >= table.num_rows) {
      throw std::invalid_argument("rows: " + std::to_string(row) + " is outside [0, " +
                                  std::to_string(table.num_rows) + ")");
    }
  }
  for (std::int64_t row = 0; row < table.num_rows; ++row) {
    const double root = table.constants[row].root;
    if (!(root >= 0 && root < static_cast<double>(padam::Root::count))) {
      throw std::invalid_argument("constants: root " + std::to_string(root) + " is none");
    }
  }

  const py::gil_scoped_release release;
  padam::step_cpu(table, num_threads, simd_level);
}

double sum_of_squares_cpu(const py::buffer& addresses, const py::buffer& numels, int grad_dtype,
                          int num_threads, const std::string& simd_level) {
  const py::buffer_info numels_info = numels.request();
  const py::buffer_info addresses_info = addresses.request();
  padam::LaunchTable table = {};
  table.num_tensors = numels_info.size;
  table.numels = items<std::int64_t>(numels_info, "numels", table.num_tensors);
  table.addresses = items<std::int64_t>(addresses_info, "addresses", kSlots * table.num_tensors);
  table.grad_dtype = dtype_of(grad_dtype, "grad_dtype");

  const py::gil_scoped_release release;
  return padam::sum_of_squares_cpu(table, num_threads, simd_level);
}

// Adds to each float32 counter and returns the smallest and the largest new value.
py::tuple add_to_steps(const py::buffer& addresses, float amount) {
  const py::buffer_info info = addresses.request();
  const auto* counters = items<std::int64_t>(info, "addresses", info.size);
  float smallest = 0.0f;
  float largest = 0.0f;
  for (py::ssize_t i = 0; i < info.size; ++i) {
    float* counter = reinterpret_cast<float*>(static_cast<std::uintptr_t>(counters[i]));
    const float value = *counter += amount;
    smallest = i == 0 || value < smallest ? value : smallest;
    largest = i == 0 || value > largest ? value : largest;
  }
  return py::make_tuple(smallest, largest);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native kernels of padam_ext, called with addresses; see launch_table.py.";
  module.def("step_cpu", &step_cpu, py::arg("addresses"), py::arg("numels"), py::arg("rows"),
             py::arg("constants"), py::arg("param_dtype"), py::arg("grad_dtype"),
             py::arg("num_threads"), py::arg("simd_level"));
  module.def("sum_of_squares_cpu", &sum_of_squares_cpu, py::arg("addresses"), py::arg("numels"),
             py::arg("grad_dtype"), py::arg("num_threads"), py::arg("simd_level"));
  module.def("add_to_steps", &add_to_steps, py::arg("addresses"), py::arg("amount"));
  py::class_<padam::Reading>(module, "Reading")
      .def("same", &padam::Reading::same, py::arg("other"))
      .def("pieces", &padam::Reading::pieces);
  py::class_<padam::Gatherer>(module, "Gatherer")
      .def(py::init<const py::object&>(), py::arg("tensor_class"))
      .def("gather", &padam::Gatherer::gather, py::arg("selection"), py::arg("dtensor"))
      .def("read_states", &padam::Gatherer::read_states, py::arg("states"), py::arg("params"),
           py::arg("keys"), py::arg("dtensor"));

  // A table in a device's memory, see device_table.py.
  py::class_<padam::DeviceTable>(module, "DeviceTable")
      .def(py::init(&device_table), py::kw_only(), py::arg("addresses"), py::arg("numels"),
           py::arg("rows"), py::arg("constants"), py::arg("chunk_tensors"),
           py::arg("chunk_first_blocks"), py::arg("num_tensors"), py::arg("num_chunks"),
           py::arg("blocks_per_chunk"), py::arg("partial_sums"), py::arg("param_dtype"),
           py::arg("grad_dtype"));
  module.def(
      "block_of",
      [](int param_dtype) { return padam::block_of(dtype_of(param_dtype, "param_dtype")); },
      py::arg("param_dtype"));
  module.def("step_on_host", &padam::step_on_host, py::arg("table"),
             py::call_guard<py::gil_scoped_release>());
  module.def("sum_of_squares_on_host", &padam::sum_of_squares_on_host, py::arg("table"),
             py::call_guard<py::gil_scoped_release>());
#if defined(PADAM_CUDA_ARCHS)
  module.def("step_cuda", &padam::step_cuda, py::arg("table"), py::arg("device"), py::arg("stream"),
             py::call_guard<py::gil_scoped_release>());
  module.def("sum_of_squares_cuda", &padam::sum_of_squares_cuda, py::arg("table"),
             py::arg("device"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
  module.attr("cuda_compiler") = "nvcc " PADAM_CUDA_COMPILER;
  module.attr("cuda_architectures") = PADAM_CUDA_ARCHS;
#endif

  module.def("available_simd_levels", &padam::available_simd_levels);
#if defined(_OPENMP)
  module.attr("openmp") = true;
#else
  module.attr("openmp") = false;
#endif
  module.attr("compiler") = PADAM_COMPILER;
}
