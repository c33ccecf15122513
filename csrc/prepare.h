// The prepare launch: one small launch in a step that works out what only the device knows, from
// the norm of all gradients to the step counts. What one thread of it does, for host and device.
//
// Every block adds up all sums for itself, in the same order, and so arrives at the same control;
// tensors and rows are shared out among all threads. In double precision throughout.
#pragma once

#include <cmath>
#include <cstdint>

#include "device_table.h"

namespace padam {

// The order is that of options.py's BIAS_CORRECTIONS.
enum class BiasCorrection : std::int64_t { none, authors, adam };

// One element of float32 or float64 in the device's memory, or null.
struct Scalar {
  void* address;
  bool is_double;
};

// What a step depends on besides its table. Null means absent, or not asked for.
struct PrepareInputs {
  const double* sums;  // [num_sums], of the squares of all gradients
  std::int64_t num_sums;
  Scalar grad_scale;
  Scalar found_inf;
  Scalar norm;            // is written
  std::int64_t* skipped;  // is added to
};

PADAM_INLINE double read(Scalar from) {
  return from.is_double ? *static_cast<const double*>(from.address)
                        : static_cast<double>(*static_cast<const float*>(from.address));
}

PADAM_INLINE void write(Scalar to, double value) {
  if (to.is_double) {
    *static_cast<double*>(to.address) = value;
  } else {
    *static_cast<float*>(to.address) = static_cast<float>(value);
  }
}

// A thread's share of the sum of all sums.
PADAM_INLINE double sum_of_sums_thread(const PrepareInputs& inputs, int thread) {
  double sum = 0.0;
  for (std::int64_t i = thread; i < inputs.num_sums; i += kThreads) sum += inputs.sums[i];
  return sum;
}

PADAM_INLINE double clip_factor(double norm, const Limits& limits) {
  const double clip = limits.max_grad_norm / (norm + 1e-6);
  return clip > 1.0 ? 1.0 : clip;  // NaN stays
}

PADAM_INLINE Control control_of(const PrepareInputs& inputs, double grad_scale, double norm,
                                const Limits& limits) {
  const bool with_norm = inputs.sums != nullptr;
  Control control = {1.0 / grad_scale, 0.0};
  if (with_norm && limits.max_grad_norm < HUGE_VAL) {
    control.grad_factor *= clip_factor(norm, limits);
  }
  const bool found_inf = inputs.found_inf.address != nullptr && read(inputs.found_inf) != 0.0;
  const bool is_finite = norm == norm && !is_infinite(norm);
  const bool bad_norm = with_norm && limits.skip_nonfinite != 0.0 && !is_finite;
  if (found_inf || bad_norm) control.skip = 1.0;
  return control;
}

// 1 - beta^step, without the digits that the difference of two numbers near 1 would lose.
PADAM_INLINE double one_minus_power(double beta, double step) {
  return beta == 0.0 ? 1.0 : -expm1(step * log(beta));
}

// A factor of zero gives zero, even if the value is infinite or NaN: the option is not used.
PADAM_INLINE double times(double factor, double value) {
  return factor == 0.0 ? 0.0 : factor * value;
}

// Fills in what is missing of a row for update number `step`.
PADAM_INLINE void complete_row(Constants<double>& row, const RowSource& source, double step) {
  const auto value = [](double known, std::int64_t address, std::int64_t dtype) {
    const bool is_double = dtype == static_cast<std::int64_t>(DType::float64);
    return address == 0 ? known : read({pointer<void>(address), is_double});
  };
  const double lr = value(source.lr, source.lr_address, source.lr_dtype);
  const double weight_decay =
      value(source.weight_decay, source.weight_decay_address, source.weight_decay_dtype);
  double c = 1.0;
  double r = 1.0;
  const auto bias_correction = static_cast<BiasCorrection>(source.bias_correction);
  if (bias_correction != BiasCorrection::none) {
    const double first = one_minus_power(row.beta1, step);
    const double root_of_second = sqrt(one_minus_power(row.beta2, step));
    const bool adam = bias_correction == BiasCorrection::adam;
    c = (adam ? 1.0 : root_of_second) / first;
    r = adam ? root_of_second : 1.0;
  }
  row.step_size = lr * c;
  row.coupled_decay = times(source.coupled_factor, weight_decay);
  row.decoupled_decay = times(source.decoupled_factor, lr * weight_decay);
  row.inverse_correction = source.maximum_scale / r;
  row.step = step;
}

// What one thread of one block does once `total`, the sum of all sums, is known.
PADAM_INLINE void prepare_thread(const DeviceTable& table, const PrepareInputs& inputs,
                                 double total, std::int64_t block, std::int64_t num_blocks,
                                 int thread) {
  const double grad_scale = inputs.grad_scale.address == nullptr ? 1.0 : read(inputs.grad_scale);
  const double norm = sqrt(total) / grad_scale;
  const Control control = control_of(inputs, grad_scale, norm, *table.limits);
  if (block == 0 && thread == 0) {
    *table.prepared_control = control;
    if (inputs.norm.address != nullptr) write(inputs.norm, norm);
    if (inputs.skipped != nullptr) *inputs.skipped += static_cast<std::int64_t>(control.skip);
  }

  // A row that needs its tensor's counter has that tensor's index: the same thread counts first.
  const std::int64_t num_counters = table.counts_on_device ? table.num_tensors : 0;
  const std::int64_t stride = num_blocks * kThreads;
  for (std::int64_t i = block * kThreads + thread; i < num_counters || i < table.num_late_rows;
       i += stride) {
    double count = 0.0;
    if (i < num_counters) {
      float& counter = *pointer<float>(table.counters[i]);
      counter += static_cast<float>(1.0 - control.skip);
      count = static_cast<double>(counter);
    }
    if (i < table.num_late_rows) {
      const RowSource& source = table.row_sources[i];
      complete_row(table.constants[i], source, source.step < 0.0 ? count : source.step);
    }
  }
}

// Blocks of the launch: few, since each adds up all sums.
inline std::int64_t num_prepare_blocks(const DeviceTable& table) {
  constexpr std::int64_t kMost = 32;
  const std::int64_t num_counters = table.counts_on_device ? table.num_tensors : 0;
  const std::int64_t items =
      num_counters > table.num_late_rows ? num_counters : table.num_late_rows;
  const std::int64_t blocks = (items + kThreads - 1) / kThreads;
  return blocks < 1 ? 1 : (blocks > kMost ? kMost : blocks);
}

}  // namespace padam
