// Signatures from the codes that Python uses, and their names for messages.
#pragma once

#include <string>
#include <vector>

#include "launch_table.h"

namespace padam {

// Throws std::invalid_argument, which names the slot and its value, for a code that is not a dtype,
// an absent slot that every step needs, slots that do not go together, and a dtype that no codec
// converts to compute_dtype.
Signature make_signature(const std::vector<int>& slot_dtypes, int compute_dtype);

// One of the codes by itself, under its name. Throws std::invalid_argument.
DType make_dtype(int code, const std::string& name);
DType make_compute_dtype(int code);

// As in "param bfloat16, grad float32, ..., in float32".
std::string name_of(const Signature& signature);

}  // namespace padam
