#pragma once

// Internal: which tokens of a file make a row.

#include <cstdint>
#include <memory>
#include <vector>

#include <tessera/data/token_rows.h>

namespace tessera::internal {

/// Consecutive tokens of one document in a row.
struct Segment {
  int64_t begin = 0, tokens = 0; ///< in the file
  bool predicts_next = false;    ///< whether the last one's target is the token after it
};

/// The segments of every row. The rest of a row that they do not fill is padding.
class RowPlan {
 public:
  virtual ~RowPlan() = default;
  virtual int64_t rows() const = 0;
  virtual std::vector<Segment> segments(int64_t row) const = 0;
};

std::unique_ptr<RowPlan> plan_rows(const TokenFile& file, const TokenRowOptions& options);

} // namespace tessera::internal
