// What a step must do to memory, and next to nothing else: five arrays are read, four of them
// written. SGD with momentum, and with the moments that it does not need.
#include <cstdint>

extern "C" void plain_loop(float* __restrict param, const float* __restrict grad,
                           float* __restrict exp_avg, float* __restrict exp_avg_sq,
                           float* __restrict max_exp_avg_sq, std::int64_t numel, int num_threads) {
#pragma omp parallel for simd schedule(static) num_threads(num_threads)
  for (std::int64_t i = 0; i < numel; ++i) {
    const float g = grad[i];
    const float m = 0.9f * exp_avg[i] + 0.1f * g;
    const float v = 0.999f * exp_avg_sq[i] + 0.001f * g * g;
    const float h = max_exp_avg_sq[i] > v ? max_exp_avg_sq[i] : v;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    max_exp_avg_sq[i] = h;
    param[i] -= 0.001f * m;
  }
}
