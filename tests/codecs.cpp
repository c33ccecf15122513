// The codecs of csrc for numbers given one by one: a library that test_packed_codecs.py compiles.
#include "codecs.h"
#include "packed_states.h"
#include "random_bits.h"

using padam::float_of;

namespace {

struct Moments {
  float m = 0.0f;
  float v = 0.0f;
  float h = 0.0f;
};

}  // namespace

extern "C" {

void pack(const std::uint32_t* old, const std::uint32_t* m_bits, const std::uint32_t* v_bits,
          const std::uint32_t* for_m, const std::uint32_t* for_v, std::uint32_t* mvh,
          std::uint32_t* mv, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float m = float_of(m_bits[i]);
    const float v = float_of(v_bits[i]);
    Moments before;
    padam::unpack_mvh(old[i], before.m, before.v, before.h);
    const float reached = padam::upper_end(v);
    const float larger = reached > before.h ? reached : before.h;
    mvh[i] = padam::pack_mvh(m, v, reached == reached ? larger : reached, for_m[i], for_v[i]);
    mv[i] = padam::pack_mv(m, v, for_m[i], for_v[i]);
  }
}

void unpack(const std::uint32_t* words, int amsgrad, float* m, float* v, float* h,
            std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (amsgrad != 0) {
      padam::unpack_mvh(words[i], m[i], v[i], h[i]);
    } else {
      padam::unpack_mv(words[i], m[i], v[i]);
      h[i] = v[i];
    }
  }
}

void round_stochastically(const float* x, const std::uint32_t* random, std::uint16_t* to,
                          std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    padam::stochastic_bfloat16 rounded;
    padam::store(x[i], random[i], rounded);
    to[i] = rounded.bits;
  }
}

void split_and_join(const float* x, std::uint16_t* high, std::uint16_t* low, float* joined,
                    std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    padam::bfloat16 upper;
    padam::store(x[i], upper, low[i]);
    high[i] = upper.bits;
    joined[i] = padam::load(padam::load(upper), low[i]);
  }
}

std::uint32_t step_key(double seed, std::int64_t salt, double step) {
  return padam::step_key(seed, salt, step);
}

void draw(std::uint32_t key, std::uint32_t* for_m, std::uint32_t* for_v, std::uint32_t* for_x,
          std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t word = padam::random_word(static_cast<std::uint32_t>(i), key);
    for_m[i] = padam::random_for_m(word);
    for_v[i] = padam::random_for_v(word);
    for_x[i] = padam::random_for_x(word);
  }
}
}
