#pragma once

#include <torch/data/samplers/base.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// What becomes of the rows of an epoch that do not divide by the ranks.
enum class LastRows {
  kRepeat, ///< the first rows of the epoch's order come once more, so that each rank has as many
  kDrop,   ///< they are left out
  kUneven, ///< each row comes once; the batches of some ranks are smaller by a row at the end
};

struct DistributedSamplerOptions {
  bool shuffle = true; ///< otherwise in the order of the data
  uint64_t seed = 0;   ///< of the order, with the epoch; the same on every rank
  LastRows last_rows = LastRows::kRepeat;
};

/// The rows of this rank's batches, for LibTorch's DataLoader: `torch::data::make_data_loader(data, sampler, batch_size)`, one
/// loader an epoch. Every rank gets as many batches as the others, in every mode, so that all run the same forwards.
///
/// The ranks' batches of b rows are together the next b × ranks rows of one order, row by row in turn. So what they hold together
/// depends on the product alone: 4 ranks with batches of 8 see in each step what one rank sees with batches of 32, and a run goes
/// on with another number of ranks. The rows are those of torch.utils.data.DistributedSampler (with kDrop: drop_last), the order
/// too. (LibTorch's DistributedRandomSampler gives each rank a stretch of an order of its own, and reads past the end where there
/// are fewer rows than ranks.)
///
/// With kUneven the last batches are those of the rest, b or less a rank. A rest of fewer rows than ranks is filled up from the
/// batches before it, so that no rank has an empty one; this needs batches of two rows at least, and is an error in `next`. Not
/// with `DataLoaderOptions::drop_last`: the DataLoader would end before the first smaller batch, which only some ranks have. No
/// sampler sees that option. kDrop and kRepeat give all ranks batches of the same size.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// `rows` of data over the ranks of `data_mesh`, those that have different data. An error for fewer rows than ranks, and for a
  /// rank outside of the mesh. Local.
  DistributedSampler(int64_t rows, const DeviceMesh& data_mesh, const DistributedSamplerOptions& options = {});

  /// What the next `reset`, which a DataLoader's `begin` does, starts with: the epoch, and how many of its rows all ranks
  /// together have had before (0, or after a resume batches × batch size × ranks of the run before; with kUneven the rows of
  /// these batches, since the last but one may be smaller too). Until then: epoch 0, row 0. An error for negative ones, for
  /// twice the rows of the data or more (repeated ones may count), and with kUneven where fewer rows than ranks are left.
  void set_epoch(int64_t epoch, int64_t first_row = 0);
  int64_t epoch() const { return epoch_; }
  /// How many rows all ranks together have had in this epoch. A DataLoader with workers draws ahead of its batches.
  int64_t rows_drawn() const { return position_; }
  /// Of a whole epoch: what a learning-rate schedule counts.
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
  int64_t rows_of_next(int64_t batch_size) const;

  int64_t rows_, ranks_, rank_;
  DistributedSamplerOptions options_;
  int64_t epoch_ = 0, first_row_ = 0, position_ = 0, end_ = 0;
  std::vector<int64_t> order_;
};

} // namespace tessera
