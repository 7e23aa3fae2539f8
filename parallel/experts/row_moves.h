#pragma once

// Internal: where the rows [rows, width] of a dispatch go, and differentiable moves of them, on a rank and between ranks. None
// adds with atomics, and all can be differentiated again.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/collectives/work.h>

namespace tessera::internal::experts {

/// A bijection from some places of one list of rows to all of another: `from[i]` is the place that row i comes from, `to[j]` the
/// row that place j goes to, -1 for none. int64, on the device of the rows.
struct RowMap {
  at::Tensor from, to;
  int64_t rows() const { return from.size(0); }
  int64_t places() const { return to.size(0); }
};

/// The map whose rows come from the places of `from`, among `places`.
RowMap map_from(const at::Tensor& from, int64_t places);

/// What goes to each rank of a communicator, and comes from it, in rows.
struct RowExchange {
  CommunicatorPtr communicator; ///< null: of one rank, which sends nothing
  std::vector<int64_t> sent, received;
  std::string name; ///< in errors and traces
};

struct TokenPlan {
  int64_t tokens = 0, top_k = 0;
  RowMap by_expert; ///< the choices of this rank's tokens, tokens × top_k places, in the order of their experts
  RowExchange exchange;
  RowMap by_rank; ///< what comes from the ranks one after another, in the order of this rank's experts
};

/// The rows of `source` for each row of the map, where `copies` neighbouring places are copies of one row of `source`.
at::Tensor take_rows(const at::Tensor& source, const RowMap& map, int64_t copies = 1);

/// The other way: each row at its place, zeros where there is none.
at::Tensor put_rows(const at::Tensor& rows, const RowMap& map);

/// Rows on their way to other ranks.
class RowsInFlight {
 public:
  /// Starts the exchange. Every rank of it calls this.
  RowsInFlight(const at::Tensor& rows, const RowExchange& exchange);
  /// What has come; differentiable: the backward is the exchange the other way.
  at::Tensor wait();

 private:
  std::shared_ptr<Work> work_ = std::make_shared<Work>();
  at::Tensor received_;
};

} // namespace tessera::internal::experts
