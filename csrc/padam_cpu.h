// The fused CPU step, and the instruction sets it was compiled for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch_table.h"
#include "padam_math.h"

namespace padam {

// Options of one row, ready for either arithmetic.
struct Row {
  Constants<float> single;
  Constants<double> full;
  Root root;
  Decay decay;
};

// Steps elements [begin, end) of one tensor of the table.
using SpanKernel = void (*)(const LaunchTable& table, const Row& row, std::int64_t tensor,
                            std::int64_t begin, std::int64_t end);

// The sum of the squares of elements [begin, end) of one tensor's gradient.
using SumKernel = double (*)(const LaunchTable& table, std::int64_t tensor, std::int64_t begin,
                             std::int64_t end);

// Names of the levels that this build has and this processor can run, best first.
std::vector<std::string> available_simd_levels();

// Steps every tensor of the table. `simd_level` is one of available_simd_levels().
// Throws std::invalid_argument for another, before anything is written.
void step_cpu(const LaunchTable& table, int num_threads, const std::string& simd_level);

// The sum of the squares of every gradient of the table, of which only addresses, numels and the
// gradient's dtype are read. In double precision, and the same whatever the number of threads.
double sum_of_squares_cpu(const LaunchTable& table, int num_threads, const std::string& simd_level);

}  // namespace padam
