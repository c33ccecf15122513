// The Python module padam_ext._native: checks the arrays, lets go of the GIL, calls the kernel.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "gather.h"
#include "launch_table.h"
#include "padam_cpu.h"

namespace py = pybind11;

namespace {

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

padam::DType dtype_of(int code, const char* name) {
  if (code < 0 || code > static_cast<int>(padam::DType::float16)) {
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(code) +
                                " is not a dtype");
  }
  return static_cast<padam::DType>(code);
}

void step_cpu(const py::buffer& addresses, const py::buffer& numels, const py::buffer& rows,
              const py::buffer& constants, int param_dtype, int grad_dtype, int num_threads,
              const std::string& simd_level) {
  const py::buffer_info numels_info = numels.request();
  const py::buffer_info addresses_info = addresses.request();
  const py::buffer_info rows_info = rows.request();
  const py::buffer_info constants_info = constants.request();
  constexpr py::ssize_t kSlots = static_cast<py::ssize_t>(padam::Slot::count);
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
  const bool half_param =
      table.param_dtype == padam::DType::bfloat16 || table.param_dtype == padam::DType::float16;
  if (table.grad_dtype != table.param_dtype &&
      !(half_param && table.grad_dtype == padam::DType::float32)) {
    throw std::invalid_argument("a gradient of dtype " + std::to_string(grad_dtype) +
                                " beside a parameter of dtype " + std::to_string(param_dtype) +
                                " is not supported");
  }
  for (std::int64_t tensor = 0; tensor < table.num_tensors; ++tensor) {
    const std::int64_t row = table.rows[tensor];
    if (row < 0 || row >= table.num_rows) {
      throw std::invalid_argument("rows: " + std::to_string(row) + " is outside [0, " +
                                  std::to_string(table.num_rows) + ")");
    }
  }

  const py::gil_scoped_release release;
  padam::step_cpu(table, num_threads, simd_level);
}

// Adds 1 to each float32 counter and returns the smallest and the largest new value.
py::tuple increment_steps(const py::buffer& addresses) {
  const py::buffer_info info = addresses.request();
  const auto* counters = items<std::int64_t>(info, "addresses", info.size);
  float smallest = 0.0f;
  float largest = 0.0f;
  for (py::ssize_t i = 0; i < info.size; ++i) {
    float* counter = reinterpret_cast<float*>(static_cast<std::uintptr_t>(counters[i]));
    const float value = *counter += 1.0f;
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
  module.def("increment_steps", &increment_steps, py::arg("addresses"));
  py::class_<padam::Gatherer>(module, "Gatherer")
      .def(py::init<const py::object&>(), py::arg("tensor_class"))
      .def("gather", &padam::Gatherer::gather, py::arg("param_lists"), py::arg("then"))
      .def("state_addresses", &padam::Gatherer::state_addresses, py::arg("states"),
           py::arg("keys"));
  module.def("available_simd_levels", &padam::available_simd_levels);
#if defined(_OPENMP)
  module.attr("openmp") = true;
#else
  module.attr("openmp") = false;
#endif
  module.attr("compiler") = PADAM_COMPILER;
}
