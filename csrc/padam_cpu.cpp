// Shares the table out among threads and hands each span to the kernel of one instruction set.
#include "padam_cpu.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "parallel.h"

namespace padam {

#define PADAM_DECLARE_LEVEL(level)                                                          \
  namespace level {                                                                         \
  void step_span(const LaunchTable&, const Row&, std::int64_t, std::int64_t, std::int64_t); \
  double sum_of_squares_span(const LaunchTable&, std::int64_t, std::int64_t, std::int64_t); \
  }
PADAM_DECLARE_LEVEL(plain)
#if defined(PADAM_X86_LEVELS)
PADAM_DECLARE_LEVEL(avx2)
PADAM_DECLARE_LEVEL(avx512)
#endif
#undef PADAM_DECLARE_LEVEL

namespace {

struct SimdLevel {
  const char* name;
  SpanKernel step;
  SumKernel sum_of_squares;
};

// Asked at run time, so that one build runs on every processor of the architecture.
std::vector<SimdLevel> supported_levels() {
  std::vector<SimdLevel> levels;
#if defined(PADAM_X86_LEVELS)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    levels.push_back({"avx512", avx512::step_span, avx512::sum_of_squares_span});
  }
  if (has_avx2) levels.push_back({"avx2", avx2::step_span, avx2::sum_of_squares_span});
#endif
  levels.push_back({"plain", plain::step_span, plain::sum_of_squares_span});
  return levels;
}

SimdLevel level_of(const std::string& simd_level) {
  for (const SimdLevel& level : supported_levels()) {
    if (simd_level == level.name) return level;
  }
  throw std::invalid_argument("SIMD level '" + simd_level + "' is not available on this CPU");
}

// Cost of going to another tensor, in elements. With it in the sums, ten thousand tensors of ten
// elements are shared out as evenly as one large tensor.
constexpr std::int64_t kTensorOverhead = 64;
// Work below this is not worth waking a thread for.
constexpr std::int64_t kSmallestPiece = 32768;
// More pieces than threads, so that a thread that was interrupted holds up little.
constexpr std::int64_t kPiecesPerThread = 8;
// Seams between pieces lie at multiples of this many elements: two threads seldom share a line.
constexpr std::int64_t kSeam = 64;

// The table laid out on one line: each tensor takes its elements plus kTensorOverhead.
class WorkLine {
 public:
  explicit WorkLine(const LaunchTable& table) : table_(table), ends_(table.num_tensors) {
    std::int64_t end = 0;
    for (std::int64_t tensor = 0; tensor < table.num_tensors; ++tensor) {
      end += table.numels[tensor] + kTensorOverhead;
      ends_[tensor] = end;
    }
  }

  std::int64_t length() const { return ends_.empty() ? 0 : ends_.back(); }

  // Where piece k of several begins. Quotient and remainder first keep the products inside int64.
  std::int64_t point(std::int64_t k, std::int64_t pieces) const {
    return length() / pieces * k + length() % pieces * k / pieces;
  }

  template <typename Visit>
  void visit(std::int64_t from, std::int64_t to, Visit visit_span) const {
    std::int64_t tensor = std::upper_bound(ends_.begin(), ends_.end(), from) - ends_.begin();
    for (; tensor < table_.num_tensors && start(tensor) < to; ++tensor) {
      const std::int64_t begin = element_at(tensor, from);
      const std::int64_t end = element_at(tensor, to);
      if (begin < end) visit_span(tensor, begin, end);
    }
  }

 private:
  std::int64_t start(std::int64_t tensor) const { return tensor == 0 ? 0 : ends_[tensor - 1]; }

  // First element of the tensor that lies at or behind a point of the line. Both neighbours of a
  // seam ask the same question, so every element belongs to exactly one of them.
  std::int64_t element_at(std::int64_t tensor, std::int64_t point) const {
    if (point >= ends_[tensor]) return table_.numels[tensor];
    const std::int64_t offset = std::max<std::int64_t>(point - start(tensor), 0);
    return std::min(offset / kSeam * kSeam, table_.numels[tensor]);
  }

  const LaunchTable& table_;
  std::vector<std::int64_t> ends_;
};

// The processor's own prefetching begins anew with each tensor, and takes some lines to notice one.
// Asking for memory that is not there does no harm.
void prefetch_begin(const LaunchTable& table, std::int64_t tensor) {
  constexpr std::int64_t kLine = 64;
  constexpr std::int64_t kBytes = 4 * kLine;
  const std::int64_t bytes = std::min<std::int64_t>(kBytes, table.numels[tensor] * sizeof(float));
  for (int slot = 0; slot < kSlots; ++slot) {
    const auto address =
        static_cast<std::uintptr_t>(table.address(static_cast<Slot>(slot), tensor));
    if (address == 0) continue;
    for (std::int64_t at = 0; at < bytes; at += kLine) {
      __builtin_prefetch(reinterpret_cast<const char*>(address + at));
    }
  }
}

std::vector<Row> make_rows(const LaunchTable& table) {
  std::vector<Row> rows;
  rows.reserve(table.num_rows);
  for (std::int64_t i = 0; i < table.num_rows; ++i) {
    const Constants<double>& constants = table.constants[i];
    rows.push_back({rounded<float>(constants), constants, root_of(constants), decay_of(constants)});
  }
  return rows;
}

}  // namespace

std::vector<std::string> available_simd_levels() {
  std::vector<std::string> names;
  for (const SimdLevel& level : supported_levels()) names.push_back(level.name);
  return names;
}

void step_cpu(const LaunchTable& table, int num_threads, const std::string& simd_level) {
  const SpanKernel step = level_of(simd_level).step;
  const std::vector<Row> rows = make_rows(table);
  const WorkLine line(table);
  const auto run = [&](std::int64_t from, std::int64_t to) {
    line.visit(from, to, [&](std::int64_t tensor, std::int64_t begin, std::int64_t end) {
      if (tensor + 1 < table.num_tensors) prefetch_begin(table, tensor + 1);
      step(table, rows[table.rows[tensor]], tensor, begin, end);
    });
  };

  const std::int64_t pieces =
      std::min(num_threads * kPiecesPerThread, line.length() / kSmallestPiece);
  if (pieces <= 1) return run(0, line.length());
  parallel_for(pieces, num_threads, 1, [&](std::int64_t piece) {
    run(line.point(piece, pieces), line.point(piece + 1, pieces));
  });
}

double sum_of_squares_cpu(const LaunchTable& table, int num_threads,
                          const std::string& simd_level) {
  const SumKernel sum_of_squares = level_of(simd_level).sum_of_squares;
  const WorkLine line(table);
  // Pieces of about one size, summed in order: the number of threads plays no part in the result.
  const std::int64_t pieces = line.length() / kSmallestPiece + 1;
  std::vector<double> sums(pieces, 0.0);
  parallel_for(pieces, num_threads, 4, [&](std::int64_t piece) {
    line.visit(line.point(piece, pieces), line.point(piece + 1, pieces),
               [&](std::int64_t tensor, std::int64_t begin, std::int64_t end) {
                 sums[piece] += sum_of_squares(table, tensor, begin, end);
               });
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace padam
