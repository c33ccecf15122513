// The signatures that there is device code for.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "codecs.h"
#include "signature.h"

namespace padam {

// Stands for the type of an absent slot.
struct Absent {};

// A signature as types. T is that of the arithmetic.
template <typename ParamType, typename GradType, typename ExpAvgType, typename ExpAvgSqType,
          typename MaxExpAvgSqType, typename ComputeType>
struct Types {
  using Param = ParamType;
  using Grad = GradType;
  using ExpAvg = ExpAvgType;
  using ExpAvgSq = ExpAvgSqType;
  using MaxExpAvgSq = MaxExpAvgSqType;
  using T = ComputeType;
  static constexpr bool amsgrad = !std::is_same_v<MaxExpAvgSq, Absent>;
};

template <typename... Each>
struct List {};

// One kernel for each line.
using CompiledSignatures = List<  //
    Types<float, float, float, float, Absent, float>,
    Types<float, float, float, float, float, float>,
    Types<double, double, double, double, Absent, double>,
    Types<double, double, double, double, double, double>,
    Types<bfloat16, bfloat16, float, float, Absent, float>,
    Types<bfloat16, bfloat16, float, float, float, float>,
    Types<bfloat16, float, float, float, Absent, float>,
    Types<bfloat16, float, float, float, float, float>,
    Types<float16, float16, float, float, Absent, float>,
    Types<float16, float16, float, float, float, float>,
    Types<float16, float, float, float, Absent, float>,
    Types<float16, float, float, float, float, float>>;

template <typename Stored>
constexpr DType kDTypeOf = DType::absent;
template <>
constexpr DType kDTypeOf<float> = DType::float32;
template <>
constexpr DType kDTypeOf<double> = DType::float64;
template <>
constexpr DType kDTypeOf<bfloat16> = DType::bfloat16;
template <>
constexpr DType kDTypeOf<float16> = DType::float16;

template <typename Each>
bool is_signature(const Signature& signature) {
  return signature.of(Slot::param) == kDTypeOf<typename Each::Param> &&
         signature.of(Slot::grad) == kDTypeOf<typename Each::Grad> &&
         signature.of(Slot::exp_avg) == kDTypeOf<typename Each::ExpAvg> &&
         signature.of(Slot::exp_avg_sq) == kDTypeOf<typename Each::ExpAvgSq> &&
         signature.of(Slot::max_exp_avg_sq) == kDTypeOf<typename Each::MaxExpAvgSq> &&
         signature.compute == kDTypeOf<typename Each::T>;
}

// Calls visit(Types<...>()) with the types of a signature. Throws std::invalid_argument where no
// code was compiled for it.
template <typename... Each, typename Visit>
void with_types(List<Each...>, const Signature& signature, const Visit& visit) {
  const bool found = ((is_signature<Each>(signature) && (visit(Each()), true)) || ...);
  if (!found) {
    throw std::invalid_argument("no kernel is compiled for the signature " + name_of(signature));
  }
}

template <typename Visit>
void with_types(const Signature& signature, const Visit& visit) {
  with_types(CompiledSignatures(), signature, visit);
}

}  // namespace padam
