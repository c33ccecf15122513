#include "signature.h"

#include <stdexcept>

#include "codecs.h"

namespace padam {

namespace {

// In the order of DType.
const char* const kDTypeNames[] = {"float32", "float64", "bfloat16",           "float16",
                                   "int32",   "int16",   "stochastic_bfloat16"};

std::string name_of(DType dtype) {
  return dtype == DType::absent ? "absent" : kDTypeNames[static_cast<int>(dtype)];
}

[[noreturn]] void refuse(const std::string& what, int code, const std::string& why) {
  throw std::invalid_argument(what + ": " + std::to_string(code) + " " + why);
}

}  // namespace

DType make_dtype(int code, const std::string& name) {
  if (code < 0 || code >= static_cast<int>(DType::count)) refuse(name, code, "is not a dtype");
  return static_cast<DType>(code);
}

DType make_compute_dtype(int code) {
  const DType dtype = make_dtype(code, "compute_dtype");
  if (dtype != DType::float32 && dtype != DType::float64) {
    refuse("compute_dtype", code, "is neither float32 (0) nor float64 (1)");
  }
  return dtype;
}

namespace {

// Throws unless the moments are held in exactly one way.
void check_moments(const Signature& signature) {
  const int ways = signature.has(Slot::exp_avg) + signature.has(Slot::packed_mvh) +
                   signature.has(Slot::packed_mv);
  const bool is_float = signature.has(Slot::exp_avg);
  const bool has_max = signature.has(Slot::max_exp_avg_sq);
  if (ways != 1 || signature.has(Slot::exp_avg_sq) != is_float || (has_max && !is_float)) {
    throw std::invalid_argument(
        "slot_dtypes: every step needs exp_avg and exp_avg_sq, or one packed slot in their place; "
        "got " +
        name_of(signature));
  }
}

}  // namespace

Signature make_signature(const std::vector<int>& slot_dtypes, int compute_dtype) {
  if (slot_dtypes.size() != kSlots) {
    throw std::invalid_argument("slot_dtypes: expected " + std::to_string(kSlots) + ", got " +
                                std::to_string(slot_dtypes.size()));
  }
  Signature signature;
  signature.compute = make_compute_dtype(compute_dtype);
  for (int slot = 0; slot < kSlots; ++slot) {
    const int code = slot_dtypes[slot];
    const std::string name = kSlotNames[slot];
    if (code == static_cast<int>(DType::absent)) {
      if (slot == static_cast<int>(Slot::param) || slot == static_cast<int>(Slot::grad)) {
        refuse(name, code, "says that it is absent, but every step needs it");
      }
      signature.slots[slot] = DType::absent;
      continue;
    }
    signature.slots[slot] = make_dtype(code, name);
    if (!has_codec(static_cast<Slot>(slot), signature.slots[slot], signature.compute)) {
      refuse(name, code,
             "(" + name_of(signature.slots[slot]) + ") has no codec to " +
                 name_of(signature.compute) + ", which the step is computed in");
    }
  }
  check_moments(signature);
  if (signature.has(Slot::param_low) && signature.of(Slot::param) != DType::bfloat16) {
    throw std::invalid_argument("param_low: it goes with bfloat16 parameters; got " +
                                name_of(signature));
  }
  return signature;
}

std::string name_of(const Signature& signature) {
  std::string name;
  for (int slot = 0; slot < kSlots; ++slot) {
    if (signature.slots[slot] == DType::absent) continue;
    name += std::string(kSlotNames[slot]) + " " + name_of(signature.slots[slot]) + ", ";
  }
  return name + "in " + name_of(signature.compute);
}

}  // namespace padam
