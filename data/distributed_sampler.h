#pragma once

#include <torch/data/samplers/base.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

namespace internal {
class RowOrder;
} // namespace internal

/// What happens to the last rows of an epoch if the ranks do not divide the number of rows.
enum class LastRows {
  kRepeat, ///< the first rows of the epoch's order are repeated, so that all ranks have the same number
  kDrop,   ///< they are left out
  kUneven, ///< each row comes once; the last batches of some ranks are one row smaller
};

/// How the order of shuffled rows is made.
enum class ShuffleKind {
  kPython,   ///< that of torch.utils.data.DistributedSampler; drawn as a whole, which takes 8 bytes a row on each rank
  kComputed, ///< a pseudorandom permutation that is computed row by row and takes no memory, for billions of rows
  kBySize,   ///< kPython up to 2^24 rows (128 MiB), kComputed beyond
};

struct DistributedSamplerOptions {
  bool shuffle = true; ///< otherwise in the order of the data
  uint64_t seed = 0;   ///< of the order, with the epoch; the same on every rank
  LastRows last_rows = LastRows::kRepeat;
  ShuffleKind shuffle_kind = ShuffleKind::kPython;
};

/// The rows of this rank's batches, for LibTorch's DataLoader: `torch::data::make_data_loader(data, sampler, batch_size)`, one
/// loader for each epoch. Every rank gets the same number of batches, in every mode, so that all run the same forwards.
///
/// The ranks' batches of b rows are together the next b × ranks rows of one order, dealt out row by row. So the rows of a step
/// depend only on this product: 4 ranks with batches of 8 have the same rows in each step as one rank with batches of 32, and a
/// run can continue on another number of ranks. Rows and order are those of torch.utils.data.DistributedSampler (with kDrop:
/// drop_last), unless `shuffle_kind` says otherwise. (LibTorch's DistributedRandomSampler gives each rank one contiguous part of
/// the order, and reads past the end if there are fewer rows than ranks.)
///
/// With kUneven the last batches have the remaining rows, b or less for each rank. If fewer rows than ranks remain, rows of the
/// batches before are used, so that no rank has an empty batch. This needs batches of at least two rows; otherwise `next` throws.
/// Do not combine it with `DataLoaderOptions::drop_last`: the DataLoader would end before the first smaller batch, which only
/// some ranks have. (A sampler cannot see that option.) kDrop and kRepeat give all ranks batches of the same size.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// `rows` of data over the ranks of `data_mesh`, those that have different data. An error for fewer rows than ranks, and for a
  /// rank outside of the mesh. Local.
  DistributedSampler(int64_t rows, const DeviceMesh& data_mesh, const DistributedSamplerOptions& options = {});

  /// Sets where the next `reset` (by a DataLoader's `begin`) starts: the epoch, and how many of its rows all ranks together have
  /// had before. This is 0, or after a resume batches × batch size × ranks of the run before; with kUneven the rows of these
  /// batches, since the last but one may be smaller too. The default is epoch 0, row 0. An error for negative numbers, for twice
  /// the rows of the data or more (repeated rows may count), and with kUneven if fewer rows than ranks are left.
  void set_epoch(int64_t epoch, int64_t first_row = 0);
  int64_t epoch() const { return epoch_; }
  /// How many rows all ranks together have had in this epoch. A DataLoader with workers draws ahead of its batches.
  int64_t rows_drawn() const { return position_; }
  /// The number of batches of a whole epoch on this rank, for a learning-rate schedule.
  int64_t batches_per_epoch(int64_t batch_size) const;

  /// Begins the epoch that `set_epoch` named, or begins it again; with a number of rows that changes from now on.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  /// The rows of this rank's next batch; none at the end of the epoch.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;
  /// Epoch and position, the same on every rank.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  int64_t rows_given(int64_t rest) const;
  void draw_order();
  size_t row_at(int64_t place) const;
  int64_t rows_of_next(int64_t batch_size) const;

  int64_t rows_, ranks_, rank_;
  DistributedSamplerOptions options_;
  int64_t epoch_ = 0, first_row_ = 0, position_ = 0, end_ = 0;
  std::shared_ptr<const internal::RowOrder> order_;
};

} // namespace tessera
