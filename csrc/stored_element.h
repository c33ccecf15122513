// What all slots store for one element, and how the values of the arithmetic come out of it and go
// back, in registers.
#pragma once

#include "codecs.h"
#include "compiled_signatures.h"
#include "packed_states.h"
#include "padam_math.h"
#include "random_bits.h"

namespace padam {

template <typename Types>
struct Stored {
  typename Types::template Stored<Slot::param> param;
  typename Types::template Stored<Slot::grad> grad;
  typename Types::template Stored<Slot::exp_avg> exp_avg;
  typename Types::template Stored<Slot::exp_avg_sq> exp_avg_sq;
  typename Types::template Stored<Slot::max_exp_avg_sq> max_exp_avg_sq;
  typename Types::template Stored<Slot::packed_mvh> packed_mvh;
  typename Types::template Stored<Slot::packed_mv> packed_mv;
  typename Types::template Stored<Slot::param_low> param_low;
};

// The part of a slot.
template <Slot slot, typename Stored>
PADAM_INLINE auto& part(Stored& stored) {
  if constexpr (slot == Slot::param) return stored.param;
  if constexpr (slot == Slot::grad) return stored.grad;
  if constexpr (slot == Slot::exp_avg) return stored.exp_avg;
  if constexpr (slot == Slot::exp_avg_sq) return stored.exp_avg_sq;
  if constexpr (slot == Slot::max_exp_avg_sq) return stored.max_exp_avg_sq;
  if constexpr (slot == Slot::packed_mvh) return stored.packed_mvh;
  if constexpr (slot == Slot::packed_mv) return stored.packed_mv;
  if constexpr (slot == Slot::param_low) return stored.param_low;
}

// The values of an element.
template <typename Types>
PADAM_INLINE void decode(const Stored<Types>& stored, Element<typename Types::T>& element) {
  using T = typename Types::T;
  T& x = at(element, Slot::param);
  T& m = at(element, Slot::exp_avg);
  T& v = at(element, Slot::exp_avg_sq);
  T& h = at(element, Slot::max_exp_avg_sq);
  x = load(stored.param);
  if constexpr (Types::template has<Slot::param_low>) x = load(x, stored.param_low);
  at(element, Slot::grad) = load(stored.grad);
  if constexpr (Types::template has<Slot::packed_mvh>) {
    unpack_mvh(stored.packed_mvh, m, v, h);
  } else if constexpr (Types::template has<Slot::packed_mv>) {
    unpack_mv(stored.packed_mv, m, v);
  } else {
    m = load(stored.exp_avg);
    v = load(stored.exp_avg_sq);
    if constexpr (Types::template has<Slot::max_exp_avg_sq>) h = load(stored.max_exp_avg_sq);
  }
}

// Stores them, but for the gradient. `place` and `key` are those of random_bits.h.
template <typename Types>
PADAM_INLINE void encode(const Element<typename Types::T>& element, std::uint32_t place,
                         std::uint32_t key, Stored<Types>& stored) {
  const auto x = at(element, Slot::param);
  const auto m = at(element, Slot::exp_avg);
  const auto v = at(element, Slot::exp_avg_sq);
  const std::uint32_t random = Types::draws ? random_word(place, key) : 0;
  if constexpr (Types::template has<Slot::param_low>) {
    store(x, stored.param, stored.param_low);
  } else if constexpr (Types::is_stochastic) {
    store(x, random_for_x(random), stored.param);
  } else {
    store(x, stored.param);
  }
  if constexpr (Types::template has<Slot::packed_mvh>) {
    stored.packed_mvh = pack_mvh(m, v, at(element, Slot::max_exp_avg_sq), random_for_m(random),
                                 random_for_v(random));
  } else if constexpr (Types::template has<Slot::packed_mv>) {
    stored.packed_mv = pack_mv(m, v, random_for_m(random), random_for_v(random));
  } else {
    store(m, stored.exp_avg);
    store(v, stored.exp_avg_sq);
    if constexpr (Types::template has<Slot::max_exp_avg_sq>) {
      store(at(element, Slot::max_exp_avg_sq), stored.max_exp_avg_sq);
    }
  }
}

}  // namespace padam
