// The signatures that there is device code for.
#pragma once

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "codecs.h"
#include "signature.h"

namespace padam {

// Stands for the type of an absent slot.
struct Absent {};

// The type at an index, Absent beyond the end.
template <int index, typename... Each>
struct TypeAt {
  using Type = Absent;
};
template <typename First, typename... Rest>
struct TypeAt<0, First, Rest...> {
  using Type = First;
};
template <int index, typename First, typename... Rest>
struct TypeAt<index, First, Rest...> : TypeAt<index - 1, Rest...> {};

// A signature as types: that of the arithmetic, then what each slot is stored as, in their order.
// Those at the end that are left out are absent.
template <typename ComputeType, typename... StoredTypes>
struct Types {
  using T = ComputeType;
  template <Slot slot>
  using Stored = typename TypeAt<static_cast<int>(slot), StoredTypes...>::Type;
  template <Slot slot>
  static constexpr bool has = !std::is_same_v<Stored<slot>, Absent>;
};

template <typename... Each>
struct List {};

// One kernel for each of these.
using CompiledSignatures = List<  //
    Types<float, float, float, float, float>, Types<float, float, float, float, float, float>,
    Types<double, double, double, double, double>,
    Types<double, double, double, double, double, double>,
    Types<float, bfloat16, bfloat16, float, float>,
    Types<float, bfloat16, bfloat16, float, float, float>,
    Types<float, bfloat16, float, float, float>, Types<float, bfloat16, float, float, float, float>,
    Types<float, float16, float16, float, float>,
    Types<float, float16, float16, float, float, float>, Types<float, float16, float, float, float>,
    Types<float, float16, float, float, float, float>>;

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

// As an argument: the indices of all slots.
using EachSlot = std::make_integer_sequence<int, kSlots>;

template <typename Each, int... slots>
bool is_signature(const Signature& signature, std::integer_sequence<int, slots...>) {
  return signature.compute == kDTypeOf<typename Each::T> &&
         ((signature.slots[slots] ==
           kDTypeOf<typename Each::template Stored<static_cast<Slot>(slots)>>) &&
          ...);
}

// Calls visit(Types<...>()) with the types of a signature. Throws std::invalid_argument where no
// code was compiled for it.
template <typename... Each, typename Visit>
void with_types(List<Each...>, const Signature& signature, const Visit& visit) {
  const bool found = ((is_signature<Each>(signature, EachSlot()) && (visit(Each()), true)) || ...);
  if (!found) {
    throw std::invalid_argument("no kernel is compiled for the signature " + name_of(signature));
  }
}

template <typename Visit>
void with_types(const Signature& signature, const Visit& visit) {
  with_types(CompiledSignatures(), signature, visit);
}

}  // namespace padam
