// The launch table: everything one fused step needs, as plain arrays.
//
// Python (padam_ext/launch_table.py) fills it, a kernel walks it. No torch type appears here:
// a tensor is an address and a length, so one build of this module serves every torch version.
#pragma once

#include <cstdint>

namespace padam {

// The codes that Python uses. A slot that a table does not have is absent. The last one is of
// parameters that are rounded stochastically.
enum class DType : int {
  absent = -1,
  float32,
  float64,
  bfloat16,
  float16,
  int32,
  int16,
  stochastic_bfloat16,
  count
};

// Rows of the address matrix; order and names are those of slots.py's SLOTS.
enum class Slot : int {
  param,
  grad,
  exp_avg,
  exp_avg_sq,
  max_exp_avg_sq,
  packed_mvh,
  packed_mv,
  param_low,
  count
};

constexpr int kSlots = static_cast<int>(Slot::count);
// The first of them are the values of the arithmetic, too. A packed slot stores several of them.
constexpr int kValues = static_cast<int>(Slot::packed_mvh);

constexpr const char* kSlotNames[kSlots] = {
    "param",          "grad",       "exp_avg",   "exp_avg_sq",
    "max_exp_avg_sq", "packed_mvh", "packed_mv", "param_low",
};

// How all tensors of one table are stored, slot by slot, and what their update is computed in:
// float32 or float64. AMSGrad is the presence of max_exp_avg_sq or packed_mvh.
struct Signature {
  DType slots[kSlots];
  DType compute;

  DType of(Slot slot) const { return slots[static_cast<int>(slot)]; }
  bool has(Slot slot) const { return of(slot) != DType::absent; }
};

// What the update of an element needs to know, the same for all elements of a param group at one
// step count. Fields and their meaning are those of constants.py's Constants; the table has them in
// double, so that float64 parameters lose nothing.
template <typename T>
struct Constants {
  T step_size;
  T beta1;
  T one_minus_beta1;
  T beta2;
  T one_minus_beta2_high;
  T one_minus_beta2_low;
  T eps;
  T coupled_decay;
  T decoupled_decay;
  T inverse_correction;
  T exponent;
  T exponent_high;
  T exponent_low;
  T second_moment;
  T root;
  T seed;
  T step;
};

struct LaunchTable {
  std::int64_t num_tensors;
  const std::int64_t* addresses;  // [kSlots][num_tensors], 0 where a slot is absent
  const std::int64_t* numels;     // [num_tensors], in real numbers: a complex element counts twice
  const std::int64_t* salts;      // [num_tensors], of random numbers
  const std::int64_t* rows;       // [num_tensors], index into constants
  std::int64_t num_rows;
  const Constants<double>* constants;  // [num_rows]
  double grad_factor;                  // what every gradient is multiplied by in this step
  Signature signature;

  std::int64_t address(Slot slot, std::int64_t tensor) const {
    return addresses[static_cast<std::int64_t>(slot) * num_tensors + tensor];
  }
};

}  // namespace padam
