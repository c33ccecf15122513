// The signatures that there is device code for.
#pragma once

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "codecs.h"
#include "padam_math.h"
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

  static constexpr bool is_packed = has<Slot::packed_mvh> || has<Slot::packed_mv>;
  static constexpr bool is_stochastic = std::is_same_v<Stored<Slot::param>, stochastic_bfloat16>;
  static constexpr bool draws = is_packed || is_stochastic;
  static constexpr Maximum maximum = has<Slot::packed_mvh>       ? Maximum::coded
                                     : has<Slot::max_exp_avg_sq> ? Maximum::exact
                                                                 : Maximum::none;
};

template <typename... Each>
struct List {};

template <typename... Lists>
struct Joined;
template <typename... Each>
struct Joined<List<Each...>> {
  using Type = List<Each...>;
};
template <typename... First, typename... Second, typename... Rest>
struct Joined<List<First...>, List<Second...>, Rest...> {
  using Type = typename Joined<List<First..., Second...>, Rest...>::Type;
};

// Those of one kind of parameter and gradient, with moments in each of the ways there are.
using A = Absent;
using Word = std::uint32_t;
template <typename T, typename Param, typename Grad, typename Low = A>
using OfFloats = List<Types<T, Param, Grad, T, T, A, A, A, Low>,  //
                      Types<T, Param, Grad, T, T, T, A, A, Low>>;
template <typename Param, typename Grad, typename Low = A>
using OfAll = typename Joined<OfFloats<float, Param, Grad, Low>,
                              List<Types<float, Param, Grad, A, A, A, Word, A, Low>,
                                   Types<float, Param, Grad, A, A, A, A, Word, Low>>>::Type;
template <typename Param, typename Low = A>
using OfHalf = typename Joined<OfAll<Param, Param, Low>, OfAll<Param, float, Low>>::Type;

// One kernel for each of these.
using CompiledSignatures =
    typename Joined<OfAll<float, float>, OfFloats<double, double, double>, OfHalf<bfloat16>,
                    OfHalf<float16>, OfAll<stochastic_bfloat16, bfloat16>,
                    OfAll<stochastic_bfloat16, float>, OfHalf<bfloat16, std::uint16_t>>::Type;

template <typename Stored>
constexpr DType kDTypeOf = DType::absent;
template <>
inline constexpr DType kDTypeOf<float> = DType::float32;
template <>
inline constexpr DType kDTypeOf<double> = DType::float64;
template <>
inline constexpr DType kDTypeOf<bfloat16> = DType::bfloat16;
template <>
inline constexpr DType kDTypeOf<float16> = DType::float16;
template <>
inline constexpr DType kDTypeOf<std::uint32_t> = DType::int32;
template <>
inline constexpr DType kDTypeOf<std::uint16_t> = DType::int16;
template <>
inline constexpr DType kDTypeOf<stochastic_bfloat16> = DType::stochastic_bfloat16;

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
