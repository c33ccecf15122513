// Sharing work out among OpenMP's threads: every parallel region of this module.
#pragma once

#include <pthread.h>

#include <cfenv>
#include <cstdint>

namespace padam {

// Tells whether this process is the child of a fork(). OpenMP's threads do not exist there, though
// its library believes so: a parallel region would wait for them for ever.
class Fork {
 public:
  static bool happened() { return happened_; }

 private:
  static bool watch() {
    pthread_atfork(nullptr, nullptr, [] { happened_ = true; });
    return false;
  }
  static inline bool happened_ = watch();
};

// Gives the thread another floating-point environment and restores its own at the end. So
// torch.set_flush_denormal, which sets only the caller's thread, holds in all threads.
class BorrowedEnvironment {
 public:
  explicit BorrowedEnvironment(const std::fenv_t& environment) {
    std::fegetenv(&own_);
    std::fesetenv(&environment);
  }
  ~BorrowedEnvironment() { std::fesetenv(&own_); }
  BorrowedEnvironment(const BorrowedEnvironment&) = delete;
  BorrowedEnvironment& operator=(const BorrowedEnvironment&) = delete;

 private:
  std::fenv_t own_;
};

// Calls run(i) for each i in [0, count), in any order, by up to num_threads threads that take
// `grain` of them at a time.
template <typename Run>
void parallel_for(std::int64_t count, int num_threads, [[maybe_unused]] int grain, const Run& run) {
  if (num_threads <= 1 || count <= 1 || Fork::happened()) {
    for (std::int64_t i = 0; i < count; ++i) run(i);
    return;
  }
  std::fenv_t environment;
  std::fegetenv(&environment);
#pragma omp parallel num_threads(num_threads)
  {
    const BorrowedEnvironment borrowed(environment);
#pragma omp for schedule(dynamic, grain) nowait
    for (std::int64_t i = 0; i < count; ++i) run(i);
  }
}

}  // namespace padam
