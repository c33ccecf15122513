// The Python module padam_ext._native: checks the arrays, lets go of the GIL, calls the kernel.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "compiled_signatures.h"
#include "gather.h"
#include "launch_table.h"
#include "padam_cpu.h"
#include "padam_cuda.h"
#include "signature.h"

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

template <typename T>
T at_address(std::uintptr_t address) {
  return reinterpret_cast<T>(address);
}

padam::DeviceTable device_table(std::uintptr_t addresses, std::uintptr_t numels,
                                std::uintptr_t salts, std::uintptr_t rows, std::uintptr_t constants,
                                std::uintptr_t control, std::uintptr_t limits,
                                std::uintptr_t prepared_control, std::uintptr_t row_sources,
                                std::uintptr_t counters, std::uintptr_t chunk_tensors,
                                std::uintptr_t chunk_first_blocks, std::int64_t num_tensors,
                                std::int64_t num_chunks, std::int64_t blocks_per_chunk,
                                std::uintptr_t partial_sums, std::int64_t num_late_rows,
                                bool counts_on_device, const std::vector<int>& slot_dtypes,
                                int compute_dtype) {
  padam::DeviceTable table;
  table.addresses = at_address<const std::int64_t*>(addresses);
  table.numels = at_address<const std::int64_t*>(numels);
  table.salts = at_address<const std::int64_t*>(salts);
  table.rows = at_address<const std::int64_t*>(rows);
  table.constants = at_address<padam::Constants<double>*>(constants);
  table.control = at_address<const padam::Control*>(control);
  table.limits = at_address<const padam::Limits*>(limits);
  table.prepared_control = at_address<padam::Control*>(prepared_control);
  table.row_sources = at_address<const padam::RowSource*>(row_sources);
  table.counters = at_address<const std::int64_t*>(counters);
  table.chunk_tensors = at_address<const std::int64_t*>(chunk_tensors);
  table.chunk_first_blocks = at_address<const std::int64_t*>(chunk_first_blocks);
  table.num_tensors = num_tensors;
  table.num_chunks = num_chunks;
  table.blocks_per_chunk = blocks_per_chunk;
  table.partial_sums = at_address<double*>(partial_sums);
  table.num_late_rows = num_late_rows;
  table.counts_on_device = counts_on_device;
  table.signature = padam::make_signature(slot_dtypes, compute_dtype);
  padam::with_types(table.signature, [](auto) {});  // throws if no code is compiled for it
  return table;
}

padam::PrepareInputs prepare_inputs(std::uintptr_t sums, std::int64_t num_sums,
                                    std::uintptr_t grad_scale, bool grad_scale_is_double,
                                    std::uintptr_t found_inf, bool found_inf_is_double,
                                    std::uintptr_t norm, bool norm_is_double,
                                    std::uintptr_t skipped) {
  return {at_address<const double*>(sums),
          num_sums,
          {at_address<void*>(grad_scale), grad_scale_is_double},
          {at_address<void*>(found_inf), found_inf_is_double},
          {at_address<void*>(norm), norm_is_double},
          at_address<std::int64_t*>(skipped)};
}

void step_cpu(const py::buffer& addresses, const py::buffer& numels, const py::buffer& salts,
              const py::buffer& rows, const py::buffer& constants,
              const std::vector<int>& slot_dtypes, int compute_dtype, double grad_factor,
              int num_threads, const std::string& simd_level) {
  const py::buffer_info numels_info = numels.request();
  const py::buffer_info addresses_info = addresses.request();
  const py::buffer_info salts_info = salts.request();
  const py::buffer_info rows_info = rows.request();
  const py::buffer_info constants_info = constants.request();
  constexpr py::ssize_t kFields = sizeof(padam::Constants<double>) / sizeof(double);

  padam::LaunchTable table;
  table.num_tensors = numels_info.size;
  table.numels = items<std::int64_t>(numels_info, "numels", table.num_tensors);
  table.addresses =
      items<std::int64_t>(addresses_info, "addresses", padam::kSlots * table.num_tensors);
  table.salts = items<std::int64_t>(salts_info, "salts", table.num_tensors);
  table.rows = items<std::int64_t>(rows_info, "rows", table.num_tensors);
  table.num_rows = constants_info.size / kFields;
  table.constants = reinterpret_cast<const padam::Constants<double>*>(
      items<double>(constants_info, "constants", table.num_rows * kFields));
  table.grad_factor = grad_factor;
  table.signature = padam::make_signature(slot_dtypes, compute_dtype);
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
      throw std::invalid_argument("constants: root " + std::to_string(root) + " is not a Root");
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
  table.addresses =
      items<std::int64_t>(addresses_info, "addresses", padam::kSlots * table.num_tensors);
  table.signature.slots[static_cast<int>(padam::Slot::grad)] =
      padam::make_dtype(grad_dtype, "grad_dtype");

  const py::gil_scoped_release release;
  return padam::sum_of_squares_cpu(table, num_threads, simd_level);
}

// Elements in a block of a launch on a device.
std::int64_t block_of(int compute_dtype) {
  return padam::block_of(padam::make_compute_dtype(compute_dtype));
}

// Adds to each float32 counter. Returns the new values, float32: one if they are all the same.
py::bytes add_to_steps(const py::buffer& addresses, float amount) {
  const py::buffer_info info = addresses.request();
  const auto* counters = items<std::int64_t>(info, "addresses", info.size);
  std::vector<float> values(info.size);
  bool all_the_same = true;
  for (py::ssize_t i = 0; i < info.size; ++i) {
    float* counter = reinterpret_cast<float*>(static_cast<std::uintptr_t>(counters[i]));
    values[i] = *counter += amount;
    all_the_same = all_the_same && values[i] == values[0];
  }
  const std::size_t count = all_the_same && !values.empty() ? 1 : values.size();
  return {reinterpret_cast<const char*>(values.data()), count * sizeof(float)};
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native kernels of padam_ext, called with addresses; see launch_table.py.";
  module.def("step_cpu", &step_cpu, py::arg("addresses"), py::arg("numels"), py::arg("salts"),
             py::arg("rows"), py::arg("constants"), py::arg("slot_dtypes"),
             py::arg("compute_dtype"), py::arg("grad_factor"), py::arg("num_threads"),
             py::arg("simd_level"));
  module.def("sum_of_squares_cpu", &sum_of_squares_cpu, py::arg("addresses"), py::arg("numels"),
             py::arg("grad_dtype"), py::arg("num_threads"), py::arg("simd_level"));
  module.def("add_to_steps", &add_to_steps, py::arg("addresses"), py::arg("amount"));
  py::class_<padam::Reading>(module, "Reading")
      .def("same", &padam::Reading::same, py::arg("other"))
      .def("pieces", &padam::Reading::pieces)
      .def("plain", &padam::Reading::plain);
  py::class_<padam::Gatherer>(module, "Gatherer")
      .def(py::init<const py::object&, const py::object&, py::object>(), py::arg("tensor_class"),
           py::arg("parameter_class"), py::arg("unwrap"))
      .def("gather", &padam::Gatherer::gather, py::arg("selection"), py::arg("dtensor"))
      .def("read_states", &padam::Gatherer::read_states, py::arg("states"), py::arg("params"),
           py::arg("keys"), py::arg("dtensor"));

  // A table in a device's memory, see device_table.py.
  py::class_<padam::DeviceTable>(module, "DeviceTable")
      .def(py::init(&device_table), py::kw_only(), py::arg("addresses"), py::arg("numels"),
           py::arg("salts"), py::arg("rows"), py::arg("constants"), py::arg("control"),
           py::arg("limits"), py::arg("prepared_control"), py::arg("row_sources"),
           py::arg("counters"), py::arg("chunk_tensors"), py::arg("chunk_first_blocks"),
           py::arg("num_tensors"), py::arg("num_chunks"), py::arg("blocks_per_chunk"),
           py::arg("partial_sums"), py::arg("num_late_rows"), py::arg("counts_on_device"),
           py::arg("slot_dtypes"), py::arg("compute_dtype"));
  py::class_<padam::PrepareInputs>(module, "PrepareInputs")
      .def(py::init(&prepare_inputs), py::kw_only(), py::arg("sums"), py::arg("num_sums"),
           py::arg("grad_scale"), py::arg("grad_scale_is_double"), py::arg("found_inf"),
           py::arg("found_inf_is_double"), py::arg("norm"), py::arg("norm_is_double"),
           py::arg("skipped"));
  module.def("block_of", &block_of, py::arg("compute_dtype"));
  module.def("step_on_host", &padam::step_on_host, py::arg("table"),
             py::call_guard<py::gil_scoped_release>());
  module.def("sum_of_squares_on_host", &padam::sum_of_squares_on_host, py::arg("table"),
             py::call_guard<py::gil_scoped_release>());
  module.def("prepare_on_host", &padam::prepare_on_host, py::arg("table"), py::arg("inputs"),
             py::call_guard<py::gil_scoped_release>());
#if defined(PADAM_CUDA_ARCHS)
  module.def("step_cuda", &padam::step_cuda, py::arg("table"), py::arg("device"), py::arg("stream"),
             py::call_guard<py::gil_scoped_release>());
  module.def("sum_of_squares_cuda", &padam::sum_of_squares_cuda, py::arg("table"),
             py::arg("device"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
  module.def("prepare_cuda", &padam::prepare_cuda, py::arg("table"), py::arg("inputs"),
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
