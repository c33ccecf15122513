// What a step must do to memory and nothing else: five arrays read, four of them written.
#include <cstdint>

extern "C" void plain_loop(float* __restrict param, const float* __restrict grad,
                           float* __restrict exp_avg, float* __restrict exp_avg_sq,
                           float* __restrict max_exp_avg_sq, std::int64_t numel, int num_threads) {
#pragma omp parallel for simd schedule(static) num_threads(num_threads)
  for (std::int64_t i = 0; i < numel; ++i) {
    const float g = grad[i];
    exp_avg[i] += g;
    exp_avg_sq[i] += g;
    max_exp_avg_sq[i] += g;
    param[i] += g;
  }
}
