#include <tessera/data/distributed_sampler.h>

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <utility>

#include <tessera/data/order/mesh_position.h>
#include <tessera/data/order/row_order.h>

namespace tessera {

namespace {

constexpr int64_t kMostDrawnRows = int64_t{1} << 24;

void check_rows(int64_t rows, int64_t ranks) {
  TORCH_CHECK_VALUE(rows >= ranks, "DistributedSampler: ", rows, " rows are fewer than the ", ranks,
                    " ranks that share them, so that some rank would have none");
}

} // namespace

DistributedSampler::DistributedSampler(int64_t rows, const DeviceMesh& data_mesh, const DistributedSamplerOptions& options)
    : rows_(rows), ranks_(data_mesh.size()), rank_(internal::position_in(data_mesh, "DistributedSampler")), options_(options) {
  check_rows(rows, ranks_);
  set_epoch(0);
}

/// Counts the rows that the ranks are given of `rest`, repeated ones included.
int64_t DistributedSampler::rows_given(int64_t rest) const {
  switch (options_.last_rows) {
    case LastRows::kRepeat: return (rest + ranks_ - 1) / ranks_ * ranks_;
    case LastRows::kDrop: return rest / ranks_ * ranks_;
    case LastRows::kUneven: break;
  }
  return rest;
}

int64_t DistributedSampler::batches_per_epoch(int64_t batch_size) const {
  TORCH_CHECK_VALUE(batch_size > 0, "DistributedSampler: the batch size is ", batch_size);
  const auto of_all = std::min(batch_size, rows_) * ranks_; // larger ones are as large
  return (rows_given(rows_) + of_all - 1) / of_all;
}

void DistributedSampler::set_epoch(int64_t epoch, int64_t first_row) {
  TORCH_CHECK_VALUE(epoch >= 0, "DistributedSampler: the epoch ", epoch, " is negative");
  TORCH_CHECK_VALUE(first_row >= 0 && first_row < 2 * rows_, "DistributedSampler: the first row is ", first_row,
                    ", and the data has ", rows_, " rows");
  const auto rest = std::max<int64_t>(rows_ - first_row, 0);
  TORCH_CHECK_VALUE(rest == 0 || rest >= ranks_ || options_.last_rows != LastRows::kUneven, "DistributedSampler: after row ",
                    first_row, " there are ", rest, " left for ", ranks_,
                    " ranks, so that some rank would have none: begin the next epoch, or take LastRows::kRepeat or kDrop");
  epoch_ = epoch;
  first_row_ = position_ = first_row;
  end_ = first_row + rows_given(rest);
  draw_order();
}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  if (new_size) {
    check_rows(static_cast<int64_t>(*new_size), ranks_);
    const auto before = std::exchange(rows_, static_cast<int64_t>(*new_size));
    try {
      set_epoch(epoch_, first_row_);
    } catch (...) {
      rows_ = before;
      throw;
    }
  }
  position_ = first_row_;
}

void DistributedSampler::draw_order() {
  const auto seed = options_.seed + static_cast<uint64_t>(epoch_);
  const bool by_size = options_.shuffle_kind == ShuffleKind::kBySize;
  const bool computed = by_size ? rows_ > kMostDrawnRows : options_.shuffle_kind == ShuffleKind::kComputed;
  order_ = std::make_shared<const internal::RowOrder>(!options_.shuffle ? internal::RowOrder()
                                                      : computed        ? internal::RowOrder::computed(rows_, seed)
                                                                        : internal::RowOrder::drawn(rows_, seed));
}

/// Beyond the last row the first ones come again.
size_t DistributedSampler::row_at(int64_t place) const {
  return static_cast<size_t>((*order_)[place < rows_ ? place : place - rows_]);
}

/// All ranks' rows of the next step.
int64_t DistributedSampler::rows_of_next(int64_t batch_size) const {
  const auto rest = end_ - position_, taken = std::min(rest, batch_size * ranks_), after = rest - taken;
  if (after == 0 || after >= ranks_) return taken;
  TORCH_CHECK_VALUE(batch_size > 1, "DistributedSampler: with batches of one row, the last ", rest, " of ", rows_,
                    " rows leave some of the ", ranks_, " ranks without any: take larger batches, or LastRows::kRepeat or kDrop");
  return rest - ranks_;
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  TORCH_CHECK_VALUE(batch_size > 0, "DistributedSampler: the batch size is 0");
  if (position_ >= end_) return std::nullopt;
  const auto end = position_ + rows_of_next(static_cast<int64_t>(std::min(batch_size, static_cast<size_t>(2 * rows_))));
  std::vector<size_t> batch;
  for (auto i = position_ + rank_; i < end; i += ranks_) batch.push_back(row_at(i));
  position_ = end;
  return batch;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", torch::tensor(epoch_, torch::kInt64), /*is_buffer=*/true);
  archive.write("rows_drawn", torch::tensor(position_, torch::kInt64), /*is_buffer=*/true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  auto epoch = torch::empty({}, torch::kInt64), drawn = torch::empty({}, torch::kInt64);
  archive.read("epoch", epoch, /*is_buffer=*/true);
  archive.read("rows_drawn", drawn, /*is_buffer=*/true);
  set_epoch(epoch.item<int64_t>(), drawn.item<int64_t>());
}

} // namespace tessera
