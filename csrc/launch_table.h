// The launch table: everything one fused step needs, as plain arrays.
//
// Python (padam_ext/launch_table.py) fills it, a kernel walks it. No torch type appears here:
// a tensor is an address and a length, so one build of this module serves every torch version.
#pragma once

#include <cstdint>

namespace padam {

// The order is that of grouping.py's PARAM_DTYPES.
enum class DType : int { float32, float64, bfloat16, float16 };

// Rows of the address matrix; order and names are those of launch_table.py's SLOTS.
enum class Slot : int { param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, count };

// One row of options: a param group at one step count. Field order is that of launch_table.py's
// HyperparameterRow. Kept in double so that float64 parameters lose nothing.
struct Hyperparameters {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double partial;
  double step_correction;         // c of semantics: multiplies the step
  double denominator_correction;  // r of semantics: divides the root of the second moment
  double amsgrad;                 // the last three are 0 or 1
  double decoupled_weight_decay;
  double maximize;
};

struct LaunchTable {
  std::int64_t num_tensors;
  const std::int64_t* addresses;  // [Slot::count][num_tensors], 0 where a slot is not used
  const std::int64_t* numels;     // [num_tensors], in real numbers: a complex element counts twice
  const std::int64_t* rows;       // [num_tensors], index into hyperparameters
  std::int64_t num_rows;
  const Hyperparameters* hyperparameters;  // [num_rows]
  DType param_dtype;
  DType grad_dtype;

  std::int64_t address(Slot slot, std::int64_t tensor) const {
    return addresses[static_cast<std::int64_t>(slot) * num_tensors + tensor];
  }
};

}  // namespace padam
