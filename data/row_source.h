#pragma once

#include <c10/util/Exception.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/data/data_source.h>
#include <tessera/data/distributed_sampler.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// Data whose rows can be read in any order: `size()` is their number, `get(rows)` makes a batch of those with these indices.
/// `get` is const and several threads may call it at once, where `prefetch` is given several workers.
template <typename Data>
concept RandomAccess = requires(const Data& data, const std::vector<size_t>& rows) {
  { data.size() } -> std::convertible_to<int64_t>;
  data.get(rows);
};

struct RowOptions {
  int64_t batch = 1;                      ///< rows of a micro-batch of one rank
  bool shuffle = true;                    ///< otherwise in the order of the data, as for an evaluation
  uint64_t seed = 0;                      ///< of the order, with the epoch; the same on every rank
  LastRows last_rows = LastRows::kRepeat; ///< kUneven counts each row once, as for an evaluation
  ShuffleKind shuffle_kind = ShuffleKind::kBySize;
};

/// The batches of this rank from random-access data: a BatchSource.
///
/// Order, shares and last rows are those of a DistributedSampler. The batches of b rows of all ranks are together the next
/// b × ranks rows of one order, so a step has the same rows on any number of ranks for which the product is the same, and a
/// training may go on on another number of ranks. Up to 2^24 rows a shuffled order is that of Python's DistributedSampler; a
/// larger one is computed row by row and takes neither memory nor time. The last batch of an epoch may have fewer rows.
template <RandomAccess Data>
class RowSource {
 public:
  using Batch = std::remove_cvref_t<decltype(std::declval<const Data&>().get(std::declval<const std::vector<size_t>&>()))>;

  /// `data_mesh` holds the ranks with different data, without dims that split layers or sequences: ranks that share a position in
  /// it have the same rows. Local. Errors: a batch without rows, fewer rows than ranks, a rank outside of the mesh.
  RowSource(Data data, const DeviceMesh& data_mesh, const RowOptions& options)
      : data_(std::move(data)),
        rows_(data_.size()),
        options_(options),
        sampler_(rows_, data_mesh, {options.shuffle, options.seed, options.last_rows, options.shuffle_kind}) {
    TORCH_CHECK_VALUE(options.batch > 0, "RowSource: a batch of ", options.batch, " rows");
  }

  /// Where `get` throws, the position stays before the batch.
  std::optional<Batch> next() {
    const auto before = position();
    const auto rows = draw();
    if (!rows) return std::nullopt;
    try {
      return read(*rows);
    } catch (...) {
      seek(before);
      throw;
    }
  }

  DataPosition position() const { return {sampler_.epoch(), sampler_.rows_drawn()}; }

  /// An error for a position beyond the epoch's rows, which are other data's.
  void seek(const DataPosition& position) {
    TORCH_CHECK_VALUE(position.row <= rows_ || options_.last_rows == LastRows::kRepeat, "RowSource: row ", position.row,
                      " of epoch ", position.epoch, " is past the end: the data has ", rows_, " rows");
    sampler_.set_epoch(position.epoch, position.row);
  }

  /// The batches of a whole epoch on each rank, for a learning-rate schedule.
  int64_t batches_per_epoch() const { return sampler_.batches_per_epoch(options_.batch); }
  const Data& data() const { return data_; }

  /// The two halves of `next`, for threads that read ahead: which rows are next (none at the end of the epoch), and their batch.
  std::optional<std::vector<size_t>> draw() {
    auto rows = sampler_.next(static_cast<size_t>(options_.batch));
    if (!rows) sampler_.set_epoch(sampler_.epoch() + 1);
    return rows;
  }
  Batch read(const std::vector<size_t>& rows) const { return data_.get(rows); }

 private:
  Data data_;
  int64_t rows_;
  RowOptions options_;
  DistributedSampler sampler_;
};

} // namespace tessera
