#include <tessera/optim/kernels/flat_runs.h>

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include <tessera/optim/parts/shared_sums.h>

namespace tessera::internal {

namespace {

/// A piece's box and the strides of its memory, seen as one of fewer dims where the last ones are whole rows.
class PieceRuns {
 public:
  PieceRuns(const Piece& piece, c10::IntArrayRef whole) : box_(piece.box), strides_(piece.data.strides().vec()) {
    global_strides_.assign(whole.size(), 1);
    for (size_t d = whole.size(); d-- > 1;) global_strides_[d - 1] = global_strides_[d] * whole[d];
    outer_ = whole.size();
    length_ = 1;
    while (outer_ > 0 && strides_[outer_ - 1] * (box_.sizes[outer_ - 1] > 1) == length_ * (box_.sizes[outer_ - 1] > 1)) {
      --outer_;
      length_ *= box_.sizes[outer_];
      if (box_.sizes[outer_] != whole[outer_]) break;
    }
  }

  void add_to(std::vector<FlatRun>& runs, int64_t offset) const {
    int64_t position = 0;
    for (size_t d = 0; d < box_.offsets.size(); ++d) position += box_.offsets[d] * global_strides_[d];
    add(runs, 0, position, offset);
  }

 private:
  void add(std::vector<FlatRun>& runs, size_t dim, int64_t position, int64_t offset) const {
    if (dim == outer_) return void(runs.push_back({position, offset, length_}));
    for (int64_t i = 0; i < box_.sizes[dim]; ++i)
      add(runs, dim + 1, position + i * global_strides_[dim], offset + i * strides_[dim]);
  }

  const Box& box_;
  std::vector<int64_t> strides_, global_strides_;
  size_t outer_ = 0; ///< dims that are walked
  int64_t length_ = 1;
};

} // namespace

std::vector<FlatRun> flat_runs(const at::Tensor& like) {
  const auto sizes = part_of(like).sizes().vec();
  const auto probe = at::empty(sizes, at::TensorOptions(at::kByte).device(at::kMeta));
  std::vector<FlatRun> runs;
  for (const auto& piece : pieces_like(like, probe)) {
    if (piece.data.numel() > 0) PieceRuns(piece, like.sizes()).add_to(runs, piece.data.storage_offset());
  }
  std::sort(runs.begin(), runs.end(), [](const auto& a, const auto& b) { return a.position < b.position; });
  return runs;
}

std::vector<FlatRun> cut_runs(const std::vector<FlatRun>& runs, int64_t most) {
  std::vector<FlatRun> cut;
  for (auto run : runs) {
    while (run.length > 0) {
      const int64_t length = std::min(run.length, most - run.position % most);
      cut.push_back({run.position, run.offset, length});
      run = {run.position + length, run.offset + length, run.length - length};
    }
  }
  return cut;
}

} // namespace tessera::internal
